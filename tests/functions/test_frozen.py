"""Functions with the values of all that they read, of one moment."""

import math
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, ModuleType, SimpleNamespace
from weakref import WeakValueDictionary

import ml_dtypes
import numba
import numpy as np
import pytest

from numbattn.functions.frozen import frozen

params, inner = ModuleType("params"), ModuleType("inner")
C = 1.5
later = None


def scaled(x):
    return x * params.SLOPE


@pytest.fixture(autouse=True)
def values(monkeypatch):
    monkeypatch.setitem(globals(), "C", 1.5)
    for module, name, x in ((params, "SLOPE", 2.0), (params, "inner", inner), (inner, "K", 3), (params, "f", scaled)):
        monkeypatch.setattr(module, name, x, raising=False)


def closure():
    c = 1.5

    def change(x):
        nonlocal c
        c = x

    return (lambda s: s + c), change


Pair = namedtuple("Pair", "x, y")
NARROW = np.uint8(200), np.int8(100), np.bool_(True), np.float32(0.1), np.uint8(7), np.uint8(9)
LARGE = np.uint64(2**64 - 1)
HALVES = np.float16(3), ml_dtypes.bfloat16(5)
INSIDE = Pair(np.uint8(200), (np.int8(100), True))


def test_numbers_of_numpy_are_pythons():
    """As compiled, where 8 bits do not wrap around; float32 stays what it is there."""
    def function(s, offset=NARROW[4], *, step=NARROW[5]):
        return (10 - offset - step) * s + NARROW[0] * NARROW[1] - NARROW[2] - INSIDE.x * INSIDE.y[0]

    taken = frozen(function)
    assert taken.python(1) == (10 - 7 - 9) + 20000 - 1 - 20000
    assert type(taken.python(1)) is int
    narrow = frozen(lambda s: NARROW[3] * s)
    assert narrow.python(1.0) == float(np.float32(0.1))
    assert narrow.linked(lambda function: function)(np.float32(1)).dtype == np.float32
    assert frozen(lambda s: s + HALVES[0] * HALVES[1]).linked(lambda function: function)(0).dtype == np.float32
    assert frozen(lambda s: INSIDE).python(0) == INSIDE
    assert type(frozen(lambda s: INSIDE).python(0)) is Pair
    assert frozen(alike(np.int64(3))) is frozen(alike(3))


READERS = {  # a function of s, and what changes something that it reads
    "global": (lambda s: s + C, lambda x: globals().update(C=x)),
    "in a lambda": (lambda s: (lambda x: x + C)(s), lambda x: globals().update(C=x)),
    "in a comprehension": (lambda s: sum([s * C for _ in range(3)]), lambda x: globals().update(C=x)),
    "closure": closure(),
    "module": (lambda s: s * params.SLOPE, lambda x: setattr(params, "SLOPE", x)),
    "module in a module": (lambda s: s * params.inner.K, lambda x: setattr(inner, "K", x)),
    "what a function reads": (lambda s: scaled(s) + 1, lambda x: setattr(params, "SLOPE", x)),
    "what a module's function reads": (lambda s: params.f(s), lambda x: setattr(params, "SLOPE", x)),
    "a module's function": (lambda s: params.f(s), lambda x: setattr(params, "f", lambda s: s + x)),
    "a function of a library": (lambda s: params.f(s), lambda x: setattr(params, "f", math.tanh)),
}


@pytest.mark.parametrize("name", READERS)
def test_what_changes_later_is_not_seen(name):
    function, change = READERS[name]
    before = frozen(function)
    first = before.python(0.5)
    assert first == function(0.5)
    assert frozen(function) is before
    change(7.0)
    assert before.python(0.5) == first != function(0.5)
    after = frozen(function)
    assert after.python(0.5) == function(0.5)
    assert after.digest != before.digest


def test_the_module_itself_stays_as_it_is():
    assert frozen(lambda s: math.exp(s)).python(0.0) == 1
    assert frozen(lambda s: params.SLOPE).python.__globals__["params"] is not params


def test_in_python_numpy_may_import_what_it_needs():
    """Where it has not done so yet: here the text of an error."""
    with pytest.raises(OverflowError, match="out of bounds"):
        frozen(lambda s: np.array(s, "int8")).python(300)


def alike(x):
    return lambda s: s + x


def test_zeros_and_types_are_told_apart():
    values = [0, 0.0, -0.0, False, np.float32(0), np.float64(0), np.float64(-0.0), "0", None, (0,), (0.0,), ((),)]
    values.append(math.nan)
    made = [frozen(alike(x)) for x in values]
    assert len(set(made)) == len(values)
    assert made == [frozen(alike(x)) for x in values]
    assert len({each.digest for each in made}) == len(values)


def test_constants_in_code_are_told_apart():
    assert frozen(lambda s: s + 0.0) is not frozen(lambda s: s + -0.0)
    assert frozen(lambda s: s + 1) is frozen(lambda s: s + 1)
    assert frozen(lambda s, x=1: s + x) is not frozen(lambda s, x=2: s + x)
    assert frozen(lambda s, *, x=1: s + x) is not frozen(lambda s, *, x=2: s + x)
    assert frozen(lambda s, *, x=1: s + x).python(1) == 2


def even(n):
    return True if n == 0 else odd(n - 1)


def odd(n):
    return False if n == 0 else even(n - 1)


def test_functions_that_call_each_other():
    made = frozen(even)
    assert made is frozen(even) is not frozen(odd)
    assert made.python(10)
    assert made.python.__globals__["odd"].__globals__["even"] is made.python


def test_what_numba_compiled_is_taken_apart():
    twice = numba.njit(lambda s: s * 2)
    made = frozen(lambda s: twice(s) + 1)
    assert isinstance(made.python.__closure__[0].cell_contents, FunctionType)
    assert made.python(3) == 7


def test_linked():
    """Numba compiles what is called along; two modules of one name are two."""
    sizes = []
    for x in (2.0, 5.0):
        params.SLOPE = x
        made = frozen(lambda s: params.f(s) + params.SLOPE + np.sinh(s))
        sizes.append(numba.njit(made.linked(numba.njit, {np.sinh: math.cos}))(0.0))
    assert sizes == [3.0, 6.0]


PROGRAM = """
import types
from numbattn.functions.frozen import frozen
params = types.ModuleType("params")
params.SLOPE, params.f = {}, lambda s: s if s in {{"a", "b", "c"}} else s + params.SLOPE
print(frozen(lambda s: params.f(s)).digest)
"""


def test_digests_last():
    """In another process they are the same, if all that is read is; Numba is not imported for them."""
    run = [sys.executable, "-c"]
    check = "import sys; assert 'numba' not in sys.modules"
    one, same, other = (
        subprocess.run([*run, PROGRAM.format(x) + check], capture_output=True, check=True).stdout for x in (1, 1, 2)
    )
    assert one == same != other


def raises_inside(s):
    def check(x):
        if x > 3:
            raise ValueError

    check(s)
    return s


def asserts(s):
    assert s > 0
    return s


def calls_what_asserts(s):
    return asserts(s)


def tries(s):
    try:
        return 1 / s
    except ZeroDivisionError:
        return 0


def sets(s):
    global later
    later = s
    return s


def empty():
    return lambda s: s + x
    x = 1


TABLE, ARRAY, THING, LIST = {"a": 1}, np.zeros(3), SimpleNamespace(x=1), [1]
def test_floats_of_float32():
    """Python's floats, wherever they are written: but not those that float32 cannot hold, and no others."""
    third, far, exact = 1 / 3, 1e300, np.float64(0.1)

    def function(s, near=0.1):
        some = s, 0.1, (0.1, 2), far, 1e-300, 16777217.0, 1e30, third
        return *some, math.pi, exact, 3, (lambda: 0.1)(), near

    made = frozen(function)
    assert made.of(np.dtype(np.float64)) is made
    assert made.of(np.dtype(np.float32)) is made.of(np.float32)
    assert made.of(np.float32).digest != made.digest
    found = made.of(np.float32).linked(lambda function: function)(0.5)
    narrow = {1, 6, 7, 8, 11, 12}
    assert {at for at, x in enumerate(found) if isinstance(x, np.float32)} == narrow
    assert isinstance(found[2][0], np.float32)
    wide = [x for at, x in enumerate(found) if at not in {2, *narrow}]
    assert wide == [0.5, far, 1e-300, 16777217.0, exact, 3]


def rounds(x):
    return math.floor(x * 0.7)


@pytest.mark.parametrize("function", [
    lambda s: s if s / 10 <= 0.7 else -s, lambda s: s and 0.7, lambda s: s // 0.7, lambda s: s % 0.7, rounds,
    lambda s: rounds(s), lambda s: int(s * 0.7), lambda s: sum(0.7 for _ in range(3)) + s,
])  # fmt: skip
def test_floats_that_may_decide_stay(function):
    made = frozen(function)
    assert made.of(np.float32) is made


REFUSED = {
    "raise": (raises_inside, r"raises_inside has a raise or an assert in line \d+ of .*test_frozen.py, which a GPU"),
    "assert": (asserts, r"asserts has a raise or an assert in line \d+"),
    "assert in what is called": (calls_what_asserts, "asserts has a raise or an assert"),
    "try": (tries, "has a try"),
    "set": (sets, "sets a global"),
    "dictionary": (lambda s: s + TABLE["a"], "uses TABLE, dict, which cannot be followed: expected numbers"),
    "list": (lambda s: s + LIST[0], "uses LIST, list, which cannot"),
    "array": (lambda s: s + ARRAY[0], "uses the array ARRAY of its surroundings, expected it among arrays"),
    "array in a module": (lambda s: s + params.ARRAY[0], "uses the array params.ARRAY of"),
    "list in a tuple": (lambda s: s + params.TUPLE[0][0], "uses params.TUPLE, tuple, which"),
    "object": (lambda s: s + THING.x, "uses THING, types.SimpleNamespace, which"),
    "class": (lambda s: s + SimpleNamespace.x, "uses SimpleNamespace, the class SimpleNamespace, which"),
    "module": (lambda s: s + len(params), "uses the module params, expected only attributes of it"),
    "a large integer": (lambda s: s + 2**63 * s, "has the number 9223372036854775808, which int64 cannot hold"),
    "one inside": (lambda s: (lambda t: t in (1, 2**64))(s), "which int64 cannot hold"),
    "one around": (lambda s: s + LARGE, "uses LARGE, 18446744073709551615, which int64 cannot hold"),
    "narrow integers": (lambda s: s * (np.uint8(s) - np.uint8(5)), "uses np.uint8, whose numbers wrap around"),
    "getattr": (lambda s: s + getattr(math, "pi"), "uses getattr, which cannot be followed"),    # noqa: B009
    "not defined": (lambda s: s + nowhere, "uses nowhere, which is not defined yet"),            # noqa: F821
    "no attribute": (lambda s: s + params.nowhere, "uses params.nowhere, which is not defined"),
    "no value yet": (empty(), "uses x, which is not defined yet"),
    "array as default": (lambda s, x=ARRAY: s, "uses the array as the default of an argument"),
    "function as default": (lambda s, x=scaled: s, "has a function as the default of an argument"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(monkeypatch, name):
    monkeypatch.setattr(params, "ARRAY", ARRAY, raising=False)
    monkeypatch.setattr(params, "TUPLE", ([],), raising=False)
    function, message = REFUSED[name]
    with pytest.raises(TypeError, match=f"^Score function: .*{message}"):
        frozen(function, "Score function")


class Slow(WeakValueDictionary):
    """One whose setdefault lets other threads in."""

    def setdefault(self, key, default):
        found = self.get(key)
        time.sleep(0.05)
        return self.__setitem__(key, default) or default if found is None else found


def test_threads_that_freeze_a_function_at_once_get_the_same(monkeypatch):
    monkeypatch.setattr(sys.modules[frozen.__module__], "KNOWN", Slow())
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(frozen, [scaled] * 2)
    assert one is other


FAULTS = {
    "with LOCK:": "if True:",
    "if isinstance(x, Called):": "if False:",
    "if function in self.numbers:": "if False:",
    "if reads.refused:": "if False:",
    "if library(x):": "if False:",
    "return repr(x)": "return str(x)",
    "x.dtype.str, x.tobytes()": "x.dtype.str, float(x)",
    "for x in inner for path in x.globals": "for x in () for path in x.globals",
    "[refused, *(x.refused for x in inner)]": "[refused]",
    "next((x.beyond for x in inner if x.beyond is not None), beyond)": "beyond",
    "if _beyond_int64(x):": "if False:",
    "x in NARROW": "False",
    'namespace = {"__builtins__": builtins}': "namespace = {}",
    "(*of_defaults, *keywords)": "()",
    "test_floats_that_may_decide_stay": {
        " and not self._decides": "",
        "not ROUNDING.isdisjoint((*piece.code.co_names, *called)) or ": "",
        "instruction.opcode in JUMPS or ": "",
    },
    "test_floats_of_float32": {
        "{path: _narrow(x) for path, x in values.items()}": "values",
        "_narrow(defaults), of_keywords": "defaults, of_keywords",
        "SMALLEST <= abs(x) <= LARGEST and": "abs(x) <= LARGEST and",
        "and not is_large_integer": "",
        "x.is_integer() and abs(x) < 2.0**53": "x.is_integer()",
        "tuple(map(_narrow, x.co_consts))": "x.co_consts",
    },
    "tuple(sorted(map(repr, map(_key_of_code, x))))": "tuple(map(repr, x))",
}

"""A user's function with all that it reads, as it was at one moment.

Python looks up a global at each call, Numba once, when it compiles, and code on disk only knows a digest. `frozen`
unites them: it takes the function, the functions that it calls, and the values that all of these read, also through
modules. Whatever could change unseen is refused by name.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from threading import RLock
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from ml_dtypes import bfloat16

from ..base.checks import library, words_for
from ..base.forks import cached_property

Path: TypeAlias = tuple[str, ...]  # a name, and attributes of modules: ("params", "SLOPE")

ORDERS = "function", "derivative", "second"  # what a Score has
LIBRARIES = frozenset({"_operator", "builtins", "cmath", "math", "numba", "numpy", "operator", "scipy"})
CONSTANTS = frozenset({bool, int, float, complex, str, bytes, type(None), type(...)})
READING_ANYTHING = frozenset({"__import__", "compile", "eval", "exec", "getattr", "globals", "locals", "vars"})
REFUSED = {
    "RAISE_VARARGS": "has a raise or an assert", "SETUP_FINALLY": "has a try", "PUSH_EXC_INFO": "has a try",
    "SETUP_WITH": "has a with", "STORE_GLOBAL": "sets a global", "DELETE_GLOBAL": "deletes a global",
    "IMPORT_NAME": "imports a module",
}  # fmt: skip
NARROW = frozenset(np.dtype(char).type for char in "bhilqBHILQ" if np.dtype(char) != np.int64)
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
ROUNDING = frozenset({
    "around", "argmax", "argmin", "bool", "ceil", "copysign", "divmod", "fix", "floor", "floor_divide", "fmod",
    "heaviside", "int", "int16", "int32", "int64", "int8", "isclose", "mod", "modf", "nextafter", "remainder", "rint",
    "round", "searchsorted", "sign", "signbit", "trunc", "where",
})  # fmt: skip
JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
BEYOND_INT64 = "int64 cannot hold: write a float"  # Numba drops bits of such an integer, or makes it uint64


class Called(NamedTuple):
    """A placeholder for a function that another one reads."""

    number: int


class BareFunction(NamedTuple):
    """A function without its surroundings, and what it reads of them: values, modules, or Called."""

    code: CodeType
    name: str
    globals: dict[Path, Any]
    cells: dict[Path, Any]
    defaults: tuple[Any, ...]
    keywords: dict[str, Any]


class Frozen:
    """A function and all values that it reads. While one is alive there is no other in this process that does the same,
    so that caches by identity stay valid."""

    def __init__(self, key: Any, pieces: list[BareFunction]) -> None:
        self.key, self.pieces = key, pieces

    def __repr__(self) -> str:
        return f"<{self.pieces[0].code.co_name} {self.digest}>"

    @cached_property
    def digest(self) -> str:
        """A digest, the same in every process, and only for functions that do the same."""
        return _digest(self.key)

    @cached_property
    def python(self) -> FunctionType:
        """The function in plain Python."""
        return self.linked(lambda function: function, number=_wide)

    def of(self, dtype: Any) -> Frozen:
        """The function for numbers of this dtype: as in NumPy, Python's floats in it do not make float64 of float32.
        Where it branches or rounds they stay as they are, for their last bits may decide."""
        return self._of_float32 if dtype == np.float32 and not self._decides else self

    @cached_property
    def _decides(self) -> bool:
        """Whether it may branch or round."""
        return any(map(_decides, self.pieces))

    @cached_property
    def calls_itself(self) -> bool:
        """Whether one of its functions calls itself, or another that calls it."""
        read = ((*piece.globals.values(), *piece.cells.values()) for piece in self.pieces)
        callees = [[x.number for x in values if isinstance(x, Called)] for values in read]
        try:
            TopologicalSorter(dict(enumerate(callees))).prepare()
        except CycleError:
            return True
        return False

    @cached_property
    def _of_float32(self) -> Frozen:
        key = self.key, "float32"
        return _only(key, [_narrow_piece(piece) for piece in self.pieces])

    def linked(
        self,
        compiled: Callable[[Any], Any],
        instead: Mapping[Any, Any] | None = None,
        number: Callable[[Any], Any] = lambda x: x,
    ) -> FunctionType:
        """The function in Python, with the functions that it calls compiled. instead: replacements for some of these;
        number: replaces constants."""
        functions = [_bare(piece, number) for piece in self.pieces]
        callees = [compiled(function) for function in functions]

        def given(x: Any) -> Any:
            if isinstance(x, Called):
                return callees[x.number]
            return instead.get(x, x) if instead and callable(x) else number(x)

        for piece, function in zip(self.pieces, functions):
            _fill(function.__globals__, piece.globals, given)
            cells: dict[str, Any] = {}
            _fill(cells, piece.cells, given)
            for name, cell in zip(piece.code.co_freevars, function.__closure__ or ()):
                if name in cells:
                    cell.cell_contents = cells[name]
        return functions[0]


KNOWN: WeakValueDictionary[Any, Frozen] = WeakValueDictionary()
LOCK = RLock()  # a WeakValueDictionary's setdefault takes several steps


def _only(key: Any, pieces: list[BareFunction]) -> Frozen:
    """The Frozen of this key, whichever thread is first."""
    with LOCK:
        return KNOWN.setdefault(key, Frozen(key, pieces))


def frozen(function: Any, words: str = "function") -> Frozen:
    """A Python function as it is now. words: what it is, in errors."""
    taking = _Taking(words)
    key = taking.key_of(function)
    known = KNOWN.get(key)
    return _only(key, taking.pieces) if known is None else known


def _bare(piece: BareFunction, number: Callable[[Any], Any]) -> FunctionType:
    cells = tuple([CellType() for _ in piece.code.co_freevars])
    namespace = {"__builtins__": builtins}  # NumPy imports by it
    function = FunctionType(piece.code, namespace, piece.name, tuple(map(number, piece.defaults)) or None, cells)
    function.__kwdefaults__ = {name: number(x) for name, x in piece.keywords.items()} or None
    return function


def _fill(namespace: dict[str, Any], found: dict[Path, Any], given: Callable[[Any], Any]) -> None:
    """Put values at their paths, through modules that hold nothing else."""
    for (*modules, name), x in found.items():
        inside = namespace
        for module in modules:
            if module not in inside:
                inside[module] = ModuleType(module)
            inside = vars(inside[module])
        inside[name] = given(x)


class _Taking:
    """A walk through a function and all functions that it calls."""

    def __init__(self, words: str) -> None:
        self.words, self.pieces = words, list[Any]()
        self.numbers: dict[Any, int] = {}

    def key_of(self, function: FunctionType) -> Any:
        """A key of what the function does, and its number; only the number if it has been met before."""
        if function in self.numbers:
            return self.numbers[function]
        number = self.numbers[function] = len(self.numbers)
        self.pieces.append(None)
        code, reads = function.__code__, reads_of(function.__code__)
        if reads.refused:
            raise self.error(function, f"{reads.refused} of {code.co_filename}, which a GPU cannot carry out")
        if reads.beyond is not None:
            raise self.error(function, f"has the number {reads.beyond}, which {BEYOND_INT64}")
        surroundings, cells = function.__globals__, dict(_contents(function))
        own = [path for path in reads.globals if path[0] in surroundings]
        for name in {path[0] for path in reads.globals} - surroundings.keys():
            if name in READING_ANYTHING:
                raise self.error(function, f"uses {name}, which cannot be followed")
            if not hasattr(builtins, name):
                raise self.error(function, f"uses {name}, which is not defined yet")
        for name in {path[0] for path in reads.free} - cells.keys():
            raise self.error(function, f"uses {name}, which is not defined yet")
        in_globals, of_globals = self.values(function, surroundings, own)
        in_cells, of_cells = self.values(function, cells, reads.free)
        defaults = tuple(map(_constant, function.__defaults__ or ()))
        keywords = {name: _constant(x) for name, x in (function.__kwdefaults__ or {}).items()}
        of_defaults = [self.default(function, x) for x in (*defaults, *keywords.values())]
        self.pieces[number] = BareFunction(code, function.__name__, in_globals, in_cells, defaults, keywords)
        return number, reads.digest, of_globals, of_cells, (*of_defaults, *keywords)

    def values(self, function: FunctionType, names: Mapping[str, Any], paths: Iterable[Path]) -> Any:
        """The values at paths that start at these names, and their keys."""
        found, keys = {}, []
        for path in paths:
            x, end = names[path[0]], 1
            while end < len(path) and isinstance(x, ModuleType) and not _is_whole(x):
                if not hasattr(x, path[end]):
                    raise self.error(function, f"uses {'.'.join(path[: end + 1])}, which is not defined")
                x, end = getattr(x, path[end]), end + 1
            path = path[:end]
            key, found[path] = self.value(function, ".".join(path), x)
            keys.append((path, key))
        return found, tuple(keys)

    def value(self, function: FunctionType, name: str, x: Any) -> Any:
        """The key of what a function reads, and what a BareFunction holds for it."""
        x = _constant(x)
        if _beyond_int64(x):
            raise self.error(function, f"uses {name}, {x!r}, which {BEYOND_INT64}")
        if isinstance(x, type) and x in NARROW:
            raise self.error(function, f"uses {name}, whose numbers wrap around in Python, but not as compiled: "
                                       "integers are int64")  # fmt: skip
        key = _key_of_constant(x)
        key = _name_in_library(x) if key is None else key
        if key is not None:
            return key, x
        callee = getattr(x, "py_func", x)  # the source of a function that Numba has compiled
        if isinstance(callee, FunctionType):
            if callee.__code__.co_kwonlyargcount:  # for which Numba raises an IndexError
                raise self.error(callee, "takes arguments by name only, which compiled code cannot give")
            return self.key_of(callee), Called(self.numbers[callee])
        if library(x):
            raise self.error(function, f"uses the array {name} of its surroundings, expected it among arrays: Numba "
                                       "would make a constant of it")  # fmt: skip
        if isinstance(x, ModuleType):
            raise self.error(function, f"uses the module {name}, expected only attributes of it, {name}.x")
        raise self.error(function, f"uses {name}, {words_for(x)}, which cannot be followed: expected numbers, strings, "
                                   "tuples of these, functions, or attributes of modules that are such")  # fmt: skip

    def default(self, function: FunctionType, x: Any) -> Any:
        """The key of the default of an argument."""
        if isinstance(getattr(x, "py_func", x), FunctionType):
            raise self.error(function, "has a function as the default of an argument, which cannot be followed")
        return self.value(function, "as the default of an argument", x)[0]

    def error(self, function: FunctionType, text: str) -> TypeError:
        return TypeError(f"{self.words}: {function.__qualname__} {text}")


def _contents(function: FunctionType) -> Iterable[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue


def _is_whole(module: ModuleType) -> bool:
    """Whether a module is kept as it is: Numba gives its own modules meanings of their own."""
    return module.__name__.partition(".")[0] == "numba"


# ------------------------------------------------------------------------------------------------------------- values
def _key_of_constant(x: Any) -> Any:
    """A key that tells an immutable value from all others; None for anything else."""
    kind = type(x)
    if kind in CONSTANTS:
        return repr(x)
    if isinstance(x, np.generic) and not isinstance(x, np.void):
        return x.dtype.str, x.tobytes()
    if isinstance(x, np.dtype):
        return "dtype", x.str
    if kind is tuple or (isinstance(x, tuple) and hasattr(x, "_fields")):
        keys = tuple(map(_key_of_constant, x))
        return None if None in keys else (kind.__qualname__, getattr(x, "_fields", None), keys)
    return None


def _constant(x: Any) -> Any:
    """NumPy's integers and booleans as Python's, which do not wrap around; Numba has no constants of half precision."""
    return _mapped(x, _constant_number)


def _constant_number(x: Any) -> Any:
    if isinstance(x, np.integer | np.bool_):
        return x.item()
    return np.float32(x) if isinstance(x, np.float16 | bfloat16) else x


def _beyond_int64(x: Any) -> bool:
    if isinstance(x, tuple | frozenset):
        return any(map(_beyond_int64, x))
    return type(x) is int and not -(2**63) <= x < 2**63


def _wide(x: Any) -> Any:
    """Floats, too: in plain Python float32 would make float32 of float64."""
    return _mapped(x, lambda x: float(x) if isinstance(x, np.floating) else x)


def _decides(piece: BareFunction) -> bool:
    called = [getattr(x, "__name__", "") for x in (*piece.globals.values(), *piece.cells.values()) if callable(x)]
    return not ROUNDING.isdisjoint((*piece.code.co_names, *called)) or any(map(_chooses, _instructions(piece.code)))


def _chooses(instruction: dis.Instruction) -> bool:
    """Whether it compares, jumps, or rounds a quotient."""
    name = instruction.opname if instruction.opname != "BINARY_OP" else instruction.argrepr.strip("=")
    return instruction.opcode in JUMPS or name in ("COMPARE_OP", "//", "%") or name.endswith(("FLOOR_DIVIDE", "MODULO"))


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _instructions(inner)


def _narrow_piece(piece: BareFunction) -> BareFunction:
    code, name, *surroundings, defaults, keywords = piece
    in_globals, in_cells = ({path: _narrow(x) for path, x in values.items()} for values in surroundings)
    of_keywords = {name: _narrow(x) for name, x in keywords.items()}
    return BareFunction(_narrow(code), name, in_globals, in_cells, _narrow(defaults), of_keywords)


def _narrow(x: Any) -> Any:
    """Python's floats as float32."""
    if isinstance(x, CodeType):
        return x.replace(co_consts=tuple(map(_narrow, x.co_consts)))
    return _mapped(x, lambda x: np.float32(x) if type(x) is float and has_float32(x) else x)


def has_float32(x: float) -> bool:
    """Whether float32 is precise enough: it is not for large integers, and not beyond its normal numbers."""
    if x == 0 or not math.isfinite(x):
        return True
    is_large_integer = x.is_integer() and abs(x) < 2.0**53 and float(np.float32(x)) != x
    return SMALLEST <= abs(x) <= LARGEST and not is_large_integer


def _mapped(x: Any, number: Callable[[Any], Any]) -> Any:
    """number(x) for a number, or for each one in a tuple; anything else unchanged."""
    if not isinstance(x, tuple):
        return number(x)
    parts = [_mapped(part, number) for part in x]
    if all(before is after for before, after in zip(x, parts)):
        return x
    return x._make(parts) if hasattr(x, "_make") else tuple(parts)


def _name_in_library(x: Any) -> str | None:
    """The name under which Python, NumPy or Numba have an object; None for any other."""
    if isinstance(x, ModuleType):
        return x.__name__ if x.__name__.partition(".")[0] in LIBRARIES else None
    if type(x).__module__.startswith("numba.core.types"):
        return str(x)
    module, name = getattr(x, "__module__", None), getattr(x, "__qualname__", getattr(x, "__name__", None))
    if isinstance(x, np.ufunc):
        module, name = "numpy", x.__name__
    if not isinstance(module, str) or module.partition(".")[0] not in LIBRARIES or not isinstance(name, str):
        return None
    return f"{module}.{name}" if getattr(sys.modules.get(module), name, None) is x else None


# --------------------------------------------------------------------------------------------------------------- code
class Surroundings(NamedTuple):
    """What a code object, with those inside of it, reads from its surroundings."""

    digest: str
    globals: tuple[Path, ...]
    free: tuple[Path, ...]
    refused: str
    beyond: Any  # a constant that int64 cannot hold, or None


@lru_cache(maxsize=1024)
def reads_of(code: CodeType) -> Surroundings:
    inner = [reads_of(x) for x in code.co_consts if isinstance(x, CodeType)]
    paths: dict[str, list[Any]] = {
        "GLOBAL": [path for x in inner for path in x.globals], "DEREF": [path for x in inner for path in x.free],
    }  # fmt: skip
    refused, path = "", [""]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        refused = f"takes keywords by ** in line {code.co_firstlineno}"
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            path = [step.argval]
            paths[step.opname[len("LOAD_") :]].append(path)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(step.argval)
        elif step.opname not in ("CACHE", "EXTENDED_ARG"):
            path = [""]
        if step.opname in REFUSED and not refused:
            line = next(line for start, end, line in code.co_lines() if start <= step.offset < end)
            refused = f"{REFUSED[step.opname]} in line {line}"
    refused = next(filter(None, [refused, *(x.refused for x in inner)]), "")
    in_globals, free = (tuple(sorted(set(map(tuple, found)))) for found in paths.values())
    free = tuple([path for path in free if path[0] in code.co_freevars])
    beyond = next((x for x in code.co_consts if _beyond_int64(x)), None)
    beyond = next((x.beyond for x in inner if x.beyond is not None), beyond)
    return Surroundings(_digest(_key_of_code(code)), in_globals, free, refused, beyond)


def _key_of_code(x: Any) -> Any:
    """A key of what code does, wherever it stands, or of a constant in code."""
    if isinstance(x, CodeType):
        names = x.co_names, x.co_varnames, x.co_freevars, x.co_cellvars
        about = x.co_flags, x.co_argcount, x.co_posonlyargcount, x.co_kwonlyargcount
        return x.co_code, names, about, getattr(x, "co_exceptiontable", b""), tuple(map(_key_of_code, x.co_consts))
    if isinstance(x, tuple):
        return tuple(map(_key_of_code, x))
    if isinstance(x, frozenset):
        return tuple(sorted(map(repr, map(_key_of_code, x))))
    return type(x).__name__, repr(x)


def _digest(key: Any) -> str:
    return hashlib.sha256(repr((sys.version_info[:2], key)).encode()).hexdigest()[:32]

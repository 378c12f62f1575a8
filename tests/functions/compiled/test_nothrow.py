"""Functions of scores that may raise an error, print or allocate are refused, before anything runs."""

import math

import numpy as np
import pytest

import numbattn as na
from numbattn.cpu.function import element, tile_function

W, TABLE, MODE = (0.5, 0.25), ((1.0, 2.0), (3.0, 4.0)), "near"


def helper(x, j):
    return W[j] * x


def reads_a_list(s, batch, head, i, j):
    return s * [0.5, 0.25][j]


def reads_a_dictionary(s, batch, head, i, j):
    return s * {0: 0.5}[j]


def prints(s, batch, head, i, j):
    print("here")
    return s


def prints_a_number(s, batch, head, i, j):
    if i > 10**6:
        print(i)
    return s


def steps(s, batch, head, i, j):
    for _ in range(0, 9, j):
        s += 1
    return s


def sums_an_array(s, batch, head, i, j):
    return s + np.zeros(3)[i % 3]


def rests(s, batch, head, i, j):
    if j < 2:
        return s / 2


REFUSED = {
    "a tuple": (lambda s, batch, head, i, j: s * W[j], "looks up an entry of a tuple"),
    "a tuple from its end": (lambda s, batch, head, i, j: s * W[min(i - j, 1)], "looks up an entry of a tuple"),
    "a tuple of tuples": (lambda s, batch, head, i, j: s * TABLE[i][j], "looks up an entry of a tuple"),
    "in a function that is called": (lambda s, batch, head, i, j: helper(s, j), "looks up an entry"),
    "a list": (reads_a_list, "makes a list.*arrays="),
    "a list that is the largest": (lambda s, batch, head, i, j: max([2 * t for t in range(j)]), "makes a list"),
    "print": (prints, "prints.*leave it out"),
    "print, seldom": (prints_a_number, "prints"),
    "a string": (lambda s, batch, head, i, j: s + len(f"{i}"), "makes a string"),
    "steps": (steps, "counts in steps that may be 0"),
    "an array": (sums_an_array, "makes an array"),
    "None": (rests, "rests, .*may return None"),
    "a tuple that is returned": (lambda s, batch, head, i, j: (s, s), "returns what is no number: let it return"),
    "a slice": (lambda s, batch, head, i, j, x: s + x[::j][0], "may raise an error"),
}
SLOW = {"a dictionary": (reads_a_dictionary, "makes a dictionary")}


@pytest.mark.parametrize(("function", "message"), [
    *[pytest.param(*case, id=name) for name, case in REFUSED.items()],
    *[pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()],
])  # fmt: skip
def test_what_may_fail_is_refused(function, message, capsys):
    arrays = [np.zeros(3)] if function.__code__.co_argcount == 6 else []
    score = na.Score(function, arrays=arrays)
    q = np.zeros((3, 4))
    for call in (lambda: na.attention(q, q, q, score=score), lambda: na.check_score(score, 2, 2)):
        with pytest.raises(TypeError, match=f"^[Ss]core.*{message}"):
            call()
    assert capsys.readouterr() == ("", "")


def test_a_derivative_that_may_fail_is_refused():
    q = np.zeros((3, 4))
    o, saved = na.attention_forward(q, q, q, score=na.Score(lambda s, batch, head, i, j: s, helped))
    with pytest.raises(TypeError, match=r"^Score derivative: helped, .*looks up an entry of a tuple"):
        na.attention_backward(o, saved)


def helped(s, batch, head, i, j):
    return helper(s + 1, j)


@pytest.mark.parametrize(("function", "line"), [
    (prints_a_number, prints_a_number.__code__.co_firstlineno + 2),
    (reads_a_list, reads_a_list.__code__.co_firstlineno + 1),
    (helped, helper.__code__.co_firstlineno + 1),
])  # fmt: skip
def test_the_line_is_named(function, line):
    q = np.zeros((3, 4))
    with pytest.raises(TypeError, match=rf"^Score function: {function.__name__}, line {line} of .*test_nothrow.py, "):
        na.attention(q, q, q, score=na.Score(function))


def counts_down(s, n):
    return counts_down(s / 2, n - 1) if n > 0 else s


def here(s, n):
    return there(s / 2, n - 1) if n > 0 else s


def there(s, n):
    return here(s, n - 1) if n > 0 else s + 1


def adds_up(s, batch, head, i, j):
    for n, (x, y) in enumerate(zip(W, TABLE)):
        s += n * x * y[0] + y[1]
    while i > 0:
        i //= 2
        s += 1 / (j + 1)
    return s


ALLOWED = {
    "tuples": lambda s, batch, head, i, j: s * W[j % 2] + W[0] * TABLE[1][i & 1] + (W[j] if j < 2 else 1),
    "the first ones of a tuple": lambda s, batch, head, i, j: s * W[min(j, 1)] * W[max(1 - i, 0)],
    "loops": adds_up,
    "zeros divided by": lambda s, batch, head, i, j: s if i == 0 else s + j // i + j % i + s / i + i / (j + 1),
    "powers": lambda s, batch, head, i, j: s**3 + 2.0 ** -(head + 1) + (s * s) ** 0.5 + i**2 + 2.0 ** (i - j) + s**i,
    "rounded": lambda s, batch, head, i, j: round(s) + round(s, 2) + np.round(s, 1) + math.floor(s) + int(s),
    "calls itself": lambda s, batch, head, i, j: counts_down(s, i),
    "calls what calls it": lambda s, batch, head, i, j: here(s, i),
    "strings": lambda s, batch, head, i, j: s if MODE == "near" else 2 * s,
    "functions": lambda s, batch, head, i, j: math.hypot(s, i) + abs(complex(s, 1.0)) + math.gcd(i + 1, j + 1),
    "perhaps nothing": lambda s, batch, head, i, j: s if (None if i else 1.0) is None else 2 * s,
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_never_fails_is_allowed(name):
    score = na.Score(ALLOWED[name])
    compiled = element(score)
    for s, i, j in ((-1.5, 0, 3), (0.25, 2, 1), (3.0, 5, 5)):
        assert compiled(s, 1, 2, i, j) == pytest.approx(ALLOWED[name](s, 1, 2, i, j), rel=1e-13)


def test_nothing_is_checked_that_is_compiled_already(monkeypatch):
    score = na.Score(lambda s, batch, head, i, j: s - 0.125 * i)
    tile_function(score, np.float64)
    monkeypatch.setattr("numbattn.functions.compiled.element.may_fail", None)
    monkeypatch.setattr("numbattn.cpu.function._tile_function", tile_function.__globals__["_tile_function"].__wrapped__)
    assert tile_function(score, np.float64) is not None     # from the disk


FAULTS = {
    "if name in seen:    #": "if False:    #",
    "return PYTHON.match(name) is not None": "return False",
    "return found and found[1]": "return None",
    'return x in seen or x == "0"': "return True",
    "isinstance(typemap[value.value.name], types.BaseTuple)": "False",
    "functions/compiled/element.py": {
        'builder.assume(builder.icmp_signed(">=", args[0], ir.Constant(args[0].type, 0)))': "pass",
        "element_of(differentiated(identity, order))": "element_of(differentiated(identity, 0))",
    },
}

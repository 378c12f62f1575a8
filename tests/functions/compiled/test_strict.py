"""Operators that Numba would give another meaning."""

import math

import numpy as np
import pytest
from numba import types

import numbattn as na
from numbattn.functions.compiled.strict import compiled

REFUSED = {
    "a power of integers": (lambda s, batch, head, i, j: s + 2**-head, r"int \*\* int.*write float\(x\) \*\* y"),
    "in place": (lambda s, batch, head, i, j: powers(i, j) + s, r"int \*\* int"),
    "a negative constant": (lambda s, batch, head, i, j: s**-2, r"negative integer as an exponent: write x \*\* -1.0"),
    "a large power": (lambda s, batch, head, i, j: s * 2**70, r"a power that int64 cannot hold: write 2.0 \*\* 70"),
    "in a function inside": (lambda s, batch, head, i, j: (lambda n: n**j)(2) + s, r"int \*\* int"),
    "in a function passed on": (lambda s, batch, head, i, j: call(lambda n, m: n**m, 2, j) + s, r"int \*\* int"),
    "not of a comparison": (lambda s, batch, head, i, j: s * ~(i < j), "~ of True or False.*write not x"),
    "not of an entry": (lambda s, batch, head, i, j, x: s * ~x[j], "~ of True or False"),
}


def call(function, x, y):
    return function(x, y)


def powers(i, j):
    i **= j
    return i


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED)
def test_what_means_something_else_is_refused(function, message):
    arrays = [np.zeros(3, bool)] if function.__code__.co_argcount == 6 else []
    q = np.zeros((3, 4))
    with pytest.raises(TypeError, match=rf"^score: <lambda>, line \d+ of .*{message}.*\(line \d+ of test_strict.py\)"):
        na.attention(q, q, q, score=na.Score(function, arrays=arrays))


def test_rounded_as_in_python(rng):
    made = compiled(lambda x, digits: round(x, digits))
    for x in (*(rng.standard_normal(9) * 1e3).tolist(), 0.125, 2.5, -0.5, 1e300, 5e-324, math.inf, -math.inf):
        for digits in (0, 1, 2, 5, -1, -3, 25, 400, -30):
            assert made(x, digits) == pytest.approx(round(x, digits), rel=1e-12), (x, digits)
    assert math.isnan(made(math.nan, 2))


def test_a_float_to_the_power_of_an_integer_divides_by_zero_as_numpy():
    """Numba's own would raise an error, which nobody sees."""
    q = np.zeros((2, 3, 4))
    got = na.attention_weights(q, q, score=na.Score(lambda s, batch, head, i, j: -1 / (1 + (s + j) ** (1 - j))))
    j = np.arange(3.0)
    with np.errstate(divide="ignore"):
        want = np.exp(-1 / (1 + j ** (1 - j)))
    np.testing.assert_allclose(got[0, 0], want / want.sum(), rtol=1e-12)


def test_numbers_do_not_make_float64_of_float32():
    made = compiled(lambda x, i: (2.0 * x, x - 1, x / 3, (x > 1) + i + 1, i / 2.0, x + 16777217))
    found = made(np.float32(0.5), 7)
    kinds = [str(kind) for kind in made.overloads[types.float32, types.int64].signature.return_type]
    assert kinds == ["float32"] * 3 + ["int64", "float64", "float64"]
    assert found == (1, -0.5, np.float32(0.5) / np.float32(3), 8, 3.5, 16777217.5)


FAULTS = {
    "return lambda x, y: x ** float(y)": "return lambda x, y: x**y",
    "if exponent < 0:": "if False:",
    "exponent * math.log2(abs(base)) >= 63": "False",
    "passes.add_pass_after(Replacing, InlineClosureLikes)": "passes.passes.insert(3, (Replacing, ''))",
    "passes.add_pass_after(Recompiling, MakeFunctionToJitFunction)": "pass",
    'if value.op == "unary"': "if False",
    "abs(number) <= 2**24": "True",
    "if x == types.float32 else (lambda number, x: number)": "",
}

"""Functions of math as users' functions call them on CPUs: right, also at the ends, and vectorised."""

import math
import re

import numba
import numpy as np
import pytest

from numbattn.functions.compiled.elementwise import elementwise, of_one
from numbattn.functions.compiled.strict import compiled, power
from numbattn.functions.frozen import frozen

DTYPES = np.float32, np.float64
FUNCTIONS = {  # and where they are compared
    "exp": (lambda x: math.exp(x), (-87, 88)),
    "expm1": (lambda x: math.expm1(x), (-50, 80)),
    "tanh": (lambda x: math.tanh(x), (-20, 20)),
    "log": (lambda x: np.log(x), (1e-30, 30)),
    "log2": (lambda x: math.log2(x), (1e-30, 30)),
    "log1p": (lambda x: np.log1p(x), (-1, 30)),
}  # fmt: skip
ENDS = [np.inf, -np.inf, np.nan, 0, 1, -1, -2, 41, 88.7, 88.8, 709.7, 709.8, -110, -750, 1e30, -1e30]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_to_the_last_bits(rng, name, dtype):
    function, ends = FUNCTIONS[name]
    x = np.concatenate([rng.uniform(*ends, 10_000), 1e-3 * rng.random(1000), 1 + 1e-3 * rng.random(1000)]).astype(dtype)
    got, want = elementwise(frozen(function))(x), getattr(np, name)(x.astype(np.longdouble))
    assert got.dtype == dtype
    assert np.abs((got - want) / want).max() < 3 * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_the_ends(name, dtype):
    x = np.array(ENDS, dtype)
    with np.errstate(all="ignore"):
        want = getattr(np, name)(x)
    np.testing.assert_allclose(elementwise(frozen(FUNCTIONS[name][0]))(x), want, rtol=8 * np.finfo(dtype).eps)


def test_logarithms_below_the_normal_numbers():
    x = np.array([1e-310, -1e-310])
    for name in "log", "log2":
        np.testing.assert_array_equal(elementwise(frozen(FUNCTIONS[name][0]))(x), [-np.inf, np.nan])


def test_of_integers():
    made = elementwise(frozen(lambda x: math.exp(2) + math.log(int(x)) + math.tanh(x > 0)))
    np.testing.assert_allclose(made(np.array([3.5])), math.exp(2) + math.log(3) + math.tanh(1), rtol=1e-15)


# -------------------------------------------------------------------------------------------------------------- powers
@compiled
def powers(x, y, out):
    for at in range(x.size):
        out[at] = power(x[at], y[at])


def powers_of(x, y):
    powers(x, y, out := np.empty_like(x))
    return out


def test_powers_of_float32_to_the_last_bit(rng):
    x, y = np.exp(rng.uniform(-9, 9, 10_000)).astype("f"), rng.uniform(-9, 9, 10_000).astype("f")
    want = x.astype(np.longdouble) ** y
    assert np.abs((powers_of(x, y) - want) / want).max() < np.finfo(np.float32).eps


def test_powers_of_float32_at_the_ends():
    ends = [np.inf, -np.inf, np.nan, 0, 0.5, -0.5, 1, -1, 2, -2, 3, -3, 3.5, 1e-3, 1e30, -1e30]
    x, y = (part.ravel() for part in np.array(np.meshgrid(ends, ends), "f"))
    with np.errstate(all="ignore"):
        want = np.power(x, y)
    np.testing.assert_allclose(powers_of(x, y), want, rtol=1e-6, atol=np.finfo("f").tiny)


# ------------------------------------------------------------------------------------------------------- vector code
def matern(t):
    r = math.sqrt(3 * t)
    return (1 + r) * math.exp(-r)


VECTORISED = {name: function for name, (function, _) in FUNCTIONS.items()} | {
    "matern": matern, "sigmoid": lambda x: 1 / (1 + math.exp(-x)), "powers": lambda x: x**2 + x**3,
    "softcap": lambda x: 30.0 * math.tanh(x / 30.0), "rational": lambda x: math.exp(-0.7 * math.log1p(x / 1.4)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VECTORISED)
def test_loops_are_vectorised(name, dtype):
    """In the dtype, up to second derivatives: code that is not inlined is not."""
    for order in range(3):
        code = code_of_loop(of_one(frozen(VECTORISED[name]).of(np.dtype(dtype)), order), dtype)
        assert re.search(rf"f\w+ .*<\d+ x {'float' if dtype == np.float32 else 'double'}>", code), order
        assert dtype == np.float64 or " double" not in code, order


def code_of_loop(one, dtype):
    @compiled
    def fill(x, out):
        for at in range(x.size):
            out[at] = one(x[at])

    array = numba.types.Array(numba.from_dtype(np.dtype(dtype)), 1, "C")
    fill.compile((array, array))
    return fill.overloads[array, array].library.get_llvm_str()


def test_a_power_of_float32_is_vectorised_in_float64():
    one = elementwise(frozen(lambda x: (1.0 + x) ** -0.7).of(np.dtype("f")))
    x = np.linspace(0, 9, 100, dtype="f")
    np.testing.assert_allclose(one(x), (1 + x.astype(float)) ** -0.7, rtol=1e-6)


FAULTS = {
    "INFINITE if x > LARGEST else y": "y",
    "return z if x > FAR else y": "return y",
    "y = y if x > LEAST else -INFINITE": "pass",
    "return y if x >= LEAST else NAN": "return y",
    "return e / (e + TWO)": "return (e + TWO - TWO) / (e + TWO)",
    "(lambda x: function(np.float64(x))) if isinstance(x, types.Integer | types.Boolean) else": "",
    "(np.inf if exponent < 0 else z) if size == 0": "z if size == 0",
    "(np.inf if exponent > 0 else 0.0) if size == np.inf": "z if size == np.inf",
    "z = z if x >= 0 or not is_whole or not is_odd else -z": "pass",
    "or is_whole else np.nan": "else z",
    "z = z if y == y else np.nan": "pass",
    "1.0 if exponent == 0 or x == 1 else z": "z",
    "functions/compiled/logarithms.py": {
        "y = y if not x < SMALLEST else -INFINITE": "pass",
        "return y if not x < ZERO else NAN": "return y",
        "y = y if x < INFINITE else x": "pass",
    },
    "functions/compiled/strict.py": {
        '"error_model": "numpy", "forceinline": True': '"error_model": "numpy"',
    },
}

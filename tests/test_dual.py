"""Derivatives by dual numbers, against finite differences."""

import math

import numba
import numpy as np
import pytest
from numba.core.errors import NumbaError

import numbattn as na
from numbattn import dual
from numbattn.frozen import frozen

FUNCTIONS = {
    "math": lambda s, b, h, i, j: math.exp(-s * s) + math.log(s * s + 1) + math.sqrt(s * s + 1) + math.erf(-s),
    "numpy": lambda s, b, h, i, j: np.tanh(2 * s) * np.sin(3 * s) + np.cos(s / 2) / (2 + np.exp2(s / 3)),
    "others": lambda s, b, h, i, j: np.fabs(-2 * s) + np.arctan(-s) + math.log1p(s * s) + math.expm1(s / 4) + abs(-s),
    "operators": lambda s, b, h, i, j: -(2 - s) / 3 + (+s) ** 3 - 1 / (4 + s * s) + 1.5**s + i * s - s / (j + 1),
    "smaller, larger": lambda s, b, h, i, j: min(s, i - 8) + max(0.5, s) + np.minimum(s, s * s) + np.maximum(1, s),
    "branches": lambda s, b, h, i, j: s * s if s > 1 else 0 if i == j else 2 * s - 1 if s != 0 else s,
    "comparisons": lambda s, b, h, i, j: s * ((s < 0) + 2 * (s <= 1) + 4 * (i < s) + 8 * (j >= s)),
    "number": lambda s, b, h, i, j: 3 if i > j else 2.0,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_follow(name):
    assert na.check_score(na.Score(FUNCTIONS[name]), 12, 17) < 1e-6


def test_in_place_operators_follow():
    def function(s, batch, head, i, j):
        t = s
        t += 2
        t *= s
        t -= 1 / 3
        t /= 5
        t **= 2
        return t

    assert na.check_score(na.Score(function)) < 1e-6


ADDITIVE = {
    "distance": lambda s, b, h, i, j: s - abs(i - j),
    "branches": lambda s, b, h, i, j: 1 + s if i > j else s - 2.5,
    "nothing": lambda s, b, h, i, j: s,
}
OTHERS = {
    "product": lambda s, b, h, i, j: 2 * s,
    "difference": lambda s, b, h, i, j: 1 - s,
    "itself": lambda s, b, h, i, j: s + s,
    "comparison": lambda s, b, h, i, j: s if s > 0 else s - 1,
    "a constant": lambda s, b, h, i, j: s if i > j else -1.0,
    "function": lambda s, b, h, i, j: math.tanh(s),
    "number": lambda s, b, h, i, j: 3.0,
}


@pytest.mark.parametrize("name", [*ADDITIVE, *OTHERS])
def test_what_only_adds_is_known_by_its_types(name):
    function = (ADDITIVE | OTHERS)[name]
    assert dual.is_additive(frozen(function), (numba.int64,) * 4) == (name in ADDITIVE)


def test_what_cannot_be_compiled_is_named():
    def strange(s):
        return s.nothing

    line = strange.__code__.co_firstlineno
    words = rf"score: Numba cannot compile .*strange, line {line} of .*test_dual"
    with pytest.raises(TypeError, match=words), dual.naming(strange):
        dual.compiled(strange)(1.0)
    with pytest.raises(NumbaError), dual.naming():
        dual.compiled(strange)(1.0)


@numba.njit
def value_and_slope(x, dx):
    y = dual.dual(x, dx) * 3
    return dual.value(y), dual.slope(y), dual.slope_of(y), dual.slope_of(x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_value_and_slope(dtype):
    assert value_and_slope(dtype(2), dtype(5)) == (6, 15, 15, 0)

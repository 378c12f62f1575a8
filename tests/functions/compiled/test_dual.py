"""Derivatives by dual numbers, against finite differences."""

import itertools
import math

import numba
import numpy as np
import pytest
from numba.core.errors import NumbaError

import numbattn as na
from numbattn.functions.compiled import dual
from numbattn.functions.compiled.derivative import compiled_of, derivative_of, is_additive
from numbattn.functions.compiled.errors import naming
from numbattn.functions.compiled.strict import compiled
from numbattn.functions.frozen import frozen

FUNCTIONS = {
    "math": lambda s, b, h, i, j: math.exp(-s * s) + math.log(s * s + 1) + math.sqrt(s * s + 1) + math.erf(-s),
    "numpy": lambda s, b, h, i, j: np.tanh(2 * s) * np.sin(3 * s) + np.cos(s / 2) / (2 + np.exp2(s / 3)),
    "others": lambda s, b, h, i, j: np.fabs(-2 * s) + np.arctan(-s) + math.log1p(s * s) + math.expm1(s / 4) + abs(-s),
    "operators": lambda s, b, h, i, j: -(2 - s) / 3 + (+s) ** 3 - 1 / (4 + s * s) + 1.5**s + i * s - s / (j + 1),
    "smaller, larger": lambda s, b, h, i, j: min(s, i - 8) + max(0.5, s) + np.minimum(s, s * s) + np.maximum(1, s),
    "branches": lambda s, b, h, i, j: s * s if s > 1 else 0 if i == j else 2 * s - 1 if s != 0 else s,
    "comparisons": lambda s, b, h, i, j: (
        s * ((s < 0) + 2 * (s <= 1) + 4 * (i < s) + 8 * (j >= s) + np.less(s, j) + 2 * np.greater_equal(s, 1))
    ),
    "number": lambda s, b, h, i, j: 3 if i > j else 2.0,
    "exponentials": lambda s, b, h, i, j: (
        math.log2(s * s + 1) + np.log10(s * s + 1) + np.exp2(s / 9) + np.logaddexp(s, i) + np.logaddexp(j, s * s)
        + np.logaddexp(s, s) + (s * s) ** s
    ),
    "angles": lambda s, b, h, i, j: (
        math.tan(s / 9) + np.sinh(s / 9) + math.cosh(s / 9) + np.arcsin(s / 19) + math.acos(s / 19) + math.asinh(s)
        + np.arctanh(s / 19) + math.acosh(s * s + 2) + math.atan2(s, i + 1) + np.arctan2(j + 1, s) + np.hypot(s, i + 1)
        + math.erfc(s) + np.deg2rad(s) + math.degrees(s / 99)
    ),
    "steps": lambda s, b, h, i, j: (
        math.floor(s) + np.floor(s) * s + np.ceil(s) + round(s) + np.rint(s) + round(s, 1) + np.round(s, 2) + int(s)
        + np.trunc(s) * s + math.trunc(s) + s * np.sign(s) + s % 3 + s // 2 + np.mod(s, 2.5) + np.mod(9, s * s + 1)
        + divmod(s, 3.5)[1] + sum(np.divmod(s, i + 1)) + sum(divmod(i - j, 3))
    ),
    "choices": lambda s, b, h, i, j: (
        np.where(i > j, s, -0.5) + np.where(s > 0, s * s, s) + np.clip(s, -1, i) + np.minimum(s, j) + np.fmin(s, 1)
        + np.fmax(0.5, s * s) + min(s, 1, i) + max(s, 0, -s) + (0 if math.isnan(s) or np.isinf(s) else 3 * s)
        + (s * s if np.isfinite(s) else s) + (s if s else 1) + (not s) * s + bool(s) * s
    ),
    "arithmetic": lambda s, b, h, i, j: (
        np.abs(s) + np.absolute(-s) + np.square(s) + np.negative(s) + np.positive(s) + np.add(s, i) + np.subtract(j, s)
        + np.multiply(j, s) + np.divide(s, i + 1) + np.power(s * s, 1.5) + math.pow(s, 2) + pow(s, 3) + s**0
        + np.reciprocal(s * s + 1) + math.copysign(s, i - 5) + np.copysign(2.0, s) * s
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_derivatives_follow(rng, name, order):
    """Second ones are derivatives differentiated once more; other tests have simpler ones."""
    score, S, h = na.Score(FUNCTIONS[name]), rng.normal(scale=3, size=(1, 12, 17)), 1e-5
    values = score._applied, score._derivative, score._curvature
    want = (values[order - 1](S + h) - values[order - 1](S - h)) / (2 * h)
    np.testing.assert_allclose(values[order](S), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["steps", "choices", "arithmetic", "exponentials"])
def test_compiled_values_are_those_of_numpy(name):
    function = FUNCTIONS[name]
    made = compiled_of(frozen(function))
    for s, i, j in itertools.product((-7.3, -0.5, 0.5, 2.5, 3.0), (0, 3, 9), (1, 5)):
        assert made(s, 0, 0, i, j) == pytest.approx(function(s, 0, 0, i, j), rel=1e-13)


@np.errstate(invalid="ignore")
def test_numpy_at_infinity_and_nan():
    def compiled(function):
        return compiled_of(frozen(lambda *x: function(*x)))

    values = -math.inf, 0.0, 1e300, math.inf, math.nan
    for function in np.floor, np.rint, np.sign:
        for x in values:
            np.testing.assert_array_equal(compiled(function)(x), function(x))
    for function in np.minimum, np.fmax, np.logaddexp:
        for x, y in itertools.product(values, values):
            np.testing.assert_array_equal(compiled(function)(x, y), function(x, y))


CORNERS = {  # of a function, where, and its derivative there
    "a factor": (lambda s: 0.5 * s, -math.inf, 0.5),
    "no factor": (lambda s: s * 0 + 1 + s, math.inf, 1),
    "a divisor": (lambda s: s / 4, -math.inf, 0.25),
    "a sum": (lambda s: s - 1 + math.inf, -math.inf, 1),
    "what is not seen": (lambda s: math.sqrt(max(s, 0.0)), -1.0, 0),
    "a power": (lambda s: s**0 + s, 0.0, 1),
    "a power of 0": (lambda s: 0.0 ** (s + 2), 0.0, 0),
    "a constant power": (lambda s: s**2, -math.inf, -math.inf),
    "far": (lambda s: np.logaddexp(s, 0), -math.inf, 0),
    "both far": (lambda s: np.logaddexp(s, -math.inf), -math.inf, 1),
    "rounded": (lambda s: np.floor(s) + s, -math.inf, 1),
    "nothing": (lambda s: math.hypot(s, 0.0), 0.0, 0),
}


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_numbers_add_nothing_to_a_derivative(dtype):
    """Not even where values are infinite."""
    for name, (function, s, want) in CORNERS.items():
        assert derivative_of(compiled_of(frozen(function)))(dtype(s)) == want, name


CORNERS_OF_SECONDS = {  # of a function, where, and its second derivative there
    "a product": (lambda s: s * s, 0.0, 2),
    "a factor": (lambda s: 0.5 * s, -math.inf, 0),
    "a power": (lambda s: s**3, 0.0, 0),
    "what is not seen": (lambda s: math.sqrt(max(s, 0.0)), -1.0, 0),
    "a power of the sum": (lambda s: (s - 1) ** 2, 1.0, 2),
    "a branch": (lambda s: s * s if s > 0 else 0, -1.0, 0),
    "a choice": (lambda s: max(s * s, 1), 0.0, 0),
    "far": (lambda s: np.logaddexp(s, -math.inf), 0.5, 0),
    "a sign": (lambda s: s * np.sign(s), 3.0, 0),
}


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_numbers_add_nothing_to_a_second_derivative(dtype):
    for name, (function, s, want) in CORNERS_OF_SECONDS.items():
        second = derivative_of(derivative_of(compiled_of(frozen(function))))
        assert second(dtype(s)) == want, name


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
    assert is_additive(frozen(function), (numba.int64,) * 4) == (name in ADDITIVE)


@pytest.mark.parametrize("count", range(3))
def test_arrays_may_have_one_name(count):
    def adds(s, batch, head, i, j, *arrays):
        return s + len(arrays) * i

    def multiplies(s, batch, head, i, j, *arrays):
        return s * len(arrays)

    kinds = (*[numba.int64] * 4, *[numba.float32[:]] * count)
    assert is_additive(frozen(adds), kinds)
    assert not is_additive(frozen(multiplies), kinds)


def test_what_cannot_be_compiled_is_named():
    def strange(s):
        return s.nothing

    line = strange.__code__.co_firstlineno
    words = rf"score: Numba cannot compile .*strange, line {line} of .*test_dual"
    with pytest.raises(TypeError, match=words), naming(strange):
        compiled(strange)(1.0)
    with pytest.raises(NumbaError), naming():
        compiled(strange)(1.0)


@numba.njit
def value_and_slope(x, dx):
    y = dual.dual(x, dx) * 3
    return dual.value(y), dual.slope(y), dual.slope_of(y), dual.slope_of(x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_value_and_slope(dtype):
    assert value_and_slope(dtype(2), dtype(5)) == (6, 15, 15, 0)


FAULTS = {
    "(operator.mul, lambda x, y, z: y, lambda x, y, z: x": "(operator.mul, lambda x, y, z: y, lambda x, y, z: ONE",
    "lambda x, y, z: -z / y": "lambda x, y, z: z / y",
    "y if first(y, x) else x": "x if first(y, x) else y",
    "y * power(x, y - ONE) if y != 0": "power(x, y - ONE) if y != 0",
    "y * power(x, y - ONE) if y != 0 else ZERO": "y * power(x, y - ONE)",
    "z * math.log(x) if z != 0": "z if z != 0",
    "lambda x, z: math.cos(x)": "lambda x, z: math.sin(x)",
    "partial * change if change != 0 else change": "partial * change",
    "term(value(partial), slope(change)) + term(slope(partial), value(change))": "term(value(partial), slope(change))",
    "return lambda partial, change: dual(term(partial, value(change)), term(partial, slope(change)))":
        "return lambda partial, change: dual(term(partial, value(change)), term(partial, value(change)))",
    "(x // y, x % y)": "(x % y, x // y)",
    "lambda x, y, z: (z - x) / y": "lambda x, y, z: (z + x) / y",
    "context.get_constant(types.int64, 0)": "context.get_constant(types.int64, 1)",
    "functions/compiled/numpy_functions.py": {
        "lambda x, y, z: exp(x - z) if x != z": "lambda x, y, z: exp(y - z) if x != z",
        "kind(to_integer(x)) if abs(x) < ALL_WHOLE else x": "x",
    },
    "functions/compiled/derivative.py": {
        "keeps_shifted(function, first_only=True)": "keeps_shifted(function, first_only=False)",
        "signature.return_type == SHIFTED": "signature.return_type is not None",
        "test_arrays_may_have_one_name": {
            "value_of.get_call_template((SHIFTED, *kinds), {})[2]":
                "value_of.compile((SHIFTED, *kinds)) or (SHIFTED, *kinds)",
        },
        "base/test_compiling.py::test_functions_of_scores_are_not_called_uncompiled": {
            '    check_setting("DISABLE_JIT")\n': "",
        },
    },
}

import numba
import numpy as np
import pytest

from numbattn.functions.compiled import logarithms


@numba.njit(error_model="numpy")
def log1p_of(x):
    out = np.empty_like(x)
    for i in range(x.size):
        out[i] = logarithms.log1p(x[i])
    return out


@numba.njit(error_model="numpy")
def power_of(x, exponent):
    out = np.empty_like(x)
    for i in range(x.size):
        out[i] = logarithms.power(x[i], exponent)
    return out


def check(got, exact, dtype, last_bits):
    about = np.finfo(dtype)
    normal = (about.tiny < exact) & (exact < about.max / 2)
    assert normal.sum() > 100
    error = abs(got[normal] - exact[normal]) / exact[normal]
    assert error.max() < last_bits * about.eps


def drawn(rng, dtype):
    return np.exp(rng.uniform(-40, 40, 10_000)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log1p(rng, dtype):
    x = drawn(rng, dtype)
    check(log1p_of(x), np.log1p(x.astype(np.longdouble)), dtype, 2)
    x = np.array([0, np.inf, np.nan, 1e-30], dtype)
    np.testing.assert_array_equal(log1p_of(x), x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("exponent", [0.5, 0.37, 1.5, 3, -0.3, -2.6])
def test_powers(rng, dtype, exponent):
    x, exponent = drawn(rng, dtype), dtype(exponent)
    with np.errstate(over="ignore"):
        check(power_of(x, exponent), x.astype(np.longdouble) ** exponent, dtype, 1.5 + abs(exponent))
    assert np.isnan(power_of(np.array([np.nan], dtype), exponent)[0])
    assert power_of(np.zeros(1, dtype), exponent)[0] == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_powers_beyond_the_dtype(dtype):
    about = np.finfo(dtype)
    x = np.array([about.tiny, about.max], dtype)
    np.testing.assert_array_equal(power_of(x, dtype(1.5)), [0, np.inf])
    np.testing.assert_array_equal(power_of(x, dtype(-1.5)), [np.inf, 0])
    np.testing.assert_array_equal(power_of(x, dtype(30)), [0, np.inf])


FAULTS = {
    "lost = (x - (w - ONE)) / w": "lost = ONE - ONE",
    "return y if x < INFINITE else x": "return y",
    "y = ZERO if x < SMALLEST else y": "pass",
    "y = ZERO if k == BELOW else y": "pass",
    "y = INFINITE if k == MOST else y": "pass",
    "return y if x == x else x": "return y",
    "(exponent - leading) * n + exponent * (LOG2_E * log_m)":
        "exponent * (LOG2_E * log_m)",
}

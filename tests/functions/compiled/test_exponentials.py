import numba
import numpy as np
import pytest

from numbattn.functions.compiled.exponentials import exp, expm1


@numba.njit
def exp_of(x):
    return np.array([exp(value) for value in x])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_is_right_to_the_last_bit_or_so(rng, dtype):
    x = np.concatenate([-rng.random(10000) * 87, rng.random(1000) * 5, np.arange(-87, 10)]).astype(dtype)
    got, want = exp_of(x), np.exp(x.astype(np.longdouble))
    assert got.dtype == dtype
    assert np.abs((got - want) / want).max() <= np.finfo(dtype).eps
    assert exp_of(np.zeros(1, dtype)) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_at_the_ends(dtype):
    x = np.array([-np.inf, np.finfo(dtype).min, -1e5, -0.0, 0, np.nan], dtype)
    np.testing.assert_array_equal(exp_of(x), np.array([0, 0, 0, 1, 1, np.nan], dtype))


@pytest.mark.parametrize("bits", [np.uint32(0x7FC00001), np.uint64(0x7FF00000000007A2)], ids=["float32", "R's NA"])
def test_exp_keeps_nan_with_a_payload(bits):
    assert np.isnan(exp_of(np.array([bits]).view(f"f{bits.itemsize}")))


@numba.njit
def expm1_of(x):
    return np.array([expm1(value) for value in x])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_expm1_is_accurate_near_0(dtype):
    x = np.geomspace(1e-30, 10, 5000)
    x = np.concatenate([x, -x]).astype(dtype)
    got, want = expm1_of(x), np.expm1(x.astype(np.longdouble))
    assert got.dtype == dtype
    assert (np.abs((got - want) / want) / (1 + np.abs(x))).max() <= 2 * np.finfo(dtype).eps
    assert expm1_of(np.zeros(1, dtype)) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_expm1_at_the_ends(dtype):
    low, high, nan = expm1_of(np.array([-np.inf, np.inf, np.nan], dtype))
    assert low == -1
    assert high == pytest.approx(np.expm1(40.0), rel=1e-4)
    assert np.isnan(nan)


FAULTS = {
    "np.float32, np.int32, 7": "np.float32, np.int32, 6",
    "ZERO if n < LOWEST else": "",
    "y if x == x else x": "y",
}

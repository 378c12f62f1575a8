"""Sums that are the same in any order."""

import numpy as np
import pytest

from numbattn.cuda.kernels.shared import exact_sums
from numbattn.cuda.kernels.shared.exact_sums import add_exactly
from numbattn.cuda.tile import index
from tests.tools.launch import launch


def summed(numbers, places, count):
    sums = np.zeros(count * exact_sums.SIZE, np.int64)

    def kernel(numbers, places, sums):
        for at in range(index(numbers.size)):
            add_exactly((places[at], numbers[at]), sums)

    launch(kernel, (1, 1, 1), 1, 0, numbers, places, sums)
    return exact_sums.rounded(sums[None])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_are_exact_in_any_order(rng, dtype):
    numbers = (rng.standard_normal(60) * 10.0 ** rng.integers(-20, 20, 60)).astype(dtype)
    numbers, places = np.append(numbers, -numbers[::2]), rng.integers(0, 3, 90)
    want = [float(sum(map(np.longdouble, numbers[places == place]))) for place in range(3)]
    got, other = summed(numbers, places, 3), summed(numbers[::-1].copy(), places[::-1].copy(), 3)
    np.testing.assert_array_equal(got, other)
    np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-20)


def test_what_is_not_finite_is_nan():
    got = summed(np.array([1.0, np.inf, np.nan, 1e39, 2.0]), np.array([0, 1, 2, 3, 0]), 5)
    np.testing.assert_array_equal(got, [3.0, np.nan, np.nan, np.nan, 0.0])


FAULTS = {
    "rest -= whole * unit": "pass",
    "unit /= STEP\n        else": "unit /= 2\n        else",
    "first, rest, unit = element * SIZE,": "first, rest, unit = element,",
    "add_element(sums, first + PARTS, 1)": "pass",
}

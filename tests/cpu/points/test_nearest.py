import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn.call.problem import describe
from numbattn.cpu.points import nearest
from tests.points import plain, test_formula

from .calls import DTYPES, SIZES, drawn


@pytest.mark.parametrize("k", [1, 2, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_sizes(rng, k, dtype):
    for m, n, d in SIZES:
        problem, inputs, _ = drawn(rng, m, n, d, 0, dtype, (2,))
        t, j = nearest(problem, inputs, k)
        exact, _ = plain.nearest(inputs.q, inputs.k, k)
        assert (t.dtype, j.dtype) == (problem.sum_dtype, np.int32)
        assert_allclose(t, exact, rtol=1e-5, atol=2e-6)
        distances = ((inputs.q[:, :, None] - inputs.k[:, None].astype(np.float64)) ** 2).sum(-1)
        found = np.where(j >= 0, np.take_along_axis(distances, j.clip(0), -1), np.inf)
        assert_allclose(found, exact, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("mask", test_formula.MASKS)
@pytest.mark.parametrize("k", [1, 5])
def test_masks(rng, mask, k):
    problem, inputs, (x, y, _), visible = test_formula.drawn(rng, mask, m=150, n=177)
    t, j = nearest(problem, inputs, k)
    exact, numbers = plain.nearest(x, y, k, visible)
    assert_allclose(t, exact, atol=1e-12)
    assert_array_equal(j, numbers)


@pytest.mark.parametrize("k", [1, 7])
def test_equal_distances_go_to_the_lower_number(k):
    x, y = np.zeros((150, 2)), np.tile(np.eye(2), (150, 1))
    y[0] = 2
    t, j = nearest(*describe(x, y, y[:, :0]), k)
    assert_array_equal(j, np.broadcast_to(np.arange(1, k + 1), (150, k)))
    assert_array_equal(t, np.ones((150, k)))


def test_points_of_nan_are_not_found(rng):
    x, y = rng.standard_normal((2, 40, 3))
    y[::2] = x[3] = np.nan
    for k in (1, 30):
        t, j = nearest(*describe(x, y, y[:, :0]), k)
        assert (j[3] == -1).all()
        assert np.isinf(t[3]).all()
        assert (j[[0, 5]][..., :20] % 2 == 1).all()
        assert (j[0, 20:] == -1).all()


FAULTS = {
    "test_masks[1-lengths]": {
        "fill(numbers[place], -1)": "fill(numbers[place], 0)",
    },
    "test_masks[1-window]": {
        "is_nearer = zero <= t[i] < best[i]": "is_nearer = t[i] < best[i]",
    },
    "test_masks[5-window]": {
        "if 0 <= t[i] < best[last, i]:": "if t[i] < best[last, i]:",
        "best[last, some]": "best[0, some]",
    },
    "test_equal_distances_go_to_the_lower_number": {
        "zero <= t[i] < best[i]": "zero <= t[i] <= best[i]",
        "best[place - 1, i] > t[i]": "best[place - 1, i] >= t[i]",
    },
}

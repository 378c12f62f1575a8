import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn.call.problem import describe
from numbattn.cpu import points
from numbattn.cpu.points.pairs import LONG
from tests.points import plain, test_formula

from .calls import DTYPES, SIZES, check, drawn

GAUSSIAN = plain.KINDS[0]
EXPONENTIALS = [kind for kind in plain.KINDS if kind.is_exponential]


def logsumexp(*call):
    return points.logsumexp(*call)[0]


@pytest.mark.parametrize("kind", EXPONENTIALS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(rng, kind, dtype):
    """Also of points far apart, whose logarithms are large."""
    for (m, n, d), scale in zip(SIZES, (1, 30, 5, 1, 1, 1)):
        problem, inputs, _ = drawn(rng, m, n, d, 0, dtype, (2,))
        inputs = inputs._replace(q=inputs.q * inputs.q.dtype.type(scale))
        columns = rng.standard_normal((2, n)).astype(problem.sum_dtype)
        columns[:, 1::2] = -np.inf
        check("logsumexp", logsumexp(problem, inputs, kind, columns), problem, inputs, kind, columns)


@pytest.mark.parametrize("mask", test_formula.MASKS)
def test_masks(rng, mask):
    problem, inputs, (x, y, _), visible = test_formula.drawn(rng, mask, m=150, n=177)
    assert_allclose(logsumexp(problem, inputs, GAUSSIAN), plain.logsumexp(GAUSSIAN, x, y, visible), atol=1e-12)


def test_nothing_seen():
    problem, inputs = describe(np.zeros((130, 2)), np.zeros((3, 2)), np.zeros((3, 0)))
    assert_array_equal(logsumexp(problem, inputs, GAUSSIAN, np.full(3, -np.inf)), np.full(130, -np.inf))
    problem, inputs = describe(np.zeros((130, 2)), np.zeros((0, 2)), np.zeros((0, 0)))
    assert_array_equal(logsumexp(problem, inputs, GAUSSIAN), np.full(130, -np.inf))


def test_parts_without_weight():
    """Of points of y that are summed at once none may have any."""
    x, y, columns = np.zeros((2, 1)), np.ones((3 * LONG, 1)), np.full(3 * LONG, -np.inf)
    columns[LONG + 5] = 2
    problem, inputs = describe(x, y, y[:, :0])
    assert_allclose(logsumexp(problem, inputs, GAUSSIAN, columns), [1.5, 1.5])


def test_equal_points_far_off(rng):
    """Their squared distance, a difference of squares, is not below 0."""
    x = 1000 * rng.standard_normal((130, 20)).astype(np.float32)
    problem, inputs = describe(x, x, x[:, :0])
    assert (logsumexp(problem, inputs, GAUSSIAN) <= 0).all()


FAULTS = {
    "test_parts_without_weight": {
        "absorb(O, m, l, O, m_next, l_next)": "pass",
    },
    "test_accuracy[float32-Gaussian()]": {
        "fill(m_next, np.finfo(lse.dtype).min)": "fill(m_next, 0)",
    },
}

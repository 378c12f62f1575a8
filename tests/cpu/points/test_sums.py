import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn.call.problem import describe
from numbattn.cpu.points import sums
from numbattn.cpu.points.pairs import LONG
from tests.points import plain, test_formula

from .calls import DTYPES, SIZES, check, drawn

GAUSSIAN = plain.KINDS[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(rng, dtype):
    for (m, n, d), e in zip(SIZES, (1, 0, 3, 5, 40, 1)):
        problem, inputs, _ = drawn(rng, m, n, d, e, dtype, (2,))
        for kind in (GAUSSIAN, plain.KINDS[5], plain.KINDS[8]):
            check("sums", sums(problem, inputs, kind), problem, inputs, kind)


@pytest.mark.parametrize("mask", test_formula.MASKS)
def test_masks(rng, mask):
    problem, inputs, (x, y, b), visible = test_formula.drawn(rng, mask, m=150, n=177)
    for kind in (GAUSSIAN, plain.KINDS[8]):  # of which the second is not 0 at any t
        assert_allclose(sums(problem, inputs, kind), plain.sums(kind, x, y, b, visible), atol=1e-10)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logarithms(rng, dtype):
    """Also where one is -inf, and where exp of one alone would overflow."""
    problem, inputs, _ = drawn(rng, 130, 70, 3, 2, dtype, (2,))
    for big in (0, 1000):
        rows, columns = (rng.standard_normal((2, size)) + shift for size, shift in ((130, big), (70, -big)))
        columns[:, ::3] = -np.inf
        given = {"rows": rows.astype(dtype), "columns": columns.astype(dtype)}
        check("sums", sums(problem, inputs, GAUSSIAN, **given), problem, inputs, GAUSSIAN, **given)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_too_large_is_infinite(rng, dtype):
    problem, inputs = describe(np.zeros((2, 1), dtype), np.zeros((1, 1), dtype), np.ones((1, 1), dtype))
    assert_array_equal(sums(problem, inputs, GAUSSIAN, np.array([1, 1e4], dtype))[:, 0] > 3, [False, True])
    assert np.isposinf(sums(problem, inputs, GAUSSIAN, np.array([1, 1e4], dtype))[1, 0])


def test_many_terms_lose_no_digits(rng):
    x, y, b = (rng.random((n, d), dtype=np.float32) for n, d in ((16, 2), (400 * LONG, 2), (400 * LONG, 1)))
    found, exact = sums(*describe(x, y, b), GAUSSIAN), plain.sums(GAUSSIAN, x, y, b)
    assert_allclose(found, exact, rtol=1e-7)


def test_infinite_sums_stay_infinite():
    b = np.full((3 * LONG, 1), 1e38, np.float32)
    assert np.isposinf(sums(*describe(np.zeros((2, 1), np.float32), np.zeros_like(b), b), GAUSSIAN)).all()


def test_broadcast_and_reversed_arrays(rng):
    x, y, b = (rng.standard_normal(shape) for shape in ((9, 3), (2, 1, 30, 3), (30, 2)))
    x, y, b = (np.broadcast_to(a, (2, 4, *a.shape[-2:]))[..., ::-1, :] for a in (x, y, b))
    problem, inputs = describe(x, y, b)
    assert_allclose(sums(problem, inputs, GAUSSIAN), plain.sums(GAUSSIAN, x, y, b))


def test_nothing_to_sum():
    for m, n, batch in ((3, 0, (2,)), (0, 3, (2,)), (3, 3, (0,))):
        problem, inputs = describe(np.ones((*batch, m, 3)), np.ones((*batch, n, 3)), np.ones((*batch, n, 2)))
        assert_array_equal(sums(problem, inputs, GAUSSIAN), np.zeros((*batch, m, 2)))


FAULTS = {
    "test_many_terms_lose_no_digits": {
        "clear(part)": "pass",
    },
    "test_broadcast_and_reversed_arrays": {
        "a[:, row : row + 1]": "a[:, :1]",
    },
    "cpu/points/pairs.py": {
        "cpu/points/test_sums.py::test_many_terms_lose_no_digits": {
            "part[row, i] - lost[row, i]": "part[row, i]",
        },
        "cpu/points/test_sums.py::test_logarithms[float32]": {
            "out[i] = given[first + i]": "out[i] = given[i]",
            "load(rows, given.rows, batch, head, m0)": "load(rows, given.columns, batch, head, m0)",
        },
        "cpu/points/test_sums.py::test_masks[blocks]": {
            "n_end = n0 if state == EMPTY else n_end": "pass",
        },
        "cpu/points/test_gradient.py::test_each_kind[20-Gaussian()]": {
            "norms = of_x[i] + of_y[j]": "norms = of_x[i]",
        },
        "points/test_pairs.py::test_points_far_off_take_no_digits": {
            "is_near |= t < bound * norms": "is_near |= t < 0",
            "x, y = (given.apart_x, given.apart_y)": "x, y = (given.x, given.y)",
            "matrix(y, at.batch, at.head, dtype)[n0:n_end]": "matrix(y, at.batch, at.head, dtype)",
        },
    },
}

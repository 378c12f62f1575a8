import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn.call.problem import describe
from numbattn.cpu.points import gradient
from tests.points import plain, test_formula

from .calls import DTYPES, SIZES, check, drawn

GAUSSIAN = plain.KINDS[0]


@pytest.mark.parametrize("kind", [*plain.KINDS, plain.radial()], ids=str)
@pytest.mark.parametrize("d", [3, 20])
def test_each_kind(rng, kind, d):
    problem, inputs, (x, y, b), _ = test_formula.drawn(rng, d=d)
    c = rng.standard_normal((*problem.batch, problem.seqlen_q, 2))
    assert_allclose(gradient(problem, inputs, kind, c), plain.gradient(kind, x, y, b, c), atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(rng, dtype):
    for (m, n, d), e in zip(SIZES, (1, 0, 3, 5, 40, 1)):
        problem, inputs, c = drawn(rng, m, n, d, e, dtype, (2,))
        for kind in (GAUSSIAN, plain.KINDS[5], plain.KINDS[8]):
            check("gradient", gradient(problem, inputs, kind, c), problem, inputs, kind, c)


@pytest.mark.parametrize("mask", test_formula.MASKS)
def test_masks(rng, mask):
    problem, inputs, (x, y, b), visible = test_formula.drawn(rng, mask, m=150, n=177)
    c = rng.standard_normal((*problem.batch, problem.seqlen_q, 2))
    assert_allclose(gradient(problem, inputs, GAUSSIAN, c), plain.gradient(GAUSSIAN, x, y, b, c, visible), atol=1e-11)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logarithms(rng, dtype):
    problem, inputs, c = drawn(rng, 130, 70, 3, 2, dtype, (2,))
    rows, columns = (rng.standard_normal((2, size)).astype(dtype) for size in (130, 70))
    columns[:, ::3] = -np.inf
    given = {"rows": rows, "columns": columns}
    for kind in plain.KINDS[:2]:
        check("gradient", gradient(problem, inputs, kind, c, **given), problem, inputs, kind, c, **given)


@pytest.mark.parametrize("kind", [kind for kind in plain.KINDS if not kind.is_of_product], ids=str)
def test_equal_points_have_no_gradient(kind):
    problem, inputs, c = drawn(np.random.default_rng(0), 20, 20, 2, 1, np.float64)
    inputs = inputs._replace(k=inputs.q[:1], q=np.repeat(inputs.q[:1], 20, axis=0), v=inputs.v[:1])
    problem, inputs = describe(inputs.q, inputs.k, inputs.v)
    assert_array_equal(gradient(problem, inputs, kind, c), np.zeros((20, 2)))


INTERVALS = np.zeros(40, int), np.where(np.arange(40) < 30, 60, 0)


@pytest.mark.parametrize("mask", [na.Lengths(queries=[30], keys=[60]), na.Intervals(*INTERVALS)])
def test_points_that_see_nothing_may_be_nan(rng, mask):
    x, y, b, c = (rng.standard_normal((1, n, d)) for n, d in ((40, 3), (60, 3), (60, 2), (40, 2)))
    exact = plain.gradient(GAUSSIAN, x, y, b, c)
    exact[:, 30:], x[:, 30:] = 0, np.nan
    problem, inputs = describe(x, y, b, mask=mask)
    assert_allclose(gradient(problem, inputs, GAUSSIAN, c), exact)


FAULTS = {
    "test_accuracy[float64]": {
        "clear(totals)": "pass",
        "clear(part)": "pass",
    },
    "test_each_kind[3-Polynomial(degree=3, number=0.5)]": {
        "1 if given.step.is_of_product else 2": "2",
    },
    "test_each_kind[20-Gaussian()]": {
        "add_products(dXT, Y, S, S.dtype.type(-1))": "add_products(dXT, Y, S, S.dtype.type(1))",
        "add_points(part, at.XT, totals[0])": "pass",
    },
    "test_points_that_see_nothing_may_be_nan": {
        "cpu/points/pairs.py": {"if sees_nothing(mask, at, i):": "if False:"},
    },
}

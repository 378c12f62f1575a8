"""Kernels against all pairs at once, in float64."""

import pytest
from numpy.testing import assert_allclose

from numbattn.cpu import points
from tests.points import plain
from tests.points.test_formula import MASKS, drawn


@pytest.mark.parametrize("kind", [*plain.KINDS, plain.radial()], ids=str)
@pytest.mark.parametrize("d", [3, 20])
def test_sums_and_gradients_of_each_kind(rng, kind, d):
    problem, inputs, (x, y, b), _ = drawn(rng, d=d)
    c = rng.standard_normal((*problem.batch, problem.seqlen_q, 2))
    assert_allclose(points.sums(problem, inputs, kind), plain.sums(kind, x, y, b), atol=1e-10)
    assert_allclose(points.gradient(problem, inputs, kind, c), plain.gradient(kind, x, y, b, c), atol=1e-10)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, mask):
    problem, inputs, (x, y, b), visible = drawn(rng, mask)
    kind, c = plain.KINDS[0], rng.standard_normal((*problem.batch, problem.seqlen_q, 2))
    columns, empty = rng.standard_normal((*problem.batch, problem.seqlen_k)), (problem, inputs, kind)
    assert_allclose(points.sums(*empty), plain.sums(kind, x, y, b, visible), atol=1e-12)
    assert_allclose(points.gradient(*empty, c), plain.gradient(kind, x, y, b, c, visible), atol=1e-12)
    assert_allclose(points.logsumexp(*empty, columns), plain.logsumexp(kind, x, y, visible, columns), atol=1e-12)
    for k in (1, 5):
        for got, exact in zip(points.nearest(problem, inputs, k), plain.nearest(x, y, k, visible)):
            assert_allclose(got, exact, atol=1e-12)

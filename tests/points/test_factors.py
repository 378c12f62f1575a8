"""Products of kernels whose factors have squared distances of their own."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn import points
from numbattn.points import factors, formula

from ..accuracy import to_numpy
from . import plain

PRODUCTS = [
    points.Matern(0.5, 2.0).on([0]) * points.Matern(2.5, 4.0).on(slice(1, None)),
    points.Cosine(2.0) * points.Cauchy(5.0) * points.Gaussian(4.0),
]
wide = pytest.mark.parametrize("d", [3, 12])


@wide
@pytest.mark.parametrize("kernel", PRODUCTS, ids=repr)
@pytest.mark.parametrize("mask", [None, na.Causal() | na.First(1)], ids=["", "mask"])
def test_tangents_are_those_of_finite_differences(rng, kernel, mask, d):
    x, y, b = given = rng.standard_normal((2, 6, d)), rng.standard_normal((7, d)), rng.standard_normal((1, 7, 2))
    tx, ty, tb = moving = [rng.standard_normal(z.shape) for z in given]
    s, backprop = points.product_vjp(x, y, b, kernel, mask=mask)
    ds, h = rng.standard_normal(s.shape), 1e-5
    ends = [points.product_vjp(*[z + step * t for z, t in zip(given, moving)], kernel, mask=mask) for step in (h, -h)]
    _, ts = points.product_jvp(x, y, b, kernel, tx, ty, tb, mask=mask)
    assert_allclose(ts, (ends[0][0] - ends[1][0]) / (2 * h), rtol=1e-6, atol=1e-7)
    ahead, behind = (backprop(ds) for _, backprop in ends)
    for found, one, other in zip(backprop.hvp(ds, tx, ty, tb), ahead, behind):
        assert_allclose(found, (one - other) / (2 * h), rtol=1e-6, atol=1e-6)


@wide
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("origin", [0, 1000])
def test_rounding_errors(xp, rng, dtype, d, origin):
    """Are at most those of the plain formula, twice, also of points that coincide or lie beside others."""
    x = (rng.standard_normal((90, d)) + origin * (dtype is np.float32)).astype(dtype)
    y, b = np.concatenate([x[:30], x[30:60] + dtype(0.01), x[60:]]), rng.standard_normal((90, 2)).astype(dtype)

    def formula(x, y, b, real):
        s, r = (real(factor) * np.sqrt((plain.apart(x, y)[..., some] ** 2).sum(-1).astype(real))
                for factor, some in ((5**0.5 / 2, slice(1)), (0.25, slice(1, None))))  # fmt: skip
        return (np.exp(-r) * plain.matern(s, real(1))).astype(dtype if real is np.float32 else real) @ b.astype(real)

    exact, rough = (formula(x, y, b, real) for real in (np.float64, np.float32))
    kernel = points.Matern(2.5, 2.0).on([0]) * points.Laplacian(4.0).on(slice(1, None))
    s = points.product(*map(xp.asarray, (x, y, b)), kernel)
    assert s.dtype == dtype
    for size in (np.linalg.norm, lambda error: np.abs(error).max()):
        assert size(to_numpy(s).astype(np.float64) - exact) <= 2 * size(rough.astype(dtype).astype(np.float64) - exact)


def test_blocks(rng, monkeypatch):
    x, y, b = rng.standard_normal((2, 30, 3)), rng.standard_normal((70, 3)), rng.standard_normal((70, 2))
    found = []
    for pairs, columns in ((factors.PAIRS, formula.COLUMNS), (2**8 * factors.SHARE, 32)):
        monkeypatch.setattr(factors, "PAIRS", pairs)
        monkeypatch.setattr(formula, "COLUMNS", columns)
        s, backprop = points.product_vjp(x, y, b, PRODUCTS[0])
        found.append([s, *backprop(s), *backprop.hvp(s, x, None, b)])
    for one, other in zip(*found):
        assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("m", "n", "d"), [(0, 4, 3), (4, 0, 3), (1, 1, 3)])
def test_few_points(m, n, d):
    x, y, b = np.ones((m, d)), np.ones((n, d)), np.ones((n, 1))
    s, backprop = points.product_vjp(x, y, b, PRODUCTS[0])
    assert_array_equal(s, np.full((m, 1), n and 1.0))
    for gradient, z in zip(backprop(s), (x, y, b)):
        assert gradient.shape == z.shape
        assert np.isfinite(gradient).all()


def test_what_nobody_sees_may_be_nan(rng):
    x, y, b = rng.standard_normal((2, 6, 3)), rng.standard_normal((7, 3)), rng.standard_normal((7, 2))
    x[:, 4:], y[5:], b[5:] = np.nan, np.nan, np.nan
    s, backprop = points.product_vjp(x, y, b, PRODUCTS[1], mask=na.Lengths(keys=5, queries=4))
    wanted, of_wanted = points.product_vjp(x[:, :4], y[:5], b[:5], PRODUCTS[1])
    assert_allclose(s[:, :4], wanted)
    grads, of_seen = backprop(np.ones(s.shape)), of_wanted(np.ones(wanted.shape))
    assert_allclose(grads.dy[:5], of_seen.dy)
    assert all(np.isfinite(z).all() for z in (*grads, *grads.kernel))


def test_processes(rng):
    """Their solutions and determinants, with gradients of all lengths."""
    x, b = rng.random((12, 3)), rng.random((12, 1))
    kernel, ridge = PRODUCTS[0], 0.1

    def solved(kernel):
        return (b * points.solve(x, b, kernel, ridge=ridge, tol=1e-12).x).sum()

    def determined(kernel):
        return points.log_determinant(x, kernel, ridge=ridge, rank=12)

    K = points.product(x, x, np.eye(12), kernel) + ridge * np.eye(12)
    r, backprop = points.solve_vjp(x, b, kernel, ridge=ridge, tol=1e-12)
    assert_allclose(r.x, np.linalg.solve(K, b), rtol=1e-8)
    plain.assert_gradient(rng, backprop(b).kernel, solved, kernel)
    value, backprop = points.log_determinant_vjp(x, kernel, ridge=ridge, rank=12)
    assert_allclose(value, np.linalg.slogdet(K)[1], rtol=1e-8)
    plain.assert_gradient(rng, backprop().kernel, determined, kernel)


FAULTS = {
    "test_tangents_are_those_of_finite_differences": {
        "by.count(at)": "(at in by)",
        "found += displaced(one.moved, one.kind, weights)": "pass",
        "return x @ ty + tx @ y": "return x @ ty",
        "2 * (rowsum(x, tx)[..., None] +": "2 * (",
        "block.only_visible(_along(factors, k) * product)": "_along(factors, k) * product",
    },
    "test_rounding_errors": {"t < NEAR * (": "t < 0 * ("},
    "test_blocks": {"o[..., block.i, :] +=": "o[..., block.i, :] ="},
    "points/test_product.py::test_gradients_are_those_of_finite_differences": {
        "block.only_visible(_derivative(factors, k) * product)": "_derivative(factors, k) * product",
    },
}

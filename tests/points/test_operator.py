"""Kernel matrices as operators."""

from importlib import import_module

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.sparse.linalg import LinearOperator, cg, eigsh, minres

import numbattn as na
from numbattn import points

from ..accuracy import to_numpy
from . import plain


@pytest.mark.parametrize("kernel", list(plain.KERNELS), ids=repr)
def test_products(rng, kernel):
    x, y = rng.standard_normal((20, 3)), rng.standard_normal((30, 3))
    A, K = points.operator(x, y, kernel), plain.KERNELS[kernel](x, y)
    assert isinstance(A, LinearOperator)
    assert (A.shape, A.dtype) == ((20, 30), np.float64)
    for v, u in ((rng.random(30), rng.random(20)), (rng.random((30, 4)), rng.random((20, 2)))):
        assert_allclose(A @ v, K @ v, atol=1e-12)
        assert_allclose(A.T @ u, K.T @ u, atol=1e-12)
        assert_allclose(A.H @ u, K.T @ u, atol=1e-12)


def test_masks_and_ridges(rng):
    x, v = rng.standard_normal((20, 3)), rng.random(20)
    K, mask = np.exp(-plain.squares(x, x, 1) / 2), na.Causal()
    A = points.operator(x, x, points.Gaussian(), ridge=0.5, mask=mask)
    wanted = np.where(mask.dense(20, 20), K, 0) + 0.5 * np.eye(20)
    for vector in (v, v + 1j * rng.random(20)):
        assert_allclose(A @ vector, wanted @ vector)
        assert_allclose(A.T @ vector, wanted.T @ vector)


def test_solvers(xp, rng):
    linalg = import_module("scipy.sparse.linalg" if xp is np else "cupyx.scipy.sparse.linalg")
    x, v = rng.random((100, 3)), rng.random(100)
    A = points.operator(*[xp.asarray(x)] * 2, points.Laplacian(0.3), ridge=0.1)
    assert isinstance(A, linalg.LinearOperator)
    K = np.exp(-plain.distances(x, x, 0.3)) + 0.1 * np.eye(100)
    found, info = linalg.cg(A, xp.asarray(v))
    assert info == 0
    assert_allclose(to_numpy(found), np.linalg.solve(K, v), rtol=1e-3)
    assert_allclose(np.sort(to_numpy(linalg.eigsh(A, k=3)[0])), np.linalg.eigvalsh(K)[-3:], rtol=1e-8)


def test_solvers_of_single_precision(rng):
    x, v = rng.random((100, 3)).astype(np.float32), rng.random(100)
    A = points.operator(x, x, points.Laplacian(0.3), ridge=0.1)
    assert A.dtype == (A @ v).dtype == np.float32
    K = np.exp(-plain.distances(x, x, 0.3)) + 0.1 * np.eye(100)
    for solve in cg, minres:
        assert_allclose(solve(A, v, rtol=1e-5)[0], np.linalg.solve(K, v), atol=5e-3)
    assert_allclose(np.sort(eigsh(A, k=3)[0]), np.linalg.eigvalsh(K)[-3:], rtol=1e-5)


def test_half_precision_is_computed_in_single(rng):
    x = rng.random((50, 3)).astype(np.float16)
    A = points.operator(x, x, points.Gaussian())
    assert A.dtype == np.float32
    assert_allclose(A @ np.ones(50), np.exp(-plain.squares(x, x, 1) / 2).sum(1), rtol=1e-6)


@pytest.mark.parametrize(("m", "n", "e"), [(0, 4, 2), (4, 0, 2), (0, 0, 2), (3, 4, 0)])
def test_nothing(m, n, e):
    A = points.operator(np.ones((m, 3)), np.ones((n, 3)), points.Gaussian())
    assert_allclose(A @ np.ones((n, e)), np.full((m, e), n))
    assert_allclose(A.T @ np.ones(m), np.full(n, m))


X = np.zeros((4, 3))


@pytest.mark.parametrize(("given", "ridge", "kind", "message"), [
    ((X, X + 1, points.Gaussian()), 0.1, ValueError, "ridge: got 0.1 with a y that is not x"),
    ((X, X, points.Gaussian()), -0.1, ValueError, "ridge: got -0.1, allowed finite and >= 0"),
    ((X[None], X, points.Gaussian()), 0, ValueError, r"x: got the shape \(1, 4, 3\), expected \(points, features\)"),
    ((X, X, "Gaussian"), 0, TypeError, "kernel: got 'Gaussian', expected one of numbattn.points"),
])  # fmt: skip
def test_errors(given, ridge, kind, message):
    with pytest.raises(kind, match=message):
        points.operator(*given, ridge=ridge)


FAULTS = {
    "test_errors": {"if ridge and y is not x:": "if False:"},
    "test_masks_and_ridges": {
        "rmatvec=transposed_times": "rmatvec=times",
        "(found + ridge * columns if ridge else found)": "found",
    },
}

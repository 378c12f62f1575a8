"""Kernels, their gradients by length, densities and neighbours, by scikit-learn's functions of all pairs."""

from importlib.metadata import version

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn import points

from .suites import Counts

sklearn = pytest.importorskip("sklearn")


def counted(count, cases):
    count("scikit-learn", f"scikit-learn {version('scikit-learn')}", Counts(cases, 0))


def test_kernels(rng, count):
    """Of Gaussian processes, whose gradients are by the logarithms of lengths, and of sklearn.metrics."""
    from sklearn.gaussian_process import kernels
    from sklearn.metrics import pairwise

    x, y, b, c = (rng.standard_normal(shape) for shape in ((20, 3), (30, 3), (30, 2), (20, 2)))
    lengths = np.array([0.7, 1.3, 0.4])

    def laplacian(x, y):
        return pairwise.pairwise_kernels(x, y, lambda u, v: np.exp(-np.linalg.norm(u - v) / 0.7))

    pairs = {
        points.Gaussian(0.8): kernels.RBF(0.8), points.Gaussian(lengths): kernels.RBF(lengths),
        points.Matern(0.5, 0.9): kernels.Matern(0.9, nu=0.5),
        points.Matern(1.5, lengths): kernels.Matern(lengths, nu=1.5),
        points.Matern(2.5, 0.9): kernels.Matern(0.9, nu=2.5),
        points.RationalQuadratic(0.6, 1.1): kernels.RationalQuadratic(1.1, 0.6),
        2 * points.Gaussian(0.5) + 3 * points.Linear(): (
            kernels.ConstantKernel(2, "fixed") * kernels.RBF(0.5)
            + kernels.ConstantKernel(3, "fixed") * kernels.DotProduct(0, "fixed")),
        points.Polynomial(3, 0.5): lambda x, y: pairwise.polynomial_kernel(x, y, 3, 1, 0.5),
        points.Cosine(): pairwise.cosine_similarity, points.Laplacian(0.7): laplacian,
    }  # fmt: skip
    for kernel, theirs in pairs.items():
        assert_allclose(points.product(x, y, b, kernel), theirs(x, y) @ b, atol=1e-12)
        if isinstance(theirs, kernels.RBF):  # Matern, too
            _, by_logarithm = theirs(x, eval_gradient=True)
            found = points.product_vjp(x, x, c, kernel)[1](c).kernel * kernel.length
            assert_allclose(found, np.einsum("ie,je,ij...->...", c, c, by_logarithm).reshape(found.shape), atol=1e-10)
    counted(count, len(pairs))


@pytest.mark.parametrize("kernel", ["gaussian", "exponential"])
def test_densities(rng, kernel, count):
    from sklearn.neighbors import KernelDensity

    x, y = rng.standard_normal((20, 1)), rng.standard_normal((30, 1))
    weights, ours = rng.random(30), {"gaussian": points.Gaussian(0.3), "exponential": points.Laplacian(0.3)}[kernel]
    exact = KernelDensity(bandwidth=0.3, kernel=kernel).fit(y, sample_weight=weights).score_samples(x)
    total = 0.3 * {"gaussian": np.sqrt(2 * np.pi), "exponential": 2}[kernel]
    assert_allclose(points.logsumexp(x, y, np.log(weights / weights.sum()), ours) - np.log(total), exact, rtol=1e-6)
    counted(count, 1)


@pytest.mark.parametrize("d", [2, 12])
def test_neighbours(rng, d, count):
    from sklearn.neighbors import NearestNeighbors

    x, y = rng.standard_normal((40, d)), rng.standard_normal((50, d))
    exact, indices = NearestNeighbors(n_neighbors=4).fit(y).kneighbors(x)
    distances, found = points.nearest(x, y, 4)
    assert_allclose(distances, exact, rtol=1e-12)
    assert_array_equal(found, indices)
    counted(count, 1)

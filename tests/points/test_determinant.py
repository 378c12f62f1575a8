"""Logarithms of determinants of kernel matrices."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
from numpy.testing import assert_allclose

from numbattn import points
from numbattn.points import determinant

from ..accuracy import to_numpy
from . import plain
from .test_solve import KERNEL, RIDGE, dense

PRECONDITIONERS = [("nystrom", 4), ("nystrom", 16), ("diagonal", None), (None, None)]


@pytest.mark.parametrize("preconditioner", ["nystrom", "diagonal", None])
def test_estimates(xp, rng, preconditioner):
    """Those of points.determinant's own probes, by the spectrum of the matrix."""
    x, options = rng.random((2, 100, 3)), {"preconditioner": preconditioner, "probes": 5, "seed": 7}
    found = points.log_determinant(xp.asarray(x), KERNEL, ridge=RIDGE, **options, tol=1e-12)
    assert isinstance(found, xp.ndarray)
    call = determinant._Call.of(x, KERNEL, RIDGE, 5, 7, preconditioner, None, 0.1, 1)
    root, wanted = call.M.times(np.broadcast_to(np.eye(100), (2, 100, 100)), -1 / 2), []
    for A, R, Z in zip(dense(x), root, call.Z):
        values, vectors = np.linalg.eigh(R @ A @ R)
        exact = -2 * np.linalg.slogdet(R)[1] + ((vectors.T @ Z) ** 2 * np.log(values)[:, None]).sum() / 5
        wanted.append(exact)
    assert_allclose(to_numpy(found), wanted, rtol=1e-7)
    assert_allclose(to_numpy(found), np.linalg.slogdet(dense(x))[1], rtol=0.1)


def test_seeds_and_probes(rng):
    x = rng.random((60, 2))
    one, same, other = (float(points.log_determinant(x, KERNEL, ridge=RIDGE, rank=5, probes=2, seed=seed))
                        for seed in (0, 0, 1))  # fmt: skip
    assert one == same != other


@pytest.mark.parametrize("preconditioner", ["nystrom", "diagonal", None])
def test_of_a_batch_of_which_one_is_indefinite(rng, preconditioner):
    x, options = rng.random((40, 2)), {"preconditioner": preconditioner, "tol": 1e-9}
    kernel = points.Gaussian(0.3)
    with pytest.warns(UserWarning, match="NaN where K . ridge is not positive definite") as warned:
        found = points.log_determinant(x, np.array([1.0, -1.0]) * kernel, ridge=RIDGE, **options)
    assert warned[0].filename == __file__
    assert_allclose(found, [points.log_determinant(x, kernel, ridge=RIDGE, **options), np.nan], rtol=1e-6)


def test_of_a_matrix_that_rounding_makes_indefinite():
    x = np.linspace(0, 1, 200, dtype=np.float32)[:, None]
    assert np.isfinite(points.log_determinant(x, points.Gaussian(1.0), ridge=1e-9, preconditioner=None, tol=1.0))


def with_exact_trace(call):
    """With the columns of a Hadamard matrix as probes, the mean of <z, A z> is the trace."""
    return replace(call, Z=np.broadcast_to(scipy.linalg.hadamard(16).astype(float), (*call.system.x.shape[:-1], 16)))


@pytest.mark.parametrize("kernel", [
    points.Gaussian(0.4), points.Laplacian([0.3, 0.6]), points.Linear(), points.Polynomial(3, 0.5, 0.9),
    0.7 * points.Gaussian(0.4) + 2 * points.Linear(), points.Periodic([0.5, 0.9]).on([1, 0]),
    0.7 * points.Gaussian(0.4) + 2 * points.Gaussian(0.7).on([0]) * points.Periodic(0.9),
    points.Matern(2.5, [[0.4], [0.6]]) * 0.7 + points.Polynomial(2, 0.5, [[0.9, 0.5], [1.1, 0.7]]),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize(("preconditioner", "rank"), PRECONDITIONERS)
def test_gradients_are_exact_up_to_probes(rng, kernel, preconditioner, rank):
    x, ds, h = rng.random((2, 16, 2)), np.array([0.3, -2.0]), 1e-5

    def call(x, kernel=kernel, ridge=RIDGE):
        return with_exact_trace(determinant._Call.of(x, kernel, ridge, 1, 0, preconditioner, rank, 1e-13, 100))

    def exact(x, kernel=kernel, ridge=RIDGE):
        K = points.product(x, x, np.eye(16), kernel)
        return (ds * np.linalg.slogdet(K + ridge * np.eye(16))[1]).sum()

    def slope(value):
        return (value(h) - value(-h)) / (2 * h)

    assert_allclose((ds * call(x).value()).sum(), exact(x), rtol=1e-9)
    grads, direction = call(x).backprop(ds), rng.standard_normal(x.shape)
    assert grads._fields == ("dx",)
    assert_allclose((grads.dx * direction).sum(), plain.slope(exact, [x], 0, direction), rtol=1e-6)
    assert_allclose(grads.ridge, slope(lambda h: exact(x, ridge=RIDGE + h)), rtol=1e-6)
    plain.assert_gradient(rng, grads.kernel, lambda kernel: exact(x, kernel), kernel)
    for one, of_factor in zip(kernel._terms, grads.factor or ()):
        assert_allclose(of_factor, slope(lambda h: exact(x, kernel + h * one[1])), rtol=1e-6)  # noqa: B023


def test_lengths_of_a_batch(rng):
    """Of points that all elements share."""
    x, ds, lengths = rng.random((16, 2)), np.array([0.3, -2.0]), [[0.4], [0.6]]
    found, backprop = points.log_determinant_vjp(x, points.Gaussian(lengths), ridge=RIDGE)
    alone = [points.log_determinant_vjp(x, points.Gaussian(length), ridge=RIDGE) for (length,) in lengths]
    assert_allclose(found, [value for value, _ in alone], rtol=1e-9)
    grads, of_each = backprop(ds), [backprop(float(own)) for (_, backprop), own in zip(alone, ds)]
    assert_allclose(grads.dx, sum(own.dx for own in of_each), rtol=1e-6)
    assert_allclose(grads.kernel, [[own.kernel] for own in of_each], rtol=1e-6)


def test_single_precision(rng):
    x = rng.random((50, 2))
    wanted = points.log_determinant(x, KERNEL, ridge=RIDGE)
    found, backprop = points.log_determinant_vjp(x.astype(np.float32), KERNEL, ridge=RIDGE, tol=1e-4)
    assert found.dtype == np.float32
    assert_allclose(found, wanted, rtol=1e-4)
    assert backprop().dx.dtype == np.float32


def test_what_has_not_converged_says_so(rng):
    with pytest.warns(UserWarning, match="log_determinant: not converged to 1e-05 per point within 2 iterations"):
        points.log_determinant(rng.random((50, 2)), KERNEL, ridge=1e-6, preconditioner=None, max_iterations=2)


@pytest.mark.parametrize("m", [0, 1])
def test_few_points(m):
    value, backprop = points.log_determinant_vjp(np.ones((m, 2)), KERNEL, ridge=RIDGE)
    assert_allclose(value, m * np.log(3 + RIDGE))
    assert_allclose(backprop().ridge, m / (3 + RIDGE))


@pytest.mark.parametrize("preconditioner", ["nystrom", "diagonal", None])
def test_points_without_features(preconditioner):
    about = {"kernel": points.Gaussian(), "ridge": RIDGE, "preconditioner": preconditioner}
    value, backprop = points.log_determinant_vjp(np.zeros((5, 0)), **about)
    assert_allclose(value, points.log_determinant(np.zeros((5, 1)), **about))
    assert backprop().dx.shape == (5, 0)


@pytest.mark.parametrize(("options", "kind", "message"), [
    ({"probes": 0}, ValueError, "probes: got 0, allowed 1 or more"),
    ({"seed": -1}, ValueError, "seed: got -1, allowed 0 or more"),
    ({"seed": 0.5}, TypeError, "seed: got 0.5, expected an integer"),
    ({"ridge": "0"}, TypeError, "ridge: got '0', expected a number"),
])  # fmt: skip
def test_errors(options, kind, message):
    with pytest.raises(kind, match=message):
        points.log_determinant(np.ones((3, 2)), KERNEL, **{"ridge": 1.0, **options})
    with pytest.raises(ValueError, match=r"ds: got the shape \(2,\), expected \(\), the shape of log_determinant"):
        points.log_determinant_vjp(np.ones((3, 2)), KERNEL, ridge=1.0)[1](np.ones(2))


FAULTS = {
    "test_estimates": {
        "M.times(q, -1 / 2)), -1 / 2) - b * before": "M.times(q, -1 / 2)), -1 / 2)",
        "points/systems.py": {"[..., self.U.shape[-1] :, 0]": "[..., :, 0]"},
    },
    "test_of_a_batch_of_which_one_is_indefinite": {
        "base/checks.py": {'in ("numbattn", "numpy")': '== "numbattn"'},
        "not (abs(found - last) > tol * m).any()": "(abs(found - last) <= tol * m).all()",
        "np.where(values < -rounding, np.nan, np.maximum(values, about.tiny))": "np.maximum(values, about.tiny)",
    },
    "test_of_a_matrix_that_rounding_makes_indefinite": {"about.eps**0.5": "0"},
    "test_lengths_of_a_batch": {"sum_broadcast(dx, self.x.shape)": "dx"},
    "test_gradients_are_exact_up_to_probes": {
        "rest = (W - M.times(Z, -1)) / Z.shape[-1]": "rest = W / Z.shape[-1]",
        "dx + np.moveaxis((own.dx + own.dy)[..., 0, :], 0, -2)": "dx",
        "+ inverse.sum(dtype=np.float64)": "",
        "added(kernel, own.kernel)": "kernel",
        "points/systems.py": {"np.moveaxis(self.x[..., None, :], -3, 0)": "self.x[..., None, :]"},
        "points/gradients.py": {"return one if one is None else (one + other)[...]": "return one"},
    },
}

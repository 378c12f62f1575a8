"""Linear systems with a kernel matrix."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn import points
from numbattn.base import backends

from ..accuracy import to_numpy
from . import plain

KERNEL, RIDGE = 2 * points.Matern(1.5, 0.9) + points.Gaussian(0.3), 0.05


def dense(x, kernel=KERNEL, ridge=RIDGE):
    """K + ridge, by the formulas of kernels."""
    found = sum(factor * plain_kernel(one)(x, x) for factor, one in kernel._terms)
    return found + ridge * np.eye(x.shape[-2])


def plain_kernel(kernel):
    if isinstance(kernel, points.Linear):
        return lambda x, y: x @ plain.T(y)
    if isinstance(kernel, points.Gaussian):
        return lambda x, y: np.exp(-plain.squares(x, y, kernel.length) / 2)
    return lambda x, y: plain.matern(3**0.5 * plain.distances(x, y, kernel.length), 0)


@pytest.fixture
def passes(monkeypatch):
    """The names of passes over pairs that were run, of 10 or more points."""
    found, run = [], backends.run_points

    def counted(problem, name, *args, **options):
        if min(problem.seqlen_q, problem.seqlen_k) >= 10:
            found.append(name)
        return run(problem, name, *args, **options)

    monkeypatch.setattr("numbattn.points.pairs.run_points", counted)
    return found


@pytest.mark.parametrize("preconditioner", ["nystrom", "diagonal", None])
def test_solutions(xp, rng, preconditioner):
    x, b = rng.standard_normal((2, 1, 40, 3)), rng.standard_normal((3, 40, 2))
    r = points.solve(*map(xp.asarray, (x, b)), KERNEL, ridge=RIDGE, preconditioner=preconditioner, rank=None, tol=1e-10)
    assert all(isinstance(found, xp.ndarray) for found in (r.x, r.residual))
    assert (r.converged, r.x.shape, r.residual.shape) == (True, (2, 3, 40, 2), (2, 3, 2))
    assert_allclose(to_numpy(r.x), np.linalg.solve(dense(x), b), rtol=1e-7, atol=1e-7)
    assert to_numpy(r.residual).max() <= 1e-10


@pytest.mark.parametrize("preconditioner", ["nystrom", "diagonal", None])
def test_points_of_unequal_diagonals_and_some_twice(rng, preconditioner):
    x = 10 ** rng.uniform(-2, 1, (60, 1)) * rng.standard_normal((60, 3))
    x[30:] = x[:30]
    b, kernel = rng.standard_normal((60, 2)), 0.1 * points.Linear() + points.Gaussian(0.5)
    r = points.solve(x, b, kernel, ridge=1e-3, preconditioner=preconditioner, tol=1e-9)
    assert r.converged
    assert_allclose(r.x, np.linalg.solve(dense(x, kernel, 1e-3), b), rtol=1e-5, atol=1e-5)


def test_a_better_preconditioner_takes_fewer_iterations(rng):
    x, b = rng.random((300, 3)), rng.standard_normal((300, 1))
    found = [points.solve(x, b, points.Gaussian(0.5), ridge=1e-3, preconditioner=name, rank=rank).iterations
             for name, rank in (("nystrom", 300), ("nystrom", 100), ("nystrom", 20), (None, None))]  # fmt: skip
    assert found[0] <= 2
    assert found[0] < found[1] < found[2] < found[3]


def test_columns_share_products_and_what_they_find_out(rng, passes):
    x, b = rng.random((200, 3)), rng.standard_normal((200, 5))
    alone = [points.solve(x, b[:, [at]], points.Gaussian(0.3), ridge=1e-2, preconditioner=None).iterations
             for at in range(5)]  # fmt: skip
    passes.clear()
    r = points.solve(x, b, points.Gaussian(0.3), ridge=1e-2, preconditioner=None)
    assert r.iterations < min(alone)
    assert passes == ["sums"] * (r.iterations + 1)


def test_columns_that_depend_on_others(rng):
    x, b = rng.random((50, 3)), rng.standard_normal((50, 2))
    b = np.concatenate([b, b @ rng.random((2, 2)), 0 * b, 1e-12 * b + b, np.zeros((50, 100))], axis=-1)
    r = points.solve(x, b, KERNEL, ridge=RIDGE, tol=1e-10)
    assert r.converged
    assert_allclose(r.x, np.linalg.solve(dense(x), b), atol=1e-7)
    assert_array_equal(r.residual[4:6], 0)


def test_a_solution_to_start_from(rng):
    x, b = rng.random((50, 3)), rng.standard_normal((50, 2))
    r = points.solve(x, b, KERNEL, ridge=RIDGE, tol=1e-8)
    again = points.solve(x, b, KERNEL, ridge=RIDGE, tol=1e-7, x0=r.x)
    assert again.iterations == 0
    assert_array_equal(again.x, r.x)


@pytest.mark.parametrize("preconditioner", ["nystrom", "diagonal", None])
def test_lengths_of_a_batch(xp, rng, preconditioner):
    """With points and right sides that all elements share."""
    x, b, ds = rng.standard_normal((40, 3)), rng.standard_normal((40, 2)), rng.standard_normal((2, 40, 2))
    lengths, options = np.array([[0.9], [0.3]]), {"ridge": RIDGE, "preconditioner": preconditioner, "tol": 1e-11}

    def kernel(lengths):
        return points.Gaussian(lengths) + 0.5 * points.Linear()

    r, backprop = points.solve_vjp(*map(xp.asarray, (x, b)), kernel(lengths), **options)
    alone = [points.solve_vjp(x, b, kernel(float(length)), **options) for length in lengths[:, 0]]
    assert_allclose(to_numpy(r.x), [one.x for one, _ in alone], atol=1e-7)
    grads, of_each = backprop(xp.asarray(ds)), [backprop(own) for (_, backprop), own in zip(alone, ds)]
    for name in ("dx", "db", "ridge"):
        assert_allclose(to_numpy(getattr(grads, name)), sum(getattr(own, name) for own in of_each), atol=1e-6)
    assert_allclose(to_numpy(grads.kernel[0]), [[own.kernel[0]] for own in of_each], rtol=1e-6)


@pytest.mark.parametrize("preconditioner", ["nystrom", None])
def test_gradients_are_those_of_finite_differences(rng, preconditioner):
    x, b, ds = rng.random((2, 12, 3)), rng.standard_normal((12, 2)), rng.standard_normal((2, 12, 2))
    numbers = [2.0, 0.7, 0.3, 0.1]  # two factors, a length and a ridge

    def call(x, b, numbers, vjp=points.solve_vjp):
        first, second, length, ridge = map(float, numbers)
        kernel = first * points.Gaussian(length) + second * points.Linear()
        return vjp(x, b, kernel, ridge=ridge, tol=1e-13, preconditioner=preconditioner)

    def loss(*given):
        return (ds * call(*given, points.solve).x).sum()

    r, backprop = call(x, b, numbers)
    grads = backprop(ds)
    assert grads._fields == ("dx", "db")
    found = *grads, np.array([*grads.factor, grads.kernel[0], grads.ridge])
    assert_allclose(grads.kernel[1], grads.factor[1] * numbers[1])
    given = x, b, np.array(numbers)
    for at, (gradient, array) in enumerate(zip(found, given)):
        assert gradient.shape == array.shape
        direction = rng.standard_normal(array.shape)
        exact = plain.slope(loss, given, at, direction)
        assert_allclose((gradient * direction).sum(), exact, rtol=1e-6)


def test_the_gradient_of_b_x_takes_no_more_iterations(rng, passes):
    x, b = rng.random((100, 3)), rng.standard_normal((100, 2))
    r, backprop = points.solve_vjp(x, b, points.Gaussian(0.3), ridge=1e-2)
    passes.clear()
    grads = backprop(b)
    assert_allclose(grads.db, r.x, rtol=1e-9)
    assert passes == ["sums", "sums", "gradient", "gradient"]  # the residual, and gradients


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_single_precision(rng, dtype):
    """Better than LAPACK's, as residuals are computed in float64; half precision is computed in single."""
    kernel = 1 * points.Gaussian(0.5)
    x, b = rng.random((100, 3)).astype(dtype), rng.standard_normal((100, 2)).astype(dtype)
    r, backprop = points.solve_vjp(x, b, kernel, ridge=RIDGE, tol=1e-6)
    assert (r.x.dtype, r.residual.dtype, r.converged) == (dtype, np.float32, True)
    assert {gradient.dtype for gradient in backprop(b)} == {np.dtype(dtype)}
    A, wide = dense(x.astype(float), kernel), b.astype(float)
    exact = np.linalg.solve(A, wide)
    lapack = np.linalg.solve(A.astype(np.float32), wide.astype(np.float32)).astype(dtype)
    assert np.linalg.norm(r.x - exact) <= (0.2 if dtype == np.float32 else 1.1) * np.linalg.norm(lapack - exact)


@pytest.mark.parametrize(("dtype", "sizes"), [(np.float32, (1e-25, 1e19, 1e30)), (np.float64, (1e-300, 1e-165, 1e200))])
def test_right_sides_of_any_size(rng, dtype, sizes):
    """Squares of which are 0 or infinite; and none at all, whatever the solution starts from."""
    x, b = rng.random((20, 2)), rng.random((20, 1))
    want = np.linalg.solve(dense(x), b)
    for size in sizes:
        r, backprop = points.solve_vjp(x.astype(dtype), (size * b).astype(dtype), KERNEL, ridge=RIDGE)
        assert_allclose(r.x / size, want, atol=1e-4 * abs(want).max())
        assert_allclose(backprop((b / 1e9 / size).astype(dtype)).db * size * 1e9, want, atol=1e-4 * abs(want).max())
    assert_array_equal(points.solve(x, 0 * b, KERNEL, ridge=RIDGE, x0=b).x, 0)


def test_what_has_not_converged_says_so(rng):
    x, b = rng.random((100, 3)), rng.standard_normal((100, 2))
    with pytest.warns(UserWarning, match="solve: not converged to 1e-05 within 3 iterations, but to .*: al") as found:
        r = points.solve(x, b, points.Gaussian(0.3), ridge=1e-3, preconditioner=None, max_iterations=3)
    assert found[0].filename == __file__
    assert (r.converged, r.iterations) == (False, 3)
    left = dense(x, 1.0 * points.Gaussian(0.3), 1e-3) @ r.x - b
    assert_allclose(r.residual, np.linalg.norm(left, axis=0) / np.linalg.norm(b, axis=0), rtol=1e-9)
    with pytest.warns(UserWarning, match="or float64 where the matrix is ill-conditioned"):
        points.solve(np.float32(x), np.float32(b), points.Gaussian(1.0), ridge=1e-6, tol=1e-6)
    nothing = points.solve(0 * x, b, points.Linear(), ridge=0.5)
    assert_allclose(nothing.x, 2 * b)
    with pytest.warns(UserWarning, match="not converged to 1e-05 within 1000 iterations, but to 1: allow"):
        assert not points.solve(0 * x, b, points.Linear(), ridge=0.0).converged
    with pytest.warns(UserWarning, match="to nan"):
        r = points.solve(x, b * np.nan, KERNEL, ridge=1.0)
    assert (r.converged, r.iterations) == (False, 0)


@pytest.mark.parametrize(("m", "e"), [(0, 2), (3, 0), (1, 1), (2, 5)])
def test_few_points(m, e):
    x, b = np.arange(3.0 * m).reshape(m, 3), np.ones((m, e))
    r, backprop = points.solve_vjp(x, b, KERNEL, ridge=RIDGE)
    assert_allclose(r.x, np.linalg.solve(dense(x), b), rtol=1e-5)
    assert backprop(b).dx.shape == (m, 3)


@pytest.mark.parametrize("preconditioner", ["nystrom", "diagonal", None])
def test_points_without_features(preconditioner):
    x, b, about = np.zeros((5, 0)), np.ones((5, 1)), {"ridge": RIDGE, "preconditioner": preconditioner}
    assert_allclose(points.solve(x, b, points.Gaussian(), **about).x, b / (5 + RIDGE))


X, B = np.zeros((4, 3)), np.zeros((4, 2))


@pytest.mark.parametrize(("given", "options", "kind", "message"), [
    ((X, B[:3]), {}, ValueError, r"b: got the shape \(3, 2\), expected \(..., 4, columns\), a row for each point of x"),
    ((X, B[:, 0]), {}, ValueError, r"b: got the shape \(4,\), .*; pass b\[:, None\]"),
    ((X * np.nan, B), {}, ValueError, "x: got points with inf or NaN, allowed are finite ones"),
    ((X, B), {"ridge": -1.0}, ValueError, "ridge: got -1.0, allowed finite and >= 0"),
    ((X, B), {"tol": -1.0}, ValueError, "tol: got -1.0, allowed finite and >= 0"),
    ((X, B), {"max_iterations": 0}, ValueError, "max_iterations: got 0, allowed 1 or more"),
    ((X, B), {"preconditioner": "ilu"}, ValueError, "preconditioner: got 'ilu', allowed 'nystrom', 'diagonal', None"),
    ((X, B), {"preconditioner": []}, ValueError, "preconditioner: got list, allowed 'nystrom'"),
    ((X, B), {"preconditioner": 3}, ValueError, "preconditioner: got 3, allowed 'nystrom'"),
    ((X, B), {"rank": 0}, ValueError, "rank: got 0, allowed 1 or more"),
    ((X, B), {"rank": 5, "preconditioner": None}, ValueError, "rank: got 5 with the preconditioner None, which has no"),
    ((X, B), {"x0": B[:3]}, ValueError, r"x0: got the shape \(3, 2\), expected \(4, 2\), the shape of Solution.x"),
])  # fmt: skip
def test_errors(given, options, kind, message):
    with pytest.raises(kind, match=message):
        points.solve(*given, **{"kernel": KERNEL, "ridge": RIDGE, **options})


def test_errors_of_gradients(rng):
    _, backprop = points.solve_vjp(X, B, KERNEL, ridge=RIDGE)
    with pytest.raises(ValueError, match=r"ds: got the shape \(4,\), expected \(4, 2\), the shape of Solution.x"):
        backprop(B[:, 0])


FAULTS = {
    "test_errors": {"points/systems.py": {'check_finite("x", x)': "pass"}},
    "test_gradients_are_those_of_finite_differences": {
        "return dx + dy, grads": "return 2 * dx, grads",
        "(-W * X).sum(": "(W * X).sum(",
        "points/product.py": {"of_factor = (db * self": "of_factor = factor * (db * self"},
    },
    "test_lengths_of_a_batch": {
        "sum_broadcast(dx, x.shape)": "dx",
        "points/systems.py": {"batch_of(**own, **batches)": "batch_of(**batches)"},
    },
    "test_the_gradient_of_b_x_takes_no_more_iterations": {
        "start = np.ldexp(XS @ (np.linalg.pinv(T(XS) @ BS) @ (T(XS) @ DS)), of_x - of_b + of_ds)": "start = None",
    },
    "test_columns_that_depend_on_others": {"step = min(BLOCK, m)": "step = max(BLOCK, m, e)"},
    "test_what_has_not_converged_says_so": {
        "points/systems.py": {
            "before, off = off, _relative(residual, size)": "before, off = off, 0 * off",
            "np.where(size == 0, 0, np.linalg": "np.where(~(size > 0), 0, np.linalg",
        },
    },
    "test_right_sides_of_any_size": {"points/systems.py": {
        "np.where(size[..., None, :] > 0, np.ldexp(X.astype(np.float64, copy=False), -exponents), 0)": "X",
    }},
    "test_columns_share_products_and_what_they_find_out": {"points/systems.py": {"Q + P @ T(S)": "Q"}},
    "test_a_better_preconditioner_takes_fewer_iterations": {
        "points/systems.py": {"G = G - F @ T(np": "G = G - 0 * F @ T(np"},
    },
    "test_points_of_unequal_diagonals_and_some_twice": {
        "points/systems.py": {"np.where(pivots > least, pivots**-0.5, 0)": "(pivots**-0.5)"},
    },
}

"""Solutions of linear systems with a kernel matrix: kernel ridge regression, Gaussian processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from ..base.checks import A, Array, warn
from ..base.values import rounded, sum_broadcast
from .checks import check_columns, check_points, check_result, checked_limits
from .composition import Kernel
from .formula import quiet
from .gradients import SolveGradients
from .product import ProductCall
from .systems import BLOCK, Preconditioner, Solved, System, T, block_conjugate_gradients, scaled


@dataclass(frozen=True, eq=False)
class Solution(Generic[A]):
    """The result of `solve`.

    Attributes
    ----------
    x : array, (..., m, e), of the dtype of the points
    converged : bool
        Whether all residuals are within the tolerance.
    iterations : int
        The number of products with the matrix for which all columns were multiplied.
    residual : array, (..., e)
        The norm of each column of b - (K + ridge) x, by that of b: computed in the end, in float64, before x was
        rounded.
    """

    x: A
    converged: bool
    iterations: int
    residual: A


def solve(
    x: A, b: A, kernel: Kernel, *, ridge: float, preconditioner: str | None = "nystrom", rank: int | None = None,
    x0: A | None = None, tol: float = 1e-5, max_iterations: int = 1000,
) -> Solution[A]:  # fmt: skip
    """Solution of (K + ridge) x = b, with the kernel matrix K(x_i, x_j), in memory linear in the number of points.

    Parameters
    ----------
    x : array, (..., m, d)
    b : array, (..., m, e)
        Points, which are finite, and right sides: NumPy arrays or CuPy arrays, all of one dtype. Batch axes broadcast.
    kernel : Gaussian, Periodic, Laplacian, Matern, Cauchy, RationalQuadratic, Radial, Linear, Cosine, Polynomial, Cost
        Or a sum of multiples of these, one pass each, or a product, of all features or of some: all that `product`
        takes. It is to be positive definite.
    ridge : float
        A number >= 0 to add to the diagonal: the variance of noise.
    preconditioner : "nystrom", "diagonal" or None, optional
        An approximation of the matrix that is easily inverted: of a lower rank plus the ridge, or its diagonal.
    rank : int, optional
        Of "nystrom": the most that a few points draw from all others. Default: 8 sqrt(m), at most 500. It takes m rank
        numbers in memory, and 4 m rank**2 operations.
    x0 : array, (..., m, e), optional
        A solution to start from.
    tol : float, optional
        The norm of residuals by that of b, of each column.
    max_iterations : int, optional
        1 or more.

    Returns
    -------
    Solution
        With x, and whether it has converged.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Warns
    -----
    UserWarning
        If it has not converged.

    Notes
    -----
    Conjugate gradients for all columns at once, 64 at most: an iteration is one pass over all pairs, and the columns
    share what each of them finds out, so that several take fewer iterations than one. In the end residuals are computed
    anew, in float64, and iterations go on from there if rounding errors have kept them above the tolerance; so x is as
    exact in float32 as float32 allows. On a GPU the stopping rule reads the device every 10 iterations.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x = np.random.default_rng(0).random((500, 2))
    >>> kernel = points.Matern(2.5, length=0.3)
    >>> weights = points.solve(x, np.sin(6 * x), kernel, ridge=1e-3)
    >>> weights.converged
    True
    >>> mean = points.product(np.array([[0.5, 0.25]]), x, weights.x, kernel)        # of a Gaussian process
    >>> np.abs(mean - np.sin([3.0, 1.5])).max().round(2)
    np.float64(0.0)
    """
    return _Call.of(x, b, kernel, ridge, preconditioner, rank, x0, tol, max_iterations).solution()


def solve_vjp(
    x: A, b: A, kernel: Kernel, *, ridge: float, preconditioner: str | None = "nystrom", rank: int | None = None,
    x0: A | None = None, tol: float = 1e-5, max_iterations: int = 1000,
) -> tuple[Solution[A], Callable[[Array], SolveGradients]]:  # fmt: skip
    """`solve` with its gradients as a closure.

    Parameters
    ----------
    x, b, kernel, ridge, preconditioner, rank, x0, tol, max_iterations
        As in `solve`.

    Returns
    -------
    r : Solution
    backprop : function
        ``backprop(ds)``, with the gradient of ``r.x``, returns dx, db, of the shapes and dtypes of x and b; a tuple
        with the attributes `kernel`, the gradient of the kernel's length, `ridge`, and for a sum of kernels or one with
        a factor `factor`, a tuple. It is one more solution, with the right side ds, and a pass over all pairs for its
        gradients.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Notes
    -----
    With W = (K + ridge)^-1 ds, db is W, and the gradient of the matrix is -W x^T. The solution for W starts from the
    columns of x, of which the right sides are known: if ds is a multiple of b, as where <b, x> is differentiated, there
    are no more iterations.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x = np.random.default_rng(0).random((500, 2))
    >>> b = np.sin(6 * x[:, :1])
    >>> r, backprop = points.solve_vjp(x, b, 2.0 * points.Gaussian(0.3), ridge=1e-2)
    >>> grads = backprop(b)             # of <b, x>
    >>> grads.dx.shape, bool(grads.ridge < 0)
    ((500, 2), True)
    """
    call = _Call.of(x, b, kernel, ridge, preconditioner, rank, x0, tol, max_iterations)
    return call.solution(), call.backprop


@dataclass(frozen=True, eq=False)
class _Call:
    """A call that is checked, and its result."""

    given: tuple[Any, Any]  # x and b
    system: System
    M: Preconditioner
    B: Any  # b with all batch axes, in the dtype of sums
    limits: tuple[float, int]
    solved: Solved

    @classmethod
    def of(
        cls, x: Any, b: Any, kernel: Any, ridge: Any, preconditioner: Any, rank: Any, x0: Any, tol: Any,
        max_iterations: Any,
    ) -> _Call:  # fmt: skip
        check_points(x, x, b=b)
        check_columns("b", b, x.shape[-2], "x")
        limits, system = checked_limits(tol, max_iterations), System.of(x, kernel, ridge, b=b.shape[:-2])
        B = np.broadcast_to(rounded(b, system.x.dtype), (*system.batch, *b.shape[-2:]))
        if x0 is not None:
            check_result("x0", x0, "Solution.x", B.shape, x)
            x0 = rounded(x0, B.dtype)
        M = system.preconditioner(preconditioner, rank)
        return cls((x, b), system, M, B, limits, solved(system, M, B, x0, *limits))

    def solution(self) -> Solution[Any]:
        """The result, after a warning if it has not converged."""
        x, residual, iterations = self.solved
        converged = bool((residual <= self.limits[0]).all())
        if not converged:
            warn_of(residual, *self.limits)
        return Solution(rounded(x, self.given[0].dtype), converged, iterations, residual)

    @quiet
    def backprop(self, ds: Any) -> SolveGradients:
        (x, b), system, X = self.given, self.system, self.solved.x
        check_result("ds", ds, "Solution.x", self.B.shape, x)
        dS = rounded(ds, X.dtype)
        (XS, of_x), (BS, of_b), (DS, of_ds) = (scaled(x, axis=(-2, -1)) for x in (X, self.B, dS))
        start = np.ldexp(XS @ (np.linalg.pinv(T(XS) @ BS) @ (T(XS) @ DS)), of_x - of_b + of_ds)
        W, residual, _ = solved(system, self.M, dS, start, *self.limits)
        if (residual > self.limits[0]).any():
            warn_of(residual, *self.limits)
        dx, kernel, factor = of_matrix(system, X, -W)
        dx = rounded(sum_broadcast(dx, x.shape), x.dtype)
        db, ridge = rounded(sum_broadcast(W, b.shape), b.dtype), (-W * X).sum(dtype=np.float64)[...]
        return SolveGradients(dx, db, kernel=kernel, factor=factor, ridge=ridge)


def solved(system: System, M: Preconditioner, B: Any, start: Any, tol: float, max_iterations: int) -> Solved:
    """All columns, some at a time."""
    *_, m, e = B.shape
    if not B.size:
        return Solved(B, np.zeros_like(B, shape=(*B.shape[:-2], e)), 0)
    step = min(BLOCK, m)
    parts = [block_conjugate_gradients(system, M, B[..., at : at + step],
                                       start if start is None else start[..., at : at + step], tol, max_iterations)
             for at in range(0, e, step)]  # fmt: skip
    X, residual, iterations = zip(*parts)
    return Solved(np.concatenate(X, axis=-1), np.concatenate(residual, axis=-1), max(iterations))


def of_matrix(system: System, b: Any, c: Any) -> tuple[Any, Any, Any]:
    """The gradients of points, lengths and factors, if that of the kernel matrix is c b^T."""
    dx, dy, _ = grads = ProductCall.of(system.x, system.x, b, system.kernel, None).backprop(c)
    return dx + dy, grads.kernel, grads.factor


def warn_of(residual: Any, tol: float, max_iterations: int) -> None:
    warn(f"solve: not converged to {tol:g} within {max_iterations} iterations, but to {float(residual.max()):.2g}: "
         "allow more, or take a larger rank, tol or ridge, or float64 where the matrix is ill-conditioned")

"""Logarithms of determinants of kernel matrices, by stochastic Lanczos quadrature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.checks import A, integer, library, number, warn
from ..base.values import filled, moved, rounded, sum_broadcast
from .checks import check_points, check_result, checked_limits
from .clouds import EVERY
from .composition import Kernel
from .formula import quiet
from .gradients import LogDeterminantGradients, added
from .product import product_vjp
from .solve import of_matrix, solved, warn_of
from .systems import Preconditioner, System, one_column


def log_determinant(
    x: A, kernel: Kernel, *, ridge: float, probes: int = 16, seed: int = 0, preconditioner: str | None = "nystrom",
    rank: int | None = None, tol: float = 1e-5, max_iterations: int = 200,
) -> A:  # fmt: skip
    """Logarithm of the determinant of K + ridge, an estimate, in memory linear in the number of points.

    Parameters
    ----------
    x : array, (..., m, d)
    kernel, ridge, preconditioner, rank
        As in `solve`.
    probes : int, optional
        1 or more: random vectors, whose mean it is. The more there are, the smaller is the error.
    seed : int, optional
        Of these vectors: the same ones give the same function of all other arguments, for an optimiser.
    tol : float, optional
        The change of the estimate, per point, in 10 more iterations, at which it has converged. It says nothing about
        the error of having few probes.
    max_iterations : int, optional
        1 or more, of Lanczos' algorithm.

    Returns
    -------
    log_determinant : array, (...), float32, or float64 for float64
        NaN where K + ridge turns out not to be positive definite.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Warns
    -----
    UserWarning
        If it has not converged, or is NaN.

    Notes
    -----
    With the preconditioner M it is log det M, exactly, plus the trace of log(M^-1/2 (K + ridge) M^-1/2), estimated as
    the mean of <z, log(...) z>: the better M is, the less there is to estimate. An iteration is one pass over all
    pairs, for all probes.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, kernel = np.random.default_rng(0).random((500, 2)), points.Matern(2.5, length=0.3)
    >>> exact = np.linalg.slogdet(points.product(x, x, np.eye(500), kernel) + 0.1 * np.eye(500)).logabsdet
    >>> bool(abs(points.log_determinant(x, kernel, ridge=0.1) / exact - 1) < 1e-2)
    True
    """
    return _Call.of(x, kernel, ridge, probes, seed, preconditioner, rank, tol, max_iterations).value()


def log_determinant_vjp(
    x: A, kernel: Kernel, *, ridge: float, probes: int = 16, seed: int = 0, preconditioner: str | None = "nystrom",
    rank: int | None = None, tol: float = 1e-5, max_iterations: int = 200,
) -> tuple[A, Callable[..., LogDeterminantGradients]]:  # fmt: skip
    """`log_determinant` with its gradients as a closure.

    Parameters
    ----------
    x, kernel, ridge, probes, seed, preconditioner, rank, tol, max_iterations
        As in `log_determinant`.

    Returns
    -------
    log_determinant : array, (...)
    backprop : function
        ``backprop(ds=1.0)`` returns (dx,), of the shape and dtype of x; a tuple with the attributes `kernel`, the
        gradient of the kernel's length, `ridge`, and for a sum of kernels or one with a factor `factor`, a tuple.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Notes
    -----
    An estimate of the exact gradient, the trace of (K + ridge)^-1 dK, rather than the gradient of the estimate: that of
    M^-1 dK exactly, and the rest by the same probes, with one solution (see `solve`) for all of them, with the same
    tolerance and number of iterations.

    Examples
    --------
    Of a Gaussian process, the marginal likelihood of values y, and its gradient by lengths, factor and noise:

    >>> import numpy as np
    >>> from numbattn import points
    >>> x = np.random.default_rng(0).random((500, 2))
    >>> y = np.sin(6 * x[:, :1])
    >>> kernel, noise = 2.0 * points.Matern(2.5, length=[0.3, 0.5]), 1e-2
    >>> r, of_weights = points.solve_vjp(x, y, kernel, ridge=noise)
    >>> logdet, of_logdet = points.log_determinant_vjp(x, kernel, ridge=noise)
    >>> likelihood = -(np.vdot(y, r.x) + logdet + len(y) * np.log(2 * np.pi)) / 2
    >>> one, other = of_weights(-y / 2), of_logdet(-0.5)
    >>> dlengths, dfactor = one.kernel[0] + other.kernel[0], one.factor[0] + other.factor[0]
    >>> dlengths.shape, dfactor.shape, (one.ridge + other.ridge).shape
    ((2,), (), ())
    """
    call = _Call.of(x, kernel, ridge, probes, seed, preconditioner, rank, tol, max_iterations)
    return call.value(), call.backprop


@dataclass(frozen=True, eq=False)
class _Call:
    """A call that is checked."""

    x: Any
    system: System
    M: Preconditioner
    Z: Any  # probes, (..., m, count), of elements 1 and -1
    limits: tuple[float, int]

    @classmethod
    def of(
        cls, x: Any, kernel: Any, ridge: Any, probes: Any, seed: Any, preconditioner: Any, rank: Any, tol: Any,
        max_iterations: Any,
    ) -> _Call:  # fmt: skip
        check_points(x, x)
        count, seed = integer("probes", probes, low=1), integer("seed", seed, low=0)
        limits, system = checked_limits(tol, max_iterations), System.of(x, kernel, ridge)
        Z = np.random.default_rng(seed).choice([-1.0, 1.0], (x.shape[-2], count)).astype(system.x.dtype)
        Z = np.broadcast_to(moved(Z, x), (*system.x.shape[:-1], count))
        return cls(x, system, system.preconditioner(preconditioner, rank), Z, limits)

    @quiet
    def value(self) -> Any:
        rest, converged = self.quadrature()
        if not converged:
            tol, most = self.limits
            warn(f"log_determinant: not converged to {tol:g} per point within {most} iterations: allow more, or take a "
                 "larger rank, tol or ridge")
        if np.isnan(rest).any():
            warn("log_determinant: NaN where K + ridge is not positive definite: allow a larger ridge")
        return (self.M.log_determinant() + rest).astype(self.system.x.dtype)[...]

    def quadrature(self) -> tuple[Any, bool]:
        """The mean of <z, log(M^-1/2 A M^-1/2) z>, and whether it has converged: Lanczos' algorithm, for each z."""
        (tol, most), M, m = self.limits, self.M, self.x.shape[-2]
        if not self.Z.size:
            return 0.0, True
        q, before, b, found = self.Z / m**0.5, 0 * self.Z, 0 * self.Z[..., :1, :], None
        diagonal, beside = list[Any](), list[Any]()
        for at in range(1, most + 1):
            w = M.times(self.system.times(M.times(q, -1 / 2)), -1 / 2) - b * before
            a = (q * w).sum(axis=-2, keepdims=True)
            w = w - a * q
            b = np.linalg.norm(w, axis=-2, keepdims=True)
            diagonal.append(a)
            if at % EVERY == 0 or at == most:
                last, found = found, m * of_tridiagonal(diagonal, beside).mean(axis=-1)
                if last is not None and not (abs(found - last) > tol * m).any():  # NaN stays NaN
                    return found, True
            beside.append(b)
            q, before = np.where(b > 0, w / b, 0), q
        return found, False

    @quiet
    def backprop(self, ds: Any = 1.0) -> LogDeterminantGradients:
        system, M, Z = self.system, self.M, self.Z
        shape, dtype = Z.shape[:-2], Z.dtype
        if not library(ds):
            ds = filled(number("ds", ds), shape, dtype, Z)
        check_result("ds", ds, "log_determinant", shape, Z)
        dS = rounded(ds, dtype)[..., None, None]
        W, residual, _ = solved(system, M, Z, None, *self.limits)
        if (residual > self.limits[0]).any():
            warn_of(residual, *self.limits)
        # tr A^-1 dK = E <(A^-1 - M^-1) z, dK z> + tr M^-1 dK, and M^-1 = U (1 / values - 1 / rest) U^T + 1 / rest
        rest = (W - M.times(Z, -1)) / Z.shape[-1]
        along = M.U * (1 / M.values[..., None, :] - 1 / M.rest) if M.U.shape[-1] else M.U
        b, c = np.concatenate([Z, M.U], axis=-1), np.concatenate([rest, along], axis=-1)
        dx, kernel, factor = of_matrix(system, b, dS * c)
        x, inverse = system.alone, np.moveaxis(np.broadcast_to(dS / M.rest, Z[..., :1].shape)[..., None], -3, 0)
        one = one_column(x)
        own = product_vjp(x, x, one, system.kernel)[1](inverse)
        ridge = (b * c * dS).sum(dtype=np.float64) + inverse.sum(dtype=np.float64)
        if factor is not None:
            factor = tuple([sum(pair) for pair in zip(factor, own.factor)])
        kernel, dx = added(kernel, own.kernel), dx + np.moveaxis((own.dx + own.dy)[..., 0, :], 0, -2)
        dx = rounded(sum_broadcast(dx, self.x.shape), self.x.dtype)
        return LogDeterminantGradients(dx, kernel=kernel, factor=factor, ridge=ridge[...])


def of_tridiagonal(diagonal: list[Any], beside: list[Any]) -> Any:
    """The first element of log T, of tridiagonal matrices T with these diagonals, of elements (..., 1, count). NaN if T
    has eigenvalues below 0, and not by rounding."""
    count = len(diagonal)
    a = np.concatenate(diagonal, axis=-2).swapaxes(-2, -1)
    matrix, k = np.zeros_like(a, shape=(*a.shape, count)), np.arange(count, like=a)
    matrix[..., k, k] = a
    if beside:
        matrix[..., k[1:], k[:-1]] = np.concatenate(beside, axis=-2).swapaxes(-2, -1)
    is_finite = np.isfinite(matrix).all(axis=(-2, -1), keepdims=True)  # -1 has an eigenvalue below 0, and is no error
    values, vectors = np.linalg.eigh(np.where(is_finite, matrix, -1))  # which reads the lower triangle
    about = np.finfo(values.dtype)
    rounding = about.eps**0.5 * abs(values).max(axis=-1, keepdims=True)
    values = np.where(values < -rounding, np.nan, np.maximum(values, about.tiny))
    return (vectors[..., 0, :] ** 2 * np.log(values)).sum(-1)

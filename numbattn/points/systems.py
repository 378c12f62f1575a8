"""Linear systems with a kernel matrix, A = K + ridge, and approximations M of it.

Block conjugate gradients solve A X = B for all columns of B, which share products with A, and the Krylov space of them
all (Dubrulle 2001, BCGrQ: residuals are kept as Q C with orthonormal Q, so that nearly dependent columns do no harm).
They are preconditioned from both sides, by M^-1/2 A M^-1/2, whose eigenvalues are the more alike, the better M is:

    "nystrom"   K_xz K_zz^-1 K_zx + ridge for some points z, drawn among x as what is left of K's diagonal says, a block
                at a time: randomly pivoted Cholesky (Chen, Epperly, Tropp, Webber 2023)
    "diagonal"  the diagonal of A
    None        1
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..base.checks import dtype_of_sums, integer, number, words_for
from ..base.forks import cached_property
from ..base.values import moved, rounded
from .checks import batch_of, check_finite
from .clouds import should_check
from .composition import Kernel
from .formula import quiet
from .kernels import as_kernel
from .pairs import Pairs, Term, terms_of
from .product import product

BLOCK = 64  # columns of a factor that are drawn at once, and most right sides that share a Krylov space
MOST_OF_RANK = 500  # unless the user asks for more
ROUNDINGS = 8  # of the largest element of the diagonal: smaller pivots are rounding errors


@dataclass(frozen=True, eq=False)
class System:
    """A = K + ridge, for points in the dtype of sums."""

    x: Any
    kernel: Kernel
    ridge: float
    terms: list[tuple[Any, Term]]

    @classmethod
    def of(cls, x: Any, kernel: Any, ridge: Any, **batches: tuple[int, ...]) -> System:
        """The System of points that are checked, with batch axes of right sides. x gets those of lengths and
        factors."""
        kernel, ridge = as_kernel(kernel, x.shape[-1]), checked_ridge(ridge)
        check_finite("x", x)
        own = {"x": x.shape[:-2], **kernel._batches}
        x = np.broadcast_to(rounded(x, dtype_of_sums(x.dtype)), (*batch_of(**own), *x.shape[-2:]))
        pairs = Pairs.of(x, x, batch_of(**own, **batches))
        return cls(x, kernel, ridge, terms_of(pairs, kernel))

    @cached_property
    def in_double(self) -> System:
        """The same in float64."""
        return System.of(self.x.astype(np.float64, copy=False), self.kernel, self.ridge, b=self.batch)

    @property
    def batch(self) -> tuple[int, ...]:
        return self.terms[0][1].pairs.batch

    @property
    def alone(self) -> Any:
        """Points, each an element of a batch of its own, (m, ..., 1, d)."""
        return np.moveaxis(self.x[..., None, :], -3, 0)

    @quiet
    def times(self, v: Any) -> Any:
        """A v, for columns v (..., m, e) with all batch axes."""
        return weighed_sums(self.terms, v) + self.ridge * v

    def diagonal_of_kernel(self) -> Any:
        """(..., m)"""
        x = self.alone
        return np.moveaxis(product(x, x, one_column(x), self.kernel)[..., 0, 0], 0, -1)

    def preconditioner(self, name: Any, rank: Any) -> Preconditioner:
        """M."""
        if not isinstance(name, str | None) or name not in PRECONDITIONERS:
            allowed = ", ".join(map(repr, PRECONDITIONERS))
            got = repr(name) if isinstance(name, str) else words_for(name)
            raise ValueError(f"preconditioner: got {got}, allowed {allowed}")
        m = self.x.shape[-2]
        if rank is not None and name != "nystrom":
            raise ValueError(f"rank: got {rank} with the preconditioner {name!r}, which has none")
        rank = min(m, MOST_OF_RANK, 8 * math.isqrt(m)) if rank is None else min(m, integer("rank", rank, low=1))
        return PRECONDITIONERS[name if m else None](self, rank)


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """M = U diag(values) U^T + rest (1 - U U^T), with orthonormal columns U; without any, rest may be a diagonal."""

    U: Any  # (..., m, r)
    values: Any  # (..., r)
    rest: Any  # (..., m or 1, 1)

    @quiet
    def times(self, v: Any, power: float) -> Any:
        """M**power v."""
        found = self.rest**power * v
        if not self.U.shape[-1]:
            return found
        return found + self.U @ ((self.values[..., None] ** power - self.rest**power) * (T(self.U) @ v))

    def log_determinant(self) -> Any:
        rest = np.broadcast_to(self.rest, (*self.U.shape[:-1], 1))[..., self.U.shape[-1] :, 0]
        return np.log(self.values).sum(-1) + np.log(rest).sum(-1)


@quiet
def nystrom(system: System, rank: int) -> Preconditioner:
    x, ridge = system.x, system.ridge
    left = diagonal = system.diagonal_of_kernel()
    rounding = ROUNDINGS * np.finfo(x.dtype).eps
    least = rounding * diagonal.max(axis=-1)[..., None]
    F = np.zeros_like(x, shape=(*x.shape[:-1], rank))  # F F^T approximates K
    rng = np.random.default_rng(0)
    for at in range(0, rank, BLOCK):
        some = slice(at, min(at + BLOCK, rank))
        waiting = moved(rng.exponential(size=x.shape[-2]), x)  # a point is drawn by its rate, what is left of it
        z = np.where(left > least, waiting / left, math.inf).argsort(axis=-1)[..., : some.stop - at, None]
        one = moved(np.eye(z.shape[-2], dtype=x.dtype), x)
        G = product(x, np.take_along_axis(x, z, -2), one, system.kernel)
        G = G - F @ T(np.take_along_axis(F, z, -2))
        pivots, vectors = np.linalg.eigh(np.take_along_axis(G, z, -2))
        F[..., some] = G @ (vectors * np.where(pivots > least, pivots**-0.5, 0)[..., None, :])
        left = left - (F[..., some] ** 2).sum(-1)
    values, vectors = np.linalg.eigh(T(F.astype(np.float64, copy=False)) @ F)
    is_sure = values > rank * np.finfo(values.dtype).eps * values[..., -1:]  # or else no direction
    U = F @ (vectors * np.where(is_sure, values**-0.5, 0)[..., None, :])
    values = np.maximum(values, 0) + max(ridge, float(np.finfo(x.dtype).tiny))
    rest = np.where(is_sure, values, values[..., -1:]).min(axis=-1)[..., None]
    found = U, np.where(is_sure, values, rest), rest[..., None]
    return Preconditioner(*(z.astype(x.dtype, copy=False) for z in found))


def diagonal(system: System, rank: int) -> Preconditioner:
    return _of_rest(system.x, (system.diagonal_of_kernel() + system.ridge)[..., None])


def nothing(system: System, rank: int) -> Preconditioner:
    return _of_rest(system.x, np.ones_like(system.x, shape=(1, 1)))


def one_column(x: Any) -> Any:
    """1 for each point."""
    return np.ones_like(x, order="C", shape=(*x.shape[:-1], 1))


def _of_rest(x: Any, rest: Any) -> Preconditioner:
    return Preconditioner(x[..., :0], np.ones_like(x, shape=(*x.shape[:-2], 0)), rest)


PRECONDITIONERS: dict[Any, Callable[[System, int], Preconditioner]] = {
    "nystrom": nystrom, "diagonal": diagonal, None: nothing,
}  # fmt: skip


class Solved(NamedTuple):
    """X, the norms of the columns of B - A X by those of B, and the number of iterations."""

    x: Any
    residual: Any
    iterations: int


@quiet
def block_conjugate_gradients(
    system: System, M: Preconditioner, B: Any, X: Any, tol: float, max_iterations: int
) -> Solved:
    """X with A X = B, from an X to start with, or None. In the end residuals are computed anew, in float64, and what
    rounding errors have left is solved for."""
    dtype, exact, at = B.dtype, system.in_double, 0
    B, exponents = scaled(B, axis=-2)
    size = np.linalg.norm(B, axis=-2)
    if X is None:
        X, residual = 0 * B, B
    else:
        X = np.where(size[..., None, :] > 0, np.ldexp(X.astype(np.float64, copy=False), -exponents), 0)
        residual = B - exact.times(X)
    off = _relative(residual, size)
    while at < max_iterations and (off > tol).any():
        Q, C = np.linalg.qr(M.times(residual.astype(dtype, copy=False), -1 / 2))
        P, Y = Q, 0 * Q
        for at in range(at + 1, max_iterations + 1):  # noqa: B020
            AP = M.times(system.times(M.times(P, -1 / 2)), -1 / 2)
            try:
                step = np.linalg.inv(T(P) @ AP)
            except np.linalg.LinAlgError:  # A is not positive definite
                break
            Y = Y + P @ (step @ C)
            Q, S = np.linalg.qr(Q - AP @ step)
            C, P = S @ C, Q + P @ T(S)
            if should_check(Q, at, max_iterations) and not (_relative(M.times(Q @ C, 1 / 2), size) > tol).any():
                break
        X = X + M.times(Y, -1 / 2)
        residual = B - exact.times(X)
        before, off = off, _relative(residual, size)
        if not (off < before / 2).any():
            break
    return Solved(np.ldexp(X, exponents).astype(dtype, copy=False), off.astype(dtype, copy=False), at)


def scaled(x: Any, axis: Any) -> tuple[Any, Any]:
    """x in float64 over a power of two along these axes, so that squares of what it holds are finite and not 0; and the
    exponents."""
    x = x.astype(np.float64, copy=False)
    largest = abs(x).max(axis=axis, keepdims=True) if x.size else np.zeros_like(x, shape=(1,) * x.ndim)
    exponents = np.frexp(np.where(np.isfinite(largest), largest, 0))[1]
    return np.ldexp(x, -exponents), exponents


def weighed_sums(terms: list[tuple[Any, Term]], b: Any) -> Any:
    """The kernel matrix times columns with all batch axes, in the dtype of sums."""
    return sum(factor * term.sums(b) for factor, term in terms)


def checked_ridge(ridge: Any) -> float:
    ridge = number("ridge", ridge)
    if not 0 <= ridge < math.inf:
        raise ValueError(f"ridge: got {ridge}, allowed finite and >= 0")
    return ridge


def T(x: Any) -> Any:
    return np.swapaxes(x, -2, -1)


def _relative(residual: Any, size: Any) -> Any:
    return np.where(size == 0, 0, np.linalg.norm(residual, axis=-2) / size)

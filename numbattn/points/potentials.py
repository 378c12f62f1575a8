"""Tangents of the potentials of optimal transport along points and weights, by implicit differentiation.

With F = f / epsilon and G = g / epsilon, the rows of R_ij = pi_ij / a_i and Q_ji = pi_ij / b_j sum to 1 for all points
and weights, so the tangents of these sums are 0:

    tF + R tG = rowsum(R tC) / epsilon - R tlog(b),  tG + Q tF = rowsum(Q tC) / epsilon - Q tlog(a).

Eliminating tF gives (1 - Q R) tG = ..., self-adjoint with the weights b, semi-definite, and 0 for a constant. For a
cloud and itself, where tF = tG, it is (1 + R) tF = ..., definite. Conjugate gradients solve both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..base.forks import cached_property
from .clouds import ROUNDINGS, Clouds, Solution, logs, should_check, weighed
from .pairs import Term, ones, quiet
from .tangents import Moving


class Moved(NamedTuple):
    """The tangents of points, and of logarithms of weights, (..., m, 1) and (..., n, 1), or None."""

    points: Moving
    a: Any
    b: Any

    @property
    def exchanged(self) -> Moved:
        return Moved(self.points.exchanged, self.b, self.a)


@dataclass(frozen=True, eq=False)
class Averages:
    """exp(rows_i + columns_j) kappa_ij, whose rows sum to 1, or to 0 where nothing is visible."""

    term: Term
    columns: Any

    @cached_property
    @quiet
    def rows(self) -> Any:
        logarithms = self.term.logsumexp(self.columns)
        return np.where(np.isneginf(logarithms), -np.inf, -logarithms)

    def __call__(self, v: Any) -> Any:
        return self.of_columns(v[..., None])[..., 0]

    def of_columns(self, v: Any) -> Any:
        return self.term.sums(v, self.rows, self.columns)

    def of_costs(self, moved: Moved) -> Any:
        """Averages of the tangents of C / epsilon - log(b): minus those of log(kappa b)."""
        return -moved.points.sums(ones(self.term.pairs), moved.b, self.rows, self.columns)[..., 0]


@dataclass(frozen=True, eq=False)
class Potentials:
    """The potentials of a solution."""

    clouds: Clouds
    solution: Solution

    @property
    def exchanged(self) -> Potentials:
        """The Potentials with the roles of x and y exchanged."""
        return Potentials(self.clouds.exchanged, self.solution.exchanged)

    @cached_property
    def over_y(self) -> Averages:
        """R"""
        return Averages(self.clouds.term, logs(self.clouds.b, self.solution.g / self.clouds.cost.epsilon))

    @cached_property
    def over_x(self) -> Averages:
        """Q"""
        return Averages(self.clouds.term.exchanged, logs(self.clouds.a, self.over_y.rows))

    @quiet
    def tangents(self, moved: Moved, tol: float, max_iterations: int) -> tuple[Any, Any, bool]:
        """tF, tG, and whether the solver converged."""
        clouds, R, Q = self.clouds, self.over_y, self.over_x
        weights = _marginal(clouds.b, self.solution.g / clouds.cost.epsilon, Q.rows)
        total = weights.sum(axis=-1, keepdims=True)

        def without_mean(v: Any) -> Any:  # orthogonal to the null space
            return v - _ratio(weighed(weights, v)[..., None], total)

        rx, ry = R.of_costs(moved), Q.of_costs(moved.exchanged)
        rhs = without_mean(ry), without_mean(-Q(rx))
        tG, is_found = conjugate_gradients(lambda v: without_mean(v - Q(R(v))), rhs, weights, tol, max_iterations)
        tF = rx - R(tG)
        return tF, ry - Q(tF), is_found  # even for points without weight

    @quiet
    def tangents_alone(self, moved: Moved, tol: float, max_iterations: int) -> tuple[Any, bool]:
        """tF = tG of a cloud and itself, and whether the solver converged."""
        clouds, R = self.clouds, self.over_y
        weights = _marginal(clouds.a, self.solution.f / clouds.cost.epsilon, R.rows)
        rx = R.of_costs(moved)
        tF, is_found = conjugate_gradients(lambda v: v + R(v), (rx,), weights, tol, max_iterations)
        return rx - R(tF), is_found

    @quiet
    def tangent_of_gradient(self, moved: Moved, dcost: Any, tF: Any, tG: Any) -> Any:
        """The tangent of the gradient of points x, see `Clouds.gradient`."""
        b, c, *logarithms = self.clouds.weights_of_gradient(self.solution, dcost)
        tF, tG = (potential[..., None] if log is None else potential[..., None] + log
                  for potential, log in ((tF, moved.a), (tG, moved.b)))  # fmt: skip
        return moved.points.gradient(b, c, tG, c * tF, *logarithms)


def conjugate_gradients(
    times: Callable[[Any], Any], rhs: tuple[Any, ...], weights: Any, tol: float, max_iterations: int
) -> tuple[Any, bool]:
    """x with times(x) = sum(rhs), for each element of the batch, and whether it converged; `times` is self-adjoint
    with these weights. The terms of the right-hand side are given apart, since rounding errors are relative to them."""

    def dot(u: Any, v: Any) -> Any:
        return weighed(weights, u * v)[..., None]

    x, r = 0 * rhs[0], sum(rhs)
    rounding = ROUNDINGS * np.finfo(x.dtype).eps * sum(np.sqrt(dot(v, v)) for v in rhs)
    before = dot(r, r)
    allowed = np.maximum(tol * np.sqrt(before), rounding) ** 2
    p = r
    for at in range(1, max_iterations + 1):
        q = times(p)
        step = np.where(before > allowed, _ratio(before, dot(p, q)), 0)  # what has converged stays
        x, r = x + step * p, r - step * q
        now = dot(r, r)
        if should_check(r, at, max_iterations) and bool((now <= allowed).all()):
            return x, True
        p, before = r + _ratio(now, before) * p, now
    return x, False


def moved_logarithm(weights: Any, tangent: Any) -> Any:
    """The tangent of the logarithm of weights (..., n), from that of the weights; a weight of 0 stays."""
    return None if tangent is None else np.where(weights > 0, tangent / weights, 0)[..., None]


def _marginal(weights: Any, potential: Any, exact: Any) -> Any:
    """The sums of a plan's rows, with this potential instead of the one for which they are the weights exactly."""
    found = weights * np.exp(potential - exact)
    return np.where((weights > 0) & np.isfinite(found), found, 0)


def _ratio(x: Any, y: Any) -> Any:
    """x / y; 0 where y is 0."""
    return np.where(y == 0, 0, x / np.where(y == 0, 1, y))

"""Tangents of the potentials of optimal transport along points and weights, by implicit differentiation.

With F = f / epsilon and G = g / epsilon, the rows of R_ij = pi_ij / a_i and Q_ji = pi_ij / b_j sum to 1 for all points
and weights, so the tangents of these sums are 0:

    tF + R tG = rowsum(R tC) / epsilon - R tlog(b),  tG + Q tF = rowsum(Q tC) / epsilon - Q tlog(a).

Eliminating tF gives (1 - Q R) tG = ..., self-adjoint with the weights b, semi-definite, and 0 for a constant. For a
cloud and itself, where tF = tG, it is (1 + R) tF = ..., definite. Conjugate gradients solve both.

Where sums of rows need not be a, F = prox(p) / epsilon with p / epsilon = tP = ... - R tG, and tF is the slope of prox,
0 to 1, times tP; likewise for columns. (1 - slope Q slope R) tG = ... is self-adjoint with the sums of columns as its
weights, and is 0 for a constant only if all slopes are 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..base.forks import cached_property
from ..base.values import filled
from . import formula
from .clouds import ROUNDINGS, Clouds, Solution, logs, should_check, weighed
from .formula import quiet
from .kernels import PairCost
from .pairs import Term, ones
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

    @cached_property
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
        clouds, epsilon = self.clouds, self.clouds.cost.epsilon
        f = clouds.of_a._prox(epsilon * self.over_y.rows, epsilon)
        return Averages(clouds.term.exchanged, logs(clouds.a, f / epsilon))

    @property
    def slopes(self) -> tuple[Any, Any]:
        """The derivatives of f and g by what they are the prox of."""
        clouds, epsilon = self.clouds, self.clouds.cost.epsilon
        return (clouds.of_a._slope(epsilon * self.over_y.rows, epsilon),
                clouds.of_b._slope(epsilon * self.over_x.rows, epsilon))  # fmt: skip

    @cached_property
    @quiet
    def share(self) -> Any:
        """Sums of rows of the plan, relative to a."""
        if self.clouds.is_balanced:
            return np.ones_like(self.solution.f)
        rows = self.over_y.rows
        return np.where(np.isneginf(rows), 0, np.exp(self.solution.f / self.clouds.cost.epsilon - rows))

    @quiet
    def value(self, part: float) -> Any:
        """h(f) without a part of the entropy's mass: half of it is a point's part of the cost, and all of it the
        derivative of the cost by the weight, but for the mass of a b^T."""
        clouds, f = self.clouds, self.solution.f
        return clouds.of_a._value(f) - part * clouds.cost.epsilon * (self.share if part else 0)

    @property
    @quiet
    def penalty(self) -> Any:
        """What the sums of rows cost for not being a."""
        clouds, f = self.clouds, self.solution.f
        if clouds.of_a._is_exact:
            return filled(0, f.shape[:-1], f.dtype, f)
        return weighed(clouds.a, clouds.of_a._value(f) - np.where(self.share > 0, self.share * f, 0))

    @property
    @quiet
    def primal(self) -> Any:
        """<pi, C>: C is homogeneous in x and y, so that its gradient says how large it is."""
        clouds, solution = self.clouds.of_whole_batch, self.solution
        one = filled(1, solution.f.shape[:-1], solution.f.dtype, solution.f)
        if isinstance(clouds.cost, PairCost):
            _, _, *logarithms = clouds.weights_of_gradient(solution, one)
            return clouds.cost.epsilon * clouds.term.of_blocks(formula.total, *logarithms)
        dx, dy = clouds.gradient(solution, one), clouds.exchanged.gradient(solution.exchanged, one)
        given = (clouds.term.x, dx), (clouds.term.y, dy)
        found = sum([np.where(gradient == 0, 0, z * gradient).sum(axis=(-2, -1)) for z, gradient in given])
        return (found / clouds.cost.power)[...]

    @quiet
    def tangents(self, moved: Moved, tol: float, max_iterations: int) -> tuple[Any, Any, bool]:
        """tF and tG, each with the tangent of `value` / epsilon, and whether the solver converged."""
        clouds, R, Q, (of_f, of_g) = self.clouds, self.over_y, self.over_x, self.slopes
        weights = _marginal(clouds.b, self.solution.g / clouds.cost.epsilon, Q.rows)
        total = weights.sum(axis=-1, keepdims=True)
        is_free = [(slope == 1).all(axis=-1, keepdims=True) for slope in (of_f, of_g)]

        def without_mean(v: Any) -> Any:  # orthogonal to the null space
            return v - np.where(is_free[0] & is_free[1], _ratio(weighed(weights, v)[..., None], total), 0)

        rx, ry = R.of_costs(moved), Q.of_costs(moved.exchanged)
        rhs = without_mean(of_g * ry), without_mean(-of_g * Q(of_f * rx))
        tG, is_found = conjugate_gradients(
            lambda v: without_mean(v - of_g * Q(of_f * R(v))), rhs, weights, tol, max_iterations
        )
        tp = rx - R(tG)
        tF = of_f * tp
        tq = ry - Q(tF)  # even for points without weight
        return (tF, self.share * tp), (of_g * tq, self.exchanged.share * tq), is_found

    @quiet
    def tangents_alone(self, moved: Moved, tol: float, max_iterations: int) -> tuple[tuple[Any, Any], bool]:
        """tF = tG of a cloud and itself, likewise."""
        clouds, R, (of_f, _) = self.clouds, self.over_y, self.slopes
        weights = _marginal(clouds.a, self.solution.f / clouds.cost.epsilon, R.rows)
        rx = R.of_costs(moved)
        tF, is_found = conjugate_gradients(lambda v: v + of_f * R(v), (of_f * rx,), weights, tol, max_iterations)
        tp = rx - R(tF)
        return (of_f * tp, self.share * tp), is_found

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

"""How the potentials of optimal transport change with the points, by implicit differentiation.

With F = f / epsilon and G = g / epsilon, R_ij = pi_ij / a_i and Q_ji = pi_ij / b_j have rows that sum to 1 whatever the
points, so the tangents of these sums are 0:

    tF + R tG = rowsum(R tC) / epsilon,  tG + Q tF = rowsum(Q tC) / epsilon.

Without tF that is (1 - Q R) tG = ..., self-adjoint with the weights b, semi-definite, and 0 of a constant. Of a cloud
and itself, where tF = tG, it is (1 + R) tF = ..., definite. Conjugate gradients solve both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .clouds import ROUNDINGS, Clouds, Solution, is_time, logs, weighed
from .pairs import Term, ones, quiet
from .tangents import Moving


@dataclass(frozen=True, eq=False)
class Averages:
    """exp(rows_i + columns_j) kappa_ij, whose rows sum to 1; to 0 where nothing is seen."""

    term: Term
    columns: Any

    @cached_property
    @quiet
    def rows(self) -> Any:
        logarithms = self.term.logsumexp(self.columns)
        return np.where(np.isneginf(logarithms), -np.inf, -logarithms)

    def __call__(self, v: Any) -> Any:
        return self.term.sums(v[..., None], self.rows, self.columns)[..., 0]

    def of_costs(self, moving: Moving) -> Any:
        """Averages of the tangents of costs, in parts of epsilon: minus those of log kappa_ij."""
        return -moving.sums(ones(self.term.pairs), None, self.rows, self.columns)[..., 0]


@dataclass(frozen=True, eq=False)
class Potentials:
    """Those of a solution."""

    clouds: Clouds
    solution: Solution

    @cached_property
    def over_y(self) -> Averages:
        """R"""
        return Averages(self.clouds.term, logs(self.clouds.b, self.solution.g / self.clouds.cost.epsilon))

    @cached_property
    def over_x(self) -> Averages:
        """Q"""
        return Averages(self.clouds.term.exchanged, logs(self.clouds.a, self.over_y.rows))

    @quiet
    def tangents(self, moving: Moving, tol: float, max_iterations: int) -> tuple[Any, Any, bool]:
        """tF, tG, and whether they are found."""
        clouds, R, Q = self.clouds, self.over_y, self.over_x
        weights = _marginal(clouds.b, self.solution.g / clouds.cost.epsilon, Q.rows)
        total = weights.sum(axis=-1, keepdims=True)

        def but_for_constants(v: Any) -> Any:
            return v - _ratio(weighed(weights, v)[..., None], total)

        rx, ry = R.of_costs(moving), Q.of_costs(moving.exchanged)
        side = but_for_constants(ry), but_for_constants(-Q(rx))
        tG, is_found = conjugate_gradients(
            lambda v: but_for_constants(v - Q(R(v))), side, weights, tol, max_iterations
        )
        tF = rx - R(tG)
        return tF, ry - Q(tF), is_found  # of points without weight, too

    @quiet
    def tangents_alone(self, moving: Moving, tol: float, max_iterations: int) -> tuple[Any, bool]:
        """tF = tG of a cloud and itself, and whether they are found."""
        clouds, R = self.clouds, self.over_y
        weights = _marginal(clouds.a, self.solution.f / clouds.cost.epsilon, R.rows)
        rx = R.of_costs(moving)
        tF, is_found = conjugate_gradients(lambda v: v + R(v), (rx,), weights, tol, max_iterations)
        return rx - R(tF), is_found


def conjugate_gradients(
    times: Callable[[Any], Any], side: tuple[Any, ...], weights: Any, tol: float, max_iterations: int
) -> tuple[Any, bool]:
    """x with times(x) = sum(side), for each element of the batch, and whether it is found; `times` is self-adjoint with
    these weights."""

    def dot(u: Any, v: Any) -> Any:
        return weighed(weights, u * v)[..., None]

    x, r = 0 * side[0], sum(side)
    rounding = ROUNDINGS * np.finfo(x.dtype).eps * sum(np.sqrt(dot(v, v)) for v in side)
    before = dot(r, r)
    allowed = np.maximum(tol * np.sqrt(before), rounding) ** 2
    p = r
    for at in range(1, max_iterations + 1):
        q = times(p)
        step = _ratio(before, dot(p, q))
        x, r = x + step * p, r - step * q
        now = dot(r, r)
        if is_time(r, at, max_iterations) and bool((now <= allowed).all()):
            return x, True
        p, before = r + _ratio(now, before) * p, now
    return x, False


def _marginal(weights: Any, potential: Any, exact: Any) -> Any:
    """What a plan has for weights, with a potential instead of the one with which it has them exactly."""
    found = weights * np.exp(potential - exact)
    return np.where((weights > 0) & np.isfinite(found), found, 0)


def _ratio(x: Any, y: Any) -> Any:
    """x / y; 0 where y is."""
    return np.where(y == 0, 0, x / np.where(y == 0, 1, y))

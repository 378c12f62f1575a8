"""How far the sums of a plan's rows and columns may be from the weights of points.

Transport at the cost <pi, C> + epsilon KL(pi | a b^T) + D(pi 1 | a) + D(pi^T 1 | b) has the dual objective

    <a, h(f)> + <b, h(g)> - epsilon <a b^T, exp((f + g - C) / epsilon) - 1>,    h(f) = -D*(-f).

f maximises it with g held fixed at prox(p), where p_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon): p itself
where the sums have to be a. At the maximum the penalty of a row, whose sum is r a, is h(f) - r f.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..base.checks import words_for
from ..base.values import Value
from .kernels import positive

ROUNDINGS = 8  # of a sum of weights: a smaller difference of two is none


@dataclass(frozen=True, eq=False, repr=False)
class Marginal(Value):
    """What the sums of one side may be. This one: the weights, exactly."""

    rho: float = field(default=math.inf, init=False)

    @property
    def _is_exact(self) -> bool:
        return math.isinf(self.rho)

    def _prox(self, p: Any, epsilon: float) -> Any:
        """The potential of an update."""
        return p

    def _slope(self, p: Any, epsilon: float) -> Any:
        """The derivative of `_prox`."""
        return np.ones_like(p)

    def _value(self, f: Any) -> Any:
        """h(f)"""
        return f

    def _share(self, f: Any) -> Any:
        """Sums of rows at the maximum, in weights, or about that."""
        return 1.0

    def _shift(self, other: Any, a: Any, b: Any, f: Any, g: Any) -> Any:
        """The constant, (..., 1), for which f + constant and g - constant are best; alternate updates are slow to find
        it where epsilon is small. other: that of b; one of the two is of this class, the other may be exact."""
        return 0.0


EXACT = Marginal()


class _Soft(Marginal):
    rho: float

    def __post_init__(self) -> None:
        self._set(rho=positive(f"{type(self).__name__} rho", self.rho))


@dataclass(frozen=True, eq=False, repr=False)
class KL(_Soft):
    """Sums r of a plan's rows, not quite a, cost rho KL(r | a) = rho sum_i r_i log(r_i / a_i) - r_i + a_i.

    Parameters
    ----------
    rho : float
        > 0, finite, in units of the cost: mass hardly moves where the cost is far beyond. It is POT's `reg_m`, and
        ``reach**power`` in GeomLoss; OTT's `tau_a` is ``rho / (rho + epsilon)``.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, y = np.zeros((2, 1)), np.array([[0.1], [9.0]])
    >>> a = np.full(2, 0.5)
    >>> r = points.sinkhorn(x, y, a, a, points.Cost(2, 0.01), marginals=points.KL(1.0))
    >>> float(sum(plan.sum() for *_, plan in r.plan())).__round__(2)       # of a mass of 1, half of which is far off
    0.7
    """

    rho: float

    def _prox(self, p: Any, epsilon: float) -> Any:
        return p / (1 + epsilon / self.rho)

    def _slope(self, p: Any, epsilon: float) -> Any:
        return np.full_like(p, 1 / (1 + epsilon / self.rho))

    def _value(self, f: Any) -> Any:
        return -self.rho * np.expm1(-f / self.rho)

    def _share(self, f: Any) -> Any:
        return np.exp(-f / self.rho)

    def _shift(self, other: Any, a: Any, b: Any, f: Any, g: Any) -> Any:
        """For it the sums of rows and of columns have the same sum."""
        first, second = (np.where(w > 0, w * side._share(z), 0).sum(axis=-1, keepdims=True)
                         for w, side, z in ((a, self, f), (b, other, g)))  # fmt: skip
        some = (first > 0) & (second > 0)
        ratio = np.where(some, first, 1) / np.where(some, second, 1)
        return np.log(ratio) / (1 / self.rho + 1 / other.rho)


@dataclass(frozen=True, eq=False, repr=False)
class TV(_Soft):
    """Total variation: sums r of a plan's rows, not quite a, cost rho sum_i abs(r_i - a_i). Mass that would have to be
    moved at a cost of more than rho, or the sum of both where b has one too, stays where it is, at that cost.

    Parameters
    ----------
    rho : float
        > 0, finite, in units of the cost.
    """

    rho: float

    def _prox(self, p: Any, epsilon: float) -> Any:
        return np.clip(p, -self.rho, self.rho)

    def _slope(self, p: Any, epsilon: float) -> Any:
        return (np.abs(p) < self.rho).astype(p.dtype)

    def _value(self, f: Any) -> Any:
        return np.minimum(f, self.rho)

    def _shift(self, other: Any, a: Any, b: Any, f: Any, g: Any) -> Any:
        """The objective is concave and piecewise linear: beyond rho - f_i it no longer gains a_i, beyond g_j - rho it
        loses b_j."""
        turns = np.concatenate([self.rho - f, g - other.rho], axis=-1)
        order, total = turns.argsort(axis=-1), a.sum(axis=-1, keepdims=True)
        masses = np.take_along_axis(np.concatenate([a, b], axis=-1), order, axis=-1)
        lost = masses.cumsum(axis=-1, dtype=np.float64)
        turns, rounding = np.take_along_axis(turns, order, axis=-1), ROUNDINGS * np.finfo(f.dtype).eps * total
        low, high = (np.where(enough & (masses > 0), turns, math.inf).min(axis=-1, keepdims=True)
                     for enough in (lost >= total - rounding, lost > total + rounding))  # fmt: skip
        least = np.where(a > 0, -self.rho - f, -math.inf).max(axis=-1, keepdims=True)
        most = np.where(b > 0, other.rho + g, math.inf).min(axis=-1, keepdims=True)
        low, high = np.maximum(np.minimum(np.maximum(low, 0), high), np.minimum(least, 0)), np.maximum(most, 0)
        return np.minimum(low, high)


def sides_of(marginals: Any) -> tuple[Marginal, Marginal]:
    """Those of a and of b, checked, from what a user gives: one for both, or two, of which one may be None."""
    given = marginals if isinstance(marginals, tuple) else (marginals, marginals)
    kinds = {type(side) for side in given if side is not None}
    if len(given) != 2 or len(kinds) > 1 or not kinds <= {KL, TV}:
        raise TypeError(f"marginals: got {words_for(marginals)}, expected points.KL(rho), points.TV(rho), None, or a "
                        "tuple of two, for a and for b, which are of one kind or None")
    return given[0] or EXACT, given[1] or EXACT

"""Two weighted clouds of points, and Sinkhorn's iterations between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..base.forks import cached_property
from . import formula
from .formula import quiet
from .kernels import Cost, PairCost
from .marginals import EXACT, Marginal
from .pairs import Pairs, Term, ones

EVERY = 10  # iterations between two questions to a GPU whether to stop
SHRINKAGE = 2  # of epsilon, from one iteration to the next, while it is annealed
ROUNDINGS = 8  # of the largest f / epsilon: a smaller error of the sums of rows is not expected
TRUSTED = 0.1  # the largest such error with which iterations count as converged


class Solution(NamedTuple):
    """The potentials that Sinkhorn's iterations have found."""

    f: Any
    g: Any
    converged: bool
    iterations: int

    @property
    def exchanged(self) -> Solution:
        return self._replace(f=self.g, g=self.f)


@dataclass(frozen=True, eq=False)
class Clouds:
    """Two weighted clouds of points, and the cost of transport from one to the other."""

    pairs: Pairs
    a: Any  # (..., m), with all batch axes, in the dtype of sums
    b: Any
    cost: Cost | PairCost
    of_a: Marginal = EXACT
    of_b: Marginal = EXACT

    @property
    def is_balanced(self) -> bool:
        return self.of_a._is_exact and self.of_b._is_exact

    @cached_property
    def exchanged(self) -> Clouds:
        found = Clouds(self.pairs.exchanged, self.b, self.a, self.cost, self.of_b, self.of_a)
        vars(found)["term"] = self.term.exchanged  # the cost need not be symmetric
        return found

    @cached_property
    def among(self) -> Clouds:
        """The first cloud and itself."""
        return Clouds(replace(self.pairs, y=self.pairs.x), self.a, self.a, self.cost, self.of_a, self.of_a)

    @property
    def of_whole_batch(self) -> Clouds:
        """With all batch axes in both clouds, so that gradients are not summed."""
        return replace(self, pairs=replace(self.pairs, **dict(zip("xy", map(self.pairs.broadcast, self.pairs.points)))))

    @cached_property
    def term(self) -> Term:
        return Term(self.pairs, self.cost)

    def epsilons(self, max_iterations: int, most_levels: int) -> Iterator[tuple[float, Term]]:
        """Epsilon of each iteration, and the Term of exp(-C / epsilon). It begins with the cost of the diameter."""
        last, levels = self.cost.epsilon, min(math.ceil(max(self.diameter(), 0)), most_levels)
        for at in range(levels, 0, -1):
            epsilon = last * SHRINKAGE**at
            yield epsilon, Term(self.pairs, replace(self.cost, epsilon=epsilon))
        for _ in range(max_iterations - levels):
            yield last, self.term

    def diameter(self) -> float:
        """The cost of the diameter of all points, in epsilons: its logarithm to the base SHRINKAGE, if it is large."""
        cost = self.cost
        if isinstance(cost, PairCost):
            largest = float(self.term.of_blocks(formula.largest))
            if not math.isfinite(largest):
                raise ValueError(f"cost: got {cost}, whose values are not finite in {self.pairs.dtype}, divided by "
                                 "epsilon")
            return math.log(max(largest, 1), SHRINKAGE)
        radius = float(np.max([_radius(*given) for given in zip((self.term.x, self.term.y), self.pairs.seen)]))
        if not math.isfinite(radius):
            raise ValueError(f"x, y: got points that are not finite in {self.pairs.dtype}, divided by epsilon**(1 / "
                             f"power), {cost._one_length:g}, and squared: expected nearer ones, or a larger "
                             f"epsilon than {cost.epsilon:g}")
        return cost.power * math.log(2 * radius, SHRINKAGE) - math.log(cost.power, SHRINKAGE) if radius else 0.0

    @quiet
    def solved(self, tol: float, max_iterations: int, start: Any = None) -> Solution:
        """Alternating updates of f and g; from a g to start with epsilon is not annealed."""
        f, g = 0 * self.a, 0 * self.b if start is None else start
        epsilons = self.epsilons(max_iterations, max_iterations // 2 if start is None else 0)
        steady = 0  # iterations with the last epsilon
        for at, (epsilon, term) in enumerate(epsilons, start=1):
            before, f = f, self.of_a._prox(-epsilon * term.logsumexp(logs(self.b, g / epsilon)), epsilon)
            is_done = steady and should_check(f, at, max_iterations) and self.is_done(before, f, g, tol)
            if is_done and self.is_balanced:
                return Solution(f, g, self.is_trusted(f, g, tol), at)
            held, g = g, self.of_b._prox(-epsilon * term.exchanged.logsumexp(logs(self.a, f / epsilon)), epsilon)
            if is_done and self.exchanged.is_done(held, g, f, tol):  # which a constant has moved
                return Solution(f, g, self.is_trusted(f, g, tol), at)
            steady += term is self.term
            if not self.is_balanced:
                f, g = self.shifted(f, g)
            elif not steady:
                f, g = self.without_gaps(f, g, epsilon)
        return Solution(f, g, False, max_iterations)

    def shifted(self, f: Any, g: Any) -> tuple[Any, Any]:
        """Potentials with the best constant, see `Marginal._shift`."""
        if not all(self.pairs.sizes):
            return f, g
        if self.of_a._is_exact:
            shift = -self.of_b._shift(self.of_a, self.b, self.a, g, f)
        else:
            shift = self.of_a._shift(self.of_b, self.a, self.b, f, g)
        shift = np.where(np.isfinite(shift), shift, 0)
        return f + shift, g - shift

    def without_gaps(self, f: Any, g: Any, epsilon: float) -> tuple[Any, Any]:
        """Potentials of the same plan, without the constants that annealing leaves in them for points far from others.

        A pair with f_i + g_j far below 0 has no share of the plan. So across a wide gap between the sorted f and -g
        mass goes only down, and none does if the a and the b above it have equal sums: then f and g above it may move
        by a constant, as far as the gap stays wide. Their median becomes 0.
        """
        masses, values = (np.concatenate(pair, axis=-1) for pair in ((self.a, -self.b), (f, -g)))
        values = np.where((masses != 0) & np.isfinite(values), values, 0)
        order, rounding, (m, n) = values.argsort(axis=-1), np.finfo(values.dtype).eps, self.pairs.sizes
        masses, values = (np.take_along_axis(x, order, axis=-1) for x in (masses, values))
        crossing = np.abs(masses.cumsum(axis=-1, dtype=np.float64)[..., :-1])
        is_free = crossing <= ROUNDINGS * rounding * self.a.sum(axis=-1, keepdims=True)
        spare = np.where(is_free, np.maximum(np.diff(values) + epsilon * math.log(rounding), 0), 0)
        shift = np.zeros_like(values)
        shift[..., 1:] = spare.cumsum(axis=-1)
        shift += (values - shift)[..., (m + n - 1) // 2 : (m + n) // 2 + 1].mean(axis=-1, keepdims=True)
        shift = np.take_along_axis(shift, order.argsort(axis=-1), axis=-1)
        return f - shift[..., :m], g + shift[..., m:]

    @quiet
    def solved_alone(self, tol: float, max_iterations: int) -> Solution:
        """For a cloud and itself, where f = g: f becomes the mean of f and its update."""
        f, steady = 0 * self.a, 0
        for at, (epsilon, term) in enumerate(self.epsilons(max_iterations, max_iterations // 2), start=1):
            before, new = f, self.of_a._prox(-epsilon * term.logsumexp(logs(self.a, f / epsilon)), epsilon)
            f = (before + new) / 2
            if steady and should_check(f, at, max_iterations) and self.is_done(before, new, new, tol):
                return Solution(f, f, self.is_trusted(f, f, tol), at)
            steady += term is self.term
        return Solution(f, f, False, max_iterations)

    def is_done(self, before: Any, f: Any, g: Any, tol: float) -> bool:
        """Whether sums of rows of the plan were right before the update, as far as tol and rounding go."""
        if not self.a.size:
            return True
        rows = self.a * self.of_a._share(f)
        off = np.where(rows > 0, rows * np.abs(np.expm1((before - f) / self.cost.epsilon)), 0).sum(axis=-1)
        return bool((off <= np.maximum(self.rounding(f, g), tol) * rows.sum(axis=-1)).all())

    def is_trusted(self, f: Any, g: Any, tol: float) -> bool:
        """Whether sums of rows mean anything, for the digits that f and g have."""
        return not self.a.size or bool((self.rounding(f, g) <= max(tol, TRUSTED)).all())

    def rounding(self, f: Any, g: Any) -> Any:
        """The error of the sums of rows by rounding, relative to these."""
        shares = [np.where(w > 0, np.minimum(side._share(z), 1), 0)
                  for w, side, z in ((self.a, self.of_a, f), (self.b, self.of_b, g))]  # fmt: skip
        share, potentials = (np.concatenate(pair, axis=-1) for pair in (shares, (f, g)))
        largest = np.where(share > 0, share * np.abs(potentials), 0).max(axis=-1) / self.cost.epsilon
        return ROUNDINGS * np.finfo(f.dtype).eps * (1 + largest)

    def gradient(self, solution: Solution, dcost: Any) -> Any:
        """sum_j pi_ij dC_ij / dx_i, times dcost, of points x of unit length."""
        return self.term.gradient(*self.weights_of_gradient(solution, dcost))

    def weights_of_gradient(self, solution: Solution, dcost: Any) -> tuple[Any, Any, Any, Any]:
        """The b, c, rows and columns of this gradient, see `Term.gradient`."""
        epsilon = self.cost.epsilon
        rows, columns = logs(self.a, solution.f / epsilon), logs(self.b, solution.g / epsilon)
        m, _ = self.pairs.sizes
        c = self.pairs.broadcast(-epsilon * dcost[..., None, None], axes=2) * np.ones_like(dcost, shape=(m, 1))
        return ones(self.pairs), c, rows, columns


def logs(weights: Any, potential: Any) -> Any:
    """Logarithms of weights times exp(potential). A point whose potential is inf meets no weight and carries none."""
    return np.where((weights > 0) & ~np.isposinf(potential), np.log(weights) + potential, -math.inf)


def weighed(weights: Any, potential: Any) -> Any:
    """<a, f>; points without weight may have an f of inf."""
    return np.where(weights > 0, weights * potential, 0).sum(axis=-1)


def should_check(array: Any, at: int, last: int) -> bool:
    """Whether to see if iterations have converged, after iteration `at` of `last` at most: on a GPU the host waits."""
    return isinstance(array, np.ndarray) or at % EVERY == 0 or at == last


def _radius(x: Any, seen: Any) -> float:
    """How far the farthest point is from 0."""
    squares = np.where(seen, np.einsum("...f,...f->...", x, x), 0)
    return math.sqrt(float(squares.max())) if squares.size else 0.0

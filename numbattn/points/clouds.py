"""Two weighted clouds of points, and Sinkhorn's iterations between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..forks import cached_property
from .kernels import Cost
from .pairs import Pairs, Term, ones, quiet

EVERY = 10  # iterations between two questions to a GPU whether to stop
SHRINKAGE = 2  # of epsilon, from one iteration to the next, while it is annealed
ROUNDINGS = 8  # of the largest f / epsilon: a smaller error of the sums of rows is not expected


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
    cost: Cost

    @cached_property
    def exchanged(self) -> Clouds:
        return Clouds(self.pairs.exchanged, self.b, self.a, self.cost)

    @cached_property
    def among(self) -> Clouds:
        """The first cloud and itself."""
        return Clouds(replace(self.pairs, y=self.pairs.x), self.a, self.a, self.cost)

    @cached_property
    def term(self) -> Term:
        return Term(self.pairs, self.cost)

    def epsilons(self, max_iterations: int) -> Iterator[tuple[float, Term]]:
        """Epsilon of each iteration, and the Term of exp(-C / epsilon). It begins with the cost of the diameter."""
        last, power = self.cost.epsilon, self.cost.power
        radius = max(_radius(*given) for given in zip((self.term.x, self.term.y), self.pairs.seen))
        if not math.isfinite(radius):
            raise ValueError(f"x, y: got points that are not finite in {self.pairs.dtype}, divided by epsilon**(1 / "
                             f"power), {self.cost._one_length:g}, and squared: expected nearer ones, or a larger "
                             f"epsilon than {last:g}")
        levels = power * math.log(2 * radius, SHRINKAGE) - math.log(power, SHRINKAGE) if radius else 0
        levels = min(math.ceil(max(levels, 0)), max_iterations // 2)
        for at in range(levels, 0, -1):
            epsilon = last * SHRINKAGE**at
            yield epsilon, Term(self.pairs, Cost(power, epsilon))
        for _ in range(max_iterations - levels):
            yield last, self.term

    @quiet
    def solved(self, tol: float, max_iterations: int) -> Solution:
        """Alternating updates of f and g."""
        f, g = 0 * self.a, 0 * self.b
        steady = 0  # iterations with the last epsilon
        for at, (epsilon, term) in enumerate(self.epsilons(max_iterations), start=1):
            before, f = f, -epsilon * term.logsumexp(logs(self.b, g / epsilon))
            if steady and should_check(f, at, max_iterations) and self.is_done(before, f, tol):
                return Solution(f, g, True, at)
            g = -epsilon * term.exchanged.logsumexp(logs(self.a, f / epsilon))
            steady += term is self.term
        return Solution(f, g, False, max_iterations)

    @quiet
    def solved_alone(self, tol: float, max_iterations: int) -> Solution:
        """For a cloud and itself, where f = g: f becomes the mean of f and its update."""
        f, steady = 0 * self.a, 0
        for at, (epsilon, term) in enumerate(self.epsilons(max_iterations), start=1):
            before, new = f, -epsilon * term.logsumexp(logs(self.a, f / epsilon))
            f = (before + new) / 2
            if steady and should_check(f, at, max_iterations) and self.is_done(before, new, tol):
                return Solution(f, f, True, at)
            steady += term is self.term
        return Solution(f, f, False, max_iterations)

    def is_done(self, before: Any, f: Any, tol: float) -> bool:
        """Whether sums of rows of the plan, a exp((before - f) / epsilon), are a."""
        if not self.a.size:
            return True
        some, epsilon = self.a > 0, self.cost.epsilon
        excess = np.where(some, self.a * np.abs(np.expm1((before - f) / epsilon)), 0).sum(axis=-1)
        largest = np.where(some, np.abs(f), 0).max(axis=-1) / epsilon
        allowed = np.maximum(ROUNDINGS * np.finfo(f.dtype).eps * (1 + largest), tol) * self.a.sum(axis=-1)
        return bool((excess <= allowed).all())

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
    """Logarithms of weights times exp(potential)."""
    return np.where(weights > 0, np.log(weights) + potential, -math.inf)


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

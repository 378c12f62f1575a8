"""Entropic optimal transport by Sinkhorn's algorithm, in the log domain.

The dual problem of transport between sum_i a_i delta(x_i) and sum_j b_j delta(y_j) at the cost C = |x - y|^p / p,

    max over f, g of  <a, f> + <b, g> - epsilon <a b^T, exp((f + g - C) / epsilon) - 1>,

is solved by turns:  f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon),  and g likewise.  The plan is
pi_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon).  At the maximum the gradient is that of the objective with f and g
held fixed: f by a, g by b, sum_j pi_ij dC_ij / dx_i by x_i, and (cost - <pi, C>) / epsilon by epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, cast

import ml_dtypes
import numpy as np

from ..checks import A, Array, flag, integer, library, number, warn, words_for
from ..masks import Mask
from ..values import rounded, sum_broadcast
from .checks import batch_of, check_points, check_result, check_vector
from .gradients import SinkhornGradients
from .kernels import Cost
from .pairs import Pairs, Term, of_points, ones, quiet

EVERY = 10  # iterations, after which a GPU is asked whether to stop
SHRINKAGE = 2  # of epsilon, from one iteration to the next, while it is annealed
EQUAL = 1e-5  # relative difference of two sums of weights that are called equal
ROUNDINGS = 8  # of the largest f / epsilon: no sums of rows are expected to be better


@dataclass(frozen=True, eq=False)
class Transport(Generic[A]):
    """What `sinkhorn` returns.

    Attributes
    ----------
    f : array, (..., m)
    g : array, (..., n)
        Dual potentials, float32, or float64 for float64; of `debias` less those of a and of b with themselves.
    cost : array, (...)
        <a, f> + <b, g>.
    converged : bool
        Whether the first marginal was within the tolerance when it was last looked at, in all elements of the batch.
    iterations : int
        How many there were.
    """

    f: A
    g: A
    cost: A
    converged: bool
    iterations: int


def sinkhorn(
    x: A, y: A, a: A, b: A, cost: Cost, *, tol: float = 1e-6, max_iterations: int = 1000, debias: bool = False,
    mask: Mask | Array | None = None,
) -> Transport[A]:  # fmt: skip
    """Entropic optimal transport between weighted points, in memory linear in their number.

    Parameters
    ----------
    x : array, (..., m, d)
    y : array, (..., n, d)
    a : array, (..., m)
    b : array, (..., n)
        Points and their weights: NumPy arrays or CuPy arrays, all of one dtype; weights of points in half precision may
        be float32. Batch axes broadcast. Weights are 0 or more, and sums of b are those of a but for rounding, after
        which b is scaled; CuPy's are not looked into.
    cost : Cost
        ``Cost(power, epsilon)``: |x - y|**power / power, and epsilon, by which the entropy is weighed.
    tol : float, optional
        How far the sums of rows of the plan may be from a: the sum of absolute differences, in parts of the sum of a.
        Less than what rounding leaves, some roundings of the largest f / epsilon, is not asked for.
    max_iterations : int, optional
        1 or more, including those, of ever smaller epsilon, with which it begins.
    debias : bool, optional
        Sinkhorn's divergence: less half the cost of a with itself, and of b with itself. It is 0 where both are the
        same, and never negative.
    mask : a mask of numbattn's, or a boolean array, optional
        Which y_j can be reached from x_i: `Segments` for several problems, the weights of each of which have equal
        sums. Not with debias.

    Returns
    -------
    Transport
        With the potentials f and g, the cost, and whether it has converged.

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
    An iteration updates f, then g, two passes over all pairs. Annealing: the first epsilon is that of the diameter of
    all points, and half of the last one in each iteration, but for at most half of the iterations. On a GPU the
    diameter is read at the beginning, and the stopping rule looks at the device every 10 iterations.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, y = np.random.default_rng(0).random((2, 500, 2))
    >>> a = np.full(500, 1 / 500)
    >>> r = points.sinkhorn(x, y + 1, a, a, points.Cost(power=2, epsilon=0.01), tol=1e-3)
    >>> r.converged, round(float(r.cost), 2)
    (True, 0.96)
    """
    return _Call.of(x, y, a, b, cost, tol, max_iterations, debias, mask).checked()


def sinkhorn_vjp(
    x: A, y: A, a: A, b: A, cost: Cost, *, tol: float = 1e-6, max_iterations: int = 1000, debias: bool = False,
    mask: Mask | Array | None = None,
) -> tuple[Transport[A], Callable[..., SinkhornGradients]]:  # fmt: skip
    """`sinkhorn`, with the gradients of the cost as a closure.

    Parameters
    ----------
    x, y, a, b, cost, tol, max_iterations, debias, mask
        As in `sinkhorn`.

    Returns
    -------
    r : Transport
    backprop : function
        ``backprop(dcost=1.0)`` returns dx, dy, da, db, of the shapes and dtypes of x, y, a, b; a tuple with the
        attribute `kernel`, the gradient of epsilon. dcost, a number or an array (...), is the gradient of ``r.cost``.
        By the envelope theorem: exact where it has converged. da and db are potentials: right for changes that leave
        the sums of a and b equal.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, y = np.random.default_rng(0).random((2, 500, 2))
    >>> a = np.full(500, 1 / 500)
    >>> r, backprop = points.sinkhorn_vjp(x, y + 1, a, a, points.Cost(power=2, epsilon=0.01), tol=1e-3, debias=True)
    >>> dx, dy, da, db = backprop()
    >>> dx.sum(axis=0).round(2)         # the points x are drawn to y
    array([-0.94, -0.99])
    """
    call = _Call.of(x, y, a, b, cost, tol, max_iterations, debias, mask)
    return call.checked(), call.backprop


@dataclass(frozen=True, eq=False)
class _Call:
    """A call that is checked."""

    given: tuple[Any, Any]  # a and b
    clouds: _Clouds
    tol: float
    max_iterations: int
    debias: bool

    @classmethod
    def of(
        cls, x: Any, y: Any, a: Any, b: Any, cost: Any, tol: Any, max_iterations: Any, debias: Any, mask: Any
    ) -> _Call:
        check_points(x, y, {"a": a, "b": b})
        check_vector("a", a, x.shape[-2], "x")
        check_vector("b", b, y.shape[-2], "y")
        if not isinstance(cost, Cost):
            raise TypeError(f"cost: got {words_for(cost)}, expected points.Cost(power, epsilon)")
        tol, max_iterations = number("tol", tol), integer("max_iterations", max_iterations, low=1)
        if not 0 <= tol < math.inf:
            raise ValueError(f"tol: got {tol}, allowed finite and >= 0")
        if flag("debias", debias) and mask is not None:
            raise ValueError("debias: got True with a mask, which does not say which x see each other")
        batch = batch_of(x=x.shape[:-2], y=y.shape[:-2], a=a.shape[:-1], b=b.shape[:-1])
        pairs = Pairs.of(x, y, batch, mask)
        first, second = (np.where(seen, pairs.broadcast(rounded(w, pairs.dtype), axes=1), 0)
                         for w, seen in zip((a, b), pairs.seen))  # fmt: skip
        if isinstance(a, np.ndarray):
            _check_weights(first, second, 4 * float(cast(Any, ml_dtypes).finfo(a.dtype).eps))
        return cls((a, b), _Clouds(pairs, first, _of_sum(second, first), cost), tol, max_iterations, debias)

    @cached_property
    def solved(self) -> list[_Solution]:
        """Between x and y; to remove the bias also between x and x, and between y and y."""
        how = self.tol, self.max_iterations
        between = self.clouds.solved(*how)
        among = [self.clouds.among, self.clouds.exchanged.among] if self.debias else []
        return [between, *(clouds.solved_alone(*how) for clouds in among)]

    def checked(self) -> Transport[Any]:
        """The result, after a warning if it has not converged."""
        if not self.transport.converged:
            warn(f"sinkhorn: not converged to {self.tol:g} within {self.max_iterations} iterations: allow more, or "
                 "take a larger tol or epsilon")
        return self.transport

    @cached_property
    @quiet
    def transport(self) -> Transport[Any]:
        clouds, (r, *alone) = self.clouds, self.solved
        f, g = (r.f, r.g) if not alone else (r.f - alone[0].f, r.g - alone[1].f)
        converged = all(solution.converged for solution in self.solved)
        cost = (_weighed(clouds.a, f) + _weighed(clouds.b, g))[...]  # an array of no axes, where NumPy has a scalar
        return Transport(f, g, cost, converged, r.iterations)

    @quiet
    def backprop(self, dcost: Any = 1.0) -> SinkhornGradients:
        clouds, r = self.clouds, self.transport
        if not library(dcost):
            dcost = np.full_like(r.cost, number("dcost", dcost))
        check_result("dcost", dcost, "cost", r.cost.shape, r.cost)
        dcost = rounded(dcost, r.cost.dtype)
        between, *alone = self.solved
        dx, dy = clouds.gradient(between, dcost), clouds.exchanged.gradient(between.exchanged, dcost)
        if alone:
            dx = dx - clouds.among.gradient(alone[0], dcost)
            dy = dy - clouds.exchanged.among.gradient(alone[1], dcost)
        dx, dy, depsilon = of_points(clouds.term, dx, dy)
        depsilon = depsilon + (dcost * r.cost).sum() / clouds.cost.epsilon
        weights = [sum_broadcast(dcost[..., None] * np.where(np.isfinite(f), f, 0), w.shape)
                   for f, w in zip((r.f, r.g), self.given)]  # fmt: skip
        grads = [rounded(gradient, clouds.pairs.x.dtype) for gradient in (dx, dy, *weights)]
        return SinkhornGradients(*grads, kernel=depsilon[...])


class _Solution(NamedTuple):
    f: Any
    g: Any
    converged: bool
    iterations: int

    @property
    def exchanged(self) -> _Solution:
        return self._replace(f=self.g, g=self.f)


@dataclass(frozen=True, eq=False)
class _Clouds:
    """Two weighted clouds of points, and what it costs to go from one to the other."""

    pairs: Pairs
    a: Any  # (..., m), with all batch axes, in the dtype of sums
    b: Any
    cost: Cost

    @cached_property
    def exchanged(self) -> _Clouds:
        return _Clouds(self.pairs.exchanged, self.b, self.a, self.cost)

    @cached_property
    def among(self) -> _Clouds:
        """The first one and itself."""
        return _Clouds(replace(self.pairs, y=self.pairs.x), self.a, self.a, self.cost)

    @cached_property
    def term(self) -> Term:
        return Term(self.pairs, self.cost)

    def epsilons(self, max_iterations: int) -> Iterator[tuple[float, Term]]:
        """Epsilon of each iteration, and exp(-C / epsilon). It begins with the cost of the diameter."""
        last, power = self.cost.epsilon, self.cost.power
        radius = max(_radius(*given) for given in zip((self.term.x, self.term.y), self.pairs.seen))
        levels = math.log(max((2 * radius) ** power / power, 1), SHRINKAGE)
        levels = min(math.ceil(levels), max_iterations // 2)
        for at in range(levels, 0, -1):
            epsilon = last * SHRINKAGE**at
            yield epsilon, Term(self.pairs, Cost(power, epsilon))
        for _ in range(max_iterations - levels):
            yield last, self.term

    @quiet
    def solved(self, tol: float, max_iterations: int) -> _Solution:
        """Updates of f and g by turns."""
        f, g = 0 * self.a, 0 * self.b
        steady = 0  # iterations with the last epsilon
        for at, (epsilon, term) in enumerate(self.epsilons(max_iterations), start=1):
            before, f = f, -epsilon * term.logsumexp(_logs(self.b, g, epsilon))
            if steady and self.is_time(at, max_iterations) and self.is_done(before, f, tol):
                return _Solution(f, g, True, at)
            g = -epsilon * term.exchanged.logsumexp(_logs(self.a, f, epsilon))
            steady += term is self.term
        return _Solution(f, g, False, max_iterations)

    @quiet
    def solved_alone(self, tol: float, max_iterations: int) -> _Solution:
        """Of a cloud and itself, where f = g: the mean of f and its update."""
        f, steady = 0 * self.a, 0
        for at, (epsilon, term) in enumerate(self.epsilons(max_iterations), start=1):
            before, new = f, -epsilon * term.logsumexp(_logs(self.a, f, epsilon))
            f = (before + new) / 2
            if steady and self.is_time(at, max_iterations) and self.is_done(before, new, tol):
                return _Solution(f, f, True, at)
            steady += term is self.term
        return _Solution(f, f, False, max_iterations)

    def is_time(self, at: int, max_iterations: int) -> bool:
        """Whether to look."""
        return isinstance(self.a, np.ndarray) or at % EVERY == 0 or at == max_iterations

    def is_done(self, before: Any, f: Any, tol: float) -> bool:
        """Whether sums of rows of the plan, a exp((before - f) / epsilon), are a."""
        if not self.a.size:
            return True
        some, epsilon = self.a > 0, self.cost.epsilon
        excess = np.where(some, self.a * np.abs(np.expm1((before - f) / epsilon)), 0).sum(axis=-1)
        largest = np.where(some, np.abs(f), 0).max(axis=-1) / epsilon
        allowed = np.maximum(ROUNDINGS * np.finfo(f.dtype).eps * (1 + largest), tol) * self.a.sum(axis=-1)
        return bool((excess <= allowed).all())

    def gradient(self, solution: _Solution, dcost: Any) -> Any:
        """sum_j pi_ij dC_ij / dx_i, times dcost, of points x of unit length."""
        epsilon = self.cost.epsilon
        rows, columns = _logs(self.a, solution.f, epsilon), _logs(self.b, solution.g, epsilon)
        m, _ = self.pairs.sizes
        c = self.pairs.broadcast(-epsilon * dcost[..., None, None], axes=2) * np.ones_like(dcost, shape=(m, 1))
        return self.term.gradient(ones(self.pairs), c, rows, columns)


def _logs(weights: Any, potential: Any, epsilon: float) -> Any:
    """Logarithms of weights times exp(potential / epsilon)."""
    return np.where(weights > 0, np.log(weights) + potential / epsilon, -math.inf)


@quiet
def _of_sum(b: Any, a: Any) -> Any:
    """b, scaled to the sum of a, which is its own but for rounding: else no plan would have these marginals."""
    ours, theirs = (weights.sum(axis=-1, dtype=np.float64)[..., None] for weights in (b, a))
    return b * np.where(ours > 0, theirs / ours, 1).astype(b.dtype)


def _weighed(weights: Any, potential: Any) -> Any:
    """<a, f>; points without weight may have an f of inf."""
    return np.where(weights > 0, weights * potential, 0).sum(axis=-1)


def _radius(x: Any, seen: Any) -> float:
    """How far the farthest point is from 0."""
    squares = np.where(seen, np.einsum("...f,...f->...", x, x), 0)
    return math.sqrt(float(squares.max())) if squares.size else 0.0


def _check_weights(a: Any, b: Any, rounding: float) -> None:
    """Refuse what NumPy's arrays show to be no weights of two clouds; rounding: the relative error of their sums."""
    for name, weights in (("a", a), ("b", b)):
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError(f"{name}: got weights from {weights.min()} to {weights.max()}, allowed finite and >= 0")
    sums = [weights.sum(axis=-1, dtype=np.float64) for weights in (a, b)]
    apart = np.abs(sums[0] - sums[1]) > max(rounding, EQUAL) * np.maximum(*sums)
    if apart.any():
        one, other = (float(np.atleast_1d(x)[np.atleast_1d(apart)][0]) for x in sums)
        raise ValueError(f"b: got weights whose sum is {other:.9g}, expected {one:.9g}, the sum of a")

"""Entropic optimal transport by Sinkhorn's algorithm, in the log domain.

The dual problem of transport between sum_i a_i delta(x_i) and sum_j b_j delta(y_j) at the cost C = |x - y|^p / p,

    max over f, g of  <a, f> + <b, g> - epsilon <a b^T, exp((f + g - C) / epsilon) - 1>,

is solved by turns:  f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon),  and g likewise.  The plan is
pi_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon).  At the maximum the gradient is that of the objective with f and g
held fixed: f by a, g by b, sum_j pi_ij dC_ij / dx_i by x_i, and (cost - <pi, C>) / epsilon by epsilon.

Where the sums of rows and columns of the plan need not be a and b, <a, f> is <a, h(f)>: see `marginals`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, cast

import ml_dtypes
import numpy as np

from ..base.checks import A, Array, flag, library, number, other_dtype, same_library, warn, words_for
from ..base.forks import cached_property
from ..base.values import broadcasts, rounded, sum_broadcast
from ..masks import Mask
from .checks import (
    TAKER,
    batch_of,
    check_columns,
    check_points,
    check_result,
    check_vector,
    check_weights,
    checked_limits,
)
from .clouds import Clouds, Solution, weighed
from .formula import quiet
from .gradients import SinkhornGradients
from .kernels import Cost, PairCost
from .marginals import KL, TV, sides_of
from .pairs import Pairs, of_points
from .potentials import Moved, Potentials, moved_logarithm
from .tangents import Moving, checked, tangents_of

Marginals = KL | TV | tuple[KL | TV | None, KL | TV | None] | None
EQUAL = 1e-5  # relative difference up to which two sums of weights are taken as equal


@dataclass(frozen=True, eq=False)
class Transport(Generic[A]):
    """The result of `sinkhorn`.

    Attributes
    ----------
    f : array, (..., m)
    g : array, (..., n)
        Dual potentials, float32, or float64 for float64; with `debias`, less those of a and of b with themselves. inf
        for a point that sees no other with weight, of which nothing goes anywhere.
    cost : array, (...)
        <a, f> + <b, g>; with `marginals` the cost that is minimised there, penalties included.
    converged : bool
        Whether the first marginal was within the tolerance when it was last checked, in all elements of the batch.
    iterations : int
        The number of iterations.
    """

    f: A
    g: A
    cost: A
    converged: bool
    iterations: int
    _call: SinkhornCall = field(repr=False)

    @quiet
    def plan(self) -> Iterator[tuple[slice, slice, A]]:
        """The plan pi_ij, how much goes from x_i to y_j, block by block.

        Returns
        -------
        blocks : iterator of (slice, slice, array)
            Rows i, columns j, and the plan there, (..., rows, columns), float32, or float64 for float64. Also with
            `debias` it is the plan between x and y.

        Examples
        --------
        >>> import numpy as np
        >>> from numbattn import points
        >>> x, y = np.random.default_rng(0).random((2, 100, 2))
        >>> a = np.full(100, 0.01)
        >>> r, plan = points.sinkhorn(x, y, a, a, points.Cost(2, 0.1)), np.empty((100, 100))
        >>> for i, j, block in r.plan():
        ...     plan[i, j] = block
        >>> np.allclose(plan.sum(axis=0), a)
        True
        """
        clouds = self._call.clouds
        _, _, *logarithms = clouds.weights_of_gradient(self._call.solved[0].solution, np.ones_like(self.cost))
        return clouds.term.weights(*logarithms)

    @quiet
    def apply(self, values: A, *, transposed: bool = False) -> A:
        """Values at y, carried to x by the plan: means, sum_j pi_ij v_j / sum_j pi_ij, in one pass over all pairs.

        Parameters
        ----------
        values : array, (..., n, e)
            Of the dtype of x, or of sums. Of y itself it is the barycentric projection of x.
        transposed : bool, optional
            Values at x, (..., m, e), to y instead.

        Returns
        -------
        means : array, (..., m, e), float32, or float64 for float64
            0 for a point that sees nothing. Transposed: (..., n, e).

        Raises
        ------
        TypeError, ValueError
            For what does not fit: see `product`.

        Examples
        --------
        >>> import numpy as np
        >>> from numbattn import points
        >>> x, a = np.random.default_rng(0).random((100, 2)), np.full(100, 0.01)
        >>> r = points.sinkhorn(x, x + [3, 0], a, a, points.Cost(2, 1e-3), tol=1e-2)
        >>> np.abs(r.apply(x + [3, 0]) - (x + [3, 0])).max() < 0.05
        np.True_
        """
        potentials, clouds = self._call.solved[0], self._call.clouds
        averages, (of, points) = potentials.over_y, ("y", clouds.pairs.y)
        if flag("transposed", transposed):
            averages, (of, points) = potentials.over_x, ("x", clouds.pairs.x)
        same_library(TAKER, **{of: points, "values": values})
        check_columns("values", values, points.shape[-2], of)
        if values.dtype not in (points.dtype, clouds.pairs.dtype):
            raise other_dtype("values", values.dtype, points.dtype, of)
        batch = clouds.pairs.batch
        if not broadcasts(values.shape[:-2], batch):
            raise ValueError(f"values: got the batch axes {values.shape[:-2]}, allowed are those of the plan, {batch}, "
                             "or fewer")
        means: A = averages.of_columns(clouds.pairs.broadcast(rounded(values, clouds.pairs.dtype)))
        return means

    def primal(self) -> A:
        """What the plan costs without its entropy, <pi, C>, in two passes over all pairs.

        Returns
        -------
        cost : array, (...), float32, or float64 for float64
            At least that of transport without entropy. Also with `debias` it is that of the plan between x and y.

        Examples
        --------
        >>> import numpy as np
        >>> from numbattn import points
        >>> x, a = np.random.default_rng(0).random((100, 2)), np.full(100, 0.01)
        >>> r = points.sinkhorn(x, x + [3, 0], a, a, points.Cost(2, 1e-3), tol=1e-2)
        >>> float(r.primal()).__round__(2)          # 3**2 / 2
        4.5
        """
        cost: A = self._call.solved[0].primal
        return cost


def sinkhorn(
    x: A, y: A, a: A, b: A, cost: Cost | PairCost, *, marginals: Marginals = None, tol: float = 1e-6,
    max_iterations: int = 1000, debias: bool = False, mask: Mask | Array | None = None,
) -> Transport[A]:  # fmt: skip
    """Entropic optimal transport between weighted points, in memory linear in their number.

    Parameters
    ----------
    x : array, (..., m, d)
    y : array, (..., n, d)
    a : array, (..., m)
    b : array, (..., n)
        Points and their weights: NumPy arrays or CuPy arrays, all of one dtype; for points in half precision weights
        may be float32. Batch axes broadcast. Weights are 0 or more, and without `marginals` a and b have the same sum,
        up to rounding: b is scaled. CuPy arrays are not checked.
    cost : Cost or PairCost
        ``Cost(power, epsilon)``: ``|x - y|**power / power``, and epsilon, the weight of the entropy. Or a function of
        your own of pairs of points: ``PairCost(function, epsilon)``.
    marginals : KL, TV or None, or a tuple of two, optional
        Unbalanced transport: how far sums of the plan's rows and columns may be from a and from b, one for both or one
        for each; None is not at all, which takes mass on the other side. ``points.KL(rho)`` and ``points.TV(rho)`` are
        penalties D, the Kullback-Leibler divergence and total variation: of all pi >= 0 it minimises
        ``<pi, C> + epsilon KL(pi | a b^T) + D(pi 1 | a) + D(pi^T 1 | b)``.
    tol : float, optional
        How far the sums of the plan's rows may be from a: the sum of absolute differences, relative to the sum of a;
        with `marginals`, how much the last update may change them. It is not taken below rounding errors, a few
        roundings of the largest f or g / epsilon. Where these come to more than 0.1 it has not converged.
    max_iterations : int, optional
        1 or more, including the first ones, with larger epsilon.
    debias : bool, optional
        Sinkhorn's divergence: less half the cost of a with itself, and of b with itself. It is 0 if both are the same,
        and for powers up to 2 never negative, but for rounding, however large tol is. With `marginals` epsilon / 2
        times the squared difference of the sums of a and b is added, for which this holds then, too; but not with two
        that differ: each cloud alone has its own on both sides, so that equal clouds need not cost 0.
    mask : a mask of numbattn's, or a boolean array, optional
        Which y_j can be reached from x_i: `Segments` for several problems, each with equal sums of weights. Points
        beyond `Lengths`, and those in segments without others, do not count. Not with debias.

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
    An iteration updates f, then g, in two passes over all pairs. Epsilon is annealed: it begins with the cost of the
    diameter of all points, and is halved in each iteration, for at most half of the iterations. Where no mass has to
    cross between groups of points that are far apart, constants of f and g of each group are arbitrary; they are kept
    small. With `marginals` one constant of all has a best value, which an iteration ends with (Sejourne, Vialard and
    Peyre, Faster Unbalanced Optimal Transport, 2022, proposition 2). On a GPU the diameter is read at the beginning,
    and the stopping rule reads the device every 10 iterations.

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
    return SinkhornCall.of(x, y, a, b, cost, marginals, tol, max_iterations, debias, mask).checked()


def sinkhorn_vjp(
    x: A, y: A, a: A, b: A, cost: Cost | PairCost, *, marginals: Marginals = None, tol: float = 1e-6,
    max_iterations: int = 1000, debias: bool = False, mask: Mask | Array | None = None,
) -> tuple[Transport[A], SinkhornBackprop]:  # fmt: skip
    """`sinkhorn`, with the gradients of the cost as a closure.

    Parameters
    ----------
    x, y, a, b, cost, marginals, tol, max_iterations, debias, mask
        As in `sinkhorn`.

    Returns
    -------
    r : Transport
    backprop : SinkhornBackprop
        ``backprop(dcost=1.0)`` returns dx, dy, da, db, of the shapes and dtypes of x, y, a, b; a tuple with the
        attribute `kernel`, the gradient of epsilon. dcost, a number or an array (...), is the gradient of ``r.cost``.
        It uses the envelope theorem, and is exact where it has converged. Without `marginals` da and db are potentials,
        for changes that keep the sums of a and b equal. They are 0 for points that neither have nor see weight.
        ``backprop.hvp(tx, ty)`` has Hessian-vector products.

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
    call = SinkhornCall.of(x, y, a, b, cost, marginals, tol, max_iterations, debias, mask)
    return call.checked(), SinkhornBackprop(call)


class SinkhornBackprop:
    """The closure that `sinkhorn_vjp` returns: ``backprop(dcost=1.0)`` returns dx, dy, da, db."""

    def __init__(self, call: SinkhornCall) -> None:
        self._call = call

    def __call__(self, dcost: float | Array = 1.0) -> SinkhornGradients:
        return self._call.backprop(dcost)

    def hvp(
        self, tx: Array | None, ty: Array | None, ta: Array | None = None, tb: Array | None = None, *,
        dcost: float | Array = 1.0, tol: float = 1e-6, max_iterations: int = 1000,
    ) -> SinkhornGradients:  # fmt: skip
        """The Hessian of the cost, including the change of the potentials, times tangents of points and weights.

        Parameters
        ----------
        tx, ty, ta, tb : arrays or None
            The tangents of x, y, a and b, of the shape of each; other floating dtypes are converted. None is zero. The
            sums of ta and tb are equal, and a weight of 0 stays 0.
        dcost : float or array, (...), optional
            As in ``backprop(dcost)``.
        tol : float, optional
            The residual, relative to the right side, at which the linear system for the tangents of the potentials
            counts as solved; not below rounding errors.
        max_iterations : int, optional
            1 or more, of conjugate gradients.

        Returns
        -------
        tgrads : SinkhornGradients
            The tangents of dx, dy, da, db, of the shapes and dtypes of x, y, a, b: those of da and db are tangents of
            potentials, defined up to a constant. ``tgrads.kernel`` is None.

        Raises
        ------
        TypeError, ValueError
            For what does not fit: see `product`.

        Warns
        -----
        UserWarning
            If conjugate gradients have not converged.

        Notes
        -----
        By implicit differentiation, exact where the transport has converged. However the points move, rows of the plan
        sum to a, and columns to b:

            a_i tf_i + sum_j pi_ij tg_j = sum_j pi_ij tC_ij,  b_j tg_j + sum_i pi_ij tf_i = sum_i pi_ij tC_ij.

        Eliminating tf gives a semi-definite system for tg, with the constants as its null space. Conjugate gradients
        solve it, with two passes over all pairs an iteration, in about twice the square root of the number of
        Sinkhorn's iterations. Eleven more passes compute its right side and the tangents of the gradients, which follow
        from tpi_ij = pi_ij (tf_i + tg_j - tC_ij) / epsilon. With debias there are better conditioned systems for x
        alone and y alone, with one pass an iteration. On a GPU the residual is read every 10 iterations.

        Examples
        --------
        A step of Newton's method towards the points z whose cost of transport to y, plus half their squared distance
        from x, is least:

        >>> import numpy as np
        >>> from scipy.sparse.linalg import LinearOperator, cg
        >>> from numbattn import points
        >>> x, y = np.random.default_rng(0).random((2, 50, 2))
        >>> a, cost = np.full(50, 1 / 50), points.Cost(power=2, epsilon=0.1)
        >>> r, backprop = points.sinkhorn_vjp(x, y, a, a, cost, tol=1e-9)
        >>> def times(t):
        ...     tdx, *_ = backprop.hvp(t.reshape(50, 2), None)
        ...     return (tdx + t.reshape(50, 2)).ravel()
        >>> step, info = cg(LinearOperator((100, 100), times, dtype=float), -backprop().dx.ravel(), rtol=1e-6)
        >>> z = x + step.reshape(50, 2)                       # from z = x
        >>> gradient = points.sinkhorn_vjp(z, y, a, a, cost, tol=1e-9)[1]().dx + z - x
        >>> bool(np.abs(gradient).max() < 1e-3 * np.abs(step).max())
        True
        """
        return self._call.hvp(tx, ty, ta, tb, dcost, tol, max_iterations)


@dataclass(frozen=True, eq=False)
class SinkhornCall:
    """A call that is checked."""

    given: tuple[Any, Any]  # a and b
    clouds: Clouds
    tol: float
    max_iterations: int
    debias: bool

    @classmethod
    def of(
        cls, x: Any, y: Any, a: Any, b: Any, cost: Any, marginals: Any, tol: Any, max_iterations: Any, debias: Any,
        mask: Any,
    ) -> SinkhornCall:  # fmt: skip
        check_points(x, y, {"a": a, "b": b})
        check_vector("a", a, x.shape[-2], "x")
        check_vector("b", b, y.shape[-2], "y")
        if not isinstance(cost, Cost | PairCost):
            raise TypeError(f"cost: got {words_for(cost)}, expected points.Cost(power, epsilon), or a PairCost")
        sides, (tol, max_iterations) = sides_of(marginals), checked_limits(tol, max_iterations)
        if flag("debias", debias) and mask is not None:
            raise ValueError("debias: got True with a mask, which does not say which x see each other")
        batch = batch_of(x=x.shape[:-2], y=y.shape[:-2], a=a.shape[:-1], b=b.shape[:-1])
        pairs = Pairs.of(x, y, batch, mask)
        first, second = (np.where(seen, pairs.broadcast(rounded(w, pairs.dtype), axes=1), 0)
                         for w, seen in zip((a, b), pairs.seen))  # fmt: skip
        clouds = Clouds(pairs, first, second, cost, *sides)
        if isinstance(a, np.ndarray):
            _check_weights(clouds, 4 * float(cast(Any, ml_dtypes).finfo(a.dtype).eps))
        if clouds.is_balanced:
            clouds = replace(clouds, b=_of_sum(second, first))
        return cls((a, b), clouds, tol, max_iterations, debias)

    @cached_property
    def solved(self) -> list[Potentials]:
        """Those between x and y and, for debias, between x and x, and y and y."""
        limits, clouds = (self.tol, self.max_iterations), self.clouds
        between = clouds.solved(*limits)
        if not self.debias:
            return self.potentials(between)
        alone = [among.solved_alone(*limits) for among in (clouds.among, clouds.exchanged.among)]
        is_negative = self.results(self.potentials(between, *alone))[2] < 0
        if is_negative.any():  # from this g it is not, since updates only raise the cost
            start = np.where(is_negative[..., None], alone[1].f, between.g)
            again = clouds.solved(self.tol, max(self.max_iterations - between.iterations, 1), start)
            between = again._replace(iterations=between.iterations + again.iterations)
        return self.potentials(between, *alone)

    def potentials(self, *solutions: Solution) -> list[Potentials]:
        clouds = self.clouds
        return [*map(Potentials, (clouds, clouds.among, clouds.exchanged.among), solutions)]

    @quiet
    def results(self, potentials: list[Potentials]) -> tuple[Any, Any, Any]:
        """f, g and the cost."""
        f, g = _less_alone(potentials, lambda one: one.solution.f)
        of_x, of_y = self.values(potentials, 0.5)
        return f, g, weighed(self.clouds.a, of_x) + weighed(self.clouds.b, of_y)

    def values(self, potentials: list[Potentials], part: float) -> list[Any]:
        """`Potentials.value` of both sides, with their part of the mass of a b^T, unless mass cannot change."""
        part = 0 if self.clouds.is_balanced else part
        found = _less_alone(potentials, lambda one: one.value(part))
        if self.debias or not part:
            return found
        masses = (w.sum(axis=-1, keepdims=True) for w in (self.clouds.b, self.clouds.a))
        return [value + part * self.clouds.cost.epsilon * mass for value, mass in zip(found, masses)]

    def checked(self) -> Transport[Any]:
        """The result, after a warning if it has not converged."""
        if not self.transport.converged:
            warn(f"sinkhorn: not converged to {self.tol:g} within {self.max_iterations} iterations: allow more, or "
                 "take a larger tol or epsilon, or float64 where points are many epsilons apart")
        return self.transport

    @cached_property
    def transport(self) -> Transport[Any]:
        f, g, cost = self.results(self.solved)
        converged = all(one.solution.converged for one in self.solved)
        iterations = self.solved[0].solution.iterations
        return Transport(f, g, cost[...], converged, iterations, self)  # an array, not NumPy's scalar

    @quiet
    def backprop(self, dcost: Any = 1.0) -> SinkhornGradients:
        clouds, cost, dcost = self.clouds, self.transport.cost, self.of_cost(dcost)
        dx, dy, depsilon = self.of_points(dcost)
        paid = sum(_less_alone(self.solved, lambda one: one.penalty))
        depsilon = depsilon + (dcost * (cost - paid)).sum() / clouds.cost.epsilon
        return SinkhornGradients(*self.of_all(dcost, dx, dy, *self.values(self.solved, 1.0)), kernel=depsilon[...])

    def of_points(self, dcost: Any) -> Any:
        """The gradients of points, and that of epsilon by C / epsilon."""
        cost, depsilon = self.clouds.cost, None
        if isinstance(cost, PairCost):
            between, *alone = [one.primal for one in self.solved]
            depsilon = -(dcost * (between - sum(alone) / 2)).sum() / cost.epsilon
            if cost.vjp is None:
                return None, None, depsilon
        dx, dy = _less_alone(self.solved, lambda one: one.clouds.gradient(one.solution, dcost))
        dx, dy, parameter = of_points(self.clouds.term, dx, dy)
        return dx, dy, parameter if depsilon is None else depsilon

    def of_cost(self, dcost: Any) -> Any:
        """A gradient of the cost, checked and in its dtype."""
        cost = self.transport.cost
        if not library(dcost):
            dcost = np.full_like(cost, number("dcost", dcost))
        check_result("dcost", dcost, "cost", cost.shape, cost)
        return rounded(dcost, cost.dtype)

    def of_all(self, dcost: Any, dx: Any, dy: Any, *of_weights: Any) -> list[Any]:
        """The gradients in the dtypes of the arguments; those of weights are of one unit of the cost."""
        clouds, (between, *_) = self.clouds, self.solved
        sides = zip((clouds.a, clouds.b), (between.solution.f, between.solution.g), clouds.pairs.seen)
        seen = [seen & ((w > 0) | np.isfinite(potential)) for w, potential, seen in sides]
        weights = [sum_broadcast(dcost[..., None] * np.where(seen & np.isfinite(gradient), gradient, 0), w.shape)
                   for gradient, seen, w in zip(of_weights, seen, self.given)]  # fmt: skip
        given = clouds.pairs.x, clouds.pairs.y, *self.given
        return [gradient if gradient is None else rounded(gradient, z.dtype)
                for gradient, z in zip((dx, dy, *weights), given)]  # fmt: skip

    def hvp(
        self, tx: Any, ty: Any, ta: Any, tb: Any, dcost: Any, tol: Any, max_iterations: Any
    ) -> SinkhornGradients:
        pairs, (a, b) = self.clouds.pairs, self.given
        if isinstance(self.clouds.cost, PairCost):
            raise TypeError(f"hvp: got {self.clouds.cost}, expected points.Cost, whose second derivatives are known")
        of_points = tangents_of(pairs, tx, ty)
        of_weights = checked(pairs, "ta", ta, a, "a"), checked(pairs, "tb", tb, b, "b")
        limits = checked_limits(tol, max_iterations)
        tgrads, is_found = self.tangent_of_gradients(of_points, of_weights, self.of_cost(dcost), *limits)
        if not is_found:
            warn(f"hvp: conjugate gradients have not converged to {tol:g} within {max_iterations} iterations: allow "
                 "more, or take a larger tol or epsilon")
        return tgrads

    @quiet
    def tangent_of_gradients(
        self, of_points: tuple[Any, Any], of_weights: tuple[Any, Any], dcost: Any, tol: float, max_iterations: int
    ) -> tuple[SinkhornGradients, bool]:
        """The tangents of gradients, and whether those of the potentials were found."""
        clouds, limits, (between, *alone) = self.clouds, (tol, max_iterations), self.solved
        a, b = map(moved_logarithm, (clouds.a, clouds.b), of_weights)
        moved, epsilon = Moved(Moving(clouds.term, *of_points), a, b), clouds.cost.epsilon
        (tF, tf), (tG, tg), is_found = between.tangents(moved, *limits)
        found = [between.tangent_of_gradient(moved, dcost, tF, tG),
                 between.exchanged.tangent_of_gradient(moved.exchanged, dcost, tG, tF)]  # fmt: skip
        values = [tf, tg]
        for side, (potentials, tangent, logarithm) in enumerate(zip(alone, of_points, (a, b))):
            moved = Moved(Moving(potentials.clouds.term, tangent, tangent), logarithm, logarithm)
            (tF, tf), is_found_alone = potentials.tangents_alone(moved, *limits)
            found[side] = found[side] - potentials.tangent_of_gradient(moved, dcost, tF, tF)
            values[side] = values[side] - tf
            is_found &= is_found_alone
        if not (alone or clouds.is_balanced):  # the mass of a b^T
            values = [value if tangent is None else value + tangent.sum(axis=-1, keepdims=True)
                      for value, tangent in zip(values, of_weights[::-1])]  # fmt: skip
        return SinkhornGradients(*self.of_all(dcost, *found, *[epsilon * value for value in values])), is_found


def _less_alone(potentials: list[Potentials], of_x: Callable[[Potentials], Any]) -> list[Any]:
    """What a function finds for x and, by the exchanged Potentials, for y; with debias, less that of each alone."""
    between, *alone = potentials
    found = [of_x(between), of_x(between.exchanged)]
    return [np.where(np.isposinf(one), one, one - of_x(own)) for one, own in zip(found, alone)] if alone else found


@quiet
def _of_sum(b: Any, a: Any) -> Any:
    """b, scaled to the sum of a, which it has up to rounding; else no plan would have these marginals."""
    ours, theirs = (weights.sum(axis=-1, dtype=np.float64)[..., None] for weights in (b, a))
    return b * np.where(ours > 0, theirs / ours, 1).astype(b.dtype)


def _check_weights(clouds: Clouds, rounding: float) -> None:
    """Refuse NumPy arrays that are not weights of clouds with a plan. rounding: the relative error of their sums."""
    check_weights("a", clouds.a)
    check_weights("b", clouds.b)
    a, b = (weights.sum(axis=-1, dtype=np.float64) for weights in (clouds.a, clouds.b))
    apart = np.abs(a - b) > max(rounding, EQUAL) * np.maximum(a, b)
    if not clouds.is_balanced:  # only mass that may not stay needs another
        apart = (clouds.of_a._is_exact & (a > 0) & (b == 0)) | (clouds.of_b._is_exact & (b > 0) & (a == 0))
    if apart.any():
        one, other = (float(np.atleast_1d(x)[np.atleast_1d(apart)][0]) for x in (a, b))
        raise ValueError(f"b: got weights whose sum is {other:.9g}, expected {one:.9g}, the sum of a, or marginals "
                         "that allow for it")

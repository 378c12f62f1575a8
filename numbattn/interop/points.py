"""Sums over pairs of points, in place of attention in what differentiates it: x, y and b are q, k and v. What has no
axis of features, as w and its sums, gets axes of length 1; the weights of a transport are one array, a before b.

Lengths of kernels that are a framework's arrays divide the points there, and factors multiply sums, so that they have
all derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..base.checks import dtype_of_sums, flag
from ..base.gradients import Gradients
from ..base.values import is_foreign, sum_broadcast
from ..masks import Mask
from ..points import Cost, Kernel, PairCost, composition
from ..points.checks import batch_of, check_columns, check_points, checked_limits
from ..points.clouds import Solution
from ..points.kernels import as_exponential, as_kernel
from ..points.logsumexp import LogsumexpCall
from ..points.product import ProductCall
from ..points.sinkhorn import Marginals, SinkhornCall
from .options import Functions, Options, taken_apart, tangent_by


@dataclass(frozen=True)
class PointsOptions(Options):
    """The options of a call over pairs of points."""

    of: type[Call]
    others: tuple[Any, ...]  # the kernel and, of a transport, what stops its iterations

    @property
    def functions(self) -> Functions:
        return FUNCTIONS[self.of]

    def given(self, arrays: Any) -> dict[str, Any]:
        return {"others": self.others, "mask": super().given(arrays)["mask"]}


def taken_apart_of_points(of: type[Call], mask: Any, *others: Any) -> tuple[PointsOptions, list[Any]]:
    apart, arrays = taken_apart(mask=mask)
    own = {field.name: getattr(apart, field.name) for field in fields(apart)}
    return PointsOptions(**own, of=of, others=others), arrays


class Points(NamedTuple):
    """Functions of `numbattn.points` for a framework's arrays, with first and second derivatives, as its `attention`
    has them: see the framework's module. Lengths and factors of kernels may be its arrays, and have derivatives, too.

    Examples
    --------
    >>> import torch
    >>> from numbattn import points
    >>> from numbattn.interop import torch as tensors
    >>> x, length = torch.randn(100, 3, requires_grad=True), torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    >>> s = tensors.points.product(x, x, torch.ones(100, 1), 2.0 * points.Matern(2.5, length))
    >>> s.square().sum().backward()
    >>> x.grad.shape, length.grad.shape
    (torch.Size([100, 3]), torch.Size([3]))
    >>> a = torch.full((100,), 0.01)
    >>> tensors.points.sinkhorn(x, x + 1, a, a, points.Cost(2, 0.1), tol=1e-3, debias=True).backward()    # as a loss
    """

    checked: Callable[..., Any]  # (x=, ...) -> arrays
    run: Callable[..., Any]  # (options, arrays, x, y, b) -> the result of the forward pass
    zeros_like: Callable[..., Any]
    concatenate: Callable[..., Any]

    def product(self, x: Any, y: Any, b: Any, kernel: Kernel, *, mask: Mask | Any = None) -> Any:
        """s of `numbattn.points.product`, which says what it takes and raises."""
        x, y, b = self.checked(x=x, y=y, b=b)
        kernel = as_kernel(kernel, x.shape[-1])
        if not any(leaf._foreign for leaf in kernel._leaves):
            return self.run(*taken_apart_of_points(Product, mask, kernel), x, y, b)
        found = 0
        for factor, term in kernel._terms:
            term, *points = self.of_unit_length(term, x, y)
            term, times = (term, factor[..., None, None]) if is_foreign(factor) else (factor * term, 1)
            found = found + times * self.run(*taken_apart_of_points(Product, mask, term), *points, b)
        return found

    def logsumexp(self, x: Any, y: Any, w: Any, kernel: Kernel, *, mask: Mask | Any = None) -> Any:
        """f of `numbattn.points.logsumexp`, which says what it takes and raises."""
        x, y = self.checked(x=x, y=y)
        (w,) = [self.zeros_like(y[..., 0])] if w is None else self.checked(w=w)
        kernel, x, y = self.of_unit_length(as_exponential(kernel, x.shape[-1]), x, y)
        return self.run(*taken_apart_of_points(Logsumexp, mask, kernel), x, y, w[..., None])[..., 0]

    def sinkhorn(
        self, x: Any, y: Any, a: Any, b: Any, cost: Cost, *, marginals: Marginals = None, tol: float = 1e-6,
        max_iterations: int = 1000, debias: bool = False, mask: Mask | Any = None,
    ) -> Any:  # fmt: skip
        """The cost of `numbattn.points.sinkhorn`, which says what it takes and raises; tol and max_iterations are also
        those of the solver for second derivatives."""
        x, y, a, b = self.checked(x=x, y=y, a=a, b=b)
        if isinstance(cost, PairCost):
            raise TypeError(f"cost: got {cost}, expected points.Cost, whose second derivatives are known")
        weights = [w + self.zeros_like(other.sum(-1))[..., None] for w, other in ((a, b), (b, a))]  # of one batch
        others = cost, marginals, *checked_limits(tol, max_iterations), flag("debias", debias)
        options = taken_apart_of_points(Sinkhorn, mask, *others)
        return self.run(*options, x, y, self.concatenate(weights, -1)[..., None])[..., 0, 0]

    def of_unit_length(self, kernel: Any, x: Any, y: Any) -> Any:
        """The kernel and the points without lengths that are a framework's arrays."""
        if not any(leaf._foreign for leaf in kernel._leaves):
            return kernel, x, y
        if isinstance(kernel, composition.Product):
            given = [(factor, own if isinstance(own, slice) else np.array(own)) for factor, own in kernel.factors]
            factors, *points = zip(*[self.of_unit_length(factor, x[..., at], y[..., at]) for factor, at in given])
            ends = np.cumsum([x.shape[-1] for x in points[0]]).tolist()
            own = [(factor, slice(*ends)) for factor, *ends in zip(factors, [0, *ends], ends)]
            return composition.Product(tuple(own)), *[self.concatenate(z, -1) for z in points]
        length = kernel.length if kernel.length.ndim < 2 else kernel.length[..., None, :]
        return replace(kernel, length=1.0), x / length, y / length


# --------------------------------------------------------------------------------------------------------------- calls
class Call:
    """A call on arrays of NumPy or CuPy: (x, y, b, others, mask, lse=None), with the lse of the forward pass for its
    derivatives. It has `value`, the result and lse, `tangent`, `backprop` and `tangent_of_gradients`."""

    name: ClassVar[str]  # of the third array
    has_vector: ClassVar[bool]  # whether that has an axis of length 1 for features
    call: Any

    @classmethod
    def shapes(cls, m: int, n: int, b: Any, others: Any) -> tuple[tuple[int, ...], int]:
        """Of results, after the batch axes, and of lse."""
        return (m, b.shape[-1]), m


class Product(Call):
    name, has_vector = "b", False

    def __init__(self, x: Any, y: Any, b: Any, others: Any, mask: Any, lse: Any = None) -> None:
        (kernel,) = others
        self.call = ProductCall.of(x, y, b, kernel, mask)

    def value(self) -> tuple[Any, Any]:
        s = self.call.value()
        return s, _zeros(s)

    def tangent(self, tx: Any, ty: Any, tb: Any) -> Any:
        return self.call.tangent(self.call.moving(tx, ty, tb))

    def backprop(self, do: Any) -> Any:
        return self.call.backprop(do)

    def tangent_of_gradients(self, do: Any, tdo: Any, tx: Any, ty: Any, tb: Any) -> Any:
        return self.call.tangent_of_gradients(do, tdo, self.call.moving(tx, ty, tb))


class Logsumexp(Call):
    name, has_vector = "w", True

    def __init__(self, x: Any, y: Any, b: Any, others: Any, mask: Any, lse: Any = None) -> None:
        (kernel,) = others
        self.call = LogsumexpCall.of(x, y, b[..., 0], kernel, mask)

    def value(self) -> tuple[Any, Any]:
        return self.call.f[..., None], 0 * self.call.low

    def tangent(self, tx: Any, ty: Any, tb: Any) -> Any:
        return self.call.tangent(self.call.moving(tx, ty), self.call.tangent_of_w(_vector(tb)))[..., None]

    def backprop(self, do: Any) -> Any:
        return _with_features(self.call.backprop(_vector(do)))

    def tangent_of_gradients(self, do: Any, tdo: Any, tx: Any, ty: Any, tb: Any) -> Any:
        moving = self.call.moving(tx, ty), self.call.tangent_of_w(_vector(tb))
        return _with_features(self.call.tangent_of_gradients(_vector(do), _vector(tdo), *moving))


class Sinkhorn(Call):
    """lse is all potentials."""

    name, has_vector = "a", True

    def __init__(self, x: Any, y: Any, b: Any, others: Any, mask: Any, lse: Any = None) -> None:
        m, n = x.shape[-2], y.shape[-2]
        self.own, batch = (x.shape, y.shape, b.shape), batch_of(x=x.shape[:-2], y=y.shape[:-2], a=b.shape[:-2])
        x, y, b = (np.broadcast_to(z, (*batch, *z.shape[-2:])) for z in (x, y, b))
        given: list[Any] = [x, y, b[..., :m, 0], b[..., m:, 0], *others, mask]
        self.call = SinkhornCall.of(*given)
        if lse is not None:
            f, g, *alone = np.split(lse, np.cumsum([m, n, m, n])[: 3 if self.call.debias else 1], axis=-1)
            solutions = [Solution(f, g, True, 0), *[Solution(f, f, True, 0) for f in alone]]
            vars(self.call)["solved"] = self.call.potentials(*solutions)

    @classmethod
    def shapes(cls, m: int, n: int, b: Any, others: Any) -> tuple[tuple[int, ...], int]:
        *_, debias = others
        return (1, 1), (m + n) * (1 + debias)

    def value(self) -> tuple[Any, Any]:
        cost, (between, *alone) = self.call.checked().cost, [one.solution for one in self.call.solved]
        return cost[..., None, None], np.concatenate([between.f, between.g, *[one.f for one in alone]], axis=-1)

    def tangent(self, tx: Any, ty: Any, tb: Any) -> Any:
        dx, dy, *weights = self.call.backprop()
        given = (dx, tx), (dy, ty), (np.concatenate(weights, axis=-1)[..., None], tb)
        along = sum([(gradient * t).sum(axis=(-2, -1)) for gradient, t in given if t is not None])
        return along[..., None, None].astype(self.call.clouds.pairs.dtype, copy=False)

    def backprop(self, do: Any) -> Any:
        return self.of_own_shape(self.call.backprop(do[..., 0, 0]))

    def tangent_of_gradients(self, do: Any, tdo: Any, tx: Any, ty: Any, tb: Any) -> Any:
        m, dcost = self.own[0][-2], do[..., 0, 0]
        tx, ty, tb = (t if t is None else np.broadcast_to(t, (*dcost.shape, *t.shape[-2:])) for t in (tx, ty, tb))
        ta, tb = (None, None) if tb is None else (tb[..., :m, 0], tb[..., m:, 0])
        found = self.call.hvp(tx, ty, ta, tb, dcost, self.call.tol, self.call.max_iterations)
        if tdo is not None:
            found = map(np.add, found, self.call.backprop(tdo[..., 0, 0]))
        return self.of_own_shape(found)

    def of_own_shape(self, grads: Any) -> Any:
        dx, dy, *weights = grads
        found = dx, dy, np.concatenate(weights, axis=-1)[..., None]
        return [sum_broadcast(gradient, shape) for gradient, shape in zip(found, self.own)]


def _vector(x: Any) -> Any:
    return x if x is None else x[..., 0]


def _with_features(grads: Any) -> Any:
    dx, dy, dw = grads
    return dx, dy, dw[..., None]


def _zeros(o: Any) -> Any:
    return np.zeros(o.shape[:-1], dtype_of_sums(o.dtype), like=o)


# ---------------------------------------------------------------------------------------------------------- functions
class Saved(NamedTuple):
    """A call, and its lse."""

    call: Any
    lse: Any


class Tangents(NamedTuple):
    """The tangents of x, y and b, of one direction or of several, and that of lse, which is 0."""

    directions: list[tuple[Any, ...]]
    several: bool
    tlse: Any

    def each(self, function: Callable[..., Any], *rows: Any) -> Any:
        """Of each direction, with its rows of other arrays; of several the results have one axis more in front."""
        if not self.several:
            return function(*rows, *self.directions[0])
        found = [function(*[x if x is None else x[at] for x in rows], *direction)
                 for at, direction in enumerate(self.directions)]  # fmt: skip
        if isinstance(found[0], np.ndarray) or hasattr(found[0], "shape"):
            return np.stack(found)
        return [np.stack(x) for x in zip(*found)]


def functions_of(kind: type[Call]) -> Functions:
    """`Functions` of a Call."""

    make: Any = kind

    def forward(x: Any, y: Any, b: Any, **given: Any) -> tuple[Any, Saved]:
        call = make(x, y, b, **given)
        o, lse = call.value()
        return o, Saved(call, lse)

    def forward_jvp(x: Any, y: Any, b: Any, *t: Any, tscore: Any, **given: Any) -> Any:
        o, saved = forward(x, y, b, **given)
        count = next((z.shape[0] for z, like in zip(t, (x, y, b)) if z is not None and z.ndim > like.ndim), None)
        each = [t]
        if count is not None:
            each = [tuple([z if z is None else z[at] for z in t]) for at in range(count)]
        lse = saved.lse if count is None else np.broadcast_to(saved.lse, (count, *saved.lse.shape))
        tsaved = Tangents(each, count is not None, np.zeros_like(lse))
        return o, tsaved.each(saved.call.tangent), saved, tsaved

    def saved_of(x: Any, y: Any, b: Any, o: Any, lse: Any, **given: Any) -> Saved:
        return Saved(make(x, y, b, **given, lse=lse), lse)

    def backward(do: Any, saved: Saved, **_: Any) -> Any:
        return Gradients(*saved.call.backprop(do))

    def saved_tangents(saved: Saved, tx: Any, ty: Any, tb: Any, tscore: Any, to: Any, tlse: Any) -> Tangents:
        return Tangents([(tx, ty, tb)], False, tlse)

    def gradients_along(do: Any, saved: Saved, tsaved: Tangents, tdo: Any, *_: Any) -> Any:
        def along(tdo: Any, *t: Any) -> Any:
            return saved.call.tangent_of_gradients(do, tdo, *t)

        return Gradients(*tsaved.each(along, tdo))

    derivatives = saved_of, backward, saved_tangents, gradients_along
    return Functions(forward, forward_jvp, tangent_by(forward_jvp), *derivatives, Described.of(kind), no_laplacian,
                     no_laplacian)  # fmt: skip


def no_laplacian(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the forward Laplacian of a sum over pairs of points: take the trace of its Hessian")


class Described(NamedTuple):
    """What a framework asks of a Problem before there are elements."""

    out_shape: tuple[int, ...]
    dtype: Any
    lse_shape: tuple[int, ...]
    sum_dtype: Any

    @staticmethod
    def of(kind: type[Call]) -> Callable[..., tuple[Described, None]]:
        def describe(x: Any, y: Any, b: Any, others: Any, **_: Any) -> tuple[Described, None]:
            if kind.has_vector:
                check_points(x, y, {kind.name: b})
            else:
                check_points(x, y, **{kind.name: b})
                check_columns(kind.name, b, y.shape[-2], "y")
            of_kernel = others[0]._batches if isinstance(others[0], Kernel) else {}
            batch = batch_of(**{"x": x.shape[:-2], "y": y.shape[:-2], kind.name: b.shape[:-2]}, **of_kernel)
            out, lse = kind.shapes(x.shape[-2], y.shape[-2], b, others)
            sums = dtype_of_sums(x.dtype)
            return Described((*batch, *out), sums if kind.has_vector else x.dtype, (*batch, lse), sums), None

        return describe


FUNCTIONS: dict[type[Call], Functions] = {
    kind: functions_of(kind) for kind in (Product, Logsumexp, Sinkhorn)
}

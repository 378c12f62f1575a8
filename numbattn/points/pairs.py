"""The pairs of points of a call, and for each kernel the points of unit length that backends sum over.

Where backends take differences of points, they take those of the points as they were given, which have all their
digits, and multiply their squares: see `Term.apart`. Points to be multiplied are first moved to a common centre, which
does not change kernels of distances, and divided by the length of the kernel. The gradient of a length l follows from
those of the points x' = (x - centre) / l: dl = -(sum x' dx' + sum y' dy') / l.

Points of half precision around the origin are not moved, and on GPUs are only divided by a power of two near the
length: with their few digits tensor cores multiply them exactly. Others have more digits once they are centred. Whether
points are around the origin is decided on the device, since the host does not wait for a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.backends import run_points
from ..base.checks import dtype_of_sums, library, refuse_foreign
from ..base.forks import cached_property
from ..base.values import moved, sum_broadcast
from ..call.problem import NOTHING_HIDDEN, describe
from ..masks import Mask
from . import factors, formula, kinds
from .composition import Kernel
from .formula import quiet
from .kinds import DIFFERENCES, Apart

ENOUGH = 64  # points, whose median is the centre
SAFE = 8  # of exponents of lengths, so that squares of points that are not divided stay in range


@dataclass(frozen=True, eq=False)
class Pairs:
    """Points x (..., m, d), y (..., n, d) as they were given, batch axes and a mask, fitted."""

    x: Any
    y: Any
    batch: tuple[int, ...]
    mask: Mask

    @classmethod
    def of(cls, x: Any, y: Any, batch: tuple[int, ...], mask: Any = None) -> Pairs:
        """The Pairs of points that are checked."""
        if mask is None:
            return cls(x, y, batch, NOTHING_HIDDEN)
        X, Y = (np.broadcast_to(points, (*batch, *points.shape[-2:])) for points in (x, y))
        _, inputs = describe(X, Y, Y[..., :0], mask=mask)
        return cls(x, y, batch, inputs.mask)

    @property
    def dtype(self) -> Any:
        """The dtype of sums."""
        return dtype_of_sums(self.x.dtype)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.x.shape[-2], self.y.shape[-2]

    @cached_property
    def points(self) -> tuple[Any, Any]:
        """x and y in the dtype of sums."""
        return self.x.astype(self.dtype, copy=False), self.y.astype(self.dtype, copy=False)

    def broadcast(self, x: Any, axes: int = 2) -> Any:
        """An array with all batch axes."""
        shape = *self.batch, *x.shape[x.ndim - axes :]
        return x if x.shape == shape else np.broadcast_to(x, shape)

    @cached_property
    def exchanged(self) -> Pairs:
        return Pairs(self.y, self.x, self.batch, self.mask._transposed(*self.sizes))

    @cached_property
    def seen(self) -> tuple[Any, Any]:
        """Which points of x and of y count, (..., m) and (..., n). Others may be NaN."""
        m, n = self.sizes
        i, j = np.arange(m, like=self.x), np.arange(n, like=self.x)
        _, _, queries, keys = (x if isinstance(x, int) else x[..., None] for x in self.mask._band(m, n))
        rows, columns = i < queries, j < keys
        interval = self.mask._interval(i, n)
        if interval is not None and m:
            rows = rows & (interval.first < interval.end)
            columns = columns & (interval.first.min(-1)[..., None] <= j) & (j < interval.end.max(-1)[..., None])
        return rows, columns

    def only_seen(self, side: int, points: Any) -> Any:
        """An array for points x, side 0, or y, side 1, with 0 for those that do not count."""
        return points if self.mask is NOTHING_HIDDEN else np.where(self.seen[side][..., None], points, 0)

    def centred(self, points: Any) -> Any:
        """x or y, moved to the centre."""
        centre = self.centre  # its axes before those of the points are of size 1
        return points - centre.reshape(centre.shape[max(centre.ndim - points.ndim, 0) :])

    @cached_property
    @quiet
    def centre(self) -> Any:
        """A point in the middle, (..., 1, d), for each element of the batch that both x and y have: the median of each
        feature, which a few points far off do not move, of some of the points."""
        sizes = [math.prod(points.shape[:-2]) for points in (self.x, self.y)]
        which = 0 if sizes[0] < sizes[1] else 1
        points, other, seen = (self.x, self.y)[which], (self.x, self.y)[1 - which], None
        if self.mask is not NOTHING_HIDDEN:
            seen = np.broadcast_to(self.seen[which], (*self.batch, points.shape[-2]))
            seen = sum_broadcast(seen, points.shape[:-1])[..., None] > 0
            points = np.where(seen, points, math.inf)
        own = points.shape[:-2]
        others = (1,) * (len(own) - other.ndim + 2) + other.shape[:-2]
        axes = tuple([axis for axis, n in enumerate(others[len(others) - len(own) :]) if n == 1])
        axes = *axes, points.ndim - 2
        some = (..., slice(None, None, max(points.shape[-2] // ENOUGH, 1)), slice(None))
        points = points[some].astype(self.dtype, copy=False)
        sizes = [1 if axis in axes else n for axis, n in enumerate(points.shape)]
        if not points.size:
            return np.zeros_like(points, shape=sizes)
        # the points of each centre as one axis, in order; those that do not count are its end
        lines = np.moveaxis(points, axes, tuple(range(-1 - len(axes), -1))).reshape(*sizes[:-2], -1, sizes[-1])
        lines = np.sort(lines, axis=-2)
        if seen is None:
            count = lines.shape[-2]
            centre = lines[..., count // 2, :]
        else:
            count = seen[some].sum(axis=axes, keepdims=True)
            centre = np.take_along_axis(lines, (count // 2).reshape(*sizes[:-2], 1, 1), axis=-2)
            points = np.where(np.isinf(points), 0, points)
        # if half of them are not finite, the origin
        centre = np.nan_to_num(centre, nan=0.0, posinf=0.0, neginf=0.0).reshape(sizes)
        if self.x.dtype.itemsize == 2:  # such points keep their few digits where they stay: about the origin they may
            squares = (points * points).sum(axis=axes, keepdims=True, dtype=np.float64) / np.maximum(count, 1)
            is_near = 2 * (centre * centre).sum(axis=-1) <= squares.sum(axis=-1)
            centre = np.where(is_near[..., None], 0, centre)
        return centre.astype(self.dtype)


class Term:
    """One kernel of a sum: its points of unit length, and sums over their pairs.

    exponential: the kind to take in place of the kernel's own.
    """

    def __init__(self, pairs: Pairs, kernel: Kernel, exponential: kinds.Kind | None = None) -> None:
        refuse_foreign("kernel", kernel._leaves)
        self.pairs, self.kernel, self.exponential = pairs, kernel, exponential
        self.kind = exponential or kernel._kind_of(pairs.x.shape[-1])
        self.kind.check(pairs.dtype, 0)
        self.features = kernel._count(pairs.x.shape[-1])
        length, least = kernel._one_length, float(np.finfo(pairs.dtype).tiny)
        if length is not None and length < least:
            raise ValueError(f"{kernel}: got the length {length:g}, allowed {least:.3g} or more in {pairs.dtype}")

    def __reduce__(self) -> Any:  # a Radial pickles its function, from which its kind follows
        return Term, (self.pairs, self.kernel, self.exponential)

    @cached_property
    @quiet
    def units(self) -> tuple[Any, Any]:
        """Points x and y of unit length."""
        x, y = self.moved
        return self.kernel._unit(x), self.kernel._unit(y)

    @property
    def x(self) -> Any:
        return self.units[0]

    @property
    def y(self) -> Any:
        return self.units[1]

    @property
    def moved(self) -> Any:
        """Points x and y as the kernel takes them."""
        points, is_centred = self.pairs.points, self.kernel._is_centred
        if is_centred is False:
            return points
        centred = [*map(self.pairs.centred, points)]
        return centred if is_centred else [*map(np.stack, zip(points, centred))]

    @cached_property
    def exchanged(self) -> Term:
        """The term with the roles of x and y exchanged."""
        return _Exchanged(self)

    @cached_property
    def slopes(self) -> Term:
        """The term with the kernel's derivative by t in its place."""
        other = object.__new__(Term)
        vars(other).update(pairs=self.pairs, kernel=self.kernel, kind=kinds.Derivative(self.kind), units=self.units,
                           apart=self.apart, features=self.features)  # fmt: skip
        return other

    @cached_property
    @quiet
    def apart(self) -> Apart:
        """The points whose differences are taken. Their squares are to be neither too large nor too small."""
        length = self.kernel._one_length
        on_gpu = library(self.pairs.x) != "numpy"
        if length is None or self.kind.is_of_product or (on_gpu and self.features <= DIFFERENCES):
            return Apart(self.x, self.y)
        exponent = math.frexp(length)[1]
        exponent = exponent if abs(exponent) > SAFE else 0
        x, y = map(self.kernel._given, self.pairs.points)
        x, y = (points * 2.0**-exponent if exponent else points for points in (x, y))
        return Apart(x, y, math.ldexp(length, -exponent) ** -2)

    @cached_property
    @quiet
    def in_halves(self) -> tuple[Any, Any, dict[str, float]]:
        """Points of half precision on a GPU, times a power of two, which keeps all digits, and the factor of their
        squared distances; other points with unit length."""
        length = self.kernel._one_length
        if self.pairs.x.dtype.itemsize > 2 or library(self.pairs.x) == "numpy" or length is None:
            return self.x, self.y, {}
        mantissa, exponent = math.frexp(length)
        x, y = (self.kernel._given(points) * 2.0**-exponent for points in self.moved)
        return x, y, {"rate": mantissa**-2}

    @property
    def has_no_pairs(self) -> bool:
        """Whether sums are products of three matrices."""
        return self.kind == kinds.LINEAR and self.pairs.mask is NOTHING_HIDDEN

    def sums(self, b: Any, rows: Any = None, columns: Any = None, **tangents: Any) -> Any:
        """sum_j kappa_ij b_j; b: with all batch axes."""
        if self.has_no_pairs:
            return self.x @ (np.swapaxes(self.y, -2, -1) @ b)
        return self._run("sums", b, rows=rows, columns=columns, **tangents)

    def gradient(self, b: Any, c: Any, rows: Any = None, columns: Any = None, **tangents: Any) -> Any:
        """The gradient of points x of unit length, summed to the batch axes that they have; b, c: as for `sums`."""
        if self.has_no_pairs:
            found = c @ (np.swapaxes(b, -2, -1) @ self.y)
        else:
            found = self._run("gradient", b, c, rows=rows, columns=columns, **tangents)
        return sum_broadcast(found, self.x.shape)

    def weights(self, rows: Any, columns: Any) -> Any:
        """The blocks of kappa_ij exp(rows_i + columns_j): see `formula.weights`."""
        return self.of_blocks(formula.weights, rows, columns)

    def of_blocks(self, function: Any, *args: Any, b: Any = None, tangents: Any = None, **options: Any) -> Any:
        """A function of `formula` or `factors`, of points of unit length, after which there are tangents."""
        x, y, b = map(self.pairs.broadcast, (self.x, self.y, self.y[..., :0] if b is None else b))
        if tangents is not None:
            x, y = (np.concatenate(pair, axis=-1) for pair in zip((x, y), tangents))
        return function(*describe(x, y, b, mask=self.pairs.mask), self.kind, *args, **options)

    def logsumexp(self, columns: Any = None) -> Any:
        return self.logsumexp_and_low(columns)[0]

    def logsumexp_and_low(self, columns: Any = None) -> tuple[Any, Any]:
        """The logsumexp and what its rounding took: with rows = -logsumexp, P = exp(rows_i + columns_j) kappa_ij is
        exp(low_i) times too large."""
        return self._run("logsumexp", self.pairs.y[..., :0].astype(self.pairs.dtype), columns=columns)

    def _run(self, name: str, b: Any, *args: Any, **options: Any) -> Any:
        pairs, apart = self.pairs, self.apart
        self.kind.check(pairs.dtype, (name == "gradient") + ("tangents" in options))
        if isinstance(self.kind, kinds.Times):
            return self.of_blocks(getattr(factors, name), *args, b=b, **options)
        if self.kind.is_of_pairs:
            found = self.of_blocks(getattr(formula, name), *args, b=b, **options)
            return (found, np.zeros_like(found)) if name == "logsumexp" else found
        apart = apart._replace(x=pairs.broadcast(apart.x), y=pairs.broadcast(apart.y))
        if self.features <= DIFFERENCES or self.kind.is_of_product:
            x, y = apart.x, apart.y
        elif name == "logsumexp":
            x, y, halves = self.in_halves
            options |= halves
        else:
            x, y = self.units
        x, y, b = map(pairs.broadcast, (x, y, b))
        problem, inputs = describe(x, y, b, mask=pairs.mask)
        return run_points(problem, name, inputs, self.kind, *args, apart=apart, **options)


class _Exchanged(Term):
    """A term with the roles of x and y exchanged, which takes its points from the other one when it needs them."""

    def __init__(self, other: Term) -> None:
        self.pairs, self.kernel, self.exponential = other.pairs.exchanged, other.kernel, other.exponential
        self.kind, self.features, self.exchanged = other.kind.exchanged, other.features, other

    @cached_property
    def units(self) -> tuple[Any, Any]:
        return self.exchanged.units[::-1]

    @cached_property
    def apart(self) -> Apart:
        x, y, rate = self.exchanged.apart
        return Apart(y, x, rate)

    @cached_property
    def in_halves(self) -> tuple[Any, Any, dict[str, float]]:
        x, y, options = self.exchanged.in_halves
        return y, x, options


@quiet
def terms_of(pairs: Pairs, kernel: Kernel) -> list[tuple[Any, Term]]:
    """The terms of the sum that a kernel is, and factors for arrays (..., rows, columns)."""
    refuse_foreign("kernel", kernel._leaves)
    return [(factor if isinstance(factor, float) else moved(factor, pairs.x).astype(pairs.dtype)[..., None, None],
             Term(pairs, term)) for factor, term in kernel._terms]  # fmt: skip


@quiet
def of_points(term: Term, dx: Any, dy: Any) -> tuple[Any, Any, Any]:
    """The gradients of the points as given, and of the kernel's parameter or None, from those of points of unit length.
    """
    kernel, pairs = term.kernel, term.pairs
    parameter = kernel._of_parameter((term.x, term.y), (dx, dy), [*map(pairs.centred, pairs.points)])
    x, y = term.moved
    dx, dy = kernel._of_points(x, dx), kernel._of_points(y, dy)
    return sum_broadcast(dx, pairs.x.shape), sum_broadcast(dy, pairs.y.shape), parameter


def ones(pairs: Pairs) -> Any:
    """A column of ones for points y."""
    return pairs.broadcast(np.ones_like(pairs.y, dtype=pairs.dtype, shape=(pairs.y.shape[-2], 1)))

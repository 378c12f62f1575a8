"""What all kernels share, and what is made of kernels: sums, products, and kernels of some features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..base.checks import Floats, floats, integers, library, number
from ..base.values import Value, identity, is_foreign, shown
from . import kinds

Features: TypeAlias = slice | tuple[int, ...]
ALL = slice(None)


class Kernel(Value):
    """What all kernels share: ``k1 + k2``, ``2.0 * k``, ``k1 * k2`` and ``k.on(features)`` are kernels, too.

    Notes
    -----
    A factor is a number, or an array over batch axes of points: ``np.array([1.0, 2.0]) * k`` of two clouds.
    A product of Gaussian and Periodic kernels takes as long as one of them. Others, such as ``Matern(1.5).on([0]) *
    Matern(2.5).on([1, 2])``, are computed by array operations, of blocks of all pairs, which takes many times as long.
    Kernels are values, like masks: two are equal if their numbers are equal and they hold the same arrays.
    """

    __array_ufunc__ = None  # so that `array * kernel` comes to __rmul__
    _own_axes = 1  # of lengths
    _is_centred: bool | None = True  # whether it takes centred points; None: both, an axis in front, centred ones last
    _is_linear = True  # whether points of unit length depend on points linearly

    def __add__(self, other: Kernel) -> Kernel:
        return Sum(self._terms + other._terms) if isinstance(other, Kernel) else NotImplemented

    def __mul__(self, factor: Floats | Kernel) -> Kernel:
        if isinstance(factor, Kernel):
            terms = [(_times(c, d), Product(one._factors + other._factors))
                     for c, one in self._terms for d, other in factor._terms]  # fmt: skip
            return terms[0][1] if len(terms) == 1 and _is_one(terms[0][0]) else Sum(tuple(terms))
        found = parameter("kernel: factor", factor)
        return Sum(tuple([(_times(found, other), kernel) for other, kernel in self._terms]))

    __rmul__ = __mul__

    def on(self, features: slice | Sequence[int]) -> Kernel:
        """The kernel of some features of points, those of a slice or of these numbers, from the end if negative.

        Examples
        --------
        >>> from numbattn import points
        >>> points.Gaussian(10.0).on([0]) * points.Periodic(1.0).on([0])        # of the first feature, a time
        Gaussian(length=10.0).on([0]) * Periodic(period=1.0, length=1.0).on([0])
        """
        return Product(((self, _features(features)),))

    @property
    def _factors(self) -> tuple[tuple[Kernel, Features], ...]:
        """The factors of the product that it is: kernels, and the features that each is of."""
        return ((self, ALL),)

    @property
    def _terms(self) -> tuple[tuple[Any, Kernel], ...]:
        """The terms of the sum that it is: factors and kernels."""
        return ((1.0, self),)

    @property
    def _leaves(self) -> tuple[Kernel, ...]:
        """The kernels that it is made of, which have its parameters."""
        return (self,)

    @property
    def _batches(self) -> dict[str, tuple[int, ...]]:
        """The batch axes of its lengths and factors, by names for errors."""
        return {f"{leaf} {name}": x.shape[: max(x.ndim - leaf._own_axes, 0)] for leaf in self._leaves
                for name, x in leaf._arrays().items()}  # fmt: skip

    @property
    def _kind(self) -> kinds.Kind:
        """The kernel of points of unit length."""
        raise NotImplementedError

    def _kinds(self, features: int) -> tuple[tuple[kinds.Kind, int], ...]:
        """Those of its factors, of points of this number of features, and how many features of unit length each has."""
        return ((self._kind, self._count(features)),)

    def _kind_of(self, features: int) -> kinds.Kind:
        """The kind of points of this number of features."""
        found = self._kinds(features)
        factors = [kind for kind, _ in found]
        return factors[0] if _are_one(factors) else kinds.Times(found)

    @property
    def _exponential(self) -> kinds.Kind | None:
        """The kind of which `logsumexp` takes the logarithm, if there is one."""
        return self._kind if self._kind.is_exponential else None

    @property
    def _one_length(self) -> float | None:
        """The number that it divides all features of centred points by, if it is that simple."""
        return None

    def _check(self, features: int) -> None:
        """Refuse points of this number of features, if they do not fit."""

    def _count(self, features: int) -> int:
        """How many features points of unit length have."""
        return features

    def _given(self, x: Any) -> Any:
        """The features that `_one_length` divides."""
        return x

    def _unit(self, x: Any) -> Any:
        """Points of unit length, of points that are centred, if it `_is_centred`."""
        return x

    def _of_points(self, x: Any, gradient: Any) -> Any:
        """The gradient of points from that of points of unit length."""
        return gradient

    def _along(self, x: Any, tx: Any) -> Any:
        """The tangent of points of unit length from that of points: where the Jacobian is symmetric, as `_of_points`.
        """
        return self._of_points(x, tx)

    def _of_moved_points(self, x: Any, tx: Any, gradient: Any) -> Any:
        """The tangent of `_of_points` along x, if it is not linear."""
        raise NotImplementedError

    def _of_parameter(self, units: Any, gradients: Any, points: Any) -> Any:
        """The gradient of its parameter, from points of unit length, x and y, and their gradients; or None. points: x
        and y, centred."""
        return None


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Kernel):
    """A sum of kernels, each times a factor, such as ``2.0 * k1 + k2``."""

    terms: tuple[tuple[Any, Kernel], ...]

    _own_axes = 0

    def __post_init__(self) -> None:
        for factor, _ in self.terms:
            if isinstance(factor, float | np.ndarray) and not np.isfinite(factor).all():
                raise ValueError(f"kernel: factor: got {factor}, allowed finite")

    @property
    def _terms(self) -> tuple[tuple[Any, Kernel], ...]:
        return self.terms

    @property
    def _leaves(self) -> tuple[Kernel, ...]:
        return (self, *[leaf for _, kernel in self.terms for leaf in kernel._leaves])

    def _arrays(self) -> dict[str, Any]:
        return {f"factor of {kernel}": factor for factor, kernel in self.terms if not isinstance(factor, float)}

    def _check(self, features: int) -> None:
        for _, kernel in self.terms:
            kernel._check(features)

    def on(self, features: slice | Sequence[int]) -> Kernel:
        return Sum(tuple([(factor, kernel.on(features)) for factor, kernel in self.terms]))

    def _key(self) -> tuple[Any, ...]:
        return type(self), tuple([(identity(factor), kernel) for factor, kernel in self.terms])

    def __repr__(self) -> str:
        return " + ".join(f"{f'{factor:g}' if isinstance(factor, float) else shown(factor)} * {kernel}"
                          for factor, kernel in self.terms)  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Product(Kernel):
    """The product of kernels, each of some features of points. If all are Gaussians of points of unit length, squared
    distances are added."""

    factors: tuple[tuple[Kernel, Features], ...]

    def __post_init__(self) -> None:
        for leaf in self._leaves if len(self.factors) > 1 else ():
            if leaf._kind.is_of_pairs:
                raise TypeError(f"kernel: got a product with {leaf}, which sinkhorn alone takes")

    def on(self, features: slice | Sequence[int]) -> Kernel:
        if any(own != ALL for _, own in self.factors):
            return super().on(features)
        return Product(tuple([(kernel, _features(features)) for kernel, _ in self.factors]))

    @property
    def _factors(self) -> tuple[tuple[Kernel, Features], ...]:
        return self.factors

    @property
    def _leaves(self) -> tuple[Kernel, ...]:
        return tuple([leaf for kernel, _ in self.factors for leaf in kernel._leaves])

    def _kinds(self, features: int) -> tuple[tuple[kinds.Kind, int], ...]:
        return tuple([one for kernel, own in self.factors for one in kernel._kinds(len(_numbers(own, features)))])

    @property
    def _exponential(self) -> kinds.Kind | None:
        return self._leaves[0]._exponential if _are_one([leaf._kind for leaf in self._leaves]) else None

    @property
    def _is_centred(self) -> bool | None:  # type: ignore[override]
        first, *others = (kernel._is_centred for kernel, _ in self.factors)
        return first if all(one == first for one in others) else None

    @property
    def _is_linear(self) -> bool:  # type: ignore[override]
        return all(kernel._is_linear for kernel, _ in self.factors)

    @property
    def _one_length(self) -> float | None:
        return None if len(self.factors) > 1 else self.factors[0][0]._one_length

    def _check(self, features: int) -> None:
        for kernel, own in self.factors:
            numbers = _numbers(own, features)
            are_there = all(-features <= at < features for at in numbers) and (numbers or own == ALL)
            if not are_there or len({at % features for at in numbers}) < len(numbers):
                raise ValueError(f"kernel: features: got {own}, of points of {features} features, expected some of "
                                 "these, each once")
            kernel._check(len(numbers))

    def _count(self, features: int) -> int:
        return sum(kernel._count(len(_numbers(own, features))) for kernel, own in self.factors)

    def _given(self, x: Any) -> Any:
        return self.factors[0][0]._given(_some(x, self.factors[0][1]))

    def _unit(self, x: Any) -> Any:
        return _beside([one._unit(self._own(x, one, own)) for one, own in self.factors])

    def _own(self, x: Any, kernel: Kernel, own: Features) -> Any:
        """The points that a factor takes."""
        return _some(x[int(kernel._is_centred)] if self._is_centred is None is not kernel._is_centred else x, own)

    def _along(self, x: Any, tx: Any) -> Any:
        return _beside([one._along(self._own(x, one, own), _some(tx, own)) for one, own in self.factors])

    def _of_points(self, x: Any, gradient: Any) -> Any:
        return sum(_of_all(x, own, kernel._of_points(self._own(x, kernel, own), part))
                   for kernel, own, part in self._parts(x, gradient))  # fmt: skip

    def _of_moved_points(self, x: Any, tx: Any, gradient: Any) -> Any:
        return sum(_of_all(x, own, kernel._of_moved_points(self._own(x, kernel, own), _some(tx, own), part))
                   for kernel, own, part in self._parts(x, gradient) if not kernel._is_linear)  # fmt: skip

    def _of_parameter(self, units: Any, gradients: Any, points: Any) -> Any:
        parts = zip(*[self._parts(points[0], z) for z in (*units, *gradients)])
        found = [kernel._of_parameter((x, y), (dx, dy), [_some(z, own) for z in points])
                 for (kernel, own, x), (*_, y), (*_, dx), (*_, dy) in parts]  # fmt: skip
        return tuple(found) if len(found) > 1 else found[0]

    def _parts(self, x: Any, gradient: Any) -> Iterator[tuple[Kernel, Features, Any]]:
        """Each factor, with its part of a gradient of points of unit length."""
        first = 0
        for kernel, own in self.factors:
            count = kernel._count(len(_numbers(own, x.shape[-1])))
            yield kernel, own, gradient[..., first : first + count]
            first += count

    def _key(self) -> tuple[Any, ...]:
        return type(self), tuple([(kernel, str(own)) for kernel, own in self.factors])  # slices have no hash

    def __repr__(self) -> str:
        return " * ".join(str(kernel) if own == ALL else f"{kernel}.on({[*own] if isinstance(own, tuple) else own})"
                          for kernel, own in self.factors)  # fmt: skip


def parameter(name: str, value: Any) -> Any:
    """A number as a float, a list as an array, and an array, of a framework too, as it is."""
    is_array = library(value) or is_foreign(value) or isinstance(value, list | tuple)
    return floats(name, value) if is_array else number(name, value)


def _times(one: Any, other: Any) -> Any:
    """The product of two factors; an array times 1 is itself."""
    if _is_one(one) or _is_one(other):
        return other if _is_one(one) else one
    found = one * other
    return found if isinstance(one, float) and isinstance(other, float) else found[...]  # not NumPy's scalar


def _are_one(factors: list[kinds.Kind]) -> bool:
    """Whether their product is one of them: a single one, or Gaussians, whose squared distances are added."""
    return len(factors) == 1 or all(kind == kinds.GAUSSIAN for kind in factors)


def _is_one(factor: Any) -> bool:
    return isinstance(factor, float) and factor == 1


def _features(given: Any) -> Features:
    if isinstance(given, slice):
        return given
    found = integers("features", given)
    if np.ndim(found) != 1 or not found.size or len({*found.tolist()}) < found.size:
        raise ValueError(f"features: got {given!r}, expected a slice, or numbers of features, each once")
    return tuple(found.tolist())


def _numbers(own: Features, features: int) -> Sequence[int]:
    """Those of the features, of so many."""
    return range(features)[own] if isinstance(own, slice) else own


def _some(x: Any, own: Features) -> Any:
    """These features of x, by views: an array of their numbers would have to be copied to a GPU."""
    if isinstance(own, slice):
        return x[..., own]
    found = np.empty_like(x, shape=(*x.shape[:-1], len(own)))
    for to, at in enumerate(own):
        found[..., to] = x[..., at]
    return found


def _beside(parts: Sequence[Any]) -> Any:
    """Features of points side by side, whose lengths may have other batch axes."""
    batch = np.broadcast_shapes(*[x.shape[:-1] for x in parts])
    return np.concatenate([np.broadcast_to(x, (*batch, x.shape[-1])) for x in parts], axis=-1)


def _of_all(x: Any, own: Features, gradient: Any) -> Any:
    """A gradient of these features, with 0 for the others of x."""
    found = np.zeros_like(gradient, shape=(*gradient.shape[:-1], x.shape[-1]))
    for at, to in enumerate(_numbers(own, x.shape[-1])):
        found[..., to] = gradient[..., at]
    return found

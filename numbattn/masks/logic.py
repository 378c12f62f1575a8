"""Masks made of masks, by `&` and `|`, and the booleans that they stand for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeVar, cast

import numpy as np

from ..base.checks import arrays_for, dtype_of, words_for
from ..base.forks import cached_property
from ..base.origin import Crop
from ..base.values import clip, for_queries
from .bands import Causal, Window
from .base import OPERATORS, Edge, Grid, Interval, Mask, interval_of
from .dense import Bits, Dense
from .intervals import Intervals
from .segments import Frame, Segments

J = TypeVar("J", bound="Joined")


@dataclass(frozen=True, eq=False, repr=False)
class Joined(Mask):
    """What All and AnyOf share."""

    of: tuple[Mask, ...] = ()

    @cached_property
    def _leaves(self) -> tuple[Mask, ...]:
        return tuple(leaf for mask in self.of for leaf in mask._leaves)

    def _fit(self, shape: tuple[int, ...]) -> Mask:
        return self._with(tuple(mask._fit(shape) for mask in self.of))

    def _mapped(self: J, function: Callable[[Any], Any]) -> J:
        return self._with(tuple(mask._mapped(function) for mask in self.of))

    def _transposed(self, seqlen_q: int, seqlen_k: int, frame: Any = None) -> Mask:
        frame = frame if self._segments is None else self._segments
        return self._with(tuple(mask._transposed(seqlen_q, seqlen_k, frame) for mask in self.of))

    def _with(self: J, of: tuple[Mask, ...]) -> J:
        """These masks, joined in the same way; itself if they are its own."""
        return self if of == self.of else type(self)(of)


@dataclass(frozen=True, eq=False, repr=False)
class All(Joined):
    """Visible where every part is; without parts, everywhere."""

    def __post_init__(self) -> None:
        if sum(isinstance(part, Segments) for part in self.of) > 1:
            raise ValueError("&: got more than one Segments, allowed is one")

    @property
    def _parts(self) -> tuple[Mask, ...]:
        return self.of

    @cached_property
    def _is_interval(self) -> bool:
        return all(part._is_interval for part in self.of)

    @cached_property
    def _is_materialised(self) -> bool:
        return any(self._materialises(part) for part in self.of)

    @cached_property
    def _within(self) -> tuple[Mask, ...]:
        if self._alignment is None:
            return ()
        return tuple(part for part in self.of if part._is_aligned)

    @cached_property
    def _others(self) -> tuple[Mask, ...]:
        others = (part for part in self.of if part not in self._within)
        return tuple(part._inside(self._frame) if isinstance(part, AnyOf) else part for part in others)

    def _edges(self, seqlen_q: int, seqlen_k: int) -> tuple[Edge, ...]:
        keys = self._keys_to_last(seqlen_q, seqlen_k)
        return tuple(edge for part in self._others for edge in part._edges(seqlen_q, keys))

    def _intervals(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        keys = self._keys_to_last(i.size, seqlen_k)
        found = tuple(
            interval for part in self._others
            for interval in part._intervals(i, seqlen_k if isinstance(part, AnyOf) else keys)
        )  # fmt: skip
        if not self._within:
            return found
        rows = self._alignment._rows(i, seqlen_k)
        return *found, *(part._aligned(rows) for part in self._within)

    def _gaps(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        return tuple(gap for part in self._others for gap in part._gaps(i, seqlen_k))

    def _grids(self) -> tuple[Grid, ...]:
        return tuple(grid for part in self.of for grid in part._grids())

    def _may_show(self, seqlen_q: int, seqlen_k: int) -> bool:
        return all(part._may_show(seqlen_q, seqlen_k) for part in self.of)

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, AnyOf) else f"{part}" for part in self.of) or "All()"


@dataclass(frozen=True, eq=False, repr=False)
class AnyOf(Joined):
    """Visible where one of several masks is.

    If there are two that show each query an interval of keys, it is an interval with a gap. All others are materialised
    as Bits. The kinds of the masks decide, not their numbers, since kernels are compiled for one or the other.
    """

    _is_interval = False

    @cached_property
    def _is_materialised(self) -> bool:
        return len(self.of) > 2 or not all(mask._is_interval for mask in self.of)

    def _inside(self, frame: Frame | None) -> AnyOf:
        """This mask with those that it joins aligned within a frame."""
        return self if frame is None else AnyOf(tuple(All((frame, *mask._parts)) for mask in self.of))

    def _intervals(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        return self._interval_and_gap(i, seqlen_k)[:1]

    def _gaps(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        return self._interval_and_gap(i, seqlen_k)[1:]

    def _interval_and_gap(self, i: Any, seqlen_k: int) -> tuple[Interval, Interval]:
        one, other = (_keys(mask, i, seqlen_k) for mask in self.of)
        both = (one.first < one.end) & (other.first < other.end)
        gap_end = np.where(both, np.maximum(one.first, other.first), 0)
        return (Interval(np.minimum(one.first, other.first), np.maximum(one.end, other.end)),
                Interval(np.minimum(one.end, other.end), gap_end))

    def _bits(self, seqlen_q: int, seqlen_k: int, frame: Frame | None, array: Any) -> Bits:
        alternatives = self._inside(frame).of
        return Bits.pack(reduce(operator.or_, (visible(mask, seqlen_q, seqlen_k, array) for mask in alternatives)))

    def _may_show(self, seqlen_q: int, seqlen_k: int) -> bool:
        return any(mask._may_show(seqlen_q, seqlen_k) for mask in self.of)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.of))


def all_of(one: Any, other: Any) -> Mask:
    """The `&` of two masks, or of a mask and booleans."""
    return All(as_mask(one, "&")._parts + as_mask(other, "&")._parts)


def any_of(one: Any, other: Any) -> Mask:
    """The `|` of two masks, or of a mask and booleans."""
    one, other = as_mask(one, "|"), as_mask(other, "|")
    if one._segments is not None or other._segments is not None:
        raise ValueError("|: got Segments, whose tokens see nothing beyond their segment: write `segments & (one | "
                         "other)`, which aligns both within each segment")
    return AnyOf(_alternatives(one) + _alternatives(other))


def as_mask(mask: Any, name: str = "mask") -> Mask:
    """A Mask from what a user may give: None, a Mask, a boolean array."""
    if mask is None:
        return All()
    if isinstance(mask, Mask):
        return mask
    if dtype_of(mask) == np.bool_:
        return Dense(mask)
    advice = "numbers that are added to the scores go into score=numbattn.Bias"
    if callable(mask) and not isinstance(mask, type):
        advice = "a function goes into numbattn.Where"
    raise TypeError(f"{name}: got {words_for(mask)}, expected a numbattn mask or a boolean array{arrays_for(mask)}, "
                    f"True = visible ({advice})")


def no_part(part: Mask) -> bool:
    return False


def materialised(
    mask: Mask, seqlen_q: int, seqlen_k: int, array: Any, also: Callable[[Mask], bool] = no_part
) -> Mask:  # fmt: skip
    """The mask as kernels take it: with Bits, in the library of `array`, in place of the parts that are materialised,
    and of those that `also` picks; with the states of blocks in place of functions."""
    if not (mask._is_materialised or any(part._is_tail or part._is_function for part in mask._parts)):
        return mask

    def placed(part: Any) -> Mask:
        if mask._materialises(part) or also(part):
            return part._bits(seqlen_q, seqlen_k, mask._frame, array)
        return part._packed(seqlen_q) if part._is_tail else part._with_states(array) if part._is_function else part

    parts = tuple(map(placed, mask._parts))
    return mask if parts == mask._parts else All(parts)


def cropped(mask: Mask, crop: Crop, segments: Segments | None = None) -> Mask:
    """The mask for a part of the score matrix; parts without an offset stay aligned as in the whole, within these
    segments."""
    if isinstance(mask, Joined):
        segments = segments if mask._segments is None else mask._segments
        return type(mask)(tuple([cropped(part, crop, segments) for part in mask.of]))
    if segments is None or not mask._is_aligned:
        return mask._cropped(crop)
    own = segments._own_key(crop.seqlen_q, crop.seqlen_k)
    if own is not None and isinstance(mask, Causal | Window):
        return replace(cast(Any, mask), offset=own)._cropped(crop)
    rows = segments._rows(np.arange(crop.seqlen_q, like=cast(Any, segments.queries)), crop.seqlen_k)
    first, end = (clip(x, 0, crop.seqlen_k) + 0 * rows.own for x in mask._aligned(rows))
    return Intervals(first, end)._cropped(crop)


def visible(mask: Mask, seqlen_q: int, seqlen_k: int, array: Any) -> Any:
    """The booleans that a mask stands for, in the library of `array` and of its own arrays."""
    mask = mask._placed
    mask = materialised(mask, seqlen_q, seqlen_k, array, also=lambda part: part._is_tail or part._is_function)
    i, j = np.arange(seqlen_q, like=array), np.arange(seqlen_k, like=array)
    lo, hi, queries, keys = (for_queries(for_queries(x)) for x in mask._band(seqlen_q, seqlen_k))
    place, end = (j, seqlen_k) if (frame := mask._placing) is None else frame._places(j, seqlen_q, seqlen_k)
    interval, gaps, i = mask._interval(i, end), mask._gaps(i, seqlen_k), i[:, None]
    found = (i + lo <= j) & (j <= i + hi) & (i < queries) & (j < keys)
    if interval:
        found = found & _between(interval, place)
    for gap in gaps:
        found = found & ~_between(gap, place)
    for cells, rows, cols, packed, _ in mask._grids():
        row, col = _places(i, rows, cells.shape[-2]), _places(j, cols, cells.shape[-1])
        cell = cells[..., row, col]
        found = found & ((cell >> (j % cols).astype(np.uint8) & 1 if packed else cell) != 0)
    return found


def _alternatives(mask: Mask) -> tuple[Mask, ...]:
    """The masks of which at least one has to show an element."""
    return mask.of if isinstance(mask, AnyOf) else (mask,)


def _keys(mask: Mask, i: Any, seqlen_k: int) -> Interval:
    """The keys that queries i see, by a mask that is an interval."""
    lo, hi, queries, keys = map(for_queries, mask._band(i.size, seqlen_k))
    in_band = Interval(i + lo, np.where(i < queries, np.minimum(i + hi + 1, keys), 0))
    return interval_of((in_band, *mask._intervals(i, seqlen_k)), seqlen_k)


def _between(interval: Interval, j: Any) -> Any:
    first, end = map(for_queries, interval)
    return (first <= j) & (j < end)


def _places(i: Any, size: int, count: int) -> Any:
    """The numbers of the cells, of this size, that elements i lie in; a single cell of one element stands for all."""
    return i // size if (size, count) != (1, 1) else 0 * i


OPERATORS |= {"&": all_of, "|": any_of, "dense": visible, "causal": partial(all_of, Causal())}

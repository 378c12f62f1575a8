"""Who sees whom on a grid, by a few operations on integers that hold the places along all axes.

Each axis has a field of the integer, with a guard bit above it. A difference of two such integers, with the guards set
in the first, keeps those of the fields in which nothing was borrowed: one subtraction compares all axes at once. Of
several grids, the first field has the number of the grid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .axis import Numbers, Part, seen_along

PADDING = -1  # in place of a token's number, where there is none


class Fields(NamedTuple):
    """Fields of `bits` for each of so many axes, in an integer of `dtype`, whose sign is free."""

    axes: int
    bits: int
    dtype: Any

    @classmethod
    def of(cls, parts: tuple[Part, ...]) -> Fields:
        """Those of the narrowest dtype that has room for all numbers, from 1 on."""
        longest = max(len(parts), *(axis.size for part in parts for axis in part.axes))
        narrow, wide = (cls.in_dtype(dtype, len(parts[0].axes), len(parts)) for dtype in (np.int32, np.int64))
        return narrow if longest < narrow.largest else wide

    @classmethod
    def in_dtype(cls, dtype: Any, axes: int, parts: int) -> Fields:
        axes += parts > 1
        return cls(axes, (np.iinfo(dtype).bits - 1) // axes - 1, dtype)

    @classmethod
    def longest(cls, axes: int, parts: int) -> int:
        """The most tokens of an axis, or grids, that there is room for."""
        return cls.in_dtype(np.int64, axes, parts).largest - 1

    @property
    def largest(self) -> int:
        return 2**self.bits - 1

    @property
    def guard(self) -> int:
        """That of the first field."""
        return 1 << self.bits

    @property
    def guards(self) -> int:
        return int(self.packed([self.guard] * self.axes))

    @property
    def sign(self) -> int:
        return int(np.iinfo(self.dtype).min)

    def packed(self, places: Any) -> Any:
        """The places along all axes in one integer."""
        return sum(place << axis * (self.bits + 1) for axis, place in enumerate(places))


def words_of(parts: tuple[Part, ...], order: Numbers) -> Numbers:
    """What `seen_by` reads of these tokens, (1 + 2 or 4, tokens): places as a key, then where each window begins,
    without the guards, and where it ends, with the guards.

    Tokens of `extra` see all of their grid and are seen by all of it: as keys they are negative, and what sees them is
    negative where its window ends. Padding sees nothing and is seen by nobody, as are zeros.
    """
    fields, rows = Fields.of(parts), 5 if wraps(parts) else 3
    found = [words_in(part, [number + 1] * (len(parts) > 1), fields, rows) for number, part in enumerate(parts)]
    padding = np.zeros((rows, 1), np.int64)                             # PADDING is the last one
    return np.concatenate([*found, padding], axis=1)[:, order].astype(fields.dtype)


def words_in(part: Part, number: list[int], fields: Fields, rows: int) -> Numbers:
    """The words of a grid's tokens; number: that of the grid, or nothing."""
    seen, axes, at = [seen_along(axis) for axis in part.axes], len(part.axes), part.places
    sign = fields.sign * (part.extra > 0)

    def packed(name: str) -> Any:
        return fields.packed([*number, *(getattr(of_axis, name)[x] + 1 for of_axis, x in zip(seen, at))])

    words = [packed("place"), packed("begin") - fields.guards, packed("last") + fields.guards + sign]
    words += [packed("wrapped_begin") - fields.guards, packed("wrapped_last") + fields.guards + sign]
    first, last = (fields.packed([*number, *[place] * axes]) for place in (1, fields.largest))
    of_extra = [first + fields.sign, *[first - fields.guards, last + fields.guards + fields.sign] * 2]
    return np.stack([np.concatenate([np.full(part.extra, one), x]) for one, x in zip(of_extra, words)])[:rows]


def wraps(parts: tuple[Part, ...]) -> bool:
    """Whether tokens have two windows along an axis."""
    return any(axis.is_periodic for part in parts for axis in part.axes)


def function_of(parts: tuple[Part, ...], is_on_tiles: bool) -> Callable[..., Any]:
    """The function for the words of these grids. is_on_tiles: whether it takes a BoxBits, too, which it leaves to tests
    of whole tiles."""
    fields = Fields.of(parts)
    of_number = fields.guard if len(parts) > 1 else 0
    return seen_by(fields.guards, of_number, wraps(parts), any(part.extra for part in parts), is_on_tiles)


@lru_cache(maxsize=64)
def seen_by(guards: int, of_number: int, has_two: bool, has_extra: bool, is_on_tiles: bool) -> Callable[..., Any]:
    """The function for words of these guards; of_number: that of the grid's number, or 0. has_two: whether tokens have
    two windows."""

    def seen(batch: Any, head: Any, i: Any, j: Any, words: Any) -> Any:
        at = words[0, j]
        inside = (at - words[1, i]) & (words[2, i] - at)
        if has_two:
            inside = inside | ((at - words[3, i]) & (words[4, i] - at))
        if has_extra:
            is_met = (at & words[2, i]) < 0
            return ((inside & guards) == guards) | (is_met & ((inside & of_number) == of_number))
        return (inside & guards) == guards

    def seen_on_tiles(batch: Any, head: Any, i: Any, j: Any, words: Any, rows: Any, boxes: Any, bits: Any) -> Any:
        return seen(batch, head, i, j, words)

    return seen_on_tiles if is_on_tiles else seen

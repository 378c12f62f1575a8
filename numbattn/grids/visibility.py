"""Who sees whom on a grid, by a few operations on integers that hold the places along all axes.

Each axis has a field of the integer, with a guard bit above it. A difference of two such integers, with the guards set
in the first, keeps those of the fields in which nothing was borrowed: one subtraction compares all axes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..masks.where import Where
from .axis import AxisWindow, Numbers, seen_along

TILE = 128  # tokens, a multiple of those of all kernels' tiles
PADDING = -1  # in place of a token's number, where there is none


class Fields(NamedTuple):
    """Fields of `bits` for each of so many axes, in an integer of `dtype`, whose sign is free."""

    axes: int
    bits: int
    dtype: Any

    @classmethod
    def of(cls, axes: tuple[AxisWindow, ...]) -> Fields:
        """Those of the narrowest dtype that has room for all places, from 1 on, and for one more number."""
        for dtype in (np.int32, np.int64):
            bits = (np.iinfo(dtype).bits - 1) // len(axes) - 1
            if max(axis.size for axis in axes) + 1 < 2**bits:
                break
        return cls(len(axes), bits, dtype)

    @property
    def largest(self) -> int:
        return 2**self.bits - 1

    @property
    def guards(self) -> int:
        return int(self.packed([1 << self.bits] * self.axes))

    @property
    def sign(self) -> int:
        return int(np.iinfo(self.dtype).min)

    def packed(self, places: Any) -> Any:
        """The places along all axes in one integer."""
        return sum(place << axis * (self.bits + 1) for axis, place in enumerate(places))


def words_of(axes: tuple[AxisWindow, ...], extra: int, order: Numbers) -> Numbers:
    """What `seen_by` reads of these tokens, (1 + 2 or 4, tokens): places as a key, then where each window begins,
    without the guards, and where it ends, with the guards.

    Tokens of `extra`, the first ones, see all and are seen by all: as keys they are negative, and what sees them is
    negative where its window ends. Padding sees nothing and is seen by nobody, as are zeros.
    """
    fields, found = Fields.of(axes), [seen_along(axis) for axis in axes]
    at = np.indices([axis.size for axis in axes]).reshape(len(axes), -1)

    def packed(name: str) -> Any:
        return fields.packed([getattr(seen, name)[x] + 1 for seen, x in zip(found, at)])

    def in_order(of_grid: Any, of_extra: int) -> Any:
        return np.concatenate([np.full(extra, of_extra), of_grid, [0]])[order]     # PADDING is the last one

    first, last = (int(fields.packed([place] * len(axes))) for place in (1, fields.largest))
    rows = [in_order(packed("place"), PADDING)]
    for name in ("", "wrapped_") if wraps(axes) else ("",):
        rows += [in_order(packed(f"{name}begin") - fields.guards, first - fields.guards),
                 in_order(packed(f"{name}last") + fields.guards + fields.sign * (extra > 0),
                          last + fields.guards + fields.sign)]  # fmt: skip
    return np.stack(rows).astype(fields.dtype)


def wraps(axes: tuple[AxisWindow, ...]) -> bool:
    """Whether tokens have two windows along an axis."""
    return any(axis.is_periodic for axis in axes)


def mask_of(axes: tuple[AxisWindow, ...], extra: int, order: Numbers, block_size: int) -> Where:
    """The mask of these tokens, see `words_of`."""
    function = seen_by(Fields.of(axes).guards, wraps(axes), extra > 0)
    return Where(function, arrays=[words_of(axes, extra, order)], block_size=block_size)._with(_is_private=True)


def on_tiles(axes: tuple[AxisWindow, ...], extra: int) -> str:
    """How backends compute the same on whole tiles of tokens; "" if their integers are too wide for that."""
    fields = Fields.of(axes)
    return f"fields={fields.guards},{wraps(axes):d},{extra > 0:d}" if fields.dtype == np.int32 else ""


@lru_cache(maxsize=64)
def seen_by(guards: int, has_two: bool, has_extra: bool) -> Callable[..., Any]:
    """The function for words of these guards. has_two: whether tokens have two windows."""

    def seen(batch: Any, head: Any, i: Any, j: Any, words: Any) -> Any:
        at = words[0, j]
        inside = (at - words[1, i]) & (words[2, i] - at)
        if has_two:
            inside = inside | ((at - words[3, i]) & (words[4, i] - at))
        if has_extra:
            return ((inside & guards) == guards) | ((at & words[2, i]) < 0)
        return (inside & guards) == guards

    return seen

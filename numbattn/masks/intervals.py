"""Masks that show each query an interval of keys: Prefix and Intervals. For Segments see `segments`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.checks import Integers, integer_array, integers
from ..base.origin import FAR, Crop
from ..base.values import Held, clip, for_queries, given
from .bands import Causal, Lengths
from .base import Interval, Mask, QuerySegments, broadcast


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """Key j is visible to query i iff ``j < lengths`` or ``j <= i + offset``: causal after a prefix that all see.

    Do not add `Causal`, which would hide the prefix.

    Parameters
    ----------
    lengths : int or integer array over the batch axes
        0 <= lengths <= seqlen_k.
    offset : int or integer array over the batch axes, optional
        The own key of query 0. Default: seqlen_k - seqlen_q, so that the last query sees every key; in a `KVCache`,
        every key of its sequence. Within `Segments` a Prefix without an offset begins with each segment and ends with
        it at the latest; with an offset both numbers count the keys of the packed array. For another length in each
        segment use `Intervals`.

    Examples
    --------
    >>> import numbattn as na
    >>> na.Prefix(2).dense(4, 4).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    """

    lengths: Integers
    offset: Integers | None = None

    _crops_by_sequence = True
    _examples = (("prefix", lambda m, n: Prefix(np.full((1, 1), n // 4))),)

    def __post_init__(self) -> None:
        self._set(
            lengths=integers("Prefix lengths", self.lengths),
            offset=None if self.offset is None else integers("Prefix offset", self.offset),
        )

    def _intervals(self, i: Any, seqlen_k: Any) -> tuple[Interval, ...]:
        offset = seqlen_k - i.size if self.offset is None else self.offset
        return (self._aligned(QuerySegments(0, seqlen_k, i + for_queries(clip(offset, -FAR, FAR)))),)

    def _aligned(self, rows: QuerySegments) -> Interval:
        return Interval(0, np.maximum(rows.first + for_queries(clip(self.lengths, 0, FAR)), rows.own + 1))

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return Held("lengths", self.lengths, (), seqlen_k), *given(offset=self.offset)

    def _cropped(self, crop: Crop) -> Prefix:
        return Prefix(crop.keys_before(self.lengths), crop.offset(self.offset))

    def _may_show(self, seqlen_q: int, seqlen_k: int) -> bool:
        return Lengths(self.lengths)._may_show(seqlen_q, seqlen_k) or Causal(self.offset)._may_show(seqlen_q, seqlen_k)


@dataclass(frozen=True, eq=False, repr=False)
class Intervals(Mask):
    """Key j is visible to query i iff ``first[..., i] <= j < end[..., i]``.

    Parameters
    ----------
    first, end : integer array, (..., seqlen_q)
        Any integers: they are clipped to the keys, and where first >= end a query sees nothing. Each broadcasts as in
        NumPy, axes of size 1 and missing axes included, against the batch axes, heads included, and seqlen_q.

    Examples
    --------
    >>> import numbattn as na
    >>> na.Intervals([0, 0, 2, 3], [2, 4, 4, 3]).dense(4, 4).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 1, 1],
           [0, 0, 1, 1],
           [0, 0, 0, 0]])
    """

    first: Integers
    end: Integers

    _axis_of_queries = -1
    _examples = (("intervals", lambda m, n: Intervals(*(np.broadcast_to(x, (1, 1, m)) for x in (0, n)))),)

    def __post_init__(self) -> None:
        self._set(
            first=integer_array("Intervals first", self.first, "(..., seqlen_q)"),
            end=integer_array("Intervals end", self.end, "(..., seqlen_q)"),
        )

    def _fit(self, shape: tuple[int, ...]) -> Mask:
        first, end = (broadcast(f"Intervals {name}", x, shape[:-1], 1) for name, x in self._arrays().items())
        return self if first is self.first and end is self.end else Intervals(first, end)

    def _intervals(self, i: Any, seqlen_k: Any) -> tuple[Interval, ...]:
        return (Interval(self.first, self.end),)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return Held("first", self.first, (seqlen_q,)), Held("end", self.end, (seqlen_q,))

    def _cropped(self, crop: Crop) -> Intervals:
        first, end = (
            clip(crop.of_queries(f"mask: Intervals {name}", x, axis=-1), -FAR, FAR) - crop.first_key
            for name, x in self._arrays().items()
        )
        return Intervals(first, end)

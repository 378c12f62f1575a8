"""Masks that are bands: Causal, Window, Lengths and First, and the Lengths of a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.checks import Integers, integer, integers
from ..base.origin import FAR, Crop
from ..base.values import Held, clip, for_queries, given, shown
from .base import Edge, Interval, Mask, QuerySegments

INSTEAD = "; an offset may be traced: Window(0, None, offset - left) & Causal(offset + right)"


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """Key j is visible to query i iff ``j <= i + offset``.

    Parameters
    ----------
    offset : int or integer array over the batch axes, optional
        Default: seqlen_k - seqlen_q, so that the last query sees every key; within `Segments` and in a `KVCache`, every
        key of its segment or sequence. With 0 the first query sees the first key.

    Examples
    --------
    >>> import numbattn as na
    >>> na.Causal(offset=0).dense(2, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0]])
    """

    offset: Integers | None = None

    _crops_by_sequence = True
    _examples = (("causal", lambda m, n: Causal()),)

    def __post_init__(self) -> None:
        self._set(offset=None if self.offset is None else integers("Causal offset", self.offset))

    def _edges(self, seqlen_q: int, seqlen_k: Any) -> tuple[Edge, ...]:
        return (Edge("hi", seqlen_k, -seqlen_q) if self.offset is None else Edge("hi", self.offset),)

    def _aligned(self, rows: QuerySegments) -> Interval:
        return Interval(rows.first, rows.own + 1)

    def _transposed(self, seqlen_q: int, seqlen_k: int, frame: Any = None) -> Window:
        return Window(0, None, _negative(self.offset))

    def _cropped(self, crop: Crop) -> Causal:
        return Causal(crop.offset(self.offset))

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return given(offset=self.offset)


@dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """Key j is visible to query i iff ``i + offset - left <= j <= i + offset + right``.

    Parameters
    ----------
    left, right : int or None
        How many keys before and after its own a query sees; None = all of them. Either may be negative, but not their
        sum. FlashAttention's -1 is None here.
    offset : int or integer array over the batch axes, optional
        The own key of query 0. Default: seqlen_k - seqlen_q, which aligns the last query with the last key, in
        `Segments` and in a `KVCache` of each segment or sequence; 0 aligns the first ones.

    Examples
    --------
    >>> import numbattn as na
    >>> na.Window(1, 0).dense(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]])
    """

    left: int | None
    right: int | None
    offset: Integers | None = None

    _crops_by_sequence = True
    _examples = (("window", lambda m, n: Window(n // 8, 0)),)

    def __post_init__(self) -> None:
        self._set(
            left=None if self.left is None else integer("Window left", self.left, instead=INSTEAD),
            right=None if self.right is None else integer("Window right", self.right, instead=INSTEAD),
            offset=None if self.offset is None else integers("Window offset", self.offset),
        )
        if self.left is not None and self.right is not None and self.left + self.right < 0:
            raise ValueError(f"Window: got left {self.left} and right {self.right}, between which there is no key; "
                             "None = unlimited")

    def _edges(self, seqlen_q: int, seqlen_k: Any) -> tuple[Edge, ...]:
        at, shift = (seqlen_k, -seqlen_q) if self.offset is None else (self.offset, 0)
        left = () if self.left is None else (Edge("lo", at, shift - self.left),)
        return left if self.right is None else (*left, Edge("hi", at, shift + self.right))

    def _aligned(self, rows: QuerySegments) -> Interval:
        left, right = (FAR if x is None else clip(x, -FAR, FAR) for x in (self.left, self.right))
        return Interval(rows.own - left, rows.own + right + 1)

    def _transposed(self, seqlen_q: int, seqlen_k: int, frame: Any = None) -> Window:
        return Window(self.right, self.left, _negative(self.offset))

    def _cropped(self, crop: Crop) -> Window:
        return Window(self.left, self.right, crop.offset(self.offset))

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return given(offset=self.offset)

    def __repr__(self) -> str:
        return f"Window({self.left}, {self.right}{'' if self.offset is None else f', offset={shown(self.offset)}'})"


@dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    """Key j is visible iff ``j < keys``, query i sees something iff ``i < queries``.

    Keys and values beyond their length are never used, even if they are NaN. In an ``|`` this is a condition like any
    other: what it hides may be read, and must be finite. With `Segments` both numbers count the packed arrays; `First`
    counts the keys of each segment.

    Parameters
    ----------
    keys, queries : int or integer array over the batch axes, optional
        0 <= keys <= seqlen_k, 0 <= queries <= seqlen_q. Default: all of them. For inputs with the batch axes (B, H),
        lengths by batch have the shape (B, 1). CuPy arrays are not checked: what is out of range is clamped.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> na.Lengths(keys=np.array([1, 3])).dense(1, 3).astype(int)
    array([[[1, 0, 0]],
    <BLANKLINE>
           [[1, 1, 1]]])
    """

    keys: Integers | None = None
    queries: Integers | None = None

    _crops_by_sequence = _may_truncate = True
    _examples = (("lengths", lambda m, n: Lengths(np.full((1, 1), n))),)

    def __post_init__(self) -> None:
        self._set(
            keys=None if self.keys is None else integers("Lengths keys", self.keys),
            queries=None if self.queries is None else integers("Lengths queries", self.queries),
        )

    def _edges(self, seqlen_q: int, seqlen_k: Any) -> tuple[Edge, ...]:
        edges = Edge("keys", self.keys), Edge("queries", self.queries)
        return tuple(edge for edge in edges if edge.at is not None)

    def _transposed(self, seqlen_q: int, seqlen_k: int, frame: Any = None) -> Lengths:
        return Lengths(self.queries, self.keys)

    def _cropped(self, crop: Crop) -> Lengths:
        keys = None if self.keys is None else crop.keys_before(self.keys)
        return Lengths(keys, None if self.queries is None else crop.queries_before(self.queries))

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        held = (Held("keys", self.keys, (), seqlen_k), Held("queries", self.queries, (), seqlen_q))
        return tuple(h for h in held if h.array is not None)


@dataclass(frozen=True, eq=False, repr=False)
class First(Mask):
    """Key j is visible iff ``j < n``, such as the sinks that go with a window: the first keys of each sequence.

    They are counted from the beginning, within `Segments` of each segment, in a `KVCache` of each sequence. Where a
    sequence has fewer keys, all of them are visible. Unlike keys beyond `Lengths`, hidden keys must be finite.

    Parameters
    ----------
    n : int or integer array over the batch axes
        0 or more. CuPy arrays are not checked: negative numbers are taken as 0. For another number in each segment use
        `Intervals`.

    Examples
    --------
    >>> import numbattn as na
    >>> na.First(2).dense(1, 5).astype(int)
    array([[1, 1, 0, 0, 0]])
    >>> streaming = na.Causal() & (na.Window(1, 0) | na.First(1))
    >>> (na.Segments([0, 3, 7]) & streaming).dense(7, 7).astype(int)
    array([[1, 0, 0, 0, 0, 0, 0],
           [1, 1, 0, 0, 0, 0, 0],
           [1, 1, 1, 0, 0, 0, 0],
           [0, 0, 0, 1, 0, 0, 0],
           [0, 0, 0, 1, 1, 0, 0],
           [0, 0, 0, 1, 1, 1, 0],
           [0, 0, 0, 1, 0, 1, 1]])
    """

    n: Integers

    _is_aligned = _crops_by_sequence = _may_truncate = True
    _examples = (("first", lambda m, n: First(np.full((1, 1), 4))),)

    def __post_init__(self) -> None:
        n = integers("First n", self.n)
        self._set(n=integer("First n", n, low=0) if isinstance(n, int) else n)

    def _edges(self, seqlen_q: int, seqlen_k: Any) -> tuple[Edge, ...]:
        return (Edge("keys", self.n),)

    def _aligned(self, rows: QuerySegments) -> Interval:
        return Interval(rows.first, rows.first + for_queries(clip(self.n, 0, FAR)))

    def _transposed(self, seqlen_q: int, seqlen_k: int, frame: Any = None) -> Mask:
        if frame is not None:
            return super()._transposed(seqlen_q, seqlen_k, frame)
        return Lengths(queries=clip(self.n, 0, seqlen_k))

    def _cropped(self, crop: Crop) -> First:
        return First(crop.keys_before(self.n))

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return (Held("n", self.n, (), math.inf),)


@dataclass(frozen=True, eq=False, repr=False)
class Cached(Lengths):
    """How many keys and queries each sequence of a cache has: in an ``&`` with it, masks without an offset of their own
    align a sequence's last query with its last key, not with the last one that the cache has room for."""

    _is_frame = True
    _may_truncate = False

    def _stored(self, seqlen_k: int) -> Any:
        """How many keys each sequence of a cache has in this many rows."""
        return clip(self.keys, 0, seqlen_k)

    def _own_key(self, seqlen_q: int, seqlen_k: int) -> Any:
        """The own key of query 0."""
        keys, counts = self._counts(seqlen_q, seqlen_k)
        return clip(keys, 0, seqlen_k) - counts

    def _last_keys(self, seqlen_q: int, seqlen_k: int) -> Any:
        """How many keys there are up to the own key of query seqlen_q - 1, as if there were such a query."""
        keys, counts = self._counts(seqlen_q, seqlen_k)
        return keys if self.queries is None else keys + (seqlen_q - counts)

    def _counts(self, seqlen_q: int, seqlen_k: int) -> tuple[Any, Any]:
        return seqlen_k if self.keys is None else self.keys, seqlen_q if self.queries is None else self.queries


def _negative(offset: Any) -> Any:
    return None if offset is None else -clip(offset, -FAR, FAR)

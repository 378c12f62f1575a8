"""Masks: who sees whom. True = visible.

Every mask is a band, an interval of keys for each query, gaps in it and some grids, and `&` joins them:

- a `Band` holds the pairs with ``i + lo <= j <= i + hi``, ``i < queries`` and ``j < keys``. Causal, Window and Lengths
  are bands, and two bands intersect in a band. Which keys a tile has to visit, and which of its elements need a test,
  follows from these four numbers;
- an `Interval` holds the pairs with ``first[i] <= j < end[i]``: Segments, Prefix and Intervals, see intervals.py, and
  Causal and Window where they are aligned within Segments;
- a gap is an `Interval` of keys that are hidden: two intervals joined by `|` are the one from the first key of both to
  the last, but for the gap between them;
- a `Grid` is an array of cells laid over the score matrix, each cell of rows x cols elements: Dense (1 x 1), Bits
  (1 x 8, one bit an element) and BlockSparse (any size).

The arrays in a mask are NumPy's or CuPy's (NumPy's functions pass CuPy's arrays on to CuPy); `_like` brings them to one
library, which bands, intervals and grids expect. Device memory is never read, but for `Bits.tree` and offsets or
lengths that have no axes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from .checks import Array, integer, library, shape_of, words_for
from .values import Value, broadcasts, moved, shown

Integers: TypeAlias = int | Sequence[int] | Array
FAR = 2**40  # beyond every sequence, and far from overflow


class Band(NamedTuple):
    """Key j is visible to query i iff i + lo <= j <= i + hi, i < queries and j < keys.

    Integers, or integer arrays over the batch axes; -seqlen_q <= lo, hi <= seqlen_k.
    """

    lo: Any
    hi: Any
    queries: Any
    keys: Any


class Edge(NamedTuple):
    """A bound of a Band: at + shift. Of all edges of a side the narrowest holds."""

    side: str  # "lo", "hi", "queries" or "keys"
    at: Any  # an int, or an integer array over the batch axes
    shift: int = 0


class Interval(NamedTuple):
    """Key j is visible to query i iff first[..., i] <= j < end[..., i]; integer arrays (..., seqlen_q)."""

    first: Any
    end: Any


class Rows(NamedTuple):
    """The segments in which queries lie, integer arrays (..., seqlen_q)."""

    first: Any  # key of the segment
    end: Any  # of its keys; `first` for a query in no segment
    own: Any  # the query's own key, where the segment's last query is aligned with its last key


class Grid(NamedTuple):
    """Element (i, j) is visible iff its cell (i // rows, j // cols) is set; in a packed cell, iff its bit j % cols is.

    cells: uint8, the batch axes and then rows and columns of cells.
    """

    cells: Any
    rows: int
    cols: int
    packed: bool = False


class Held(NamedTuple):
    """An array that a mask holds, with the shape it must have behind the batch axes and the largest value allowed."""

    name: str
    array: Any
    shape: tuple[int, ...]
    largest: Any = None
    rising: bool = False  # whether it must not decrease along its last axis


class Mask(Value):
    """What all masks share: `&`, `|` and `dense`."""

    __array_ufunc__ = None  # so that `array & mask` comes to __rand__
    _aligns = False  # whether masks without an offset are aligned within its segments

    def _edges(self, seqlen_q: int, seqlen_k: int) -> tuple[Edge, ...]:
        """Where its band ends; on other sides it goes on to the end of the matrix."""
        return ()

    def _band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return band_of(self._edges(seqlen_q, seqlen_k), seqlen_q, seqlen_k)

    def _intervals(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        """What queries i, np.arange(seqlen_q) in the library of its arrays, see by its intervals."""
        return ()

    def _interval(self, i: Any, seqlen_k: int) -> Interval | None:
        """What queries i see by all its intervals; None if it has none."""
        intervals = self._intervals(i, seqlen_k)
        return interval_of(intervals, seqlen_k) if intervals else None

    def _gaps(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        """What its intervals show queries i though it is hidden."""
        return ()

    def _keys(self, i: Any, seqlen_k: int) -> Interval:
        """What queries i see, if that is an interval."""
        lo, hi, queries, keys = map(_for_queries, self._band(i.size, seqlen_k))
        in_band = Interval(i + lo, np.where(i < queries, np.minimum(i + hi + 1, keys), 0))
        return interval_of((in_band, *self._intervals(i, seqlen_k)), seqlen_k)

    def _aligned(self, rows: Rows) -> Interval:
        """What queries see if the mask, which has no offset of its own, is aligned within segments."""
        raise NotImplementedError

    def _inside(self, segments: Mask | None) -> Mask:
        """It, or an AnyOf whose parts are aligned within segments."""
        return self

    def _drawn(self, seqlen_q: int, seqlen_k: int, array: Any) -> Mask:
        """The mask with Bits, in the library of `array`, where that is how it comes to kernels."""
        return self

    def _grids(self) -> tuple[Grid, ...]:
        return ()

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        """Its arrays, each as a Held."""
        return ()

    def _fit(self, shape: tuple[int, ...]) -> Mask:
        """The mask for scores of the shape (..., seqlen_q, seqlen_k): boolean arrays are broadcast."""
        return self

    @property
    def _parts(self) -> tuple[Mask, ...]:
        """All of them hold."""
        return (self,)

    @property
    def _alternatives(self) -> tuple[Mask, ...]:
        """One of them holds."""
        return (self,)

    @property
    def _leaves(self) -> tuple[Mask, ...]:
        """What `&` and `|` have joined."""
        return (self,)

    @property
    def _is_interval(self) -> bool:
        """Whether each query sees an interval of keys."""
        return True

    @property
    def _is_drawn(self) -> bool:
        """Whether each call makes Bits of it."""
        return False

    @cached_property
    def _kinds(self) -> tuple[type, ...]:
        """What kernels are compiled for."""
        return tuple(Bits if part._is_drawn else type(part) for part in self._parts)

    @cached_property
    def _segments(self) -> Any:
        """The Segments in it, or None."""
        return next((part for part in self._parts if part._aligns), None)

    @property
    def _within(self) -> tuple[Mask, ...]:
        """The parts that are aligned within segments: if there are any, those without an offset of their own."""
        return ()

    @property
    def _others(self) -> tuple[Mask, ...]:
        return self._parts

    @cached_property
    def _is_in_part_drawn(self) -> bool:
        return any(part._is_drawn for part in self._parts)

    @cached_property
    def _holds_arrays(self) -> bool:
        return self._is_in_part_drawn or any(leaf._arrays() for leaf in self._leaves)

    @cached_property
    def _is_on_gpu(self) -> bool:
        arrays = [x for leaf in self._leaves for x in leaf._arrays().values()]
        return bool(arrays) and not any(isinstance(x, np.ndarray) for x in arrays)

    @cached_property
    def _and_causal(self) -> Mask:
        return Causal() & self

    def dense(self, seqlen_q: int, seqlen_k: int) -> NDArray[np.bool_]:
        """The boolean array that the mask stands for.

        Parameters
        ----------
        seqlen_q, seqlen_k : int

        Returns
        -------
        array of bool, (..., seqlen_q, seqlen_k)
            True = visible. The leading axes are those of the arrays in the mask; without arrays there are none. It is
            a CuPy array if the mask holds one.

        Raises
        ------
        TypeError, ValueError
            For what are no lengths.

        Examples
        --------
        >>> import numbattn as na
        >>> na.Causal().dense(2, 3).astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])
        """
        seqlen_q, seqlen_k = integer("seqlen_q", seqlen_q, low=0), integer("seqlen_k", seqlen_k, low=0)
        held = [x for leaf in self._leaves for x in leaf._arrays().values()]
        array = next((x for x in held if not isinstance(x, np.ndarray)), np.empty(0))
        return self._like(array)._visible(seqlen_q, seqlen_k, array)

    def _visible(self, seqlen_q: int, seqlen_k: int, array: Any) -> Any:
        """`dense` in the library of `array`, which is that of its arrays."""
        mask = self._drawn(seqlen_q, seqlen_k, array)
        i, j = np.arange(seqlen_q, like=array), np.arange(seqlen_k, like=array)
        lo, hi, queries, keys = (_for_queries(_for_queries(x)) for x in mask._band(seqlen_q, seqlen_k))
        interval, gaps, i = mask._interval(i, seqlen_k), mask._gaps(i, seqlen_k), i[:, None]
        visible = (i + lo <= j) & (j <= i + hi) & (i < queries) & (j < keys)
        if interval:
            visible = visible & _between(interval, j)
        for gap in gaps:
            visible = visible & ~_between(gap, j)
        for cells, rows, cols, packed in mask._grids():
            row, col = _places(i, rows, cells.shape[-2]), _places(j, cols, cells.shape[-1])
            cell = cells[..., row, col]
            visible = visible & ((cell >> (j % cols).astype(np.uint8) & 1 if packed else cell) != 0)
        return visible

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: use & where you wrote `and`, | where you wrote `or`, "
                        "and ~ on boolean arrays")

    def __and__(self, other: Mask | Array) -> Mask:
        return All(self._parts + as_mask(other, "&")._parts)

    def __rand__(self, other: Mask | Array) -> Mask:
        return All(as_mask(other, "&")._parts + self._parts)

    def __or__(self, other: Mask | Array) -> Mask:
        return any_of(self, as_mask(other, "|"))

    def __ror__(self, other: Mask | Array) -> Mask:
        return any_of(as_mask(other, "|"), self)


@dataclass(frozen=True, eq=False, repr=False)
class All(Mask):
    """Visible where every part is; with no part, everywhere."""

    of: tuple[Mask, ...] = ()

    def __post_init__(self) -> None:
        if sum(part._aligns for part in self.of) > 1:
            raise ValueError("&: got more than one Segments, allowed is one")

    @property
    def _parts(self) -> tuple[Mask, ...]:
        return self.of

    @cached_property
    def _leaves(self) -> tuple[Mask, ...]:
        return tuple(leaf for part in self._parts for leaf in part._leaves)

    @cached_property
    def _is_interval(self) -> bool:
        return all(part._is_interval for part in self._parts)

    @cached_property
    def _within(self) -> tuple[Mask, ...]:
        return tuple(part for part in self._parts if self._segments is not None and getattr(part, "offset", 0) is None)

    @cached_property
    def _others(self) -> tuple[Mask, ...]:
        return tuple(part._inside(self._segments) for part in self._parts if part not in self._within)

    def _edges(self, seqlen_q: int, seqlen_k: int) -> tuple[Edge, ...]:
        return tuple(edge for part in self._others for edge in part._edges(seqlen_q, seqlen_k))

    def _intervals(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        found = tuple(interval for part in self._others for interval in part._intervals(i, seqlen_k))
        if not self._within:
            return found
        rows = self._segments._rows(i, seqlen_k)
        return *found, *(part._aligned(rows) for part in self._within)

    def _gaps(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        return tuple(gap for part in self._others for gap in part._gaps(i, seqlen_k))

    def _drawn(self, seqlen_q: int, seqlen_k: int, array: Any) -> Mask:
        if not self._is_in_part_drawn:
            return self
        return All(tuple(
            part._inside(self._segments)._drawn(seqlen_q, seqlen_k, array) if part._is_drawn else part
            for part in self._parts
        ))  # fmt: skip

    def _grids(self) -> tuple[Grid, ...]:
        return tuple(grid for part in self._parts for grid in part._grids())

    def _fit(self, shape: tuple[int, ...]) -> Mask:
        parts = tuple(part._fit(shape) for part in self._parts)
        return self if parts == self._parts else All(parts)

    def _like(self, array: Any) -> All:
        parts = tuple(part._like(array) for part in self._parts)
        return self if parts == self._parts else All(parts)

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if len(part._alternatives) > 1 else f"{part}" for part in self._parts) or "All()"


@dataclass(frozen=True, eq=False, repr=False)
class AnyOf(Mask):
    """Visible where one of several masks is.

    Of two that show each query an interval of keys it is an interval with a gap. All others are drawn, as Bits: which
    of both follows from the kinds of the masks, since kernels are compiled for it.
    """

    of: tuple[Mask, ...]

    _is_interval = False

    @property
    def _alternatives(self) -> tuple[Mask, ...]:
        return self.of

    @cached_property
    def _leaves(self) -> tuple[Mask, ...]:
        return tuple(leaf for mask in self.of for leaf in mask._leaves)

    @cached_property
    def _is_drawn(self) -> bool:
        return len(self.of) > 2 or not all(mask._is_interval for mask in self.of)

    def _inside(self, segments: Mask | None) -> Mask:
        return self if segments is None else AnyOf(tuple(All((segments, *mask._parts)) for mask in self.of))

    def _interval_and_gap(self, i: Any, seqlen_k: int) -> tuple[Interval, Interval]:
        one, other = (mask._keys(i, seqlen_k) for mask in self.of)
        both = (one.first < one.end) & (other.first < other.end)
        gap_end = np.where(both, np.maximum(one.first, other.first), 0)
        return (Interval(np.minimum(one.first, other.first), np.maximum(one.end, other.end)),
                Interval(np.minimum(one.end, other.end), gap_end))

    def _intervals(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        return self._interval_and_gap(i, seqlen_k)[:1]

    def _gaps(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        return self._interval_and_gap(i, seqlen_k)[1:]

    def _drawn(self, seqlen_q: int, seqlen_k: int, array: Any) -> Mask:
        if not self._is_drawn:
            return self
        return Bits.pack(reduce(operator.or_, (mask._visible(seqlen_q, seqlen_k, array) for mask in self.of)))

    def _fit(self, shape: tuple[int, ...]) -> Mask:
        of = tuple(mask._fit(shape) for mask in self.of)
        return self if of == self.of else AnyOf(of)

    def _like(self, array: Any) -> AnyOf:
        of = tuple(mask._like(array) for mask in self.of)
        return self if of == self.of else AnyOf(of)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.of))


def any_of(one: Mask, other: Mask) -> Mask:
    """Their `|`."""
    if one._segments is not None or other._segments is not None:
        raise ValueError("|: got Segments, whose tokens see nothing beyond their segment: write `segments & (one | "
                         "other)`, which aligns both within each segment")
    return AnyOf(one._alternatives + other._alternatives)


# ------------------------------------------------------------------------------------------------------------- bands
def band_of(edges: Iterable[Edge], seqlen_q: int, seqlen_k: int) -> Band:
    """The Band with these edges."""
    ends = {"lo": -seqlen_q, "hi": seqlen_k, "queries": seqlen_q, "keys": seqlen_k}
    for side, at, shift in edges:
        low, high = {"queries": (0, seqlen_q), "keys": (0, seqlen_k)}.get(side, (-seqlen_q, seqlen_k))
        end = _clip(_clip(at, -FAR, FAR) + _clip(shift, -FAR, FAR), low, high)
        ends[side] = (_larger if side == "lo" else _smaller)(ends[side], end)
    return Band(**ends)


def interval_of(intervals: Sequence[Interval], seqlen_k: int) -> Interval:
    """The Interval of what all of them show, 0 <= first, end <= seqlen_k; where that is nothing, (seqlen_k, 0)."""
    first = reduce(_larger, (_clip(interval.first, 0, seqlen_k) for interval in intervals))
    end = reduce(_smaller, (_clip(interval.end, 0, seqlen_k) for interval in intervals))
    some = first < end
    return Interval(np.where(some, first, seqlen_k), np.where(some, end, 0))


@dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """Key j is visible to query i iff ``i + offset - left <= j <= i + offset + right``.

    Parameters
    ----------
    left, right : int or None
        How many keys before and after its own a query sees; None = all of them.
    offset : int or integer array over the batch axes, optional
        The own key of query 0. Default: seqlen_k - seqlen_q, which aligns the last query with the last key, within
        `Segments` those of each segment; 0 aligns the first ones.

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

    def __post_init__(self) -> None:
        self._set(
            left=None if self.left is None else integer("Window left", self.left),
            right=None if self.right is None else integer("Window right", self.right),
            offset=None if self.offset is None else _integers("Window offset", self.offset),
        )

    def _edges(self, seqlen_q: int, seqlen_k: int) -> tuple[Edge, ...]:
        offset = seqlen_k - seqlen_q if self.offset is None else self.offset
        left = () if self.left is None else (Edge("lo", offset, -self.left),)
        return left if self.right is None else (*left, Edge("hi", offset, self.right))

    def _aligned(self, rows: Rows) -> Interval:
        left, right = (FAR if x is None else _clip(x, -FAR, FAR) for x in (self.left, self.right))
        return Interval(rows.own - left, rows.own + right + 1)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return _given(offset=self.offset)

    def __repr__(self) -> str:
        return f"Window({self.left}, {self.right}{'' if self.offset is None else f', offset={shown(self.offset)}'})"


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """Key j is visible to query i iff ``j <= i + offset``.

    Parameters
    ----------
    offset : int or integer array over the batch axes, optional
        Default: seqlen_k - seqlen_q, so that the last query sees every key, within `Segments` every one of its segment;
        with 0 the first query sees the first key.

    Examples
    --------
    >>> import numbattn as na
    >>> na.Causal(offset=0).dense(2, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0]])
    """

    offset: Integers | None = None

    def __post_init__(self) -> None:
        self._set(offset=None if self.offset is None else _integers("Causal offset", self.offset))

    def _edges(self, seqlen_q: int, seqlen_k: int) -> tuple[Edge, ...]:
        return (Edge("hi", seqlen_k - seqlen_q if self.offset is None else self.offset),)

    def _aligned(self, rows: Rows) -> Interval:
        return Interval(rows.first, rows.own + 1)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return _given(offset=self.offset)


@dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    """Key j is visible iff ``j < keys``, query i sees something iff ``i < queries``.

    What lies in keys and values beyond their length is never used, be it NaN. As part of an ``|`` this is a condition
    like others: what it hides may be read, and is to be finite.

    Parameters
    ----------
    keys, queries : int or integer array over the batch axes, optional
        0 <= keys <= seqlen_k, 0 <= queries <= seqlen_q. Default: all of them. For inputs with the batch axes (B, H),
        lengths by batch have the shape (B, 1). CuPy's arrays are not looked into: what is out of range is clamped.

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

    def __post_init__(self) -> None:
        self._set(
            keys=None if self.keys is None else _integers("Lengths keys", self.keys),
            queries=None if self.queries is None else _integers("Lengths queries", self.queries),
        )

    def _edges(self, seqlen_q: int, seqlen_k: int) -> tuple[Edge, ...]:
        edges = Edge("keys", self.keys), Edge("queries", self.queries)
        return tuple(edge for edge in edges if edge.at is not None)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        held = (Held("keys", self.keys, (), seqlen_k), Held("queries", self.queries, (), seqlen_q))
        return tuple(h for h in held if h.array is not None)


# ------------------------------------------------------------------------------------------------------------- grids
@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """Key j is visible to query i iff ``visible[..., i, j]``.

    Parameters
    ----------
    visible : array of bool, (..., seqlen_q, seqlen_k)
        Broadcast as NumPy does, axes of size 1 and missing axes included, against the batch axes, heads included, and
        (seqlen_q, seqlen_k). A boolean array that is given as a mask is a Dense.
    """

    visible: Array

    _is_interval = False

    def __post_init__(self) -> None:
        _array("Dense visible", self.visible, np.bool_, ndim=1)

    def _fit(self, shape: tuple[int, ...]) -> Dense:
        visible = _broadcast("booleans", self.visible, shape, 2)
        return self if visible is self.visible else Dense(visible)

    def _grids(self) -> tuple[Grid, ...]:
        return (Grid(cast(Any, self.visible).view(np.uint8), 1, 1),)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return (Held("visible", self.visible, (seqlen_q, seqlen_k)),)


@dataclass(frozen=True, eq=False, repr=False)
class Bits(Mask):
    """Key j is visible to query i iff bit ``j % 32`` of ``words[..., i, j // 32]`` is set.

    Parameters
    ----------
    words : array of uint32, (..., seqlen_q, ceil(seqlen_k / 32))
        All axes but the last are broadcast as NumPy does, axes of size 1 and missing axes included, against the batch
        axes, heads included, and seqlen_q.

    See Also
    --------
    Bits.pack : from a boolean array.
    Bits.tree : from the parents of a tree of tokens.
    """

    words: Array

    _is_interval = False

    def __post_init__(self) -> None:
        _array("Bits words", self.words, np.uint32)

    @classmethod
    def pack(cls, visible: Array) -> Bits:
        """Pack a boolean array.

        Parameters
        ----------
        visible : array of bool, (..., seqlen_q, seqlen_k)

        Returns
        -------
        Bits

        Raises
        ------
        TypeError, ValueError
            For what is no array of booleans of two axes or more.

        Examples
        --------
        >>> import numbattn as na, numpy as np
        >>> na.Bits.pack(np.array([[True, False, True]])).words
        array([[5]], dtype=uint32)
        """
        _array("Bits.pack visible", visible, np.bool_)
        *batch, n = visible.shape
        padded = np.zeros((*batch, -(-n // 32) * 32), bool, like=cast(Any, visible))
        padded[..., :n] = _truths(visible)
        bits = (padded[..., bit::8].view(np.uint8) << np.uint8(bit) for bit in range(8))
        return cls(reduce(operator.or_, bits).view("<u4").astype(np.uint32, copy=False))

    @classmethod
    def tree(cls, parents: Sequence[int] | Array) -> Bits:
        """The mask of a tree of tokens: a node sees itself and its ancestors, as in speculative decoding.

        Parameters
        ----------
        parents : integer array, (..., nodes)
            The index of each node's parent, -1 at a root. A CuPy array is copied to the host and read there.

        Returns
        -------
        Bits, (..., nodes, nodes), of the library of `parents`

        Raises
        ------
        TypeError
            For what are no integers.
        ValueError
            For a parent that is no node, and for a node that is its own ancestor.

        Examples
        --------
        >>> import numbattn as na
        >>> na.Bits.tree([-1, 0, 0, 1]).dense(4, 4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 0, 1, 0],
               [1, 1, 0, 1]])
        """
        given = _integers("Bits.tree parents", parents)
        if isinstance(given, int):
            raise ValueError("Bits.tree parents: got a number, expected an array (..., nodes)")
        parent = moved(given, np.empty(0))
        nodes = parent.shape[-1]
        if parent.size and not -1 <= parent.min() <= parent.max() < nodes:
            raise ValueError(f"Bits.tree parents: got values from {parent.min()} to {parent.max()}, "
                             f"allowed -1 to {nodes - 1}")
        flat = parent.reshape(math.prod(parent.shape[:-1]), nodes)
        visible = np.zeros((len(flat), nodes, nodes), bool)
        node = np.broadcast_to(np.arange(nodes), flat.shape)  # an ancestor of each node, one generation a turn
        for _ in range(nodes):
            tree, at = np.nonzero(node >= 0)
            if not tree.size:
                break
            visible[tree, at, node[tree, at]] = True
            node = np.where(node >= 0, np.take_along_axis(flat, np.maximum(node, 0), axis=1), -1)
        if (node >= 0).any():
            raise ValueError("Bits.tree parents: a node is its own ancestor, so this is not a tree")
        return cls.pack(visible.reshape(*parent.shape, nodes))._like(given)

    def _fit(self, shape: tuple[int, ...]) -> Bits:
        count, wanted = self.words.shape[-1], -(-shape[-1] // 32)
        if count != wanted:  # of size 1, too: what a word says holds for its own keys
            raise ValueError(f"mask: Bits words: got {count} words a row, expected {wanted}, for {shape[-1]} keys")
        words = _broadcast("Bits words", self.words, (*shape[:-1], wanted), 2)
        return self if words is self.words else Bits(words)

    def _grids(self) -> tuple[Grid, ...]:
        given: Any = self.words
        words = given if given.strides[-1] == given.itemsize else np.ascontiguousarray(given, like=given)
        return (Grid(words.astype("<u4", copy=False).view(np.uint8), 1, 8, True),)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return (Held("words", self.words, (seqlen_q, -(-seqlen_k // 32))),)


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(Mask):
    """Key j is visible to query i iff ``blocks[..., i // rows, j // columns]``: Algorithm 5 skips the other blocks.

    Parameters
    ----------
    blocks : array of bool, (..., ceil(seqlen_q / rows), ceil(seqlen_k / columns))
        The leading axes are the batch axes, heads included, each of full size or 1.
    block_size : (int, int)
        Rows and columns of a block, any size.

    See Also
    --------
    BlockSparse.butterfly, BlockSparse.local_global, BlockSparse.strided : patterns.

    Notes
    -----
    The patterns are symmetric; ``& Causal()`` makes them causal. Of a matrix that is not square, the pattern of the
    shorter axis is stretched along the longer one.
    """

    blocks: Array
    block_size: tuple[int, int] = (64, 64)

    _is_interval = False

    def __post_init__(self) -> None:
        _array("BlockSparse blocks", self.blocks, np.bool_)
        self._set(block_size=_block_size(self.block_size))

    @classmethod
    def butterfly(cls, shape: Iterable[int], block_size: tuple[int, int] = (64, 64)) -> BlockSparse:
        """Block i sees block j iff i and j are equal or differ in one bit: the paper's pattern, log2(n) blocks a row.

        Parameters
        ----------
        shape : tuple of int
            Of the mask: (..., seqlen_q, seqlen_k), its leading axes usually 1.
        block_size : (int, int), optional
            Rows and columns of a block.

        Returns
        -------
        BlockSparse

        Raises
        ------
        TypeError, ValueError
            For what is no shape, and for blocks without elements.

        Examples
        --------
        >>> import numbattn as na
        >>> na.BlockSparse.butterfly((4, 4), block_size=(1, 1)).blocks.astype(int)
        array([[1, 1, 1, 0],
               [1, 1, 0, 1],
               [1, 0, 1, 1],
               [0, 1, 1, 1]])
        """
        return cls._built(shape, block_size, lambda i, j: ((i ^ j) & ((i ^ j) - 1)) == 0)

    @classmethod
    def local_global(
        cls, shape: Iterable[int], block_size: tuple[int, int] = (64, 64), local: int = 1, everywhere: int = 1
    ) -> BlockSparse:
        """Block i sees block j iff ``|i - j| <= local``, or one of them is among the first `everywhere` blocks.

        Parameters
        ----------
        shape : tuple of int
            Of the mask: (..., seqlen_q, seqlen_k), its leading axes usually 1.
        block_size : (int, int), optional
            Rows and columns of a block.
        local : int, optional
            Blocks on either side that a block sees.
        everywhere : int, optional
            So many first blocks see all, and all see them.

        Returns
        -------
        BlockSparse

        Raises
        ------
        TypeError, ValueError
            For what is no shape, and for blocks without elements.

        Examples
        --------
        >>> import numbattn as na
        >>> na.BlockSparse.local_global((4, 4), block_size=(1, 1), local=0).blocks.astype(int)
        array([[1, 1, 1, 1],
               [1, 1, 0, 0],
               [1, 0, 1, 0],
               [1, 0, 0, 1]])
        """
        local, everywhere = integer("local", local), integer("everywhere", everywhere)
        return cls._built(shape, block_size, lambda i, j: (abs(i - j) <= local) | (np.minimum(i, j) < everywhere))

    @classmethod
    def strided(
        cls, shape: Iterable[int], block_size: tuple[int, int] = (64, 64), local: int = 1, stride: int = 4
    ) -> BlockSparse:
        """Block i sees block j iff ``|i - j| <= local``, or i - j is a multiple of `stride`.

        Parameters
        ----------
        shape : tuple of int
            Of the mask: (..., seqlen_q, seqlen_k), its leading axes usually 1.
        block_size : (int, int), optional
            Rows and columns of a block.
        local : int, optional
            Blocks on either side that a block sees.
        stride : int, optional
            1 or more.

        Returns
        -------
        BlockSparse

        Raises
        ------
        TypeError, ValueError
            For what is no shape, and for blocks without elements.

        Examples
        --------
        >>> import numbattn as na
        >>> na.BlockSparse.strided((4, 4), block_size=(1, 1), local=0, stride=2).blocks.astype(int)
        array([[1, 0, 1, 0],
               [0, 1, 0, 1],
               [1, 0, 1, 0],
               [0, 1, 0, 1]])
        """
        local, stride = integer("local", local), integer("stride", stride, low=1)
        return cls._built(shape, block_size, lambda i, j: (abs(i - j) <= local) | ((i - j) % stride == 0))

    @classmethod
    def _built(cls, shape: Iterable[int], block_size: tuple[int, int], sees: Callable[[Any, Any], Any]) -> BlockSparse:
        *batch, m, n = shape_of("shape", shape)
        rows, cols = _block_size(block_size)
        m_blocks, n_blocks = -(-m // rows), -(-n // cols)
        shorter = min(m_blocks, n_blocks)
        i = np.arange(m_blocks)[:, None] * shorter // max(m_blocks, 1)
        j = np.arange(n_blocks) * shorter // max(n_blocks, 1)
        return cls(np.broadcast_to(sees(i, j), (*batch, m_blocks, n_blocks)).copy(), (rows, cols))

    def _grids(self) -> tuple[Grid, ...]:
        return (Grid(cast(Any, self.blocks).view(np.uint8), *self.block_size),)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        rows, cols = self.block_size
        return (Held("blocks", self.blocks, (-(-seqlen_q // rows), -(-seqlen_k // cols))),)


# ----------------------------------------------------------------------------------------------- from the user's hand
def as_mask(mask: Any, name: str = "mask") -> Mask:
    """A Mask from what a user may give: None, a Mask, a boolean array."""
    if mask is None:
        return All()
    if isinstance(mask, Mask):
        return mask
    if library(mask) and mask.dtype == np.bool_:
        return Dense(mask)
    raise TypeError(f"{name}: got {words_for(mask)}, expected a numbattn mask or a boolean array of NumPy or CuPy, "
                    "True = visible (numbers that are added to the scores go into score=numbattn.Bias)")


def _array(name: str, array: Any, dtype: Any, ndim: int = 2) -> None:
    """Refuse what is no array of this dtype."""
    if not library(array) or array.dtype != dtype:
        raise TypeError(f"{name}: got {words_for(array)}, expected an array of {np.dtype(dtype)} of NumPy or CuPy")
    if array.ndim < ndim:
        raise ValueError(f"{name}: got the shape {array.shape}, expected (..., rows, columns)")


def _integers(name: str, value: Any) -> Any:
    """An int, or an integer array as it is; of lists a NumPy array is made."""
    if isinstance(value, int | np.integer):
        return integer(name, value, -(2**63), 2**63 - 1)
    array = np.asarray(value) if isinstance(value, list | tuple | range) else value
    if not library(array) or array.dtype.kind not in "iu":
        raise TypeError(f"{name}: got {words_for(value)}, expected an int or an integer array of NumPy or CuPy")
    return array if array.ndim else int(array)


def _block_size(block_size: Any) -> tuple[int, int]:
    try:
        rows, cols = block_size
    except (TypeError, ValueError):
        raise TypeError(f"block_size: got {words_for(block_size)}, expected two integers (rows, columns)") from None
    return integer("block_size", rows, low=1), integer("block_size", cols, low=1)


def _broadcast(what: str, x: Any, shape: tuple[int, ...], own_axes: int) -> Any:
    """An array with all axes of a shape, the last `own_axes` of them at full size; itself if it has them already."""
    if not broadcasts(x.shape, shape):
        raise ValueError(f"mask: got {what} of the shape {x.shape}, which do not broadcast to {shape}")
    own = (1,) * (len(shape) - x.ndim) + x.shape
    full = *own[:-own_axes], *shape[len(shape) - own_axes :]
    return x if x.shape == full else np.broadcast_to(x.reshape(own), full)


def _for_queries(x: Any) -> Any:
    """A number, or an array with an axis of queries behind its own."""
    return x if isinstance(x, int) else x[..., None]


def _places(i: Any, size: int, count: int) -> Any:
    """The cells, of so many elements each, in which elements i lie; a single element stands for all of them."""
    return i // size if (size, count) != (1, 1) else 0 * i


def _between(interval: Interval, j: Any) -> Any:
    first, end = map(_for_queries, interval)
    return (first <= j) & (j < end)


def _given(**arrays: Any) -> tuple[Held, ...]:
    return tuple(Held(name, array, ()) for name, array in arrays.items() if array is not None)


def _clip(x: Any, low: int, high: int) -> Any:
    """An int, or an array of int64: unsigned numbers beyond it are cut first."""
    if isinstance(x, int):
        return max(low, min(x, high))
    if x.dtype == np.uint64:
        x = np.minimum(x, np.uint64(2**62))
    return np.clip(x.astype(np.int64), low, high)


def _truths(array: Any) -> Any:
    """Booleans as NumPy reads them: a view of other bytes may have True that is not 1."""
    return array.view(np.uint8) != 0


def _larger(x: Any, y: Any) -> Any:
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else np.maximum(x, y)


def _smaller(x: Any, y: Any) -> Any:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else np.minimum(x, y)

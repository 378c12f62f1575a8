"""The base class of masks, and what kernels are told of a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.checks import Array, integer, refuse_foreign
from ..base.forks import cached_property
from ..base.origin import FAR, Crop
from ..base.values import Value, broadcasts, clip

OPERATORS: dict[str, Callable[..., Any]] = {}  # of masks: "&", "|", "dense" and others, which `logic` registers


class Band(NamedTuple):
    """Key j is visible to query i iff i + lo <= j <= i + hi, i < queries and j < keys.

    Integers, or integer arrays over the batch axes; -seqlen_q <= lo, hi <= seqlen_k.
    """

    lo: Any
    hi: Any
    queries: Any
    keys: Any


class Edge(NamedTuple):
    """A bound of a Band: at + shift. The narrowest edge of each side holds."""

    side: str  # "lo", "hi", "queries" or "keys"
    at: Any  # an int, or an integer array over the batch axes
    shift: int = 0


class Interval(NamedTuple):
    """Key j is visible to query i iff first[..., i] <= j < end[..., i]; integer arrays (..., seqlen_q)."""

    first: Any
    end: Any


class QuerySegments(NamedTuple):
    """The segments in which queries lie, integer arrays (..., seqlen_q)."""

    first: Any  # key of the segment
    end: Any  # of its keys; `first` for a query in no segment
    own: Any  # the query's own key, where the segment's last query is aligned with its last key


class Grid(NamedTuple):
    """Element (i, j) is visible iff its cell (i // rows, j // cols) is set; in a packed cell, iff its bit j % cols is.

    cells: uint8, the batch axes and then rows and columns of cells. Cells of a function's mask are states: 0 for EMPTY,
    1 for PARTIAL, where the function is called for each element, 2 for FULL.
    """

    cells: Any
    rows: int
    cols: int
    packed: bool = False
    function: Any = None  # a Where


class Mask(Value):
    """What all masks share: `&`, `|` and `dense`.

    Notes
    -----
    Masks are values: two are equal if their numbers are equal and they hold the very same arrays, so that a pickled
    copy of a mask with arrays is unequal.

    The `|` of two masks that show each query an interval of keys, as all do but Dense, Bits, Tail and BlockSparse,
    takes no more memory than a few numbers for each query, and the tiles between the two intervals are skipped. Any
    other `|` becomes Bits of seqlen_q x seqlen_k in each call. Segments stay outside, as in ``segments & (a | b)``, and
    align a and b. Lengths in an `|` hide keys, but NaN there may be read. With Segments they count the keys of the
    packed array, which is seldom what is meant and warns: First counts the keys of each segment.
    """

    __array_ufunc__ = None  # so that `array & mask` comes to __rand__

    def dense(self, seqlen_q: int, seqlen_k: int, *, heads: int = 1, batch: int = 1) -> NDArray[np.bool_]:
        """The boolean array that the mask stands for.

        Parameters
        ----------
        seqlen_q, seqlen_k : int
        heads, batch : int, optional
            How many heads, and elements of the batch, there are, for a function in the mask that reads these.

        Returns
        -------
        array of bool, (..., seqlen_q, seqlen_k)
            True = visible. The leading axes are those of the arrays in the mask; without arrays there are none. With
            several heads or elements of the batch functions have an axis of each, of size 1 where they do not read it.
            It is a CuPy array if the mask holds one.

        Raises
        ------
        TypeError, ValueError
            For numbers that are not integers, or too small, or arrays of other heads or batches.

        Examples
        --------
        >>> import numbattn as na
        >>> na.Causal().dense(2, 3).astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])
        >>> own = na.Where(lambda batch, head, i, j: j >= head)
        >>> (na.Causal() & own).dense(2, 3, heads=2).astype(int)
        array([[[[1, 1, 0],
                 [1, 1, 1]],
        <BLANKLINE>
                [[0, 1, 0],
                 [0, 1, 1]]]])
        """
        seqlen_q, seqlen_k = integer("seqlen_q", seqlen_q, low=0), integer("seqlen_k", seqlen_k, low=0)
        lead = integer("batch", batch, low=1), integer("heads", heads, low=1)
        if lead != (1, 1):
            return self._fit((*lead, seqlen_q, seqlen_k)).dense(seqlen_q, seqlen_k)
        refuse_foreign("mask", self._leaves)
        array = next((x for x in self._all_arrays if not isinstance(x, np.ndarray)), np.empty(0))
        return OPERATORS["dense"](self._like(array), seqlen_q, seqlen_k, array)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: use & where you wrote `and`, | where you wrote `or`, "
                        "and ~ on boolean arrays")

    def __invert__(self) -> Mask:
        raise TypeError("a mask has no ~: numbattn.Where takes a function of your own, and ~mask.dense(seqlen_q, "
                        "seqlen_k) is one of booleans")

    def __and__(self, other: Mask | Array) -> Mask:
        return OPERATORS["&"](self, other)

    def __rand__(self, other: Mask | Array) -> Mask:
        return OPERATORS["&"](other, self)

    def __or__(self, other: Mask | Array) -> Mask:
        return OPERATORS["|"](self, other)

    def __ror__(self, other: Mask | Array) -> Mask:
        return OPERATORS["|"](other, self)

    # ------------------------------------------------------------------------------------- what a kind of mask says
    def _edges(self, seqlen_q: int, seqlen_k: Any) -> tuple[Edge, ...]:
        """The edges of its band; on the other sides it extends to the end of the matrix.

        seqlen_k: an int, or with a cache an array over the batch axes, the length of each sequence.
        """
        return ()

    def _intervals(self, i: Any, seqlen_k: Any) -> tuple[Interval, ...]:
        """The keys that its intervals show to queries i, np.arange(seqlen_q) in the library of its arrays; seqlen_k as
        in `_edges`."""
        return ()

    def _gaps(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        """The keys within its intervals that are hidden from queries i all the same."""
        return ()

    def _grids(self) -> tuple[Grid, ...]:
        """Its grids: an element is visible if all of them show it."""
        return ()

    def _aligned(self, rows: QuerySegments) -> Interval:
        """The keys that queries see if the mask, which has no offset of its own, is aligned within segments."""
        raise NotImplementedError

    def _bits(self, seqlen_q: int, seqlen_k: int, frame: Any, array: Any) -> Any:
        """The mask as Bits, if it is materialised, aligned within its `_frame`; `array` and its own are of one library.
        """
        raise NotImplementedError

    def _fit(self, shape: tuple[int, ...]) -> Mask:
        """The mask for scores of the shape (..., seqlen_q, seqlen_k): boolean arrays are broadcast."""
        return self

    def _cropped(self, crop: Crop) -> Mask:
        """The mask for a part of the score matrix."""
        raise NotImplementedError

    def _from_head(self, head: int) -> Mask:
        """The mask for the heads from this one on; its arrays stay as they are."""
        return self

    def _transposed(self, seqlen_q: int, seqlen_k: int, frame: Any = None) -> Mask:
        """The mask, which is fitted, with queries and keys exchanged, for an `&` with its exchanged `_frame`, if it has
        one: as Bits, unless a kind knows better."""
        whole = OPERATORS["&"](frame, self) if frame is not None and self._is_aligned else self
        kind: Any = self._kind_materialised
        return kind.pack(np.swapaxes(whole.dense(seqlen_q, seqlen_k), -2, -1))

    def _may_show(self, seqlen_q: int, seqlen_k: int) -> bool:
        """Whether a query may see a key: a guess that reads no array on a GPU and none with a row for each query."""
        if len(self._on_host) < len(self._all_arrays):
            return True
        lo, hi, queries, keys = self._band(seqlen_q, seqlen_k)
        return bool(np.any((lo < keys) & (hi > -queries) & (lo <= hi) & (queries > 0) & (keys > 0)))

    @property
    def _may_wait(self) -> bool:
        """Whether a call may do without it as it is, since it takes its tokens in another order."""
        return False

    @property
    def _is_aligned(self) -> bool:
        """Whether Segments in the same mask align it, since it has no offset of its own."""
        return getattr(self, "offset", 0) is None

    @property
    def _is_interval(self) -> bool:
        """Whether each query sees an interval of keys."""
        return True

    @property
    def _is_materialised(self) -> bool:
        """Whether each call turns it, or a part of it, into Bits: materialises it."""
        return False

    # examples for `python -m numbattn`, by name: (seqlen_q, seqlen_k) -> a mask
    _examples: tuple[tuple[str, Callable[[int, int], Mask]], ...] = ()
    _crops_by_sequence = False  # whether `_cropped` takes places that differ between sequences, as in caches
    _is_immutable = False  # whether nothing in it can change: its arrays are copies
    _is_tail = False  # whether its grid has columns for the last keys only
    _windows: Any = None  # of a grid's tokens, if it is nothing else: see numbattn.grids
    _is_function = False  # whether a function of the user's own tells what is visible
    _is_segments = False
    _is_frame = False  # whether parts without an offset of their own are aligned within it
    _has_rows = False  # whether they are so row by row
    _places_keys = False  # whether it gives keys positions other than their numbers
    _is_of_rows = False  # whether its intervals are of a rolling cache's rows all the same
    _may_truncate = False  # whether it may hide the last keys, or queries, of the matrix
    _kind_materialised: ClassVar[type]  # Bits

    def _draws(self, part: Mask) -> bool:
        """Whether each call turns this part into Bits where this mask is the frame."""
        return False

    def _materialises(self, part: Mask) -> bool:
        """Whether each call turns this part into Bits: also a tail where another part hides the last keys or queries,
        and what the frame draws."""
        if self._frame is not None and self._frame._draws(part):
            return True
        return part._is_materialised or (part._is_tail and any(
            other._may_truncate and other not in self._within for other in self._parts
        ))

    # ------------------------------------------------------------------------------------------- what it consists of
    @property
    def _parts(self) -> tuple[Mask, ...]:
        """The masks that `&` has joined: an element is visible if all of them show it."""
        return (self,)

    @property
    def _leaves(self) -> tuple[Mask, ...]:
        """The masks that `&` and `|` have joined."""
        return (self,)

    @property
    def _segments(self) -> Any:
        """The Segments in it, or None."""
        return next((part for part in self._parts if part._is_segments), None)

    @property
    def _frame(self) -> Any:
        """The Segments, or the keys of a cache, that the parts without an offset are aligned within; or None."""
        return next((part for part in self._parts if part._is_frame), None)

    @property
    def _alignment(self) -> Any:
        """The frame, if it aligns row by row; or None."""
        frame = self._frame
        return frame if frame is not None and frame._has_rows else None

    @property
    def _placing(self) -> Any:
        """The frame, if it places keys and intervals are of their positions; or None."""
        frame = self._frame
        places = frame is not None and frame._places_keys and not any(leaf._is_of_rows for leaf in self._leaves)
        return frame if places else None

    def _keys_to_last(self, seqlen_q: int, seqlen_k: int) -> Any:
        """How many keys there are up to the one that parts without an offset align the last query with: an int, or with
        a cache an array over the batch axes."""
        return seqlen_k if self._frame is None else self._frame._last_keys(seqlen_q, seqlen_k)

    @property
    def _within(self) -> tuple[Mask, ...]:
        """The parts that are aligned row by row, within segments or by positions."""
        return ()

    @property
    def _others(self) -> tuple[Mask, ...]:
        """The other parts; the masks that an AnyOf among them joins may be aligned."""
        return self._parts

    # ----------------------------------------------------------------------------------------------- what calls ask
    def _band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return band_of(self._edges(seqlen_q, seqlen_k), seqlen_q, seqlen_k)

    def _interval(self, i: Any, seqlen_k: int) -> Interval | None:
        """The keys that all its intervals show to queries i; None if it has none."""
        intervals = self._intervals(i, seqlen_k)
        return interval_of(intervals, seqlen_k) if intervals else None

    @cached_property
    def _kinds(self) -> tuple[type, ...]:
        """The kinds of parts that kernels are compiled for."""
        return tuple(self._kind_materialised if self._materialises(part) else type(part) for part in self._parts)

    @cached_property
    def _all_arrays(self) -> list[Any]:
        return [x for leaf in self._leaves for x in leaf._arrays().values()]

    @cached_property
    def _on_host(self) -> list[Any]:
        leaves = [leaf for leaf in self._leaves if not leaf._is_private]
        return [x for leaf in leaves for x in leaf._arrays().values() if isinstance(x, np.ndarray)]

    @cached_property
    def _holds_arrays(self) -> bool:
        """Whether kernels take arrays of it."""
        return bool(self._all_arrays) or self._is_materialised or self._has_functions

    @cached_property
    def _has_functions(self) -> bool:
        return any(leaf._is_function for leaf in self._leaves)

    @cached_property
    def _is_reusable(self) -> bool:
        """Whether what one call finds out about it is valid for the next: its arrays, on a GPU, are not read."""
        return not self._is_materialised and not self._on_host

    @cached_property
    def _has_frame(self) -> bool:
        return self._frame is not None

    @property
    def _placed(self) -> Mask:
        """The mask with the positions of its rows as its frame, if it gives them."""
        return self if self._placed_anew is None else self._placed_anew

    @cached_property
    def _placed_anew(self) -> Mask | None:
        """A mask that kept itself would be freed late, and its arrays with it."""
        found: Mask = OPERATORS["placed"](self)
        return None if found is self else found

    @cached_property
    def _and_causal(self) -> Mask:
        """Its `&` with Causal(), as `causal=True` asks."""
        return OPERATORS["causal"](self)


def band_of(edges: Iterable[Edge], seqlen_q: int, seqlen_k: int) -> Band:
    """The Band with these edges."""
    ends = {"lo": -seqlen_q, "hi": seqlen_k, "queries": seqlen_q, "keys": seqlen_k}
    for side, at, shift in edges:
        low, high = {"queries": (0, seqlen_q), "keys": (0, seqlen_k)}.get(side, (-seqlen_q, seqlen_k))
        end = clip(clip(at, -FAR, FAR) + clip(shift, -FAR, FAR), low, high)
        ends[side] = (_larger if side == "lo" else _smaller)(ends[side], end)
    return Band(**ends)


def interval_of(intervals: Sequence[Interval], seqlen_k: int) -> Interval:
    """The intersection of these, 0 <= first, end <= seqlen_k; where it is empty, (seqlen_k, 0)."""
    first = reduce(_larger, (clip(interval.first, 0, seqlen_k) for interval in intervals))
    end = reduce(_smaller, (clip(interval.end, 0, seqlen_k) for interval in intervals))
    some = first < end
    return Interval(np.where(some, first, seqlen_k), np.where(some, end, 0))


def broadcast(what: str, x: Any, shape: tuple[int, ...], own_axes: int) -> Any:
    """An array with all axes of a shape, the last `own_axes` of them at full size; itself if it has them already."""
    if not broadcasts(x.shape, shape):
        raise ValueError(f"mask: got {what} of the shape {x.shape}, which do not broadcast to {shape}"
                         + _way_for_padding(x, shape) * (what == "booleans"))
    own = (1,) * (len(shape) - x.ndim) + x.shape
    full = *own[:-own_axes], *shape[len(shape) - own_axes :]
    return x if x.shape == full else np.broadcast_to(x.reshape(own), full)


def _way_for_padding(visible: Any, shape: tuple[int, ...]) -> str:
    """For an error: how to pass booleans for the keys of each sequence; "" for other booleans."""
    lead, missing = visible.shape[:-1], len(shape) - visible.ndim
    if missing < 1 or (*lead, visible.shape[-1]) != (*shape[: len(lead)], shape[-1]):
        return ""
    index, lengths = (", ".join([":"] * len(lead) + ["None"] * count) for count in (missing, missing - 1))
    return (f"; if they say which keys of each sequence are no padding, pass visible[{index}, :], or, where padding is "
            f"at the end, Lengths(keys=visible.sum(-1){f'[{lengths}]' if missing > 1 else ''})")


def _larger(x: Any, y: Any) -> Any:
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else np.maximum(x, y)


def _smaller(x: Any, y: Any) -> Any:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else np.minimum(x, y)

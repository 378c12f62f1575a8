"""Masks that show each query an interval of keys, among them the segments of packed sequences.

Sequences of unequal length are packed one after the other along the sequence axis, without padding: `pack` does it,
`Segments` keeps them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .checks import Array, check_values, same_library
from .masks import FAR, Held, Integers, Interval, Mask, Rows, _broadcast, _clip, _for_queries, _given, _integers
from .values import moved

A = TypeVar("A", bound=Array)


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Packed sequences: key j is visible to query i iff both are in the same segment.

    Segment s holds the queries ``queries[s] <= i < queries[s + 1]`` and the keys ``keys[s] <= j < keys[s + 1]``.

    In an ``&`` with it, masks without an offset of their own mean in each segment what they mean in a call on that
    sequence alone: `Causal` and `Window` align its last query with its last key, `Prefix` counts from its first key.
    So do the scores `Alibi` and `RelativeBias`. All other masks, scores and dropout count the rows and columns of the
    packed arrays.

    Parameters
    ----------
    queries : list, range or integer array, (count + 1,) or (..., count + 1)
        Where each segment begins and, last, where the last one ends; they do not decrease. A segment may be empty.
        Tokens before the first offset and from the last one on see nothing and are seen by nobody. Leading axes, if
        any, are all batch axes, heads included, each of full size or 1.
    keys : likewise, optional
        Default: the same offsets. CuPy's arrays are not looked into: what is out of range is clamped.

    Warns
    -----
    UserWarning
        When a call is given offsets, of NumPy, of which neither the first is 0 nor the last the number of tokens, and
        whose sum is no more than that: they are lengths, most likely, whose offsets are ``np.cumsum([0, *lengths])``.
        If they are meant, ``warnings.filterwarnings("ignore", "mask: Segments")`` says so.

    See Also
    --------
    pack : makes the packed array and its offsets.

    Notes
    -----
    On CPUs a segment is computed as if it were alone: NaN in one of them stays there, in gradients, too. On GPUs it may
    reach the tokens that lie in one tile with them.

    Examples
    --------
    >>> import numbattn as na
    >>> na.Segments([0, 2, 5]).dense(5, 5).astype(int)
    array([[1, 1, 0, 0, 0],
           [1, 1, 0, 0, 0],
           [0, 0, 1, 1, 1],
           [0, 0, 1, 1, 1],
           [0, 0, 1, 1, 1]])
    >>> (na.Segments([0, 1, 3], [0, 2, 5]) & na.Causal()).dense(3, 5).astype(int)
    array([[1, 1, 0, 0, 0],
           [0, 0, 1, 1, 0],
           [0, 0, 1, 1, 1]])
    """

    queries: Integers
    keys: Integers | None = None

    _aligns = True

    def __post_init__(self) -> None:
        queries = _offsets("Segments queries", self.queries)
        keys = None if self.keys is None else _offsets("Segments keys", self.keys)
        if keys is not None and keys.shape[-1] != queries.shape[-1]:
            raise ValueError(f"Segments keys: got {keys.shape[-1]} offsets, expected {queries.shape[-1]}, "
                             "as many as queries")
        self._set(queries=queries, keys=keys)

    def _fit(self, shape: tuple[int, ...]) -> Mask:
        """Offsets without batch axes hold for all of them."""
        lead = (1,) * (len(shape) - 2)
        fitted = {name: x.reshape(*lead, x.size) for name, x in self._arrays().items() if x.ndim == 1}
        return Segments(**self._arrays() | fitted) if lead and fitted else self

    def _rows(self, i: Any, seqlen_k: int) -> Rows:
        keys = self.queries if self.keys is None else self.keys
        queries, keys = np.broadcast_arrays(_clip(self.queries, 0, i.size), _clip(keys, 0, seqlen_k))
        *lead, size = queries.shape
        row = np.arange(math.prod(lead), like=i)[:, None]
        above = i.size * row  # beyond the offsets of the rows before: one search finds the segments of all rows
        s = np.searchsorted((queries.reshape(-1, size) + above).ravel(), i + above, side="right") - size * row - 1
        at, behind = (np.clip(x.reshape(*lead, i.size), 0, size - 1) for x in (s, s + 1))
        first, end = np.take_along_axis(keys, at, -1), np.take_along_axis(keys, behind, -1)
        return Rows(first, end, i + end - np.take_along_axis(queries, behind, -1))

    def _intervals(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        first, end, _ = self._rows(i, seqlen_k)
        return (Interval(first, end),)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        if self.keys is None:
            seqlen_q = min(seqlen_q, seqlen_k)
        held: Any = ("queries", self.queries, seqlen_q), ("keys", self.keys, seqlen_k)
        return tuple(Held(name, x, x.shape[-1:], largest, rising=True) for name, x, largest in held if x is not None)


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """Key j is visible to query i iff ``j < lengths`` or ``j <= i + offset``: causal behind a prefix that all see.

    It needs no `Causal` beside it, which would hide the prefix.

    Parameters
    ----------
    lengths : int or integer array over the batch axes
        0 <= lengths <= seqlen_k.
    offset : int or integer array over the batch axes, optional
        The own key of query 0. Default: seqlen_k - seqlen_q, so that the last query sees every key. Within `Segments`
        a Prefix without an offset begins with each segment and is no longer than it; with an offset both numbers count
        the keys of the packed array. For a length of its own for each segment take `Intervals`.

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

    def __post_init__(self) -> None:
        self._set(
            lengths=_integers("Prefix lengths", self.lengths),
            offset=None if self.offset is None else _integers("Prefix offset", self.offset),
        )

    def _intervals(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        offset = seqlen_k - i.size if self.offset is None else self.offset
        return (self._aligned(Rows(0, seqlen_k, i + _for_queries(_clip(offset, -FAR, FAR)))),)

    def _aligned(self, rows: Rows) -> Interval:
        return Interval(0, np.maximum(rows.first + _for_queries(_clip(self.lengths, 0, FAR)), rows.own + 1))

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return Held("lengths", self.lengths, (), seqlen_k), *_given(offset=self.offset)


@dataclass(frozen=True, eq=False, repr=False)
class Intervals(Mask):
    """Key j is visible to query i iff ``first[..., i] <= j < end[..., i]``.

    Parameters
    ----------
    first, end : integer array, (..., seqlen_q)
        Any integers: what is beyond the keys is clipped, and where first >= end a query sees nothing. Each is broadcast
        as NumPy does, axes of size 1 and missing axes included, against the batch axes, heads included, and seqlen_q.

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

    def __post_init__(self) -> None:
        self._set(
            first=_vector("Intervals first", self.first, "(..., seqlen_q)"),
            end=_vector("Intervals end", self.end, "(..., seqlen_q)"),
        )

    def _fit(self, shape: tuple[int, ...]) -> Mask:
        first, end = (_broadcast(f"Intervals {name}", x, shape[:-1], 1) for name, x in self._arrays().items())
        return self if first is self.first and end is self.end else Intervals(first, end)

    def _intervals(self, i: Any, seqlen_k: int) -> tuple[Interval, ...]:
        return (Interval(self.first, self.end),)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return Held("first", self.first, (seqlen_q,)), Held("end", self.end, (seqlen_q,))


# ----------------------------------------------------------------------------------------------------------- packing
def pack(arrays: Iterable[A]) -> tuple[A, NDArray[np.int64]]:
    """Sequences, one after the other in one array, and the offsets that `Segments` takes.

    Parameters
    ----------
    arrays : list of arrays, (..., length, features)
        Of NumPy or of CuPy; all axes but that of the sequence are equal.

    Returns
    -------
    packed : array, (..., total, features)
        A copy.
    offsets : numpy.ndarray of int64, (count + 1,)
        Sequence s is ``packed[..., offsets[s] : offsets[s + 1], :]``.

    Raises
    ------
    TypeError, ValueError
        For what are no arrays of one library and of one dtype, and for shapes that do not fit.

    See Also
    --------
    unpack : the inverse.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> x, offsets = na.pack([np.zeros((8, 3, 64)), np.zeros((8, 5, 64))])
    >>> x.shape, offsets
    ((8, 8, 64), array([0, 3, 8]))
    >>> na.attention(x, x, x, mask=na.Segments(offsets)).shape
    (8, 8, 64)
    """
    given: list[Any] = list(arrays)
    if not given:
        raise ValueError("arrays: got none, expected at least one")
    same_library(**{f"arrays[{number}]": x for number, x in enumerate(given)})
    for number, x in enumerate(given):
        if x.ndim < 2 or (*x.shape[:-2], x.shape[-1]) != (*given[0].shape[:-2], given[0].shape[-1]):
            raise ValueError(f"arrays[{number}]: got the shape {x.shape}, expected (..., length, features), equal in "
                             "all arrays but for the lengths")
        if x.dtype != given[0].dtype:
            raise TypeError(f"arrays[{number}]: got {x.dtype}, expected {given[0].dtype}, the dtype of arrays[0]")
    packed: Any = np.concatenate(given, axis=-2)
    return packed, np.cumsum([0, *(x.shape[-2] for x in given)])


def unpack(packed: A, offsets: Sequence[int] | Array) -> list[A]:
    """The sequences of a packed array.

    Parameters
    ----------
    packed : array, (..., total, features)
        Of NumPy or of CuPy.
    offsets : integer array, (count + 1,)
        As `pack` returns them. A CuPy array is copied to the host and read there.

    Returns
    -------
    list of arrays, (..., length, features)
        Views.

    Raises
    ------
    TypeError, ValueError
        For what is no array, and for offsets that decrease or are beyond the array.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> [x.shape for x in na.unpack(np.zeros((8, 8, 64)), [0, 3, 8])]
    [(8, 3, 64), (8, 5, 64)]
    """
    same_library(packed=packed)
    if packed.ndim < 2:
        raise ValueError(f"packed: got the shape {packed.shape}, expected (..., total, features)")
    found = moved(_offsets("offsets", offsets), np.empty(0))
    if found.ndim > 1:
        raise ValueError(f"offsets: got the shape {found.shape}, expected (count + 1,)")
    check_values("offsets", found, packed.shape[-2], rising=True)
    return [packed[..., first:end, :] for first, end in pairwise(found.tolist())]


def _vector(name: str, value: Any, shape: str) -> Any:
    """An integer array of at least one axis."""
    array = _integers(name, value)
    if isinstance(array, int):
        raise ValueError(f"{name}: got a number, expected an array {shape}")
    return array


def _offsets(name: str, value: Any) -> Any:
    array = _vector(name, value, "(..., count + 1)")
    if array.shape[-1] == 0:
        raise ValueError(f"{name}: got the shape {array.shape}, expected at least one offset")
    return array

"""Packed sequences: of unequal lengths, one after the other along the sequence axis, without padding. `pack` packs
them, `Segments` keeps them apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..base.checks import Array, Integers, check_values, integer, integer_array, own, same_library, words_for
from ..base.origin import Crop
from ..base.values import Held, clip, moved
from .bands import Cached, Causal, Window
from .base import Interval, Mask, QuerySegments

A = TypeVar("A", bound=Array)


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Packed sequences: key j is visible to query i iff both are in the same segment.

    Segment s holds the queries ``queries[s] <= i < queries[s + 1]`` and the keys ``keys[s] <= j < keys[s + 1]``.

    In an ``&`` with it, masks without an offset of their own mean in each segment what they mean in a call on that
    sequence alone: `Causal` and `Window` align its last query with its last key, `Prefix` and `First` count from its
    first key. The scores `Alibi` and `RelativeBias` do likewise. All other masks and scores, and dropout, count the
    rows and columns of the packed arrays; beside a `KVCache` functions are told the row within its sequence.

    Parameters
    ----------
    queries : list, range or integer array, (count + 1,) or (..., count + 1)
        Where each segment begins and, last, where the last one ends, in ascending order. A segment may be empty. Tokens
        before the first offset and from the last one on see nothing and are seen by nobody. Leading axes, if any, are
        all batch axes, heads included, each of full size or 1. For calls on a GPU int32 on the GPU is best: nothing is
        copied then.
    keys : likewise, optional
        Default: the same offsets. CuPy arrays are not checked: what is out of range is clamped.
    max_queries : int, optional
        An upper bound of the queries of a segment. Calls with a `KVCache`, where segment s holds the queries of
        sequence s, need it on a GPU: q is then packed, (heads, total, head_dim), and sees the cache's keys; further
        queries of a segment see nothing. Without a cache it says of offsets on a GPU, which are not read, how long
        segments are: up to 128 tokens a faster kernel may take them. They must not be longer.

    Warns
    -----
    UserWarning
        When a call is given NumPy offsets that neither begin with 0 nor end with the number of tokens, and whose sum is
        at most that number: most likely they are lengths, whose offsets are ``np.cumsum([0, *lengths])``. If they are
        meant, ``warnings.filterwarnings("ignore", "mask: Segments")`` says so. Also where there are `Lengths` of keys
        in an ``|``, as in ``segments & (Window(99, 0) | Lengths(keys=4))``: these are the first keys of the packed
        array; `First(4)` are those of each segment.

    See Also
    --------
    pack : makes the packed array and its offsets.

    Notes
    -----
    On CPUs a segment is computed as if it were alone: results are those of a call on the sequence alone, bit for bit,
    and a NaN in one segment stays there, in gradients, too. On GPUs a NaN may reach tokens of other segments in the
    same tile. It does not in calls of more than 16 queries where `Segments`, the same for all heads, are alone or
    combined with `Causal`, `Window` and `Lengths`, one length for all, without dropout or a `Bias`, and without
    gradients of a score other than a `Sink`.

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
    max_queries: int | None = None
    _tokens: int | None = field(init=False, default=None)  # of a segment at most, from offsets that were on the host

    _is_segments = _is_frame = _has_rows = True
    _examples = (
        ("segments", lambda m, n: _eight(m, n)),
        ("causal-segments", lambda m, n: Causal() & _eight(m, n)),
        ("window-segments", lambda m, n: Window(n // 8, 0) & _eight(m, n)),
    )

    def __post_init__(self) -> None:
        if self.max_queries is not None:
            self._set(max_queries=integer("Segments max_queries", self.max_queries, low=0))
        queries = _offsets("Segments queries", self.queries)
        keys = None if self.keys is None else _offsets("Segments keys", self.keys)
        if keys is not None and keys.shape[-1] != queries.shape[-1]:
            raise ValueError(f"Segments keys: got {keys.shape[-1]} offsets, expected {queries.shape[-1]}, "
                             "as many as queries")
        self._set(queries=queries, keys=keys)

    def _fit(self, shape: tuple[int, ...]) -> Mask:
        """Offsets without batch axes hold for all of them."""
        lead = (1,) * (len(shape) - 2)
        return self._mapped(lambda x: x.reshape(*lead, x.size) if lead and x.ndim == 1 else x)

    def _mapped(self, function: Callable[[Any], Any]) -> Segments:
        made = super()._mapped(function)
        if isinstance(self.queries, np.ndarray) and not isinstance(made.queries, np.ndarray):
            made._set(_tokens=_most_tokens(self.queries))
        return made

    @property
    def _longest(self) -> int | None:
        """The most tokens of a segment; None if that is not known."""
        if self.keys is not None:
            return None
        if isinstance(self.queries, np.ndarray):
            return _most_tokens(self.queries)
        return self.max_queries if self._tokens is None else self._tokens

    def _rows(self, i: Any, seqlen_k: int) -> QuerySegments:
        keys = self.queries if self.keys is None else self.keys
        queries, keys = np.broadcast_arrays(clip(self.queries, 0, i.size), clip(keys, 0, seqlen_k))
        *lead, size = queries.shape
        row = np.arange(math.prod(lead), like=i)[:, None]
        above = i.size * row  # beyond the offsets of the rows before: one search finds the segments of all rows
        s = np.searchsorted((queries.reshape(-1, size) + above).ravel(), i + above, side="right") - size * row - 1
        at, after = (np.clip(x.reshape(*lead, i.size), 0, size - 1) for x in (s, s + 1))
        first, end = np.take_along_axis(keys, at, -1), np.take_along_axis(keys, after, -1)
        return QuerySegments(first, end, i + end - np.take_along_axis(queries, after, -1))

    def _last_keys(self, seqlen_q: int, seqlen_k: int) -> int:
        return seqlen_k

    def _own_key(self, seqlen_q: int, seqlen_k: int) -> int | None:
        """Own key of query 0; None where it depends on the segment. Between equal offsets: the query's number."""
        return 0 if self.keys is None and seqlen_q == seqlen_k else None

    def _intervals(self, i: Any, seqlen_k: Any) -> tuple[Interval, ...]:
        first, end, _ = self._rows(i, seqlen_k)
        return (Interval(first, end),)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        if self.keys is None:
            seqlen_q = min(seqlen_q, seqlen_k)
        held: Any = ("queries", self.queries, seqlen_q), ("keys", self.keys, seqlen_k)
        return tuple(Held(name, x, x.shape[-1:], largest, rising=True) for name, x, largest in held if x is not None)

    def _transposed(self, seqlen_q: int, seqlen_k: int, frame: Any = None) -> Segments:
        return self if self.keys is None else Segments(self.keys, self.queries)

    def _cropped(self, crop: Crop) -> Segments:
        """Masks and scores stay aligned within the whole: see `cropped`."""
        keys = self.queries if self.keys is None else self.keys
        return Segments(crop.queries_before(self.queries), crop.keys_before(keys))

    def _may_show(self, seqlen_q: int, seqlen_k: int) -> bool:
        offsets: Any = self.queries, self.queries if self.keys is None else self.keys
        if not all(isinstance(x, np.ndarray) for x in offsets):
            return True
        queries, keys = (np.diff(x) > 0 for x in offsets)
        return bool(np.any(queries & keys))


Frame: TypeAlias = Segments | Cached  # what masks without an offset of their own are aligned within


def _most_tokens(offsets: NDArray[Any]) -> int:
    return int(np.diff(offsets).max(initial=0))


def _eight(seqlen_q: int, seqlen_k: int) -> Segments:
    """Segments for a sample, with offsets of keys if the numbers of queries and keys differ."""
    queries, keys = (np.linspace(0, length, 9).astype(np.int32) for length in (seqlen_q, seqlen_k))
    return Segments(queries, None if seqlen_q == seqlen_k else keys)


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
        For anything but arrays of one library and dtype, and for shapes that do not fit.

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
    if not isinstance(arrays, Iterable) or getattr(arrays, "ndim", 1) == 0:
        raise TypeError(f"arrays: got {words_for(arrays)}, expected a list of arrays")
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
        As `pack` returns them; what is most likely lengths warns, as in `Segments`. A CuPy array is copied to the host
        and read there.

    Returns
    -------
    list of arrays, (..., length, features)
        Views.

    Raises
    ------
    TypeError, ValueError
        For what is not an array, and for offsets that decrease or are beyond the array.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> [x.shape for x in na.unpack(np.zeros((8, 8, 64)), [0, 3, 8])]
    [(8, 3, 64), (8, 5, 64)]
    """
    same_library(packed=packed)
    if packed.ndim < 2:
        raise ValueError(f"packed: got the shape {packed.shape}, expected (..., total, features)")
    found = moved(own("offsets", _offsets("offsets", offsets)), np.empty(0))
    if found.ndim > 1:
        raise ValueError(f"offsets: got the shape {found.shape}, expected (count + 1,)")
    check_values("offsets", found, packed.shape[-2], rising=True)
    return [packed[..., first:end, :] for first, end in pairwise(found.tolist())]


def _offsets(name: str, value: Any) -> Any:
    array = integer_array(name, value, "(..., count + 1)")
    if array.shape[-1] == 0:
        raise ValueError(f"{name}: got the shape {array.shape}, expected at least one offset")
    return array

"""Positions: where the last rows of a call are, if they are not in order, such as the nodes of a tree of tokens; and
where those of a rolling cache are.

Here and nowhere else a row becomes a position. Masks that show intervals of keys take positions of their queries from
`Positions._rows`, as they do within Segments, and those of keys from `Positions._places`; functions of the user's own,
and scores that depend on distances, read the `_arrays_for` a call, see `numbattn.functions.positions`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..base.origin import FAR, Crop
from ..base.values import Held, for_queries
from .bands import Cached, Causal, First, Lengths, Window
from .base import OPERATORS, Mask, QuerySegments, broadcast
from .dense import Bits
from .intervals import Intervals, Prefix
from .logic import All, AnyOf, Joined, visible
from .rolling import Ring
from .tail import Tail, taken
from .where import Where


@dataclass(frozen=True, eq=False, repr=False)
class Positions(Cached):
    """The frame of a call whose last keys are those of its queries, row by row, but not in the order of their rows.

    Where there are `first` keys before these, row i has the position first + depths[..., i]; earlier keys have their
    numbers. With a rolling cache that is said of tokens, whose keys lie in the rows of a ring.
    """

    depths: Any = None  # int32 (..., seqlen_q); of a ring also None: in the order of their rows
    ring: Ring | None = None

    _has_rows = _places_keys = True

    @property
    def _words(self) -> str:
        return "beside the positions of a Tail" if self.ring is None else "with a rolling KVCache"

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        own = () if self.depths is None else (Held("depths", self.depths, (seqlen_q,)),)
        return *super()._held(seqlen_q, seqlen_k if self.ring is None else FAR), *own

    def _fit(self, shape: tuple[int, ...]) -> Positions:
        depths = None if self.depths is None else broadcast("Tail positions", self.depths, shape[:-1], 1)
        return self if depths is self.depths else Positions(self.keys, self.queries, depths, self.ring)

    def _draws(self, part: Mask) -> bool:
        return part._is_function or (
            self.ring is not None and isinstance(part, AnyOf) and not any(leaf._is_of_rows for leaf in part._leaves)
        )

    def _own_key(self, seqlen_q: int, seqlen_k: int) -> Any:
        return super()._own_key(seqlen_q, seqlen_k if self.ring is None else FAR)

    def _depths(self, seqlen_q: int) -> Any:
        if self.depths is None:
            return np.arange(seqlen_q, dtype=np.int32, like=cast(Any, self.keys))
        return self.depths

    def _rows(self, i: Any, seqlen_k: int) -> QuerySegments:
        keys, _ = self._counts(i.size, seqlen_k)
        own = for_queries(self._own_key(i.size, seqlen_k)) + self._depths(i.size).astype(np.int64)
        return QuerySegments(0 * own, for_queries(keys), own)

    def _tokens(self, j: Any, seqlen_k: int) -> Any:
        """The numbers of the tokens whose keys are keys j, (..., keys)."""
        return j if self.ring is None else self.ring.tokens(j, for_queries(self._counts(0, seqlen_k)[0]))

    def _places(self, j: Any, seqlen_q: int, seqlen_k: int) -> tuple[Any, int]:
        """The positions of keys j, (..., 1, keys), and one beyond all."""
        end = seqlen_k if self.ring is None else FAR
        if not seqlen_q:
            return j, end
        first, token = for_queries(self._own_key(seqlen_q, seqlen_k)), self._tokens(j, seqlen_k)
        row = token - first
        return np.where(row < 0, token, first + taken(self._depths(seqlen_q), row))[..., None, :], end

    def _arrays_for(self, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """For functions in a call with S of this shape: depths (batch, heads, seqlen_q), the number of keys and that
        of queries, (batch, heads), where batch and heads may be 1; how many tokens have rows of a ring of their own,
        and how many rows it has, or 0 without a ring."""
        *batch, seqlen_q, seqlen_k = shape
        depths = self._depths(seqlen_q)
        arrays, one = [depths], np.zeros((1,), np.int64, like=depths)
        for x in self._counts(seqlen_q, seqlen_k):  # computed on a device: in a capture nothing is copied to it
            arrays.append(one + x if isinstance(x, int) else x[..., None])
        lead = np.broadcast_shapes((1,) * max(len(batch), 2), *(x.shape[:-1] for x in arrays))
        flat = math.prod(lead[:-1]), lead[-1]
        depths, *counts = (np.broadcast_to(x, (*lead, x.shape[-1])).reshape(*flat, x.shape[-1]) for x in arrays)
        ring = self.ring
        rows = one if ring is None else np.arange(ring.first, ring.capacity + 1, ring.size, like=one)
        return depths, *(x[..., 0] for x in counts), rows

    def _cropped(self, crop: Crop) -> Lengths:
        raise NotImplementedError(f"mask: {self} are of whole sequences")


def placed(mask: Mask, keys: Any = None, queries: Any = None, ring: Ring | None = None) -> Mask:
    """The mask of a call, with the positions of its rows as its frame if it gives them, and with the lengths of a
    cache if there is one, and its ring if it is a rolling one."""
    tail, bare = apart(mask)
    if ring is not None:
        return _rolled(bare, Positions(keys, queries, None if tail is None else tail.positions, ring))
    if tail is None:
        return mask if keys is None else All((Cached(keys, queries), *mask._parts))
    found = takers(bare)
    for leaf in found:
        if getattr(leaf, "offset", None) is not None:
            raise ValueError(f"mask: got {leaf} beside {tail}, which has positions, expected it without an offset")
    for part in bare._parts:
        if found and (part._is_segments or isinstance(part, Lengths)):
            raise ValueError(f"mask: got {part} beside {tail}, which has positions, and {found[0]}, expected the last "
                             "keys to be those of the queries")  # fmt: skip
    return All((Positions(keys, queries, tail.positions), *bare._parts))


def _rolled(mask: Mask, frame: Positions) -> Mask:
    """The mask of a call with a rolling cache: as intervals of its rows or, if more than the ring decides, as Bits."""
    ring: Any = frame.ring
    for leaf in mask._leaves:
        for name, words in OF_ROWS.items():
            if getattr(leaf, name, None) is not None:
                raise ValueError(f"mask: got {leaf} with a rolling KVCache, expected it without {words}")
        if not (leaf._crops_by_sequence or isinstance(leaf, Intervals | Where)):
            raise ValueError(f"mask: got {leaf} with a rolling KVCache, whose keys have no columns of their own, "
                             "expected Causal, Window, First, Prefix, Intervals, Where, Lengths of queries or Tail")
    parts = [part for part in mask._parts if part not in ring.seen and not isinstance(part, Prefix)]
    if not parts:
        return All((frame, *ring.rows_seen(frame.keys, frame.queries)))
    return All((frame, AnyOf((All((*ring.seen, *parts)),))))


def apart(mask: Mask) -> tuple[Tail | None, Mask]:
    """The Tail that gives positions, or None, and the mask without these."""
    tails = [leaf for leaf in mask._leaves if isinstance(leaf, Tail) and leaf.positions is not None]
    if not tails:
        return None, mask
    for tail in tails[1:]:
        if not _equal(tail.positions, tails[0].positions):
            raise ValueError(f"mask: got {tails[0]} and {tail}, expected the same positions in both")
    is_tree = any(isinstance(part, Tail) and part._is_tree for part in mask._parts)  # then Causal hides nothing more
    return tails[0], All(tuple([_bare(part) for part in mask._parts if not (is_tree and part == Causal())]))


def _equal(one: Any, other: Any) -> bool:
    """Whether positions are the same; on a GPU, which is not waited for, the same array."""
    both = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return one is other or (both and np.array_equal(one, other))


def drawn(mask: Mask, seqlen_q: int, seqlen_k: int) -> Mask:
    """A mask with Positions as one without, in which what each query sees is drawn as Bits."""
    lengths = [part for part in mask._parts if isinstance(part, Lengths)]
    return All((*lengths, Bits.pack(visible(mask, seqlen_q, seqlen_k, np.empty(0)))))


def takers(mask: Mask) -> list[Mask]:
    """The parts of a mask that take positions for rows."""
    return [leaf for leaf in mask._leaves if leaf._is_function or isinstance(leaf, TAKERS)]


def _bare(mask: Mask) -> Mask:
    if isinstance(mask, Joined):
        return mask._with(tuple(map(_bare, mask.of)))
    return mask._with(mask._inner, None) if isinstance(mask, Tail) else mask


TAKERS = Causal, Window, First, Prefix, Intervals
OF_ROWS = {"offset": "an offset", "keys": "keys: First counts those of a sequence"}  # fields that count rows of a call
OPERATORS["placed"] = placed

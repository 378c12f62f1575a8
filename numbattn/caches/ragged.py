"""Packed queries with a cache: those of all sequences in one array.

They are computed as a batch with `max_queries` rows each, where a sequence sees only its own rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from ..base.checks import check_values
from ..base.values import moved
from ..masks import All, Bits, Mask, Tail, placed
from .kv_cache import KVCache


class Ragged(NamedTuple):
    """Packed queries (heads, total, features) as a batch, and where each query is in it."""

    q: Any  # (batch, heads, max_queries, features)
    mask: Mask
    sequence: Any  # (total,), the sequence of each query
    row: Any  # (total,), its row there
    inside: Any  # (total,), whether it belongs to a sequence, and is one of its first max_queries

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """(batch, heads, max_queries, ...) as (heads, total, ...)."""
        _, heads, _, *others = shape
        return heads, len(self.inside), *others

    def packed(self, x: Any, out: Any = None, fill: float = 0) -> Any:
        """A result of the batch as one of packed queries, in `out` if given; `fill` for those of no sequence."""
        if out is None:
            out = np.empty(self.shape_of(x.shape), x.dtype, like=x)
        out[...] = fill
        if len(x):
            inside = self.inside.reshape(-1, *(1,) * (x.ndim - 3))
            out[...] = np.where(inside, x[self.sequence, :, self.row].swapaxes(0, 1), out)
        return out


def ragged(q: Any, cache: KVCache, mask: Mask) -> Ragged:
    """Queries with a cache, packed as the Segments of the mask say."""
    segments: Any = mask._segments
    batch = len(cache.lengths)
    if q.ndim != 3:
        raise ValueError(f"q: got the shape {q.shape} with Segments and a KVCache, expected (heads, total, head_dim)")
    if segments.keys is not None or segments.queries.shape != (batch + 1,):
        raise ValueError(f"mask: got {segments}, expected Segments of {batch + 1} offsets of queries alone, a segment "
                         "for each sequence of the KVCache")
    total, most = q.shape[1], max(_most(segments), 1)
    if isinstance(segments.queries, np.ndarray):
        check_values("mask: Segments queries", segments.queries, total, rising=True)
    offsets = np.clip(moved(segments.queries, q).astype(np.int64), 0, total)
    counts = np.clip(offsets[1:] - offsets[:-1], 0, most)
    cache._check_queries(most, counts)
    token = np.minimum(offsets[:-1, None] + np.arange(most, like=offsets), max(total - 1, 0))  # (batch, max_queries)
    number = np.arange(total, like=offsets)
    sequence = np.clip(np.searchsorted(offsets, number, side="right") - 1, 0, max(batch - 1, 0))
    row, end = number - offsets[sequence], offsets[np.minimum(sequence + 1, batch)]
    inside = (row >= 0) & (row < np.minimum(end - offsets[sequence], most))
    own = offsets[sequence], np.minimum(end, offsets[sequence] + most)
    parts = tuple([_unpacked(_by_sequence(part, *own, most), token, total)
                   for part in mask._parts if part is not segments])  # fmt: skip
    rows = q[:, token] if total else np.zeros((len(q), batch, most, q.shape[2]), q.dtype, like=q)
    aligned = placed(All(parts), cache.lengths[:, None], counts[:, None], cache._ring)
    return Ragged(rows.swapaxes(0, 1), aligned, sequence, np.clip(row, 0, most - 1), inside)


def _most(segments: Any) -> int:
    """The most queries that a sequence has."""
    if segments.max_queries is not None:
        return int(segments.max_queries)
    if not isinstance(segments.queries, np.ndarray):
        raise ValueError("mask: Segments max_queries: got None with offsets on a GPU, which nobody waits to read; "
                         "with a KVCache the most queries of a sequence are expected")
    return int(np.diff(segments.queries).max(initial=0))


def _by_sequence(part: Mask, first: Any, end: Any, most: int) -> Mask:
    """A tree of all packed tokens, a forest, as one whose columns are those of each row's sequence; first, end: of the
    tokens of that. Other parts as they are."""
    if not (isinstance(part, Tail) and part._is_tree and part.positions is not None and len(first)):
        return part
    forest: Any = part.mask
    column = first[:, None] + np.arange(most, like=first)
    at, words = np.minimum(column, len(first) - 1), moved(forest.words, first)
    if words.shape != (len(first), -(-len(first) // 32)):
        return part
    bits = np.take_along_axis(words, at // 32, axis=1) >> (at % 32).astype(words.dtype) & words.dtype.type(1)
    return Tail(Bits.pack((bits != 0) & (column < end[:, None])), part.positions)


def _unpacked(part: Mask, token: Any, total: int) -> Mask:
    """A part of the mask, for queries in a batch."""
    if isinstance(part, Tail):
        words = getattr(part.mask, "words", None)
        if words is None or words.shape[:-1] != (total,):
            raise ValueError(f"mask: got {part} with Segments and a KVCache, expected Tail(Bits.tree(parents)) of "
                             f"all {total} tokens, or Tail(Bits(words)) with words of the shape ({total}, "
                             "ceil(max_queries / 32)), a row for each query and a bit for each of its sequence")
        if (depths := cast(Any, part.positions)) is None:
            return Tail(Bits(moved(words, token)[token][:, None]))
        if depths.shape != (total,):
            raise ValueError(f"mask: got {part} with Segments and a KVCache, expected positions of the shape "
                             f"({total},), one for each query")  # fmt: skip
        return Tail(Bits(moved(words, token)[token][:, None]), moved(depths, token)[token][:, None])
    if any(x.ndim > 1 for leaf in part._leaves for x in leaf._arrays().values()):
        raise ValueError(f"mask: got {part} with Segments and a KVCache, expected masks without arrays of two axes "
                         "or more, but for Tail")
    return part


"""Tokens that `append` writes and `keep` keeps: checks of arguments, and quantisation of what is written."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..base.checks import check_values, integer_array, own, same_library
from ..base.values import rounded
from .eight_bits import FLOAT8, INT8, to_float8, to_int8


class NewTokens(NamedTuple):
    """Tokens after those of each sequence."""

    sequence: Any
    position: Any
    own: slice  # which of the given tokens they are
    counts: Any  # for each sequence


def new_tokens(lengths: Any, longest: int, segments: Any, count: int) -> NewTokens:
    """The tokens after sequences of these lengths. There are `count` for each or, if they are packed, in all."""
    if segments is None:
        return _as_many_for_each(lengths.tobytes(), lengths.dtype, longest, count)
    offsets = checked_offsets(segments, len(lengths))
    same_library(KVCache=np.empty(0), segments=offsets)
    check_values("segments", offsets, count, rising=True)
    return _new_tokens(lengths, longest, offsets.astype(np.int64))


@lru_cache(maxsize=64)
def _as_many_for_each(lengths: bytes, dtype: np.dtype[Any], longest: int, count: int) -> NewTokens:
    """The same in the next layer, whose lengths are equal."""
    held = np.frombuffer(lengths, dtype)
    return _new_tokens(held, longest, np.arange(len(held) + 1) * count)


def _new_tokens(lengths: Any, longest: int, offsets: Any) -> NewTokens:
    starts, counts = offsets[:-1], offsets[1:] - offsets[:-1]
    for b in (counts > longest - lengths).nonzero()[0][:1]:
        raise ValueError(f"k: got {counts[b]} tokens for sequence {b}, which has {lengths[b]} of at most {longest}")
    sequence, own = np.arange(len(lengths)).repeat(counts), slice(int(offsets[0]), int(offsets[-1]))
    return NewTokens(sequence, np.arange(own.start, own.stop) + (lengths - starts)[sequence], own, counts)


def checked_offsets(segments: Any, batch: int) -> Any:
    """An array of batch + 1 integers."""
    offsets = own("segments", integer_array("segments", segments, "(batch + 1,)"))
    if offsets.shape != (batch + 1,):
        raise ValueError(f"segments: got the shape {offsets.shape}, expected ({batch + 1},)")
    return offsets


def check_path(path: Any, nodes: int) -> None:
    """Refuse a path unless it ascends from 0 on, and then is -1."""
    if path.size and not -1 <= path.min() <= path.max() < nodes:
        raise ValueError(f"path: got values from {path.min()} to {path.max()}, allowed -1 to {nodes - 1}")
    one, other = path[:, :-1], path[:, 1:]
    wrong = (other >= 0) & ((one < 0) | (other <= one))
    if wrong.any():
        raise ValueError(f"path: got {one[wrong][0]} before {other[wrong][0]}, expected ascending nodes, then -1")


def by_token(x: Any) -> Any:
    """(..., heads, tokens, features) as (tokens, heads, features)."""
    x = x.swapaxes(-2, -3)
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def stored(tokens: Any, held: Any, scale: Any) -> list[tuple[Any, Any]]:
    """(array, what to write there) for tokens (tokens, heads, features): to k or v, called `held`, quantised if it has
    8 bits, and for int8 to its scales."""
    if held.dtype == INT8:
        tokens, scales = to_int8(tokens)
        return [(held, tokens), (scale, scales)]
    return [(held, to_float8(tokens, scale) if held.dtype == FLOAT8 else rounded(tokens, held.dtype))]

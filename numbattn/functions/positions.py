"""Functions of an element that take positions for rows: those of `numbattn.masks.Positions`, whose arrays they read.

In front of a function's own arrays there are depths (batch, heads, seqlen_q); how many keys and queries there are,
(batch, heads), where batch and heads may be 1; and of a rolling cache the first row that tokens take in turns, and the
row after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from .frozen import Frozen, frozen


def positions_of(arrays: Sequence[Any]) -> Callable[..., Any]:
    """The function (batch, head, i, j, depths, keys, queries, ring) -> the positions of query i, counted from the first
    of the last keys, and of key j, and that of the first of the last keys; for arrays like these."""
    batch, heads, _ = arrays[0].shape
    return _positions(batch > 1, heads > 1, arrays[-1].size > 1)


@lru_cache(maxsize=8)
def _positions(by_batch: bool, by_head: bool, rolls: bool) -> Any:
    own: Any = OWN[by_batch, by_head]
    token_of: Any = _in_turn if rolls else _in_order

    def positions(batch, head, i, j, depths, keys, queries, ring):  # type: ignore[no-untyped-def]
        depth, count = own(depths, batch, head), own(keys, batch, head)
        first = count - own(queries, batch, head)
        token = token_of(j, count, ring)
        row = token - first
        key = token if row < 0 else first + depth[min(row, depth.shape[0] - 1)]
        return depth[i], max(key, 0), first

    return positions


def _in_order(j, count, ring):  # type: ignore[no-untyped-def]
    return j


def _in_turn(j, count, ring):  # type: ignore[no-untyped-def]
    return j if j < ring[0] else count - 1 - (count - 1 - j) % (ring[1] - ring[0])


@lru_cache(maxsize=256)
def of_score(function: Frozen, positions: Callable[..., Any], words: str) -> Frozen:
    """A function (s, batch, head, i, j, *arrays) of positions as one of rows; words: what it is, in errors."""
    of_user = function.linked(lambda callee: callee)

    def at_positions(s, batch, head, i, j, depths, keys, queries, ring, *arrays):  # type: ignore[no-untyped-def]
        i, j, _ = positions(batch, head, i, j, depths, keys, queries, ring)
        return of_user(s, batch, head, i, j, *arrays)

    return frozen(at_positions, words)


@lru_cache(maxsize=256)
def of_mask(function: Frozen, positions: Callable[..., Any]) -> Frozen:
    """A function (batch, head, i, j, *arrays) of positions as one of rows."""
    of_user = function.linked(lambda callee: callee)

    def at_positions(batch, head, i, j, depths, keys, queries, ring, *arrays):  # type: ignore[no-untyped-def]
        i, j, _ = positions(batch, head, i, j, depths, keys, queries, ring)
        return of_user(batch, head, i, j, *arrays)

    return frozen(at_positions, "Where function")


@lru_cache(maxsize=16)
def of_distance(read: Callable[..., Any], positions: Callable[..., Any]) -> Frozen:
    """The function that adds to s what read(ahead, reach), an entry and a factor, makes of an array, (batch, heads,
    entries); ahead: how far the key's position is ahead of the query's."""

    def by_distance(s, batch, head, i, j, depths, keys, queries, ring, array):  # type: ignore[no-untyped-def]
        i, j, first = positions(batch, head, i, j, depths, keys, queries, ring)
        entry, factor = read(j - first - i, array.shape[2] // 2)
        return s + factor * array[min(batch, array.shape[0] - 1), min(head, array.shape[1] - 1), entry]

    return frozen(by_distance, "Score function")


OWN = {
    (False, False): lambda x, batch, head: x[0, 0],
    (True, False): lambda x, batch, head: x[batch, 0],
    (False, True): lambda x, batch, head: x[0, head],
    (True, True): lambda x, batch, head: x[batch, head],
}

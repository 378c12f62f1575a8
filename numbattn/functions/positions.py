"""Functions of an element that take positions for rows: those of `numbattn.masks.Positions`, whose arrays they read.

In front of a function's own arrays there are depths (batch, heads, seqlen_q), and how many keys and queries there are,
(batch, heads), where batch and heads may be 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from .frozen import Frozen, frozen


def positions_of(arrays: Sequence[Any]) -> Callable[..., Any]:
    """The function (batch, head, i, j, depths, keys, queries) -> the positions of query i, counted from the first of
    the last keys, and of key j, and that of the first of the last keys; for arrays like these."""
    batch, heads, _ = arrays[0].shape
    return _positions(batch > 1, heads > 1)


@lru_cache(maxsize=4)
def _positions(by_batch: bool, by_head: bool) -> Any:
    own: Any = OWN[by_batch, by_head]

    def positions(batch, head, i, j, depths, keys, queries):  # type: ignore[no-untyped-def]
        depth = own(depths, batch, head)
        first = own(keys, batch, head) - own(queries, batch, head)
        row = j - first
        key = j if row < 0 else first + depth[min(row, depth.shape[0] - 1)]
        return depth[i], max(key, 0), first

    return positions


@lru_cache(maxsize=256)
def of_score(function: Frozen, positions: Callable[..., Any], words: str) -> Frozen:
    """A function (s, batch, head, i, j, *arrays) of positions as one of rows; words: what it is, in errors."""
    of_user = function.linked(lambda callee: callee)

    def at_positions(s, batch, head, i, j, depths, keys, queries, *arrays):  # type: ignore[no-untyped-def]
        i, j, _ = positions(batch, head, i, j, depths, keys, queries)
        return of_user(s, batch, head, i, j, *arrays)

    return frozen(at_positions, words)


@lru_cache(maxsize=256)
def of_mask(function: Frozen, positions: Callable[..., Any]) -> Frozen:
    """A function (batch, head, i, j, *arrays) of positions as one of rows."""
    of_user = function.linked(lambda callee: callee)

    def at_positions(batch, head, i, j, depths, keys, queries, *arrays):  # type: ignore[no-untyped-def]
        i, j, _ = positions(batch, head, i, j, depths, keys, queries)
        return of_user(batch, head, i, j, *arrays)

    return frozen(at_positions, "Where function")


@lru_cache(maxsize=16)
def of_distance(read: Callable[..., Any], positions: Callable[..., Any]) -> Frozen:
    """The function that adds to s what read(ahead, reach), an entry and a factor, makes of an array, (batch, heads,
    entries); ahead: how far the key's position is ahead of the query's."""
    own: Any = OWN[True, True]

    def by_distance(s, batch, head, i, j, depths, keys, queries, array):  # type: ignore[no-untyped-def]
        i, j, first = positions(batch, head, i, j, depths, keys, queries)
        entries = own(array, min(batch, array.shape[0] - 1), min(head, array.shape[1] - 1))
        entry, factor = read(j - first - i, entries.shape[0] // 2)
        return s + factor * entries[entry]

    return frozen(by_distance, "Score function")


OWN = {
    (False, False): lambda x, batch, head: x[0, 0],
    (True, False): lambda x, batch, head: x[batch, 0],
    (False, True): lambda x, batch, head: x[0, head],
    (True, True): lambda x, batch, head: x[batch, head],
}

"""The functions of a score by offset on a grid, which backends compile, and the arrays that they read."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from .axis import Part, Seen, Sizes, seen_along
from .offsets import offsets_of
from .visibility import wraps

EXTRA = -(2**31)  # in place of what is read of a token of `extra`


@lru_cache(maxsize=64)
def columns_of(parts: tuple[Part, ...]) -> tuple[Any, Any]:
    """What `index_along` reads of each token as a query, int32 (axes, 1 or 3, tokens), and as a key, (axes, tokens)."""
    is_wrapped, queries, keys = wraps(parts), [], []
    for part in parts:
        (axes, extra), at = part, part.places
        seen = [seen_along(axis) for axis in axes]
        of_query = [rows_of(of, is_wrapped)[:, own] for of, own in zip(seen, at)]
        of_key = [of.place[own] for of, own in zip(seen, at)]
        queries.append(np.pad(of_query, ((0, 0), (0, 0), (extra, 0)), constant_values=EXTRA))
        keys.append(np.pad(of_key, ((0, 0), (extra, 0)), constant_values=EXTRA))
    found = np.concatenate(queries, axis=-1).astype(np.int32), np.concatenate(keys, axis=-1).astype(np.int32)
    for x in found:
        x.flags.writeable = False                                       # it is that of other scores, too
    return found


def rows_of(seen: Seen, is_wrapped: bool) -> Any:
    """From which place of a key its index along an axis counts; if windows may wrap, from which place they begin, the
    period, and the index there."""
    if is_wrapped:
        return np.stack([seen.begin, seen.period, seen.offset])
    return (seen.begin - seen.offset)[None]


def lines_of(parts: tuple[Part, ...], entries: tuple[int, ...]) -> tuple[Any, Any]:
    """What `of_lines` reads of each token as a query and as a key, int32 (tokens,), for windows that do not wrap."""
    queries, keys = columns_of(parts)
    query, key = (np.where(x[0] == EXTRA, EXTRA, strides_of(entries) @ x) for x in (queries[:, 0], keys))
    return query.astype(np.int32), key.astype(np.int32)


def steps_of(sizes: Sizes, entries: tuple[int, ...]) -> Any:
    """From the entry that the first tokens of two boxes read to that of each sum of `offsets_of`, keys before queries,
    int32 (groups, sums)."""
    if not sizes:
        return np.zeros((1, 1), np.int32)
    return (offsets_of(sizes) @ -strides_of(entries)).astype(np.int32)


def strides_of(entries: tuple[int, ...]) -> Any:
    """Of the axes of a table, in entries."""
    return np.cumprod([1, *entries[:0:-1]])[::-1]


@lru_cache(maxsize=2)
def of_lines(has_extra: bool) -> Callable[..., Any]:
    """`biased` for a table whose entries are on one axis. Kernels know what else its arrays say."""

    def added(s: Any, batch: Any, head: Any, i: Any, j: Any, table: Any, query: Any, key: Any, steps: Any) -> Any:
        if has_extra and (query[i] == EXTRA or key[j] == EXTRA):
            return s
        return s + table[min(head, table.shape[0] - 1), max(0, min(key[j] - query[i], table.shape[1] - 1))]

    return added


@lru_cache(maxsize=64)
def biased(axes: int, is_wrapped: bool, has_extra: bool) -> Callable[..., Any]:
    """The function for so many axes; is_wrapped: whether windows may go on at the other side."""

    def index_along(query: Any, key: Any, i: Any, j: Any, size: Any) -> Any:
        """The index of a pair along an axis of the table, clamped to it, since hidden pairs are computed, too."""
        steps = key[j] - query[0, i]
        if is_wrapped:
            steps = (steps + query[1, i] if steps < 0 else steps) + query[2, i]
        return max(0, min(steps, size - 1))

    def is_alone(query: Any, key: Any, i: Any, j: Any) -> Any:
        return has_extra and (query[0, 0, i] == EXTRA or key[0, j] == EXTRA)

    def along_1(s: Any, batch: Any, head: Any, i: Any, j: Any, table: Any, query: Any, key: Any) -> Any:
        if is_alone(query, key, i, j):
            return s
        return s + table[min(head, table.shape[0] - 1), index_along(query[0], key[0], i, j, table.shape[1])]

    def along_2(s: Any, batch: Any, head: Any, i: Any, j: Any, table: Any, query: Any, key: Any) -> Any:
        if is_alone(query, key, i, j):
            return s
        x = index_along(query[0], key[0], i, j, table.shape[1])
        y = index_along(query[1], key[1], i, j, table.shape[2])
        return s + table[min(head, table.shape[0] - 1), x, y]

    def along_3(s: Any, batch: Any, head: Any, i: Any, j: Any, table: Any, query: Any, key: Any) -> Any:
        if is_alone(query, key, i, j):
            return s
        x = index_along(query[0], key[0], i, j, table.shape[1])
        y = index_along(query[1], key[1], i, j, table.shape[2])
        z = index_along(query[2], key[2], i, j, table.shape[3])
        return s + table[min(head, table.shape[0] - 1), x, y, z]

    return (along_1, along_2, along_3)[axes - 1]

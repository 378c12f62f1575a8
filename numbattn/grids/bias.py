"""The functions of a score by offset on a grid, which backends compile, and the arrays that they read."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..base.values import moved
from .axis import AxisWindow, Part, Seen, Sizes, seen_along
from .offsets import offsets_of
from .visibility import wraps

EXTRA = -(2**31)  # in place of what is read of a token of `extra`


@lru_cache(maxsize=64)
def columns_of(parts: tuple[Part, ...], by_steps: bool = False) -> tuple[Any, Any]:
    """What `index_along` reads of each token as a query, int32 (axes, 1 or 3, tokens), and as a key, (axes, tokens).
    by_steps: of a table that is read by the steps along periodic axes, see `Turn`."""
    is_wrapped, queries, keys = wraps(parts) and not by_steps, [], []
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
    return np.where(seen.period > 0, seen.place - seen.period + 1, seen.begin - seen.offset)[None]


class Turn(NamedTuple):
    """How a table is read along a periodic axis, by the steps from a query to a key: 1 - period to period - 1."""

    entries: Any  # which entry each step reads
    steps: Any  # which steps read each entry, (2, entries); the number after the last where none does


class Turns(NamedTuple):
    """How a table is read along each axis; None: by its entries, since windows do not wrap."""

    along: tuple[Turn | None, ...]
    entries: tuple[int, ...]

    @classmethod
    def of(cls, parts: tuple[Part, ...], like: Any) -> Turns | None:
        """With arrays of the library of `like`. None where an entry does not follow from the steps: if periods differ,
        or groups of neighbours see all the way around."""
        found: list[Turn | None] = []
        for axes in zip(*[part.axes for part in parts]):
            turn = turn_of(axes[0]) if axes[0].is_periodic and len({*axes}) == 1 else None
            if turn is None and any(axis.is_periodic for axis in axes):
                return None
            found.append(turn)
        entries = [len(turn.entries) if turn else 2 * axis.window - 1 for turn, axis in zip(found, parts[0].axes)]
        return cls(tuple([turn and Turn(*[moved(x, like) for x in turn]) for turn in found]), tuple(entries))

    @property
    def axes(self) -> list[tuple[int, Turn]]:
        """Those that are read by steps, numbered from the last."""
        return [(axis, turn) for axis, turn in enumerate(self.along, -len(self.along)) if turn is not None]

    def by_steps(self, table: Any) -> Any:
        """A table, (..., *entries), with an entry for each step, on one axis."""
        lead = table.shape[: -len(self.along)]
        for axis, turn in self.axes:
            table = np.take(table, turn.entries, axis=axis)
        return table.reshape(*lead, -1)

    def by_entries(self, gradient: Any, heads: int) -> Any:
        """The gradient of a table, (..., heads, *entries), from that of `by_steps`, (..., elements)."""
        gradient = gradient.reshape(*gradient.shape[:-1], heads, *self.entries)
        for axis, turn in self.axes:
            none = np.zeros_like(np.take(gradient, turn.entries[:1], axis=axis))
            whole = np.concatenate([gradient, none], axis=axis)
            gradient = sum([np.take(whole, steps, axis=axis) for steps in turn.steps])
        return gradient


@lru_cache(maxsize=64)
def turn_of(axis: AxisWindow) -> Turn | None:
    period, size = axis.size // axis.dilation, 2 * axis.window - 1
    if axis.size % axis.dilation or (size > period and axis.stride > 1):
        return None
    left = axis.window - 1 if size <= period else axis.window // 2      # steps to the first of a window
    entries = (np.arange(1 - period, period) + left) % period + axis.window - 1 - left
    steps = np.full((2, size), 2 * period - 1)
    for number in np.flatnonzero(entries < size):                       # those beyond are of hidden pairs
        steps[int(number >= period - 1), entries[number]] = number
    return Turn(np.minimum(entries, size - 1), steps)


def lines_of(parts: tuple[Part, ...], entries: tuple[int, ...]) -> tuple[Any, Any]:
    """What `of_lines` reads of each token as a query and as a key, int32 (tokens,), of a table read by steps."""
    queries, keys = columns_of(parts, by_steps=True)
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

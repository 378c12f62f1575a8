"""The functions of a score by offset on a grid, which backends compile, and the arrays that they read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .axis import Part, seen_along

READ = "begin", "period", "offset"  # of a query, see axis.Seen


@lru_cache(maxsize=64)
def columns_of(parts: tuple[Part, ...]) -> tuple[Any, Any]:
    """What is READ of each token as a query, int32 (axes, 3, tokens), and places as a key, (axes, tokens). Of tokens
    of `extra` all is -1."""
    found = []
    for axes, extra in parts:
        at = np.indices([axis.size for axis in axes]).reshape(len(axes), -1)
        fields = np.full((len(axes), len(READ) + 1, extra + at.shape[1]), -1, np.int32)
        for of, axis, own in zip(fields, axes, at):
            for row, name in zip(of, (*READ, "place")):
                row[extra:] = getattr(seen_along(axis), name)[own]
        found.append(fields)
    fields = np.concatenate(found, axis=-1)
    return fields[:, :-1].copy(), fields[:, -1].copy()


def is_extra(column: Any, place: Any, i: Any, j: Any) -> Any:
    return (column[0, 0, i] < 0) | (place[0, j] < 0)


def offset_of(column: Any, place: Any, i: Any, j: Any, size: Any) -> Any:
    """The index of a pair along an axis of the table, clamped to it, since hidden pairs are computed, too."""
    steps = place[j] - column[0, i]
    steps = steps + column[1, i] if steps < 0 else steps
    return max(0, min(steps + column[2, i], size - 1))


def biased_1(s: Any, batch: Any, head: Any, i: Any, j: Any, table: Any, column: Any, place: Any) -> Any:
    if is_extra(column, place, i, j):
        return s
    return s + table[min(head, table.shape[0] - 1), offset_of(column[0], place[0], i, j, table.shape[1])]


def biased_2(s: Any, batch: Any, head: Any, i: Any, j: Any, table: Any, column: Any, place: Any) -> Any:
    if is_extra(column, place, i, j):
        return s
    x = offset_of(column[0], place[0], i, j, table.shape[1])
    y = offset_of(column[1], place[1], i, j, table.shape[2])
    return s + table[min(head, table.shape[0] - 1), x, y]


def biased_3(s: Any, batch: Any, head: Any, i: Any, j: Any, table: Any, column: Any, place: Any) -> Any:
    if is_extra(column, place, i, j):
        return s
    x = offset_of(column[0], place[0], i, j, table.shape[1])
    y = offset_of(column[1], place[1], i, j, table.shape[2])
    z = offset_of(column[2], place[2], i, j, table.shape[3])
    return s + table[min(head, table.shape[0] - 1), x, y, z]


BIASED = biased_1, biased_2, biased_3

"""The k smallest elements of each row over tiles of columns, and their columns, ascending; the first of equal ones."""

from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ...tile import (
    WARP,
    Axis,
    Layout,
    allocate,
    anywhere,
    column_halves,
    columns,
    device,
    full,
    get,
    index,
    opaque,
    part_argmin,
    put,
    row_max,
    shifted,
    sync_warp,
    where,
)

NOBODY = -1  # in place of a column, if fewer than k elements are less than infinity


class Smallest(NamedTuple):
    """The result so far: tiles of k columns, or, for k = 1, of each thread for its part of a row."""

    values: Any
    cols: Any


def minimum_steps(layout, ACC):
    """Device functions for k = 1 and tiles of this layout: () -> the Smallest of nothing; (Smallest, tile, n0) -> the
    same with a tile whose columns are numbered from n0 on; (Smallest) -> values and columns, row vectors."""
    PARTS, INFINITE, NONE, LAST = layout.row_parts(), ACC(np.inf), np.int32(NOBODY), np.int32(2**31 - 1)

    @device
    def start():
        return Smallest(full(PARTS, INFINITE), full(PARTS, NONE))

    @device
    def add(found, tile, n0):
        values, cols = part_argmin(tile, n0, found.values, found.cols)
        return Smallest(values, cols)

    @device
    def finish(found):
        least = -row_max(-found.values)
        return least, -row_max(-where(found.values == least, found.cols, LAST))

    return start, add, finish


def by_row(layout, cols):
    """The layout with the same rows and `cols` columns in which a thread has whole rows. Each warp keeps at least the
    rows that it has in `layout`."""
    weights = {weight << i: shift + i for shift, bits, weight in layout.rows.fields for i in range(bits)}
    of_warps = {weight: bit for weight, bit in weights.items() if 1 << bit >= WARP}
    inner = [1 << i for i in range(layout.rows.size.bit_length() - 1) if 1 << i not in of_warps]
    lanes, slots = inner[: WARP.bit_length() - 1], inner[WARP.bit_length() - 1 :]
    fields = [(bit, 1, weight) for bit, weight in [*enumerate(lanes), *((of_warps[x], x) for x in of_warps)]]
    offsets = sorted(map(sum, product(*[(0, weight) for weight in slots])))
    return Layout(
        Axis(layout.rows.size, tuple(fields), tuple(offsets)), Axis(cols, (), tuple(range(cols))), layout.threads
    )


def smallest_steps(layout, ACC, k, shared):
    """`minimum_steps` for any k, with sorted tiles of k columns.

    If a warp's rows of a tile have an element less than the last one so far, they go through shared memory to threads
    that have whole rows and insert the elements one by one.
    """
    if k == 1:
        return minimum_steps(layout, ACC)
    rows, cols = layout.shape
    FOUND, FOUR, VECTOR = by_row(layout, k), by_row(layout, 4), layout.row_vector()
    ROWS = FOUND.row_vector()
    PLACE, BOUND = shared.tile(rows, cols, ACC), shared.tile(1, rows, ACC)
    INFINITE, NONE, GROUPS = ACC(np.inf), np.int32(NOBODY), cols // 4

    @device
    def start():
        put(allocate(BOUND).T, full(ROWS, INFINITE))
        return Smallest(full(FOUND, INFINITE), full(FOUND, NONE))

    @device
    def insert(found, x, col):
        """Insert a row vector, the elements of one column."""
        smaller = x < found.values                              # from its place on: after equal ones
        beyond = shifted(smaller, False)
        values = where(beyond, shifted(found.values, 0), where(smaller, x, found.values))
        return Smallest(values, where(beyond, shifted(found.cols, 0), where(smaller, col, found.cols)))

    @device
    def insert_two(found, two, col):
        left, right = column_halves(two)
        return insert(insert(found, left, col), right, col + 1)

    @device
    def insert_all(found, n0):
        group = index(0)
        while group < GROUPS:
            four = get(columns(allocate(PLACE), group, GROUPS), FOUR)
            if anywhere(four < row_max(found.values)):
                left, right = column_halves(four)
                found = insert_two(insert_two(found, left, n0 + 4 * group), right, n0 + 4 * group + 2)
            group = opaque(group + 1)
        return found

    @device
    def add(found, tile, n0):
        sync_warp()                                             # the bound is there, all have read the last tile
        if anywhere(tile < get(allocate(BOUND).T, VECTOR)):
            put(allocate(PLACE), tile)
            sync_warp()
            found = insert_all(found, n0)
            put(allocate(BOUND).T, row_max(found.values))
        return found

    @device
    def finish(found):
        return found.values, found.cols

    return start, add, finish

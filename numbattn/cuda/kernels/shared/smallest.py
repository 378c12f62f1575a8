"""The k smallest elements of each row over tiles of columns, and their columns, ascending; of equal ones the first."""

from typing import Any, NamedTuple

import numpy as np

from ...tile import device, full, part_argmin, row_max, where

NOBODY = -1  # in place of a column, where fewer than k elements are less than infinity


class Smallest(NamedTuple):
    """What has been found so far: tiles of k columns, or, for k = 1, what each thread has found in its part of a row.
    """

    values: Any
    cols: Any


def minimum_steps(layout, ACC):
    """Device functions for k = 1, of tiles of this layout: () -> a Smallest of nothing; (that, tile, n0) -> the one
    with a tile whose columns are numbers n0 and on; (that) -> values and columns, row vectors."""
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

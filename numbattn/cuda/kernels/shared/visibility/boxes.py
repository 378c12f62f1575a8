"""The windows of a grid as a test of whole tiles, in the order of boxes: bits from numbattn.grids.bits."""

import numpy as np

from .....grids.bits import QUARTERS
from .....grids.boxes import BLOCK
from ....tile import col_index, convert, device, full, row_index, spread, take

BOXES = "boxes"
BOX_BITS = BLOCK.bit_length() - 1
WITHIN = BLOCK - 1 - 2 * (QUARTERS - 1)  # the bits of a column that say which bit of its word it has
LAST = 2 * BLOCK // 8 - 2


def axes_of(kind):
    """How many axes the grid of a function with such a test has; None for others."""
    name, _, axes = kind.rpartition(" ")[-1].partition("=")
    return int(axes) if name == BOXES else None


def has_boxes(mask):
    """Whether tokens are in the order of boxes of a grid."""
    return any(map(axes_of, mask))


def boxes_test(g, kind, layout, transposed):
    """The device function (mask, band, batch, head, m0, n0): `element_test` for grid number g."""
    AXES, SIDE, WORDS = axes_of(kind), int(transposed), layout.without(cols=WITHIN)
    COLS, IS_PART = layout.col_vector(), layout.cols.size < BLOCK

    @device
    def test(mask, band, batch, head, m0, n0):
        _, rows, boxes, bits = mask.grids[g].arrays
        first, start = (n0, m0) if SIDE else (m0, n0)
        row, col = row_index(layout, first), col_index(WORDS, start)
        box, quarter = col >> BOX_BITS, (col >> 1) & (QUARTERS - 1)
        word = full(WORDS, np.int32(-1))
        for axis in range(AXES):
            word = word & take(bits, take(rows[SIDE, axis], row) + (take(boxes[SIDE, axis], box) + quarter))
        if IS_PART:
            word = word >> ((start & (BLOCK - 1)) >> 2)
        col = col_index(layout, 0)
        bit = full(COLS, np.int32(1)) << ((col & 1) | ((col >> 2) & LAST))
        return convert(spread(word, layout) & bit, np.bool_)

    return test

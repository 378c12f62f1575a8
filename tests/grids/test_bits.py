"""What tokens see of boxes, as bits: what the mask shows, in the order of boxes."""

import numpy as np
import pytest

import numbattn as na
from numbattn.grids.bits import MOST, bits_of
from numbattn.grids.boxes import BLOCK, boxes_of

from .test_boxes import CASES


def shown_by(bits, side, tokens):
    """The truths of all tokens, (rows, columns)."""
    rows, starts, words = bits
    boxes, column = np.divmod(np.arange(tokens), BLOCK)
    places = rows[side, :, :, None] + starts[side][:, None, boxes] + column % 8 // 2
    found = np.bitwise_and.reduce(np.take(words, places, mode="clip"), axis=0)   # of one grid and another: any
    return found >> (column // 8 * 2 + column % 2) & 1 != 0


@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_mask(case):
    """Of tokens of one grid."""
    shape, extra, options = CASES[case]
    mask = na.Grid(shape, extra).window(**options)
    boxes = boxes_of(mask._windows.parts)
    tokens, bits = boxes.tokens, bits_of(boxes)
    shown = np.pad(mask.dense(*[mask._windows.tokens] * 2), (0, 1))[np.ix_(tokens, tokens)]     # PADDING is the last
    number = np.repeat(np.arange(len(boxes.parts)), [part.tokens.size for part in boxes.parts])
    same = number[:, None] == number
    np.testing.assert_array_equal(shown_by(bits, 0, tokens.size) & same, shown)
    np.testing.assert_array_equal((shown_by(bits, 1, tokens.size) & same).T, shown)


def test_bits_of_long_axes():
    size = int((MOST * BLOCK) ** 0.5) + BLOCK
    boxes = boxes_of(na.Grid((size,)).window(99, dilation=31)._windows.parts)
    assert bits_of(boxes) is None


FAULTS = {
    "test_bits_are_the_mask": {
        "np.where(tokens < extra, axis.size, at[number])": "at[number]",
        "of_others[-1] = False": "of_others[-1] = True",
        "box[is_other] += 0 if number else np.arange(len(others))": "",
        "box * words[0].size": "box * words.size",
        "of_boxes + used": "of_boxes",
        "enumerate((seen, seen.T))": "enumerate((seen, seen))",
        "& is_there, is_there[None]": ", is_there[None]",
        "grids/boxes.py": {"(begin <= at) & (at <= last)": "(begin <= at) & (at < last)"},
    },
}

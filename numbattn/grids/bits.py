"""What the tokens of grids see of boxes, as bits, for tests of whole tiles.

A box is a product of intervals, and so is a window: a token sees of a box what it sees along all axes. For each axis
there are words of bits, by intervals and tokens; an AND over the axes is what a token sees of a quarter of a box. A
quarter has columns 2 n and 2 n + 1 of every eight, as one thread holds them for tensor cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .axis import AxisWindow, Numbers
from .boxes import BLOCK, Boxes, PartBoxes, Truths, intervals_along, seen_of
from .visibility import PADDING

QUARTERS = 4
MOST = 2**20  # intervals times tokens of an axis
Words = NDArray[np.int32]


class BoxBits(NamedTuple):
    """What tokens see of boxes of keys, [0], and by which queries of boxes they are seen, [1].

    Bit 2 n + c of words[rows[side, axis, token] + boxes[side, axis, box] + quarter] is of column 8 n + 2 quarter + c.
    """

    rows: Words  # (2, axes, tokens)
    boxes: Words  # (2, axes, boxes)
    words: Words


def bits_of(boxes: Boxes) -> BoxBits | None:
    """None for axes so long that words would take too much memory."""
    longest = max(axis.size * -(-axis.size // n) for x in boxes.parts for axis, n in zip(x.part.axes, x.sizes))
    if longest > MOST:
        return None
    of_parts, words, used = [], [], 0
    for part in boxes.parts:
        at = np.empty((2, 2, len(part.sizes)), object)                  # of rows and boxes, by side and axis
        for side, axis, (of_rows, of_boxes, found) in words_of_axes(part):
            at[:, side, axis] = of_rows, of_boxes + used
            words.append(found)
            used += found.size
        of_parts.append([np.stack([np.stack([*side]) for side in sides]) for sides in at])
    rows, starts = (np.concatenate(x, axis=-1).astype(np.int32) for x in zip(*of_parts))
    return BoxBits(rows, starts, np.concatenate(words))


def words_of_axes(found: PartBoxes) -> Iterator[tuple[int, int, tuple[Numbers, Numbers, Words]]]:
    """For each side and axis where words begin of each token in order, and of each box in order, and the words.

    Each axis has two more tokens, one of `extra`, which sees all that is there, and PADDING, which sees nothing; the
    first axis has as intervals, too, blocks that are not the grid's, of which only PADDING is not seen; the others one
    of which all is.
    """
    (axes, extra), sizes, boxes, tokens = found
    is_there = (tokens != PADDING).reshape(-1, BLOCK)
    is_other = np.ones(len(is_there), np.bool_)
    is_other[found.ahead : found.ahead + boxes.shape[1]] = False
    within, shape = np.indices(sizes).reshape(len(sizes), -1), [axis.size for axis in axes]
    at = np.unravel_index(np.maximum(tokens - extra, 0), shape)
    for number, (axis, size) in enumerate(zip(axes, sizes)):
        seen = seen_of(axis, np.arange(axis.size))
        others = np.ones((1, BLOCK), np.bool_) if number else is_there[is_other]
        row = np.where(tokens == PADDING, axis.size + 1, np.where(tokens < extra, axis.size, at[number]))
        box = np.full(len(is_there), -(-axis.size // size))
        box[is_other] += 0 if number else np.arange(len(others))
        box[~is_other] = boxes[number]
        for side, visible in enumerate((seen, seen.T)):
            words = packed(shown_of(axis, size, visible, within[number], others))
            yield side, number, (row * QUARTERS, box * words[0].size, words.ravel())


def shown_of(axis: AxisWindow, size: int, seen: Truths, within: Numbers, others: Truths) -> Truths:
    """What each of an axis' tokens, see `words_of_axes`, sees of its intervals and of others, (intervals, tokens,
    BLOCK); seen: of other tokens; within: the place in the interval of each column."""
    tokens = intervals_along(axis, size)
    is_there = (np.arange(tokens.size) < axis.size).reshape(tokens.shape)
    shown = np.concatenate([seen[:, tokens] & is_there, is_there[None], np.zeros_like(is_there)[None]])[:, :, within]
    of_others = np.repeat(others[None], len(shown), 0)
    of_others[-1] = False
    return np.concatenate([shown, of_others], axis=1).swapaxes(0, 1)


def packed(truths: Truths) -> Words:
    """The words of four quarters of columns, (..., BLOCK)."""
    by_quarter = truths.reshape(*truths.shape[:-1], BLOCK // 8, QUARTERS, 2).swapaxes(-3, -2)
    weights = 1 << np.arange(BLOCK // QUARTERS, dtype=np.int32)
    return by_quarter.reshape(*truths.shape[:-1], QUARTERS, -1) @ weights

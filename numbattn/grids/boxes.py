"""Tokens of a grid in the order of boxes: neighbours along all axes see nearly the same keys, in few boxes.

A box is a block of BLOCK consecutive tokens in that order. Two boxes, neighbours along one axis, come one after the
other, and make a tile of usual size. What a box sees of another one follows from what its axes say, since both are
products of intervals: of the union of its tokens' windows, and of their intersection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .axis import AxisWindow, Numbers, Part, Sizes, seen_along
from .offsets import groups_of, is_summed, sums_of
from .visibility import PADDING

BLOCK = 64  # tokens
TILE = 128  # tokens, a multiple of those of all kernels' tiles
SAMPLES = 16  # of tiles in rows
GAIN = 0.9  # how many fewer pairs boxes show, at most: arrays are copied into their order, and back
EMPTY, PARTIAL, FULL = 0, 1, 2
HIDDEN = 192  # sums by offset of a pair of boxes that take no time of their own
Truths = NDArray[np.bool_]


class Boxes(NamedTuple):
    """Tokens of grids in the order of boxes."""

    parts: tuple[PartBoxes, ...]  # one grid after the other

    @property
    def tokens(self) -> Numbers:
        """Which token is at each place of the order, or PADDING."""
        first = np.cumsum([0, *[part.part.tokens for part in self.parts]])
        return np.concatenate([np.where(x.tokens == PADDING, PADDING, x.tokens + n) for x, n in zip(self.parts, first)])

    @property
    def states(self) -> NDArray[np.uint8]:
        """Of what the tokens of a box see of another one: EMPTY, PARTIAL or FULL."""
        found = [states_of(part) for part in self.parts]
        ends = np.cumsum([len(x) for x in found])
        states = np.full((ends[-1], ends[-1]), EMPTY, np.uint8)
        for x, end in zip(found, ends):
            states[end - len(x) : end, end - len(x) : end] = x
        return states


class PartBoxes(NamedTuple):
    """Tokens of one grid in the order of boxes, of `sizes` along each axis."""

    part: Part
    sizes: Sizes
    boxes: Numbers  # (axes, boxes)
    tokens: Numbers  # at each place of the order, or PADDING

    @property
    def ahead(self) -> int:
        """Blocks of tokens of `extra` before the boxes."""
        return -(-self.part.extra // TILE) * TILE // BLOCK


class Hull(NamedTuple):
    """What the windows of intervals of tokens along an axis have in common."""

    begin: Numbers  # of their union
    last: Numbers
    common_begin: Numbers  # of their intersection
    common_last: Numbers


@lru_cache(maxsize=16)
def boxes_of(parts: tuple[Part, ...], summed: bool = False) -> Boxes | None:
    """The Boxes of which the fewest pairs are not empty; None if tiles of the grids' own rows do nearly as well.

    summed: whether gradients are summed by offset, too: see `offsets`.
    """
    found = [cheapest(part.axes, summed) for part in parts]
    chosen = [choice for choice in found if choice is not None]
    if len(chosen) < len(parts):
        return None
    if summed and found == [cheapest(part.axes) for part in parts]:
        return boxes_of(parts)
    shown = sum(pairs_shown(part.axes, doubled_along(*choice)) for part, choice in zip(parts, chosen))
    if shown > GAIN * sum(pairs_shown_in_rows(part.axes) for part in parts):
        return boxes_of(parts) if summed else None
    return Boxes(tuple([part_in_boxes(part, *choice) for part, choice in zip(parts, chosen)]))


@lru_cache(maxsize=256)
def cheapest(axes: tuple[AxisWindow, ...], summed: bool = False) -> tuple[int, Sizes] | None:
    """The axis along which boxes are in pairs, and their sizes, that show the fewest pairs; if summed, in the least
    time. None for a small grid."""

    def cost(axis: int, sizes: Sizes) -> float:
        shown = pairs_shown(axes, sizes) + pairs_shown(axes, doubled_along(axis, sizes))
        if summed and is_summed(sizes):
            shown *= max(1, groups_of(sizes) * sums_of(sizes) / HIDDEN)
        return shown

    choices = [(axis, sizes) for sizes in sizes_of(axes) for axis in range(len(axes))]
    if summed:
        choices = [choice for choice in choices if is_summed(choice[1])] or choices
    return min(choices, key=lambda choice: cost(*choice)) if choices else None


def part_in_boxes(part: Part, doubled: int, sizes: Sizes) -> PartBoxes:
    boxes = in_pairs([-(-axis.size // size) for axis, size in zip(part.axes, sizes)], doubled)
    return PartBoxes(part, sizes, boxes, tokens_of(part, sizes, boxes))


def sizes_of(axes: tuple[AxisWindow, ...]) -> Iterator[Sizes]:
    """The sizes along each axis of boxes of BLOCK tokens, powers of two, that are not much larger than the grid."""
    powers = [2**power for power in range(BLOCK.bit_length())]
    for sizes in product(powers, repeat=len(axes)):
        if math.prod(sizes) == BLOCK and all(size < 2 * axis.size for axis, size in zip(axes, sizes)):
            yield sizes


def doubled_along(axis: int, sizes: Sizes) -> Sizes:
    return *sizes[:axis], 2 * sizes[axis], *sizes[axis + 1 :]


def pairs_shown(axes: tuple[AxisWindow, ...], sizes: Sizes) -> float:
    """How many pairs of tokens there are in pairs of boxes that are not empty."""
    boxes = math.prod(float(shown_along(axis, size).sum()) for axis, size in zip(axes, sizes))
    return boxes * math.prod(sizes) ** 2


def pairs_shown_in_rows(axes: tuple[AxisWindow, ...]) -> float:
    """How many pairs of tokens there are in tiles of consecutive tokens that are not empty, by some of these."""
    shape = [axis.size for axis in axes]
    count, found = math.prod(shape), 0
    tiles = np.unique(np.linspace(0, (count - 1) // TILE, SAMPLES, dtype=np.int64))
    for tile in tiles:
        at = np.unravel_index(np.arange(tile * TILE, min((tile + 1) * TILE, count)), shape)
        *others, last = (seen_of(axis, own).astype(np.float32) for axis, own in zip(axes, at))
        seen = np.ones((len(last), 1), np.float32)
        for along in others:
            seen = (seen[:, :, None] * along[:, None, :]).reshape(len(seen), -1)
        keys = (seen.T @ last).ravel() > 0                              # that any of the tile's tokens sees
        found += int(np.logical_or.reduceat(keys, np.arange(0, count, TILE)).sum())
    return found / len(tiles) * -(-count // TILE) * TILE**2


def seen_of(axis: AxisWindow, tokens: Numbers) -> Truths:
    """Which tokens of an axis these see, (these, all)."""
    seen = seen_along(axis)
    begin, last, wrapped_begin, wrapped_last = (x[tokens, None] for x in seen[1:5])
    at = seen.place
    return ((begin <= at) & (at <= last)) | ((wrapped_begin <= at) & (at <= wrapped_last))


def intervals_along(axis: AxisWindow, size: int) -> Numbers:
    """The tokens of each interval of this many places, (intervals, size); the last one again beyond the axis."""
    by_place = np.argsort(seen_along(axis).place)
    places = np.minimum(np.arange(-(-axis.size // size) * size), axis.size - 1)
    return by_place[places].reshape(-1, size)


def hulls_along(axis: AxisWindow, size: int) -> list[Hull]:
    """The Hulls of these intervals' windows, and of what lies beyond a periodic edge."""
    found, tokens, hulls = seen_along(axis), intervals_along(axis, size), []
    for begin, last in ((found.begin, found.last), (found.wrapped_begin, found.wrapped_last))[: 1 + axis.is_periodic]:
        is_some = (begin <= last)[tokens]
        begin, last = np.where(is_some, begin[tokens], axis.size), np.where(is_some, last[tokens], -1)
        hulls.append(Hull(begin.min(1), last.max(1), begin.max(1), last.min(1)))
    return hulls


@lru_cache(maxsize=256)
def shown_along(axis: AxisWindow, size: int) -> Truths:
    """Whether a token of one interval may see one of another, (intervals, intervals)."""
    first = np.arange(-(-axis.size // size)) * size
    shown = [(hull.begin[:, None] < first + size) & (first <= hull.last[:, None]) for hull in hulls_along(axis, size)]
    return np.logical_or.reduce(shown)


def full_along(axis: AxisWindow, size: int) -> Truths:
    """Whether all tokens of one interval see all of another; none beyond the axis do."""
    first = np.arange(-(-axis.size // size)) * size
    full = [(hull.common_begin[:, None] <= first) & (first + size - 1 <= hull.common_last[:, None])
            for hull in hulls_along(axis, size)]  # fmt: skip
    is_whole = first + size <= axis.size
    return np.logical_or.reduce(full) & is_whole & is_whole[:, None]


def in_pairs(counts: list[int], axis: int) -> Numbers:
    """The boxes of a grid of so many, (axes, boxes): pairs along an axis in C order, then those that are left over."""
    boxes = np.indices(counts).reshape(len(counts), -1)
    pair, second = np.divmod(boxes[axis], 2)
    is_alone = (boxes[axis] == counts[axis] - 1) & (second == 0)
    keys = [pair if number == axis else of_axis for number, of_axis in enumerate(boxes)]
    return boxes[:, np.lexsort([second, *keys[::-1], is_alone])]


def tokens_of(part: Part, sizes: Sizes, boxes: Numbers) -> Numbers:
    """The tokens of these boxes, in C order; before them those of `extra`; both are whole tiles."""
    axes, extra = part
    found, is_there = np.zeros((boxes.shape[1], *sizes), np.int64), np.ones((boxes.shape[1], *sizes), np.bool_)
    for number, (axis, size) in enumerate(zip(axes, sizes)):
        along = (-1, *(size if other == number else 1 for other in range(len(axes))))
        at = boxes[number, :, None] * size + np.arange(size)
        found = found * axis.size + intervals_along(axis, size)[boxes[number]].reshape(along)
        is_there = is_there & (at < axis.size).reshape(along)
    ahead, behind = (np.full(-count % TILE, PADDING) for count in (extra, found.size))
    return np.concatenate([np.arange(extra), ahead, np.where(is_there, found + extra, PADDING).ravel(), behind])


def states_of(found: PartBoxes) -> NDArray[np.uint8]:
    """The states of pairs of a grid's boxes; those of extra tokens are tested."""
    (axes, _), sizes, boxes, _ = found

    def on_all_axes(along: Callable[[AxisWindow, int], Truths]) -> Any:
        return np.logical_and.reduce([along(axis, size)[np.ix_(at, at)] for axis, size, at in zip(axes, sizes, boxes)])

    shown, full = on_all_axes(shown_along), on_all_axes(full_along)
    states = np.pad(np.where(full, FULL, shown).astype(np.uint8), (0, len(shown) % (TILE // BLOCK)))
    return np.pad(states, (found.ahead, 0), constant_values=PARTIAL)


def states_in_rows(parts: tuple[Part, ...]) -> NDArray[np.uint8] | None:
    """The states of blocks of tokens in the order of the grid, where boxes are that: on one axis."""
    (part, *others) = parts
    if others or part.extra or len(part.axes) > 1 or part.axes[0].dilation > 1:
        return None
    count = -(-part.tokens // BLOCK)
    return states_of(part_in_boxes(part, 0, (BLOCK,)))[:count, :count]

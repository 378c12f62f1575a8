"""Alibi: S - slope |j - own key|. It is added to Q K^T, in its unit: the multiplication by scale stays where it is."""

from dataclasses import replace

import numpy as np

from ....scores.alibi import Alibi
from ...tile import always, column_halves, device, full, opaque, part_sum
from ..shared.layouts import array_type
from .distance import Distance, distance_steps, own_key_step
from .kind import ValueAndSlope
from .traits import parts_of

COLS_AT_ONCE = 32  # of dS, for the gradient of slopes


class AlibiKind(Distance):
    name, of = "alibi", Alibi
    is_natural, weight = False, "distance"

    def types(self, number):
        return array_type(np.dtype(number.name), 2), self.offset_type  # slopes

    def steps(self, at, unit, layout, ACC, transposed=False, by_tma=False, has_derivative=True):
        (own, _), (own_key, distance) = unit, distance_steps(self.part, at, layout, ACC, transposed)

        @device
        def look_up(scores, tile, batch, head, m0, n0):
            slopes, _ = scores.parts[at]
            return own(slopes[batch, head], scores)

        @device
        def step(S, F, slope, scores, batch, head, m0, n0):
            key, offsets = own_key(scores, batch, head, m0)
            return ValueAndSlope(S - distance(key, offsets, n0) * slope, F)

        return look_up, step


def slopes_steps(number, score, layout, ACC, transposed=False):
    """Device functions for the gradient of the slopes of this part: () -> sums, for each row; (sums, dS, scores, batch,
    head, m0, n0) -> sums. Without a number there are none."""
    ZERO, PARTS = ACC(0), layout.row_parts()

    @device
    def start():
        return full(PARTS, ZERO)

    @device
    def start_none():
        return ()

    @device
    def add_none(sums, dS, scores, batch, head, m0, n0):
        return sums

    if number is None:
        return start_none, add_none

    part = parts_of(score)[number]
    own_key, add_tile = own_key_step(part, number), slopes_step(part, number, layout, ACC, transposed)

    @device
    def add(sums, dS, scores, batch, head, m0, n0):
        key, offsets = own_key(scores, batch, head, m0)
        return add_tile(sums, dS, key, offsets, n0)

    return start, add


def slopes_step(part, number, layout, ACC, transposed):
    """The device function (sums, dS, key, offsets, n0) -> sums.

    By parts of the tile, each a basic block: else ptxas keeps the distances of a whole one in registers, and spills.
    """
    if layout.shape[1] <= COLS_AT_ONCE:
        _, distance = distance_steps(part, number, layout, ACC, transposed)

        @device
        def add_part(sums, dS, key, offsets, n0):
            if always():
                sums = part_sum(-(dS * distance(opaque(key), offsets, n0)), sums)   # computed anew, not kept since S
            return sums

        return add_part

    HALF = replace(layout, cols=layout.cols.half())
    DOWN, RIGHT = (HALF.shape[1], 0) if transposed else (0, HALF.shape[1])  # from one half to the other
    add_half = slopes_step(part, number, HALF, ACC, transposed)

    @device
    def add_halves(sums, dS, key, offsets, n0):
        left, right = column_halves(dS)
        return add_half(add_half(sums, left, key, offsets, n0), right, key + DOWN, offsets, n0 + RIGHT)

    return add_halves

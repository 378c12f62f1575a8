"""Dropout of a tile, as `numbattn.dropout_mask` shows it: one call of the generator serves several elements."""

from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from ....dropout import ROUNDS, round_by
from ...compiler import from_dtype, types
from ...tile import (
    always,
    beside,
    column_halves,
    convert,
    device,
    full,
    spread,
    transposed_halves,
    where,
    wide_product,
)
from ...words.arguments import Numbers
from ...words.numbers import DropoutNumbers
from .layouts import places_of
from .origin import PLACE, PLACE_TYPES

U32, U64 = np.uint32, np.uint64


def then(one, other):
    @device
    def both(c0, c1, c2, c3, k0, k1):
        return other(*one(c0, c1, c2, c3, k0, k1))

    return both


random_words = reduce(then, [device(round_by(wide_product))] * ROUNDS)  # a loop would move the words between registers


class Drops(NamedTuple):
    """A Dropout, as kernels take it."""

    threshold: Any  # an element is kept iff its number is at least this
    offset: Any
    key_low: Any
    key_high: Any
    first: Any  # element of the batch
    origin: Any


OWN_TYPES = [from_dtype(np.dtype(kind)) for kind in DropoutNumbers.__annotations__.values()]
DROPS = types.NamedTuple([*OWN_TYPES, *PLACE_TYPES], Drops)
DROPOUT = Numbers((*DropoutNumbers._fields, *PLACE), DROPS)


def keep_test(layout, transposed=False):
    """The device function (drops, batch, head, m0, n0) -> which elements of P are kept, in the tile from there on.

    The tile's rows are queries, or keys if it is transposed. One call of the generator serves queries i and i + 8 and
    keys j, j + 1, j + 8 and j + 9, as far as this thread holds them. In a transposed tile of tensor cores two lanes
    hold keys j and j + 1, each for queries i and i + 1: one lane calls for i, the other for i + 1, and they share.
    """
    LANE = layout.neighbours_lane() if transposed and 1 in layout.cols.offsets else None
    SHARES = LANE is not None
    COUNTERS = layout.without(rows=9, cols=8) if transposed and not SHARES else layout.without(rows=8, cols=9)
    IN_BLOCK = 0 if layout.rows.size % 16 == layout.cols.size % 16 == 0 else 15
    places = places_of(transposed)

    @device
    def shared(word):
        return transposed_halves(word, LANE) if SHARES else word

    @device
    def kept(drops, batch, head, m0, n0):
        at = drops.origin
        batch, head, m0, n0 = drops.first + at.batch + batch, at.head + head, at.query + m0, at.key + n0
        i, j = places(COUNTERS, m0, n0)
        if SHARES:
            i = i + (j & 1)
        c0 = full(COUNTERS, convert((j >> 4) * 4 + ((j >> 1) & 3), U32))
        c1 = full(COUNTERS, convert((i >> 4) * 8 + (i & 7), U32))
        matrix = convert(batch, U64) * convert(at.heads, U64) + convert(head, U64)
        c2, c3 = full(COUNTERS, U32(matrix)), full(COUNTERS, U32(drops.offset))
        w0, w1, w2, w3, _, _ = random_words(c0, c1, c2, c3, drops.key_low, drops.key_high)
        i, j = places(layout, m0 & IN_BLOCK, n0 & IN_BLOCK)
        below, right, odd = (i & 8) != 0, (j & 8) != 0, ((i if SHARES else j) & 1) != 0
        upper = where(right, spread(shared(w1), layout), spread(shared(w0), layout))
        lower = where(right, spread(shared(w3), layout), spread(shared(w2), layout))
        word = where(below, lower, upper)
        return where(odd, word, word << 16) >= U32(drops.threshold << 16)   # compares the upper halves

    return kept


def drop_step(layout, dropout, transposed=False):
    """The device function (P, drops, batch, head, m0, n0) -> P with 0 where it is dropped; P itself without dropout."""
    if not dropout:

        @device
        def keep(P, drops, batch, head, m0, n0):
            return P

        return keep

    kept = keep_test(layout, transposed)

    @device
    def drop(P, drops, batch, head, m0, n0):
        return where(kept(drops, batch, head, m0, n0), P, 0)

    return drop


def dropout_steps(layout, dropout, transposed=False):
    """Device functions for lines 14 to 20 of Algorithm 4: `sign_dropped`, P with a minus sign where dropped; and dS.

    With dropout the latter is dS * 2 / kept_scale, which takes fewer instructions; "ds_scale" makes up for it.
    """
    if not dropout:

        @device
        def sign_dropped(P, drops, batch, head, m0, n0):
            return P

        @device
        def dS_of(P, dP, D, delta_scale):
            return P * (dP - D)

        return sign_dropped, dS_of

    # By halves, each a basic block: else ptxas overlaps all calls of the generator, and all of dS, and spills; and it
    # delays the product dO V^T, which should run meanwhile, until the generator is done
    HALF = replace(layout, cols=layout.cols.half())
    DOWN, RIGHT = (HALF.shape[1], 0) if transposed else (0, HALF.shape[1])  # from one half to the other
    keeps, ZERO = keep_test(HALF, transposed), np.float32(0)

    @device
    def sign_half(P, drops, batch, head, m0, n0):
        if always():
            P = where(keeps(drops, batch, head, m0, n0), P, ZERO - P)
        return P

    @device
    def sign_dropped(P, drops, batch, head, m0, n0):
        left, right = column_halves(P)
        left = sign_half(left, drops, batch, head, m0, n0)
        return beside(left, sign_half(right, drops, batch, head, m0 + DOWN, n0 + RIGHT), layout)

    @device
    def dS_half(P, dP, D):
        """2 |P| (Z dP - D / kept_scale), since P + |P| is 2 |P| or, where dropped, 0. D is scaled by 2 / kept_scale."""
        if always():
            dP = (P + abs(P)) * dP - abs(P) * D
        return dP

    @device
    def dS_of(P, dP, D, delta_scale):
        (P, P_right), (dP, dP_right) = column_halves(P), column_halves(dP)
        D, D_right = halves_of_D(D * delta_scale)
        return beside(dS_half(P, dP, D), dS_half(P_right, dP_right, D_right), layout)

    @device
    def halves_of_D(D):
        return column_halves(D) if transposed else (D, D)       # both halves have the same row vector

    return sign_dropped, dS_of

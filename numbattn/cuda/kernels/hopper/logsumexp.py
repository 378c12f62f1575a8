"""log sum_j exp(columns_j - |x_i - y_j|^2 / 2) of points of float32 on Hopper, by the online softmax: wgmma multiplies
their parts, see `pairs` and `parts`.

-|x - y|^2 / 2 = x . y - |x|^2 / 2 - |y|^2 / 2: the terms of y come with its tiles, those of x are added once.
"""

import numpy as np

from ....points.kinds import GAUSSIAN
from ...tile import SharedMemory, device, full, load, part_sum, row_sum, save, shape, wgmma
from ...words.arguments import Statistic
from ...words.numbers import LOG2_E
from ...words.signatures import signature_of
from ..shared.layouts import DTYPES
from ..shared.softmax import LN_2, logsumexp, softmax_parts
from ..shared.warps import source_of, warp_specialised
from .pairs import REGISTERS, PairSizes, PairTiles, chunk_steps, pairs_spec, resident_steps
from .parts import (
    DTYPES_OF_PARTS,
    FIRST,
    INEXACT_POINTS,
    LINE_OF_X,
    LINE_OF_Y,
    PARTS,
    PARTS_OF_X,
    PARTS_OF_Y,
    SCALES,
    SHORT,
    SHORT_OF_X,
    SHORT_OF_Y,
    WIDTH,
    fits_parts,
)


def hopper_logsumexp(*, tiles, parts=PARTS, short=0):
    """The kernel for these PairTiles.

    short: the short form of points, see `parts`, if they have one. If all points are equal to it, the kernel for the
    parts of the short form computes the results, else the one for all parts; the other kernel ends at once. FIRST is
    for points of half precision, times a power of two, whose squared distances are multiplied by a scale. By SHORT ten
    iterations of transport between 50,000 points each, d 64, take 40 ms on an H200, by all parts 58; with errors of
    logsumexp at most a fifth larger.
    """
    ACC, S_TILE, shared, consumers = np.float32, wgmma(tiles.tile_n), SharedMemory(), tiles.consumers
    VECTOR, OF_LANES, OF_HALVES = S_TILE.row_vector(), S_TILE.row_parts(), short == FIRST
    HAS_SHORT, IS_SHORT = short > 0, parts == short
    walk = (
        resident_steps(shared, S_TILE, tiles, ACC, DTYPES_OF_PARTS[parts], MOST, parts)
        if IS_SHORT
        else chunk_steps(shared, S_TILE, tiles, ACC)
    )
    ZERO, ONE, LN2, LOG2E = ACC(0), ACC(1), ACC(LN_2), ACC(LOG2_E / SCALES[parts] ** 2)
    no_max, new_max, exponentials = softmax_parts(ACC)

    @device
    def start(given, at):
        return full(VECTOR, no_max(ONE)), full(OF_LANES, ZERO)

    @device
    def add(found, S, line, Y, n0, given):
        (m, l), (_, _, scales) = found, given
        S = S * (scales[1] if OF_HALVES else LOG2E) + line      # in base 2
        m, alpha, zero = new_max(S, m, ONE)                     # Alg. 2 line 13
        return m, l * alpha + part_sum(exponentials(S, zero, ONE))     # each tile is summed on its own: more digits

    @device
    def finish(found, of_x, given, at):
        (m, l), (mLineX, mLse, scales), (batch, head, m0) = found, given, at
        lse = logsumexp(m * LN2, row_sum(l), LN2)               # line 16
        save(mLse[batch, head], lse + load(mLineX[batch, head], VECTOR, m0) * (scales[0] if OF_HALVES else ONE), m0)

    compute = walk.consumer_of(start, add, finish)
    begin, take_roles = warp_specialised(walk.pipelines, consumers, REGISTERS[consumers], compute, *walk.producers)

    def kernel(mX, mY, mLineX, mLineY, mLse, seqlen_k, chunks, counts, scales):
        (batches, heads, seqlen_q), (_, _, apart_x), (_, _, apart_y) = shape(mLse), shape(mLineX), shape(mLineY)
        begin()
        sizes = PairSizes(seqlen_q, seqlen_k, heads, batches * heads, chunks, apart_x, apart_y)
        if not HAS_SHORT or (counts[0][0] == 0) == IS_SHORT:
            take_roles(((mLineX, mLse, scales), sizes), ((mX, mY, sizes), (mY, mLineY, sizes)))

    signature = signature_of(kernel, arguments_of(parts, short), DTYPES["bfloat16"], ACC)
    return source_of(kernel, signature, consumers, shared, walk.places)


FEW, MOST = 16, WIDTH  # dimensions: mma.sync is as fast up to 16; short forms have at most MOST
TILES = {  # ms for 50,000 points each, d 64
    PARTS: PairTiles(192, 2, 5, 2),  # 2.6 on an H100, by mma.sync 6.4; 2.9 on an H200
    SHORT: PairTiles(160, 2, 3),  # 2.05 on an H200; 128 points y 2.02, 3 consumers with 96 2.08, 192 points y 2.34
    FIRST: PairTiles(96, 3, 6),  # 1.2 on an H100; 128 points y, 2 consumers 1.4
}


def fits(problem, kind):
    return kind == GAUSSIAN and problem.head_dim > FEW and fits_parts(problem)


def fits_short(problem, kind):
    """Whether points may have a short form; if so, those of half precision, given as float32, stay as they are."""
    return fits(problem, kind) and problem.head_dim <= MOST


def takes(work):
    return work.device.cc == (9, 0) and fits(work.problem, work.kind)


def takes_short(work):
    return work.device.cc == (9, 0) and fits_short(work.problem, work.kind)


def arguments_of(parts, short):
    points = (SHORT_OF_X, SHORT_OF_Y) if parts == SHORT else (PARTS_OF_X, PARTS_OF_Y)
    return (
        *[each.map for each in points], LINE_OF_X, LINE_OF_Y, Statistic("lse"), "seqlen_k", "chunks",
        (INEXACT_POINTS,) * (short > 0), ("scale", "scale_log2") * (short == FIRST),
    )  # fmt: skip


def spec_of(parts=PARTS, short=0):
    about = {"parts": parts, "short": short}
    return pairs_spec(hopper_logsumexp, arguments_of(**about), lambda work: TILES[parts], lambda work: about)


SPEC = spec_of()
SPECS_OF_HALVES, SPECS_OF_SHORT = ((spec_of(short, short), spec_of(PARTS, short)) for short in (FIRST, SHORT))

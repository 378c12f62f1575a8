"""log sum_j exp(columns_j - |x_i - y_j|^2 / 2) of points of float32 on Hopper, by the online softmax: wgmma multiplies
their parts, see `pairs` and `parts`.

-|x - y|^2 / 2 = x . y - |x|^2 / 2 - |y|^2 / 2: the terms of y come with its tiles, those of x are added once.
"""

import numpy as np

from ....points.kinds import GAUSSIAN
from ...tile import SharedMemory, bfloat16, device, full, load, part_sum, row_sum, save, shape, wgmma
from ...words.arguments import Statistic
from ...words.numbers import LOG2_E
from ...words.signatures import signature_of
from ..shared.layouts import DTYPES
from ..shared.softmax import LN_2, logsumexp, softmax_parts
from ..shared.warps import source_of, warp_specialised
from .pairs import REGISTERS, PairSizes, PairTiles, chunk_steps, pairs_spec, resident_steps
from .parts import INEXACT_POINTS, LINE_OF_X, LINE_OF_Y, PARTS, PARTS_OF_X, PARTS_OF_Y, WIDTH, fits_parts


def hopper_logsumexp(*, tiles, parts=PARTS, of_halves=False):
    """The kernel for these PairTiles.

    of_halves: for points of half precision, times a power of two, whose squared distances are multiplied by a scale. If
    all points are equal to their first parts, the kernel with parts=1 computes them, else the one with all parts; the
    other kernel ends at once.
    """
    ACC, S_TILE, shared, consumers = np.float32, wgmma(tiles.tile_n), SharedMemory(), tiles.consumers
    VECTOR, OF_LANES, OF_HALVES, IS_EXACT = S_TILE.row_vector(), S_TILE.row_parts(), of_halves, parts == 1
    walk = (
        resident_steps(shared, S_TILE, tiles, ACC, bfloat16, MOST)
        if IS_EXACT
        else chunk_steps(shared, S_TILE, tiles, ACC)
    )
    ZERO, ONE, LN2, LOG2E = ACC(0), ACC(1), ACC(LN_2), ACC(LOG2_E)
    NO_MAX, new_max, exponentials = softmax_parts(ACC)

    @device
    def start(given, at):
        return full(VECTOR, NO_MAX), full(OF_LANES, ZERO)

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
        if not OF_HALVES or (counts[0][0] == 0) == IS_EXACT:
            take_roles(((mLineX, mLse, scales), sizes), ((mX, mY, sizes), (mY, mLineY, sizes)))

    spec = SPEC if not of_halves else EXACT if parts == 1 else INEXACT
    signature = signature_of(kernel, spec.arguments, DTYPES["bfloat16"], ACC)
    return source_of(kernel, signature, consumers, shared, walk.places)


FEW, MOST = 16, WIDTH  # dimensions: mma.sync is as fast up to 16; points of half precision have at most MOST
OF_PARTS = PairTiles(192, 2, 5, 2)  # ms for 50,000 points each, d 64, on an H100: 2.6; by mma.sync 6.4
OF_FIRST_PARTS = PairTiles(96, 3, 6)  # 1.2; 128 points y, 2 consumers 1.4


def fits(problem, kind):
    return kind == GAUSSIAN and problem.head_dim > FEW and fits_parts(problem)


def fits_halves(problem, kind):
    """Whether points of half precision, given as float32, stay as they are."""
    return fits(problem, kind) and problem.head_dim <= MOST


def takes(work):
    return work.device.cc == (9, 0) and fits(work.problem, work.kind)


def takes_halves(work):
    return work.device.cc == (9, 0) and fits_halves(work.problem, work.kind)


def spec_of(tiles=lambda work: OF_PARTS, of_halves=False, **options):
    arguments = (
        PARTS_OF_X.map, PARTS_OF_Y.map, LINE_OF_X, LINE_OF_Y, Statistic("lse"), "seqlen_k", "chunks",
        (INEXACT_POINTS,) * of_halves, ("scale", "scale_log2") * of_halves,
    )  # fmt: skip
    return pairs_spec(hopper_logsumexp, arguments, tiles, lambda work: {"of_halves": of_halves, **options})


SPEC = spec_of()
EXACT = spec_of(lambda work: OF_FIRST_PARTS, of_halves=True, parts=1)
INEXACT = spec_of(of_halves=True)

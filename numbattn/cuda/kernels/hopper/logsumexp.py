"""log sum_j exp(columns_j - |x_i - y_j|^2 / 2) of points of float32 on Hopper, by the online softmax: wgmma multiplies
their parts, see `pairs` and `parts`.

-|x - y|^2 / 2 = x . y - |x|^2 / 2 - |y|^2 / 2: the terms of y come with its tiles, those of x are added once.
"""

import numpy as np

from ....points.kinds import GAUSSIAN
from ...tile import SharedMemory, allocate, device, dot, full, load, part_sum, row_sum, save, shape, wgmma
from ...words.arguments import Statistic
from ...words.numbers import LOG2_E
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.layouts import DTYPES
from ..shared.softmax import LN_2, logsumexp, softmax_parts
from ..shared.warps import source_of, warp_specialised
from .forward_tiles import ROWS
from .pairs import REGISTERS, PairSizes, PairTiles, pair_steps
from .parts import INEXACT_POINTS, LINE_OF_X, LINE_OF_Y, PARTS, PARTS_OF_X, PARTS_OF_Y, take_little_room, whole_boxes


def hopper_logsumexp(*, dim, tile_n, consumers, stages, parts=PARTS, of_halves=False):
    """The kernel for tiles of 64 points x a consumer, tile_n points y and dimensions rounded up to dim.

    stages: of the pipeline of y. of_halves: for points of half precision, times a power of two, whose squared distances
    are multiplied by a scale. If all points are equal to their first parts, the kernel with parts=1 computes them, else
    the one with all parts; the other kernel ends at once.
    """
    dtype, ACC = DTYPES["bfloat16"], np.float32
    S_TILE = wgmma(tile_n)
    shared = SharedMemory()
    X_PLACES = tuple(shared.boxes(ROWS, dim, dtype, 2 * consumers) for _ in range(parts))
    Y_PLACES = tuple(shared.boxes(tile_n, dim, dtype, stages) for _ in range(parts))
    pipelines, (load_x, load_y), consumer_of = pair_steps(
        shared, X_PLACES, Y_PLACES, tile_n, consumers, S_TILE, ACC
    )  # fmt: skip
    product = product_step(S_TILE, X_PLACES, Y_PLACES)
    is_called_for, *scales = halves_steps(parts, ACC) if of_halves else whole_steps(ACC)
    start, add, finish = softmax_of_tiles(S_TILE, ACC, *scales)

    @device
    def nothing(X):
        return ()

    compute = consumer_of(start, product, nothing, add, finish)
    begin, take_roles = warp_specialised(pipelines, consumers, REGISTERS[consumers], compute, load_x, load_y)

    def kernel(mX, mY, mLineX, mLineY, mLse, seqlen_k, counts, scales):
        (batches, heads, seqlen_q), (_, _, apart_x), (_, _, apart_y) = shape(mLse), shape(mLineX), shape(mLineY)
        begin()
        sizes = PairSizes(seqlen_q, seqlen_k, heads, batches * heads, apart_x, apart_y)
        if is_called_for(counts):
            take_roles(((mLineX, mLse, scales), sizes), ((mX, sizes), (mY, mLineY, sizes)))

    spec = SPEC if not of_halves else EXACT if parts == 1 else INEXACT
    signature = signature_of(kernel, spec.arguments, dtype, ACC)
    return source_of(kernel, signature, consumers, shared, (X_PLACES[0], Y_PLACES[0]))


def softmax_of_tiles(layout, ACC, scale_of, scale_log2_of):
    """Device functions: () -> the online softmax of no tile; (found, S, line, n0, given) -> the same with a tile of
    products added; (found, aside, given, batch, head, m0) saves lse. given: the line of x, lse, and scales, if any.
    """
    VECTOR, OF_LANES, ZERO, ONE, LN2 = layout.row_vector(), layout.row_parts(), ACC(0), ACC(1), ACC(LN_2)
    NO_MAX, new_max, exponentials = softmax_parts(ACC)

    @device
    def start():
        return full(VECTOR, NO_MAX), full(OF_LANES, ZERO)

    @device
    def add(found, S, line, n0, given):
        m, l = found
        S = S * scale_log2_of(given) + line                     # in base 2
        m, alpha, zero = new_max(S, m, ONE)                     # Alg. 2 line 13
        return m, l * alpha + part_sum(exponentials(S, zero, ONE))     # each tile is summed on its own: more digits

    @device
    def finish(found, aside, given, batch, head, m0):
        (m, l), (mLineX, mLse, _) = found, given
        lse = logsumexp(m * LN2, row_sum(l), LN2)               # line 16
        save(mLse[batch, head], lse + load(mLineX[batch, head], VECTOR, m0) * scale_of(given), m0)

    return start, add, finish


def whole_steps(ACC):
    """Device functions: (counts) -> whether the kernel computes; (given) -> the factor of S; (given) -> that in base 2.
    """
    ONE, LOG2E = ACC(1), ACC(LOG2_E)

    @device
    def always(counts):
        return True

    @device
    def one(given):
        return ONE

    @device
    def log2_e(given):
        return LOG2E

    return always, one, log2_e


def halves_steps(parts, ACC):
    """`whole_steps` for points of half precision."""
    IS_EXACT = parts == 1

    @device
    def is_called_for(counts):
        return (counts[0][0] == 0) == IS_EXACT

    @device
    def scale_of(given):
        return given[2][0]

    @device
    def scale_log2_of(given):
        return given[2][1]

    return is_called_for, scale_of, scale_log2_of


def product_step(layout, x_places, y_places):
    """The device function (X, Y): start the products of the parts in two stages, small terms first, since the unit
    truncates what does not fit into a sum."""
    S_TILE, X1, Y1 = layout, x_places[0], y_places[0]

    @device
    def of_first(X, Y):
        return dot(S_TILE, allocate(X1, X.index), allocate(Y1, Y.index).T)

    if len(x_places) == 1:
        return of_first
    (_, X2, X3), (_, Y2, Y3) = x_places, y_places

    @device
    def of_all(X, Y):
        x1, x2, x3 = allocate(X1, X.index), allocate(X2, X.index), allocate(X3, X.index)
        y1, y2, y3 = allocate(Y1, Y.index), allocate(Y2, Y.index), allocate(Y3, Y.index)
        S = dot(dot(dot(S_TILE, x3, y1.T), x2, y2.T), x1, y3.T)
        return dot(dot(dot(S, x2, y1.T), x1, y2.T), x1, y1.T)

    return of_all


FEW, MOST = 16, 64  # dimensions: mma.sync is as fast up to 16; parts of more than 64 leave no room in shared memory
TILES = PairTiles(96, 2, 3)  # ms for 50,000 points each, d 64, on an H100: 2.6; by mma.sync 6.4
OF_FIRST_PARTS = PairTiles(96, 3, 6)  # 1.2; 128 points y, 2 consumers 1.4


def is_gaussian(problem, kind):
    """Whether it is a Gaussian of float32 points without a mask, so that every y is in sight."""
    is_plain = problem.dtype == np.float32 and not problem.mask_kinds and kind == GAUSSIAN
    return is_plain and take_little_room(problem)


def fits(problem, kind):
    return is_gaussian(problem, kind) and FEW < problem.head_dim <= MOST


def takes(work):
    return work.device.cc == (9, 0) and fits(work.problem, work.kind)


def spec_of(tiles, of_halves=False, **options):
    return Spec(
        hopper_logsumexp,
        (PARTS_OF_X.map, PARTS_OF_Y.map, LINE_OF_X, LINE_OF_Y, Statistic("lse"), "seqlen_k",
         (INEXACT_POINTS,) * of_halves, ("scale", "scale_log2") * of_halves),
        tiles=lambda work: (tiles,),
        parameters=lambda work, tiles: {
            "dim": whole_boxes(work.problem.head_dim), **tiles._asdict(), "of_halves": of_halves, **options,
        },
        persistent=True,
        arch="a",
    )  # fmt: skip


SPEC = spec_of(TILES)
EXACT = spec_of(OF_FIRST_PARTS, of_halves=True, parts=1)
INEXACT = spec_of(TILES, of_halves=True)

"""log sum_j exp(columns_j - |x_i - y_j|^2 / 2) of points of float32 on Hopper: products of their parts by wgmma, see
`pairs` and `parts`, and the online softmax.

-|x - y|^2 / 2 = x . y - |x|^2 / 2 - |y|^2 / 2: what depends on y comes with its tiles, what depends on x is added once.
"""

import numpy as np

from ...tile import SharedMemory, allocate, device, dot, full, load, part_sum, row_sum, save, shape, wgmma
from ...words.arguments import Statistic
from ...words.numbers import LOG2_E
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.layouts import DTYPES
from ..shared.softmax import LN_2, logsumexp, softmax_parts
from ..shared.warps import source_of, warp_specialised
from .forward_tiles import ROWS
from .pairs import REGISTERS, PairTiles, Sizes, pair_steps
from .parts import LINE_OF_X, LINE_OF_Y, PARTS, PARTS_OF_X, PARTS_OF_Y, whole_boxes


def hopper_logsumexp(*, dim, tile_n, consumers, stages):
    """The kernel for tiles of 64 points x a consumer, tile_n points y and dimensions rounded up to dim.

    stages: of the pipeline of y.
    """
    dtype, ACC = DTYPES["bfloat16"], np.float32
    S_TILE = wgmma(tile_n)
    VECTOR, OF_LANES = S_TILE.row_vector(), S_TILE.row_parts()
    ZERO, ONE, LOG2E, LN2 = ACC(0), ACC(1), ACC(LOG2_E), ACC(LN_2)
    shared = SharedMemory()
    X1, X2, X3 = (shared.boxes(ROWS, dim, dtype, 2 * consumers) for _ in range(PARTS))
    Y1, Y2, Y3 = (shared.boxes(tile_n, dim, dtype, stages) for _ in range(PARTS))
    pipelines, (load_x, load_y), consumer_of = pair_steps(
        shared, (X1, X2, X3), (Y1, Y2, Y3), tile_n, consumers, S_TILE, ACC
    )  # fmt: skip
    NO_MAX, new_max, exponentials = softmax_parts(ACC)

    @device
    def start():
        return full(VECTOR, NO_MAX), full(OF_LANES, ZERO)

    @device
    def product(X, Y):
        """The small terms first, since the unit cuts off what does not fit into a sum."""
        x1, x2, x3 = allocate(X1, X.index), allocate(X2, X.index), allocate(X3, X.index)
        y1, y2, y3 = allocate(Y1, Y.index), allocate(Y2, Y.index), allocate(Y3, Y.index)
        S = dot(dot(dot(S_TILE, x3, y1.T), x2, y2.T), x1, y3.T)
        return dot(dot(dot(S, x2, y1.T), x1, y2.T), x1, y1.T)

    @device
    def nothing(X):
        return ()

    @device
    def add(found, S, line, n0):
        (m, l), S = found, S * LOG2E + line                     # in base 2
        m, alpha, zero = new_max(S, m, ONE)                     # Alg. 2 line 13
        return m, l * alpha + part_sum(exponentials(S, zero, ONE))     # the sum of a tile on its own: more digits

    @device
    def finish(found, aside, given, batch, head, m0):
        (m, l), (mLineX, mLse) = found, given
        lse = logsumexp(m * LN2, row_sum(l), LN2)               # line 16
        save(mLse[batch, head], lse + load(mLineX[batch, head], VECTOR, m0), m0)

    compute = consumer_of(start, product, nothing, add, finish)
    begin, take_roles = warp_specialised(pipelines, consumers, REGISTERS[consumers], compute, load_x, load_y)

    def kernel(mX, mY, mLineX, mLineY, mLse, seqlen_k):
        (batches, heads, seqlen_q), (_, _, apart_x), (_, _, apart_y) = shape(mLse), shape(mLineX), shape(mLineY)
        begin()
        sizes = Sizes(seqlen_q, seqlen_k, heads, batches * heads, apart_x, apart_y)
        take_roles(((mLineX, mLse), sizes), ((mX, sizes), (mY, mLineY, sizes)))

    signature = signature_of(kernel, SPEC.arguments, dtype, ACC)
    return source_of(kernel, signature, consumers, shared, (X1, Y1))


FEW, MOST = 16, 64  # dimensions: mma.sync is as fast up to 16; parts of more than 64 leave no room in shared memory
TILES = PairTiles(96, 2, 3)  # ms for 50,000 points each, d 64, on an H100: 2.6; by mma.sync 6.4


def takes(work):
    """Of a Gaussian, and no masks: every y is in sight."""
    problem = work.problem
    fits = problem.dtype == np.float32 and FEW < problem.head_dim <= MOST
    return fits and work.device.cc == (9, 0) and not problem.mask_kinds and work.kind == "Gaussian"


SPEC = Spec(
    hopper_logsumexp,
    (PARTS_OF_X.map, PARTS_OF_Y.map, LINE_OF_X, LINE_OF_Y, Statistic("lse"), "seqlen_k"),
    tiles=lambda work: (TILES,),
    parameters=lambda work, tiles: {"dim": whole_boxes(work.problem.head_dim), **tiles._asdict()},
    persistent=True,
    arch="a",
)

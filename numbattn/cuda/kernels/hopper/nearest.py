"""The nearest of the points y for each point x on Hopper, as k-means assigns points to centres: by wgmma, see `pairs`.

|x - y|^2 = |x|^2 + 2 (|y|^2 / 2 - x . y): consumers find the running minimum of |y|^2 / 2 - S, S = x y^T, and its
column; |x|^2, which changes no order, is added once.
"""

import numpy as np

from ...tile import SharedMemory, convert, device, dot, get, maximum, row_sum, save, shape, wgmma
from ...words.arguments import MatrixOfCall, TmaMatrix
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..points.nearest import takes_one
from ..points.norms import HALF_NORMS_OF_Y
from ..shared.layouts import DTYPES
from ..shared.smallest import minimum_steps
from ..shared.warps import source_of, warp_specialised
from .forward_tiles import ROWS, head_dims, is_for_hopper
from .pairs import REGISTERS, PairSizes, PairTiles, pair_steps


def hopper_nearest(*, dtype, head_dim, tile_n, consumers, stages):
    """The kernel for tiles of 64 points x a consumer, tile_n points y and dimensions rounded up to head_dim.

    stages: of the pipeline of y.
    """
    dtype, ACC = DTYPES[dtype], np.float32
    S_TILE, X_TILE, ZERO = wgmma(tile_n), wgmma(head_dim), ACC(0)
    shared = SharedMemory()
    SHARED_X = shared.boxes(ROWS, head_dim, dtype, 2 * consumers)
    SHARED_Y = shared.boxes(tile_n, head_dim, dtype, stages)
    pipelines, (load_x, load_y), consumer_of = pair_steps(
        shared, (SHARED_X,), (SHARED_Y,), tile_n, consumers, S_TILE, ACC
    )  # fmt: skip
    start, add_tile, nearest_of = minimum_steps(S_TILE, ACC)

    @device
    def product(X, Y):
        return dot(S_TILE, X.tile, Y.tile.T)

    @device
    def norms(X):
        points = convert(get(X.tile, X_TILE), ACC)
        return row_sum(points * points)

    @device
    def add(found, S, half_norms, n0, given):
        return add_tile(found, half_norms - S, n0)

    @device
    def finish(found, norms_x, given, batch, head, m0):
        (mR2, mJ), (least, j) = given, nearest_of(found)
        save(mR2[batch, head], maximum(norms_x + 2 * least, ZERO), m0)
        save(mJ[batch, head], j, m0)

    compute = consumer_of(start, product, norms, add, finish)
    begin, take_roles = warp_specialised(pipelines, consumers, REGISTERS[consumers], compute, load_x, load_y)

    def kernel(mX, mY, mNorms, mR2, mJ, seqlen_k):
        batches, heads, seqlen_q, _ = shape(mR2)
        begin()
        sizes = PairSizes(seqlen_q, seqlen_k, heads, batches * heads, 0, 0)
        take_roles(((mR2, mJ), sizes), ((mX, sizes), (mY, mNorms, sizes)))

    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, {"r2": "float32", "j": "int32"})
    return source_of(kernel, signature, consumers, shared, (SHARED_X, SHARED_Y))


TILES = {  # by the largest dimension. TFLOP/s on an H100, 1,000,000 points x
    64: PairTiles(64, 4, 8),            # 4096 points y: 388; 3 consumers, 128 334
    128: PairTiles(128, 3, 4),          # 1000 512, 8192 558, 32768 605; 2 consumers 412, -, 574
    192: PairTiles(96, 2, 3),           # 4096 642
    256: PairTiles(64, 2, 3),           # 4096 668
}


def size_of(work):
    return head_dims(work.problem)[0]


def takes(work):
    """For the nearest point alone, and without masks, so that every y is in sight."""
    return is_for_hopper(work) and not work.problem.mask_kinds and takes_one(work)


SPEC = Spec(
    hopper_nearest,
    (TmaMatrix("q"), TmaMatrix("k", "k"), HALF_NORMS_OF_Y, MatrixOfCall("r2"), MatrixOfCall("j"), "seqlen_k"),
    tiles=lambda work: (TILES[size_of(work)],),
    parameters=lambda work, tiles: {"dtype": work.problem.dtype.name, "head_dim": size_of(work), **tiles._asdict()},
    persistent=True,
    arch="a",
)

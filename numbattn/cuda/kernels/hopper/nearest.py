"""The nearest of the points y for each point x on Hopper, as k-means assigns points to centres: wgmma, TMA.

A persistent, warp-specialised kernel. A block takes work tiles in turn, 64 points x for each consumer, and loops over
all tiles of y. |x - y|^2 = |x|^2 + 2 (|y|^2 / 2 - x . y): consumers compute S = x y^T, then the running minimum of
|y|^2 / 2 - S and its column, while the tensor cores work for the other consumers; |x|^2, which changes no order, is
added once. Two threads of the producer load x and y, and halves of |y|^2 with it.
"""

from typing import NamedTuple

import numpy as np

from ...tile import (
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    block_index,
    bulk_load,
    convert,
    device,
    dot,
    get,
    grid_size,
    index,
    maximum,
    opaque,
    prefetch_tensor_map,
    release,
    row_sum,
    save,
    shape,
    stage,
    sync_warpgroup,
    tma_load,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)
from ...words.arguments import MatrixOfCall, TmaMatrix
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..points.nearest import takes_one
from ..points.norms import HALF_NORMS_OF_Y
from ..shared.layouts import DTYPES
from ..shared.schedule import place
from ..shared.smallest import minimum_steps
from ..shared.warps import source_of, warp_specialised
from .forward_tiles import ROWS, head_dims, is_for_hopper

REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}  # {consumers: of a producer's thread, of a consumer's}


def hopper_nearest(*, dtype, head_dim, tile_n, consumers, stages, x_stages):
    """The kernel for tiles of 64 points x a consumer, tile_n points y and dimensions rounded up to head_dim.

    stages: of the pipeline of y; x_stages: of that of x, a multiple of the consumers, so that each has its own.
    """
    dtype, ACC = DTYPES[dtype], np.float32
    S_TILE, X_TILE = wgmma(tile_n), wgmma(head_dim)
    COLS, TILE_N, CONSUMERS, ZERO = S_TILE.col_vector(), tile_n, consumers, ACC(0)
    shared = SharedMemory()
    SHARED_X, SHARED_Y = shared.boxes(ROWS, head_dim, dtype, x_stages), shared.boxes(tile_n, head_dim, dtype, stages)
    SHARED_NORMS = shared.tile(1, tile_n, ACC, stages)
    X_PIPELINE, Y_PIPELINE = Pipeline.within(shared, SHARED_X, 1), Pipeline.within(shared, SHARED_Y, consumers, fills=2)
    start, add, finish = minimum_steps(S_TILE, ACC)

    @device
    def blocks_of(length, tile):
        return (length + tile - 1) // tile

    @device
    def work_tile(number, matrices, heads):
        """The batch, the head and the first point x of a work tile."""
        m_block, batch, head = place(number, matrices, heads)
        return batch, head, m_block * (CONSUMERS * ROWS)

    @device
    def load_x(mX, seqlen_q, heads, matrices):
        X, number = stage(X_PIPELINE, 0), block_index()
        prefetch_tensor_map(mX)
        while number < blocks_of(seqlen_q, CONSUMERS * ROWS) * matrices:
            (batch, head, m0), consumer = work_tile(number, matrices, heads), index(0)
            while consumer < CONSUMERS:
                acquire(X)
                tma_load(X, mX, batch, head, m0 + consumer * ROWS)
                X, consumer = advance(X, 1), opaque(consumer + 1)
            number = number + grid_size()

    @device
    def load_y(mY, mNorms, seqlen_q, seqlen_k, heads, matrices):
        Y, number = stage(Y_PIPELINE, 0), block_index()
        prefetch_tensor_map(mY)
        while number < blocks_of(seqlen_q, CONSUMERS * ROWS) * matrices:
            (batch, head, _), n0 = work_tile(number, matrices, heads), index(0)
            while n0 < seqlen_k:
                acquire(Y)
                tma_load(Y, mY, batch, head, n0)
                bulk_load(Y, allocate(SHARED_NORMS, Y.index), mNorms[batch, head], n0)
                Y, n0 = advance(Y, 1), opaque(n0 + TILE_N)
            number = number + grid_size()

    @device
    def with_tile(found, S, norms, Y, n0):
        """The nearest y up to a tile, whose product with x is in flight."""
        S = wgmma_wait(S, 0)
        sync_warpgroup()                                        # all have read the norms
        release(Y)
        return add(found, norms - S, n0)

    @device
    def compute(mR2, mJ, seqlen_k, heads, matrices):
        """The consumers, whole warpgroups."""
        _, _, seqlen_q, _ = shape(mR2)
        X, Y, number = stage(X_PIPELINE, warpgroup_index()), stage(Y_PIPELINE, 0), block_index()
        while number < blocks_of(seqlen_q, CONSUMERS * ROWS) * matrices:
            batch, head, m0 = work_tile(number, matrices, heads)
            wait(X)
            wait(Y)
            norms = get(allocate(SHARED_NORMS, Y.index), COLS)
            S = dot(S_TILE, X.tile, Y.tile.T)                   # in flight
            points = convert(get(X.tile, X_TILE), ACC)
            norms_x = row_sum(points * points)
            found = with_tile(start(), S, norms, Y, 0)
            Y, n0 = advance(Y, 1), index(TILE_N)
            while n0 < seqlen_k:
                wait(Y)
                norms = get(allocate(SHARED_NORMS, Y.index), COLS)
                found = with_tile(found, dot(S_TILE, X.tile, Y.tile.T), norms, Y, n0)
                Y, n0 = advance(Y, 1), n0 + TILE_N
            least, j = finish(found)
            sync_warpgroup()                                    # all have read X
            release(X)
            save(mR2[batch, head], maximum(norms_x + 2 * least, ZERO), m0 + warpgroup_index() * ROWS)
            save(mJ[batch, head], j, m0 + warpgroup_index() * ROWS)
            X, number = advance(X, CONSUMERS), number + grid_size()

    pipelines = X_PIPELINE, Y_PIPELINE
    begin, take_roles = warp_specialised(pipelines, consumers, REGISTERS[consumers], compute, load_x, load_y)

    def kernel(mX, mY, mNorms, mR2, mJ, seqlen_k):
        batches, heads, seqlen_q, _ = shape(mR2)
        begin()
        of_x, of_y = (mX, seqlen_q, heads, batches * heads), (mY, mNorms, seqlen_q, seqlen_k, heads, batches * heads)
        take_roles((mR2, mJ, seqlen_k, heads, batches * heads), (of_x, of_y))

    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, {"r2": "float32", "j": "int32"})
    return source_of(kernel, signature, consumers, shared, (SHARED_X, SHARED_Y))


class NearestTiles(NamedTuple):
    """A row: tiles of 64 points x for each consumer, and of tile_n points y."""

    tile_n: int
    consumers: int
    stages: int  # of y
    x_stages: int  # of 64 points x

    unit = "wgmma"

    @property
    def tile_m(self):
        return ROWS * self.consumers


TILES = {  # of the largest dimension
    64: NearestTiles(128, 3, 4, 6),
    128: NearestTiles(128, 3, 4, 6),
    192: NearestTiles(128, 2, 2, 4),
    256: NearestTiles(96, 2, 2, 4),
}


def size_of(work):
    return head_dims(work.problem)[0]


def takes(work):
    """The one nearest, and no masks: every y is in sight."""
    return is_for_hopper(work) and not work.problem.mask_kinds and takes_one(work)


SPEC = Spec(
    hopper_nearest,
    (TmaMatrix("q"), TmaMatrix("k", "k"), HALF_NORMS_OF_Y, MatrixOfCall("r2"), MatrixOfCall("j"), "seqlen_k"),
    tiles=lambda work: (TILES[size_of(work)],),
    parameters=lambda work, tiles: {"dtype": work.problem.dtype.name, "head_dim": size_of(work), **tiles._asdict()},
    persistent=True,
    arch="a",
)

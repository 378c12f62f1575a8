"""`nearest` of points of float32 with more dimensions than fit into shared memory: chunk by chunk, see `chunks`.

|x - y|^2 = 2 (|y|^2 / 2 - x . y + |x|^2 / 2): the last term, which changes no order, is added once. Lines have these
halves with the opposite sign.
"""

import numpy as np

from ...tile import SharedMemory, col_index, device, load, maximum, save, shape, wgmma, where
from ...words.arguments import MatrixOfCall
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..points.nearest import takes_one
from ..shared.layouts import DTYPES
from ..shared.smallest import minimum_steps
from ..shared.warps import source_of, warp_specialised
from .chunks import ChunkSizes, ChunkTiles, chunk_steps
from .pairs import REGISTERS
from .parts import LINE_OF_X, LINE_OF_Y, PARTS_OF_X, PARTS_OF_Y, WIDTH, take_little_room, whole_boxes


def hopper_wide_nearest(*, tile_n, consumers, stages, y_stages):
    """The kernel for tiles of 64 points x a consumer and tile_n points y.

    stages: of parts of points; y_stages: of numbers that come with y.
    """
    ACC, S_TILE, shared = np.float32, wgmma(tile_n), SharedMemory()
    tiles = ChunkTiles(tile_n, consumers, stages, y_stages)
    pipelines, producers, consumer_of, of_points = chunk_steps(shared, S_TILE, tiles, ACC)
    VECTOR, TILE_N, ZERO, INFINITE = S_TILE.row_vector(), tile_n, ACC(0), ACC(np.inf)
    nobody, add_tile, nearest_of = minimum_steps(S_TILE, ACC)

    @device
    def start(given, batch, head, m0):
        return nobody()

    @device
    def add(found, S, line, Y, n0, given):
        T, seqlen_k = -(S + line), given[3]
        if n0 + TILE_N > seqlen_k:
            T = where(col_index(S_TILE, n0) < seqlen_k, T, INFINITE)
        return add_tile(found, T, n0)

    @device
    def finish(found, given, batch, head, m0):
        (mLineX, mR2, mJ, _), (least, j) = given, nearest_of(found)
        save(mR2[batch, head], maximum((least - load(mLineX[batch, head], VECTOR, m0)) * 2, ZERO), m0)
        save(mJ[batch, head], j, m0)

    compute = consumer_of(start, add, finish)
    begin, take_roles = warp_specialised(pipelines, consumers, REGISTERS[consumers], compute, *producers)

    def kernel(mX, mY, mLineX, mLineY, mR2, mJ, seqlen_k, chunks):
        (batches, heads, seqlen_q, _), (_, _, apart_x), (_, _, apart_y) = shape(mR2), shape(mLineX), shape(mLineY)
        begin()
        sizes = ChunkSizes(seqlen_q, seqlen_k, heads, batches * heads, chunks, apart_x, apart_y)
        take_roles(((mLineX, mR2, mJ, seqlen_k), sizes), ((mX, mY, sizes), ((), mLineY, sizes)))

    signature = signature_of(kernel, SPEC.arguments, DTYPES["bfloat16"], ACC, {"r2": "float32", "j": "int32"})
    return source_of(kernel, signature, consumers, shared, of_points)


FEW = 64  # dimensions up to which mma.sync, whose points stay where they are, is as fast
TILES = ChunkTiles(192, 2, 5, 2)


def fits(problem, k):
    """Whether these points are for the kernel: the one nearest, and no masks: every y is in sight."""
    is_plain = problem.dtype == np.float32 and not problem.mask_kinds and k == 1
    return is_plain and problem.head_dim > FEW and take_little_room(problem)


def takes(work):
    return work.device.cc == (9, 0) and takes_one(work) and fits(work.problem, 1)


SPEC = Spec(
    hopper_wide_nearest,
    (PARTS_OF_X.map, PARTS_OF_Y.map, LINE_OF_X, LINE_OF_Y, MatrixOfCall("r2"), MatrixOfCall("j"), "seqlen_k", "chunks"),
    tiles=lambda work: (TILES,),
    parameters=lambda work, tiles: tiles._asdict(),
    numbers=lambda work, tiles: {"chunks": whole_boxes(work.problem.head_dim) // WIDTH},
    persistent=True,
    arch="a",
)

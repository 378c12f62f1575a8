"""The nearest of the points y for each point x on Hopper, as k-means assigns points to centres: by wgmma, see `pairs`.

|x - y|^2 = |x|^2 + 2 (|y|^2 / 2 - x . y): consumers find the running minimum of |y|^2 / 2 - S, S = x y^T, and its
column; |x|^2, which changes no order, is added once. Points of half precision are multiplied as they are; those of
float32, of more than FEW dimensions, as parts, whose lines have |x|^2 / 2 and |y|^2 / 2 with the opposite sign.
"""

import numpy as np

from ...tile import (
    SharedMemory,
    col_index,
    convert,
    device,
    get,
    load,
    maximum,
    row_sum,
    save,
    shape,
    wgmma,
    where,
)
from ...words.arguments import MatrixOfCall, TmaMatrix
from ...words.signatures import signature_of
from ..points.nearest import takes_one
from ..points.norms import HALF_NORMS_OF_Y
from ..shared.layouts import DTYPES
from ..shared.smallest import minimum_steps
from ..shared.warps import source_of, warp_specialised
from .forward_tiles import head_dims, is_for_hopper
from .pairs import REGISTERS, PairSizes, PairTiles, chunk_steps, pairs_spec, resident_steps
from .parts import LINE_OF_X, LINE_OF_Y, PARTS_OF_X, PARTS_OF_Y, WIDTH, fits_parts


def hopper_nearest(*, dtype, head_dim, tiles):
    """The kernel for these PairTiles. head_dim: rounded up, of points of half precision; those of float32 have any
    number of dimensions."""
    ACC, S_TILE, shared, consumers = np.float32, wgmma(tiles.tile_n), SharedMemory(), tiles.consumers
    OF_PARTS = dtype == "float32"
    walk = (
        chunk_steps(shared, S_TILE, tiles, ACC)
        if OF_PARTS
        else resident_steps(shared, S_TILE, tiles, ACC, DTYPES[dtype], head_dim)
    )
    X_TILE, VECTOR, TILE_N = wgmma(head_dim), S_TILE.row_vector(), tiles.tile_n
    ZERO, INFINITE, TWICE = ACC(0), ACC(np.inf), ACC(-2)
    nobody, add_tile, nearest_of = minimum_steps(S_TILE, ACC)

    @device
    def start(given, at):
        return nobody()

    @device
    def add(found, S, half_norms, Y, n0, given):
        return add_tile(found, half_norms - S, n0)

    @device
    def norms(X):
        points = convert(get(X.tile, X_TILE), ACC)
        return row_sum(points * points)

    @device
    def add_of_parts(found, S, line, Y, n0, given):
        T, seqlen_k = -(S + line), given[3]
        if n0 + TILE_N > seqlen_k:
            T = where(col_index(S_TILE, n0) < seqlen_k, T, INFINITE)
        return add_tile(found, T, n0)

    @device
    def finish(found, norms_x, given, at):
        (lines, mR2, mJ, _), (batch, head, m0), (least, j) = given, at, nearest_of(found)
        if OF_PARTS:
            norms_x = load(lines[0][batch, head], VECTOR, m0) * TWICE
        save(mR2[batch, head], maximum(norms_x + 2 * least, ZERO), m0)
        save(mJ[batch, head], j, m0)

    steps = (start, add_of_parts, finish) if OF_PARTS else (start, add, finish, norms)
    compute = walk.consumer_of(*steps)
    begin, take_roles = warp_specialised(walk.pipelines, consumers, REGISTERS[consumers], compute, *walk.producers)

    def kernel(mX, mY, lines, mLineY, mR2, mJ, seqlen_k, chunks):
        (batches, heads, seqlen_q, _), (_, _, apart_y) = shape(mR2), shape(mLineY)
        apart_x = shape(lines[0])[2] if OF_PARTS else 0
        begin()
        sizes = PairSizes(seqlen_q, seqlen_k, heads, batches * heads, chunks, apart_x, apart_y)
        take_roles(((lines, mR2, mJ, seqlen_k), sizes), ((mX, mY, sizes), (mY, mLineY, sizes)))

    about = (SPEC_OF_PARTS, DTYPES["bfloat16"]) if OF_PARTS else (SPEC, DTYPES[dtype])
    signature = signature_of(kernel, about[0].arguments, about[1], ACC, {"r2": "float32", "j": "int32"})
    return source_of(kernel, signature, consumers, shared, walk.places)


TILES = {  # by the largest dimension. TFLOP/s on an H100, 1,000,000 points x
    64: PairTiles(64, 4, 8),            # 4096 points y: 388; 3 consumers, 128 334
    128: PairTiles(128, 3, 4),          # 1000 512, 8192 558, 32768 605; 2 consumers 412, -, 574
    192: PairTiles(96, 2, 3),           # 4096 642
    256: PairTiles(64, 2, 3),           # 4096 668
}
OF_PARTS = PairTiles(192, 2, 5, 2)
FEW = 64  # dimensions up to which mma.sync, whose points stay where they are, is as fast for float32


def takes(work):
    """For the nearest point alone, and without masks, so that every y is in sight."""
    return is_for_hopper(work) and not work.problem.mask_kinds and takes_one(work)


def fits(problem, k):
    return k == 1 and problem.head_dim > FEW and fits_parts(problem)


def takes_parts(work):
    return work.device.cc == (9, 0) and takes_one(work) and fits(work.problem, 1)


def spec_of(x, y, of_y, tiles, size_of, lines=()):
    arguments = x, y, lines, of_y, MatrixOfCall("r2"), MatrixOfCall("j"), "seqlen_k", "chunks"
    return pairs_spec(
        hopper_nearest,
        arguments,
        tiles,
        lambda work: {"dtype": work.problem.dtype.name, "head_dim": size_of(work)},
    )


def size_of(work):
    return head_dims(work.problem)[0]


SPEC = spec_of(TmaMatrix("q"), TmaMatrix("k", "k"), HALF_NORMS_OF_Y, lambda work: TILES[size_of(work)], size_of)
SPEC_OF_PARTS = spec_of(
    PARTS_OF_X.map, PARTS_OF_Y.map, LINE_OF_Y, lambda work: OF_PARTS, lambda work: WIDTH, (LINE_OF_X,)
)  # fmt: skip

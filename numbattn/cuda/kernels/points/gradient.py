"""The gradient of sums over pairs of points: dx_i = sum_j W_ij 2 (x_i - y_j), W_ij = kappa'_ij <c_i, b_j>, or
sum_j W_ij y_j for a function of x . y.

A block keeps a tile of rows and loops over the columns that they see, as in `sums`. Of few dimensions each thread sums
its own differences. Of more they are 2 (x_i rowsum(W)_i - (W Y)_i).
"""

from ....points.kinds import DIFFERENCES
from ...build import Source
from ...tile import (
    aligned,
    convert,
    device,
    dot,
    full,
    index,
    load,
    part_sum,
    row_sum,
    save,
    sync_threads,
    wait_copies,
)
from ...words.arguments import Matrix
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.layouts import left_operand
from ..shared.visibility import MASK
from .features import no_sums_step, part_differences_step, save_sums_step
from .kinds import of_products, pair_step
from .pairs import (
    COLUMNS,
    FEW,
    ROWS,
    VECTORS,
    Pairs,
    PointTiles,
    block_steps,
    mask_steps,
    parameters,
    rows_of,
)


def point_gradient(
    *, dtype, dim, dim_b, unit, tile_m, tile_n, threads, lanes, chunks, stages, blocks, kind, given, mask, nbytes,
):  # fmt: skip
    """The kernel for points of `dim` dimensions and `dim_b` features of b and c; given, kind: see `point_sums`."""
    pairs = Pairs(dtype, dim, dim_b, unit, tile_m, tile_n, threads, lanes, chunks, stages, nbytes)
    keep_points, fetch_points, get_points, distances = pairs.distances(dim, kind)
    keep_rows, fetch_columns, shift_of = pairs.shifts(given)
    keep_c, (fetch_b, get_b), inner = pairs.kept(dim_b, FEW), pairs.walked(dim_b, FEW), pairs.inner(dim_b, FEW)
    no_sums, add, save_dx = displacement_steps(pairs, dim, kind)
    slope_of = pair_step(kind, pairs.ACC, shifted=ROWS in given or COLUMNS in given, derivative=True)
    block_of, next_tile = block_steps(mask, tile_m, tile_n)
    needs_mask, masked = mask_steps(mask, pairs.layout, tile_m, tile_n)
    TILE_N, COLS, CHUNKS, IN_TURN = tile_n, tile_n // chunks, chunks, stages == 1

    @device
    def fetch(mY, mB, vectors, block, stage, n_block):
        n0 = n_block * TILE_N
        fetch_points(mY, vectors, block, stage, n0)
        fetch_columns(vectors, block, stage, n0)
        fetch_b(mB[block.batch, block.head][block.key : block.seen_key], stage, n0)

    def kernel(mX, mY, mB, mC, mDX, vectors, mask, kind_number):
        block, mask = block_of(mDX, mask)
        n_block, stage, batch, head = block.first, index(0), block.batch, block.head
        X, R, dX = keep_points(mX, vectors, block), keep_rows(vectors, block), no_sums()
        C = keep_c(mC[batch, head][block.query : block.seen_query], block.m0)
        if n_block < block.tiles:
            fetch(mY, mB, vectors, block, stage, n_block)
        while n_block < block.tiles:
            this = n_block
            n_block = next_tile(mask, block, n_block)
            wait_copies()
            sync_threads()                                      # this tile has arrived, all have read the last one
            if not IN_TURN and n_block < block.tiles:
                fetch(mY, mB, vectors, block, 1 - stage, n_block)
            is_masked = needs_mask(mask, block, this)
            for chunk in range(CHUNKS):
                Y = get_points(stage, chunk)
                T = distances(X, Y, stage, chunk)
                W = slope_of(T, shift_of(R, stage, chunk), kind_number)
                W = W * inner(C, get_b(stage, chunk))           # W_ij = kappa'_ij <c_i, b_j>
                if is_masked:
                    W = masked(W, mask, block, this * TILE_N + chunk * COLS)
                dX = add(dX, W, X, Y)                           # dx_i += sum_j W_ij (x_i - y_j)
            if not IN_TURN:
                stage = 1 - stage
            elif n_block < block.tiles:
                sync_threads()                                  # all have read this tile
                fetch(mY, mB, vectors, block, stage, n_block)
        points = mX[batch, head][block.query : block.seen_query]
        save_dx(mDX[batch, head][block.query : block.end_query], dX, points, block.m0)

    signature = signature_of(kernel, SPEC.arguments, pairs.dtype, pairs.ACC, {"dq": pairs.ACC}, mask=mask, given=given)
    return Source(kernel, signature, threads, blocks, pairs.shared.nbytes)


def displacement_steps(pairs, dim, kind):
    """Device functions for sums of displacements: none yet; (dX, W, X, Y) -> dX with those of a tile added; (matrix,
    dX, points, m0) saves them."""
    TWO, ZERO, ROWS_OF = pairs.ACC(2), pairs.ACC(0), pairs.rows_of
    if of_products(kind):
        no_sums, add_products, save_sums = pairs.outer(dim, DIFFERENCES)

        @device
        def add_points(dX, W, X, Y):
            return add_products(dX, W, Y)

        @device
        def save_as_it_is(matrix, dX, points, m0):
            save_sums(matrix, dX, m0)

        return no_sums, add_points, save_as_it_is

    if dim <= DIFFERENCES:
        add_to_parts, save_parts = part_differences_step(dim), save_sums_step(dim, TWO)

        @device
        def add_differences(dX, W, X, Y):
            return add_to_parts(dX, W, X[0], Y)

        @device
        def save_differences(matrix, dX, points, m0):
            save_parts(matrix, dX, m0)

        return no_sums_step(pairs.layout, pairs.ACC, dim), add_differences, save_differences

    X_TILE, PARTS, left = pairs.tile_of_sums(dim), pairs.layout.row_parts(), left_operand(
        pairs.layout, pairs.shared, pairs.ACC, dim
    )  # fmt: skip
    ACC = pairs.ACC

    @device
    def nothing():
        return full(X_TILE, ZERO), full(PARTS, ZERO)

    @device
    def add_tile(dX, W, X, Y):
        WY, total = dX
        return dot(WY, left(W), Y), part_sum(W, total)

    @device
    def save_tile(matrix, dX, points, m0):
        WY, total = dX
        X = convert(load(aligned(points, ROWS_OF), X_TILE, m0), ACC)
        save(aligned(matrix, ROWS_OF), (X * row_sum(total) - WY) * TWO, m0)

    return nothing, add_tile, save_tile


# see `pairs.rows_of`
TILES = {
    (True, True, 2): {
        4: (PointTiles("fma", 32, 512, 256, lanes=32, chunks=4, blocks=2),),
        12: (PointTiles("fma", 32, 512, 256, lanes=32, chunks=8),),
    },
    (True, True, 4): {
        4: (PointTiles("fma", 32, 512, 256, lanes=32, chunks=4, blocks=2),),
        12: (PointTiles("fma", 32, 512, 256, lanes=32, chunks=8),),
    },
    (True, True, 8): {
        7: (PointTiles("fma", 32, 256, 256, lanes=32, chunks=4),),
        12: (PointTiles("fma", 16, 256, 256, lanes=32, chunks=4),),
    },
    (True, False, 2): {256: (PointTiles("mma", 128, 64, 256), PointTiles("mma", 64, 32, 128))},
    (True, False, 4): {
        64: (PointTiles("mma", 128, 64, 256), PointTiles("mma", 64, 32, 128)),
        128: (PointTiles("mma", 128, 32, 256), PointTiles("mma", 64, 32, 128)),
        256: (PointTiles("mma", 128, 32, 256), PointTiles("mma", 64, 16, 128)),
    },
    (True, False, 8): {
        128: (PointTiles("mma", 64, 16, 128), PointTiles("mma", 64, 16, 128, stages=1)),
        256: (PointTiles("mma", 64, 16, 128), PointTiles("mma", 64, 8, 128, stages=1)),
    },
    (False, True, 2): {
        128: (PointTiles("mma", 128, 64, 256), PointTiles("mma", 64, 32, 128)),
        256: (PointTiles("mma", 64, 32, 128),),
    },
    (False, True, 4): {
        64: (PointTiles("mma", 128, 64, 256), PointTiles("mma", 64, 32, 128)),
        128: (PointTiles("mma", 128, 32, 256), PointTiles("mma", 64, 16, 128)),
        256: (PointTiles("mma", 128, 16, 256), PointTiles("mma", 64, 16, 128, stages=1)),
    },
    (False, True, 8): {
        64: (PointTiles("mma", 128, 16, 256), PointTiles("mma", 64, 16, 128)),
        128: (PointTiles("mma", 64, 16, 128), PointTiles("mma", 64, 8, 128, stages=1)),
    },
    (False, False, 2): {
        128: (PointTiles("mma", 128, 64, 256), PointTiles("mma", 64, 32, 128)),
        256: (PointTiles("mma", 64, 32, 128), PointTiles("mma", 64, 32, 128, stages=1)),
    },
    (False, False, 4): {
        64: (PointTiles("mma", 128, 32, 256), PointTiles("mma", 64, 32, 128)),
        128: (PointTiles("mma", 128, 16, 256), PointTiles("mma", 64, 16, 128)),
        256: (PointTiles("mma", 64, 16, 128), PointTiles("mma", 64, 8, 128, stages=1)),
    },
    (False, False, 8): {
        64: (PointTiles("mma", 64, 16, 128), PointTiles("mma", 64, 16, 128, stages=1)),
        128: (PointTiles("mma", 64, 8, 128), PointTiles("mma", 64, 8, 128, stages=1)),
    },
}
SPEC = Spec(
    point_gradient,
    (Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("c"), Matrix("dq"), VECTORS, MASK, "kind_number"),
    tiles=lambda work: rows_of(TILES, work),
    parameters=parameters,
    packs=True,
)

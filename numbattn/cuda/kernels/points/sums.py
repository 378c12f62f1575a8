"""Sums over pairs of points: o_i = sum_j kappa_ij b_j.

A block keeps a tile of rows and loops over the columns that they see; the next tile is in flight while this one is
computed. Of few features of b each thread sums its own products, and lanes meet in the epilogue; of more a tile of
kappa is a left operand.
"""

from ...build import Source
from ...tile import device, index, sync_threads, wait_copies
from ...words.arguments import Matrix
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.visibility import MASK
from .kinds import pair_step
from .pairs import COLUMNS, FEW, ROWS, VECTORS, Pairs, PointTiles, block_steps, mask_steps, parameters, rows_of


def point_sums(
    *, dtype, dim, dim_b, unit, tile_m, tile_n, threads, lanes, chunks, stages, blocks, kind, given, mask, nbytes,
):  # fmt: skip
    """The kernel for points of `dim` dimensions and `dim_b` features of b.

    given: the names of the vectors that the call has; kind: what is compiled in of it, see `kinds`.
    """
    pairs = Pairs(dtype, dim, dim_b, unit, tile_m, tile_n, threads, lanes, chunks, stages, nbytes)
    keep_points, fetch_points, get_points, distances = pairs.distances(dim, kind)
    keep_rows, fetch_columns, shift_of = pairs.shifts(given)
    fetch_b, get_b = pairs.walked(dim_b, FEW)
    no_sums, add, save_o = pairs.outer(dim_b, FEW)
    kappa_of = pair_step(pairs.steps(dim, kind), shifted=ROWS in given or COLUMNS in given)
    block_of, next_tile = block_steps(mask, tile_m, tile_n)
    needs_mask, masked = mask_steps(mask, pairs.layout, tile_m, tile_n)
    TILE_N, COLS, CHUNKS, IN_TURN = tile_n, tile_n // chunks, chunks, stages == 1

    @device
    def fetch(mY, mB, vectors, block, stage, n_block):
        n0 = n_block * TILE_N
        fetch_points(mY, vectors, block, stage, n0)
        fetch_columns(vectors, block, stage, n0)
        fetch_b(mB[block.batch, block.head][block.key : block.seen_key], stage, n0)

    def kernel(mX, mY, mB, mO, vectors, mask, kind_number):
        block, mask = block_of(mO, mask)
        n_block, stage = block.first, index(0)
        X, R, O = keep_points(mX, vectors, block), keep_rows(vectors, block), no_sums()
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
                T = distances(X, get_points(stage, chunk), stage, chunk)
                P = kappa_of(T, shift_of(R, stage, chunk), kind_number)
                if is_masked:
                    P = masked(P, mask, block, this * TILE_N + chunk * COLS)
                O = add(O, P, get_b(stage, chunk))              # o_i += sum_j kappa_ij b_j
            if not IN_TURN:
                stage = 1 - stage
            elif n_block < block.tiles:
                sync_threads()                                  # all have read this tile
                fetch(mY, mB, vectors, block, stage, n_block)
        save_o(mO[block.batch, block.head][block.query : block.end_query], O, block.m0)

    signature = signature_of(kernel, SPEC.arguments, pairs.dtype, pairs.ACC, {"o": pairs.ACC}, mask=mask, given=given)
    return Source(kernel, signature, threads, blocks, pairs.shared.nbytes)


# see `pairs.rows_of`
TILES = {
    (True, True, 2): {
        4: (PointTiles("fma", 64, 512, 256, lanes=32, chunks=4, blocks=2),),
        12: (PointTiles("fma", 32, 512, 256, lanes=32, chunks=4, blocks=2),),
    },
    (True, True, 4): {
        4: (PointTiles("fma", 64, 512, 256, lanes=32, chunks=4, blocks=2),),
        7: (PointTiles("fma", 64, 512, 256, lanes=32, chunks=8, blocks=2),),
        12: (PointTiles("fma", 32, 512, 256, lanes=32, chunks=4, blocks=2),),
    },
    (True, True, 8): {
        7: (PointTiles("fma", 32, 256, 256, lanes=32, chunks=4, blocks=2),),
        12: (PointTiles("fma", 32, 256, 256, lanes=32, chunks=4),),
    },
    (True, False, 2): {
        128: (PointTiles("mma", 128, 64, 256),),
        256: (PointTiles("mma", 64, 32, 128),),
    },
    (True, False, 4): {
        128: (PointTiles("mma", 128, 64, 256), PointTiles("mma", 64, 32, 128)),
        256: (PointTiles("mma", 128, 32, 256), PointTiles("mma", 64, 16, 128)),
    },
    (True, False, 8): {
        64: (PointTiles("mma", 128, 32, 256), PointTiles("mma", 64, 16, 128)),
        128: (PointTiles("mma", 128, 16, 256), PointTiles("mma", 64, 16, 128)),
    },
    (False, True, 2): {
        256: (PointTiles("mma", 128, 64, 256), PointTiles("mma", 64, 32, 128)),
    },
    (False, True, 4): {
        128: (PointTiles("mma", 128, 64, 256), PointTiles("mma", 64, 32, 128)),
        256: (PointTiles("mma", 128, 32, 256), PointTiles("mma", 64, 16, 128)),
    },
    (False, True, 8): {
        128: (PointTiles("mma", 64, 32, 128), PointTiles("mma", 64, 16, 128, stages=1)),
        256: (PointTiles("mma", 64, 16, 128), PointTiles("mma", 64, 8, 128, stages=1)),
    },
    (False, False, 2): {
        128: (PointTiles("mma", 128, 64, 256), PointTiles("mma", 64, 32, 128)),
        256: (PointTiles("mma", 64, 32, 128),),
    },
    (False, False, 4): {
        64: (PointTiles("mma", 128, 64, 256), PointTiles("mma", 64, 32, 128)),
        128: (PointTiles("mma", 128, 32, 256), PointTiles("mma", 64, 16, 128)),
        256: (PointTiles("mma", 128, 16, 256), PointTiles("mma", 64, 16, 128, stages=1)),
    },
    (False, False, 8): {
        64: (PointTiles("mma", 128, 16, 256), PointTiles("mma", 64, 16, 128)),
        128: (PointTiles("mma", 64, 16, 128), PointTiles("mma", 64, 8, 128, stages=1)),
    },
}
SPEC = Spec(
    point_sums,
    (Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("o"), VECTORS, MASK, "kind_number"),
    tiles=lambda work: rows_of(TILES, work),
    parameters=parameters,
    packs=True,
)

"""The k nearest of the points y for each point x: their squared distances and indices.

A block keeps a tile of rows and loops over the columns that they see, as `point_sums` does.
"""

import numpy as np

from ...build import Source
from ...tile import device, index, save, sync_threads, wait_copies
from ...words.arguments import Matrix, MatrixOfCall
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.smallest import smallest_steps
from ..shared.visibility import MASK
from .pairs import VECTORS, Pairs, PointTiles, block_steps, mask_steps, parameters, rows_of

NEAREST = "Nearest"  # in place of a kind, before k


def point_nearest(
    *, dtype, dim, dim_b, unit, tile_m, tile_n, threads, lanes, chunks, stages, blocks, kind, given, mask, nbytes,
):  # fmt: skip
    """The kernel for points of `dim` dimensions; kind: NEAREST and k. Other parameters: see `point_sums`."""
    pairs = Pairs(dtype, dim, dim_b, unit, tile_m, tile_n, threads, lanes, chunks, stages, nbytes)
    keep_points, fetch_points, get_points, distances = pairs.distances(dim, kind)
    block_of, next_tile = block_steps(mask, tile_m, tile_n)
    needs_mask, masked = mask_steps(mask, pairs.layout, tile_m, tile_n, hidden=np.inf)
    start, add, finish = smallest_steps(pairs.layout, pairs.ACC, int(kind.split()[1]), pairs.shared)
    TILE_N, COLS, CHUNKS, IN_TURN = tile_n, tile_n // chunks, chunks, stages == 1

    @device
    def fetch(mY, vectors, block, stage, n_block):
        fetch_points(mY, vectors, block, stage, n_block * TILE_N)

    def kernel(mX, mY, mR2, mJ, vectors, mask):
        block, mask = block_of(mX, mask)
        n_block, stage = block.first, index(0)
        X, found = keep_points(mX, vectors, block), start()
        if n_block < block.tiles:
            fetch(mY, vectors, block, stage, n_block)
        while n_block < block.tiles:
            this = n_block
            n_block = next_tile(mask, block, n_block)
            wait_copies()
            sync_threads()                                      # this tile has arrived, all have read the last one
            if not IN_TURN and n_block < block.tiles:
                fetch(mY, vectors, block, 1 - stage, n_block)
            is_masked = needs_mask(mask, block, this)
            for chunk in range(CHUNKS):
                n0 = this * TILE_N + chunk * COLS
                T = distances(X, get_points(stage, chunk), stage, chunk)
                if is_masked:
                    T = masked(T, mask, block, n0)
                found = add(found, T, block.key + n0)           # numbers of points in packed arrays
            if not IN_TURN:
                stage = 1 - stage
            elif n_block < block.tiles:
                sync_threads()                                  # all have read this tile
                fetch(mY, vectors, block, stage, n_block)
        r2, j = finish(found)
        save(mR2[block.batch, block.head][block.query : block.end_query], r2, block.m0)
        save(mJ[block.batch, block.head][block.query : block.end_query], j, block.m0)

    dtypes = {"r2": pairs.ACC, "j": np.int32}
    signature = signature_of(kernel, SPEC.arguments, pairs.dtype, pairs.ACC, dtypes, mask=mask, given=given)
    return Source(kernel, signature, threads, blocks, pairs.shared.nbytes)


# As those of `point_sums`
TILES = {
    (True, True, 2): {12: (PointTiles("fma", 128, 256, 128, lanes=4, chunks=8, blocks=4),)},
    (True, True, 4): {12: (PointTiles("fma", 128, 256, 128, lanes=4, chunks=8, blocks=4),)},
    (True, True, 8): {12: (PointTiles("fma", 64, 128, 64, lanes=4, chunks=8, blocks=4),)},
    (False, True, 2): {
        128: (PointTiles("mma", 128, 64, 128, blocks=2), PointTiles("mma", 64, 64, 128)),
        256: (PointTiles("mma", 64, 64, 128, blocks=2), PointTiles("mma", 64, 32, 128)),
    },
    (False, True, 4): {
        64: (PointTiles("mma", 128, 64, 128, blocks=2), PointTiles("mma", 64, 32, 128)),
        128: (PointTiles("mma", 128, 32, 128, blocks=2), PointTiles("mma", 64, 32, 128)),
        256: (PointTiles("mma", 64, 32, 128), PointTiles("mma", 32, 16, 64)),
    },
    (False, True, 8): {
        64: (PointTiles("mma", 64, 32, 128), PointTiles("mma", 32, 32, 64)),
        128: (PointTiles("mma", 64, 32, 128), PointTiles("mma", 32, 16, 64)),
        256: (PointTiles("mma", 32, 16, 64),),
    },
}


def takes_one(work):
    """Whether the one nearest point is asked for."""
    return work.kind == f"{NEAREST} 1"


SPEC = Spec(
    point_nearest,
    (Matrix("q"), Matrix("k", "k"), MatrixOfCall("r2"), MatrixOfCall("j"), VECTORS, MASK),
    tiles=lambda work: rows_of(TILES, work),
    parameters=parameters,
    packs=True,
)

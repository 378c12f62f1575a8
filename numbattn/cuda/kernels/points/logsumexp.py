"""log sum_j exp(columns_j) kappa_ij over pairs of points: the online softmax of attention (Algorithm 2), with no P V.

A block keeps a tile of rows and loops over the columns that they see, as `point_sums` does.
"""

import numpy as np

from ...build import Source
from ...tile import device, full, index, row_sum, save, sync_threads, wait_copies
from ...words.arguments import Matrix, Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.softmax import LN_2, logsumexp, softmax_steps
from ..shared.visibility import MASK
from .kinds import steps_of
from .pairs import COLUMNS, VECTORS, Pairs, PointTiles, block_steps, mask_steps, parameters, rows_of


def point_logsumexp(
    *, dtype, dim, dim_b, unit, tile_m, tile_n, threads, lanes, chunks, stages, blocks, kind, given, mask, nbytes,
):  # fmt: skip
    """The kernel for points of `dim` dimensions. Other parameters: see `point_sums`."""
    pairs = Pairs(dtype, dim, dim_b, unit, tile_m, tile_n, threads, lanes, chunks, stages, nbytes)
    keep_points, fetch_points, get_points, distances = pairs.distances(dim, kind)
    _, fetch_columns, shift_of = pairs.shifts(given)
    exponent, ACC = steps_of(kind, pairs.ACC).exponent, pairs.ACC
    block_of, next_tile = block_steps(mask, tile_m, tile_n)
    needs_mask, masked = mask_steps(mask, pairs.layout, tile_m, tile_n, hidden=-np.inf)
    VECTOR, PARTS, ZERO, ONE, LN2 = pairs.layout.row_vector(), pairs.layout.row_parts(), ACC(0), ACC(1), ACC(LN_2)
    TILE_N, COLS, CHUNKS, IN_TURN, HAS_COLUMNS = tile_n, tile_n // chunks, chunks, stages == 1, COLUMNS in given
    NO_MAX, softmax_step = softmax_steps(ACC)

    @device
    def fetch(mY, vectors, block, stage, n_block):
        fetch_points(mY, vectors, block, stage, n_block * TILE_N)
        fetch_columns(vectors, block, stage, n_block * TILE_N)

    def kernel(mX, mY, mLse, vectors, mask, kind_number):
        block, mask = block_of(mX, mask)
        n_block, stage = block.first, index(0)
        X, m, l = keep_points(mX, vectors, block), full(VECTOR, NO_MAX), full(PARTS, ZERO)
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
                S = exponent(distances(X, get_points(stage, chunk), stage, chunk), kind_number)    # in base 2
                if HAS_COLUMNS:
                    S = S + shift_of((), stage, chunk)
                if is_masked:
                    S = masked(S, mask, block, this * TILE_N + chunk * COLS)
                _, m, l, _ = softmax_step(S, m, l, ONE)         # Alg. 2 lines 12 and 13
            if not IN_TURN:
                stage = 1 - stage
            elif n_block < block.tiles:
                sync_threads()                                  # all have read this tile
                fetch(mY, vectors, block, stage, n_block)
        lse = logsumexp(m * LN2, row_sum(l), LN2)               # line 16
        save(mLse[block.batch, block.head][block.query : block.end_query], lse, block.m0)

    signature = signature_of(kernel, SPEC.arguments, pairs.dtype, ACC, mask=mask, given=given)
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


SPEC = Spec(
    point_logsumexp,
    (Matrix("q"), Matrix("k", "k"), Statistic("lse"), VECTORS, MASK, "kind_number"),
    tiles=lambda work: rows_of(TILES, work),
    parameters=parameters,
    packs=True,
)

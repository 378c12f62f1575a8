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
from ..tables import has_tensor_cores
from .kinds import pair_step
from .pairs import COLUMNS, FEW, ROWS, VECTORS, Pairs, PointTiles, block_steps, has_few, mask_steps, parameters


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
    kappa_of = pair_step(kind, pairs.ACC, shifted=ROWS in given or COLUMNS in given)
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


# {(few dimensions, few features of b, tensor cores, bytes of an element): rows}
TILES = {
    (True, True, True, 4): (PointTiles("fma", 128, 256, 128, lanes=8, chunks=4, blocks=4),),
}
FMA = (PointTiles("fma", 64, 64, 128, lanes=8, stages=1), PointTiles("fma", 16, 16, 64, lanes=8, stages=1))


def tiles_of(work):
    """The rows for this work."""
    unit = has_tensor_cores(work.device), work.problem.dtype.itemsize
    return TILES.get((*has_few(work), *unit), FMA)


SPEC = Spec(
    point_sums,
    (Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("o"), VECTORS, MASK, "kind_number"),
    tiles=tiles_of,
    parameters=parameters,
    packs=True,
)

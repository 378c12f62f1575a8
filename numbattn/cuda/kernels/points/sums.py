"""Sums over pairs of points: o_i = sum_j kappa_ij b_j.

See `loop` for how a block gets its pairs. With few features of b each thread sums its own products, and lanes meet in
the epilogue; with more a tile of kappa is a left operand.
"""

from ...build import Source
from ...tile import device
from ...words.arguments import Matrix
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.visibility import MASK
from .arguments import APART, COLUMNS, FEW, ROWS, VECTORS, PointTiles, parameters, rows_of
from .kinds import pair_step
from .loop import loop_steps
from .outer import outer
from .pairs import PairSteps


def point_sums(*, dtype, dim, dim_b, tiles, kind, given, mask, nbytes):
    """The kernel for points of `dim` dimensions and `dim_b` features of b.

    tiles: PointTiles; given: the names of the vectors that the call has; kind: the form of a
    `numbattn.points.kinds.Kind`.
    """
    pairs = PairSteps(dtype, dim, dim_b, tiles, nbytes)
    keep_points, fetch_points, get_points, distances = pairs.distances(dim, kind)
    keep_rows, fetch_columns, shift_of = pairs.shifts(given)
    (fetch_b, get_b), sums = pairs.walked(dim_b, FEW), outer(pairs, dim_b, FEW)
    kappa_of = pair_step(kind, pairs.ACC, shifted=ROWS in given or COLUMNS in given)
    none, add_products, save_o = sums.none, sums.add, sums.save

    @device
    def fetch(given, block, stage, n0):
        _, _, mY, mB, vectors, _ = given
        fetch_points(mY, vectors, block, stage, n0)
        fetch_columns(vectors, block, stage, n0)
        fetch_b(mB[block.batch, block.head][block.key : block.seen_key], stage, n0)

    block_of, in_sight, loop_of = loop_steps(pairs, mask, fetch)

    @device
    def add(O, given, mask, block, part):
        X, R, _, _, _, kind_number = given
        T = distances(X, get_points(part.stage, part.chunk), part)
        P = in_sight(kappa_of(T, shift_of(R, part.stage, part.chunk), kind_number), mask, block, part)
        return add_products(O, P, get_b(part.stage, part.chunk))    # o_i += sum_j kappa_ij b_j

    loop = loop_of(add, sums.begin, sums.end)

    def kernel(mX, mY, mB, mO, mGivenX, mGivenY, vectors, mask, kind_number, rate):
        block, mask = block_of(mO, mask)
        points = keep_points(mX, vectors, (mGivenX, mGivenY, rate), block)
        given = points, keep_rows(vectors, block), mY, mB, vectors, kind_number
        O = loop(none(), given, mask, block)
        save_o(mO[block.batch, block.head][block.query : block.end_query], O, block.m0)

    signature = signature_of(kernel, SPEC.arguments, pairs.dtype, pairs.ACC, {"o": pairs.ACC}, mask=mask, given=given)
    return Source(kernel, signature, tiles.threads, tiles.blocks, pairs.shared.nbytes)


# See `arguments.rows_of`. 10^12 pairs a second: Gaussian, 100,000 points of each, H100
TILES = {
    (True, True, 2): {
        4: PointTiles("fma", 64, 512, 256, lanes=32, chunks=4, blocks=2),
        12: PointTiles("fma", 32, 512, 256, lanes=32, chunks=4, blocks=2),
    },
    (True, True, 4): {
        4: PointTiles("fma", 64, 512, 256, lanes=32, chunks=4, blocks=2),  # 2.3
        9: PointTiles("fma", 64, 256, 128, lanes=16, chunks=8, blocks=3),  # 1.2
        12: PointTiles("fma", 64, 256, 128, lanes=16, chunks=8, blocks=2),  # 0.9
    },
    (True, True, 8): {
        7: PointTiles("fma", 32, 256, 256, lanes=32, chunks=4, blocks=2),
        12: PointTiles("fma", 32, 256, 256, lanes=32, chunks=4),
    },
    (True, False, 2): {128: PointTiles("mma", 128, 64, 256), 256: PointTiles("mma", 64, 32, 128)},
    (True, False, 4): {
        64: PointTiles("mma", 128, 32, 128, blocks=2),  # 0.40; 64 columns 0.31
        128: PointTiles("mma", 128, 64, 256), 256: PointTiles("mma", 128, 32, 256),
    },
    (True, False, 8): {64: PointTiles("mma", 128, 32, 256), 128: PointTiles("mma", 128, 16, 256)},
    (False, True, 2): {256: PointTiles("mma", 128, 64, 256)},
    (False, True, 4): {
        32: PointTiles("mma", 128, 64, 128, blocks=2),  # 1.02; 256 threads 0.80
        64: PointTiles("mma", 128, 32, 128, blocks=2),  # 0.38; 256 threads 0.33
        128: PointTiles("mma", 128, 64, 256), 256: PointTiles("mma", 128, 32, 256),
    },
    (False, True, 8): {128: PointTiles("mma", 64, 32, 128), 256: PointTiles("mma", 64, 16, 128)},
    (False, False, 2): {128: PointTiles("mma", 128, 64, 256), 256: PointTiles("mma", 64, 32, 128)},
    (False, False, 4): {
        64: PointTiles("mma", 128, 32, 128, blocks=2),  # 0.24; 64 columns 0.22
        128: PointTiles("mma", 128, 32, 256), 256: PointTiles("mma", 128, 16, 256),
    },
    (False, False, 8): {64: PointTiles("mma", 128, 16, 256), 128: PointTiles("mma", 64, 16, 128)},
}
SPEC = Spec(
    point_sums,
    (Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("o"), *APART, VECTORS, MASK, "kind_number", "rate"),
    tiles=lambda work: rows_of(TILES, work),
    parameters=parameters,
    packs=True,
)

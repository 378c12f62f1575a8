"""log sum_j exp(columns_j) kappa_ij over pairs of points: the online softmax of attention (Algorithm 2), with no P V.

See `loop` for how a block comes by its pairs.
"""

import numpy as np

from ...build import Source
from ...tile import device, full, row_sum, save
from ...words.arguments import Matrix, Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.softmax import LN_2, logsumexp, softmax_steps
from ..shared.visibility import MASK
from .kinds import steps_of
from .loop import loop_steps
from .pairs import COLUMNS, VECTORS, Pairs, PointTiles, parameters, rows_of


def point_logsumexp(
    *, dtype, dim, dim_b, unit, tile_m, tile_n, threads, lanes, chunks, stages, blocks, kind, given, mask, nbytes,
):  # fmt: skip
    """The kernel for points of `dim` dimensions. Other parameters: see `point_sums`."""
    pairs = Pairs(dtype, dim, dim_b, unit, tile_m, tile_n, threads, lanes, chunks, stages, nbytes)
    keep_points, fetch_points, get_points, distances = pairs.distances(dim, kind)
    _, fetch_columns, shift_of = pairs.shifts(given)
    exponent, ACC = steps_of(kind, pairs.ACC).exponent, pairs.ACC
    VECTOR, PARTS, ZERO, ONE, LN2 = pairs.layout.row_vector(), pairs.layout.row_parts(), ACC(0), ACC(1), ACC(LN_2)
    HAS_COLUMNS = COLUMNS in given
    NO_MAX, softmax_step = softmax_steps(ACC)

    @device
    def fetch(given, block, stage, n0):
        _, mY, vectors, _ = given
        fetch_points(mY, vectors, block, stage, n0)
        fetch_columns(vectors, block, stage, n0)

    block_of, in_sight, loop_of = loop_steps(pairs, mask, fetch, hidden=-np.inf)

    @device
    def add(found, given, mask, block, part):
        (m, l), (X, _, _, kind_number) = found, given
        S = exponent(distances(X, get_points(part.stage, part.chunk), part.stage, part.chunk), kind_number)  # in base 2
        if HAS_COLUMNS:
            S = S + shift_of((), part.stage, part.chunk)
        _, m, l, _ = softmax_step(in_sight(S, mask, block, part), m, l, ONE)    # Alg. 2 lines 12 and 13
        return m, l

    loop = loop_of(add)

    def kernel(mX, mY, mLse, vectors, mask, kind_number):
        block, mask = block_of(mX, mask)
        given = keep_points(mX, vectors, block), mY, vectors, kind_number
        m, l = loop((full(VECTOR, NO_MAX), full(PARTS, ZERO)), given, mask, block)
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

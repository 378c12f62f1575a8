"""log sum_j exp(columns_j) kappa_ij over pairs of points: the online softmax of attention (Algorithm 2), with no P V.

See `loop` for how a block gets its pairs.
"""

import numpy as np

from ....points.kinds import LOGARITHM
from ...build import Source
from ...tile import device, full, part_sum, reciprocal, row_sum, save
from ...words.arguments import Matrix, Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.softmax import LN_2, logsumexp, low_step, softmax_parts
from ..shared.visibility import MASK
from .arguments import APART, COLUMNS, VECTORS, WITHOUT_VECTORS, PointTiles, parameters, rows_of
from .kinds import pair_step
from .loop import loop_steps
from .pairs import PairSteps


def point_logsumexp(*, dtype, dim, dim_b, tiles, kind, given, mask, nbytes):
    """The kernel for points of `dim` dimensions. Other parameters: see `point_sums`."""
    pairs = PairSteps(dtype, dim, dim_b, tiles, nbytes)
    keep_points, fetch_points, get_points, distances = pairs.distances(dim, kind)
    _, fetch_columns, shift_of = pairs.shifts(given)
    ACC, logarithm = pairs.ACC, pair_step(kind, pairs.ACC, LOGARITHM)
    VECTOR, PARTS, ZERO, ONE, LN2 = pairs.layout.row_vector(), pairs.layout.row_parts(), ACC(0), ACC(1), ACC(LN_2)
    HAS_COLUMNS, low_of = COLUMNS in given, low_step(ACC)
    no_max, new_max, exponentials = softmax_parts(ACC)

    @device
    def fetch(given, block, stage, n0):
        _, mY, vectors, _ = given
        fetch_points(mY, vectors, block, stage, n0)
        fetch_columns(vectors, block, stage, n0)

    block_of, in_sight, loop_of = loop_steps(pairs, mask, fetch, hidden=-np.inf)

    @device
    def add(found, given, mask, block, part):
        (m, l), (X, _, _, kind_number) = found, given
        S = logarithm(distances(X, get_points(part.stage, part.chunk), part), (), kind_number)  # in base 2
        if HAS_COLUMNS:
            S = S + shift_of((), part.stage, part.chunk)
        S = in_sight(S, mask, block, part)
        m, alpha, zero = new_max(S, m, ONE)                     # Alg. 2 line 13
        # each tile is summed on its own: one sum of all terms of a thread would lose more digits
        return m, l * alpha + part_sum(exponentials(S, zero, ONE))

    loop = loop_of(add)

    def kernel(mX, mY, mLse, mLow, mGivenX, mGivenY, vectors, mask, kind_number, rate):
        block, mask = block_of(mX, mask)
        given = keep_points(mX, vectors, (mGivenX, mGivenY, rate), block), mY, vectors, kind_number
        m, l = loop((full(VECTOR, no_max(ONE)), full(PARTS, ZERO)), given, mask, block)
        total = row_sum(l)
        lse = logsumexp(m * LN2, total, LN2)                    # line 16
        save(mLse[block.batch, block.head][block.query : block.end_query], lse, block.m0)
        low = low_of(lse, m, ONE, reciprocal(total))
        save(mLow[block.batch, block.head][block.query : block.end_query], low, block.m0)

    signature = signature_of(kernel, SPEC.arguments, pairs.dtype, ACC, mask=mask, given=given)
    return Source(kernel, signature, tiles.threads, tiles.blocks, pairs.shared.nbytes)


# As those of `point_sums`. TFLOP/s on an H100, 50,000 points each
TILES = {
    (True, True, 2): {12: PointTiles("fma", 128, 256, 128, lanes=4, chunks=8, blocks=4)},
    (True, True, 4): {12: PointTiles("fma", 128, 256, 128, lanes=4, chunks=8, blocks=4)},  # d 3: 1.87e12 pairs/s
    (True, True, 8): {12: PointTiles("fma", 64, 128, 64, lanes=4, chunks=8, blocks=4)},
    (False, True, 2): {
        128: PointTiles("mma", 128, 128, 128),  # d 64: 173; 64 x 64 151
        256: PointTiles("mma", 64, 64, 128, blocks=2),
    },
    (False, True, 4): {
        64: PointTiles("mma", 128, 128, 256),  # 50; 64 x 64 48
        128: PointTiles("mma", 128, 64, 256),  # 56
        256: PointTiles("mma", 64, 32, 128),
    },
    (False, True, 8): {
        64: PointTiles("mma", 128, 64, 256),  # 15, 13
        128: PointTiles("mma", 64, 32, 128), 256: PointTiles("mma", 32, 16, 64),
    },
}


SPEC = Spec(
    point_logsumexp,
    (Matrix("q"), Matrix("k", "k"), Statistic("lse"), Statistic("lse_low"), *APART, VECTORS, MASK, "kind_number",
     "rate"),
    tiles=lambda work: rows_of(TILES, work, WITHOUT_VECTORS),
    parameters=parameters,
    packs=True,
)

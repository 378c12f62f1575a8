"""The k nearest of the points y for each point x: their squared distances and indices.

See `loop` for how a block gets its pairs.
"""

from dataclasses import dataclass

import numpy as np

from ....points.kinds import Kind
from ...build import Source
from ...tile import device, save
from ...words.arguments import Matrix, MatrixOfCall
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.smallest import smallest_steps
from ..shared.visibility import MASK
from .arguments import APART, VECTORS, WITHOUT_VECTORS, PointTiles, parameters, rows_of
from .loop import loop_steps
from .pairs import PairSteps


@dataclass(frozen=True)
class Nearest(Kind):
    """In place of a kind."""

    k: int



def point_nearest(*, dtype, dim, dim_b, tiles, kind, given, mask, nbytes):
    """The kernel for points of `dim` dimensions; kind: a Nearest. Other parameters: see `point_sums`."""
    pairs = PairSteps(dtype, dim, dim_b, tiles, nbytes)
    keep_points, fetch_points, get_points, distances = pairs.distances(dim, kind)
    start, add_tile, finish = smallest_steps(pairs.layout, pairs.ACC, kind.k, pairs.shared)

    @device
    def fetch(given, block, stage, n0):
        _, mY, vectors = given
        fetch_points(mY, vectors, block, stage, n0)

    block_of, in_sight, loop_of = loop_steps(pairs, mask, fetch, hidden=np.inf)

    @device
    def add(found, given, mask, block, part):
        X, _, _ = given
        T = distances(X, get_points(part.stage, part.chunk), part)
        return add_tile(found, in_sight(T, mask, block, part), block.key + part.n0)    # numbers in packed arrays

    loop = loop_of(add)

    def kernel(mX, mY, mR2, mJ, mGivenX, mGivenY, vectors, mask, rate):
        block, mask = block_of(mX, mask)
        X = keep_points(mX, vectors, (mGivenX, mGivenY, rate), block)
        r2, j = finish(loop(start(), (X, mY, vectors), mask, block))
        save(mR2[block.batch, block.head][block.query : block.end_query], r2, block.m0)
        save(mJ[block.batch, block.head][block.query : block.end_query], j, block.m0)

    dtypes = {"r2": pairs.ACC, "j": np.int32}
    signature = signature_of(kernel, SPEC.arguments, pairs.dtype, pairs.ACC, dtypes, mask=mask, given=given)
    return Source(kernel, signature, tiles.threads, tiles.blocks, pairs.shared.nbytes)


# As those of `point_sums`. Pairs in 1e12 a second on an H100, 100,000 points each
TILES = {
    (True, True, 2): {12: PointTiles("fma", 128, 256, 128, lanes=4, chunks=16, blocks=4)},
    (True, True, 4): {12: PointTiles("fma", 128, 256, 128, lanes=4, chunks=16, blocks=4)},  # d 3: k 10 1.73, 32 .58
    (True, True, 8): {12: PointTiles("fma", 64, 128, 64, lanes=4, chunks=8, blocks=4)},
    (False, True, 2): {
        128: PointTiles("mma", 128, 64, 128, blocks=2),  # d 128: k 10 .38
        256: PointTiles("mma", 64, 64, 128, blocks=2),
    },
    (False, True, 4): {
        128: PointTiles("mma", 128, 32, 128, blocks=2),  # d 64: k 10 .29
        256: PointTiles("mma", 64, 32, 128),
    },
    (False, True, 8): {128: PointTiles("mma", 64, 32, 128), 256: PointTiles("mma", 32, 16, 64)},
}
TILES_OF_ONE = TILES | {  # for k = 1, which takes few registers
    (True, True, 4): {12: PointTiles("fma", 128, 256, 128, lanes=4, chunks=8, blocks=4)},  # d 3: 3.13
    (False, True, 4): {
        64: PointTiles("mma", 128, 128, 256),       # .43
        128: PointTiles("mma", 128, 64, 256), 256: PointTiles("mma", 64, 32, 128),
    },
}


def takes_one(work):
    """Whether only the nearest point is wanted."""
    return work.kind == Nearest(1)


SPEC = Spec(
    point_nearest,
    (Matrix("q"), Matrix("k", "k"), MatrixOfCall("r2"), MatrixOfCall("j"), *APART, VECTORS, MASK, "rate"),
    tiles=lambda work: rows_of(TILES_OF_ONE, work, WITHOUT_VECTORS) if takes_one(work) else rows_of(TILES, work),
    parameters=parameters,
    packs=True,
)

"""|y|^2 of all points y: what products need to give distances. Infinite after the last point, which is never nearest."""

from typing import NamedTuple

import numpy as np

from ...build import Source
from ...tile import (
    Alignment,
    aligned,
    block_index,
    convert,
    load,
    row_index,
    row_sum,
    save,
    shape,
    simt,
    where,
)
from ...words.arguments import Argument, Matrix
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.layouts import DTYPES, sum_type, vector
from ..shared.schedule import overlap_launches, place
from ..tables import rounded

PADDED = 256  # of which the length of the norms is a multiple: no tile of y is longer


class PointTiles(NamedTuple):
    """The tile of a block."""

    tile_n: int
    tile_m: int = 1


TILES = PointTiles(32)
THREADS, LANES = 4 * TILES.tile_n, 8


def squared_norms(*, dtype, head_dim, nbytes):
    """The kernel; nbytes: alignment of the rows."""
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    TILE_N, ROWS_OF, INFINITE = TILES.tile_n, Alignment(nbytes), ACC(np.inf)
    TILE = simt(TILES.tile_n, head_dim, THREADS, LANES, vector(dtype))
    ROWS = TILE.row_vector()

    def kernel(mY, mNorms):
        overlap_launches()
        batches, heads, _ = shape(mNorms)
        tile, batch, head = place(block_index(), batches * heads, heads)
        Y, n0 = mY[batch, head], tile * TILE_N
        seqlen_k, _ = shape(Y)
        points = convert(load(aligned(Y, ROWS_OF), TILE, n0), ACC)
        save(mNorms[batch, head], where(row_index(ROWS, n0) < seqlen_k, row_sum(points * points), INFINITE), n0)

    return Source(kernel, signature_of(kernel, SPEC.arguments, dtype, ACC), THREADS, overlaps=True)


def padded_length(problem):
    return -(-problem.seqlen_k // PADDED) * PADDED


class SquaredNorms(Argument):
    """The temporary for them (batch, heads, padded length)."""

    def find(self, planner, work):
        problem = work.problem
        planner.add_temporary("norms", (*problem.lse_shape[:-1], padded_length(problem)), problem.sum_dtype)

    def flat(self, planner, work):
        yield planner.at("norms", own=1)

    def type(self, about):
        return about.sums_of(3)


NORMS = SquaredNorms()
SPEC = Spec(
    squared_norms,
    (Matrix("k", "k"), NORMS),
    tiles=lambda work: (TILES,),
    parameters=lambda work, tiles: {
        "dtype": work.problem.dtype.name, "head_dim": rounded("head_dim", work.problem.head_dim), "nbytes": work.nbytes,
    },
    blocks=lambda work, tiles, m_blocks, n_blocks: work.problem.heads * padded_length(work.problem) // tiles.tile_n,
)  # fmt: skip

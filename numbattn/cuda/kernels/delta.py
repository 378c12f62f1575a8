"""delta = rowsum(dO * O) - dlse: D of Algorithm 4, line 19, less the gradient of lse."""

from typing import NamedTuple

import numpy as np
from numba.cuda import types

from ..build import Source
from ..spec import Line, Matrix, Spec
from ..tile import Alignment, aligned, block_index, convert, load, row_sum, save, shape, simt, where
from .layouts import DTYPES, array_type, sum_type, vector
from .schedule import place
from .tables import rounded


class Rows(NamedTuple):
    """The tile of a block; there are no keys in it."""

    tile_m: int
    tile_n: int = 1


TILES = Rows(32)
THREADS, LANES = 4 * TILES.tile_m, 8


def delta(*, dtype, head_dim_v, dlse, nbytes):
    """The kernel; dlse says whether lse has a gradient."""
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    TILE_M, ROWS_OF = TILES.tile_m, Alignment(nbytes)
    TILE = simt(TILES.tile_m, head_dim_v, THREADS, LANES, vector(dtype))
    ROWS, NOTHING_SEEN = TILE.row_vector(), ACC(-np.inf)

    def kernel(mDO, mO, mLse, mDlse, mDelta):
        batches, heads, seqlen_q = shape(mLse)
        tile, batch, head = place(block_index(), batches * heads, heads)
        m0 = tile * TILE_M
        dO = convert(load(aligned(mDO[batch, head], ROWS_OF), TILE, m0), ACC)
        O = convert(load(aligned(mO[batch, head], ROWS_OF), TILE, m0), ACC)
        D = row_sum(dO * O)
        if dlse:
            D = D - load(mDlse[batch, head], ROWS, m0)
        lse = load(mLse[batch, head], ROWS, m0)
        save(mDelta[batch, head], where(lse == NOTHING_SEEN, 0, D), m0)

    matrix, line = array_type(dtype, 4), array_type(ACC, 3)
    return Source(kernel, types.void(matrix, matrix, line, line, line), THREADS)


def parameters(work, tiles):
    return {
        "dtype": work.problem.dtype.name, "dlse": "dlse" in work.dtypes, "nbytes": work.nbytes,
        "head_dim_v": rounded("head_dim_v", work.problem.head_dim_v),
    }  # fmt: skip


SPEC = Spec(
    delta,
    (Matrix("do"), Matrix("o"), Line("lse"), Line("dlse"), Line("delta")),
    tiles=lambda work: (TILES,),
    parameters=parameters,
)

"""delta = rowsum(dO * O) - dlse: what the backward pass subtracts from dP (Algorithm 4, line 19)."""

import numpy as np
from numba import cuda
from numba.cuda import types

from ..build import Source
from ..plan import DELTA_ROWS
from ..tile import Alignment, aligned, convert, full, load, row_sum, save, simt, where
from .layouts import DTYPES, array_type, sum_type, vector
from .schedule import place

THREADS, LANES = 4 * DELTA_ROWS, 8


def delta(*, dtype, head_dim_v, dlse, nbytes):
    """The kernel; dlse says whether lse has a gradient."""
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    TILE_M, ROWS_OF = np.int32(DELTA_ROWS), Alignment(nbytes)
    TILE = simt(DELTA_ROWS, head_dim_v, THREADS, LANES, vector(dtype))
    ROWS, ZERO, NOTHING = TILE.row_vector(), ACC(0), ACC(-np.inf)

    def kernel(mDO, mO, mLse, mDlse, mDelta):
        batches, heads, seqlen_q = mLse.shape
        tile, batch, head = place(cuda.blockIdx.x, np.int32(batches * heads), np.int32(heads))
        m0 = np.int32(tile * TILE_M)
        dO = convert(load(aligned(mDO[batch, head], ROWS_OF), TILE, m0), ACC)
        O = convert(load(aligned(mO[batch, head], ROWS_OF), TILE, m0), ACC)
        D = row_sum(dO * O, ZERO)
        if dlse:
            D = D - load(mDlse[batch, head], ROWS, m0)
        lse = load(mLse[batch, head], ROWS, m0)
        save(mDelta[batch, head], where(lse == NOTHING, full(ROWS, ZERO), D), m0)

    matrix, line = array_type(dtype, 4), array_type(ACC, 3)
    return Source(kernel, types.void(matrix, matrix, line, line, line), THREADS)

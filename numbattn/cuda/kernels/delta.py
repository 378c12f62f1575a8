"""delta = rowsum(dO * O) - dlse: D of Algorithm 4, line 19, less the gradient of lse."""

from typing import NamedTuple

import numpy as np
from numba.cuda import types

from ..build import Source
from ..spec import Line, Matrix, Spec, padded_length
from ..tile import (
    Alignment,
    aligned,
    block_index,
    convert,
    device,
    launch_dependents,
    load,
    row_index,
    row_sum,
    save,
    shape,
    simt,
    wait_on_dependencies,
    where,
)
from . import forward_hopper
from .layouts import DTYPES, array_type, sum_type, vector
from .schedule import place
from .softmax import LOG2_E
from .tables import rounded


class Rows(NamedTuple):
    """The tile of a block; there are no keys in it."""

    tile_m: int
    tile_n: int = 1


TILES = Rows(32)
THREADS, LANES = 4 * TILES.tile_m, 8


def delta(*, dtype, head_dim_v, dlse, nbytes, padded=False):
    """The kernel; dlse says whether lse has a gradient.

    padded: for kernels that copy these lines tile by tile; lse in base 2 is then written, too. A query that sees
    nothing, as those beyond the last one do, has lse +inf there: exp(S - lse) is 0.
    """
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    TILE_M, ROWS_OF = TILES.tile_m, Alignment(nbytes)
    TILE = simt(TILES.tile_m, head_dim_v, THREADS, LANES, vector(dtype))
    ROWS, INFINITE, LOG2E = TILE.row_vector(), ACC(np.inf), ACC(LOG2_E)

    @device
    def delta_of(mDO, mO, mLse, mDlse):
        """Where a block's tile is, its lse, delta and which of its queries see something."""
        batches, heads, seqlen_q = shape(mLse)
        tile, batch, head = place(block_index(), batches * heads, heads)
        m0 = tile * TILE_M
        dO = convert(load(aligned(mDO[batch, head], ROWS_OF), TILE, m0), ACC)
        O = convert(load(aligned(mO[batch, head], ROWS_OF), TILE, m0), ACC)
        D = row_sum(dO * O)
        if dlse:
            D = D - load(mDlse[batch, head], ROWS, m0)
        lse = load(mLse[batch, head], ROWS, m0)
        sees = (lse != -INFINITE) & (row_index(ROWS, m0) < seqlen_q)
        return batch, head, m0, lse, where(sees, D, 0), sees

    def kernel(mDO, mO, mLse, mDlse, mDelta):
        batch, head, m0, lse, D, sees = delta_of(mDO, mO, mLse, mDlse)
        save(mDelta[batch, head], D, m0)

    def padded_kernel(mDO, mO, mLse, mDlse, mDelta, mLseLog2):
        launch_dependents()
        wait_on_dependencies()
        batch, head, m0, lse, D, sees = delta_of(mDO, mO, mLse, mDlse)
        save(mDelta[batch, head], D, m0)
        save(mLseLog2[batch, head], where(sees, lse * LOG2E, INFINITE), m0)

    matrix, line = array_type(dtype, 4), array_type(ACC, 3)
    lines = [line] * (4 if padded else 3)
    return Source(
        padded_kernel if padded else kernel, types.void(matrix, matrix, *lines), THREADS, overlaps=padded
    )


def parameters(work, tiles):
    return {
        "dtype": work.problem.dtype.name, "dlse": "dlse" in work.dtypes, "nbytes": work.nbytes,
        "head_dim_v": rounded("head_dim_v", work.problem.head_dim_v),
    }  # fmt: skip


GIVEN = Matrix("do"), Matrix("o"), Line("lse"), Line("dlse")
SPEC = Spec(delta, (*GIVEN, Line("delta")), tiles=lambda work: (TILES,), parameters=parameters)
SPEC_PADDED = Spec(
    delta,
    (*GIVEN, Line("delta", padded=True), Line("lse_log2", padded=True)),
    tiles=lambda work: (TILES,),
    parameters=lambda work, tiles: parameters(work, tiles) | {"padded": True},
    takes=forward_hopper.takes,
    blocks=lambda work, tiles, m_blocks, n_blocks: (
        work.problem.heads * (padded_length(work.problem.seqlen_q) // tiles.tile_m)
    ),
)  # fmt: skip

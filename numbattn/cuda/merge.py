"""Attention over other keys, merged into o and lse where they lie: one pass over memory."""

from functools import cache
from typing import Any

import numpy as np

from .kernel import launch
from .kernels.shared.schedule import split
from .kernels.shared.softmax import LN_2, LOG2_E
from .plan.views import alignment_of
from .tile import (
    Alignment,
    aligned,
    block_index,
    copy_layout,
    exp2,
    load,
    log2,
    maximum,
    save,
    shape,
    sync_threads,
    where,
)

THREADS, ROWS = 128, 16


def merge_into(o: Any, lse: Any, part: Any, part_lse: Any) -> None:
    """As `numbattn.merging.merge_into`. o and lse are contiguous but for their rows; o is finite where lse is -inf."""
    if not part.size:
        return
    nbytes = min(map(alignment_of, (o, part)))
    seqlen_q, features = part.shape[-2:]
    o, part = (x.reshape(-1, seqlen_q, features) for x in (o, part))
    lse, part_lse = (x.reshape(-1, seqlen_q) for x in (lse, part_lse))
    kernel = kernel_of(features, o.dtype, nbytes)
    launch(kernel, (-(-seqlen_q // ROWS) * len(o), 1, 1), THREADS, 0, o, lse, part, part_lse)


@cache
def kernel_of(features, dtype, nbytes):
    """The kernel: a block merges ROWS rows."""
    ACC, vector = dtype.type, 16 // dtype.itemsize
    TILE, ROWS_OF = copy_layout(ROWS, -(-features // vector) * vector, THREADS, vector), Alignment(nbytes)
    VECTOR, INFINITE, LOG2E, LN2 = TILE.row_vector(), ACC(np.inf), ACC(LOG2_E), ACC(LN_2)

    def kernel(mO, mLse, mPart, mPartLse):
        _, seqlen_q, _ = shape(mO)
        number, tile = split(block_index(), (seqlen_q + ROWS - 1) // ROWS)
        row, O = tile * ROWS, aligned(mO[number], ROWS_OF)
        lse, part_lse = load(mLse[number], VECTOR, row), load(mPartLse[number], VECTOR, row)
        highest = maximum(lse, part_lse)
        m = where(highest == -INFINITE, 0, highest)  # finite where both are empty, since (-inf) - (-inf) is NaN
        weight, part_weight = exp2((lse - m) * LOG2E), exp2((part_lse - m) * LOG2E)
        l = weight + part_weight
        o = load(O, TILE, row) * weight + load(aligned(mPart[number], ROWS_OF), TILE, row) * part_weight
        save(O, o * (1 / where(l == 0, 1, l)), row)
        sync_threads()  # all of a row have read its lse
        save(mLse[number], where(highest == INFINITE, highest, m + log2(l) * LN2), row)

    return kernel

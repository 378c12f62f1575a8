"""Alibi and RelativeBias: S plus what the entry of their array adds that follows from j - own key."""

import numpy as np

from ...base.values import rounded
from ...scores.alibi import Alibi
from ...scores.relative import RelativeBias
from ..operands import compact
from ..tile import inline
from .kind import CPUScoreKind, LoweredStep, aligned, matrix_at, matrix_of


def lower(part, problem, order, sums):
    """With the array in the dtype of sums."""
    x = matrix_of(part)
    *lead, _ = compact(x).shape  # a table keeps its columns, whatever memory they share
    x = aligned(rounded(x[tuple(map(slice, lead))], problem.sum_dtype))
    offset = part._whole_offset(problem.seqlen_q, problem.seqlen_k)
    if isinstance(offset, np.ndarray):
        offset = np.broadcast_to(offset, problem.batch).astype(np.int64).tobytes()
    return LoweredStep(x.shape, x.strides, offset), x, None


@inline
def clip(x, low, high):
    return min(max(x, low), high)


def kind_of(part):
    read = inline(part._reading(clip))

    @inline
    def apply(S, slopes, row, batch, head, m0, n0):
        array, reach = matrix_at(row, S.dtype), row.cols // 2
        first = n0 - m0 - row.offset  # the first key, from the own key of the first query
        for j in range(S.shape[0]):
            for i in range(S.shape[1]):
                entry, slope = read(first + j - i, reach)
                S[j, i] += S.dtype.type(slope) * array[0, entry]

    @inline
    def collect(dx, dS, S, row, batch, head, m0, n0):
        first, reach = n0 - m0 - row.offset, row.cols // 2
        for j in range(dS.shape[0]):
            for i in range(dS.shape[1]):
                entry, slope = read(first + j - i, reach)
                dx[0, entry] += slope * dS[j, i]

    return CPUScoreKind(part, lower, apply, collect)


ALIBI, RELATIVE = map(kind_of, (Alibi, RelativeBias))

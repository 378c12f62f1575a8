"""The start of the loop over keys: from nothing, or from O and lse over other keys.

Algorithm 1 of FlashAttention does the latter, too: it loads O, l and m for each tile of keys. So a result that is
computed in parts needs no pass that merges them.
"""

from ...tile import Alignment, aligned, device, exp2, full, load, maximum, minimum
from ...tile.alignment import VECTOR_BYTES
from ...words.numbers import LOG2_E
from .segments import queries_of
from .softmax import LN_2


def resume_step(ACC, no_max):
    """The device function (lse, scale_log2) -> m and l of keys that have this lse, for each row."""
    LN2, LOG2E = ACC(LN_2), ACC(LOG2_E)

    @device
    def m_and_l(lse, scale_log2):
        unit = scale_log2 * LN2                                 # m times this is in natural units
        lowest = no_max(scale_log2)
        m = minimum(maximum(lse / unit, lowest), -lowest)
        return m, exp2((lse - m * unit) * LOG2E)                # l is about 1, or 0 where nothing is seen

    return m_and_l


def start_step(S_TILE, O_TILE, ACC, no_max, resumes):
    """The device function (before, mLse, segment, batch, head, m0, scale_log2, kept_scale) -> O, m and l.

    before: a tuple of the matrices O over other keys, whose lse is in mLse, or of none.
    """
    ROWS, PARTS, VECTORS = S_TILE.row_vector(), S_TILE.row_parts(), Alignment(VECTOR_BYTES)
    ZERO, ONE, SHARE, m_and_l = ACC(0), ACC(1), ACC(1 / PARTS.cols.size), resume_step(ACC, no_max)

    @device
    def start(before, mLse, segment, batch, head, m0, scale_log2, kept_scale):
        return full(O_TILE, ZERO), full(ROWS, no_max(scale_log2)), full(PARTS, ZERO)

    @device
    def resume(before, mLse, segment, batch, head, m0, scale_log2, kept_scale):
        first, end = queries_of(segment)
        O = load(aligned(before[0][batch, head][first:end], VECTORS), O_TILE, m0) * (ONE / kept_scale)
        m, l = m_and_l(load(mLse[batch, head][first:end], ROWS, m0), scale_log2)
        return O, m, full(PARTS, SHARE) * l

    return resume if resumes else start

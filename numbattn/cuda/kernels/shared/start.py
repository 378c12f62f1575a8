"""What the loop over keys starts from: nothing, or O and lse over other keys, as in Algorithm 1 of FlashAttention, which
loads O, l and m for each tile of keys. Attention that is computed part by part needs no pass to merge the parts then.
"""

from ...plan.views import VECTOR_BYTES
from ...tile import Alignment, aligned, device, exp2, full, load, maximum, minimum
from .segments import queries_of
from .softmax import LN_2, LOG2_E


def start_step(S_TILE, O_TILE, ACC, NO_MAX, resumes):
    """The device function (before, mLse, segment, batch, head, m0, scale_log2, kept_scale) -> O, m and l.

    before: a tuple of the matrices O over other keys, whose lse is in mLse, or of none.
    """
    ROWS, PARTS, VECTORS = S_TILE.row_vector(), S_TILE.row_parts(), Alignment(VECTOR_BYTES)
    ZERO, ONE, SHARE, LN2, LOG2E = map(ACC, (0, 1, 1 / PARTS.cols.size, LN_2, LOG2_E))

    @device
    def start(before, mLse, segment, batch, head, m0, scale_log2, kept_scale):
        return full(O_TILE, ZERO), full(ROWS, NO_MAX), full(PARTS, ZERO)

    @device
    def resume(before, mLse, segment, batch, head, m0, scale_log2, kept_scale):
        first, end = queries_of(segment)
        O = load(aligned(before[0][batch, head][first:end], VECTORS), O_TILE, m0) * (ONE / kept_scale)
        lse = load(mLse[batch, head][first:end], ROWS, m0)
        unit = scale_log2 * LN2                                 # m in natural units: it may be too small for lse / unit
        m = minimum(maximum(lse / unit, NO_MAX), -NO_MAX)
        l = exp2((lse - m * unit) * LOG2E)                      # 1, or 0 where nothing is seen, but for rounding
        return O, m, full(PARTS, SHARE) * l

    return resume if resumes else start

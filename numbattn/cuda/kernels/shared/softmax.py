"""The online softmax over one tile of scores, in base 2 (Algorithm 2, lines 12 and 13).

Unlike in the paper m_new comes first: P is taken relative to it at once, and needs no second factor.
"""

import numpy as np

from ...tile import device, exp2, log2, maximum, part_sum, row_max, where
from ...words.numbers import LOG2_E

LN_2 = np.log(2)
SLACK = 1  # bits


def alpha_steps(ACC, exact):
    """Device functions: (m, scale_log2) -> m in base 2, to which P is relative; (m, m_new, scale_log2) -> alpha =
    exp(m - m_new). exact: by m in base 2 as rounded, kept out of fused multiply-adds by a bound, so that rows of P
    sum to l however large scores are: some instructions for each row, not for half precision."""
    EXACT, LOWEST = exact, ACC(np.finfo(ACC).min)

    @device
    def in_log2(m, scale_log2):
        return maximum(m * scale_log2, LOWEST) if EXACT else m * scale_log2

    @device
    def alpha_of(m, m_new, scale_log2):
        return exp2(in_log2(m, scale_log2) - in_log2(m_new, scale_log2) if EXACT else (m - m_new) * scale_log2)

    return in_log2, alpha_of


def softmax_parts(ACC, far=False, exact=False):
    """Device functions: (scale_log2) -> m of rows that have seen no key yet; (S, m, scale_log2, level=None,
    factor=None) -> the new m, alpha, the factor that rescales the sums so far, and the S whose P is 1; (S, that,
    scale_log2, factor=None) -> P.

    far: all scores of a row may be finfo.min, which times log2(e) is -inf: they are subtracted first then, an
    instruction more for each element. exact: see `alpha_steps`.
    """
    in_log2, alpha_of = alpha_steps(ACC, exact and not far)
    LOWEST, ONE, FAR = ACC(np.finfo(ACC).min * (1 if far else 0.99)), ACC(1), far

    @device
    def no_max(scale_log2):
        """Finite, in base 2 too unless far, since (-inf) - (-inf) is NaN; .99 leaves room for a level."""
        return LOWEST if FAR else LOWEST / maximum(scale_log2, ONE)

    @device
    def new_max(S, m, scale_log2, level=None, factor=None):
        """Any m near the maximum will do: it is updated only where it lags by more than SLACK, so that for most tiles
        alpha is 1. P is then at most 2**SLACK, and the largest element of a row, otherwise exactly 1, is rounded like
        the others.

        level: what is added to S, a number or row vector, and factor, what S is multiplied by before that, at no cost
        for each element. m may be tiny compared with the level: where not raised it is not touched, or it would lose
        bits.
        """
        if level is None:
            m_new = row_max(S, m)
        else:
            m_new = maximum((row_max(S) if factor is None else row_max(S) * factor) + level, m)
        m_new = where((m_new - m) * scale_log2 > SLACK, m_new, m)   # Alg. 2 line 13: m_new = max(m, rowmax(S))
        alpha = alpha_of(m, m_new, scale_log2)              # line 13: alpha = exp(m - m_new)
        return m_new, alpha, m_new if level is None else m_new - level

    @device
    def fused(S, zero, scale_log2, factor=None):
        """line 12: P = exp(S - m_new)"""
        return exp2(S * (scale_log2 if factor is None else factor * scale_log2) - in_log2(zero, scale_log2))

    @device
    def subtracted_first(S, zero, scale_log2, factor=None):  # factor is 1: after what may be far S is scaled
        return exp2((S - zero) * scale_log2)

    return no_max, new_max, subtracted_first if far else fused


def softmax_steps(ACC, far=False, exact=False):
    """The first of `softmax_parts`, and both steps in one: (S, m, l, scale_log2, level=None, factor=None) -> P, the new
    m and l, and alpha."""
    no_max, new_max, exponentials = softmax_parts(ACC, far, exact)

    @device
    def softmax_step(S, m, l, scale_log2, level=None, factor=None):
        m, alpha, zero = new_max(S, m, scale_log2, level, factor)
        P = exponentials(S, zero, scale_log2, factor)
        return P, m, part_sum(P, l * alpha), alpha          # line 13: l = alpha l + rowsum(P)

    return no_max, softmax_step


@device
def logsumexp(m, total, ln_2):
    """lse = m + log(l): m, in natural units here, and l of line 16 as one number. -inf for a row that saw nothing."""
    return m + log2(total) * ln_2


def log2_step(ACC):
    """The device function (lse) -> it in base 2, as backward kernels take it: finite where it is."""
    LOG2E, LOWEST = ACC(LOG2_E), ACC(np.finfo(ACC).min)

    @device
    def to_log2(lse):
        lse_log2 = lse * LOG2E
        return where(lse_log2 < LOWEST, LOWEST, lse_log2)       # NaN stays NaN

    return to_log2


def low_step(ACC, far=False):
    """The device function (lse, m, scale_log2, factor) -> low, what rounding took from lse and from it in base 2: with
    P = exp(S - m) factor, exp(S - lse) is exp(low) times as large. far: see `softmax_parts`; m is not rounded then, nor
    is it here, in a fused multiply-add."""
    to_log2, (in_log2, _), LN2 = log2_step(ACC), alpha_steps(ACC, exact=not far), ACC(LN_2)

    @device
    def low_of(lse, m, scale_log2, factor):
        return where(factor > 0, (in_log2(m, scale_log2) - to_log2(lse) - log2(factor)) * LN2, 0)

    return low_of

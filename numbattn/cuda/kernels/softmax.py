"""The online softmax over one tile of scores, in base 2 (Algorithm 2, lines 12 and 13).

Unlike in the paper m_new comes first: P is taken relative to it at once, and needs no second factor.
"""

import numpy as np

from ..tile import device, exp2, log2, maximum, part_sum, row_max, where

LOG2_E, LN_2 = np.log2(np.e), np.log(2)
SLACK = 1  # bits


def no_max(dtype):
    """The maximum of a row that has seen no key yet: finite, since (-inf) - (-inf) is NaN."""
    return dtype(-1e30)


@device
def softmax_step(S, m, l, scale_log2):
    """P, the new m and l, and alpha, the factor that rescales the sums so far.

    Any m near the maximum will do: it is updated only where it lags by more than SLACK, so that for most tiles alpha is
    1. P is then at most 2**SLACK, and the largest element of a row, otherwise exactly 1, is rounded like the others.
    """
    m_new = raised(m, row_max(S, m), scale_log2)
    return relative(S, m_new, m, m_new, l, scale_log2)


@device
def softmax_step_on_level(S, level, m, l, scale_log2):
    """The same of S + level, a row vector. m stays what it is where it is not raised: it may be tiny beside the level,
    and would lose bits if it were counted from there."""
    m_new = raised(m, maximum(row_max(S) + level, m), scale_log2)
    return relative(S, m_new - level, m, m_new, l, scale_log2)


@device
def raised(m, m_new, scale_log2):                           # Alg. 2 line 13: m_new = max(m, rowmax(S))
    return where((m_new - m) * scale_log2 > SLACK, m_new, m)


@device
def relative(S, to, m, m_new, l, scale_log2):
    alpha = exp2((m - m_new) * scale_log2)                  # line 13: alpha = exp(m - m_new)
    P = exp2(S * scale_log2 - to * scale_log2)              # line 12: P = exp(S - m_new)
    return P, m_new, part_sum(P, l * alpha), alpha          # line 13: l = alpha l + rowsum(P)


@device
def logsumexp(m, total, scale_log2, ln_2):
    """lse = m + log(l), natural: m and l of line 16 as one number. -inf for a row that saw nothing."""
    return (m * scale_log2 + log2(total)) * ln_2

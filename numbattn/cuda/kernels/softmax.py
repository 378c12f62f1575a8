"""The online softmax over one tile of scores, in base 2 (Algorithm 1, lines 10 and 11)."""

import numpy as np

from ..tile import device, exp2, log2, part_sum, row_max, where

LOG2_E, LN_2 = np.log2(np.e), np.log(2)
SLACK = 1  # bits


def no_max(sums):
    """The maximum of a row that has seen no key yet: finite, since (-inf) - (-inf) is NaN."""
    return sums(-1e30)


@device
def softmax_step(S, m, l, scale_log2):
    """P, the new m and l, and alpha, by which what was summed so far has to be multiplied.

    Any m serves that is near the maximum: it follows only when it would be left behind by more than SLACK, so that for
    most tiles alpha is 1. P is at most 2**SLACK then, and the largest of a row, which would be 1, is rounded like the
    others.
    """
    m_new = row_max(S, m)                                   # Alg. 1 line 11: m_new = max(m, rowmax(S))
    m_new = where((m_new - m) * scale_log2 > SLACK, m_new, m)
    alpha = exp2((m - m_new) * scale_log2)
    P = exp2(S * scale_log2 - m_new * scale_log2)           # line 10: P = exp(S - m_new)
    return P, m_new, part_sum(P, l * alpha), alpha          # line 11: l = alpha l + rowsum(P)


@device
def logsumexp(m, total, scale_log2, ln_2):
    """lse = m + log(l), natural; -inf of a row that saw nothing."""
    return (m * scale_log2 + log2(total)) * ln_2

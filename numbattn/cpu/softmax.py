"""The online softmax over tiles of keys, and its epilogue: Algorithm 2, lines 12 to 16."""

import numpy as np

from ..functions.compiled.exponentials import exp
from .tile import fill, inline

SUMMED = 32  # keys that are summed before the sum is added to l, so that long rows lose fewer digits


@inline
def softmax_step(S, m, l, alpha, part):
    """Alg. 2 lines 12 and 13: m_new = max(m, rowmax(S)), P = exp(S - m_new), l = alpha l + rowsum(P)."""
    keys, queries = S.shape
    for i in range(queries):
        alpha[i] = m[i]
    for j in range(keys):
        for i in range(queries):
            m[i] = S[j, i] if S[j, i] > m[i] else m[i]
    for i in range(queries):
        alpha[i] = exp(alpha[i] - m[i])
        l[i] *= alpha[i]
    for first in range(0, keys, SUMMED):
        fill(part, 0)
        for j in range(first, min(first + SUMMED, keys)):
            for i in range(queries):
                S[j, i] = exp(S[j, i] - m[i])
                part[i] += S[j, i]
        for i in range(queries):
            l[i] += part[i]


@inline
def rescale(O, alpha):
    for i in range(O.shape[0]):
        for c in range(O.shape[1]):
            O[i, c] *= alpha[i]


@inline
def multiply(S, Z):
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            S[j, i] *= Z[j, i]


@inline
def absorb(O, m, l, O_next, m_next, l_next):
    """Merge the next keys into O, m and l."""
    for r in range(m.size):
        if l_next[r] != 0:
            m_new = max(m[r], m_next[r])
            alpha, beta = exp(m[r] - m_new), exp(m_next[r] - m_new)
            m[r], l[r] = m_new, alpha * l[r] + beta * l_next[r]
            for c in range(O.shape[1]):
                O[r, c] = alpha * O[r, c] + beta * O_next[r, c]


@inline
def add_sink(O, m, l, alpha, logit):
    """A softmax step for one more logit, which has no value."""
    for i in range(m.size):
        m_new = max(m[i], logit)
        alpha[i] = exp(m[i] - m_new)
        if l[i] != 0:
            l[i] = l[i] * alpha[i] + exp(logit - m_new)
        m[i] = m_new
    rescale(O, alpha)


@inline
def save_lse(lse, low, m, l):
    """Alg. 2 line 16: lse = m + log(l), and what its rounding took, low; -inf and 0 for a row that saw nothing. Both
    may be empty."""
    for i in range(lse.size):
        log_l = np.log(l[i])
        lse[i] = m[i] + log_l if l[i] != 0 else -np.inf
        rest = (m[i] - lse[i]) + log_l
        low[i] = rest if np.isfinite(rest) else 0


@inline
def normalise(O, l, kept_scale, statistics):
    """Alg. 2 line 15: O = O / l, 0 for a row that saw nothing. kept_scale: for all but the last `statistics` columns.
    """
    weighted = O.shape[1] - statistics
    for i in range(O.shape[0]):
        factor = O.dtype.type(kept_scale / l[i] if l[i] != 0 else 0.0)
        for c in range(weighted):
            O[i, c] *= factor
        if statistics:
            inverse = O.dtype.type(1 / l[i] if l[i] != 0 else 0.0)
            for c in range(weighted, O.shape[1]):
                O[i, c] *= inverse

"""Alibi: S - slope |j - own key|."""

from ...scores.alibi import Alibi
from ..tile import inline
from .kind import CPUScoreKind, lower_distance, matrix_at


def lower(part, problem, order):
    return lower_distance(part, problem)


@inline
def apply(S, slopes, row, batch, head, m0, n0):
    slope, first = matrix_at(row, S.dtype), m0 + row.offset - n0  # the own key of the first query, from the first key
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            S[j, i] -= slope[0, 0] * S.dtype.type(abs(first + i - j))


@inline
def collect(dx, dS, row, batch, head, m0, n0):
    first = n0 - m0 - row.offset
    for j in range(dS.shape[0]):
        for i in range(dS.shape[1]):
            dx[0, 0] -= abs(first + j - i) * dS[j, i]


KIND = CPUScoreKind(Alibi, lower, apply, collect)

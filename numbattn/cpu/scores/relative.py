"""RelativeBias: S + table[entry of j - own key], clipped at both ends."""

from ...scores.relative import RelativeBias
from ..tile import inline
from .kind import CPUScoreKind, lower_distance, matrix_at


def lower(part, problem, order):
    return lower_distance(part, problem, (part._reach, 0))


@inline
def apply(S, slopes, row, batch, head, m0, n0):
    table, reach = matrix_at(row, S.dtype), row.one
    first = n0 - m0 - row.offset  # the first key, from the own key of the first query
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            S[j, i] += table[0, min(max(first + j - i, -reach), reach) + reach]


@inline
def collect(dx, dS, row, batch, head, m0, n0):
    first, reach = n0 - m0 - row.offset, row.one
    for j in range(dS.shape[0]):
        for i in range(dS.shape[1]):
            dx[0, min(max(first + j - i, -reach), reach) + reach] += dS[j, i]


KIND = CPUScoreKind(RelativeBias, lower, apply, collect)

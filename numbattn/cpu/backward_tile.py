"""A tile of the backward pass: Algorithm 4, lines 10 to 20, for `backward` and along directions."""

from typing import Any, NamedTuple

import numpy as np

from ..functions.compiled.exponentials import exp
from .bfloat16 import NO_PAIRS, load_transpose, matmul, matmul_tn, matrix_in, scores, transpose_in
from .operands import HALVES, MATRIX, ROWS, Operands
from .product import row_dots
from .score import score
from .score_gradients import pull_back, sums_along
from .tile import draw, fill, hide, inline, keys_seen, tile, tile_state

ARRAYS, ARRAYS_IN_PAIRS = (
    Operands(q=kind, k=kind, v=kind, do=kind, o=kind, lse=ROWS, lse_low=ROWS, dlse=ROWS) for kind in (MATRIX, HALVES)
)  # of BackwardGiven


class BackwardGiven(NamedTuple):
    """The inputs of a call, in the order of its Records."""

    q: Any
    k: Any
    v: Any
    do: Any
    o: Any
    lse: Any
    lse_low: Any  # or nothing
    dlse: Any  # or nothing
    mask: Any
    steps: Any
    drops: Any
    scale: Any
    kept_scale: Any


class BackwardWork(NamedTuple):
    """Blocks, each every chunks-th tile of keys of some (batch, key head) pairs, and what they add to."""

    tiles: Any  # WorkTiles.table
    starts: Any  # WorkTiles.starts
    pairs: Any  # Shares.order
    shares: Any  # Shares.starts
    chunks: Any
    sums: Any
    dq: Any  # (directions, parts, batch, heads, queries, features)
    dk: Any  # (directions, batch, heads, keys, features)
    dv: Any


class BackwardQueries(NamedTuple):
    """A tile of queries [m0, m_end) of a head, which sees the keys [first, end)."""

    batch: Any
    head: Any
    m0: Any
    m_end: Any
    segment: Any  # its first key
    offset: Any  # of the segment
    first: Any
    end: Any
    band: Any
    intervals: Any
    QT: Any
    dOT: Any
    lse: Any
    low: Any
    D: Any
    pairs: Any  # of the kernel


class BackwardKeys(NamedTuple):
    """Keys [n0, n_end) of a tile of queries."""

    n0: Any
    n_end: Any
    head_k: Any
    chunk: Any  # of the block
    part: Any  # of dq
    state: Any  # EMPTY, PARTIAL or FULL
    K: Any
    V: Any


def arrays_of(pairs):
    """The Operands of a call."""
    return ARRAYS if pairs is NO_PAIRS else ARRAYS_IN_PAIRS


@inline
def queries_of(scratch, given, row, pairs):
    """The BackwardQueries in a row of WorkTiles.table, not loaded yet."""
    batch, head, m0, m_end, segment, segment_end, offset = row
    band, intervals, first, end = keys_seen(given.mask, batch, head, m0, m_end, segment, segment_end)
    m_end = max(min(m_end, band[2]), m0)
    QT = transpose_in(scratch.QT, given.q.cols, m_end - m0, pairs)
    dOT = transpose_in(scratch.dOT, given.do.cols, m_end - m0, pairs)
    vectors = tile(scratch.vectors, 3, m_end - m0)
    lse, low, D = vectors[0], vectors[1], vectors[2]
    return BackwardQueries(
        batch, head, m0, m_end, segment, offset, first, end, band, intervals, QT, dOT, lse, low, D, pairs
    )


@inline
def load_queries(at, given, scratch):
    """Q and dO, transposed, lse, low and D. A query that sees nothing has lse = inf here: P = 0."""
    dtype = given.lse.dtype
    Q = matrix_in(given.q, at.batch, at.head, at.m0, at.m_end, dtype, at.pairs)
    dO = matrix_in(given.do, at.batch, at.head, at.m0, at.m_end, dtype, at.pairs)
    O = matrix_in(given.o, at.batch, at.head, at.m0, at.m_end, dtype, at.pairs)
    load_transpose(at.QT, Q, dtype.type(given.scale), scratch, at.pairs)
    load_transpose(at.dOT, dO, dtype.type(given.kept_scale), scratch, at.pairs)
    row_dots(at.D, dO, O)                                                   # line 19: delta = rowsum(dO * O)
    if given.dlse.size:
        dlse = given.dlse[at.batch, at.head, at.m0 : at.m_end]
        for i in range(at.D.size):
            at.D[i] -= dlse[i]                                              # the gradient of lse
    lse = given.lse[at.batch, at.head, at.m0 : at.m_end]
    for i in range(at.D.size):
        at.D[i] = at.D[i] if lse[i] != -np.inf else dtype.type(0)
        at.lse[i] = lse[i] if lse[i] != -np.inf else dtype.type(np.inf)
    fill(at.low, 0)
    if given.lse_low.size:
        low = given.lse_low[at.batch, at.head, at.m0 : at.m_end]
        for i in range(at.D.size):
            at.low[i] = low[i]


@inline
def keys_of(n0, n_end, head_k, chunk, part, at, given):
    """The BackwardKeys [n0, n_end)."""
    state = tile_state(given.mask, at.intervals, at.batch, at.head, at.m0, at.m_end, n0, n_end)
    K = matrix_in(given.k, at.batch, at.head, n0, n_end, at.D.dtype, at.pairs)
    V = matrix_in(given.v, at.batch, at.head, n0, n_end, at.D.dtype, at.pairs)
    return BackwardKeys(n0, n_end, head_k, chunk, part, state, K, V)


@inline
def add_tile(keys, at, scratch, given, work):
    """Add the terms of a tile to the gradients."""
    batch, head, n0, n_end, dtype = at.batch, at.head, keys.n0, keys.n_end, at.D.dtype
    scale, kept_scale = dtype.type(given.scale), dtype.type(given.kept_scale)
    P, dP = tile(scratch.S, n_end - n0, at.m_end - at.m0), tile(scratch.dP, n_end - n0, at.m_end - at.m0)
    recompute(P, keys, scratch, given, at)
    scores(dP, keys.V, at.dOT, kept_scale, scratch, at.pairs)               # line 17: dP = dO V^T, transposed
    if given.drops.threshold > 0:
        Z = tile(scratch.Z, n_end - n0, at.m_end - at.m0)
        draw(Z, scratch.words, given.drops, batch, head, at.m0, n0)         # line 14
        drop_and_differentiate(P, dP, Z, at.D)                              # lines 15, 18 and 20
    else:
        differentiate(P, dP, at.D)                                          # line 20
    Q = matrix_in(given.q, batch, head, at.m0, at.m_end, dtype, at.pairs)
    dO = matrix_in(given.do, batch, head, at.m0, at.m_end, dtype, at.pairs)
    dQ = work.dq[0, keys.part, batch, head, at.m0 : at.m_end]
    dK, dV = work.dk[0, batch, keys.head_k, n0:n_end], work.dv[0, batch, keys.head_k, n0:n_end]
    matmul(dV, P, dO, kept_scale, scratch, at.pairs)                        # line 16: dV += (P Z)^T dO
    pull_back(dP, given.steps, scratch.slopes, sums_along(work.sums, 0), batch, head, keys.chunk, at.m0, n0, at.offset)
    matmul(dK, dP, Q, scale, scratch, at.pairs)                             # line 22: dK += scale dS^T Q
    matmul_tn(dQ, dP, keys.K, scale, scratch, at.pairs)                     # line 21: dQ += scale dS K


@inline
def recompute(S, keys, scratch, given, at):
    """P of a tile, in S."""
    scores(S, keys.K, at.QT, S.dtype.type(given.scale), scratch, at.pairs)  # line 11: S = scale Q K^T, transposed
    score(S, given.steps, scratch.slopes, at.batch, at.head, at.m0, keys.n0, at.offset)
    hide(S, given.mask, at, keys.n0, keys.state)                            # line 12: MASK(S)
    exponentiate(S, at.lse, at.low)                                         # line 13: P = exp(S - lse)


@inline
def exponentiate(S, lse, low):
    """Alg. 4 line 13: P = exp(S - lse), in place of S. It is at most 1, even where lse has too few digits and no low
    part."""
    zero = S.dtype.type(0)
    if is_large(low):
        for j in range(S.shape[0]):
            for i in range(S.shape[1]):
                x = (S[j, i] - lse[i]) - low[i]                             # the first difference is exact
                S[j, i] = exp(zero if x > zero else x)
        return
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            x = S[j, i] - lse[i]
            S[j, i] = exp(zero if x > zero else x)


@inline
def is_large(low):
    """Whether it matters: one more difference takes up to 5 % of the time."""
    largest = low.dtype.type(0)
    for i in range(low.size):
        largest = max(largest, abs(low[i]))
    return largest > 4 * np.finfo(low.dtype).eps


@inline
def differentiate(P, dP, D):
    """Alg. 4 line 20: dS = P (dP - D), in place of dP."""
    for j in range(P.shape[0]):
        for i in range(P.shape[1]):
            dP[j, i] = P[j, i] * (dP[j, i] - D[i])


@inline
def drop_and_differentiate(P, dP, Z, D):
    """Alg. 4 lines 15, 18 and 20: dS = P (dP Z - D), in place of dP; P Z, in place of P."""
    for j in range(P.shape[0]):
        for i in range(P.shape[1]):
            dP[j, i] = P[j, i] * (dP[j, i] * Z[j, i] - D[i])
            P[j, i] *= Z[j, i]

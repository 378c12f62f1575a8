"""What the rows of S say on the CPU: their maxima, entropies of P and lse, in one pass without P V."""

from functools import lru_cache

import numpy as np

from ..functions.compiled.exponentials import exp
from .arguments import record_of_tiles
from .compile import Kernel
from .forward import EXPONENTIAL, Queries
from .launch import launch
from .operands import ForwardGiven, operands_of, record_of
from .product import product
from .record import Record
from .score import options_of, score, sinks_of
from .scratch import TILE_M, TILE_N, Lent, scratch_of
from .softmax import SUMMED, save_lse
from .tile import (
    EMPTY,
    address_of,
    contiguous_view,
    fill,
    hide,
    inline,
    inline_view,
    is_set,
    keys_seen,
    matrix,
    rows_of,
    tile,
    tile_state,
)
from .transposition import transpose

VECTORS, LEAST = 4, -1e30  # of a number a query; what -inf counts as where its exponential is 0


def statistics(problem, inputs, given, tangents=None):
    """row_max, entropy, lse and its low part, by name."""
    rows = np.empty((4, *problem.lse_shape), problem.sum_dtype)
    tiles, of_tiles = record_of_tiles(problem, inputs.mask, TILE_M)
    lent = Lent()
    arrays, options, scratch, nbytes, cost = call_of(problem, inputs, lent.new)
    own = Record(rows[:2].reshape(2, *problem.matrices, problem.seqlen_q))
    o = np.empty(problem.out_shape, problem.sum_dtype)
    call = statistics_kernel.given(scratch, *options, sinks_of(problem, inputs.score), own, of_tiles)
    launch(call, len(tiles.table), tiles.pairs * cost, nbytes, (*arrays, o, rows[2:]))
    lent.give_back()
    return dict(zip(("row_max", "entropy", "lse", "lse_low"), rows))


def call_of(problem, inputs, new, saves=True):
    """The arrays of q, k and v, the Records of ForwardGiven but for sinks, the scratch and its bytes, and the cost of a
    pair."""
    arrays, layouts = operands_of(problem, inputs, new)
    scratch, nbytes = scratch_for(problem)
    options = record_of(problem, layouts, saves), *options_of(problem, inputs)
    return arrays, options, scratch, nbytes, problem.head_dim + EXPONENTIAL


@lru_cache(maxsize=64)
def scratch_for(problem):
    """The scratch of a call."""
    return scratch_of(problem, S=1, QT=1, wide=1, vectors=VECTORS + 4)


@inline_view
def wide_vectors(buffer, count):
    """Two vectors of float64 after those of the dtype of sums."""
    return contiguous_view(address_of(buffer[VECTORS * count :]), 2, count, count, np.float64)


@inline
def scores_of(S, at, given, scratch, n0, n_end, state):
    """S of a tile of keys, transposed, after scale, scores and mask."""
    K = rows_of(given.k, at.batch, at.head, n0, n_end, scratch.wide, S.dtype)
    product(S, K, at.QT, S.dtype.type(1), False)                    # Alg. 2 line 10: S = scale Q K^T
    score(S, given.steps, scratch.slopes, at.batch, at.head, at.m0, n0, at.offset)
    hide(S, given.mask, at, n0, state)                              # line 11: MASK(S)


@inline
def queries_of(row, given, scratch):
    """The Queries in a row of WorkTiles.table, scaled, and the keys that they see."""
    batch, head, m0, m_end, segment, segment_end, offset = row
    QT = tile(scratch.QT, given.q.cols, m_end - m0)
    Q = matrix(given.q, batch, head, QT.dtype)[m0:m_end]
    transpose(QT, Q, QT.dtype.type(given.scale), False)
    band, intervals, first, end = keys_seen(given.mask, batch, head, m0, m_end, segment, segment_end)
    vectors = tile(scratch.vectors, VECTORS, m_end - m0)
    return Queries(batch, head, m0, m_end, offset, band, intervals, QT, vectors[2], vectors[3], None), first, end


@Kernel
def statistics_kernel(first_block, end_block, stop, scratch, given: ForwardGiven, rows, tiles):
    """Blocks [first_block, end_block); a block is a tile of queries of one (batch, head)."""
    dtype, sinks = given.lse.dtype, given.sinks
    for block in range(first_block, end_block):
        at, first, end = queries_of(tiles[block], given, scratch)
        batch, head, m0, m_end = at.batch, at.head, at.m0, at.m_end
        vectors, wide = tile(scratch.vectors, VECTORS, m_end - m0), wide_vectors(scratch.vectors, m_end - m0)
        m, before, l, t = vectors[0], vectors[1], wide[0], wide[1]
        fill(m, np.finfo(dtype).min)                                # finite, since (-inf) - (-inf) is NaN
        fill(l, 0)
        fill(t, 0)
        for n0 in range(first, end, TILE_N):
            n_end = min(n0 + TILE_N, end)
            state = tile_state(given.mask, at.intervals, batch, head, m0, m_end, n0, n_end)
            if state == EMPTY:
                continue
            if is_set(stop):
                return
            S = tile(scratch.S, n_end - n0, m_end - m0)
            scores_of(S, at, given, scratch, n0, n_end, state)
            entropy_step(S, m, before, l, t, at.alpha, at.part)
        row_max, entropy = rows[0, batch, head, m0:m_end], rows[1, batch, head, m0:m_end]
        for i in range(m.size):
            row_max[i] = m[i] if l[i] != 0 else -np.inf
            if sinks.size and l[i] != 0:
                add_logit(m, l, t, i, sinks[batch, head])
            entropy[i] = np.log(l[i]) - t[i] / l[i] if l[i] != 0 else 0
        save_lse(given.lse[0, batch, head, m0:m_end], given.lse[1, batch, head, m0:m_end], m, l)


@inline
def entropy_step(S, m, before, l, t, part, part_t):
    """A step of the online softmax, Alg. 2 lines 12 and 13, with t = sum of exp(S - m) (S - m) beside l."""
    keys, queries = S.shape
    for i in range(queries):
        before[i] = m[i]
    for j in range(keys):
        for i in range(queries):
            m[i] = S[j, i] if S[j, i] > m[i] else m[i]
    for i in range(queries):
        change = before[i] - m[i]
        alpha = exp(change)
        t[i] = alpha * (t[i] + l[i] * change)
        l[i] *= alpha
    least = S.dtype.type(LEAST)
    for first in range(0, keys, SUMMED):
        fill(part, 0)
        fill(part_t, 0)
        for j in range(first, min(first + SUMMED, keys)):
            for i in range(queries):
                x = S[j, i] - m[i]
                p = exp(x)
                part[i] += p
                part_t[i] += p * (least if x < least else x)
        for i in range(queries):
            l[i] += part[i]
            t[i] += part_t[i]


@inline
def add_logit(m, l, t, i, logit):
    """A step for the logit of a sink."""
    largest = max(m[i], logit)
    change, own = m[i] - largest, logit - largest
    p = exp(own)
    t[i] = exp(change) * (t[i] + l[i] * change) + (p * own if p != 0 else p)
    l[i] = exp(change) * l[i] + p
    m[i] = largest

"""Attention forward on the CPU: Algorithm 2, and 5 where the mask has blocks (lines 10 to 16 are the same in both).

O is divided by l once, in the epilogue.
"""

import numpy as np

from ..problem import Saved
from .arguments import drops_of, matrices_of, readable, scratch_of, sight_of, tiles_of
from .compile import kernel
from .launch import launch
from .product import product, product_tn
from .score import score, sinks_of, steps_of
from .tile import (
    EMPTY,
    PARTIAL,
    band_of,
    clear,
    draw,
    exp,
    fill,
    inline,
    intervals_of,
    is_set,
    keys_in_sight,
    mask_band,
    mask_cells,
    mask_intervals,
    matrix,
    tile,
    tile_state,
    transpose,
)

TILE_M, TILE_N = 128, 128  # queries, keys: of 64 to 256 the fastest, forward and backward, causal or not
SUMMED = 32  # keys that are summed before they are added to l: a long row loses fewer digits
EXPONENTIAL = 32  # the cost of one, in multiplications


def forward(problem, inputs, out=None, save=True):
    """o, in `out` if given, and what the backward pass needs, if it is to be saved."""
    q, k, v = (readable(x, problem.sum_dtype) for x in (inputs.q, inputs.k, inputs.v))
    o = np.empty((*problem.matrices, problem.seqlen_q, problem.head_dim_v), problem.sum_dtype)
    lse = np.empty((*problem.matrices, problem.seqlen_q), problem.sum_dtype)
    tiles = tiles_of(problem, inputs.mask, TILE_M)
    sight, alive = sight_of(problem, inputs.mask)
    steps, also_alive = steps_of(problem, inputs.score)
    drops, kept_scale = drops_of(inputs.dropout)
    launch(
        forward_kernel,
        len(tiles.table),
        tiles.pairs * (problem.head_dim + problem.head_dim_v + EXPONENTIAL),
        scratch_of(problem, TILE_M, TILE_N),
        *(matrices_of(x, problem) for x in (q, k, v)),
        o, lse, tiles.table, sight, steps, sinks_of(problem, inputs.score), drops,
        inputs.scale, kept_scale,
    )  # fmt: skip
    o, lse = o.reshape(problem.out_shape), lse.reshape(problem.lse_shape)
    if out is None:
        out = o.astype(problem.dtype, copy=False)
    else:
        out[...] = o
    return out, Saved(problem, inputs, out, lse) if save else None


@kernel
def forward_kernel(
    first_block, end_block, stop, scratch, q, k, v, o, lse, tiles, sight, steps, sinks, drops, scale, kept_scale
):
    """Blocks [first_block, end_block); a block is a tile of queries of one (batch, head)."""
    _, heads, _ = lse.shape
    dtype, one = lse.dtype, lse.dtype.type(1)
    for block in range(first_block, end_block):
        batch, head, m0, m_end, segment, segment_end, offset = tiles[block]
        K, V, O = matrix(k, batch, head, dtype), matrix(v, batch, head, dtype), o[batch, head, m0:m_end]
        QT = tile(scratch.QT, q.cols, m_end - m0)
        transpose(QT, matrix(q, batch, head, dtype)[m0:m_end], dtype.type(scale))
        vectors = tile(scratch.vectors, 4, m_end - m0)
        m, l, alpha, part = vectors[0], vectors[1], vectors[2], vectors[3]
        fill(m, np.finfo(dtype).min)                                        # finite, since (-inf) - (-inf) is NaN
        fill(l, 0)
        clear(O)
        band, intervals = band_of(sight, batch, head), intervals_of(sight, batch, head)
        first, end = keys_in_sight(band, intervals, m0, m_end, segment, segment_end)
        for n0 in range(first - (first - segment) % TILE_N, end, TILE_N):
            n_end = min(n0 + TILE_N, end)
            state = tile_state(sight, intervals, batch, head, m0, m_end, n0, n_end)
            if state == EMPTY:
                continue                                                    # Alg. 5 line 8
            if is_set(stop):
                return
            S = tile(scratch.S, n_end - n0, m_end - m0)
            product(S, K[n0:n_end], QT, one, False)                         # Alg. 2 line 10: S = scale Q K^T
            score(S, steps, scratch.slopes, batch, head, m0, n0, offset)
            mask_band(S, band, m0, n0)                                      # line 11: MASK(S)
            mask_intervals(S, intervals, m0, n0)
            if state == PARTIAL:
                mask_cells(S, sight, batch, head, m0, n0)
            softmax_step(S, m, l, alpha, part)                              # lines 12 and 13: S becomes P
            rescale(O, alpha)                                               # line 15: O = alpha O
            if drops.threshold > 0:
                Z = tile(scratch.Z, n_end - n0, m_end - m0)
                draw(Z, scratch.words, drops, batch * heads + head, m0, n0)
                multiply(S, Z)                                              # line 14: dropout(P)
            product_tn(O, S, V[n0:n_end], one, True)                        # line 15: O = O + P V
        if sinks.size:
            add_sink(m, l, alpha, sinks[batch, head])
            rescale(O, alpha)
        epilogue(O, lse[batch, head, m0:m_end], m, l, kept_scale)


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
def add_sink(m, l, alpha, logit):
    """A softmax step for one more logit."""
    for i in range(m.size):
        m_new = max(m[i], logit)
        alpha[i] = exp(m[i] - m_new)
        if l[i] != 0:
            l[i] = l[i] * alpha[i] + exp(logit - m_new)
        m[i] = m_new


@inline
def epilogue(O, lse, m, l, kept_scale):
    """Alg. 2 lines 15 and 16: O = O / l, lse = m + log(l); 0 and -inf for a row that saw nothing."""
    for i in range(O.shape[0]):
        lse[i] = m[i] + np.log(l[i]) if l[i] != 0 else -np.inf
        factor = kept_scale / l[i] if l[i] != 0 else 0.0
        for c in range(O.shape[1]):
            O[i, c] *= factor

"""Attention forward on the CPU: Algorithms 1 and 2, and 5 where the mask has blocks."""

import math

import numpy as np

from ..problem import Saved
from .arguments import drops_of, heads_of, readable, scratch_of, sight_of
from .compile import kernel
from .launch import launch
from .product import product, product_tn
from .tile import (
    EMPTY,
    PARTIAL,
    band_of,
    clear,
    draw,
    exp2,
    fill,
    hide_cells,
    hide_outside,
    inline,
    is_set,
    keys_in_sight,
    matrix,
    state,
    tile,
    transpose,
)

TILE_M, TILE_N = 128, 128  # queries, keys: of 64 to 256 the fastest, forward and backward, causal or not
SUMMED = 32  # so many keys are summed before they are added to l: a long row loses fewer digits
LOWEST = float(np.finfo(np.float32).min)
EXPONENTIAL = 32  # takes as long as so many multiplications


def forward(problem, inputs, out=None, save=True):
    """o, in `out` if given, and what the backward pass needs, whether it is to be saved or not."""
    q, k, v = (readable(x, problem.sum_dtype) for x in (inputs.q, inputs.k, inputs.v))
    o = np.empty((*problem.matrices, problem.seqlen_q, problem.head_dim_v), problem.sum_dtype)
    lse = np.empty((*problem.matrices, problem.seqlen_q), problem.sum_dtype)
    sight, alive = sight_of(problem, inputs.mask)
    drops, kept_scale = drops_of(inputs.dropout)
    launch(
        forward_kernel,
        math.prod(problem.matrices) * -(-problem.seqlen_q // TILE_M),
        lse.size * problem.seqlen_k * (problem.head_dim + problem.head_dim_v + EXPONENTIAL),
        scratch_of(problem, TILE_M, TILE_N),
        *(heads_of(x, problem) for x in (q, k, v)), o, lse, sight, drops, inputs.scale * math.log2(math.e), kept_scale,
    )  # fmt: skip
    o, lse = o.reshape(problem.out_shape), lse.reshape(problem.lse_shape)
    if out is None:
        out = o.astype(problem.dtype, copy=False)
    else:
        out[...] = o
    return out, Saved(problem, inputs, out, lse)


@kernel
def forward_kernel(first, last, stop, scratch, q, k, v, o, lse, sight, drops, scale_log2, kept_scale):
    """Blocks first to last; a block is a tile of queries of one (batch, head)."""
    batches, heads, seqlen_q = lse.shape
    m_blocks = (seqlen_q + TILE_M - 1) // TILE_M
    dtype, one = lse.dtype, lse.dtype.type(1)
    for block in range(first, last):
        b, h, m0 = block // m_blocks // heads, block // m_blocks % heads, block % m_blocks * TILE_M
        m0 = (m_blocks - 1) * TILE_M - m0                                   # the heaviest tiles of a causal mask first
        m_end = min(m0 + TILE_M, seqlen_q)
        K, V, O = matrix(k, b, h, dtype), matrix(v, b, h, dtype), o[b, h, m0:m_end]
        QT = tile(scratch.queries, q.cols, m_end - m0)
        transpose(QT, matrix(q, b, h, dtype)[m0:m_end], dtype.type(scale_log2))
        rows = tile(scratch.rows, 4, m_end - m0)
        m, l, alpha, part = rows[0], rows[1], rows[2], rows[3]
        fill(m, LOWEST)                                                     # finite: a row may see no key of a tile
        fill(l, 0)
        clear(O)
        band = band_of(sight, b, h)
        n_first, n_end = keys_in_sight(band, m0, m_end)
        for n0 in range(n_first // TILE_N * TILE_N, n_end, TILE_N):
            n1 = min(n0 + TILE_N, n_end)
            seen = state(sight, b, h, m0, m_end, n0, n1)
            if seen == EMPTY:
                continue                                                    # Alg. 5 line 8
            if is_set(stop):
                return
            S = tile(scratch.scores, n1 - n0, m_end - m0)
            product(S, K[n0:n1], QT, one, False)                            # Alg. 1 line 9: S = scale Q K^T, transposed
            hide_outside(S, band, m0, n0)                                   # Alg. 2 line 11: MASK(S)
            if seen == PARTIAL:
                hide_cells(S, sight, b, h, m0, n0)
            softmax_step(S, m, l, alpha, part)                              # lines 10 and 11: S becomes P
            rescale(O, alpha)
            if drops.threshold > 0:
                Z = tile(scratch.kept, n1 - n0, m_end - m0)
                draw(Z, scratch.words, drops, b * heads + h, m0, n0)
                multiply(S, Z)                                              # Alg. 2 line 14: dropout(P)
            product_tn(O, S, V[n0:n1], one, True)                           # Alg. 1 line 12: O = alpha O + P V
        finish(O, lse[b, h, m0:m_end], m, l, kept_scale)


@inline
def softmax_step(S, m, l, alpha, part):
    """Alg. 1 lines 10 and 11 in base 2: m_new = max(m, rowmax(S)), P = 2^(S - m_new), l = alpha l + rowsum(P)."""
    keys, queries = S.shape
    for i in range(queries):
        alpha[i] = m[i]
    for j in range(keys):
        for i in range(queries):
            m[i] = S[j, i] if S[j, i] > m[i] else m[i]
    for i in range(queries):
        alpha[i] = exp2(alpha[i] - m[i])
        l[i] *= alpha[i]
    for first in range(0, keys, SUMMED):
        fill(part, 0)
        for j in range(first, min(first + SUMMED, keys)):
            for i in range(queries):
                S[j, i] = exp2(S[j, i] - m[i])
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
def finish(O, lse, m, l, kept_scale):
    """Alg. 1 line 12, the division: O = O / l; lse = m + log(l). A row that saw nothing: 0 and -inf."""
    for i in range(O.shape[0]):
        lse[i] = (m[i] + np.log2(l[i])) * math.log(2) if l[i] != 0 else -np.inf
        factor = kept_scale / l[i] if l[i] != 0 else 0.0
        for c in range(O.shape[1]):
            O[i, c] *= factor

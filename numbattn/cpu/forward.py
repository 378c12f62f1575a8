"""Attention forward on the CPU: Algorithms 1 and 2, and 5 where the mask has blocks."""

import math

import numpy as np

from ..problem import Saved
from .launch import drops_of, heads_of, kernel, launch, readable, visibility_of
from .tile import (
    NONE,
    SOME,
    draw,
    exp2,
    hide_cells,
    hide_outside,
    inline,
    keys_in_sight,
    matrix,
    product_nt,
    product_tn,
    state,
    tile,
)

TILE_M, TILE_N = 128, 128  # queries, keys: of 64 to 256 the fastest, forward and backward, causal or not
SUMMED = 32  # so many keys are summed before they are added to l: a long row loses fewer digits


def forward(problem, inputs, out=None, save=True):
    """o, in `out` if given, and what the backward pass needs, whether it is to be saved or not."""
    q, k, v = (readable(x, problem.sum_dtype) for x in (inputs.q, inputs.k, inputs.v))
    o = np.empty((*problem.matrices, problem.seqlen_q, problem.head_dim_v), problem.sum_dtype)
    lse = np.empty((*problem.matrices, problem.seqlen_q), problem.sum_dtype)
    see, alive = visibility_of(problem, inputs.mask)
    drops, kept_scale = drops_of(inputs.dropout)
    launch(
        forward_kernel(),
        lse.shape[0] * lse.shape[1] * -(-problem.seqlen_q // TILE_M),
        *(heads_of(x, problem) for x in (q, k, v)), o, lse, see, drops,
        inputs.scale * math.log2(math.e), kept_scale,
    )
    o, lse = o.reshape(problem.out_shape), lse.reshape(problem.lse_shape)
    if out is None:
        out = o.astype(problem.dtype, copy=False)
    else:
        out[...] = o
    return out, Saved(problem, inputs, out, lse)


@kernel
def forward_kernel(first, last, q, k, v, o, lse, see, drops, scale_log2, kept_scale):
    """Blocks first to last; a block is a tile of queries of one (batch, head)."""
    batches, heads, seqlen_q = lse.shape
    m_blocks = (seqlen_q + TILE_M - 1) // TILE_M
    rows = np.empty(4 * TILE_M, lse.dtype)
    scores, kept = np.empty(TILE_N * TILE_M, lse.dtype), np.empty(TILE_N * TILE_M, np.uint8)
    for block in range(first, last):
        i0 = (m_blocks - 1 - block % m_blocks) * TILE_M                     # the heaviest tiles of a causal mask first
        i1 = min(i0 + TILE_M, seqlen_q)
        b, h = block // m_blocks // heads, block // m_blocks % heads
        Q, K, V = matrix(q, b, h, lse.dtype), matrix(k, b, h, lse.dtype), matrix(v, b, h, lse.dtype)
        Q, O = Q[i0:i1], o[b, h, i0:i1]
        band, size = see.bands[b, h], i1 - i0
        m, l, alpha, part = rows[:size], rows[size : 2 * size], rows[2 * size : 3 * size], rows[3 * size : 4 * size]
        m[:], l[:], O[:] = -np.finfo(lse.dtype).max, 0, 0                   # finite: a row may see no key of a tile
        n_first, n_end = keys_in_sight(band, i0, i1)
        for j0 in range(n_first // TILE_N * TILE_N, n_end, TILE_N):
            j1 = min(j0 + TILE_N, n_end)
            seen = state(see, b, h, i0, i1, j0, j1)
            if seen == NONE:
                continue                                                    # Alg. 5 line 8
            S = tile(scores, j1 - j0, i1 - i0)
            product_nt(S, K[j0:j1], Q, scale_log2, 0)                       # Alg. 1 line 9: S = scale Q K^T, transposed
            hide_outside(S, band, i0, j0)                                   # Alg. 2 line 11: MASK(S)
            if seen == SOME:
                hide_cells(S, see, b, h, i0, j0)
            softmax_step(S, m, l, alpha, part)                              # lines 10 and 11: S becomes P
            rescale(O, alpha)
            if drops.threshold > 0:
                Z = tile(kept, j1 - j0, i1 - i0)
                draw(Z, drops, b * heads + h, i0, j0)
                multiply(S, Z)                                              # Alg. 2 line 14: dropout(P)
            product_tn(O, S, V[j0:j1], 1, 1)                                # Alg. 1 line 12: O = alpha O + P V
        finish(O, lse[b, h, i0:i1], m, l, kept_scale)


@inline
def softmax_step(S, m, l, alpha, part):
    """Alg. 1 lines 10 and 11 in base 2: m_new = max(m, rowmax(S)), P = 2^(S - m_new), l = alpha l + rowsum(P)."""
    keys, queries = S.shape
    alpha[:] = m
    for j in range(keys):
        for i in range(queries):
            m[i] = S[j, i] if S[j, i] > m[i] else m[i]
    for i in range(queries):
        alpha[i] = exp2(alpha[i] - m[i])
        l[i] *= alpha[i]
    for j0 in range(0, keys, SUMMED):
        part[:] = 0
        for j in range(j0, min(j0 + SUMMED, keys)):
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

"""Attention backward on the CPU: Algorithm 4, key tiles outside, query tiles inside, P computed again from lse."""

import math

import numpy as np

from ..problem import sum_to
from .launch import drops_of, heads_of, kernel, launch, readable, visibility_of
from .tile import (
    NONE,
    SOME,
    draw,
    exp2,
    hide_cells,
    hide_outside,
    inline,
    matrix,
    product,
    product_nt,
    product_tn,
    queries_in_sight,
    state,
    tile,
)

TILE_M, TILE_N = 128, 128
BLOCKS = 16  # at least so many blocks, however few heads: a constant, so that gradients do not depend on the threads


def backward(saved, do, dlse=None, deterministic=True):
    """dq, dk, dv. They are equal bit for bit from call to call, whatever `deterministic`."""
    problem, inputs = saved.problem, saved.inputs
    q, k, v, do = (readable(x, problem.sum_dtype) for x in (inputs.q, inputs.k, inputs.v, do))
    batches, heads = problem.matrices
    lse = saved.lse.reshape(batches, heads, problem.seqlen_q)
    delta = np.einsum("...mc,...mc->...m", do, saved.o.astype(problem.sum_dtype, copy=False))    # Alg. 4 line 19: D
    delta = delta.reshape(lse.shape) - (0 if dlse is None else dlse.reshape(lse.shape))          # lse's own gradient
    n_tiles = -(-problem.seqlen_k // TILE_N)
    chunks = max(1, min(n_tiles, BLOCKS // max(batches * problem.heads_k, 1)))
    dq = np.zeros((chunks, batches, heads, problem.seqlen_q, problem.head_dim), problem.sum_dtype)
    dk = np.zeros((batches, problem.heads_k, problem.seqlen_k, problem.head_dim), problem.sum_dtype)
    dv = np.zeros((batches, problem.heads_k, problem.seqlen_k, problem.head_dim_v), problem.sum_dtype)
    see, alive = visibility_of(problem, inputs.mask)
    drops, kept_scale = drops_of(inputs.dropout)
    launch(
        backward_kernel(),
        batches * problem.heads_k * chunks,
        *(heads_of(x, problem) for x in (q, k, v, do)),
        np.ascontiguousarray(lse), np.ascontiguousarray(delta), dq, dk, dv, see, drops, inputs.scale, kept_scale,
    )
    dq = dq[0] if chunks == 1 else dq.sum(axis=0)
    lead = problem.batch[:-1]
    return tuple(
        sum_to(dx.reshape(*lead, *dx.shape[1:]), x.shape).astype(problem.dtype, copy=False)
        for dx, x in ((dq, inputs.q), (dk, inputs.k), (dv, inputs.v))
    )


@kernel
def backward_kernel(first, last, q, k, v, do, lse, delta, dq, dk, dv, see, drops, scale, kept_scale):
    """Blocks first to last; a block is every chunks-th key tile of one (batch, key head), with its own share of dq."""
    chunks, batches, heads, seqlen_q, _ = dq.shape
    _, heads_k, seqlen_k, _ = dk.shape
    group_size = heads // heads_k
    scale_log2, log2_e = scale * math.log2(math.e), math.log2(math.e)
    scores, grads = np.empty(TILE_N * TILE_M, lse.dtype), np.empty(TILE_N * TILE_M, lse.dtype)
    kept = np.empty(TILE_N * TILE_M, np.uint8)
    lse2, D = np.empty(TILE_M, lse.dtype), np.empty(TILE_M, lse.dtype)
    for block in range(first, last):
        chunk, head_k, b = block % chunks, block // chunks % heads_k, block // chunks // heads_k
        for j0 in range(chunk * TILE_N, seqlen_k, chunks * TILE_N):         # Alg. 4 line 6
            for h in range(head_k * group_size, (head_k + 1) * group_size):
                Q, K, V, dO = (matrix(q, b, h, lse.dtype), matrix(k, b, h, lse.dtype),
                               matrix(v, b, h, lse.dtype), matrix(do, b, h, lse.dtype))
                band = see.bands[b, h]
                j1 = min(j0 + TILE_N, seqlen_k, band[3])
                K, V = K[j0:j1], V[j0:j1]                                   # line 7
                dQ, dK, dV = dq[chunk, b, h], dk[b, head_k, j0:j1], dv[b, head_k, j0:j1]
                m_first, m_end = queries_in_sight(band, j0, j1)
                for i0 in range(m_first // TILE_M * TILE_M, m_end, TILE_M):  # line 9
                    i1 = min(i0 + TILE_M, m_end)
                    seen = state(see, b, h, i0, i1, j0, j1)
                    if seen == NONE:
                        continue
                    keys, queries = j1 - j0, i1 - i0
                    S, dP = tile(scores, keys, queries), tile(grads, keys, queries)
                    for i in range(queries):                                # where lse = -inf no key was seen: P = 0
                        blind = lse[b, h, i0 + i] == -np.inf
                        lse2[i] = np.inf if blind else lse[b, h, i0 + i] * log2_e
                        D[i] = 0 if blind else delta[b, h, i0 + i]
                    product_nt(S, K, Q[i0:i1], scale_log2, 0)               # line 11: S = scale Q K^T, transposed
                    hide_outside(S, band, i0, j0)                           # line 12: MASK(S)
                    if seen == SOME:
                        hide_cells(S, see, b, h, i0, j0)
                    for j in range(keys):                                   # line 13: P = exp(S - lse)
                        for i in range(queries):
                            S[j, i] = exp2(S[j, i] - lse2[i])
                    product_nt(dP, V, dO[i0:i1], kept_scale, 0)             # lines 17, 18: dP = dO V^T Z
                    if drops.threshold > 0:
                        Z = tile(kept, keys, queries)
                        draw(Z, drops, b * heads + h, i0, j0)               # line 14
                        drop_and_differentiate(S, dP, Z, D)
                    else:
                        differentiate(S, dP, D)
                    product(dV, S, dO[i0:i1], kept_scale, 1)                # line 16: dV += (P Z)^T dO
                    product(dK, dP, Q[i0:i1], scale, 1)                     # line 22: dK += scale dS^T Q
                    product_tn(dQ[i0:i1], dP, K, scale, 1)                  # line 21: dQ += scale dS K


@inline
def differentiate(P, dP, D):
    """Line 20: dS = P (dP - D), in place of dP."""
    for j in range(P.shape[0]):
        for i in range(P.shape[1]):
            dP[j, i] = P[j, i] * (dP[j, i] - D[i])


@inline
def drop_and_differentiate(P, dP, Z, D):
    """Lines 15 and 20: dS = P (dP Z - D), in place of dP; P Z in place of P."""
    for j in range(P.shape[0]):
        for i in range(P.shape[1]):
            dP[j, i] = P[j, i] * (dP[j, i] * Z[j, i] - D[i])
            P[j, i] *= Z[j, i]

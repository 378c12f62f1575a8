"""Attention backward on the CPU: Algorithm 4, P recomputed from lse."""

import math

import numpy as np

from ..problem import sum_to
from .arguments import drops_of, matrices_of, readable, scratch_of, sight_of
from .compile import kernel
from .forward import EXPONENTIAL
from .launch import launch
from .product import product, product_tn
from .tile import (
    EMPTY,
    PARTIAL,
    band_of,
    draw,
    exp2,
    inline,
    is_set,
    keys_in_sight,
    mask_band,
    mask_cells,
    matrix,
    tile,
    tile_state,
    transpose,
)

TILE_M, TILE_N = 128, 128
BLOCKS = 16  # at least, however few heads: a constant, so that gradients do not depend on the number of threads


def backward(saved, do, dlse=None, deterministic=True):
    """dq, dk, dv, bitwise reproducible."""
    problem, inputs = saved.problem, saved.inputs
    q, k, v, do = (readable(x, problem.sum_dtype) for x in (inputs.q, inputs.k, inputs.v, do))
    batches, heads = problem.matrices
    lse = np.ascontiguousarray(saved.lse.reshape(batches, heads, problem.seqlen_q))
    delta = np.einsum("...mc,...mc->...m", do, saved.o.astype(problem.sum_dtype, copy=False))    # Alg. 4 line 19
    delta = delta.reshape(lse.shape) - (0 if dlse is None else dlse.reshape(lse.shape))          # the gradient of lse
    n_blocks = -(-problem.seqlen_k // TILE_N)
    chunks = max(1, min(n_blocks, BLOCKS // max(batches * problem.heads_k, 1)))
    dq = np.zeros((chunks, batches, heads, problem.seqlen_q, problem.head_dim), problem.sum_dtype)
    dk = np.zeros((batches, problem.heads_k, problem.seqlen_k, problem.head_dim), problem.sum_dtype)
    dv = np.zeros((batches, problem.heads_k, problem.seqlen_k, problem.head_dim_v), problem.sum_dtype)
    sight, alive = sight_of(problem, inputs.mask)
    drops, kept_scale = drops_of(inputs.dropout)
    launch(
        backward_kernel,
        batches * problem.heads_k * chunks,
        lse.size * problem.seqlen_k * (3 * problem.head_dim + 2 * problem.head_dim_v + EXPONENTIAL),
        scratch_of(problem, TILE_M, TILE_N, backward=True),
        *(matrices_of(x, problem) for x in (q, k, v, do)),
        lse, delta, dq, dk, dv, sight, drops, inputs.scale, kept_scale,
    )  # fmt: skip
    dq = dq[0] if chunks == 1 else dq.sum(axis=0)
    lead = problem.batch[:-1]
    return tuple(
        sum_to(dx.reshape(*lead, *dx.shape[1:]), x.shape).astype(problem.dtype, copy=False)
        for dx, x in ((dq, inputs.q), (dk, inputs.k), (dv, inputs.v))
    )


@kernel
def backward_kernel(
    first_block, end_block, stop, scratch, q, k, v, do, lse, delta, dq, dk, dv, sight, drops, scale, kept_scale
):
    """Blocks [first_block, end_block); a block is every chunks-th tile of keys of a (batch, key head), with its own dq.

    Unlike in the paper queries are the outer loop: Q and dO are transposed once for all keys.
    """
    chunks, batches, heads, seqlen_q, _ = dq.shape
    _, heads_k, _, _ = dk.shape
    group_size, log2_e, dtype = heads // heads_k, math.log2(math.e), lse.dtype
    one, kept_scale = dtype.type(1), dtype.type(kept_scale)
    scale, scale_log2 = dtype.type(scale), dtype.type(scale * log2_e)
    for block in range(first_block, end_block):
        chunk, head_k, batch = block % chunks, block // chunks % heads_k, block // chunks // heads_k
        dK, dV = dk[batch, head_k], dv[batch, head_k]
        for head in range(head_k * group_size, (head_k + 1) * group_size):
            K, V = matrix(k, batch, head, dtype), matrix(v, batch, head, dtype)
            band = band_of(sight, batch, head)
            for m0 in range(0, min(seqlen_q, band[2]), TILE_M):             # Alg. 4 line 9
                m_end = min(m0 + TILE_M, seqlen_q, band[2])
                first, end = keys_in_sight(band, m0, m_end)
                if first >= end:
                    continue
                Q, dO = matrix(q, batch, head, dtype)[m0:m_end], matrix(do, batch, head, dtype)[m0:m_end]   # line 10
                dQ = dq[chunk, batch, head, m0:m_end]
                QT, dOT = tile(scratch.QT, q.cols, m_end - m0), tile(scratch.dOT, do.cols, m_end - m0)
                transpose(QT, Q, scale_log2)
                transpose(dOT, dO, kept_scale)
                vectors = tile(scratch.vectors, 2, m_end - m0)
                lse_log2, D = vectors[0], vectors[1]
                for i in range(m_end - m0):                                 # where lse = -inf no key was seen: P = 0
                    nothing_seen = lse[batch, head, m0 + i] == -np.inf
                    lse_log2[i] = np.inf if nothing_seen else lse[batch, head, m0 + i] * log2_e
                    D[i] = 0 if nothing_seen else delta[batch, head, m0 + i]
                n_block = first // TILE_N
                for n0 in range((n_block + (chunk - n_block) % chunks) * TILE_N, end, chunks * TILE_N):     # line 6
                    n_end = min(n0 + TILE_N, end)
                    state = tile_state(sight, batch, head, m0, m_end, n0, n_end)
                    if state == EMPTY:
                        continue
                    if is_set(stop):
                        return
                    S, dP = tile(scratch.S, n_end - n0, m_end - m0), tile(scratch.dP, n_end - n0, m_end - m0)
                    product(S, K[n0:n_end], QT, one, False)                 # line 11: S = scale Q K^T, transposed
                    mask_band(S, band, m0, n0)                              # line 12: MASK(S)
                    if state == PARTIAL:
                        mask_cells(S, sight, batch, head, m0, n0)
                    exponentiate(S, lse_log2)                               # line 13: P = exp(S - lse)
                    product(dP, V[n0:n_end], dOT, one, False)               # line 17: dP = dO V^T, transposed
                    if drops.threshold > 0:
                        Z = tile(scratch.Z, n_end - n0, m_end - m0)
                        draw(Z, scratch.words, drops, batch * heads + head, m0, n0)     # line 14
                        drop_and_differentiate(S, dP, Z, D)                 # lines 15, 18 and 20
                    else:
                        differentiate(S, dP, D)                             # line 20
                    product(dV[n0:n_end], S, dO, kept_scale, True)          # line 16: dV += (P Z)^T dO
                    product(dK[n0:n_end], dP, Q, scale, True)               # line 22: dK += scale dS^T Q
                    product_tn(dQ, dP, K[n0:n_end], scale, True)            # line 21: dQ += scale dS K


@inline
def exponentiate(S, lse_log2):
    """Alg. 4 line 13: P = 2^(S - lse_log2), in place of S."""
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            S[j, i] = exp2(S[j, i] - lse_log2[i])


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

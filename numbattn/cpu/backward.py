"""Attention backward on the CPU: Algorithm 4, P recomputed from lse."""

from typing import Any, NamedTuple

import numpy as np

from ..problem import Gradients, sum_to
from ..scores import Sink
from .arguments import drops_of, matrices_of, readable, scratch_of, sight_of
from .compile import kernel
from .forward import EXPONENTIAL
from .launch import launch
from .product import product, product_tn
from .score import LOG2_E, collect, curved_in, factor_of_q, pull_back, score, steps_of, sums_for
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
    """The Gradients, bitwise reproducible."""
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
    steps, also_alive = steps_of(problem, inputs.score)
    drops, kept_scale = drops_of(inputs.dropout)
    curved, factor = curved_in(inputs.score), factor_of_q(inputs.scale, inputs.score)
    scratch = scratch_of(problem, TILE_M, TILE_N, backward=True, slopes=curved)
    matrices = (matrices_of(x, problem) for x in (q, k, v, do))
    given = Given(*matrices, lse, delta, sight, steps, drops, factor, kept_scale, curved)
    work = lse.size * problem.seqlen_k * (3 * problem.head_dim + 2 * problem.head_dim_v + EXPONENTIAL)
    launch(backward_kernel, batches * problem.heads_k * chunks, work, scratch, given, dq, dk, dv, inputs.scale)
    dq = dq[0] if chunks == 1 else dq.sum(axis=0)
    lead = problem.batch[:-1]
    grads = [
        sum_to(dx.reshape(*lead, *dx.shape[1:]), x.shape).astype(problem.dtype, copy=False)
        for dx, x in ((dq, inputs.q), (dk, inputs.k), (dv, inputs.v))
    ]
    return Gradients(*grads, tuple(gradients_of_score(saved, given, scratch, work)))


def gradients_of_score(saved, given, scratch, work):
    """The gradient of each array in the score; None where it is not wanted."""
    problem, parts = saved.problem, saved.inputs.score
    for number, part in enumerate(parts):
        arrays = list(part._arrays().values())
        if not part._wants_gradient:
            yield from [None] * len(arrays)
            continue
        (array,) = arrays
        if isinstance(part, Sink):
            lse, delta = (x.reshape(problem.lse_shape) for x in (given.lse, given.delta))
            yield part._gradient(None, lse, delta).astype(array.dtype, copy=False)
        else:
            m_blocks = -(-problem.seqlen_q // TILE_M)
            sums = sums_for(problem, part, m_blocks)
            sums_apart, own, rows, _ = sums.dx.shape
            step = sum(not isinstance(before, Sink) for before in parts[:number])
            blocks = own * (m_blocks if rows > 1 else sums_apart)
            launch(score_kernel, blocks, work, scratch, given, sums, step, curved_in(parts[:number]))
            yield sums.dx.sum(axis=0).reshape(array.shape).astype(array.dtype, copy=False)


class Given(NamedTuple):
    """What both kernels take."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    sight: Any
    steps: Any
    drops: Any
    factor_of_q: Any
    kept_scale: Any
    curved: Any  # how many steps have a derivative that is not 1


class Queries(NamedTuple):
    """A tile of queries [m0, m_end) of a head, in whose sight are the keys [first, end)."""

    batch: Any
    head: Any
    m0: Any
    m_end: Any
    first: Any
    end: Any
    band: Any
    QT: Any
    dOT: Any
    lse_log2: Any
    D: Any


@kernel
def backward_kernel(first_block, end_block, stop, scratch, given, dq, dk, dv, scale):
    """Blocks [first_block, end_block); a block is every chunks-th tile of keys of a (batch, key head), with its own dq.

    Unlike in the paper queries are the outer loop: Q and dO are transposed once for all keys.
    """
    chunks, batches, heads, seqlen_q, _ = dq.shape
    _, heads_k, _, _ = dk.shape
    group_size, dtype = heads // heads_k, given.lse.dtype
    scale, kept_scale = dtype.type(scale), dtype.type(given.kept_scale)
    for block in range(first_block, end_block):
        chunk, head_k, batch = block % chunks, block // chunks % heads_k, block // chunks // heads_k
        dK, dV = dk[batch, head_k], dv[batch, head_k]
        for head in range(head_k * group_size, (head_k + 1) * group_size):
            K = matrix(given.k, batch, head, dtype)
            for m0 in range(0, seqlen_q, TILE_M):                           # Alg. 4 line 9
                at = load_queries(scratch, given, batch, head, m0)
                if at.first >= at.end:
                    continue
                Q = matrix(given.q, batch, head, dtype)[m0 : at.m_end]      # line 10
                dO = matrix(given.do, batch, head, dtype)[m0 : at.m_end]
                dQ, n_block = dq[chunk, batch, head, m0 : at.m_end], at.first // TILE_N
                for n0 in range((n_block + (chunk - n_block) % chunks) * TILE_N, at.end, chunks * TILE_N):  # line 6
                    if is_set(stop):
                        return
                    S, dP = differentiate_tile(scratch, given, at, n0)
                    if S.size == 0:
                        continue
                    n_end = n0 + S.shape[0]
                    product(dV[n0:n_end], S, dO, kept_scale, True)          # line 16: dV += (P Z)^T dO
                    pull_back(dP, scratch.slopes, 0, given.curved)
                    product(dK[n0:n_end], dP, Q, scale, True)               # line 22: dK += scale dS^T Q
                    product_tn(dQ, dP, K[n0:n_end], scale, True)            # line 21: dQ += scale dS K


@kernel
def score_kernel(first_block, end_block, stop, scratch, given, sums, step, curved_before):
    """The gradient of the array of a step, which has so many curved ones before it.

    A block is a tile of queries of one of the array's own matrices, or every parts-th of them; it sums over all score
    matrices to which that one is broadcast.
    """
    parts, own, rows, _ = sums.dx.shape
    batches, heads, seqlen_q = given.lse.shape
    m_blocks = (seqlen_q + TILE_M - 1) // TILE_M
    tiles = m_blocks if rows > 1 else parts
    for block in range(first_block, end_block):
        part, number = block % tiles, block // tiles
        dx = sums.dx[0 if rows > 1 else part, number]
        for pair in range(sums.starts[number], sums.starts[number + 1]):
            batch, head = sums.pairs[pair]
            for m0 in range(part * TILE_M, seqlen_q, tiles * TILE_M):
                at = load_queries(scratch, given, batch, head, m0)
                if at.first >= at.end:
                    continue
                for n0 in range(at.first // TILE_N * TILE_N, at.end, TILE_N):
                    if is_set(stop):
                        return
                    _, dP = differentiate_tile(scratch, given, at, n0)
                    pull_back(dP, scratch.slopes, curved_before, given.curved)
                    collect(dx, dP, given.steps, step, m0, n0)


@inline
def load_queries(scratch, given, batch, head, m0):
    """The Queries from m0 on, transposed, with lse in base 2."""
    dtype = given.lse.dtype
    band = band_of(given.sight, batch, head)
    m_end = max(min(m0 + TILE_M, given.lse.shape[2], band[2]), m0)
    first, end = keys_in_sight(band, m0, m_end)
    QT, dOT = tile(scratch.QT, given.q.cols, m_end - m0), tile(scratch.dOT, given.do.cols, m_end - m0)
    vectors = tile(scratch.vectors, 2, m_end - m0)
    lse_log2, D = vectors[0], vectors[1]
    if first < end:
        transpose(QT, matrix(given.q, batch, head, dtype)[m0:m_end], dtype.type(given.factor_of_q))
        transpose(dOT, matrix(given.do, batch, head, dtype)[m0:m_end], dtype.type(given.kept_scale))
        for i in range(m_end - m0):                                         # where lse = -inf no key was seen: P = 0
            lse = given.lse[batch, head, m0 + i]
            lse_log2[i] = np.inf if lse == -np.inf else lse * dtype.type(LOG2_E)
            D[i] = 0 if lse == -np.inf else given.delta[batch, head, m0 + i]
    return Queries(batch, head, m0, m_end, first, end, band, QT, dOT, lse_log2, D)


@inline
def differentiate_tile(scratch, given, at, n0):
    """P Z and dS behind the score, of a tile of keys from n0 on; of no keys if nobody sees any of them."""
    batch, head, dtype, one = at.batch, at.head, given.lse.dtype, given.lse.dtype.type(1)
    n_end = min(n0 + TILE_N, at.end)
    state = tile_state(given.sight, batch, head, at.m0, at.m_end, n0, n_end)
    n_end = n0 if state == EMPTY else n_end
    S, dP = tile(scratch.S, n_end - n0, at.m_end - at.m0), tile(scratch.dP, n_end - n0, at.m_end - at.m0)
    if state == EMPTY:
        return S, dP
    K, V = matrix(given.k, batch, head, dtype)[n0:n_end], matrix(given.v, batch, head, dtype)[n0:n_end]
    product(S, K, at.QT, one, False)                                        # line 11: S = scale Q K^T, transposed
    score(S, given.steps, scratch.slopes, batch, head, at.m0, n0)
    mask_band(S, at.band, at.m0, n0)                                        # line 12: MASK(S)
    if state == PARTIAL:
        mask_cells(S, given.sight, batch, head, at.m0, n0)
    exponentiate(S, at.lse_log2)                                            # line 13: P = exp(S - lse)
    product(dP, V, at.dOT, one, False)                                      # line 17: dP = dO V^T, transposed
    if given.drops.threshold > 0:
        Z = tile(scratch.Z, n_end - n0, at.m_end - at.m0)
        draw(Z, scratch.words, given.drops, batch * given.lse.shape[1] + head, at.m0, n0)   # line 14
        drop_and_differentiate(S, dP, Z, at.D)                              # lines 15, 18 and 20
    else:
        differentiate(S, dP, at.D)                                          # line 20
    return S, dP


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

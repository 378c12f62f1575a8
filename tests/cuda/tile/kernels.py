"""Attention in the tile language, as small as it can be: the forward pass on ordinary and on tensor cores, dK and dV.

Each factory returns the kernel, its threads and its bytes of shared memory. keys_of is the mask, as an interval.
"""

import numpy as np
from numba import cuda

from numbattn.cuda.tile import (
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    col_index,
    copying,
    device,
    dot,
    exp2,
    full,
    get,
    load,
    log2,
    maximum,
    minimum,
    mma,
    part_sum,
    put,
    quotient,
    reciprocal,
    row_index,
    row_max,
    row_sum,
    save,
    simt,
    sync_warp,
    where,
)


@device
def every_key(query, seqlen_q, seqlen_k):
    return 0, seqlen_k


@device
def causal(query, seqlen_q, seqlen_k):
    return 0, minimum(query + (seqlen_k - seqlen_q + 1), seqlen_k)


def window(left, right):
    @device
    def keys_of(query, seqlen_q, seqlen_k):
        diagonal = query + (seqlen_k - seqlen_q)
        return maximum(diagonal - left, 0), minimum(diagonal + (right + 1), seqlen_k)

    return keys_of


@device
def softmax_step(S, m, l, scale_log2):
    m_new = row_max(S, m)  # Alg. 1 line 10: m_new = max(m, rowmax(S))
    alpha = exp2((m - m_new) * scale_log2)
    P = exp2(S * scale_log2 - m_new * scale_log2)  # line 11: P = exp(S - m_new)
    l = part_sum(P, l * alpha)  # l = alpha l + rowsum(P)
    return P, m_new, l, alpha


def forward_simt(dtype, head_dim, tile_m, tile_n, keys_of, threads=256, lanes_per_row=16, nbytes=16, stored=None):
    """stored: dtype of the arrays, where it is not the one of the arithmetic."""
    vector = 16 // np.dtype(dtype).itemsize
    S_TILE = simt(tile_m, tile_n, threads, lanes_per_row, 1)  # neighbouring lanes, neighbouring columns
    O_TILE = simt(tile_m, head_dim, threads, lanes_per_row, vector)  # neighbouring lanes, neighbouring vectors
    ROWS, PARTS = S_TILE.row_vector(), S_TILE.row_parts()
    COPY_Q = copying(tile_m, head_dim, threads, vector)
    COPY_K = copying(tile_n, head_dim, threads, vector)
    shared = SharedMemory()
    SHARED_Q = shared.tile(tile_m, head_dim, dtype)
    SHARED_K = shared.tile(tile_n, head_dim, dtype)
    SHARED_V = shared.tile(tile_n, head_dim, dtype)
    SHARED_P = shared.tile(tile_m, tile_n, dtype)
    TILE_M, TILE_N, ROWS_OF = np.int32(tile_m), np.int32(tile_n), Alignment(nbytes)
    ZERO, NO_SCORE = dtype(0), dtype(-np.inf)
    NO_MAX = dtype(-1e30)  # finite, so that a row with no key yet in sight does not make inf - inf

    def forward(mQ, mK, mV, mO, mLse, group_size, scale_log2):
        m0, head, batch = cuda.blockIdx.x * TILE_M, cuda.blockIdx.y, cuda.blockIdx.z
        head_k = quotient(head, group_size)
        Q, K = aligned(mQ[batch, head], ROWS_OF), aligned(mK[batch, head_k], ROWS_OF)
        V, O_out = aligned(mV[batch, head_k], ROWS_OF), aligned(mO[batch, head], ROWS_OF)
        seqlen_q, seqlen_k = np.int32(mQ.shape[2]), np.int32(mK.shape[2])
        sQ, sK, sV, sP = allocate(SHARED_Q), allocate(SHARED_K), allocate(SHARED_V), allocate(SHARED_P)
        put(sQ, load(Q, COPY_Q, m0))
        O, m, l = full(O_TILE, ZERO), full(ROWS, NO_MAX), full(PARTS, ZERO)
        last = minimum(m0 + TILE_M, seqlen_q) - 1
        first, full_end = keys_of(m0, seqlen_q, seqlen_k)  # the keys that the first query sees ...
        full_first, end = keys_of(last, seqlen_q, seqlen_k)  # ... and the last; both move with the query
        row_first, row_end = keys_of(row_index(S_TILE, m0), seqlen_q, seqlen_k)
        n0, end = np.int32(first & -TILE_N), np.int32(end)
        put(sK, load(K, COPY_K, n0))
        cuda.syncthreads()
        while n0 < end:
            V_next = load(V, COPY_K, n0)  # in flight while S is made
            S = dot(full(S_TILE, ZERO), sQ, sK.T)  # line 8: S = Q K^T
            if n0 < full_first or n0 + TILE_N > full_end:
                keys = col_index(S_TILE, n0)
                S = where((keys >= row_first) & (keys < row_end), S, NO_SCORE)
            P, m, l, alpha = softmax_step(S, m, l, scale_log2)
            put(sP, P)
            put(sV, V_next)
            cuda.syncthreads()  # P and V are there, K is done with
            n0 += TILE_N
            K_next = load(K, COPY_K, n0)  # in flight while O is made
            O = dot(O * alpha, sP, sV)  # line 12: O = alpha O + P V
            put(sK, K_next)
            cuda.syncthreads()  # K is there, P and V are done with
        total = row_sum(l, ZERO)
        save(O_out, O * reciprocal(total), m0)  # line 15: O = O / l
        save(mLse[batch, head], m * scale_log2 + log2(total), m0)  # base 2

    return forward, threads, shared.nbytes


def forward_mma(dtype, head_dim, tile_m, tile_n, keys_of, threads=128, nbytes=16):
    S_TILE, O_TILE = mma(tile_m, tile_n, threads), mma(tile_m, head_dim, threads)
    ROWS, PARTS = S_TILE.row_vector(), S_TILE.row_parts()
    COPY_Q, COPY_K = copying(tile_m, head_dim, threads, 8), copying(tile_n, head_dim, threads, 8)
    shared = SharedMemory()
    SHARED_Q = shared.tile(tile_m, head_dim, dtype)
    SHARED_K, SHARED_V = shared.tile(tile_n, head_dim, dtype), shared.tile(tile_n, head_dim, dtype)
    TILE_M, TILE_N, ROWS_OF = np.int32(tile_m), np.int32(tile_n), Alignment(nbytes)
    ZERO, NO_SCORE, NO_MAX = np.float32(0), np.float32(-np.inf), np.float32(-1e30)

    def forward(mQ, mK, mV, mO, mLse, group_size, scale_log2):
        m0, head, batch = cuda.blockIdx.x * TILE_M, cuda.blockIdx.y, cuda.blockIdx.z
        head_k = quotient(head, group_size)
        Q, K = aligned(mQ[batch, head], ROWS_OF), aligned(mK[batch, head_k], ROWS_OF)
        V, O_out = aligned(mV[batch, head_k], ROWS_OF), aligned(mO[batch, head], ROWS_OF)
        seqlen_q, seqlen_k = np.int32(mQ.shape[2]), np.int32(mK.shape[2])
        sQ, sK, sV = allocate(SHARED_Q), allocate(SHARED_K), allocate(SHARED_V)
        put(sQ, load(Q, COPY_Q, m0))
        O, m, l = full(O_TILE, ZERO), full(ROWS, NO_MAX), full(PARTS, ZERO)
        first, _ = keys_of(m0, seqlen_q, seqlen_k)
        _, end = keys_of(minimum(m0 + TILE_M, seqlen_q) - 1, seqlen_q, seqlen_k)
        row_first, row_end = keys_of(row_index(S_TILE, m0), seqlen_q, seqlen_k)
        n0, end = np.int32(first & -TILE_N), np.int32(end)
        while n0 < end:
            cuda.syncthreads()
            put(sK, load(K, COPY_K, n0))
            put(sV, load(V, COPY_K, n0))
            cuda.syncthreads()
            S = dot(full(S_TILE, ZERO), sQ, sK.T)
            keys = col_index(S_TILE, n0)
            S = where((keys >= row_first) & (keys < row_end), S, NO_SCORE)
            P, m, l, alpha = softmax_step(S, m, l, scale_log2)
            O = dot(O * alpha, P, sV)
            n0 += TILE_N
        total = row_sum(l, ZERO)
        save(O_out, O * reciprocal(total), m0)
        save(mLse[batch, head], m * scale_log2 + log2(total), m0)

    return forward, threads, shared.nbytes


def backward_kv(dtype, tile_of, head_dim, tile_m, tile_n, keys_of, threads, accumulated=np.float32):
    """dK and dV: Algorithm 4 with the keys held still. S, P, dP, dS are transposed: a row is a key, a column a query.

    tile_of(rows, cols, vector) is the layout of sums: on ordinary or on tensor cores, nothing else differs.
    """
    vector = 16 // np.dtype(dtype).itemsize
    S_TILE, K_TILE = tile_of(tile_n, tile_m, 1), tile_of(tile_n, head_dim, vector)
    COPY_Q, COPY_K = copying(tile_m, head_dim, threads, vector), copying(tile_n, head_dim, threads, vector)
    COLS = S_TILE.col_vector()
    shared = SharedMemory()
    SHARED_K, SHARED_V = shared.tile(tile_n, head_dim, dtype), shared.tile(tile_n, head_dim, dtype)
    SHARED_Q, SHARED_DO = shared.tile(tile_m, head_dim, dtype), shared.tile(tile_m, head_dim, dtype)
    SHARED_P, SHARED_DS = shared.tile(tile_n, tile_m, dtype), shared.tile(tile_n, tile_m, dtype)
    LINE = shared.tile(1, tile_m, accumulated)
    TILE_M, TILE_N, ZERO = np.int32(tile_m), np.int32(tile_n), accumulated(0)

    def backward(mQ, mK, mV, mDO, mLse, mDelta, mDK, mDV, scale, scale_log2):
        n0, head, batch = cuda.blockIdx.x * TILE_N, cuda.blockIdx.y, cuda.blockIdx.z
        Q, K, V, dO = mQ[batch, head], mK[batch, head], mV[batch, head], mDO[batch, head]
        lse, delta = mLse[batch, head], mDelta[batch, head]  # lse in base 2; delta = rowsum(dO * O)
        seqlen_q, seqlen_k = np.int32(Q.shape[0]), np.int32(K.shape[0])
        sQ, sK, sV, sdO = allocate(SHARED_Q), allocate(SHARED_K), allocate(SHARED_V), allocate(SHARED_DO)
        sP, sdS, sdelta = allocate(SHARED_P), allocate(SHARED_DS), allocate(LINE)
        put(sK, load(K, COPY_K, n0))
        put(sV, load(V, COPY_K, n0))
        dK, dV = full(K_TILE, ZERO), full(K_TILE, ZERO)
        keys = row_index(S_TILE, n0)
        m0 = np.int32(0)
        while m0 < seqlen_q:
            put(sQ, load(Q, COPY_Q, m0))
            put(sdO, load(dO, COPY_Q, m0))
            put(sdelta, load(delta, COLS, m0))
            cuda.syncthreads()
            S = dot(full(S_TILE, ZERO), sK, sQ.T)  # Alg. 4 line 11: S = Q K^T
            P = exp2(S * scale_log2 - load(lse, COLS, m0))  # P = exp(S - lse)
            first, end = keys_of(col_index(S_TILE, m0), seqlen_q, seqlen_k)
            P = where((keys >= first) & (keys < end), P, ZERO)
            put(sP, P)
            dP = dot(full(S_TILE, ZERO), sV, sdO.T)  # line 13: dP = dO V^T
            dS = P * (dP - get(sdelta, COLS))  # line 14: dS = P (dP - delta)
            put(sdS, dS)
            sync_warp()
            dV = dot(dV, sP, sdO)  # line 12: dV += P^T dO
            dK = dot(dK, sdS, sQ)  # line 16: dK += dS^T Q
            m0 += TILE_M
            cuda.syncthreads()
        save(mDK[batch, head], dK * scale, n0)
        save(mDV[batch, head], dV, n0)

    return backward, threads, shared.nbytes

"""Attention forward on Hopper: Algorithms 1 and 2, and 5 where the mask has blocks, by warpgroups that work side by side.

One thread fills rings of shared memory with tiles of Q, K and V. Each of the other warpgroups keeps 64 queries and walks
over the keys in their sight: the product P V of a tile runs while the softmax of the next tile is computed, and the
warpgroups take turns, so that one multiplies while another computes exponentials. A block does several tiles of
queries: O is sent off while the next tile starts.
"""

import numpy as np
from numba import cuda
from numba.cuda import types

from ..build import Source, TensorMap
from ..tile import (
    WARPGROUP,
    Ring,
    SharedMemory,
    acquire,
    allocate,
    col_index,
    device,
    dot,
    fill,
    finished,
    following,
    full,
    give_registers,
    minimum,
    open_ring,
    operand,
    pass_turn,
    put,
    quotient,
    reciprocal,
    release,
    row_index,
    row_sum,
    save,
    send,
    sent,
    share_with_tma,
    slot,
    sync_warpgroup,
    take_registers,
    take_turn,
    wait,
    warpgroup_index,
    wgmma,
    where,
)
from .dropout import DROPS, drop_step
from .layouts import DTYPES, array_type, sum_type
from .schedule import place_near
from .softmax import LN_2, logsumexp, no_max, softmax_step
from .visibility import band_of, element_test, keys_in_sight, needs_test, sight_type, steps_to_next

ROWS = 64  # of a warpgroup
REGISTERS = {1: (24, 240), 2: (24, 240), 3: (32, 160)}  # of a producer's thread and a consumer's, by consumers


def forward(*, dtype, head_dim, head_dim_v, tile_n, consumers, stages, own_o, mask, dropout):
    """The kernel for tiles of 64 queries a consumer, tile_n keys and head_dims rounded up to head_dim and head_dim_v.

    own_o: O leaves through shared memory of its own, not through that of Q.
    """
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    S_TILE, O_TILE = wgmma(tile_n), wgmma(head_dim_v)
    ROWS_OF_S, PARTS = S_TILE.row_vector(), S_TILE.row_parts()
    shared = SharedMemory()
    SHARED_Q = shared.boxes(ROWS, head_dim, dtype, stages=consumers)
    SHARED_K, SHARED_V = (shared.boxes(tile_n, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    SHARED_O = shared.boxes(ROWS, head_dim_v, dtype, stages=consumers) if own_o else SHARED_Q
    Q_RING = Ring.within(shared, SHARED_Q, readers=1)
    K_RING, V_RING = (Ring.within(shared, tile, readers=consumers) for tile in (SHARED_K, SHARED_V))
    CONSUMERS, TILE_M, TILE_N = np.int32(consumers), np.int32(ROWS * consumers), np.int32(tile_n)
    TURNS = consumers
    FEW, MANY = REGISTERS[consumers]
    ZERO, NO_SCORE, NO_MAX, LN2 = ACC(0), ACC(-np.inf), no_max(ACC), ACC(LN_2)
    band_at, sees, tested, steps = band_of(mask), element_test(mask), needs_test(mask), steps_to_next(mask)
    drop = drop_step(S_TILE, dropout)

    @device
    def next_of(sight, batch, head, m_block, n_block, n_blocks):
        """The first tile of keys from n_block on that is not empty."""
        return np.int32(n_block + steps(sight, batch, head, m_block, n_block, 0, 1, np.int32(n_blocks - n_block)))

    @device
    def work(number, sight, seqlen_q, heads, matrices, near):
        """What the number-th piece of work is: a tile of queries, and the tiles of keys that it may see."""
        m_blocks = quotient(seqlen_q + TILE_M - 1, TILE_M)
        tile, batch, head = place_near(number, m_blocks, matrices, heads, near)
        m_block = np.int32(m_blocks - 1 - tile)                 # the heaviest tiles of a causal mask first
        m0 = np.int32(m_block * TILE_M)
        band = band_at(sight, batch, head)
        first, end = keys_in_sight(band, m0, minimum(m0 + TILE_M, seqlen_q))
        n_block, n_blocks = quotient(first, TILE_N), quotient(end + TILE_N - 1, TILE_N)
        return m_block, m0, batch, head, band, next_of(sight, batch, head, m_block, n_block, n_blocks), n_blocks

    @device
    def produce(mQ, mK, mV, sight, seqlen_q, heads, matrices, group_size, near, pieces):
        Q, K, V = slot(Q_RING, 0), slot(K_RING, 0), slot(V_RING, 0)
        number = np.int32(cuda.blockIdx.x)
        while number < pieces:
            m_block, m0, batch, head, band, n_block, n_blocks = work(number, sight, seqlen_q, heads, matrices, near)
            head_k = quotient(head, group_size)
            group = np.int32(0)
            while group < CONSUMERS:
                acquire(Q)
                fill(Q, mQ, batch, head, np.int32(m0 + group * ROWS))
                Q = following(Q, 1)
                group = np.int32(group + 1)
            while n_block < n_blocks:
                n0 = np.int32(n_block * TILE_N)
                acquire(K)
                fill(K, mK, batch, head_k, n0)
                K = following(K, 1)
                acquire(V)
                fill(V, mV, batch, head_k, n0)
                V = following(V, 1)
                n_block = next_of(sight, batch, head, m_block, np.int32(n_block + 1), n_blocks)
            number = np.int32(number + cuda.gridDim.x)

    @device
    def masked(S, sight, band, batch, head, m_block, n_block, m0):
        n0 = np.int32(n_block * TILE_N)
        if tested(sight, band, batch, head, m_block, n_block, m0, np.int32(m0 + ROWS), n0, np.int32(n0 + TILE_N)):
            queries, keys = row_index(S_TILE, m0), col_index(S_TILE, n0)
            S = where(sees(sight, band, batch, head, queries, keys), S, NO_SCORE)       # Alg. 2 line 11: MASK(S)
        return S

    @device
    def consume(mO, mLse, sight, drops, seqlen_q, heads, matrices, near, pieces, scale_log2, kept_scale):
        group = warpgroup_index()
        leads = cuda.threadIdx.x % WARPGROUP == 0
        Q, K, V = slot(Q_RING, group), slot(K_RING, 0), slot(V_RING, 0)
        sO = allocate(SHARED_O, group)
        if group == CONSUMERS - 1:
            pass_turn(TURNS)
        number = np.int32(cuda.blockIdx.x)
        while number < pieces:
            m_block, m0, batch, head, band, n_block, n_blocks = work(number, sight, seqlen_q, heads, matrices, near)
            matrix, m0 = np.int32(batch * heads + head), np.int32(m0 + group * ROWS)
            O, m, l = full(O_TILE, ZERO), full(ROWS_OF_S, NO_MAX), full(PARTS, ZERO)
            wait(Q)
            if n_block < n_blocks:
                wait(K)
                S = finished(dot(S_TILE, Q.tile, K.tile.T), 0)      # Alg. 1 line 9: S = Q K^T
                release(K)
                K = following(K, 1)
                S = masked(S, sight, band, batch, head, m_block, n_block, m0)
                P, m, l, alpha = softmax_step(S, m, l, scale_log2)  # lines 12 and 13
                P = operand(drop(P, drops, matrix, m0, np.int32(n_block * TILE_N)), SHARED_V)    # line 14
                n_block = next_of(sight, batch, head, m_block, np.int32(n_block + 1), n_blocks)
                while n_block < n_blocks:
                    wait(K)
                    take_turn(TURNS)
                    S = dot(S_TILE, Q.tile, K.tile.T)               # the next S, in flight
                    wait(V)
                    O = dot(O, P, V.tile)                           # line 12: O = O + P V, in flight
                    pass_turn(TURNS)
                    S = finished(S, 1)
                    release(K)
                    K = following(K, 1)
                    S = masked(S, sight, band, batch, head, m_block, n_block, m0)
                    F, m, l, alpha = softmax_step(S, m, l, scale_log2)
                    O = finished(O, 0)
                    release(V)
                    V = following(V, 1)
                    O = O * alpha                                   # line 12: O = alpha O
                    P = operand(drop(F, drops, matrix, m0, np.int32(n_block * TILE_N)), SHARED_V)
                    n_block = next_of(sight, batch, head, m_block, np.int32(n_block + 1), n_blocks)
                wait(V)
                O = finished(dot(O, P, V.tile), 0)
                release(V)
                V = following(V, 1)
            total = row_sum(l, ZERO)
            if own_o:
                release(Q)
                if leads:
                    sent()                                          # the O before
                sync_warpgroup()
            put(sO, O * (reciprocal(total) * kept_scale))           # line 12: O = O / l
            share_with_tma()
            sync_warpgroup()
            if leads:
                send(mO, sO, batch, head, m0)
                if not own_o:
                    sent()
            if not own_o:
                release(Q)
            Q = following(Q, CONSUMERS)
            save(mLse[batch, head], logsumexp(m, total, scale_log2, LN2), m0)
            number = np.int32(number + cuda.gridDim.x)

    def kernel(mQ, mK, mV, mO, mLse, sight, drops, group_size, scale_log2, kept_scale, near):
        batches, heads, seqlen_q = mLse.shape
        heads, seqlen_q, matrices = np.int32(heads), np.int32(seqlen_q), np.int32(batches * heads)
        pieces = matrices * quotient(seqlen_q + TILE_M - 1, TILE_M)
        open_ring(Q_RING)
        open_ring(K_RING)
        open_ring(V_RING)
        cuda.syncthreads()
        if warpgroup_index() == CONSUMERS:
            give_registers(FEW)
            if cuda.threadIdx.x == CONSUMERS * WARPGROUP:
                produce(mQ, mK, mV, sight, seqlen_q, heads, matrices, group_size, near, pieces)
        else:
            take_registers(MANY)
            consume(mO, mLse, sight, drops, seqlen_q, heads, matrices, near, pieces, scale_log2, kept_scale)

    maps, number = [types.uint64] * 4, getattr(types, ACC.__name__)
    signature = types.void(
        *maps, array_type(ACC, 3), sight_type(mask), DROPS, types.int32, number, number, types.int32
    )
    tensor_maps = tuple(TensorMap(i, tile.box) for i, tile in enumerate((SHARED_Q, SHARED_K, SHARED_V, SHARED_O)))
    return Source(kernel, signature, WARPGROUP * (consumers + 1), shared=shared.nbytes, tensor_maps=tensor_maps)

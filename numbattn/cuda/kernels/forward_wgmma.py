"""Attention forward on Hopper: Algorithms 1 and 2, and 5 where the mask has blocks, by warpgroups that work side by side.

A block works on one tile of queries after the other: jobs. One thread, the producer, fills rings of shared memory with
tiles of Q, K and V. The other warpgroups, the consumers, keep 64 queries each and walk over the keys in their sight.
To a consumer all its jobs are one stream of steps: in each it starts S = Q K^T of this step and O = O + P V of the step
before, and while the tensor cores multiply it computes the softmax of S. The consumers take turns in starting products,
so that one computes exponentials while another multiplies.
"""

import numpy as np
from numba import cuda
from numba.cuda import types

from ..build import Source, TensorMap
from ..tile import (
    WARPGROUP,
    Alignment,
    Ring,
    SharedMemory,
    acquire,
    aligned,
    allocate,
    cluster_rank,
    device,
    dot,
    exp2_in_both,
    expect,
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
    rescaled,
    row_sum,
    save,
    send,
    sent,
    share_with_tma,
    slot,
    sync_cluster,
    sync_warpgroup,
    take_registers,
    take_turn,
    tell,
    told,
    unforeseen,
    wait,
    warpgroup_index,
    wgmma,
    where,
)
from ..views import VECTOR_BYTES
from .dropout import DROPS, drop_step
from .layouts import DTYPES, array_type, sum_type
from .schedule import drawn, in_turn, leave, place_near
from .softmax import LN_2, logsumexp, no_max, softmax_step_by
from .visibility import band_of, element_test, keys_in_sight, needs_test, sight_type, steps_to_next

ROWS = 64  # of a consumer
REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160), 4: (24, 112)}  # of a producer's thread and a consumer's, by consumers
EXP_SHARE = 64
JOB = 5  # numbers: batch, head, m_block, first and end of its tiles of keys


@device
def nothing():
    """A block that shares nothing may end when it likes."""


def forward(*, dtype, head_dim, head_dim_v, tile_n, consumers, stages, q_stages, sends, cluster, mask, dropout):
    """The kernel for tiles of 64 queries a consumer, tile_n keys and head_dims rounded up to head_dim and head_dim_v.

    stages: tiles of K, and of V, in shared memory at once; q_stages: tiles of Q of each consumer.
    sends: O leaves through shared memory, or else straight from registers.
    cluster: blocks that share the tiles of K and V, each with queries of its own.
    """
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    S_TILE, O_TILE = wgmma(tile_n), wgmma(head_dim_v)
    ROW_VECTOR, PARTS = S_TILE.row_vector(), S_TILE.row_parts()
    shared = SharedMemory()
    SHARED_Q = shared.boxes(ROWS, head_dim, dtype, q_stages * consumers)
    SHARED_K, SHARED_V = (shared.boxes(tile_n, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    SHARED_O = shared.boxes(ROWS, head_dim_v, dtype, consumers) if sends else None
    Q_RING = Ring.within(shared, SHARED_Q, readers=1)
    K_RING, V_RING = (Ring.within(shared, tile, consumers, cluster) for tile in (SHARED_K, SHARED_V))
    JOBS = Ring.within(shared, shared.tile(1, JOB, np.int32, stages=2), readers=consumers + 1)
    CONSUMERS, TURNS, FEW, MANY = np.int32(consumers), consumers, *REGISTERS[consumers]
    TILE_M, TILE_N = np.int32(ROWS * consumers), np.int32(tile_n)
    CLUSTER, CLUSTER_M = np.int32(cluster), np.int32(ROWS * consumers * cluster)
    ZERO, NO_SCORE, NO_MAX, LN2 = ACC(0), ACC(-np.inf), no_max(ACC), ACC(LN_2)
    SUPPLIES, HANDS_OUT = WARPGROUP * consumers, WARPGROUP * consumers + 32       # threads of different warps
    ALIGNED, NO_JOB = Alignment(VECTOR_BYTES), (np.int32(0),) * JOB
    band_at, sees, tested, steps = band_of(mask), element_test(mask, S_TILE), needs_test(mask), steps_to_next(mask)
    drop = drop_step(S_TILE, dropout)

    @device
    def exponential(x):
        return exp2_in_both(x, EXP_SHARE)

    softmax_step = softmax_step_by(exponential)
    if cluster > 1:
        next_number, ready, done = in_turn, sync_cluster, sync_cluster
    else:
        next_number, ready, done = drawn, cuda.syncthreads, nothing

    @device
    def first_seen(sight, batch, head, m_block, n_block, n_blocks):
        """The first tile of keys from n_block on that is not empty."""
        return np.int32(n_block + steps(sight, batch, head, m_block, n_block, 0, 1, np.int32(n_blocks - n_block)))

    @device
    def job_of(number, sight, seqlen_q, heads, matrices, near):
        """A tile of queries for each block of the cluster, and the tiles of keys that any of them may see."""
        tiles = quotient(seqlen_q + CLUSTER_M - 1, CLUSTER_M)
        tile, batch, head = place_near(number, tiles, matrices, heads, near)
        tile = np.int32(tiles - 1 - tile)                       # the heaviest tiles of a causal mask first
        m0 = np.int32(tile * CLUSTER_M)
        first, end = keys_in_sight(band_at(sight, batch, head), m0, minimum(m0 + CLUSTER_M, seqlen_q))
        m_block = np.int32(tile * CLUSTER + cluster_rank())
        n_block, n_blocks = quotient(first, TILE_N), quotient(end + TILE_N - 1, TILE_N)
        n_block = first_seen(sight, batch, head, m_block, n_block, n_blocks)
        if n_block >= n_blocks:                                 # who sees nothing looks at one tile, all of it masked
            n_block, n_blocks = np.int32(0), np.int32(1)
        return batch, head, m_block, n_block, n_blocks

    @device
    def hand_out(mQ, sight, jobs, seqlen_q, heads, matrices, near):
        """One thread: jobs, and their tiles of Q."""
        J, Q = slot(JOBS, 0), slot(Q_RING, 0)
        count = np.int32(quotient(seqlen_q + CLUSTER_M - 1, CLUSTER_M) * matrices * CLUSTER)
        number = np.int32(cuda.blockIdx.x)
        while number < count:
            later = next_number(number, jobs)
            job = job_of(quotient(number, CLUSTER), sight, seqlen_q, heads, matrices, near)
            batch, head, m_block, _, _ = job
            acquire(J)
            tell(J, job)
            J = following(J, 1)
            for group in range(CONSUMERS):
                acquire(Q)
                fill(Q, mQ, batch, head, np.int32(m_block * TILE_M + group * ROWS))
                Q = following(Q, 1)
            number = later
        acquire(J)
        tell(J, NO_JOB)
        leave(jobs)

    @device
    def supply(mK, mV, sight, group_size):
        """Another thread: the tiles of K and V that the jobs need, as fast as there is room."""
        J, K, V = slot(JOBS, 0), slot(K_RING, 0), slot(V_RING, 0)
        while True:
            wait(J)
            batch, head, m_block, n_block, n_blocks = told(J)
            release(J)
            J = following(J, 1)
            if n_blocks == 0:
                break
            head_k = quotient(head, group_size)
            while n_block < n_blocks:
                n0 = np.int32(n_block * TILE_N)
                acquire(K)
                fill(K, mK, batch, head_k, n0)
                K = following(K, 1)
                acquire(V)
                fill(V, mV, batch, head_k, n0)
                V = following(V, 1)
                n_block = first_seen(sight, batch, head, m_block, unforeseen(n_block + 1), n_blocks)

    @device
    def masked(S, sight, batch, head, m_block, n_block, m0):
        n0, band = np.int32(n_block * TILE_N), band_at(sight, batch, head)
        if tested(sight, band, batch, head, m_block, n_block, m0, np.int32(m0 + ROWS), n0, np.int32(n0 + TILE_N)):
            S = where(sees(sight, band, batch, head, m0, n0), S, NO_SCORE)              # Alg. 2 line 11: MASK(S)
        return S

    @device
    def leads():
        return cuda.threadIdx.x % WARPGROUP == 0

    if sends:

        @device
        def store(mO, O, batch, head, m0):
            sO = allocate(SHARED_O, warpgroup_index())
            if leads():
                sent()                                          # the O before
            sync_warpgroup()
            put(sO, O)
            share_with_tma()
            sync_warpgroup()
            if leads():
                send(mO, sO, batch, head, m0)

    else:

        @device
        def store(mO, O, batch, head, m0):
            save(aligned(mO[batch, head], ALIGNED), O, m0)

    @device
    def conclude(mO, mLse, O, m, l, batch, head, m0, scale_log2, kept_scale):
        total = where(m > NO_MAX, row_sum(l, ZERO), 0)          # 0 if it has seen nothing
        store(mO, O * (reciprocal(total) * kept_scale), batch, head, m0)                # Alg. 1 line 12: O = O / l
        save(mLse[batch, head], logsumexp(m, total, scale_log2, LN2), m0)

    @device
    def step_after(J, sight, batch, head, m0, m_block, n_block, n_blocks):
        """The next tile of keys of this job, else the first one of the next job; n_blocks is 0 if there is none."""
        n_block = first_seen(sight, batch, head, m_block, np.int32(n_block + 1), n_blocks)
        ends = n_block >= n_blocks
        if ends:
            wait(J)
            batch, head, m_block, n_block, n_blocks = told(J)
            sync_warpgroup()                                        # all have read it
            release(J)
            J = following(J, 1)
            m0 = np.int32(m_block * TILE_M + warpgroup_index() * ROWS)
        return J, batch, head, m0, m_block, n_block, n_blocks, ends

    @device
    def step_after(J, sight, batch, head, m0, m_block, n_block, n_blocks):
        """The next tile of keys of this job, else the first one of the next job; n_blocks is 0 if there is none."""
        n_block = first_seen(sight, batch, head, m_block, np.int32(n_block + 1), n_blocks)
        ends = n_block >= n_blocks
        if ends:
            wait(J)
            batch, head, m_block, n_block, n_blocks = told(J)
            sync_warpgroup()                                        # all have read it
            release(J)
            J = following(J, 1)
            m0 = np.int32(m_block * TILE_M + warpgroup_index() * ROWS)
        return J, batch, head, m0, m_block, n_block, n_blocks, ends

    @device
    def consume(mO, mLse, sight, drops, heads, scale_log2, kept_scale):
        group, zero = warpgroup_index(), np.int32(0)
        J, Q, K, V = slot(JOBS, 0), slot(Q_RING, group), slot(K_RING, 0), slot(V_RING, 0)
        if group == CONSUMERS - 1:
            pass_turn(TURNS)
        J, batch, head, m0, m_block, n_block, n_blocks, _ = step_after(J, sight, zero, zero, zero, zero, zero, zero)
        O, m, l = full(O_TILE, ZERO), full(ROW_VECTOR, NO_MAX), full(PARTS, ZERO)
        wait(Q)
        wait(K)
        S = finished(dot(S_TILE, Q.tile, K.tile.T), 0)
        release(K)
        K = following(K, 1)
        S = masked(S, sight, batch, head, m_block, n_block, m0)
        F, m, l, alpha = softmax_step(S, m, l, scale_log2)
        P = operand(drop(F, drops, np.int32(batch * heads + head), m0, np.int32(n_block * TILE_N)), SHARED_V)
        old_batch, old_head, old_m0 = batch, head, m0
        J, batch, head, m0, m_block, n_block, n_blocks, begins = step_after(
            J, sight, batch, head, m0, m_block, n_block, n_blocks)
        if begins:
            release(Q)
            Q = following(Q, CONSUMERS)
        while True:
            if n_blocks == 0:
                break
            if begins:
                wait(Q)
            wait(K)
            take_turn(TURNS)
            S = dot(S_TILE, Q.tile, K.tile.T)                       # Alg. 1 line 9: S = Q K^T, in flight
            wait(V)
            O = dot(O, P, V.tile)                                   # line 12: O = O + P V of the step before, in flight
            pass_turn(TURNS)
            J, batch2, head2, m02, m_block2, n_block2, n_blocks2, ends = step_after(
                J, sight, batch, head, m0, m_block, n_block, n_blocks)
            S = finished(S, 1)
            release(K)
            K = following(K, 1)
            if ends:
                release(Q)
                Q = following(Q, CONSUMERS)
            S = masked(S, sight, batch, head, m_block, n_block, m0)
            old_m, old_l = m, l
            if begins:
                m, l = full(ROW_VECTOR, NO_MAX), full(PARTS, ZERO)
            F, m, l, alpha = softmax_step(S, m, l, scale_log2)      # lines 12 and 13
            O = finished(O, 0)
            release(V)
            V = following(V, 1)
            P = operand(drop(F, drops, np.int32(batch * heads + head), m0, np.int32(n_block * TILE_N)), SHARED_V)
            if begins:
                conclude(mO, mLse, O, old_m, old_l, old_batch, old_head, old_m0, scale_log2, kept_scale)
                O = full(O_TILE, ZERO)
            else:
                O = rescaled(O, alpha)                              # line 12: O = alpha O
            begins = ends
            old_batch, old_head, old_m0 = batch, head, m0
            batch, head, m0, m_block, n_block, n_blocks = batch2, head2, m02, m_block2, n_block2, n_blocks2
        wait(V)
        O = finished(dot(O, P, V.tile), 0)
        conclude(mO, mLse, O, m, l, old_batch, old_head, old_m0, scale_log2, kept_scale)
        if leads():
            sent()

    def kernel(mQ, mK, mV, mO, mLse, sight, drops, jobs, group_size, scale_log2, kept_scale, near):
        batches, heads, seqlen_q = mLse.shape
        heads, seqlen_q, matrices = np.int32(heads), np.int32(seqlen_q), np.int32(batches * heads)
        open_ring(JOBS)
        open_ring(Q_RING)
        open_ring(K_RING)
        open_ring(V_RING)
        ready()
        if warpgroup_index() == CONSUMERS:
            give_registers(FEW)
            if cuda.threadIdx.x == HANDS_OUT:
                expect(mQ)
                hand_out(mQ, sight, jobs, seqlen_q, heads, matrices, near)
            if cuda.threadIdx.x == SUPPLIES:
                expect(mK)
                expect(mV)
                supply(mK, mV, sight, group_size)
        else:
            take_registers(MANY)
            consume(mO, mLse, sight, drops, heads, scale_log2, kept_scale)
        done()

    o_type, number = types.uint64 if sends else array_type(dtype, 4), getattr(types, ACC.__name__)
    signature = types.void(
        *[types.uint64] * 3, o_type, array_type(ACC, 3), sight_type(mask), DROPS, types.uint32[:], types.int32, number,
        number, types.int32,
    )  # fmt: skip
    boxes = [Q_RING.box, K_RING.box, V_RING.box, *([SHARED_O.box] if sends else [])]
    threads = WARPGROUP * (consumers + 1)
    return Source(
        kernel, signature, threads, shared=shared.nbytes, cluster=cluster,
        tensor_maps=tuple(TensorMap(i, box) for i, box in enumerate(boxes)),
    )  # fmt: skip

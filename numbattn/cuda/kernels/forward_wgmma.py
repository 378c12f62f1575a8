"""Attention forward on Hopper: Algorithms 1 and 2, and 5 where the mask has blocks, by warpgroups side by side.

A block works on one tile of queries after the other: jobs. Two threads, the producers, hand out the jobs and fill rings
of shared memory with the tiles of Q, K and V that they need. The other warpgroups, the consumers, keep 64 queries of a
job each and walk over the keys in their sight.

To a consumer all jobs are one stream of steps, a tile of keys each: it starts S = Q K^T of this step and O = O + P V of
the step before, looks up what comes next while the tensor cores multiply, and computes the softmax of S. The consumers
take turns in starting products, so that one computes exponentials while another multiplies; where a job ends, the first
S of the next one is made before O leaves, so that the tensor cores do not wait.
"""

from typing import Any, NamedTuple

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
    clear,
    device,
    dot,
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
    sync_warpgroup,
    sync_warpgroups,
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
from .schedule import draw, leave, place_near
from .softmax import LN_2, logsumexp, no_max, softmax_step
from .visibility import band_of, element_test, keys_in_sight, needs_test, sight_type, steps_to_next

ROWS = 64  # of a consumer
REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}  # of a producer's thread and a consumer's, by consumers


class Step(NamedTuple):
    """A tile of queries and a tile of keys, and where the tiles of keys end. As a job: the first step of a tile."""

    batch: Any
    head: Any
    m_block: Any
    n_block: Any
    n_blocks: Any  # 0: there is no such step


NO_STEP = Step(*[np.int32(0)] * 5)


def forward(*, dtype, head_dim, head_dim_v, tile_n, consumers, stages, q_stages, sends, mask, dropout):
    """The kernel for tiles of 64 queries a consumer, tile_n keys and head_dims rounded up to head_dim and head_dim_v.

    stages: tiles of K, and of V, in shared memory at once; q_stages: tiles of Q of each consumer.
    sends: O leaves through shared memory, or else straight from registers.
    """
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    S_TILE, O_TILE = wgmma(tile_n), wgmma(head_dim_v)
    ROW_VECTOR, PARTS = S_TILE.row_vector(), S_TILE.row_parts()
    shared = SharedMemory()
    SHARED_Q = shared.boxes(ROWS, head_dim, dtype, q_stages * consumers)
    SHARED_K, SHARED_V = (shared.boxes(tile_n, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    SHARED_O = shared.boxes(ROWS, head_dim_v, dtype, consumers) if sends else None
    Q_RING = Ring.within(shared, SHARED_Q, readers=1)
    K_RING, V_RING = (Ring.within(shared, tile, consumers) for tile in (SHARED_K, SHARED_V))
    JOBS = Ring.within(shared, shared.tile(1, len(NO_STEP), np.int32, stages=2), readers=consumers + 1)
    CONSUMERS, TURNS, FEW, MANY = np.int32(consumers), consumers, *REGISTERS[consumers]
    TILE_M, TILE_N = np.int32(ROWS * consumers), np.int32(tile_n)
    ZERO, NO_SCORE, NO_MAX, LN2 = ACC(0), ACC(-np.inf), no_max(ACC), ACC(LN_2)
    SUPPLIES, HANDS_OUT = WARPGROUP * consumers, WARPGROUP * consumers + 32       # threads of different warps
    ALIGNED = Alignment(VECTOR_BYTES)
    band_at, sees, tested, steps = band_of(mask), element_test(mask, S_TILE), needs_test(mask), steps_to_next(mask)
    drop = drop_step(S_TILE, dropout)

    @device
    def seen_from(step, sight, n_block):
        """The step with the first tile of keys from n_block on that is not empty."""
        batch, head, m_block, _, n_blocks = step
        left = steps(sight, batch, head, m_block, n_block, 0, 1, np.int32(n_blocks - n_block))
        return Step(batch, head, m_block, np.int32(n_block + left), n_blocks)

    @device
    def job_of(number, sight, seqlen_q, heads, matrices, near):
        m_blocks = quotient(seqlen_q + TILE_M - 1, TILE_M)
        tile, batch, head = place_near(number, m_blocks, matrices, heads, near)
        m_block = np.int32(m_blocks - 1 - tile)                 # the heaviest tiles of a causal mask first
        m0 = np.int32(m_block * TILE_M)
        first, end = keys_in_sight(band_at(sight, batch, head), m0, minimum(m0 + TILE_M, seqlen_q))
        n_block, n_blocks = quotient(first, TILE_N), quotient(end + TILE_N - 1, TILE_N)
        job = seen_from(Step(batch, head, m_block, n_block, n_blocks), sight, n_block)
        if job.n_block >= n_blocks:                             # who sees nothing looks at one tile, all of it masked
            job = Step(batch, head, m_block, np.int32(0), np.int32(1))
        return job

    @device
    def hand_out(mQ, sight, jobs, seqlen_q, heads, matrices, near):
        """One thread: jobs, and their tiles of Q."""
        J, Q = slot(JOBS, 0), slot(Q_RING, 0)
        count, number = np.int32(quotient(seqlen_q + TILE_M - 1, TILE_M) * matrices), np.int32(cuda.blockIdx.x)
        while number < count:
            job = job_of(number, sight, seqlen_q, heads, matrices, near)
            acquire(J)
            tell(J, job)
            J = following(J, 1)
            for group in range(CONSUMERS):
                acquire(Q)
                fill(Q, mQ, job.batch, job.head, np.int32(job.m_block * TILE_M + group * ROWS))
                Q = following(Q, 1)
            number = draw(jobs)
        acquire(J)
        tell(J, NO_STEP)
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
            step, head_k = Step(batch, head, m_block, n_block, n_blocks), quotient(head, group_size)
            while step.n_block < n_blocks:
                n0 = np.int32(step.n_block * TILE_N)
                acquire(K)
                fill(K, mK, batch, head_k, n0)
                K = following(K, 1)
                acquire(V)
                fill(V, mV, batch, head_k, n0)
                V = following(V, 1)
                step = seen_from(step, sight, unforeseen(step.n_block + 1))

    @device
    def step_after(step, J, sight):
        """The next step of this job, else the first one of the next job; whether it is that one; J."""
        step = seen_from(step, sight, np.int32(step.n_block + 1))
        begins = step.n_block >= step.n_blocks
        if begins:
            wait(J)
            batch, head, m_block, n_block, n_blocks = told(J)
            step = Step(batch, head, m_block, n_block, n_blocks)
            sync_warpgroup()                                    # all have read it
            release(J)
            J = following(J, 1)
        return step, begins, J

    @device
    def first_query(step):
        """Of this consumer."""
        return np.int32(step.m_block * TILE_M + warpgroup_index() * ROWS)

    @device
    def masked(S, step, sight):
        batch, head, m_block, n_block, _ = step
        m0, n0, band = first_query(step), np.int32(n_block * TILE_N), band_at(sight, batch, head)
        if tested(sight, band, batch, head, m_block, n_block, m0, np.int32(m0 + ROWS), n0, np.int32(n0 + TILE_N)):
            S = where(sees(sight, band, batch, head, m0, n0), S, NO_SCORE)              # Alg. 2 line 11: MASK(S)
        return S

    @device
    def weights(P, step, drops, heads):
        matrix, n0 = np.int32(step.batch * heads + step.head), np.int32(step.n_block * TILE_N)
        return operand(drop(P, drops, matrix, first_query(step), n0), SHARED_V)         # Alg. 2 line 14

    if mask[0] == "bands":

        @device
        def cut(V, step, sight):
            """What lies beyond the end of a sequence may be NaN, and 0 * NaN is NaN."""
            left = np.int32(band_at(sight, step.batch, step.head)[3] - step.n_block * TILE_N)
            if left < TILE_N:
                wait(V)
                if warpgroup_index() == 0:
                    clear(V.tile, left)
                    share_with_tma()
                sync_warpgroups(TURNS)

    else:  # TMA knows where the matrix ends

        @device
        def cut(V, step, sight):
            pass

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
    def conclude(O, m, l, step, mO, mLse, scale_log2, kept_scale):
        batch, head, m0 = step.batch, step.head, first_query(step)
        total = where(m > NO_MAX, row_sum(l, ZERO), 0)          # 0 if it has seen nothing
        store(mO, O * (reciprocal(total) * kept_scale), batch, head, m0)                # Alg. 1 line 12: O = O / l
        save(mLse[batch, head], logsumexp(m, total, scale_log2, LN2), m0)

    @device
    def consume(mO, mLse, sight, drops, heads, scale_log2, kept_scale):
        J, Q, K, V = slot(JOBS, 0), slot(Q_RING, warpgroup_index()), slot(K_RING, 0), slot(V_RING, 0)
        O, m, l = full(O_TILE, ZERO), full(ROW_VECTOR, NO_MAX), full(PARTS, ZERO)
        if warpgroup_index() == CONSUMERS - 1:
            pass_turn(TURNS)
        before, _, J = step_after(NO_STEP, J, sight)
        wait(Q)
        wait(K)
        S = finished(dot(S_TILE, Q.tile, K.tile.T), 0)
        release(K)
        K = following(K, 1)
        F, m, l, alpha = softmax_step(masked(S, before, sight), m, l, scale_log2)
        P = weights(F, before, drops, heads)
        here, begins, J = step_after(before, J, sight)
        if begins:
            release(Q)
            Q = following(Q, CONSUMERS)
        while True:
            if here.n_blocks == 0:
                break
            if begins:
                wait(Q)
            cut(V, before, sight)
            wait(K)
            take_turn(TURNS)
            S = dot(S_TILE, Q.tile, K.tile.T)                   # Alg. 1 line 9: S = Q K^T, in flight
            wait(V)
            O = dot(O, P, V.tile)                               # line 12: O = O + P V of the step before, in flight
            pass_turn(TURNS)
            after, ends, J = step_after(here, J, sight)
            S = finished(S, 1)
            release(K)
            K = following(K, 1)
            if ends:
                release(Q)
                Q = following(Q, CONSUMERS)
            m_before, l_before = m, l
            if begins:
                m, l = full(ROW_VECTOR, NO_MAX), full(PARTS, ZERO)
            F, m, l, alpha = softmax_step(masked(S, here, sight), m, l, scale_log2)     # lines 10 to 13
            O = finished(O, 0)
            release(V)
            V = following(V, 1)
            P = weights(F, here, drops, heads)
            if begins:
                conclude(O, m_before, l_before, before, mO, mLse, scale_log2, kept_scale)
                O = full(O_TILE, ZERO)
            else:
                O = rescaled(O, alpha)                          # line 12: O = alpha O
            before, here, begins = here, after, ends
        cut(V, before, sight)
        wait(V)
        O = finished(dot(O, P, V.tile), 0)
        conclude(O, m, l, before, mO, mLse, scale_log2, kept_scale)
        if leads():
            sent()

    def kernel(mQ, mK, mV, mO, mLse, sight, drops, jobs, group_size, scale_log2, kept_scale, near):
        batches, heads, seqlen_q = mLse.shape
        heads, seqlen_q, matrices = np.int32(heads), np.int32(seqlen_q), np.int32(batches * heads)
        open_ring(JOBS)
        open_ring(Q_RING)
        open_ring(K_RING)
        open_ring(V_RING)
        cuda.syncthreads()
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

    o_type, number = types.uint64 if sends else array_type(dtype, 4), getattr(types, ACC.__name__)
    signature = types.void(
        *[types.uint64] * 3, o_type, array_type(ACC, 3), sight_type(mask), DROPS, types.uint32[:], types.int32, number,
        number, types.int32,
    )  # fmt: skip
    boxes = [tile.box for tile in (SHARED_Q, SHARED_K, SHARED_V, SHARED_O) if tile]
    threads = WARPGROUP * (consumers + 1)
    return Source(
        kernel, signature, threads, shared=shared.nbytes,
        tensor_maps=tuple(TensorMap(i, box) for i, box in enumerate(boxes)),
    )  # fmt: skip

"""Attention forward on Hopper: Algorithms 1 and 2, and 5 where the mask has blocks, by warpgroups side by side.

A block works on one tile of queries after the other: jobs. One thread hands them out with their tiles of Q, and brings
home the tiles of O that it finds in their places; another one supplies the tiles of K and V that they need. The other
warpgroups, the consumers, keep 64 queries of a job each and walk over the keys in their sight: S = Q K^T of a tile and
O = O + P V of the tile before are in flight together, then the softmax of S follows. No consumer waits for another, so
while one of them computes exponentials, or ends a job, the tensor cores work for the others.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.cuda import types

from ..build import Source, TensorMap
from ..tile import (
    WARPGROUP,
    WARPGROUP_ROWS,
    Ring,
    SharedMemory,
    acquire,
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
    let_kernel_after_start,
    maximum,
    minimum,
    open_ring,
    operand,
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
    sync_warp,
    sync_warpgroup,
    sync_warpgroups,
    take_registers,
    tell,
    told,
    unforeseen,
    wait,
    wait_for_kernel_before,
    warpgroup_index,
    wgmma,
    where,
)
from .dropout import DROPS, drop_step
from .layouts import DTYPES, array_type, sum_type
from .schedule import draw, leave, place_near
from .softmax import LN_2, logsumexp, no_max, softmax_step
from .visibility import band_of, element_test, keys_in_sight, needs_test, sight_type, steps_to_next

ROWS = WARPGROUP_ROWS  # of a consumer
JOBS_AHEAD = 4  # told before they begin, the present one among them
REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}  # of a producer's thread, a consumer's


class Job(NamedTuple):
    """A tile of queries, and the tiles of keys [n_block, n_blocks) in its sight."""

    batch: Any
    head: Any
    m_block: Any
    n_block: Any  # the first one that is not empty
    n_blocks: Any  # 0: there is no such job


class Rows(NamedTuple):
    """What a consumer has of its queries: O lacks alpha, and P times V, of the last tile."""

    O: Any
    P: Any
    m: Any
    l: Any
    alpha: Any


NO_JOB = Job(*[np.int32(0)] * len(Job._fields))


def forward(*, dtype, head_dim, head_dim_v, tile_n, consumers, stages, q_places, mask, dropout):
    """The kernel for tiles of 64 queries a consumer, tile_n keys and head_dims rounded up to head_dim and head_dim_v.

    near: see `schedule`. abreast: where one job has room for all queries of several heads of a group, it takes so many,
    and they share the tiles of K and V. upward: the first tiles of queries come first, else the last ones.

    stages: tiles of K, and of V, in shared memory at once; q_places: tiles of Q, or of O where they were.
    """
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    S_TILE, O_TILE = wgmma(tile_n), wgmma(head_dim_v)
    ROW_VECTOR, PARTS = S_TILE.row_vector(), S_TILE.row_parts()
    shared = SharedMemory()
    SHARED_Q = shared.boxes(ROWS, head_dim, dtype, q_places, room=head_dim_v)
    SHARED_O = SHARED_Q.of_columns(head_dim_v)
    SHARED_K, SHARED_V = (shared.boxes(tile_n, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    Q_RING = Ring.within(shared, SHARED_Q, readers=1)
    K_RING, V_RING = (Ring.within(shared, tile, consumers) for tile in (SHARED_K, SHARED_V))
    HOMES = Ring.within(shared, shared.tile(1, 3, np.int32, stages=q_places), readers=1)    # of the tiles of O
    JOBS = Ring.within(shared, shared.tile(1, len(NO_JOB), np.int32, stages=JOBS_AHEAD), readers=consumers + 1)
    CONSUMERS, PLACES, FEW, MANY = np.int32(consumers), np.int32(q_places), *REGISTERS[consumers]
    TILE_M, TILE_N = np.int32(ROWS * consumers), np.int32(tile_n)
    ZERO, NO_SCORE, NO_MAX, LN2 = ACC(0), ACC(-np.inf), no_max(ACC), ACC(LN_2)
    SUPPLIES, HANDS_OUT = WARPGROUP * consumers, WARPGROUP * consumers + 32       # threads of different warps
    band_at, sees, tested, steps = band_of(mask), element_test(mask, S_TILE), needs_test(mask), steps_to_next(mask)
    drop, GRIDS = drop_step(S_TILE, dropout), len(mask) > 1
    RESCALES_FIRST = head_dim_v > 192  # more of O than can be rescaled while S is in flight

    @device
    def seen_from(job, sight, n_block):
        """The first tile of keys from n_block on that is not empty."""
        left = steps(sight, job.batch, job.head, job.m_block, n_block, np.int32(job.n_blocks - n_block))
        return np.int32(n_block + left)

    @device
    def blocks_in_sight(sight, batch, head, m0, m_end):
        """Tiles of keys [first, end)."""
        first, end = keys_in_sight(band_at(sight, batch, head), m0, m_end)
        return quotient(first, TILE_N), quotient(end + TILE_N - 1, TILE_N)

    @device
    def job_of(number, sight, seqlen_q, m_blocks, heads, matrices, near, abreast, upward):
        tile, batch, head = place_near(number, m_blocks, matrices, heads, near)
        head = np.int32(head * abreast)
        m_block = tile if upward else np.int32(m_blocks - 1 - tile)     # the heaviest first, if the mask is causal
        m0 = np.int32(m_block * TILE_M)
        first, end = blocks_in_sight(sight, batch, head, m0, minimum(m0 + TILE_M, seqlen_q))
        n_block = seen_from(Job(batch, head, m_block, first, end), sight, first)
        if n_block >= end:                                      # who sees nothing looks at one tile, all of it masked
            n_block, end = np.int32(0), np.int32(1)
        return Job(batch, head, m_block, n_block, end)

    @device
    def share_of(job, consumer, abreast):
        """The head and the first query that a consumer takes: neighbours take neighbouring heads or queries."""
        head, row = np.int32(consumer), np.int32(0)
        while head >= abreast:                                  # a division would take more registers
            head, row = np.int32(head - abreast), np.int32(row + 1)
        return np.int32(job.head + head), np.int32(job.m_block * TILE_M + row * ROWS)

    @device
    def make_room(Q, count, mO):
        """Bring the O home that lies where tile number `count` of Q is to be."""
        acquire(Q)
        if count >= PLACES:
            batch, head, m0 = told(slot(HOMES, Q.stage))
            send(mO, allocate(SHARED_O, Q.stage), batch, head, m0)
            sent()

    @device
    def hand_out(mQ, mO, sight, jobs, seqlen_q, heads, matrices, near, abreast, upward):
        """One thread: jobs, and their tiles of Q and O."""
        J, Q, count = slot(JOBS, 0), slot(Q_RING, 0), np.int32(0)
        m_blocks = quotient(seqlen_q + TILE_M - 1, TILE_M)
        heads, matrices = quotient(heads, abreast), quotient(matrices, abreast)     # of heads abreast
        number = np.int32(cuda.blockIdx.x)
        while number < m_blocks * matrices:
            job = job_of(number, sight, seqlen_q, m_blocks, heads, matrices, near, abreast, upward)
            acquire(J)
            tell(J, job)
            J = following(J, 1)
            consumer = np.int32(0)
            while consumer < CONSUMERS:
                head, m0 = share_of(job, consumer, abreast)
                make_room(Q, count, mO)
                tell(slot(HOMES, Q.stage), (job.batch, head, m0))
                fill(Q, mQ, job.batch, head, m0)
                Q, count = following(Q, 1), np.int32(count + 1)
                consumer = unforeseen(consumer + 1)
            number = draw(jobs)
        acquire(J)
        tell(J, NO_JOB)
        leave(jobs)
        end = np.int32(count + PLACES)
        while count < end:
            make_room(Q, count, mO)
            Q, count = following(Q, 1), unforeseen(count + 1)

    @device
    def supply(mK, mV, sight, group_size):
        """Another thread: the tiles of K and V that the jobs need, as fast as there is room."""
        J, K, V = slot(JOBS, 0), slot(K_RING, 0), slot(V_RING, 0)
        while True:
            wait(J)
            job = Job(*told(J))
            release(J)
            J = following(J, 1)
            if job.n_blocks == 0:
                break
            n_block, head_k = job.n_block, quotient(job.head, group_size)
            while n_block < job.n_blocks:
                n0 = np.int32(n_block * TILE_N)
                acquire(K)
                fill(K, mK, job.batch, head_k, n0)
                K = following(K, 1)
                acquire(V)
                fill(V, mV, job.batch, head_k, n0)
                V = following(V, 1)
                n_block = seen_from(job, sight, unforeseen(n_block + 1))

    @device
    def leave_to_others(K, V, job, sight, n_block, end):
        """Go on to the first tile of keys from `end` on."""
        while n_block < end:
            wait(K)
            wait(V)
            sync_warpgroup()                                    # no warp may miss a round of the ring
            release(K)
            release(V)
            K, V = following(K, 1), following(V, 1)
            n_block = seen_from(job, sight, unforeseen(n_block + 1))
        return K, V, n_block

    @device
    def at_the_edge(job, sight, m0, n_block):
        """Whether the elements of this tile have to be tested."""
        batch, head, n0, band = job.batch, job.head, np.int32(n_block * TILE_N), band_at(sight, job.batch, job.head)
        m_end, n_end = np.int32(m0 + ROWS), np.int32(n0 + TILE_N)
        return tested(sight, band, batch, head, job.m_block, n_block, m0, m_end, n0, n_end)

    @device
    def masked(S, job, sight, m0, n_block):
        batch, head, n0, band = job.batch, job.head, np.int32(n_block * TILE_N), band_at(sight, job.batch, job.head)
        return where(sees(sight, band, batch, head, m0, n0), S, NO_SCORE)               # Alg. 2 line 11: MASK(S)

    @device
    def unmasked(S, job, sight, m0, n_block):
        return S

    @device
    def weights(P, job, drops, heads, m0, n_block):
        matrix = np.int32(job.batch * heads + job.head)
        return operand(drop(P, drops, matrix, m0, np.int32(n_block * TILE_N)), SHARED_V)    # Alg. 2 line 14

    if mask[0] == "bands":

        @device
        def own_blocks(job, m0, sight):
            return job.n_block, job.n_blocks

        @device
        def cut(V, job, sight, n_block):
            """What lies beyond the end of a sequence may be NaN, and 0 * NaN is NaN. All consumers come here."""
            left = np.int32(band_at(sight, job.batch, job.head)[3] - n_block * TILE_N)
            if left < TILE_N:
                wait(V)
                if warpgroup_index() == 0:
                    clear(V.tile, left)
                    share_with_tma()
                sync_warpgroups(consumers)

    else:  # TMA knows where the matrix ends

        @device
        def own_blocks(job, m0, sight):
            """The tiles of keys [first, end) that this consumer does not leave to the others: one at least."""
            first, end = blocks_in_sight(sight, job.batch, job.head, m0, np.int32(m0 + ROWS))
            if GRIDS or first >= end:
                first = job.n_block
            return first, minimum(maximum(end, first + 1), job.n_blocks)

        @device
        def cut(V, job, sight, n_block):
            pass

    def step_with(mask):
        @device
        def step(rows, Q, K, V, job, m0, before, here, sight, drops, heads, scale_log2):
            """The tile `here`, once the tile `before` is all but multiplied by V. Returns it and the next one, too."""
            O, P, m, l, alpha = rows
            if RESCALES_FIRST:
                O = rescaled(O, alpha)
            cut(V, job, sight, before)
            wait(K)
            S = dot(S_TILE, Q.tile, K.tile.T)                   # Alg. 1 line 9: S = Q K^T, in flight
            if not RESCALES_FIRST:
                O = rescaled(O, alpha)                          # line 12: O = alpha O
            wait(V)
            O = dot(O, P, V.tile)                               # line 12: O = O + P V of the tile before, in flight
            after = seen_from(job, sight, np.int32(here + 1))
            S = finished(S, 1)
            release(K)
            F, m, l, alpha = softmax_step(mask(S, job, sight, m0, here), m, l, scale_log2)      # lines 10 to 13
            O = finished(O, 0)
            release(V)
            P = weights(F, job, drops, heads, m0, here)
            return Rows(O, P, m, l, alpha), following(K, 1), following(V, 1), here, after

        return step

    step, step_at_the_edge = step_with(unmasked), step_with(masked)

    @device
    def share_told(J, abreast):
        """What a job is to this consumer, and its first query."""
        wait(J)
        job = Job(*told(J))
        head, m0 = share_of(job, warpgroup_index(), abreast)
        return Job(job.batch, head, job.m_block, job.n_block, job.n_blocks), m0

    @device
    def consume(mLse, sight, drops, heads, scale_log2, kept_scale, abreast):
        J, Q, K, V = slot(JOBS, 0), slot(Q_RING, warpgroup_index()), slot(K_RING, 0), slot(V_RING, 0)
        job, m0 = share_told(J, abreast)
        while job.n_blocks > 0:
            first, end = own_blocks(job, m0, sight)
            K, V, before = leave_to_others(K, V, job, sight, job.n_block, first)
            m, l = full(ROW_VECTOR, NO_MAX), full(PARTS, ZERO)
            acquire(Q)                                          # another consumer had this stage before: see ring
            wait(Q)
            wait(K)
            S = finished(dot(S_TILE, Q.tile, K.tile.T), 0)
            release(K)
            K = following(K, 1)
            if at_the_edge(job, sight, m0, before):
                S = masked(S, job, sight, m0, before)
            F, m, l, alpha = softmax_step(S, m, l, scale_log2)
            rows = Rows(full(O_TILE, ZERO), weights(F, job, drops, heads, m0, before), m, l, alpha)
            here = seen_from(job, sight, np.int32(before + 1))
            while here < end:
                # Nearly all of the time goes here: a loop of its own is 1 to 2 % faster than one with if and else.
                while here < end and not at_the_edge(job, sight, m0, here):
                    rows, K, V, before, here = step(
                        rows, Q, K, V, job, m0, before, here, sight, drops, heads, scale_log2
                    )
                if here < end:
                    rows, K, V, before, here = step_at_the_edge(
                        rows, Q, K, V, job, m0, before, here, sight, drops, heads, scale_log2
                    )
            O, P, m, l, alpha = rows
            cut(V, job, sight, before)
            wait(V)
            O = dot(rescaled(O, alpha), P, V.tile)
            total = row_sum(l, ZERO)                            # 0 if it has seen nothing
            save(mLse[job.batch, job.head], logsumexp(m, total, scale_log2, LN2), m0)
            job_next, m0_next = share_told(following(J, 1), abreast)
            O = finished(O, 0)
            release(V)
            V = following(V, 1)
            K, V, _ = leave_to_others(K, V, job, sight, here, job.n_blocks)
            sync_warpgroup()                                    # all have read Q
            put(allocate(SHARED_O, Q.stage), O * (reciprocal(total) * kept_scale))      # line 12: O = O / l
            share_with_tma()
            sync_warpgroup()
            release(Q)                                          # with O in its place
            Q = following(Q, CONSUMERS)
            release(J)
            J, job, m0 = following(J, 1), job_next, m0_next
            sync_warp()                                         # the first thread had more to do

    def kernel(mQ, mK, mV, mO, mLse, sight, drops, jobs, group_size, scale_log2, kept_scale, near, abreast, upward):
        batches, heads, seqlen_q = mLse.shape
        heads, seqlen_q, matrices = np.int32(heads), np.int32(seqlen_q), np.int32(batches * heads)
        open_ring(JOBS)
        open_ring(Q_RING)
        open_ring(HOMES)
        open_ring(K_RING)
        open_ring(V_RING)
        let_kernel_after_start()
        wait_for_kernel_before()
        cuda.syncthreads()
        if warpgroup_index() == CONSUMERS:
            give_registers(FEW)
            if cuda.threadIdx.x == HANDS_OUT:
                expect(mQ)
                expect(mO)
                hand_out(mQ, mO, sight, jobs, seqlen_q, heads, matrices, near, abreast, upward)
            if cuda.threadIdx.x == SUPPLIES:
                expect(mK)
                expect(mV)
                supply(mK, mV, sight, group_size)
        else:
            take_registers(MANY)
            consume(mLse, sight, drops, heads, scale_log2, kept_scale, abreast)

    number = getattr(types, ACC.__name__)
    signature = types.void(
        *[types.uint64] * 4, array_type(ACC, 3), sight_type(mask), DROPS, types.uint32[:], types.int32, number,
        number, *[types.int32] * 3,
    )  # fmt: skip
    boxes = [tile.box for tile in (SHARED_Q, SHARED_K, SHARED_V, SHARED_O)]
    threads = WARPGROUP * (consumers + 1)
    return Source(
        kernel, signature, threads, shared=shared.nbytes, overlaps=True,
        tensor_maps=tuple(TensorMap(i, box) for i, box in enumerate(boxes)),
    )  # fmt: skip

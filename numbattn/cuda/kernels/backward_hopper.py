"""Attention backward on Hopper (wgmma, TMA): Algorithm 4, warp-specialised.

Two kernels keep a tile of keys and loop over the queries in its sight: dK and dV. `backward_kv` can also add up dQ, in
global memory, together with all other blocks; `round_dq` then rounds the sums. In `backward_wide`, for larger
head_dims, a consumer has registers for only one of the accumulators: the first one computes P and dV, the second dS and
dK. `backward_q` keeps a tile of queries and loops over the keys: dQ without sums between blocks, bitwise reproducible.

One thread of the last warpgroup is the producer, which TMA-loads tiles into pipelines; the other warpgroups are
consumers. Where keys are kept, S, P, dP and dS are transposed, a row is a key: P and dS are so left operands of dV and
dK in the registers where they are. For dQ = dS K, dS goes through shared memory, a step late, so that no consumer waits
for what another one computes at that moment. At the end of a step S of the next tile is in flight already.

As in `backward` MASK follows the exponential. lse is in base 2, and +inf where nothing is seen: P is 0 there. Rows
beyond a sequence's length may be NaN, and 0 * NaN is NaN: tiles are cleared beyond it before they are multiplied.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.cuda import types

from ..build import Source, TensorMap
from ..spec import DROPOUT, MASK, Boxes, Line, Matrix, Spec, Sums
from ..tile import (
    INDEX,
    WARPGROUP,
    WARPGROUP_ROWS,
    Alignment,
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    aligned,
    allocate,
    block_index,
    bulk_add,
    bulk_load,
    clear,
    commit,
    decrease_registers,
    device,
    dot,
    exp2,
    fence_async_proxy,
    full,
    get,
    get_registers,
    increase_registers,
    index,
    init_pipeline,
    launch_dependents,
    load,
    load_registers,
    maximum,
    minimum,
    opaque,
    operand,
    prefetch_tensor_map,
    put,
    put_registers,
    release,
    save,
    shape,
    stage,
    sync_threads,
    sync_warpgroup,
    sync_warpgroups,
    thread_index,
    tma_load,
    tma_store_wait,
    wait,
    wait_on_dependencies,
    warpgroup_index,
    wgmma,
    wgmma_wait,
    where,
)
from .dropout import DROPS, keep_test
from .forward_hopper import head_dims, matrices_in_l2, takes
from .layouts import DTYPES, array_type
from .schedule import place, place_grouped
from .tables import compiled_in
from .visibility import (
    band_of,
    element_test,
    keys_in_sight,
    needs_test,
    queries_in_sight,
    sight_type,
    steps_to_next,
)

ROWS = WARPGROUP_ROWS  # of a consumer: keys, or queries
PART = 64  # rows and columns of a part of dQ
CONSUMERS = 2
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
PRODUCER = WARPGROUP * CONSUMERS  # its thread
ZERO = np.float32(0)


class Keys(NamedTuple):
    """The tile of keys that a block keeps: keys [first, end) of a head, which query heads [head, heads) see."""

    batch: Any
    head_k: Any
    head: Any
    heads: Any
    n_block: Any
    first: Any
    end: Any


class Queries(NamedTuple):
    """A tile of queries in sight, number m_block of a head; if m_block is m_blocks there is none left."""

    head: Any
    m_block: Any
    m_blocks: Any


class Call(NamedTuple):
    """What consumers need of the kernel's arguments."""

    sight: Any
    drops: Any
    heads: Any
    scale_log2: Any
    kept_scale: Any


# -------------------------------------------------------------------------------------------------- what they share
def dropout_steps(layout, dropout, transposed):
    """Device functions of lines 14 to 20: `mark` P, with a minus sign where it is dropped; P Z; dS."""
    if not dropout:

        @device
        def mark(P, drops, matrix, m0, n0):
            return P

        @device
        def kept(P):
            return P

        @device
        def dS_of(P, dP, D, kept_scale):
            return P * (dP - D)

        return mark, kept, dS_of

    keeps = keep_test(layout, transposed)

    @device
    def mark(P, drops, matrix, m0, n0):
        return where(keeps(drops, matrix, m0, n0), P, ZERO - P)

    @device
    def kept(P):
        return maximum(P, 0)

    @device
    def dS_of(P, dP, D, kept_scale):
        return maximum(P, 0) * (dP * kept_scale) - abs(P) * D

    return mark, kept, dS_of


def clear_step(rows, clears):
    """The device function (one, other, length): zero two tiles of so many rows from `length` on. By all consumers."""

    @device
    def clear_beyond(one, other, length):
        if length < rows:
            wait(one)
            wait(other)
            if warpgroup_index() == 0:
                clear(one.tile, length)
                clear(other.tile, length)
                fence_async_proxy()
            sync_warpgroups(CONSUMERS)

    @device
    def keep(one, other, length):                               # TMA fills in zeros beyond the matrix
        pass

    return clear_beyond if clears else keep


def queries_steps(mask, tile_m):
    """Device functions that walk over the queries in sight of a tile of keys, head by head: the first, the next tile.
    And whether a tile needs a test per element."""
    TILE_M = tile_m
    band_at, tested, steps = band_of(mask), needs_test(mask), steps_to_next(mask)

    @device
    def queries_from(sight, tile, head):
        m_block, m_blocks = index(0), index(0)
        while head < tile.heads and m_block >= m_blocks:
            first, end = queries_in_sight(band_at(sight, tile.batch, head), tile.first, tile.end)
            m_block, m_blocks = first // TILE_M, (end + TILE_M - 1) // TILE_M
            m_block = m_block + steps(sight, tile.batch, head, tile.n_block, m_block, m_blocks - m_block)
            head = opaque(head + 1)
        return Queries(head - 1, m_block, m_blocks)

    @device
    def first_queries(sight, tile):
        return queries_from(sight, tile, tile.head)

    @device
    def next_queries(sight, tile, at):
        m_block = opaque(at.m_block + 1)
        m_block = m_block + steps(sight, tile.batch, at.head, tile.n_block, m_block, at.m_blocks - m_block)
        if m_block < at.m_blocks:
            return Queries(at.head, m_block, at.m_blocks)
        return queries_from(sight, tile, at.head + 1)

    @device
    def needs_mask(sight, tile, at, n0):
        band, m0 = band_at(sight, tile.batch, at.head), at.m_block * TILE_M
        return tested(
            sight, band, tile.batch, at.head, tile.n_block, at.m_block, m0, m0 + TILE_M, n0, n0 + ROWS
        )  # fmt: skip

    return first_queries, next_queries, needs_mask


def key_lengths(mask):
    """The device function (sight, tile): beyond which key all heads of a tile's group see nothing."""
    band_at = band_of(mask)

    @device
    def longest(sight, tile):
        keys = index(0)
        for head in range(tile.head, tile.heads):
            _, _, queries, length = band_at(sight, tile.batch, head)
            if queries > 0:
                keys = maximum(keys, length)
        return keys

    return longest


@device
def wait_for(filled, count):
    """Wait for so many stages of a pipeline."""
    for _ in range(count):
        wait(filled)
        filled = advance(filled, 1)


@device
def is_first_of_warpgroup():
    return thread_index() % WARPGROUP == 0


def loader(mask, tile_m, pipelines, parts):
    """The device function of the producer where keys are kept; `parts` tiles of K and V of 64 rows, then Q and dO."""
    K_PIPELINE, V_PIPELINE, Q_PIPELINE, DO_PIPELINE, SHARED_LSE, SHARED_DELTA = pipelines
    TILE_M, PARTS = tile_m, parts
    first_queries, next_queries, _ = queries_steps(mask, tile_m)

    @device
    def load_tiles(mQ, mK, mV, mDO, mLse, mDelta, sight, tile):
        K, V, Q, dO = stage(K_PIPELINE, 0), stage(V_PIPELINE, 0), stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0)
        for part in range(PARTS):
            tma_load(K, mK, tile.batch, tile.head_k, tile.first + part * ROWS)
            tma_load(V, mV, tile.batch, tile.head_k, tile.first + part * ROWS)
            K, V = advance(K, 1), advance(V, 1)
        at = first_queries(sight, tile)
        while at.m_block < at.m_blocks:
            m0 = at.m_block * TILE_M
            acquire(Q)
            tma_load(Q, mQ, tile.batch, at.head, m0)
            bulk_load(Q, allocate(SHARED_LSE, Q.index), mLse[tile.batch, at.head], m0)
            bulk_load(Q, allocate(SHARED_DELTA, Q.index), mDelta[tile.batch, at.head], m0)
            acquire(dO)
            tma_load(dO, mDO, tile.batch, at.head, m0)
            Q, dO = advance(Q, 1), advance(dO, 1)
            at = next_queries(sight, tile, at)

    return load_tiles


# -------------------------------------------------------------------------------------------------------- dK and dV
def backward_kv(
    *, dtype, out_dtypes, head_dim, head_dim_v, tile_m, tile_n, stages, dv_first, adds_dq, mask, dropout, nbytes
):  # fmt: skip
    """dK and dV, 64 keys a consumer; if it adds_dq, sums for dQ, of which a consumer computes 64 rows and columns.

    stages: of the pipelines of Q and of dO. dv_first: whether dV is in flight while dS is computed, which takes more
    registers.
    """
    dtype = DTYPES[dtype]
    S_TILE, K_TILE, V_TILE, Q_TILE = wgmma(tile_m), wgmma(head_dim), wgmma(head_dim_v), wgmma(PART)
    COLS = S_TILE.col_vector()
    shared = SharedMemory()
    SHARED_K, SHARED_V = (shared.boxes(ROWS, cols, dtype, CONSUMERS) for cols in (head_dim, head_dim_v))
    SHARED_Q, SHARED_DO = (shared.boxes(tile_m, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    SHARED_DS = shared.boxes(ROWS, tile_m, dtype, 2 * CONSUMERS if adds_dq else 0)
    SHARED_DQ = shared.tile(1, PART * PART, np.float32, CONSUMERS if adds_dq else 0)
    SHARED_LSE, SHARED_DELTA = (shared.tile(1, tile_m, np.float32, stages) for _ in range(2))
    K_PIPELINE, V_PIPELINE = (Pipeline.within(shared, tile, readers=1) for tile in (SHARED_K, SHARED_V))
    Q_PIPELINE, DO_PIPELINE = (
        Pipeline.within(shared, tile, CONSUMERS, fills) for tile, fills in ((SHARED_Q, 3), (SHARED_DO, 1))
    )
    DS_PIPELINE = Pipeline.within(shared, SHARED_DS.of_stages(2), CONSUMERS, fills=CONSUMERS)
    K_PARTS, DS_PARTS = SHARED_K.parts(PART), SHARED_DS.parts(PART)
    ROW_PARTS, COL_PARTS = tile_m // PART, head_dim // PART
    TILE_M, TILE_N, ROWS_OF = tile_m, ROWS * CONSUMERS, Alignment(nbytes)
    band_at, sees, longest = band_of(mask), element_test(mask, S_TILE, transposed=True), key_lengths(mask)
    first_queries, next_queries, needs_mask = queries_steps(mask, tile_m)
    mark, kept, dS_of = dropout_steps(S_TILE, dropout, transposed=True)
    clear_queries, CLEARS_KEYS = clear_step(tile_m, "queries" in mask), "keys" in mask
    pipelines = K_PIPELINE, V_PIPELINE, Q_PIPELINE, DO_PIPELINE, SHARED_LSE, SHARED_DELTA
    load_tiles = loader(mask, tile_m, pipelines, CONSUMERS)
    if adds_dq and ROW_PARTS * COL_PARTS != CONSUMERS:
        raise ValueError(f"tile_m: got {tile_m} for head_dim {head_dim}, expected {CONSUMERS} parts of dQ")

    @device
    def scores(K, Q, dO, tile, at, call):
        """S of a tile of queries, transposed, in flight."""
        clear_queries(Q, dO, band_at(call.sight, tile.batch, at.head)[2] - at.m_block * TILE_M)
        wait(Q)
        return dot(S_TILE, K, Q.tile.T)                         # Alg. 4 line 11: S = Q K^T

    @device
    def share(dS, E):
        """Let all consumers read dS. This one's place for dQ is then free, too."""
        acquire(E)
        if is_first_of_warpgroup():
            tma_store_wait()
        put(allocate(SHARED_DS, E.index * CONSUMERS + warpgroup_index()), dS)
        fence_async_proxy()
        sync_warpgroup()
        commit(E)

    @device
    def dq_part(E):
        """dS K of all keys of the block, in flight: the 64 queries and 64 columns that are this consumer's."""
        part = warpgroup_index()
        rows, cols, first = part // COL_PARTS, part % COL_PARTS, E.index * CONSUMERS
        wait(E)
        dQ = dot(Q_TILE, allocate(DS_PARTS, first * ROW_PARTS + rows).T, allocate(K_PARTS, cols))
        for consumer in range(1, CONSUMERS):
            dS, K = (first + consumer) * ROW_PARTS + rows, consumer * COL_PARTS + cols
            dQ = dot(dQ, allocate(DS_PARTS, dS).T, allocate(K_PARTS, K))
        return dQ

    @device
    def add_dq(dQ, E, last, mSums, tile):
        """dQ, of the tile of queries `last`, if any, to the sums in global memory."""
        release(E)
        if last.m_blocks > 0:
            part = warpgroup_index()
            put_registers(allocate(SHARED_DQ, part), dQ)
            fence_async_proxy()
            sync_warpgroup()
            if is_first_of_warpgroup():
                bulk_add(mSums[tile.batch, last.head], last.m_block * CONSUMERS + part, allocate(SHARED_DQ, part))

    def step_with(masks, has_next):
        AFTER_DQ = int(has_next)                                # products that are started after it
        AFTER_DK, AFTER_DP = AFTER_DQ + CONSUMERS * adds_dq, int(dv_first)

        @device
        def step(dK, dV, S, K, V, Q, dO, E, tile, last, at, after, n0, mSums, call):
            """dV and dK of the tile of queries `at`, dQ of the one before, S of the one after."""
            batch, m0 = tile.batch, at.m_block * TILE_M
            band = band_at(call.sight, batch, at.head)
            wait(dO)
            dP = dot(S_TILE, V, dO.tile.T)                      # line 17: dP = dO V^T, transposed, in flight
            P = exp2(S * call.scale_log2 - get(allocate(SHARED_LSE, Q.index), COLS))    # line 13: P = exp(S - lse)
            if masks:
                P = where(sees(call.sight, band, batch, at.head, m0, n0), P, 0)     # line 12: MASK
            P = mark(P, call.drops, batch * call.heads + at.head, m0, n0)           # line 14
            if dv_first:
                dV = dot(dV, operand(kept(P), SHARED_DO), dO.tile)      # line 16: dV += (P Z)^T dO, in flight
            dP = wgmma_wait(dP, AFTER_DP)
            dS = dS_of(P, dP, get(allocate(SHARED_DELTA, Q.index), COLS), call.kept_scale)      # line 20
            if not dv_first:
                dV = dot(dV, operand(kept(P), SHARED_DO), dO.tile)
            if adds_dq:
                share(dS, advance(E, 1))
            else:
                sync_warpgroup()                                # all have read lse and delta
            dK = dot(dK, operand(dS, SHARED_Q), Q.tile)         # line 22: dK += dS^T Q, in flight
            dV = wgmma_wait(dV, 1)
            release(dO)
            if adds_dq:
                dQ = dq_part(E)                                 # line 21: dQ += dS K, in flight
            if has_next:
                S = scores(K, advance(Q, 1), advance(dO, 1), tile, after, call)
            dK = wgmma_wait(dK, AFTER_DK)
            release(Q)
            if adds_dq:
                add_dq(wgmma_wait(dQ, AFTER_DQ), E, last, mSums, tile)
            return dK, dV, wgmma_wait(S, 0)

        return step

    step, masked_step, last_step = step_with(False, True), step_with(True, True), step_with(True, False)

    @device
    def compute(mDK, mDV, mSums, tile, scale, call):
        """The consumers, whole warpgroups."""
        consumer = warpgroup_index()
        K, V, n0 = allocate(SHARED_K, consumer), allocate(SHARED_V, consumer), tile.first + consumer * ROWS
        Q, dO, E = stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0), stage(DS_PIPELINE, 0)
        dK, dV = full(K_TILE, ZERO), full(V_TILE, ZERO)
        wait_for(stage(K_PIPELINE, 0), CONSUMERS)
        wait_for(stage(V_PIPELINE, 0), CONSUMERS)
        if CLEARS_KEYS:
            left = longest(call.sight, tile) - n0
            clear(K, left)
            clear(V, left)
            fence_async_proxy()
            sync_warpgroups(CONSUMERS)
        last, at = Queries(index(0), index(0), index(0)), first_queries(call.sight, tile)
        if at.m_block < at.m_blocks:
            if adds_dq:
                share(full(S_TILE, ZERO), E)                    # before the first tile there is no dS
            S = wgmma_wait(scores(K, Q, dO, tile, at, call), 0)
            after = next_queries(call.sight, tile, at)
            while after.m_block < after.m_blocks:
                while after.m_block < after.m_blocks and not needs_mask(call.sight, tile, at, n0):
                    dK, dV, S = step(dK, dV, S, K, V, Q, dO, E, tile, last, at, after, n0, mSums, call)
                    Q, dO, E = advance(Q, 1), advance(dO, 1), advance(E, 1)
                    last, at, after = at, after, next_queries(call.sight, tile, after)
                if after.m_block < after.m_blocks:
                    dK, dV, S = masked_step(dK, dV, S, K, V, Q, dO, E, tile, last, at, after, n0, mSums, call)
                    Q, dO, E = advance(Q, 1), advance(dO, 1), advance(E, 1)
                    last, at, after = at, after, next_queries(call.sight, tile, after)
            dK, dV, S = last_step(dK, dV, S, K, V, Q, dO, E, tile, last, at, after, n0, mSums, call)
            if adds_dq:
                dQ = wgmma_wait(dq_part(advance(E, 1)), 0)
                if is_first_of_warpgroup():
                    tma_store_wait()
                sync_warpgroup()
                add_dq(dQ, advance(E, 1), at, mSums, tile)
                if is_first_of_warpgroup():
                    tma_store_wait()
        save(aligned(mDK[tile.batch, tile.head_k], ROWS_OF), dK * scale, n0)    # line 24
        save(aligned(mDV[tile.batch, tile.head_k], ROWS_OF), dV * call.kept_scale, n0)

    def kernel(
        mQ, mK, mV, mDO, mDK, mDV, mSums, mLse, mDelta, sight, drops, group_size, scale, scale_log2, kept_scale, at_once
    ):
        batches, heads, _ = shape(mLse)
        _, heads_k, seqlen_k, _ = shape(mDK)
        n_blocks = (seqlen_k + TILE_N - 1) // TILE_N
        n_block, batch, head_k = place_grouped(block_index(), n_blocks, batches * heads_k, heads_k, at_once)
        n0, head = n_block * TILE_N, head_k * group_size
        tile = Keys(batch, head_k, head, head + group_size, n_block, n0, minimum(n0 + TILE_N, seqlen_k))
        init_pipeline(K_PIPELINE)
        init_pipeline(V_PIPELINE)
        init_pipeline(Q_PIPELINE)
        init_pipeline(DO_PIPELINE)
        init_pipeline(DS_PIPELINE)
        launch_dependents()
        wait_on_dependencies()
        sync_threads()
        if warpgroup_index() == CONSUMERS:
            decrease_registers(PRODUCER_REGISTERS)
            if thread_index() == PRODUCER:
                prefetch_tensor_map(mQ)
                prefetch_tensor_map(mDO)
                load_tiles(mQ, mK, mV, mDO, mLse, mDelta, sight, tile)
        else:
            increase_registers(CONSUMER_REGISTERS)
            compute(mDK, mDV, mSums, tile, scale, Call(sight, drops, heads, scale_log2, kept_scale))

    line, number = array_type(np.float32, 3), types.float32
    dk, dv = (array_type(DTYPES[out], 4) for out in out_dtypes)
    signature = types.void(
        *[types.uint64] * 4, dk, dv, line, line, line, sight_type(mask), DROPS, INDEX, number, number, number, INDEX
    )
    return source(kernel, signature, shared, (SHARED_Q, SHARED_K, SHARED_V, SHARED_DO))


def source(kernel, signature, shared, tiles):
    """tiles: of the tensor maps, which are the first arguments."""
    maps = tuple(TensorMap(i, tile.box) for i, tile in enumerate(tiles))
    threads = WARPGROUP * (CONSUMERS + 1)
    return Source(kernel, signature, threads, shared=shared.nbytes, overlaps=True, tensor_maps=maps)


def backward_wide(*, dtype, out_dtypes, head_dim, head_dim_v, tile_m, tile_n, stages, mask, dropout, nbytes):
    """dK and dV of 64 keys: the first consumer computes S, P and dV, the second one dP, dS and dK."""
    dtype = DTYPES[dtype]
    S_TILE, K_TILE, V_TILE = wgmma(tile_m), wgmma(head_dim), wgmma(head_dim_v)
    COLS = S_TILE.col_vector()
    shared = SharedMemory()
    SHARED_K, SHARED_V = (shared.boxes(ROWS, cols, dtype, 1) for cols in (head_dim, head_dim_v))
    SHARED_Q, SHARED_DO = (shared.boxes(tile_m, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    SHARED_P = shared.tile(1, ROWS * tile_m, np.float32, 2)
    SHARED_LSE, SHARED_DELTA = (shared.tile(1, tile_m, np.float32, stages) for _ in range(2))
    K_PIPELINE, V_PIPELINE = (Pipeline.within(shared, tile, readers=1) for tile in (SHARED_K, SHARED_V))
    Q_PIPELINE, DO_PIPELINE = (
        Pipeline.within(shared, tile, CONSUMERS, fills) for tile, fills in ((SHARED_Q, 3), (SHARED_DO, 1))
    )
    P_PIPELINE = Pipeline.within(shared, SHARED_P, readers=1)
    TILE_M, TILE_N, ROWS_OF = tile_m, ROWS, Alignment(nbytes)
    band_at, sees, longest = band_of(mask), element_test(mask, S_TILE, transposed=True), key_lengths(mask)
    first_queries, next_queries, needs_mask = queries_steps(mask, tile_m)
    mark, kept, dS_of = dropout_steps(S_TILE, dropout, transposed=True)
    clear_queries, CLEARS_KEYS = clear_step(tile_m, "queries" in mask), "keys" in mask
    pipelines = K_PIPELINE, V_PIPELINE, Q_PIPELINE, DO_PIPELINE, SHARED_LSE, SHARED_DELTA
    load_tiles = loader(mask, tile_m, pipelines, 1)

    @device
    def product(X, Y, other, tile, at, call):
        """S = Q K^T or dP = dO V^T of a tile of queries, transposed, in flight: Alg. 4 lines 11 and 17.

        other: dO or Q, of the same queries.
        """
        left = band_at(call.sight, tile.batch, at.head)[2] - at.m_block * TILE_M
        clear_queries(Y, other, left)
        wait(Y)
        return dot(S_TILE, X, Y.tile.T)

    @device
    def step_v(dV, S, Q, dO, sP, tile, at, call):
        """P for the other consumer; dV in flight."""
        batch, m0 = tile.batch, at.m_block * TILE_M
        P = exp2(S * call.scale_log2 - get(allocate(SHARED_LSE, Q.index), COLS))    # line 13: P = exp(S - lse)
        if needs_mask(call.sight, tile, at, tile.first):
            band = band_at(call.sight, batch, at.head)
            P = where(sees(call.sight, band, batch, at.head, m0, tile.first), P, 0)     # line 12: MASK
        P = mark(P, call.drops, batch * call.heads + at.head, m0, tile.first)           # line 14
        acquire(sP)
        put_registers(sP.tile, P)
        sync_warpgroup()
        commit(sP)
        release(Q)
        return dot(dV, operand(kept(P), SHARED_DO), dO.tile)    # line 16: dV += (P Z)^T dO

    @device
    def compute_v(mDV, K, tile, call):
        """The first consumer."""
        dV, at = full(V_TILE, ZERO), first_queries(call.sight, tile)
        Q, dO, sP = stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0), stage(P_PIPELINE, 0)
        if at.m_block < at.m_blocks:
            S = wgmma_wait(product(K, Q, dO, tile, at, call), 0)
            after = next_queries(call.sight, tile, at)
            while after.m_block < after.m_blocks:
                wait(dO)
                dV = step_v(dV, S, Q, dO, sP, tile, at, call)
                S = product(K, advance(Q, 1), advance(dO, 1), tile, after, call)
                dV = wgmma_wait(dV, 1)
                release(dO)
                S = wgmma_wait(S, 0)
                Q, dO, sP = advance(Q, 1), advance(dO, 1), advance(sP, 1)
                at, after = after, next_queries(call.sight, tile, after)
            wait(dO)
            dV = wgmma_wait(step_v(dV, S, Q, dO, sP, tile, at, call), 0)
            release(dO)
        save(aligned(mDV[tile.batch, tile.head_k], ROWS_OF), dV * call.kept_scale, tile.first)

    @device
    def step_k(dK, dP, Q, dO, sP, call):
        """dK in flight."""
        wait(Q)
        D = get(allocate(SHARED_DELTA, Q.index), COLS)
        wait(sP)
        dS = dS_of(get_registers(sP.tile, S_TILE), dP, D, call.kept_scale)      # line 20
        sync_warpgroup()                                        # all have read P
        release(sP)
        release(dO)
        return dot(dK, operand(dS, SHARED_Q), Q.tile)           # line 22: dK += dS^T Q

    @device
    def compute_k(mDK, V, tile, scale, call):
        """The second consumer."""
        dK, at = full(K_TILE, ZERO), first_queries(call.sight, tile)
        Q, dO, sP = stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0), stage(P_PIPELINE, 0)
        if at.m_block < at.m_blocks:
            dP = wgmma_wait(product(V, dO, Q, tile, at, call), 0)
            after = next_queries(call.sight, tile, at)
            while after.m_block < after.m_blocks:
                dK = step_k(dK, dP, Q, dO, sP, call)
                dP = product(V, advance(dO, 1), advance(Q, 1), tile, after, call)
                dK = wgmma_wait(dK, 1)
                release(Q)
                dP = wgmma_wait(dP, 0)
                Q, dO, sP = advance(Q, 1), advance(dO, 1), advance(sP, 1)
                at, after = after, next_queries(call.sight, tile, after)
            dK = wgmma_wait(step_k(dK, dP, Q, dO, sP, call), 0)
            release(Q)
        save(aligned(mDK[tile.batch, tile.head_k], ROWS_OF), dK * scale, tile.first)    # line 24

    def kernel(
        mQ, mK, mV, mDO, mDK, mDV, mLse, mDelta, sight, drops, group_size, scale, scale_log2, kept_scale, at_once
    ):
        batches, heads, _ = shape(mLse)
        _, heads_k, seqlen_k, _ = shape(mDK)
        n_blocks = (seqlen_k + TILE_N - 1) // TILE_N
        n_block, batch, head_k = place_grouped(block_index(), n_blocks, batches * heads_k, heads_k, at_once)
        n0, head = n_block * TILE_N, head_k * group_size
        tile = Keys(batch, head_k, head, head + group_size, n_block, n0, minimum(n0 + TILE_N, seqlen_k))
        init_pipeline(K_PIPELINE)
        init_pipeline(V_PIPELINE)
        init_pipeline(Q_PIPELINE)
        init_pipeline(DO_PIPELINE)
        init_pipeline(P_PIPELINE)
        launch_dependents()
        wait_on_dependencies()
        sync_threads()
        if warpgroup_index() == CONSUMERS:
            decrease_registers(PRODUCER_REGISTERS)
            if thread_index() == PRODUCER:
                prefetch_tensor_map(mQ)
                prefetch_tensor_map(mDO)
                load_tiles(mQ, mK, mV, mDO, mLse, mDelta, sight, tile)
        else:
            increase_registers(CONSUMER_REGISTERS)
            K, V = stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
            wait(K)
            wait(V)
            if CLEARS_KEYS:
                left = longest(sight, tile) - n0
                if warpgroup_index() == 0:
                    clear(K.tile, left)
                else:
                    clear(V.tile, left)
                fence_async_proxy()
                sync_warpgroup()
            call = Call(sight, drops, heads, scale_log2, kept_scale)
            if warpgroup_index() == 0:
                compute_v(mDV, K.tile, tile, call)
            else:
                compute_k(mDK, V.tile, tile, scale, call)

    line, number = array_type(np.float32, 3), types.float32
    dk, dv = (array_type(DTYPES[out], 4) for out in out_dtypes)
    signature = types.void(
        *[types.uint64] * 4, dk, dv, line, line, sight_type(mask), DROPS, INDEX, number, number, number, INDEX
    )
    return source(kernel, signature, shared, (SHARED_Q, SHARED_K, SHARED_V, SHARED_DO))


# --------------------------------------------------------------------------------------------------------------- dQ
def round_dq(*, out_dtypes, head_dim, nbytes):
    """dQ from the sums that backward_kv has added up. A block rounds a part of 64 queries and 64 columns."""
    TILE, ROWS_OF, COL_PARTS = wgmma(PART), Alignment(nbytes), head_dim // PART

    def kernel(mSums, mDQ, scale):
        launch_dependents()
        wait_on_dependencies()
        batches, heads, _, _ = shape(mDQ)
        part, batch, head = place(block_index(), batches * heads, heads)
        m0, col = part // COL_PARTS * PART, part % COL_PARTS * PART
        dQ = load_registers(mSums[batch, head], part, TILE)
        save(aligned(mDQ[batch, head][:, col : col + PART], ROWS_OF), dQ * scale, m0)       # line 24

    (dq,) = (array_type(DTYPES[out], 4) for out in out_dtypes)
    signature = types.void(array_type(np.float32, 3), dq, types.float32)
    return Source(kernel, signature, WARPGROUP, overlaps=True)


def backward_q(*, dtype, out_dtypes, head_dim, head_dim_v, tile_m, tile_n, stages, mask, dropout, nbytes):
    """dQ, 64 queries a consumer; a row of S, P, dP and dS is a query. stages: of the pipelines of K and of V."""
    dtype = DTYPES[dtype]
    S_TILE, Q_TILE = wgmma(tile_n), wgmma(head_dim)
    ROW_VECTOR = S_TILE.row_vector()
    shared = SharedMemory()
    SHARED_Q, SHARED_DO = (shared.boxes(ROWS, cols, dtype, CONSUMERS) for cols in (head_dim, head_dim_v))
    SHARED_K, SHARED_V = (
        shared.boxes(tile_n, cols, dtype, count) for cols, count in zip((head_dim, head_dim_v), stages)
    )
    Q_PIPELINE, DO_PIPELINE = (Pipeline.within(shared, tile, readers=1) for tile in (SHARED_Q, SHARED_DO))
    K_PIPELINE, V_PIPELINE = (Pipeline.within(shared, tile, CONSUMERS) for tile in (SHARED_K, SHARED_V))
    TILE_M, TILE_N, ROWS_OF = tile_m, tile_n, Alignment(nbytes)
    band_at, sees, tested = band_of(mask), element_test(mask, S_TILE), needs_test(mask)
    steps = steps_to_next(mask)
    mark, _, dS_of = dropout_steps(S_TILE, dropout, transposed=False)
    clear_keys, CLEARS_QUERIES = clear_step(tile_n, "keys" in mask), "queries" in mask

    @device
    def blocks_in_sight(sight, batch, head, m_block, m_end):
        """The tiles of keys [first, end) in sight of a tile of queries; the first one is not empty."""
        first, end = keys_in_sight(band_at(sight, batch, head), m_block * TILE_M, m_end)
        n_block, n_blocks = first // TILE_N, (end + TILE_N - 1) // TILE_N
        return n_block + steps(sight, batch, head, m_block, n_block, n_blocks - n_block), n_blocks

    @device
    def next_n_block(sight, batch, head, m_block, n_block, n_blocks):
        n_block = opaque(n_block + 1)
        return n_block + steps(sight, batch, head, m_block, n_block, n_blocks - n_block)

    @device
    def load_tiles(mQ, mK, mV, mDO, sight, batch, head, head_k, m_block, m_end):
        """The producer, one thread."""
        Q, dO, K, V = stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0), stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
        for consumer in range(CONSUMERS):
            tma_load(Q, mQ, batch, head, m_block * TILE_M + consumer * ROWS)
            tma_load(dO, mDO, batch, head, m_block * TILE_M + consumer * ROWS)
            Q, dO = advance(Q, 1), advance(dO, 1)
        n_block, n_blocks = blocks_in_sight(sight, batch, head, m_block, m_end)
        while n_block < n_blocks:
            acquire(K)
            tma_load(K, mK, batch, head_k, n_block * TILE_N)
            acquire(V)
            tma_load(V, mV, batch, head_k, n_block * TILE_N)
            K, V = advance(K, 1), advance(V, 1)
            n_block = next_n_block(sight, batch, head, m_block, n_block, n_blocks)

    @device
    def scores(Q, K, V, n_block, band):
        """S of a tile of keys, in flight."""
        clear_keys(K, V, band[3] - n_block * TILE_N)
        wait(K)
        return dot(S_TILE, Q, K.tile.T)                         # Alg. 4 line 11: S = Q K^T

    @device
    def step(dQ, S, dO, K, V, lse, D, batch, head, m_block, m0, n_block, band, call):
        """dQ of a tile of keys, in flight."""
        n0 = n_block * TILE_N
        wait(V)
        dP = dot(S_TILE, dO, V.tile.T)                          # line 17: dP = dO V^T, in flight
        P = exp2(S * call.scale_log2 - lse)                     # line 13: P = exp(S - lse)
        if tested(call.sight, band, batch, head, m_block, n_block, m0, m0 + ROWS, n0, n0 + TILE_N):
            P = where(sees(call.sight, band, batch, head, m0, n0), P, 0)        # line 12: MASK
        P = mark(P, call.drops, batch * call.heads + head, m0, n0)              # line 14
        dS = dS_of(P, wgmma_wait(dP, 0), D, call.kept_scale)    # line 20
        release(V)
        return dot(dQ, operand(dS, SHARED_K), K.tile)           # line 21: dQ += dS K

    @device
    def compute(mDQ, mLse, mDelta, batch, head, m_block, m_end, scale, call):
        """The consumers, whole warpgroups."""
        consumer = warpgroup_index()
        m0, band = m_block * TILE_M + consumer * ROWS, band_at(call.sight, batch, head)
        sQ, sDO = stage(Q_PIPELINE, consumer), stage(DO_PIPELINE, consumer)
        K, V, Q, dO = stage(K_PIPELINE, 0), stage(V_PIPELINE, 0), sQ.tile, sDO.tile
        wait(sQ)
        wait(sDO)
        if CLEARS_QUERIES:
            clear(Q, band[2] - m0)
            clear(dO, band[2] - m0)
            fence_async_proxy()
            sync_warpgroup()
        lse, D = load(mLse[batch, head], ROW_VECTOR, m0), load(mDelta[batch, head], ROW_VECTOR, m0)
        dQ, (n_block, n_blocks) = full(Q_TILE, ZERO), blocks_in_sight(call.sight, batch, head, m_block, m_end)
        if n_block < n_blocks:
            S = wgmma_wait(scores(Q, K, V, n_block, band), 0)
            after = next_n_block(call.sight, batch, head, m_block, n_block, n_blocks)
            while after < n_blocks:
                dQ = step(dQ, S, dO, K, V, lse, D, batch, head, m_block, m0, n_block, band, call)
                S = scores(Q, advance(K, 1), advance(V, 1), after, band)
                dQ = wgmma_wait(dQ, 1)
                release(K)
                S = wgmma_wait(S, 0)
                K, V, n_block = advance(K, 1), advance(V, 1), after
                after = next_n_block(call.sight, batch, head, m_block, n_block, n_blocks)
            dQ = wgmma_wait(step(dQ, S, dO, K, V, lse, D, batch, head, m_block, m0, n_block, band, call), 0)
            release(K)
        save(aligned(mDQ[batch, head], ROWS_OF), dQ * scale, m0)        # line 24

    def kernel(
        mQ, mK, mV, mDO, mDQ, mLse, mDelta, sight, drops, group_size, scale, scale_log2, kept_scale, at_once
    ):
        batches, heads, seqlen_q, _ = shape(mDQ)
        m_blocks = (seqlen_q + TILE_M - 1) // TILE_M
        tile, batch, head = place_grouped(block_index(), m_blocks, batches * heads, heads, at_once)
        m_block = m_blocks - 1 - tile                           # the heaviest first, if causal
        m_end = minimum((m_block + 1) * TILE_M, seqlen_q)
        init_pipeline(Q_PIPELINE)
        init_pipeline(DO_PIPELINE)
        init_pipeline(K_PIPELINE)
        init_pipeline(V_PIPELINE)
        launch_dependents()
        wait_on_dependencies()
        sync_threads()
        if warpgroup_index() == CONSUMERS:
            decrease_registers(PRODUCER_REGISTERS)
            if thread_index() == PRODUCER:
                prefetch_tensor_map(mK)
                prefetch_tensor_map(mV)
                load_tiles(mQ, mK, mV, mDO, sight, batch, head, head // group_size, m_block, m_end)
        else:
            increase_registers(CONSUMER_REGISTERS)
            call = Call(sight, drops, heads, scale_log2, kept_scale)
            compute(mDQ, mLse, mDelta, batch, head, m_block, m_end, scale, call)

    line, number = array_type(np.float32, 3), types.float32
    (dq,) = (array_type(DTYPES[out], 4) for out in out_dtypes)
    signature = types.void(
        *[types.uint64] * 4, dq, line, line, sight_type(mask), DROPS, INDEX, number, number, number, INDEX
    )
    return source(kernel, signature, shared, (SHARED_Q, SHARED_K, SHARED_V, SHARED_DO))


# ------------------------------------------------------------------------------------------------------------- tiles
class Tiles(NamedTuple):
    """A row: tiles of tile_m queries and tile_n keys."""

    tile_m: int
    tile_n: int
    stages: Any  # of the tiles that are not kept

    unit = "wgmma"


KEYS = {64: Tiles(128, 128, 2), 128: Tiles(64, 128, 2)}  # of the largest head_dim
WIDE = {192: Tiles(64, 64, 3), 256: Tiles(64, 64, 2)}
QUERIES = {
    64: Tiles(128, 128, (2, 2)), 128: Tiles(128, 64, (3, 2)), 192: Tiles(128, 64, (3, 2)), 256: Tiles(128, 64, (2, 1))
}  # fmt: skip


def size_of(work):
    return max(head_dims(work.problem))


def keeps_both(work):
    """Whether a consumer has registers for both accumulators, dK and dV."""
    return takes(work) and size_of(work) in KEYS


def adds_dq(work):
    """Whether dQ is added up by all blocks: in no fixed order."""
    head_dim, _ = head_dims(work.problem)
    return keeps_both(work) and head_dim == size_of(work) and not work.deterministic


def with_results(*names):
    def parameters(work, tiles):
        results = tuple(work.dtypes[name].name for name in names)
        return compiled_in(work, tiles, head_dims(work.problem)) | {"out_dtypes": results, "nbytes": work.nbytes}

    return parameters


def parameters_kv(work, tiles):
    about = {"adds_dq": adds_dq(work), "dv_first": size_of(work) > 64}
    return with_results("dk", "dv")(work, tiles) | about


def at_once(work, tiles):
    """As many matrices at a time as keep Q, dO and the sums of dQ in the L2 cache; see `schedule.place_grouped`."""
    return {"at_once": 8}


def blocks_of_keys(work, tiles, m_blocks, n_blocks):
    return work.problem.heads_k * n_blocks


GIVEN = Boxes("q"), Boxes("k", "k"), Boxes("v", "k"), Boxes("do")
LINES_AND_NUMBERS = (
    Line("lse_log2", padded=True), Line("delta", padded=True), MASK, DROPOUT, "group_size", "scale", "scale_log2",
    "kept_scale", "at_once",
)  # fmt: skip
DQ_SUMS = Sums("sums of dq")


def kv_spec(takes, sums):
    return Spec(
        backward_kv,
        (*GIVEN, Matrix("dk", "k"), Matrix("dv", "k"), sums, *LINES_AND_NUMBERS),
        tiles=lambda work: (KEYS[size_of(work)],),
        parameters=parameters_kv,
        takes=takes,
        numbers=at_once,
        keeps="k",
        blocks=blocks_of_keys,
        arch="a",
    )


SPEC_SUMS = kv_spec(adds_dq, DQ_SUMS)
SPEC_KV = kv_spec(keeps_both, Line("delta", padded=True))  # in place of sums, which it does not touch
SPEC_WIDE = Spec(
    backward_wide,
    (*GIVEN, Matrix("dk", "k"), Matrix("dv", "k"), *LINES_AND_NUMBERS),
    tiles=lambda work: (WIDE[size_of(work)],),
    parameters=with_results("dk", "dv"),
    takes=takes,
    numbers=at_once,
    keeps="k",
    blocks=blocks_of_keys,
    arch="a",
)
SPEC_ROUND = Spec(
    round_dq,
    (DQ_SUMS, Matrix("dq"), "scale"),
    tiles=lambda work: (KEYS[size_of(work)],),
    parameters=lambda work, tiles: {
        "out_dtypes": (work.dtypes["dq"].name,), "head_dim": head_dims(work.problem)[0], "nbytes": work.nbytes,
    },
    takes=adds_dq,
    blocks=lambda work, tiles, m_blocks, n_blocks: (
        work.problem.heads * -(-work.problem.seqlen_q // PART) * (head_dims(work.problem)[0] // PART)
    ),
)  # fmt: skip
SPEC_Q = Spec(
    backward_q,
    (*GIVEN, Matrix("dq"), *LINES_AND_NUMBERS),
    tiles=lambda work: (QUERIES[size_of(work)],),
    parameters=with_results("dq"),
    takes=takes,
    numbers=at_once,
    arch="a",
)

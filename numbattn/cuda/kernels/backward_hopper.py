"""Attention backward on Hopper (wgmma, TMA): Algorithm 4.

`backward_kv` keeps a tile of keys, 64 for each consumer, and loops over the queries in its sight: dK and dV, and, where
it `adds_dq`, what these keys contribute to dQ, which all blocks add up in global memory. `backward_q` keeps a tile of
queries, 64 for each consumer, and loops over the keys: dQ, without any sums between blocks, so that it is bitwise
reproducible. `backward_wide` is backward_kv for head_dims of which a consumer has registers for only one accumulator:
the first consumer computes P and dV, the second one dS and dK.

All are warp-specialised: one thread of the last warpgroup, the producer, TMA-loads tiles into pipelines; the consumers
wait for each other only where one needs what another one has computed. In backward_kv S, P, dP and dS are transposed,
a row is a key: P and dS so are left operands of dV and dK in the registers where they are. For dQ = dS K they go
through shared memory, a step late: no consumer waits for what the other one computes at that moment.

As in `backward` MASK follows the exponential. lse is in base 2, and +inf where nothing is seen: P is 0 there.
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
from .forward_hopper import head_dims, takes
from .dropout import DROPS, keep_test
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

ROWS = WARPGROUP_ROWS  # keys, or queries, of a consumer
REGISTERS = {2: (24, 240), 3: (32, 160)}  # {consumers: of a producer's thread, of a consumer's}
PART = 64  # rows and columns of a part of dQ
DS_STAGES = 2
ZERO = np.float32(0)


class Keys(NamedTuple):
    """A block's tile of keys: keys [first, end) of a head, and the query heads [head, heads) that see them."""

    batch: Any
    head_k: Any
    head: Any
    heads: Any
    block: Any
    first: Any
    end: Any


class Queries(NamedTuple):
    """A tile of queries of a head, and the end of those in sight; there is none from m_blocks on."""

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


def dropout_steps(layout, dropout, transposed):
    """Device functions of line 14: mark(P), what is dropped with a minus sign; P Z; dS = P (dP Z - D)."""
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


@device
def wait_for_all(filled, count):
    """Wait for the first `count` stages of a pipeline."""
    for _ in range(count):
        wait(filled)
        filled = advance(filled, 1)


def clear_step(clears, tile_rows, consumers):
    """The device function (stage, rows): zero the rows of a tile from `rows` on, which lie beyond a sequence's length.

    They may be NaN, and 0 * NaN is NaN. By all consumers.
    """

    @device
    def clear_beyond(filled, rows):
        if rows < tile_rows:
            wait(filled)
            if warpgroup_index() == 0:
                clear(filled.tile, rows)
                fence_async_proxy()
            sync_warpgroups(consumers)

    @device
    def keep(filled, rows):                                     # TMA fills in zeros beyond the matrix
        pass

    return clear_beyond if clears else keep


def backward_kv(
    *, dtype, out_dtypes, head_dim, head_dim_v, tile_m, tile_n, stages, adds_dq, mask, dropout, nbytes
):  # fmt: skip
    """dK and dV, and, if it adds_dq, sums for dQ. stages: of the pipelines of Q and of dO.

    For dQ each consumer multiplies 64 queries and 64 columns: so many are tile_m times head_dim.
    """
    dtype, consumers = DTYPES[dtype], tile_n // ROWS
    S_TILE, K_TILE, V_TILE, Q_TILE = wgmma(tile_m), wgmma(head_dim), wgmma(head_dim_v), wgmma(PART)
    COLS = S_TILE.col_vector()
    shared = SharedMemory()
    SHARED_K, SHARED_V = (shared.boxes(ROWS, cols, dtype, consumers) for cols in (head_dim, head_dim_v))
    SHARED_Q, SHARED_DO = (shared.boxes(tile_m, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    SHARED_DS = shared.boxes(ROWS, tile_m, dtype, DS_STAGES * consumers) if adds_dq else SHARED_K
    SHARED_DQ = shared.tile(1, PART * PART, np.float32, consumers if adds_dq else 0)
    SHARED_LSE, SHARED_DELTA = (shared.tile(1, tile_m, np.float32, stages) for _ in range(2))
    K_PIPELINE, V_PIPELINE = (Pipeline.within(shared, tile, readers=1) for tile in (SHARED_K, SHARED_V))
    Q_PIPELINE, DO_PIPELINE = (Pipeline.within(shared, tile, consumers, fills=2) for tile in (SHARED_Q, SHARED_DO))
    DS_PIPELINE = Pipeline.within(shared, SHARED_DS.of_stages(DS_STAGES), consumers, fills=consumers)
    K_PARTS, DS_PARTS, ROW_PARTS, COL_PARTS = SHARED_K.parts(PART), SHARED_DS.parts(PART), tile_m // PART, head_dim // PART
    CONSUMERS, TILE_M, TILE_N, ROWS_OF = consumers, tile_m, tile_n, Alignment(nbytes)
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = REGISTERS[consumers]
    LOADER = WARPGROUP * consumers
    sees = element_test(mask, S_TILE, transposed=True)
    band_at, tested, steps = band_of(mask), needs_test(mask), steps_to_next(mask)
    mark, kept, dS_of = dropout_steps(S_TILE, dropout, transposed=True)
    clear_queries = clear_step("queries" in mask, tile_m, consumers)

    @device
    def queries_from(sight, tile, head):
        """The first tile of queries in sight of a tile of keys, of its heads from this one on."""
        m_block, m_blocks = index(0), index(0)
        while head < tile.heads and m_block >= m_blocks:
            first, end = queries_in_sight(band_at(sight, tile.batch, head), tile.first, tile.end)
            m_block, m_blocks = first // TILE_M, (end + TILE_M - 1) // TILE_M
            m_block = m_block + steps(sight, tile.batch, head, tile.block, m_block, m_blocks - m_block)
            head = opaque(head + 1)
        return Queries(head - 1, m_block, m_blocks)

    @device
    def next_queries(sight, tile, at):
        m_block = opaque(at.m_block + 1)
        m_block = m_block + steps(sight, tile.batch, at.head, tile.block, m_block, at.m_blocks - m_block)
        if m_block < at.m_blocks:
            return Queries(at.head, m_block, at.m_blocks)
        return queries_from(sight, tile, at.head + 1)

    @device
    def load_tiles(mQ, mK, mV, mDO, mLse, mDelta, sight, tile):
        """The loader, one thread of the producer: TMA-loads K and V, then Q and dO as stages become free."""
        K, V, Q, dO = stage(K_PIPELINE, 0), stage(V_PIPELINE, 0), stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0)
        n0 = tile.first
        while n0 < tile.first + TILE_N:
            tma_load(K, mK, tile.batch, tile.head_k, n0)
            tma_load(V, mV, tile.batch, tile.head_k, n0)
            K, V, n0 = advance(K, 1), advance(V, 1), opaque(n0 + ROWS)
        at = queries_from(sight, tile, tile.head)
        while at.m_block < at.m_blocks:
            m0 = at.m_block * TILE_M
            acquire(Q)
            tma_load(Q, mQ, tile.batch, at.head, m0)
            bulk_load(Q, allocate(SHARED_LSE, Q.index), mLse[tile.batch, at.head], m0)
            acquire(dO)
            tma_load(dO, mDO, tile.batch, at.head, m0)
            bulk_load(dO, allocate(SHARED_DELTA, dO.index), mDelta[tile.batch, at.head], m0)
            Q, dO = advance(Q, 1), advance(dO, 1)
            at = next_queries(sight, tile, at)

    @device
    def scores(K, Q, tile, at, call):
        """S of a tile of queries, transposed, in flight."""
        clear_queries(Q, band_at(call.sight, tile.batch, at.head)[2] - at.m_block * TILE_M)
        wait(Q)
        return dot(S_TILE, K, Q.tile.T)                         # Alg. 4 line 11: S = Q K^T

    @device
    def share(dS, E):
        """Let all consumers read dS; this one's place for dQ is free then, too."""
        acquire(E)
        if thread_index() % WARPGROUP == 0:
            tma_store_wait()
        put(allocate(SHARED_DS, E.index * CONSUMERS + warpgroup_index()), dS)
        fence_async_proxy()
        sync_warpgroup()
        commit(E)

    @device
    def dq_part(E):
        """dS K of all keys of the block, in flight: of 64 queries and 64 columns, which are this consumer's."""
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
        """dQ, of the tile of queries `last`, to the sums in global memory."""
        release(E)
        part = warpgroup_index()
        sDQ = allocate(SHARED_DQ, part)
        if last.m_blocks > 0:
            put_registers(sDQ, dQ)
            fence_async_proxy()
            sync_warpgroup()
            if thread_index() % WARPGROUP == 0:
                bulk_add(mSums[tile.batch, last.head], last.m_block * CONSUMERS + part, sDQ)

    def step_with(has_next):
        AFTER_DQ = int(has_next)                                # products that are started after it
        AFTER_DK = AFTER_DQ + (consumers if adds_dq else 0)

        @device
        def step(dK, dV, S, K, V, Q, dO, E, tile, last, at, after, n0, mSums, call):
            """dV and dK of a tile of queries, dQ of the one before, S of the next one."""
            batch, head, m0 = tile.batch, at.head, at.m_block * TILE_M
            band = band_at(call.sight, batch, head)
            clear_queries(dO, band[2] - m0)
            wait(dO)
            dP = dot(S_TILE, V, dO.tile.T)                      # line 17: dP = dO V^T, transposed, in flight
            P = exp2(S * call.scale_log2 - get(allocate(SHARED_LSE, Q.index), COLS))    # line 13: P = exp(S - lse)
            masks = tested(call.sight, band, batch, head, tile.block, at.m_block, m0, m0 + TILE_M, n0, n0 + ROWS)
            if masks:
                P = where(sees(call.sight, band, batch, head, m0, n0), P, 0)    # line 12: MASK
            P = mark(P, call.drops, batch * call.heads + head, m0, n0)
            dV = dot(dV, operand(kept(P), SHARED_DO), dO.tile)  # line 16: dV += (P Z)^T dO, in flight
            dP = wgmma_wait(dP, 1)
            dS = dS_of(P, dP, get(allocate(SHARED_DELTA, dO.index), COLS), call.kept_scale)     # line 20
            if masks:
                dS = where(P == 0, 0, dS)                       # 0 * NaN
            if adds_dq:
                share(dS, advance(E, 1))
            dK = dot(dK, operand(dS, SHARED_Q), Q.tile)         # line 22: dK += dS^T Q, in flight
            dV = wgmma_wait(dV, 1)
            release(dO)
            if adds_dq:
                dQ = dq_part(E)                                 # line 21: dQ += dS K of the tile before, in flight
            if has_next:
                S = scores(K, advance(Q, 1), tile, after, call)
            dK = wgmma_wait(dK, AFTER_DK)
            release(Q)
            if adds_dq:
                dQ = wgmma_wait(dQ, AFTER_DQ)
                add_dq(dQ, E, last, mSums, tile)
            if has_next:
                S = wgmma_wait(S, 0)
            return dK, dV, S

        return step

    step, last_step = step_with(True), step_with(False)

    @device
    def compute(mDK, mDV, mSums, tile, scale, call):
        """The consumers, whole warpgroups."""
        consumer = warpgroup_index()
        K, V = allocate(SHARED_K, consumer), allocate(SHARED_V, consumer)
        Q, dO, E = stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0), stage(DS_PIPELINE, 0)
        n0 = tile.first + consumer * ROWS
        dK, dV = full(K_TILE, ZERO), full(V_TILE, ZERO)
        wait_for_all(stage(K_PIPELINE, 0), CONSUMERS)
        wait_for_all(stage(V_PIPELINE, 0), CONSUMERS)
        last, at = Queries(index(0), index(0), index(0)), queries_from(call.sight, tile, tile.head)
        if at.m_block < at.m_blocks:
            if adds_dq:
                share(full(S_TILE, ZERO), E)
            S = wgmma_wait(scores(K, Q, tile, at, call), 0)
            after = next_queries(call.sight, tile, at)
            while after.m_block < after.m_blocks:
                dK, dV, S = step(dK, dV, S, K, V, Q, dO, E, tile, last, at, after, n0, mSums, call)
                Q, dO, E = advance(Q, 1), advance(dO, 1), advance(E, 1)
                last, at, after = at, after, next_queries(call.sight, tile, after)
            dK, dV, S = last_step(dK, dV, S, K, V, Q, dO, E, tile, last, at, after, n0, mSums, call)
            if adds_dq:
                E = advance(E, 1)
                dQ = wgmma_wait(dq_part(E), 0)
                if thread_index() % WARPGROUP == 0:
                    tma_store_wait()
                sync_warpgroup()
                add_dq(dQ, E, at, mSums, tile)
                if thread_index() % WARPGROUP == 0:
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
            if thread_index() == LOADER:
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
    boxes = [tile.box for tile in (SHARED_Q, SHARED_K, SHARED_V, SHARED_DO)]
    return Source(
        kernel, signature, WARPGROUP * (consumers + 1), shared=shared.nbytes, overlaps=True,
        tensor_maps=tuple(TensorMap(i, box) for i, box in enumerate(boxes)),
    )  # fmt: skip


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
        save(aligned(mDQ[batch, head][:, col : col + PART], ROWS_OF), dQ * scale, m0)  # line 24: dQ = scale dQ

    (dq,) = (array_type(DTYPES[out], 4) for out in out_dtypes)
    signature = types.void(array_type(np.float32, 3), dq, types.float32)
    return Source(kernel, signature, WARPGROUP, overlaps=True)


# ------------------------------------------------------------------------------------------------------------- tiles
class KeyRow(NamedTuple):
    """A row: tiles of tile_m queries, and consumers of 64 keys each."""

    tile_m: int
    tile_n: int
    stages: int  # of Q and of dO

    unit = "wgmma"


KEYS = {64: KeyRow(128, 128, 2), 128: KeyRow(64, 128, 2)}  # of the largest head_dim


def adds_dq(work):
    return takes(work) and max(head_dims(work.problem)) <= 128


def with_results(work, tiles, *names):
    results = {"out_dtypes": tuple(work.dtypes[name].name for name in names), "nbytes": work.nbytes}
    return compiled_in(work, tiles, head_dims(work.problem)) | results


GIVEN = Boxes("q"), Boxes("k", "k"), Boxes("v", "k"), Boxes("do")
LINES_AND_NUMBERS = Line("lse_log2", padded=True), Line("delta", padded=True), MASK, DROPOUT, "group_size"
SPEC_KV = Spec(
    backward_kv,
    (*GIVEN, Matrix("dk", "k"), Matrix("dv", "k"), Sums("sums of dq"), *LINES_AND_NUMBERS, "scale", "scale_log2",
     "kept_scale", "at_once"),
    tiles=lambda work: (KEYS[max(head_dims(work.problem))],),
    parameters=lambda work, tiles: with_results(work, tiles, "dk", "dv") | {"adds_dq": adds_dq(work)},
    takes=adds_dq,
    numbers=lambda work, tiles: {"at_once": 8},
    keeps="k",
    blocks=lambda work, tiles, m_blocks, n_blocks: work.problem.heads_k * n_blocks,
    arch="a",
)  # fmt: skip
SPEC_ROUND = Spec(
    round_dq,
    (Sums("sums of dq"), Matrix("dq"), "scale"),
    tiles=lambda work: (KEYS[max(head_dims(work.problem))],),
    parameters=lambda work, tiles: {
        "out_dtypes": (work.dtypes["dq"].name,), "head_dim": head_dims(work.problem)[0], "nbytes": work.nbytes,
    },
    takes=adds_dq,
    blocks=lambda work, tiles, m_blocks, n_blocks: (
        work.problem.heads * -(-work.problem.seqlen_q // PART) * (head_dims(work.problem)[0] // PART)
    ),
)  # fmt: skip

"""Attention backward on Hopper: dK and dV, and sums for dQ where they are wanted. See `gradients`.

For dQ = dS K, dS goes through shared memory, a step late: no consumer waits for what another one computes just then.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.cuda import types

from ...build import Source
from ...plan.arguments import Line, Matrix, SlopeSums, Sums
from ...plan.spec import PADDED, Spec
from ...tile import (
    WARPGROUP,
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    block_index,
    bulk_add,
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
    load_registers,
    operand,
    prefetch_tensor_map,
    put,
    put_registers,
    release,
    row_sum,
    save,
    shape,
    stage,
    sync_threads,
    sync_warpgroup,
    sync_warpgroups,
    thread_index,
    tma_load_part,
    tma_store_wait,
    wait,
    wait_on_dependencies,
    warpgroup_index,
    wgmma,
    wgmma_wait,
    where,
)
from ..scores import place_of_part, score_steps_ahead, slopes_steps, within_segment
from ..shared.layouts import DTYPES, array_type
from ..shared.schedule import place
from ..shared.segments import keys_of, queries_of, slot_step
from ..shared.visibility import (
    PACKED,
    PACKING,
    band_of,
    element_test,
    has_key_lengths,
    has_query_lengths,
    packing_of,
    packing_type,
    several,
)
from .backward_steps import (
    BIAS,
    CONSUMER_REGISTERS,
    CONSUMERS,
    GIVEN,
    LINE,
    PART,
    PRODUCER,
    PRODUCER_REGISTERS,
    ROWS,
    ZERO,
    Call,
    Queries,
    Tiles,
    clear_step,
    dropout_steps,
    dtype_of_bias,
    key_lengths,
    keys_spec,
    keys_step,
    loader,
    makes_slopes,
    pipelines_within,
    queries_steps,
    save_step,
    size_of,
    source,
    with_results,
)
from .forward_tiles import head_dims
from .variants import DP, KERNELS, LAST, SUMS, variant_of


class Accumulators(NamedTuple):
    """What a consumer carries from tile to tile."""

    dK: Any
    dV: Any
    slopes: Any  # sums for their gradient, if it is made here
    S: Any  # of the tile to come, transposed
    lse: Any  # of its queries, as delta, if they are read so early
    delta: Any


@device
def wait_for(filled, count):
    """Wait for so many stages of a pipeline."""
    for _ in range(count):
        wait(filled)
        filled = advance(filled, 1)


@device
def is_first_of_warpgroup():
    return thread_index() % WARPGROUP == 0


@device
def wait_for_store():
    """The first thread, which stores sums, waits until they may be overwritten."""
    if is_first_of_warpgroup():
        tma_store_wait()


def line_steps(places, layout, early):
    """Device functions for the line of lse or delta beside Q: (Q) -> what is read ahead of it; (that, Q) -> the line.

    early: all is read ahead, which takes registers. A load waits behind the products that are started before it.
    """

    @device
    def read(Q):
        return get(allocate(places, Q.index), layout)

    @device
    def read_nothing(Q):
        return ()

    @device
    def same(line, Q):
        return line

    @device
    def read_now(nothing, Q):
        return read(Q)

    return (read, same) if early else (read_nothing, read_now)


def backward_kv(
    *, dtype, out_dtypes, head_dim, head_dim_v, tile_m, tile_n, stages, dv_first, adds_dq, mask, score,
    dropout, nbytes, boxed="", dp_last=False, lines_early=False, dq_late=False, slopes=None,
):  # fmt: skip
    """dK and dV, 64 keys a consumer; if it adds_dq, sums for dQ, of which a consumer computes 64 rows and columns.

    The sums leave by bulk reduce-add: atomics from registers (red.v4) were slower by 8 to 15 %.

    stages: of the pipelines of Q and of dO. dv_first: whether dV is in flight while dS is computed, which takes more
    registers. boxed: the dtype of a bias that TMA loads. dp_last: whether dP is started behind dV, and so overlaps with
    no exponential of its own: then there are registers for what a mask, a score or dropout needs. lines_early: whether
    lse and delta of a tile are read a step ahead. dq_late: whether dQ leaves shared memory a step later, with two
    places for it: then one fence and one barrier serve dS and dQ, and no store is waited for behind the products.
    slopes: the number of the part whose slopes have a gradient, which is left to be summed over the keys.
    """
    dtype = DTYPES[dtype]
    S_TILE, K_TILE, V_TILE, Q_TILE = wgmma(tile_m), wgmma(head_dim), wgmma(head_dim_v), wgmma(PART)
    COLS = S_TILE.col_vector()
    shared = SharedMemory()
    SHARED_K, SHARED_V = (shared.boxes(ROWS, cols, dtype, CONSUMERS) for cols in (head_dim, head_dim_v))
    SHARED_Q, SHARED_DO = (shared.boxes(tile_m, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    SHARED_DS = shared.boxes(ROWS, tile_m, dtype, 2 * CONSUMERS if adds_dq else 0)
    DP_LAST, SCORES_FIRST = dp_last, dp_last or bool(boxed)
    IS_BOXED, BIASES = bool(boxed), 1 if tile_m > 64 else 2     # stages of them
    SHARED_B = shared.boxes(tile_m, ROWS, DTYPES[boxed] if boxed else dtype, BIASES * CONSUMERS * IS_BOXED)
    DQ_LATE, DQ_PLACES = dq_late, 1 + dq_late                   # of a consumer
    SHARED_DQ = shared.tile(1, PART * PART, np.float32, DQ_PLACES * CONSUMERS if adds_dq else 0)
    given = SHARED_Q, SHARED_K, SHARED_V, SHARED_DO
    pipelines = pipelines_within(shared, *given)
    Q_PIPELINE, K_PIPELINE, V_PIPELINE, DO_PIPELINE, SHARED_LSE, SHARED_DELTA = pipelines
    DS_PIPELINE = Pipeline.within(shared, SHARED_DS.of_stages(2), CONSUMERS, fills=CONSUMERS)
    B_PIPELINE = Pipeline.within(shared, SHARED_B.of_stages(BIASES), CONSUMERS, fills=CONSUMERS)
    K_PARTS, DS_PARTS = SHARED_K.parts(PART), SHARED_DS.parts(PART)
    read_lse, lse_of = line_steps(SHARED_LSE, COLS, early=lines_early)
    read_delta, delta_of = line_steps(SHARED_DELTA, COLS, early=lines_early)
    ROW_PARTS, COL_PARTS, TILE_M = tile_m // PART, head_dim // PART, tile_m
    save_dk, save_dv = (save_step(dtype, out, cols, nbytes) for out, cols in zip(out_dtypes, (head_dim, head_dim_v)))
    band_at, sees, longest = band_of(mask), element_test(mask, S_TILE, transposed=True), key_lengths(mask)
    first_queries, next_queries, needs_mask = queries_steps(mask, tile_m)
    mark, kept, dS_of = dropout_steps(S_TILE, dropout, transposed=True)
    start_slopes, add_slopes = slopes_steps(slopes, score, S_TILE, np.float32, transposed=True)
    MAKES_SLOPES = slopes is not None
    look_up, apply, pull_back, _ = score_steps_ahead(score, S_TILE, np.float32, transposed=True, is_boxed=IS_BOXED)
    clear_queries, CLEARS_KEYS = clear_step(tile_m, has_query_lengths(mask)), has_key_lengths(mask)
    keys_of_block, scores_of = keys_step(mask, ROWS * CONSUMERS), within_segment(score)
    if adds_dq and ROW_PARTS * COL_PARTS != CONSUMERS:
        raise ValueError(f"tile_m: got {tile_m} for head_dim {head_dim}, expected {CONSUMERS} parts of dQ")

    @device
    def load_biases(biases, tile, at, row, B):
        if not IS_BOXED:
            return B
        acquire(B)
        for consumer in range(CONSUMERS):
            col = tile.segment.first_key + tile.first + consumer * ROWS
            place = allocate(SHARED_B, B.index * CONSUMERS + consumer)
            tma_load_part(B, place, biases[0], tile.batch, at.head, row, col)
        return advance(B, 1)

    load_tiles = loader(pipelines, first_queries, next_queries, load_biases)

    @device
    def scored(S, B, segment, batch, head, m0, n0, call):
        """S behind the score, and F."""
        row, col = segment.first_query + m0, segment.first_key + n0
        if IS_BOXED:
            wait(B)
            place = allocate(SHARED_B, B.index * CONSUMERS + warpgroup_index())
            S, F = apply(S, look_up(call.scores, place.T, batch, head, row, col), call.scores, batch, head, row, col)
            sync_warpgroup()                                    # all have read it
            release(B)
            return S, F
        return apply(S, look_up(call.scores, (), batch, head, row, col), call.scores, batch, head, row, col)

    @device
    def start_scores(K, Q, dO, tile, at, call):
        """S of a tile of queries, transposed, in flight."""
        clear_queries(Q, dO, band_at(call.sight, tile.batch, at.head)[2] - at.m_block * TILE_M)
        wait(Q)
        return dot(S_TILE, K, Q.tile.T)                         # Alg. 4 line 11: S = Q K^T

    @device
    def dq_place(E, part):
        """Where a consumer puts its part of dQ; with two places, that of dS in stage E."""
        return allocate(SHARED_DQ, E.index % DQ_PLACES * CONSUMERS + part)

    @device
    def send_dq(E, of, mSums, tile):
        """dQ of the tile of queries `of`, if it is one, from shared memory to the sums in global memory."""
        part = warpgroup_index()
        if of.m_blocks > 0 and is_first_of_warpgroup():
            first = tile.segment.first_line // TILE_M + of.m_block
            bulk_add(mSums[tile.batch, of.head], first * CONSUMERS + part, dq_place(E, part))

    @device
    def add_dq(E, of, mSums, tile):
        """The same, as soon as the whole warpgroup has put it."""
        fence_async_proxy()
        sync_warpgroup()
        send_dq(E, of, mSums, tile)

    @device
    def share(dS, E, sent, mSums, tile):
        """Let all consumers read dS. If dQ is late, send that of the tile of queries `sent`, put a step ago."""
        acquire(E)
        wait_for_store()                                        # the next dQ may be put
        put(allocate(SHARED_DS, E.index * CONSUMERS + warpgroup_index()), dS)
        fence_async_proxy()
        sync_warpgroup()
        commit(E)
        if DQ_LATE:
            send_dq(E, sent, mSums, tile)

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
    def put_dq(dQ, E, of, mSums, tile):
        """dQ of the tile of queries `of` to shared memory and, unless it is late, on to the sums."""
        release(E)
        if DQ_LATE:
            put_registers(dq_place(E, warpgroup_index()), dQ)
        elif of.m_blocks > 0:
            put_registers(dq_place(E, warpgroup_index()), dQ)
            add_dq(E, of, mSums, tile)

    def step_with(masks, has_next):
        AFTER_DQ = int(has_next)                                # products that are started after it
        AFTER_DK, AFTER_DP = AFTER_DQ + CONSUMERS * adds_dq, int(dv_first and not DP_LAST)

        @device
        def step(acc, K, V, Q, dO, E, B, tile, sent, last, at, after, n0, mSums, call):
            """dV and dK of the tile of queries `at`, dQ of the one before, S of the one after."""
            dK, dV, slopes, S, lse, delta = acc
            batch, segment, m0 = tile.batch, tile.segment, at.m_block * TILE_M
            band = band_at(call.sight, batch, at.head)
            if SCORES_FIRST:                                    # before dP takes registers, too
                S, F = scored(S, B, segment, batch, at.head, m0, n0, call)
            wait(dO)
            if not DP_LAST:
                dP = dot(S_TILE, V, dO.tile.T)                  # line 17: dP = dO V^T, transposed, in flight
            if not SCORES_FIRST:
                if DQ_LATE:
                    S = wgmma_wait(S, 1)                        # so that ptxas starts all of dP before the exponentials
                S, F = scored(S, B, segment, batch, at.head, m0, n0, call)
            P = exp2(S * call.scale_log2 - lse_of(lse, Q))                 # line 13: P = exp(S - lse)
            if masks:
                visible = sees(call.sight, band, batch, at.head, m0, n0)
                P, F = where(visible, P, 0), where(visible, F, 0)               # line 12: MASK
            P = mark(P, call.drops, batch * call.heads + at.head, m0, n0)           # line 14
            if dv_first:
                dV = dot(dV, kept(P, SHARED_DO), dO.tile)       # line 16: dV += (P Z)^T dO, in flight
            PF = pull_back(P, F)                                # dS is P F times the rest
            if DP_LAST:
                dP = dot(S_TILE, V, dO.tile.T)                  # line 17
            dP = wgmma_wait(dP, AFTER_DP)
            dS = dS_of(PF, dP, delta_of(delta, Q), call.delta_scale)         # line 20
            row, col = segment.first_query + m0, segment.first_key + n0
            slopes = add_slopes(slopes, dS, call.scores, batch, at.head, row, col)
            if not dv_first:
                dV = dot(dV, kept(P, SHARED_DO), dO.tile)
            if adds_dq:
                share(dS, advance(E, 1), sent, mSums, tile)
            else:
                sync_warpgroup()                                # all have read lse and delta
            dK = dot(dK, operand(dS, SHARED_Q), Q.tile)         # line 22: dK += dS^T Q, in flight
            dV = wgmma_wait(dV, 1)
            release(dO)
            if adds_dq:
                dQ = dq_part(E)                                 # line 21: dQ += dS K, in flight
            if has_next:
                S = start_scores(K, advance(Q, 1), advance(dO, 1), tile, after, call)
            dK = wgmma_wait(dK, AFTER_DK)
            release(Q)
            if has_next:
                lse = read_lse(advance(Q, 1))
            if adds_dq:
                put_dq(wgmma_wait(dQ, AFTER_DQ), E, last, mSums, tile)
            if has_next:
                delta = read_delta(advance(Q, 1))
            return Accumulators(dK, dV, slopes, wgmma_wait(S, 0), lse, delta)

        return step

    step, masked_step, last_step = step_with(False, True), step_with(True, True), step_with(True, False)

    @device
    def compute(mDK, mDV, mSums, mSlopes, tile, scale, call):
        """The consumers, whole warpgroups."""
        consumer = warpgroup_index()
        K, V, n0 = allocate(SHARED_K, consumer), allocate(SHARED_V, consumer), tile.first + consumer * ROWS
        Q, dO, E, B = stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0), stage(DS_PIPELINE, 0), stage(B_PIPELINE, 0)
        dK, dV, slopes = full(K_TILE, ZERO), full(V_TILE, ZERO), start_slopes()
        wait_for(stage(K_PIPELINE, 0), CONSUMERS)
        wait_for(stage(V_PIPELINE, 0), CONSUMERS)
        if CLEARS_KEYS:
            left = longest(call.sight, tile) - n0
            clear(K, left)
            clear(V, left)
            fence_async_proxy()
            sync_warpgroups(CONSUMERS)
        none = Queries(index(0), index(0), index(0))
        sent, last, at = none, none, first_queries(call.sight, tile)
        if at.m_block < at.m_blocks:
            if adds_dq:
                share(full(S_TILE, ZERO), E, sent, mSums, tile)             # before the first tile there is no dS
            S = wgmma_wait(start_scores(K, Q, dO, tile, at, call), 0)
            acc = Accumulators(dK, dV, slopes, S, read_lse(Q), read_delta(Q))
            after = next_queries(call.sight, tile, at)
            while after.m_block < after.m_blocks:
                while after.m_block < after.m_blocks and not needs_mask(call.sight, tile, at, n0):
                    acc = step(acc, K, V, Q, dO, E, B, tile, sent, last, at, after, n0, mSums, call)
                    Q, dO, E, B = advance(Q, 1), advance(dO, 1), advance(E, 1), advance(B, 1)
                    sent, last, at, after = last, at, after, next_queries(call.sight, tile, after)
                if after.m_block < after.m_blocks:
                    acc = masked_step(acc, K, V, Q, dO, E, B, tile, sent, last, at, after, n0, mSums, call)
                    Q, dO, E, B = advance(Q, 1), advance(dO, 1), advance(E, 1), advance(B, 1)
                    sent, last, at, after = last, at, after, next_queries(call.sight, tile, after)
            acc = last_step(acc, K, V, Q, dO, E, B, tile, sent, last, at, after, n0, mSums, call)
            dK, dV, slopes = acc.dK, acc.dV, acc.slopes
            if adds_dq:
                dQ = wgmma_wait(dq_part(advance(E, 1)), 0)
                if DQ_LATE:
                    add_dq(E, last, mSums, tile)
                wait_for_store()
                sync_warpgroup()
                put_dq(dQ, advance(E, 1), at, mSums, tile)
                if DQ_LATE:
                    add_dq(advance(E, 1), at, mSums, tile)
                wait_for_store()
        sync_warpgroups(CONSUMERS)                              # all have read K
        first, end = keys_of(tile.segment)
        if MAKES_SLOPES:
            save(mSlopes[0][tile.batch, tile.head][first:end], row_sum(slopes), n0)
        save_dk(mDK[tile.batch, tile.head_k][first:end], dK * scale, K, n0)     # line 24
        save_dv(mDV[tile.batch, tile.head_k][first:end], dV * call.kept_scale, V, n0)

    def kernel(
        mQ, mK, mV, mDO, biases, mDK, mDV, mSums, mSlopes, mLse, mDelta, sight, scores, drops, group_size, scale,
        scale_log2, kept_scale, at_once, delta_scale,
    ):
        _, heads, _ = shape(mLse)
        init_pipeline(K_PIPELINE)
        init_pipeline(V_PIPELINE)
        init_pipeline(Q_PIPELINE)
        init_pipeline(DO_PIPELINE)
        init_pipeline(DS_PIPELINE)
        if IS_BOXED:
            init_pipeline(B_PIPELINE)
        launch_dependents()
        wait_on_dependencies()
        tile, sight = keys_of_block(mLse, mDK, sight, group_size, at_once)
        if tile.first >= tile.end:
            return
        sync_threads()
        if warpgroup_index() == CONSUMERS:
            decrease_registers(PRODUCER_REGISTERS)
            if thread_index() == PRODUCER:
                prefetch_tensor_map(mQ)
                prefetch_tensor_map(mDO)
                load_tiles(mQ, mK, mV, mDO, biases, mLse, mDelta, sight, tile, stage(B_PIPELINE, 0))
        else:
            increase_registers(CONSUMER_REGISTERS)
            scores = scores_of(scores, tile.segment)
            call = Call(sight, scores, drops, heads, scale_log2, kept_scale, delta_scale)
            compute(mDK, mDV, mSums, mSlopes, tile, scale, call)

    sums = LINE, several(LINE, MAKES_SLOPES)
    return source(kernel, dtype, out_dtypes, mask, score, shared, (*given, *[SHARED_B] * IS_BOXED), sums)


def round_dq(*, dtype, out_dtypes, head_dim, nbytes, mask):
    """dQ from the sums that backward_kv has added up. A block rounds a part of 64 queries and 64 columns."""
    PARTS_A_SLOT, segment_of = PADDED // PART, slot_step(mask, "q", PADDED)
    TILE, COL_PARTS, shared = wgmma(PART), head_dim // PART, SharedMemory()
    PLACE = shared.boxes(PART, PART, DTYPES[dtype])
    save_part = save_step(DTYPES[dtype], *out_dtypes, PART, nbytes)

    def kernel(mSums, mDQ, scale, packing):
        launch_dependents()
        wait_on_dependencies()
        batches, heads, seqlen_q, _ = shape(mDQ)
        part, batch, head = place(block_index(), batches * heads, heads)
        down, col = part // COL_PARTS, part % COL_PARTS * PART
        segment, slot = segment_of(packing, batch, down // PARTS_A_SLOT, seqlen_q)
        m0 = slot * PADDED + down % PARTS_A_SLOT * PART
        if m0 < segment.queries:
            dQ = load_registers(mSums[batch, head], part, TILE)
            first, end = queries_of(segment)
            save_part(mDQ[batch, head][first:end, col : col + PART], dQ * scale, allocate(PLACE), m0)   # line 24

    (dq,) = (array_type(DTYPES[out], 4) for out in out_dtypes)
    signature = types.void(array_type(np.float32, 3), dq, types.float32, packing_type(mask))
    return Source(kernel, signature, WARPGROUP, shared=shared.nbytes, overlaps=True)


# ------------------------------------------------------------------------------------------------------------- tiles
# TFLOP/s by bench/gpu.py on an H200, seqlen 1024, 4096, 16384
KEYS = {  # of the largest head_dim
    64: Tiles(128, 128, 2),                                         # 388, 510, 528
    128: Tiles(64, 128, 2),                                         # 425, 560, 583; three stages are no faster
}


def adds_dq(work):
    """Whether dQ is added up here, by all blocks: in no fixed order."""
    return variant_of(KERNELS, work) == SUMS


def adds_slopes(work):
    """Whether the gradient of slopes comes from here."""
    return adds_dq(work) and makes_slopes(work)


def has_place(work):
    """Whether shared memory has a place more for dQ, and a consumer registers to tell its tile."""
    return adds_dq(work) and not adds_slopes(work) and size_of(work) > 64 and not dtype_of_bias(work)


def is_plain(work):
    """Whether a consumer has registers for lse and delta beside the accumulators."""
    sizes = {*head_dims(work.problem)}
    return set(work.mask) <= {"lo", "hi", PACKED} and not work.score and not work.problem.dropout and sizes == {128}


def parameters_kv(work, tiles):
    dp_last = variant_of(DP, work) == LAST
    about = {"boxed": dtype_of_bias(work), "adds_dq": adds_dq(work), "dp_last": dp_last}
    about |= {"dv_first": size_of(work) > 64 or dp_last}  # slower by 8 % at 64, faster by 6 % at 128
    about |= {"slopes": place_of_part(work.score, work.slopes) if adds_slopes(work) else None}
    about |= {"dq_late": has_place(work), "lines_early": has_place(work) and is_plain(work)}  # faster by 1, 6 % at 128
    return with_results("dk", "dv")(work, tiles) | about


DQ_SUMS = Sums("sums of dq")
NO_SUMS = Line("delta", padded=True)  # in place of sums, which are not touched then

SLOPE_SUMS = SlopeSums(adds_slopes, "k")

SPEC_SUMS = keys_spec(backward_kv, KEYS, parameters_kv, (*GIVEN, BIAS), (DQ_SUMS, SLOPE_SUMS))
SPEC = keys_spec(backward_kv, KEYS, parameters_kv, (*GIVEN, BIAS), (NO_SUMS, SLOPE_SUMS))
SPEC_ROUND = Spec(
    round_dq,
    (DQ_SUMS, Matrix("dq"), "ds_scale", PACKING),
    tiles=lambda work: (KEYS[size_of(work)],),
    parameters=lambda work, tiles: {
        "dtype": work.problem.dtype.name, "out_dtypes": (work.dtypes["dq"].name,),
        "head_dim": head_dims(work.problem)[0], "nbytes": work.nbytes,
        "mask": packing_of(work.mask),
    },
    blocks=lambda work, tiles, m_blocks, n_blocks: (
        work.problem.heads * (work.padded_length // PART) * (head_dims(work.problem)[0] // PART)
    ),
    packs=True,
)  # fmt: skip

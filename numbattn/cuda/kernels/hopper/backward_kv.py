"""Attention backward on Hopper: dK and dV, and sums for dQ where they are wanted. See `gradients`.

For dQ = dS K, dS goes through shared memory, a step late: no consumer waits for what another one computes just then.
"""

from typing import Any, NamedTuple

import numpy as np

from ...plan.arguments import Statistic
from ...tile import (
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    clear,
    decrease_registers,
    device,
    dot,
    fence_async_proxy,
    full,
    get,
    increase_registers,
    index,
    init_pipelines,
    operand,
    prefetch_tensor_map,
    release,
    stage,
    sync_threads,
    sync_warpgroup,
    sync_warpgroups,
    thread_index,
    tma_load_part,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)
from ..round_dq import DQ_SUMS
from ..scores import score_steps_ahead, within_segment
from ..shared.dropout import dropout_steps
from ..shared.layouts import DTYPES
from ..shared.query_tiles import QueryTile, key_lengths, keys_step, queries_steps
from ..shared.recompute import mask_step, recompute
from ..shared.schedule import overlap_launches
from ..shared.segments import keys_of
from ..shared.visibility import (
    band_of,
    has_key_lengths,
    has_query_lengths,
)
from .backward_steps import (
    BIAS,
    CONSUMER_REGISTERS,
    CONSUMERS,
    FLOATS,
    GIVEN,
    PART,
    PRODUCER,
    PRODUCER_REGISTERS,
    ROWS,
    ZERO,
    BackwardArguments,
    WgmmaTiles,
    dtype_of_bias,
    kept_operand,
    keys_spec,
    loader,
    pipelines_within,
    save_step,
    size_of,
    source,
    with_results,
)
from .dq_sums import dq_steps
from .forward_steps import clear_step
from .variants import DP, DQ, KERNELS, LAST, LATE_BESIDE_STATISTICS, NOW, SUMS, variant_of


class BackwardAccumulators(NamedTuple):
    """What a consumer carries from tile to tile."""

    dK: Any
    dV: Any
    S: Any  # of the tile to come, transposed
    lse: Any  # of its queries, as delta, if they are read so early
    delta: Any


class Stages(NamedTuple):
    """Where a consumer is in the pipelines."""

    Q: Any
    dO: Any
    E: Any  # of dS
    B: Any  # of a bias


class Walk(NamedTuple):
    """Where it is among the queries."""

    sent: Any  # the tile whose dQ leaves shared memory now, if that is late
    last: Any
    at: Any
    after: Any


@device
def advance_all(stages):
    return Stages(advance(stages.Q, 1), advance(stages.dO, 1), advance(stages.E, 1), advance(stages.B, 1))


@device
def wait_for(filled, count):
    """Wait for so many stages of a pipeline."""
    for _ in range(count):
        wait(filled)
        filled = advance(filled, 1)


def statistic_steps(places, layout, early):
    """Device functions for lse or delta of the rows of Q: (Q) -> what is read ahead; (that, Q) -> the row statistic.

    early: all is read ahead, which takes registers. A load waits behind the products that are started before it.
    """

    @device
    def read(Q):
        return get(allocate(places, Q.index), layout)

    @device
    def read_nothing(Q):
        return ()

    @device
    def same(statistic, Q):
        return statistic

    @device
    def read_now(nothing, Q):
        return read(Q)

    return (read, same) if early else (read_nothing, read_now)


def backward_kv(
    *, dtype, out_dtypes, head_dim, head_dim_v, tile_m, tile_n, stages, dv_first, adds_dq, mask, score,
    dropout, nbytes, bias_dtype="", dp_last=False, statistics_early=False, dq_late=False,
):  # fmt: skip
    """dK and dV, 64 keys a consumer; if it adds_dq, sums for dQ, of which a consumer computes 64 rows and columns.

    stages: of the pipelines of Q and of dO. dv_first: whether dV is in flight while dS is computed, which takes more
    registers. bias_dtype: that of a bias that TMA loads. dp_last: whether dP is started behind dV, and so overlaps with
    no exponential of its own: then there are registers for what a mask, a score or dropout needs. statistics_early:
    whether lse and delta of a tile are read a step ahead. dq_late: whether dQ leaves shared memory a step later, with
    two places for it: then one fence and one barrier serve dS and dQ, and no store is waited for behind the products.
    """
    dtype = DTYPES[dtype]
    S_TILE, K_TILE, V_TILE = wgmma(tile_m), wgmma(head_dim), wgmma(head_dim_v)
    COLS = S_TILE.col_vector()
    shared = SharedMemory()
    SHARED_K, SHARED_V = (shared.boxes(ROWS, cols, dtype, CONSUMERS) for cols in (head_dim, head_dim_v))
    SHARED_Q, SHARED_DO = (shared.boxes(tile_m, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    SHARED_DS = shared.boxes(ROWS, tile_m, dtype, 2 * CONSUMERS if adds_dq else 0)
    DP_LAST, SCORES_FIRST = dp_last, dp_last or bool(bias_dtype)
    HAS_TMA_BIAS, BIASES = bool(bias_dtype), 1 if tile_m > 64 else 2      # stages of them
    SHARED_B = shared.boxes(tile_m, ROWS, DTYPES.get(bias_dtype, dtype), BIASES * CONSUMERS * HAS_TMA_BIAS)
    DQ_LATE, TILE_M = dq_late, tile_m
    SHARED_DQ = shared.tile(1, PART * PART, np.float32, (1 + dq_late) * CONSUMERS if adds_dq else 0)
    given = SHARED_Q, SHARED_K, SHARED_V, SHARED_DO
    pipelines = pipelines_within(shared, *given)
    Q_PIPELINE, K_PIPELINE, V_PIPELINE, DO_PIPELINE, SHARED_LSE, SHARED_DELTA = pipelines
    DS_PIPELINE = Pipeline.within(shared, SHARED_DS.of_stages(2), CONSUMERS, fills=CONSUMERS)
    B_PIPELINE = Pipeline.within(shared, SHARED_B.of_stages(BIASES), CONSUMERS, fills=CONSUMERS)
    read_lse, lse_of = statistic_steps(SHARED_LSE, COLS, early=statistics_early)
    read_delta, delta_of = statistic_steps(SHARED_DELTA, COLS, early=statistics_early)
    share, dq_part, put_dq, finish_dq = dq_steps(SHARED_DS, SHARED_K, SHARED_DQ, late=dq_late)
    save_dk, save_dv = (save_step(dtype, out, cols, nbytes) for out, cols in zip(out_dtypes, (head_dim, head_dim_v)))
    masked, band_at, longest = mask_step(mask, S_TILE, transposed=True), band_of(mask), key_lengths(mask)
    first_queries, next_queries, needs_mask = queries_steps(mask, tile_m, ROWS)
    (mark, dS_of), kept = dropout_steps(S_TILE, dropout, transposed=True), kept_operand(dropout)
    look_up, apply, pull_back, _ = score_steps_ahead(score, S_TILE, np.float32, transposed=True, by_tma=HAS_TMA_BIAS)
    clear_queries, CLEARS_KEYS = clear_step(tile_m, CONSUMERS, has_query_lengths(mask)), has_key_lengths(mask)
    keys_of_block, scores_of = keys_step(mask, ROWS * CONSUMERS), within_segment(score)
    if adds_dq and tile_m // PART * (head_dim // PART) != CONSUMERS:
        raise ValueError(f"tile_m: got {tile_m} for head_dim {head_dim}, expected {CONSUMERS} parts of dQ")

    @device
    def load_biases(biases, tile, at, row, B):
        if not HAS_TMA_BIAS:
            return B
        acquire(B)
        for consumer in range(CONSUMERS):
            col = tile.segment.first_key + tile.first + consumer * ROWS
            place = allocate(SHARED_B, B.index * CONSUMERS + consumer)
            tma_load_part(B, place, biases[0], tile.batch, at.head, row, col)
        return advance(B, 1)

    load_tiles = loader(pipelines, first_queries, next_queries, load_biases)

    @device
    def scored(S, B, segment, batch, head, m0, n0, args):
        """S behind the score, and F."""
        row, col = segment.first_query + m0, segment.first_key + n0
        if HAS_TMA_BIAS:
            wait(B)
            place = allocate(SHARED_B, B.index * CONSUMERS + warpgroup_index())
            S, F = apply(S, look_up(args.scores, place.T, batch, head, row, col), args.scores, batch, head, row, col)
            sync_warpgroup()                                    # all have read it
            release(B)
            return S, F
        return apply(S, look_up(args.scores, (), batch, head, row, col), args.scores, batch, head, row, col)

    @device
    def start_scores(K, Q, dO, tile, at, args):
        """S of a tile of queries, transposed, in flight."""
        left = band_at(args.sight, tile.batch, at.head)[2] - at.m_block * TILE_M
        clear_queries(Q, left)
        clear_queries(dO, left)
        wait(Q)
        return dot(S_TILE, K, Q.tile.T)                         # Alg. 4 line 11: S = Q K^T

    @device
    def has_next(walk):
        return walk.after.m_block < walk.after.m_blocks

    @device
    def go_on(walk, tile, args):
        return Walk(walk.last, walk.at, walk.after, next_queries(args.sight, tile, walk.after))

    def step_with(masks, is_last=False):
        AFTER_DQ = int(not is_last)                                # products that are started after it
        AFTER_DK, AFTER_DP = AFTER_DQ + CONSUMERS * adds_dq, int(dv_first and not DP_LAST)

        @device
        def step(acc, K, V, stages, walk, tile, n0, mSums, args):
            """dV and dK of the tile of queries `at`, dQ of the one before, S of the one after."""
            (dK, dV, S, lse, delta), (Q, dO, E, B), (sent, last, at, after) = acc, stages, walk
            batch, segment, m0 = tile.batch, tile.segment, at.m_block * TILE_M
            band = band_at(args.sight, batch, at.head)
            if SCORES_FIRST:                                    # before dP takes registers, too
                S, F = scored(S, B, segment, batch, at.head, m0, n0, args)
            wait(dO)
            if not DP_LAST:
                dP = dot(S_TILE, V, dO.tile.T)                  # line 17: dP = dO V^T, transposed, in flight
            if not SCORES_FIRST:
                if DQ_LATE:
                    S = wgmma_wait(S, 1)                        # so that ptxas starts all of dP before the exponentials
                S, F = scored(S, B, segment, batch, at.head, m0, n0, args)
            P = recompute(S, lse_of(lse, Q), args.scale_log2)   # line 13: P = exp(S - lse)
            if masks:
                P, F = masked(P, F, args.sight, band, batch, at.head, m0, n0)   # line 12: MASK
            P = mark(P, args.drops, batch, at.head, m0, n0)                         # line 14
            if dv_first:
                dV = dot(dV, kept(P, SHARED_DO), dO.tile)       # line 16: dV += (P Z)^T dO, in flight
            PF = pull_back(P, F)                                # dS is P F times the rest
            if DP_LAST:
                dP = dot(S_TILE, V, dO.tile.T)                  # line 17
            dP = wgmma_wait(dP, AFTER_DP)
            dS = dS_of(PF, dP, delta_of(delta, Q), args.delta_scale)         # line 20
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
            if not is_last:
                S = start_scores(K, advance(Q, 1), advance(dO, 1), tile, after, args)
            dK = wgmma_wait(dK, AFTER_DK)
            release(Q)
            if not is_last:
                lse = read_lse(advance(Q, 1))
            if adds_dq:
                put_dq(wgmma_wait(dQ, AFTER_DQ), E, last, mSums, tile)
            if not is_last:
                delta = read_delta(advance(Q, 1))
            return BackwardAccumulators(dK, dV, wgmma_wait(S, 0), lse, delta)

        return step

    step, masked_step, last_step = step_with(masks=False), step_with(masks=True), step_with(True, is_last=True)

    @device
    def compute(mDK, mDV, mSums, tile, scale, args):
        """The consumers, whole warpgroups."""
        consumer = warpgroup_index()
        K, V, n0 = allocate(SHARED_K, consumer), allocate(SHARED_V, consumer), tile.first + consumer * ROWS
        stages = Stages(stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0), stage(DS_PIPELINE, 0), stage(B_PIPELINE, 0))
        dK, dV = full(K_TILE, ZERO), full(V_TILE, ZERO)
        wait_for(stage(K_PIPELINE, 0), CONSUMERS)
        wait_for(stage(V_PIPELINE, 0), CONSUMERS)
        if CLEARS_KEYS:
            left = longest(args.sight, tile) - n0
            clear(K, left)
            clear(V, left)
            fence_async_proxy()
            sync_warpgroups(CONSUMERS)
        none = QueryTile(index(0), index(0), index(0))
        at = first_queries(args.sight, tile)
        if at.m_block < at.m_blocks:
            if adds_dq:
                share(full(S_TILE, ZERO), stages.E, none, mSums, tile)      # before the first tile there is no dS
            S = wgmma_wait(start_scores(K, stages.Q, stages.dO, tile, at, args), 0)
            acc = BackwardAccumulators(dK, dV, S, read_lse(stages.Q), read_delta(stages.Q))
            walk = Walk(none, none, at, next_queries(args.sight, tile, at))
            while has_next(walk):
                while has_next(walk) and not needs_mask(args.sight, tile, walk.at, n0):
                    acc = step(acc, K, V, stages, walk, tile, n0, mSums, args)
                    stages, walk = advance_all(stages), go_on(walk, tile, args)
                if has_next(walk):
                    acc = masked_step(acc, K, V, stages, walk, tile, n0, mSums, args)
                    stages, walk = advance_all(stages), go_on(walk, tile, args)
            acc = last_step(acc, K, V, stages, walk, tile, n0, mSums, args)
            dK, dV = acc.dK, acc.dV
            if adds_dq:
                finish_dq(stages.E, walk, mSums, tile)
        sync_warpgroups(CONSUMERS)                              # all have read K
        first, end = keys_of(tile.segment)
        save_dk(mDK[tile.batch, tile.head_k][first:end], dK * scale, K, n0)     # line 24
        save_dv(mDV[tile.batch, tile.head_k][first:end], dV * args.kept_scale, V, n0)

    def kernel(
        mQ, mK, mV, mDO, biases, mDK, mDV, mSums, mLse, mDelta, sight, scores, drops, group_size, scale,
        scale_log2, kept_scale, at_once, delta_scale,
    ):
        init_pipelines(K_PIPELINE, V_PIPELINE, Q_PIPELINE, DO_PIPELINE, DS_PIPELINE, B_PIPELINE)
        overlap_launches()
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
            args = BackwardArguments(sight, scores, drops, scale_log2, kept_scale, delta_scale)
            compute(mDK, mDV, mSums, tile, scale, args)

    return source(kernel, dtype, out_dtypes, mask, score, shared, (*given, *[SHARED_B] * HAS_TMA_BIAS), [FLOATS])


# ------------------------------------------------------------------------------------------------------------- tiles
# TFLOP/s by bench/gpu.py on an H200, seqlen 1024, 4096, 16384
KEYS = {  # of the largest head_dim
    64: WgmmaTiles(128, 128, 2),                                    # 388, 510, 528
    128: WgmmaTiles(64, 128, 2),                                    # 425, 560, 583; three stages are no faster
}


def adds_dq(work):
    """Whether dQ is added up here, by all blocks: in no fixed order."""
    return variant_of(KERNELS, work) == SUMS


def parameters_kv(work, tiles):
    dp_last, leaves = variant_of(DP, work) == LAST, variant_of(DQ, work) if adds_dq(work) else NOW
    about = {"bias_dtype": dtype_of_bias(work), "adds_dq": adds_dq(work), "dp_last": dp_last}
    about |= {"dv_first": size_of(work) > 64 or dp_last}  # slower by 8 % at 64, faster by 6 % at 128
    about |= {"dq_late": leaves != NOW, "statistics_early": leaves == LATE_BESIDE_STATISTICS}
    return with_results("dk", "dv")(work, tiles) | about


NO_SUMS = Statistic("delta", padded=True)  # in place of sums, which are not touched then

SPEC_SUMS = keys_spec(backward_kv, KEYS, parameters_kv, (*GIVEN, BIAS), [DQ_SUMS])
SPEC = keys_spec(backward_kv, KEYS, parameters_kv, (*GIVEN, BIAS), [NO_SUMS])

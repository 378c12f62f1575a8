"""Attention backward on Hopper: dK and dV, and sums for dQ where they are wanted. See `backward_steps`, and
`kv_schedule` for the tiles of keys, one after the other, that a block computes.

Five products make a step, for a tile of queries:

    1  S = Q K^T        started a step early: it is there when the step begins
    2  dP = dO V^T      2 and 3 in an order that fits in a consumer's registers: see `kv_steps` and `Variant`
    3  dV += P^T dO
    4  dK += dS^T Q
    5  dQ = dS K        a step late: dS goes through shared memory, and no consumer waits for another one's
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...tile import (
    Pipeline,
    SharedMemory,
    advance,
    allocate,
    alongside,
    clear,
    device,
    dot,
    fence_async_proxy,
    full,
    index,
    operand,
    release,
    stage,
    sync_warpgroup,
    sync_warpgroups,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)
from ...words.arguments import COUNTERS, Statistic
from ..any.round_dq import DQ_SUMS, DQ_TURNS, SUMS_IN_TURN
from ..scores import within_segment
from ..scores.reads import DISTANCE_SUMS
from ..shared.layouts import DTYPES
from ..shared.query_tiles import QueryTile, key_lengths, queries_steps
from ..shared.segments import keys_of
from ..shared.visibility import band_of, has_functions, has_key_lengths, has_query_lengths
from ..shared.warps import warp_specialised
from .backward_steps import (
    BIAS,
    GIVEN,
    MORE_FOR_PRODUCER,
    PART,
    REGISTERS,
    ROWS,
    ZERO,
    BackwardArguments,
    WgmmaTiles,
    dtype_of_bias,
    keys_spec,
    parameters_of,
    pipelines_within,
    save_step,
    size_of,
    source,
)
from .distance_sums import distance_reads_of, distance_sums_step
from .dq_sums import dq_steps, product_step
from .dq_turns import PLACES, adder, at_once, dq_turn_steps, pipeline_of_dq
from .forward_steps import clear_step
from .forward_tiles import has_small_blocks
from .kv_schedule import (
    ProducerArguments,
    is_tile,
    pipeline_of_tiles,
    producer_steps,
    receive,
    record_steps,
)
from .kv_steps import (
    BackwardAccumulators,
    Stages,
    advance_all,
    after_last,
    bias_steps,
    ds_step,
    next_keys,
    statistic_steps,
)
from .variants import SUMS, TURNS, variant_of


class Walk(NamedTuple):
    """Where a consumer is among the tiles of queries."""

    leaving: Any  # the one whose dQ leaves shared memory now, if dQ is late
    previous: Any
    current: Any
    next: Any


@device
def wait_for(filled, count):
    """Wait for the next `count` stages of a pipeline."""
    for _ in range(count):
        wait(filled)
        filled = advance(filled, 1)


@device
def done(place):
    """Let TMA fill the place of K or V again, through which dK or dV has been saved."""
    fence_async_proxy()
    sync_warpgroup()
    release(place)


def hopper_backward_kv(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, variant, mask, score, dropout, nbytes, bias_dtype="", reads=(),
):  # fmt: skip
    """dK and dV, 64 keys a consumer. Beside the kernel that rounds sums for dQ, also those: each consumer computes 64
    rows and 64 columns.

    tiles: WgmmaTiles, stages being those of Q and of dO. variant: a Variant. bias_dtype: of a bias that TMA loads.
    reads: see `distance_sums`.
    """
    dtype, (tile_m, tile_n, stages, blocks) = DTYPES[dtype], tiles
    adds_dq, in_turn = variant.kernels in (SUMS, TURNS), variant.kernels == TURNS
    variant = variant._replace(dq_late=adds_dq and variant.dq_late)
    S_TILE, K_TILE, V_TILE, CONSUMERS = wgmma(tile_m), wgmma(head_dim), wgmma(head_dim_v), tile_n // ROWS
    COLS, TILE_M, TILE_N, ADDS_DQ, IN_TURN = S_TILE.col_vector(), tile_m, tile_n, adds_dq, in_turn
    shared = SharedMemory()
    SHARED_K, SHARED_V = (shared.boxes(ROWS, cols, dtype, CONSUMERS) for cols in (head_dim, head_dim_v))
    SHARED_Q, SHARED_DO = (shared.boxes(tile_m, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    SHARED_DS = shared.boxes(ROWS, tile_m, dtype, 2 * CONSUMERS * adds_dq)
    SHARED_DQ = shared.tile(1, PART * PART, np.float32, (1 + (variant.dq_late or in_turn)) * CONSUMERS * adds_dq)
    SHARED_B, B_PIPELINE, load_biases = bias_steps(shared, bias_dtype, tile_m, CONSUMERS)
    given = SHARED_Q, SHARED_K, SHARED_V, SHARED_DO
    pipelines = pipelines_within(shared, *given, CONSUMERS)
    Q_PIPELINE, K_PIPELINE, V_PIPELINE, DO_PIPELINE, SHARED_LSE, SHARED_DELTA = pipelines
    READERS, S_EARLY = CONSUMERS * (1 + bool(reads)), variant.s_early
    DQ_PIPELINE, HAS_MASK = pipeline_of_dq(shared), bool(mask)
    DS_PIPELINE = Pipeline.within(shared, SHARED_DS.of_stages(2), READERS, fills=CONSUMERS)
    TILES = pipeline_of_tiles(shared, mask, READERS + 1)
    (_, from_record), scores_of = record_steps(mask, tile_n), within_segment(score)
    band_at, longest = band_of(mask), key_lengths(mask)
    about = {"consumers": CONSUMERS * has_functions(mask), "from_last": in_turn}
    first_queries, next_queries, needs_mask = queries_steps(mask, tile_m, ROWS, **about)
    *walk_of_producer, _ = queries_steps(mask, tile_m, ROWS, **about, by_consumer=False)
    clear_queries, CLEARS_KEYS = clear_step(tile_m, CONSUMERS, has_query_lengths(mask)), has_key_lengths(mask)
    read_lse, lse_of = statistic_steps(SHARED_LSE, COLS, early=variant.statistics_early)
    read_delta, delta_of = statistic_steps(SHARED_DELTA, COLS, early=variant.statistics_early)
    plain_ds, masked_ds = (
        ds_step(
            variant, S_TILE, tile_m, CONSUMERS, mask, score, dropout, SHARED_DO, SHARED_B, lse_of, delta_of, masks
        )
        for masks in (False, True)
    )  # fmt: skip
    start_dq, shared_dq = product_step(SHARED_DS, SHARED_K), (SHARED_DS, SHARED_DQ)
    publish_ds, store_dq, drain_dq, finish_dq = (
        dq_turn_steps(*shared_dq, start_dq, DQ_PIPELINE, mask, tile_n) if in_turn
        else dq_steps(*shared_dq, start_dq, late=variant.dq_late)
    )  # fmt: skip
    save_dk, save_dv = (save_step(dtype, out, cols, nbytes) for out, cols in zip(out_dtypes, (head_dim, head_dim_v)))
    if adds_dq and tile_m // PART * (head_dim // PART) != CONSUMERS:
        raise ValueError(f"tile_m: got {tile_m} for head_dim {head_dim}, expected {CONSUMERS} parts of dQ")

    @device
    def start_s(K, Q, dO, tile, at, args):
        """Product 1 for a tile of queries, transposed, in flight."""
        left = band_at(args.mask, tile.batch, at.head)[2] - at.m_block * TILE_M
        clear_queries((Q, dO), left)
        wait(Q)
        return dot(S_TILE, K, Q.tile.T)                         # Alg. 4 line 11: S = Q K^T

    @device
    def has_next(walk):
        return walk.next.m_block < walk.next.m_blocks

    @device
    def go_on(walk, tile, args):
        return Walk(walk.previous, walk.current, walk.next, next_queries(args.mask, tile, walk.next))

    def step_without_dq(ds_of, is_last=False):
        AHEAD = int(not is_last)                                # whether product 1 is in flight

        @device
        def step(acc, K, V, stages, walk, tile, n0, mSums, args):
            """dV and dK of the current tile of queries, S of the next one."""
            Q, dO, S = stages.Q, stages.dO, acc.S
            dS, dV = ds_of(acc, V, stages, tile, walk.current, n0, args)        # products 2 and 3
            sync_warpgroup()                                    # all have read lse and delta
            dK = dot(acc.dK, operand(dS, SHARED_Q), Q.tile)     # product 4, line 22: dK += dS^T Q
            dV = wgmma_wait(dV, 1)
            release(dO)
            if not is_last:
                S = start_s(K, advance(Q, 1), advance(dO, 1), tile, walk.next, args)    # product 1
            dK = wgmma_wait(dK, AHEAD)
            release(Q)
            return BackwardAccumulators(dK, dV, wgmma_wait(S, 0), (), ())

        return step

    def step_with_dq(ds_of, is_last=False):
        AHEAD = int(S_EARLY and not is_last)
        AFTER_DK = CONSUMERS + AHEAD                            # product 5 is a group for each consumer's keys

        @device
        def step(acc, K, V, stages, walk, tile, n0, mSums, args):
            """dV and dK of the current tile of queries, dQ of the previous one, S of the next one."""
            (_, _, Q, dO, sdS, _), (_, _, S, lse, delta) = stages, acc
            dS, dV = ds_of(acc, V, stages, tile, walk.current, n0, args)        # products 2 and 3
            publish_ds(dS, advance(sdS, 1), walk, mSums, tile, args.mask)
            dK = dot(acc.dK, operand(dS, SHARED_Q), Q.tile)     # product 4, line 22: dK += dS^T Q
            dV = wgmma_wait(dV, 1)
            release(dO)
            dQ = start_dq(sdS)                                  # product 5, line 21: dQ += dS K
            if S_EARLY and not is_last:
                S = start_s(K, advance(Q, 1), advance(dO, 1), tile, walk.next, args)    # product 1
            dK = wgmma_wait(dK, AFTER_DK)
            release(Q)
            if not is_last:
                lse = read_lse(advance(Q, 1))
            store_dq(wgmma_wait(dQ, AHEAD), sdS, walk.previous, mSums, tile)
            if not S_EARLY and not is_last:
                S = start_s(K, advance(Q, 1), advance(dO, 1), tile, walk.next, args)
            if not is_last:
                delta = read_delta(advance(Q, 1))
            return BackwardAccumulators(dK, dV, wgmma_wait(S, 0), lse, delta)

        return step

    step_with = step_with_dq if adds_dq else step_without_dq
    step, masked_step = step_with(plain_ds), step_with(masked_ds)
    last_step, masked_last_step = step_with(plain_ds, is_last=True), step_with(masked_ds, is_last=True)

    @device
    def compute_tile(mDK, mDV, mSums, tile, stages, scale, args):
        """dK and dV of a tile of keys, and what it adds to dQ. Returns the stages after it."""
        consumer, at = warpgroup_index(), first_queries(args.mask, tile)
        K, V, n0 = allocate(SHARED_K, consumer), allocate(SHARED_V, consumer), tile.first + consumer * ROWS
        dK, dV = full(K_TILE, ZERO), full(V_TILE, ZERO)
        none, sees = QueryTile(index(0), index(0), index(0), at.known), at.m_block < at.m_blocks
        if ADDS_DQ and sees:
            nowhere = Walk(none, none, none, none)              # before the first tile there is no dS
            publish_ds(full(S_TILE, ZERO), stages.dS, nowhere, mSums, tile, args.mask)
        wait_for(stages.K, CONSUMERS)
        keys = longest(args.mask, tile)
        clears = CLEARS_KEYS and keys < tile.first + TILE_N
        if clears or not sees:
            wait(advance(stages.V, consumer))
        if clears:
            clear(K, keys - n0)
            clear(V, keys - n0)
            fence_async_proxy()
            sync_warpgroups(CONSUMERS)
        if sees:
            S = start_s(K, stages.Q, stages.dO, tile, at, args)
            wait(advance(stages.V, consumer))
            acc = BackwardAccumulators(dK, dV, wgmma_wait(S, 0), read_lse(stages.Q), read_delta(stages.Q))
            walk = Walk(none, none, at, next_queries(args.mask, tile, at))
            while has_next(walk):
                while has_next(walk) and not needs_mask(args.mask, tile, walk.current, n0):
                    acc = step(acc, K, V, stages, walk, tile, n0, mSums, args)
                    stages, walk = advance_all(stages), go_on(walk, tile, args)
                if has_next(walk):
                    acc = masked_step(acc, K, V, stages, walk, tile, n0, mSums, args)
                    stages, walk = advance_all(stages), go_on(walk, tile, args)
            if HAS_MASK and not needs_mask(args.mask, tile, walk.current, n0):  # else only the last keys are tested
                acc = last_step(acc, K, V, stages, walk, tile, n0, mSums, args)
            else:
                acc = masked_last_step(acc, K, V, stages, walk, tile, n0, mSums, args)
            dK, dV = acc.dK, acc.dV
            if ADDS_DQ:
                drain_dq(stages.dS, walk, mSums, tile, args.mask)
            stages = after_last(stages)
        sync_warpgroups(CONSUMERS)                              # all have read K
        first, end = keys_of(tile.segment)
        save_dk(mDK[tile.batch, tile.head_k][first:end], dK * scale, K, n0)     # line 24
        done(advance(stages.K, consumer))
        save_dv(mDV[tile.batch, tile.head_k][first:end], dV * args.kept_scale, V, n0)
        done(advance(stages.V, consumer))
        return next_keys(stages, CONSUMERS)

    @device
    def compute(mDK, mDV, mSums, group_size, scale, args):
        """The consumers, whole warpgroups."""
        W, stages = stage(TILES, 0), Stages(
            stage(K_PIPELINE, 0), stage(V_PIPELINE, 0), stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0),
            stage(DS_PIPELINE, 0), stage(B_PIPELINE, 0),
        )  # fmt: skip
        record = receive(W)
        while is_tile(record):
            tile, mask = from_record(record, mDK, args.mask, group_size)
            here = BackwardArguments(
                mask, scores_of(args.scores, tile.segment), args.drops, args.scale_log2, args.kept_scale,
                args.delta_scale, (),
            )  # fmt: skip
            stages = compute_tile(mDK, mDV, mSums, tile, stages, scale, here)
            W = alongside(W, stages.K)
            record = receive(W)
        if ADDS_DQ:
            finish_dq(stages.dS)

    about = mask, tile_n, *walk_of_producer
    producers = producer_steps(pipelines, TILES, *about, load_biases, B_PIPELINE, in_turn)
    if in_turn:
        producers += tuple(adder(SHARED_DQ, DQ_PIPELINE, place) for place in range(PLACES))
    helpers = ()
    if reads:
        add_reads = distance_sums_step(score, reads, SHARED_DS, DS_PIPELINE, TILES, *about)
        helpers = CONSUMERS, add_reads
    has_some_left = CONSUMERS == 2 and (reads or (head_dim + head_dim_v <= 128 and not dropout))
    registers = MORE_FOR_PRODUCER if has_some_left else REGISTERS[CONSUMERS]
    own_pipelines = TILES, K_PIPELINE, V_PIPELINE, Q_PIPELINE, DO_PIPELINE, DS_PIPELINE, DQ_PIPELINE, B_PIPELINE
    begin, take_roles = warp_specialised(
        own_pipelines, CONSUMERS, registers, compute, *producers, blocks=blocks, helpers=helpers
    )

    def kernel(
        mQ, mK, mV, mDO, biases, mDK, mDV, mSums, mTurns, mReads, mLse, mDelta, mask, scores, drops, group_size,
        ds_scale, scale_log2, kept_scale, at_once, delta_scale, counters,
    ):  # fmt: skip
        begin()
        args = BackwardArguments(mask, scores, drops, scale_log2, kept_scale, delta_scale, ())
        given = ProducerArguments(
            mQ, mK, mV, mDO, biases, mLse, mDelta, mDK, mask, counters, group_size, at_once
        )  # fmt: skip
        of_consumers = mDK, mDV, mSums, group_size, ds_scale, args
        if IN_TURN:
            take_roles(of_consumers, ((given,), (given,), (mSums, mTurns), (mSums, mTurns)))
        else:
            take_roles(of_consumers, ((given,), (given,), (mDK, mask, scores, group_size, mReads)))

    maps = *given, *[SHARED_B] * bool(bias_dtype)
    dtypes, about = dict(zip(("dk", "dv"), out_dtypes)), {"mask": mask, "score": score, "bias_dtype": bias_dtype}
    about["read_dtype"] = reads[2] if reads else None
    spec = SPEC_TURNS if in_turn else SPEC_SUMS
    return source(kernel, spec.arguments, shared, maps, dtype, dtypes, CONSUMERS, blocks, **about)


# ------------------------------------------------------------------------------------------------------------- tiles
# TFLOP/s by bench/gpu.py on an H200, seqlen 1024, 4096, 16384
KEYS = {  # by the larger head_dim
    64: WgmmaTiles(128, 128, 2),                                    # 388, 510, 528
    128: WgmmaTiles(64, 128, 2),                                    # 425, 560, 583; three stages are no faster
}
SMALL_BLOCKS = {64: WgmmaTiles(64, 64, 4, 2), 128: WgmmaTiles(64, 64, 2, 2)}


def keys_row(work):
    return (SMALL_BLOCKS if has_small_blocks(work) else KEYS)[size_of(work)]


def parameters_kv(work, tiles):
    variant = variant_of(work)
    about = {"reads": distance_reads_of(work) if variant.kernels == SUMS else (), "bias_dtype": dtype_of_bias(work)}
    return parameters_of("dk", "dv")(work, tiles) | {"variant": variant} | about


def blocks_of_multiprocessor(work, tiles):
    return tiles.blocks


def tiles_of_states(work, tiles):
    """The tiles that have states: with functions in the mask those of a single consumer."""
    return tiles._replace(tile_n=ROWS) if has_functions(work.mask) else tiles


def persistent(spec):
    return replace(spec, arguments=(*spec.arguments, COUNTERS), persistent=True, resident=blocks_of_multiprocessor)


NO_SUMS = Statistic("delta", padded=True)  # a placeholder for sums, which are not touched then
ABOUT = hopper_backward_kv, keys_row, parameters_kv, (*GIVEN, BIAS)
SPEC_SUMS = persistent(keys_spec(*ABOUT, [DQ_SUMS, (), DISTANCE_SUMS], tiles_of_states))
SPEC_TURNS = replace(persistent(keys_spec(*ABOUT, [SUMS_IN_TURN, DQ_TURNS, ()])), numbers=at_once)
SPEC = persistent(keys_spec(*ABOUT, [NO_SUMS, (), ()], tiles_of_states))

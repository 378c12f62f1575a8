"""Attention backward on Hopper: dQ, bitwise reproducible. See `backward_steps`."""

from typing import Any, NamedTuple

import numpy as np

from ...tile import (
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    block_index,
    clear,
    device,
    dot,
    fence_async_proxy,
    full,
    load,
    minimum,
    opaque,
    operand,
    prefetch_tensor_map,
    release,
    shape,
    stage,
    sync_warpgroup,
    tma_load,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)
from ...words.arguments import Matrix
from ...words.spec import Spec
from ..scores import score_steps_ahead, within_segment
from ..scores.reads import READ_SUMS
from ..shared.dropout import dropout_steps
from ..shared.layouts import DTYPES
from ..shared.recompute import mask_step, recompute
from ..shared.schedule import at_once, place_grouped
from ..shared.segments import count_step, mask_within_step, queries_of, slot_step
from ..shared.visibility import (
    band_of,
    has_key_lengths,
    has_query_lengths,
    needs_test,
)
from ..shared.warps import warp_specialised
from ..tables import is_under_pressure
from .backward_steps import (
    BIAS,
    GIVEN,
    REGISTERS,
    ROWS,
    STATISTICS_AND_NUMBERS,
    ZERO,
    BackwardArguments,
    WgmmaTiles,
    dtype_of_bias,
    parameters_of,
    save_step,
    size_of,
    source,
)
from .forward_steps import clear_step
from .forward_tiles import by_columns, has_small_blocks
from .read_sums import reads_of, reads_steps
from .tma_bias import load_bias_step
from .walk import ConsumerTile, WorkTile, n_block_steps, score_tile_steps


class Kept(NamedTuple):
    """What a consumer keeps for its queries."""

    dO: Any
    lse: Any
    D: Any
    band: Any  # of keys that they see


def hopper_backward_q(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, score, dropout, nbytes, bias_dtype="", reads=(),
    own=(),
):  # fmt: skip
    """dQ, 64 queries a consumer; a row of S, P, dP and dS is a query.

    tiles: WgmmaTiles, stages being those of K and of V. bias_dtype: of a bias whose tiles come with those of K. reads:
    see `read_sums.reads_of`. own: which columns of dQ, the first one and how many, if not all.
    """
    dtype, (tile_m, tile_n, stages, blocks), ((first_own, cols),) = DTYPES[dtype], tiles, own or ((0, head_dim),)
    S_TILE, Q_TILE, CONSUMERS = wgmma(tile_n), wgmma(cols), tile_m // ROWS
    ROW_VECTOR = S_TILE.row_vector()
    shared = SharedMemory()
    SHARED_Q, SHARED_DO = (shared.boxes(ROWS, cols, dtype, CONSUMERS) for cols in (head_dim, head_dim_v))
    SHARED_K, SHARED_V = (
        shared.boxes(tile_n, cols, dtype, count) for cols, count in zip((head_dim, head_dim_v), stages)
    )
    OWN_K, STAGED_Q = SHARED_K.part(first_own, cols), SHARED_Q.of_columns(cols)
    Q_PIPELINE, DO_PIPELINE = (Pipeline.within(shared, tile, readers=1) for tile in (SHARED_Q, SHARED_DO))
    HAS_TMA_BIAS = bool(bias_dtype)
    SHARED_B = shared.boxes(ROWS, tile_n, DTYPES.get(bias_dtype, dtype), stages[0] * CONSUMERS * HAS_TMA_BIAS)
    K_PIPELINE = Pipeline.within(shared, SHARED_K, CONSUMERS, fills=1 + CONSUMERS * HAS_TMA_BIAS)
    V_PIPELINE = Pipeline.within(shared, SHARED_V, CONSUMERS)
    TILE_M, TILE_N, save_dq = tile_m, tile_n, save_step(dtype, *out_dtypes, cols, nbytes)
    band_at, masked, tested = band_of(mask), mask_step(mask, S_TILE), needs_test(mask)
    sign_dropped, dS_of = dropout_steps(S_TILE, dropout)
    look_up, apply, pull_back, _ = score_steps_ahead(score, S_TILE, np.float32, by_tma=HAS_TMA_BIAS)
    none_pending, prepare, add_reads, settled, add_last = reads_steps(
        shared, score, reads, S_TILE, dtype, stages[0], CONSUMERS
    )
    prefetch_bias, bias_in_registers, apply_score = score_tile_steps(look_up, apply, tile_n, CONSUMERS, SHARED_B)
    clear_keys, CLEARS_QUERIES = clear_step(tile_n, CONSUMERS, has_key_lengths(mask)), has_query_lengths(mask)
    tiles_of, tile_of = count_step(mask, tile_m), slot_step(mask, "q", tile_m)
    mask_of, scores_of = mask_within_step(mask, ROWS), within_segment(score)
    visible_blocks, next_n_block = n_block_steps(mask, tile_n)

    @device
    def work_tile(mask, segment, batch, head, m_block, m_end):
        """Computed by each role: once, before they part, it costs 1 % of the time at head_dim 256."""
        first, end = visible_blocks(mask, batch, head, m_block * TILE_M, m_end)
        return WorkTile(batch, head, m_block, first, end, segment)

    @device
    def bias_of(consumer, where):
        work, n0 = where
        return work.batch, work.head, work.segment.first_query + work.m_block * TILE_M + consumer * ROWS, n0

    load_bias = load_bias_step(SHARED_B, CONSUMERS, bias_of)

    @device
    def load_tiles(mQ, mK, mV, mDO, biases, mask, tile, head_k):
        """The producer, one thread."""
        prefetch_tensor_map(mK)
        prefetch_tensor_map(mV)
        work = work_tile(mask, *tile)
        Q, dO, K, V = stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0), stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
        for consumer in range(CONSUMERS):
            m0 = work.segment.first_query + work.m_block * TILE_M + consumer * ROWS
            tma_load(Q, mQ, work.batch, work.head, m0)
            tma_load(dO, mDO, work.batch, work.head, m0)
            Q, dO = advance(Q, 1), advance(dO, 1)
        n_block = next_n_block(work, mask, work.n_block)
        while n_block < work.n_blocks:
            n0 = work.segment.first_key + n_block * TILE_N
            acquire(K)
            tma_load(K, mK, work.batch, head_k, n0)
            if HAS_TMA_BIAS:
                load_bias(K, biases, (work, n0))
            acquire(V)
            tma_load(V, mV, work.batch, head_k, n0)
            K, V = advance(K, 1), advance(V, 1)
            n_block = next_n_block(work, mask, opaque(n_block + 1))

    @device
    def start_scores(Q, K, V, n_block, band):
        """Start S of a tile of keys."""
        left = band[3] - n_block * TILE_N
        clear_keys((K, V), left)
        wait(K)
        return dot(S_TILE, Q, K.tile.T)                         # Alg. 4 line 11: S = Q K^T

    @device
    def step(dQ, pending, S, found, kept, K, V, tile, n_block, args):
        """dQ of a tile of keys, in flight; and what is pending of the gradients of a function's arrays."""
        batch, head, m0, n0 = tile.batch, tile.head, tile.m0, n_block * TILE_N
        here = bias_in_registers(found, K, tile, args.scores)
        wait(V)
        dP = dot(S_TILE, kept.dO, V.tile.T)                     # line 17: dP = dO V^T, in flight
        prepare(K, args, tile, n0)
        QK = S
        S, F = apply_score(S, here, tile, args.scores, n_block)
        P = recompute(S, kept.lse, args.scale_log2)             # line 13: P = exp(S - lse)
        if tested(args.mask, kept.band, batch, head, tile.m_block, n_block, m0, m0 + ROWS, n0, n0 + TILE_N):
            P, F = masked(P, F, args.mask, kept.band, batch, head, m0, n0)     # line 12: MASK
        P = sign_dropped(P, args.drops, batch, head, m0, n0)                            # line 14
        after = dS_of(P, wgmma_wait(dP, 0), kept.D, args.delta_scale)                   # dS after the score
        dS = pull_back(after, F)                                # line 20
        release(V)
        dQ = dot(dQ, operand(dS, SHARED_K), allocate(OWN_K, K.index))       # line 21: dQ += dS K
        return dQ, add_reads(pending, QK, after, K, args, tile, n0)

    @device
    def compute(mDQ, mLse, mDelta, tile, scale, args):
        """The consumers, whole warpgroups."""
        consumer, (batch, head, m_block, first, n_blocks, segment) = warpgroup_index(), work_tile(args.mask, *tile)
        m0, band = m_block * TILE_M + consumer * ROWS, band_at(args.mask, batch, head)
        tile = ConsumerTile(batch, head, m0, m_block, first, n_blocks, segment)
        sQ, sDO = stage(Q_PIPELINE, consumer), stage(DO_PIPELINE, consumer)
        K, V, Q, dO = stage(K_PIPELINE, 0), stage(V_PIPELINE, 0), sQ.tile, sDO.tile
        wait(sQ)
        wait(sDO)
        if CLEARS_QUERIES:
            left = minimum(band[2], segment.queries) - m0
            clear(Q, left)
            clear(dO, left)
            fence_async_proxy()
            sync_warpgroup()
        padded_row = segment.first_padded_row + m0
        lse, D = load(mLse[batch, head], ROW_VECTOR, padded_row), load(mDelta[batch, head], ROW_VECTOR, padded_row)
        dQ, kept = full(Q_TILE, ZERO), Kept(dO, lse, D, band)
        n_block, pending = next_n_block(tile, args.mask, first), none_pending()
        if n_block < n_blocks:
            found = prefetch_bias(tile, args.scores, n_block)
            S = wgmma_wait(start_scores(Q, K, V, n_block, band), 0)
            after = next_n_block(tile, args.mask, opaque(n_block + 1))
            while after < n_blocks:
                dQ, pending = step(dQ, pending, S, found, kept, K, V, tile, n_block, args)
                found = prefetch_bias(tile, args.scores, after)
                S = start_scores(Q, advance(K, 1), advance(V, 1), after, band)
                dQ, pending = wgmma_wait(dQ, 1), settled(pending)
                release(K)
                S = wgmma_wait(S, 0)
                K, V, n_block = advance(K, 1), advance(V, 1), after
                after = next_n_block(tile, args.mask, opaque(n_block + 1))
            dQ, pending = step(dQ, pending, S, found, kept, K, V, tile, n_block, args)
            dQ = wgmma_wait(dQ, 0)
            release(K)
        add_last(pending, args, tile)
        sync_warpgroup()                                        # all have read Q
        first, end = queries_of(segment)
        save_dq(mDQ[batch, head][first:end], dQ * scale, allocate(STAGED_Q, sQ.index), m0)  # line 24

    own_pipelines = Q_PIPELINE, DO_PIPELINE, K_PIPELINE, V_PIPELINE
    registers = REGISTERS[CONSUMERS]
    begin, take_roles = warp_specialised(own_pipelines, CONSUMERS, registers, compute, load_tiles, blocks=blocks)

    def kernel(
        mQ, mK, mV, mDO, biases, mDQ, mReads, mLse, mDelta, mask, scores, drops, group_size, ds_scale, scale_log2,
        kept_scale, at_once, delta_scale,
    ):
        begin()
        batches, heads, seqlen_q, _ = shape(mDQ)
        m_blocks = tiles_of(mask.packing, seqlen_q)
        number, batch, head = place_grouped(block_index(), m_blocks, batches * heads, heads, at_once)
        segment, m_block = tile_of(mask.packing, batch, m_blocks - 1 - number, seqlen_q)   # heaviest first, if causal
        mask, m_end = mask_of(mask, segment), minimum((m_block + 1) * TILE_M, segment.queries)
        if m_block * TILE_M < m_end:                            # else a slot without a tile
            tile = segment, batch, head, m_block, m_end
            args = BackwardArguments(
                mask, scores_of(scores, segment), drops, scale_log2, kept_scale, delta_scale, mReads
            )  # fmt: skip
            given = mQ, mK, mV, mDO, biases, mask, tile, head // group_size
            take_roles((mDQ, mLse, mDelta, tile, ds_scale, args), (given,))

    maps = SHARED_Q, SHARED_K, SHARED_V, SHARED_DO, *[SHARED_B] * HAS_TMA_BIAS
    dtypes, about = {"dq": out_dtypes[0]}, {"mask": mask, "score": score, "bias_dtype": bias_dtype}
    about["read_dtype"] = reads[2] if reads else None
    return source(kernel, SPEC.arguments, shared, maps, dtype, dtypes, CONSUMERS, blocks, **about)


# ------------------------------------------------------------------------------------------------------------- tiles
QUERIES = {
    64: WgmmaTiles(128, 128, (2, 2)),
    128: WgmmaTiles(128, 64, (3, 2)),
    192: WgmmaTiles(128, 64, (3, 2)),
    256: WgmmaTiles(128, 64, (2, 1)),
    320: WgmmaTiles(128, 32, (2, 1)),
    384: WgmmaTiles(64, 32, (3, 2)),
    448: WgmmaTiles(64, 32, (2, 1)),
    512: WgmmaTiles(64, 32, (2, 1)),
    576: WgmmaTiles(64, 16, (3, 2)),
}  # fmt: skip
QUERIES_UNDER_PRESSURE = {256: WgmmaTiles(128, 32, (3, 2))}  # with dropout or a mask's grids
SMALL_BLOCKS = {64: WgmmaTiles(64, 64, (4, 4), 2), 128: WgmmaTiles(64, 64, (2, 2), 2)}
QUERIES_SCORED = QUERIES_UNDER_PRESSURE | {64: WgmmaTiles(128, 64, (3, 3))}


def queries_row(work):
    if has_small_blocks(work) and size_of(work) in SMALL_BLOCKS:
        return SMALL_BLOCKS[size_of(work)]
    size, under_pressure = size_of(work), QUERIES_SCORED if work.score else QUERIES_UNDER_PRESSURE
    return under_pressure.get(size, QUERIES[size]) if is_under_pressure(work) else QUERIES[size]


OF_COLUMNS = by_columns(dq=0)


def parameters_q(work, tiles):
    added = {"bias_dtype": dtype_of_bias(work), "reads": reads_of(work, tiles), **OF_COLUMNS["of_slice"](work, 0)}
    return parameters_of("dq")(work, tiles) | added


SPEC = Spec(
    hopper_backward_q,
    (*GIVEN, BIAS, Matrix("dq"), READ_SUMS, *STATISTICS_AND_NUMBERS),
    tiles=lambda work: (queries_row(work),),
    parameters=parameters_q,
    numbers=at_once,
    arch="a",
    packs=True,
    **OF_COLUMNS,
)

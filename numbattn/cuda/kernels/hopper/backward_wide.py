"""Attention backward on Hopper: dK and dV where a consumer has registers for only one of them. See `backward_steps`."""

import numpy as np

from ...tile import (
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    bulk_load,
    clear,
    commit,
    device,
    dot,
    fence_async_proxy,
    full,
    get,
    get_registers,
    operand,
    prefetch_tensor_map,
    put_registers,
    release,
    stage,
    sync_warpgroup,
    tma_load,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)
from ..scores import score_steps_ahead, within_segment
from ..shared.dropout import dropout_steps
from ..shared.layouts import DTYPES
from ..shared.query_tiles import key_lengths, keys_step, queries_steps
from ..shared.recompute import mask_step, recompute
from ..shared.segments import keys_of
from ..shared.visibility import band_of, has_key_lengths, has_query_lengths
from ..shared.warps import warp_specialised
from .backward_steps import (
    CONSUMERS,
    GIVEN,
    REGISTERS,
    ROWS,
    ZERO,
    BackwardArguments,
    WgmmaTiles,
    kept_operand,
    keys_spec,
    parameters_of,
    pipelines_within,
    save_step,
    size_of,
    source,
)
from .forward_steps import clear_step
from .forward_tiles import by_columns


def loader(pipelines, first_queries, next_queries):
    """The producer's device function: it loads a tile of K and V, then Q and dO and what goes with them."""
    Q_PIPELINE, K_PIPELINE, V_PIPELINE, DO_PIPELINE, SHARED_LSE, SHARED_DELTA = pipelines
    TILE_M = Q_PIPELINE.tile.rows

    @device
    def load_tiles(mQ, mK, mV, mDO, mLse, mDelta, mask, tile):
        prefetch_tensor_map(mQ)
        prefetch_tensor_map(mDO)
        Q, dO, n0 = stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0), tile.segment.first_key + tile.first
        tma_load(stage(K_PIPELINE, 0), mK, tile.batch, tile.head_k, n0)
        tma_load(stage(V_PIPELINE, 0), mV, tile.batch, tile.head_k, n0)
        at = first_queries(mask, tile)
        while at.m_block < at.m_blocks:
            m0 = at.m_block * TILE_M
            row, padded_row = tile.segment.first_query + m0, tile.segment.first_padded_row + m0
            acquire(Q)
            tma_load(Q, mQ, tile.batch, at.head, row)
            bulk_load(Q, allocate(SHARED_LSE, Q.index), mLse[tile.batch, at.head], padded_row)
            bulk_load(Q, allocate(SHARED_DELTA, Q.index), mDelta[tile.batch, at.head], padded_row)
            acquire(dO)
            tma_load(dO, mDO, tile.batch, at.head, row)
            Q, dO = advance(Q, 1), advance(dO, 1)
            at = next_queries(mask, tile, at)

    return load_tiles


def hopper_backward_wide(*, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, score, dropout, nbytes, own=()):
    """dK and dV of 64 keys: the first consumer computes S, P and dV, the second one dP, dS and dK.

    own: which columns of dK and of dV, the first one and how many, if not all.
    """
    dtype, (tile_m, tile_n, stages, _) = DTYPES[dtype], tiles
    (first_k, cols_k), (first_v, cols_v) = own or ((0, head_dim), (0, head_dim_v))
    S_TILE, K_TILE, V_TILE = wgmma(tile_m), wgmma(cols_k), wgmma(cols_v)
    COLS = S_TILE.col_vector()
    shared = SharedMemory()
    SHARED_K, SHARED_V = (shared.boxes(ROWS, cols, dtype, 1) for cols in (head_dim, head_dim_v))
    SHARED_Q, SHARED_DO = (shared.boxes(tile_m, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    OWN_Q, OWN_DO = SHARED_Q.part(first_k, cols_k), SHARED_DO.part(first_v, cols_v)
    STAGED_K, STAGED_V = SHARED_K.of_columns(cols_k), SHARED_V.of_columns(cols_v)
    SHARED_P = shared.tile(1, ROWS * tile_m, np.float32, 2)
    given = SHARED_Q, SHARED_K, SHARED_V, SHARED_DO
    pipelines = pipelines_within(shared, *given)
    Q_PIPELINE, K_PIPELINE, V_PIPELINE, DO_PIPELINE, SHARED_LSE, SHARED_DELTA = pipelines
    P_PIPELINE = Pipeline.within(shared, SHARED_P, readers=1)
    TILE_M = tile_m
    save_dk, save_dv = (save_step(dtype, out, cols, nbytes) for out, cols in zip(out_dtypes, (cols_k, cols_v)))
    masked, band_at, longest = mask_step(mask, S_TILE, transposed=True), band_of(mask), key_lengths(mask)
    first_queries, next_queries, needs_mask = queries_steps(mask, tile_m, ROWS)
    (sign_dropped, dS_of), kept = dropout_steps(S_TILE, dropout, transposed=True), kept_operand(dropout)
    look_up, apply, pull_back, _ = score_steps_ahead(
        score, S_TILE, np.float32, transposed=True, has_room=cols_v <= 192
    )  # fmt: skip
    clear_queries, CLEARS_KEYS = clear_step(tile_m, CONSUMERS, has_query_lengths(mask)), has_key_lengths(mask)

    @device
    def product(X, Y, tile, at, args):
        """Start S = Q K^T or dP = dO V^T of a tile of queries, transposed: Alg. 4 lines 11 and 17."""
        left = band_at(args.mask, tile.batch, at.head)[2] - at.m_block * TILE_M
        clear_queries((Y, Y), left)                             # of each consumer, which is the other one's Z
        wait(Y)
        return dot(S_TILE, X, Y.tile.T)

    @device
    def place_of(tile, at):
        return tile.segment.first_query + at.m_block * TILE_M, tile.segment.first_key + tile.first

    @device
    def prefetch_bias(tile, at, args):
        """What the score looks up for a tile of S, in flight."""
        m0, n0 = place_of(tile, at)
        return look_up(args.scores, (), tile.batch, at.head, m0, n0)

    @device
    def no_bias(tile, at, args):
        return ()

    def sum_over_queries(layout, step, prefetch, Y_PIPELINE, Z_PIPELINE):
        """The device function (X, tile, args): the sum of step(sum, S, found, Y, Z, sP, tile, at, args) over the tiles
        of queries, where S = X Y^T, and found is what prefetch(tile, at, args) looks up. The next S is in flight
        beside the product that `step` starts, whose right operand is Z. `step` releases Y and sP."""

        @device
        def loop(X, tile, args):
            total, at = full(layout, ZERO), first_queries(args.mask, tile)
            Y, Z, sP = stage(Y_PIPELINE, 0), stage(Z_PIPELINE, 0), stage(P_PIPELINE, 0)
            if at.m_block < at.m_blocks:
                found = prefetch(tile, at, args)
                S = wgmma_wait(product(X, Y, tile, at, args), 0)
                after = next_queries(args.mask, tile, at)
                while after.m_block < after.m_blocks:
                    wait(Z)
                    total = step(total, S, found, Y, Z, sP, tile, at, args)
                    found = prefetch(tile, after, args)
                    S = product(X, advance(Y, 1), tile, after, args)
                    total = wgmma_wait(total, 1)
                    release(Z)
                    S = wgmma_wait(S, 0)
                    Y, Z, sP = advance(Y, 1), advance(Z, 1), advance(sP, 1)
                    at, after = after, next_queries(args.mask, tile, after)
                wait(Z)
                total = wgmma_wait(step(total, S, found, Y, Z, sP, tile, at, args), 0)
                release(Z)
            return total

        return loop

    @device
    def step_v(dV, S, found, Q, dO, sP, tile, at, args):
        """P for the other consumer; dV in flight."""
        batch, m0, (row, col) = tile.batch, at.m_block * TILE_M, place_of(tile, at)
        S, F = apply(S, found, args.scores, batch, at.head, row, col)
        P = recompute(S, get(allocate(SHARED_LSE, Q.index), COLS), args.scale_log2) # line 13: P = exp(S - lse)
        if needs_mask(args.mask, tile, at, tile.first):
            band = band_at(args.mask, batch, at.head)
            P, F = masked(P, F, args.mask, band, batch, at.head, m0, tile.first)   # line 12: MASK
        P = sign_dropped(P, args.drops, batch, at.head, m0, tile.first)                         # line 14
        acquire(sP)
        put_registers(sP.tile, pull_back(P, F))                 # dS is P F times the rest
        sync_warpgroup()
        commit(sP)
        release(Q)
        return dot(dV, kept(P, SHARED_DO), allocate(OWN_DO, dO.index))     # line 16: dV += (P Z)^T dO

    sum_dv = sum_over_queries(V_TILE, step_v, prefetch_bias, Q_PIPELINE, DO_PIPELINE)

    @device
    def compute_v(mDV, K, V, tile, args):
        """The first consumer."""
        dV = sum_dv(K.tile, tile, args)
        release(K)
        acquire(advance(V, 1))                                  # the other consumer has read V
        first, end = keys_of(tile.segment)
        save_dv(mDV[tile.batch, tile.head_k][first:end], dV * args.kept_scale, allocate(STAGED_V, V.index), tile.first)

    @device
    def step_k(dK, dP, nothing, dO, Q, sP, tile, at, args):
        """dK in flight."""
        D = get(allocate(SHARED_DELTA, Q.index), COLS)
        wait(sP)
        dS = dS_of(get_registers(sP.tile, S_TILE), dP, D, args.delta_scale)     # line 20
        sync_warpgroup()                                        # all have read P
        release(sP)
        release(dO)
        return dot(dK, operand(dS, SHARED_Q), allocate(OWN_Q, Q.index))     # line 22: dK += dS^T Q

    sum_dk = sum_over_queries(K_TILE, step_k, no_bias, DO_PIPELINE, Q_PIPELINE)

    @device
    def compute_k(mDK, K, V, tile, scale, args):
        """The second consumer."""
        dK = sum_dk(V.tile, tile, args)
        release(V)
        acquire(advance(K, 1))                                  # the other consumer has read K
        first, end = keys_of(tile.segment)
        of_keys = mDK[tile.batch, tile.head_k][first:end]
        save_dk(of_keys, dK * scale, allocate(STAGED_K, K.index), tile.first)   # line 24

    @device
    def compute(mDK, mDV, tile, scale, args):
        """Both consumers, whole warpgroups."""
        K, V = stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
        wait(K)
        wait(V)
        if CLEARS_KEYS:
            left = longest(args.mask, tile) - tile.first
            if warpgroup_index() == 0:
                clear(K.tile, left)
            else:
                clear(V.tile, left)
            fence_async_proxy()
            sync_warpgroup()
        if warpgroup_index() == 0:
            compute_v(mDV, K, V, tile, args)
        else:
            compute_k(mDK, K, V, tile, scale, args)

    own_pipelines = K_PIPELINE, V_PIPELINE, Q_PIPELINE, DO_PIPELINE, P_PIPELINE
    load_tiles = loader(pipelines, first_queries, next_queries)
    begin, take_roles = warp_specialised(own_pipelines, CONSUMERS, REGISTERS[CONSUMERS], compute, load_tiles)

    keys_of_block, scores_of = keys_step(mask, tile_n), within_segment(score)

    def kernel(
        mQ, mK, mV, mDO, biases, mDK, mDV, mSums, mReads, mLse, mDelta, mask, scores, drops, group_size, ds_scale,
        scale_log2, kept_scale, at_once, delta_scale,
    ):  # fmt: skip
        begin()
        tile, mask = keys_of_block(mLse, mDK, mask, group_size, at_once)
        if tile.first < tile.end:                               # else a slot without a tile
            args = BackwardArguments(
                mask, scores_of(scores, tile.segment), drops, scale_log2, kept_scale, delta_scale, ()
            )  # fmt: skip
            take_roles((mDK, mDV, tile, ds_scale, args), ((mQ, mK, mV, mDO, mLse, mDelta, mask, tile),))

    dtypes = dict(zip(("dk", "dv"), out_dtypes))
    return source(kernel, SPEC.arguments, shared, given, dtype, dtypes, mask=mask, score=score)


# ------------------------------------------------------------------------------------------------------------- tiles
WIDE = {
    64: WgmmaTiles(64, 64, 4), 128: WgmmaTiles(64, 64, 4), 192: WgmmaTiles(64, 64, 3), 256: WgmmaTiles(64, 64, 2),
    320: WgmmaTiles(32, 64, 3), 384: WgmmaTiles(32, 64, 2), 448: WgmmaTiles(16, 64, 3), 512: WgmmaTiles(16, 64, 2),
    576: WgmmaTiles(16, 64, 2),
}  # fmt: skip


def keys_row(work):
    return WIDE[size_of(work)]


OF_COLUMNS = by_columns(dk=0, dv=1)


def parameters(work, tiles):
    return parameters_of("dk", "dv")(work, tiles) | OF_COLUMNS["of_slice"](work, 0)


SPEC = keys_spec(hopper_backward_wide, keys_row, parameters, (*GIVEN, ()), **OF_COLUMNS)  # no bias

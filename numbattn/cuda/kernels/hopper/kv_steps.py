"""Parts of a step of `hopper_backward_kv`: dS and dV of a tile of queries, in an order that fits in registers."""

from typing import Any, NamedTuple

import numpy as np

from ...tile import (
    Pipeline,
    acquire,
    advance,
    allocate,
    alongside,
    device,
    dot,
    get,
    release,
    sync_warpgroup,
    wait,
    warpgroup_index,
    wgmma_wait,
)
from ..scores import score_steps_ahead
from ..shared.dropout import dropout_steps
from ..shared.layouts import DTYPES
from ..shared.recompute import mask_step, recompute
from ..shared.visibility import band_of
from .backward_steps import ROWS, kept_operand
from .tma_bias import load_bias_step
from .variants import DP_DS_DV, DP_DV_DS, DV_DP_DS


class BackwardAccumulators(NamedTuple):
    """What a consumer carries from tile to tile."""

    dK: Any
    dV: Any
    S: Any  # of the next tile, transposed
    lse: Any  # of its queries, and delta, if these are read a step ahead
    delta: Any


class Stages(NamedTuple):
    """Where a consumer is in the pipelines. Of those that are advanced together one is kept in registers."""

    K: Any  # the first part of the tile of keys, one of several
    V: Any
    Q: Any
    dO: Any
    dS: Any
    B: Any  # of a bias


@device
def advance_all(stages):
    """The stages of the next tile of queries."""
    K, V, Q, dO, dS, B = stages
    Q = advance(Q, 1)
    return Stages(K, V, Q, alongside(dO, Q), advance(dS, 1), advance(B, 1))


@device
def after_last(stages):
    """Those after the last tile of queries that see a tile of keys, whose dS no later step reads."""
    K, V, Q, dO, dS, B = advance_all(stages)
    return Stages(K, V, Q, dO, advance(dS, 1), B)


@device
def next_keys(stages, parts):
    """Those of the next tile of keys, of so many parts."""
    K, V, Q, dO, dS, B = stages
    K = advance(K, parts)
    return Stages(K, alongside(V, K), Q, dO, dS, B)


def statistic_steps(places, layout, early):
    """Device functions for lse or delta of the rows of Q: (Q) -> what is read a step ahead; (that, Q) -> the row
    statistic.

    early: whether it is read ahead, which takes registers; else its load waits for the products started before it.
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


def bias_steps(shared, dtype, tile_m, consumers):
    """The tiles of a bias that TMA loads, transposed; their pipeline; and the producer's device function (biases, tile,
    at, row, B) -> the next B. dtype: "" if there is no such bias."""
    STAGES, HAS_TMA_BIAS = 1 if tile_m > 64 else 2, bool(dtype)
    SHARED_B = shared.boxes(tile_m, ROWS, DTYPES[dtype or "float16"], STAGES * consumers * HAS_TMA_BIAS)

    @device
    def place_of(consumer, where):
        tile, at, row = where
        return tile.batch, at.head, row, tile.segment.first_key + tile.first + consumer * ROWS

    load_bias = load_bias_step(SHARED_B, consumers, place_of)

    @device
    def load_biases(biases, tile, at, row, B):
        if not HAS_TMA_BIAS:
            return B
        acquire(B)
        load_bias(B, biases, (tile, at, row))
        return advance(B, 1)

    return SHARED_B, Pipeline.within(shared, SHARED_B.of_stages(STAGES), consumers, fills=consumers), load_biases


def score_step(score, layout, tile_m, consumers, SHARED_B):
    """Device functions: (S, B, tile, at, n0, args) -> S after the score, and F; (P, F) -> P F."""
    HAS_TMA_BIAS, TILE_M, CONSUMERS = SHARED_B.stages > 0, tile_m, consumers
    look_up, apply, pull_back, _ = score_steps_ahead(score, layout, np.float32, transposed=True, by_tma=HAS_TMA_BIAS)

    @device
    def apply_score(S, B, tile, at, n0, args):
        batch, scores = tile.batch, args.scores
        row, col = tile.segment.first_query + at.m_block * TILE_M, tile.segment.first_key + n0
        if HAS_TMA_BIAS:
            wait(B)
            place = allocate(SHARED_B, B.index * CONSUMERS + warpgroup_index())
            S, F = apply(S, look_up(scores, place.T, batch, at.head, row, col), scores, batch, at.head, row, col)
            sync_warpgroup()                                    # all have read it
            release(B)
            return S, F
        return apply(S, look_up(scores, (), batch, at.head, row, col), scores, batch, at.head, row, col)

    return apply_score, pull_back


def p_step(mask, layout, tile_m, sign_dropped, lse_of, masks):
    """The device function (S, F, lse, Q, tile, at, n0, args) -> P, negative where it is dropped, and F."""
    band_at, masked, TILE_M = band_of(mask), mask_step(mask, layout, transposed=True), tile_m

    @device
    def p_of(S, F, lse, Q, tile, at, n0, args):
        batch, m0 = tile.batch, at.m_block * TILE_M
        P = recompute(S, lse_of(lse, Q), args.scale_log2)       # Alg. 4 line 13: P = exp(S - lse)
        if masks:
            band = band_at(args.mask, batch, at.head)
            P, F = masked(P, F, args.mask, band, batch, at.head, m0, n0)       # line 12: MASK
        return sign_dropped(P, args.drops, batch, at.head, m0, n0), F           # line 14

    return p_of


def ds_step(
    variant, layout, tile_m, consumers, mask, score, dropout, SHARED_DO, SHARED_B, lse_of, delta_of, masks,
):  # fmt: skip
    """The device function (acc, V, stages, tile, at, n0, args) -> dS of the tile of queries `at`, transposed, and dV
    with this tile's added, in flight. masks: whether elements may be masked."""
    S_TILE, HAS_TMA_BIAS, DQ_LATE = layout, SHARED_B.stages > 0, variant.dq_late
    (sign_dropped, dS_of), kept = dropout_steps(S_TILE, dropout, transposed=True), kept_operand(dropout)
    apply_score, pull_back = score_step(score, S_TILE, tile_m, consumers, SHARED_B)
    p_of = p_step(mask, S_TILE, tile_m, sign_dropped, lse_of, masks)

    @device
    def start_dp(S, V, dO, B, tile, at, n0, args):
        """Product 2, in flight; S after the score, and F."""
        if HAS_TMA_BIAS:                                        # before dP takes registers
            S, F = apply_score(S, B, tile, at, n0, args)
            wait(dO)
            return dot(S_TILE, V, dO.tile.T), S, F
        wait(dO)
        dP = dot(S_TILE, V, dO.tile.T)                          # line 17: dP = dO V^T
        if DQ_LATE:
            S = wgmma_wait(S, 1)                                # so that ptxas starts all of dP before the exponentials
        S, F = apply_score(S, B, tile, at, n0, args)
        return dP, S, F

    @device
    def add_dv(dV, P, dO):
        return dot(dV, kept(P, SHARED_DO), dO.tile)             # line 16: dV += (P Z)^T dO

    @device
    def dp_ds_dv(acc, V, stages, tile, at, n0, args):
        (_, dV, S, lse, delta), (_, _, Q, dO, _, B) = acc, stages
        dP, S, F = start_dp(S, V, dO, B, tile, at, n0, args)    # product 2
        P, F = p_of(S, F, lse, Q, tile, at, n0, args)
        PF = pull_back(P, F)                                    # dS is P F times the rest
        dS = dS_of(PF, wgmma_wait(dP, 0), delta_of(delta, Q), args.delta_scale)     # line 20: dS = P (dP - D)
        return dS, add_dv(dV, P, dO)                            # product 3

    @device
    def dp_dv_ds(acc, V, stages, tile, at, n0, args):
        (_, dV, S, lse, delta), (_, _, Q, dO, _, B) = acc, stages
        dP, S, F = start_dp(S, V, dO, B, tile, at, n0, args)    # product 2
        P, F = p_of(S, F, lse, Q, tile, at, n0, args)
        dV = add_dv(dV, P, dO)                                  # product 3
        PF = pull_back(P, F)
        return dS_of(PF, wgmma_wait(dP, 1), delta_of(delta, Q), args.delta_scale), dV

    @device
    def dv_dp_ds(acc, V, stages, tile, at, n0, args):
        (_, dV, S, lse, delta), (_, _, Q, dO, _, B) = acc, stages
        S, F = apply_score(S, B, tile, at, n0, args)
        wait(dO)
        P, F = p_of(S, F, lse, Q, tile, at, n0, args)
        dV = add_dv(dV, P, dO)                                  # product 3
        PF = pull_back(P, F)
        dP = dot(S_TILE, V, dO.tile.T)                          # product 2
        return dS_of(PF, wgmma_wait(dP, 0), delta_of(delta, Q), args.delta_scale), dV

    return {DP_DS_DV: dp_ds_dv, DP_DV_DS: dp_dv_ds, DV_DP_DS: dv_dp_ds}[variant.order]

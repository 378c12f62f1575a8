"""The tangent of the backward pass on any GPU: the directional derivatives of dQ, dK and dV, as two kernels.

tX is the tangent of X. The lines of `backward`, differentiated; Z is the factor of P for dropout:

    tP = P (tS - tlse)                       tS = scale (tQ K^T + Q tK^T)
    dS = P (Z dP - D)                        dP = dO V^T
    tdS = tP (Z dP - D) + P (Z tdP - tD)     tdP = dO tV^T + tdO V^T
    tdQ = scale (tdS K + dS tK)
    tdK = scale (tdS^T Q + dS^T tQ)
    tdV = (Z tP)^T dO + (Z P)^T tdO

Without tdO its two products are not compiled in. tlse and tD are row vectors, as lse and D are: see `delta_tangent`.

`backward_tangent_kv` keeps a tile of keys and loops over the queries that see it, for tdK and tdV. `backward_tangent_q`
keeps a tile of queries and loops over the keys that they see, for tdQ. Both recompute P from lse. Everything else,
tiles, stages and the mask after the exponential, is as in `backward`; masked elements of tP and tdP are 0, too.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...build import Source
from ...tile import (
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    block_index,
    copy_async,
    copy_layout,
    device,
    full,
    get,
    index,
    lines_of,
    load,
    maximum,
    minimum,
    opaque,
    save,
    shape,
    sync_threads,
    wait_copies,
)
from ...words.arguments import LSE_LOG2, Matrix, Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..scores import SCORE, TSCORE, is_nonlinear, tangent_steps, within_segment
from ..shared.dropout import DROPOUT, drop_step
from ..shared.layouts import DTYPES, sum_type, sums, vector
from ..shared.recompute import clear_tangents, low_steps, mask_step, tangent_of_p, tangents_of_ds
from ..shared.schedule import place
from ..shared.segments import count_step, keys_of, mask_within_step, queries_of, slot_step
from ..shared.tangents import OperandRows, add_tangent_step, products_step, tiles_step
from ..shared.visibility import (
    MASK,
    band_of,
    needs_test,
    steps_to_next,
    visible_keys,
    visible_queries,
)
from ..tables import rows_of, with_results
from . import delta, delta_tangent
from .backward_tangent_tiles import NONLINEAR_KV, NONLINEAR_Q, SHORT_KV, SHORT_Q, TILES_KV, TILES_Q


class Statistics(NamedTuple):
    """Row vectors, padded: lse in base 2, +inf where nothing is seen, and others, which are 0 there."""

    lse: Any
    tlse: Any
    delta: Any
    tdelta: Any


def backward_tangent_kv(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, score, tscore, dropout, nbytes, tangents
):  # fmt: skip
    """tdK and tdV; S, P, dP, dS and their tangents are transposed: a row is a key, a column a query.

    tangents: which of "q", "k", "v" and "do" have one; tscore: see Work.
    """
    dtype, ACC, (_, tile_m, tile_n, threads, _, stages, *_) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    has_tq, has_tk, has_tv, has_tdo = (name in tangents for name in ("q", "k", "v", "do"))
    K_TILE = sums(tiles, tile_n, head_dim, run=vector(dtype))
    V_TILE = sums(tiles, tile_n, head_dim_v, run=vector(dtype))
    S_TILE = sums(tiles, tile_n, tile_m)
    shared = SharedMemory()
    kept, moving = (shared, dtype, threads, tile_n), (shared, dtype, threads, tile_m)
    copy_k, k_tiles = tiles_step(*kept, head_dim, has_tk, nbytes)
    copy_v, v_tiles = tiles_step(*kept, head_dim_v, has_tv, nbytes)
    copy_q, q_tiles = tiles_step(*moving, head_dim, has_tq, nbytes, stages)
    copy_do, do_tiles = tiles_step(*moving, head_dim_v, has_tdo, nbytes, stages)
    (first_low, recompute, _), HAS_LOW = low_steps(dtype), dtype.itemsize > 2
    SHARED_LSE, SHARED_TLSE, SHARED_DELTA, SHARED_TDELTA, *others = (
        shared.tile(1, tile_m, ACC, stages) for _ in range(4 + HAS_LOW)
    )  # fmt: skip
    SHARED_LOW = others[0] if HAS_LOW else SHARED_LSE
    COLS, COPY_LINE = S_TILE.col_vector(), copy_layout(1, tile_m, threads, vector(np.dtype(ACC)))
    scores_of = products_step(S_TILE, ACC, dtype, has_tk, has_tq)
    dp_of = products_step(S_TILE, ACC, dtype, has_tv, has_tdo)
    add_dv = add_tangent_step(S_TILE, shared, ACC, dtype, has_tdo)
    add_dk = add_tangent_step(S_TILE, shared, ACC, dtype, has_tq)
    TILE_M, TILE_N, STAGES, ROWS_OF, ZERO = tile_m, tile_n, stages, Alignment(nbytes), ACC(0)
    tested, steps, band_at = needs_test(mask), steps_to_next(mask), band_of(mask)
    masked, drop = mask_step(mask, S_TILE, transposed=True), drop_step(S_TILE, dropout, transposed=True)
    apply, pull_back = tangent_steps(score, tscore, S_TILE, ACC, transposed=True)
    tile_of, mask_of = slot_step(mask, "k", tile_n), mask_within_step(mask)
    scores_within, tscores_within = within_segment(score), within_segment(tuple(filter(None, tscore)))

    @device
    def fetch(stage, mQ, mDO, mTQ, mTDO, statistics, queries, row, m0):
        """A tile of queries."""
        copy_q(stage, mQ, mTQ, queries, m0)
        copy_do(stage, mDO, mTDO, queries, m0)
        batch, head, line = opaque(queries.batch), opaque(queries.head), (row + m0) // TILE_M
        copy_async(allocate(SHARED_LSE, stage), lines_of(statistics.lse, batch, head, TILE_M), COPY_LINE, line)
        if HAS_LOW:
            low = line + first_low(statistics.lse) // TILE_M
            copy_async(allocate(SHARED_LOW, stage), lines_of(statistics.lse, batch, head, TILE_M), COPY_LINE, low)
        copy_async(allocate(SHARED_TLSE, stage), lines_of(statistics.tlse, batch, head, TILE_M), COPY_LINE, line)
        copy_async(allocate(SHARED_DELTA, stage), lines_of(statistics.delta, batch, head, TILE_M), COPY_LINE, line)
        copy_async(allocate(SHARED_TDELTA, stage), lines_of(statistics.tdelta, batch, head, TILE_M), COPY_LINE, line)

    def kernel(
        mQ, mK, mV, mDO, mTQ, mTK, mTV, mTDO, mTDK, mTDV, mLse, mTLse, mDelta, mTDelta, mask, scores, tscores,
        drops, group_size, scale, scale_log2, kept_scale,
    ):  # fmt: skip
        batches, heads, _ = shape(mLse)
        _, heads_k, seqlen_k, _ = shape(mTDK)
        tile, batch, head_k = place(block_index(), batches * heads_k, heads_k)
        segment, n_block = tile_of(mask.packing, batch, tile, seqlen_k)
        n0 = n_block * TILE_N
        if n0 >= segment.keys:                                  # a slot without a tile
            return
        mask, scores = mask_of(mask, segment), scores_within(scores, segment)
        tscores = tscores_within(tscores, segment)
        query, row, (key, end_key) = segment.first_query, segment.first_padded_row, keys_of(segment)
        keys = OperandRows(batch, head_k, key, end_key - key)
        copy_k(0, mK, mTK, keys, n0)
        copy_v(0, mV, mTV, keys, n0)
        (sK, stK), (sV, stV), statistics = k_tiles(0), v_tiles(0), Statistics(mLse, mTLse, mDelta, mTDelta)
        tdK, tdV = full(K_TILE, ZERO), full(V_TILE, ZERO)
        for head in range(head_k * group_size, (head_k + 1) * group_size):
            band = band_at(mask, batch, head)
            first, end = visible_queries(band, n0, minimum(n0 + TILE_N, segment.keys))
            # without rows beyond a sequence's length, which may be NaN
            queries = OperandRows(batch, head, query, maximum(band[2], 1))
            m_block, m_blocks = first // TILE_M, (end + TILE_M - 1) // TILE_M
            m_block += steps(mask, batch, head, n_block, m_block, m_blocks - m_block)
            stage = index(0)
            sync_threads()                                      # all have read the last tile of the previous head
            if m_block < m_blocks:
                fetch(stage, mQ, mDO, mTQ, mTDO, statistics, queries, row, m_block * TILE_M)
            while m_block < m_blocks:
                m0, this = m_block * TILE_M, m_block
                m_block += 1
                m_block += steps(mask, batch, head, n_block, m_block, m_blocks - m_block)
                wait_copies()
                sync_threads()                                  # this tile has arrived, all have read the last one
                if STAGES == 2 and m_block < m_blocks:
                    fetch(1 - stage, mQ, mDO, mTQ, mTDO, statistics, queries, row, m_block * TILE_M)
                (sQ, stQ), (sdO, stdO) = q_tiles(stage), do_tiles(stage)
                S, tS = scores_of(sK, stK, sQ, stQ)             # S = Q K^T, tS = tQ K^T + Q tK^T
                S, tS, (F, tF) = apply(S, tS, scores, tscores, batch, head, query + m0, key + n0)
                lse, tlse = get(allocate(SHARED_LSE, stage), COLS), get(allocate(SHARED_TLSE, stage), COLS)
                P = recompute(S, lse, get(allocate(SHARED_LOW, stage), COLS), scale_log2)   # P = exp(S - lse)
                tP = tangent_of_p(P, tS, tlse, scale_log2)      # tP = P (tS - tlse)
                needs_mask = tested(mask, band, batch, head, n_block, this, m0, m0 + TILE_M, n0, n0 + TILE_N)
                if needs_mask:
                    P, tP = masked(P, tP, mask, band, batch, head, m0, n0)
                Z = drop(full(S_TILE, kept_scale), drops, batch, head, m0, n0)
                tdV = add_dv(tdV, P * Z, tP * Z, sdO, stdO)     # tdV += (Z tP)^T dO + (Z P)^T tdO
                dP, tdP = dp_of(sV, stV, sdO, stdO)             # dP = dO V^T, tdP = dO tV^T + tdO V^T
                if needs_mask:
                    dP, tdP, F, tF = clear_tangents(P, dP, tdP, F, tF)
                D, tD = get(allocate(SHARED_DELTA, stage), COLS), get(allocate(SHARED_TDELTA, stage), COLS)
                dS, tdS = tangents_of_ds(P, tP, dP * Z - D, tdP * Z - tD)
                dS, tdS = pull_back(dS, tdS, F, tF)
                tdK = add_dk(tdK, dS, tdS, sQ, stQ)             # tdK += tdS^T Q + dS^T tQ, scaled in the epilogue
                stage = opaque(STAGES - 1 - stage)              # else addresses are kept in registers across the loop
                if STAGES == 1 and m_block < m_blocks:
                    sync_threads()                              # all have read it
                    fetch(stage, mQ, mDO, mTQ, mTDO, statistics, queries, row, m_block * TILE_M)
        save(aligned(mTDK[batch, head_k][key:end_key], ROWS_OF), tdK * scale, n0)
        save(aligned(mTDV[batch, head_k][key:end_key], ROWS_OF), tdV, n0)

    dtypes, given = dict(zip(("tdk", "tdv"), out_dtypes)), [f"t{name}" for name in tangents]
    signature = signature_of(kernel, SPEC_KV.arguments, dtype, ACC, dtypes, mask=mask, score=score, tscore=tscore,
                             given=given)  # fmt: skip
    return Source(kernel, signature, threads, tiles.blocks, shared.nbytes)


def backward_tangent_q(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, score, tscore, dropout, nbytes, tangents
):  # fmt: skip
    """tdQ; a row of S, P, dP, dS and their tangents is a query."""
    dtype, ACC, (_, tile_m, tile_n, threads, _, stages, *_) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    has_tq, has_tk, has_tv, has_tdo = (name in tangents for name in ("q", "k", "v", "do"))
    Q_TILE = sums(tiles, tile_m, head_dim, run=vector(dtype))
    S_TILE = sums(tiles, tile_m, tile_n)
    shared = SharedMemory()
    kept, moving = (shared, dtype, threads, tile_m), (shared, dtype, threads, tile_n)
    copy_q, q_tiles = tiles_step(*kept, head_dim, has_tq, nbytes)
    copy_do, do_tiles = tiles_step(*kept, head_dim_v, has_tdo, nbytes)
    copy_k, k_tiles = tiles_step(*moving, head_dim, has_tk, nbytes, stages)
    copy_v, v_tiles = tiles_step(*moving, head_dim_v, has_tv, nbytes, stages)
    ROWS, (first_low, recompute, _) = S_TILE.row_vector(), low_steps(dtype)
    scores_of = products_step(S_TILE, ACC, dtype, has_tq, has_tk)
    dp_of = products_step(S_TILE, ACC, dtype, has_tdo, has_tv)
    add_dq = add_tangent_step(S_TILE, shared, ACC, dtype, has_tk)
    TILE_M, TILE_N, STAGES, ROWS_OF, ZERO = tile_m, tile_n, stages, Alignment(nbytes), ACC(0)
    tested, steps, band_at = needs_test(mask), steps_to_next(mask), band_of(mask)
    masked, drop = mask_step(mask, S_TILE), drop_step(S_TILE, dropout)
    apply, pull_back = tangent_steps(score, tscore, S_TILE, ACC)
    tiles_of, tile_of = count_step(mask, tile_m), slot_step(mask, "q", tile_m)
    mask_of = mask_within_step(mask)
    scores_within, tscores_within = within_segment(score), within_segment(tuple(filter(None, tscore)))

    @device
    def fetch(stage, mK, mV, mTK, mTV, keys, n0):
        """A tile of keys."""
        copy_k(stage, mK, mTK, keys, n0)
        copy_v(stage, mV, mTV, keys, n0)

    def kernel(
        mQ, mK, mV, mDO, mTQ, mTK, mTV, mTDO, mTDQ, mLse, mTLse, mDelta, mTDelta, mask, scores, tscores, drops,
        group_size, scale, scale_log2, kept_scale,
    ):  # fmt: skip
        batches, heads, seqlen_q, _ = shape(mTDQ)
        tile, batch, head = place(block_index(), batches * heads, heads)
        number = tiles_of(mask.packing, seqlen_q) - 1 - tile   # the heaviest tiles of a causal mask first
        segment, m_block = tile_of(mask.packing, batch, number, seqlen_q)
        m0 = m_block * TILE_M
        if m0 >= segment.queries:                               # a slot without a tile
            return
        mask, scores = mask_of(mask, segment), scores_within(scores, segment)
        tscores = tscores_within(tscores, segment)
        band = band_at(mask, batch, head)
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, segment.queries))
        key, row, (query, end_query) = segment.first_key, segment.first_padded_row, queries_of(segment)
        # without rows beyond a sequence's length, which may be NaN
        queries = OperandRows(batch, head, query, maximum(band[2], 1))
        keys = OperandRows(batch, head // group_size, key, maximum(band[3], 1))
        n_block, n_blocks = first // TILE_N, (end + TILE_N - 1) // TILE_N
        n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
        copy_q(0, mQ, mTQ, queries, m0)
        copy_do(0, mDO, mTDO, queries, m0)
        (sQ, stQ), (sdO, stdO), stage = q_tiles(0), do_tiles(0), index(0)
        if n_block < n_blocks:
            fetch(stage, mK, mV, mTK, mTV, keys, n_block * TILE_N)
        lse, tlse = load(mLse[batch, head], ROWS, row + m0), load(mTLse[batch, head], ROWS, row + m0)
        low = load(mLse[batch, head], ROWS, first_low(mLse) + row + m0)
        D, tD = load(mDelta[batch, head], ROWS, row + m0), load(mTDelta[batch, head], ROWS, row + m0)
        tdQ = full(Q_TILE, ZERO)
        while n_block < n_blocks:
            n0, this = n_block * TILE_N, n_block
            n_block += 1
            n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
            wait_copies()
            sync_threads()                                      # this tile has arrived, all have read the last one
            if STAGES == 2 and n_block < n_blocks:
                fetch(1 - stage, mK, mV, mTK, mTV, keys, n_block * TILE_N)
            (sK, stK), (sV, stV) = k_tiles(stage), v_tiles(stage)
            S, tS = scores_of(sQ, stQ, sK, stK)                 # S = Q K^T, tS = tQ K^T + Q tK^T
            S, tS, (F, tF) = apply(S, tS, scores, tscores, batch, head, query + m0, key + n0)
            P = recompute(S, lse, low, scale_log2)              # P = exp(S - lse)
            tP = tangent_of_p(P, tS, tlse, scale_log2)          # tP = P (tS - tlse)
            needs_mask = tested(mask, band, batch, head, m_block, this, m0, m0 + TILE_M, n0, n0 + TILE_N)
            if needs_mask:
                P, tP = masked(P, tP, mask, band, batch, head, m0, n0)
            dP, tdP = dp_of(sdO, stdO, sV, stV)                 # dP = dO V^T, tdP = dO tV^T + tdO V^T
            if needs_mask:
                dP, tdP, F, tF = clear_tangents(P, dP, tdP, F, tF)
            Z = drop(full(S_TILE, kept_scale), drops, batch, head, m0, n0)
            dS, tdS = tangents_of_ds(P, tP, dP * Z - D, tdP * Z - tD)
            dS, tdS = pull_back(dS, tdS, F, tF)
            tdQ = add_dq(tdQ, dS, tdS, sK, stK)                 # tdQ += tdS K + dS tK, scaled in the epilogue
            stage = opaque(STAGES - 1 - stage)                  # else addresses are kept in registers across the loop
            if STAGES == 1 and n_block < n_blocks:
                sync_threads()                                  # all have read it
                fetch(stage, mK, mV, mTK, mTV, keys, n_block * TILE_N)
        save(aligned(mTDQ[batch, head][query:end_query], ROWS_OF), tdQ * scale, m0)

    dtypes, given = {"tdq": out_dtypes[0]}, [f"t{name}" for name in tangents]
    signature = signature_of(kernel, SPEC_Q.arguments, dtype, ACC, dtypes, mask=mask, score=score, tscore=tscore,
                             given=given)  # fmt: skip
    return Source(kernel, signature, threads, tiles.blocks, shared.nbytes)


def rows(table, nonlinear, short):
    """The rows for this work from these tables; for a score that is not linear, those of `nonlinear` first."""
    return lambda work: rows_of(table, nonlinear if is_nonlinear(work.score) else {}, work, short)


def parameters(*names):
    """`tables.with_results`, and which arrays have a tangent."""
    found = with_results(*names)

    def with_tangents(work, tiles):
        tangents = tuple([x.name for x in GIVEN if f"t{x.name}" in work.dtypes])
        return found(work, tiles) | {"tangents": tangents, "tscore": work.tscore}

    return with_tangents


GIVEN = Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("do")
TANGENTS = tuple(replace(x, name=f"t{x.name}", optional=True) for x in GIVEN)
STATISTICS = LSE_LOG2, *(Statistic(name, padded=True) for name in ("padded tlse", "delta", "tdelta"))
NUMBERS = MASK, SCORE, TSCORE, DROPOUT, "group_size", "scale", "scale_log2", "kept_scale"
SPEC_KV = Spec(
    backward_tangent_kv,
    (*GIVEN, *TANGENTS, Matrix("tdk", "k"), Matrix("tdv", "k"), *STATISTICS, *NUMBERS),
    tiles=rows(TILES_KV, NONLINEAR_KV, SHORT_KV),
    parameters=parameters("tdk", "tdv"),
    keeps="k",
    blocks=lambda work, tiles, m_blocks, n_blocks: work.problem.heads_k * n_blocks,
    packs=True,
)
SPEC_Q = Spec(
    backward_tangent_q,
    (*GIVEN, *TANGENTS, Matrix("tdq"), *STATISTICS, *NUMBERS),
    tiles=rows(TILES_Q, NONLINEAR_Q, SHORT_Q),
    parameters=parameters("tdq"),
    packs=True,
)


def blocks_of_rows(work, tiles, m_blocks, n_blocks):
    """Blocks for the statistics that both kernels read: for whole tiles of queries, unless tiles end with a segment."""
    if work.segments:
        return delta.blocks_of_slots(work, tiles, m_blocks, n_blocks)
    tile_m = max(tiles.tile_m, *[spec.fitting(work).tile_m for spec in (SPEC_KV, SPEC_Q)])
    return work.problem.heads * (-(-work.problem.seqlen_q // tile_m) * tile_m // tiles.tile_m)


SPECS = (
    replace(delta.SPEC_BOUNDED, blocks=blocks_of_rows), replace(delta_tangent.SPEC, blocks=blocks_of_rows), SPEC_KV,
    SPEC_Q,
)  # fmt: skip

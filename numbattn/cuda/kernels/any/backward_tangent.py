"""The tangent of the backward pass on any GPU: what the gradients change by as Q, K, V and dO move, as two kernels.

tX is the tangent of X. What `backward` computes, differentiated line by line, Z being what P is multiplied by for
dropout:

    tP = P (tS - tlse)                       tS = scale (tQ K^T + Q tK^T)
    dS = P (Z dP - D)                        dP = dO V^T
    tdS = tP (Z dP - D) + P (Z tdP - tD)     tdP = dO tV^T + tdO V^T
    tdQ = scale (tdS K + dS tK)
    tdK = scale (tdS^T Q + dS^T tQ)
    tdV = (Z tP)^T dO + (Z P)^T tdO

Without tdO its two products are not compiled in. tlse and tD are row vectors, as lse and D are: see `delta_tangent`.

`backward_tangent_kv` keeps a tile of keys and loops over the queries that see it: tdK and tdV. `backward_tangent_q`
keeps a tile of queries and loops over the keys that it sees: tdQ. Both recompute P from lse. Everything else, tiles,
stages and the mask after the exponential, is as in `backward`; what is masked is 0 in tP and tdP, too.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.cuda import types

from ...build import Source
from ...tile import (
    INDEX,
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    block_index,
    copy_async,
    copy_layout,
    device,
    dot,
    full,
    get,
    index,
    lines_of,
    load,
    maximum,
    minimum,
    opaque,
    rows_between,
    save,
    shape,
    sync_threads,
    wait_copies,
    where,
)
from ...words.arguments import Matrix, Statistic
from ...words.spec import Spec
from ..scores import SCORE, scores_type, within_segment
from ..scores.score import to_log2_of
from ..shared.dropout import DROPOUT, DROPS, drop_step
from ..shared.layouts import DTYPES, array_type, buffers, left_operand, result_types, sum_type, sums, vector
from ..shared.recompute import mask_tangent_step, recompute_tangents
from ..shared.schedule import place
from ..shared.segments import count_step, keys_of, mask_within_step, queries_of, slot_step
from ..shared.visibility import MASK, band_of, mask_type, needs_test, steps_to_next, visible_keys, visible_queries
from ..tables import rows_of, with_results
from .backward_tangent_tiles import TILES_KV, TILES_Q


class Tangents(NamedTuple):
    """The tangents of Q, K, V and dO, as kernels take them."""

    q: Any
    k: Any
    v: Any
    do: Any  # a tuple of it, or of nothing where it is 0


class Rows(NamedTuple):
    """Row vectors, padded: lse in base 2, +inf where nothing is seen, and what is 0 there."""

    lse: Any
    tlse: Any
    delta: Any
    tdelta: Any


class Part(NamedTuple):
    """Some rows of a head, those of a sequence: after its end there may be NaN."""

    batch: Any
    head: Any
    first: Any
    length: Any


def backward_tangent_kv(
    *, dtype, out_dtypes, head_dim, head_dim_v, tile_m, tile_n, threads, unit, lanes, stages, blocks, mask, score,
    dropout, nbytes, tdo,
):  # fmt: skip
    """tdK and tdV; S, P, dP, dS and their tangents are transposed: a row is a key, a column a query."""
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    K_TILE = sums(unit, lanes, tile_n, head_dim, threads, run=vector(dtype))
    V_TILE = sums(unit, lanes, tile_n, head_dim_v, threads, run=vector(dtype))
    S_TILE = sums(unit, lanes, tile_n, tile_m, threads)
    shared, widths = SharedMemory(), (head_dim, head_dim_v)
    (SHARED_K, COPY_K), (SHARED_V, COPY_V) = buffers(shared, dtype, threads, tile_n, widths)
    SHARED_TK, SHARED_TV = (shared.tile(tile_n, width, dtype) for width in widths)
    (SHARED_Q, COPY_Q), (SHARED_DO, COPY_DO) = buffers(shared, dtype, threads, tile_m, widths, stages)
    SHARED_TQ = shared.tile(tile_m, head_dim, dtype, stages)
    SHARED_TDO = shared.tile(tile_m, head_dim_v, dtype, stages * tdo)
    SHARED_LSE, SHARED_TLSE, SHARED_DELTA, SHARED_TDELTA = (shared.tile(1, tile_m, ACC, stages) for _ in range(4))
    COLS, COPY_LINE = S_TILE.col_vector(), copy_layout(1, tile_m, threads, vector(np.dtype(ACC)))
    left_P, left_tP, left_dS, left_tdS = (left_operand(S_TILE, shared, dtype if unit == "mma" else ACC) for _ in range(4))
    TILE_M, TILE_N, STAGES, HAS_TDO, ZERO = tile_m, tile_n, stages, tdo, ACC(0)
    tested, steps, band_at = needs_test(mask), steps_to_next(mask), band_of(mask)
    masked, drop = mask_tangent_step(mask, S_TILE, transposed=True), drop_step(S_TILE, dropout, transposed=True)
    (apply, pull_back), to_log2 = tangent_steps(score, (), S_TILE, ACC, transposed=True), to_log2_of(score, ACC)
    tile_of, mask_of, scores_of = slot_step(mask, "k", tile_n), mask_within_step(mask), within_segment(score)
    ROWS_OF, rows_of = Alignment(nbytes), rows_step(nbytes)

    @device
    def fetch(stage, mQ, mDO, tangents, rows, queries, row, m0):
        """A tile of queries."""
        copy_async(allocate(SHARED_Q, stage), rows_of(mQ, queries), COPY_Q, m0)
        copy_async(allocate(SHARED_TQ, stage), rows_of(tangents.q, queries), COPY_Q, m0)
        copy_async(allocate(SHARED_DO, stage), rows_of(mDO, queries), COPY_DO, m0)
        if HAS_TDO:
            copy_async(allocate(SHARED_TDO, stage), rows_of(tangents.do[0], queries), COPY_DO, m0)
        batch, head, line = opaque(queries.batch), opaque(queries.head), (row + m0) // TILE_M
        copy_async(allocate(SHARED_LSE, stage), lines_of(rows.lse, batch, head, TILE_M), COPY_LINE, line)
        copy_async(allocate(SHARED_TLSE, stage), lines_of(rows.tlse, batch, head, TILE_M), COPY_LINE, line)
        copy_async(allocate(SHARED_DELTA, stage), lines_of(rows.delta, batch, head, TILE_M), COPY_LINE, line)
        copy_async(allocate(SHARED_TDELTA, stage), lines_of(rows.tdelta, batch, head, TILE_M), COPY_LINE, line)

    def kernel(mQ, mK, mV, mDO, tangents, mTDK, mTDV, rows, mask, scores, drops, group_size, scale, kept_scale):
        batches, heads, _ = shape(rows.lse)
        _, heads_k, seqlen_k, _ = shape(mTDK)
        tile, batch, head_k = place(block_index(), batches * heads_k, heads_k)
        segment, n_block = tile_of(mask.packing, batch, tile, seqlen_k)
        n0 = n_block * TILE_N
        if n0 >= segment.keys:                                  # a slot without a tile
            return
        mask, scores = mask_of(mask, segment), scores_of(scores, segment)
        query, row, (key, end_key) = segment.first_query, segment.first_padded_row, keys_of(segment)
        keys = Part(batch, head_k, key, end_key - key)
        sK, stK, sV, stV = allocate(SHARED_K), allocate(SHARED_TK), allocate(SHARED_V), allocate(SHARED_TV)
        copy_async(sK, rows_of(mK, keys), COPY_K, n0)
        copy_async(stK, rows_of(tangents.k, keys), COPY_K, n0)
        copy_async(sV, rows_of(mV, keys), COPY_V, n0)
        copy_async(stV, rows_of(tangents.v, keys), COPY_V, n0)
        tdK, tdV = full(K_TILE, ZERO), full(V_TILE, ZERO)
        for head in range(head_k * group_size, (head_k + 1) * group_size):
            band = band_at(mask, batch, head)
            first, end = visible_queries(band, n0, minimum(n0 + TILE_N, segment.keys))
            queries = Part(batch, head, query, maximum(band[2], 1))
            m_block, m_blocks = first // TILE_M, (end + TILE_M - 1) // TILE_M
            m_block += steps(mask, batch, head, n_block, m_block, m_blocks - m_block)
            stage = index(0)
            sync_threads()                                      # all have read the last tile of the previous head
            if m_block < m_blocks:
                fetch(stage, mQ, mDO, tangents, rows, queries, row, m_block * TILE_M)
            while m_block < m_blocks:
                m0, this = m_block * TILE_M, m_block
                m_block += 1
                m_block += steps(mask, batch, head, n_block, m_block, m_blocks - m_block)
                wait_copies()
                sync_threads()                                  # this tile has arrived, all have read the last one
                if STAGES == 2 and m_block < m_blocks:
                    fetch(1 - stage, mQ, mDO, tangents, rows, queries, row, m_block * TILE_M)
                sQ, stQ, sdO = allocate(SHARED_Q, stage), allocate(SHARED_TQ, stage), allocate(SHARED_DO, stage)
                S = dot(S_TILE, sK, sQ.T)                       # S = scale Q K^T
                tS = dot(dot(S_TILE, sK, stQ.T), stK, sQ.T)     # tS = scale (tQ K^T + Q tK^T)
                S, tS, (F, tF) = apply(S, tS, scores, (), batch, head, query + m0, key + n0)
                lse, tlse = get(allocate(SHARED_LSE, stage), COLS), get(allocate(SHARED_TLSE, stage), COLS)
                P, tP = recompute_tangents(S, tS, lse, tlse, to_log2(scale))    # P = exp(S - lse), tP = P (tS - tlse)
                if tested(mask, band, batch, head, n_block, this, m0, m0 + TILE_M, n0, n0 + TILE_N):
                    P, tP = masked(P, tP, mask, band, batch, head, m0, n0)
                Z = drop(full(S_TILE, kept_scale), drops, batch, head, m0, n0)
                tdV = dot(tdV, left_tP(tP * Z), sdO)            # tdV += (Z tP)^T dO + (Z P)^T tdO
                if HAS_TDO:
                    tdV = dot(tdV, left_P(P * Z), allocate(SHARED_TDO, stage))
                dP = dot(S_TILE, sV, sdO.T) * Z - get(allocate(SHARED_DELTA, stage), COLS)  # dP = Z dO V^T, less D
                dS = where(P == 0, 0, P * dP)
                tdS = where(P == 0, 0, tP * dP)
                dS0, _ = pull_back(dS, tdS, F, tF)
                tdK = dot(tdK, left_dS(dS0), stQ)
                tdP = dot(S_TILE, stV, sdO.T)                   # tdP = dO tV^T + tdO V^T
                if HAS_TDO:
                    tdP = dot(tdP, sV, allocate(SHARED_TDO, stage).T)
                tdP = tdP * Z - get(allocate(SHARED_TDELTA, stage), COLS)
                tdS = where(P == 0, 0, tdS + P * tdP)
                _, tdS = pull_back(dS, tdS, F, tF)
                tdK = dot(tdK, left_tdS(tdS), sQ)               # tdK += tdS^T Q + dS^T tQ, scaled in the epilogue
                stage = opaque(STAGES - 1 - stage)              # else addresses are kept in registers across the loop
                if STAGES == 1 and m_block < m_blocks:
                    sync_threads()                              # all have read it
                    fetch(stage, mQ, mDO, tangents, rows, queries, row, m_block * TILE_M)
        save(aligned(mTDK[batch, head_k][key:end_key], ROWS_OF), tdK * scale, n0)
        save(aligned(mTDV[batch, head_k][key:end_key], ROWS_OF), tdV, n0)

    return source(kernel, dtype, out_dtypes, mask, score, tdo, threads, blocks, shared)


def backward_tangent_q(
    *, dtype, out_dtypes, head_dim, head_dim_v, tile_m, tile_n, threads, unit, lanes, stages, blocks, mask, score,
    dropout, nbytes, tdo,
):  # fmt: skip
    """tdQ; a row of S, P, dP, dS and their tangents is a query."""
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    Q_TILE = sums(unit, lanes, tile_m, head_dim, threads, run=vector(dtype))
    S_TILE = sums(unit, lanes, tile_m, tile_n, threads)
    shared, widths = SharedMemory(), (head_dim, head_dim_v)
    (SHARED_Q, COPY_Q), (SHARED_DO, COPY_DO) = buffers(shared, dtype, threads, tile_m, widths)
    SHARED_TQ, SHARED_TDO = shared.tile(tile_m, head_dim, dtype), shared.tile(tile_m, head_dim_v, dtype, int(tdo))
    (SHARED_K, COPY_K), (SHARED_V, COPY_V) = buffers(shared, dtype, threads, tile_n, widths, stages)
    SHARED_TK, SHARED_TV = (shared.tile(tile_n, width, dtype, stages) for width in widths)
    ROWS = S_TILE.row_vector()
    left_dS, left_tdS = (left_operand(S_TILE, shared, dtype if unit == "mma" else ACC) for _ in range(2))
    TILE_M, TILE_N, STAGES, HAS_TDO, ZERO = tile_m, tile_n, stages, tdo, ACC(0)
    tested, steps, band_at = needs_test(mask), steps_to_next(mask), band_of(mask)
    masked, drop = mask_tangent_step(mask, S_TILE), drop_step(S_TILE, dropout)
    (apply, pull_back), to_log2 = tangent_steps(score, (), S_TILE, ACC), to_log2_of(score, ACC)
    tiles_of, tile_of = count_step(mask, tile_m), slot_step(mask, "q", tile_m)
    mask_of, scores_of = mask_within_step(mask), within_segment(score)
    ROWS_OF, rows_of = Alignment(nbytes), rows_step(nbytes)

    @device
    def fetch(stage, mK, mV, tangents, keys, n0):
        """A tile of keys."""
        copy_async(allocate(SHARED_K, stage), rows_of(mK, keys), COPY_K, n0)
        copy_async(allocate(SHARED_TK, stage), rows_of(tangents.k, keys), COPY_K, n0)
        copy_async(allocate(SHARED_V, stage), rows_of(mV, keys), COPY_V, n0)
        copy_async(allocate(SHARED_TV, stage), rows_of(tangents.v, keys), COPY_V, n0)

    def kernel(mQ, mK, mV, mDO, tangents, mTDQ, rows, mask, scores, drops, group_size, scale, kept_scale):
        batches, heads, seqlen_q, _ = shape(mTDQ)
        tile, batch, head = place(block_index(), batches * heads, heads)
        number = tiles_of(mask.packing, seqlen_q) - 1 - tile   # the heaviest tiles of a causal mask first
        segment, m_block = tile_of(mask.packing, batch, number, seqlen_q)
        m0 = m_block * TILE_M
        if m0 >= segment.queries:                               # a slot without a tile
            return
        mask, scores = mask_of(mask, segment), scores_of(scores, segment)
        band = band_at(mask, batch, head)
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, segment.queries))
        key, row, (query, end_query) = segment.first_key, segment.first_padded_row, queries_of(segment)
        queries = Part(batch, head, query, maximum(band[2], 1))
        keys = Part(batch, head // group_size, key, maximum(band[3], 1))
        n_block, n_blocks = first // TILE_N, (end + TILE_N - 1) // TILE_N
        n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
        sQ, stQ, sdO = allocate(SHARED_Q), allocate(SHARED_TQ), allocate(SHARED_DO)
        copy_async(sQ, rows_of(mQ, queries), COPY_Q, m0)
        copy_async(stQ, rows_of(tangents.q, queries), COPY_Q, m0)
        copy_async(sdO, rows_of(mDO, queries), COPY_DO, m0)
        if HAS_TDO:
            copy_async(allocate(SHARED_TDO), rows_of(tangents.do[0], queries), COPY_DO, m0)
        stage = index(0)
        if n_block < n_blocks:
            fetch(stage, mK, mV, tangents, keys, n_block * TILE_N)
        end_row = row + queries.length
        lse = load(rows.lse[batch, head][row:end_row], ROWS, m0)
        tlse = load(rows.tlse[batch, head][row:end_row], ROWS, m0)
        D = load(rows.delta[batch, head][row:end_row], ROWS, m0)
        tD = load(rows.tdelta[batch, head][row:end_row], ROWS, m0)
        tdQ = full(Q_TILE, ZERO)
        while n_block < n_blocks:
            n0, this = n_block * TILE_N, n_block
            n_block += 1
            n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
            wait_copies()
            sync_threads()                                      # this tile has arrived, all have read the last one
            if STAGES == 2 and n_block < n_blocks:
                fetch(1 - stage, mK, mV, tangents, keys, n_block * TILE_N)
            sK, stK = allocate(SHARED_K, stage), allocate(SHARED_TK, stage)
            sV, stV = allocate(SHARED_V, stage), allocate(SHARED_TV, stage)
            S = dot(S_TILE, sQ, sK.T)                           # S = scale Q K^T
            tS = dot(dot(S_TILE, stQ, sK.T), sQ, stK.T)         # tS = scale (tQ K^T + Q tK^T)
            S, tS, (F, tF) = apply(S, tS, scores, (), batch, head, query + m0, key + n0)
            P, tP = recompute_tangents(S, tS, lse, tlse, to_log2(scale))    # P = exp(S - lse), tP = P (tS - tlse)
            if tested(mask, band, batch, head, m_block, this, m0, m0 + TILE_M, n0, n0 + TILE_N):
                P, tP = masked(P, tP, mask, band, batch, head, m0, n0)
            Z = drop(full(S_TILE, kept_scale), drops, batch, head, m0, n0)
            dP = dot(S_TILE, sdO, sV.T) * Z - D                 # dP = dO V^T
            dS = where(P == 0, 0, P * dP)
            tdS = where(P == 0, 0, tP * dP)
            dS0, _ = pull_back(dS, tdS, F, tF)
            tdQ = dot(tdQ, left_dS(dS0), stK)
            tdP = dot(S_TILE, sdO, stV.T)                       # tdP = dO tV^T + tdO V^T
            if HAS_TDO:
                tdP = dot(tdP, allocate(SHARED_TDO), sV.T)
            tdP = tdP * Z - tD
            tdS = where(P == 0, 0, tdS + P * tdP)
            _, tdS = pull_back(dS, tdS, F, tF)
            tdQ = dot(tdQ, left_tdS(tdS), sK)                   # tdQ += tdS K + dS tK, scaled in the epilogue
            stage = opaque(STAGES - 1 - stage)                  # else addresses are kept in registers across the loop
            if STAGES == 1 and n_block < n_blocks:
                sync_threads()                                  # all have read it
                fetch(stage, mK, mV, tangents, keys, n_block * TILE_N)
        save(aligned(mTDQ[batch, head][query:end_query], ROWS_OF), tdQ * scale, m0)

    return source(kernel, dtype, out_dtypes, mask, score, tdo, threads, blocks, shared)


def tangent_steps(score, tangents, layout, ACC, transposed=False):
    """Until there is a hook: no scores."""

    @device
    def apply(S, tS, scores, tscores, batch, head, m0, n0):
        return S, tS, (S, tS)

    @device
    def pull_back(dS, tdS, F, tF):
        return dS, tdS

    return apply, pull_back


def rows_step(nbytes):
    """The device function (matrix, part): its rows of an array (batch, heads, rows, features)."""
    ROWS_OF = Alignment(nbytes)

    @device
    def rows_of(matrix, part):
        batch, head = opaque(part.batch), opaque(part.head)     # else addresses are kept in registers across the loop
        return rows_between(matrix, batch, head, part.first, part.first + part.length, ROWS_OF)

    return rows_of


def source(kernel, dtype, out_dtypes, mask, score, tdo, threads, blocks, shared):
    ACC = sum_type(dtype)
    matrix, statistic, number = array_type(dtype, 4), array_type(ACC, 3), getattr(types, ACC.__name__)
    tangents = types.NamedTuple([matrix, matrix, matrix, types.Tuple([matrix] * tdo)], Tangents)
    rows = types.NamedTuple([statistic] * len(Rows._fields), Rows)
    signature = types.void(
        *[matrix] * 4, tangents, *result_types(out_dtypes), rows, mask_type(mask), scores_type(score, dtype), DROPS,
        INDEX, number, number
    )
    return Source(kernel, signature, threads, blocks, shared.nbytes)


def parameters(*names):
    """With the dtypes of these results, and whether dO has a tangent."""
    found = with_results(*names)
    return lambda work, tiles: found(work, tiles) | {"tdo": "tdo" in work.dtypes}


def takes(work):
    return not work.score


GIVEN = Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("do")
TANGENTS = Matrix("tq"), Matrix("tk", "k"), Matrix("tv", "k"), Matrix("tdo", optional=True)
ROWS = tuple(Statistic(name, padded=True) for name in ("lse_log2", "padded tlse", "delta", "tdelta"))
NUMBERS = MASK, SCORE, DROPOUT, "group_size", "scale", "kept_scale"
SPEC_KV = Spec(
    backward_tangent_kv,
    (*GIVEN, *TANGENTS, Matrix("tdk", "k"), Matrix("tdv", "k"), *ROWS, *NUMBERS),
    tiles=lambda work: rows_of(TILES_KV, {}, work),
    parameters=parameters("tdk", "tdv"),
    keeps="k",
    blocks=lambda work, tiles, m_blocks, n_blocks: work.problem.heads_k * n_blocks,
    packs=True,
)
SPEC_Q = Spec(
    backward_tangent_q,
    (*GIVEN, *TANGENTS, Matrix("tdq"), *ROWS, *NUMBERS),
    tiles=lambda work: rows_of(TILES_Q, {}, work),
    parameters=parameters("tdq"),
    packs=True,
)

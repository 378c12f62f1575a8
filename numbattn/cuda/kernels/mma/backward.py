"""Attention backward by mma.sync, of float16 and bfloat16: Algorithm 4 in one kernel.

A block keeps a tile of keys and loops over the queries that see it, for each head of a group in turn. dK and dV stay
in registers. dQ is added up in global memory by all blocks, in float32 and in no fixed order, and `round_dq` rounds it;
if results have to be the same bit for bit, `any.backward.backward_q` computes it instead. With two pipeline stages the
next tile of queries is in flight while this one is computed.

S, P, dP and dS are transposed: a row is a key, a column a query. If a warp has whole rows of them, the registers of P
and dS are the left operands for dV and dK as they are; dS goes through shared memory only for dQ, which is computed a
tile late, so that a tile takes one barrier. If warps share rows, P and dS go through shared memory, and a tile takes
two.

As in `backward` MASK follows the exponential. lse is in base 2, and +inf where nothing is seen, so that P is 0 there.
Rows beyond a sequence's length, which may be NaN, are loaded as zeros.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...build import Source
from ...tile import (
    Alignment,
    SharedMemory,
    add_lines,
    add_registers,
    allocate,
    copy_async,
    copy_layout,
    device,
    dot,
    full,
    get,
    index,
    launch_dependents,
    lines_of,
    maximum,
    mma,
    opaque,
    put,
    rows_between,
    sync_threads,
    wait_copies,
    wait_on_dependencies,
)
from ...tile.alignment import VECTOR_BYTES
from ...words.arguments import AlignedMatrix, Matrix, Statistic
from ...words.signatures import signature_of
from ...words.spec import Route, Spec
from ...words.tiers import MMA
from ..any import backward, delta
from ..any.round_dq import DQ_SUMS, DqPart, round_spec
from ..scores import SCORE, score_steps, within_segment
from ..shared.dropout import DROPOUT, dropout_steps
from ..shared.layouts import DTYPES, save_sums_step, vector, warps_across
from ..shared.query_tiles import QueryTile, key_lengths, keys_step, padded_number, queries_steps
from ..shared.recompute import mask_step, recompute
from ..shared.schedule import at_once
from ..shared.segments import keys_of
from ..shared.visibility import MASK, band_of
from ..tables import compiled_in, dtypes_of, has_tensor_cores, head_dims, is_under_pressure, size_of_rows

ZERO = np.float32(0)


def mma_backward(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, score, dropout, nbytes, adds_dq, in_lines
):  # fmt: skip
    """dK and dV, and with adds_dq sums for dQ: in lines, or else in register order, see tile.accumulation."""
    dtype, (tile_m, tile_n, threads, stages, swizzled) = DTYPES[dtype], tiles
    S_TILE, K_TILE, V_TILE, Q_TILE = (
        mma(rows, cols, threads, warps_across(rows, cols, threads))
        for rows, cols in ((tile_n, tile_m), (tile_n, head_dim), (tile_n, head_dim_v), (tile_m, head_dim))
    )
    COLS, COPY_LINE = S_TILE.col_vector(), copy_layout(1, tile_m, threads, vector(np.dtype(np.float32)))
    COPY_K, COPY_V, COPY_Q, COPY_DO = (
        copy_layout(*sizes, threads, vector(dtype))
        for sizes in ((tile_n, head_dim), (tile_n, head_dim_v), (tile_m, head_dim), (tile_m, head_dim_v))
    )
    shared = SharedMemory()
    place = shared.boxes if swizzled else shared.tile           # tiles of queries are always boxes: see tile.boxes
    SHARED_K, SHARED_V = (place(tile_n, cols, dtype) for cols in (head_dim, head_dim_v))
    SHARED_Q, SHARED_DO = (shared.boxes(tile_m, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    SHARED_LSE, SHARED_DELTA = (shared.tile(1, tile_m, np.float32, stages) for _ in range(2))
    share, add_dq, DQ_LATE = dq_steps(place, dtype, S_TILE, Q_TILE, SHARED_K, stages, adds_dq, in_lines)
    TILE_M, STAGES, VECTORS, HAS_DROPOUT = tile_m, stages, Alignment(VECTOR_BYTES), dropout
    masked, band_at, longest = mask_step(mask, S_TILE, transposed=True), band_of(mask), key_lengths(mask)
    first_queries, next_queries, needs_mask = queries_steps(mask, tile_m, tile_n)
    sign_dropped, dS_of = dropout_steps(S_TILE, dropout, transposed=True)
    (apply, pull_back, _), scores_of = score_steps(score, S_TILE, np.float32, transposed=True), within_segment(score)
    keys_of_block = keys_step(mask, tile_n)
    sizes = zip(out_dtypes, (head_dim, head_dim_v))
    save_dk, save_dv = (save_sums_step(dtype, out, tile_n, cols, threads, nbytes) for out, cols in sizes)

    @device
    def copy_keys(mK, mV, tile, mask):
        first, _ = keys_of(tile.segment)
        end = first + maximum(longest(mask, tile), 1)
        batch, head = tile.batch, tile.head_k
        copy_async(allocate(SHARED_K), rows_between(mK, batch, head, first, end, VECTORS), COPY_K, tile.first)
        copy_async(allocate(SHARED_V), rows_between(mV, batch, head, first, end, VECTORS), COPY_V, tile.first)

    @device
    def copy_queries(stage, mQ, mDO, mLse, mDelta, tile, at, mask):
        """Start to copy a tile of queries, if one is left."""
        if at.m_block < at.m_blocks:
            batch, head = opaque(tile.batch), opaque(at.head)   # else addresses are kept in registers across the loop
            m0, first = at.m_block * TILE_M, tile.segment.first_query
            end, line = first + band_at(mask, batch, head)[2], padded_number(tile, at, TILE_M)
            copy_async(allocate(SHARED_Q, stage), rows_between(mQ, batch, head, first, end, VECTORS), COPY_Q, m0)
            copy_async(allocate(SHARED_DO, stage), rows_between(mDO, batch, head, first, end, VECTORS), COPY_DO, m0)
            copy_async(allocate(SHARED_LSE, stage), lines_of(mLse, batch, head, TILE_M), COPY_LINE, line)
            copy_async(allocate(SHARED_DELTA, stage), lines_of(mDelta, batch, head, TILE_M), COPY_LINE, line)

    def kernel(
        mQ, mK, mV, mDO, mDK, mDV, mSums, mLse, mDelta, mask, scores, drops, group_size, ds_scale, scale_log2,
        kept_scale, at_once, delta_scale,
    ):
        launch_dependents()
        wait_on_dependencies()
        tile, mask = keys_of_block(mLse, mDK, mask, group_size, at_once)
        if tile.first >= tile.end:                              # a slot without a tile
            return
        batch, n0, scores = tile.batch, tile.first, scores_of(scores, tile.segment)
        sK, sV, stage = allocate(SHARED_K), allocate(SHARED_V), index(0)
        dK, dV = full(K_TILE, ZERO), full(V_TILE, ZERO)
        last, at = QueryTile(index(0), index(0), index(0), ()), first_queries(mask, tile)
        copy_keys(mK, mV, tile, mask)
        copy_queries(stage, mQ, mDO, mLse, mDelta, tile, at, mask)
        while at.m_block < at.m_blocks:                         # Alg. 4 line 9
            after = next_queries(mask, tile, at)
            wait_copies()
            sync_threads()                                      # this tile has arrived, all have read the last one
            if STAGES == 2:
                copy_queries(1 - stage, mQ, mDO, mLse, mDelta, tile, after, mask)
            if DQ_LATE:
                add_dq(mSums, tile, last, 1 - stage)
            sQ, sdO, m0 = allocate(SHARED_Q, stage), allocate(SHARED_DO, stage), at.m_block * TILE_M
            row, col = tile.segment.first_query + m0, tile.segment.first_key + n0
            S = dot(S_TILE, sK, sQ.T)                           # line 11: S = Q K^T
            S, F = apply(S, scores, batch, at.head, row, col)
            P = recompute(S, get(allocate(SHARED_LSE, stage), COLS), scale_log2)    # line 13: P = exp(S - lse)
            if needs_mask(mask, tile, at, n0):
                band = band_at(mask, batch, at.head)
                P, F = masked(P, F, mask, band, batch, at.head, m0, n0)    # line 12: MASK
            P = sign_dropped(P, drops, batch, at.head, m0, n0)  # line 14
            dP = dot(S_TILE, sV, sdO.T)                         # line 17: dP = dO V^T
            dS = pull_back(dS_of(P, dP, get(allocate(SHARED_DELTA, stage), COLS), delta_scale), F)  # lines 18 and 20
            left_P, left_dS = share(maximum(P, 0) if HAS_DROPOUT else P, dS, stage)     # line 15: what is kept
            dV = dot(dV, left_P, sdO)                           # line 16: dV += (P Z)^T dO
            dK = dot(dK, left_dS, sQ)                           # line 22: dK += dS^T Q
            if STAGES == 1:
                sync_threads()                                  # all have read it
                copy_queries(stage, mQ, mDO, mLse, mDelta, tile, after, mask)
            if not DQ_LATE:
                add_dq(mSums, tile, at, stage)                  # line 21: dQ += dS K
            last, at, stage = at, after, (stage + 1) % STAGES
        wait_copies()
        sync_threads()
        if DQ_LATE:
            add_dq(mSums, tile, last, 1 - stage)
            sync_threads()                                      # all have read K
        first, end = keys_of(tile.segment)
        save_dk(mDK[batch, tile.head_k][first:end], dK * ds_scale, sK, n0)      # line 24
        save_dv(mDV[batch, tile.head_k][first:end], dV * kept_scale, sV, n0)

    dtypes = dict(zip(("dk", "dv"), out_dtypes))
    signature = signature_of(kernel, SPEC.arguments, dtype, np.float32, dtypes, mask=mask, score=score)
    return Source(kernel, signature, threads, shared=shared.nbytes, overlaps=True)


def dq_steps(place, dtype, S_TILE, Q_TILE, SHARED_K, stages, adds_dq, in_lines):
    """Device functions: (P, dS, stage) -> the left operands for dV and dK; (mSums, tile, at, stage) adds dQ of the tile
    of queries `at`. And whether the latter is called a tile late."""
    ADDS_DQ, add, TILE_M = adds_dq, add_lines if in_lines else add_registers, Q_TILE.rows.size
    HAS_WHOLE_ROWS = S_TILE.has_whole_rows
    SHARED_P = place(*S_TILE.shape, dtype, 0 if HAS_WHOLE_ROWS else 1)
    SHARED_DS = place(*S_TILE.shape, dtype, stages * adds_dq if HAS_WHOLE_ROWS else 1)
    DQ_LATE = HAS_WHOLE_ROWS and adds_dq

    @device
    def share_for_dq(P, dS, stage):
        if ADDS_DQ:
            put(allocate(SHARED_DS, stage), dS)
        return P, dS

    @device
    def share(P, dS, stage):
        sP, sdS = allocate(SHARED_P), allocate(SHARED_DS)
        put(sP, P)
        put(sdS, dS)
        sync_threads()
        return sP, sdS

    @device
    def add_dq(mSums, tile, at, stage):
        if ADDS_DQ and at.m_blocks > 0:
            dQ = dot(Q_TILE, allocate(SHARED_DS, stage if DQ_LATE else 0).T, allocate(SHARED_K))
            add(mSums[tile.batch, at.head], padded_number(tile, at, TILE_M), dQ)    # line 21: dQ += dS K

    return share_for_dq if HAS_WHOLE_ROWS else share, add_dq, DQ_LATE


class BackwardTiles(NamedTuple):
    """A row: tiles of tile_m queries and tile_n keys."""

    tile_m: int
    tile_n: int
    threads: int
    stages: int  # of the tiles of queries
    swizzled: bool = False  # all tiles, not only those of queries, which takes less room and more registers

    unit = "mma"


# {larger head_dim: rows}, see kernels.tables. TFLOP/s: bfloat16 on an H200, full, seqlen 1024, 4096, 16384
TILES = {
    64: (BackwardTiles(32, 128, 128, 2),),  # 280, 320, 328; two blocks in 163 KB, one in 99 KB
    128: (
        BackwardTiles(64, 128, 256, 2),  # 271, 316, 325
        BackwardTiles(64, 128, 256, 2, True),  # 271, 307, in 163 KB; with one stage 261, 294
        BackwardTiles(64, 64, 128, 1),  # fits in 99 KB
    ),
    256: (
        BackwardTiles(64, 64, 256, 2, True),  # 224, 249, 258; dV before dS is as fast
        BackwardTiles(64, 64, 256, 1),  # 220, 244, in 163 KB
        BackwardTiles(32, 32, 128, 1),  # 181, 191, in 99 KB
    ),
}  # fmt: skip
UNDER_PRESSURE = {256: (BackwardTiles(32, 64, 256, 2),)}  # half as many registers for dQ


def takes(work):
    return has_tensor_cores(work.device) and work.problem.dtype.itemsize == 2


def rows(work):
    size = size_of_rows(work)
    return (UNDER_PRESSURE.get(size, ()) if is_under_pressure(work) else ()) + TILES[size]


def sizes(work, tiles):
    """Both head_dims rounded up, that of q so that each warp has columns of dQ."""
    head_dim, head_dim_v = head_dims(work.problem)
    return max(head_dim, 8 * tiles.threads // tiles.tile_m), head_dim_v


def adds_in_lines(work):
    """Before 9.0 an atomic adds one number, so that the same register of all threads should be contiguous."""
    return work.device.cc < (9, 0)


def parameters(adds_dq):
    def found(work, tiles):
        about = {"nbytes": work.nbytes, "adds_dq": adds_dq, "in_lines": adds_in_lines(work)}
        return compiled_in(work, tiles, sizes(work, tiles)) | dtypes_of(work, "dk", "dv") | about

    return found


def part_of_dq(work):
    """The layout of the sums that `round_dq` rounds."""
    tiles = SPEC.fitting(work)
    head_dim, _ = sizes(work, tiles)
    across = warps_across(tiles.tile_m, head_dim, tiles.threads)
    return DqPart(tiles.tile_m, head_dim, tiles.threads, across, adds_in_lines(work))


GIVEN = AlignedMatrix("q"), AlignedMatrix("k", "k"), AlignedMatrix("v", "k"), AlignedMatrix("do")
RESULTS = Matrix("dk", "k"), Matrix("dv", "k")
STATISTICS = Statistic("lse_log2", padded=True), Statistic("delta", padded=True)
NUMBERS = MASK, SCORE, DROPOUT, "group_size", "ds_scale", "scale_log2", "kept_scale", "at_once", "delta_scale"
SPEC = Spec(
    mma_backward,
    (*GIVEN, *RESULTS, DQ_SUMS, *STATISTICS, *NUMBERS),
    tiles=rows,
    parameters=parameters(adds_dq=True),
    numbers=at_once,
    keeps="k",
    packs=True,
    blocks=lambda work, tiles, m_blocks, n_blocks: work.problem.heads_k * n_blocks,
)
NO_SUMS = STATISTICS[1]  # a placeholder for sums, which are not touched then
ALONE = (*GIVEN, *RESULTS, NO_SUMS, *STATISTICS, *NUMBERS)
SPEC_KV = replace(SPEC, arguments=ALONE, parameters=parameters(adds_dq=False))
SPEC_ROUND = round_spec(part_of_dq)
ROUTES = (
    Route(lambda work: takes(work) and not work.deterministic, (delta.SPEC_BOUNDED, SPEC, SPEC_ROUND), MMA),
    Route(takes, (delta.SPEC_BOUNDED, SPEC_KV, backward.SPEC_Q), MMA),
)

"""The tangent of attention backward on Hopper (wgmma, TMA): tdK, tdV, and sums for tdQ. Its lines are those of
`any.backward_tangent`.

As in `hopper_backward_kv` a block keeps a tile of keys, 64 a consumer, and loops over the queries that see it; S, P,
dP, dS and their tangents are transposed. All products of a pair of tiles are computed once, 10, or 12 with tdO: two
kernels, one for tdQ, would take 15 or 18. tdQ is added up in global memory, a step late: see `tdq_sums`.

At head_dim 64 a step takes 64 queries. At 128 the accumulators leave registers for 32, and products with so few columns
read shared memory half as long again as they multiply. So Q and tQ, one above the other, are multiplied by K at once.
"""

from typing import Any, NamedTuple

import numpy as np

from ...tile import (
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    alongside,
    bulk_load,
    clear,
    column_halves,
    device,
    dot,
    fence_async_proxy,
    full,
    get,
    index,
    operand,
    prefetch_tensor_map,
    release,
    stage,
    sync_warpgroups,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)
from ...words.arguments import Matrix, Statistic, TmaMatrix
from ...words.numbers import SIDES
from ...words.spec import Spec
from ..any import delta, delta_tangent
from ..any.round_dq import DQ_SUMS
from ..shared.layouts import DTYPES
from ..shared.query_tiles import QueryTile, key_lengths, keys_step, queries_steps
from ..shared.recompute import mask_step, recompute, tangent_of_p, tangents_of_ds
from ..shared.schedule import at_once
from ..shared.segments import keys_of
from ..shared.visibility import MASK, PACKED, band_of, has_key_lengths, has_query_lengths
from ..shared.warps import warp_specialised
from ..tables import dtypes_of
from .backward_kv import wait_for
from .backward_steps import CONSUMERS, GIVEN, REGISTERS, ROWS, ZERO, WgmmaTiles, save_step, size_of, source
from .forward_skeleton import each, load
from .forward_steps import clear_step, clear_tile
from .forward_tiles import head_dims, is_for_hopper
from .tangent import parts
from .tdq_sums import round_spec_of, tdq_steps


class Matrices(NamedTuple):
    """Each beside its tangent, with which TMA loads it."""

    Q: tuple
    K: tuple
    V: tuple
    dO: tuple  # tdO may be missing


class Statistics(NamedTuple):
    """Row vectors of the queries, padded."""

    lse: Any  # in base 2
    tlse: Any
    D: Any
    tD: Any


class Accumulators(NamedTuple):
    """What a consumer carries from tile to tile."""

    tdK: Any
    tdV: Any
    S: Any  # of the next tile of queries, see `scores_steps`, and tS
    tS: Any


class Stages(NamedTuple):
    """Where a consumer is in the pipelines."""

    Q: Any
    dO: Any
    dS: Any


class Walk(NamedTuple):
    """Where a consumer is among the tiles of queries."""

    previous: Any
    current: Any
    next: Any


class TangentArguments(NamedTuple):
    """What consumers need of the kernel's arguments."""

    mask: Any
    mSums: Any
    scale_log2: Any


def halves(tile):
    """The places of X and tX, one above the other."""
    return tile.some_rows(0, tile.rows // 2), tile.some_rows(tile.rows // 2, tile.rows // 2)


def scores_steps(layout, OF_K, SHARED_Q):
    """S = Q K^T and tS = tQ K^T + Q tK^T of a stage of Q: how many groups of products they take; and device functions:
    (consumer, Q) -> what is in flight; (that, once it is there) -> S and tS. OF_K: the places of K and tK."""
    (K, TK), (ONLY_Q, TQ), BOTH = OF_K, halves(SHARED_Q), wgmma(SHARED_Q.rows)

    @device
    def start(consumer, Q):
        S = dot(layout, allocate(K, consumer), allocate(ONLY_Q, Q.index).T)
        tS = dot(layout, allocate(K, consumer), allocate(TQ, Q.index).T)
        return S, dot(tS, allocate(TK, consumer), allocate(ONLY_Q, Q.index).T)

    @device
    def found(S, tS):
        return S, tS

    @device
    def start_together(consumer, Q):
        S = dot(BOTH, allocate(K, consumer), allocate(SHARED_Q, Q.index).T)     # beside tQ K^T
        return S, dot(layout, allocate(TK, consumer), allocate(ONLY_Q, Q.index).T)

    @device
    def found_together(S, tS):
        S, more = column_halves(S)
        return S, tS + more

    return (2, start_together, found_together) if ONLY_Q.rows < ROWS else (3, start, found)


def hopper_backward_tangent(*, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, nbytes, has_tdo):
    """The kernel, where q, k and v have tangents.

    tiles: WgmmaTiles, stages being those of Q and of dO; has_tdo: whether dO has a tangent, too.
    """
    dtype, (tile_m, tile_n, (q_stages, do_stages), _) = DTYPES[dtype], tiles
    S_TILE, K_TILE, V_TILE = wgmma(tile_m), wgmma(head_dim), wgmma(head_dim_v)
    COLS, TILE_M, HAS_TDO = S_TILE.col_vector(), tile_m, has_tdo
    shared = SharedMemory()
    ONLY_K, TK = OF_K = tuple(shared.boxes(ROWS, head_dim, dtype, CONSUMERS) for _ in range(2))
    SHARED_V = shared.boxes(ROWS, 2 * head_dim_v, dtype, CONSUMERS)
    SHARED_Q = shared.boxes(2 * tile_m, head_dim, dtype, q_stages)
    SHARED_DO = shared.boxes(tile_m, head_dim_v * (1 + has_tdo), dtype, do_stages)
    TV, ONLY_V = OF_V = parts(SHARED_V, head_dim_v, 2)          # [tV V]
    ONLY_Q, TQ = OF_Q = halves(SHARED_Q)                        # Q above tQ
    ONLY_DO, *_ = OF_DO = parts(SHARED_DO, head_dim_v, 1 + has_tdo)     # [dO tdO]
    TDO, LEFT_OF_TDP = OF_DO[-1], SHARED_V if has_tdo else TV
    SHARED_DS, OF_DQ, (publish_ds, start_dq, store_dq, drain_dq, finish_dq) = tdq_steps(
        shared, OF_K, tile_m, dtype, started_later=2
    )  # fmt: skip
    LSE, TLSE, SHARED_D, SHARED_TD = (shared.tile(1, tile_m, np.float32, q_stages) for _ in Statistics._fields)
    K_PIPELINE, V_PIPELINE = (Pipeline.within(shared, tile, readers=1, fills=2) for tile in (ONLY_K, SHARED_V))
    Q_PIPELINE = Pipeline.within(shared, SHARED_Q, CONSUMERS, fills=2 + len(Statistics._fields))
    DO_PIPELINE = Pipeline.within(shared, SHARED_DO, CONSUMERS, fills=len(OF_DO))
    DS_PIPELINE = Pipeline.within(shared, SHARED_DS.of_stages(2), CONSUMERS, fills=CONSUMERS)
    load_q, load_k, load_v, load_do = (each(load, places) for places in (OF_Q, OF_K, OF_V[::-1], OF_DO))
    GROUPS_OF_S, start_scores, found_scores = scores_steps(S_TILE, OF_K, SHARED_Q)
    band_at, longest, masked = band_of(mask), key_lengths(mask), mask_step(mask, S_TILE, transposed=True)
    first_queries, next_queries, needs_mask = queries_steps(mask, tile_m, ROWS)
    save_dk, save_dv = (save_step(dtype, out, cols, nbytes) for out, cols in zip(out_dtypes, (head_dim, head_dim_v)))
    CLEARS_KEYS, DO_BESIDE_Q = has_key_lengths(mask), do_stages == q_stages
    OF_DP, OF_DV, AFTER_DV = 2, 2 * has_tdo, 2 + OF_DQ          # groups of products

    # ------------------------------------------------------------------------------------------------------ producer
    @device
    def load_line(Q, places, statistic, tile, at):
        row = tile.segment.first_padded_row + at.m_block * TILE_M
        bulk_load(Q, allocate(places, Q.index), statistic[tile.batch, at.head], row)

    @device
    def load_tiles(matrices, statistics, mask, tile):
        """One thread."""
        Q, dO, K, V = stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0), stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
        prefetch_tensor_map(matrices.Q[0])
        prefetch_tensor_map(matrices.dO[0])
        for consumer in range(CONSUMERS):
            keys = tile.batch, tile.head_k, tile.segment.first_key + tile.first + consumer * ROWS
            load_k(advance(K, consumer), matrices.K, keys)
            load_v(advance(V, consumer), matrices.V, keys)
        at = first_queries(mask, tile)
        while at.m_block < at.m_blocks:
            queries = tile.batch, at.head, tile.segment.first_query + at.m_block * TILE_M
            acquire(Q)
            load_q(Q, matrices.Q, queries)
            load_line(Q, LSE, statistics.lse, tile, at)
            load_line(Q, TLSE, statistics.tlse, tile, at)
            load_line(Q, SHARED_D, statistics.D, tile, at)
            load_line(Q, SHARED_TD, statistics.tD, tile, at)
            acquire(dO)
            load_do(dO, matrices.dO, queries)
            Q, dO, at = advance(Q, 1), advance(dO, 1), next_queries(mask, tile, at)

    # ----------------------------------------------------------------------------------------------------- consumers
    @device
    def clear_both(Q, length):
        clear(allocate(ONLY_Q, Q.index), length)
        clear(allocate(TQ, Q.index), length)

    clear_queries = clear_step(tile_m, CONSUMERS, has_query_lengths(mask), (clear_both, clear_tile))

    @device
    def start_s(Q, dO, tile, at, args):
        """S and tS of a tile of queries, in flight."""
        left = band_at(args.mask, tile.batch, at.head)[2] - at.m_block * TILE_M
        clear_queries((Q, dO), left)
        wait(Q)
        return start_scores(warpgroup_index(), Q)

    @device
    def start_dp(dO):
        """dP and tdP, in flight."""
        consumer = warpgroup_index()
        dP = dot(S_TILE, allocate(ONLY_V, consumer), allocate(ONLY_DO, dO.index).T)         # dP = dO V^T
        return dP, dot(S_TILE, allocate(LEFT_OF_TDP, consumer), dO.tile.T)

    @device
    def add_dv(tdV, P, tP, dO):
        """In flight."""
        tdV = dot(tdV, operand(tP, ONLY_DO), allocate(ONLY_DO, dO.index))
        if HAS_TDO:
            tdV = dot(tdV, operand(P, ONLY_DO), allocate(TDO, dO.index))
        return tdV                                              # tdV += tP^T dO + P^T tdO

    @device
    def of_queries(places, Q):
        return get(allocate(places, Q.index), COLS)

    def step_with(masks, is_last=False):
        AHEAD = 0 if is_last else GROUPS_OF_S

        @device
        def step(acc, stages, walk, tile, n0, args):
            """tdV and tdK of the current tile of queries, tdQ of the previous one, S and tS of the next one."""
            (tdK, tdV, S, tS), (Q, dO, sdS), at = acc, stages, walk.current
            wait(dO)
            dP, tdP = start_dp(dO)
            S, tS = wgmma_wait(S, OF_DP), wgmma_wait(tS, OF_DP)  # so that ptxas starts dP before the exponentials
            S, tS = found_scores(S, tS)
            P = recompute(S, of_queries(LSE, Q), args.scale_log2)               # P = exp(S - lse)
            tP = tangent_of_p(P, tS, of_queries(TLSE, Q), args.scale_log2)      # tP = P (tS - tlse)
            if masks:
                band = band_at(args.mask, tile.batch, at.head)
                P, tP = masked(P, tP, args.mask, band, tile.batch, at.head, at.m_block * TILE_M, n0)
            if HAS_TDO:                                         # else after dS: faster, but P and tP take registers
                tdV = add_dv(tdV, P, tP, dO)
            dP, tdP = wgmma_wait(dP, OF_DV), wgmma_wait(tdP, OF_DV)
            dS, tdS = tangents_of_ds(P, tP, dP - of_queries(SHARED_D, Q), tdP - of_queries(SHARED_TD, Q))
            if not HAS_TDO:
                tdV = add_dv(tdV, P, tP, dO)
            publish_ds(dS, tdS, advance(sdS, 1))
            tdQ = start_dq(sdS)                                 # tdQ += tdS K + dS tK
            tdK = dot(tdK, operand(tdS, SHARED_Q), allocate(ONLY_Q, Q.index))
            tdK = dot(tdK, operand(dS, SHARED_Q), allocate(TQ, Q.index))        # tdK += tdS^T Q + dS^T tQ
            tdV = wgmma_wait(tdV, AFTER_DV)
            release(dO)
            store_dq(tdQ, sdS, walk.previous, tile, args.mSums)
            if not is_last:
                S, tS = start_s(advance(Q, 1), advance(dO, 1), tile, walk.next, args)
            tdK = wgmma_wait(tdK, AHEAD)
            release(Q)
            return Accumulators(tdK, tdV, wgmma_wait(S, 0), wgmma_wait(tS, 0))

        return step

    step, masked_step, last_step = step_with(masks=False), step_with(masks=True), step_with(masks=True, is_last=True)

    @device
    def has_next(walk):
        return walk.next.m_block < walk.next.m_blocks

    @device
    def go_on(stages, walk, tile, args):
        Q = advance(stages.Q, 1)                                # of two stages, as dS has
        dO = alongside(stages.dO, Q) if DO_BESIDE_Q else advance(stages.dO, 1)
        stages = Stages(Q, dO, alongside(stages.dS, Q))
        return stages, Walk(walk.current, walk.next, next_queries(args.mask, tile, walk.next))

    @device
    def all_queries(at, n0, tile, args):
        """tdK and tdV of all queries that see the keys, from the tile `at` on."""
        walk = Walk(QueryTile(index(0), index(-1), index(0), ()), at, next_queries(args.mask, tile, at))
        stages = Stages(stage(Q_PIPELINE, 0), stage(DO_PIPELINE, 0), stage(DS_PIPELINE, 0))
        publish_ds(full(S_TILE, ZERO), full(S_TILE, ZERO), stages.dS)       # before the first tile there is no dS
        S, tS = start_s(stages.Q, stages.dO, tile, at, args)
        acc = Accumulators(full(K_TILE, ZERO), full(V_TILE, ZERO), wgmma_wait(S, 0), wgmma_wait(tS, 0))
        while has_next(walk):
            while has_next(walk) and not needs_mask(args.mask, tile, walk.current, n0):
                acc = step(acc, stages, walk, tile, n0, args)
                stages, walk = go_on(stages, walk, tile, args)
            if has_next(walk):
                acc = masked_step(acc, stages, walk, tile, n0, args)
                stages, walk = go_on(stages, walk, tile, args)
        acc = last_step(acc, stages, walk, tile, n0, args)
        drain_dq(advance(stages.dS, 1), walk.current, tile, args.mSums)
        return acc.tdK, acc.tdV

    @device
    def clear_keys(consumer, left):
        clear(allocate(ONLY_K, consumer), left)
        clear(allocate(TK, consumer), left)
        clear(allocate(SHARED_V, consumer), left)
        fence_async_proxy()
        sync_warpgroups(CONSUMERS)

    @device
    def compute(mTDK, mTDV, tile, scale, args):
        """Whole warpgroups."""
        consumer, at = warpgroup_index(), first_queries(args.mask, tile)
        n0, tdK, tdV = tile.first + consumer * ROWS, full(K_TILE, ZERO), full(V_TILE, ZERO)
        wait_for(stage(K_PIPELINE, 0), CONSUMERS)
        wait(stage(V_PIPELINE, consumer))
        if CLEARS_KEYS:
            clear_keys(consumer, longest(args.mask, tile) - n0)
        if at.m_block < at.m_blocks:
            tdK, tdV = all_queries(at, n0, tile, args)
        sync_warpgroups(CONSUMERS)                              # all have read K
        first, end = keys_of(tile.segment)
        save_dk(mTDK[tile.batch, tile.head_k][first:end], tdK * scale, allocate(ONLY_K, consumer), n0)
        save_dv(mTDV[tile.batch, tile.head_k][first:end], tdV, allocate(ONLY_V, consumer), n0)
        finish_dq()

    own_pipelines = K_PIPELINE, V_PIPELINE, Q_PIPELINE, DO_PIPELINE, DS_PIPELINE
    begin, take_roles = warp_specialised(own_pipelines, CONSUMERS, REGISTERS[CONSUMERS], compute, load_tiles)
    keys_of_block = keys_step(mask, tile_n)

    def kernel(
        mQ, mK, mV, mDO, mTQ, mTK, mTV, mTDO, mTDK, mTDV, mSums, mLse, mTLse, mDelta, mTDelta, mask, group_size, scale,
        scale_log2, at_once,
    ):  # fmt: skip
        begin()
        tile, mask = keys_of_block(mLse, mTDK, mask, group_size, at_once)
        if tile.first < tile.end:                               # else a slot without a tile
            matrices = Matrices((mQ, mTQ), (mK, mTK), (mV, mTV), (mDO, *mTDO))
            given = matrices, Statistics(mLse, mTLse, mDelta, mTDelta), mask, tile
            take_roles((mTDK, mTDV, tile, scale, TangentArguments(mask, mSums, scale_log2)), (given,))

    maps, dtypes = (ONLY_Q, ONLY_K, ONLY_V, ONLY_DO, TQ, TK, TV, *OF_DO[1:]), dict(zip(("tdk", "tdv"), out_dtypes))
    return source(kernel, SPEC.arguments, shared, maps, dtype, dtypes, mask=mask, given=["tdo"] * has_tdo)


# ------------------------------------------------------------------------------------------------------------- tiles
# TFLOP/s of ten products on an H200, seqlen 1024, 4096, 16384, and of the backward pass's five beside them; at 64 with
# parts of tdQ that were not transposed
KEYS = {  # by head_dim
    64: WgmmaTiles(64, 128, (2, 2)),    # 433, 517, 538; 408, 524, 552; a half of tdQ by each consumer 403, 485, 508
    128: WgmmaTiles(32, 128, (2, 2)),   # 451, 524, 533; 451, 578, 606; Q apart from tQ 429, 480, 483
}
KEYS_WITH_TDO = KEYS | {128: WgmmaTiles(32, 128, (2, 1))}           # of twelve: 4096 538, 16384 569; apart 458, 478
SHORTEST = 128  # sequences: a block's start and end take as long as two steps


def keys_row(work):
    return (KEYS_WITH_TDO if "tdo" in work.dtypes else KEYS)[size_of(work)]


def parameters(work, tiles):
    head_dim, head_dim_v = head_dims(work.problem)
    return {
        "dtype": work.problem.dtype.name, **dtypes_of(work, "tdk", "tdv"), "head_dim": head_dim,
        "head_dim_v": head_dim_v, "tiles": tiles, "mask": work.mask, "nbytes": work.nbytes,
        "has_tdo": "tdo" in work.dtypes,
    }  # fmt: skip


def takes(work):
    """Whether there is a row of tiles, q, k and v have tangents, sequences are long enough, packed ones on average, a
    band is all that hides keys, and tdQ may be added up in no fixed order."""
    head_dim, head_dim_v = head_dims(work.problem)
    return (
        is_for_hopper(work)
        and head_dim == head_dim_v
        and head_dim in KEYS
        and work.dtypes.keys() >= {"tq", "tk", "tv"}
        and set(work.mask) <= {*SIDES, PACKED}
        and min(work.problem.seqlen_q, work.keys if work.segments else work.problem.seqlen_k) >= SHORTEST
        and not (work.deterministic or work.score or work.problem.dropout)
    )


TANGENTS = TmaMatrix("tq"), TmaMatrix("tk", "k"), TmaMatrix("tv", "k"), TmaMatrix("tdo", optional=True)
STATISTICS = tuple(Statistic(name, padded=True) for name in ("lse_log2", "padded tlse", "delta", "tdelta"))
SPEC = Spec(
    hopper_backward_tangent,
    (*GIVEN, *TANGENTS, Matrix("tdk", "k"), Matrix("tdv", "k"), DQ_SUMS, *STATISTICS, MASK, "group_size", "scale",
     "scale_log2", "at_once"),
    tiles=lambda work: (keys_row(work),),
    parameters=parameters,
    numbers=at_once,
    keeps="k",
    blocks=lambda work, tiles, m_blocks, n_blocks: work.problem.heads_k * n_blocks,
    arch="a",
    packs=True,
)  # fmt: skip
SPECS = delta.SPEC_BOUNDED, delta_tangent.SPEC, SPEC, round_spec_of(lambda work: keys_row(work).tile_m)

"""Tangent of attention's forward pass on Hopper (wgmma, TMA): O, lse and their derivatives in the direction tQ, tK, tV.

    S = scale Q K^T                     tS = scale (tQ K^T + Q tK^T)
    P = exp(S - lse)                    tlse = rowsum(P tS)
    O = (Z P) V                         tO = (Z P) tV + (Z P tS) V - tlse O

Z is what dropout multiplies P by. All is summed in one pass over the keys: like O and l, the sums of P~ tV + (P~ tS) V
and of P~ tS, where P~ lacks the factor 1 / l, are rescaled by alpha when m rises. P tS is rounded to q's dtype, as P
is: in float16 it overflows where |tS| is beyond 32000.

A warp-specialised kernel like `hopper_forward`, with the same producer. A stage of K holds [tK K], one of V [V tV] and
one of Q [Q tQ], so that tS is one product [Q tQ] [tK K]^T of twice the depth. A consumer starts S and tS, computes the
softmax while tS is in flight, and P tS while O and P tV are.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.cuda import types

from ...tile import (
    INDEX,
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    device,
    dot,
    fence_async_proxy,
    full,
    operand,
    part_sum,
    put,
    read,
    release,
    rescaled,
    row_sum,
    save,
    shape,
    stage,
    sync_warp,
    sync_warpgroup,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
    where,
)
from ...words.arguments import COUNTERS, Statistic, TmaMatrix
from ...words.spec import Spec
from ..scores import sink_steps
from ..shared.dropout import DROPOUT, DROPS
from ..shared.layouts import DTYPES, array_type, sum_type
from ..shared.softmax import LN_2, logsumexp, softmax_steps
from ..shared.visibility import MASK, mask_type
from ..shared.warps import source_of, warp_specialised
from ..tables import compiled_in
from .forward_producer import TILES_AHEAD, Moved, producer_steps
from .forward_steps import Pipelines, key_tile_steps, mask_steps, record_steps, share_steps
from .forward_tiles import ROWS, head_dims, numbers
from .tangent_steps import drop_steps
from .tangent_tiles import rows
from .walk import ConsumerTile, block_steps

REGISTERS = {2: (32, 240), 3: (32, 160)}  # {consumers: of a producer's thread, of a consumer's}


class TangentArguments(NamedTuple):
    """What consumers need of the kernel's arguments."""

    mLse: Any
    mtLse: Any
    mask: Any
    drops: Any
    scale: Any
    scale_log2: Any
    kept_scale: Any
    heads_per_tile: Any


class TangentAccumulators(NamedTuple):
    """What a consumer carries from tile to tile."""

    O: Any
    tO: Any
    m: Any
    l: Any
    tl: Any


def hopper_tangent(
    *, dtype, head_dim, head_dim_v, tile_n, consumers, stages, q_stages, mask, score, dropout,
):  # fmt: skip
    """The kernel for tiles of 64 queries a consumer, tile_n keys and head_dims rounded up to head_dim and head_dim_v.

    Its parameters and arguments are those of `hopper_forward`.
    """
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    S_TILE, O_TILE = wgmma(tile_n), wgmma(head_dim_v)
    VECTOR, PARTS, ZERO, LN2 = S_TILE.row_vector(), S_TILE.row_parts(), ACC(0), ACC(LN_2)
    shared = SharedMemory()
    SHARED_Q = shared.boxes(ROWS, 2 * head_dim, dtype, q_stages, room=2 * head_dim_v)       # [Q tQ], then [O tO]
    SHARED_K, SHARED_V = (shared.boxes(tile_n, 2 * cols, dtype, stages) for cols in (head_dim, head_dim_v))
    (ONLY_Q, ONLY_TQ), (ONLY_TK, ONLY_K) = halves(SHARED_Q, head_dim), halves(SHARED_K, head_dim)
    (ONLY_V, ONLY_TV), (SHARED_O, SHARED_TO) = halves(SHARED_V, head_dim_v), halves(SHARED_Q, head_dim_v)
    Q_PIPELINE = Pipeline.within(shared, SHARED_Q, readers=1, fills=2)
    K_PIPELINE, V_PIPELINE = (Pipeline.within(shared, tile, consumers, fills=2) for tile in (SHARED_K, SHARED_V))
    _, from_record, NO_WORK = record_steps(mask)
    O_COORDINATES, WORK = (shared.tile(1, size, np.int32, stages=count)
                           for size, count in ((3, q_stages), (len(NO_WORK), TILES_AHEAD)))  # fmt: skip
    O_PIPELINE, WORK_PIPELINE = Pipeline.within(shared, O_COORDINATES, 1), Pipeline.within(shared, WORK, consumers + 1)
    pipelines = Pipelines(Q_PIPELINE, K_PIPELINE, V_PIPELINE, O_PIPELINE, WORK_PIPELINE)
    moved = Moved((ONLY_Q, ONLY_TQ), (ONLY_K, ONLY_TK), (ONLY_V, ONLY_TV), (SHARED_O, SHARED_TO))
    schedule, load = producer_steps(pipelines, moved, shared.boxes(ROWS, tile_n, dtype, 0), mask, tile_n, consumers)
    CONSUMERS, TILE_N = consumers, tile_n
    (_, next_n_block), (share_of, _) = block_steps(mask, tile_n), share_steps(mask, consumers)
    needs_mask, masked = mask_steps(mask, S_TILE, tile_n, ACC)
    (NO_MAX, softmax_step), (with_sink, inverse) = softmax_steps(ACC), sink_steps(score, ACC)
    mark, left_operand, both_factors = drop_steps(S_TILE, dropout, ONLY_V)
    clear_beyond, skip, n_block_range = key_tile_steps(mask, tile_n, consumers)

    def step_with(masks):
        @device
        def step(acc, Q, K, V, tile, here, args):
            """Adds a tile of keys to all sums; also returns the tile after it."""
            O, tO, m, l, tl = acc
            wait(K)
            q, k = allocate(ONLY_Q, Q.index), allocate(ONLY_K, K.index)
            S = dot(S_TILE, q, k.T)                             # S = Q K^T, in flight
            tS = dot(S_TILE, Q.tile, K.tile.T)                  # tS = Q tK^T + tQ K^T, in flight
            after = next_n_block(tile, args.mask, here + 1)
            S = wgmma_wait(S, 1)
            if masks:
                S = masked(S, tile, args.mask, here)
            P, m, l, alpha = softmax_step(S, m, l, args.scale_log2)
            P = mark(P, args.drops, tile.batch, tile.head, tile.m0, here * TILE_N)
            O, tO = rescaled(O, alpha), rescaled(tO, alpha)
            if masks:
                clear_beyond(V, tile, args.mask, here)
            wait(V)
            v, left = allocate(ONLY_V, V.index), left_operand(P)
            O = dot(O, left, v)                                 # O = O + P V, in flight
            tO = dot(tO, left, allocate(ONLY_TV, V.index))      # tO = tO + P tV, in flight
            tS = wgmma_wait(tS, 2)
            release(K)
            if masks:
                tS = where(P != ZERO, tS, ZERO)                 # what is masked may be NaN
            P, kept = both_factors(P)
            tS = tS * args.scale
            tl = part_sum(P * tS, tl * alpha)
            tO = dot(tO, operand(kept * tS, ONLY_V), v)         # tO = tO + (P tS) V, in flight
            O, tO = wgmma_wait(O, 0), wgmma_wait(tO, 0)
            release(V)
            return TangentAccumulators(O, tO, m, l, tl), advance(K, 1), advance(V, 1), after

        return step

    step, masked_step = step_with(masks=False), step_with(masks=True)

    @device
    def receive(W, heads_per_tile):
        """The share of this consumer in the next work tile."""
        wait(W)
        work = from_record(read(W))
        head, m0 = share_of(work, warpgroup_index(), heads_per_tile)
        return ConsumerTile(work.batch, head, m0, work.m_block, work.n_block, work.n_blocks, work.segment)

    @device
    def main_loop(Q, K, V, tile, here, end, args):
        """All tiles of keys up to `end`. Also returns the next one not computed."""
        O, tO, nothing = full(O_TILE, ZERO), full(O_TILE, ZERO), full(PARTS, ZERO)
        acc = TangentAccumulators(O, tO, full(VECTOR, NO_MAX), nothing, nothing)
        while here < end:
            while here < end and not needs_mask(tile, args.mask, here):
                acc, K, V, here = step(acc, Q, K, V, tile, here, args)
            if here < end:
                acc, K, V, here = masked_step(acc, Q, K, V, tile, here, args)
        return acc, K, V, here

    @device
    def epilogue(acc, W, Q, tile, args):
        """O and tO, staged, lse and tlse."""
        O, tO, m, l, tl = acc
        m = m * (args.scale_log2 * LN2)
        m, total, alpha = with_sink(m, row_sum(l), (), tile.batch, tile.head)   # total is 0 if nothing is seen
        factor = inverse(total, alpha)
        tlse = row_sum(tl) * factor
        save(args.mLse[tile.batch, tile.head], logsumexp(m, total, LN2), tile.m0)
        save(args.mtLse[tile.batch, tile.head], tlse, tile.m0)
        factor = factor * args.kept_scale
        O = O * factor                                          # O = O / l
        tO = tO * factor - O * tlse                             # tO = tO / l - tlse O
        sync_warpgroup()                                        # all have read Q
        put(allocate(SHARED_O, Q.index), O)
        put(allocate(SHARED_TO, Q.index), tO)
        fence_async_proxy()
        sync_warpgroup()
        release(Q)                                              # to the scheduler, which stores both
        release(W)

    @device
    def compute(args):
        """The consumers, whole warpgroups."""
        W, K, V = stage(WORK_PIPELINE, 0), stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
        Q = stage(Q_PIPELINE, warpgroup_index())
        tile = receive(W, args.heads_per_tile)
        while tile.n_blocks > 0:
            first, end = n_block_range(tile, args.mask)
            K, V, here = skip(K, V, tile, args.mask, tile.n_block, first)
            acquire(Q)                                          # consumers take turns with these stages: see pipeline
            wait(Q)
            acc, K, V, here = main_loop(Q, K, V, tile, here, end, args)
            K, V, _ = skip(K, V, tile, args.mask, here, tile.n_blocks)
            epilogue(acc, W, Q, tile, args)
            W, Q = advance(W, 1), advance(Q, CONSUMERS)
            tile = receive(W, args.heads_per_tile)
            sync_warp()                                         # reconverge: the first thread did more

    begin, take_roles = warp_specialised(pipelines, consumers, REGISTERS[consumers], compute, load, schedule)

    def kernel(
        mQ, mtQ, mK, mtK, mV, mtV, mO, mtO, mLse, mtLse, mask, drops, counters, group_size, scale, scale_log2,
        kept_scale, at_once, heads_per_tile, ascending,
    ):  # fmt: skip
        batches, heads, seqlen_q = shape(mLse)
        begin()
        args = TangentArguments(mLse, mtLse, mask, drops, scale, scale_log2, kept_scale, heads_per_tile)
        of_loader = (mK, mtK), (mV, mtV), (), mask, group_size, heads_per_tile
        sizes = seqlen_q, heads, batches * heads
        of_scheduler = (mQ, mtQ), (mO, mtO), mask, counters, *sizes, at_once, heads_per_tile, ascending
        take_roles((args,), (of_loader, of_scheduler))

    number = getattr(types, ACC.__name__)
    signature = types.void(
        *[types.uint64] * 8, *[array_type(ACC, 3)] * 2, mask_type(mask), DROPS, types.uint32[:], INDEX,
        *[number] * 3, *[INDEX] * 3,
    )  # fmt: skip
    tiles = ONLY_Q, ONLY_TQ, ONLY_K, ONLY_TK, ONLY_V, ONLY_TV, SHARED_O, SHARED_TO
    return source_of(kernel, signature, consumers, shared, tiles)


def halves(tile, cols):
    """The places of both halves of the first 2 * cols columns of each stage."""
    return tile.part(0, cols), tile.part(cols, cols)


SPEC = Spec(
    hopper_tangent,
    (TmaMatrix("q"), TmaMatrix("tq"), TmaMatrix("k", "k"), TmaMatrix("tk", "k"), TmaMatrix("v", "k"),
     TmaMatrix("tv", "k"), TmaMatrix("o"), TmaMatrix("to"), Statistic("lse"), Statistic("tlse"), MASK, DROPOUT,
     COUNTERS, "group_size", "scale", "scale_log2", "kept_scale", "at_once", "heads_per_tile", "ascending"),
    tiles=rows,
    parameters=lambda work, tiles: compiled_in(work, tiles, head_dims(work.problem)),
    numbers=numbers,
    persistent=True,
    arch="a",
)  # fmt: skip

"""The tangent of attention forward on Hopper (wgmma, TMA): O, lse and their directional derivatives, see `any.tangent`.

A warp-specialised kernel with the skeleton of `hopper_forward`. A stage of its pipelines holds a tile and its tangent,
[Q tQ], [tK K] and [V tV], and O and tO are staged in the buffers of [Q tQ]. So tS is one product of twice the depth,
[Q tQ] [tK K]^T. A consumer has S and tS in flight, computes the softmax of S while it waits for tS, and P tS while
O + P V and tO + P tV are in flight; then tO + (P tS) V. Registers allow no more overlap: O, tO, S and tS take 192 of
232 at head_dim 128. Meanwhile the tensor cores also work for the other consumer.

P and P tS are left operands, rounded to q's dtype relative to the maximum so far: P is at most 2, but P tS may be as
large as tS, in float16 up to 65504.
"""

from ...tile import (
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
    release,
    rescaled,
    row_sum,
    save,
    shape,
    sync_warpgroup,
    wait,
    wgmma,
    wgmma_wait,
    where,
)
from ...words.arguments import COUNTERS, RaggedMatrix, Statistic, TmaMatrix
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..any.tangent import tangents_of
from ..scores import SCORE, TSCORE, may_be_far, sink_steps, sink_tangent_step
from ..shared.dropout import DROPOUT
from ..shared.layouts import DTYPES, sum_type
from ..shared.segments import queries_of
from ..shared.softmax import LN_2, logsumexp, softmax_steps
from ..shared.visibility import MASK, PACKED
from ..shared.warps import source_of, warp_specialised
from .forward_skeleton import MovedTiles, ProducerArguments, skeleton_of
from .forward_steps import mask_steps
from .forward_tiles import ROWS, numbers, parameters, tiles_of_states
from .tangent_steps import TangentAccumulators, TangentArguments, drop_steps, scored_step, within_step
from .tangent_tiles import rows
from .walk import known_steps, n_block_steps

REGISTERS = {2: (40, 232), 3: (32, 160)}  # {consumers: of a producer's thread, of a consumer's}


def hopper_tangent(*, dtype, head_dim, head_dim_v, tiles, tangents, mask, score, tscore, dropout):
    """The kernel for these Warpgroups and head_dims rounded up to head_dim and head_dim_v.

    tangents: which of "q", "k" and "v" have one, at least "q" or "k"; tscore: see Work. All else, and the arguments of
    the kernel, as in `hopper_forward`.
    """
    dtype, ACC, (tile_n, consumers, stages, q_stages, _) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    HAS_TQ, HAS_TK, HAS_TV = (name in tangents for name in "qkv")
    S_TILE, O_TILE = wgmma(tile_n), wgmma(head_dim_v)
    VECTOR, PARTS, ZERO, LN2 = S_TILE.row_vector(), S_TILE.row_parts(), ACC(0), ACC(LN_2)
    shared = SharedMemory()
    SHARED_Q = shared.boxes(ROWS, head_dim * (1 + HAS_TQ), dtype, q_stages, room=2 * head_dim_v)
    SHARED_K = shared.boxes(tile_n, head_dim * (1 + HAS_TK), dtype, stages)
    SHARED_V = shared.boxes(tile_n, head_dim_v * (1 + HAS_TV), dtype, stages)
    ONLY_Q, *ONLY_TQ = parts(SHARED_Q, head_dim, 1 + HAS_TQ)
    *ONLY_TK, ONLY_K = parts(SHARED_K, head_dim, 1 + HAS_TK)
    ONLY_V, *ONLY_TV = parts(SHARED_V, head_dim_v, 1 + HAS_TV)
    SHARED_O, SHARED_TO = parts(SHARED_Q, head_dim_v, 2)
    LEFT_OF_TS = SHARED_Q if HAS_TK else ONLY_TQ[0]
    RIGHT_OF_TS = SHARED_K if HAS_TQ else ONLY_TK[0]
    TANGENT_V = ONLY_TV[0] if HAS_TV else ONLY_V
    moved = MovedTiles((ONLY_Q, *ONLY_TQ), (ONLY_K, *ONLY_TK), (ONLY_V, *ONLY_TV), (SHARED_O, SHARED_TO))
    no_bias = shared.boxes(ROWS, tile_n, dtype, 0)
    skeleton = skeleton_of(shared, SHARED_Q, SHARED_K, SHARED_V, moved, no_bias, mask, tile_n, consumers)
    receive, is_whole, clear_beyond, skip = skeleton.steps
    TILE_N, IS_PACKED, next_n_block = tile_n, PACKED in mask, n_block_steps(mask, tile_n, consumers).next
    needs_mask, masked = mask_steps(mask, S_TILE, tile_n, consumers, ACC)
    (no_max, softmax_step), (with_sink, inverse) = softmax_steps(ACC, may_be_far(score)), sink_steps(score, ACC)
    apply_score, with_tsink = scored_step(score, tscore, S_TILE, tile_n, ACC), sink_tangent_step(tscore, ACC)
    HAS_SCORE = any(part.has_step for part in score)
    sign_dropped, left_operand, both_factors = drop_steps(S_TILE, dropout, ONLY_V)
    known_of = known_steps(mask, tile_n, consumers, by_consumer=True).of
    within = within_step(mask, score, tscore)

    def step_with(masks):
        @device
        def step(acc, Q, K, V, tile, here, args):
            """Add a tile of keys to all sums. Also returns the next tile."""
            O, tO, m, l, tl = acc
            wait(K)
            S = dot(S_TILE, allocate(ONLY_Q, Q.index), allocate(ONLY_K, K.index).T)     # (1), in flight
            tS = dot(S_TILE, allocate(LEFT_OF_TS, Q.index), allocate(RIGHT_OF_TS, K.index).T)   # (2), in flight
            after = next_n_block(tile, args.mask, here + 1)
            if HAS_SCORE:
                S, tS = apply_score(wgmma_wait(S, 0), wgmma_wait(tS, 0), tile, args.scores, args.tscores, here)
                release(K)
            else:
                S = wgmma_wait(S, 1)
            if masks:
                S = masked(S, tile, args.mask, here)
            P, m, l, alpha = softmax_step(S, m, l, args.scale_log2)     # (4), relative to the maximum so far
            P = sign_dropped(P, args.drops, tile.batch, tile.head, tile.m0, here * TILE_N)
            O, tO = rescaled(O, alpha), rescaled(tO, alpha)
            if masks:
                clear_beyond(V, tile, args.mask, here)
            wait(V)
            v, left = allocate(ONLY_V, V.index), left_operand(P)
            O = dot(O, left, v)                                 # (3): O = O + P V, in flight
            if HAS_TV:
                tO = dot(tO, left, allocate(TANGENT_V, V.index))    # (6): tO = tO + P tV, in flight
            if not HAS_SCORE:
                tS = wgmma_wait(tS, 2) if HAS_TV else wgmma_wait(tS, 1)
                release(K)
            if masks:
                tS = where(P != ZERO, tS, ZERO)                 # what is masked may be NaN
            P, kept = both_factors(P)
            tS = tS * (args.scale_log2 * LN2)
            tl = part_sum(P * tS, tl * alpha)                   # (5)
            tO = dot(tO, operand(kept * tS, ONLY_V), v)         # (6): tO = tO + (P tS) V, in flight
            O, tO = wgmma_wait(O, 0), wgmma_wait(tO, 0)
            release(V)
            return TangentAccumulators(O, tO, m, l, tl), advance(K, 1), advance(V, 1), after

        return step

    step, masked_step = step_with(masks=False), step_with(masks=True)

    @device
    def main_loop(Q, K, V, tile, here, end, args):
        """All tiles of keys up to `end`. Also returns the next one."""
        O, tO, nothing = full(O_TILE, ZERO), full(O_TILE, ZERO), full(PARTS, ZERO)
        acc = TangentAccumulators(O, tO, full(VECTOR, no_max(args.scale_log2)), nothing, nothing)
        while here < end:
            while here < end and not needs_mask(tile, args.mask, here):
                acc, K, V, here = step(acc, Q, K, V, tile, here, args)
            if here < end:
                acc, K, V, here = masked_step(acc, Q, K, V, tile, here, args)
        return acc, K, V, here

    @device
    def epilogue(acc, W, Q, tile, args):
        """Save lse and tlse, stage O and tO."""
        O, tO, m, l, tl = acc
        m = m * (args.scale_log2 * LN2)
        m, total, alpha = with_sink(m, row_sum(l), args.scores, tile.batch, tile.head)     # total is 0: nothing is seen
        over_l = inverse(total, alpha)
        O, tlse = O * (over_l * args.kept_scale), row_sum(tl) * over_l
        tlse = with_tsink(tlse, m, total, args.scores, args.tscores, tile.batch, tile.head)
        tO = tO * (over_l * args.kept_scale) - O * tlse         # (6)
        first, end = queries_of(tile.segment)
        save(args.mLse[tile.batch, tile.head][first:end], logsumexp(m, total, LN2), tile.m0)
        save(args.mTLse[tile.batch, tile.head][first:end], tlse, tile.m0)
        sync_warpgroup()                                        # all have read Q
        put(allocate(SHARED_O, Q.index), O)
        put(allocate(SHARED_TO, Q.index), tO)
        if IS_PACKED and not is_whole(tile.segment, tile.m0):
            save(args.by_rows[0][tile.batch, tile.head][first:end], O, tile.m0)
            save(args.by_rows[1][tile.batch, tile.head][first:end], tO, tile.m0)
        fence_async_proxy()
        sync_warpgroup()
        release(Q)                                              # to the scheduler, which stores both
        release(W)

    @device
    def attend(W, Q, K, V, tile, first, end, known, args):
        """What a consumer does of a work tile: see `skeleton_of`."""
        acquire(Q)                                              # consumers take turns with these stages: see pipeline
        wait(Q)
        acc, K, V, here = main_loop(Q, K, V, tile, first, end, args)
        K, V, _, _ = skip(K, V, tile, args.mask, here, known_of(tile, args.mask, here), tile.n_blocks)
        epilogue(acc, W, Q, tile, args)
        return K, V, receive(advance(W, 1), args.heads_per_tile)

    registers, compute = REGISTERS[consumers], skeleton.consumer_of(within, attend)
    begin, take_roles = warp_specialised(skeleton.pipelines, consumers, registers, compute, *skeleton.producers)

    def kernel(
        mQ, mK, mV, mTQ, mTK, mTV, mO, mTO, o_by_rows, to_by_rows, mLse, mTLse, mask, scores, tscores, drops, counters,
        group_size, scale_log2, kept_scale, at_once, heads_per_tile, ascending,
    ):  # fmt: skip
        batches, heads, seqlen_q = shape(mLse)
        begin()
        by_rows = *o_by_rows, *to_by_rows
        args = TangentArguments(
            by_rows, mLse, mTLse, mask, scores, tscores, drops, scale_log2, kept_scale, heads_per_tile
        )  # fmt: skip
        given = ProducerArguments(
            MovedTiles((mQ, *mTQ), (mK, *mTK), (mV, *mTV), (mO, mTO)), (), mask, counters, seqlen_q, heads,
            batches * heads, group_size, at_once, heads_per_tile, ascending,
        )  # fmt: skip
        take_roles((args,), ((given,), (given,)))

    given = [f"t{name}" for name in tangents]
    signature = signature_of(
        kernel, SPEC.arguments, dtype, ACC, mask=mask, score=score, tscore=tscore, given=given,
        is_packed=IS_PACKED,
    )  # fmt: skip
    maps = ONLY_Q, ONLY_K, ONLY_V, *ONLY_TQ, *ONLY_TK, *ONLY_TV, SHARED_O, SHARED_TO
    return source_of(kernel, signature, consumers, shared, maps)


def parts(tile, cols, count):
    """The places of `count` parts of each stage, of `cols` columns each."""
    return [tile.part(number * cols, cols) for number in range(count)]


SPEC = Spec(
    hopper_tangent,
    (TmaMatrix("q"), TmaMatrix("k", "k"), TmaMatrix("v", "k"), TmaMatrix("tq", optional=True),
     TmaMatrix("tk", "k", optional=True), TmaMatrix("tv", "k", optional=True), TmaMatrix("o"), TmaMatrix("to"),
     RaggedMatrix("o"), RaggedMatrix("to"), Statistic("lse"), Statistic("tlse"), MASK, SCORE, TSCORE, DROPOUT, COUNTERS,
     "group_size", "scale_log2", "kept_scale", "at_once", "heads_per_tile", "ascending"),
    tiles=rows,
    parameters=lambda work, tiles: parameters(work, tiles) | tangents_of(work),
    numbers=numbers,
    states=tiles_of_states,
    persistent=True,
    arch="a",
    packs=True,
)  # fmt: skip

"""Attention forward on Hopper (wgmma, TMA): Algorithm 2, and 5 where the mask has blocks (lines 10 to 16 are the same).

A persistent, warp-specialised kernel, see `forward_skeleton`. Each consumer takes 64 queries of a work tile and loops
over the keys that they see: the prologue computes the first S; the main loop has S = Q K^T of one tile and O = O + P V
of the previous tile in flight together, then computes the softmax of S; the epilogue adds the last P V, divides by l
and stages O in Q's buffer. Consumers do not wait for each other: while one computes exponentials, or is in its
epilogue, the tensor cores work for the others.
"""

from ....call.passes import BEFORE
from ...tile import (
    Alignment,
    SharedMemory,
    acquire,
    advance,
    aligned,
    allocate,
    device,
    dot,
    fence_async_proxy,
    operand,
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
)
from ...tile.alignment import VECTOR_BYTES
from ...words.arguments import COUNTERS, O_BEFORE, RaggedMatrix, Statistic, TmaBias, TmaMatrix
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..scores import (
    SCORE,
    dtype_of_tma_bias,
    may_be_far,
    number_of_tma_bias,
    sink_steps,
    softmax_score_steps,
)
from ..shared.dropout import DROPOUT, drop_step
from ..shared.layouts import DTYPES, sum_type
from ..shared.segments import queries_of
from ..shared.softmax import LN_2, logsumexp, softmax_steps
from ..shared.start import start_step
from ..shared.visibility import MASK, PACKED
from ..shared.warps import source_of, warp_specialised
from ..tables import compiled_in, lse_alone, of_o
from .forward_skeleton import MovedTiles, ProducerArguments, skeleton_of
from .forward_steps import ForwardAccumulators, ForwardArguments, ahead_steps, mask_steps, within_step
from .forward_tiles import ROWS, by_columns, dims_of_launch, numbers, rows, tiles_of_states
from .linear_bias import DEPTH, is_linear_bias, linear_bias_steps
from .walk import score_tile_steps

# {consumers: of a producer's thread, of a consumer's}; two blocks of one consumer share a multiprocessor
REGISTERS = {1: (40, 216), 2: (40, 232), 3: (32, 160), 4: (32, 112)}


def hopper_forward(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, score, dropout, bias_dtype="", resumes=False
):  # fmt: skip
    """The kernel for these Warpgroups and head_dims rounded up to head_dim and head_dim_v.

    bias_dtype: of a bias whose tiles come with those of K. resumes: whether the loop starts from O and lse over other
    keys, see `shared.start`. An O of another dtype than q is neither staged nor a tensor map.

    Arguments of the kernel: see ProducerArguments.
    """
    dtype, ACC, (tile_n, consumers, stages, q_stages, blocks) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    S_TILE, O_TILE = wgmma(tile_n), wgmma(head_dim_v)
    shared = SharedMemory()
    SHARED_Q = shared.boxes(ROWS, head_dim, dtype, q_stages, room=head_dim_v)
    IS_STAGED = out_dtypes == (dtype.name,) and head_dim_v > 0
    SHARED_O = SHARED_Q.of_columns(head_dim_v) if IS_STAGED else None
    SHARED_K, SHARED_V = (shared.boxes(tile_n, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    HAS_TMA_BIAS, HAS_LINEAR_BIAS = bool(bias_dtype), is_linear_bias(score)
    IS_PACKED, ROWS_OF = PACKED in mask, Alignment(0 if IS_STAGED else VECTOR_BYTES)
    SHARED_B = shared.boxes(ROWS, tile_n, DTYPES.get(bias_dtype, dtype), stages * consumers * HAS_TMA_BIAS)
    SHARED_C = shared.boxes(tile_n, DEPTH, DTYPES["bfloat16"], int(HAS_LINEAR_BIAS))
    moved = MovedTiles((SHARED_Q,), (SHARED_K,), (SHARED_V,) * (head_dim_v > 0), (SHARED_O,) * IS_STAGED)
    skeleton = skeleton_of(shared, SHARED_Q, SHARED_K, SHARED_V, moved, SHARED_B, mask, tile_n, consumers)
    receive, is_whole, clear_beyond, skip = skeleton.steps
    TILE_N, LN2 = tile_n, ACC(LN_2)
    RESCALES_FIRST = head_dim_v > 192  # more of O than can be rescaled while S is in flight
    # with levels a RelativeBias is 7 % faster at head_dim 128, at 256 4 % slower (H200)
    look_up, apply = softmax_score_steps(score, S_TILE, ACC, has_levels=not RESCALES_FIRST, by_tma=HAS_TMA_BIAS)
    prefetch_bias, bias_in_registers, apply_score = score_tile_steps(look_up, apply, tile_n, consumers, SHARED_B)
    needs_mask, masked = mask_steps(mask, S_TILE, tile_n, consumers, ACC)
    next_block, is_first_partial, is_partial, has_more = ahead_steps(mask, needs_mask, tile_n, consumers)
    (no_max, softmax_step), (with_sink, inverse) = softmax_steps(ACC, may_be_far(score)), sink_steps(score, ACC)
    put_columns, linear_bias_of, side_of, add_linear_bias, level_of = linear_bias_steps(score, S_TILE, SHARED_C, ACC)
    within, drop = within_step(mask, score, linear_bias_of), drop_step(S_TILE, dropout)
    start = start_step(S_TILE, O_TILE, ACC, no_max, resumes)

    @device
    def left_operand(P, tile, args, n_block):
        dropped = drop(P, args.drops, tile.batch, tile.head, tile.m0, n_block * TILE_N)     # line 14: dropout(P)
        return operand(dropped, SHARED_V)

    def step_with(masks):
        BY_PRODUCT = HAS_LINEAR_BIAS and not masks

        @device
        def step(acc, Q, K, V, tile, before, here, state, side, args):
            """The softmax of tile `here` and P V of tile `before`. Also returns `here` and the next tile."""
            O, P, m, l, alpha = acc
            prefetched = prefetch_bias(tile, args.scores, here)
            if RESCALES_FIRST:
                O = rescaled(O, alpha)
            wait(K)
            S = dot(S_TILE, Q.tile, K.tile.T)                   # Alg. 2 line 10: S = Q K^T, in flight
            if BY_PRODUCT:
                S = add_linear_bias(S, side)
            if not RESCALES_FIRST:
                O = rescaled(O, alpha)                          # line 15: O = alpha O
            wait(V)
            O = dot(O, P, V.tile)                               # line 15: O = O + P V, of tile `before`, in flight
            after, next_state = next_block(tile, args.mask, here, state)
            S = wgmma_wait(S, 1)
            found = bias_in_registers(prefetched, K, tile, args.scores)
            release(K)
            if BY_PRODUCT:
                level = level_of(args.linear_bias, side, here)
                P_f32, m, l, alpha = softmax_step(S, m, l, args.scale_log2, level)
            else:
                S, level, factor = apply_score(S, found, tile, args.scores, here)
                if masks:
                    S = masked(S, tile, args.mask, here)
                P_f32, m, l, alpha = softmax_step(S, m, l, args.scale_log2, level, factor)  # lines 12 and 13
            O = wgmma_wait(O, 0)
            release(V)
            P = left_operand(P_f32, tile, args, here)
            return ForwardAccumulators(O, P, m, l, alpha), advance(K, 1), advance(V, 1), here, after, next_state

        return step

    step, masked_step = step_with(masks=False), step_with(masks=True)

    @device
    def prologue(Q, K, tile, n_block, state, args):
        """The softmax of the first S."""
        place = tile.segment, tile.batch, tile.head, tile.m0
        O, m, l = start(args.before, args.mLse, *place, args.scale_log2, args.kept_scale)
        prefetched = prefetch_bias(tile, args.scores, n_block)
        acquire(Q)                                              # consumers take turns with these stages: see pipeline
        wait(Q)
        wait(K)
        S = wgmma_wait(dot(S_TILE, Q.tile, K.tile.T), 0)        # line 10: S = Q K^T
        found = bias_in_registers(prefetched, K, tile, args.scores)
        release(K)
        K, (S, level, factor) = advance(K, 1), apply_score(S, found, tile, args.scores, n_block)
        if is_first_partial(tile, args.mask, n_block, state):
            S = masked(S, tile, args.mask, n_block)
        P_f32, m, l, alpha = softmax_step(S, m, l, args.scale_log2, level, factor)
        return ForwardAccumulators(O, left_operand(P_f32, tile, args, n_block), m, l, alpha), K

    @device
    def main_loop(acc, Q, K, V, tile, before, state, end, args):
        """All tiles of keys but the first, up to `end`. Also returns the last one computed, and the next one."""
        here, next_state = next_block(tile, args.mask, before, state)
        while has_more(tile, args.mask, here, end, next_state):
            side, until = side_of(args.linear_bias, here, end)
            # Nearly all of the time is spent here: an inner loop is 1 to 2 % faster than one loop with if and else.
            while here < until and not is_partial(tile, args.mask, here, next_state):
                acc, K, V, before, here, next_state = step(acc, Q, K, V, tile, before, here, next_state, side, args)
            if has_more(tile, args.mask, here, end, next_state):
                acc, K, V, before, here, next_state = masked_step(
                    acc, Q, K, V, tile, before, here, next_state, side, args
                )
        return acc, K, V, before, here, next_state

    @device
    def epilogue(acc, W, Q, K, V, tile, before, here, next_state, args):
        """The last P V, O and lse. Also returns the next tile, received while P V is in flight."""
        O, P, m, l, alpha = acc
        clear_beyond(V, tile, args.mask, before)
        wait(V)
        O = dot(rescaled(O, alpha), P, V.tile)                  # line 15: O = alpha O + P V
        m = m * (args.scale_log2 * LN2)                         # in natural units; total is 0 if nothing is seen
        m, total, alpha = with_sink(m, row_sum(l), args.scores, tile.batch, tile.head)
        lse = logsumexp(m, total, LN2)
        first, end = queries_of(tile.segment)
        save(args.mLse[tile.batch, tile.head][first:end], lse, tile.m0)     # line 16
        next_tile = receive(advance(W, 1), args.heads_per_tile)
        O = wgmma_wait(O, 0)
        release(V)
        V = advance(V, 1)
        K, V, _, _ = skip(K, V, tile, args.mask, here, next_state, tile.n_blocks)
        sync_warpgroup()                                        # all have read Q
        O = O * (inverse(total, alpha) * args.kept_scale)       # line 15: O = O / l
        if IS_STAGED:
            put(allocate(SHARED_O, Q.index), O)
        if not IS_STAGED or (IS_PACKED and not is_whole(tile.segment, tile.m0)):
            save(aligned(args.by_rows[0][tile.batch, tile.head][first:end], ROWS_OF), O, tile.m0)
        fence_async_proxy()
        sync_warpgroup()
        release(Q)                                              # to the scheduler, which stores O
        release(W)
        return K, V, next_tile

    @device
    def attend(W, Q, K, V, tile, first, end, state, args):
        """What a consumer does of a work tile: see `skeleton_of`."""
        acc, K = prologue(Q, K, tile, first, state, args)
        acc, K, V, before, here, state = main_loop(acc, Q, K, V, tile, first, state, end, args)
        return epilogue(acc, W, Q, K, V, tile, before, here, state, args)

    registers, compute = REGISTERS[consumers], skeleton.consumer_of(within, attend)
    begin, take_roles = warp_specialised(
        skeleton.pipelines, consumers, registers, compute, *skeleton.producers, blocks=blocks
    )  # fmt: skip

    def kernel(
        mQ, mK, mV, mO, biases, ragged, before, mLse, mask, scores, drops, counters, group_size, scale_log2,
        kept_scale, at_once, heads_per_tile, ascending,
    ):  # fmt: skip
        batches, heads, seqlen_q = shape(mLse)
        put_columns()
        begin()
        by_rows = ragged if IS_STAGED else (mO,)
        args = ForwardArguments(
            by_rows, before, mLse, mask, scores, drops, scale_log2, kept_scale, heads_per_tile, ()
        )  # fmt: skip
        given = ProducerArguments(
            MovedTiles((mQ,), (mK,), (mV,), (mO,)), biases, mask, counters, seqlen_q, heads, batches * heads,
            group_size, at_once, heads_per_tile, ascending,
        )  # fmt: skip
        take_roles((args,), ((given,), (given,)))

    signature = signature_of(
        kernel, SPEC.arguments, dtype, ACC, {"o": out_dtypes[0]}, mask=mask, score=score, resumes=resumes,
        bias_dtype=bias_dtype, is_packed=IS_PACKED, head_dim_v=head_dim_v,
    )  # fmt: skip
    maps = SHARED_Q, SHARED_K, SHARED_V if head_dim_v else None, SHARED_O, *[SHARED_B] * HAS_TMA_BIAS
    return source_of(kernel, signature, consumers, shared, maps, blocks)


SPEC = Spec(
    hopper_forward,
    (TmaMatrix("q"), TmaMatrix("k", "k"), TmaMatrix("v", "k", may_be_empty=True), TmaMatrix("o", may_be_empty=True),
     TmaBias(number_of_tma_bias), RaggedMatrix("o"), O_BEFORE, Statistic("lse"), MASK, SCORE, DROPOUT, COUNTERS,
     "group_size", "scale_log2", "kept_scale", "at_once", "heads_per_tile", "ascending"),
    tiles=rows,
    parameters=lambda work, tiles: (
        compiled_in(work, tiles, dims_of_launch(work.problem)) | of_o(work) | lse_alone(work)
        | {"bias_dtype": dtype_of_tma_bias(work)}
    ),
    numbers=numbers,
    states=tiles_of_states,
    persistent=True,
    resident=lambda work, tiles: tiles.blocks,
    arch="a",
    packs=True,
    slices=True,
    columns=by_columns(v=1, o=1, **{BEFORE: 1})["columns"],
)  # fmt: skip

"""Attention forward on Hopper (wgmma, TMA): Algorithm 2, and 5 where the mask has blocks (lines 10 to 16 are the same).

A persistent, warp-specialised kernel: a block draws work tiles, some queries of some heads each, until none is left.
The last warpgroup is the producer. One of its threads, the scheduler, draws work tiles, TMA-loads their Q and
TMA-stores their O; another one, the loader, TMA-loads the tiles of K and V. The other warpgroups are consumers. Each
takes 64 queries of a work tile and loops over the keys in their sight: the prologue computes the first S; the main loop
has S = Q K^T of a tile and O = O + P V of the tile before in flight together, then computes the softmax of S; the
epilogue adds the last P V, divides by l and stages O in Q's buffer. Consumers do not wait for each other: while one
computes exponentials, or is in its epilogue, the tensor cores work for the others.
"""


import numpy as np
from numba.cuda import types

from ...build import Source, TensorMap
from ...plan.arguments import COUNTERS, BoxedBias, Boxes, Line, Tails
from ...plan.spec import Spec
from ...tile import (
    INDEX,
    WARPGROUP,
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    block_index,
    clear,
    commit,
    decrease_registers,
    device,
    dot,
    fence_async_proxy,
    full,
    increase_registers,
    index,
    init_pipeline,
    launch_dependents,
    maximum,
    minimum,
    opaque,
    operand,
    prefetch_tensor_map,
    put,
    read,
    release,
    rescaled,
    row_sum,
    save,
    shape,
    stage,
    sync_threads,
    sync_warp,
    sync_warpgroup,
    sync_warpgroups,
    thread_index,
    tma_load,
    tma_load_part,
    tma_store,
    tma_store_wait,
    wait,
    wait_on_dependencies,
    warpgroup_index,
    wgmma,
    wgmma_wait,
    where,
)
from ..scores import (
    SCORE,
    boxed_bias,
    boxed_dtype,
    may_be_far,
    scores_type,
    sink_steps,
    softmax_score_steps,
    within_segment,
)
from ..shared.dropout import DROPOUT, DROPS, drop_step
from ..shared.layouts import DTYPES, array_type, sum_type
from ..shared.schedule import finish, next_number, place_grouped
from ..shared.segments import count_step, queries_of, sight_step, slot_step
from ..shared.softmax import LN_2, logsumexp, softmax_steps
from ..shared.tables import compiled_in
from ..shared.visibility import (
    MASK,
    PACKED,
    band_of,
    element_test,
    has_key_lengths,
    is_looked_up,
    keys_in_sight,
    needs_test,
    several,
    sight_type,
    steps_to_next,
)
from .forward_steps import BY_CONSUMER, Accumulators, Call, ConsumerTile, WorkTile, record_steps
from .forward_tiles import ROWS, head_dims, numbers, rows
from .ramp import DEPTH, is_ramp, ramp_steps

TILES_AHEAD = 4  # stages of the pipeline of work tiles
REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}  # {consumers: of a producer's thread, of a consumer's}


def forward(
    *, dtype, head_dim, head_dim_v, tile_n, consumers, stages, q_stages, mask, score, dropout, boxed="",
):  # fmt: skip
    """The kernel for tiles of 64 queries a consumer, tile_n keys and head_dims rounded up to head_dim and head_dim_v.

    stages: of the pipelines of K and of V; q_stages: of that of Q, in whose buffers O is staged. boxed: the dtype of a
    bias whose tiles come with those of K.

    Arguments of the kernel: at_once, see `schedule.place_grouped`; heads_per_tile, the query heads of a group that are
    packed into one work tile and share the tiles of K and V; ascending, whether the first tiles of queries come first,
    or the last.
    """
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    S_TILE, O_TILE = wgmma(tile_n), wgmma(head_dim_v)
    ROW_VECTOR, PARTS = S_TILE.row_vector(), S_TILE.row_parts()
    shared = SharedMemory()
    SHARED_Q = shared.boxes(ROWS, head_dim, dtype, q_stages, room=head_dim_v)
    SHARED_O = SHARED_Q.of_columns(head_dim_v)
    SHARED_K, SHARED_V = (shared.boxes(tile_n, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    Q_PIPELINE = Pipeline.within(shared, SHARED_Q, readers=1)
    IS_BOXED = bool(boxed)
    SHARED_B = shared.boxes(ROWS, tile_n, DTYPES[boxed] if boxed else dtype, stages * consumers * IS_BOXED)
    IS_RAMP = is_ramp(score)
    SHARED_C = shared.boxes(tile_n, DEPTH, DTYPES["bfloat16"], int(IS_RAMP))
    K_PIPELINE = Pipeline.within(shared, SHARED_K, consumers, fills=1 + consumers * IS_BOXED)
    V_PIPELINE = Pipeline.within(shared, SHARED_V, consumers)
    O_COORDINATES, WORK = (shared.tile(1, size, np.int32, stages=count)
                           for size, count in ((3, q_stages), (len(record_steps(mask)[2]), TILES_AHEAD)))  # fmt: skip
    O_PIPELINE, WORK_PIPELINE = Pipeline.within(shared, O_COORDINATES, 1), Pipeline.within(shared, WORK, consumers + 1)
    CONSUMERS, Q_STAGES = consumers, q_stages
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = REGISTERS[consumers]
    TILE_M, TILE_N = ROWS * consumers, tile_n
    ZERO, NO_SCORE, LN2 = ACC(0), ACC(-np.inf), ACC(LN_2)
    LOADER, SCHEDULER = WARPGROUP * consumers, WARPGROUP * consumers + 32       # threads of different warps
    band_at, sees, tested, steps = band_of(mask), element_test(mask, S_TILE), needs_test(mask), steps_to_next(mask)
    drop, IS_LOOKED_UP, IS_PACKED = drop_step(S_TILE, dropout), is_looked_up(mask), PACKED in mask
    HAS_KEY_LENGTHS = has_key_lengths(mask)
    (to_record, from_record, NO_WORK), tile_of = record_steps(mask), slot_step(mask, "q", TILE_M, by_warp=False)
    tiles_of, sight_of, scores_of = count_step(mask, TILE_M), sight_step(mask, ROWS), within_segment(score)
    RESCALES_FIRST = head_dim_v > 192  # more of O than can be rescaled while S is in flight
    # with levels a RelativeBias is 7 % faster at head_dim 128, at 256 4 % slower (H200)
    look_up, apply = softmax_score_steps(score, S_TILE, ACC, has_levels=not RESCALES_FIRST, is_boxed=IS_BOXED)
    (NO_MAX, softmax_step), (with_sink, inverse) = softmax_steps(ACC, may_be_far(score)), sink_steps(score, ACC)
    put_columns, ramp_of, side_of, add_ramp, level_of = ramp_steps(score, S_TILE, SHARED_C, ACC)

    @device
    def next_n_block(work, sight, n_block):
        """The first tile of keys from n_block on that is not empty."""
        left = steps(sight, work.batch, work.head, work.m_block, n_block, work.n_blocks - n_block)
        return n_block + left

    @device
    def blocks_in_sight(sight, batch, head, m0, m_end):
        """The tiles of keys [first, end) in sight of queries [m0, m_end)."""
        first, end = keys_in_sight(band_at(sight, batch, head), m0, m_end)
        return first // TILE_N, (end + TILE_N - 1) // TILE_N

    @device
    def work_tile(number, sight, seqlen_q, m_blocks, heads, matrices, at_once, heads_per_tile, ascending):
        """A work tile, and how many queries there are from its first one on: none if a slot has no tile."""
        tile, batch, head = place_grouped(number, m_blocks, matrices, heads, at_once)
        head = head * heads_per_tile
        tile = tile if ascending else m_blocks - 1 - tile       # the heaviest first, if causal
        segment, m_block = tile_of(sight.packing, batch, tile, seqlen_q)
        sight, m0 = sight_of(sight, segment), m_block * TILE_M
        first, end = blocks_in_sight(sight, batch, head, m0, minimum(m0 + TILE_M, segment.queries))
        n_block = next_n_block(WorkTile(batch, head, m_block, first, end, segment), sight, first)
        if n_block >= end:                                      # if nothing is seen, one tile, fully masked
            n_block, end = 0, 1
        return WorkTile(batch, head, m_block, n_block, end, segment), segment.queries - m0

    @device
    def consumer_tile(work, consumer, heads_per_tile):
        """The head and the first query of a consumer: adjacent consumers take adjacent heads, then adjacent queries."""
        head, row = consumer, index(0)
        while head >= heads_per_tile:                           # a division would take more registers
            head, row = head - heads_per_tile, row + 1
        return work.head + head, work.m_block * TILE_M + row * ROWS

    @device
    def is_whole(segment, m0):
        """Whether a consumer's queries are all of the segment: else a TMA store would write to the next one, too."""
        return not IS_PACKED or m0 + ROWS <= segment.queries

    @device
    def store_o(Q, count, mO):
        """TMA-store the O, if any, that is staged in the buffer of tile number `count` of Q."""
        acquire(Q)
        if count >= Q_STAGES:
            batch, head, row = read(stage(O_PIPELINE, Q.index))
            if not IS_PACKED or row != BY_CONSUMER:
                tma_store(mO, allocate(SHARED_O, Q.index), batch, head, row)
                tma_store_wait()

    @device
    def schedule(mQ, mO, sight, counters, seqlen_q, heads, matrices, at_once, heads_per_tile, ascending):
        """The scheduler, one thread of the producer: draws work tiles, TMA-loads their Q, TMA-stores their O."""
        W, Q, count = stage(WORK_PIPELINE, 0), stage(Q_PIPELINE, 0), index(0)
        m_blocks = tiles_of(sight.packing, seqlen_q)
        heads, matrices = heads // heads_per_tile, matrices // heads_per_tile
        number = block_index()
        while number < m_blocks * matrices:
            work, left = work_tile(
                number, sight, seqlen_q, m_blocks, heads, matrices, at_once, heads_per_tile, ascending
            )  # fmt: skip
            if IS_PACKED and left <= 0:
                number = next_number(counters)
                continue
            acquire(W)
            commit(W, to_record(work))
            W = advance(W, 1)
            consumer = index(0)
            while consumer < CONSUMERS:
                head, m0 = consumer_tile(work, consumer, heads_per_tile)
                row = work.segment.first_query + m0
                stored_at = row if is_whole(work.segment, m0) else BY_CONSUMER
                store_o(Q, count, mO)
                commit(stage(O_PIPELINE, Q.index), (work.batch, head, stored_at))
                tma_load(Q, mQ, work.batch, head, row)
                Q, count = advance(Q, 1), count + 1
                consumer = opaque(consumer + 1)
            number = next_number(counters)
        acquire(W)
        commit(W, NO_WORK)
        finish(counters)
        end = count + Q_STAGES
        while count < end:
            store_o(Q, count, mO)
            Q, count = advance(Q, 1), opaque(count + 1)

    @device
    def load_bias(K, biases, work, n0, heads_per_tile):
        """The bias of all consumers' tiles of S goes with K."""
        consumer = index(0)
        while consumer < CONSUMERS:
            head, m0 = consumer_tile(work, consumer, heads_per_tile)
            place = allocate(SHARED_B, K.index * CONSUMERS + consumer)
            tma_load_part(K, place, biases[0], work.batch, head, work.segment.first_query + m0, n0)
            consumer = opaque(consumer + 1)

    @device
    def load(mK, mV, biases, sight, group_size, heads_per_tile):
        """The loader, one thread of the producer: TMA-loads K and V for the work tiles, as stages become free."""
        W, K, V = stage(WORK_PIPELINE, 0), stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
        while True:
            wait(W)
            work = from_record(read(W))
            release(W)
            W = advance(W, 1)
            if work.n_blocks == 0:
                break
            n_block, head_k = work.n_block, work.head // group_size
            while n_block < work.n_blocks:
                n0 = work.segment.first_key + n_block * TILE_N
                acquire(K)
                tma_load(K, mK, work.batch, head_k, n0)
                if IS_BOXED:
                    load_bias(K, biases, work, n0, heads_per_tile)
                K = advance(K, 1)
                acquire(V)
                tma_load(V, mV, work.batch, head_k, n0)
                V = advance(V, 1)
                n_block = next_n_block(work, sight, opaque(n_block + 1))

    @device
    def skip(K, V, tile, sight, n_block, end):
        """Release tiles of keys unread; also returns the first one from `end` on."""
        while n_block < end:
            wait(K)
            clear_beyond(V, tile, sight, n_block)
            wait(V)
            sync_warpgroup()                                    # no warp may miss a phase of the pipeline
            release(K)
            release(V)
            K, V = advance(K, 1), advance(V, 1)
            n_block = next_n_block(tile, sight, opaque(n_block + 1))
        return K, V, n_block

    @device
    def needs_mask(tile, sight, n_block):
        """Whether this tile needs a test per element."""
        batch, head, m0, n0 = tile.batch, tile.head, tile.m0, n_block * TILE_N
        band = band_at(sight, batch, head)
        m_end, n_end = m0 + ROWS, n0 + TILE_N
        return tested(sight, band, batch, head, tile.m_block, n_block, m0, m_end, n0, n_end)

    @device
    def place_of(tile, n_block):
        return tile.segment.first_query + tile.m0, tile.segment.first_key + n_block * TILE_N

    @device
    def looked_up(tile, scores, n_block):
        """What the score looks up for a tile of S, in flight."""
        if IS_BOXED:
            return ()
        m0, n0 = place_of(tile, n_block)
        return look_up(scores, (), tile.batch, tile.head, m0, n0)

    @device
    def at_hand(found, K, tile, scores):
        """The same, or the tile of a bias that has come with K."""
        if not IS_BOXED:
            return found
        place = allocate(SHARED_B, K.index * CONSUMERS + warpgroup_index())
        boxed = look_up(scores, place, tile.batch, tile.head, 0, 0)
        sync_warpgroup()                                        # all have read it
        return boxed

    @device
    def scored(S, found, tile, scores, n_block):
        m0, n0 = place_of(tile, n_block)
        return apply(S, found, scores, tile.batch, tile.head, m0, n0)

    @device
    def masked(S, tile, sight, n_block):
        batch, head, n0 = tile.batch, tile.head, n_block * TILE_N
        m0 = opaque(tile.m0)                                    # or the rows' bounds take registers in the main loop
        band = band_at(sight, batch, head)
        return where(sees(sight, band, batch, head, m0, n0), S, NO_SCORE)               # Alg. 2 line 11: MASK(S)

    @device
    def left_operand(P, tile, call, n_block):
        matrix = tile.batch * call.heads + tile.head
        return operand(drop(P, call.drops, matrix, tile.m0, n_block * TILE_N), SHARED_V)    # line 14: dropout(P)

    @device
    def clear_beyond(V, tile, sight, n_block):
        """Zero the rows of V beyond a sequence's length: they may be NaN, and 0 * NaN is NaN. They lie in the last tile
        of a work tile. By all consumers, also by those that skip this tile."""
        left = band_at(sight, tile.batch, tile.head)[3] - n_block * TILE_N
        if HAS_KEY_LENGTHS and left < TILE_N:                   # else TMA has filled in zeros beyond the matrix
            wait(V)
            if warpgroup_index() == 0:
                clear(V.tile, left)
                fence_async_proxy()
            sync_warpgroups(CONSUMERS)

    @device
    def n_block_range(tile, sight):
        """The tiles of keys [first, end) that this consumer reads, at least one."""
        first, end = blocks_in_sight(sight, tile.batch, tile.head, tile.m0, tile.m0 + ROWS)
        if IS_LOOKED_UP or first >= end:
            first = tile.n_block
        return first, minimum(maximum(end, first + 1), tile.n_blocks)

    def step_with(masks):
        ON_RAMP = IS_RAMP and not masks

        @device
        def step(acc, Q, K, V, tile, before, here, side, call):
            """The softmax of tile `here` and P V of tile `before`. Also returns `here` and the tile after it."""
            O, P, m, l, alpha = acc
            looked_up_ahead = looked_up(tile, call.scores, here)
            if RESCALES_FIRST:
                O = rescaled(O, alpha)
            wait(K)
            S = dot(S_TILE, Q.tile, K.tile.T)                   # Alg. 2 line 10: S = Q K^T, in flight
            if ON_RAMP:
                S = add_ramp(S, side)
            if not RESCALES_FIRST:
                O = rescaled(O, alpha)                          # line 15: O = alpha O
            wait(V)
            O = dot(O, P, V.tile)                               # line 15: O = O + P V of the tile before, in flight
            after = next_n_block(tile, call.sight, here + 1)
            S = wgmma_wait(S, 1)
            found = at_hand(looked_up_ahead, K, tile, call.scores)
            release(K)
            if ON_RAMP:
                level = level_of(call.ramp, side, here)
                P_f32, m, l, alpha = softmax_step(S, m, l, call.scale_log2, level)
            else:
                S, level, factor = scored(S, found, tile, call.scores, here)
                if masks:
                    S = masked(S, tile, call.sight, here)
                P_f32, m, l, alpha = softmax_step(S, m, l, call.scale_log2, level, factor)  # lines 12 and 13
            O = wgmma_wait(O, 0)
            release(V)
            P = left_operand(P_f32, tile, call, here)
            return Accumulators(O, P, m, l, alpha), advance(K, 1), advance(V, 1), here, after

        return step

    step, masked_step = step_with(masks=False), step_with(masks=True)

    @device
    def receive(W, heads_per_tile):
        """The share of this consumer in the next work tile."""
        wait(W)
        work = from_record(read(W))
        head, m0 = consumer_tile(work, warpgroup_index(), heads_per_tile)
        return ConsumerTile(work.batch, head, m0, work.m_block, work.n_block, work.n_blocks, work.segment)

    @device
    def prologue(Q, K, tile, n_block, call):
        """The softmax of the first S."""
        m, l = full(ROW_VECTOR, NO_MAX), full(PARTS, ZERO)
        looked_up_ahead = looked_up(tile, call.scores, n_block)
        acquire(Q)                                              # consumers take turns with these stages: see pipeline
        wait(Q)
        wait(K)
        S = wgmma_wait(dot(S_TILE, Q.tile, K.tile.T), 0)        # line 10: S = Q K^T
        found = at_hand(looked_up_ahead, K, tile, call.scores)
        release(K)
        K, (S, level, factor) = advance(K, 1), scored(S, found, tile, call.scores, n_block)
        if needs_mask(tile, call.sight, n_block):
            S = masked(S, tile, call.sight, n_block)
        P_f32, m, l, alpha = softmax_step(S, m, l, call.scale_log2, level, factor)
        return Accumulators(full(O_TILE, ZERO), left_operand(P_f32, tile, call, n_block), m, l, alpha), K

    @device
    def main_loop(acc, Q, K, V, tile, before, end, call):
        """All tiles of keys but the first, up to `end`. Also returns the last one, and the next one not computed."""
        here = next_n_block(tile, call.sight, before + 1)
        while here < end:
            side, until = side_of(call.ramp, here, end)
            # Nearly all of the time is spent here: this inner loop is 1 to 2 % faster than one loop with if and else.
            while here < until and not needs_mask(tile, call.sight, here):
                acc, K, V, before, here = step(acc, Q, K, V, tile, before, here, side, call)
            if here < end:
                acc, K, V, before, here = masked_step(acc, Q, K, V, tile, before, here, side, call)
        return acc, K, V, before, here

    @device
    def epilogue(acc, W, Q, K, V, tile, before, here, call):
        """The last P V, O and lse. Also returns the next tile, received while P V is in flight."""
        O, P, m, l, alpha = acc
        clear_beyond(V, tile, call.sight, before)
        wait(V)
        O = dot(rescaled(O, alpha), P, V.tile)                  # line 15: O = alpha O + P V
        # total is 0 if nothing is seen
        m = m * (call.scale_log2 * LN2)
        m, total, alpha = with_sink(m, row_sum(l), call.scores, tile.batch, tile.head)
        lse = logsumexp(m, total, LN2)
        first, end = queries_of(tile.segment)
        save(call.mLse[tile.batch, tile.head][first:end], lse, tile.m0)     # line 16
        next_tile = receive(advance(W, 1), call.heads_per_tile)
        O = wgmma_wait(O, 0)
        release(V)
        V = advance(V, 1)
        K, V, _ = skip(K, V, tile, call.sight, here, tile.n_blocks)
        sync_warpgroup()                                        # all have read Q
        O = O * (inverse(total, alpha) * call.kept_scale)       # line 15: O = O / l
        put(allocate(SHARED_O, Q.index), O)
        if IS_PACKED and not is_whole(tile.segment, tile.m0):
            save(call.tails[0][tile.batch, tile.head][first:end], O, tile.m0)
        fence_async_proxy()
        sync_warpgroup()
        release(Q)                                              # to the scheduler, which stores O
        release(W)
        return K, V, next_tile

    @device
    def within(call, tile):
        """The Call, with what a segment's queries see, and the ramp of these rows."""
        (m0, n0), scores = place_of(tile, 0), scores_of(call.scores, tile.segment)
        ramp = ramp_of(scores, tile.batch, tile.head, m0, n0)
        return Call(
            call.tails, call.mLse, sight_of(call.sight, tile.segment), scores, call.drops, call.heads,
            call.scale_log2, call.kept_scale, call.heads_per_tile, ramp,
        )  # fmt: skip

    @device
    def compute(call):
        """The consumers, whole warpgroups."""
        W, K, V = stage(WORK_PIPELINE, 0), stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
        Q = stage(Q_PIPELINE, warpgroup_index())
        tile = receive(W, call.heads_per_tile)
        while tile.n_blocks > 0:
            here = within(call, tile)
            first, end = n_block_range(tile, here.sight)
            K, V, n_block = skip(K, V, tile, here.sight, tile.n_block, first)
            acc, K = prologue(Q, K, tile, n_block, here)
            acc, K, V, n_block, after = main_loop(acc, Q, K, V, tile, n_block, end, here)
            K, V, tile = epilogue(acc, W, Q, K, V, tile, n_block, after, here)
            W, Q = advance(W, 1), advance(Q, CONSUMERS)
            sync_warp()                                         # reconverge: the first thread did more

    def kernel(
        mQ, mK, mV, mO, biases, tails, mLse, sight, scores, drops, counters, group_size, scale_log2, kept_scale,
        at_once, heads_per_tile, ascending,
    ):  # fmt: skip
        batches, heads, seqlen_q = shape(mLse)
        matrices = batches * heads
        init_pipeline(WORK_PIPELINE)
        init_pipeline(Q_PIPELINE)
        init_pipeline(O_PIPELINE)
        init_pipeline(K_PIPELINE)
        init_pipeline(V_PIPELINE)
        put_columns()
        launch_dependents()
        wait_on_dependencies()
        sync_threads()
        if warpgroup_index() == CONSUMERS:
            decrease_registers(PRODUCER_REGISTERS)
            if thread_index() == SCHEDULER:
                prefetch_tensor_map(mQ)
                prefetch_tensor_map(mO)
                schedule(mQ, mO, sight, counters, seqlen_q, heads, matrices, at_once, heads_per_tile, ascending)
            if thread_index() == LOADER:
                prefetch_tensor_map(mK)
                prefetch_tensor_map(mV)
                if IS_BOXED:
                    prefetch_tensor_map(biases[0])
                load(mK, mV, biases, sight, group_size, heads_per_tile)
        else:
            increase_registers(CONSUMER_REGISTERS)
            compute(Call(tails, mLse, sight, scores, drops, heads, scale_log2, kept_scale, heads_per_tile, ()))

    number = getattr(types, ACC.__name__)
    signature = types.void(
        *[types.uint64] * 4, several(types.uint64, IS_BOXED), several(array_type(dtype, 4), IS_PACKED),
        array_type(ACC, 3), sight_type(mask), scores_type(score, dtype), DROPS, types.uint32[:], INDEX, number, number,
        *[INDEX] * 3,
    )  # fmt: skip
    tiles = SHARED_Q, SHARED_K, SHARED_V, SHARED_O, *[SHARED_B] * IS_BOXED
    return warp_specialised(kernel, signature, consumers, shared, tiles)


def warp_specialised(kernel, signature, consumers, shared, tiles):
    """The Source of a kernel with a producer behind its consumers; tiles: of its tensor maps, its first arguments."""
    maps = tuple(TensorMap(i, tile.box) for i, tile in enumerate(tiles))
    threads = WARPGROUP * (consumers + 1)
    return Source(kernel, signature, threads, shared=shared.nbytes, overlaps=True, tensor_maps=maps)


SPEC = Spec(
    forward,
    (Boxes("q"), Boxes("k", "k"), Boxes("v", "k"), Boxes("o"), BoxedBias(boxed_bias), Tails("o"), Line("lse"), MASK,
     SCORE, DROPOUT, COUNTERS, "group_size", "scale_log2", "kept_scale", "at_once", "heads_per_tile", "ascending"),
    tiles=rows,
    parameters=lambda work, tiles: compiled_in(work, tiles, head_dims(work.problem)) | {
        "boxed": boxed_dtype(work),
    },
    numbers=numbers,
    persistent=True,
    arch="a",
    packs=True,
)  # fmt: skip

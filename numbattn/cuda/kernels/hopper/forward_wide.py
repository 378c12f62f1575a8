"""Attention forward on Hopper for head_dims beyond 256: Algorithm 2 by two blocks.

A block has no registers for 128 queries of O with more than 256 columns, and scores that are computed anew for every
slice of columns cost half as much again. So two blocks, a cluster, share 128 queries. Of each 128 keys either block
computes the scores of its own 64; their maximum and P go to the other block, its peer; and each multiplies both halves
of P by its own half of the columns of V:

    block 0   S = Q K_0^T, P_0  ---- max, P_0 --->   O[:, right] += P_0 V_0[:, right] + P_1 V_1[:, right]   block 1
    block 1   S = Q K_1^T, P_1  ---- max, P_1 --->   O[:, left]  += P_0 V_0[:, left]  + P_1 V_1[:, left]    block 0

Q takes most of the shared memory. K and V come through a ring of chunks: 64 features of K, or 16 rows of V. What goes
to the peer is on its way while products are in flight: P during the next S, the maximum during P V of own keys.
"""

from functools import reduce
from typing import Any, NamedTuple

from ...tile import (
    WARPGROUP,
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    block_index,
    cluster_rank,
    columns,
    device,
    dot,
    fence_async_proxy,
    full,
    get,
    index,
    maximum,
    minimum,
    opaque,
    operand,
    operand_columns,
    part_sum,
    prefetch_tensor_map,
    put,
    put_in_peer,
    reciprocal,
    release,
    release_in_peer,
    rescaled,
    row_max,
    row_sum,
    save,
    shape,
    stage,
    sync_cluster,
    sync_warpgroup,
    thread_index,
    tma_load,
    tma_load_part,
    tma_store,
    tma_store_wait,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)
from ...words.arguments import Statistic, TmaMatrix
from ...words.numbers import SIDES
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.layouts import DTYPES, sum_type
from ..shared.schedule import place_grouped
from ..shared.softmax import LN_2, logsumexp, softmax_parts
from ..shared.visibility import MASK, has_key_lengths
from ..shared.warps import source_of, warp_specialised
from .forward import REGISTERS
from .forward_steps import ForwardAccumulators, mask_steps
from .forward_tiles import MOST, ROWS, head_dims, is_uneven
from .walk import ConsumerTile, n_block_steps

RANKS, CONSUMERS, TILE_N = 2, 2, 64  # blocks of a cluster; of each of them the consumers, and its keys of a tile
WIDTH, DEPTH = 64, 16  # features of a chunk of K, rows of a chunk of V
PARTS = TILE_N // DEPTH  # chunks of V for the keys of a block
MATRICES = 8  # at a time, if causal: heavy tiles mix with light ones. 1 is up to 5 % slower, 32 up to 18 % (H200)
AHEAD = 5  # products of S that are started before P leaves for the peer: 571 TFLOP/s; 3 562, 1 528 (H200, 16384 tokens)


class ClusterTiles(NamedTuple):
    """A row."""

    stages: int  # of the ring

    tile_m = ROWS * CONSUMERS
    tile_n = TILE_N * RANKS
    unit = "wgmma"


class Stages(NamedTuple):
    """The stages that a consumer is at."""

    Q: Any
    R: Any  # of the ring
    X: Any  # of the peer's P
    M: Any  # of the peer's maximum, and at last of its sum


def hopper_forward_wide(*, dtype, head_dim, head_dim_v, tiles, mask):
    """The kernel for head_dims rounded up to head_dim and head_dim_v, and these ClusterTiles."""
    dtype, ACC, CHUNKS = DTYPES[dtype], sum_type(DTYPES[dtype]), head_dim // WIDTH
    OWN_COLUMNS = -(-head_dim_v // (RANKS * WIDTH)) * WIDTH
    S_TILE, O_TILE = wgmma(TILE_N), wgmma(OWN_COLUMNS)
    VECTOR, SUMS = S_TILE.row_vector(), S_TILE.row_parts()
    shared = SharedMemory()
    SHARED_Q = shared.boxes(ROWS, head_dim, dtype, CONSUMERS)
    SHARED_O, Q_CHUNK = SHARED_Q.of_columns(OWN_COLUMNS), SHARED_Q.parts(WIDTH)
    K_CHUNK = shared.boxes(TILE_N, WIDTH, dtype, tiles.stages)
    V_CHUNK = shared.boxes(DEPTH, OWN_COLUMNS, dtype, tiles.stages, room=MOST, at=K_CHUNK)
    PEERS_P = shared.boxes(ROWS, TILE_N, dtype, CONSUMERS)
    PEERS_MAX = shared.tile(1, ROWS, ACC, 2 * CONSUMERS)        # the next one comes while one may still be read
    Q_PIPELINE, RING = Pipeline.within(shared, SHARED_Q, readers=1), Pipeline.within(shared, K_CHUNK, CONSUMERS)
    P_PIPELINE, MAX_PIPELINE = (
        Pipeline.within(shared, place, readers=1, in_cluster=True) for place in (PEERS_P, PEERS_MAX)
    )
    visible_tiles = n_block_steps(mask, RANKS * TILE_N).visible
    needs_mask, masked = mask_steps(mask, S_TILE, TILE_N, 0, ACC)
    no_max, new_max, exponentials = softmax_parts(ACC)
    TILE_M, ZERO, LN2 = ROWS * CONSUMERS, ACC(0), ACC(LN_2)

    # ------------------------------------------------------------------------------------------------- the producer
    @device
    def load_keys(R, mK, batch, head, tile):
        """K of this block."""
        n0, col = (tile * RANKS + cluster_rank()) * TILE_N, index(0)
        while col < head_dim:
            acquire(R)
            tma_load_part(R, allocate(K_CHUNK, R.index), mK, batch, head, n0, col)
            R, col = advance(R, 1), opaque(col + WIDTH)
        return R

    @device
    def load_values(R, mV, batch, head, tile):
        """Own columns of V, for the keys of this block and then for those of its peer."""
        part = index(0)
        while part < RANKS:
            n0, row = (tile * RANKS + (cluster_rank() ^ part)) * TILE_N, index(0)
            while row < TILE_N:
                acquire(R)
                place, first_own = allocate(V_CHUNK, R.index), cluster_rank() * OWN_COLUMNS
                tma_load_part(R, place, mV, batch, head, n0 + row, first_own)
                R, row = advance(R, 1), opaque(row + DEPTH)
            part = opaque(part + 1)
        return R

    @device
    def load_tiles(mQ, mK, mV, work, group_size, first, end):
        """The producer, one thread: K of a tile comes before V of the last one, as they are read."""
        prefetch_tensor_map(mK)
        prefetch_tensor_map(mV)
        Q, R, consumer = stage(Q_PIPELINE, 0), stage(RING, 0), index(0)
        while consumer < CONSUMERS:
            tma_load(Q, mQ, work.batch, work.head, work.m0 + consumer * ROWS)
            Q, consumer = advance(Q, 1), opaque(consumer + 1)
        head = work.head // group_size
        R, tile = load_keys(R, mK, work.batch, head, first), first + 1
        while tile < end:
            R = load_keys(R, mK, work.batch, head, tile)
            R, tile = load_values(R, mV, work.batch, head, tile - 1), opaque(tile + 1)
        load_values(R, mV, work.batch, head, end - 1)

    # ------------------------------------------------------------------------------------------------ the consumers
    def chunk_steps(left_of, PLACE, numbers, transposed=False):
        """The device function (sums, left, R) that adds products with the chunks after R, whose product is in flight:
        each starts when the chunk is there; when the one before is over, its chunk is released. left_of: (number) ->
        the device function (left) -> the left operand."""

        def then(before, number):
            left_of_chunk = left_of(number)

            @device
            def more(sums, left, R):
                sums, R = before(sums, left, R)
                after = advance(R, 1)
                wait(after)
                chunk = allocate(PLACE, after.index)
                sums = wgmma_wait(dot(sums, left_of_chunk(left), chunk.T if transposed else chunk), 1)
                release(R)
                return sums, after

            return more

        return reduce(then, numbers, nothing)

    @device
    def nothing(sums, left, R):
        return sums, R

    def q_chunk(number):
        @device
        def of_consumer(Q):
            return allocate(Q_CHUNK, Q.index * CHUNKS + number)

        return of_consumer

    def own_part(number):
        @device
        def part(P):
            return operand_columns(P, number, PARTS)

        return part

    def peers_part(number):
        @device
        def part(X):
            return columns(X.tile, number, PARTS)

        return part

    first_q, first_part, ahead = q_chunk(0), own_part(0), min(AHEAD, CHUNKS)
    some_scores, other_scores = (
        chunk_steps(q_chunk, K_CHUNK, range(*some), transposed=True) for some in ((1, ahead), (ahead, CHUNKS))
    )
    more_values, own_values = (chunk_steps(own_part, V_CHUNK, range(first, PARTS)) for first in (1, 0))
    peers_values = chunk_steps(peers_part, V_CHUNK, range(PARTS))

    @device
    def start_scores(Q, R):
        """Of a first chunk, R."""
        wait(R)
        S = dot(S_TILE, first_q(Q), allocate(K_CHUNK, R.index).T)
        return some_scores(S, Q, R)

    @device
    def start_values(O, P, R):
        wait(R)
        O = dot(O, first_part(P), allocate(V_CHUNK, R.index))
        return more_values(O, P, R)

    @device
    def visible(S, tile, mask, number):
        n_block = number * RANKS + cluster_rank()
        return masked(S, tile, mask, n_block) if needs_mask(tile, mask, n_block) else S

    @device
    def send_max(M, S):
        own = row_max(S)
        put_in_peer(M, M.tile.T, own)
        return own

    @device
    def softmax(S, own, M, m, l, scale_log2):
        """P of own keys, m of all, l of own ones, and alpha. own: their maximum, which has been sent."""
        wait(M)
        both = maximum(own, get(M.tile.T, VECTOR))
        m, alpha, zero = new_max(both, m, scale_log2)           # line 13: m_new = max(m, rowmax(S))
        P = exponentials(S, zero, scale_log2)                   # line 12: P = exp(S - m_new)
        return P, m, part_sum(P, l * alpha), alpha              # line 13: l = alpha l + rowsum(P)

    @device
    def send_p(X, P):
        acquire(X)
        put_in_peer(X, X.tile, P)

    @device
    def receive_p(X):
        wait(X)
        fence_async_proxy()

    @device
    def prologue(stages, tile, mask, number, scale_log2):
        """The softmax of the first S."""
        Q, R, X, M = stages
        m, l, O = full(VECTOR, no_max(scale_log2)), full(SUMS, ZERO), full(O_TILE, ZERO)
        wait(Q)
        S, R = start_scores(Q, R)
        S, R = other_scores(S, Q, R)
        S = wgmma_wait(S, 0)
        release(R)
        S = visible(S, tile, mask, number)
        P, m, l, alpha = softmax(S, send_max(M, S), M, m, l, scale_log2)
        return ForwardAccumulators(O, P, m, l, alpha), Stages(Q, advance(R, 1), X, advance(M, CONSUMERS))

    @device
    def step(acc, stages, tile, mask, number, scale_log2):
        """The softmax of a tile, and P V of the tile before."""
        (O, P, m, l, alpha), (Q, R, X, M) = acc, stages
        S, R = start_scores(Q, R)                               # Alg. 2 line 10: S = Q K^T
        O = rescaled(O, alpha)                                  # line 15: O = alpha O
        send_p(X, P)
        S, R = other_scores(S, Q, R)
        O, R = own_values(O, operand(P, PEERS_P), R)            # line 15: O = O + P V, of own keys
        S = visible(wgmma_wait(S, PARTS), tile, mask, number)
        own = send_max(M, S)
        receive_p(X)
        O, R = peers_values(O, X, R)                            # and of the peer's
        P, m, l, alpha = softmax(S, own, M, m, l, scale_log2)
        O = wgmma_wait(O, 0)
        release(R)
        sync_warpgroup()                                        # all have read the peer's P
        release_in_peer(X)
        stages = Stages(Q, advance(R, 1), advance(X, CONSUMERS), advance(M, CONSUMERS))
        return ForwardAccumulators(O, P, m, l, alpha), stages

    @device
    def epilogue(acc, stages, mO, mLse, tile, scale_log2):
        """The last P V, O and lse."""
        (O, P, m, l, alpha), (Q, R, X, M) = acc, stages
        send_p(X, P)
        O, R = start_values(rescaled(O, alpha), operand(P, PEERS_P), R)
        receive_p(X)
        O, _ = peers_values(O, X, R)
        own = row_sum(l)
        put_in_peer(M, M.tile.T, own)
        wait(M)
        total = own + get(M.tile.T, VECTOR)
        if cluster_rank() == 0:
            lse = logsumexp(m * (scale_log2 * LN2), total, LN2)
            save(mLse[tile.batch, tile.head], lse, tile.m0)     # line 16
        O = wgmma_wait(O, 0) * reciprocal(total)                # line 15: O = O / l
        sync_warpgroup()                                        # all have read Q
        staged = allocate(SHARED_O, Q.index)
        put(staged, O)
        fence_async_proxy()
        sync_warpgroup()
        if thread_index() % WARPGROUP == 0:
            tma_store(mO, staged, tile.batch, tile.head, tile.m0, cluster_rank() * OWN_COLUMNS)
            tma_store_wait()

    @device
    def compute(mO, mLse, work, mask, scale_log2, first, end):
        """The consumers, whole warpgroups."""
        consumer, R = warpgroup_index(), stage(RING, 0)
        tile = ConsumerTile(work.batch, work.head, work.m0 + consumer * ROWS, 0, 0, 0, ())
        Q, X, M = stage(Q_PIPELINE, consumer), stage(P_PIPELINE, consumer), stage(MAX_PIPELINE, consumer)
        acc, stages = prologue(Stages(Q, R, X, M), tile, mask, first, scale_log2)
        number = first + 1
        while number < end:
            acc, stages = step(acc, stages, tile, mask, number, scale_log2)
            number = opaque(number + 1)
        epilogue(acc, stages, mO, mLse, tile, scale_log2)

    pipelines = Q_PIPELINE, RING, P_PIPELINE, MAX_PIPELINE
    begin, take_roles = warp_specialised(pipelines, CONSUMERS, REGISTERS[CONSUMERS], compute, load_tiles)

    def kernel(mQ, mK, mV, mO, mLse, mask, group_size, scale_log2, at_once, ascending):
        begin()
        sync_cluster()                                          # the peer's barriers are ready
        batches, heads, seqlen_q = shape(mLse)
        m_blocks = (seqlen_q + TILE_M - 1) // TILE_M
        number, batch, head = place_grouped(block_index() // RANKS, m_blocks, batches * heads, heads, at_once)
        m0 = (number if ascending else m_blocks - 1 - number) * TILE_M              # the heaviest first, if causal
        first, end = visible_tiles(mask, batch, head, m0, minimum(m0 + TILE_M, seqlen_q))
        if first >= end:                                        # nothing is seen: one tile, fully masked
            first, end = index(0), index(1)
        work = ConsumerTile(batch, head, m0, 0, 0, 0, ())
        take_roles((mO, mLse, work, mask, scale_log2, first, end), ((mQ, mK, mV, work, group_size, first, end),))
        sync_cluster()                                          # nothing is on its way to this block

    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, mask=mask, head_dim_v=head_dim_v)
    return source_of(kernel, signature, CONSUMERS, shared, (SHARED_Q, K_CHUNK, V_CHUNK, SHARED_O), cluster=RANKS)


def parameters(work, tiles):
    head_dim, head_dim_v = head_dims(work.problem)
    about = {"dtype": work.problem.dtype.name, "tiles": tiles, "mask": work.mask}
    return about | {"head_dim": head_dim, "head_dim_v": head_dim_v}


def numbers(work, tiles):
    uneven = is_uneven(work)
    return {"at_once": max(MATRICES if uneven else 1, work.problem.group_size), "ascending": int(not uneven)}


SPEC = Spec(
    hopper_forward_wide,
    (TmaMatrix("q"), TmaMatrix("k", "k"), TmaMatrix("v", "k"), TmaMatrix("o"), Statistic("lse"), MASK, "group_size",
     "scale_log2", "at_once", "ascending"),
    tiles=lambda work: [ClusterTiles(stages) for stages in (16, 10, 8)],
    parameters=parameters,
    numbers=numbers,
    blocks=lambda work, tiles, m_blocks, n_blocks: RANKS * work.problem.heads * m_blocks,
    arch="a",
    slices=True,
)  # fmt: skip


def takes(work):
    """Whether O fits into both blocks, the mask is at most a band of whole arrays, and nothing else changes S, P or O.
    """
    (head_dim, head_dim_v), dtype = head_dims(work.problem), work.problem.dtype
    is_band = set(work.mask) <= set(SIDES) and not has_key_lengths(work.mask)
    is_plain = is_band and not (work.score or work.problem.dropout or work.resumes)
    fits = head_dim > MOST and head_dim_v <= RANKS * MOST and work.problem.head_dim_v > 0
    return is_plain and fits and work.dtypes["o"] == dtype

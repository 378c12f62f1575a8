"""Attention forward on Hopper for wide heads, where a block has no registers for all columns of O: Algorithm 2.

Two blocks, a cluster, share a work tile of 128 queries. Of each 128 keys either block computes the scores of its 64,
and the softmax of these with the maximum of both; it sends its P to the other block, its peer, and multiplies both
halves of P by its own half of the columns of V:

    own K -> S -> max -> P ----\\         /---- P <- max <- S <- own K
                   |     |     peer's P      |     |
              O = O + (P, peer's P) V     O = O + (peer's P, P) V          each its own columns of V and of O

Q takes most of the shared memory, so that K and V come through a ring of chunks: of 64 features of K, or of 16 rows of
V. What goes to the peer arrives while products are in flight: the maximum while the first half of P V is, and P while
the next S is.
"""

from functools import reduce
from typing import NamedTuple

import numpy as np

from ...tile import (
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    block_index,
    cluster_rank,
    columns,
    commit_in_peer,
    device,
    dot,
    exp2,
    fence_async_proxy,
    fence_async_proxy_of_peer,
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
    tma_load_part,
    tma_store,
    tma_store_wait,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
    where,
)
from ...tile.layout import WARPGROUP
from ...words.arguments import Statistic, TmaMatrix
from ...words.numbers import SIDES
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.layouts import DTYPES
from ..shared.schedule import place_grouped
from ..shared.softmax import LN_2, SLACK, logsumexp
from ..shared.visibility import MASK
from ..shared.warps import source_of, warp_specialised
from .forward_steps import mask_steps
from .forward_tiles import ROWS, head_dims, is_uneven, matrices_in_l2
from .walk import ConsumerTile, n_block_steps

CONSUMERS, RANKS, TILE_N = 2, 2, 64
REGISTERS = 40, 232
WIDTH, DEPTH = 64, 16  # features of a chunk of K, rows of a chunk of V
KEYS = TILE_N // DEPTH  # chunks of V for the keys of a block


class Row(NamedTuple):
    tile_m: int
    tile_n: int
    stages: int
    unit: str = "wgmma"


def hopper_forward_wide(*, dtype, head_dim, head_dim_v, tiles, mask):
    dtype, ACC, CHUNKS, HALF_V = DTYPES[dtype], np.float32, head_dim // WIDTH, -(-head_dim_v // (2 * WIDTH)) * WIDTH
    S_TILE, O_TILE = wgmma(TILE_N), wgmma(HALF_V)
    VECTOR, SUMS = S_TILE.row_vector(), S_TILE.row_parts()
    shared = SharedMemory()
    SHARED_Q = shared.boxes(ROWS, head_dim, dtype, CONSUMERS, room=HALF_V)
    SHARED_O, Q_CHUNK = SHARED_Q.of_columns(HALF_V), SHARED_Q.parts(WIDTH)
    K_CHUNK = shared.boxes(TILE_N, WIDTH, dtype, tiles.stages)
    V_CHUNK = shared.boxes(DEPTH, HALF_V, dtype, tiles.stages, room=4 * WIDTH, at=K_CHUNK)
    PEERS_P = shared.boxes(ROWS, TILE_N, dtype, CONSUMERS)
    PEERS_MAX = shared.tile(1, ROWS, ACC, 2 * CONSUMERS)       # one is written while the last one may be read
    Q_PIPELINE = Pipeline.within(shared, SHARED_Q, readers=1)
    RING = Pipeline.within(shared, K_CHUNK, CONSUMERS)
    P_PIPELINE = Pipeline.within(shared, PEERS_P, readers=1, in_cluster=True)
    MAX_PIPELINE = Pipeline.within(shared, PEERS_MAX, readers=1, in_cluster=True)
    visible_tiles = n_block_steps(mask, RANKS * TILE_N).visible
    needs_mask, masked = mask_steps(mask, S_TILE, TILE_N, 0, ACC)
    TILE_M, ZERO, LN2, LEAST = ROWS * CONSUMERS, ACC(0), ACC(LN_2), ACC(np.finfo(ACC).min * 2.0**-28)

    @device
    def load_keys(R, mK, work, number):
        """The K of this block."""
        n0, col = (number * RANKS + cluster_rank()) * TILE_N, index(0)
        while col < CHUNKS * WIDTH:
            acquire(R)
            tma_load_part(R, allocate(K_CHUNK, R.index), mK, work.batch, work.head, n0, col)
            R, col = advance(R, 1), opaque(col + WIDTH)
        return R

    @device
    def load_values(R, mV, work, number):
        """The V of the keys of this block, then of those of its peer."""
        half = index(0)
        while half < RANKS:
            n0, row = (number * RANKS + (cluster_rank() ^ half)) * TILE_N, index(0)
            while row < TILE_N:
                acquire(R)
                place = allocate(V_CHUNK, R.index)
                tma_load_part(R, place, mV, work.batch, work.head, n0 + row, cluster_rank() * HALF_V)
                R, row = advance(R, 1), opaque(row + DEPTH)
            half = opaque(half + 1)
        return R

    @device
    def load_all(mQ, mK, mV, work, group_size, first, end):
        """The producer, one thread."""
        prefetch_tensor_map(mK)
        prefetch_tensor_map(mV)
        Q, R, consumer = stage(Q_PIPELINE, 0), stage(RING, 0), index(0)
        while consumer < CONSUMERS:
            place = allocate(SHARED_Q, Q.index)
            tma_load_part(Q, place, mQ, work.batch, work.head, work.m0 + consumer * ROWS, 0)
            Q, consumer = advance(Q, 1), opaque(consumer + 1)
        of_keys = ConsumerTile(work.batch, work.head // group_size, work.m0, 0, 0, 0, ())
        R, number = load_keys(R, mK, of_keys, first), first + 1
        while number < end:
            R = load_keys(R, mK, of_keys, number)
            R = load_values(R, mV, of_keys, number - 1)
            number = opaque(number + 1)
        load_values(R, mV, of_keys, end - 1)

    def chunk_step(left_of, PLACE, first, end, transposed=False):
        """The device function (sums, left, R, done) that adds the products with some chunks of the ring: each waits for
        a chunk, starts a product and releases the chunk of the product before, `done`."""

        def then(before, number):
            left_of_chunk = left_of(number)

            @device
            def more(sums, left, R, done):
                sums, R, done = before(sums, left, R, done)
                wait(R)
                chunk = allocate(PLACE, R.index)
                sums = wgmma_wait(dot(sums, left_of_chunk(left), chunk.T if transposed else chunk), 1)
                release(done)
                return sums, advance(R, 1), advance(done, 1)

            return more

        @device
        def nothing(sums, left, R, done):
            return sums, R, done

        return reduce(then, range(first, end), nothing)

    def q_chunk(number):
        @device
        def of_consumer(Q):
            return allocate(Q_CHUNK, Q.index * CHUNKS + number)

        return of_consumer

    def own_part(number):
        @device
        def part(P):
            return operand_columns(P, number, KEYS)

        return part

    def peers_part(number):
        @device
        def part(X):
            return columns(X.tile, number, KEYS)

        return part

    first_q, first_part = q_chunk(0), own_part(0)
    more_scores = chunk_step(q_chunk, K_CHUNK, 1, CHUNKS, transposed=True)
    more_values, peers_values = chunk_step(own_part, V_CHUNK, 1, KEYS), chunk_step(peers_part, V_CHUNK, 0, KEYS)
    own_values = chunk_step(own_part, V_CHUNK, 0, KEYS)

    @device
    def first_scores(Q, R):
        wait(R)
        return dot(S_TILE, first_q(Q), allocate(K_CHUNK, R.index).T)            # Alg. 2 line 10: S = Q K^T

    @device
    def send_max(S, M):
        """The maximum of own scores, to the peer."""
        own = row_max(S)
        put_in_peer(M.tile.T, own)
        sync_warpgroup()
        commit_in_peer(M)
        return own

    @device
    def softmax(S, own, M, m, l, scale_log2):
        """The softmax of own scores: P, m, l, alpha."""
        wait(M)
        m_new = maximum(maximum(own, get(M.tile.T, VECTOR)), m)
        m_new = where((m_new - m) * scale_log2 > SLACK, m_new, m)                   # line 13
        alpha = exp2((m - m_new) * scale_log2)
        P = exp2(S * scale_log2 - m_new * scale_log2)                               # line 12
        return operand(P, PEERS_P), P, m_new, part_sum(P, l * alpha), alpha

    @device
    def send(P, X):
        """P, to the peer."""
        acquire(X)
        put_in_peer(X.tile, P)
        fence_async_proxy_of_peer()
        sync_warpgroup()
        commit_in_peer(X)

    @device
    def visible_scores(S, tile, mask, number):
        n_block = number * RANKS + cluster_rank()
        if needs_mask(tile, mask, n_block):
            S = masked(S, tile, mask, n_block)
        return S

    @device
    def compute(mO, mLse, tile, mask, scale_log2, first, end):
        """The consumers, whole warpgroups."""
        consumer = warpgroup_index()
        tile = ConsumerTile(tile.batch, tile.head, tile.m0 + consumer * ROWS, 0, 0, 0, ())
        Q, R = stage(Q_PIPELINE, consumer), stage(RING, 0)
        X, M = stage(P_PIPELINE, consumer), stage(MAX_PIPELINE, consumer)
        m, l, O = full(VECTOR, LEAST), full(SUMS, ZERO), full(O_TILE, ZERO)
        wait(Q)
        S = first_scores(Q, R)
        S, R, done = more_scores(S, Q, advance(R, 1), R)
        S = wgmma_wait(S, 0)
        release(done)
        S = visible_scores(S, tile, mask, first)
        own = send_max(S, M)
        P, P_f32, m, l, alpha = softmax(S, own, M, m, l, scale_log2)
        M, number = advance(M, CONSUMERS), first + 1
        while number < end:
            S = first_scores(Q, R)
            send(P_f32, X)
            O = rescaled(O, alpha)                              # line 15: O = alpha O
            S, R, done = more_scores(S, Q, advance(R, 1), R)
            O, R, done = own_values(O, P, R, done)
            S = visible_scores(wgmma_wait(S, 1), tile, mask, number)
            own = send_max(S, M)
            wait(X)
            O, R, done = peers_values(O, X, R, done)
            P, P_f32, m, l, alpha = softmax(S, own, M, m, l, scale_log2)
            O = wgmma_wait(O, 0)
            release(done)
            release_in_peer(X)
            X, M, number = advance(X, CONSUMERS), advance(M, CONSUMERS), opaque(number + 1)
        send(P_f32, X)
        O = rescaled(O, alpha)
        wait(R)
        O = dot(O, first_part(P), allocate(V_CHUNK, R.index))   # line 15: O = O + P V
        O, R, done = more_values(O, P, advance(R, 1), R)
        wait(X)
        O, R, done = peers_values(O, X, R, done)
        l = row_sum(l)
        put_in_peer(M.tile.T, l)
        sync_warpgroup()
        commit_in_peer(M)
        wait(M)
        total = l + get(M.tile.T, VECTOR)
        lse = logsumexp(m * (scale_log2 * LN2), total, LN2)
        if cluster_rank() == 0:
            save(mLse[tile.batch, tile.head], lse, tile.m0)     # line 16
        O = wgmma_wait(O, 0)
        O = O * reciprocal(total)                               # line 15: O = O / l
        sync_warpgroup()                                        # all have read Q
        staged = allocate(SHARED_O, consumer)
        put(staged, O)
        fence_async_proxy()
        sync_warpgroup()
        if thread_index() == consumer * WARPGROUP:
            tma_store(mO, staged, tile.batch, tile.head, tile.m0, cluster_rank() * HALF_V)
            tma_store_wait()

    pipelines = Q_PIPELINE, RING, P_PIPELINE, MAX_PIPELINE
    begin, take_roles = warp_specialised(pipelines, CONSUMERS, REGISTERS, compute, load_all)

    def kernel(mQ, mK, mV, mO, mLse, mask, group_size, scale_log2, at_once, ascending):
        begin()
        sync_cluster()
        batches, heads, seqlen_q = shape(mLse)
        m_blocks = (seqlen_q + TILE_M - 1) // TILE_M
        number, batch, head = place_grouped(block_index() // RANKS, m_blocks, batches * heads, heads, at_once)
        m_block = number if ascending else m_blocks - 1 - number                    # the heaviest first, if causal
        m0 = m_block * TILE_M
        first, end = visible_tiles(mask, batch, head, m0, minimum(m0 + TILE_M, seqlen_q))
        if first >= end:                                        # nothing is seen: one tile, fully masked
            first, end = index(0), index(1)
        tile = ConsumerTile(batch, head, m0, 0, 0, 0, ())
        take_roles((mO, mLse, tile, mask, scale_log2, first, end), ((mQ, mK, mV, tile, group_size, first, end),))
        sync_cluster()                                          # the peer may still write here

    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, mask=mask, head_dim_v=head_dim_v)
    return source_of(kernel, signature, CONSUMERS, shared, (SHARED_Q, K_CHUNK, V_CHUNK, SHARED_O), cluster=RANKS)


SPEC = Spec(
    hopper_forward_wide,
    (TmaMatrix("q"), TmaMatrix("k", "k"), TmaMatrix("v", "k"), TmaMatrix("o"), Statistic("lse"), MASK, "group_size",
     "scale_log2", "at_once", "ascending"),
    tiles=lambda work: (Row(ROWS * CONSUMERS, RANKS * TILE_N, 10), Row(ROWS * CONSUMERS, RANKS * TILE_N, 8)),
    parameters=lambda work, tiles: {
        "dtype": work.problem.dtype.name, "tiles": tiles, "mask": work.mask,
        **dict(zip(("head_dim", "head_dim_v"), head_dims(work.problem))),
    },
    numbers=lambda work, tiles: {
        "at_once": max(matrices_in_l2(work) if work.mask else 1, work.problem.group_size),
        "ascending": int(not is_uneven(work)),
    },
    blocks=lambda work, tiles, m_blocks, n_blocks: RANKS * work.problem.heads * m_blocks,
    arch="a",
    slices=True,
)  # fmt: skip


def takes(work):
    """Whether the mask is a band at most, and nothing else changes S or P."""
    return set(work.mask) <= set(SIDES) and not (work.score or work.problem.dropout or work.resumes)

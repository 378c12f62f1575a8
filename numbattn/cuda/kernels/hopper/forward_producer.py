"""The producer of `hopper_forward`, two threads: a scheduler that draws work tiles, and a loader of K and V. For
`hopper_tangent` they also move tangents."""

from functools import reduce
from typing import NamedTuple

from ...tile import (
    acquire,
    advance,
    allocate,
    block_index,
    commit,
    device,
    grid_size,
    index,
    minimum,
    opaque,
    prefetch_tensor_map,
    read,
    release,
    stage,
    tma_load_part,
    tma_store,
    tma_store_wait,
    wait,
)
from ..shared.schedule import finish, next_number, place_grouped
from ..shared.segments import count_step, mask_within_step, slot_step
from ..shared.visibility import PACKED
from .forward_steps import record_steps, share_steps
from .forward_tiles import ROWS
from .tma_bias import load_bias_step
from .walk import WorkTile, known_steps, n_block_steps

BY_CONSUMER = -1  # in place of a row: TMA does not store this O
TILES_AHEAD = 4  # stages of the pipeline of work tiles


class MovedTiles(NamedTuple):
    """Places of the tiles that TMA moves, one for each matrix: those that fill a stage of Q, K and V, and those stored.
    """

    Q: tuple
    K: tuple
    V: tuple
    O: tuple  # in the buffers of Q; empty if O is not staged


@device
def nothing(stage, matrices, at):
    pass


def each(step, places):
    """The device function (stage, matrices, at) that calls step(stage, tile, matrix, at) for each place and its matrix.
    """

    def then(before, numbered):
        NUMBER, PLACE = numbered

        @device
        def both(stage, matrices, at):
            before(stage, matrices, at)
            step(stage, allocate(PLACE, stage.index), matrices[NUMBER], at)

        return both

    return reduce(then, enumerate(places), nothing)


@device
def prefetch(stage, tile, matrix, at):
    prefetch_tensor_map(matrix)


@device
def load(stage, tile, matrix, at):
    batch, head, row = at
    tma_load_part(stage, tile, matrix, batch, head, row, 0)


@device
def store(stage, tile, matrix, at):
    batch, head, row = at
    tma_store(matrix, tile, batch, head, row)


def producer_steps(pipelines, moved, SHARED_B, mask, tile_n, consumers):
    """Device functions of the scheduler and of the loader. moved: see MovedTiles; SHARED_B: see `score_tile_steps`."""
    Q_PIPELINE, K_PIPELINE, V_PIPELINE, O_PIPELINE, WORK_PIPELINE = pipelines
    TILE_M, TILE_N, CONSUMERS, Q_STAGES = ROWS * consumers, tile_n, consumers, Q_PIPELINE.tile.stages
    HAS_TMA_BIAS, IS_PACKED, IS_STAGED = SHARED_B.stages > 0, PACKED in mask, bool(moved.O)
    (to_record, from_record, NO_WORK), tile_of = record_steps(mask), slot_step(mask, "q", TILE_M, by_warp=False)
    tiles_of, mask_of = count_step(mask, TILE_M), mask_within_step(mask, ROWS)
    visible_blocks, next_n_block = n_block_steps(mask, tile_n, consumers)
    share_of, is_whole = share_steps(mask, consumers)
    known_of, next_known = known_steps(mask, tile_n, consumers, by_consumer=False)
    load_q, load_k, load_v = (each(load, places) for places in (moved.Q, moved.K, moved.V))
    prefetch_q, prefetch_k, prefetch_v, prefetch_o = (each(prefetch, places) for places in moved)
    store_all = each(store, moved.O)

    @device
    def work_tile(number, mask, seqlen_q, m_blocks, heads, matrices, at_once, heads_per_tile, ascending):
        """A work tile, and how many queries are left from its first one on: none if the slot has no tile."""
        tile, batch, head = place_grouped(number, m_blocks, matrices, heads, at_once)
        head = head * heads_per_tile
        tile = tile if ascending else m_blocks - 1 - tile       # the heaviest first, if causal
        segment, m_block = tile_of(mask.packing, batch, tile, seqlen_q)
        mask, m0 = mask_of(mask, segment), m_block * TILE_M
        first, end = visible_blocks(mask, batch, head, m0, minimum(m0 + TILE_M, segment.queries))
        n_block = next_n_block(WorkTile(batch, head, m_block, first, end, segment), mask, first)
        if n_block >= end:                                      # nothing is seen: one tile, fully masked
            n_block, end = 0, 1
        return WorkTile(batch, head, m_block, n_block, end, segment), segment.queries - m0

    @device
    def store_o(Q, count, mO):
        """TMA-store the O, if any, that is staged in the buffer for tile number `count` of Q."""
        acquire(Q)
        if IS_STAGED and count >= Q_STAGES:
            batch, head, row = read(stage(O_PIPELINE, Q.index))
            if not IS_PACKED or row != BY_CONSUMER:
                store_all(Q, mO, (batch, head, row))
                tma_store_wait()

    @device
    def schedule(mQ, mO, mask, counters, seqlen_q, heads, matrices, at_once, heads_per_tile, ascending):
        """The scheduler, one thread of the producer: draws work tiles, TMA-loads their Q, TMA-stores their O.

        mQ, mO: tuples of matrices, as are mK and mV of the loader."""
        W, Q, count = stage(WORK_PIPELINE, 0), stage(Q_PIPELINE, 0), index(0)
        prefetch_q(Q, mQ, ())
        prefetch_o(Q, mO, ())
        m_blocks = tiles_of(mask.packing, seqlen_q)
        heads, matrices = heads // heads_per_tile, matrices // heads_per_tile
        number = block_index()
        while number < m_blocks * matrices:
            work, left = work_tile(
                number, mask, seqlen_q, m_blocks, heads, matrices, at_once, heads_per_tile, ascending
            )  # fmt: skip
            if IS_PACKED and left <= 0:
                number = next_number(counters, grid_size())
                continue
            acquire(W)
            commit(W, to_record(work))
            W = advance(W, 1)
            consumer = index(0)
            while consumer < CONSUMERS:
                head, m0 = share_of(work, consumer, heads_per_tile)
                row = work.segment.first_query + m0
                stored_at = row if is_whole(work.segment, m0) else BY_CONSUMER
                store_o(Q, count, mO)
                commit(stage(O_PIPELINE, Q.index), (work.batch, head, stored_at))
                load_q(Q, mQ, (work.batch, head, row))
                Q, count = advance(Q, 1), count + 1
                consumer = opaque(consumer + 1)
            number = next_number(counters, grid_size())
        acquire(W)
        commit(W, NO_WORK)
        finish(counters, grid_size())
        end = count + Q_STAGES
        while count < end:
            store_o(Q, count, mO)
            Q, count = advance(Q, 1), opaque(count + 1)

    @device
    def bias_of(consumer, where):
        work, n0, heads_per_tile = where
        head, m0 = share_of(work, consumer, heads_per_tile)
        return work.batch, head, work.segment.first_query + m0, n0

    load_bias = load_bias_step(SHARED_B, consumers, bias_of)

    @device
    def load_keys(mK, mV, biases, mask, group_size, heads_per_tile):
        """The loader, one thread of the producer: TMA-loads K and V of the work tiles as stages become free."""
        W, K, V = stage(WORK_PIPELINE, 0), stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
        prefetch_k(K, mK, ())
        prefetch_v(V, mV, ())
        if HAS_TMA_BIAS:
            prefetch_tensor_map(biases[0])
        while True:
            wait(W)
            work = from_record(read(W))
            release(W)
            W = advance(W, 1)
            if work.n_blocks == 0:
                break
            n_block, head_k = work.n_block, work.head // group_size
            known = known_of(work, mask, n_block)
            while n_block < work.n_blocks:
                n0 = work.segment.first_key + n_block * TILE_N
                acquire(K)
                load_k(K, mK, (work.batch, head_k, n0))
                if HAS_TMA_BIAS:
                    load_bias(K, biases, (work, n0, heads_per_tile))
                K = advance(K, 1)
                acquire(V)
                load_v(V, mV, (work.batch, head_k, n0))
                V = advance(V, 1)
                n_block, known = next_known(work, mask, n_block, known)

    return schedule, load_keys

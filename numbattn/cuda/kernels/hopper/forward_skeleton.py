"""The skeleton of `hopper_forward` and `hopper_tangent`, persistent kernels that keep queries.

A block draws work tiles, each some queries of some heads, until none is left. The last warpgroup is the producer. One
of its threads, the scheduler, draws work tiles, TMA-loads their Q and TMA-stores their O; another one, the loader,
TMA-loads the tiles of K and V. The other warpgroups are consumers, each of which computes its share of each work tile:
what that is, the kernel says by a device function, `attend`.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from ...tile import (
    Pipeline,
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
    sync_warp,
    tma_load_part,
    tma_store,
    tma_store_wait,
    wait,
    warpgroup_index,
)
from ..shared.schedule import finish, next_number, place_grouped
from ..shared.segments import Segment, count_step, mask_within_step, slot_step, whole
from ..shared.visibility import FARTHEST, PACKED
from .forward_steps import key_tile_steps
from .forward_tiles import ROWS
from .tma_bias import load_bias_step
from .walk import ConsumerTile, WorkTile, known_steps, n_block_steps

BY_CONSUMER = -1  # in place of a row: TMA does not store this O
TILES_AHEAD = 4  # stages of the pipeline of work tiles


class MovedTiles(NamedTuple):
    """One of each matrix that TMA moves: the places of tiles that fill a stage of Q, K and V, and of those stored; or
    the matrices themselves."""

    Q: tuple
    K: tuple
    V: tuple
    O: tuple  # in the buffers of Q; empty if O is not staged


class ProducerArguments(NamedTuple):
    """What the scheduler and the loader need of the kernel's arguments."""

    matrices: MovedTiles
    biases: tuple  # whose tiles come with those of K
    mask: Any
    counters: Any
    seqlen_q: Any
    heads: Any
    count: Any  # of matrices
    group_size: Any
    at_once: Any  # see `schedule.place_grouped`
    heads_per_tile: Any  # how many query heads of a group are packed into a work tile, to share the tiles of K and V
    ascending: Any  # whether the first tiles of queries come first, or the last


class Pipelines(NamedTuple):
    """The pipelines of the kernel."""

    Q: Pipeline  # O is staged in its buffers
    K: Pipeline
    V: Pipeline
    O: Pipeline  # where to store the O in a buffer of Q
    work: Pipeline  # tiles, as records


class Skeleton(NamedTuple):
    """A kernel without what it computes."""

    pipelines: Pipelines
    producers: tuple  # the loader and the scheduler, device functions (ProducerArguments)
    consumer_of: Callable  # (within, attend) -> the consumers, a device function (arguments)
    steps: tuple  # of consumers: `receive`, `is_whole` of `share_steps`, `clear_beyond` and `skip` of `key_tile_steps`


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


def record_steps(mask):
    """Device functions: a WorkTile as integers, and back; and the integers that mean no work."""

    @device
    def numbers(work):
        return work.batch, work.head, work.m_block, work.n_block, work.n_blocks

    @device
    def from_numbers(record):
        batch, head, m_block, n_block, n_blocks = record
        return WorkTile(batch, head, m_block, n_block, n_blocks, whole(index(FARTHEST)))

    @device
    def packed_numbers(work):
        at = work.segment
        return (
            work.batch, work.head, work.m_block, work.n_block, work.n_blocks,
            at.first_query, at.queries, at.first_key, at.keys,
        )  # fmt: skip

    @device
    def from_packed_numbers(record):
        batch, head, m_block, n_block, n_blocks, first_query, queries, first_key, keys = record
        segment = Segment(first_query, queries, first_key, keys, index(0))
        return WorkTile(batch, head, m_block, n_block, n_blocks, segment)

    if PACKED in mask:
        return packed_numbers, from_packed_numbers, (0,) * 9
    return numbers, from_numbers, (0,) * 5


def share_steps(mask, consumers):
    """Device functions for a consumer's share of a WorkTile: (work, consumer, heads_per_tile) -> its head and its first
    query; (segment, m0) -> whether all of its rows are queries of the segment: else a TMA store would write to the next
    segment."""
    TILE_M, IS_PACKED = ROWS * consumers, PACKED in mask

    @device
    def share_of(work, consumer, heads_per_tile):
        head, row = consumer, index(0)                          # consumers take adjacent heads first, then queries
        while head >= heads_per_tile:                           # a division would take more registers
            head, row = head - heads_per_tile, row + 1
        return work.head + head, work.m_block * TILE_M + row * ROWS

    @device
    def is_whole(segment, m0):
        return not IS_PACKED or m0 + ROWS <= segment.queries

    return share_of, is_whole


def skeleton_of(shared, Q, K, V, moved, SHARED_B, mask, tile_n, consumers):
    """The Skeleton for these places. Q, K, V: of stages, of which `moved` are parts; SHARED_B: see `score_tile_steps`.
    """
    pipelines = pipelines_of(shared, Q, K, V, moved, SHARED_B, mask, consumers)
    producers = producer_steps(pipelines, moved, SHARED_B, mask, tile_n, consumers)
    Q_PIPELINE, K_PIPELINE, V_PIPELINE, _, WORK_PIPELINE = pipelines
    (_, from_record, _), (share_of, is_whole) = record_steps(mask), share_steps(mask, consumers)
    (clear_beyond, skip, n_block_range), CONSUMERS = key_tile_steps(mask, tile_n, consumers), consumers

    @device
    def receive(W, heads_per_tile):
        """The share of this consumer in the next work tile."""
        wait(W)
        work = from_record(read(W))
        head, m0 = share_of(work, warpgroup_index(), heads_per_tile)
        return ConsumerTile(work.batch, head, m0, work.m_block, work.n_block, work.n_blocks, work.segment)

    def consumer_of(within, attend):
        """within: the device function (args, tile) -> the arguments with what belongs to a tile; attend: (W, Q, K, V,
        tile, first, end, known, args) -> the next K and V, and the next tile, received. It reads the tiles of keys
        [first, end) of the stages K and V, skips those after them, and releases Q and W. known: see `KnownSteps`."""

        @device
        def compute(args):
            """The consumers, whole warpgroups."""
            W, K, V = stage(WORK_PIPELINE, 0), stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
            Q = stage(Q_PIPELINE, warpgroup_index())
            tile = receive(W, args.heads_per_tile)
            while tile.n_blocks > 0:
                here = within(args, tile)
                first, end, known = n_block_range(tile, here.mask)
                K, V, n_block, known = skip(K, V, tile, here.mask, tile.n_block, known, first)
                K, V, tile = attend(W, Q, K, V, tile, n_block, end, known, here)
                W, Q = advance(W, 1), advance(Q, CONSUMERS)
                sync_warp()                                     # reconverge: the first thread did more

        return compute

    return Skeleton(pipelines, producers, consumer_of, (receive, is_whole, clear_beyond, skip))


def pipelines_of(shared, Q, K, V, moved, SHARED_B, mask, consumers):
    """The Pipelines of these places."""
    _, _, NO_WORK = record_steps(mask)
    O, work = shared.tile(1, 3, np.int32, Q.stages), shared.tile(1, len(NO_WORK), np.int32, TILES_AHEAD)
    return Pipelines(
        Q=Pipeline.within(shared, Q, readers=1, fills=len(moved.Q)),
        K=Pipeline.within(shared, K, consumers, fills=len(moved.K) + consumers * (SHARED_B.stages > 0)),
        V=Pipeline.within(shared, V, consumers, fills=max(len(moved.V), 1)),
        O=Pipeline.within(shared, O, readers=1),
        work=Pipeline.within(shared, work, consumers + 1),
    )


def producer_steps(pipelines, moved, SHARED_B, mask, tile_n, consumers):
    """Device functions of the loader and of the scheduler, of ProducerArguments."""
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
    def work_tile(number, m_blocks, heads, count, args):
        """A work tile, and how many queries are left from its first one on: none if the slot has no tile."""
        tile, batch, head = place_grouped(number, m_blocks, count, heads, args.at_once)
        head = head * args.heads_per_tile
        tile = tile if args.ascending else m_blocks - 1 - tile  # the heaviest first, if causal
        segment, m_block = tile_of(args.mask.packing, batch, tile, args.seqlen_q)
        mask, m0 = mask_of(args.mask, segment), m_block * TILE_M
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
    def schedule(args):
        """The scheduler, one thread of the producer."""
        W, Q, count = stage(WORK_PIPELINE, 0), stage(Q_PIPELINE, 0), index(0)
        mQ, _, _, mO = args.matrices
        prefetch_q(Q, mQ, ())
        prefetch_o(Q, mO, ())
        m_blocks, heads_per_tile = tiles_of(args.mask.packing, args.seqlen_q), args.heads_per_tile
        heads, matrices = args.heads // heads_per_tile, args.count // heads_per_tile
        number = block_index()
        while number < m_blocks * matrices:
            work, left = work_tile(number, m_blocks, heads, matrices, args)
            if IS_PACKED and left <= 0:
                number = next_number(args.counters, grid_size())
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
            number = next_number(args.counters, grid_size())
        acquire(W)
        commit(W, NO_WORK)
        finish(args.counters, grid_size())
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
    def load_keys(args):
        """The loader, one thread of the producer."""
        W, K, V = stage(WORK_PIPELINE, 0), stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
        _, mK, mV, _ = args.matrices
        prefetch_k(K, mK, ())
        prefetch_v(V, mV, ())
        if HAS_TMA_BIAS:
            prefetch_tensor_map(args.biases[0])
        while True:
            wait(W)
            work = from_record(read(W))
            release(W)
            W = advance(W, 1)
            if work.n_blocks == 0:
                break
            n_block, head_k = work.n_block, work.head // args.group_size
            known = known_of(work, args.mask, n_block)
            while n_block < work.n_blocks:
                n0 = work.segment.first_key + n_block * TILE_N
                acquire(K)
                load_k(K, mK, (work.batch, head_k, n0))
                if HAS_TMA_BIAS:
                    load_bias(K, args.biases, (work, n0, args.heads_per_tile))
                K = advance(K, 1)
                acquire(V)
                load_v(V, mV, (work.batch, head_k, n0))
                V = advance(V, 1)
                n_block, known = next_known(work, args.mask, n_block, known)

    return load_keys, schedule

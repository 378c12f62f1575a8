"""Which tiles of keys a block of `hopper_backward_kv` computes, and its producer, which loads them.

The kernel is persistent: the first queries of the next tile of keys, then its K and V, are on their way while the last
dQ, dK and dV are stored. At head_dim 64 this is 8 to 11 % faster than a block for each tile up to seqlen 1024, 4 % at
4096 (H200).

The producer has few registers, so that two of its threads share the work. The scheduler draws tiles of keys and loads
K, V and dO, the second thread Q, lse and delta. A tile is drawn when all dO of the one before are on their way: drawn
earlier, it would wait for this block while others run out of work. Consumers, and the warps that help them, receive
tiles as records.
"""

from typing import Any, NamedTuple

import numpy as np

from ...tile import (
    WARP,
    Pipeline,
    acquire,
    advance,
    allocate,
    alongside,
    block_index,
    bulk_load,
    commit,
    device,
    grid_size,
    index,
    opaque,
    prefetch_tensor_map,
    read,
    release,
    shape,
    stage,
    sync_warpgroup,
    tma_load,
    wait,
)
from ..shared.query_tiles import key_tile_step, numbered_keys_steps
from ..shared.schedule import finish, next_number
from ..shared.segments import Segment, mask_within_step, whole
from ..shared.visibility import PACKED
from .backward_steps import ROWS


class ProducerArguments(NamedTuple):
    """What the producer needs of the kernel's arguments."""

    mQ: Any
    mK: Any
    mV: Any
    mDO: Any
    biases: Any  # whose tiles come with those of Q
    mLse: Any
    mDelta: Any
    mDK: Any
    mask: Any
    counters: Any
    group_size: Any
    at_once: Any  # see `schedule.place_grouped`


def record_steps(mask, tile_n):
    """Device functions: a KeyTile as integers; and back, (record, mDK, mask, group_size) -> the KeyTile, and the mask
    within its segment."""
    key_tile, mask_of = key_tile_step(tile_n), mask_within_step(mask)

    @device
    def numbers(tile):
        return tile.batch, tile.head_k, tile.n_block

    @device
    def segment_of(record, mDK):
        return whole(shape(mDK)[2])

    @device
    def packed_numbers(tile):
        at = tile.segment
        return (
            tile.batch, tile.head_k, tile.n_block,
            at.first_query, at.queries, at.first_key, at.keys, at.first_padded_row,
        )  # fmt: skip

    @device
    def packed_segment_of(record, mDK):
        return Segment(record[3], record[4], record[5], record[6], record[7])

    to_record, segment = (packed_numbers, packed_segment_of) if PACKED in mask else (numbers, segment_of)

    @device
    def from_record(record, mDK, mask, group_size):
        here = segment(record, mDK)
        return key_tile(record[0], record[1], record[2], here, group_size), mask_of(mask, here)

    return to_record, from_record


def no_tile(mask):
    """The record that means that there is no tile left."""
    return (-1,) * (8 if PACKED in mask else 3)


def pipeline_of_tiles(shared, mask, readers):
    """The pipeline of tiles of keys, as records, of one stage, so that its rounds are those of K and V. readers: how
    many warpgroups and warps receive them."""
    return Pipeline.within(shared, shared.tile(1, len(no_tile(mask)), np.int32), readers)


@device
def is_tile(record):
    return record[0] >= 0


@device
def receive(W):
    """The record of the next tile of keys, for a consumer."""
    wait(W)
    record = read(W)
    sync_warpgroup()                                            # all have read it
    release(W)
    return record


def producer_steps(pipelines, tiles, mask, tile_n, first_queries, next_queries, load_biases, B_PIPELINE, in_turn):
    """Device functions of the producer's threads, of ProducerArguments. tiles: the pipeline of tiles of keys. in_turn:
    whether a tile waits for those drawn before it, which then all have to be drawn, the first ones too."""
    Q_PIPELINE, K_PIPELINE, V_PIPELINE, DO_PIPELINE, SHARED_LSE, SHARED_DELTA = pipelines
    IN_TURN = in_turn
    TILES, TILE_M, PARTS = tiles, Q_PIPELINE.tile.rows, K_PIPELINE.tile.stages
    (to_record, from_record), mask_of, NO_TILE = record_steps(mask, tile_n), mask_within_step(mask), no_tile(mask)
    count_of, keys_of = numbered_keys_steps(mask, tile_n, by_warp=False, staggered=in_turn)

    @device
    def load_parts(X, matrix, tile):
        """The tile of K or V, a part for each consumer."""
        first, part = tile.segment.first_key + tile.first, index(0)
        while part < PARTS:
            mine = advance(X, part)
            acquire(mine)
            tma_load(mine, matrix, tile.batch, tile.head_k, first + part * ROWS)
            part = opaque(part + 1)                             # not unrolled: registers are few

    @device
    def load_statistic(Q, places, statistic, tile, at, m0):
        batch, head = opaque(tile.batch), opaque(at.head)       # else their products with strides are kept in registers
        bulk_load(Q, allocate(places, Q.index), statistic[batch, head], tile.segment.first_padded_row + m0)

    @device
    def draw(counters):
        if IN_TURN:
            return next_number(counters, 0)
        return next_number(counters, grid_size())

    @device
    def schedule(args):
        """Draw tiles of keys, and load K and V, then dO and a bias of the queries."""
        prefetch_tensor_map(args.mK)
        prefetch_tensor_map(args.mV)
        prefetch_tensor_map(args.mDO)
        W, K, V = stage(TILES, 0), stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
        dO, B, number = stage(DO_PIPELINE, 0), stage(B_PIPELINE, 0), index(block_index())
        if IN_TURN:
            number = draw(args.counters)
        while number < count_of(args.mLse, args.mDK, args.mask, args.at_once):
            tile = keys_of(number, args.mLse, args.mDK, args.mask, args.group_size, args.at_once)
            if tile.first < tile.end:                           # else a slot without a tile
                acquire(W)
                commit(W, to_record(tile))
                load_parts(K, args.mK, tile)
                load_parts(V, args.mV, tile)
                K, mask = advance(K, PARTS), mask_of(args.mask, tile.segment)
                V, W = alongside(V, K), alongside(W, K)
                at = first_queries(mask, tile)
                while at.m_block < at.m_blocks:
                    row = tile.segment.first_query + at.m_block * TILE_M
                    acquire(dO)
                    tma_load(dO, args.mDO, tile.batch, at.head, row)
                    B = load_biases(args.biases, tile, at, row, B)
                    dO, at = advance(dO, 1), next_queries(mask, tile, at)
            number = draw(args.counters)
        acquire(W)
        commit(W, NO_TILE)
        finish(args.counters, grid_size())

    @device
    def load_queries(args):
        """Load Q, lse and delta."""
        prefetch_tensor_map(args.mQ)
        W, Q = stage(TILES, 0), stage(Q_PIPELINE, 0)
        while True:
            wait(W)
            record = read(W)
            release(W, WARP)
            W = advance(W, 1)
            if not is_tile(record):
                break
            tile, mask = from_record(record, args.mDK, args.mask, args.group_size)
            at = first_queries(mask, tile)
            while at.m_block < at.m_blocks:
                m0 = at.m_block * TILE_M
                acquire(Q)
                tma_load(Q, args.mQ, tile.batch, at.head, tile.segment.first_query + m0)
                load_statistic(Q, SHARED_LSE, args.mLse, tile, at, m0)
                load_statistic(Q, SHARED_DELTA, args.mDelta, tile, at, m0)
                Q, at = advance(Q, 1), next_queries(mask, tile, at)

    return schedule, load_queries

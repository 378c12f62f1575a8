"""Gradients of the arrays that a part of the score reads by distance, beside dK, dV and sums for dQ: of slopes, of the
table of a RelativeBias, of what a user's function reads as table[abs(i - j), head].

dS goes through shared memory for dQ. There one warp for each consumer, of those beside the producer's that are idle
otherwise, sums its dS along diagonals: all elements of a diagonal read the same element of the arrays. Where tiles are
boxes of a grid, it sums dS over the pairs of tokens at each offset.
"""

import numpy as np

from ...tile import (
    WARP,
    advance,
    allocate,
    block_index,
    device,
    read,
    release,
    shape,
    stage,
    sync_warp,
    wait,
)
from ..scores import distance_step, is_nonlinear, parts_of, within_segment
from ..shared.exact_sums import add_atomically
from .backward_steps import PART, ROWS
from .kv_schedule import is_tile, record_steps


def distance_reads_of(work):
    """What is compiled in of the Reads of this work, which of what in which dtype, if all are by distance; or nothing.
    """
    if not work.reads or is_nonlinear(work.score):              # dS in shared memory is that before the score
        return ()
    _, _, after, wanted, sum_dtype, _ = work.reads
    fits = parts_of(work.score)[after].is_by_distance(wanted, np.float32)
    return (after, wanted, sum_dtype) if fits else ()


def distance_sums_step(score, reads, SHARED_DS, DS_PIPELINE, tiles, mask, tile_n, first_queries, next_queries):
    """The device function of a warp, (number of its consumer, mDK, mask, scores, group_size, sums of what is read).
    tiles: see `kv_schedule.producer_steps`."""
    (after, wanted, sum_dtype), TILES = reads, tiles
    (_, from_record), scores_of = record_steps(mask, tile_n), within_segment(score)
    SUM, CONSUMERS, TILE_M = np.dtype(sum_dtype).type, DS_PIPELINE.fills, SHARED_DS.cols
    DS_PARTS, PARTS, NONE, NOTHING = SHARED_DS.parts(PART), TILE_M // PART, np.int32(0), SUM(0)
    sums_of, add_sums = distance_step(parts_of(score)[after], after, wanted, np.float32, SUM, add_atomically)

    @device
    def done(place):
        sync_warp()                                             # all have read it
        release(place, WARP)

    @device
    def add_tile(consumer, mask, tile, scores, mReads, sdS):
        """Add what a tile of keys reads. Returns the stage after it."""
        (_, _, copies, _), at = shape(mReads), first_queries(mask, tile)
        copy, pending = block_index() % copies, (NONE, NOTHING)
        col = tile.segment.first_key + tile.first + consumer * ROWS
        if at.m_block < at.m_blocks:
            wait(sdS)
            done(sdS)                                           # before the first tile there is no dS
            sdS = advance(sdS, 1)
        while at.m_block < at.m_blocks:
            sums = mReads[tile.batch, at.head][copy]
            wait(sdS)
            for part in range(PARTS):
                dS = allocate(DS_PARTS, (sdS.index * CONSUMERS + consumer) * PARTS + part)
                row = tile.segment.first_query + at.m_block * TILE_M + part * PART
                found = sums_of(dS)
                if part == PARTS - 1:
                    done(sdS)
                pending = add_sums(pending, found, scores, sums, tile.batch, at.head, row, col)
            sdS = advance(sdS, 1)
            after = next_queries(mask, tile, at)
            if after.head != at.head or after.m_block >= after.m_blocks:
                add_atomically(pending, sums)                   # a matrix has sums of its own
                pending = NONE, NOTHING
            at = after
        return sdS

    @device
    def add_up(consumer, mDK, mask, scores, group_size, mReads):
        W, sdS = stage(TILES, 0), stage(DS_PIPELINE, 0)
        while True:
            wait(W)
            record = read(W)
            done(W)
            if not is_tile(record):
                break
            tile, own = from_record(record, mDK, mask, group_size)
            sdS = add_tile(consumer, own, tile, scores_of(scores, tile.segment), mReads, sdS)
            W = advance(W, 1)

    return add_up

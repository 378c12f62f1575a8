"""The loop of kernels over pairs: a block keeps a tile of rows and walks over the columns that these see."""

from typing import Any, NamedTuple

from ...tile import block_index, device, index, maximum, minimum, shape, sync_threads, wait_copies, where
from ..shared.schedule import place
from ..shared.segments import count_step, keys_of, mask_within_step, queries_of, slot_step
from ..shared.visibility import band_of, element_test, needs_test, steps_to_next, visible_keys
from .outer import latest, same


class PointBlock(NamedTuple):
    """A block's tile of rows of a matrix, and the tiles of columns that these see."""

    batch: Any
    head: Any
    m_block: Any
    m0: Any
    first: Any  # tile of columns
    tiles: Any
    band: Any
    query: Any  # rows [query, end_query) of the arrays are those of its segment
    end_query: Any
    seen_query: Any  # rows before it may be read
    key: Any
    seen_key: Any


def block_steps(mask, tile_m, tile_n):
    """Device functions: (mO, mask) -> the PointBlock of this block, and the mask of its segment; (mask, block,
    n_block) -> the next tile of columns after this one."""
    TILE_M, TILE_N = tile_m, tile_n
    band_at, steps = band_of(mask), steps_to_next(mask)
    tiles_of, tile_of, mask_of = count_step(mask, tile_m), slot_step(mask, "q", tile_m), mask_within_step(mask)

    @device
    def block_of(mO, mask):
        batches, heads, rows, _ = shape(mO)
        tile, batch, head = place(block_index(), batches * heads, heads)
        number = tiles_of(mask.packing, rows) - 1 - tile        # the heaviest tiles of a causal mask first
        segment, m_block = tile_of(mask.packing, batch, number, rows)
        mask, m0 = mask_of(mask, segment), m_block * TILE_M
        band = band_at(mask, batch, head)
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, segment.queries))  # none in a slot without a tile
        (query, end_query), (key, _) = queries_of(segment), keys_of(segment)
        n_block, n_blocks = first // TILE_N, (end + TILE_N - 1) // TILE_N
        n_block = n_block + steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
        # beyond a sequence's length there may be NaN
        seen_query, seen_key = query + maximum(band[2], 1), key + maximum(band[3], 1)
        rows_and_columns = query, end_query, seen_query, key, seen_key
        return PointBlock(batch, head, m_block, m0, n_block, n_blocks, band, *rows_and_columns), mask

    @device
    def next_tile(mask, block, n_block):
        n_block = n_block + 1
        return n_block + steps(mask, block.batch, block.head, block.m_block, n_block, block.tiles - n_block)

    return block_of, next_tile


def mask_steps(mask, layout, tile_m, tile_n, hidden=0):
    """Device functions: (mask, block, n_block) -> whether a tile needs a test per element; (P, mask, block, n0) -> P of
    a part of it from column n0 on, `hidden` where it is masked."""
    TILE_M, TILE_N, HIDDEN, sees, tested = tile_m, tile_n, hidden, element_test(mask, layout), needs_test(mask)

    @device
    def needs_mask(mask, block, n_block):
        (batch, head, m_block, m0), n0 = block[:4], n_block * TILE_N
        return tested(mask, block.band, batch, head, m_block, n_block, m0, m0 + TILE_M, n0, n0 + TILE_N)

    @device
    def masked(P, mask, block, n0):
        return where(sees(mask, block.band, block.batch, block.head, block.m0, n0), P, HIDDEN)

    return needs_mask, masked


class ColumnPart(NamedTuple):
    """A tile of pairs in registers, for some of the columns that are copied together."""

    stage: Any
    chunk: Any
    n0: Any  # its first column
    is_masked: Any  # whether some of its pairs may be out of sight


def loop_steps(pairs, mask, fetch, hidden=0):
    """Device functions: (array with the axes of rows, mask) -> the PointBlock of this block, and the mask of its
    segment; (P, mask, block, part) -> P, `hidden` where it is masked; and a function (add, begin, end) -> the loop, a
    device function (found, given, mask, block) -> the result of found = add(found, given, mask, block, part) for each
    ColumnPart in turn. For those of one tile begin(found) may start another sum, which end(found, new) adds to the one
    before.

    fetch: a device function (given, block, stage, n0) that starts to copy columns from n0 on. The next tile is in
    flight while this one is computed.
    """
    block_of, next_tile = block_steps(mask, pairs.tile_m, pairs.tile_n)
    needs_mask, masked = mask_steps(mask, pairs.layout, pairs.tile_m, pairs.tile_n, hidden)
    TILE_N, COLS, CHUNKS, IN_TURN = pairs.tile_n, pairs.layout.cols.size, pairs.chunks, pairs.stages == 1

    @device
    def in_sight(P, mask, block, part):
        if part.is_masked:
            P = masked(P, mask, block, part.n0)
        return P

    def loop_of(add, begin=same, end=latest):
        @device
        def loop(found, given, mask, block):
            n_block, stage = block.first, index(0)
            if n_block < block.tiles:
                fetch(given, block, stage, n_block * TILE_N)
            while n_block < block.tiles:
                this = n_block
                n_block = next_tile(mask, block, n_block)
                wait_copies()
                sync_threads()                                  # this tile has arrived, all have read the last one
                if not IN_TURN and n_block < block.tiles:
                    fetch(given, block, 1 - stage, n_block * TILE_N)
                is_masked = needs_mask(mask, block, this)
                new = begin(found)
                for chunk in range(CHUNKS):
                    part = ColumnPart(stage, chunk, this * TILE_N + chunk * COLS, is_masked)
                    new = add(new, given, mask, block, part)
                found = end(found, new)
                if not IN_TURN:
                    stage = 1 - stage
                elif n_block < block.tiles:
                    sync_threads()                              # all have read this tile
                    fetch(given, block, stage, n_block * TILE_N)
            return found

        return loop

    return block_of, in_sight, loop_of

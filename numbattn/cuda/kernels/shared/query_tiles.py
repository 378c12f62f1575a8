"""What blocks that keep keys walk over: the tiles of queries that see them, head by head of a group."""

from typing import Any, NamedTuple

from ...tile import block_index, device, index, maximum, minimum, opaque, shape
from .schedule import place_grouped
from .segments import count_step, mask_within_step, slot_step
from .visibility import PACKED, band_of, needs_test, steps_to_next, visible_queries


class KeyTile(NamedTuple):
    """The tile of keys that a block keeps: keys [first, end) of a head, which query heads [head, heads) see.

    It is empty if a slot has no tile: see segments."""

    batch: Any
    head_k: Any
    head: Any
    heads: Any
    n_block: Any
    first: Any
    end: Any
    segment: Any


class QueryTile(NamedTuple):
    """A tile of queries that sees them, number m_block of a head; if m_block is m_blocks there is none left."""

    head: Any
    m_block: Any
    m_blocks: Any


def keys_step(mask, tile_n):
    """The device function (mLse, mDK, mask, group_size, at_once): the tile of keys that this block keeps, and what is
    seen of them."""
    TILE_N, tiles_of, tile_of = tile_n, count_step(mask, tile_n), slot_step(mask, "k", tile_n)
    mask_of = mask_within_step(mask)

    @device
    def keys_of_block(mLse, mDK, mask, group_size, at_once):
        batches, _, _ = shape(mLse)
        _, heads_k, seqlen_k, _ = shape(mDK)
        n_blocks = tiles_of(mask.packing, seqlen_k)
        tile, batch, head_k = place_grouped(block_index(), n_blocks, batches * heads_k, heads_k, at_once)
        segment, n_block = tile_of(mask.packing, batch, tile, seqlen_k)
        n0, head = n_block * TILE_N, head_k * group_size
        end = minimum(n0 + TILE_N, segment.keys)
        return KeyTile(batch, head_k, head, head + group_size, n_block, n0, end, segment), mask_of(mask, segment)

    return keys_of_block


def queries_steps(mask, tile_m, keys):
    """Device functions that walk over the queries that see a tile of keys, head by head: the first, the next tile.
    And whether a tile needs a test per element, with so many keys from n0 on."""
    TILE_M, KEYS, IS_PACKED = tile_m, keys, PACKED in mask
    band_at, tested, steps = band_of(mask), needs_test(mask), steps_to_next(mask)

    @device
    def queries_from(mask, tile, head):
        m_block, m_blocks = index(0), index(0)
        while head < tile.heads and m_block >= m_blocks:
            first, end = visible_queries(band_at(mask, tile.batch, head), tile.first, tile.end)
            m_block, m_blocks = first // TILE_M, (end + TILE_M - 1) // TILE_M
            m_block = m_block + steps(mask, tile.batch, head, tile.n_block, m_block, m_blocks - m_block)
            head = opaque(head + 1)
        return QueryTile(head - 1, m_block, m_blocks)

    @device
    def first_queries(mask, tile):
        return queries_from(mask, tile, tile.head)

    @device
    def next_queries(mask, tile, at):
        m_block = opaque(at.m_block + 1)
        m_block = m_block + steps(mask, tile.batch, at.head, tile.n_block, m_block, at.m_blocks - m_block)
        if m_block < at.m_blocks:
            return QueryTile(at.head, m_block, at.m_blocks)
        return queries_from(mask, tile, at.head + 1)

    @device
    def needs_mask(mask, tile, at, n0):
        band, m0 = band_at(mask, tile.batch, at.head), at.m_block * TILE_M
        m_end = m0 + TILE_M
        if IS_PACKED:
            m_end = minimum(m_end, tile.segment.queries)        # lse is inf after it
        return tested(mask, band, tile.batch, at.head, tile.n_block, at.m_block, m0, m_end, n0, n0 + KEYS)

    return first_queries, next_queries, needs_mask


@device
def padded_number(tile, at, tile_m):
    """Which of the tiles of so many rows in padded statistics, or sums, is that of queries `at`."""
    return opaque(tile.segment.first_padded_row) // tile_m + at.m_block


def key_lengths(mask):
    """The device function (mask, tile): beyond which key all heads of a tile's group see nothing."""
    band_at = band_of(mask)

    @device
    def longest(mask, tile):
        keys = index(0)
        for head in range(tile.head, tile.heads):
            _, _, queries, length = band_at(mask, tile.batch, head)
            if queries > 0:
                keys = maximum(keys, length)
        return keys

    return longest

"""The tiles of queries that a block which keeps keys walks over, for each head of a group in turn."""

from typing import Any, NamedTuple

import numpy as np

from ...tile import block_index, device, index, maximum, minimum, opaque, shape, warpgroup_index
from .schedule import count_staggered, place_grouped, place_staggered
from .segments import count_step, mask_within_step, slot_step
from .visibility import (
    NO_WORDS,
    PACKED,
    band_of,
    needs_test,
    needs_test_of_full,
    steps_to_next,
    visible_queries,
    word_steps,
)


class KeyTile(NamedTuple):
    """The tile of keys that a block keeps: keys [first, end) of a head, seen by query heads [head, heads).

    It is empty if the slot has no tile: see segments."""

    batch: Any
    head_k: Any
    head: Any
    heads: Any
    n_block: Any
    first: Any
    end: Any
    segment: Any


class QueryTile(NamedTuple):
    """A tile of queries that see them, number m_block of a head; none is left if m_block is m_blocks."""

    head: Any
    m_block: Any
    m_blocks: Any
    known: Any  # its Words, if consumers have states of their own, else ()


def key_tile_step(tile_n):
    """The device function (batch, head_k, n_block, segment, group_size) -> the KeyTile."""
    TILE_N = tile_n

    @device
    def key_tile(batch, head_k, n_block, segment, group_size):
        n0, head = n_block * TILE_N, head_k * group_size
        end = minimum(n0 + TILE_N, segment.keys)
        return KeyTile(batch, head_k, head, head + group_size, n_block, n0, end, segment)

    return key_tile


def numbered_keys_steps(mask, tile_n, by_warp=True, staggered=False):
    """Device functions: (mLse, mDK, mask, at_once) -> how many KeyTiles there are; (number, mLse, mDK, mask,
    group_size, at_once) -> one of them. by_warp: see `segments.search_step`; staggered: see `schedule`."""
    tiles_of, tile_of = count_step(mask, tile_n), slot_step(mask, "k", tile_n, by_warp)
    key_tile, TILE_N, STAGGERED = key_tile_step(tile_n), tile_n, staggered
    place_of = place_staggered if staggered else place_grouped

    @device
    def count_of(mLse, mDK, mask, at_once):
        (batches, _, _), (_, heads_k, seqlen_k, _) = shape(mLse), shape(mDK)
        n_blocks = tiles_of(mask.packing, seqlen_k)
        if STAGGERED:
            return count_staggered(n_blocks, batches * heads_k, at_once)
        return n_blocks * batches * heads_k

    @device
    def keys_of(number, mLse, mDK, mask, group_size, at_once):
        (batches, _, _), (_, heads_k, seqlen_k, _) = shape(mLse), shape(mDK)
        n_blocks = tiles_of(mask.packing, seqlen_k)
        tile, batch, head_k = place_of(number, n_blocks, batches * heads_k, heads_k, at_once)
        segment, n_block = tile_of(mask.packing, batch, maximum(tile, 0), seqlen_k)
        if STAGGERED and tile < 0:
            n_block = segment.keys // TILE_N + 1                # an empty one
        return key_tile(batch, head_k, n_block, segment, group_size)

    return count_of, keys_of


def keys_step(mask, tile_n):
    """The device function (mLse, mDK, mask, group_size, at_once) -> this block's KeyTile, and the mask within its
    segment."""
    (_, keys_of), mask_of = numbered_keys_steps(mask, tile_n), mask_within_step(mask)

    @device
    def keys_of_block(mLse, mDK, mask, group_size, at_once):
        tile = keys_of(block_index(), mLse, mDK, mask, group_size, at_once)
        return tile, mask_of(mask, tile.segment)

    return keys_of_block


def m_block_steps(mask, consumers, by_consumer=True):
    """Device functions that walk over the tiles of queries of a head, up to number `end`: (mask, tile, head, m_block,
    end) -> the first one from m_block on that is not empty, and what is known of it; (mask, tile, head, m_block, known,
    end) -> the next one after m_block, likewise; (mask, band, tile, at, m0, m_end, n0, n_end) -> whether a visible tile
    needs a test per element.

    consumers: of a block, if they have states of their own, 0 if not. by_consumer: whether consumers walk, whose own
    states are known then: threads of the producer do not ask which warpgroup they are, which takes a whole warp.
    """
    CONSUMERS, steps, tested = consumers, steps_to_next(mask), needs_test(mask)
    (first_word, next_word, _), tested_if_full = word_steps(consumers), needs_test_of_full(mask)

    @device
    def first_of_all():
        return 0

    own = warpgroup_index if by_consumer else first_of_all

    @device
    def first(mask, tile, head, m_block, end):
        return m_block + steps(mask, tile.batch, head, tile.n_block, m_block, end - m_block), ()

    @device
    def after(mask, tile, head, m_block, known, end):
        return first(mask, tile, head, opaque(m_block + 1), end)

    @device
    def needs_test_by_states(mask, band, tile, at, m0, m_end, n0, n_end):
        return tested(mask, band, tile.batch, at.head, tile.n_block, at.m_block, m0, m_end, n0, n_end)

    @device
    def first_by_words(mask, tile, head, m_block, end):
        kept = tile.n_block * CONSUMERS
        return first_word(mask, tile.batch, head, kept, kept + own(), m_block, end)

    @device
    def after_by_words(mask, tile, head, m_block, words, end):
        kept = tile.n_block * CONSUMERS
        return next_word(mask, tile.batch, head, kept, kept + own(), m_block, words, end)

    @device
    def needs_test_by_words(mask, band, tile, at, m0, m_end, n0, n_end):
        is_full = (at.known.full & np.uint32(1)) != 0
        return not is_full or tested_if_full(mask, band, tile.batch, at.head, 0, 0, m0, m_end, n0, n_end)

    if consumers:
        return first_by_words, after_by_words, needs_test_by_words
    return first, after, needs_test_by_states


def queries_steps(mask, tile_m, keys, consumers=0, by_consumer=True, from_last=False):
    """Device functions that walk over the queries that see a KeyTile, head by head: (mask, tile) -> the first
    QueryTile; (mask, tile, at) -> the next one; (mask, tile, at, n0) -> whether it needs a test per element, with
    `keys` keys from n0 on. consumers, by_consumer: see `m_block_steps`. from_last: whether they walk from the last
    queries of a head to the first, with a band and nothing else."""
    TILE_M, KEYS, IS_PACKED, NOTHING = tile_m, keys, PACKED in mask, NO_WORDS if consumers else ()
    band_at, (first_block, next_block, tested) = band_of(mask), m_block_steps(mask, consumers, by_consumer)

    @device
    def queries_from(mask, tile, head):
        m_block, m_blocks, known = index(0), index(0), NOTHING
        while head < tile.heads and m_block >= m_blocks:
            first, end = visible_queries(band_at(mask, tile.batch, head), tile.first, tile.end)
            m_block, m_blocks = first // TILE_M, (end + TILE_M - 1) // TILE_M
            m_block, known = first_block(mask, tile, head, m_block, m_blocks)
            head = opaque(head + 1)
        return QueryTile(head - 1, m_block, m_blocks, known)

    @device
    def last_queries_from(mask, tile, head):
        at = queries_from(mask, tile, head)
        return QueryTile(at.head, maximum(at.m_blocks - 1, at.m_block), at.m_blocks, at.m_block)

    @device
    def queries_before(mask, tile, at):
        if at.m_block > at.known:                               # the first one
            return QueryTile(at.head, opaque(at.m_block - 1), at.m_blocks, at.known)
        return last_queries_from(mask, tile, at.head + 1)

    @device
    def queries_after(mask, tile, at):
        m_block, known = next_block(mask, tile, at.head, at.m_block, at.known, at.m_blocks)
        if m_block < at.m_blocks:
            return QueryTile(at.head, m_block, at.m_blocks, known)
        return queries_from(mask, tile, at.head + 1)

    start_from, next_queries = (last_queries_from, queries_before) if from_last else (queries_from, queries_after)

    @device
    def first_queries(mask, tile):
        return start_from(mask, tile, tile.head)

    @device
    def needs_mask(mask, tile, at, n0):
        band, m0 = band_at(mask, tile.batch, at.head), at.m_block * TILE_M
        m_end = m0 + TILE_M
        if IS_PACKED:
            m_end = minimum(m_end, tile.segment.queries)        # lse is inf after it
        return tested(mask, band, tile, at, m0, m_end, n0, n0 + KEYS)

    return first_queries, next_queries, needs_mask


@device
def padded_number(tile, at, tile_m):
    """The number, in padded statistics or sums, of the tile of tile_m queries `at`."""
    return opaque(tile.segment.first_padded_row) // tile_m + at.m_block


def key_lengths(mask):
    """The device function (mask, tile) -> how many keys there are up to the last one that a head of the group sees."""
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

"""What the warps of Hopper's kernels walk over: tiles of keys in sight of queries, or of queries in sight of keys."""

from typing import Any, NamedTuple

from ...tile import (
    allocate,
    block_index,
    device,
    index,
    maximum,
    minimum,
    opaque,
    shape,
    sync_warpgroup,
    warpgroup_index,
)
from ..shared.schedule import place_grouped
from ..shared.segments import count_step, sight_step, slot_step
from ..shared.visibility import PACKED, band_of, keys_in_sight, needs_test, queries_in_sight, steps_to_next
from .forward_tiles import ROWS


# ------------------------------------------------------------------------------------------- where queries are kept
class WorkTile(NamedTuple):
    """A tile of queries, and the tiles of keys [n_block, n_blocks) in its sight."""

    batch: Any
    head: Any
    m_block: Any
    n_block: Any  # the first one that is not empty
    n_blocks: Any  # 0: there is no work left
    segment: Any


class ConsumerTile(NamedTuple):
    """A consumer's share of it: 64 queries of a head, from m0 on."""

    batch: Any
    head: Any
    m0: Any
    m_block: Any
    n_block: Any
    n_blocks: Any
    segment: Any


def block_steps(mask, tile_n):
    """Device functions that walk over the tiles of keys: (sight, batch, head, m0, m_end) -> those [first, end) in sight
    of queries [m0, m_end); (tile, sight, n_block) -> the first one from n_block on that is not empty."""
    band_at, steps, TILE_N = band_of(mask), steps_to_next(mask), tile_n

    @device
    def blocks_in_sight(sight, batch, head, m0, m_end):
        first, end = keys_in_sight(band_at(sight, batch, head), m0, m_end)
        return first // TILE_N, (end + TILE_N - 1) // TILE_N

    @device
    def next_n_block(tile, sight, n_block):
        return n_block + steps(sight, tile.batch, tile.head, tile.m_block, n_block, tile.n_blocks - n_block)

    return blocks_in_sight, next_n_block


@device
def place_of(tile, n0):
    """Where a consumer's tile of S, from key n0 on, starts in the matrix."""
    return tile.segment.first_query + tile.m0, tile.segment.first_key + n0


def score_tile_steps(look_up, apply, tile_n, consumers, biases):
    """Device functions of the score of a consumer's tile of S: (tile, scores, n_block) -> what it looks up, in flight;
    (that, K, tile, scores) -> the same, or the tile of a bias that has come with K; (S, that, tile, scores, n_block) ->
    what `apply` returns. biases: places, one for each stage of K and each consumer, or none."""
    BIASES, HAS_TMA_BIAS, TILE_N, CONSUMERS = biases, biases.stages > 0, tile_n, consumers

    @device
    def looked_up(tile, scores, n_block):
        if HAS_TMA_BIAS:
            return ()
        m0, n0 = place_of(tile, n_block * TILE_N)
        return look_up(scores, (), tile.batch, tile.head, m0, n0)

    @device
    def at_hand(found, K, tile, scores):
        if not HAS_TMA_BIAS:
            return found
        place = allocate(BIASES, K.index * CONSUMERS + warpgroup_index())
        loaded = look_up(scores, place, tile.batch, tile.head, 0, 0)
        sync_warpgroup()                                        # all have read it
        return loaded

    @device
    def scored(S, found, tile, scores, n_block):
        m0, n0 = place_of(tile, n_block * TILE_N)
        return apply(S, found, scores, tile.batch, tile.head, m0, n0)

    return looked_up, at_hand, scored


# ---------------------------------------------------------------------------------------------- where keys are kept
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
    """A tile of queries in sight, number m_block of a head; if m_block is m_blocks there is none left."""

    head: Any
    m_block: Any
    m_blocks: Any


def keys_step(mask, tile_n):
    """The device function (mLse, mDK, sight, group_size, at_once): the tile of keys that this block keeps, and what is
    seen of them."""
    TILE_N, tiles_of, tile_of = tile_n, count_step(mask, tile_n), slot_step(mask, "k", tile_n)
    sight_of = sight_step(mask)

    @device
    def keys_of_block(mLse, mDK, sight, group_size, at_once):
        batches, _, _ = shape(mLse)
        _, heads_k, seqlen_k, _ = shape(mDK)
        n_blocks = tiles_of(sight.packing, seqlen_k)
        tile, batch, head_k = place_grouped(block_index(), n_blocks, batches * heads_k, heads_k, at_once)
        segment, n_block = tile_of(sight.packing, batch, tile, seqlen_k)
        n0, head = n_block * TILE_N, head_k * group_size
        end = minimum(n0 + TILE_N, segment.keys)
        return KeyTile(batch, head_k, head, head + group_size, n_block, n0, end, segment), sight_of(sight, segment)

    return keys_of_block


def queries_steps(mask, tile_m):
    """Device functions that walk over the queries in sight of a tile of keys, head by head: the first, the next tile.
    And whether a tile needs a test per element."""
    TILE_M, IS_PACKED = tile_m, PACKED in mask
    band_at, tested, steps = band_of(mask), needs_test(mask), steps_to_next(mask)

    @device
    def queries_from(sight, tile, head):
        m_block, m_blocks = index(0), index(0)
        while head < tile.heads and m_block >= m_blocks:
            first, end = queries_in_sight(band_at(sight, tile.batch, head), tile.first, tile.end)
            m_block, m_blocks = first // TILE_M, (end + TILE_M - 1) // TILE_M
            m_block = m_block + steps(sight, tile.batch, head, tile.n_block, m_block, m_blocks - m_block)
            head = opaque(head + 1)
        return QueryTile(head - 1, m_block, m_blocks)

    @device
    def first_queries(sight, tile):
        return queries_from(sight, tile, tile.head)

    @device
    def next_queries(sight, tile, at):
        m_block = opaque(at.m_block + 1)
        m_block = m_block + steps(sight, tile.batch, at.head, tile.n_block, m_block, at.m_blocks - m_block)
        if m_block < at.m_blocks:
            return QueryTile(at.head, m_block, at.m_blocks)
        return queries_from(sight, tile, at.head + 1)

    @device
    def needs_mask(sight, tile, at, n0):
        band, m0 = band_at(sight, tile.batch, at.head), at.m_block * TILE_M
        m_end = m0 + TILE_M
        if IS_PACKED:
            m_end = minimum(m_end, tile.segment.queries)        # lse is inf behind it
        return tested(sight, band, tile.batch, at.head, tile.n_block, at.m_block, m0, m_end, n0, n0 + ROWS)

    return first_queries, next_queries, needs_mask


def key_lengths(mask):
    """The device function (sight, tile): beyond which key all heads of a tile's group see nothing."""
    band_at = band_of(mask)

    @device
    def longest(sight, tile):
        keys = index(0)
        for head in range(tile.head, tile.heads):
            _, _, queries, length = band_at(sight, tile.batch, head)
            if queries > 0:
                keys = maximum(keys, length)
        return keys

    return longest

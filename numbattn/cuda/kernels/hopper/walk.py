"""The tiles of keys that kernels on Hopper walk over where they keep queries; where they keep keys, see
`shared.query_tiles`."""

from typing import Any, NamedTuple

from ...tile import allocate, device, minimum, opaque, sync_warpgroup, warpgroup_index
from ..shared.visibility import band_of, has_functions, steps_to_next, visible_keys, word_steps
from .forward_tiles import ROWS


class WorkTile(NamedTuple):
    """A tile of queries, and the tiles of keys [n_block, n_blocks) that it sees."""

    batch: Any
    head: Any
    m_block: Any
    n_block: Any  # the first one that is not empty
    n_blocks: Any  # 0: there is no work left
    segment: Any


class ConsumerTile(NamedTuple):
    """A consumer's share of a WorkTile: 64 queries of a head, from m0 on."""

    batch: Any
    head: Any
    m0: Any
    m_block: Any
    n_block: Any
    n_blocks: Any
    segment: Any


def has_own_states(mask, consumers):
    """Whether each consumer's queries have states of their own; else a work tile has them."""
    return consumers > 0 and has_functions(mask)


class BlockSteps(NamedTuple):
    """Device functions that find the tiles of keys to visit."""

    visible: Any  # (mask, batch, head, m0, m_end) -> those [first, end) that queries [m0, m_end) see
    next: Any  # (tile, mask, n_block) -> the first one from n_block on that is not empty


class KnownSteps(NamedTuple):
    """Device functions that carry along what is known of a tile of keys."""

    of: Any  # (tile, mask, n_block) -> what is known of it
    after: Any  # (tile, mask, n_block, known) -> the tile after it, and what is known of that one


def n_block_steps(mask, tile_n, consumers=0):
    """The BlockSteps of a mask."""
    band_at, steps, TILE_N, CONSUMERS = band_of(mask), steps_to_next(mask), tile_n, consumers
    first_word = word_steps(consumers).first

    @device
    def visible_blocks(mask, batch, head, m0, m_end):
        first, end = visible_keys(band_at(mask, batch, head), m0, m_end)
        return first // TILE_N, (end + TILE_N - 1) // TILE_N

    @device
    def next_n_block(tile, mask, n_block):
        return n_block + steps(mask, tile.batch, tile.head, tile.m_block, n_block, tile.n_blocks - n_block)

    @device
    def next_of_any(tile, mask, n_block):
        kept = tile.m_block * CONSUMERS
        found, _ = first_word(mask, tile.batch, tile.head, kept, kept, n_block, tile.n_blocks)
        return found

    return BlockSteps(visible_blocks, next_of_any if has_own_states(mask, consumers) else next_n_block)


def known_steps(mask, tile_n, consumers, by_consumer):
    """The KnownSteps for a ConsumerTile, if by_consumer, else for a WorkTile."""
    next_n_block, CONSUMERS = n_block_steps(mask, tile_n, consumers).next, consumers
    _, next_word, words = word_steps(consumers)

    @device
    def nothing(tile, mask, n_block):
        return ()

    @device
    def after(tile, mask, n_block, known):
        return next_n_block(tile, mask, opaque(n_block + 1)), known

    @device
    def own_of_consumer(tile):
        return tile.m0 // ROWS

    @device
    def first_of_all(tile):
        return tile.m_block * CONSUMERS

    own_of = own_of_consumer if by_consumer else first_of_all

    @device
    def words_of(tile, mask, n_block):
        n_block = minimum(n_block, tile.n_blocks - 1)
        return words(mask, tile.batch, tile.head, first_of_all(tile), own_of(tile), n_block)

    @device
    def after_words(tile, mask, n_block, known):
        kept = first_of_all(tile)
        return next_word(mask, tile.batch, tile.head, kept, own_of(tile), n_block, known, tile.n_blocks)

    if has_own_states(mask, consumers):
        return KnownSteps(words_of, after_words)
    return KnownSteps(nothing, after)


@device
def place_of(tile, n0):
    """Where a consumer's tile of S, from key n0 on, starts in the matrix."""
    return tile.segment.first_query + tile.m0, tile.segment.first_key + n0


def score_tile_steps(look_up, apply, tile_n, consumers, biases):
    """Device functions for the score of a consumer's tile of S: prefetch_bias (tile, scores, n_block) -> what it looks
    up, in flight; bias_in_registers (that, K, tile, scores) -> what has come, or the tile of a bias that TMA has loaded
    with K; apply_score (S, that, tile, scores, n_block) -> what `apply` returns. biases: their places in shared memory,
    one for each stage of K and each consumer, or none."""
    BIASES, HAS_TMA_BIAS, TILE_N, CONSUMERS = biases, biases.stages > 0, tile_n, consumers

    @device
    def prefetch_bias(tile, scores, n_block):
        if HAS_TMA_BIAS:
            return ()
        m0, n0 = place_of(tile, n_block * TILE_N)
        return look_up(scores, (), tile.batch, tile.head, m0, n0)

    @device
    def bias_in_registers(found, K, tile, scores):
        if not HAS_TMA_BIAS:
            return found
        place = allocate(BIASES, K.index * CONSUMERS + warpgroup_index())
        loaded = look_up(scores, place, tile.batch, tile.head, 0, 0)
        sync_warpgroup()                                        # all have read it
        return loaded

    @device
    def apply_score(S, found, tile, scores, n_block):
        m0, n0 = place_of(tile, n_block * TILE_N)
        return apply(S, found, scores, tile.batch, tile.head, m0, n0)

    return prefetch_bias, bias_in_registers, apply_score

"""What consumers of `hopper_forward` pass from step to step, and steps that they share with other kernels."""

from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from ...tile import (
    advance,
    clear,
    device,
    fence_async_proxy,
    lowest_bit,
    maximum,
    minimum,
    opaque,
    release,
    sync_warpgroup,
    sync_warpgroups,
    wait,
    warpgroup_index,
    where,
)
from ..scores import within_segment
from ..shared.segments import mask_within_step
from ..shared.visibility import (
    WORD,
    band_of,
    band_test,
    has_key_lengths,
    has_states,
    in_band,
    is_looked_up,
    kept_tile,
    looked_up_test,
    needs_test,
    needs_test_of_full,
    next_tile,
)
from .forward_tiles import ROWS
from .walk import has_own_states, known_steps, n_block_steps, place_of


class ForwardArguments(NamedTuple):
    """What consumers need of the kernel's arguments."""

    by_rows: Any  # O, where TMA does not store all of it
    before: Any  # O over other keys, if there is one
    mLse: Any
    mask: Any
    scores: Any
    drops: Any
    scale_log2: Any
    kept_scale: Any
    heads_per_tile: Any
    linear_bias: Any = ()  # of the tile's rows, if there is one: see linear_bias


class ForwardAccumulators(NamedTuple):
    """What a consumer carries from tile to tile: O still lacks the factor alpha and P V of the last tile."""

    O: Any
    P: Any
    m: Any
    l: Any
    alpha: Any


def mask_steps(mask, layout, tile_n, consumers, ACC):
    """Device functions: (tile, mask, n_block) -> whether a tile of S needs a test per element; (S, tile, mask, n_block)
    -> S where it is visible, else -inf."""
    band_at, seen_in_band, tested = band_of(mask), band_test(layout, transposed=False), needs_test(mask)
    TILE_N, NO_SCORE, HAS_OWN_STATES = tile_n, ACC(-float("inf")), has_own_states(mask, consumers)
    IS_LOOKED_UP, looked_up = is_looked_up(mask), looked_up_test(mask, layout) if is_looked_up(mask) else None

    @device
    def needs_mask(tile, mask, n_block):
        batch, head, m0, n0 = tile.batch, tile.head, tile.m0, n_block * TILE_N
        band = band_at(mask, batch, head)
        m_end, n_end = m0 + ROWS, n0 + TILE_N
        kept = kept_tile(mask, m0 // ROWS) if HAS_OWN_STATES else tile.m_block
        return tested(mask, band, batch, head, kept, n_block, m0, m_end, n0, n_end)

    @device
    def masked(S, tile, mask, n_block):
        batch, head, n0 = tile.batch, tile.head, n_block * TILE_N
        m0 = opaque(tile.m0)                                    # or the rows' bounds take registers in the main loop
        band = band_at(mask, batch, head)
        if IS_LOOKED_UP:
            if not in_band(band, m0, m0 + ROWS, n0, n0 + TILE_N):                       # rarely
                S = where(seen_in_band(band, m0, n0), S, NO_SCORE)
            return where(looked_up(mask, band, batch, head, m0, n0), S, NO_SCORE)
        return where(seen_in_band(band, m0, n0), S, NO_SCORE)                          # Alg. 2 line 11: MASK(S)

    return needs_mask, masked


def ahead_steps(mask, needs_mask, tile_n, consumers):
    """Device functions that find out about the next tile while products are in flight: (tile, mask, n_block, state) ->
    the next one that is not empty, and its state; the same arguments -> whether n_block needs a test per element, a
    function for the first tile and one for others; (tile, mask, n_block, end, state) -> whether this consumer reads
    n_block or a later tile. state: what is known of n_block."""
    if has_own_states(mask, consumers):
        return word_ahead_steps(mask, tile_n, consumers)
    HAS_STATES, next_n_block = has_states(mask), n_block_steps(mask, tile_n, consumers).next

    @device
    def after(tile, mask, n_block, state):
        n_block = next_n_block(tile, mask, n_block + 1)
        if HAS_STATES:
            return n_block, needs_mask(tile, mask, minimum(n_block, tile.n_blocks - 1))
        return n_block, ()

    @device
    def needs_test_at_once(tile, mask, n_block, nothing):
        return needs_mask(tile, mask, n_block)

    @device
    def needs_test(tile, mask, n_block, state):
        return state if HAS_STATES else needs_mask(tile, mask, n_block)

    @device
    def is_before(tile, mask, n_block, end, state):
        return n_block < end

    return after, needs_test_at_once, needs_test, is_before


def word_ahead_steps(mask, tile_n, consumers):
    """`ahead_steps` by Words, if each consumer has states of its own."""
    band_at, tested, TILE_N = band_of(mask), needs_test_of_full(mask), tile_n
    after = known_steps(mask, tile_n, consumers, by_consumer=True).after

    @device
    def needs_test(tile, mask, n_block, words):
        batch, head, m0, n0 = tile.batch, tile.head, tile.m0, n_block * TILE_N
        band, is_full = band_at(mask, batch, head), (words.full & np.uint32(1)) != 0
        return not is_full or tested(mask, band, batch, head, 0, n_block, m0, m0 + ROWS, n0, n0 + TILE_N)

    @device
    def is_left(tile, mask, n_block, end, words):
        return n_block < end and own_steps(tile, mask, n_block, words) < tile.n_blocks - n_block

    return after, needs_test, needs_test, is_left


@device
def own_steps(tile, mask, n_block, words):
    """How many tiles of keys, from this one on, are empty for a consumer; if all are, at least as many as are left."""
    steps = lowest_bit(words.own)
    if steps == WORD:
        beyond, own = (n_block // WORD + 1) * WORD, kept_tile(mask, tile.m0 // ROWS)
        steps = beyond - n_block + next_tile(mask, tile.batch, tile.head, own, beyond, tile.n_blocks - beyond)
    return steps


@device
def clear_tile(stage, length):
    clear(stage.tile, length)


def clear_step(rows, consumers, has_lengths, clear_rows=(clear_tile, clear_tile)):
    """The device function (stages, length), for all consumers: zero the rows of their tiles from `length` on, where the
    sequence ends: they may be NaN, and 0 * NaN is NaN. Beyond the matrix TMA has filled in zeros. clear_rows: for each
    stage a device function (stage, length), called by a consumer of its own."""

    def then(before, numbered):
        NUMBER, clear_rows = numbered
        CONSUMER = NUMBER % consumers

        @device
        def clear_next(stages, length):
            before(stages, length)
            if warpgroup_index() == CONSUMER:
                wait(stages[NUMBER])
                clear_rows(stages[NUMBER], length)

        return clear_next

    clear_all = reduce(then, enumerate(clear_rows), keep)

    @device
    def clear_beyond(stages, length):
        if length < rows:
            clear_all(stages, length)
            fence_async_proxy()
            sync_warpgroups(consumers)

    return clear_beyond if has_lengths else keep


@device
def keep(stages, length):
    pass


def key_tile_steps(mask, tile_n, consumers):
    """Device functions for the tiles of keys of a work tile: (V, tile, mask, n_block) clears the last one beyond the
    keys; (K, V, tile, mask, n_block, known, end) releases tiles unread; (tile, mask) -> those that a consumer reads.
    known: see `KnownSteps`."""
    TILE_N, IS_LOOKED_UP, band_at = tile_n, is_looked_up(mask), band_of(mask)
    visible_blocks, HAS_OWN_STATES = n_block_steps(mask, tile_n, consumers).visible, has_own_states(mask, consumers)
    known_of, next_known = known_steps(mask, tile_n, consumers, by_consumer=True)
    clear_keys = clear_step(tile_n, consumers, has_key_lengths(mask), (clear_tile,))

    @device
    def clear_beyond(V, tile, mask, n_block):
        """For the last tile of a work tile; called by consumers that skip it, too."""
        clear_keys((V,), band_at(mask, tile.batch, tile.head)[3] - n_block * TILE_N)

    @device
    def skip(K, V, tile, mask, n_block, known, end):
        """Release tiles of keys unread; also returns the first one from `end` on."""
        while n_block < end:
            wait(K)
            clear_beyond(V, tile, mask, n_block)
            wait(V)
            sync_warpgroup()                                    # no warp may miss a phase of the pipeline
            release(K)
            release(V)
            K, V = advance(K, 1), advance(V, 1)
            n_block, known = next_known(tile, mask, n_block, known)
        return K, V, n_block, known

    @device
    def n_block_range(tile, mask):
        """The tiles of keys [first, end) that this consumer reads, at least one; and what is known of the first one of
        the work tile."""
        known = known_of(tile, mask, tile.n_block)
        first, end = visible_blocks(mask, tile.batch, tile.head, tile.m0, tile.m0 + ROWS)
        if IS_LOOKED_UP or first >= end:
            first = tile.n_block
        if HAS_OWN_STATES:
            steps = own_steps(tile, mask, first, known)
            first = first + (steps if steps < tile.n_blocks - first else 0)
        return first, minimum(maximum(end, first + 1), tile.n_blocks), known

    return clear_beyond, skip, n_block_range


def within_step(mask, score, linear_bias_of):
    """The device function (args, tile) -> the arguments with the mask and scores of the tile's segment, and the linear
    bias of its rows."""
    mask_of, scores_of = mask_within_step(mask, ROWS), within_segment(score)

    @device
    def within(args, tile):
        (m0, n0), scores = place_of(tile, 0), scores_of(args.scores, tile.segment)
        linear_bias = linear_bias_of(scores, tile.batch, tile.head, m0, n0)
        return ForwardArguments(
            args.by_rows, args.before, args.mLse, mask_of(args.mask, tile.segment), scores, args.drops,
            args.scale_log2, args.kept_scale, args.heads_per_tile, linear_bias,
        )  # fmt: skip

    return within

"""The states of tiles, empty, partial or full, that let loops skip tiles and tests of elements."""

from typing import Any, NamedTuple

import numpy as np

from ....tile import convert, device, index, lowest_bit, minimum, shape
from .args import BY_INTERVALS, GAP, PLACED, has_blocks, has_states
from .band import in_band
from .cells import first_of_tail

WORD = 32  # tiles whose states are bits of one word


@device
def every_tile(mask, batch, head, kept, tile, count):
    return 0


@device
def next_tile(mask, batch, head, kept, tile, count):
    """How many tiles, from this one on, are empty before the first that is not; `count` if all are empty."""
    steps, found = index(0), False
    while steps < count and not found:
        at = tile + steps
        step = lowest_bit(states_from(mask, batch, head, kept, at, 0))
        found = step < WORD
        steps = steps + (step if found else WORD - at % WORD)
    return minimum(steps, count)


class Words(NamedTuple):
    """What is known of a tile, in the lowest bits, and of those after it in its word."""

    shown: Any  # which are not empty for at least one of several kept tiles
    own: Any  # which are not empty for one of these
    full: Any  # which are full for that one


NO_WORDS = Words(np.uint32(0), np.uint32(0), np.uint32(0))


class WordSteps(NamedTuple):
    """Device functions that walk over the tiles, up to `end`, that are not empty for one or more of several kept tiles,
    from number `kept` on. own: the number of one kept tile."""

    first: Any  # (mask, batch, head, kept, own, tile, end) -> the first such tile from `tile` on, and its Words
    after: Any  # (mask, batch, head, kept, own, tile, words, end) -> the first one after `tile`, and its Words
    words: Any  # (mask, batch, head, kept, own, tile) -> the Words of `tile`


def word_steps(rows):
    """The WordSteps for so many kept tiles."""
    ROWS = rows

    @device
    def load(mask, batch, head, kept, own, tile):
        shown = np.uint32(0)
        for row in range(ROWS):
            shown = np.uint32(shown | states_from(mask, batch, head, kept_tile(mask, kept + row), tile, 0))
        own = kept_tile(mask, own)
        return Words(
            shown, states_from(mask, batch, head, own, tile, 0), states_from(mask, batch, head, own, tile, 1)
        )  # fmt: skip

    @device
    def moved(words, count):
        count = convert(count & (WORD - 1), np.uint32)
        return Words(
            np.uint32(words.shown >> count), np.uint32(words.own >> count), np.uint32(words.full >> count)
        )  # fmt: skip

    @device
    def search(mask, batch, head, kept, own, tile, words, unread, end):
        """The first tile from this one on. unread: the first tile whose word has not been loaded."""
        while words.shown == 0 and unread < end:
            tile, words = unread, load(mask, batch, head, kept, own, unread)
            unread = (unread // WORD + 1) * WORD
        steps = lowest_bit(words.shown)
        return minimum(tile + steps, end), moved(words, steps)

    @device
    def first(mask, batch, head, kept, own, tile, end):
        return search(mask, batch, head, kept, own, tile, NO_WORDS, tile, end)

    @device
    def after(mask, batch, head, kept, own, tile, words, end):
        tile = tile + 1
        return search(mask, batch, head, kept, own, tile, moved(words, 1), (tile + WORD - 1) // WORD * WORD, end)

    return WordSteps(first, after, words=load)


@device
def kept_tile(mask, number):
    """The number, at most that of the last kept tile."""
    _, _, kept_tiles, _ = shape(mask.states[0])
    return minimum(number, kept_tiles - 1)


@device
def states_from(mask, batch, head, kept, tile, which):
    """The bit of a tile, the lowest, and those of later tiles in its word. which: 0 for not empty, 1 for full."""
    word = mask.states[0][batch, head, kept, 2 * (tile // WORD) + which]
    return np.uint32(word >> convert(tile % WORD, np.uint32))


@device
def has_state(mask, batch, head, kept, tile, which):
    return (states_from(mask, batch, head, kept, tile, which) & np.uint32(1)) != 0


def is_shown(mask):
    """The device function (mask, batch, head, kept, tile) -> whether a tile is not empty, as far as states say."""

    @device
    def by_states(mask, batch, head, kept, tile):
        return has_state(mask, batch, head, kept, tile, 0)

    @device
    def without_states(mask, batch, head, kept, tile):
        return True

    return by_states if has_states(mask) else without_states


def steps_to_next(mask):
    return next_tile if has_states(mask) else every_tile


def needs_test(mask):
    """The device function that says whether a visible tile needs a test per element."""
    if "dense" in mask or "bits" in mask:

        @device
        def always(mask, band, batch, head, kept, tile, m0, m_end, n0, n_end):
            return True

        return always

    @device
    def partial(mask, band, batch, head, kept, tile, m0, m_end, n0, n_end):
        whole = has_state(mask, batch, head, kept, tile, 1)
        return not (whole and in_band(band, m0, m_end, n0, n_end))

    @device
    def across_an_edge(mask, band, batch, head, kept, tile, m0, m_end, n0, n_end):
        return not in_band(band, m0, m_end, n0, n_end)

    tested = partial if has_states(mask) else across_an_edge

    @device
    def in_tail(mask, band, batch, head, kept, tile, m0, m_end, n0, n_end):
        return n_end > first_of_tail(band) or tested(mask, band, batch, head, kept, tile, m0, m_end, n0, n_end)

    return in_tail if "tail" in mask else tested


def needs_test_of_full(mask):
    """`needs_test` for tiles whose states say that they are full."""
    return needs_test(tuple(kind for kind in mask if not (has_blocks(kind) or kind in (BY_INTERVALS, GAP, PLACED))))

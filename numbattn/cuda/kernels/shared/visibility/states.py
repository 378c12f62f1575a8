"""The states of tiles, empty, partial or full, by which loops skip tiles and leave out tests of elements."""

import numpy as np

from ....tile import convert, device, index, lowest_bit, minimum, shape
from .args import has_states
from .band import in_band
from .cells import first_of_tail

WORD = 32  # tiles whose states are bits of one word


@device
def every_tile(mask, batch, head, kept, tile, count):
    return 0


@device
def next_tile(mask, batch, head, kept, tile, count):
    """How many tiles, from this one on, are empty before the first that is not; `count` if all of them are."""
    steps, found = index(0), False
    while steps < count and not found:
        at = tile + steps
        step = lowest_bit(states_from(mask, batch, head, kept, at, 0))
        found = step < WORD
        steps = steps + (step if found else WORD - at % WORD)
    return minimum(steps, count)


def next_tile_of_any(rows):
    """The device function `next_tile` for so many kept tiles, from number `kept` on: tiles that are empty for all."""
    ROWS = rows

    @device
    def next_tile(mask, batch, head, kept, tile, count):
        steps, found = index(0), False
        while steps < count and not found:
            at, word = tile + steps, np.uint32(0)
            for row in range(ROWS):
                word = word | states_from(mask, batch, head, kept_tile(mask, kept + row), at, 0)
            step = lowest_bit(np.uint32(word))
            found = step < WORD
            steps = steps + (step if found else WORD - at % WORD)
        return minimum(steps, count)

    return next_tile


@device
def kept_tile(mask, number):
    """The number, or that of the last kept tile if there are fewer."""
    _, _, kept_tiles, _ = shape(mask.states[0])
    return minimum(number, kept_tiles - 1)


@device
def states_from(mask, batch, head, kept, tile, which):
    """The bits of a tile, the lowest, and of those after it in its word. which: 0 for not empty, 1 for full."""
    word = mask.states[0][batch, head, kept, 2 * (tile // WORD) + which]
    return np.uint32(word >> convert(tile % WORD, np.uint32))


@device
def has_state(mask, batch, head, kept, tile, which):
    return (states_from(mask, batch, head, kept, tile, which) & np.uint32(1)) != 0


def is_shown(mask):
    """The device function (mask, batch, head, kept, tile): whether states do not say that a tile is empty."""

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
    """The device function that tells whether a visible tile needs a test per element."""
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

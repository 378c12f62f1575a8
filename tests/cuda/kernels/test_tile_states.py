"""Which tiles are empty and which are full: beyond a word of them, by one grid of blocks or several."""

import numpy as np
import pytest

from numbattn.cuda.kernels.tile_states import TILES, tile_states
from numbattn.cuda.kernels.visibility import WORD, Cells
from tests.tools.launch import launch

from .states import (
    COLS,
    KEPT,
    ROWS,
    SEQLEN_K,
    SEQLEN_Q,
    TILE_M,
    TILE_N,
    WALKED,
    WORDS,
    random_cells,
    shown,
    sight_of,
    states_of,
)


def assert_states(states, *wanted):
    """Of each tile whether it is not empty, and whether it is full."""
    for which, want in enumerate(wanted):
        bits = np.unpackbits(states[0, ..., which::2].copy().view(np.uint8), axis=-1, bitorder="little")
        np.testing.assert_array_equal(bits[..., :WALKED], want)
        assert not bits[..., WALKED:].any()


@pytest.mark.parametrize("kept", ["q", "k"])
def test_states(rng, kept):
    cells = random_cells(rng)
    _, states = states_of(cells, kept)
    assert_states(states, *shown(cells))


def test_states_of_several_grids(rng):
    """A tile is empty if one of them shows nothing of it, full if each of them shows all of it."""
    cells, others = random_cells(rng), rng.random((1, 2, 2, 9)) < 0.6
    sight, states = sight_of(cells, ROWS, COLS, (KEPT, 2 * WORDS))
    grids = *sight.grids, Cells(others.astype(np.uint8), np.int32(5), np.int32(45))
    source = tile_states(tile_m=TILE_M, tile_n=TILE_N, kept="q", mask=("blocks", "blocks"))
    blocks = 2 * -(-KEPT * WORDS * WORD // TILES)
    lengths = np.int32(SEQLEN_Q), np.int32(SEQLEN_K)
    launch(source.function, (blocks, 1, 1), source.threads, 0, sight._replace(grids=grids), *lengths)
    assert_states(states, *(one & other for one, other in zip(shown(cells), shown(others, 5, 45))))


def test_states_of_intervals(rng):
    """Alone, and beside a grid. Every third query sees nothing, as kernels.intervals says it: from beyond the keys."""
    first, end = np.sort(rng.integers(0, SEQLEN_K + 1, (2, 1, 2, SEQLEN_Q)), axis=0).astype(np.int32)
    first[..., :4], end[..., :4] = 100, 300                     # whole tiles
    first[..., 6::3], end[..., 6::3] = SEQLEN_K, 0
    j = np.arange(SEQLEN_K)
    seen = (first[..., None] <= j) & (j < end[..., None])
    cells = random_cells(rng)
    by_intervals = [*shown(seen.astype(np.uint8), 1, 1)]
    by_both = [one & other for one, other in zip(by_intervals, shown(cells))]
    for mask, wanted in ((("intervals",), by_intervals), (("blocks", "intervals"), by_both)):
        sight, states = sight_of(cells, ROWS, COLS, (KEPT, 2 * WORDS))
        sight = sight._replace(grids=sight.grids if "blocks" in mask else (), intervals=(first, end))
        source = tile_states(tile_m=TILE_M, tile_n=TILE_N, kept="q", mask=mask)
        blocks = 2 * -(-KEPT * WORDS * WORD // TILES)
        launch(source.function, (blocks, 1, 1), source.threads, 0, sight, np.int32(SEQLEN_Q), np.int32(SEQLEN_K))
        assert_states(states, *wanted)

"""Which tiles are empty and which are full: beyond a word of them, by one grid of blocks or several."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.any.tile_states import states_blocks, tile_states
from numbattn.cuda.kernels.shared.visibility import WORD, Cells, MaskArgs
from tests.accuracy import assert_equal
from tests.tools.device import HOPPER, execute, on
from tests.tools.launch import compiled_only, launch

from ..states import (
    COLS,
    KEPT,
    ROWS,
    SEQLEN_K,
    SEQLEN_Q,
    TILE_M,
    TILE_N,
    WALKED,
    WORDS,
    mask_of,
    random_cells,
    shown,
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


def test_more_words_than_a_warp_finds(rng):
    cells, words = (rng.random((1, 1, 3, 600)) < 0.5).astype(np.uint8), -(-600 // WORD)
    states, size = np.full((1, 1, 3, 2 * words), 0xDEADBEEF, np.uint32), np.int32(1)
    mask = MaskArgs(*[np.int32(600)] * 4, grids=(Cells(cells, size, size),), states=(states,))
    source = tile_states(tile_m=1, tile_n=1, kept="q", mask=("blocks",))
    launch(source.function, (states_blocks(3, 2 * words), 1, 1), source.threads, 0, mask, np.int32(3), np.int32(600))
    for which in range(2):
        bits = np.unpackbits(states[0, 0, :, which::2].copy().view(np.uint8), axis=-1, bitorder="little")
        np.testing.assert_array_equal(bits[:, :600], cells[0, 0])


def test_states_of_several_grids(rng):
    """A tile is empty if one of them shows nothing of it, full if each of them shows all of it."""
    cells, others = random_cells(rng), rng.random((1, 2, 2, 9)) < 0.6
    mask, states = mask_of(cells, ROWS, COLS, (KEPT, 2 * WORDS))
    grids = *mask.grids, Cells(others.astype(np.uint8), np.int32(5), np.int32(45))
    source = tile_states(tile_m=TILE_M, tile_n=TILE_N, kept="q", mask=("blocks", "blocks"))
    blocks = 2 * states_blocks(KEPT, 2 * WORDS)
    lengths = np.int32(SEQLEN_Q), np.int32(SEQLEN_K)
    launch(source.function, (blocks, 1, 1), source.threads, 0, mask._replace(grids=grids), *lengths)
    assert_states(states, *(one & other for one, other in zip(shown(cells), shown(others, 5, 45))))


def test_states_of_intervals(rng):
    """Alone, and beside a grid. Every third query sees nothing, as `intervals` says it: from beyond the keys."""
    first, end = np.sort(rng.integers(0, SEQLEN_K + 1, (2, 1, 2, SEQLEN_Q)), axis=0).astype(np.int32)
    first[..., :4], end[..., :4] = 100, 300                     # whole tiles
    first[..., 6::3], end[..., 6::3] = SEQLEN_K, 0
    j = np.arange(SEQLEN_K)
    seen = (first[..., None] <= j) & (j < end[..., None])
    cells = random_cells(rng)
    by_intervals = [*shown(seen.astype(np.uint8), 1, 1)]
    by_both = [one & other for one, other in zip(by_intervals, shown(cells))]
    for mask, wanted in ((("intervals",), by_intervals), (("blocks", "intervals"), by_both)):
        assert_states(states_by(mask, cells, intervals=(first, end)), *wanted)


def states_by(kinds, cells, **intervals):
    mask, states = mask_of(cells, ROWS, COLS, (KEPT, 2 * WORDS))
    mask = mask._replace(grids=mask.grids if "blocks" in kinds else (), **intervals)
    source = tile_states(tile_m=TILE_M, tile_n=TILE_N, kept="q", mask=kinds)
    blocks = 2 * states_blocks(KEPT, 2 * WORDS)
    launch(source.function, (blocks, 1, 1), source.threads, 0, mask, np.int32(SEQLEN_Q), np.int32(SEQLEN_K))
    return states


def test_states_of_gaps(rng):
    """A tile that lies in the gap of every query is empty; with two gaps, if one of them hides it."""
    first, gap, gap_end, end = np.sort(rng.integers(0, SEQLEN_K + 1, (4, 1, 2, SEQLEN_Q)), axis=0).astype(np.int32)
    first[..., :4], gap[..., :4], gap_end[..., :4], end[..., :4] = 3, 60, 300, 398
    gap_end[:, :, 6::3] = 0                                     # no gap, by end < first
    end[..., 5] = gap_end[..., 5]                               # nothing after it
    j, cells = np.arange(SEQLEN_K), random_cells(rng)

    def seen_beside(gap, gap_end):
        return ((first[..., None] <= j) & (j < end[..., None])
                & ~((gap[..., None] <= j) & (j < gap_end[..., None]))).astype(np.uint8)

    by_gap, by_other = [*shown(seen_beside(gap, gap_end), 1, 1)], [*shown(seen_beside(gap + 60, gap_end + 90), 1, 1)]
    assert 0 < by_gap[0][:, 0].sum() < 2 * WALKED / 2
    one = states_by(("intervals", "gap"), cells, intervals=(first, end), gaps=(gap, gap_end))
    assert_states(one, *by_gap)
    gaps = gap, gap_end, gap + np.int32(60), gap_end + np.int32(90)
    two = states_by(("intervals", "gap", "gap"), cells, intervals=(first, end), gaps=gaps)
    assert_states(two, *(x & y for x, y in zip(by_gap, by_other)))


@compiled_only
@pytest.mark.parametrize("mask", [
    na.Causal() & (na.Window(20, 0) | na.Lengths(keys=4)),
    na.Segments(np.array([0, 30, 400])) & (na.Window(20, 0) | na.First(4)) & na.Causal(),
], ids=["stream", "within segments"])  # fmt: skip
def test_tiles_in_the_gap_are_empty(mask):
    """By the states that kernels loop by, from the side of queries and from that of keys."""
    kept, visible = set(), mask.dense(400, 400)

    def run_states(key, source, grid, *arguments):
        if key.name in ("intervals", "tile_states"):
            execute(key, source, grid, *arguments)
        if key.name == "tile_states":
            about, (given, *_) = dict(key.parameters), arguments
            assert_empty(given.states[0][0, 0], visible, about["tile_m"], about["tile_n"], about["kept"])
            kept.add(about["kept"])

    q = np.zeros((1, 1, 400, 64), np.float16)
    with on(HOPPER, run_states):
        _, saved = na.attention_forward(q, q, q, mask=mask)
        na.attention_backward(q, saved)
    assert kept == {"q", "k"}


def assert_empty(words, visible, tile_m, tile_n, kept):
    tiles = np.array([[visible[m0 : m0 + tile_m, n0 : n0 + tile_n].any() for n0 in range(0, visible.shape[1], tile_n)]
                      for m0 in range(0, visible.shape[0], tile_m)])  # fmt: skip
    tiles = tiles if kept == "q" else tiles.T
    bits = words[:, ::2, None] >> np.arange(32, dtype=np.uint32) & 1
    assert_equal(bits.reshape(len(words), -1)[:, : tiles.shape[1]], tiles)


FAULTS = {
    "minimum(m0 + TILE_M, seqlen_q) - 1": "minimum(m0 + TILE_M, seqlen_q)",
    "minimum(n0 + TILE_N, seqlen_k) - 1": "n0 + TILE_N - 1",
    "minimum((run + 1) * WORDS, words)": "run * WORDS + 1",
    "-(-words // 2 // WORDS)": "1",
    "some or cell != 0": "cell != 0",
    "minimum(one(mask": "max(one(mask",
    "(kept_tile, tile) if KEEPS_Q else (tile, kept_tile)": "(kept_tile, tile)",
    "if m0 < seqlen_q and n0 < seqlen_k": "if True",
    "first[i] < n_end and n0 < end[i]": "first[i] < n0 and n0 < end[i]",
    "every and (first[i] <= n0 and n_end <= end[i])": "every and first[i] <= n0",
}

"""The states of tiles, and the walk over those that are not empty, beyond a word of them."""

import numpy as np
import pytest
from numba import cuda

from numbattn.cuda.kernels.visibility import Cells, Sight, next_tile, tile_states
from numbattn.cuda.plan import STATES_TILES, STATES_WORD
from numbattn.cuda.tile import WARPGROUP
from tests.tools.launch import launch

TILE_M, TILE_N, ROWS, COLS, SEQLEN_Q, SEQLEN_K = 4, 6, 3, 10, 10, 400
KEPT, WALKED = -(-SEQLEN_Q // TILE_M), -(-SEQLEN_K // TILE_N)


@pytest.fixture
def cells(rng):
    """Of two matrices: few are shown, and a run of them that is longer than a word of tiles is hidden."""
    found = rng.random((1, 2, -(-SEQLEN_Q // ROWS), -(-SEQLEN_K // COLS))) < 0.15
    found[0, 1, :, 3:30] = False
    found[0, 0, 0], found[..., -1] = True, True
    return found.astype(np.uint8)


def sight_of(cells, rows, cols, words):
    states = np.full((1, 2, *words), 0xDEADBEEF, np.uint32)
    numbers = (np.int32(x) for x in (-1000, 1000, 1000, 1000))
    return Sight(*numbers, (), (Cells(cells, np.int32(rows), np.int32(cols)),), (states,)), states


def shown(cells):
    """Whether some and whether all elements of each tile [head, tile of queries, tile of keys] are."""
    whole = cells[0].repeat(ROWS, 1).repeat(COLS, 2)[:, :SEQLEN_Q, :SEQLEN_K] != 0
    tiles = [[whole[:, m : m + TILE_M, n : n + TILE_N] for n in range(0, SEQLEN_K, TILE_N)]
             for m in range(0, SEQLEN_Q, TILE_M)]  # fmt: skip
    for of in np.any, np.all:
        yield np.array([[of(tile, (1, 2)) for tile in row] for row in tiles]).transpose(2, 0, 1)


def states_of(cells, kept):
    """The states as the kernel finds them, and those that it is to find; `kept` queries, or keys by turning it all."""
    words = -(-WALKED // STATES_WORD)
    if kept == "q":
        sight, states = sight_of(cells, ROWS, COLS, (KEPT, 2 * words))
        sizes, lengths = {"tile_m": TILE_M, "tile_n": TILE_N}, (SEQLEN_Q, SEQLEN_K)
    else:
        sight, states = sight_of(cells.swapaxes(2, 3), COLS, ROWS, (KEPT, 2 * words))
        sizes, lengths = {"tile_m": TILE_N, "tile_n": TILE_M}, (SEQLEN_K, SEQLEN_Q)
    source = tile_states(**sizes, kept=kept, mask=("band", "blocks"))
    blocks = 2 * -(-KEPT * words * STATES_WORD // STATES_TILES)
    launch(source.function, (blocks, 1, 1), source.threads, 0, sight, *map(np.int32, lengths))
    return sight, states


@pytest.mark.parametrize("kept", ["q", "k"])
def test_states(cells, kept):
    _, states = states_of(cells, kept)
    for which, want in enumerate(shown(cells)):
        bits = np.unpackbits(states[0, ..., which::2].copy().view(np.uint8), axis=-1, bitorder="little")
        np.testing.assert_array_equal(bits[..., :WALKED], want)
        assert not bits[..., WALKED:].any()


def test_next_tile(cells):
    sight, _ = states_of(cells, "q")
    some, _ = shown(cells)
    left = np.full((2, KEPT, WALKED), -1, np.int32)

    def walk(sight, left, end):
        tile = cuda.threadIdx.x
        if tile < left.shape[2]:
            for head in range(left.shape[0]):
                for kept in range(left.shape[1]):
                    left[head, kept, tile] = next_tile(sight, np.int32(0), head, kept, np.int32(tile), end - tile)

    for end in (WALKED, WALKED - 7):
        launch(walk, (1, 1, 1), WARPGROUP, 0, sight, left, np.int32(end))
        for head, kept, tile in np.ndindex(2, KEPT, end):
            ahead = np.flatnonzero(some[head, kept, tile:end])
            assert left[head, kept, tile] == (ahead[0] if ahead.size else end - tile)

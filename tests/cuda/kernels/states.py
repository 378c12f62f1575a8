"""Blocks of a mask, and the states of tiles by them: as the kernel finds them, and as they are."""

import numpy as np

from numbattn.cuda.kernels.any.tile_states import states_blocks, tile_states
from numbattn.cuda.kernels.shared.visibility import WORD, Cells, MaskArgs
from tests.tools.launch import launch

TILE_M, TILE_N, ROWS, COLS, SEQLEN_Q, SEQLEN_K = 4, 6, 3, 10, 10, 400
KEPT, WALKED = -(-SEQLEN_Q // TILE_M), -(-SEQLEN_K // TILE_N)
WORDS = -(-WALKED // WORD)


def random_cells(rng):
    """Of two matrices: few are shown, and a run of them that is longer than a word of tiles is hidden."""
    found = rng.random((1, 2, -(-SEQLEN_Q // ROWS), -(-SEQLEN_K // COLS))) < 0.15
    found[0, 1, :, 3:30] = False
    found[0, 0, 0], found[..., -1] = True, True
    return found.astype(np.uint8)


def mask_of(cells, rows, cols, words):
    states = np.full((1, 2, *words), 0xDEADBEEF, np.uint32)
    numbers = (np.int32(x) for x in (-1000, 1000, 1000, 1000))
    return MaskArgs(*numbers, grids=(Cells(cells, np.int32(rows), np.int32(cols)),), states=(states,)), states


def shown(cells, rows=ROWS, cols=COLS):
    """Whether some and whether all elements of each tile [head, tile of queries, tile of keys] are."""
    whole = cells[0].repeat(rows, 1).repeat(cols, 2)[:, :SEQLEN_Q, :SEQLEN_K] != 0
    tiles = [[whole[:, m : m + TILE_M, n : n + TILE_N] for n in range(0, SEQLEN_K, TILE_N)]
             for m in range(0, SEQLEN_Q, TILE_M)]  # fmt: skip
    for of in np.any, np.all:
        yield np.array([[of(tile, (1, 2)) for tile in row] for row in tiles]).transpose(2, 0, 1)


def states_of(cells, kept):
    """The states as the kernel finds them, and those that it is to find; `kept` queries, or keys by turning it all."""
    if kept == "q":
        mask, states = mask_of(cells, ROWS, COLS, (KEPT, 2 * WORDS))
        sizes, lengths = {"tile_m": TILE_M, "tile_n": TILE_N}, (SEQLEN_Q, SEQLEN_K)
    else:
        mask, states = mask_of(cells.swapaxes(2, 3), COLS, ROWS, (KEPT, 2 * WORDS))
        sizes, lengths = {"tile_m": TILE_N, "tile_n": TILE_M}, (SEQLEN_K, SEQLEN_Q)
    source = tile_states(**sizes, kept=kept, mask=("blocks",))
    blocks = 2 * states_blocks(KEPT, 2 * WORDS)
    launch(source.function, (blocks, 1, 1), source.threads, 0, mask, *map(np.int32, lengths))
    return mask, states

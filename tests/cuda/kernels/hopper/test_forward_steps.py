"""What a consumer of the forward pass knows of its tiles of keys."""

import numpy as np

from numbattn.cuda.kernels.hopper.forward_steps import own_steps
from numbattn.cuda.kernels.hopper.forward_tiles import ROWS
from numbattn.cuda.kernels.hopper.walk import ConsumerTile
from numbattn.cuda.kernels.shared.visibility import WORD, word_steps
from numbattn.cuda.tile import WARPGROUP, index, thread_index
from tests.tools.launch import launch

from ..states import KEPT, WALKED, random_cells, shown, states_of


def test_tiles_that_are_empty_for_a_consumer(rng):
    """From each tile on, in its word and beyond."""
    cells = random_cells(rng)
    cells[..., -6:] = 0
    mask, _ = states_of(cells, "q")
    words_of = word_steps(1).words

    def ask(mask, steps):
        n_block = index(thread_index())
        if n_block < steps.shape[2]:
            for head in range(steps.shape[0]):
                for kept in range(steps.shape[1]):
                    own, here = index(kept), index(head)
                    tile = ConsumerTile(index(0), here, own * ROWS, index(0), index(0), index(steps.shape[2]), ())
                    words = words_of(mask, 0, here, own, own, n_block)
                    steps[head, kept, n_block] = own_steps(tile, mask, n_block, words)

    steps = np.full((2, KEPT, WALKED), -1, np.int32)
    launch(ask, (1, 1, 1), WARPGROUP, 0, mask, steps)
    some, _ = shown(cells)
    for head, kept, n_block in np.ndindex(2, KEPT, WALKED):
        ahead = np.flatnonzero(some[head, kept, n_block:])
        got = steps[head, kept, n_block]
        assert got == ahead[0] if ahead.size else got >= WALKED - n_block
    assert (steps > WORD).any()


FAULTS = {
    "    if steps == WORD:\n": "    if steps > WORD:\n",
    "(n_block // WORD + 1) * WORD, kept_tile": "(n_block // WORD + 2) * WORD, kept_tile",
    "steps = beyond - n_block + next_tile": "steps = beyond + next_tile",
}

"""How the tiles of keys are shared out among blocks. Gradients: see test_api."""

import numpy as np

import numbattn as na
from numbattn.cpu.backward import TILE_N, backward


def test_blocks_share_the_tiles_of_all_segments(rng, monkeypatch):
    """Equally, and each tile is one block's, so that no two add to the same dK."""
    touched = []

    def one_by_one(kernel, blocks, work, scratch, *args):
        dk = args[5]
        for block in range(blocks):
            before = dk.copy()
            kernel(block, block + 1, np.zeros(1, np.int32), scratch(), *args)
            touched.append((dk != before).any(axis=(0, 1, 3)))

    monkeypatch.setitem(backward.__globals__, "launch", one_by_one)
    segments = np.arange(5) * 2 * TILE_N  # of two tiles each
    q, k, v, do = rng.standard_normal((4, segments[-1], 4))
    o, saved = na.attention_forward(q, k, v, mask=na.Segments(segments))
    na.attention_backward(do, saved)
    assert [rows.sum() for rows in touched] == [TILE_N] * 8
    assert (np.sum(touched, axis=0) == 1).all()

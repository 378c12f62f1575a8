"""In tiles of 16 x 16 pairs, or two of 16 x 32, simulated; test_points has those of a plan."""

import pytest

import numbattn as na
from numbattn.cuda.kernels.points import sums
from tests.tools.device import AMPERE, TURING
from tests.tools.launch import simulated_only

from .calls import MASKS, TILES, check_far, check_mask, check_number, check_others_stay, check_tiles

pytestmark = simulated_only


@pytest.fixture(params=TILES)
def sizes(request, monkeypatch):
    """Dimensions, and features of b, for which there are only these tiles."""
    d, e, tiles = TILES[request.param]
    monkeypatch.setattr(sums, "rows_of", lambda table, work: (tiles,))
    return {"d": d, "e": e}


def test_tiles(rng, sizes):
    check_tiles(rng, "sums", sizes)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, sizes, mask):
    check_mask(rng, "sums", sizes, mask)


def test_number_of_a_kind(rng, sizes):
    check_number(rng, "sums", sizes)


@pytest.mark.parametrize(("device", "tiles"), [(AMPERE, "in turn"), (TURING, "CUDA cores")])
def test_points_far_off(rng, monkeypatch, device, tiles):
    """In several tiles, and in segments."""
    monkeypatch.setattr(sums, "rows_of", lambda table, work: TILES[tiles][-1:])
    check_far(rng, "sums", 11, device=device, mask=na.Segments([1, 5, 20], [0, 4, 31]))


def test_only_near_pairs_are_recomputed(rng):
    check_others_stay(rng, 20, 2, AMPERE)


FAULTS = {
    "mB[block.batch, block.head][block.key : block.seen_key]": "mB[block.batch, block.head]",
    "[block.query : block.end_query]": "[block.query :]",
    "shift_of(R, part.stage, part.chunk), kind_number)": "shift_of(R, part.stage, 0), kind_number)",
    "loop_of(add, sums.begin, sums.end)": "loop_of(add, sums.begin)",
    "in_sight(kappa_of(": "(kappa_of(",
    "cuda/kernels/points/loop.py": {
        "found = end(found, new)": "found = new",
        "sync_threads()                              # all": "pass  # all",
        "needs_mask(mask, block, this)": "needs_mask(mask, block, n_block)",
        "(end + TILE_N - 1) // TILE_N": "end // TILE_N",
        "n_block = n_block + 1\n": "",
        "block[:4], n_block * TILE_N": "block[:4], n_block",
    },
    "cuda/kernels/points/pairs.py": {
        "(norms + norms_of(part.stage, part.chunk))": "(norms - norms_of(part.stage, part.chunk))",
        "rows, cols, m0, part.n0, rate": "rows, cols, m0, 0, rate",
        "mY[batch, head][block.key : block.seen_key]": "mY[batch, head]",
        "[block.batch, block.head][block.key : block.seen_key], stage, n0)\n\n        if dim":
            "[block.batch, block.head], stage, n0)\n\n        if dim",
        "return R + line_of": "return R - line_of",
        "full(TILE, NOTHING)": "full(TILE, 1)",
    },
    "cuda/kernels/points/features.py": {
        "anywhere(norms * SHARE > T)": "anywhere(-norms > T)",
        "x_norms * BOUND + y_norms * BOUND > T, ZERO": "T > ZERO, ZERO",
        "T * -rate": "-T",
        "columns(allocate(PLACE, line), chunk, CHUNKS)": "columns(allocate(PLACE, line), 0, CHUNKS)",
        "allocate(PLACE, stage * COUNT + number), matrix": "allocate(PLACE, number), matrix",
        "others(xs, ys) + term": "term",
        "return one + other": "return other",
    },
}  # fmt: skip

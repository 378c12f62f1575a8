"""In tiles of 16 x 16 pairs, or two of 16 x 32, simulated; test_points has those of a plan."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.points import sums
from numbattn.cuda.kernels.points.arguments import PointTiles
from numbattn.points import kinds
from tests.tools.launch import simulated_only

from .calls import check, drawn

pytestmark = simulated_only
TILES = {
    "few features": (3, 2, PointTiles("fma", 16, 32, 64, lanes=8, chunks=2)),
    "many of b": (2, 6, PointTiles("mma", 16, 16, 32)),
    "many dimensions": (10, 2, PointTiles("mma", 32, 16, 64)),
    "CUDA cores": (10, 6, PointTiles("fma", 16, 16, 64, lanes=8)),
    "in turn": (10, 6, PointTiles("mma", 32, 16, 64, stages=1)),
}
MASKS = {
    "window": lambda: na.Window(20, 9),
    "causal": lambda: na.Causal(offset=9),
    "lengths": lambda: na.Lengths(np.array([[37]]), np.array([[19]])),
    "blocks": lambda: na.BlockSparse(np.array([[[[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]]], bool), (7, 11)),
    "segments": lambda: na.Segments([1, 5, 20], [0, 18, 37]),
}


@pytest.fixture(params=TILES)
def sizes(request, monkeypatch):
    """Dimensions, and features of b, for which there are only these tiles."""
    d, e, tiles = TILES[request.param]
    monkeypatch.setattr(sums, "rows_of", lambda table, work: (tiles,))
    return {"d": d, "e": e}


def test_tiles(rng, sizes):
    x, y, b, c = drawn(rng, batch=(2, 2), m=21, n=39, **sizes)
    rows, columns = rng.standard_normal((2, 2, 21)), rng.standard_normal((2, 2, 39))
    check(x, y, b, c, only=("sums",), rows=rows, columns=columns)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, sizes, mask):
    x, y, b, c = drawn(rng, m=21, n=40, **sizes)
    if mask == "lengths":
        x[:, :, 19:], y[:, :, 37:], b[:, :, 37:] = np.nan, np.nan, np.nan
    check(x, y, b, c, mask=MASKS[mask](), only=("sums",))


def test_number_of_a_kind(rng, sizes):
    check(*drawn(rng, m=16, n=16, **sizes), kinds.Polynomial(2, 0.5), only=("sums",))


FAULTS = {
    "mB[block.batch, block.head][block.key : block.seen_key]": "mB[block.batch, block.head]",
    "[block.query : block.end_query]": "[block.query :]",
    "shift_of(R, part.stage, part.chunk), kind_number)": "shift_of(R, part.stage, 0), kind_number)",
    "loop_of(add, sums.begin, sums.end)": "loop_of(add, sums.begin)",
    "in_sight(kappa_of(": "(kappa_of(",
    "cuda/kernels/points/loop.py": {
        "found = end(found, new)": "found = new",
        "this * TILE_N + chunk * COLS": "this * TILE_N",
        "needs_mask(mask, block, this)": "needs_mask(mask, block, n_block)",
        "(end + TILE_N - 1) // TILE_N": "end // TILE_N",
        "n_block = n_block + 1\n": "",
        "block[:4], n_block * TILE_N": "block[:4], n_block",
    },
    "cuda/kernels/points/pairs.py": {
        "norms + norms_of(stage, chunk), 0)": "norms - norms_of(stage, chunk), 0)",
        "[block.batch, block.head][block.key : block.seen_key], stage, n0)\n\n        if dim":
            "[block.batch, block.head], stage, n0)\n\n        if dim",
        "return R + line_of": "return R - line_of",
        "full(TILE, NOTHING)": "full(TILE, 1)",
    },
    "cuda/kernels/points/features.py": {
        "columns(allocate(PLACE, line), chunk, CHUNKS)": "columns(allocate(PLACE, line), 0, CHUNKS)",
        "allocate(PLACE, stage * COUNT + number), matrix": "allocate(PLACE, number), matrix",
        "others(xs, ys) + term": "term",
        "return one + other": "return other",
        "ROWS, m0), ACC) * UNIT": "ROWS, m0), ACC)",
    },
}  # fmt: skip

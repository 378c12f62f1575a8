"""In tiles of 16 x 16 pairs, or two of 16 x 32, simulated; test_points has those of a plan."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.points import gradient
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
    monkeypatch.setattr(gradient, "rows_of", lambda table, work: (tiles,))
    return {"d": d, "e": e}


def test_tiles(rng, sizes):
    x, y, b, c = drawn(rng, batch=(2, 2), m=21, n=39, **sizes)
    rows, columns = rng.standard_normal((2, 2, 21)), rng.standard_normal((2, 2, 39))
    check(x, y, b, c, only=("gradient",), rows=rows, columns=columns)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, sizes, mask):
    x, y, b, c = drawn(rng, m=21, n=40, **sizes)
    if mask == "lengths":
        x[:, :, 19:], y[:, :, 37:], b[:, :, 37:] = np.nan, np.nan, np.nan
    check(x, y, b, c, mask=MASKS[mask](), only=("gradient",))


def test_number_of_a_kind(rng, sizes):
    check(*drawn(rng, m=16, n=16, **sizes), kinds.Polynomial(2, 0.5), only=("gradient",))


FAULTS = {
    "mC[batch, head][block.query : block.seen_query]": "mC[batch, head]",
    "derivative=True": "derivative=False",
    "slope * inner(C": "inner(C",
    "X * row_sum(total) - WY": "X * row_sum(total) + WY",
    "2 / unit)": "2.0)",
    "if of_products(kind):": "if not of_products(kind):",
    "points = mX[batch, head][block.query : block.seen_query]": "points = mX[batch, head]",
    "cuda/kernels/points/loop.py": {"query + maximum(band[2], 1)": "query + segment.queries"},
    "cuda/kernels/points/features.py": {
        "part_sum(W * (x - y * UNIT), total)": "part_sum(W * (x - y), total)",
        "row_sum(total) * FACTOR": "row_sum(total)",
    },
}

"""In tiles of 16 x 16 pairs, or two of 16 x 32, simulated; test_points has those of a plan."""

import pytest

from numbattn.cuda.kernels.points import gradient
from tests.tools.launch import simulated_only

from .calls import MASKS, TILES, check_mask, check_number, check_tiles

pytestmark = simulated_only


@pytest.fixture(params=TILES)
def sizes(request, monkeypatch):
    """Dimensions, and features of b, for which there are only these tiles."""
    d, e, tiles = TILES[request.param]
    monkeypatch.setattr(gradient, "rows_of", lambda table, work: (tiles,))
    return {"d": d, "e": e}


def test_tiles(rng, sizes):
    check_tiles(rng, "gradient", sizes)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, sizes, mask):
    check_mask(rng, "gradient", sizes, mask)


def test_number_of_a_kind(rng, sizes):
    check_number(rng, "gradient", sizes)


FAULTS = {
    "mC[batch, head][block.query : block.seen_query]": "mC[batch, head]",
    "pairs.ACC, DERIVATIVE, shifted": "pairs.ACC, shifted",
    "slope * inner(C": "inner(C",
    "X * row_sum(total) - WY": "X * row_sum(total) + WY",
    "part_differences_step(dim), 2.0)": "part_differences_step(dim), 1.0)",
    "if kind.is_of_product:": "if not kind.is_of_product:",
    "points = mX[batch, head][block.query : block.seen_query]": "points = mX[batch, head]",
    "cuda/kernels/points/loop.py": {"query + maximum(band[2], 1)": "query + segment.queries"},
    "cuda/kernels/points/features.py": {
        "part_sum(W * (x - y), total)": "part_sum(W * (x + y), total)",
        "row_sum(total) * FACTOR": "row_sum(total)",
    },
}

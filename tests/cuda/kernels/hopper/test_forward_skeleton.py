"""One block that draws all work tiles, simulated: the kernels that the skeleton is of."""

import numpy as np
import pytest

import numbattn as na
from tests.tools.launch import simulated_only

from . import test_forward, test_tangent

pytestmark = simulated_only


@pytest.fixture(params=["forward", "tangent"])
def check(request):
    return {"forward": test_forward.check, "tangent": test_tangent.check}[request.param]


@pytest.mark.parametrize("ascending", [0, 1])
def test_causal(rng, check, ascending):
    """The two consumers see different keys."""
    check(rng, m=190, n=190, causal=True, ascending=ascending)


def test_window(rng, check):
    """The second consumer skips keys that the first one sees."""
    check(rng, m=250, n=250, mask=na.Window(30, 9))


def test_heads_packed_into_a_work_tile(rng, check):
    check(rng, heads=4, heads_k=2, m=60, n=70, causal=True, heads_per_tile=2)


def test_a_work_tile_that_sees_nothing(rng, check):
    check(rng, m=130, n=20, mask=na.Causal(offset=-128))


def test_lengths(rng, check):
    mask = na.Lengths(np.array([[70, 17]]), np.array([[19, 100]]))
    check(rng, heads=2, m=100, n=150, poison=np.nan, mask=mask)


def test_blocks(rng, check):
    blocks = np.array([[[[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]]], bool)
    check(rng, m=192, n=256, mask=na.BlockSparse(blocks, (64, 64)))


def test_several_work_tiles(rng, check):
    """More of them than are scheduled ahead, and more tiles of Q, K and V than there are stages."""
    check(rng, heads=5, m=70, n=150)


def test_dropout(rng, check):
    check(rng, batch=2, heads=2, m=70, n=70, dropout=na.Dropout(0.3, seed=5), at_once=2, blocks=2)


FAULTS = {
    "advance(Q, CONSUMERS)": "advance(Q, 1)",
    "            tma_store_wait()\n": "",
    "head * args.heads_per_tile": "head",
    "if n_block >= end:": "if n_block > end:",
    "        acquire(Q)\n        if": "        if",
    "and count >= Q_STAGES:": "and count > Q_STAGES:",
    "number < m_blocks * matrices": "number <= m_blocks * matrices",
    "(work.batch, head, stored_at))": "(work.batch, work.head, stored_at))",
    "        commit(W, NO_WORK)\n": "",
    "while head >= heads_per_tile:": "while head > heads_per_tile:",
    "row * ROWS": "row",
    "        finish(args.counters, grid_size())\n": "",
    "end = count + Q_STAGES": "end = count",
    "            wait(W)\n            work": "            work",
    "release(W)\n            W = advance(W, 1)\n": "W = advance(W, 1)\n",
    "                acquire(K)\n": "",
    "                acquire(V)\n": "",
    "work.head // args.group_size": "work.head",
    "first_key + n_block * TILE_N\n                acquire": "first_key + n_block\n                acquire",
    "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated": {
        "row = work.segment.first_query + m0": "row = m0",
        "m0 + ROWS <= segment.queries": "m0 <= segment.queries",
    },
    "K, V, n_block, known = skip(K, V, tile, here.mask, tile.n_block, known, first)": "n_block = first",
    "matrices[NUMBER], at)": "matrices[0], at)",
}

"""Gradients of tables by warpgroups; those of biases are in scores/test_bias."""

import numpy as np
import pytest

import numbattn as na
from tests.accuracy import check, random
from tests.scores import test_parts as scores
from tests.tools.device import HOPPER, on
from tests.tools.launch import compiled_only

pytestmark = compiled_only


@pytest.mark.slow  # simulated: scores/test_relative
def test_a_table_of_all_batches(rng, sizes):
    """A block has several diagonals of tiles."""
    sizes(2, 2, 140, 150)
    with on(HOPPER._replace(multiprocessors=1)):
        score = [na.Sink(random(rng, 2, np.float16)), na.RelativeBias(random(rng, (2, 61), np.float16))]
        check(*scores.qkv(rng, np.float16, heads_k=1, d=8, e=8), rng, score=score, mask=na.Window(60, 100))


FAULTS = {
    "mSums[at.share.own_batch, at.share.own_head, at": "mSums[at.share.own_batch, 0, at",
    "K, V = load_tiles(K, V, given": "load_tiles(K, V, given",
    "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads[compiled-sums]": {
        "at.m_first * TILE_M + consumer * ROWS, at.n_first": "at.m_first * TILE_M, at.n_first",
        "mDO, batch, head, m0 + consumer * ROWS, 0": "mDO, batch, head, m0, 0",
        "at.share.part][:, at.n_first :]": "at.share.part]",
    },
    "cuda/plan/test_planner.py::test_gradients_by_warpgroups": {
        "part.takes_few_registers or part.gradient == ENTRIES": "part.gradient == ENTRIES",
        "is_looked_up(work.mask) or work.problem.dropout": "is_looked_up(work.mask)",
        "few and not (": "not (",
        "> 64": "> 6400",
    },
    "cuda/words/test_tiers.py": {
        "(spec,), WGMMA)\n\n\ndef diagonals_route": "(spec,))\n\n\ndef diagonals_route",
    },
}

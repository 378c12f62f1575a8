"""Gradients of tables by warpgroups; those of biases are in scores/test_bias."""

import numpy as np

import numbattn as na
from tests import test_scores as scores
from tests.accuracy import check, random
from tests.tools.device import HOPPER, on
from tests.tools.launch import compiled_only

pytestmark = compiled_only


def test_a_table_of_all_batches(rng, sizes):
    """A block has several diagonals of tiles."""
    sizes(2, 2, 140, 150)
    with on(HOPPER._replace(multiprocessors=1)):
        score = [na.Sink(random(rng, 2, np.float16)), na.RelativeBias(random(rng, (2, 61), np.float16))]
        check(*scores.qkv(rng, np.float16, heads_k=1, d=8, e=8), rng, score=score, mask=na.Window(60, 100))

"""Slopes, and their gradients."""

import numpy as np
import pytest

import numbattn as na
from tests.accuracy import check, random
from tests.masks.calls import ONE_KEY
from tests.scores import test_parts as scores
from tests.tools.device import HOPPER, TURING, on
from tests.tools.launch import compiled_only, simulated_only

pytestmark = compiled_only  # but for the test that says otherwise

LEADS = [(2,), (2, 1), (1, 1), ()]  # axes of slopes, of 2 batches and 2 heads


@pytest.mark.slow  # simulated: hopper/test_linear_bias
@pytest.mark.parametrize(("lead", "heads_k", "d"), [*((lead, 1, 24) for lead in LEADS), ((2,), 2, 24), ((), 2, 80)])
def test_slopes_of_all_heads_or_some(rng, sizes, lead, heads_k, d):
    """On Hopper, with kernels that keep queries, or keys."""
    sizes(2, 2, 70, 90)
    with on(HOPPER):
        check(*scores.qkv(rng, np.float16, heads_k=heads_k, d=d, e=d), rng, score=[na.Sink(random(rng, 2, np.float16)),
              na.Alibi(random(rng, lead, np.float16) / 50)], mask=na.Window(60, 40))  # fmt: skip


@simulated_only
@pytest.mark.parametrize("seqlen_k", [1, 29])
def test_slopes_of_a_single_query(rng, seqlen_k):
    """Of no axes, of inputs with two."""
    with on(TURING):
        q, k = random(rng, (1, 8), np.float32), random(rng, (seqlen_k, 8), np.float32)
        check(q, k, k, rng, score=[na.Alibi(np.float32(0.1)), na.Bias(random(rng, seqlen_k, np.float32))], bits=ONE_KEY)


FAULTS = {
    "test_slopes_of_all_heads_or_some": {
        "distance(key, offsets, n0) * slope": "distance(key, offsets, m0) * slope",
        "own(slopes[batch, head], scores)": "own(slopes[batch, 0], scores)",
        "total - dS * distance(": "total + dS * distance(",
    },
}

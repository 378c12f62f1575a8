"""Tables, and their gradients."""

import numpy as np
import pytest

import numbattn as na
from tests import test_scores as scores
from tests.accuracy import check, random
from tests.tools.device import HOPPER, TURING, on
from tests.tools.launch import compiled_only, simulated_only


@pytest.mark.parametrize(("device", "dtype"), [
    pytest.param(HOPPER, np.float16, id="Hopper", marks=simulated_only),  # compiled: hopper/test_score_gradient
    pytest.param(TURING, np.float32, id="any GPU", marks=compiled_only),
])  # fmt: skip
def test_entries_far_from_the_diagonal(rng, sizes, device, dtype):
    """Tiles of which all elements are added the first entry of the table, or the last one."""
    sizes(1, 1, 140, 140)
    with on(device):
        score = na.RelativeBias(random(rng, 9, dtype), offset=10)
        check(*scores.qkv(rng, dtype, heads_k=1, d=8, e=8), rng, score=score)

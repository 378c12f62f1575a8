"""Slopes that the tensor cores add to S."""

import numpy as np
import pytest

import numbattn as na
from tests.tools.device import HOPPER, on
from tests.tools.launch import compiled_only, simulated_only

from ....accuracy import check
from ....scores import test_parts as scores

pytestmark = compiled_only  # but for what says otherwise


@pytest.mark.parametrize(("dtype", "heads", "m", "n", "d", "options"), [
    pytest.param("float16", 3, 256, 256, 8, {}, marks=pytest.mark.slow),
    pytest.param("bfloat16", 1, 128, 400, 128, {"mask": na.Window(300, 0)}, marks=pytest.mark.slow),
    pytest.param("float16", 2, 70, 330, 8, {"mask": na.Causal(40)}, marks=pytest.mark.slow),
    pytest.param("bfloat16", 1, 128, 192, 200, {"causal": True}, marks=simulated_only),
    pytest.param("float16", 1, 100, 560, 8, {"mask": na.Segments([10, 40, 100], [0, 60, 560]) & na.Causal()},
                 marks=pytest.mark.slow),
], ids=["both sides", "window", "diagonal elsewhere", "wide", "segments"])  # fmt: skip
def test_slopes_far_from_the_diagonal(rng, sizes, dtype, heads, m, n, d, options):
    """There the tensor cores add them to S; slopes of which lse shows all the bits of a float32, and one beside which a
    row's maximum is tiny."""
    sizes(1, heads, m, n)
    slopes = np.array([1 / 30, -0.102, 3], np.float32)[:heads]
    score = [na.Alibi(slopes, gradient=False), na.Sink(0.5, gradient=False)]
    with on(HOPPER):
        check(*scores.qkv(rng, np.dtype(dtype), heads_k=1, d=d, e=d), rng, bits=2, score=score, **options)


@simulated_only
def test_slopes_far_from_the_diagonal_simulated(rng, sizes):
    sizes(1, 1, 128, 192)
    with on(HOPPER):
        check(*scores.qkv(rng, np.float16, heads_k=1, d=8, e=8), rng, score=na.Alibi(np.float32(0.1), gradient=False))


FAULTS = {
    ("test_slopes_far_from_the_diagonal", "test_slopes_far_from_the_diagonal_simulated"): {
        "row_index(RIGHT, -MIDDLE)": "row_index(RIGHT, 0)",
        "PIECES = 3": "PIECES = 2",
        "            fence_async_proxy()\n": "",
        "k == 2, whole - high - middle": "k == 2, whole - high",
        "slopes[batch, head] * scores.inverse_scale": "slopes[batch, head]",
        "key - n0)": "key)",
        "bias.at + TILE_M - 1:": "bias.at:",
        "Side(-bias.slope,": "Side(bias.slope,",
        "operand(-bias.pieces, COLUMNS)": "operand(bias.pieces, COLUMNS)",
        "(bias.at + 1, 0) // TILE_N": "(bias.at + TILE_N, 0) // TILE_N",
        "bias.at - MIDDLE - n_block": "bias.at - n_block",
    },
}

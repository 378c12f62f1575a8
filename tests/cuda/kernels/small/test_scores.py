"""Scores of small matrices, and their gradients, as a plan has them: on a device whose few blocks take several matrices
in turn."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.small.steps import SmallTiles
from tests.accuracy import exact, random, rounding, wrong_elements
from tests.tools.device import AMPERE, on

M, N, HEADS = 9, 13, 2
LITTLE = AMPERE._replace(multiprocessors=1, shared=24 << 10)


def shared(rng, *shape):
    return random(rng, shape, np.float32)


SCORES = {
    "bias by head": lambda rng: na.Bias(shared(rng, HEADS, M, N)),
    "bias for all": lambda rng: na.Bias(shared(rng, M, N)),
    "bias of keys": lambda rng: na.Bias(shared(rng, 1, N)),
    "two biases": lambda rng: [na.Bias(shared(rng, HEADS, M, N)), na.Bias(shared(rng, M, 1))],
    "bias of its own": lambda rng: na.Bias(shared(rng, 5, HEADS, M, N)),
    "distances": lambda rng: na.RelativeBias(shared(rng, HEADS, 7)),
    "as many distances as scores": lambda rng: na.RelativeBias(shared(rng, M * N)),
    "slopes": lambda rng: na.Alibi(shared(rng, HEADS)),
    "slopes and bias": lambda rng: [na.Alibi(shared(rng, HEADS)), na.Bias(shared(rng, HEADS, M, N))],
    "bias, capped": lambda rng: [na.Bias(shared(rng, HEADS, M, N)), na.Softcap(2.0)],
    "sink and bias": lambda rng: [na.Sink(shared(rng, HEADS)), na.Bias(shared(rng, HEADS, M, N))],
}


@pytest.mark.parametrize("score", SCORES)
def test_gradients(rng, world, score):
    q, k, v, do = (random(rng, (5, HEADS, rows, 8), np.float32) for rows in (M, N, N, M))
    options, dlse = {"score": SCORES[score](rng), "causal": True}, random(rng, (5, HEADS, M), np.float32)
    with on(LITTLE, small=True) as gpu:
        o, saved = na.attention_forward(q, k, v, **options)
        grads = na.attention_backward(do, saved, dlse=dlse)
    steps = [step for program in gpu.programs.values() for step in program.plan.steps]
    assert sum(isinstance(step.tiles, SmallTiles) for step in steps) == 2
    found, wanted = (o, saved.lse, *grads, *grads.score), exact(do, q, k, v, dlse, **options)
    for got, want, error in zip(found, wanted, rounding(do, q, k, v, dlse, **options), strict=True):
        assert not wrong_elements(got, want, error).any()

"""Scores of small matrices, and their gradients, as a plan has them: on a device whose few blocks take several matrices
in turn."""

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.small.steps import SmallTiles
from tests.accuracy import exact, random
from tests.rounding import rounding, wrong_elements
from tests.tools.device import AMPERE, on
from tests.tools.launch import mostly_simulated

M, N, HEADS = 9, 13, 2
BFLOAT16 = ml_dtypes.bfloat16
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


@pytest.mark.parametrize("score", [
    "slopes and bias", "bias of its own", "distances",
    *(pytest.param(name, marks=mostly_simulated) for name in (
        "bias by head", "bias for all", "bias of keys", "two biases", "as many distances as scores", "slopes",
        "bias, capped", "sink and bias",
    )),
])  # fmt: skip
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


@pytest.mark.parametrize(("dtype", "heads_k"), [
    pytest.param(*which, marks=mostly_simulated)
    for which in ((BFLOAT16, 1), (np.float32, 2), (BFLOAT16, 2), (np.float32, 1))
])  # fmt: skip
def test_sequences_without_keys_or_queries(rng, world, dtype, heads_k):
    """No row is read of them, not even to be ignored: the first lie at the beginning of an array."""
    shapes = [(3, HEADS, M, 5), (3, heads_k, N, 5), (3, heads_k, N, 3), (3, HEADS, M, 3)]
    q, k, v, do = (random(rng, shape, dtype) for shape in shapes)
    keys, queries = np.array([[0], [N], [4]]), np.array([[M], [0], [0]])
    for x, lengths in ((q, queries), (k, keys), (v, keys), (do, queries)):
        for b, length in enumerate(lengths[:, 0]):
            x[b, :, length:] = np.nan
    k[2], v[2] = 0, 0
    score = na.Bias(random(rng, (HEADS, M, N), np.float32))
    with on(LITTLE, small=True):
        o, saved = na.attention_forward(q, k, v, mask=na.Lengths(keys, queries), score=score)
        found = o, *(grads := na.attention_backward(do, saved)), *grads.score
    assert np.isneginf(saved.lse).all()
    for x in found:
        np.testing.assert_array_equal(x.astype(np.float32), 0)


FAULTS = {
    "cuda/kernels/small/steps.py": {
        "if rows > 0:": "if rows >= 0:",
        "put(allocate(PLACE, stage), full(COPY, ZERO))": "pass",
        "put_registers(allocate(PLACE), added)": "put_registers(allocate(PLACE), added + added)",
        "S = S * scores.scale": "S = S",
        "apply(full(S_TILE, ZERO), scores, 0, head, 0, 0)": "apply(full(S_TILE, ZERO), scores, 0, 0, 0, 0)",
        "cuda/plan/test_small.py": {
            "FEWER * problem.seqlen_q >= problem.seqlen_k": "True",
            "min(tiles.blocks, ": "max(tiles.blocks, ",
            "(work.score_added == BY_HEAD and not grouped)": "False",
        },
    },
    "cuda/words/spec.py": {
        "cuda/plan/test_small.py": {"work.problem.heads if sharing == BY_HEAD else 1": "1"},
    },
}

"""Biases, those that TMA loads above all."""

import cupy
import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from tests.accuracy import assert_equal, check, random
from tests.scores import test_parts as scores
from tests.scores.test_parts import MASKS, PARTS
from tests.tools.device import HOPPER, on
from tests.tools.launch import compiled_only, simulated_only

pytestmark = compiled_only  # but for the tests that say otherwise

TMA_LOADED = [("pair bias",), ("bias", "sink"), ("alibi", "pair bias"), ("softcap", "pair bias")]


@pytest.mark.parametrize(("names", "d", "deterministic"), [
    pytest.param(TMA_LOADED[0], 64, False, id="sums", marks=pytest.mark.slow),
    pytest.param(TMA_LOADED[1], 128, True, id="deterministic", marks=pytest.mark.slow),
    pytest.param(TMA_LOADED[3], 80, False, id="wide", marks=pytest.mark.slow),
    pytest.param(TMA_LOADED[0], 256, False, id="bias not by TMA in the backward pass", marks=simulated_only),
])  # fmt: skip
def test_biases_that_tma_loads(rng, sizes, names, d, deterministic):
    """Rows of 16 bytes; elements of a batch that share a bias, and a head that two others share."""
    sizes(1 if d > 64 and not deterministic else 2, 1 if d > 128 else 2, 70, 136)
    score = [PARTS[name](rng, np.float16) for name in names]
    with on(HOPPER):
        check(*scores.qkv(rng, np.float16, heads_k=1, d=d, e=d), rng, score=score, causal=True,
              deterministic=deterministic)  # fmt: skip


@simulated_only
def test_biases_that_tma_loads_simulated(rng, sizes):
    """No tile is read before it is there, nor loaded before the last one has been read."""
    sizes(1, 1, 150, 136)
    with on(HOPPER):
        score = na.Bias(random(rng, (150, 136), np.float16))
        check(*scores.qkv(rng, np.float16, heads_k=1, d=16, e=16), rng, score=score)


@simulated_only
@pytest.mark.slow
def test_biases_in_stages_that_are_filled_again(rng, sizes):
    sizes(1, 1, 70, 528)
    with on(HOPPER):
        q, k, v = scores.qkv(rng, np.float16, heads_k=1, d=8, e=8)
        score = na.Bias(random(rng, (70, 528), np.float16))
        o = na.attention(q, k, v, score=score)
    np.testing.assert_allclose(o, na.attention(q, k, v, score=score), rtol=2e-3, atol=2e-3)


# ----------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize(("number", "names"), list(enumerate(TMA_LOADED)), ids=str)
@pytest.mark.parametrize(("d", "deterministic"), [(24, False), (64, False), (64, True), (128, False), (128, True),
                                                  (192, False), (256, False)])  # fmt: skip
def test_biases_that_tma_loads_on_a_gpu(rng, monkeypatch, number, names, d, deterministic):
    monkeypatch.setattr(scores, "N", 272)
    dtype, mask = (np.float16, ml_dtypes.bfloat16)[number % 2], (None, na.Causal(), MASKS["window"](rng))[number % 3]
    score = [PARTS[name](rng, dtype) for name in names]
    check(*scores.qkv(rng, dtype, heads_k=2, d=d, e=d), rng, cupy, score=score, mask=mask, deterministic=deterministic)


SHAPES = [(1, 1, 1, 1), (3, 1, 1), (2, 1, 70, 1), (1, 3, 1, 90), (90,), (2, 3, 70, 90), (70, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [(2,), (4, 2), (2, 1, 2)])
def test_bias_broadcasts_as_in_numpy(rng, shape, batch):
    q, k, v = (random(rng, (*batch, 3, n, 16), np.float16) for n in (70, 90, 90))
    check(q, k, v, rng, cupy, score=na.Bias(random(rng, shape, np.float16)))


@pytest.mark.gpu
def test_what_is_masked_may_be_nan(rng):
    q, k, v, do = (cupy.asarray(random(rng, (3, 200, 64), np.float16)) for _ in range(4))
    visible, bias = rng.random((3, 200, 200)) < 0.3, random(rng, (3, 200, 200), np.float32)
    results = []
    for hidden in (0, np.nan, np.inf):
        score = [na.Bias(np.where(visible, bias, hidden).astype(np.float32)), na.Softcap(5.0)]
        o, saved = na.attention_forward(q, k, v, mask=visible, score=score)
        grads = na.attention_backward(do, saved, deterministic=True)
        results.append((o, saved.lse, *grads, *grads.score))
        assert (grads.score[0].get()[~visible] == 0).all()
    for one in results[1:]:
        for x, want in zip(one, results[0]):
            assert_equal(x, want)


FAULTS = {
    (
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-softcap-alibi-sink]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-softcap]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-bias of keys]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-pair bias-softcap-bias "
        "of queries]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-function-shift]",
    ): {
        "load(matrix[m0:].T, layout, n0)": "load(matrix.T, layout, n0)",
    },
}

"""A sink's logits."""

import cupy
import numpy as np
import pytest

import numbattn as na
from tests.accuracy import random
from tests.tools.launch import compiled_only

pytestmark = compiled_only


# ----------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_a_sink_of_any_size(rng, logit):
    q, k, v = (cupy.asarray(random(rng, (2, 20, 64), np.float16)) for _ in range(3))
    o, saved = na.attention_forward(q, k, v, score=na.Sink(np.float32(logit)))
    want, lse = na.attention_forward(q, k, v) if logit < 0 else (0 * q, None)
    np.testing.assert_allclose(o.get(), want.get(), rtol=2e-3, atol=1e-4)
    wanted = np.float32(logit) if lse is None else lse.lse.get()
    np.testing.assert_allclose(saved.lse.get(), np.broadcast_to(wanted, saved.lse.shape), rtol=1e-5)


FAULTS = {
    (
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-softcap-alibi-sink]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-softcap]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-bias of keys]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-pair bias-softcap-bias "
        "of queries]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-function-shift]",
    ): {
        "total * alpha + where": "total + where",
        "return alpha * reciprocal(total)": "return reciprocal(total)",
    },
}

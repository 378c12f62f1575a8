"""A cap, and its derivative."""

import cupy
import numpy as np
import pytest

import numbattn as na
from tests.accuracy import check, random
from tests.scores import test_parts as scores
from tests.scores.test_parts import PARTS
from tests.tools.device import HOPPER, on
from tests.tools.launch import simulated_only


@simulated_only
def test_a_derivative_beside_both_sums(rng, small):
    score = [PARTS[name](rng, np.float16) for name in ("softcap", "alibi")]
    with on(HOPPER):
        check(*scores.qkv(rng, np.float16, heads_k=1), rng, score=score, causal=True, deterministic=False)


# ----------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
def test_a_changed_cap_compiles_nothing(rng, tmp_path, monkeypatch):
    q = cupy.asarray(random(rng, (2, 40, 64), np.float16))
    na.attention(q, q, q, score=na.Softcap(3.0))
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    na.attention(q, q, q, score=na.Softcap(4.0))
    assert not list(tmp_path.rglob("*.cubin*"))


FAULTS = {
    (
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-softcap-alibi-sink]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-softcap]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-bias of keys]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-pair bias-softcap-bias "
        "of queries]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-function-shift]",
    ): {
        "cap - 2 * cap * r": "cap - cap * r",
        "cap - 2 * cap * r, 4 * r * (1 - r)": "cap - 2 * cap * r, 4 * r",
    },
}

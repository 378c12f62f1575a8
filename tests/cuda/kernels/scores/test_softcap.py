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


@pytest.mark.slow
@simulated_only
def test_a_derivative_beside_both_sums(rng, small):
    score = [PARTS[name](rng, np.float16) for name in ("softcap", "alibi")]
    with on(HOPPER):
        check(*scores.qkv(rng, np.float16, heads_k=1), rng, score=score, causal=True, deterministic=False)


@simulated_only
@pytest.mark.parametrize("cap", [1.0, 1000.0])
def test_no_digits_are_lost_where_scores_are_small(rng, small, cap):
    with on(HOPPER):
        check(*scores.qkv(rng, np.float32, heads_k=2), rng, score=na.Softcap(cap))


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
        ", 4 * r * (1 - r)": ", 4 * r",
    },
    "test_a_derivative_beside_both_sums": {"device(lambda x, r: 1 - 2 * r)": "device(lambda x, r: 1 - r)"},
    "test_no_digits_are_lost_where_scores_are_small": {
        "square < NEAR": "square < 0 * NEAR",
        "CUBE, FIFTH, SEVENTH = dtype(0.04), dtype(-1 / 3)": "CUBE, FIFTH, SEVENTH = dtype(0.04), dtype(-1 / 4)",
    },
}

"""What slopes and tables share: how far a key is from a query's own."""

import cupy
import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from tests.accuracy import check, random
from tests.masks.calls import ONE_KEY
from tests.scores import test_parts as scores
from tests.tools.device import HOPPER, TURING, on
from tests.tools.launch import compiled_only, simulated_only


@pytest.mark.parametrize(("device", "dtype", "part", "offset"), [
    pytest.param(TURING, np.float32, "alibi", [[30, -20]], id="slopes", marks=[compiled_only, pytest.mark.slow]),
    pytest.param(HOPPER, np.float16, "alibi", [[30, -20]], id="slopes on Hopper", marks=simulated_only),
    pytest.param(HOPPER, np.float16, "relative", [[30, -20]], id="table", marks=simulated_only),
    pytest.param(HOPPER, np.float16, "relative", [[30, -20]], id="table compiled",
                 marks=[compiled_only, pytest.mark.slow]),
])  # fmt: skip
def test_offsets(rng, small, device, dtype, part, offset):
    """One of each matrix."""
    array = random(rng, (2,) if part == "alibi" else (1, 9), dtype) / 20
    kind = na.Alibi if part == "alibi" else na.RelativeBias
    with on(device):
        check(*scores.qkv(rng, dtype, heads_k=1), rng, score=kind(array, offset=np.array(offset)))


@pytest.mark.parametrize(("device", "dtype", "kinds", "entries", "deterministic"), [
    pytest.param(TURING, np.float32, "slopes and table", 3, True, marks=simulated_only),
    pytest.param(HOPPER, np.float16, "table", 161, False, marks=[compiled_only, pytest.mark.slow]),
])  # fmt: skip
def test_distances_within_segments_of_unequal_lengths(rng, device, dtype, kinds, entries, deterministic):
    """Where tiles lie in several of them, each query has an offset of its own; no key may be as far as an entry."""
    q, k, v = (random(rng, (1, n, 8), dtype) for n in (40, 70, 70))
    score = [na.RelativeBias(random(rng, (1, entries), dtype))]
    score += [na.Alibi(random(rng, 1, dtype) / 9)] * ("slopes" in kinds)
    mask = na.Segments(np.array([3, 3, 20, 38]), np.array([0, 9, 40, 66]))
    with on(device):
        check(q, k, v, rng, mask=mask, score=score, bits=ONE_KEY, deterministic=deterministic)


@simulated_only
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_tangents_within_segments_of_unequal_lengths(rng, deterministic):
    """Of the gradient of a table, after a part that is not linear."""
    (q, do), (k, tk) = (random(rng, (2, 1, n, 8), np.float32) for n in (40, 70))
    options = {"score": [na.Softcap(3.0), na.RelativeBias(random(rng, (1, 5), np.float32))],
               "mask": na.Segments(np.array([3, 3, 20, 38]), np.array([0, 9, 40, 66])),
               "tscore": [random(rng, (1, 5), np.float32)]}  # fmt: skip
    with on(TURING):
        _, _, saved, tsaved = na.attention_forward_jvp(q, k, k, None, tk, None, **options)
        _, found = na.attention_backward_jvp(do, saved, tsaved, deterministic=deterministic)
    want = reference.attention_backward_jvp(do, q, k, k, None, tk, None, **options)
    np.testing.assert_allclose(found.score[-1], want.score[-1], rtol=0, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize(("m", "n", "mask"), [
    (1000, 1000, None), (300, 2500, na.Causal()), (1000, 1000, na.Window(600, 100)), (600, 2100, na.Causal(1000)),
    (1000, 1000, na.Segments(np.array([0, 7, 600, 600, 990])) & na.Causal()),
], ids=["full", "causal", "window", "offset", "segments"])  # fmt: skip
def test_far_from_the_diagonal(rng, m, n, mask, d):
    dtype = (np.float16, ml_dtypes.bfloat16)[d // 64 % 2]
    q, k, v = (random(rng, (2, 2, size, d), dtype) for size in (m, n, n))
    slopes = np.array([-1 / 70, 3], ml_dtypes.bfloat16)        # float16 ends before their gradients
    for part in (na.Alibi(slopes), na.RelativeBias(random(rng, (2, 41), dtype))):
        check(q, k, v, rng, cupy, score=[part, na.Sink(random(rng, 2, dtype))], mask=mask, bits=ONE_KEY)


@pytest.mark.gpu
@pytest.mark.parametrize("lead", [(4, 1, 3), (1, 2, 3), (4, 2, 1), ()])
def test_tables_broadcast_over_several_axes(rng, lead):
    for entries, dtype in zip((1, 9, 801), (np.float32, np.float16, np.float32)):
        q, k, v = (random(rng, (4, 2, 3, n, 16), dtype) for n in (70, 290, 290))
        check(q, k, v, rng, cupy, score=[na.RelativeBias(random(rng, (*lead, entries), dtype)),
                                         na.Alibi(random(rng, lead, dtype) / 50)])  # fmt: skip


FAULTS = {
    (
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-softcap-alibi-sink]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-softcap]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-bias of keys]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-pair bias-softcap-bias "
        "of queries]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-function-shift]",
    ): {
        "convert(SIGN * (n0 - key), ACC)": "convert(n0 - key, ACC)",
        "m0 + offset, ()": "m0, ()",
    },
    ("test_offsets", "test_distances_within_segments_of_unequal_lengths"): {
        "index(offsets[batch, head])": "index(offsets[batch, 0])",
        "convert(of_queries(offsets, m0) * SIGN, ACC)": "convert(of_queries(offsets, m0), ACC)",
    },
    "cuda/kernels/scores/by_distance.py": {
        "test_distances_within_segments_of_unequal_lengths": {"element_of(i + offsets[i] - j": "element_of(i - j"},
    },
}

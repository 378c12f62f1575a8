"""Gradients of the arrays of a score, on any GPU."""

import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from tests.accuracy import check, random
from tests.scores import test_parts as scores
from tests.tools.device import HOPPER, TURING, on
from tests.tools.launch import compiled_only, simulated_only

pytestmark = compiled_only  # but for the tests that say otherwise


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "heads", "n", "multiprocessors"), [
    (1, 1, 140, 40), pytest.param(3, 3, 15, 1, marks=simulated_only),
])  # fmt: skip
def test_gradients_where_tiles_are_empty(rng, sizes, batch, heads, n, multiprocessors):
    """By blocks that leave others neither empty nor full; by segments in scores/test_distance. Where a batch shares an
    array, a multiprocessor has room for some of its parts: of several matrices each, and of fewer in the last."""
    sizes(batch, heads, n, n)
    mask = na.BlockSparse(np.array([[[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]], bool), (-(-n // 3), -(-n // 3)))
    with on(TURING._replace(multiprocessors=multiprocessors)):
        check(*scores.qkv(rng, np.float32, heads_k=heads, d=8, e=8), rng, mask=mask, score=[
            na.RelativeBias(random(rng, 9, np.float32)), na.Bias(random(rng, (n, 1), np.float32)),
            na.Bias(random(rng, (n, n), np.float32))])  # fmt: skip


@pytest.mark.slow
def test_gradients_of_columns_where_head_dims_are_large(rng, sizes):
    """Several warps share the rows of tiles there, but for sums along them; of float64: tests/test_random."""
    sizes(1, 1, 20, 40)
    with on(HOPPER):
        q, k, v = scores.qkv(rng, np.float32, d=160, e=8)
        slopes, bias = (random(rng, shape, np.float32) for shape in (1, (20, 1)))
        check(q, k, v, rng, score=[na.Alibi(slopes / 50), na.Bias(bias)])


@simulated_only
@pytest.mark.parametrize("mask", [
    na.Segments([0, 7, 20], [0, 9, 30]), na.BlockSparse(np.eye(3, 4, dtype=bool)[None], (8, 8)),
])  # fmt: skip
def test_kernels_of_different_tiles_look_up_their_own(rng, mask):
    """The gradient of a bias has 64 x 32 here, that of slopes 64 x 16."""
    q, k, v = (random(rng, (1, n, 128), np.float64) for n in (20, 30, 30))
    score = [na.Bias(random(rng, (1, 20, 30), np.float64)), na.Alibi(np.array([0.1]))]
    with on(HOPPER):
        check(q, k, v, rng, mask=mask, score=score)


@simulated_only
def test_launches_add_to_partial_sums(rng):
    """Batch axes that are no single stride take a launch each; two of four have the same matrix."""
    q, k, v = (random(rng, (2, 2, 2, 1, 9, 8), np.float32) for _ in range(3))
    with on(TURING) as gpu:
        check(q, k, v, rng, score=na.Bias(random(rng, (2, 1, 1, 9, 9), np.float32)))
    plans = (program.plan.steps for program in gpu.programs.values())
    names = [step.key.name for steps in plans for step in steps if step.key.name in ("bias_gradient", "sum_parts")]
    assert names == ["bias_gradient"] * 4 + ["sum_parts"]


TANGENTS = {
    "slopes": (TURING, np.float32, lambda rng: [na.Alibi(random(rng, 2, np.float32) / 9), na.Softcap(2.0),
                                                na.Sink(random(rng, 2, np.float32))]),
    "tables": (HOPPER, np.float16, lambda rng: [na.RelativeBias(random(rng, (1, 9), np.float16))]),
    "biases": (TURING, np.float32, lambda rng: [na.Bias(random(rng, 40, np.float32)), na.Softcap(2.0),
                                        na.Bias(random(rng, (34, 40), np.float32))]),
}  # fmt: skip


@pytest.mark.slow
@simulated_only
@pytest.mark.parametrize("name", ["tables", "slopes", "biases"])   # the latter 40 s each
def test_tangents(rng, name):
    """Of gradients along directions of all that there is, or of arrays in the score alone."""
    device, dtype, score_of = TANGENTS[name]
    score = score_of(rng)
    heads = 1 if name == "tables" else 2
    (q, tq, do, tdo), (k, tk, v, tv) = (random(rng, (4, 1, heads, n, 8), dtype) for n in (34, 40))
    dlse, tdlse = random(rng, (2, 1, heads, 34), np.float32)
    tscore = [random(rng, x.shape, x.dtype) for part in score for x in part._weights]
    for tangents, rows in (((tq, tk, tv), {"tdo": tdo, "dlse": dlse, "tdlse": tdlse}), ((None,) * 3, {})):
        with on(device):
            _, _, saved, tsaved = na.attention_forward_jvp(q, k, v, *tangents, causal=True, score=score, tscore=tscore)
            _, found = na.attention_backward_jvp(do, saved, tsaved, **rows)
        want = reference.attention_backward_jvp(do, q, k, v, *tangents, causal=True, score=score, tscore=tscore, **rows)
        for got, exact in zip(found.score, want.score, strict=True):
            assert got.dtype == dtype
            assert abs(got - exact).max() <= 8 * np.finfo(dtype).eps * abs(exact).max()


FAULTS = {
    (
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-softcap-alibi-sink]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-softcap]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-bias of keys]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-pair bias-softcap-bias "
        "of queries]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-function-shift]",
    ): {
        "return total + dS": "return dS",
        "if first < n0 + TILE_N and n0 < end": "if first < n0 and n0 < end",
        "dS = clear(sees(given.mask, band, batch, head, m0, n0), dS)": "pass",
    },
    "cuda/kernels/any/score_gradient_ds.py": {
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-softcap]": {
            "return pull_back(P * (dP - D), F)": "return P * (dP - D)",
        },
        "test_tangents": {
            "return pull_back(dS, tdS, F, tF)": "return dS, tdS",
            "dP - D, tdP - tD)": "dP - D, tdP)",
        },
    },
    "cuda/kernels/shared/shares.py": {
        "test_gradients_where_tiles_are_empty": {
            "size = (count + parts - 1) // parts": "size = count // parts",
            "minimum((part + 1) * size, count)": "(part + 1) * size",
            "share.own_head + number % share.heads": "share.own_head",
            "1 if own_heads > 1 else heads": "1",
        },
    },
}

"""Parts of a score one after the other, those of tests/scores/test_parts.py.

Arrays have the dtype of q, whose rounding o and so delta have: their gradients are not better.
"""

import cupy
import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn.call.problem import DTYPES
from tests.accuracy import assert_equal, check, random
from tests.scores import test_parts as scores
from tests.scores.test_parts import CORNERS, MASKS, PAIRS, PARTS, check_corner
from tests.tools.device import AMPERE, BY_UNIT, HOPPER, TURING, on
from tests.tools.graphs import capture, own_stream
from tests.tools.launch import compiled_only, simulated_only

pytestmark = compiled_only  # but for the tests that say otherwise


def on_device(rng, device, dtype, names, **options):
    score = [PARTS[name](rng, dtype) for name in names]
    with on(device):
        check(*scores.qkv(rng, dtype, heads_k=1, d=24, e=40), rng, score=score, **options)


SMALL = [("softcap", "alibi", "sink"), ("relative", "softcap"), ("pair bias", "softcap", "bias of queries"),
         ("relative", "function", "shift")]  # fmt: skip


@simulated_only
@pytest.mark.parametrize(("device", "names"), [
    *(("CUDA cores", names) for names in [*SMALL, ("bias of keys",)]),
    ("warpgroups", SMALL[0]), ("warpgroups", SMALL[3]),         # biases: test_bias
], ids=lambda x: x if isinstance(x, str) else "-".join(x))  # fmt: skip
def test_small_problems(rng, sizes, device, names):
    sizes(1, 1 if device == "warpgroups" else 2, 34, 40)
    on_device(rng, BY_UNIT[device], np.float16 if device == "warpgroups" else np.float32, names, causal=True)


@pytest.mark.slow  # backward_tangent and sums of what is read are compiled with scores, too
@pytest.mark.parametrize("names", [("pair bias", "function"), ("shift", "softcap", "alibi"), ("relative", "sink")],
                         ids="-".join)  # fmt: skip
def test_compiled(rng, small, names):
    """As the PTX says."""
    on_device(rng, HOPPER, np.float32, names, mask=na.Window(30, 9))


@pytest.mark.parametrize(("device", "dtype", "name"), [
    *(pytest.param(HOPPER, dtype, name, marks=simulated_only) for dtype, name in (
        (np.float16, "bias of queries"), (np.float16, "function"), (np.float16, "softcap after"), (np.float32, "all"),
    )), pytest.param(AMPERE, np.float32, "softcap after", marks=pytest.mark.slow),
], ids=lambda x: x if isinstance(x, str) else x.__name__ if isinstance(x, type) else str(x.cc))  # fmt: skip
def test_scores_of_minus_infinity(rng, sizes, device, dtype, name):
    sizes(1, 1, 40, 70)
    with on(device):
        check_corner(rng, name, dtype)


@pytest.mark.parametrize(("device", "dtype"), [
    pytest.param(HOPPER, ml_dtypes.bfloat16, id="Hopper simulated", marks=simulated_only),
    pytest.param(HOPPER, ml_dtypes.bfloat16, id="Hopper", marks=pytest.mark.slow),
    pytest.param(TURING, np.float32, id="any GPU", marks=[pytest.mark.slow, pytest.mark.xfail(
        reason="the interpreter rounds products that ptxas fuses with sums")]),
])
def test_scores_at_the_ends(rng, sizes, device, dtype):
    sizes(1, 1, 40, 70)
    with on(device):
        scores.check_lowest(rng, np.dtype(dtype))
        scores.check_large_scores(rng, np.dtype(dtype))


# ----------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_minus_infinity_on_a_gpu(rng, name, dtype):
    check_corner(rng, name, dtype, xp=cupy, bits=16 if dtype == np.float64 else 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "deterministic"), [(64, False), (64, True), (128, False), (256, False)])
@pytest.mark.parametrize("name", PARTS)
def test_head_dims(rng, name, d, deterministic):
    score = PARTS[name](rng, np.float16)
    check(*scores.qkv(rng, np.float16, heads_k=2, d=d, e=d), rng, cupy, score=score, causal=True,
          deterministic=deterministic)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("mask", "dtype"), [*(("window", dtype) for dtype in DTYPES), ("dense", DTYPES[0])], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_parts(rng, name, mask, dtype):
    check(*scores.qkv(rng, dtype), rng, cupy, score=PARTS[name](rng, dtype), mask=MASKS[mask](rng),
          bits=16 if dtype == np.float64 else 4)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("number", "names"), list(enumerate(PAIRS)), ids=str)
def test_parts_in_order(rng, number, names):
    dtype = (np.float32, ml_dtypes.bfloat16)[number % 2]
    score = [PARTS[name](rng, dtype) for name in names]
    check(*scores.qkv(rng, dtype, heads_k=2), rng, cupy, score=score, causal=True, dropout=na.Dropout(0.2, 3))


@pytest.mark.gpu
def test_gradients_are_equal_bit_for_bit(rng):
    q, k, v, do = (cupy.asarray(random(rng, (2, 4, 300, 64), np.float16)) for _ in range(4))
    score = [PARTS[name](rng, np.float32) for name in ("sink", "alibi")]
    score += [na.Bias(random(rng, (4, 300, 300), np.float32)), na.RelativeBias(random(rng, (4, 41), np.float32))]
    _, saved = na.attention_forward(q, k, v, score=score)
    first = na.attention_backward(do, saved, deterministic=True)
    for _ in range(10):
        again = na.attention_backward(do, saved, deterministic=True)
        for one, other in zip((*first, *first.score), (*again, *again.score)):
            assert_equal(one, other)


@pytest.mark.gpu
def test_in_a_graph(rng):
    q, k, v, do = (cupy.asarray(random(rng, (2, 4, 100, 64), np.float16)) for _ in range(4))
    slopes, bias, logits = (cupy.ones(shape, np.float32) for shape in (4, (4, 1, 100), 4))
    score = [na.Alibi(slopes), na.Bias(bias), na.Sink(logits)]

    def run():
        o, saved = na.attention_forward(q, k, v, score=score)
        grads = na.attention_backward(do, saved, deterministic=True)
        return o, *grads, *grads.score

    want = run()
    with own_stream() as stream:
        run()
        got, graph = capture(run)
        graph.launch()
        stream.synchronize()
    for one, other in zip(got, want):
        assert_equal(one, other)


FAULTS = {
    (
        "test_small_problems[simulated-CUDA cores-softcap-alibi-sink]",
        "test_small_problems[simulated-CUDA cores-relative-softcap]",
        "test_small_problems[simulated-CUDA cores-bias of keys]",
        "test_small_problems[simulated-CUDA cores-pair bias-softcap-bias of queries]",
        "test_small_problems[simulated-CUDA cores-relative-function-shift]",
    ): {
        "if is_scaled(before):": "if is_scaled([*before, part]):",
        "return scale * LOG2E": "return LOG2E",
    },
    "cuda/kernels/scores/packed.py": {
        "cuda/kernels/shared/test_segments.py::test_gradients_without_own_kernels[compiled-warpgroups in two]": {
            "within(scores.parts, own - query)": "within(scores.parts, own)",
        },
    },
    "cuda/kernels/scores/traits.py": {
        "cuda/plan/test_planner.py::test_biases_that_tma_loads": {
            " and len(by_tma) == 1": "",
            "looking_up == by_tma and": "by_tma and",
            "(is_looked_up(work.mask) or work.problem.dropout)": "is_looked_up(work.mask)",
        },
    },
}

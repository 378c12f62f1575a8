"""Which kernels small matrices have, and how many blocks."""

from dataclasses import replace

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.small import backward, forward
from numbattn.cuda.passes import plans
from numbattn.cuda.plan.planner import DEVICES
from tests.cuda.works import array, kernels
from tests.tools.device import AMPERE, HOPPER, TURING, on

ALONE, GIVEN = ["small_backward"], ["delta", "small_backward"]


def names(device, *sizes, heads_k=8, dtype=np.float32, **options):
    """Those of q, k and v of (queries, keys, head_dim), a batch of 1000."""
    m, n, d = sizes
    q, k = array(1000, 8, m, d, dtype=dtype), array(1000, heads_k, n, d, dtype=dtype)
    return [kernels(planned) for planned in plans(device, q, k, k, **options)]


@pytest.mark.parametrize("device", [x for x in DEVICES.values() if x != TURING], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_kernel_a_pass(device, dtype):
    assert names(device, 20, 32, 24, dtype=dtype) == [["small_forward"], ALONE]


def test_without_tensor_cores_there_is_none():
    assert names(TURING, 20, 20, 32)[0] == ["forward"]


@pytest.mark.parametrize(("sizes", "dtype", "found"), [
    ((65, 65, 32), np.float32, "forward"), ((128, 128, 64), np.float16, "small_forward"),
    ((64, 64, 192), np.float16, "hopper_forward"), ((8, 64, 64), np.float32, "decode"),
    ((16, 64, 64), np.float32, "small_forward"),
])  # fmt: skip
def test_larger_ones_have_the_usual_kernels(sizes, dtype, found):
    assert names(HOPPER, *sizes, dtype=dtype)[0][0] == found


SHARED = np.zeros((8, 32, 32), np.float32)


@pytest.mark.parametrize(("score", "found"), [
    (na.Bias(SHARED), [*ALONE, "sum_parts"]), (na.Bias(SHARED, gradient=False), ALONE),
    (na.Bias(SHARED[0]), [*ALONE, "sum_parts"]), (na.Bias(SHARED[:, :1]), [*ALONE, "sum_parts"]),
    (na.RelativeBias(np.zeros((8, 9))), [*ALONE, "sum_parts", "table_gradient"]),
    ([na.Bias(SHARED), na.RelativeBias(np.zeros(9))], [*ALONE, "sum_parts", "table_gradient"]),
    ([na.Alibi(1.0), na.Bias(SHARED)], [*ALONE, "sum_parts"]),
    (na.Softcap(3.0), ALONE), (na.Sink(np.zeros(8), gradient=False), ALONE), (na.Sink(np.zeros(8)), GIVEN),
    ([na.Sink(np.zeros(8)), na.Bias(SHARED)], [*GIVEN, "sum_parts"]),
    (na.Bias(np.zeros((1000, 8, 32, 32))), [*GIVEN, "bias_gradient"]),
    ([na.Softcap(3.0), na.Bias(SHARED)], [*GIVEN, "bias_gradient", "sum_parts"]),
])  # fmt: skip
def test_gradients_of_scores(score, found):
    """dS is summed where it is made if a gradient consists of it, summed over the batch."""
    assert names(HOPPER, 32, 32, 32, score=score)[1] == found


def test_heads_that_share_keys_have_the_usual_kernel_for_a_bias():
    assert names(HOPPER, 32, 32, 32, heads_k=2, score=na.Bias(SHARED))[1][:3] == [*GIVEN, "bias_gradient"]


@pytest.mark.parametrize(("longest", "dtype", "count"), [
    (16, np.float32, 1), (30, np.float32, 1), (60, np.float64, 2), (100, np.float16, 3), (100, np.float32, 0),
])  # fmt: skip
def test_packed_ones_have_a_kernel_for_each_size(longest, dtype, count):
    q, mask = array(8, 4000, 32, dtype=dtype), na.Segments(np.cumsum([0, *[10] * 99, longest]))
    found = [kernels(x) for x in plans(HOPPER, q, q, q, mask=mask)]
    assert [names.count(of) for names, of in zip(found, ("small_forward", "small_backward"))] == [count, count]


def test_lse_over_other_keys():
    """D is then no longer rowsum(P dP)."""
    launched, (q, do) = [], np.ones((2, 3, 8, 20, 16), np.float32)
    with on(HOPPER, lambda key, *rest: launched.append(key.name), small=True):
        o, saved = na.attention_forward(q, q, q)
        na.attention_backward(do, saved)
        na.attention_backward(do, na.Saved.of(q, q, q, o, saved.lse))
        na.attention_backward(do, replace(saved, whole=False))
    assert launched == ["small_forward", *ALONE, *GIVEN, *GIVEN]


@pytest.mark.parametrize(("batch", "heads", "own", "blocks"), [
    (4096, 8, 8, 132 * 10 // 8 * 8), (4096, 7, 7, 132 * 10 // 7 * 7), (4096, 7, 1, 132 * 10), (2, 8, 8, 16),
    (1, 8192, 8192, 8192), (1, 8192, 1, 132 * 10),
])  # fmt: skip
def test_a_block_keeps_its_head_if_the_bias_has_heads(batch, heads, own, blocks):
    """There are as many as are resident, or as there are matrices."""
    q = array(batch, heads, 32, 32, dtype=np.float32)
    planned, _ = plans(HOPPER, q, q, q, score=na.Bias(array(own, 32, 32, dtype=np.float32), gradient=False))
    assert planned.steps[0].blocks == blocks


@pytest.mark.parametrize(("score", "heads_k", "kept"), [
    (na.Bias(SHARED), 8, [True, True]), (na.Bias(SHARED), 2, [True, False]), (na.Bias(SHARED[0]), 2, [True, True]),
    (na.RelativeBias(np.zeros((8, 9))), 8, [True, True]), (na.Bias(np.zeros((1000, 1, 32, 32))), 8, [False, False]),
    ([na.Bias(SHARED), na.Softcap(1.0)], 8, [False, False]), (None, 8, [False, False]),
])  # fmt: skip
def test_what_a_score_adds_is_kept_where_the_matrices_of_a_block_share_it(score, heads_k, kept):
    q, k = (array(1000, heads, 32, 32, dtype=np.float32) for heads in (8, heads_k))
    steps = [next(x for x in planned.steps if "small" in x.key.name) for planned in plans(HOPPER, q, k, k, score=score)]
    assert [dict(step.key.parameters)["tiles"].keeps_score for step in steps] == kept


@pytest.mark.parametrize("spec", [forward.SPEC, backward.SPEC], ids=lambda spec: spec.name)
@pytest.mark.parametrize("device", [HOPPER, AMPERE, DEVICES[8, 6]], ids=str)
def test_resident_blocks_fit_into_shared_memory(spec, device):
    q = array(1000, 8, 64, 64, dtype=np.float32)
    for planned in plans(device, q, q, q):
        for step in planned.steps:
            if step.key.name == spec.name:
                blocks = -(-step.blocks // device.multiprocessors)
                assert blocks * (step.key.source().shared + 1024) <= device.shared + 1024

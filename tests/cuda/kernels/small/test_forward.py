"""Some blocks that walk over several matrices, simulated; test_passes has those of a plan, compiled."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.small.forward import small_forward
from numbattn.cuda.kernels.small.steps import SmallTiles
from tests.accuracy import assert_accurate
from tests.tools.launch import launch, poisoned, simulated_only

from ..calls import call

pytestmark = simulated_only


def check(case, size=16, threads=32, stages=1, blocks=2, saves=True):
    dtype = case.q.dtype
    source = small_forward(
        dtype=dtype.name, out_dtypes=(dtype.name,), head_dim=16, head_dim_v=16,
        tiles=SmallTiles(threads, 1, stages, False, size), mask=case.kinds, score=(), dropout=case.kept_scale != 1,
        nbytes=0, saves=saves,
    )  # fmt: skip
    o, (lse, low) = poisoned(case.do.shape, dtype), (poisoned(case.lse.shape, case.lse.dtype) for _ in range(2))
    launch(
        source.function, (blocks, 1, 1), threads, source.shared, case.q, case.k, case.v, o, lse, low, case.mask,
        (), case.drops, case.group_size, case.scale_log2, case.kept_scale,
    )  # fmt: skip
    assert_accurate("o", o, case.wanted["o"], case.plain["o"], dtype)
    if saves:
        assert_accurate("lse", lse, case.wanted["lse"], case.plain["lse"], lse.dtype)
    else:
        np.testing.assert_array_equal(lse, poisoned(case.lse.shape, case.lse.dtype))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_matrix_after_the_other(rng, dtype, stages):
    """Five for two blocks, of a group of two heads."""
    check(call(rng, dtype, batch=3, heads=2, heads_k=1, m=13, n=16), stages=stages)


def test_two_warps(rng):
    check(call(rng, batch=2, m=20, n=31), size=32, threads=64)


def test_more_blocks_than_matrices(rng):
    check(call(rng, m=16, n=9), stages=2, blocks=2)


def test_without_lse(rng):
    check(call(rng, batch=2, m=16, n=16), saves=False)


MASKS = {
    "causal": {"causal": True},
    "lengths": {"mask": na.Lengths(np.array([[16, 3]]), np.array([[11, 9]])), "poison": np.nan},
    "one length": {"mask": na.Lengths(9, 7), "poison": np.nan},
    "nothing": {"mask": na.Lengths(np.array([[0, 3]]), np.array([[11, 0]])) & na.Window(5, 9)},
    "dense": {"mask": na.Dense(np.random.default_rng(0).random((1, 1, 13, 16)) < 0.3)},
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, mask):
    check(call(rng, heads=2, heads_k=2, m=13, n=16, **MASKS[mask]))


def test_dropout(rng):
    check(call(rng, batch=2, heads=2, m=16, n=16, dropout=na.Dropout(0.3, seed=5)))


FAULTS = {
    "fetch_k(mK, batch, head // group_size": "fetch_k(mK, batch, head",
    "fetch_v(mV, batch, head // group_size, segment.first_key, band[3]":
        "fetch_v(mV, batch, head // group_size, segment.first_key, mask.keys",
    "stage = 1 - stage\n": "stage = stage + 0\n",
    "wait_copies(AHEAD)": "wait_copies(1)",
    "sync()                                              # Q, K and V have": "pass  # Q, K and V have",
    "sync()                                              # all have": "pass  # all have",
    "hide(S, NO_SCORE, shown, band)": "hide(S, 0, shown, band)",
    "drop(P, drops, batch, head, 0, 0)": "drop(P, drops, head, batch, 0, 0)",
    "if SAVES:": "if not SAVES:",
    "number < matrices.count:\n            band": "number <= matrices.count:\n            band",
    "test_small.py::test_segments[simulated-function]": {
        "mLse[batch, head][first:end], lse": "mLse[batch, head], lse",
        "batch, head, first, segment.first_key)": "batch, head, 0, 0)",
    },
    "test_small.py::test_segments[simulated-none]": {
        "cuda/kernels/small/steps.py": {
            "start_of(offsets, count, length) + (tile - ahead)": "start_of(offsets, count, length) + tile",
            "end = before if tile < ahead else length": "end = length",
            "number += grid_size()": "number += 2 * grid_size()",
            "(count - 1 + others)": "(count - 1)",
        },
        "cuda/kernels/small/backward.py": {
            "return queries_of if PACKED in mask else keys_of": "return keys_of",
        },
    },
    "test_small.py::test_segments[simulated-sizes-none]": {
        "cuda/kernels/small/steps.py": {
            "size // 2 + 1 if size > SPLIT else 0": "size + 1 if size > SPLIT else 0",
        },
    },
    "test_small.py::test_segments[simulated-groups-none]": {
        "cuda/kernels/small/backward.py": {"PACKED not in work.mask or not is_grouped(work)": "True"},
    },
}

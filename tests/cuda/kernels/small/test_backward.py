"""Some blocks that walk over several matrices, simulated; test_passes has those of a plan, compiled."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.small.backward import small_backward
from tests.accuracy import assert_accurate
from tests.tools.launch import launch, poisoned, simulated_only

from ..calls import call, padded
from .test_forward import MASKS

pytestmark = simulated_only


def check(case, size=16, threads=32, blocks=2, given=False):
    """given: lse and delta, as those over other keys, too; else dlse."""
    dtype = case.q.dtype
    source = small_backward(
        dtype=dtype.name, out_dtypes=(dtype.name,) * 3, head_dim=16, head_dim_v=16, size=size, threads=threads,
        blocks=1, stages=1, mask=case.mask, score=(), dropout=case.kept_scale != 1, nbytes=0, given=given,
        grouped=case.group_size > 1, dlse=not given, sums=False, keeps_score=False,
    )  # fmt: skip
    results = [poisoned(x.shape, dtype) for x in (case.q, case.k, case.v)]
    statistics = (padded(case.lse_log2, np.inf), padded(case.delta, 0)) if given else (case.dlse,)
    launch(
        source.function, (blocks, 1, 1), threads, source.shared, case.q, case.k, case.v, case.do, *results, (),
        statistics, case.sight, (), case.drops, case.group_size, case.scale, case.scale_log2, case.kept_scale,
    )  # fmt: skip
    for name, got in zip(("dq", "dk", "dv"), results):
        assert_accurate(name, got, case.wanted[name], case.plain[name], dtype)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_matrix_after_the_other(rng, dtype, given):
    check(call(rng, dtype, batch=5, m=13, n=16), given=given)


@pytest.mark.parametrize("given", [False, True])
def test_heads_that_share_keys(rng, given):
    """Three groups of two heads for two blocks."""
    check(call(rng, batch=3, heads=2, heads_k=1, m=13, n=16), given=given)


def test_two_warps(rng):
    check(call(rng, batch=2, m=20, n=31), size=32, threads=64)


def test_more_blocks_than_matrices(rng):
    check(call(rng, m=16, n=9))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, mask, given):
    check(call(rng, heads=2, m=13, n=16, **MASKS[mask]), given=given)


@pytest.mark.parametrize("given", [False, True])
def test_dropout(rng, given):
    check(call(rng, batch=2, heads=2, m=16, n=16, dropout=na.Dropout(0.3, seed=5)), given=given)

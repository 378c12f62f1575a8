"""Some blocks that walk over several matrices, simulated; test_passes has those of a plan, compiled."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.small.backward import small_backward
from numbattn.cuda.kernels.small.steps import SmallTiles
from tests.accuracy import assert_accurate
from tests.tools.launch import launch, poisoned, simulated_only

from ..calls import call, padded, padded_lse
from .test_forward import MASKS

pytestmark = simulated_only


def check(case, size=16, threads=32, blocks=2, given=False):
    """given: lse and delta, as those over other keys, too; else dlse, which does not count where nothing is seen."""
    dtype = case.q.dtype
    source = small_backward(
        dtype=dtype.name, out_dtypes=(dtype.name,) * 3, head_dim=16, head_dim_v=16,
        tiles=SmallTiles(threads, 1, 1, False, size), mask=case.kinds, score=(), dropout=case.kept_scale != 1, nbytes=0,
        grouped=case.group_size > 1, statistics=("lse_log2", "delta") if given else ("dlse",), sums=False,
    )  # fmt: skip
    results = [poisoned(x.shape, dtype) for x in (case.q, case.k, case.v)]
    dlse = np.where(np.isfinite(case.lse), case.dlse, np.nan).astype(case.dlse.dtype)
    statistics = (padded_lse(case.lse_log2, np.nan), padded(case.delta, np.nan)) if given else (dlse,)
    launch(
        source.function, (blocks, 1, 1), threads, source.shared, case.q, case.k, case.v, case.do, *results, (),
        statistics, case.mask, (), case.drops, case.group_size, case.scale, case.scale_log2, case.kept_scale,
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
    check(call(rng, heads=2, heads_k=2, m=13, n=16, **MASKS[mask]), given=given)


@pytest.mark.parametrize("given", [False, True])
def test_dropout(rng, given):
    check(call(rng, batch=2, heads=2, m=16, n=16, dropout=na.Dropout(0.3, seed=5)), given=given)


FAULTS = {
    "at.segment.first_query, band_within(at, mask)[2])": "at.segment.first_query, mask.queries)",
    "at.segment.first_key, band_within(at, mask)[3])": "at.segment.first_key, mask.keys)",
    "wait_copies(2)": "wait_copies(3)",
    "sync()                                              # V and dO": "pass  # V and dO",
    "wait_copies()\n            sync()": "sync()",
    "sync()                                              # Q and K": "pass  # Q and K",
    "sync()                                              # P is": "pass  # P is",
    "sync()                                              # all have read P": "pass  # all have read P",
    "sync()                                              # dS is": "pass  # dS is",
    "sync()                                              # all have read Q": "pass  # all have read Q",
    "S, F = hide(S, NO_SCORE, shown, band), hide(F, 0, shown, band)": "S, F = hide(S, 0, shown, band), F",
    "put(sP, PZ)": "put(sP, P)",
    "dV = full(V_TILE, ZERO)\n": "dV = dV\n",
    "dK = full(Q_TILE, ZERO)\n": "dK = dK\n",
    "member == group_size - 1": "member == 0",
    "return P * Z, dP * Z": "return P * Z, dP",
    "D - where(seen, load": "D + where(seen, load",
    "where(seen, load(statistics[0][batch, head][first:end], ROWS, 0), 0)":
        "load(statistics[0][batch, head][first:end], ROWS, 0)",
    "load(statistics[1][batch, head][:end]": "load(statistics[0][batch, head][:end]",
    "load(line[:end]": "load(line",
    (
        "test_small.py::test_padding_is_not_read[simulated-bias]",
        "test_small.py::test_padding_is_not_read[simulated-capped bias]",
    ): {
        "S, F = hide(S, NO_SCORE, shown, band), hide(F, 0, shown, band)": "S = hide(S, NO_SCORE, shown, band)",
        "inverse(whole, alpha), total > 0": "inverse(whole, alpha), total >= 0",
        "band_within(at, mask)[2])": "band_within(at, mask)[3])",
        "band_within(at, mask)[3])": "band_within(at, mask)[2])",
    },
    "test_small.py::test_gradients_of_inputs_that_a_batch_shares[simulated-groups-kv]": {
        "member == group_size - 1, segment)": "member == 0, segment)",
        "dV = full(V_TILE, ZERO)": "dV = dV + ZERO",
    },
    "cuda/kernels/small/test_scores.py": {
        "return total + dS": "return total",
    },
    "cuda/plan/test_small.py": {
        "return fits and work.whole and work.sink is None": "return fits and work.sink is None",
        "work.sink is None and (not": "(not",
    },
    "cuda/kernels/shared/sums_of_ds.py": {
        "test_small.py::test_arrays_of_as_many_elements_as_the_scores": {
            "if others or not is_matrix or": "if others or",
        },
        "cuda/kernels/small/test_scores.py": {
            "return split(number, heads)": "return number // heads, 0",
            "is_zero=True)": "is_zero=False)",
            "or not is_matrix": "",
            "[heads] * bool(lead)": "[1] * bool(lead)",
        },
        "cuda/plan/test_small.py": {
            "in (SHARED, BY_HEAD) and not is_grouped(work)": "in (SHARED, BY_HEAD)",
        },
    },
}

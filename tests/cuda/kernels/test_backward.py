"""In tiles of 16 queries and keys, simulated; test_passes has those of a plan, compiled."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.backward import backward_kv, backward_q
from tests.accuracy import assert_accurate
from tests.tools.launch import launch, poisoned, simulated_only

from .calls import call, padded

pytestmark = simulated_only


def check(case, sums_of, unit="fma", threads=32, tile=16, stages=1, lanes=4):
    """The gradients of `sums_of`, "q" or "kv"."""
    dtype, kept = case.q.dtype, "q" if sums_of == "q" else "k"
    inputs = {"q": case.q, "k": case.k, "v": case.v}
    grads = {name: poisoned(inputs[name].shape, dtype) for name in sums_of}
    tiles = {"tile_m": tile, "tile_n": 16} if kept == "q" else {"tile_m": 16, "tile_n": tile}
    source = (backward_q if kept == "q" else backward_kv)(
        dtype=dtype.name, out_dtypes=(dtype.name,) * len(grads), head_dim=16, head_dim_v=8, threads=threads, unit=unit,
        lanes=lanes, stages=stages, mask=case.mask, score=(), dropout=case.kept_scale != 1, nbytes=0, **tiles,
    )  # fmt: skip
    statistics = padded(case.lse_log2, np.inf), padded(case.delta, 0)
    batches, heads, rows = inputs[kept].shape[:3]
    launch(
        source.function, (batches * heads * -(-rows // tile), 1, 1), threads, source.shared, case.q, case.k, case.v,
        case.do, *grads.values(), *statistics, case.sight_of(kept, **tiles), (), case.drops, case.group_size,
        case.scale, case.kept_scale,
    )  # fmt: skip
    for name in sums_of:
        assert_accurate("d" + name, grads[name], case.wanted["d" + name], case.plain["d" + name], dtype)


BOTH = pytest.mark.parametrize("sums_of", ["q", "kv"])


@BOTH
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("unit", "tile", "lanes"), [("fma", 16, 4), ("mma", 32, 4), ("mma", 16, 8)])
def test_two_warps(rng, unit, tile, lanes, stages, sums_of):
    """They share the tiles that they loop over; with 8 lanes the rows, too."""
    m, n = (16, 40) if sums_of == "q" else (40, 16)
    check(call(rng, heads=2, m=m, n=n), sums_of, unit, 64, tile, stages, lanes)


MASKS = {
    "causal": {"causal": True},
    "lengths": {"mask": na.Lengths(np.array([[16, 33]]), np.array([[19, 0]])) & na.Window(20, 9), "poison": np.nan},
    "one length": {"mask": na.Lengths(19, 17), "poison": np.nan},
    "blocks": {"mask": na.BlockSparse(np.array([[[[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]]], bool), (8, 11))},
}


@BOTH
@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, mask, sums_of):
    check(call(rng, heads=2, m=20, n=35, **MASKS[mask]), sums_of)


@BOTH
def test_dropout(rng, sums_of):
    check(call(rng, batch=2, heads=2, m=16, n=16, dropout=na.Dropout(0.3, seed=5)), sums_of)

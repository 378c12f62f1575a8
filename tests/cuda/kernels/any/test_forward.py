"""In tiles of 16 queries and keys, simulated; test_passes has those of a plan, compiled."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.any.forward import forward
from numbattn.cuda.kernels.tables import Tiles
from tests.accuracy import assert_accurate
from tests.tools.launch import launch, poisoned, simulated_only

from ..calls import call

pytestmark = simulated_only
TILE_N = 16


def check(case, unit="fma", threads=32, tile_m=16):
    dtype = case.q.dtype
    source = forward(
        dtype=dtype.name, out_dtypes=(dtype.name,), head_dim=16, head_dim_v=8, nbytes=0,
        tiles=Tiles(unit, tile_m, TILE_N, threads, 4), mask=case.kinds, score=(), dropout=case.kept_scale != 1,
    )  # fmt: skip
    o, (lse, low) = poisoned(case.do.shape, dtype), (poisoned(case.lse.shape, case.lse.dtype) for _ in range(2))
    batches, heads, m = lse.shape
    launch(
        source.function, (batches * heads * -(-m // tile_m), 1, 1), threads, source.shared, case.q, case.k, case.v, o,
        (), lse, low, case.mask_of("q", tile_m, TILE_N), (), case.drops, case.group_size, case.scale_log2,
        case.kept_scale,
    )  # fmt: skip
    for name, got in (("o", o), ("lse", lse)):
        assert_accurate(name, got, case.wanted[name], case.plain[name], got.dtype)


@pytest.mark.parametrize(("unit", "tile_m"), [("fma", 16), ("mma", 32)])
def test_two_warps(rng, unit, tile_m):
    """They share tiles of K and V."""
    check(call(rng, m=16, n=40), unit, 64, tile_m)


MASKS = {
    "causal": {"causal": True},
    "lengths": {"mask": na.Lengths(np.array([[16, 33]]), np.array([[19, 0]])) & na.Window(20, 9), "poison": np.nan},
    "one length": {"mask": na.Lengths(19, 17), "poison": np.nan},
    "blocks": {"mask": na.BlockSparse(np.array([[[[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]]], bool), (8, 11))},
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, mask):
    check(call(rng, heads=2, m=20, n=35, **MASKS[mask]))


@pytest.mark.parametrize("unit", ["fma", "mma"])
def test_dropout(rng, unit):
    check(call(rng, batch=2, heads=2, m=16, n=16, dropout=na.Dropout(0.3, seed=5)), unit)


FAULTS = {
    "head_k, key, (query, end_query) = head // group_size": "head_k, key, (query, end_query) = head",
    "mV[batch, head_k][key : key + maximum(band[3], 1)]": "mV[batch, head_k]",
    "(end + TILE_N - 1) // TILE_N": "end // TILE_N",
    "wait_copies()\n        sync_threads()\n": "sync_threads()\n",
    "        sync_threads()\n        while": "        while",
    "wait_copies()\n            sync_threads()                                      # V":
        "sync_threads()                                      # V",
    "sync_threads()                                      # V": "pass  # V",
    "wait_copies()\n            sync_threads()                                      # K":
        "sync_threads()                                      # K",
    "sync_threads()                                      # K": "pass  # K",
    "if tested(": "if not tested(",
    "sees(mask, band, batch, head, m0, n0)": "sees(mask, band, batch, head, n0, m0)",
    "drops, batch, head, m0": "drops, head, batch, m0",
    "dot(O * alpha, left(P), sV)": "dot(O, left(P), sV)",
    "O * (factor * kept_scale)": "O * factor",
    (
        "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated[simulated-CUDA cores]",
        "cuda/kernels/shared/test_segments.py::test_gradients_without_own_kernels[compiled-CUDA cores]",
    ): {
        "mV[batch, head_k][key : key + maximum(band[3], 1)]": "mV[batch, head_k][key:]",
        "query + m0, key + n0": "m0, n0",
        "scores_of(scores, segment)": "scores",
        "mO[batch, head][query:end_query]": "mO[batch, head][query:]",
        "packs=True": "packs=False",
    },
}

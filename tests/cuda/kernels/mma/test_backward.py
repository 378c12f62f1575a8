"""In small tiles, of which a warp has whole rows of S or shares them; the tiles of plans beyond that, compiled."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.any.round_dq import DqPart, round_dq
from numbattn.cuda.kernels.mma.backward import TILES as TABLE
from numbattn.cuda.kernels.mma.backward import UNDER_PRESSURE, BackwardTiles, mma_backward, sizes
from numbattn.cuda.kernels.shared.layouts import warps_across
from numbattn.cuda.kernels.tables import HEAD_DIMS
from numbattn.cuda.tile import mma
from tests.accuracy import assert_accurate
from tests.tools.launch import compiled_only, launch, mostly_simulated, poisoned, simulated_only

from ..calls import call, padded

DTYPE = np.float16
TILES = {
    "whole rows": BackwardTiles(16, 64, 64, stages=2), "shared rows": BackwardTiles(32, 64, 128, stages=2),
    "one stage": BackwardTiles(32, 64, 128, stages=1),
}  # fmt: skip
EACH = pytest.mark.parametrize("tiles", TILES)


def check(rng, tiles, adds_dq=True, at_once=2, cc=(8, 0), size=32, nbytes=0, **problem):
    """The gradients. Returns what is known of the kernel's PTX."""
    case, tiles, in_lines = call(rng, DTYPE, **{"d": 24, "e": 16} | problem), TILES.get(tiles, tiles), cc < (9, 0)
    arrays = {"q": case.q, "k": case.k, "v": case.v}
    grads = {name: poisoned(arrays[name].shape, DTYPE) for name in ("qkv" if adds_dq else "kv")}
    source = mma_backward(
        dtype="float16", out_dtypes=("float16",) * 2, head_dim=size, head_dim_v=size, tiles=tiles,
        mask=case.kinds,
        score=(), dropout=case.kept_scale != 1, nbytes=nbytes, adds_dq=adds_dq, in_lines=in_lines,
    )  # fmt: skip
    lse, delta = padded(case.lse_log2, np.inf), padded(case.delta, 0)
    batches, heads, rows = lse.shape
    sums, (heads_k, n) = np.zeros((batches, heads, rows * size), np.float32), case.k.shape[1:3]
    known = launch(
        source.function, (batches * heads_k * -(-n // tiles.tile_n), 1, 1), tiles.threads, source.shared,
        case.q, case.k, case.v, case.do, grads["k"], grads["v"], sums, lse, delta,
        case.mask_of("k", tiles.tile_m, tiles.tile_n), (), case.drops, case.group_size, case.ds_scale, case.scale_log2,
        case.kept_scale, np.int32(at_once), case.delta_scale, cc=cc,
    )  # fmt: skip
    if adds_dq:
        part = DqPart(tiles.tile_m, size, tiles.threads, warps_across(tiles.tile_m, size, tiles.threads), in_lines)
        source = round_dq(dtype="float16", out_dtypes=("float16",), col_parts=1, nbytes=0, mask=(), **part._asdict())
        parts = batches * heads * rows // tiles.tile_m
        arguments = sums, (), grads["q"], case.ds_scale, ()
        launch(source.function, (parts, 1, 1), tiles.threads, source.shared, *arguments, cc=cc)
    for name, got in grads.items():
        assert_accurate("d" + name, got, case.wanted["d" + name], case.plain["d" + name], DTYPE)
    return known


@mostly_simulated
@EACH
def test_causal(rng, tiles):
    """More tiles of queries than stages; some need a test of each element."""
    check(rng, tiles, m=130, n=100, causal=True)


@simulated_only
@EACH
def test_groups_of_heads(rng, tiles):
    """Heads of a group that see different queries and keys; after those lies NaN."""
    mask = na.Lengths(np.array([[50, 17, 70, 60]]), np.array([[30, 70, 0, 60]]))
    check(rng, tiles, heads=4, heads_k=2, m=70, n=75, mask=mask, poison=np.nan)


@simulated_only
@EACH
def test_blocks(rng, tiles):
    blocks = np.array([[[[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]]], bool)
    check(rng, tiles, m=96, n=128, mask=na.BlockSparse(blocks, (32, 32)))


@simulated_only
@pytest.mark.parametrize("mask", [na.Causal(offset=-64), na.Lengths(np.array([[0]]))], ids=["by most", "by all"])
@EACH
def test_nothing_is_seen(rng, tiles, mask):
    check(rng, tiles, m=70, n=20, mask=mask)


@mostly_simulated
@EACH
def test_dropout(rng, tiles):
    check(rng, tiles, batch=2, heads=2, m=40, n=40, dropout=na.Dropout(0.3, seed=5))


@simulated_only
@EACH
def test_without_dq(rng, tiles):
    check(rng, tiles, adds_dq=False, m=70, n=70, causal=True)


@compiled_only
@pytest.mark.parametrize(("tiles", "cc", "size"), [
    (BackwardTiles(32, 128, 128, 2), (8, 0), 64), (BackwardTiles(64, 128, 256, 2, swizzled=True), (8, 0), 128),
    *(pytest.param(*which, marks=pytest.mark.slow) for which in (
        (BackwardTiles(64, 64, 128, 1), (8, 6), 128), (BackwardTiles(64, 64, 256, 2), (9, 0), 192),
        (BackwardTiles(32, 32, 128, 1), (8, 9), 256),
    )),
], ids=str)  # fmt: skip
def test_no_bank_conflicts(rng, tiles, cc, size):
    """Rows of tables, with aligned rows."""
    known = check(rng, tiles, cc=cc, size=size, nbytes=16, m=70, n=130, d=size, e=size)
    assert not +known.conflicts


@pytest.mark.parametrize(("largest", "tiles"), [
    (largest, tiles) for table in (TABLE, UNDER_PRESSURE) for largest, rows in table.items() for tiles in rows
], ids=str)  # fmt: skip
def test_every_warp_has_sums_of_its_own(largest, tiles):
    """Of both head_dims, however small one is beside the other; 16 columns of them, where warps share rows."""
    for head_dim, head_dim_v in product((d for d in HEAD_DIMS if d <= largest), repeat=2):
        work = SimpleNamespace(problem=SimpleNamespace(head_dim=head_dim, head_dim_v=head_dim_v))
        d, e = sizes(work, tiles)
        assert d >= head_dim
        assert e >= head_dim_v
        for rows, cols in ((tiles.tile_n, tiles.tile_m), (tiles.tile_n, d), (tiles.tile_n, e), (tiles.tile_m, d)):
            layout = mma(rows, cols, tiles.threads, warps_across(rows, cols, tiles.threads))
            assert layout.rows.slots * layout.cols.slots * tiles.threads == rows * cols
            assert layout.has_whole_rows or layout.cols.slots % 4 == 0


FAULTS = {
    ("test_groups_of_heads", "test_nothing_is_seen", "test_dropout", "test_causal"): {
        "rows_between(mK, batch, head, first, end": "rows_between(mK, batch, head, first, shape(mK)[2]",
        "maximum(longest(mask, tile), 1)": "longest(mask, tile)",
        "            wait_copies()\n            sync_threads()": "            sync_threads()",
        "sync_threads()                                      # this tile": "pass  # this tile",
        "copy_queries(1 - stage,": "copy_queries(stage,",
        "add_dq(mSums, tile, last, 1 - stage)\n            sQ": "add_dq(mSums, tile, last, stage)\n            sQ",
        "sync_threads()                                  # all have read it": "pass  # all have read it",
        "        wait_copies()\n        sync_threads()\n        if": "        wait_copies()\n        if",
        "            add_dq(mSums, tile, last, 1 - stage)\n            sync_threads()": "            sync_threads()",
        "sync_threads()                                      # all have read K": "pass  # all have read K",
        "        put(sdS, dS)\n        sync_threads()\n": "        put(sdS, dS)\n",
        "if needs_mask(mask": "if not needs_mask(mask",
        "P, F = masked(P, F, mask": "_, F = masked(P, F, mask",
        "drops, batch, at.head, m0": "drops, 0, at.head, m0",
        "maximum(P, 0) if HAS_DROPOUT else P": "P",
        "dK * ds_scale": "dK",
        "dV * kept_scale": "dV",
        "stages * adds_dq if HAS_WHOLE_ROWS else 1": "1",
        "ADDS_DQ and at.m_blocks > 0": "ADDS_DQ",
    },
    "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated[simulated-warps]": {
        "rows_between(mQ, batch, head, first, end": "rows_between(mQ, batch, head, first, shape(mQ)[2]",
        "rows_between(mDO, batch, head, first, end": "rows_between(mDO, batch, head, first, shape(mDO)[2]",
    },
    "cuda/plan/test_planner.py::test_packed_arrays_on_other_gpus": {
        "parameters=parameters(adds_dq=False))": "parameters=parameters(adds_dq=False), packs=False)",
    },
    "test_every_warp_has_sums_of_its_own": {
        "max(head_dim, 8 * tiles.threads // tiles.tile_m)": "head_dim",
    },
    "cuda/kernels/any/round_dq.py": {
        ("test_causal", "cuda/kernels/hopper/test_backward.py::test_causal"): {
            "down % PARTS_A_SLOT * TILE_M": "down * TILE_M",
            "load_lines if in_lines else load_registers": "load_lines",
            "dQ * ds_scale": "dQ",
        },
    },
}

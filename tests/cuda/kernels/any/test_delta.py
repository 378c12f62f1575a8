"""delta = rowsum(dO * O) - dlse, and 0 of a query that sees nothing, whatever its gradients are; lse in base 2, +inf of
such a query. Queries beyond the last one see nothing."""

import numpy as np
import pytest

from numbattn.cuda.kernels.any.delta import delta
from tests.tools.launch import launch, poisoned

from ..calls import padded


@pytest.mark.parametrize("has_dlse", [False, True])
def test_delta(rng, has_dlse):
    o, do = rng.standard_normal((2, 2, 3, 45, 13)).astype(np.float32)
    lse, dlse = rng.standard_normal((2, 2, 3, 45)).astype(np.float32)
    lse[0, 1, 40], do[0, 1, 40], dlse[0, 1, 40], lse[1, 0, 7] = -np.inf, np.nan, np.nan, np.nan
    about = {"tile_m": 32, "head_dim_v": 32, "dlse": has_dlse, "nbytes": 0, "bounded": False}
    source = delta(dtype="float32", out_dtypes=("float32",), **about)
    got, base_2 = poisoned((2, 3, 128)), poisoned((2, 3, 256))
    launch(source.function, (24, 1, 1), source.threads, 0, do, o, lse, lse, dlse, (), got, base_2, ())
    want, blind = (do * o).sum(-1, dtype=np.float64) - (dlse if has_dlse else 0), lse == -np.inf
    np.testing.assert_allclose(got, padded(np.where(blind, 0, want), 0), rtol=1e-5, atol=1e-5)
    want = padded(np.where(blind, np.inf, lse * np.log2(np.e)), np.inf)
    np.testing.assert_allclose(base_2[..., :128], want, rtol=1e-6)
    np.testing.assert_array_equal(base_2[..., 128:], 0)         # nothing is known of what rounding took


def test_low(rng):
    """What rounding took from lse is added in base 2, in a second half, and lse is not bounded then."""
    o, do = rng.standard_normal((2, 1, 2, 45, 13)).astype(np.float32)
    lse, low = rng.standard_normal((2, 1, 2, 45)).astype(np.float32)
    lse *= 10**8
    lse[0, 1, 40] = -np.inf
    about = {"tile_m": 32, "head_dim_v": 32, "dlse": False, "nbytes": 0, "bounded": True, "low": True}
    source = delta(dtype="float32", out_dtypes=("float32",), **about)
    got, base_2 = poisoned((1, 2, 128)), poisoned((1, 2, 256))
    launch(source.function, (8, 1, 1), source.threads, 0, do, o, lse, low, lse, (), got, base_2, ())
    blind, log2_e = lse == -np.inf, np.float32(np.log2(np.e))
    np.testing.assert_array_equal(base_2[..., :128], padded(np.where(blind, np.inf, lse * log2_e), np.inf))
    np.testing.assert_array_equal(base_2[..., 128:], padded(np.where(blind, 0, low * log2_e), 0))


def test_low_of_a_sink(rng):
    """What rounding took from lse counts for the gradient of a sink's logits, too."""
    o, do = rng.standard_normal((2, 1, 2, 45, 13)).astype(np.float32)
    exact = 1e7 + rng.random((1, 2, 45))
    lse, logits = exact.astype(np.float32), np.full((1, 2), 1e7, np.float32)
    about = {"tile_m": 32, "head_dim_v": 32, "dlse": False, "nbytes": 0, "bounded": False, "low": True, "sink": True}
    source = delta(dtype="float32", out_dtypes=("float32",), **about)
    sums, got, base_2 = poisoned((1, 2, 45)), poisoned((1, 2, 128)), poisoned((1, 2, 256))
    given = do, o, lse, (exact - lse).astype(np.float32), lse, (logits, sums), got, base_2, ()
    launch(source.function, (8, 1, 1), source.threads, 0, *given)
    np.testing.assert_allclose(sums, -np.exp(1e7 - exact) * (do * o).sum(-1, dtype=np.float64), rtol=1e-4, atol=1e-5)


def test_bounded(rng):
    """lse is rounded up where it is so large that its last bits are not enough."""
    o, do = rng.standard_normal((2, 1, 2, 45, 13)).astype(np.float16)
    lse = rng.standard_normal((1, 2, 45)).astype(np.float32)
    lse[0, 1, 40], lse[0, 0, :3] = -np.inf, (1e8, -1e8, np.finfo(np.float32).min)
    about = {"tile_m": 64, "head_dim_v": 32, "dlse": False, "nbytes": 0, "bounded": True}
    source = delta(dtype="float16", out_dtypes=("float16",), **about)
    got, base_2 = poisoned((2, 1, 2, 128))
    launch(source.function, (4, 1, 1), source.threads, 0, do, o, lse, lse, lse, (), got, base_2, ())
    sees = np.zeros(got.shape, bool)
    sees[..., :45] = lse > -np.inf
    want = np.zeros(got.shape)
    want[..., :45] = (do.astype(np.float64) * o).sum(-1)
    np.testing.assert_allclose(got, np.where(sees, want, 0), rtol=1e-5, atol=1e-5)
    exact = lse[lse > -np.inf] * np.log2(np.e)
    np.testing.assert_allclose(base_2[sees][3:], exact[3:], rtol=1e-6)
    assert np.isfinite(base_2[sees]).all()
    assert (base_2[sees][:2] > exact[:2] * (1 + np.sign(exact[:2]) * 8e-7)).all()      # exp(S - lse) is at most 1
    assert (base_2[~sees] == np.inf).all()


FAULTS = {
    "row_sum(convert(dO, ACC) * convert(O, ACC))": "row_sum(convert(dO, ACC))",
    "D = D - load(mDlse": "D = D + load(mDlse",
    "where(sees, D, 0)": "D",
    "where(sees, lse_log2, INFINITE)": "lse_log2",
    "if BOUNDED:": "if not BOUNDED:",
    "first_low(mLseLog2) + padded_row": "padded_row",
    "bounded and not low": "bounded",
    "lse_log2 + abs(lse_log2) * MARGIN": "lse_log2 * (1 + MARGIN)",
    " & (row_index(ROWS, m0) < end - first)": "",
    "tile % TILES_A_SLOT * TILE_M": "tile % TILES_A_SLOT",
    "batches * heads, heads)": "batches * heads, batches)",
    "test_low_of_a_sink": {
        "(logits[batch, head] - lse) - low": "logits[batch, head] - lse",
    },
    "cuda/kernels/shared/test_segments.py::test_gradients_without_own_kernels": {
        "logits[batch, head] - lse": "logits[head, batch] - lse",
        "-(P * D)": "P * D",
        "where(sees, -(P * D), 0)": "-(P * D)",
        "            save_sink(sinks, batch, head, lse, low, D, sees, first, end, m0)\n": "",
    },
}

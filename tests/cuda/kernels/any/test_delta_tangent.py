"""The tangent of delta, and tlse, both 0 of a query that sees nothing and beyond the last one."""

import numpy as np
import pytest

from numbattn.cuda.kernels.any.delta_tangent import delta_tangent
from tests.tools.launch import launch, poisoned

from ..calls import padded


@pytest.mark.parametrize(("has_tdo", "has_tdlse"), [(False, True), (True, False)])
def test_delta_tangent(rng, has_tdo, has_tdlse):
    o, to, do, tdo = rng.standard_normal((4, 2, 3, 45, 13)).astype(np.float32)
    lse, tlse, tdlse = rng.standard_normal((3, 2, 3, 45)).astype(np.float32)
    blind = np.zeros(lse.shape, bool)
    blind[0, 1, 40] = blind[1, 2, 0] = True
    lse[blind], tdlse[blind], tlse[blind], do[blind] = -np.inf, np.nan, np.nan, np.nan
    source = delta_tangent(
        dtype="float32", out_dtypes=("float32",), tile_m=32, head_dim_v=32, tdo=has_tdo, tdlse=has_tdlse, nbytes=0
    )
    got, got_tlse = poisoned((2, 2, 3, 128))
    given = do, (tdo,) if has_tdo else (), o, to, lse, tlse, tdlse
    launch(source.function, (24, 1, 1), source.threads, 0, *given, got, got_tlse, ())
    want = (do * to + (tdo * o if has_tdo else 0)).sum(-1, dtype=np.float64) - (tdlse if has_tdlse else 0)
    np.testing.assert_allclose(got, padded(np.where(blind, 0, want), 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got_tlse, padded(np.where(blind, 0, tlse), 0))


FAULTS = {
    "row_sum(X * Y)": "row_sum(X)",
    "tD = tD + row_sums(": "tD = row_sums(",
    "tD = tD - load(": "tD = tD + load(",
    "where(sees, tD, 0)": "tD",
    "where(sees, tlse, 0)": "tlse",
    "tile % TILES_A_SLOT * TILE_M": "tile % TILES_A_SLOT",
    "batches * heads, heads)": "batches * heads, batches)",
}

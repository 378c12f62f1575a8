"""delta = rowsum(dO * O) - dlse, and 0 of a query that sees nothing, whatever its gradients are."""

import numpy as np
import pytest

from numbattn.cuda.kernels.delta import delta
from tests.tools.launch import launch, poisoned


@pytest.mark.parametrize("has_dlse", [False, True])
def test_delta(rng, has_dlse):
    o, do = rng.standard_normal((2, 2, 3, 45, 13)).astype(np.float32)
    lse, dlse = rng.standard_normal((2, 2, 3, 45)).astype(np.float32)
    lse[0, 1, 40], do[0, 1, 40], dlse[0, 1, 40] = -np.inf, np.nan, np.nan
    source = delta(dtype="float32", head_dim_v=32, dlse=has_dlse, nbytes=0)
    got = poisoned(lse.shape)
    launch(source.function, (12, 1, 1), source.threads, 0, do, o, lse, dlse, got)
    want = (do * o).sum(-1, dtype=np.float64) - (dlse if has_dlse else 0)
    np.testing.assert_allclose(got, np.where(lse == -np.inf, 0, want), rtol=1e-5, atol=1e-5)

"""P from S and lse, where rows see nothing or are beyond the queries; elsewhere with the kernels that recompute P."""

import numpy as np
import pytest

from numbattn.cuda.kernels.shared.recompute import recompute, recompute_capped
from numbattn.cuda.tile import load, mma, save
from tests.tools.launch import launch, poisoned

TILE = mma(16, 8, 32)
ROWS = TILE.row_vector()


@pytest.mark.parametrize(("step", "lse", "want"), [
    (recompute, 3, [0.5, 2.0**-15]), (recompute, np.inf, [0, 0]),       # of a row that sees nothing
    (recompute_capped, 3, [0.5, 2.0**-15]), (recompute_capped, 0, [1, 2.0**-12]),   # of one beyond the queries
], ids=["a row", "nothing is seen", "a capped row", "beyond the queries"])  # fmt: skip
def test_a_tile(step, lse, want):
    def kernel(S, lses, P):
        save(P, step(load(S, TILE, 0), load(lses, ROWS, 0), np.float32(2)), 0)

    S, P = np.tile(np.array([1, -6], np.float32), (16, 4)), poisoned((16, 8), np.float32)
    launch(kernel, (1, 1, 1), 32, 0, S, np.full(16, lse, np.float32), P)
    np.testing.assert_allclose(P, np.tile(np.array(want, np.float32), (16, 4)), rtol=1e-6)


FAULTS = {
    "exp2(S * scale_log2 - lse)": "exp2(S * scale_log2 + lse)",
    "capped(S * scale_log2 - lse, 0)": "S * scale_log2 - lse",
    "cuda/kernels/mma/test_backward.py::test_causal": {
        "return where(visible, P, 0), where(visible, F, 0)       #": "return P, where(visible, F, 0)       #",
    },
    "cuda/kernels/any/test_backward_tangent.py::test_two_warps": {
        "tS * (scale_log2 * LN_2) - tlse": "tS * scale_log2 - tlse",
        "tP * dP + P * tdP": "tP * dP + tP * tdP",
    },
    "cuda/kernels/any/test_backward_tangent.py::test_masks": {
        "return where(visible, P, 0), where(visible, F, 0)       #": "return where(visible, P, 0), F       #",
    },
}

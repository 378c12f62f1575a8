"""P from S and lse, where rows see nothing or are beyond the queries; elsewhere with the kernels that recompute P."""

import numpy as np
import pytest

from numbattn.cuda.kernels.shared.recompute import low_steps, recompute
from numbattn.cuda.tile import device, load, mma, save
from tests.tools.launch import launch, poisoned

_, _, of_words = low_steps(np.dtype(np.float32))
_, _, of_halves = low_steps(np.dtype(np.float16))
TILE = mma(16, 8, 32)
ROWS = TILE.row_vector()


@device
def without_low(S, lse, low, scale_log2):
    return recompute(S, lse, scale_log2)


@pytest.mark.parametrize(("step", "lse", "low", "want"), [
    (without_low, 3, 0, [0.5, 2.0**-15]), (without_low, np.inf, 0, [0, 0]),     # of a row that sees nothing
    (of_words, 2, 1, [0.5, 2.0**-15]), (of_words, 0, -1, [1, 2.0**-11]),        # of one beyond the queries
    (of_halves, 3, 1, [0.5, 2.0**-15]),
], ids=["a row", "nothing is seen", "a capped row", "beyond the queries", "half precision"])  # fmt: skip
def test_a_tile(step, lse, low, want):
    low = np.float32(low)

    def kernel(S, lses, P):
        save(P, step(load(S, TILE, 0), load(lses, ROWS, 0), low, np.float32(2)), 0)

    S, P = np.tile(np.array([1, -6], np.float32), (16, 4)), poisoned((16, 8), np.float32)
    launch(kernel, (1, 1, 1), 32, 0, S, np.full(16, lse, np.float32), P)
    np.testing.assert_allclose(P, np.tile(np.array(want, np.float32), (16, 4)), rtol=1e-6)


FAULTS = {
    "exp2(S * scale_log2 - lse)": "exp2(S * scale_log2 + lse)",
    "exp2(capped(S * scale_log2 - lse - low": "exp2((S * scale_log2 - lse + low",
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

"""The kernels drop what `numbattn.dropout_mask` says."""

import numpy as np
import pytest

from numbattn.cuda.kernels.dropout import Drops, dropout_step
from numbattn.cuda.tile import SIMULATED, mma, save, simt, wgmma
from numbattn.dropout import Dropout, dropout_mask
from tests.tools.launch import launch, ptx_of

THREADS = 128
LAYOUTS = {"simt": simt(64, 32, THREADS, 8, 2), "mma": mma(64, 32, THREADS), "wgmma": wgmma(32)}
DROPOUT = Dropout(0.3, seed=0x123456789ABCDEF, offset=77)
SCALARS = np.uint32(DROPOUT.threshold), np.uint64(77), *map(np.uint64, DROPOUT.key), np.uint64(2)


def dropping(layout, transposed):
    kept = dropout_step(layout, transposed)

    def kernel(z, threshold, offset, key_low, key_high, first, i0, j0):
        save(z, kept(Drops(threshold, offset, key_low, key_high, first), np.int32(1), i0, j0), 0)

    return kernel


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_kept(layout, transposed):
    z = np.zeros((64, 32), np.bool_)
    launch(dropping(LAYOUTS[layout], transposed), (1, 1, 1), THREADS, 0, z, *SCALARS, np.int32(48), np.int32(112))
    shape = (32, 64) if transposed else (64, 32)
    want = dropout_mask(DROPOUT, (4, 256, 256))[3, 48:, 112:][: shape[0], : shape[1]]
    np.testing.assert_array_equal(z, want.T if transposed else want)


@pytest.mark.skipif(SIMULATED, reason="looks at PTX")
def test_a_call_of_the_generator_serves_eight_elements_on_tensor_cores():
    """And a round takes two products."""
    z = np.zeros((64, 32), np.bool_)
    found = ptx_of(dropping(LAYOUTS["wgmma"], False), THREADS, z, *SCALARS, np.int32(0), np.int32(0), cc=(9, 0, "a"))
    assert 0 < found.count(r"mul\.wide\.u32\s+%\w+, %\w+, %\w+;") <= 2 * 10 * z.size // THREADS // 8

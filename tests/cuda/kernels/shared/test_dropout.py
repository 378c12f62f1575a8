"""The kernels drop what `numbattn.dropout_mask` says."""

import numpy as np
import pytest

import numbattn as na
from numbattn.base.origin import Origin
from numbattn.cuda.kernels.shared.dropout import Drops, drop_step
from numbattn.cuda.tile import full, mma, save, simt, wgmma
from numbattn.dropout import Dropout, dropout_mask
from tests.accuracy import random
from tests.tools.device import HOPPER, on
from tests.tools.launch import compiled_only, launch, poisoned, ptx_of, simulated_only

THREADS = 128
LAYOUTS = {"simt": simt(64, 32, THREADS, 8, 2), "mma": mma(64, 32, THREADS), "wgmma": wgmma(32),
           "mma, 8 columns": mma(64, 8, THREADS), "simt, 8 x 4": simt(8, 4, THREADS, 4, 1)}
DROPOUT = Dropout(32829 / 65536, seed=0x123456789ABCDEF, offset=77)  # what an element of the large tiles draws
SCALARS = np.uint32(DROPOUT.threshold), np.uint64(77), *map(np.uint64, DROPOUT.key), np.int32(1)


def dropping(layout, transposed):
    drop, ONE = drop_step(layout, True, transposed), np.float32(1)

    def kernel(z, threshold, offset, key_low, key_high, first, m0, n0):
        origin = Origin(np.int32(32), np.int32(16), np.int32(1), np.int32(2), np.int32(5))
        drops = Drops(threshold, offset, key_low, key_high, first, origin)
        save(z, drop(full(layout, ONE), drops, np.int32(3), np.int32(1), m0, n0), 0)

    return kernel


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_kept(layout, transposed):
    """Of a tile that is smaller than a block of 16 x 16: of the second one in it. It counts from the origin."""
    layout = LAYOUTS[layout]
    z = poisoned(layout.shape)
    m, n = reversed(z.shape) if transposed else z.shape
    m0, n0 = 48 + m % 16, 112 + n % 16
    launch(dropping(layout, transposed), (1, 1, 1), THREADS, 0, z, *SCALARS, np.int32(m0), np.int32(n0))
    want = dropout_mask(DROPOUT, (6, 5, 256, 256))[1 + 1 + 3, 2 + 1, 32 + m0 :, 16 + n0 :][:m, :n]
    np.testing.assert_array_equal(z, want.T if transposed else want)


@compiled_only
@pytest.mark.parametrize("transposed", [False, True])
def test_a_call_of_the_generator_serves_eight_elements_on_tensor_cores(transposed):
    """And a round takes two products."""
    z = poisoned((64, 32))
    at = np.int32(0), np.int32(0)
    found = ptx_of(dropping(LAYOUTS["wgmma"], transposed), THREADS, z, *SCALARS, *at, cc=(9, 0, "a"))
    assert 0 < found.count(r"mul\.wide\.u32\s+%\w+, %\w+, %\w+;") <= 2 * 10 * z.size // THREADS // 8


@simulated_only
def test_a_row_of_which_all_is_dropped(rng):
    """Gives no gradient at all, not even by rounding."""
    q, k, v, do = random(rng, (4, 1, 48, 16), np.float16)
    dropout = na.Dropout(0.9, seed=3)
    with on(HOPPER):
        o, saved = na.attention_forward(q, k[:, :8], v[:, :8], dropout=dropout)
        dq, *_ = na.attention_backward(do, saved)
    dropped = ~na.dropout_mask(dropout, (1, 48, 8)).any(-1)
    assert dropped.any()
    assert (o[dropped] == 0).all()
    assert (dq[dropped] == 0).all()


FAULTS = {
    "[device(round_by(wide_product))] * ROUNDS": "[device(round_by(wide_product))] * (ROUNDS - 1)",
    "% 16 == 0 else 15": "% 16 == 0 else 7",
    "(j >> 4) * 4 + ((j >> 1) & 3)": "(j >> 4) * 4 + ((j >> 1) & 1)",
    "(i >> 4) * 8 + (i & 7)": "(i >> 4) * 8 + (i & 3)",
    "drops.first + at.batch + batch": "at.batch + batch",
    "convert(batch, U64) * convert(at.heads, U64)": "convert(batch, U64)",
    "drops.key_low, drops.key_high)": "drops.key_high, drops.key_low)",
    "(i & 8) != 0, (j & 8) != 0": "(j & 8) != 0, (i & 8) != 0",
    "i = i + (j & 1)": "pass",
    "where(odd, word, word << 16)": "where(odd, word << 16, word)",
    ">= U32(drops.threshold << 16)": "> U32(drops.threshold << 16)",
    "where(kept(drops, batch, head, m0, n0), P, 0)": "where(kept(drops, batch, head, n0, m0), P, 0)",
    "test_what_is_kept": {
        "drops.first + at.batch + batch": "drops.first + batch",
        "at.head + head, at.query + m0, at.key + n0\n": "head, at.query + m0, at.key + n0\n",
        "at.query + m0, at.key + n0\n": "at.query + m0, n0\n",
    },
    "cuda/kernels/hopper/test_backward.py": {
        "- abs(P) * D": "- P * D",
    },
}

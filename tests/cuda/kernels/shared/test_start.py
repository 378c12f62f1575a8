"""What the loop over keys starts from has the lse of the keys before, whatever the scale; and their O."""

import numpy as np
import pytest

from numbattn.cuda.kernels.shared.segments import Segment
from numbattn.cuda.kernels.shared.softmax import LN_2, softmax_steps
from numbattn.cuda.kernels.shared.start import start_step
from numbattn.cuda.tile import index, mma, row_sum, save, simt
from numbattn.cuda.words.numbers import LOG2_E
from tests.tools.launch import launch, poisoned

CASES = {  # scale_log2, whether scores may be far, lse
    "usual": (0.75, False, [0, -np.inf, 5, 88, -700, 1e-3, 1e29, -1e29]),
    "large": (2.0**28, False, [0, -np.inf, 5, 88, -700, 1e-3, 1e29, -1e29]),
    "tiny": (2e-38, False, [0, -np.inf, 5, 3, -4, 1e-3, 8, -8]),  # m would be beyond the largest number
    "far": (LOG2_E, True, [0, -np.inf, 5, 88, -700, 1e-3, 3e38, -3e38]),
}
TILES = {"rows in one thread": simt(8, 8, 8, 1, 8), "four threads a row": simt(8, 8, 32, 4, 8), "mma": mma(16, 8, 32)}
ROW = 3  # where a segment begins


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tile", TILES)
def test_resumes(rng, world, tile, case):
    layout, (scale_log2, far, wanted) = TILES[tile], CASES[case]
    wanted = np.array(wanted, np.float32)
    lse = np.pad(wanted, (ROW, 4), constant_values=99)[None, None]
    before = rng.standard_normal((1, 1, lse.size, 8)).astype(np.float32)
    no_max, _ = softmax_steps(np.float32, far)
    start = start_step(layout, layout, np.float32, no_max, resumes=True)

    def kernel(mBefore, mLse, mO, mM, mL, scale_log2, kept_scale):
        segment = Segment(index(ROW), index(8), index(0), index(0), index(0))
        O, m, l = start((mBefore,), mLse, segment, index(0), index(0), index(0), scale_log2, kept_scale)
        save(mO, O, 0)
        save(mM, m, 0)
        save(mL, row_sum(l), 0)

    O, m, l = poisoned((8, 8)), poisoned(8), poisoned(8)
    launch(kernel, (1, 1, 1), layout.threads, 0, before, lse, O, m, l, np.float32(scale_log2), np.float32(2))
    np.testing.assert_array_equal(O, before[0, 0, ROW : ROW + 8] / 2)
    assert np.isfinite(m).all()
    seen = wanted > -np.inf
    np.testing.assert_array_equal(l > 0, seen)
    found = m.astype(float) * np.float32(scale_log2) * LN_2 + np.log(l, where=seen, out=np.zeros(8))
    np.testing.assert_allclose(found[seen], wanted[seen], rtol=1e-6, atol=1e-6)


FAULTS = {
    "maximum(lse / unit, lowest)": "lse / unit",
    "* (ONE / kept_scale)": "",
    "full(PARTS, SHARE) * l": "full(PARTS, ONE) * l",
    "minimum(maximum(lse / unit, lowest), -lowest)": "maximum(lse / unit, lowest)",
    "(lse - m * unit) * LOG2E": "lse * ZERO",
    "first, end = queries_of(segment)": "first, end = 0, 99",
}

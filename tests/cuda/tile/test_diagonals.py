"""Sums along the diagonals of tiles."""

import numpy as np
import pytest

from numbattn.cuda.tile import SharedMemory, allocate, bfloat16, diagonal_sums, load, put, save, simt, sync_warp
from tests.tools.launch import MISUSED, launch, poisoned

ROWS = simt(64, 64, 32, 16, 4)


def summed(x, place, nbytes):
    def kernel(x, y):
        put(allocate(place), load(x, ROWS, 0))
        sync_warp()
        save(y, diagonal_sums(allocate(place)), 0)

    y = poisoned((1, 128), np.float32)
    launch(kernel, (1, 1, 1), 32, nbytes, x, y, cc=(9, 0, "a"))
    return y[0]


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_diagonal_sums(rng, dtype):
    shared = SharedMemory()
    shared.boxes(8, 64, dtype)
    x = rng.standard_normal((64, 64)).astype(np.float32)
    found, exact = summed(x, shared.boxes(64, 64, dtype), shared.nbytes), x.astype(dtype).astype(np.float64)
    np.testing.assert_allclose(found, [exact.trace(k) for k in range(-64, 64)], rtol=0, atol=1e-5)


@pytest.mark.parametrize("place", [SharedMemory().boxes(64, 64, np.float32), SharedMemory().tile(64, 64, np.float16)])
def test_other_tiles_are_refused(place):
    with pytest.raises(MISUSED, match=r"diagonal_sums: got .*, expected boxes of 64x64 float16"):
        summed(np.zeros((64, 64), np.float32), place, place.nbytes)


FAULTS = {
    "values.trace(k - SIZE": "values.trace(k - SIZE + 1",
    "any(inside)": "all(inside)",
    "block if is_inside else I32(0)": "block",
    'icmp_unsigned(">=", b.add(lane.col': 'icmp_unsigned(">", b.add(lane.col',
    "after = blocks[0]": "after = blocks[1]",
    "b.and_(b.add(number, half), I32(3))": "b.and_(number, I32(3))",
    "(pair[::-1], pair)": "(pair, pair)",
    "b.and_(chunk, I32(PERIOD - 1))": "chunk",
}

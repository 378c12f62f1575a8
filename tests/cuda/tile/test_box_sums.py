"""Sums over the pairs of tokens of two boxes by their offset."""

import numpy as np
import pytest

from numbattn.cuda.tile import BoxGroup, SharedMemory, allocate, bfloat16, box_sums, load, put, save, simt, sync_warp
from numbattn.grids.offsets import groups_of, offsets_of
from tests.tools.launch import MISUSED, launch, poisoned

ROWS = simt(64, 64, 32, 16, 4)


def summed(x, place, nbytes, group):
    def kernel(x, y):
        put(allocate(place), load(x, ROWS, 0))
        sync_warp()
        save(y, box_sums(allocate(place), group), 0)

    y = poisoned((1, group.layout.cols.size), np.float32)
    launch(kernel, (1, 1, 1), 32, nbytes, x, y, cc=(9, 0, "a"))
    return y[0]


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize("sizes", [(8, 8), (64,), (4, 4, 4), (2, 4, 8), (16, 4)], ids=str)
def test_box_sums(rng, sizes, dtype):
    shared = SharedMemory()
    shared.boxes(8, 64, dtype)
    place, x = shared.boxes(64, 64, dtype), rng.standard_normal((64, 64)).astype(np.float32)
    found, places = {}, np.indices(sizes).reshape(len(sizes), -1).T
    for number, offsets in enumerate(offsets_of(sizes)):
        assert number < groups_of(sizes)
        for offset, one in zip(map(tuple, offsets), summed(x, place, shared.nbytes, BoxGroup(sizes, number))):
            found[offset] = found.get(offset, 0) + one
    exact = {}
    for (i, j), one in np.ndenumerate(x.astype(dtype).astype(np.float64)):
        offset = tuple(places[j] - places[i])
        exact[offset] = exact.get(offset, 0) + one
    exact = {offset: exact.get(offset, 0) for offset in found} | exact      # some sums are of no pairs
    np.testing.assert_allclose([found[offset] for offset in exact], [*exact.values()], rtol=0, atol=1e-5)


@pytest.mark.parametrize("place", [SharedMemory().boxes(64, 64, np.float32), SharedMemory().tile(64, 64, np.float16)])
def test_other_tiles_are_refused(place):
    with pytest.raises(MISUSED, match=r"box_sums: got .*, expected boxes of 64x64 float16"):
        summed(np.zeros((64, 64), np.float32), place, place.nbytes, BoxGroup((8, 8), 0))


FAULTS = {
    "x if block else I32(0)": "x",
    "b.xor(self.row,": "b.add(self.row,",
    "b.lshr(total, I32(field.bits))": "I32(0)",
    "b.lshr(at, I32(1))": "at",
    "for x in (offset, lane.row))": "for x in (offset, I32(0)))",
    "cuda/tile/diagonals.py": {"for bit in (4, 3, 2)": "for bit in (3, 4, 2)"},
}

"""The smallest elements of rows of tiles, against a stable sort."""

import numpy as np
import pytest

from numbattn.cuda.kernels.shared.smallest import NOBODY, by_row, smallest_steps
from numbattn.cuda.tile import SharedMemory, load, mma, save, simt, sync_threads
from tests.tools.launch import launch, poisoned, simulated_only

LAYOUTS = {
    "mma": mma(64, 16, 64),
    "mma, rows of 16": mma(16, 16, 32),
    "simt": simt(64, 16, 64, 4, 2),
    "simt, whole rows": simt(32, 16, 32, 1, 4),
    "simt, many rows": simt(128, 8, 64, 2, 4),
}


def smallest(layout, k, tiles):
    """Of rows of some tiles side by side, by the steps of a kernel."""
    shared = SharedMemory()
    start, add, finish = smallest_steps(layout, np.float32, k, shared)
    (rows, COLS), COUNT = layout.shape, len(tiles)

    def kernel(x, values, numbers):
        found = start()
        sync_threads()
        for tile in range(COUNT):
            found = add(found, load(x[tile], layout, 0), 100 + tile * COLS)
        smallest, at = finish(found)
        save(values, smallest, 0)
        save(numbers, at, 0)

    values, numbers = poisoned((rows, k)), np.full((rows, k), 77, np.int32)
    launch(kernel, (1, 1, 1), layout.threads, shared.nbytes, tiles, values, numbers)
    return values, numbers


def check(rng, layout, k, count=4):
    tiles = np.round(rng.standard_normal((count, *layout.shape)) * 4).astype(np.float32)    # many are equal
    tiles[:, 3], tiles[1:, 5], tiles[0, 7, 2] = np.inf, np.inf, -np.inf
    values, numbers = smallest(layout, k, tiles)
    x = np.concatenate([*tiles, np.full((layout.shape[0], k), np.inf, np.float32)], axis=1)
    first = x.argsort(axis=1, kind="stable")[:, :k]
    wanted = np.take_along_axis(x, first, 1)
    np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(numbers, np.where(np.isinf(wanted) & (wanted > 0), NOBODY, first + 100))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1, 3])
def test_layouts(rng, layout, k):
    check(rng, LAYOUTS[layout], k)


@simulated_only
@pytest.mark.parametrize("k", [2, 17, 32])
def test_how_many(rng, k):
    check(rng, LAYOUTS["mma, rows of 16"], k, count=2)


@simulated_only
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_stay_in_their_warp(layout):
    layout = LAYOUTS[layout]
    whole = by_row(layout, 3)
    for warp in range(layout.threads // 32):
        rows = [
            {int(i) for thread in range(32 * warp, 32 * warp + 32) for i in x.positions(thread)[0].ravel()}
            for x in (layout, whole)
        ]
        assert rows[0] == rows[1]


FAULTS = {
    "-where(found.values == least, found.cols, LAST)": "-found.cols",
    "smaller = x < found.values": "smaller = x <= found.values",
    "insert(insert(found, left, col), right, col + 1)": "insert(insert(found, right, col + 1), left, col)",
    "n0 + 4 * group + 2)": "n0 + 4 * group)",
    "        sync_warp()                                             # the bound": "        pass  # the bound",
    "            sync_warp()\n            found": "            found",
    "fields = [(bit, 1, weight) for bit, weight in [*enumerate(lanes), *((of_warps[x], x) for x in of_warps)]]":
        "fields = [(bit, 1, weight) for bit, weight in enumerate(lanes)]",
}

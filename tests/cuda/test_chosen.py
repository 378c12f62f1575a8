"""Lists of blocks on a GPU; as on NumPy arrays."""

import numpy as np
import pytest

from numbattn.cuda import chosen as module
from tests.tools.launch import launch


@pytest.fixture(autouse=True)
def in_world(world, monkeypatch):
    monkeypatch.setattr(module, "launch", launch)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("has_counts", [False, True])
def test_chosen(rng, dtype, has_counts):
    """Of more blocks than a block of the kernel has threads; some are named twice, some out of range."""
    indices = rng.integers(-3, 153, (4, 140)).astype(dtype)
    counts = rng.integers(0, 140, 4).astype(dtype) if has_counts else None
    want = np.zeros((4, 150), bool)
    for row, named in enumerate(indices):
        named = named[: counts[row]] if has_counts else named
        want[row, named[(named >= 0) & (named < 150)]] = True
    np.testing.assert_array_equal(module.chosen(indices, counts, 150), want)


def test_without_blocks_nothing_is_launched(monkeypatch):
    monkeypatch.setattr(module, "launch", None)
    assert module.chosen(np.zeros((0, 3), np.int32), None, 5).shape == (0, 5)


FAULTS = {
    "        sync_threads()": "        pass",
    "0 <= block < n_blocks": "block < n_blocks",
    "block < n_blocks and": "block <= n_blocks and",
    "place < counts[0][row]": "place <= counts[0][row]",
    "range(thread_index(), n_blocks, THREADS)": "range(thread_index(), n_blocks - 1, THREADS)",
}

import numpy as np
import pytest

from numbattn.cuda.tile.alignment import alignment, layout_of


@pytest.mark.parametrize(("x", "nbytes"), [
    (np.zeros((2, 5, 8), np.float32), 16),
    (np.zeros((2, 5, 6), np.float32), 8),
    (np.zeros((2, 5, 7), np.float32), 4),
    (np.zeros((2, 5, 16), np.float32)[..., ::2], 0),
    (np.zeros((2, 5, 8), np.float32)[:, ::-1], 16),
    (np.zeros((2, 5, 9), np.float32)[..., :8], 4),
    (np.zeros((5, 2, 8), np.float16).swapaxes(0, 1), 16),
])  # fmt: skip
def test_alignment(x, nbytes):
    assert alignment(layout_of(x, 1024)) == nbytes
    assert alignment(layout_of(x, 1024 + x.itemsize)) <= max(x.itemsize, 0)


FAULTS = {
    "common >= dtype.itemsize": "common > dtype.itemsize",
}

"""Arrays in the parts in which they travel."""

import numpy as np
import pytest

from numbattn.distributed import travel
from numbattn.distributed.travel import parts_of


@pytest.mark.parametrize(("shape", "count"), [
    ((2, 3, 5, 5), 6), ((2, 3, 5, 4), 1), ((1, 7, 5, 5), 1), ((6, 5, 5), 6), ((5, 5), 1), ((0, 3, 5, 5), 1),
    ((2, 3, 0, 5), 1),
])  # fmt: skip
def test_as_many_for_all_arrays_of_a_shape(rng, monkeypatch, shape, count):
    """Whether their rows are all there are, or some of longer matrices. Together the parts are the array."""
    monkeypatch.setattr(travel, "LARGE", 100)
    monkeypatch.setattr(travel, "MOST", 6)
    *lead, rows, cols = shape
    longer = rng.random((*lead, rows + 3, cols)).astype(np.float32)
    for x in longer[..., 2 : rows + 2, :], longer[..., 2 : rows + 2, :].copy():
        parts = parts_of(x)
        assert len(parts) == count
        assert b"".join(part.tobytes() for part in parts) == x.tobytes()
        assert count == 1 or all(part.flags.c_contiguous and part.base is not None for part in parts)

"""Sums over the pairs of tokens of two boxes by their offset, as they are numbered."""

import numpy as np
import pytest

from numbattn.grids.offsets import groups_of, numbers_of, offsets_of, sums_of

SIZES = [(64,), (8, 8), (16, 4), (2, 32), (4, 4, 4), (2, 4, 8), (8, 4, 2), (1, 8, 8), (64, 1)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_offsets(sizes):
    """Those of a box's tokens, in C order."""
    places = np.indices(sizes).reshape(len(sizes), -1)
    wanted = (places[:, None, :] - places[:, :, None]).transpose(1, 2, 0)
    offsets = offsets_of(sizes)
    assert offsets.shape[:2] == (groups_of(sizes), sums_of(sizes))
    np.testing.assert_array_equal(offsets.reshape(-1, len(sizes))[numbers_of(sizes)], wanted)


FAULTS = {
    "low - start": "0",
    "low - BITS": "0",
    "% (1 << field.bits) << field.shift": "% (1 << field.bits)",
    "(steps < 0)": "(steps <= 0)",
    "steps * field.unit": "steps",
    "(wraps >> number & 1)": "(wraps & 1)",
}

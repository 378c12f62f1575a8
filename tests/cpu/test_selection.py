"""Selection of a tile's elements, whole vectors of queries and parts of them."""

import itertools

import numba
import numpy as np
import pytest

from numbattn.cpu.selection import select


@numba.njit
def selected(S, cells, cols, packed, m0, n0):
    select(S, cells, cols, packed, m0, n0)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_select(rng, dtype):
    for rows, queries in itertools.product([1, 5], [1, 7, 16, 33]):
        visible = rng.random((queries + 3, rows + 6)) < 0.5
        packed = np.packbits(visible, axis=1, bitorder="little")
        m0, n0 = 3, 4
        for cells, cols in [(visible.view(np.uint8), 1), (packed, 8), (np.asfortranarray(visible).view(np.uint8), 1)]:
            around = rng.standard_normal((rows + 2, queries + 5)).astype(dtype)
            around[2] = np.nan  # hidden or not
            S, expected = around[1:-1, 2:-3], around.copy()
            expected[1:-1, 2:-3][~visible[m0:, n0 : n0 + rows].T] = -np.inf
            selected(S, cells, cols, cells is packed, m0, n0)
            np.testing.assert_array_equal(around, expected)


FAULTS = {
    "1 << bit if packed else 255": "255",
    "builder.sub(mS.shape[1], query) if masked else None": "None",
    "i + width <= S.shape[1]": "True",
    'float("-inf")': "0.0",
}

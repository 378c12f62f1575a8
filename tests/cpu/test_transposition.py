"""Transposition of tiles, whole squares and parts of them."""

import itertools

import numba
import numpy as np
import pytest

from numbattn.cpu.transposition import transpose


@numba.njit
def transposed(out, x, factor, add):
    transpose(out, x, factor, add)


@pytest.mark.parametrize("of_x", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_transpose(rng, dtype, of_x):
    for rows, cols in itertools.product([1, 7, 16, 33], repeat=2):
        x = np.hstack([rng.standard_normal((rows, cols)), np.full((rows, 3), np.nan)]).astype(of_x)[:, :cols]
        around = np.full((cols + 2, rows + 5), 7, dtype)
        out = around[1:-1, 2:-3]
        out[...] = np.nan
        transposed(out, x, dtype(2), False)  # forgets what was there
        np.testing.assert_array_equal(out, 2 * x.T.astype(dtype))
        out[...] = 1
        transposed(out, x, dtype(2), True)
        np.testing.assert_array_equal(out, 1 + 2 * x.T.astype(dtype))
        out[...] = 7
        assert (around == 7).all()  # nothing is written beside it


FAULTS = {
    "n + unit.width - size if n & size": "n + unit.width if n & size",
    "times(unit.rounded(line), unit.splat(factor))": "unit.rounded(line)",
    'builder.select(builder.icmp_signed("<", c, width), left, zero)': "left",
    "with builder.if_then(add):": "with builder.if_then(builder.not_(add)):",
    "row + width <= rows and": "",
    "and col + width <= cols": "",
}

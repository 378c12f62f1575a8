"""Rows of many keys, and numbers near the largest. All else: see test_api."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cpu import decode
from numbattn.cpu.arguments import LONG
from tests.accuracy import check, exact

MANY = decode.FEW + 1  # queries that decode.py does not compute


def test_long_rows_lose_no_digits(rng):
    """O and l grow along all keys; the errors of the gradients come from those of o and lse."""
    q, k = (size * rng.standard_normal((n, 8), dtype=np.float32) for size, n in ((0.01, MANY), (1, 16 * LONG)))
    check(q, k, rng.random(k.shape, dtype=np.float32), rng)


@pytest.mark.parametrize("options", [{}, {"dropout": na.Dropout(0.3, 1)}, {"score": na.Sink(np.float32(3.0))}])
def test_parts_of_a_long_row_that_see_nothing(rng, options):
    """Some queries see keys of one part alone, one of none, and nobody one of the parts."""
    n = 3 * LONG + 300
    first, end = np.zeros(MANY, int), np.full(MANY, n)
    first[1:5], end[1:5] = (3, LONG + 7, 2 * LONG + 5, 9), (LONG - 2, LONG + 90, n, 9)
    mask = na.Intervals(first, end) & na.BlockSparse(np.array([[True, False, True, True]]), (MANY, LONG))
    q, k, v = (rng.standard_normal((size, 8), dtype=np.float32) for size in (MANY, n, n))
    o, lse, _ = check(q, k, v, rng, mask=mask, **options)
    assert np.isneginf(lse[[2, 4]]).all()
    assert not o[[2, 4]].any()


@pytest.mark.parametrize("m", [1, MANY])
def test_the_largest_values(rng, m):
    """The number of keys times the largest one is finite."""
    largest = np.finfo(np.float32).max / 70
    q, k, v = (rng.uniform(-1, 1, (size, 8)).astype(np.float32) for size in (m, 64, 64))
    o = na.attention(q, k, v * largest)
    np.testing.assert_allclose(o / largest, exact(o, q, k, v)[0], rtol=1e-6, atol=1e-6)

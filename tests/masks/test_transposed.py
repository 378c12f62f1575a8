"""Masks with queries and keys exchanged."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn.call.problem import describe

from ..accuracy import assert_equal
from .examples import INTERVALS, KINDS, segments

M, N = 5, 6
UNIONS = [na.Window(1, 0) | na.First(2), na.Causal() | na.Prefix(3) | na.Lengths(queries=2), na.Causal(1) | KINDS[3]]


def assert_transposed(mask, m, n, batch=(2, 1)):
    """As a call fits it, there and back again."""
    x, y, b = np.zeros((*batch, m, 1)), np.zeros((*batch, n, 1)), np.zeros((*batch, n, 0))
    _, inputs = describe(x, y, b, mask=mask)
    exchanged = inputs.mask._transposed(m, n)
    _, inputs = describe(y, x, np.zeros((*batch, m, 0)), mask=exchanged)
    visible, found = mask.dense(m, n), inputs.mask.dense(n, m)
    wanted = np.broadcast_to(np.swapaxes(visible, -2, -1), np.broadcast_shapes(found.shape, (n, m)))
    assert_equal(np.broadcast_to(found, wanted.shape), wanted)


@pytest.mark.parametrize("mask", [*KINDS, *INTERVALS, *UNIONS, na.Causal(-2), na.Window(None, 1, np.array([[3], [0]]))],
                         ids=repr)
def test_each(mask):
    assert_transposed(mask, M, N)
    assert_transposed(mask & na.Window(2, 2) & na.Lengths(4, 3), M, N)


WITHIN = [na.Causal(), na.Window(1, 0), na.Window(1, 0) | na.First(1), na.First(2), na.Prefix(1),
          na.Causal(0) & na.First(1), na.Prefix(2) | na.Causal(-1) | na.First(1)]  # fmt: skip


@pytest.mark.parametrize("other", WITHIN, ids=repr)
@settings(max_examples=20)
@given(drawn=segments())
def test_within_segments(other, drawn):
    queries, keys, m, n = drawn
    assume(min(m, n) >= 2)  # as many as the longest Prefix
    assert_transposed(na.Segments(queries, keys) & other, m, n)
    assert_transposed(other & na.Segments(queries), m, m)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(-12, 12))
def test_of_all_sizes(m, n, offset):
    for mask in (na.Causal(offset), na.Window(2, 1, offset), na.First(abs(offset)), na.Causal() | na.First(2)):
        assert_transposed(mask, m, n)


def test_unsigned_offsets():
    assert_transposed(na.Causal(np.array([[3], [0]], np.uint8)), M, N)


FAULTS = {
    "masks/bands.py": {
        "return Window(0, None, _negative(self.offset))": "return Window(1, None, _negative(self.offset))",
        "return Window(self.right, self.left, _negative": "return Window(self.left, self.right, _negative",
        "return None if offset is None else -clip": "return None if offset is None else clip",
    },
    "masks/base.py": {
        "if frame is not None and self._is_aligned else self\n        kind": "if False else self\n        kind",
    },
    "masks/segments.py": {
        "return self if self.keys is None else Segments(self.keys, self.queries)": "return self",
    },
}

"""Prefix and Intervals, element by element, and in calls."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import numbattn as na

from ..accuracy import assert_equal
from .calls import B, H, M, N, qkv
from .examples import LENGTHS, NUMBER, by_definition


@given(LENGTHS, st.integers(0, 25), st.none() | NUMBER)
def test_prefix(lengths, length, offset):
    m, n = lengths
    own = n - m if offset is None else offset
    assert_equal(na.Prefix(length, offset).dense(m, n), by_definition(m, n, lambda i, j: j < length or j <= i + own))


@given(LENGTHS, st.sampled_from([np.int8, np.uint8, np.int32, np.int64, np.uint64]), st.data())
def test_intervals(lengths, dtype, data):
    """Any integers: in or beyond the keys, first before or behind end."""
    m, n = lengths
    info = np.iinfo(dtype)
    number = st.one_of(st.integers(max(-3, info.min), n + 3), st.sampled_from([info.min, info.max]))
    first, end = (data.draw(st.lists(number, min_size=m, max_size=m)) for _ in range(2))
    mask = na.Intervals(np.array(first, dtype), np.array(end, dtype))
    assert_equal(mask.dense(m, n), by_definition(m, n, lambda i, j: first[i] <= j < end[i]))


@given(LENGTHS, NUMBER, st.integers(0, 25), st.data())
def test_intervals_of_a_band(lengths, offset, left, data):
    """Intervals made of a banded mask's own rows are that mask."""
    m, n = lengths
    band = na.Window(left, data.draw(st.integers(0, 9)), offset) & na.Lengths(data.draw(st.integers(0, n)))
    visible = band.dense(m, n)
    some, last = visible.any(axis=1), n - visible[:, ::-1].argmax(axis=1) if n else np.zeros(m, int)
    mask = na.Intervals(visible.argmax(axis=1) if n else np.zeros(m, int), np.where(some, last, 0))
    assert_equal(mask.dense(m, n), visible)


def test_intervals_are_broadcast_as_in_numpy(rng):
    q, k, v = qkv(rng)
    first, end = rng.integers(0, N, (H, 1)), rng.integers(0, N, M)
    whole = na.Intervals(*(np.broadcast_to(x, (1, H, M)) for x in (first, end)))
    want = na.attention(q, k, v, mask=whole)
    assert_equal(na.attention(q, k, v, mask=na.Intervals(first, end)), want)
    want = na.attention(q, k, v, mask=na.Intervals([0] * M, end))
    assert_equal(na.attention(q, k, v, mask=na.Intervals([0], end)), want)


def test_intervals_of_any_strides(rng):
    """The axes in any order in memory."""
    q, k, v = qkv(rng)
    bounds = rng.integers(-9, N, (2, B, H, M))
    turned = na.Intervals(*map(np.asfortranarray, bounds))
    assert_equal(na.attention(q, k, v, mask=turned), na.attention(q, k, v, mask=na.Intervals(*bounds)))


FAULTS = {
    (
        "masks/test_segments.py::test_segments",
        "masks/test_segments.py::test_alignment_within_segments",
        "masks/test_segments.py::test_batch_axes",
        "masks/test_segments.py::test_cupys_offsets_out_of_range_are_clamped",
        "masks/test_segments.py::test_pack_and_unpack",
        "masks/test_calls.py::test_masks[-segments]",
        "test_prefix",
    ): {
        "np.maximum(rows.first + ": "np.maximum(",
        "offset = seqlen_k - i.size if self.offset": "offset = 0 if self.offset",
    },
}

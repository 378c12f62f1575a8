"""Causal, Window and Lengths, element by element, and numbers of any size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numbattn as na

from ..accuracy import assert_equal
from .examples import LENGTHS, NUMBER, WINDOWS, by_definition


@given(LENGTHS, st.none() | NUMBER)
def test_causal(lengths, offset):
    m, n = lengths
    own = n - m if offset is None else offset
    np.testing.assert_array_equal(na.Causal(offset).dense(m, n), by_definition(m, n, lambda i, j: j <= i + own))


@given(LENGTHS, WINDOWS, st.none() | NUMBER)
def test_window(lengths, ends, offset):
    (m, n), (left, right) = lengths, ends
    own = n - m if offset is None else offset

    def sees(i, j):
        return (left is None or j >= i + own - left) and (right is None or j <= i + own + right)

    np.testing.assert_array_equal(na.Window(left, right, offset).dense(m, n), by_definition(m, n, sees))


@given(LENGTHS, st.data())
def test_lengths(lengths, data):
    m, n = lengths
    keys, queries = data.draw(st.integers(0, n)), data.draw(st.integers(0, m))
    want = by_definition(m, n, lambda i, j: i < queries and j < keys)
    np.testing.assert_array_equal(na.Lengths(keys, queries).dense(m, n), want)
    np.testing.assert_array_equal(na.Lengths(keys=keys).dense(m, n), by_definition(m, n, lambda i, j: j < keys))


def test_lengths_out_of_range_are_clamped(xp):
    mask = na.Lengths(xp.asarray([-3, 4, 99]), xp.asarray([99, 2, -1]))
    assert_equal(mask.dense(5, 6), na.Lengths(np.array([0, 4, 6]), np.array([5, 2, 0])).dense(5, 6))


@pytest.mark.parametrize("far", [2**70, -(2**70), 2**63 - 1])
def test_far_numbers(far):
    assert na.Window(far, None).dense(3, 4).all() == na.Window(None, far).dense(3, 4).all() == (far > 0)
    assert na.Causal(np.array([np.clip(far, -(2**63), 2**63 - 1)])).dense(3, 4).all() == (far > 0)


FAR = np.array([-(2**63), -300, 3, 300, 2**63 - 1])


@pytest.mark.parametrize("mask", [
    na.Causal(FAR), na.Window(2**70, 2**70), na.Window(-(2**70), 2**70), na.Window(3, 1, offset=FAR),
    na.Lengths(FAR, FAR), na.Lengths(FAR[:, None]) & na.Causal(FAR),
], ids=repr)  # fmt: skip
def test_bands_end_with_the_matrix(mask):
    """Kernels add to these numbers in int32, and take them for lengths."""
    for number, (low, high) in zip(mask._band(7, 9), [(-7, 9), (-7, 9), (0, 7), (0, 9)]):
        assert np.min(number) >= low
        assert np.max(number) <= high


@pytest.mark.parametrize("make", [
    na.Causal, lambda offset: na.Window(None, 1, offset), lambda offset: na.Window(1, None, offset)
], ids=["causal", "right", "left"])  # fmt: skip
def test_far_beyond_the_matrix_is_beyond_the_matrix(make):
    """Sums of such numbers do not overflow."""
    np.testing.assert_array_equal(make(FAR).dense(7, 9), make(np.clip(FAR, -300, 300)).dense(7, 9))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint64])
def test_integer_dtypes(dtype):
    lengths = np.array([0, 100, 127], dtype)
    np.testing.assert_array_equal(na.Lengths(lengths).dense(1, 300).sum(axis=(-2, -1)), lengths)
    np.testing.assert_array_equal(na.Causal(lengths).dense(1, 300).sum(axis=(-2, -1)), lengths.astype(int) + 1)


def test_unsigned_numbers_do_not_wrap():
    most = np.array([2**64 - 1, 1], np.uint64)
    for mask in (na.Causal(most), na.Window(None, 0, most)):
        np.testing.assert_array_equal(mask.dense(1, 9).sum(axis=(-2, -1)), [9, 2])


FAULTS = {
    "shift - self.left": "shift + self.left",
    'Edge("hi", seqlen_k, -seqlen_q) if': 'Edge("hi", 0) if',
    "at, shift = (seqlen_k, -seqlen_q)": "at, shift = (seqlen_k, 0)",
    (
        "masks/test_segments.py::test_segments",
        "masks/test_segments.py::test_alignment_within_segments",
        "masks/test_segments.py::test_batch_axes",
        "masks/test_segments.py::test_cupys_offsets_out_of_range_are_clamped",
        "masks/test_segments.py::test_pack_and_unpack",
        "masks/test_calls.py::test_masks[-segments]",
    ): {
        "Interval(rows.own - left, rows.own + right + 1)": "Interval(rows.own - left, rows.own + right)",
        "Interval(rows.first, rows.own + 1)": "Interval(rows.first, rows.own)",
    },
    "masks/test_first.py": {
        "rows.first + for_queries(clip(self.n, 0, FAR))": "for_queries(clip(self.n, 0, FAR))",
        "    _is_aligned = _crops_by_sequence = _may_truncate = True": "    _crops_by_sequence = _may_truncate = True",
    },
    "distributed/test_over_keys.py::test_caches": {
        "First(crop.keys_before(self.n))": "First(self.n)",
    },
    "caches/test_kv_cache.py::test_weights": {
        "clip(keys, 0, seqlen_k) - counts": "seqlen_k - counts",
    },
    "test_errors.py": {
        "and self.left + self.right < 0": "and self.left + self.right < -1",
    },
}

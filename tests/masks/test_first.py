"""First, element by element, within segments, and in calls."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numbattn as na

from ..accuracy import assert_equal, check
from .calls import ONE_KEY, B, H, M, qkv
from .examples import LENGTHS, by_definition, in_segment, segments

COUNT = st.sampled_from([0, 1, 2, 5, 30, 2**40, 2**63 - 1])
STREAM = na.Causal() & (na.Window(3, 0) | na.First(2))


@given(LENGTHS, COUNT)
def test_first(lengths, count):
    m, n = lengths
    assert_equal(na.First(count).dense(m, n), by_definition(m, n, lambda i, j: j < count))


@given(segments(), COUNT, st.integers(0, 5), st.sampled_from([None, 1, 4]))
def test_of_each_segment(call, count, left, offset):
    """However it is joined: by `&`, as an interval with a gap, and drawn."""
    queries, keys, m, n = call

    def within(sees):
        """sees(distance to the query's own key, place in the segment, query, key)"""
        def visible(i, j):
            s = in_segment(queries, keys, i, j)
            return s is not None and sees(j - (i + keys[s + 1] - queries[s + 1]), j - keys[s], i, j)
        return by_definition(m, n, visible)

    packed, first = na.Segments(queries, keys), na.First(count)
    for mask, sees in (
        (first, lambda d, k, i, j: k < count),
        (first & na.Causal(), lambda d, k, i, j: k < count and d <= 0),
        (na.Window(left, 0) | first, lambda d, k, i, j: -left <= d <= 0 or k < count),
        (na.Causal(offset) & (first | na.Window(left, 0)),
         lambda d, k, i, j: (d <= 0 if offset is None else j <= i + offset) and (-left <= d <= 0 or k < count)),
        (na.Window(left, 0) | first | na.Intervals([1], [3]),
         lambda d, k, i, j: -left <= d <= 0 or k < count or 1 <= j < 3),
    ):  # fmt: skip
        assert_equal((packed & mask).dense(m, n), within(sees))
        assert_equal((mask & packed).dense(m, n), within(sees))


def test_numbers_of_their_own(rng):
    """By batch and by head, beyond the segments, too."""
    queries, count = np.sort(rng.integers(0, 21, (3, 1, 5))), rng.integers(0, 9, (3, 2))
    found = (na.Segments(queries) & na.First(count) & na.Causal()).dense(20, 20)
    for at in np.ndindex(3, 2):
        own = na.Segments(queries[at[0], 0]) & na.First(int(count[at])) & na.Causal()
        assert_equal(found[at], own.dense(20, 20))


def test_cupys_numbers_below_0_are_0(xp):
    first = na.First(xp.asarray([-3, 4, 2**40]))
    assert_equal(first.dense(5, 6), na.First(np.array([0, 4, 6])).dense(5, 6))
    packed = na.Segments([0, 2, 5], [1, 3, 6])
    assert_equal((packed & first).dense(5, 6), (packed & na.First(np.array([0, 4, 6]))).dense(5, 6))


@pytest.mark.parametrize("dropout", [None, na.Dropout(0.3, 5)], ids=["", "dropout"])
@pytest.mark.parametrize("offsets", [
    ([5, 5, 140, 141, 141, 148], [0, 17, 210, 211, 230, 260]), ([0, 1, 2, 3, M],), ([0, 0], [0, 0])
], ids=["unequal", "of one token", "none"])  # fmt: skip
def test_in_calls(rng, offsets, dropout):
    mask = na.Segments(*offsets) & na.First(rng.integers(0, 60, (B, H)))
    check(*qkv(rng, heads_k=2), rng, mask=mask, dropout=dropout, bits=ONE_KEY)


@pytest.mark.parametrize("m", [0, 1])
def test_few_queries(rng, m):
    q, k = rng.standard_normal((2, m, 8)), rng.standard_normal((2, 9, 8))
    for mask in (na.First(3), na.First(99), na.Segments([0, m], [0, 4]) & (na.Window(0, 0) | na.First(2))):
        o = na.attention(q, k, k, mask=mask)
        seen = mask.dense(m, 9).any(0) if m else slice(0)
        np.testing.assert_allclose(o, na.attention(q, k[:, seen], k[:, seen]), atol=1e-12)


def test_nobody_reads_behind_the_first_keys_alone(rng):
    """Which is an end of keys as Lengths are."""
    q, k, v = qkv(rng)
    k[..., 70:, :] = v[..., 70:, :] = np.nan
    assert_equal(na.attention(q, k, v, mask=na.First(70)), na.attention(q, k, v, mask=na.Lengths(keys=70)))


def test_a_sequence_sees_the_same_packed_padded_and_in_a_cache(rng):
    """The first keys of each sequence, of one shorter than that, too."""
    lengths = 20, 1, 7, 3
    alone = [rng.standard_normal((2, length, 8)) for length in lengths]
    wanted = [na.attention(x, x, x, mask=STREAM) for x in alone]
    packed, offsets = na.pack(alone)
    for got, want in zip(na.unpack(na.attention(packed, packed, packed, mask=na.Segments(offsets) & STREAM), offsets),
                         wanted, strict=True):  # fmt: skip
        np.testing.assert_allclose(got, want, atol=1e-12)
    cache = na.KVCache.zeros(4, 2, 20, 8, like=packed, page_size=4)
    cache.append(packed, packed, segments=offsets)
    o = na.attention(packed, cache, mask=na.Segments(offsets) & STREAM)
    padded = np.zeros((4, 2, 20, 8))
    for b, x in enumerate(alone):
        np.testing.assert_allclose(o[:, offsets[b] : offsets[b + 1]], wanted[b], atol=1e-12)
        padded[b, :, : lengths[b]] = x
    o = na.attention(padded, padded, padded, mask=STREAM & na.Lengths(keys=np.array(lengths)[:, None]))
    for b, length in enumerate(lengths):
        np.testing.assert_allclose(o[b, :, :length], wanted[b], atol=1e-12)


@pytest.mark.parametrize("keys", [4, np.array([4, 3])], ids=["int", "array"])
def test_lengths_where_first_was_meant_warn(keys):
    """In an `|` beside Segments; nowhere else."""
    q, segments = np.zeros((2, 9, 4)), na.Segments([0, 4, 9])
    window, lengths = na.Window(1, 0), na.Lengths(keys=keys)
    for mask in (window | lengths, na.Causal() & (window | na.Prefix(1) | lengths & na.Causal())):
        with pytest.warns(UserWarning, match=r"Lengths\(.*\) in an \| with Segments, .* First\(") as found:
            na.attention(q, q, q, mask=segments & mask)
        assert [warning.filename for warning in found] == [__file__]
    cache = na.KVCache.zeros(2, 2, 9, 4, like=q)
    cache.append(q, q, segments=[0, 4, 9])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        na.attention(q, q, q, mask=segments & lengths & (window | na.Lengths(queries=3)))
        na.attention(q, q, q, mask=window | lengths)
        na.attention(q, cache, mask=segments & (window | na.Lengths(keys=4)))

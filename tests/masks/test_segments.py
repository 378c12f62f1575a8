"""Segments: against their definition, and packed sequences against separate calls."""

import itertools
import warnings

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import numbattn as na

from ..accuracy import assert_equal, check, random
from .calls import ONE_KEY, sorted_integers
from .examples import NUMBER, WINDOWS, by_definition, in_segment, segments


@given(segments())
def test_segments(call):
    queries, keys, m, n = call
    want = by_definition(m, n, lambda i, j: in_segment(queries, keys, i, j) is not None)
    assert_equal(na.Segments(queries, keys).dense(m, n), want)
    want = by_definition(m, m, lambda i, j: in_segment(queries, queries, i, j) is not None)
    assert_equal(na.Segments(queries.tolist()).dense(m, m), want)


@given(segments(), WINDOWS, st.integers(0, 9))
def test_alignment_within_segments(call, ends, length):
    """The last query of a segment is aligned with its last key, and its prefix begins with it."""
    (queries, keys, m, n), (left, right) = call, ends

    def within(sees):
        """sees(distance to the query's own key, place in the segment)"""
        def visible(i, j):
            s = in_segment(queries, keys, i, j)
            return s is not None and sees(j - (i + keys[s + 1] - queries[s + 1]), j - keys[s])
        return by_definition(m, n, visible)

    segments = na.Segments(queries, keys)
    for mask, sees in (
        (na.Causal(), lambda d, j: d <= 0),
        (na.Window(left, right), lambda d, j: (left is None or d >= -left) and (right is None or d <= right)),
        (na.Causal() & na.Window(left, None), lambda d, j: d <= 0 and (left is None or d >= -left)),
    ):
        assert_equal((segments & mask).dense(m, n), within(sees))
        assert_equal((mask & segments).dense(m, n), within(sees))
    assert_equal((segments & na.Prefix(length)).dense(m, max(n, length))[:, :n],
                 within(lambda d, j: j < length or d <= 0))  # fmt: skip


@given(segments(), NUMBER)
def test_with_an_offset_packed_rows_and_columns_count(call, offset):
    queries, keys, m, n = call
    segments = na.Segments(queries, keys)
    for mask in (na.Causal(offset), na.Window(2, 3, offset), na.Prefix(2, offset), na.Lengths(n // 2, m // 2)):
        assert_equal((segments & mask).dense(m, n), segments.dense(m, n) & mask.dense(m, n))


@pytest.mark.parametrize(("queries", "keys"), [((), ()), ((1, 3), ()), ((2, 1), (1, 3)), ((0, 3), (0, 3))])
def test_batch_axes(rng, queries, keys):
    """Segments, lengths and offsets of their own for each matrix."""
    queries, keys = (np.sort(rng.integers(0, 21, (*lead, 5))) for lead in (queries, keys))
    lead = np.broadcast_shapes(queries.shape[:-1], keys.shape[:-1])
    lengths = rng.integers(0, 5, lead)
    mask = na.Segments(queries, keys) & na.Prefix(lengths) & na.Window(9, None)
    found = mask.dense(20, 20)
    queries, keys = (np.broadcast_to(x, (*lead, 5)) for x in (queries, keys))
    for at in np.ndindex(lead):
        own = na.Segments(queries[at], keys[at]) & na.Prefix(int(lengths[at])) & na.Window(9, None)
        assert_equal(found[at], own.dense(20, 20))


def test_cupys_offsets_out_of_range_are_clamped(xp):
    queries, keys = xp.asarray([-9, 2, 70]), xp.asarray([1, 3, 99])
    assert_equal(na.Segments(queries, keys).dense(5, 6), na.Segments([0, 2, 5], [1, 3, 6]).dense(5, 6))


def test_lists_and_ranges():
    want = na.Segments(np.array([0, 2, 4])).dense(5, 5)
    for offsets in [0, 2, 4], (0, 2, 4), range(0, 5, 2):
        assert_equal(na.Segments(offsets).dense(5, 5), want)
        assert_equal(na.Segments(offsets, range(0, 5, 2)).dense(5, 5), want)


def test_offsets_that_are_lengths_warn():
    """Where the call is; neither of tokens before the offsets alone, nor behind them alone."""
    q = np.zeros((2, 9, 4))
    calls = [lambda mask: na.attention(q, q, q, mask=mask), lambda mask: na.attention_vjp(q, q, q, mask=mask)]
    for call, lengths in itertools.product(calls, ([2, 3, 4], np.array([2, 2]), np.array([[1, 8], [4, 5]]))):
        with pytest.warns(UserWarning, match=r"lengths were given.*offsets are np.cumsum\(\[0, \*lengths\]\)") as found:
            call(na.Segments(lengths))
        assert [warning.filename for warning in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for offsets in ([0, 2, 4], [1, 9], [0], [9], [2, 8], np.array([[0, 3], [1, 8]])):
            na.attention(q, q, q, mask=na.Segments(offsets))


# ----------------------------------------------------------------------------------------------------------- packing
@pytest.mark.parametrize("lengths", [(3,), (0,), (3, 0, 5), (1, 1, 0, 7)])
@pytest.mark.parametrize("lead", [(), (2,), (0, 3)])
def test_pack_and_unpack(rng, xp, lead, lengths):
    arrays = [xp.asarray(random(rng, (*lead, length, 4), np.float32)) for length in lengths]
    packed, offsets = na.pack(arrays)
    assert packed.shape == (*lead, sum(lengths), 4)
    assert offsets.tolist() == [0, *itertools.accumulate(lengths)]
    for given_offsets in (offsets, offsets.tolist(), xp.asarray(offsets)):
        for x, y in zip(na.unpack(packed, given_offsets), arrays, strict=True):
            assert_equal(x, y)
    for x in na.unpack(packed, offsets):
        x[...] = 7
    assert (packed == 7).all()          # they are views


def test_lengths_given_to_unpack_warn():
    with pytest.warns(UserWarning, match="offsets: got offsets from 3 to 7 for 10 tokens: lengths were given"):
        na.unpack(np.zeros((1, 10, 1)), [3, 7])


# -------------------------------------------------------------------------------------------------- packed sequences
LENGTH = st.sampled_from([0, 0, 1, 1, 2, 17, 129])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.tuples(LENGTH, LENGTH), max_size=5), st.sampled_from([None, 0.3]), st.integers(0, 3))
def test_lengths(lengths, p, batch):
    """Segments without queries or keys, too, and broadcast batch axes."""
    rng = np.random.default_rng(0)
    queries, keys = (np.cumsum([0, *x]) for x in (zip(*lengths) if lengths else ((), ())))
    m, n = queries[-1] + 1, keys[-1] + 1
    q, k, v = (random(rng, (*lead, 4), np.float32) for lead in ((batch, 4, m), (1, 2, n), (2, n)))
    dropout = None if p is None else na.Dropout(p, 1)
    check(q, k, v, rng, mask=na.Segments(queries, keys), causal=True, dropout=dropout, bits=ONE_KEY)


DISTANCES = na.Alibi(np.float32(0.1)), na.RelativeBias(np.sin(np.arange(21, dtype=np.float32)))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=5), st.sampled_from([
    None, na.Causal(), na.Window(30, 5), na.Causal() & na.Window(150, None), na.Prefix(1), na.Prefix(0) & na.Causal(),
    na.Causal() & (na.Window(5, 0) | na.Window(None, -130)), na.Causal() & (na.Window(9, 0) | na.First(4)), na.First(3),
]), st.sampled_from([1, 2]), st.sampled_from([(), DISTANCES]))  # fmt: skip
@example([(17, 2), (200, 260), (0, 3), (1, 300), (129, 129)], na.Causal(), 1, ())
@example([(17, 2), (200, 260), (0, 3), (1, 300), (129, 129)], None, 2, DISTANCES)
def test_packed_is_separate(lengths, mask, heads_k, score):
    """Bit for bit: tiles are cut, and sums made in the order, as in a call on each sequence alone. What is learned of a
    score has the sum of the gradients."""
    if any(n == 0 for _, n in lengths):
        mask = None if isinstance(mask, na.Prefix) else mask    # a Prefix is no longer than the keys
    rng = np.random.default_rng(0)
    sequences = [[random(rng, (heads, length, 8), np.float32) for heads, length in
                  ((2, m), (heads_k, n), (heads_k, n), (2, m))] for m, n in lengths]  # fmt: skip
    (q, queries), (k, keys), (v, _), (do, _) = (na.pack(x) for x in zip(*sequences))
    segments = na.Segments(queries, keys)
    o, saved = na.attention_forward(q, k, v, mask=segments if mask is None else segments & mask, score=score)
    grads = na.attention_backward(do, saved)
    alone = [na.attention_forward(*x[:3], mask=mask, score=score) for x in sequences]
    wanted = [na.attention_backward(x[3], its) for x, (_, its) in zip(sequences, alone)]
    for x, y in zip(na.unpack(o, queries), alone, strict=True):
        assert_equal(x, y[0])
    for x, y in zip(na.unpack(saved.lse[..., None], queries), alone, strict=True):
        assert_equal(x[..., 0], y[1].lse)
    for packed, separate, its in zip(grads, zip(*wanted), (queries, keys, keys)):
        for x, y in zip(na.unpack(packed, its), separate, strict=True):
            assert_equal(x, y)
    for packed, *separate in zip(grads.score, *(its.score for its in wanted)):
        np.testing.assert_allclose(packed, sum(separate), rtol=1e-4, atol=1e-4 * max(1, abs(packed).max()))


def test_an_offset_counts_packed_rows_and_columns(rng):
    q, k, v = random(rng, (4, 9, 8), np.float32), *random(rng, (2, 2, 12, 8), np.float32)
    segments, table = na.Segments([0, 4, 9], [0, 3, 12]), random(rng, (4, 5), np.float32)
    check(q, k, v, rng, mask=segments, score=[na.RelativeBias(table, offset=1),
                                              na.Alibi(random(rng, 4, np.float32), offset=np.arange(4))])  # fmt: skip


def test_results_do_not_depend_on_the_number_of_threads(rng):
    """Where each head of a group has segments of its own, too."""
    q, k, v, do = (random(rng, (heads, 1100, 16), np.float32) for heads in (4, 2, 2, 4))
    bias, before = na.Bias(np.zeros((1100, 1100), np.float32)), numba.get_num_threads()
    for mask in (na.Segments([0, 100, 330, 1090]), na.Segments(sorted_integers(rng, 1100, 4, 5))):
        _, saved = na.attention_forward(q, k, v, mask=mask, causal=True, score=bias)
        many = na.attention_backward(do, saved)
        try:
            numba.set_num_threads(1)
            one = na.attention_backward(do, saved)
        finally:
            numba.set_num_threads(before)
        for x, y in zip((*one, *one.score), (*many, *many.score), strict=True):
            assert_equal(x, y)


BOUNDS = np.array([3, 70, 71, 71, 171, 350, 400])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
@pytest.mark.parametrize("mask", [
    None, na.Causal(), na.Window(60, 20), na.Prefix(30), na.Window(9, 0) | na.First(2)
], ids=repr)  # fmt: skip
def test_nan_stays_in_its_segment(rng, poison, where, mask):
    """And that of tokens in no segment there, too: in o, lse and all gradients."""
    heads = {"q": 4, "k": 2, "v": 2, "do": 4}
    arrays = {name: random(rng, (heads[name], 410, 8), np.float32) for name in heads}
    bias, segments = random(rng, (410, 410), np.float32), na.Segments(BOUNDS)
    options = {"mask": segments if mask is None else segments & mask, "score": na.Bias(bias),
               "dropout": na.Dropout(0.1, 1)}  # fmt: skip

    def results(do, **qkv):
        o, saved = na.attention_forward(**qkv, **options)
        grads = na.attention_backward(do, saved)
        return o, saved.lse[..., None], *grads, *grads.score

    wanted = results(**arrays)
    for first, end in ((0, 3), (71, 171), (400, 410)):
        x = arrays[where].copy()
        x[:, first:end] = poison
        others = np.r_[:first, end:410]
        for got, want in zip(results(**arrays | {where: x}), wanted):
            assert np.isfinite(want[..., others, :]).all() or want.shape[-1] == 1       # lse = -inf in no segment
            assert_equal(got[..., others, :], want[..., others, :])


FAULTS = {
    (
        "test_segments",
        "test_alignment_within_segments",
        "test_batch_axes",
        "test_cupys_offsets_out_of_range_are_clamped",
        "test_pack_and_unpack",
        "masks/test_calls.py::test_masks[-segments]",
    ): {
        "x.reshape(*lead, x.size)": "x",
        "above = i.size * row": "above = 0 * row",
        'side="right"': 'side="left"',
        "QuerySegments(first, end, i + end - ": "Rows(first, end, i + first - ",
        "packed[..., first:end, :]": "packed[..., first:end, :].copy()",
    },
    "scores/test_parts.py": {
        "0 if self.keys is None and seqlen_q == seqlen_k else None": "0",
    },
}

"""Segments, Prefix and Intervals: against their definitions, in calls, and packed sequences against separate calls."""

import itertools
import warnings

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn.problem import DTYPES

from .accuracy import assert_equal, check, random
from .test_masks import copied

# ------------------------------------------------------------------------------------------------------- definitions
LENGTHS = st.tuples(st.integers(0, 20), st.integers(0, 20))
NUMBER = st.integers(-25, 25)


def by_definition(m, n, sees):
    return np.array([[sees(i, j) for j in range(n)] for i in range(m)], bool).reshape(m, n)


@st.composite
def offsets(draw, count):
    """Of segments, with tokens before and beyond them: offsets and the number of tokens."""
    before, *lengths, beyond = draw(st.lists(st.integers(0, 6), min_size=count + 2, max_size=count + 2))
    found = np.cumsum([before, *lengths])
    return found, found[-1] + beyond


@st.composite
def segments(draw):
    """Offsets of queries and keys, and how many of these there are."""
    count = draw(st.integers(0, 4))
    (queries, m), (keys, n) = draw(offsets(count)), draw(offsets(count))
    return queries, keys, m, n


def in_segment(queries, keys, i, j):
    """The number of the segment in which both are, or None."""
    for s in range(len(queries) - 1):
        if queries[s] <= i < queries[s + 1] and keys[s] <= j < keys[s + 1]:
            return s
    return None


@given(segments())
def test_segments(call):
    queries, keys, m, n = call
    want = by_definition(m, n, lambda i, j: in_segment(queries, keys, i, j) is not None)
    assert_equal(na.Segments(queries, keys).dense(m, n), want)
    want = by_definition(m, m, lambda i, j: in_segment(queries, queries, i, j) is not None)
    assert_equal(na.Segments(queries.tolist()).dense(m, m), want)


@given(segments(), st.none() | NUMBER, st.none() | NUMBER, st.integers(0, 9))
def test_alignment_within_segments(call, left, right, length):
    """The last query of a segment is aligned with its last key, and its prefix begins with it."""
    queries, keys, m, n = call

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


FIRST, END = np.array([[0, 5, 2, 1, 9]]), np.array([[3, 6, 6, 1, 2], [1, 2, 3, 4, 5]])[:, None]
KINDS = [na.Segments([1, 2, 2, 5], [0, 2, 3, 5]), na.Segments([[[0, 4]], [[1, 5]]], [0, 6]), na.Prefix(2),
         na.Prefix(np.array([[1], [4]]), 0), na.Intervals(FIRST[None], END)]  # fmt: skip
OTHERS = [na.Causal(0), na.Window(3, 1, 1), na.Lengths(keys=np.array([[2], [3]])), na.Dense(np.eye(5, 6, dtype=bool)),
          na.Bits.pack(np.tri(5, 6, dtype=bool)[None, None]),
          na.BlockSparse(np.eye(3, dtype=bool)[None, None], (2, 2))]  # fmt: skip


@pytest.mark.parametrize("one", KINDS, ids=repr)
@pytest.mark.parametrize("other", [*OTHERS, KINDS[3], KINDS[4]], ids=repr)
def test_and(one, other):
    want = one.dense(5, 6) & other.dense(5, 6)
    assert_equal((one & other).dense(5, 6), want)
    assert_equal((other & one).dense(5, 6), want)


@pytest.mark.parametrize("mask", [*KINDS, KINDS[0] & na.Causal() & KINDS[3], KINDS[1] & na.Prefix(3)], ids=repr)
def test_like(xp, mask):
    copy = copied(mask, xp)
    assert all(isinstance(x, xp.ndarray) for x in copy._interval(xp.arange(5), 6))


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


def test_equality_and_repr():
    queries = np.array([0, 2])
    assert na.Segments(queries) == na.Segments(queries) != na.Segments(queries.copy())
    assert na.Prefix(3) == na.Prefix(3) != na.Prefix(4)
    assert repr(na.Segments(queries) & na.Prefix(3)) == "Segments(queries=<int64 array (2,)>) & Prefix(lengths=3)"
    assert repr(na.Prefix(3, 1)) == "Prefix(lengths=3, offset=1)"
    assert repr(KINDS[4]) == "Intervals(first=<int64 array (1, 1, 5)>, end=<int64 array (2, 1, 5)>)"


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


# ------------------------------------------------------------------------------------------------------------- calls
B, H, M, N = 2, 4, 150, 270  # several tiles each way, with tails


def sorted_integers(rng, largest, *shape):
    return np.sort(rng.integers(0, largest + 1, shape))


SEGMENTS = {
    "segments": lambda rng: na.Segments([5, 5, 140, 141, 141, 148], [0, 17, 210, 211, 230, 260]),
    "segments by batch": lambda rng: na.Segments(sorted_integers(rng, M, B, 1, 8), sorted_integers(rng, N, B, 1, 8)),
    "segments by head": lambda rng: na.Segments(sorted_integers(rng, M, 1, H, 8), sorted_integers(rng, N, B, H, 8)),
}
MASKS = SEGMENTS | {
    "prefix": lambda rng: na.Prefix(90),
    "prefix offsets": lambda rng: na.Prefix(rng.integers(0, N, (B, 1)), rng.integers(-M, N, (1, H))),
    "intervals": lambda rng: na.Intervals(rng.integers(-9, N, (B, H, M)), rng.integers(-9, N + 9, (1, H, M))),
    "monotone intervals": lambda rng: na.Intervals(*sorted_integers(rng, N, 2, 1, 1, M)),
}
OTHER_MASKS = {
    "causal": lambda rng: na.Causal(),
    "causal offset": lambda rng: na.Causal(100),
    "window": lambda rng: na.Window(40, 30),
    "lengths": lambda rng: na.Lengths(rng.integers(0, N + 1, (B, 1)), rng.integers(0, M + 1, (B, H))),
    "dense": lambda rng: na.Dense(rng.random((B, 1, M, N)) < 0.3),
    "bits": lambda rng: na.Bits.pack(rng.random((1, H, M, N)) < 0.5),
    "blocks": lambda rng: na.BlockSparse(rng.random((B, H, 3, 6)) < 0.4, block_size=(64, 48)),
}
def by_place(s, batch, head, i, j):
    return s * s / (1 + i + j)


SCORES = {  # whose arrays have the dtype of q: see cuda/test_scores.py
    "bias": lambda rng, dtype: na.Bias(random(rng, (M, N), dtype)),
    "biases": lambda rng, dtype: na.Bias(random(rng, (B, 1, M, N), dtype)),
    "curved": lambda rng, dtype: [na.Softcap(2.0), na.Bias(random(rng, (H, 1, N), dtype)), na.Score(by_place)],
    "sums": lambda rng, dtype: [na.Alibi(random(rng, H, dtype) / 50), na.RelativeBias(random(rng, (H, 41), dtype)),
                                na.Sink(random(rng, H, dtype))],
}  # fmt: skip
ONE_KEY = 16  # bits: where many queries see one key, whose dS is 0, delta = rowsum(dO * O) is that far from dP


def qkv(rng, dtype=np.float32, heads_k=H, d=24, e=24):
    return (random(rng, (B, H, M, d), dtype), random(rng, (B, heads_k, N, d), dtype),
            random(rng, (B, heads_k, N, e), dtype))  # fmt: skip


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dropout", [None, na.Dropout(0.5, seed=2**63, offset=9)], ids=["", "dropout"])
def test_masks(rng, kind, dropout):
    check(*qkv(rng), rng, mask=MASKS[kind](rng), dropout=dropout, bits=ONE_KEY)


UNIONS = {
    "stream": lambda rng: na.Causal() & (na.Window(9, 0) | na.Lengths(keys=4)),
    "by batch": lambda rng: na.Lengths(rng.integers(0, N, (B, 1)), rng.integers(0, M, (1, H))) | na.Window(9, None, 0),
    "segments": lambda rng: na.Segments([0, 30, M], [0, N - 110, N]) & (na.Window(5, 0) | na.Prefix(2)),
    "two gaps": lambda rng: (na.Window(9, 0) | na.Lengths(keys=4)) & (na.Window(60, 0) | na.Prefix(10, -100)),
    "intervals": lambda rng: na.Intervals(*rng.integers(-9, N, (2, B, H, M))) | na.Intervals([3], [7]) | na.Lengths(0),
    "dense": lambda rng: na.Causal() & (na.Window(9, 0) | (rng.random((H, 1, N)) < 0.1)),
}


@pytest.mark.parametrize("kind", UNIONS)
def test_unions(rng, kind):
    """Two intervals a query, the gaps between which take whole tiles, and what becomes Bits."""
    check(*qkv(rng, heads_k=2), rng, mask=UNIONS[kind](rng), bits=ONE_KEY)


def test_unions_of_both_kinds_within_segments(rng):
    """One that is drawn beside one that is two intervals."""
    unions = na.Window(9, 0) | na.Prefix(2), na.Window(5, 0) | na.Prefix(3) | na.Causal(-40)
    check(*qkv(rng), rng, mask=na.Segments([0, 30, M], [0, N - 110, N]) & unions[0] & unions[1], bits=ONE_KEY)


def test_unions_are_drawn_anew_by_each_call(rng):
    """Since arrays may be edited."""
    q, k, v = qkv(rng)
    visible = rng.random((M, N)) < 0.5
    mask = na.Lengths(keys=40) | visible
    before = na.attention(q, k, v, mask=mask)
    visible[...] = ~visible
    after = na.attention(q, k, v, mask=mask)
    assert (before != after).any()
    assert_equal(after, na.attention(q, k, v, mask=mask.dense(M, N)))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(rng, dtype):
    d, e = (4, 2) if dtype == np.float64 else (64, 40)  # float64 is checked in long doubles, which are slow
    for kind in ("segments by head", "intervals"):
        check(*qkv(rng, dtype, heads_k=2, d=d, e=e), rng, mask=MASKS[kind](rng), causal=True, bits=ONE_KEY)


PAIRS = [*itertools.product(MASKS, OTHER_MASKS), *itertools.product(SEGMENTS, set(MASKS) - set(SEGMENTS))]


@pytest.mark.parametrize(("one", "other"), sorted(PAIRS))
def test_pairs_of_masks(rng, one, other):
    check(*qkv(rng, heads_k=2), rng, mask=MASKS[one](rng) & OTHER_MASKS.get(other, MASKS.get(other))(rng), bits=ONE_KEY)


@pytest.mark.parametrize("kind", ["segments", "segments by head", "prefix", "intervals"])
@pytest.mark.parametrize("score", SCORES)
def test_scores(rng, kind, score):
    check(*qkv(rng, heads_k=2), rng, mask=MASKS[kind](rng), causal=True, score=SCORES[score](rng, np.float32),
          bits=ONE_KEY, dropout=na.Dropout(0.2, 3))  # fmt: skip


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


@pytest.mark.parametrize("shapes", [((2, 0, 8), (2, 7, 8)), ((2, 5, 8), (2, 0, 8)), ((0, 5, 8), (0, 7, 8))])
def test_empty_arrays(shapes):
    (_, m, _), (_, n, _) = shapes
    q, k = map(np.zeros, shapes)
    for mask in (na.Segments([0, 0], [0, 0]), na.Segments([0, m], [0, n]), na.Prefix(0),
                 na.Intervals(np.zeros((1, m), int), np.ones((1, m), int))):  # fmt: skip
        o, saved = na.attention_forward(q, k, k, mask=mask, causal=True, score=na.Bias(np.zeros((m, n))))
        assert (o == 0).all()
        for grad in na.attention_backward(o, saved):
            assert (grad == 0).all()


# -------------------------------------------------------------------------------------------------- packed sequences
DISTANCES = na.Alibi(np.float32(0.1)), na.RelativeBias(np.sin(np.arange(21, dtype=np.float32)))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=5), st.sampled_from([
    None, na.Causal(), na.Window(30, 5), na.Causal() & na.Window(150, None), na.Prefix(1), na.Prefix(0) & na.Causal(),
    na.Causal() & (na.Window(5, 0) | na.Window(None, -130)),
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
    for segments in (na.Segments([0, 100, 330, 1090]), na.Segments(sorted_integers(rng, 1100, 4, 5))):
        _, saved = na.attention_forward(q, k, v, mask=segments, causal=True, score=bias)
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
    None, na.Causal(), na.Window(60, 20), na.Prefix(30), na.Window(9, 0) | na.Prefix(2)
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

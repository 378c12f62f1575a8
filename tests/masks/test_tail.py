"""Tail, element by element, beside other masks, and in calls."""


import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numbattn as na
from numbattn.masks import All, Cached

from ..accuracy import assert_equal, check
from .calls import ONE_KEY, B, H, M, N, qkv
from .examples import LENGTHS, by_definition, copied


def by_rule(visible, m, n):
    return by_definition(m, n, lambda i, j: j < n - m or visible[i, j - (n - m)])


@given(LENGTHS, st.sampled_from([np.asarray, na.Dense, na.Bits.pack]), st.integers(0, 99))
def test_tail(lengths, make, seed):
    m, n = lengths
    visible = np.random.default_rng(seed).random((m, m)) < 0.5
    assert_equal(na.Tail(make(visible)).dense(m, n), by_rule(visible, m, n))


@pytest.mark.parametrize("m", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 65, 200])
def test_words_that_begin_and_end_anywhere(rng, m, n):
    visible = rng.random((m, m)) < 0.5
    assert_equal(na.Tail(visible).dense(m, n), by_rule(visible, m, n))


def test_batch_axes(rng):
    visible = rng.random((2, 1, 5, 5)) < 0.5
    want = np.concatenate([np.ones((2, 1, 5, 7), bool), visible], axis=-1)
    for mask in visible, na.Dense(visible), na.Bits.pack(visible):
        assert_equal(na.Tail(mask).dense(5, 12), want)


@given(st.lists(st.integers(0, 90), min_size=1, max_size=4), st.integers(0, 40), st.integers(0, 99))
def test_the_last_keys_of_each_sequence(lengths, m, seed):
    visible = np.random.default_rng(seed).random((m, m)) < 0.5
    found = All((Cached(np.array(lengths)[:, None]), na.Tail(visible))).dense(m, 90)
    for shown, n in zip(found, lengths):
        assert_equal(shown[0, :, :n], by_rule(visible, m, n))
        assert not shown[..., n:].any()


def test_words_and_booleans_that_change_are_seen(rng):
    visible = rng.random((5, 5)) < 0.5
    mask = na.Tail(visible)
    before = mask.dense(5, 9)
    visible[...] = ~visible
    assert_equal(mask.dense(5, 9)[:, 4:], ~before[:, 4:])


def test_arrays_of_cupy(rng, xp):
    copied(na.Tail(rng.random((1, 1, 5, 5)) < 0.5), xp)


def test_equal_by_what_is_inside(rng):
    bits = na.Bits.tree([-1, 0])
    assert na.Tail(bits) == na.Tail(bits)
    assert na.Tail(bits) != na.Tail(na.Bits.tree([-1, 0]))
    assert repr(na.Tail(bits)) == "Tail(mask=Bits(words=<uint32 array (2, 1)>), positions=<int32 array (2,)>)"


TAILS = {
    "booleans": lambda rng: na.Tail(rng.random((M, M)) < 0.5),
    "bits by batch": lambda rng: na.Tail(na.Bits.pack(rng.random((B, 1, M, M)) < 0.5)),
    "and": lambda rng: na.Tail(rng.random((H, M, M)) < 0.5) & na.Window(200, 0) & na.Lengths(keys=N - 3),
    "or": lambda rng: na.Causal() & (na.Tail(rng.random((1, 1, M, M)) < 0.5) | na.Window(9, 0)),
}


@pytest.mark.parametrize("kind", TAILS)
def test_in_calls(rng, kind):
    check(*qkv(rng, heads_k=2), rng, mask=TAILS[kind](rng), bits=ONE_KEY)


@pytest.mark.parametrize("ends", [na.Lengths(keys=4), na.First(4)], ids=repr)
def test_where_keys_end_before_the_tail_it_is_drawn(ends):
    """Kernels take the last keys for those before the end."""
    tail = na.Tail(na.Bits.tree([-1, 0, 0]))
    assert (tail & na.Causal())._kinds == (na.Tail, na.Causal)
    assert (tail & ends)._kinds == (na.Bits, type(ends))


def test_a_tree_behind_a_prompt(rng):
    """As one mask, and as a call for each path."""
    q, k, v = (rng.standard_normal((4, n, 16)) for n in (4, 50, 50))
    o = na.attention(q, k, v, mask=na.Tail(na.Bits.tree([-1, 0, 0, 2])))
    for path in [0], [0, 1], [0, 2, 3]:
        rows = [*range(46), *(46 + node for node in path)]
        alone = na.attention(q[:, path[-1:]], k[:, rows], v[:, rows])
        np.testing.assert_allclose(o[:, path[-1:]], alone, atol=1e-12)


ERRORS = [
    (lambda: na.Tail(na.Causal()), TypeError, r"Tail mask: got Causal\(\), expected Bits, Dense or a"),
    (lambda: na.Tail(np.ones((2, 2))), TypeError, "Tail mask: got numpy.ndarray of float64, expected a numbattn mask"),
    (lambda: na.Tail(None), TypeError, "Tail mask: got None, expected Bits, Dense"),
    (lambda: call(na.Tail(np.ones((3, 3), bool))), ValueError,
     r"mask: got booleans of the shape \(3, 3\), which do not broadcast to \(2, 4, 4\)"),
    (lambda: call(na.Tail(na.Bits.pack(np.ones((3, 4), bool)))), ValueError, "mask: got Bits words of the shape"),
    (lambda: call(na.Tail(na.Bits(np.ones((4, 2), np.uint32)))), ValueError,
     "mask: Bits words: got 2 words a row, expected 1, for 4 keys"),
]  # fmt: skip


def call(mask):
    return na.attention(*np.zeros((1, 2, 4, 8)), *np.zeros((2, 2, 6, 8)), mask=mask)


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_errors(number):
    make, error, words = ERRORS[number]
    with pytest.raises(error, match=words):
        make()


FAULTS = {
    "(seqlen_q + WORD - 1) // WORD": "seqlen_q // WORD",
    "like=array) - first % WORD": "like=array)",
    " | (key < 0)": "",
    "np.where(word < 0": "np.where(word <= 0",
    "frame._own_key(seqlen_q, seqlen_k) if isinstance(frame, Cached) else": "",
    "self._inner._held(seqlen_q, seqlen_q)": "self._inner._held(seqlen_q, seqlen_k)",
    "distributed/test_over_keys.py::test_caches": {
        "crop.seqlen_k - crop.seqlen_q - crop.first_key": "crop.seqlen_k - crop.seqlen_q",
    },
}

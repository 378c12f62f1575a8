"""Masks of intervals in calls, against the reference."""

import itertools

import numpy as np
import pytest

import numbattn as na
from numbattn.call.problem import DTYPES

from ..accuracy import assert_equal, check
from .calls import MASKS, ONE_KEY, OTHER_MASKS, SCORES, SEGMENTS, UNIONS, M, N, qkv


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dropout", [None, na.Dropout(0.5, seed=2**63, offset=9)], ids=["", "dropout"])
def test_masks(rng, kind, dropout):
    check(*qkv(rng), rng, mask=MASKS[kind](rng), dropout=dropout, bits=ONE_KEY)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(rng, dtype):
    d, e = (4, 2) if dtype == np.float64 else (64, 40)  # float64 is checked in long doubles, which are slow
    for kind in ("segments by head", "intervals"):
        check(*qkv(rng, dtype, heads_k=2, d=d, e=e), rng, mask=MASKS[kind](rng), causal=True, bits=ONE_KEY)


PAIRS = [*itertools.product(MASKS, OTHER_MASKS), *itertools.product(SEGMENTS, set(MASKS) - set(SEGMENTS))]


@pytest.mark.parametrize(("one", "other"), sorted(PAIRS))
def test_pairs_of_masks(rng, one, other):
    check(*qkv(rng, heads_k=2), rng, mask=MASKS[one](rng) & OTHER_MASKS.get(other, MASKS.get(other))(rng), bits=ONE_KEY)


@pytest.mark.parametrize("kind", [
    "segments", "intervals", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("segments by head", "prefix")),
])  # fmt: skip
@pytest.mark.parametrize("score", SCORES)
def test_scores(rng, kind, score):
    check(*qkv(rng, heads_k=2), rng, mask=MASKS[kind](rng), causal=True, score=SCORES[score](rng, np.float32),
          bits=ONE_KEY, dropout=na.Dropout(0.2, 3))  # fmt: skip


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

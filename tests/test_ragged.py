"""Packed queries beside a cache."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
from tests.tools.device import BY_UNIT, on
from tests.tools.launch import world_of

KINDS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"mask": na.Window(3, 1)},
    "prefix": {"mask": na.Prefix(2)},
    "stream": {"mask": na.Causal() & (na.Window(1, 0) | na.First(2))},
    "alibi": {"causal": True, "score": na.Alibi(np.linspace(0.1, 0.4, 4))},
    "relative": {"score": na.RelativeBias(np.linspace(-1, 1, 36).reshape(4, 9))},
    "sink and softcap": {"causal": True, "score": [na.Softcap(2.0), na.Sink(np.linspace(-1, 1, 4))]},
}


def filled(rng, lengths, **options):
    q = np.zeros(0, options.pop("like", np.float64))
    cache = na.KVCache.zeros(len(lengths), 2, max([*lengths, 2]), 16, like=q, **options)
    new = rng.standard_normal((2, 2, sum(lengths), 16)).astype(q.dtype)
    cache.append(*new, segments=np.cumsum([0, *lengths]))
    return cache


def check(rng, counts, lengths, kind, before=0, behind=0, out=True, **options):
    """As each sequence alone; tokens before and behind the segments see nothing."""
    cache = filled(rng, lengths, **options)
    offsets = np.cumsum([before, *counts])
    q = rng.standard_normal((4, offsets[-1] + behind, 16)).astype(options.get("like", np.float64))
    how = dict(KINDS[kind])
    mask = how.pop("mask", na.Lengths()) & na.Segments(offsets)
    o, saved = na.attention_forward(q, cache, mask=mask, **how)
    if out:
        np.testing.assert_array_equal(o, na.attention(q, cache, mask=mask, out=np.empty_like(o), **how))
    want, want_lse = np.zeros((4, q.shape[1], 16)), np.full(q.shape[:2], -np.inf)
    for b, (first, end) in enumerate(pairwise(offsets)):
        if not lengths[b]:
            continue
        k, v = (x[b : b + 1, :, : lengths[b]] for x in cache._dense())
        one, lse = na.attention_forward(q[None, :, first:end].astype(float), k, v, **KINDS[kind])
        want[:, first:end], want_lse[:, first:end] = one[0], lse.lse[0]
    return o, saved.lse, want, want_lse


@pytest.mark.parametrize("kind", ["full", "prefix", "stream", "alibi"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), sizes=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 2, 3, 9])), max_size=4))
def test_as_each_sequence_alone(kind, seed, sizes):
    counts, lengths = zip(*sizes) if sizes else ((), ())
    o, lse, want, want_lse = check(np.random.default_rng(seed), counts, lengths, kind, before=seed % 2, behind=seed % 3)
    np.testing.assert_allclose(o, want, atol=1e-12)
    np.testing.assert_allclose(lse, want_lse, atol=1e-12)


@pytest.mark.parametrize(("unit", "kind"), [
    ("CUDA cores", "causal"), ("tensor cores", "stream"), ("warpgroups", "prefix"), ("warpgroups", "relative"),
    *(pytest.param(*which, marks=pytest.mark.slow) for which in (
        ("tensor cores", "sink and softcap"), ("warpgroups", "alibi"),
    )),
])  # fmt: skip
def test_on_devices(rng, unit, kind):
    with world_of("simulated"), on(BY_UNIT[unit]):
        o, lse, want, want_lse = check(
            rng, (3, 0, 1), (3, 7, 20), kind, page_size=4, like=np.float32, out=kind in ("causal", "stream", "prefix")
        )
    np.testing.assert_allclose(o, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_trees(rng):
    """Each of its own size, beside one token."""
    trees = [[-1, 0, 0, 1], [-1], [-1, 0, 1, 1, 0]]
    lengths, offsets = (9, 4, 40), np.cumsum([0, *map(len, trees)])
    cache = filled(rng, lengths)
    q = rng.standard_normal((4, offsets[-1], 16))
    bits = [na.Bits.tree(tree) for tree in trees]
    words = np.concatenate([x.words for x in bits])
    o = na.attention(q, cache, mask=na.Segments(offsets, max_queries=6) & na.Tail(na.Bits(words)))
    for b, (first, end) in enumerate(pairwise(offsets)):
        k, v = (x[b, :, : lengths[b]] for x in cache._dense())
        np.testing.assert_allclose(o[:, first:end], na.attention(q[:, first:end], k, v, mask=na.Tail(bits[b])))


def test_queries_beyond_the_most_see_nothing(rng):
    cache, q = filled(rng, (5, 6)), rng.standard_normal((4, 7, 16))
    o = na.attention(q, cache, mask=na.Segments([0, 4, 7], max_queries=2))
    assert o[:, [0, 1, 4, 5]].all()
    assert not o[:, [2, 3, 6]].any()


@pytest.mark.parametrize(("q", "mask", "error"), [
    ((2, 4, 3, 16), na.Segments([0, 1, 2]), "q: got the shape"),
    ((4, 3, 16), na.Segments([0, 1, 2, 3]), "expected Segments of 3 offsets"),
    ((4, 3, 16), na.Segments([0, 1, 2], [0, 1, 2]), "expected Segments of 3 offsets"),
    ((4, 3, 16), na.Segments([0, 1, 9]), "mask: Segments queries"),
    ((4, 3, 16), na.Segments([0, 1, 3]) & na.Dense(np.ones((3, 6), bool)), "but for Tail"),
    ((4, 3, 16), na.Segments([0, 1, 3]) & na.Tail(np.ones((2, 2), bool)), r"expected Tail\(Bits"),
])  # fmt: skip
def test_errors(rng, q, mask, error):
    with pytest.raises(ValueError, match=error):
        na.attention(np.zeros(q), filled(rng, (5, 6)), mask=mask)


def test_out_of_another_shape(rng):
    q, cache = np.zeros((4, 3, 16)), filled(rng, (5, 6))
    with pytest.raises(ValueError, match="out: got float64 of the shape"):
        na.attention(q, cache, mask=na.Segments([0, 1, 3]), out=np.empty((4, 2, 16)))

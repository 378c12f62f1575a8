"""Packed queries beside a cache."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn.base import faults
from numbattn.base.backends import BACKENDS
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
    ("CUDA cores", "causal"), ("tensor cores", "stream"), ("warpgroups", "relative"),
    *(pytest.param(*which, marks=pytest.mark.slow) for which in (
        ("warpgroups", "prefix"), ("tensor cores", "sink and softcap"), ("warpgroups", "alibi"),
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
    forest = np.concatenate([np.where(np.array(tree) < 0, -1, np.add(tree, n)) for tree, n in zip(trees, offsets)])
    tree = na.Tail(na.Bits.tree(forest)) & na.Window(1, 0)              # of all tokens, with their depths
    o = na.attention(q, cache, mask=na.Segments(offsets) & tree)
    for b, (first, end) in enumerate(pairwise(offsets)):
        k, v = (x[b, :, : lengths[b]] for x in cache._dense())
        mask = na.Tail(bits[b]) & na.Window(1, 0)
        np.testing.assert_allclose(o[:, first:end], na.attention(q[:, first:end], k, v, mask=mask))


def test_what_is_saved_has_the_shapes_of_the_call(rng):
    o, saved = na.attention_forward(np.zeros((4, 7, 16)), filled(rng, (5, 6)), mask=na.Segments([0, 4, 7]))
    assert (saved.o.shape, saved.lse.shape) == ((4, 7, 16), (4, 7))
    assert saved.o is o
    assert repr(saved).startswith("<Saved: q (4, 7, 16), k (2, 2, 6, 16), v (2, 2, 6, 16)")


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


@pytest.mark.parametrize("function", [na.attention, na.attention_forward])
@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda out, **_: out[:, :2], ValueError, r"out: got the shape \(4, 2, 16\), expected \(4, 3, 16\)"),
    (lambda out, **_: out.astype(np.float32), TypeError, "out: got float32, expected float64, the dtype of q"),
    (lambda out, **_: out.tolist(), TypeError, "out: got list, expected a numpy.ndarray"),
    (lambda out, **_: np.broadcast_to(out[:1], out.shape), ValueError, "out: got a read-only array"),
    (lambda out, **_: np.lib.stride_tricks.as_strided(out, strides=(0, 0, 8)), ValueError, "out: .* share memory"),
    (lambda q, **_: q, ValueError, "out: overlaps q"),
    (lambda cache, **_: cache.k.reshape(-1)[-192:].reshape(4, 3, 16), ValueError, "out: overlaps KVCache k"),
    (lambda cache, **_: cache.v.reshape(-1)[:192].reshape(4, 3, 16), ValueError, "out: overlaps KVCache v"),
    (lambda out, lengths, **_: lengths, ValueError, "out: overlaps KVCache lengths"),
    (lambda out, offsets, **_: offsets, ValueError, "out: overlaps Segments queries"),
    (lambda out, alibi, **_: alibi, ValueError, "out: overlaps Alibi slopes"),
])  # fmt: skip
def test_out_is_checked_before_anything_runs(rng, monkeypatch, function, make, error, words):
    held = {name: np.zeros((4, 3, 16)) for name in ("q", "out", "lengths", "offsets", "alibi")}
    lengths, offsets, slopes = (held[name].reshape(-1).view(kind)[:size] for name, kind, size in (
        ("lengths", np.int32, 2), ("offsets", np.int64, 3), ("alibi", np.float64, 4),
    ))  # fmt: skip
    lengths[:], offsets[:] = (5, 6), (0, 1, 3)
    cache = na.KVCache(*rng.standard_normal((2, 2, 2, 6, 16)), lengths)
    monkeypatch.setitem(BACKENDS, "numpy", None)
    with pytest.raises(error, match=words):
        function(
            held["q"], cache, mask=na.Segments(offsets), score=na.Alibi(slopes), out=make(cache=cache, **held)
        )


def test_where_arrays_lie_is_checked_before_anything_runs(rng, monkeypatch):
    seen = []
    monkeypatch.setattr(na.KVCache, "_is_numpy", False)
    monkeypatch.setitem(BACKENDS, "cupy", SimpleNamespace(check_device=seen.extend))
    monkeypatch.setitem(BACKENDS, "numpy", None)
    cache, q = na.KVCache(*rng.standard_normal((2, 2, 2, 6, 16)), np.ones(2, np.int32)), np.zeros((4, 3, 16))
    with pytest.raises(faults.Fault, match="NoneType"):
        na.attention(q, cache, mask=na.Segments([0, 1, 3]), out=np.empty_like(q))
    of_cache = [f"KVCache {name}" for name in ("k", "v", "lengths")]
    assert seen == ["q", *of_cache, "out", *of_cache]


def test_weights(rng):
    """Those of each sequence; of tokens in none, 0."""
    lengths, offsets = (5, 0, 9), [1, 3, 4, 8]
    cache, q = filled(rng, lengths), rng.standard_normal((4, 9, 16))
    P = na.attention_weights(q, cache, causal=True, mask=na.Segments(offsets), score=na.Alibi(np.ones(4)))
    want = np.zeros((4, 9, 9))
    for b, (first, end) in enumerate(pairwise(offsets)):
        k = cache.k[b, :, : lengths[b]]
        want[:, first:end, : lengths[b]] = na.attention_weights(
            q[:, first:end], k, causal=True, score=na.Alibi(np.ones(4))
        )
    np.testing.assert_allclose(P, want, atol=1e-12)


FAULTS = {
    "test_trees": {"first[:, None] + np.arange(most": "0 * first[:, None] + np.arange(most"},
    ("test_as_each_sequence_alone[full]", "test_weights"): {
        "np.where(inside, x[self.sequence, :, self.row].swapaxes(0, 1), out)":
            "x[self.sequence, :, self.row].swapaxes(0, 1)",
    },
}

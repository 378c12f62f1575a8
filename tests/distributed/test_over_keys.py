"""Keys that stay where they are give what they give in one cache, or in one array."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn import distributed as nad

from .test_ring import MASKS, SCORES, Strict, Watched

BESIDE_CACHES = {  # of rng, seqlen_q
    "none": lambda rng, m: None,
    "causal": lambda rng, m: na.Causal(),
    "offset": lambda rng, m: na.Causal(rng.integers(0, 60, (2, 1))),
    "window": lambda rng, m: na.Window(20, 1),
    "lengths": lambda rng, m: na.Lengths(keys=rng.integers(0, 9, (2, 1)), queries=rng.integers(0, m + 1, (2, 4))),
    "first": lambda rng, m: na.First(rng.integers(0, 60, (2, 1))),
    "stream": lambda rng, m: na.Causal() & (na.Window(9, 0) | na.First(30)),
    "prefix": lambda rng, m: na.Prefix(3),
    "union": lambda rng, m: na.Causal() & (na.Window(9, 0) | na.Prefix(4)),
    "tail": lambda rng, m: na.Tail(rng.random((m, m)) < 0.5),
    "tails": lambda rng, m: na.Tail(na.Bits.pack(rng.random((2, 1, m, m)) < 0.5)) & na.Window(40, None),
}
COUNT_KEYS = {
    "none": [],
    "alibi": [na.Alibi(np.arange(4) / 8), na.Softcap(3.0), na.Sink(np.arange(4.0))],
    "relative": [na.RelativeBias(np.sin(np.arange(41.0)), offset=np.array([[3], [40]])), na.Sink(0.5)],
}


def caches_of(rng, ranks, heads, dim, page_size=None, dtype=np.float64):
    """Of each rank, and one of all tokens."""
    lengths = rng.integers(0, 40, (ranks, 2)) * (rng.random((ranks, 2)) < 0.8)
    lengths[-1] += 5
    k, v = rng.standard_normal((2, 2, heads, lengths.sum(axis=0).max(), dim)).astype(dtype)
    ends = lengths.cumsum(axis=0)
    caches = []
    for own, end in [*zip(lengths, ends), (ends[-1], ends[-1])]:
        cache = na.KVCache.zeros(2, heads, 8 * (1 + own.max() // 8), dim, like=k, page_size=page_size)
        offsets = np.append(0, own.cumsum())
        tokens = [np.concatenate([x[b, :, end[b] - own[b] : end[b]] for b in range(2)], axis=1) for x in (k, v)]
        cache.append(*tokens, segments=offsets)
        caches.append(cache)
    return caches[:-1], caches[-1]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 5), st.integers(1, 9), st.sampled_from(list(BESIDE_CACHES)), st.sampled_from(list(COUNT_KEYS)),
    st.sampled_from([None, 8]), st.integers(0, 99),
)  # fmt: skip
def test_caches(ranks, m, mask, score, page_size, seed):
    rng = np.random.default_rng(seed)
    caches, whole = caches_of(rng, ranks, 2, 8, page_size)
    options = {"mask": BESIDE_CACHES[mask](rng, m), "score": COUNT_KEYS[score], "scale": 0.4}
    q = rng.standard_normal((2, 4, m, 8))
    found = nad.attention_over_keys(Strict(ranks), [q] * ranks, caches, **options)
    for o in found:
        assert o.tobytes() == found[0].tobytes()
    np.testing.assert_allclose(found[0], na.attention(q, whole, **options), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 9), st.sampled_from([0, 1, 31, 100, 200]), st.integers(1, 5), st.sampled_from(list(MASKS)),
    st.sampled_from(list(SCORES)), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_arrays(m, n, ranks, mask, score, zigzag, seed):
    """With all masks and scores."""
    rng = np.random.default_rng(seed)
    n = m if score == "alibi" and "documents" in mask else n
    q, k, v = (rng.standard_normal((2, heads, size, 8)) for heads, size in ((2, m), (1, n), (1, n)))
    options = {"mask": MASKS[mask](rng, m, n), "score": SCORES[score](rng, m, n), "scale": 0.4}
    ring = Strict(ranks, "zigzag" if zigzag else "contiguous")
    found = nad.attention_over_keys(ring, [q] * ranks, ring.split(k), ring.split(v), **options)
    for o in found:
        np.testing.assert_allclose(o, na.attention(q, k, v, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_rounded_once(rng, dtype):
    caches, whole = caches_of(rng, 5, 2, 16, dtype=dtype)
    q = rng.standard_normal((2, 2, 3, 16)).astype(dtype)
    o = nad.attention_over_keys(nad.Simulated(5), [q] * 5, caches, causal=True)[0]
    exact = na.attention_weights(q.astype(np.float64), *[na.KVCache(*(x.astype(np.float64) for x in (whole.k, whole.v)),
                                                                  whole.lengths)], causal=True)  # fmt: skip
    exact = exact @ whole.v.astype(np.float64)
    assert o.dtype == dtype
    rounding = abs(exact.astype(dtype).astype(np.float64) - exact).mean()
    assert abs(o.astype(np.float64) - exact).mean() <= 1.3 * rounding


def test_lengths_travel_where_they_matter(rng):
    ring, (caches, _) = Watched(2), caches_of(rng, 2, 2, 8)
    q, results = rng.standard_normal((2, 2, 1, 8)), 2 * 2 * (8 + 1) * 8
    for options, nbytes in (({}, 0), ({"score": [na.Sink(1.0), na.Softcap(3.0)]}, 0), ({"causal": True}, 2 * 4)):
        nad.attention_over_keys(ring, [q, q], caches, **options)
        assert ring.sent == [results + nbytes] * 2


@pytest.mark.parametrize(("options", "message"), [
    ({"mask": np.ones((1, 90), bool)}, "mask: got Dense.* of several ranks, expected masks such as Causal"),
    ({"mask": na.Segments([0, 1])}, "mask: got Segments.* with KVCaches of several ranks"),
    ({"mask": na.Lengths(1) & na.Intervals([0], [9])}, "mask: got Intervals.* with KVCaches of several ranks"),
    ({"score": na.Bias(np.ones(90))}, "score: got Bias.* of several ranks, expected Alibi, RelativeBias, S"),
    ({"score": na.Score(lambda s, b, h, i, j: s - j)}, "score: got Score.* with KVCaches of several ranks"),
    ({"mask": na.Causal(np.zeros(3, int))}, r"mask: Causal offset: got the shape \(3,\)"),
    ({"mask": na.Lengths(np.zeros((3, 1), int))}, r"mask: Lengths keys: got the shape \(3, 1\), expected \(2 or 1, 2"),
    ({"mask": na.Tail(np.ones((2, 2), bool))}, r"mask: got booleans of the shape \(2, 2\), which do not broadcast"),
    ({"score": na.Alibi(1.0, offset=np.zeros((3, 1), int))}, r"score: Alibi offset: got the shape \(3, 1\)"),
    ({"score": na.Sink(np.ones(3))}, r"score: Sink logits: got the shape \(3,\)"),
])  # fmt: skip
def test_what_caches_refuse(rng, options, message):
    caches, _ = caches_of(rng, 2, 2, 8)
    with pytest.raises(ValueError, match=message):
        nad.attention_over_keys(nad.Simulated(2), [np.zeros((2, 2, 1, 8))] * 2, caches, **options)


def test_errors(rng):
    caches, _ = caches_of(rng, 2, 2, 8)
    ring, q = nad.Simulated(2), np.zeros((2, 2, 1, 8))
    with pytest.raises(ValueError, match="seqlen_q: got 1 on rank 0, 2 on rank 1, expected the same on all ranks"):
        nad.attention_over_keys(ring, [q, np.zeros((2, 2, 2, 8))], caches)
    with pytest.raises(ValueError, match="k and v: got a KVCache on rank 0, arrays on rank 1, expected the same"):
        nad.attention_over_keys(ring, [q, q], [caches[0], q], [None, q])
    with pytest.raises(ValueError, match="k and v: got 9 of 18 tokens on rank 0, expected 18: what `split` gives it"):
        nad.attention_over_keys(ring, [q, q], *[[np.zeros((2, 2, 9, 8))] * 2] * 2)
    with pytest.raises(ValueError, match="mask: Lengths keys: got 65, allowed 0 to 64"):
        nad.attention_over_keys(ring, [q, q], *[ring.split(np.zeros((2, 2, 64, 8)))] * 2, mask=na.Lengths(65))


FAULTS = {
    "mask._leaves or any(": "any(",
    "if not part._crops_by_sequence": "if False",
    "counts[: place.rank], counts": "counts[: place.rank + 1], counts",
    "lengths is not None:": "False:",
    "share.check()": "pass",
    "mask=mask, scale=inputs.scale, score=parts, wide=True": "mask=mask, scale=inputs.scale, score=parts",
    "parts = inputs.q, steps_of(score)": "parts = inputs.q, list(score)",
    "whole.add_sink(sink_of(score))": "pass",
    "check_mask(leaf._fit(shape), shape, problem.xp)": "pass",
    '"seqlen_q": problem.seqlen_q,': "",
    "distributed/test_devices.py": {
        "    mask, score = yield from near_by(mask, score)": "    pass",
    },
}

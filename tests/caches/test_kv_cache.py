"""Caches: what is appended, kept and dropped, and attention over it, sequence by sequence."""

import copy
import itertools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn import reference
from numbattn.base.backends import BACKENDS
from numbattn.cpu import decode, launch
from tests.accuracy import assert_equal, to_numpy

FLOAT8 = ml_dtypes.float8_e4m3fn
WILD = 2147480000, -1, -(2**31)
B, HEADS, HEADS_K, D, E = 5, 4, 2, 20, 12
LONG = 2 * decode.CHUNK + decode.TILE_N + 37


def tokens(rng, *lead, count, dtype=np.float32, d=D, e=E):
    return [rng.standard_normal((*lead, count, size)).astype(dtype) for size in (d, e)]


def laid_out(rng, k, v, lengths, page_size=None, scales=()):
    """A cache of tokens (batch, heads, capacity, features), made by hand: pages in any order, beyond lengths wild page
    numbers and NaN."""
    batch, _, capacity, _ = k.shape
    most = 1 if page_size is None else -(-capacity // page_size)
    pages = np.arange(batch)[:, None] if page_size is None else rng.permutation(batch * most + 3)[: batch * most]
    pages = pages.reshape(batch, most)
    rows = capacity if page_size is None else page_size
    held = []
    for x in (k, v, *scales):
        nothing = np.asarray(np.nan if x.dtype != np.int8 else 99).astype(x.dtype)
        padded = np.full((batch, x.shape[1], most * rows, *x.shape[3:]), nothing)
        for b, n in enumerate(lengths):
            padded[b, :, :n] = x[b, :, :n]
        memory = np.full((pages.max(initial=-1) + 1, x.shape[1], rows, *x.shape[3:]), nothing)
        memory[pages] = padded.reshape(batch, x.shape[1], most, rows, *x.shape[3:]).swapaxes(1, 2)
        held.append(memory)
    unused = np.arange(most) * rows >= np.asarray(lengths)[:, None]
    table = None if page_size is None else np.where(unused, rng.choice(WILD, unused.shape), pages).astype(np.int32)
    return na.KVCache(held[0], held[1], np.array(lengths, np.int32), table, *held[2:])


def one_by_one(q, k, v, lengths, **options):
    """o and lse of the reference, each sequence alone."""
    alone = [reference.attention_forward(q[b], k[b, :, :n], v[b, :, :n], **options) for b, n in enumerate(lengths)]
    return [np.stack(x) for x in zip(*alone)]


def options(rng, m):
    """What is aligned with the last key of each sequence, or counts from the first."""
    return {
        "nothing": {},
        "causal": {"causal": True},
        "window": {"mask": na.Window(7, 2)},
        "offset": {"mask": na.Causal(3)},
        "prefix": {"mask": na.Prefix(0) & na.Window(20, None)},
        "stream": {"mask": na.Causal() & (na.Window(4, 0) | na.First(3))},
        "stream of intervals": {"mask": na.Causal() & (na.Window(4, 0) | na.Intervals([0], [3]))},
        "drawn": {"mask": na.Window(4, 0) | na.Prefix(0) | na.Tail(rng.random((m, m)) < 0.5)},
        "tail": {"mask": na.Tail(rng.random((m, m)) < 0.5)},
        "alibi": {"score": na.Alibi(np.linspace(0.1, 0.5, HEADS)), "causal": True},
        "relative": {"score": [na.Softcap(3.0), na.RelativeBias(rng.standard_normal((HEADS, 15))), na.Sink(1.0)]},
        "own offset": {"score": na.Alibi(0.1, offset=2), "scale": 0.5},
    }


LENGTHS = st.lists(st.sampled_from([0, 1, 2]) | st.integers(0, 60), min_size=1, max_size=4)


@settings(deadline=None, max_examples=80)
@given(LENGTHS, st.sampled_from([1, 2, 5, 16, 17, 40]), st.sampled_from([None, 1, 3, 16, 100]), st.integers(0, 9),
       st.sampled_from(list(options(np.random.default_rng(), 0))), st.integers(0, 999))  # fmt: skip
def test_ragged_lengths_in_any_pages(lengths, seqlen_q, page_size, room, kind, seed):
    rng = np.random.default_rng(seed)
    k, v = tokens(rng, len(lengths), HEADS_K, count=max(lengths) + room)
    q = rng.standard_normal((len(lengths), HEADS, seqlen_q, D)).astype(np.float32)
    given = options(rng, seqlen_q)[kind]
    o, saved = na.attention_forward(q, laid_out(rng, k, v, lengths, page_size), **given)
    want, want_lse = one_by_one(q, k, v, lengths, **given)
    np.testing.assert_allclose(saved.lse, want_lse, atol=1e-5)
    np.testing.assert_allclose(o, want, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("seqlen_q", [2, decode.FEW + 1])
def test_dtypes(rng, dtype, page_size, seqlen_q):
    k, v = tokens(rng, 3, HEADS_K, count=50, dtype=dtype, d=256)
    q = rng.standard_normal((3, HEADS, seqlen_q, 256)).astype(dtype)
    o, saved = na.attention_forward(q, laid_out(rng, k, v, [50, 0, 17], page_size), causal=True)
    want, want_lse = one_by_one(q, k, v, [50, 0, 17], causal=True)
    np.testing.assert_allclose(saved.lse, want_lse, atol=1e-12 if dtype == np.float64 else 1e-5)
    np.testing.assert_allclose(o.astype(float), want, atol=1e-12 if dtype == np.float64 else 2e-2)


def test_masks_and_scores_with_axes_of_their_own(rng):
    """Along batch, heads and the capacity; elements are dropped by their place in the cache."""
    q, (k, v) = rng.standard_normal((3, HEADS, 2, D)), tokens(rng, 3, HEADS_K, count=40, dtype=np.float64)
    lengths, visible = [40, 9, 1], rng.random((3, HEADS, 2, 40)) < 0.7
    bias, first = rng.standard_normal((HEADS, 2, 40)), rng.integers(0, 5, (3, 1, 2))
    mask = na.Dense(visible) & na.Intervals(first, first + 40) & na.Prefix(np.array([[3], [2], [1]]))
    dropout = na.Dropout(0.4, 3)
    o = na.attention(q, laid_out(rng, k, v, lengths), mask=mask, score=na.Bias(bias), dropout=dropout)
    within = na.Segments(np.full((3, 1, 2), [0, 2]), np.stack([np.zeros(3, int), lengths], -1)[:, None])
    want, _ = reference.attention_forward(q, k, v, mask=mask & within, score=na.Bias(bias), dropout=dropout)
    np.testing.assert_allclose(o, want, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
@pytest.mark.parametrize("seqlen_q", [1, 3, 150])
def test_bits_of_a_sequence_alone_and_in_any_batch(rng, monkeypatch, dtype, seqlen_q):
    """Of another capacity, in pages or not."""
    monkeypatch.setattr(launch, "SERIAL", 1)
    monkeypatch.setattr(launch, "_threads", lambda: 3)
    lengths = [LONG, 3, decode.CHUNK, 1700, 0]
    like = np.zeros(0, np.float32 if dtype == np.int8 else dtype)
    q = rng.standard_normal((B, HEADS, seqlen_q, D)).astype(like.dtype)
    k, v = tokens(rng, B, HEADS_K, count=LONG, dtype=like.dtype)
    found = []
    for capacity, page_size in ((LONG, None), (LONG + 99, 16), (LONG, 1000)):
        cache = na.KVCache.zeros(B, HEADS_K, capacity, D, like=like, head_dim_v=E, dtype=dtype, page_size=page_size)
        cache.append(k, v)
        cache.truncate(lengths)
        o, saved = na.attention_forward(q, cache, causal=True)
        found.append((o, saved.lse))
    for b, n in enumerate(lengths):
        cache = na.KVCache.zeros(1, HEADS_K, n, D, like=like, head_dim_v=E, dtype=dtype)
        cache.append(k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        o, saved = na.attention_forward(q[b : b + 1], cache, causal=True)
        for others, others_lse in found:
            assert_equal(others[b], o[0])
            assert_equal(others_lse[b], saved.lse[0])
        if dtype != np.int8:
            assert_equal(o[0], na.attention(q[b], k[b, :, :n], v[b, :, :n], causal=True))


def test_lengths_may_be_edited_in_place(rng):
    """Nothing of a call before is left, also where lengths come again."""
    k, v = tokens(rng, 2, HEADS_K, count=90)
    q, options = rng.standard_normal((2, HEADS, 1, D), dtype=np.float32), {
        "mask": na.Causal() & (na.Window(9, 0) | na.Lengths(keys=2)),
        "score": na.Alibi(rng.random((1, HEADS), dtype=np.float32)),
    }
    cache = na.KVCache(k.copy(), v.copy(), np.array([3, 90], np.int32))
    for lengths in ([3, 90], [90, 40], [50, 50], [3, 90]):
        cache.lengths[...] = lengths
        for chosen in (options, {"mask": options["mask"]}, {}):
            got = na.attention(q, cache, **chosen)
            for b, n in enumerate(lengths):
                alone = na.attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], **chosen)
                np.testing.assert_allclose(got[b : b + 1], alone, rtol=1e-6, atol=1e-6)
    cache.lengths[0] = 91
    with pytest.raises(ValueError, match="KVCache lengths: got values from 90 to 91, allowed 0 to 90"):
        na.attention(q, cache, **options)


def test_tokens_are_appended_where_lengths_end_now(rng):
    """As many as before, and other ones; what is refused has no effect on what follows."""
    cache = na.KVCache.zeros(2, HEADS_K, 9, D, head_dim_v=E, like=np.zeros(0, np.float32))
    for lengths, count in [([0, 4], 2), ([5, 1], 2), ([5, 1], 3), ([8, 8], 2), ([0, 4], 2), ([6, 0], 3), ([5, 1], 2)]:
        cache.lengths[...] = lengths
        k, v = tokens(rng, 2, HEADS_K, count=count)
        want_k, want_v = cache.k.copy(), cache.v.copy()
        if max(lengths) + count > 9:
            with pytest.raises(ValueError, match="k: got 2 tokens for sequence 0, which has 8 of at most 9"):
                cache.append(k, v)
            count = 0
        else:
            for b, n in enumerate(lengths):
                want_k[b, :, n : n + count], want_v[b, :, n : n + count] = k[b], v[b]
            cache.append(k, v)
        np.testing.assert_array_equal(cache.k, want_k)
        np.testing.assert_array_equal(cache.v, want_v)
        np.testing.assert_array_equal(cache.lengths, np.add(lengths, count))


def test_any_strides(rng):
    """(batch, capacity, heads, features), backwards, every other number."""
    k, v = tokens(rng, 2, HEADS_K, count=30)
    q, lengths = rng.standard_normal((2, HEADS, 3, D)).astype(np.float32), np.array([30, 12], np.int32)
    want = na.attention(q, na.KVCache(k, v, lengths))
    layouts = [lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2), lambda x: x[:, :, ::-1].copy()[:, :, ::-1],
               lambda x: np.repeat(x, 2, axis=-1)[..., ::2], lambda x: x[::-1].copy()[::-1]]  # fmt: skip
    for layout in layouts:
        assert_equal(na.attention(q, na.KVCache(layout(k), layout(v), lengths)), want)


@pytest.mark.parametrize("shape", [(0, 2, 8, 4), (2, 0, 8, 4), (2, 2, 0, 4), (2, 2, 8, 0)])
@pytest.mark.parametrize("page_size", [None, 3])
def test_no_sequences_heads_room_or_features(shape, page_size):
    batch, heads, capacity, d = shape
    cache = na.KVCache.zeros(*shape, like=np.zeros(0), page_size=page_size, head_dim_v=3)
    tokens = min(capacity, 2)
    cache.append(np.ones((batch, heads, tokens, d)), np.ones((batch, heads, tokens, 3)))
    for m in (0, 1, 20):
        o, saved = na.attention_forward(np.ones((batch, 2 * heads, m, d)), cache, causal=True)
        assert_equal(o, np.broadcast_to(np.arange(m)[:, None] >= m - tokens, o.shape))
        assert o.shape == (batch, 2 * heads, m, 3)
    cache.keep(np.zeros((batch, 0), int), nodes=tokens)
    assert not cache.lengths.any()


def test_weights(rng):
    q, (k, v) = rng.standard_normal((2, HEADS, 3, D)), tokens(rng, 2, HEADS_K, count=30, dtype=np.float64)
    options = {"mask": na.Window(9, 0), "score": na.RelativeBias(rng.standard_normal(9))}
    weights = na.attention_weights(q, laid_out(rng, k, v, [30, 16], 8), **options)
    assert weights.shape == (2, HEADS, 3, 32)
    np.testing.assert_allclose(weights[1, ..., :16], na.attention_weights(q[1], k[1, :, :16], **options), atol=1e-12)
    assert (weights[1, ..., 16:] == 0).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weights_beside_8_bits_are_rounded_once(rng, dtype):
    q, new = (8 * rng.standard_normal((2, HEADS, 3, D))).astype(dtype), tokens(rng, 2, HEADS_K, count=30)
    held = na.KVCache.zeros(2, HEADS_K, 30, D, head_dim_v=E, like=q, dtype=np.int8)
    held.append(*new)
    want = na.attention_weights(q.astype(np.float64), held)
    found = na.attention_weights(q, held)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(float), want, rtol=float(ml_dtypes.finfo(dtype).eps), atol=1e-6)


def test_out(rng):
    q, (k, v) = rng.standard_normal((2, HEADS, 3, D)), tokens(rng, 2, HEADS_K, count=30, dtype=np.float64)
    out = np.empty((2, HEADS, 3, E))
    cache = laid_out(rng, k, v, [30, 12], 8)
    assert na.attention(q, cache, out=out) is out
    assert_equal(out, na.attention(q, cache))


# -------------------------------------------------------------------------------------------------------------- append
def read(cache):
    """The tokens of each sequence, dequantised: k and v (heads, length, features)."""
    k, v = cache._dense()
    return [(k[b, :, :n], v[b, :, :n]) for b, n in enumerate(cache.lengths)]


def assert_holds(cache, wanted):
    for found, want in zip(read(cache), wanted, strict=True):
        for got, x in zip(found, want):
            assert_equal(got, x.astype(np.float64))


@pytest.mark.parametrize("page_size", [None, 1, 7])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_append_in_pieces(rng, page_size, dtype):
    k, v = tokens(rng, 3, HEADS_K, count=30, dtype=dtype)
    cache = na.KVCache.zeros(3, HEADS_K, 30, D, like=k, head_dim_v=E, page_size=page_size)
    lengths = cache.lengths
    for first, end in ((0, 11), (11, 11), (11, 12), (12, 30)):
        cache.append(k[:, :, first:end], v[:, :, first:end])
        assert_holds(cache, [(k[b, :, :end], v[b, :, :end]) for b in range(3)])
    assert cache.lengths is lengths
    assert cache.k.dtype == dtype


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=4), st.sampled_from([None, 1, 4]),
       st.integers(0, 3), st.integers(0, 99))  # fmt: skip
def test_append_to_a_ragged_batch(counts, page_size, before, seed):
    """Tokens before the first offset and behind the last one are nobody's."""
    rng = np.random.default_rng(seed)
    table = None if page_size is None else rng.permutation(3 * -(-40 // page_size)).reshape(3, -1).astype(np.int32)
    cache = na.KVCache.zeros(3, 2, 40, 4, like=np.zeros(0), page_size=page_size, table=table)
    wanted = [(np.zeros((2, 0, 4)), np.zeros((2, 0, 4))) for _ in range(3)]
    for lengths in counts:
        offsets = np.cumsum([before, *lengths])
        k, v = tokens(rng, 2, count=offsets[-1] + 2, d=4, e=4, dtype=np.float64)
        cache.append(k, v, segments=offsets)
        new = [[x[:, first:end] for x in (k, v)] for first, end in itertools.pairwise(offsets)]
        wanted = [[np.concatenate(pair, axis=1) for pair in zip(*held)] for held in zip(wanted, new)]
    assert_holds(cache, wanted)


def test_sequences_share_pages(rng):
    """A prompt's pages; each goes on in its own."""
    k, v = tokens(rng, 1, HEADS_K, count=20)
    first = na.KVCache.zeros(1, HEADS_K, 40, D, like=k, head_dim_v=E, page_size=8)
    first.append(k[:, :, :16], v[:, :, :16])
    table = np.array([[0, 1, 2, 99], [0, 1, 3, 99]], np.int32)
    both = na.KVCache(first.k, first.v, np.array([16, 16], np.int32), table)
    new = [np.concatenate([x[:, :, 16:], -x[:, :, 16:]]) for x in (k, v)]
    both.append(*new)
    (one, _), (other, _) = read(both)
    assert_equal(one, k[0])
    assert_equal(other, np.concatenate([k[0, :, :16], -k[0, :, 16:]], axis=1))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("of_tokens", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_16_bits_beside_float32(rng, dtype, of_tokens):
    """What is appended is rounded once; what is read is what is stored."""
    k, v = tokens(rng, 3, HEADS_K, count=50, dtype=of_tokens)
    for page_size, seqlen_q in (None, 1), (16, decode.FEW + 1):
        cache = na.KVCache.zeros(3, HEADS_K, 50, D, like=k, head_dim_v=E, dtype=dtype, page_size=page_size)
        cache.append(k, v)
        assert_holds(cache, [(k[b].astype(dtype), v[b].astype(dtype)) for b in range(3)])
        cache.truncate([50, 1, 17])
        q = rng.standard_normal((3, HEADS, seqlen_q, D), dtype=np.float32)
        o, saved = na.attention_forward(q, cache, causal=True)
        want, want_lse = one_by_one(q.astype(float), *cache._dense(), [50, 1, 17], causal=True)
        assert (o.dtype, saved.lse.dtype) == (np.float32, np.float32)
        np.testing.assert_allclose(saved.lse, want_lse, atol=1e-5)
        np.testing.assert_allclose(o, want, atol=1e-5)
    assert na.attention_weights(q, cache).dtype == np.float32


@pytest.mark.parametrize("dtype", [np.int8, FLOAT8])
@pytest.mark.parametrize("seqlen_q", [1, decode.FEW + 1])
@pytest.mark.parametrize("page_size", [None, 16])
def test_8_bits(rng, dtype, seqlen_q, page_size):
    """What is read is what is dequantised, at any float dtype of q."""
    k, v = tokens(rng, 3, HEADS_K, count=50, dtype=np.float64)
    written = na.KVCache.zeros(3, HEADS_K, 50, D, like=k, head_dim_v=E, dtype=dtype)
    if dtype == FLOAT8:
        written = na.KVCache(written.k, written.v, written.lengths, None, *np.array([[0.5, 3], [2, 0.25]], np.float32))
    written.append(k[:, :, :20], v[:, :, :20])
    written.append(k[:, :, 20:], v[:, :, 20:])
    scales = (written.k_scale, written.v_scale)
    if dtype == np.int8:
        cache = laid_out(rng, written.k, written.v, [50, 1, 17], page_size, scales)
    else:
        held = laid_out(rng, written.k, written.v, [50, 1, 17], page_size)
        cache = na.KVCache(held.k, held.v, held.lengths, held.table, *scales)
    for of_q in (np.float16, np.float32, np.float64):
        q = rng.standard_normal((3, HEADS, seqlen_q, D)).astype(of_q)
        o, saved = na.attention_forward(q, cache, causal=True)
        want, want_lse = one_by_one(q.astype(float), *written._dense(), [50, 1, 17], causal=True)
        assert o.dtype == of_q
        np.testing.assert_allclose(saved.lse, want_lse, atol=1e-12 if of_q == np.float64 else 1e-5)
        np.testing.assert_allclose(o.astype(float), want, atol=np.finfo(of_q).eps * 20)


def test_error_of_int8(rng):
    """Half a step of the token's own scale; a token of zeros stays that."""
    k, v = tokens(rng, 2, 3, count=9)
    k *= np.geomspace(1e-30, 1e30, 9, dtype=np.float32)[:, None]
    k[0, 1, 5] = 0
    cache = na.KVCache.zeros(2, 3, 9, D, like=k, head_dim_v=E, dtype=np.int8)
    cache.append(k, v)
    largest = abs(k).max(axis=-1)
    np.testing.assert_allclose(cache.k_scale, largest / 127, rtol=1e-6)
    assert (abs(cache._dense()[0] - k) <= largest[..., None] / 254 * (1 + 1e-5)).all()
    assert (abs(cache.k).max(axis=-1) == 127 * (largest > 0)).all()


def test_error_of_float8(rng):
    """A sixteenth, or half the smallest subnormal number; what is too large becomes the largest one."""
    k = np.concatenate([np.geomspace(1e-3, 400, 50), [448, 460, 1e9, -1e9, np.nan]]).astype(np.float32)
    k = k.reshape(1, 1, -1, 1) * np.array([2, 0.5], np.float32)[:, None, None]
    zeros = np.zeros(k.shape, FLOAT8)
    cache = na.KVCache(zeros, zeros.copy(), np.zeros(1, np.int32), None, np.array([2, 0.5], np.float32))
    cache.append(k, k)
    got, want = cache._dense()[0] / [[[[2]], [[0.5]]]], np.clip(k / [[[[2]], [[0.5]]]], -448, 448)
    np.testing.assert_allclose(got, want, rtol=2**-4, atol=2.0**-10)
    np.testing.assert_array_equal(cache.v_scale, [1, 1])
    assert (cache._dense()[1][0, :, 53:54] == -448).all()


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("held", [np.float64, np.float16, np.int8, FLOAT8])
def test_keys_are_turned_by_their_positions(rng, held, page_size):
    """Whatever they are appended beside; values are not, and 8 bits are quantised afterwards."""
    dtype = held if held in (np.float64, np.float16) else np.float32
    k, v = tokens(rng, 3, HEADS_K, count=30, dtype=dtype)
    rotary, counts = na.Rotary(dims=12, interleaved=True), np.array([[5, 2, 0], [9, 0, 1]])
    cache, other = (na.KVCache.zeros(3, HEADS_K, 30, D, like=k, head_dim_v=E, dtype=held, page_size=page_size)
                    for _ in range(2))  # fmt: skip
    turned = na.rotary(k, np.arange(30), rotary)
    for first, more in zip(np.cumsum(counts, axis=0) - counts, counts):
        packed, _, packed_v = ([x[b, :, n : n + m] for b, (n, m) in enumerate(zip(first, more))] for x in (k, k, v))
        args = np.concatenate(packed, axis=1), np.concatenate(packed_v, axis=1), np.append(0, np.cumsum(more))
        cache.append(*args, rotary=rotary)
        packed = [turned[b, :, n : n + m] for b, (n, m) in enumerate(zip(first, more))]
        other.append(np.concatenate(packed, axis=1), *args[1:])
    cache.append(k[:, :, :1], v[:, :, :1], rotary=rotary)
    at = cache.lengths[:, None, None] - 1
    other.append(na.rotary(k[:, :, :1], at, rotary), v[:, :, :1])
    for (got, got_v), (want, want_v) in zip(read(cache), read(other)):
        assert_equal(got_v, want_v)
        np.testing.assert_allclose(got, want, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- keep, truncate
@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 6))), min_size=1, max_size=3),
       st.sampled_from([None, 1, 4]), st.sampled_from([np.float64, np.int8]), st.integers(0, 99))  # fmt: skip
@example([(3, set())], None, np.float64, 0)  # NumPy takes an empty list for floats
def test_keep(sequences, page_size, dtype, seed):
    """Of 7 nodes."""
    rng, nodes = np.random.default_rng(seed), 7
    lengths, paths = [before + nodes for before, _ in sequences], [sorted(path) for _, path in sequences]
    k, v = tokens(rng, len(lengths), 2, count=12, d=4, e=3, dtype=np.float64)
    written = na.KVCache.zeros(len(lengths), 2, 12, 4, like=k, head_dim_v=3, dtype=dtype)
    written.append(k, v)
    scales = () if dtype == np.float64 else (written.k_scale, written.v_scale)
    cache = laid_out(rng, written.k, written.v, lengths, page_size, scales)
    before, depth = read(cache), max(map(len, paths))
    cache.keep([path + [-1] * (depth - len(path)) for path in paths], nodes)
    rows = [[*range(n - nodes), *(n - nodes + node for node in path)] for n, path in zip(lengths, paths)]
    assert_holds(cache, [[x[:, own] for x in held] for held, own in zip(before, rows)])


def test_keep_where_v_is_a_part_of_k(rng):
    k = rng.standard_normal((1, 1, 6, D))
    cache, want = na.KVCache(k, k[..., :E], np.array([6], np.int32)), k[:, :, [0, 1, 3, 5]]
    cache.keep([[1, 3, -1]], nodes=4)
    assert_equal(k[:, :, :4], want)


def test_keep_and_truncate_on_arrays_of_cupy(rng, xp):
    k, v = (xp.asarray(x) for x in tokens(rng, 2, 3, count=8))
    cache = na.KVCache(k, v, xp.asarray([8, 5], dtype=np.int32))
    want = to_numpy(k)[:, :, [0, 1, 2, 3, 5, 7]]
    cache.keep(xp.asarray([[1, 3], [0, -1]], dtype=np.int32), nodes=4)
    assert cache.lengths.tolist() == [6, 2]
    assert_equal(cache.k[0, :, :6], want[0])
    cache.truncate(xp.asarray([3, 2]))
    assert cache.lengths.tolist() == [3, 2]
    cache.truncate(1)
    assert cache.lengths.tolist() == [1, 1]
    assert not cache.overflowed()


@pytest.mark.parametrize("dtype", [np.int8, FLOAT8])
def test_8_bits_on_arrays_of_cupy(rng, xp, dtype):
    """Bit for bit what they are on NumPy's."""
    k, v = tokens(rng, 2, 3, count=9, dtype=np.float16)
    caches = []
    for like in (np, xp):
        cache = na.KVCache.zeros(2, 3, 20, D, like=like.zeros(0), head_dim_v=E, dtype=dtype, page_size=8)
        cache.append(like.asarray(k), like.asarray(v))
        cache.keep([[1, 3], [0, -1]], nodes=4)
        caches.append([to_numpy(x.view(f"u{x.itemsize}")) for x in cache._arrays().values()])
        assert cache.k.dtype == dtype
    for want, got in zip(*caches):
        np.testing.assert_array_equal(got, want)


def test_speculative_decoding(rng):
    """Draft a tree, verify it, keep a path: as if the path's tokens had been appended."""
    k, v = tokens(rng, 2, HEADS_K, count=30, dtype=np.float64)
    q = rng.standard_normal((2, HEADS, 5, D))
    parents, paths = [[-1, 0, 0, 2, 1], [-1, -1, 1, 2, 3]], [[0, 2, 3], [1]]
    cache = na.KVCache.zeros(2, HEADS_K, 40, D, like=q, head_dim_v=E, page_size=8)
    cache.append(k[:, :, :20], v[:, :, :20])
    cache.append(k[:, :, 20:25], v[:, :, 20:25])
    o = na.attention(q, cache, mask=na.Tail(na.Bits.tree(np.array(parents)[:, None])))
    cache.keep(np.array([[0, 2, 3], [1, -1, -1]], np.int32), nodes=5)
    assert cache.lengths.tolist() == [23, 21]
    for b, path in enumerate(paths):
        rows = [*range(20), *(20 + node for node in path)]
        assert_equal(read(cache)[b][0], k[b][:, rows])
        alone = na.attention(q[b][:, path[-1:]], k[b][:, rows], v[b][:, rows])
        np.testing.assert_allclose(o[b][:, path[-1:]], alone, atol=1e-12)


def test_overflowed():
    """Only who changes lengths by hand can do that on NumPy arrays."""
    cache = na.KVCache.zeros(2, 1, 8, 4, like=np.zeros(0))
    cache.lengths[1] = 8
    assert not cache.overflowed()
    cache.lengths[1] = 9
    assert cache.overflowed()


# -------------------------------------------------------------------------------------------------------------- errors
def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def cache(page_size=None, dtype=np.float32, filled=(5, 3), **changed):
    made = na.KVCache.zeros(2, 2, 8, 4, like=zeros(0), page_size=page_size, dtype=dtype, head_dim_v=3)
    made.lengths[...] = filled
    return na.KVCache(**{**made.__getstate__(), **changed})


def appended(k=(2, 2, 1, 4), v=(2, 2, 1, 3), dtype=np.float32, segments=None, **about):
    cache(**about).append(zeros(*k, dtype=dtype), zeros(*v, dtype=dtype), segments)


def kept(path, nodes=3, dtype=np.int32):
    cache().keep(np.array(path, dtype), nodes)


INT32 = {"dtype": np.int32}
Q = zeros(2, 4, 1, 4)
MADE = [
    (lambda: cache(k=[1]), TypeError, "KVCache k: got list, expected a numpy.ndarray or a cupy.ndarray"),
    (lambda: cache(lengths=None), TypeError, "KVCache lengths: got None, expected a numpy.ndarray"),
    (lambda: cache(4, table=[[0, 1], [2, 3]]), TypeError, "KVCache table: got list, expected a numpy.ndarray"),
    (lambda: cache(k=zeros(2, 2, 8, 4, **INT32)), TypeError,
     "KVCache k: got int32, allowed float16, bfloat16, float32, float64, int8, float8_e4m3fn"),
    (lambda: cache(v=zeros(2, 2, 8, 3, dtype=float)), TypeError, "KVCache v: got float64, allowed float32"),
    (lambda: cache(k=zeros(2, 8, 4)), ValueError,
     r"KVCache k: got the shape \(2, 8, 4\), expected \(batch, heads, capacity, head_dim\)"),
    (lambda: cache(4, k=zeros(2, 8, 4)), ValueError, r"expected \(pages, heads, page_size, head_dim\)"),
    (lambda: cache(v=zeros(2, 2, 9, 3)), ValueError,
     r"KVCache v: got the shape \(2, 2, 9, 3\), expected \(2, 2, 8, head_dim_v\)"),
    (lambda: cache(k=np.broadcast_to(zeros(8, 4), (2, 2, 8, 4))), ValueError,
     "KVCache k: got strides .* elements share memory"),
    (lambda: cache(lengths=zeros(2)), TypeError, "KVCache lengths: got float32, allowed int32"),
    (lambda: cache(lengths=[1.0, 2.0]), TypeError, "KVCache lengths: got list, expected an int or an integer array"),
    (lambda: cache(lengths=np.array([1, 2**33])).truncate(0), ValueError,
     "KVCache lengths: got values from 1 to 2"),
    (lambda: cache(lengths=zeros(3, **INT32)), ValueError,
     r"KVCache lengths: got the shape \(3,\), expected \(2,\)"),
    (lambda: cache(4, table=zeros(2, 2, dtype=int)), TypeError, "KVCache table: got int64, allowed int32"),
    (lambda: cache(4, table=zeros(2, **INT32)), ValueError,
     r"KVCache table: got the shape \(2,\), expected \(batch, pages of a sequence\)"),
    (lambda: cache(4, k=zeros(4, 2, 0, 4), v=zeros(4, 2, 0, 3)), ValueError, "KVCache k: got pages of 0 tokens"),
    (lambda: cache(k_scale=zeros(2)), ValueError, "KVCache k_scale: got one with float32, which has none"),
    (lambda: cache(dtype=np.int8, v_scale=None), TypeError,
     "KVCache v_scale: got None, expected a numpy.ndarray"),
    (lambda: cache(dtype=np.int8, k_scale=zeros(2)), ValueError,
     r"KVCache k_scale: got the shape \(2,\), expected \(2, 2, 8\)"),
    (lambda: cache(dtype=FLOAT8, k_scale=zeros(2, dtype=float)), TypeError, "KVCache k_scale: got float64, allow"),
    (lambda: na.KVCache.zeros(2, 2, 8, 4, like=3), TypeError, "KVCache.zeros like: got 3, expected a numpy.ndarray"),
    (lambda: na.KVCache.zeros(2, 2, 8.0, 4, like=Q), TypeError, "KVCache.zeros capacity: got 8.0, expected an integer"),
    (lambda: na.KVCache.zeros(-1, 2, 8, 4, like=Q), ValueError, "KVCache.zeros batch: got -1, allowed 0 or more"),
    (lambda: na.KVCache.zeros(2, 2, 8, 4, like=Q, page_size=0), ValueError, "KVCache.zeros page_size: got 0, allow"),
    (lambda: na.KVCache.zeros(2, 2, 8, 4, like=Q, dtype="f3"), TypeError, "KVCache.zeros dtype: got 'f3', allowed fl"),
    (lambda: na.KVCache.zeros(2, 2, 8, 4, like=Q, dtype=int), TypeError, "KVCache.zeros dtype: got int64, allowed"),
    (lambda: na.KVCache.zeros(2, 2, 8, 4, like=Q, table=zeros(2, 2, **INT32)), ValueError,
     "KVCache.zeros table: got one without a page_size"),
]  # fmt: skip
APPENDED = [
    (lambda: cache().append(zeros(2, 2, 1, 4), zeros(2, 2, 1, 3), rotary=500.0), TypeError,
     "rotary: got 500.0, expected a numbattn.Rotary"),
    (lambda: cache().append(zeros(2, 2, 1, 4), zeros(2, 2, 1, 3), rotary=na.Rotary(dims=6)), ValueError,
     "Rotary dims: got 6, at most 4"),
    (lambda: na.KVCache(x := zeros(2, 2, 8, 4), x[..., :3], [0, 0]).append(
        zeros(2, 2, 1, 4), zeros(2, 2, 1, 3), rotary=na.Rotary()), ValueError,
     "rotary: got one with a v that is a part of k"),
    (lambda: appended(k=(2, 2, 4, 4), v=(2, 2, 4, 3)), ValueError,
     "k: got 4 tokens for sequence 0, which has 5 of at most 8"),
    (lambda: appended(v=(2, 2, 2, 3)), ValueError, r"v: got the shape \(2, 2, 2, 3\), expected \(2, 2, 1, 3\)"),
    (lambda: appended(k=(2, 3, 1, 4)), ValueError, r"k: got the shape \(2, 3, 1, 4\), expected \(2, 2, tokens, 4\)"),
    (lambda: appended(v=(2, 2, 1, 4)), ValueError, r"v: got the shape \(2, 2, 1, 4\), expected \(2, 2, 1, 3\)"),
    (lambda: appended(dtype=int), TypeError, "k: got int64, allowed float16, .*; pass k.astype.np.float32.$"),
    (lambda: appended(dtype=">f4"), TypeError, "k: got >f4, allowed float16, .*; pass k.astype.np.float32.$"),
    *((lambda q=q, held=held: na.attention(Q.astype(q), cache(dtype=held)), ValueError,
       f"q: got {np.dtype(q)}, allowed {words} with a KVCache of {np.dtype(held)}; pass q.astype.*{cast}.$")
      for q, held, words, cast in (
          (float, np.float32, "float32", "np.float32"), (np.float32, float, "float64", "np.float64"),
          (float, np.float16, "float16 or float32", "np.float32"),
          (np.float16, ml_dtypes.bfloat16, "bfloat16 or float32", "np.float32"),
      )),
    (lambda: cache(dtype=np.int8).append(cache(dtype=np.int8).k, cache().v), TypeError,
     "k: got int8, allowed float16, bfloat16, float32, float64"),
    (lambda: cache().append([1], zeros(2, 2, 1, 3)), TypeError, "k: got list, expected a numpy.ndarray"),
    (lambda: appended(segments=[0, 1, 2]), ValueError, r"k: got the shape .* expected \(2, tokens, 4\)"),
    (lambda: appended((2, 3, 4), (2, 3, 3), segments=[0, 3]), ValueError,
     r"segments: got the shape \(2,\), expected \(3,\)"),
    (lambda: appended((2, 3, 4), (2, 3, 3), segments=[0, 2, 4]), ValueError, "segments: got values from 0 to 4, allow"),
    (lambda: appended((2, 3, 4), (2, 3, 3), segments=[0, 2, 1]), ValueError, "segments: got 2 before 1, expected"),
    (lambda: appended((2, 3, 4), (2, 3, 3), segments=3), ValueError, "segments: got a number, expected an array"),
    (lambda: appended((2, 9, 4), (2, 9, 3), segments=[0, 3, 9]), ValueError,
     "k: got 6 tokens for sequence 1, which has 3 of at most 8"),
    (lambda: appended(filled=(9, 0)), ValueError, "KVCache lengths: got values from 0 to 9, allowed 0 to 8"),
    (lambda: appended(page_size=4, table=np.array([[0, 1], [4, 3]], np.int32)), ValueError,
     "KVCache table: got values from 1 to 4, allowed 0 to 3"),
]  # fmt: skip
KEPT = [
    (lambda: kept([[0], [3]]), ValueError, "path: got values from 0 to 3, allowed -1 to 2"),
    (lambda: kept([[0], [-2]]), ValueError, "path: got values from -2 to 0, allowed -1 to 2"),
    (lambda: kept([[0, 1], [1, 0]]), ValueError, "path: got 1 before 0, expected ascending nodes, then -1"),
    (lambda: kept([[0, 1], [1, 1]]), ValueError, "path: got 1 before 1, expected ascending nodes, then -1"),
    (lambda: kept([[0, 1], [-1, 1]]), ValueError, "path: got -1 before 1, expected ascending nodes, then -1"),
    (lambda: kept([[0], [1]], dtype=float), TypeError, "path: got numpy.ndarray of float64, expected an int or an int"),
    (lambda: cache(4, table=np.array([[0, 1], [4, 3]], np.int32)).keep([[0], [0]], 1), ValueError,
     "KVCache table: got values from 1 to 4, allowed 0 to 3"),
    (lambda: kept([0, 1]), ValueError, r"path: got the shape \(2,\), expected \(2, depth\), a depth of 0 to 3"),
    (lambda: kept([[0]]), ValueError, r"path: got the shape \(1, 1\), expected \(2, depth\)"),
    (lambda: kept([[0, 1, 2, -1]] * 2), ValueError, r"path: got the shape \(2, 4\)"),
    (lambda: kept([[0], [1]], 4), ValueError, "nodes: got 4 for a sequence of 3 tokens"),
    (lambda: kept([[0], [1]], 9), ValueError, "nodes: got 9, allowed 0 to 8"),
    (lambda: kept([[0], [1]], 1.5), TypeError, "nodes: got 1.5, expected an integer"),
    (lambda: cache().keep(None, 2), TypeError, "path: got None, expected an int or an integer array"),
    (lambda: cache().truncate(4), ValueError, "lengths: got 4 for sequence 1, allowed 0 to 3, its length"),
    (lambda: cache().truncate([-1, 0]), ValueError, "lengths: got -1 for sequence 0, allowed 0 to 5"),
    (lambda: cache().truncate([1, 2, 3]), ValueError, r"lengths: got the shape \(3,\), expected \(2,\)"),
    (lambda: cache().truncate(1.5), TypeError, "lengths: got 1.5, expected an int or an integer array"),
]  # fmt: skip
CALLS = [
    (lambda f: f(Q, cache(), Q), TypeError, "v: got numpy.ndarray of float32 with a KVCache, which has its own"),
    (lambda f: f(Q, Q), TypeError, "v: got None, expected a numpy.ndarray or a cupy.ndarray"),
    (lambda f: f(None, cache()), TypeError, "q: got None, expected a numpy.ndarray"),
    (lambda f: f(Q[0], cache()), ValueError,
     r"q: got the shape \(4, 1, 4\), expected \(2, heads, seqlen_q, head_dim\): as many sequences as the KVCache has"),
    (lambda f: f(Q[:1], cache()), ValueError, r"q: got the shape \(1, 4, 1, 4\), expected \(2, heads"),
    (lambda f: f(zeros(2, 3, 1, 4), cache()), ValueError, "q: got 3 heads, expected a multiple of 2"),
    (lambda f: f(zeros(2, 4, 1, 5), cache()), ValueError, "q: got head_dim 5, expected 4, that of the KVCache"),
    (lambda f: f(Q.astype(np.float16), cache()), TypeError, "q: got float16, allowed float32 with a KVCache"),
    (lambda f: f(Q, cache(), mask=na.Segments([0, 1])), ValueError,
     "got .* with (Segments and )?a KVCache, "),
    (lambda f: f(Q, cache(), mask=np.ones((1, 9), bool)), ValueError, "mask: got booleans of the shape"),
    (lambda f: f(Q, cache(filled=(9, 0))), ValueError, "KVCache lengths: got values from 0 to 9, allowed 0 to 8"),
    (lambda f: f(Q, cache(filled=(-1, 0))), ValueError, "KVCache lengths: got values from -1 to 0, allowed 0 to 8"),
    (lambda f: f(Q, cache(4, table=np.array([[0, 4], [2, 9]], np.int32))), ValueError,
     "KVCache table: got values from 0 to 4, allowed 0 to 3"),
    (lambda f: f(Q, cache(), out=zeros(2, 4, 1, 4)), ValueError, r"out: got the shape \(2, 4, 1, 4\), expected"),
    *((lambda f, name=name: overlapping(f, name), ValueError, f"out: overlaps KVCache {name}")
      for name in ("k", "v", "lengths", "table", "k_scale", "v_scale")),
]  # fmt: skip
CHANGED = MADE + APPENDED + KEPT


def overlapping(function, name):
    """A call whose out shares memory with an array of a cache."""
    held = na.KVCache.zeros(2, 2, 8, 4, like=Q, head_dim_v=3, page_size=4, dtype=np.int8)
    arrays = {x: getattr(held, x) for x in ("k", "v", "lengths", "table", "k_scale", "v_scale")}
    memory, x = np.zeros(1000, np.uint8), arrays[name]
    arrays[name] = memory[: x.nbytes].view(x.dtype).reshape(x.shape)
    arrays[name][...] = x
    function(Q, na.KVCache(**arrays), out=memory[:96].view(np.float32).reshape(2, 4, 1, 3))


@pytest.mark.parametrize("number", range(len(CHANGED)))
def test_errors(number):
    make, error, words = CHANGED[number]
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("function", [na.attention, na.attention_forward])
@pytest.mark.parametrize("number", range(len(CALLS)))
def test_errors_of_calls(function, number):
    call, error, words = CALLS[number]
    with pytest.raises(error, match=words):
        call(function)


def test_there_are_no_gradients():
    words = "k: got a KVCache, which has no gradients: pass k and v as arrays"
    with pytest.raises(TypeError, match=words):
        na.attention_vjp(Q, cache())
    o, saved = na.attention_forward(Q, cache())
    with pytest.raises(TypeError, match=words):
        na.attention_backward(o, saved)


def test_nothing_is_written_where_something_is_wrong(rng):
    k, v = tokens(rng, 2, 2, count=4, d=4, e=3)
    held = cache(4, filled=(2, 6))
    with pytest.raises(ValueError, match="k: got 4 tokens for sequence 1"):
        held.append(k, v)
    assert held.lengths.tolist() == [2, 6]
    assert not held.k.any()
    assert not held.v.any()


@pytest.mark.parametrize("name", ["k", "v", "lengths", "k_scale", "v_scale"])
@pytest.mark.parametrize("change", [lambda x: x.append(*zeros(2, 2, 2, 1, 4)), lambda x: x.keep([[0], [1]], 2)])
def test_what_is_read_only_is_not_changed_by_half(rng, name, change):
    held = na.KVCache.zeros(2, 2, 8, 4, like=Q, dtype=np.int8)
    held.append(*rng.standard_normal((2, 2, 2, 5, 4)))
    before = copy.deepcopy(held)
    getattr(held, name).flags.writeable = False
    with pytest.raises(ValueError, match=f"KVCache {name}: got a read-only array"):
        change(held)
    if name == "lengths":
        with pytest.raises(ValueError, match="KVCache lengths: got a read-only array"):
            held.truncate(1)
    for x in ("k", "v", "lengths", "k_scale", "v_scale"):
        assert_equal(getattr(held, x), getattr(before, x))


def shared(x):
    """An array whose elements along the first axis share memory."""
    return np.lib.stride_tricks.as_strided(x, x.shape, (0, *x.strides[1:]))


K = zeros(2, 1, 9, 4)
K8, SCALES = K.astype(np.int8), zeros(2, 1, 9)
NONE = zeros(2, dtype=np.int32)  # lengths


@pytest.mark.parametrize(("arrays", "words"), [
    ((K, K.copy(), shared(NONE)), "lengths: got strides .* elements share memory"),
    ((K, K.copy(), K.view(np.int32)[:, 0, 0, 0]), "lengths: overlaps k"),
    ((K[:, :, 1:], K[:, :, :-1], NONE), "v: overlaps k"),
    ((K8, K8[..., :2], NONE, None, SCALES, SCALES.copy()), "v: overlaps k"),
    ((K8, K8.copy(), NONE, None, SCALES, SCALES), "v_scale: overlaps k_scale"),
    ((K8, K8.copy(), NONE, None, shared(SCALES), SCALES), "k_scale: got strides .* elements share memory"),
    ((K8.view(FLOAT8), K8.view(FLOAT8)[..., :2], NONE, None, np.ones(1, np.float32), np.full(1, 2, np.float32)),
     "v_scale: got another one than k_scale"),
])  # fmt: skip
def test_writes_that_would_change_one_another(arrays, words):
    """They are refused before any is made; such a cache may be read."""
    held = na.KVCache(*arrays)
    na.attention(K[:, :, :1], held)
    with pytest.raises(ValueError, match=f"KVCache {words}"):
        held.append(np.ones((2, 1, 1, 4), np.float32), np.ones((2, 1, 1, held.v.shape[-1]), np.float32))
    assert not any(any(x.tobytes()) for x in (held.k, held.lengths))


def test_values_that_are_a_part_of_keys_are_appended(rng):
    k = np.zeros((2, 1, 9, 4))
    held, new = na.KVCache(k, k[..., 1:3], np.zeros(2, np.int32)), rng.standard_normal((2, 1, 5, 4))
    held.append(new, new[..., 1:3])
    held.keep([[1], [0]], 2)
    assert_equal(held.k[:, :, 3], np.stack([new[0, :, 4], new[1, :, 3]]))


@pytest.mark.parametrize("which", range(5))
def test_keep_that_is_interrupted_has_changed_nothing(rng, which):
    """A signal's exception comes when one of the arrays has been written."""
    writes = []

    class Interrupted(np.ndarray):
        def __setitem__(self, at, x):
            super().__setitem__(at, x)
            writes.append(at)
            if len(writes) == 1 + which:
                raise KeyboardInterrupt

    held = na.KVCache.zeros(2, 2, 8, 4, like=Q, dtype=np.int8)
    held.append(*rng.standard_normal((2, 2, 2, 5, 4)))
    arrays = {x: getattr(held, x) for x in ("k", "v", "lengths", "k_scale", "v_scale")}
    before = {name: x.copy() for name, x in arrays.items()}
    with pytest.raises(KeyboardInterrupt):
        na.KVCache(**{name: x.view(Interrupted) for name, x in arrays.items()}).keep([[1, 3], [0, -1]], nodes=4)
    for name, x in arrays.items():
        assert_equal(x, before[name])


def test_where_arrays_lie_is_checked_before_anything_is_written(monkeypatch):
    seen = []
    monkeypatch.setattr(na.KVCache, "_is_numpy", False)
    monkeypatch.setitem(BACKENDS, "cupy", SimpleNamespace(check_device=seen.append))
    monkeypatch.setattr(na.KVCache, "_append_on_gpu", lambda *_: seen.append("written"))
    cache(4, dtype=np.int8).append(zeros(2, 2, 1, 4), zeros(2, 2, 1, 3))
    arrays, *then = seen
    assert set(arrays) == {"k", "v", *(f"KVCache {x}" for x in ("k", "v", "lengths", "table", "k_scale", "v_scale"))}
    assert then == ["written"]


@pytest.mark.parametrize("scale", [0, -1, np.nan, np.inf, 1e-40, 1e36])
def test_scales_of_float8(scale):
    name = "v_scale" if scale else "k_scale"
    bad = np.array([1, scale], np.float32)
    words = f"KVCache {name}: got values from .* to .*, allowed 1.2e-38 to 7.6e.35"
    with pytest.raises(ValueError, match=words):
        cache(dtype=FLOAT8, **{name: bad})
    held = cache(dtype=FLOAT8)
    getattr(held, name)[...] = bad
    with pytest.raises(ValueError, match=words):
        held.append(zeros(2, 2, 1, 4), zeros(2, 2, 1, 3))
    with pytest.raises(ValueError, match=words):
        na.attention(Q, held)


@pytest.mark.parametrize("dtype", [np.int8, FLOAT8])
def test_what_is_too_large_for_8_bits(dtype):
    """Becomes as large as can be, and warns of nothing: what is lost is meant to be."""
    x = np.array([[1e300, 1.0], [-3e38, 1e-300], [1e-42, 1e-45]]).reshape(1, 1, 3, 2)
    held = na.KVCache.zeros(1, 1, 3, 2, like=x, dtype=dtype)
    with np.errstate(all="raise"):
        held.append(x, x)
    largest, want = held._dense()[0][0, 0, :, 0], [3.4e38, -3e38, 0] if dtype == np.int8 else [448, -448, 0]
    np.testing.assert_allclose(largest, want, rtol=0.01, atol=1e-40)


def test_repr():
    assert repr(cache()) == ("KVCache(k=<float32 array (2, 2, 8, 4)>, v=<float32 array (2, 2, 8, 3)>, "
                             "lengths=<int32 array (2,)>)")  # fmt: skip


@pytest.mark.parametrize("lengths", [[3, 5], (3, 5), np.array([3, 5]), np.array([3, 5], ">u2")])
def test_any_integers_are_lengths(lengths):
    """In an array of its own."""
    made = cache(lengths=lengths)
    made.append(zeros(2, 2, 1, 4), zeros(2, 2, 1, 3))
    assert made.lengths.dtype == np.int32
    np.testing.assert_array_equal(made.lengths, [4, 6])
    np.testing.assert_array_equal(lengths, [3, 5])


FAULTS = {
    (
        "test_append_in_pieces",
        "test_append_to_a_ragged_batch",
        "test_sequences_share_pages",
        "test_error_of_int8",
        "test_error_of_float8",
        "test_keep",
        "test_keep_where_v_is_a_part_of_k",
        "test_weights",
        "test_errors",
        "test_nothing_is_written_where_something_is_wrong",
        "test_overflowed",
    ): {
        "before + np.maximum(steps, 0)": "before + t",
        "[x[page, :, row] for x in arrays]": "(x[page, :, row] for x in arrays)",
        "- nodes + (steps >= 0).sum(axis=1)": "- nodes + steps.shape[1]",
        "lengths.min() < nodes": "lengths.max() < nodes",
        "(self.k_scale, self.v_scale) if self.k.dtype == INT8 else ()": "()",
        "(given < 0) | (given > held)": "given > held",
        "self.lengths > self._longest": "self.lengths >= self._longest",
    },
    (
        "test_what_is_read_only_is_not_changed_by_half",
        "test_keep_that_is_interrupted_has_changed_nothing",
        "test_scales_of_float8",
    ): {
        "        self._check_writable()\n        if not": "        if not",
        '        check_writable("KVCache lengths", self.lengths)\n': "",
        "x[to_page, :, to_row] = before_it": "pass",
        "            self.lengths[...] = lengths\n            raise": "            raise",
    },
    ("test_writes_that_would_change_one_another", "test_values_that_are_a_part_of_keys_are_appended"): {
        "(self.k_scale != self.v_scale).any()": "False",
    },
    "masks/test_rolling.py::test_any_history[rows]": {
        "new_k, new_v = (x[lasts] for x in": "new_k, new_v = (x[::-1] for x in",
    },
    ("masks/test_rolling.py::test_errors", "masks/test_rolling.py::test_what_is_left_may_be_dropped"): {
        "np.where(lengths <= self._ring.first, lengths, reached)": "reached",
        "for b in np.flatnonzero(lengths < least)[:1]:": "for b in ():",
    },
    "test_keys_are_turned_by_their_positions": {
        "turned_tokens(new_k, positions, rotary)": "turned_tokens(new_k, positions - positions.min(), rotary)",
    },
    "caches/arrays.py": {
        "test_any_integers_are_lengths": {'kind in "iu" and': 'kind == "u" and'},
        ("test_append_in_pieces", "test_sequences_share_pages", "test_errors"): {
            "position // size]": "0 * position]",
            "        self._check_pages(pages)\n": "",
        },
        "test_ragged_lengths_in_any_pages": {
            "first < np.minimum(self.lengths, self.capacity)[:, None]": "first <= self.lengths[:, None]",
        },
        "test_scales_of_float8": {
            "            self._check_scales()\n            if self.table": "            if self.table",
        },
        ("test_writes_that_would_change_one_another", "test_values_that_are_a_part_of_keys_are_appended"): {
            'check_apart(f"KVCache {name}", x)\n        shared': "pass\n        shared",
            "self.k.dtype != INT8 and lies_within_rows(self.v, self.k)": "False",
            "self.k.dtype != INT8 and ": "",
            "lies_within_rows(self.v, self.k)": "True",
        },
        "test_lengths_may_be_edited_in_place": {
            "check_lengths(self.lengths.tobytes(), self.lengths.dtype, self._longest)": "pass",
        },
    },
    "call/passes.py": {
        "test_weights_beside_8_bits_are_rounded_once": {
            "(rounded(x, problem.sum_dtype) for x in (q,": "(rounded(x, problem.dtype) for x in (q,",
        },
    },
    "caches/masked.py": {
        "test_weights": {
            "placed(mask, np.frombuffer(lengths, dtype)[:, None], *about)": "placed(mask)",
        },
    },
    "caches/eight_bits.py": {
        ("test_error_of_int8", "test_error_of_float8"): {
            "np.rint(x": "np.trunc(x",
            "np.clip(scaled, -LARGEST_FLOAT8, LARGEST_FLOAT8)": "np.clip(scaled, -np.inf, np.inf)",
        },
        "test_what_is_too_large_for_8_bits": {
            "np.clip(x, -LARGEST_IN_INT8, LARGEST_IN_INT8)": "x",
        },
    },
    "caches/tokens.py": {
        ("test_append_in_pieces", "test_errors"): {
            "x.swapaxes(-2, -3)": "x.swapaxes(0, 1)",
            "(other <= one)": "(other < one)",
            "(counts > longest - lengths)": "(counts > longest)",
        },
        ("test_append_to_a_ragged_batch", "test_tokens_are_appended_where_lengths_end_now"): {
            "(lengths - starts)[sequence]": "lengths[sequence]",
            "slice(int(offsets[0]), int(offsets[-1]))": "slice(0, int(offsets[-1] - offsets[0]))",
            "np.arange(len(held) + 1) * count": "np.arange(len(held) + 1)",
        },
    },
}

"""What happens to S before the mask: every part alone and in pairs, with masks and dropout, against the reference.

The reference itself is held against finite differences.
"""

import itertools
import math
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn import reference
from numbattn.base.values import kinds
from numbattn.call.problem import DTYPES
from numbattn.cpu.forward import forward_kernel
from numbattn.cpu.score import number_of
from numbattn.cpu.scores import KINDS
from numbattn.cuda.kernels.scores import CLASSES, class_of
from numbattn.scores import Part, names
from numbattn.scores.element import ScoreTangent

from ..accuracy import assert_equal, check, random

B, H, M, N = 2, 4, 150, 270  # several tiles each way, with tails


def far_and_foreign(s, batch, head, i, j, groups, weights):
    """All that it may do: look up, branch, call, return a number."""
    if j > i + 200 * (batch + 1):
        return -1.0
    if groups[i] != groups[j]:
        s -= weights[head] * abs(i - j) / 100
    return max(s, 0.1 * s) + math.tanh(s)


def nearer(s, batch, head, i, j, slopes, marked):
    """As far as types tell, it only adds."""
    if marked[j]:
        s += (i + j) % 5 / 4
    return s - slopes[batch, head] * abs(i - j)


PARTS = {
    "softcap": lambda rng, dtype: na.Softcap(2.0),
    "alibi": lambda rng, dtype: na.Alibi(random(rng, H, dtype) / 50),
    "bias": lambda rng, dtype: na.Bias(random(rng, (B, H, M, N), dtype)),
    "pair bias": lambda rng, dtype: na.Bias(random(rng, (H, M, N), dtype)),
    "bias of keys": lambda rng, dtype: na.Bias(random(rng, (B, 1, 1, N), dtype)),
    "bias of queries": lambda rng, dtype: na.Bias(random(rng, (M, 1), dtype)),
    "relative": lambda rng, dtype: na.RelativeBias(random(rng, (H, 41), dtype)),
    "sink": lambda rng, dtype: na.Sink(np.linspace(-2, 6, H).astype(dtype)),
    "function": lambda rng, dtype: na.Score(far_and_foreign, arrays=(rng.integers(3, size=N),
                                                                     rng.random(H, np.float32) / 20)),
    "shift": lambda rng, dtype: na.Score(nearer, arrays=(rng.random((B, H), np.float32) / 20, rng.random(N) < 0.5)),
}
MASKS = {
    "none": lambda rng: None,
    "window": lambda rng: na.Window(90, 3) & na.Lengths(rng.integers(0, N, (B, 1)), rng.integers(0, M, (B, H))),
    "dense": lambda rng: na.Dense(rng.random((B, 1, M, N)) < 0.3),
}


def qkv(rng, dtype=np.float32, heads_k=H, d=16, e=8):
    return (random(rng, (B, H, M, d), dtype), random(rng, (B, heads_k, N, d), dtype),
            random(rng, (B, heads_k, N, e), dtype))  # fmt: skip


def few_heads(monkeypatch):
    """Of one element of the batch, where the reference calls a function for each element of S."""
    monkeypatch.setattr(f"{__name__}.B", 1)
    monkeypatch.setattr(f"{__name__}.H", 2)


# ---------------------------------------------------------------------------------------------------------- reference
WITH_GRADIENTS = [(name,) for name in PARTS if name not in ("function", "shift")]


@pytest.mark.parametrize("names", [*WITH_GRADIENTS, ("bias", "softcap", "alibi"), ("softcap", "relative")])
def test_gradients_of_the_reference_by_finite_differences(rng, names, monkeypatch):
    for name, size in zip("BHMN", (2, 2, 3, 4)):
        monkeypatch.setitem(globals(), name, size)
    parts = [PARTS[name](rng, np.float64) for name in names]
    arrays = [x for part in parts for x in part._arrays().values()]
    x = [*rng.standard_normal((3, B, H, 4, 2)), *arrays]
    x[0] = x[0][:, :, :M]
    do, dlse = rng.standard_normal((B, H, M, 2)), rng.standard_normal((B, H, M))

    def with_arrays(arrays):
        arrays = iter(arrays)
        return [type(part)(next(arrays)) if part._arrays() else part for part in parts]

    def loss(q, k, v, *arrays):
        o, lse = reference.attention_forward(q, k, v, causal=True, score=with_arrays(arrays))
        return np.vdot(o, do) + np.vdot(lse, dlse)

    grads = reference.attention_backward(do, *x[:3], causal=True, score=parts, dlse=dlse)
    for i, grad in enumerate((*grads, *grads.score)):
        for at in itertools.islice(np.ndindex(grad.shape), 0, None, 3):
            step = [np.zeros_like(y) for y in x]
            step[i][at] = 1e-6
            ahead, behind = (loss(*(y + sign * s for y, s in zip(x, step))) for sign in (1, -1))
            assert grad[at] == pytest.approx((ahead - behind) / 2e-6, rel=1e-6, abs=1e-8)


def test_parts_are_what_they_say(rng):
    """Softmax of what the docstrings' equations give."""
    q, k = rng.standard_normal((2, 3, 5, 8))
    i, j = np.arange(5)[:, None], np.arange(5)
    S = q @ k.swapaxes(-2, -1) / np.sqrt(8)
    bias, slopes, table = rng.standard_normal((5, 5)), rng.standard_normal(3), rng.standard_normal((3, 5))
    for score, want in (
        (na.Softcap(0.5), 0.5 * np.tanh(S / 0.5)),
        (na.Bias(bias), S + bias),
        (na.Alibi(slopes), S - slopes[:, None, None] * abs(i - j)),
        (na.RelativeBias(table), S + table[:, np.clip(j - i, -2, 2) + 2]),
        ([na.Bias(bias), na.Softcap(0.5)], 0.5 * np.tanh((S + bias) / 0.5)),
        ([na.Softcap(0.5), na.Bias(bias)], 0.5 * np.tanh(S / 0.5) + bias),
    ):
        P = np.exp(want) / np.exp(want).sum(-1, keepdims=True)
        np.testing.assert_allclose(na.attention_weights(q, k, score=score), P, rtol=1e-12)
    P = np.exp(S) / (np.exp(S).sum(-1, keepdims=True) + np.exp(slopes)[:, None, None])
    np.testing.assert_allclose(na.attention_weights(q, k, score=na.Sink(slopes)), P, rtol=1e-12)


@pytest.mark.parametrize("offset", [None, 0, -3, np.int32(9), np.array([[1], [-4]]), np.array([[2, 0, 99]], np.uint8)])
def test_offsets_are_what_they_say(rng, offset):
    """Without one the last query is at the last key."""
    q, k, slopes, table = np.zeros((2, 3, 2, 8)), np.zeros((2, 3, 4, 8)), rng.random(3), rng.standard_normal((2, 1, 5))
    at = 4 - 2 if offset is None else np.asarray(offset, int)[..., None, None]
    ahead = np.broadcast_to(np.arange(4) - (np.arange(2)[:, None] + at), (2, 3, 2, 4))
    entries = np.take_along_axis(np.broadcast_to(table[..., None, :], (2, 3, 2, 5)), np.clip(ahead, -2, 2) + 2, -1)
    for score, want in ((na.Alibi(slopes, offset=offset), -slopes[:, None, None] * abs(ahead)),
                        (na.RelativeBias(table, offset=offset), entries)):
        P = np.exp(want) / np.exp(want).sum(-1, keepdims=True)
        np.testing.assert_allclose(na.attention_weights(q, k, score=score), P)


def test_decoding_with_the_score_of_training(rng):
    """The last row of a call equals a call with that one query."""
    q, k, v = rng.standard_normal((3, 2, 40, 8))
    for score in (na.RelativeBias(rng.standard_normal((2, 9))), na.Alibi(rng.random(2))):
        whole = na.attention(q, k, v, causal=True, score=score)
        np.testing.assert_allclose(na.attention(q[:, -1:], k, v, causal=True, score=score), whole[:, -1:], rtol=1e-12)


# ------------------------------------------------------------------------------------------------------------ corners
def half(s, batch, head, i, j):
    return 0.5 * s


def hiding_rows(s, batch, head, i, j):
    return -math.inf if i % 3 == 0 else s


def with_infinities(x, *places):
    for place in places:
        x[place] = -np.inf
    return x


CORNERS = {  # rows that see nothing by scores of -inf, and elements that a Softcap makes visible again
    "bias of queries": lambda rng, dtype: na.Bias(with_infinities(random(rng, (B, 1, M, 1), dtype), (0, 0, 3))),
    "bias of keys": lambda rng, dtype: na.Bias(with_infinities(random(rng, N, dtype), 0, slice(5, 9))),
    "function": lambda rng, dtype: [na.Score(hiding_rows), na.Score(half)],
    "all": lambda rng, dtype: [na.Sink(random(rng, H, dtype)), na.Bias(np.array(-np.inf, dtype))],
    "softcap after": lambda rng, dtype: [na.Bias(with_infinities(random(rng, (M, N), dtype), (3, 7), 5)),
                                          na.Score(half), na.Softcap(3.0)],
}  # fmt: skip


def check_corner(rng, name, dtype, d=16, e=8, bits=4, **options):
    """What sees nothing has gradients of exactly 0; nothing is NaN."""
    q, k, v = qkv(rng, dtype, heads_k=1, d=d, e=e)
    o, lse, (dq, *_) = check(q, k, v, rng, score=CORNERS[name](rng, dtype), bits=bits, **options)
    assert (o[lse == -np.inf] == 0).all()
    assert (dq[lse == -np.inf] == 0).all()


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, np.float32) for name in CORNERS), ("bias of queries", np.float16), ("bias of keys", np.float16),
    ("all", np.float16),
])  # fmt: skip
def test_scores_of_minus_infinity(rng, monkeypatch, name, dtype):
    few_heads(monkeypatch)
    check_corner(rng, name, dtype)


def check_lowest(rng, dtype):
    """A row of finfo.min, as padding has it, is the mean of v; where others are visible it is as good as masked."""
    q, k, v = qkv(rng, dtype, heads_k=1)
    bias = np.zeros((M, N), dtype)
    bias[3], bias[4, 9:] = ml_dtypes.finfo(dtype).min, ml_dtypes.finfo(dtype).min
    o, saved = na.attention_forward(q, k, v, score=na.Bias(bias, gradient=False))
    atol = 4 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(o[:, :, 3], np.repeat(v.mean(-2, dtype=np.float64), H, 1), rtol=0, atol=atol)
    np.testing.assert_allclose(o[:, :, 4], na.attention(q[:, :, 4:5], k[..., :9, :], v[..., :9, :])[:, :, 0], atol=atol)
    np.testing.assert_allclose(saved.lse[:, :, 3], float(ml_dtypes.finfo(dtype).min), rtol=1e-6)
    for grad in na.attention_backward(np.ones_like(o), saved):
        assert np.isfinite(grad).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float64], ids=str)
def test_the_lowest_scores_are_visible(rng, dtype):
    check_lowest(rng, np.dtype(dtype))


@pytest.mark.parametrize(("given", "array"), [
    (1, np.float64(1)), (np.int8(3), np.float64(3)), (np.float32(0.5), np.float32(0.5)), ([1, 2], np.array([1.0, 2.0])),
    (ml_dtypes.bfloat16(0.5), np.asarray(ml_dtypes.bfloat16(0.5))), ((0.5, 2), np.array([0.5, 2.0])),
    (range(3), np.arange(3.0)), ([[1], [2]], np.array([[1.0], [2.0]])),
], ids=repr)  # fmt: skip
def test_numbers_and_lists_are_arrays(given, array):
    """Of float64, but for NumPy's own floats."""
    for part in na.Sink(given), na.Alibi(given), na.Bias(given):
        assert part._array.dtype == array.dtype
        assert_equal(part._array, np.asarray(array))
    assert na.RelativeBias([1, 2, 3]).table.tolist() == [1.0, 2.0, 3.0]


def test_a_list_computes_as_its_array(rng):
    q, k, v = qkv(rng)
    slopes, logits, table = [0.1, 0.2, 0.5, 1], [1, 0, -2, 0], [[0.5, 1, 2]] * H
    lists = [na.Alibi(slopes), na.RelativeBias(table), na.Sink(logits)]
    arrays = [na.Alibi(np.array(slopes)), na.RelativeBias(np.array(table)), na.Sink(np.array(logits, float))]
    assert_equal(na.attention(q, k, v, score=lists), na.attention(q, k, v, score=arrays))


def check_large_scores(rng, dtype):
    """lse has no digits left for exp(S - lse): P is 1 at most all the same."""
    q, k, v = qkv(rng, dtype, heads_k=1)
    o, saved = na.attention_forward(q * dtype.type(3e4), k * dtype.type(3e4), v)
    _, _, dv = na.attention_backward(np.ones_like(o), saved)
    assert np.abs(dv.astype(np.float64)).max() <= H * M
    o, saved = na.attention_forward(q, k, v, score=na.Sink(np.float32(3e38)))
    np.testing.assert_allclose(saved.lse, 3e38, rtol=1e-6)
    for x in (o, *na.attention_backward(np.ones_like(o), saved)):
        assert (x == 0).all()


def test_large_scores(rng):
    check_large_scores(rng, np.dtype(np.float32))


def test_low_scores_in_float64(rng):
    q, k, v = qkv(rng, np.float64)
    k = np.broadcast_to(k[:, :, :1], k.shape)                   # in each row all scores are equal
    o = na.attention(q * 1e20, k * 1e20, v)
    np.testing.assert_allclose(o, np.broadcast_to(v.mean(-2, keepdims=True), o.shape), rtol=1e-10)


# -------------------------------------------------------------------------------------------------------------- calls
FUNCTIONS = "function", "shift"  # which the reference calls element by element


@pytest.mark.parametrize(("name", "mask"), [
    *((name, mask) for name in PARTS for mask in MASKS if name not in FUNCTIONS),
    ("function", "window"), pytest.param("shift", "dense", marks=pytest.mark.slow),
])  # fmt: skip
def test_parts(rng, monkeypatch, name, mask):
    if name in FUNCTIONS:
        few_heads(monkeypatch)
    check(*qkv(rng, heads_k=H), rng, score=PARTS[name](rng, np.float32), mask=MASKS[mask](rng))


OFFSETS = {
    "number": lambda rng: -70,
    "by batch": lambda rng: rng.integers(-M, N, (B, 1)),
    "by head": lambda rng: rng.integers(-M, N, (B, H)).astype(np.int32),
}


@pytest.mark.parametrize("offset", OFFSETS)
def test_offsets(rng, offset):
    """The gradients are sums over matrices of different offsets."""
    offset = OFFSETS[offset](rng)
    score = [na.Alibi(random(rng, H, np.float32) / 50, offset=offset), na.Softcap(5.0),
             na.RelativeBias(random(rng, (1, 41), np.float32), offset=offset)]  # fmt: skip
    check(*qkv(rng, heads_k=2), rng, score=score, causal=True)


PAIRS = [*itertools.permutations(("softcap", "alibi", "pair bias", "relative", "sink"), 2),
         ("pair bias", "bias of keys"), ("pair bias", "softcap", "alibi", "softcap", "sink"), ("shift", "softcap")]
SLOW_PAIRS = ("function", "alibi"), ("alibi", "function", "function"), ("softcap", "shift"), ("shift", "pair bias")


@pytest.mark.parametrize(
    "names", [*PAIRS, *(pytest.param(names, marks=pytest.mark.slow) for names in SLOW_PAIRS)], ids="-".join
)
def test_parts_in_order(rng, monkeypatch, names):
    few_heads(monkeypatch)
    score = [PARTS[name](rng, np.float32) for name in names]
    check(*qkv(rng, heads_k=1), rng, score=score, causal=True, dropout=na.Dropout(0.2, 3))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64], ids=["float16", "bfloat16", "float64"])
def test_dtypes(rng, dtype):
    """In float64 more bits are allowed: scores in base 2 have the rounding of log2(e), of one sign in all of them."""
    score = [PARTS[name](rng, dtype) for name in ("pair bias", "softcap", "sink")]
    check(*qkv(rng, dtype), rng, score=score, causal=True, bits=16 if dtype == np.float64 else 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_another_dtype(rng, dtype):
    check(*qkv(rng), rng, score=[PARTS["bias of keys"](rng, dtype), na.Softcap(3.0)])


@st.composite
def biases(draw):
    """Lengths, and the shape of a bias that broadcasts to (2, 3, seqlen_q, seqlen_k)."""
    length = st.sampled_from([1, 2, 5, 129])
    m, n = draw(length), draw(length)
    shape = [draw(st.sampled_from([1, size])) for size in (2, 3, m, n)]
    return m, n, shape[draw(st.integers(0, 4)) :]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(call=biases())
def test_bias_broadcasts_as_in_numpy(call):
    m, n, shape = call
    rng = np.random.default_rng(0)
    q, k, v = random(rng, (2, 3, m, 4), np.float32), *random(rng, (2, 2, 3, n, 4), np.float32)
    check(q, k, v, rng, score=na.Bias(random(rng, shape, np.float32)), causal=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("part", "shape"), [(na.Bias, (H, 40, 40)), (na.RelativeBias, (H, 9))])
def test_arrays_of_any_strides(rng, part, shape, dtype):
    q, k, v, do = (random(rng, (H, 40, 8), np.float32) for _ in range(4))
    whole = random(rng, shape, dtype)
    views = [whole.swapaxes(-2, -1).copy().swapaxes(-2, -1), whole[:, ::-1], whole[..., ::-1],
             np.broadcast_to(whole[:, :1], shape), np.broadcast_to(whole[..., :1], shape)]  # fmt: skip
    for view in views:
        results = []
        for x in (view, view.copy()):
            o, backprop = na.attention_vjp(q, k, v, score=part(x))
            grads = backprop(do)
            results.append((o, *grads, *grads.score))
        for one, other in zip(*results):
            np.testing.assert_array_equal(one, other)


def traced(call):
    """The most bytes that NumPy holds during a call, and what it returns."""
    tracemalloc.start()
    try:
        found = call()
        return tracemalloc.get_traced_memory()[1], found
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("view", [
    lambda x: np.broadcast_to(x[0], x.shape),
    lambda x: x.swapaxes(-2, -1),
    lambda x: x[..., ::-1],
    lambda x: x.astype(np.float16),
    lambda x: np.broadcast_to(x[0].astype(ml_dtypes.bfloat16), x.shape),
    lambda x: x.astype(np.float64),
], ids=["batch", "transposed", "reversed", "float16", "bfloat16 batch", "float64"])  # fmt: skip
def test_a_bias_is_read_as_it_lies(rng, view):
    """Of no strides and no dtype a copy of its size is made."""
    q, k, v, do = random(rng, (4, 4, 500, 8), np.float32)
    bias = view(random(rng, (4, 500, 500), np.float32))
    o, saved = na.attention_forward(q, k, v, score=na.Bias(bias, gradient=False))
    used, again = traced(lambda: na.attention(q, k, v, score=na.Bias(bias, gradient=False)))
    assert used < bias.size
    _, want = na.attention_forward(q, k, v, score=na.Bias(np.array(bias, np.float32)))
    np.testing.assert_array_equal(again, o)
    np.testing.assert_allclose(saved.lse, want.lse, rtol=1e-6)
    used, grads = traced(lambda: na.attention_backward(do, saved))
    assert used < bias.size
    for got, wanted in zip(grads, na.attention_backward(do, want)):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("view", [lambda x: x.swapaxes(-2, -1), lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
                                  lambda x: np.broadcast_to(x[0].T, x.shape)])  # fmt: skip
def test_booleans_are_read_as_they_lie(rng, view):
    q, k, v = random(rng, (3, 4, 500, 8), np.float32)
    mask = view(rng.random((4, 500, 500)) < 0.5)
    want = na.attention(q, k, v, mask=mask.copy())
    used, got = traced(lambda: na.attention(q, k, v, mask=mask))
    assert used < mask.size
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_16_bits_is_read(dtype):
    bias = np.arange(2**16, dtype=np.uint16).view(dtype)[:, None]
    with np.errstate(all="ignore"):
        exact = bias[:, 0].astype(np.float64)
    fits = abs(exact) < 1e38
    q, k = np.zeros((2**16, 1)), np.zeros((1, 1))
    _, saved = na.attention_forward(q, k, k, score=na.Bias(bias, gradient=False))
    np.testing.assert_allclose(saved.lse[fits], exact[fits], rtol=1e-12)
    assert np.isneginf(saved.lse[np.isneginf(exact)]).all()
    assert np.isnan(saved.lse[np.isnan(exact)]).all()


def test_what_is_masked_may_be_nan(rng):
    q, k, v, do = rng.standard_normal((4, 3, 200, 8))
    visible = rng.random((3, 200, 200)) < 0.3
    bias = rng.standard_normal((3, 200, 200))
    results = []
    for hidden in (0, np.nan, np.inf):
        score = [na.Bias(np.where(visible, bias, hidden)), na.Softcap(5.0)]
        o, saved = na.attention_forward(q, k, v, mask=visible, score=score)
        grads = na.attention_backward(do, saved)
        results.append((o, saved.lse, *grads, *grads.score))
        assert (grads.score[0][~visible] == 0).all()
    for one in results[1:]:
        for x, want in zip(one, results[0]):
            np.testing.assert_array_equal(x, want)


def test_a_score_of_minus_infinity_is_as_good_as_masked(rng):
    q, k, v, do = rng.standard_normal((4, 3, 50, 8))
    visible = rng.random((3, 50, 50)) < 0.3
    visible[:, 7] = False
    o, saved = na.attention_forward(q, k, v, score=na.Bias(np.where(visible, 0, -np.inf)))
    want, masked = na.attention_forward(q, k, v, mask=visible)
    np.testing.assert_allclose(o, want, rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(np.isneginf(saved.lse), np.isneginf(masked.lse))
    for grad, wanted in zip(na.attention_backward(do, saved), na.attention_backward(do, masked)):
        np.testing.assert_allclose(grad, wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("part", [na.Alibi, na.Bias, na.Sink, lambda x: na.RelativeBias([0.0, x, 0.0])])
@pytest.mark.parametrize("x", [np.inf, -np.inf, np.nan])
def test_numbers_that_are_not_finite(rng, part, x):
    """As NumPy computes with them: a slope of inf is NaN at a query's own key, a bias of -inf is as good as masked."""
    q, k, v = rng.standard_normal((3, 2, 5, 8))
    o, saved = na.attention_forward(q, k, v, causal=True, score=part(x))
    with np.errstate(invalid="ignore"):
        want, lse = reference.attention_forward(q, k, v, causal=True, score=part(x))
    np.testing.assert_array_equal(np.isnan(o), np.isnan(want))
    np.testing.assert_allclose(saved.lse, lse, rtol=1e-12)
    assert np.isnan(saved.lse).any() == (x != -np.inf or part is na.Alibi)


def logistic(s, batch, head, i, j):
    return 1 / (1 + math.exp(-s))


def check_behind_minus_infinity(rng):
    """A function that makes it finite again, and has no derivative there, inf / inf: the gradient is 0."""
    q, k, v = (random(rng, (2, 10, 8), np.float32) for _ in "qkv")
    hidden = np.where(rng.random((10, 10)) < 0.3, -np.inf, 0).astype(np.float32)
    check(q, k, v, rng, score=[na.Bias(hidden, gradient=False), na.Score(logistic)])


def test_what_was_minus_infinity_has_no_gradient(rng):
    check_behind_minus_infinity(rng)


@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_a_sink_of_any_size(rng, logit):
    q, k, v = rng.standard_normal((3, 2, 20, 8)).astype(np.float32)
    o, saved = na.attention_forward(q, k, v, score=na.Sink(np.float32(logit)))
    want, lse = (na.attention(q, k, v), reference.attention_forward(q, k, v)[1]) if logit < 0 else (0 * q, logit)
    np.testing.assert_array_equal(o, want)
    np.testing.assert_allclose(saved.lse, np.broadcast_to(lse, saved.lse.shape), rtol=1e-6)


def test_a_query_that_sees_nothing(rng):
    q, k, v, do = rng.standard_normal((4, 2, 20, 8))
    o, saved = na.attention_forward(q, k, v, mask=na.Lengths(queries=5), score=na.Sink(rng.standard_normal(2)))
    assert (o[:, 5:] == 0).all()
    assert np.isneginf(saved.lse[:, 5:]).all()
    dq, _, _ = na.attention_backward(do, saved, dlse=np.ones_like(saved.lse))
    assert (dq[:, 5:] == 0).all()


@pytest.mark.parametrize("shapes", [((2, 0, 8), (2, 7, 8)), ((2, 5, 8), (2, 0, 8)), ((0, 5, 8), (0, 7, 8))])
def test_empty_arrays(xp, shapes):
    (*lead, m, _), (*_, n, _) = shapes
    q, k = map(xp.zeros, shapes)
    score = [na.Bias(np.zeros((*lead, m, n))), na.Softcap(1.0), na.Alibi(np.zeros(lead)), na.Sink(np.zeros(lead))]
    o, saved = na.attention_forward(q, k, k, score=score)
    grads = na.attention_backward(xp.zeros_like(o), saved)
    for x, array in zip(grads.score, (score[0].bias, score[2].slopes, score[3].logits), strict=True):
        assert_equal(x, np.zeros_like(array))


# ---------------------------------------------------------------------------------------------------------- gradients
def test_gradients_come_in_the_order_of_their_arrays(rng):
    q, k, v, do = rng.standard_normal((4, 2, 9, 8))
    bias, slopes, logits = np.zeros((9, 9)), np.zeros(2), np.zeros(2)
    score = [na.Sink(logits), na.Bias(bias, gradient=False), na.Softcap(3.0), na.Alibi(slopes)]
    _, backprop = na.attention_vjp(q, k, v, score=score)
    grads = backprop(do)
    dq, dk, dv = grads
    dlogits, nothing, dslopes = grads.score
    assert (dlogits.shape, nothing, dslopes.shape) == ((2,), None, (2,))
    assert isinstance(grads, na.Gradients)
    want = reference.attention_backward(do, q, k, v, score=score)
    for got, wanted in zip((dq, dk, dv, dlogits, dslopes), (*want, want.score[0], want.score[2])):
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-13)
    assert want.score[1] is None


def test_without_a_score_there_are_no_gradients_of_it(rng):
    q, k, v, do = rng.standard_normal((4, 9, 8))
    _, backprop = na.attention_vjp(q, k, v)
    assert backprop(do).score == ()


def test_gradients_do_not_depend_on_the_number_of_threads(rng):
    q, k, v, do = rng.standard_normal((4, 2, 1100, 16)).astype(np.float32)
    score = [na.Bias(np.zeros((1100, 1100), np.float32)), na.Alibi(np.zeros(2)), na.RelativeBias(np.zeros((2, 9)))]
    _, saved = na.attention_forward(q, k, v, score=score)
    before, many = numba.get_num_threads(), na.attention_backward(do, saved)
    try:
        numba.set_num_threads(1)
        one = na.attention_backward(do, saved)
    finally:
        numba.set_num_threads(before)
    for x, y in zip((*one, *one.score), (*many, *many.score)):
        np.testing.assert_array_equal(x, y)


def test_saved_of_takes_a_score(rng):
    q, k, v, do = rng.standard_normal((4, 2, 9, 8))
    score = [na.Softcap(2.0), na.Sink(np.zeros(2))]
    o, saved = na.attention_forward(q, k, v, score=score)
    again = na.Saved.of(q, k, v, o, saved.lse, score=score)
    for x, y in zip(na.attention_backward(do, saved), na.attention_backward(do, again)):
        np.testing.assert_array_equal(x, y)


# ---------------------------------------------------------------------------------------------------------- functions
def test_a_function_that_repeats_alibi(rng):
    q, k, v, do = rng.standard_normal((4, 2, 150, 8))
    slopes = rng.random(2)
    results = []
    for score in (na.Alibi(slopes, gradient=False),
                  na.Score(lambda s, batch, head, i, j, slopes: s - slopes[head] * abs(i - j), arrays=[slopes])):
        o, saved = na.attention_forward(q, k, v, score=score)
        results.append((o, saved.lse, *na.attention_backward(do, saved)))
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def test_a_derivative_of_the_users_own():
    square = lambda s, batch, head, i, j: s * s / 2     # noqa: E731
    assert na.check_score(na.Score(square, lambda s, batch, head, i, j: s)) < 1e-6
    with pytest.raises(ValueError, match=r"the derivative is -?[\d.]+, finite differences give -?[\d.]+, at s = "):
        na.check_score(na.Score(square, lambda s, batch, head, i, j: 2 * s))


def test_second_derivatives(rng):
    """Also far out, where 1 - tanh(x)^2 would be 0."""
    cube = na.Score(lambda s, batch, head, i, j: s**3, lambda s, batch, head, i, j: 3 * s * s)
    given = na.Score(*cube._functions[:2], second=lambda s, batch, head, i, j: 6 * s)
    S, h = rng.normal(scale=3, size=(1, 4, 5)), 1e-5
    for score in (cube, given, na.Softcap(3.0)):
        want = (score._derivative(S + h) - score._derivative(S - h)) / (2 * h)
        np.testing.assert_allclose(score._curvature(S), want, rtol=1e-6, atol=1e-9)
    assert na.check_score(given) < 1e-6
    far = np.full((1, 1, 1), 60.0)
    assert na.Softcap(3.0)._derivative(far) == pytest.approx(1 / math.cosh(20) ** 2, rel=1e-12)
    assert na.Softcap(3.0)._curvature(far) == pytest.approx(-2 / 3 / math.cosh(20) ** 2, rel=1e-12)
    assert na.Bias(0.0)._curvature(S) == 0
    assert given == na.Score(*given._functions[:2], second=given.second) != cube


def test_gradients_of_a_function_by_finite_differences(rng):
    q, k, v, do = rng.standard_normal((4, 2, 6, 4))
    for derivative in (None, lambda s, batch, head, i, j: 1 - math.tanh(s) ** 2):
        score = [na.Score(lambda s, batch, head, i, j: math.tanh(s) + head * j, derivative), na.Softcap(3.0)]
        _, backprop = na.attention_vjp(q, k, v, score=score)
        for x, grad in zip((q, k, v), backprop(do)):
            step = 1e-6 * rng.standard_normal(x.shape)
            inputs = [[y + sign * step if y is x else y for y in (q, k, v)] for sign in (1, -1)]
            ahead, behind = (np.vdot(na.attention(*those, score=score), do) for those in inputs)
            assert np.vdot(grad, step) == pytest.approx((ahead - behind) / 2, rel=1e-5)


def test_a_function_is_known_by_what_it_does():
    def made(number, text="x"):
        return na.Score(lambda s, batch, head, i, j: s + number if text else s)

    assert made(1) == made(1) != made(2)
    assert made(1) != made(1.0)
    assert made(1) != na.Score(lambda s, batch, head, i, j: s + 1)
    assert len({made(1), made(1), made(2)}) == 2


def test_what_stands_for_a_function_lasts():
    """In compiled code on disk: the same in another process."""
    def made(number):
        return na.Score(lambda s, batch, head, i, j: math.tanh(s) * number)._identity

    assert made(1).digest == made(1).digest != made(2).digest
    program = "import math, numbattn as na; print(na.Score(lambda s, batch, head, i, j: math.tanh(s))._identity.digest)"
    one, other = (subprocess.run([sys.executable, "-c", program], capture_output=True, check=True) for _ in range(2))
    assert one.stdout == other.stdout


def ladder(s, batch, head, i, j):
    return s if s > 0 else ladder(s + 1, batch, head, i, j)


def test_a_function_may_name_itself():
    assert na.Score(ladder) == na.Score(ladder)


def test_arrays_around_a_function_are_refused():
    """Numba would make constants of them: what is changed in them later would not be seen."""
    x = np.zeros(9)
    message = r"uses the array {} of its surroundings, expected it among arrays"
    with pytest.raises(TypeError, match=message.format("x")):
        na.Score(lambda s, batch, head, i, j: s + x[j])
    with pytest.raises(TypeError, match=message.format("X")):
        na.Score(lambda s, batch, head, i, j: s + X[0, i, j])
    na.Score(lambda s, batch, head, i, j, y: s + y.X, arrays=[x])     # only a name that is X


C = 2.0


def by_name(s, *, n=1):
    return n * s


def scaled(s, batch, head, i, j):
    return C * math.tanh(s)


def test_a_function_is_taken_when_the_score_is_made(rng, monkeypatch):
    """Value and derivative alike, however often a global that they read changes before, between and after calls."""
    q, k, v, do = rng.standard_normal((4, 6, 4))

    def results(score):
        o, saved = na.attention_forward(q, k, v, score=score)
        return o, *na.attention_backward(do, saved)

    twice = na.Score(scaled)
    monkeypatch.setitem(globals(), "C", 3.0)
    thrice = na.Score(scaled)
    got = {2.0: results(twice), 3.0: results(thrice)}
    assert twice != thrice
    monkeypatch.setitem(globals(), "C", 5.0)
    for score, c in ((twice, 2.0), (thrice, 3.0)):
        want = results([na.Score(lambda s, batch, head, i, j: math.tanh(s)),
                        na.Score(lambda s, batch, head, i, j, c: c[0] * s, arrays=[np.array([c])])])
        for x, y, z in zip(got[c], results(score), want):
            np.testing.assert_array_equal(x, y)
            np.testing.assert_allclose(x, z, rtol=1e-10, atol=1e-13)
        reference_o, _ = reference.attention_forward(q, k, v, score=score)
        np.testing.assert_allclose(reference_o, got[c][0], rtol=1e-10)


def test_in_plain_python_numbers_are_as_wide_as_compiled():
    """float32 beside float is float64 there, and integers of 8 bits do not wrap around."""
    def function(s, batch, head, i, j, weights, groups):
        return s * weights[j] + (groups[i] - groups[j]) * 2

    S, weights, groups = np.full((1, 3, 3), 1 / 3), np.full(3, 0.1, np.float32), np.array([3, 200, 90], np.uint8)
    for dtype in np.uint8, np.int16:
        found = na.Score(function, arrays=[weights, groups.astype(dtype)])._applied(S)
        i, j = np.indices((3, 3))
        assert_equal(found[0], S[0] * np.float64(weights[0]) + (groups[i] - groups[j].astype(int)) * 2)


def test_a_score_with_its_arrays_elsewhere_is_the_same_function(monkeypatch):
    score = na.Score(lambda s, batch, head, i, j, x: C * s + x[j], arrays=[np.zeros(3)])
    monkeypatch.setitem(globals(), "C", 3.0)
    assert score._mapped(np.copy)._identity is score._identity


def hides(s, batch, head, i, j):
    return i >= j


def test_a_function_that_is_a_mask_is_refused():
    q = np.zeros((3, 4))
    for call in (na.attention, reference.attention_forward):
        with pytest.raises(TypeError, match=r"score: hides.* returns True or False, as a mask does: return s where it"):
            call(q, q, q, score=na.Score(hides))


def unruly(s, batch, head, i, j):
    return math.gamma(s * s + 1)


def test_a_derivative_is_only_asked_for_in_the_backward_pass(rng):
    q, k, v = rng.standard_normal((3, 3, 4))
    o, saved = na.attention_forward(q, k, v, score=na.Score(unruly))
    want, _ = reference.attention_forward(q, k, v, score=na.Score(unruly))
    np.testing.assert_allclose(o, want)
    with pytest.raises(TypeError) as error:
        na.attention_backward(o, saved)
    first, second, third = str(error.value).splitlines()
    assert first.startswith("score: the derivative of unruly, line ")
    assert second == "gamma(Dual(float64)) has no rule here"
    assert "derivative=" in third


# ------------------------------------------------------------------------------------------------------------- values
def test_parts_are_values():
    x = np.zeros((3, 3))
    assert na.Softcap(3) == na.Softcap(3.0) != na.Softcap(4.0)
    assert na.Bias(x) == na.Bias(x) != na.Bias(x.copy())
    assert na.Bias(x) != na.Bias(x, gradient=False)
    assert na.Alibi(x) == na.Alibi(x) != na.Alibi(x, offset=0) == na.Alibi(x, offset=0)
    assert len({na.Bias(x), na.Bias(x), na.Softcap(1), na.Softcap(1.0)}) == 2
    assert repr(na.Bias(x)) == "Bias(bias=<float64 array (3, 3)>, gradient=True)"
    with pytest.raises(AttributeError):
        na.Softcap(3.0).cap = 4.0


def test_a_score_compiles_nothing_that_is_not_there(rng):
    """The CPU's kernels take all of them: one compilation for each dtype."""
    q, k, v = rng.standard_normal((3, 2, 9, 8))
    na.attention(q, k, v)
    compiled = len(forward_kernel.entries)
    for score in (na.Softcap(1.0), na.Bias(np.zeros((9, 1))), [na.Sink(0.0), na.Alibi(0.0), na.Softcap(2.0)],
                  [na.Alibi(0.0, offset=3), na.RelativeBias(np.zeros(5), offset=np.array([1, 2]))]):
        na.attention(q, k, v, score=score)
    assert len(forward_kernel.entries) == compiled


X = np.zeros((2, 9, 8))
WRONG = {
    "no part": (lambda: na.attention(X, X, X, score="softcap"), TypeError,
                "score: got 'softcap', expected numbattn's Alibi, Bias, RelativeBias, Score, Sink, Softcap, or a list"),
    "a number in a list": (lambda: na.attention(X, X, X, score=[3.0]), TypeError, "score: got 3.0"),
    "an array": (lambda: na.attention(X, X, X, score=X), TypeError, "score: got numpy.ndarray of float64"),
    "a mask": (lambda: na.attention(X, X, X, score=na.Causal()), TypeError, r"score: got Causal\(\), expected"),
    "two sinks": (lambda: na.attention(X, X, X, score=[na.Sink(0.0)] * 2), ValueError, "more than one Sink"),
    "cap 0": (lambda: na.Softcap(0), ValueError, "Softcap cap: got 0, allowed finite and > 0"),
    "cap inf": (lambda: na.Softcap(np.inf), ValueError, "Softcap cap: got inf, allowed finite and > 0"),
    "cap text": (lambda: na.Softcap("50"), TypeError, "Softcap cap: got '50', expected a number"),
    "integers": (lambda: na.Bias(np.zeros((3, 3), int)), TypeError, "Bias bias: got numpy.ndarray of int64, expected"),
    "flag for a number": (lambda: na.Sink(True), TypeError, "Sink logits: got True, expected a number or an array of"),
    "list of flags": (lambda: na.Alibi([True]), TypeError, "Alibi slopes: got list, expected a number or an array"),
    "rows of unequal length": (lambda: na.Bias([[1.0], [1.0, 2.0]]), ValueError,
                               "Bias bias: got list, of which NumPy makes no array: setting"),
    "beyond floats": (lambda: na.Alibi(10**400), ValueError, "Alibi slopes: got 10+, allowed are floats"),
    "byte order": (lambda: na.Bias(X.astype(">f8")), TypeError,
                   r'Bias bias: got numpy.ndarray of >f8, which x.astype\(x.dtype.newbyteorder\("="\)\) casts, exp'),
    "many axes": (lambda: na.Bias(np.zeros((1,) * 33)), ValueError, "Bias bias: got 33 axes, at most 32"),
    "flag": (lambda: na.Bias(X, gradient=1), TypeError, "Bias gradient: got 1, expected True or False"),
    "even": (lambda: na.RelativeBias(np.zeros((2, 4))), ValueError, r"RelativeBias table: got the shape \(2, 4\)"),
    "shape": (lambda: na.attention(X, X, X, score=na.Bias(np.zeros((3, 9)))), ValueError,
              r"score: Bias bias: got the shape \(3, 9\), which does not broadcast to \(2, 9, 9\)"),
    "axes": (lambda: na.attention(X, X, X, score=na.Bias(np.zeros((1, 2, 9, 9)))), ValueError,
             r"does not broadcast to \(2, 9, 9\)$"),
    "an axis that is missing": (lambda: na.attention(*[np.zeros((2, 3, 9, 4))] * 3, score=na.Bias(np.zeros((2, 9, 9)))),
                                ValueError, r"does not broadcast to \(2, 3, 9, 9\); pass bias\[:, None\]$"),
    "an axis behind": (lambda: na.attention(*[np.zeros((2, 3, 9, 4))] * 3, score=na.Alibi(np.zeros(2))), ValueError,
                       r"does not broadcast to \(2, 3\); pass slopes\[:, None\]$"),
    "heads": (lambda: na.attention(X, X, X, score=na.Sink(np.zeros(3))), ValueError,
              r"score: Sink logits: got the shape \(3,\), which does not broadcast to \(2,\)"),
    "no function": (lambda: na.Score("s"), TypeError, "Score function: got 's', expected a Python function"),
    "no derivative": (lambda: na.Score(far_and_foreign, 1), TypeError, "Score derivative: got 1, expected a"),
    "no second": (lambda: na.Score(scaled, scaled, second=1), TypeError, "Score second: got 1, expected a"),
    "a second alone": (lambda: na.Score(scaled, second=scaled), ValueError, "Score second: got one without a deriv"),
    "half arrays": (lambda: na.Score(far_and_foreign, arrays=[np.zeros(3, np.float16)]), TypeError,
                    r"Score arrays\[0\]: got numpy.ndarray of float16, expected an array of"),
    "no arrays": (lambda: na.Score(far_and_foreign, arrays=None), TypeError, "Score arrays: got None, expected a"),
    "an array of arrays": (lambda: na.Score(far_and_foreign, arrays=X[:2]), TypeError,
                           "Score arrays: got numpy.ndarray of float64, expected a sequence of arrays"),
    "large arrays": (lambda: na.Score(far_and_foreign, arrays=[np.zeros(3, np.uint64)]), TypeError,
                     r"Score arrays\[0\]: got numpy.ndarray of uint64, which int64 cannot hold: give x.astype"),
    "few arrays": (lambda: na.Score(scaled, arrays=[X]), TypeError, r"Score function: scaled.* with 1 arrays: too"),
    "few arrays of a derivative": (lambda: na.Score(scaled, lambda s: 1), TypeError, r"Score derivative: .* with 0"),
    "few arrays of a second": (lambda: na.Score(scaled, scaled, (), lambda s: 1), TypeError, "Score second: .* with 0"),
    "by name": (lambda: na.Score(lambda s, batch, head, i, j, *, n=1: s), TypeError, "takes arguments by name only"),
    "called by name": (lambda: na.Score(lambda s, batch, head, i, j: s + by_name(s)), TypeError,
                       "by_name takes arguments by name only, which compiled code cannot give"),
    "keywords": (lambda: na.Score(lambda *x, **names: x[0]), TypeError, r"takes keywords by \*\* in line"),
    "checks what is no function": (lambda: na.check_score(na.Softcap(1.0)), TypeError, "expected a numbattn.Score"),
    "offset": (lambda: na.Alibi(1.0, offset=0.5), TypeError, "Alibi offset: got 0.5, expected an int or an integer"),
    "offset by place": (lambda: na.RelativeBias(X, True, 0), TypeError, "positional arguments"),
    "offset axes": (lambda: na.attention(X, X, X, score=na.RelativeBias(np.zeros(5), offset=np.zeros((1, 2), int))),
                    ValueError, r"score: RelativeBias offset: got the shape \(1, 2\), expected \(2 or 1\): all batch"),
    "table": (lambda: na.attention(X, X, X, score=na.RelativeBias(np.zeros((3, 5)))), ValueError,
              r"score: RelativeBias table: got the shape \(3, 5\)"),
}  # fmt: skip


def test_every_kind_is_known_to_kernels():
    """Each is found by its file in cpu/scores and cuda/kernels/scores."""
    every = {kind for kind in kinds(Part) if kind.__name__ in names()}
    assert {na.Alibi, na.Score, na.Sink} < every
    assert {KINDS[number_of(kind)].of for kind in every if kind._has_step} == {kind.of for kind in KINDS}
    assert {class_of(kind).of for kind in every} | {ScoreTangent} == CLASSES.keys()


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_table_of_no_scores_has_a_gradient_of_zeros():
    part = na.RelativeBias(np.ones((2, 3)))
    for m, n in itertools.product((0, 1), repeat=2):
        found = part._gradient(np.zeros((2, m, n)), None, None)
        np.testing.assert_array_equal(found, np.zeros((2, 3)))


FAULTS = {
    "if sum(not part._has_step for part in parts) > 1": "if False",
    "sorted(kind.__name__ for": "list(kind.__name__ for",
    "if kind._examples and kind": "if kind",
    "for at in range(1, len(own) + 1)": "for at in range(1, len(own))",
    "next((f\"; pass": "next((f\"; give",
    "scores/softcap.py": {
        "return 4 * e / (1 + e) ** 2": "return 1",
        "test_second_derivatives": {
            "return -2 / cap * np.tanh(S / cap)": "return -2 * np.tanh(S / cap)",
        },
    },
    "scores/alibi.py": {
        "sum_broadcast((dS * self._weight(dS))": "sum_broadcast(-(dS * self._weight(dS))",
    },
    "scores/sink.py": {
        "sum_broadcast(-(P * np.where": "sum_broadcast((P * np.where",
    },
    "scores/distance.py": {
        "return j - own[..., None]": "return own[..., None] - j",
        "return seqlen_k - seqlen_q if self.offset is None": "return 0 if self.offset is None",
        "cuda/plan/test_scores.py": {
            "ALIGNED.keep(self, frame, part)": "pass",
        },
    },
    "scores/function.py": {
        "_set(_identity=self._identity,": "_set(_identity=Identity(*self._functions),",
    },
    "scores/element.py": {
        "test_what_was_minus_infinity_has_no_gradient": {
            "np.where(np.isneginf(S), 0, self._of_each(self._element(order), S))":
                "self._of_each(self._element(order), S)",
        },
    },
}

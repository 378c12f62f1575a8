"""All that a call can be asked for, on NumPy and on CuPy arrays, against the reference.

Arrays in masks are NumPy's, beside CuPy inputs too, where a test does not say otherwise.
"""

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn.call.problem import DTYPES

from .accuracy import assert_equal, check, random, to_numpy

B, H, M, N = 2, 4, 150, 270  # several tiles each way, with tails


def lengths(rng, largest, shape):
    return rng.integers(0, largest + 1, shape)


MASKS = {
    "causal": lambda rng: na.Causal(),
    "causal offsets": lambda rng: na.Causal(offset=rng.integers(-M, N, (B, 1))),
    "window": lambda rng: na.Window(100, 30),
    "window left": lambda rng: na.Window(37, None, offset=rng.integers(-50, M, (1, H))),
    "lengths": lambda rng: na.Lengths(keys=lengths(rng, N, (B, 1)), queries=lengths(rng, M, (B, H))),
    "dense": lambda rng: na.Dense(rng.random((B, 1, M, N)) < 0.3),
    "bits": lambda rng: na.Bits.pack(rng.random((1, H, M, N)) < 0.5),
    "blocks": lambda rng: na.BlockSparse(rng.random((B, H, 3, 6)) < 0.4, block_size=(64, 48)),
}


def qkv(rng, dtype=np.float32, batch=(B,), heads=H, heads_k=H, m=M, n=N, d=24, e=24):
    return (random(rng, (*batch, heads, m, d), dtype), random(rng, (*batch, heads_k, n, d), dtype),
            random(rng, (*batch, heads_k, n, e), dtype))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [None, na.Dropout(0.2, seed=5)], ids=["", "dropout"])
def test_dtypes(rng, xp, dtype, causal, dropout):
    d, e = (16, 8) if dtype == np.float64 else (64, 40)  # float64 is checked in long doubles, which are slow
    check(*qkv(rng, dtype, heads_k=2, d=d, e=e), rng, xp, causal=causal, dropout=dropout)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dropout", [None, na.Dropout(0.5, seed=2**63, offset=9)], ids=["", "dropout"])
def test_masks(rng, xp, kind, dropout):
    check(*qkv(rng), rng, xp, mask=MASKS[kind](rng), dropout=dropout)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations_with_replacement(MASKS, 2)))
def test_pairs_of_masks(rng, xp, one, other):
    check(*qkv(rng, heads_k=2), rng, xp, mask=MASKS[one](rng) & MASKS[other](rng))


@pytest.mark.parametrize("kind", ["butterfly", "local_global", "strided"])
def test_block_builders(rng, xp, kind):
    mask = getattr(na.BlockSparse, kind)((1, 1, M, N), block_size=(32, 32))
    check(*qkv(rng), rng, xp, mask=mask, causal=True)


def test_tree(rng, xp):
    parents = np.array([rng.integers(-1, max(i, 1)) if i else -1 for i in range(40)])[None, None]
    check(*qkv(rng, m=40, n=40), rng, xp, mask=na.Bits.tree(parents))


def test_boolean_array_is_a_mask(rng, xp):
    q, k, v = map(xp.asarray, qkv(rng))
    visible = rng.random((B, H, M, N)) < 0.1
    assert_equal(na.attention(q, k, v, mask=visible), na.attention(q, k, v, mask=na.Dense(visible)))


BOOLEANS = {"queries x keys": (M, N), "batch x keys": (B, 1, 1, N), "heads x keys": (H, 1, N), "queries": (M, 1),
            "keys": (N,), "one": (1, 1), "batch x queries": (B, 1, M, 1)}  # fmt: skip


@pytest.mark.parametrize("shape", BOOLEANS.values(), ids=BOOLEANS)
def test_booleans_broadcast_as_in_numpy(rng, xp, shape):
    visible = rng.random(shape) < 0.7
    mask = visible & na.Causal()
    check(*qkv(rng, heads_k=2), rng, xp, mask=mask)
    q, k, v = map(xp.asarray, qkv(rng, heads_k=2))
    whole = na.Dense(np.broadcast_to(visible, (B, H, M, N)).copy())
    for same in (visible, xp.asarray(visible), np.broadcast_to(visible, (B, H, M, N))):
        assert_equal(na.attention(q, k, v, mask=same), na.attention(q, k, v, mask=whole))


def test_any_bytes_but_0_are_true(rng, xp):
    """As NumPy reads a boolean view of other bytes."""
    truth = rng.integers(0, 4, (B, H, M, N)).astype(np.uint8)
    odd, plain = truth.view(bool), truth != 0
    q, k, v = map(xp.asarray, qkv(rng))
    blocks = na.BlockSparse(odd[..., :3, :5], (64, 64)), na.BlockSparse(plain[..., :3, :5], (64, 64))
    for one, other in ((na.Dense(odd), na.Dense(plain)), (na.Bits.pack(odd), na.Bits.pack(plain)), blocks):
        np.testing.assert_array_equal(one.dense(M, N), other.dense(M, N))
        assert_equal(na.attention(q, k, v, mask=one), na.attention(q, k, v, mask=other))


def test_causal_and_mask_both_hold(rng, xp):
    q, k, v = map(xp.asarray, qkv(rng))
    both = na.attention(q, k, v, mask=na.Causal() & na.Window(50, 50))
    assert_equal(na.attention(q, k, v, causal=True, mask=na.Window(50, 50)), both)


LENGTH = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 40, 257])
AXES = st.lists(st.sampled_from([1, 2, 3]), max_size=2)


@st.composite
def calls(draw):
    """Shapes that broadcast, with dropped and stretched axes, GQA, masks of both kinds."""
    m, n = draw(LENGTH), draw(LENGTH)
    d, e = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    heads_k = draw(st.integers(1, 3))
    heads = heads_k * draw(st.integers(1, 3))
    batch = draw(AXES)
    shapes = []
    for sizes, own_heads in (((m, d), heads), ((n, d), heads_k), ((n, e), heads_k)):
        lead = [draw(st.sampled_from([1, size])) for size in batch] + [own_heads]
        lead = lead[draw(st.integers(0, len(batch))) :] if all(x == 1 for x in lead[:-1]) else lead
        shapes.append((*lead, *sizes))
    mask = draw(st.sampled_from([None, na.Causal(), na.Causal(0), na.Window(3, 5), na.Lengths(n // 2, m // 2)]))
    dropout = draw(st.sampled_from([None, na.Dropout(0.3, seed=1)]))
    return shapes, mask, dropout


@settings(max_examples=40, deadline=None, derandomize=True)
@given(call=calls(), dtype=st.sampled_from(DTYPES))
@example(call=([(2, 1, 1, 1, 4), (1, 2, 1, 15, 4), (1, 1, 1, 15, 6)], None, None), dtype=np.dtype(np.float32))
def test_broadcasting(xp, call, dtype):
    shapes, mask, dropout = call
    rng = np.random.default_rng(1)
    q, k, v = (random(rng, shape, dtype) for shape in shapes)
    # tensor cores multiply 22 bits of float32, which few terms do not average
    bits = 8 if xp is not np and dtype == np.float32 else 4
    o, _, _ = check(q, k, v, rng, xp, bits, mask=mask, dropout=dropout)
    lead = np.broadcast_shapes(*(shape[:-3] for shape in shapes))
    assert o.shape == (*lead, shapes[0][-3], q.shape[-2], v.shape[-1])


@pytest.mark.parametrize(("q_shape", "k_shape", "v_shape", "o_shape"), [
    ((5, 8), (7, 8), (7, 3), (5, 3)),                           # one matrix each
    ((4, 5, 8), (7, 8), (7, 3), (4, 5, 3)),                     # k and v serve all heads
    ((5, 8), (4, 7, 8), (4, 7, 3), (4, 5, 3)),                  # q serves all heads
    ((1, 5, 8), (4, 7, 8), (1, 7, 3), (4, 5, 3)),
    ((2, 1, 6, 5, 8), (3, 2, 7, 8), (1, 3, 1, 7, 3), (2, 3, 6, 5, 3)),
    ((0, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 3), (0, 4, 5, 3)),   # no batch at all
    ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 3), (2, 0, 5, 3)),   # no heads
])  # fmt: skip
def test_shapes(rng, xp, q_shape, k_shape, v_shape, o_shape):
    o, lse, _ = check(*(random(rng, s, np.float64) for s in (q_shape, k_shape, v_shape)), rng, xp, causal=True)
    assert o.shape == o_shape
    assert lse.shape == o_shape[:-1]


def test_other_heads_than_groups(rng, xp):
    """Query head h uses key head h // group_size."""
    q, k, v = map(xp.asarray, qkv(rng, heads=6, heads_k=2))
    o = to_numpy(na.attention(q, k, v))
    for h in range(6):
        alone = na.attention(q[:, h], k[:, h // 3], v[:, h // 3])
        np.testing.assert_allclose(o[:, h], to_numpy(alone), atol=1e-6)


VIEWS = {
    "sequence before heads": lambda x: x.swapaxes(-2, -3).copy().swapaxes(-2, -3),
    "transposed": lambda x: x.swapaxes(-2, -1).copy().swapaxes(-2, -1),
    "reversed": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "reversed features": lambda x: x[..., ::-1].copy()[..., ::-1],
    "reversed batch": lambda x: x[::-1].copy()[::-1],
    "every other row": lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
    "every other feature": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "columns of a wider array": lambda x: np.concatenate([x, x], axis=-1)[..., : x.shape[-1]],
    "columns from the second": lambda x: np.concatenate([x[..., :1], x], axis=-1)[..., 1:],
}
NUMPY_VIEWS = {
    "unaligned": lambda x: np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("name", VIEWS)
def test_strides(rng, xp, name, dtype):
    _assert_same_results(VIEWS[name], *map(xp.asarray, qkv(rng, dtype, m=40, n=50)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("name", NUMPY_VIEWS)
def test_numpy_views(rng, name, dtype):
    _assert_same_results(NUMPY_VIEWS[name], *qkv(rng, dtype, m=40, n=50))


def _assert_same_results(view, q, k, v):
    o, saved = na.attention_forward(q, k, v, causal=True)
    grads = na.attention_backward(o, saved)
    o_view, saved_view = na.attention_forward(*map(view, (q, k, v)), causal=True)
    assert_equal(o_view, o)
    for got, want in zip(na.attention_backward(view(o), saved_view), grads):
        assert_equal(got, want)


def test_broadcast_views(rng, xp):
    """Views with stride 0 get the gradient of each of their elements, as any array of their shape."""
    kv, q = random(rng, (2, 1, 1, 20, 8), np.float64), random(rng, (1, 1, 20, 8), np.float64)
    check(*(np.broadcast_to(xp.asarray(x), (3, 2, 20, 8)) for x in (q, *kv)), rng, xp)


def test_masks_of_any_strides(rng, xp):
    q, k, v = qkv(rng, m=40, n=64)
    visible = xp.asarray(rng.random((64, 40, H, B)) < 0.5)
    check(q, k, v, rng, xp, mask=na.Dense(visible.T))
    words = na.Bits.pack(visible.T).words
    check(q, k, v, rng, xp, mask=na.Bits(np.repeat(words, 2, axis=-1)[..., ::2]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing(rng, xp, dtype):
    visible = rng.random((B, H, M, N)) < 0.05
    visible[:, :, 10:100] = False
    visible[1, 2] = False
    o, lse, (dq, dk, dv) = check(*qkv(rng, dtype), rng, xp, mask=na.Dense(visible))
    assert not o[:, :, 10:100].any()
    assert np.isneginf(lse[:, :, 10:100]).all()
    for gradient in (dq[:, :, 10:100], dk[1, 2], dv[1, 2]):
        assert not gradient.any()


def test_gradient_of_lse_is_ignored_where_nothing_is_seen(rng, xp):
    q, k, v = map(xp.asarray, qkv(rng))
    mask = na.Lengths(keys=np.array([[0], [N]])) & na.Causal(offset=-5)  # nobody, and some among others
    o, saved = na.attention_forward(q, k, v, mask=mask)
    dlse = xp.where(xp.isneginf(saved.lse), np.nan, 1).astype(np.float32)
    assert xp.isnan(dlse).any()
    for gradient in na.attention_backward(xp.zeros_like(o), saved, dlse=dlse):
        assert xp.isfinite(gradient).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("extra", [na.Causal(), na.Window(40, 9), na.BlockSparse.butterfly((1, 1, M, N))], ids=repr)
def test_beyond_lengths_nothing_leaks(rng, xp, poison, extra):
    q, k, v = qkv(rng)
    keys, queries = np.array([[17], [200]]), np.array([[M], [33]])
    for b in range(B):
        k[b, :, keys[b, 0] :] = v[b, :, keys[b, 0] :] = poison
        q[b, :, queries[b, 0] :] = poison
    check(q, k, v, rng, xp, mask=na.Lengths(keys, queries) & extra)


def test_a_visible_nan_is_not_hidden(rng, xp):
    q, k, v = map(xp.asarray, qkv(rng))
    q[0, 0, 5] = np.nan
    o, saved = na.attention_forward(q, k, v)
    o, lse = to_numpy(o), to_numpy(saved.lse)
    assert np.isnan(o[0, 0, 5]).all()
    assert np.isnan(lse[0, 0, 5])
    assert np.isfinite(np.delete(o[0, 0], 5, axis=0)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_scores(rng, xp, dtype):
    """Scores of +-1e4 and rows whose maximum comes last.

    P is made again from lse, which has one rounding of its own: with scores of 1e4 that is 1e4 last bits of P where
    dtype is that of lse. For float16 and bfloat16 it is nothing.
    """
    q, k, v = qkv(rng, dtype, d=16)
    q[..., 0], k[..., 0] = 100, np.linspace(-100, 100, N)
    bits = 4 if dtype.itemsize == 2 else 1e4
    check(q, k, v, rng, xp, bits, scale=1.0)
    check(-q, k, v, rng, xp, bits, scale=1.0, causal=True)


@pytest.mark.parametrize("scale", [1e-30, 0.3, np.float32(2), 10])
def test_scale(rng, xp, scale):
    check(*qkv(rng), rng, xp, bits=max(4, 20 * scale), scale=scale)  # see test_extreme_scores


# ------------------------------------------------------------------------------------------------------------ dropout
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_drops_what_dropout_mask_shows(xp, dtype):
    """With v columns of the unit matrix o is those of P, dropped; with do in its place dv is those of P^T, dropped."""
    n = 290
    dropout = na.Dropout(0.4, seed=123456789, offset=3)
    q, k = xp.zeros((2, 2, 3, n, 8), dtype)
    kept = na.dropout_mask(dropout, (2, 3, n, n))
    for columns in (slice(0, 145), slice(145, n)):
        eye = np.broadcast_to(xp.asarray(np.eye(n, dtype=dtype)[:, columns]), (2, 3, n, 145))
        o, saved = na.attention_forward(q, k, eye, dropout=dropout)
        assert_equal(to_numpy(o) != 0, kept[..., columns])
        _, _, dv = na.attention_backward(eye, saved)
        assert_equal(to_numpy(dv) != 0, kept.swapaxes(-2, -1)[..., columns])


def test_dropout_keeps_the_mean(rng, xp):
    q, k, v = map(xp.asarray, qkv(rng, np.float64, batch=(1,), heads=1, heads_k=1, m=8, n=64))
    o = to_numpy(na.attention(q, k, v))
    draws = [to_numpy(na.attention(q, k, v, dropout=na.Dropout(0.5, 1, offset))) for offset in range(4000)]
    error = (np.mean(draws, axis=0) - o) / (np.std(draws, axis=0) / np.sqrt(len(draws)))
    assert np.abs(error).max() < 5
    assert np.sqrt(np.mean(error**2)) == pytest.approx(1, abs=0.3)


def test_dropout_leaves_lse(rng, xp):
    q, k, v = map(xp.asarray, qkv(rng))
    _, saved = na.attention_forward(q, k, v)
    _, dropped = na.attention_forward(q, k, v, dropout=na.Dropout(0.9, 1))
    assert_equal(saved.lse, dropped.lse)


# ---------------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("options", [
    {},
    {"causal": True},
    {"mask": na.Window(20, 3), "scale": 0.7},
    {"mask": na.Lengths(200, 250)},
    {"dropout": na.Dropout(0.3, 11)},
    {"mask": na.BlockSparse.butterfly((1, 1, 280, 270), (32, 32)) & na.Causal(), "dropout": na.Dropout(0.1, 2)},
], ids=str)  # fmt: skip
def test_gradients_by_finite_differences(rng, xp, options):
    x = qkv(rng, np.float64, batch=(1,), heads=2, heads_k=1, m=280, n=270, d=7, e=5)

    def loss(*x):
        o, saved = na.attention_forward(*map(xp.asarray, x), **options)
        o, lse = to_numpy(o), to_numpy(saved.lse)
        return np.vdot(o, do) + np.vdot(np.where(np.isfinite(lse), lse, 0), dlse)

    o, saved = na.attention_forward(*map(xp.asarray, x), **options)
    do, dlse = random(rng, o.shape, np.float64), random(rng, saved.lse.shape, np.float64)
    grads = map(to_numpy, na.attention_backward(xp.asarray(do), saved, dlse=xp.asarray(dlse)))
    for i, grad in enumerate(grads):
        step = [np.zeros_like(y) for y in x]
        step[i] = random(rng, x[i].shape, np.float64)
        h = 1e-5
        ahead, behind = (loss(*(y + sign * h * s for y, s in zip(x, step))) for sign in (1, -1))
        np.testing.assert_allclose(np.vdot(grad, step[i]), (ahead - behind) / (2 * h), rtol=1e-6)


def test_vjp(rng, xp):
    q, k, v = map(xp.asarray, qkv(rng))
    options = {"causal": True, "mask": na.Window(50, 0), "scale": 0.1, "dropout": na.Dropout(0.1, seed=1)}
    o, backprop = na.attention_vjp(q, k, v, **options)
    want, saved = na.attention_forward(q, k, v, **options)
    assert_equal(o, want)
    dlse = xp.ones_like(saved.lse)
    for got, expected in zip(backprop(o, dlse=dlse), na.attention_backward(o, saved, dlse=dlse)):
        assert_equal(got, expected)


def test_gradients_of_other_dtypes_are_converted(rng, xp):
    """As autograd hands them back."""
    o, saved = na.attention_forward(*map(xp.asarray, qkv(rng)))
    do, dlse = random(rng, o.shape, np.float64), random(rng, saved.lse.shape, np.float64)
    want = na.attention_backward(xp.asarray(do.astype(np.float32)), saved, dlse=xp.asarray(dlse.astype(np.float32)))
    for got, expected in zip(na.attention_backward(xp.asarray(do), saved, dlse=xp.asarray(dlse)), want):
        assert got.dtype == np.float32
        assert_equal(got, expected)


def test_saved_of_arrays(rng, xp):
    q, k, v = map(xp.asarray, qkv(rng, heads_k=2))
    options = {"mask": MASKS["lengths"](rng), "scale": 0.1, "dropout": na.Dropout(0.1, seed=1)}
    o, saved = na.attention_forward(q, k, v, **options)
    again = na.Saved.of(q, k, v, o, saved.lse, **options)
    rounded = replace(saved, lse_low=None)  # arrays tell nothing of what rounding took from lse
    for got, expected in zip(na.attention_backward(o, again), na.attention_backward(o, rounded)):
        assert_equal(got, expected)
    assert saved == saved
    assert saved != again
    assert len({saved, again, saved}) == 2
    assert repr(again) == (f"<Saved: q {q.shape}, k {k.shape}, v {v.shape}, float32, {xp.__name__}>")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights(rng, xp, dtype):
    """Times v they are the output; without dropout a row sums to 1, or to 0 if it sees nothing."""
    q, k, v = map(xp.asarray, qkv(rng, dtype, heads_k=2))
    options = {"mask": MASKS["lengths"](rng), "scale": 0.1}
    weights = na.attention_weights(q, k, **options)
    assert (weights.shape, weights.dtype) == ((B, H, M, N), dtype)
    tolerance = 8 * float(ml_dtypes.finfo(dtype).eps)
    sums, seen = to_numpy(weights).astype(np.float64).sum(-1), to_numpy(na.attention_forward(q, k, v, **options)[1].lse)
    np.testing.assert_allclose(sums, np.isfinite(seen), atol=tolerance)
    options["dropout"] = na.Dropout(0.3, seed=2)
    weights = to_numpy(na.attention_weights(q, k, **options)).astype(np.float64)
    o = weights @ np.repeat(to_numpy(v).astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(o, to_numpy(na.attention(q, k, v, **options)).astype(np.float64), atol=4 * tolerance)


def test_weights_compile_a_function(xp):
    """As attention does: a division by zero is no error, least of all where it is masked."""
    def function(s, batch, head, i, j, x):
        return s + head * x[j] / (i - j)

    q = xp.zeros((2, 200, 8), np.float64)
    score = na.Score(function, arrays=[np.arange(200.0)])
    weights = na.attention_weights(q, q, mask=~np.eye(200, dtype=bool), score=score)
    sums = to_numpy(na.attention(q, q, xp.asarray(np.eye(200)), mask=~np.eye(200, dtype=bool), score=score))
    np.testing.assert_allclose(to_numpy(weights), sums, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [
    {"mask": na.Lengths(np.array([[9], [5], [1]]))},
    {"mask": na.Segments([[[0, 3, 9]], [[0, 5, 9]]]) & na.Causal()},
    {"mask": np.random.default_rng(0).random((4, 1, 9)) < 0.5, "score": na.Alibi(np.ones(4))},
    {"score": [na.Bias(np.ones((3, 1, 9, 9))), na.Softcap(2.0), na.RelativeBias(np.ones((4, 3)))]},
], ids=["lengths", "segments", "booleans", "scores"])  # fmt: skip
def test_weights_take_what_attention_takes(rng, options):
    """Batch axes that v brings, and not q and k."""
    q, k = rng.standard_normal((2, 9, 8))
    weights = na.attention_weights(q, k, **options)
    lead = np.broadcast_shapes(weights.shape[:-2], (2, 1) if "mask" in options and weights.shape[0] == 2 else ())
    v = rng.standard_normal((*lead, 9, 5))
    np.testing.assert_allclose(weights @ v, na.attention(q, k, v, **options), rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match=r"mask: Lengths keys: got the shape \(2, 1\), expected"):
        na.attention_weights(np.zeros((3, 4, 9, 8)), k, mask=na.Lengths(np.array([[1], [2]])))


def test_backward_twice(rng, xp):
    """backprop may be called again, and leaves what it was given."""
    q, k, v = map(xp.asarray, qkv(rng))
    copies = [x.copy() for x in (q, k, v)]
    o, saved = na.attention_forward(q, k, v, causal=True)
    first = na.attention_backward(o, saved)
    for a, b in zip(first, na.attention_backward(o, saved, deterministic=True)):
        assert_equal(a, b)
    for a, b in zip(copies, (q, k, v)):
        assert_equal(a, b)


# ---------------------------------------------------------------------------------------------------------------- out
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out(rng, xp, dtype):
    q, k, v = map(xp.asarray, qkv(rng, dtype))
    out = xp.asarray(np.full((B, M, H, 24), np.nan, dtype)).swapaxes(1, 2)
    o, saved = na.attention_forward(q, k, v, out=out)
    assert o is out
    assert saved.o is out
    want = na.attention(q, k, v)
    assert_equal(out, want)
    out[...] = np.nan
    o, backprop = na.attention_vjp(q, k, v, out=out)
    assert o is out
    assert_equal(out, want)
    out[...] = np.nan
    assert na.attention(q, k, v, out=out) is out
    assert_equal(out, want)


def test_results_are_new_arrays(rng, xp):
    q, k, v = map(xp.asarray, qkv(rng, np.float64))
    o, saved = na.attention_forward(q, k, v)
    grads = na.attention_backward(o, saved)
    for result in (o, saved.lse, *grads):
        assert xp is not np or result.flags.writeable
        assert result.flags.c_contiguous
        assert not any(np.shares_memory(result, x) for x in (q, k, v))


def test_long_sequences_do_not_lose_digits(rng, xp):
    """Sums over 20000 keys are as good as the plain formula's."""
    check(*qkv(rng, batch=(1,), heads=1, heads_k=1, m=3, n=20000), rng, xp)

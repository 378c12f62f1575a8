"""Decoding, in the spirit of the suites of FlashAttention 2 and 3, FlashInfer and FlashMLA: their cases and tolerances.

What is in memory is compared bit for bit. Errors are at most twice the largest and 1.5 times the mean one of the plain
formula in the same dtype.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from tests.accuracy import assert_equal, plain, to_numpy

from .test_kv_cache import laid_out

BFLOAT16, FLOAT8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
HEADS, CAPACITY = 6, 512


def random(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(dtype)


def on(xp, cache, **changed):
    """The same on arrays of xp."""
    arrays = {name: getattr(cache, name) for name in ("k", "v", "lengths", "table")} | changed
    return na.KVCache(**{name: None if x is None else xp.asarray(x) for name, x in arrays.items()})


def assert_accurate(got, want, formula):
    assert got.dtype == formula.dtype
    error, allowed = (abs(x.astype(np.float64) - want) for x in (to_numpy(got), formula))
    assert error.max() <= 2 * allowed.max() + 1e-6  # of float32 the largest errors are chance
    assert error.mean() <= 1.5 * allowed.mean()


def assert_attends(q, sequences, options, o, lse):
    """To these keys and values of each sequence, with these options of each."""
    exact, formula = [], []
    for q_b, kv, how in zip(q, sequences, options, strict=True):
        exact.append(reference.attention_forward(*(x.astype(np.float64) for x in (q_b, *kv)), **how))
        do = np.zeros((*q_b.shape[:-1], kv[1].shape[-1]), q.dtype)
        formula.append(plain(do, q_b, *(x.astype(q.dtype) for x in kv), **how)[0])
    want, want_lse = map(np.stack, zip(*exact))
    assert_accurate(o, want, np.stack(formula))
    np.testing.assert_allclose(to_numpy(lse), want_lse, rtol=1e-5, atol=1e-5)


def options(kind, padding):
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"mask": na.Window(31, 2)},
        "alibi": {"score": na.Alibi(np.geomspace(0.004, 0.5, HEADS)), "causal": True},
        "left padding": {"mask": na.Causal() & na.Intervals(padding, np.full_like(padding, CAPACITY))},
    }[kind]


@pytest.mark.parametrize(("dtype", "head_dim", "heads_k", "seqlen_q", "new", "page_size", "kind"), [
    (BFLOAT16, 64, 6, 1, 1, None, "causal"), (BFLOAT16, 128, 3, 1, 0, 16, "full"),
    (BFLOAT16, 96, 1, 64, 33, 256, "alibi"), (BFLOAT16, 59, 3, 16, 5, 1, "left padding"),
    (BFLOAT16, 256, 2, 128, 64, 16, "causal"), (np.float16, 128, 3, 3, 9, 16, "window"),
    (np.float16, 32, 1, 8, 2, None, "alibi"),
    (np.float16, 160, 6, 1, 4, CAPACITY, "left padding"), (np.float16, 224, 2, 25, 300, 256, "window"),
])  # fmt: skip
def test_append_and_attend(rng, xp, dtype, head_dim, heads_k, seqlen_q, new, page_size, kind):
    """New keys, as many as there are, to sequences of lengths down to 0, in pages in any order, NaN behind them."""
    batch, seed = 5, rng.integers(2**32)
    before, counts = rng.integers(0, CAPACITY - new, batch), rng.integers(0, new + 1, batch)
    before[:2], counts[:2] = 0, [0, new]
    lengths = before + counts
    k, v = (random(rng, dtype, batch, heads_k, CAPACITY, head_dim) for _ in range(2))
    is_new = (np.arange(CAPACITY) >= before[:, None])[:, None, :, None]
    want = laid_out(np.random.default_rng(seed), k, v, lengths, page_size)
    held = (np.where(is_new, np.asarray(np.nan, dtype), x) for x in (k, v))
    cache = on(xp, laid_out(np.random.default_rng(seed), *held, lengths, page_size), lengths=before.astype(np.int32))
    packed = (xp.asarray(np.concatenate([x[b, :, before[b] : n] for b, n in enumerate(lengths)], 1)) for x in (k, v))
    cache.append(*packed, segments=np.cumsum([0, *counts]))
    for name in ("k", "v", "lengths"):
        assert_equal(*(getattr(x, name).view(f"u{getattr(want, name).itemsize}") for x in (cache, want)))
    q, padding = random(rng, dtype, batch, HEADS, seqlen_q, head_dim), rng.integers(0, 40, (batch, 1, 1))
    padding = np.broadcast_to(padding, (batch, 1, seqlen_q))
    o, saved = na.attention_forward(xp.asarray(q), cache, **options(kind, padding))
    sequences = [(k[b, :, :n], v[b, :, :n]) for b, n in enumerate(lengths)]
    assert_attends(q, sequences, [options(kind, padding[b]) for b in range(batch)], o, saved.lse)


@pytest.mark.parametrize(("dtype", "page_size"), [(np.int8, None), (np.int8, 16), (FLOAT8, None), (FLOAT8, 64)])
def test_8_bits(rng, xp, dtype, page_size):
    """As of what has been quantised, which NumPy's cache says."""
    k, v = random(rng, BFLOAT16, 2, 3, 2, 300, 128)
    caches = [na.KVCache.zeros(3, 2, 300, 128, like=x.zeros(0), dtype=dtype, page_size=page_size) for x in (np, xp)]
    for library, cache in zip((np, xp), caches):
        cache.append(library.asarray(k), library.asarray(v))
        cache.truncate([300, 0, 77])
    q = random(rng, BFLOAT16, 3, HEADS, 4, 128)
    o, saved = na.attention_forward(xp.asarray(q), caches[1], causal=True)
    sequences = [(x[:, :n], y[:, :n]) for x, y, n in zip(*caches[0]._dense(), (300, 0, 77))]
    assert_attends(q, sequences, [{"causal": True}] * 3, o, saved.lse)


@pytest.mark.parametrize("seqlen_q", [1, 2])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (576, 512)])
def test_latent_attention(rng, xp, seqlen_q, head_dim, head_dim_v):
    """One key head, whose values are a part of its keys."""
    if xp is not np and head_dim > 256:
        pytest.skip("on a GPU head_dim is at most 256")
    k, lengths = random(rng, BFLOAT16, 4, 1, 400, head_dim), [0, 1, 64, 333]
    cache = on(xp, laid_out(rng, k, k, lengths, 64))
    cache = na.KVCache(cache.k, cache.k[..., :head_dim_v], cache.lengths, cache.table)
    q = random(rng, BFLOAT16, 4, 16, seqlen_q, head_dim)
    o, saved = na.attention_forward(xp.asarray(q), cache, causal=True)
    assert not to_numpy(o)[0].any()
    assert (to_numpy(saved.lse)[0] == -np.inf).all()
    sequences = [(k[b, :, :n], k[b, :, :n, :head_dim_v]) for b, n in enumerate(lengths)]
    assert_attends(q, sequences, [{"causal": True}] * 4, o, saved.lse)


def test_trees(rng, xp):
    """Guessed tokens, behind prompts of any length, see the prompt, themselves and their ancestors."""
    lengths, nodes = [0, 1, 100, 257], 12
    parents = np.array([[rng.integers(-1, node) if node else -1 for node in range(nodes)] for _ in lengths])
    trees = np.tile(np.eye(nodes, dtype=bool), (len(lengths), 1, 1))
    for tree, (node, parent) in itertools.product(range(len(lengths)), enumerate(parents.T)):
        if parent[tree] >= 0:
            trees[tree, node] |= trees[tree, parent[tree]]
    k, v = random(rng, BFLOAT16, 2, len(lengths), 2, 300, 64)
    q = random(rng, BFLOAT16, len(lengths), HEADS, nodes, 64)
    cache = on(xp, laid_out(rng, k, v, [n + nodes for n in lengths], 16))
    o, saved = na.attention_forward(xp.asarray(q), cache, mask=na.Tail(na.Bits.tree(parents[:, None])))
    sequences = [(k[b, :, : n + nodes], v[b, :, : n + nodes]) for b, n in enumerate(lengths)]
    masks = [{"mask": np.hstack([np.ones((nodes, n), bool), tree])} for n, tree in zip(lengths, trees)]
    assert_attends(q, sequences, masks, o, saved.lse)


def test_shared_prefix(rng, xp):
    """Read once for all sequences, merged with what each has of its own, be it nothing: to FlashInfer's tolerance."""
    lengths, prefix = [0, 1, 33, 200], random(rng, np.float16, 2, 1, 2, 150, 128)
    k, v = random(rng, np.float16, 2, 4, 2, 200, 128)
    q = random(rng, np.float16, 4, HEADS, 1, 128)
    parts = (xp.asarray(prefix[0]), xp.asarray(prefix[1])), (on(xp, laid_out(rng, k, v, lengths, 16)),)
    states = [na.attention_forward(xp.asarray(q), *part) for part in parts]
    o, lse = na.merge([(o, saved.lse) for o, saved in states])
    for b, n in enumerate(lengths):
        both = (np.concatenate([x[0], y[b, :, :n]], 1) for x, y in zip(prefix, (k, v)))
        want, want_lse = reference.attention_forward(q[b], *both)
        np.testing.assert_allclose(to_numpy(o)[b].astype(float), want, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(to_numpy(lse)[b], want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 17, 32, 55, 97, 133])
def test_combine(rng, xp, splits, dtype):
    """Partial results of which some are empty, whatever they hold, for some queries all."""
    o, lse = random(rng, dtype, splits, 2, 3, 16, 64), random(rng, np.float32, splits, 2, 3, 16)
    lse[rng.random(lse.shape) < 0.3] = lse[:, 0, 0, :4] = -np.inf
    o[lse == -np.inf] = np.nan

    def weighted(real):
        parts, lses = np.where(np.isneginf(lse)[..., None], 0, o).astype(real), lse.astype(real)
        weights = np.exp(lses - lses.max(0, initial=-1e30))
        return (weights[..., None] * parts).sum(0) / np.maximum(weights.sum(0), 1e-30)[..., None]

    got, got_lse = na.merge([(xp.asarray(x), xp.asarray(y)) for x, y in zip(o, lse)])
    assert_accurate(got, weighted(np.float64), weighted(np.float32).astype(dtype))
    np.testing.assert_allclose(to_numpy(got_lse), np.logaddexp.reduce(lse.astype(np.float64)), rtol=1e-6, atol=1e-6)
    assert not to_numpy(got)[0, 0, :4].any()


@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_bits_depend_neither_on_the_batch_nor_on_pages(rng, xp, seqlen_q):
    lengths = [1, 700, 0, 1300, 64]
    k, v = random(rng, BFLOAT16, 2, 5, 2, 1400, 64)
    q = xp.asarray(random(rng, BFLOAT16, 5, HEADS, seqlen_q, 64))
    wanted = [na.attention(q, on(xp, laid_out(rng, k, v, lengths, size)), causal=True) for size in (None, 16, 256)]
    for b, n in enumerate(lengths):
        one = slice(b, b + 1)
        alone = na.attention(q[one], on(xp, laid_out(rng, k[one, :, :n], v[one, :, :n], [n], 16)), causal=True)
        for want in wanted:
            assert_equal(want[one], alone)

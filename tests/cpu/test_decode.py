"""Few queries against many keys."""

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.cpu import decode, launch

N = 2 * decode.CHUNK + decode.TILE_N + 37  # three chunks
HALVES = np.float16, ml_dtypes.bfloat16


def inputs(rng, dtype=np.float32, heads=4, heads_k=2, seqlen_q=2, seqlen_k=N, head_dim=20, batch=1):
    q = rng.standard_normal((batch, heads, seqlen_q, head_dim)).astype(dtype)
    k, v = rng.standard_normal((2, batch, heads_k, seqlen_k, head_dim)).astype(dtype)
    return q, k, v


@pytest.fixture
def threaded(monkeypatch):
    """Several threads, however little there is to do."""
    monkeypatch.setattr(launch, "SERIAL", 1)
    monkeypatch.setattr(launch, "_threads", lambda: 3)


def options(rng):
    visible = rng.random((2, N)) < 0.5
    yield {}
    yield {"causal": True}
    yield {"mask": na.Window(1200, 0)}
    yield {"mask": na.Lengths(keys=np.array([[5, N, 1500, 0]]))}  # heads of one group see other keys
    yield {"mask": visible}
    yield {"mask": na.BlockSparse(np.arange(-(-N // 256)) % 5 == np.full((1, 1, 1, 1), 2), (2, 256))}
    yield {"mask": na.Causal() & (na.Window(99, 0) | na.Lengths(keys=4))}
    yield {"mask": na.Segments([0, 1, 2], [0, 1500, N])}
    yield {"mask": na.Segments(np.array([[[0, 1, 2], [0, 2, 2]] * 2]), np.array([[[0, 1500, N]] * 4]))}
    yield {"score": [na.Softcap(2.0), na.Alibi(np.full((1, 4), 0.01)), na.Sink(np.full((1, 4), 3.0))], "causal": True}
    yield {"score": na.Bias(rng.standard_normal((4, 2, N))), "dropout": na.Dropout(0.3, 5)}


@pytest.mark.parametrize("number", range(11))
def test_all_that_can_be_asked_for(rng, number):
    given = list(options(rng))[number]
    q, k, v = inputs(rng)
    o, saved = na.attention_forward(q, k, v, **given)
    want, want_lse = reference.attention_forward(q, k, v, **given)
    np.testing.assert_allclose(saved.lse, want_lse, atol=2e-5)
    np.testing.assert_allclose(o, want, atol=2e-5)


@pytest.mark.parametrize("dtype", [*HALVES, np.float64])
def test_dtypes(rng, dtype):
    q, k, v = inputs(rng, dtype)
    o, saved = na.attention_forward(q, k, v)
    want, want_lse = reference.attention_forward(q, k, v)
    np.testing.assert_allclose(saved.lse, want_lse, atol=1e-12 if dtype == np.float64 else 1e-5)
    np.testing.assert_allclose(o.astype(float), want, atol=1e-12 if dtype == np.float64 else 2e-3)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("seqlen_q", [1, decode.FEW + 1])
def test_half_precision_is_read_as_it_lies(rng, monkeypatch, dtype, seqlen_q):
    from numbattn.cpu import bfloat16, operands

    monkeypatch.setattr(bfloat16, "has_pairs", lambda: False)
    q, k, v = inputs(rng, dtype, seqlen_q=seqlen_q)
    assert operands.readable(k, k.dtype) is k
    want = na.attention(*(x.astype(np.float32) for x in (q, k, v))).astype(dtype)
    np.testing.assert_array_equal(na.attention(q, k, v), want)


@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_a_sequence_alone_and_in_a_batch_of_another_capacity(rng, threaded, seqlen_q):
    q, k, v = inputs(rng, batch=5, seqlen_q=seqlen_q)
    lengths = np.array([N, 3, decode.CHUNK, 1700, seqlen_q])
    o, saved = na.attention_forward(q, k, v, mask=na.Lengths(keys=lengths[:, None]))
    for b, n in enumerate(lengths):
        for heads in (slice(0, 4), slice(0, 1), slice(2, 4)):
            group = slice(heads.start // 2, (heads.stop + 1) // 2)
            alone, saved_alone = na.attention_forward(q[b, heads], k[b, group, :n], v[b, group, :n])
            np.testing.assert_array_equal(alone, o[b, heads])
            np.testing.assert_array_equal(saved_alone.lse, saved.lse[b, heads])


def test_threads_do_not_matter(rng, monkeypatch):
    q, k, v = inputs(rng, batch=3)
    alone = na.attention(q, k, v)
    monkeypatch.setattr(launch, "SERIAL", 1)
    monkeypatch.setattr(launch, "_threads", lambda: 3)
    np.testing.assert_array_equal(na.attention(q, k, v), alone)


def test_large_scores(rng):
    q, k, v = inputs(rng)
    o, saved = na.attention_forward(1000 * q, k, v)
    want, want_lse = reference.attention_forward(1000 * q, k, v)
    np.testing.assert_allclose(saved.lse, want_lse, rtol=1e-6)
    np.testing.assert_allclose(o, want, atol=5e-3)


def test_nan_beyond_a_heads_own_length_does_not_matter(rng):
    q, k, v = inputs(rng)
    k[:, 0, 100:], v[:, 0, 100:] = np.nan, np.nan
    o = na.attention(q, k, v, mask=na.Lengths(keys=np.array([[100, N, N, N]])))
    assert np.isfinite(o[:, 0]).all()
    assert np.isnan(o[:, 1]).all()


def test_who_sees_nothing(rng):
    q, k, v = inputs(rng)
    o, saved = na.attention_forward(q, k, v, mask=na.Lengths(keys=0))
    assert (o == 0).all()
    assert (saved.lse == -np.inf).all()


FAULTS = {
    "head % packed == 0": "head >= 0",
    "segment + (block - begin) * CHUNK": "segment",
    "begin + 1, begin + chunks)": "begin + 1, begin + 1)",
    "seen_by(mask, batch, other, m0, m_end, first, end) == seen": "True",
    "first - (first - origin) % TILE_N": "first",
    "fill(S[keys : whole * LANES], -np.inf)": "pass",
    "lanes[width + i] if lanes[width + i] > lanes[i] else lanes[i]": "lanes[i]",
    "lanes[i] += lanes[width + i]": "pass",
}

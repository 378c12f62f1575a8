"""What NumPy is told to do about floating-point errors changes no call: numbers that are too small become 0."""

import math
import warnings

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import distributed as nad
from numbattn import reference

HALF = np.float16


@np.errstate(all="ignore")
def small(rng, *shape, dtype=np.float32, size=1.0):
    """Random numbers of many magnitudes, all of them at most of this size."""
    return (size * rng.standard_normal(shape) * 10.0 ** -rng.integers(0, 8, shape)).astype(dtype)


@np.errstate(all="ignore")
def inputs(rng, m=20, n=20, dtype=np.float32, heads=2):
    """q, k, v and do; scores differ by some hundreds, and v and do are small."""
    q, k = (100 * rng.standard_normal((1, heads, size, 8)).astype(dtype) for size in (m, n))
    return q, k, small(rng, 1, heads, n, 8, dtype=dtype), small(rng, 1, heads, m, 8, dtype=dtype)


def both_passes(*given, **options):
    q, k, v, do = given
    o, saved = na.attention_forward(q, k, v, **options)
    grads = na.attention_backward(do, saved, dlse=np.full(saved.lse.shape, 1e-30, saved.lse.dtype))
    return o, saved.lse, *grads, *(x for x in grads.score if x is not None)


def of_another_dtype(rng):
    *qkv, do = inputs(rng, dtype=HALF)
    return both_passes(*qkv, 1e-9 * do.astype(float))


def shared_keys(rng):
    q, k, v, do = inputs(rng, dtype=HALF)
    return both_passes(q, k[:, :1], v[:, :1], do)


def parts_of_score(rng, dtype=np.float64):
    return [na.Alibi(small(rng, 2, dtype=dtype)), na.Softcap(50.0), na.Bias(small(rng, 20, 20, dtype=dtype)),
            na.RelativeBias(small(rng, 2, 9, dtype=dtype)),
            na.Sink(small(rng, 2, dtype=dtype, size=1e-40))]  # fmt: skip


def squeezed(s, batch, head, i, j):
    return s * np.exp(-s * s)


def over_a_ring(rng, plan, dtype, **options):
    ring = nad.Simulated(2)
    q, k, v, do = (ring.split(x) for x in inputs(rng, dtype=dtype))
    o, backprop = nad.attention_vjp(ring, q, k, v, plan=plan, **options)
    grads = backprop(do)
    return *o, *(x for dx in grads for x in dx), *(x for dx in grads.score for x in dx if x is not None)


def with_a_cache(rng, dtype, tokens_dtype=np.float32, **scales):
    q, k, v, _ = inputs(rng, 2, 20, dtype=HALF if dtype is HALF else np.float32)
    cache = na.KVCache.zeros(1, 2, 30, 8, like=q, dtype=dtype)
    for name, scale in scales.items():
        getattr(cache, name)[...] = scale
    size = 1 if dtype is HALF else 1e-36
    cache.append(k.astype(tokens_dtype), small(rng, *v.shape, dtype=tokens_dtype, size=size))
    return (na.attention(q, cache, mask=na.Causal()),)


def merged(rng, dtype):
    o, do = small(rng, 3, 2, 20, 8, dtype=dtype), small(rng, 2, 20, 8, dtype=dtype)
    lse = 300 * rng.standard_normal((3, 2, 20)).astype(np.float32)
    lse[:, :, ::3] = lse[0] = -math.inf
    (o_all, lse_all), backprop = na.merge_vjp(zip(o, lse))
    pairs = backprop(do, small(rng, 2, 20, dtype=float, size=1e-36))
    return *na.merge(zip(o, lse)), o_all, lse_all, *(x for pair in pairs for x in pair)


def over_keys(rng):
    ring = nad.Simulated(2)
    q, k, v, _ = inputs(rng, 3, 20, dtype=HALF)
    return nad.attention_over_keys(ring, [q, q], ring.split(k), ring.split(v), causal=True, score=na.Sink(1e-30))


def ragged(rng, out):
    q, k, v, _ = inputs(rng, 5, 5, dtype=HALF)
    cache = na.KVCache.zeros(2, 2, 30, 8, like=q)
    cache.append(k[0], v[0], [0, 2, 5])
    return (na.attention(q[0], cache, mask=na.Segments([0, 2, 5]) & na.Causal(),
                         out=np.empty_like(q[0]) if out else None),)  # fmt: skip


def plainly(rng, **options):
    q, k, v, do = inputs(rng)
    grads = reference.attention_backward(do, q, k, v, **options)
    o = reference.attention_forward(q, k, v, **options)
    return *o, *grads, *(x for x in grads.score if x is not None), na.attention_weights(q, k, **options)


NOTHING = na.Lengths(keys=0) | na.Lengths(queries=0)
CALLS = {
    "float32": lambda rng: both_passes(*inputs(rng), causal=True),
    "float64": lambda rng: both_passes(*inputs(rng, dtype=float), causal=True),
    "float16": lambda rng: both_passes(*inputs(rng, dtype=HALF), causal=True),
    "bfloat16": lambda rng: both_passes(*inputs(rng, dtype=ml_dtypes.bfloat16), dropout=na.Dropout(0.3, 2**63, 7)),
    "one query": lambda rng: both_passes(*inputs(rng, 1, dtype=HALF)),
    "a gradient of another dtype": of_another_dtype,
    "out": lambda rng: (na.attention(*inputs(rng, dtype=HALF)[:3], out=np.empty((1, 2, 20, 8), HALF)),),
    "nothing is seen": lambda rng: both_passes(*inputs(rng), mask=NOTHING, score=na.Sink(3.0)),
    "minus infinity": lambda rng: both_passes(*inputs(rng), score=[na.Bias(np.full(20, -np.inf)), na.Softcap(9.0)]),
    "all scores": lambda rng: both_passes(*inputs(rng), score=parts_of_score(rng)),
    "all scores in float16": lambda rng: both_passes(*inputs(rng, dtype=HALF), score=parts_of_score(rng, HALF)),
    "a function": lambda rng: both_passes(*inputs(rng), score=na.Score(squeezed)),
    "packed": lambda rng: both_passes(*inputs(rng), mask=na.Segments([0, 7, 7, 20]) & na.Causal()),
    "shared keys": shared_keys,
    "merged": lambda rng: merged(rng, np.float32),
    "merged in float16": lambda rng: merged(rng, HALF),
    "the reference": lambda rng: plainly(rng, score=parts_of_score(rng), dropout=na.Dropout(0.5, 3)),
    "the reference where nothing is seen": lambda rng: plainly(rng, mask=NOTHING, score=na.Sink(1.0)),
    "the reference with a function": lambda rng: plainly(rng, score=na.Score(squeezed)),
    "weights": lambda rng: (na.attention_weights(*inputs(rng, dtype=HALF)[:2], causal=True),),
    "check_score": lambda rng: (np.array(na.check_score(na.Score(squeezed), spread=30.0)),),
    "a cache": lambda rng: with_a_cache(rng, HALF, HALF),
    "a cache of int8": lambda rng: with_a_cache(rng, np.int8),
    "a cache of int8, from float64": lambda rng: with_a_cache(rng, np.int8, float),
    "a cache of float8": lambda rng: with_a_cache(rng, ml_dtypes.float8_e4m3fn, k_scale=300.0, v_scale=9.0),
    "ragged queries": lambda rng: ragged(rng, out=False),
    "ragged queries, out": lambda rng: ragged(rng, out=True),
    "a ring": lambda rng: over_a_ring(rng, "ring", np.float32, score=parts_of_score(rng)),
    "a ring in float16": lambda rng: over_a_ring(rng, "ring", HALF, causal=True, score=parts_of_score(rng, HALF)),
    "by heads": lambda rng: over_a_ring(rng, "heads", np.float32, score=parts_of_score(rng)),
    "by heads in float16": lambda rng: over_a_ring(rng, "heads", HALF, causal=True, score=parts_of_score(rng, HALF)),
    "over keys": over_keys,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_no_floating_point_error(name, rng):
    """Nor a warning; and results are what they are without any of it."""
    state = rng.bit_generator.state
    with np.errstate(all="ignore"):
        wanted = CALLS[name](rng)
    rng.bit_generator.state = state
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        found = CALLS[name](rng)
    assert len(found) == len(wanted)
    for got, want in zip(found, wanted):
        np.testing.assert_array_equal(got, want)


def test_what_is_too_large_is_for_numpy_to_say(rng):
    """As everywhere: it is no fault of numbattn's."""
    q, k, v, do = rng.standard_normal((4, 1, 2, 20, 8)).astype(HALF)
    o, saved = na.attention_forward(q, k, 1000 * v)
    with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow encountered in cast"):
        na.attention_backward(1000 * do, saved)
    with np.errstate(over="ignore"):
        assert np.isinf(na.attention_backward(1000 * do, saved).dq).any()


FAULTS = {
    "base/values.py": {
        'with np.errstate(under="ignore"):': "if True:",
        "masks/test_bands.py": {
            "x = np.minimum(x, np.uint64(2**62))": "pass",
        },
    },
}

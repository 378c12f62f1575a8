"""Heads that are split give what they give on one device."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn import distributed as nad
from numbattn.distributed.rank import backward, forward
from numbattn.distributed.share import RingOptions

from .test_ring import MASKS, Strict, each, far, segments

BY_HEAD = {  # of rng, heads, m, n
    "lengths by head": lambda rng, h, m, n: na.Lengths(keys=rng.integers(0, n + 1, (1, h))),
    "window by head": lambda rng, h, m, n: na.Window(9, 2, rng.integers(-9, 9, (2, h))),
    "first by head": lambda rng, h, m, n: segments(rng, m, n) & na.First(rng.integers(0, n + 9, (1, h))),
    "prefix by head": lambda rng, h, m, n: na.Prefix(rng.integers(0, n + 1, (1, h)), 3),
    "segments by head": lambda rng, h, m, n: na.Segments(np.sort(rng.integers(0, min(m, n) + 1, (1, h, 4)), -1)),
    "intervals by head": lambda rng, h, m, n: na.Intervals(*np.sort(rng.integers(0, n + 1, (2, h, m)), axis=0)),
    "dense by head": lambda rng, h, m, n: na.Dense(rng.random((h, m, n)) < 0.4) | na.Causal(),
    "bits by head": lambda rng, h, m, n: na.Bits.pack(rng.random((2, h, m, n)) < 0.4),
    "blocks by head": lambda rng, h, m, n: na.BlockSparse(rng.random((1, h, -(-m // 48), -(-n // 20))) < 0.4, (48, 20)),
    "where by head": lambda rng, h, m, n: na.Where(near, [rng.integers(0, n + 1, h)], 16),
    "tail by head": lambda rng, h, m, n: na.Tail(rng.random((h, m, m)) < 0.4),
}
SCORES = {  # of rng, heads, m, n
    "none": lambda rng, h, m, n: None,
    "alibi": lambda rng, h, m, n: [na.Alibi(rng.random(h), offset=rng.integers(0, 9, (2, h))), na.Sink(rng.random(h))],
    "relative": lambda rng, h, m, n: [na.RelativeBias(rng.random((h, 21)), offset=0), na.Sink(0.5)],
    "bias": lambda rng, h, m, n: [na.Bias(rng.random((h, m, 1))), na.Bias(rng.random((1, n))), na.Softcap(3.0)],
    "function": lambda rng, h, m, n: [na.Score(far, arrays=[rng.random(m)], gradient=True),
                                      na.Alibi(0.1, gradient=False, offset=0)],
}


def near(batch, head, i, j, reach):
    return abs(i - j) <= reach[head] + batch


def assert_as_on_one_device(ring, q, k, v, rng, **options):
    o, saved = na.attention_forward(q, k, v, **options)
    do, dlse = rng.standard_normal(o.shape), rng.standard_normal(saved.lse.shape)
    grads = na.attention_backward(do, saved, dlse=dlse)
    split, join = ring.split, ring.join
    o_parts, saved_parts = nad.attention_forward(ring, *map(split, (q, k, v)), plan="heads", **options)
    found = nad.attention_backward(ring, split(do), saved_parts, dlse=split(dlse, -1))
    got = [join(o_parts), join([own.lse for own in saved_parts], -1), *map(join, found), *found.score]
    for one, other in zip(got, [o, saved.lse, *grads, *grads.score], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    *[st.sampled_from([0, 1, 31, 64, 100, 129])] * 2, st.integers(1, 5), st.integers(1, 2), st.integers(1, 2),
    st.sampled_from([*MASKS.keys() - {"dense"}, *BY_HEAD]), st.sampled_from(list(SCORES)), *[st.booleans()] * 3,
    st.integers(0, 99),
)  # fmt: skip
def test_as_on_one_device(m, n, ranks, times, group, mask, score, square, dropped, zigzag, seed):
    rng, heads_k, n = np.random.default_rng(seed), ranks * times, m if square else n
    heads = heads_k * group
    q, k, v = (rng.standard_normal((2, h, size, 8)) for h, size in ((heads, m), (heads_k, n), (heads_k, n)))
    options = {
        "mask": BY_HEAD[mask](rng, heads, m, n) if mask in BY_HEAD else MASKS[mask](rng, m, n), "scale": 0.4,
        "score": SCORES[score](rng, heads, m, n), "dropout": na.Dropout(0.3, seed, 4) if dropped else None,
    }  # fmt: skip
    assert_as_on_one_device(Strict(ranks, "zigzag" if zigzag else "contiguous"), q, k, v, rng, **options)


@pytest.mark.parametrize("shared", ["q", "k", "v"])
def test_heads_may_share_an_input(rng, shared):
    """Its gradient is the sum over ranks."""
    q, k, v = (rng.standard_normal((2, 1 if name == shared else 4, 70, 8)) for name in "qkv")
    assert_as_on_one_device(Strict(2), q, k, v, rng, score=na.Alibi(0.3), causal=True)


def test_two_functions_count_from_the_same_head(rng):
    q, k, v = rng.standard_normal((3, 1, 4, 40, 8))
    mask = na.Where(lambda batch, head, i, j: (i + j + head) % 5 > 0) & na.Where(lambda *at: (at[2] + at[1]) % 3 > 0)
    assert_as_on_one_device(Strict(2), q, k, v, rng, mask=mask)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_equal_to_one_device_bit_for_bit(rng, dtype):
    """Where nothing is summed over ranks, heads are computed as ever, and what travels is not rounded."""
    q, k, v, do = rng.standard_normal((4, 4, 200, 16)).astype(dtype)
    options = {"causal": True, "score": na.Alibi((np.arange(4) / 8).astype(dtype)), "dropout": na.Dropout(0.2, 1)}
    ring = nad.Simulated(4)
    o, backprop = na.attention_vjp(q, k, v, **options)
    o_parts, back = nad.attention_vjp(ring, *map(ring.split, (q, k, v)), plan="heads", **options)
    grads, found = backprop(do), back(ring.split(do))
    for one, other in zip([o, *grads, *grads.score], [*map(ring.join, (o_parts, *found)), *found.score], strict=True):
        assert one.tobytes() == other.tobytes()


def test_sums_over_ranks_are_not_rounded_before(rng):
    q, do = rng.standard_normal((2, 8, 100, 16)).astype(np.float16)
    k, v = rng.standard_normal((2, 8, 100, 16)).astype(np.float16)
    ring, results = nad.Simulated(8), []
    for dtype in (np.float16, np.float64):
        parts = (ring.split(x.astype(dtype)) for x in (q, k[:1], v))
        _, backprop = nad.attention_vjp(ring, *parts, plan="heads", score=na.Alibi(np.array(0.1, dtype)))
        _, dk, _ = grads = backprop(ring.split(do.astype(dtype)))
        results.append([ring.join(dk).astype(np.float64), grads.score[0].astype(np.float64)])
    for half, exact in zip(*results):
        rounded = abs(exact.astype(np.float16) - exact).mean()
        assert abs(half - exact).mean() <= 1.6 * rounded


@pytest.mark.parametrize("kind", ["dense", "bits", "intervals"])
def test_ranks_may_hold_their_own_rows_alone(rng, kind):
    """Of the mask and of a Bias, which travel, too."""
    q, k, v, do = rng.standard_normal((4, 3, 200, 8))
    visible, first, ring = rng.random((3, 200, 200)) < 0.3, rng.integers(0, 100, 200), nad.Simulated(3)
    biases = rng.standard_normal((3, 200, 200)), rng.standard_normal((200, 1))
    mask = {"dense": na.Dense, "bits": na.Bits.pack, "intervals": lambda x: na.Intervals(x, [150])}[kind]
    rows = first if kind == "intervals" else visible
    o, backprop = na.attention_vjp(q, k, v, causal=True, mask=mask(rows), score=list(map(na.Bias, biases)))
    grads = backprop(do)
    own = zip(ring.split(rows, 0 if kind == "intervals" else -2), *map(ring.split, biases))
    calls = [RingOptions(True, mask(x), None, None, list(map(na.Bias, of_bias)), "heads") for x, *of_bias in own]
    o_parts, saved = each(ring, forward, *map(ring.split, (q, k, v)), calls)
    *found, score = each(ring, backward, ring.split(do), [None] * 3, saved, [False] * 3)
    for parts, want in zip((o_parts, *found, *zip(*score)), (o, *grads, *grads.score), strict=True):
        np.testing.assert_allclose(ring.join(list(parts)), want, atol=1e-12)


# -------------------------------------------------------------------------------------------------------------- errors
def refused(message, *by_rank, **options):
    with pytest.raises(ValueError, match=message):
        nad.attention(nad.Simulated(3), *by_rank, **options)


def test_what_cannot_be_split(rng):
    parts = [nad.Simulated(3).split(np.zeros((2, 70, 8)))] * 3
    refused("plan: got 'heads' for 2 heads of k and v on 3 ranks, expected as many heads as ranks", *parts,
            plan="heads")  # fmt: skip
    refused("plan: got 'head', allowed 'ring', 'heads' or None", *parts, plan="head")
    refused("plan: got 'heads' for 4 heads of k and v on 3 ranks", *[nad.Simulated(3).split(np.zeros((4, 70, 8)))] * 3,
            plan="heads")  # fmt: skip
    nad.attention(nad.Simulated(3), *parts)


def test_all_rows_beside_rows_of_one_rank(rng):
    """A ring takes them, and is taken by default."""
    q, ring = rng.standard_normal((2, 64, 8)), nad.Simulated(2)
    visible = rng.random((64, 64)) < 0.5
    for plan in ("heads", None):
        calls = [RingOptions(False, x, None, None, None, plan) for x in (ring.split(visible)[0], visible)]
        parts = [ring.split(q)] * 3
        if plan is None:
            o, _ = each(ring, forward, *parts, calls)
            np.testing.assert_allclose(ring.join(list(o)), na.attention(q, q, q, mask=visible), atol=1e-13)
        else:
            with pytest.raises(ValueError, match="plan: got 'heads' with an array that has all rows on some ranks"):
                each(ring, forward, *parts, calls)


FAULTS = {
    "if not heads or heads % ranks": "if heads < ranks",
    "rows not in (1, size)": "False",
    "Origin(head=place.rank * heads // place.ranks, heads=heads)": "Origin(heads=heads)",
    "wide=sums_over_ranks(share)": "wide=False",
    "dx if axes.heads is None else rounded(dx, x.dtype)": "rounded(dx, x.dtype)",
    "(yield AllReduce([*whole.values()])) if whole else ()": "whole.values()",
    "reduce(np.add, parts) if axes.heads is None else": "",
    "np.broadcast_to(x, with_tokens(x.shape, axes, share.place.rank))": "x",
    "x.ndim <= own or x.shape[-1 - own] == 1": "x.ndim <= own",
    "base/values.py": {
        "found = {held.name: len(held.shape) for held in self._held(1, 1)}": "found = {}",
        "self._own_axes, **found": "0, **found",
    },
    "test_two_functions_count_from_the_same_head": {
        "cpu/tile.py": {
            "matrix = mask.grids[g, BATCH] + batch, mask.grids[g, HEAD] + head": (
                "matrix = batch, head = mask.grids[g, BATCH] + batch, mask.grids[g, HEAD] + head"
            ),
        },
    },
}

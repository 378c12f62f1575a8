"""Parts of a larger attention: masks and scores that are cropped, dropout and functions that count from an origin."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn import reference
from numbattn.base.origin import Crop, Origin
from numbattn.call import passes
from numbattn.call.problem import Saved, describe
from numbattn.masks import as_mask, cropped
from tests.problems import MASKS, Draw, Limit

SMALL = Limit(140, 40_000, 16)
SEGMENTED = {
    "causal": lambda s: s & na.Causal(),
    "window": lambda s: s & na.Window(9, 2),
    "prefix": lambda s: s & na.Prefix(3),
    "prefixes": lambda s: s & na.Prefix(np.array([3, 9])) & na.Lengths(keys=np.array([50, 80])),
    "union": lambda s: s & (na.Window(5, 0) | na.Prefix(2)),
    "first": lambda s: s & na.First(5),
    "sinks": lambda s: s & na.Causal() & (na.Window(5, 0) | na.First(np.array([2, 30]))),
    "offset": lambda s: s & na.Causal(4),
}


def crops(m, n):
    """Rectangles of a matrix; keys begin at multiples of 32, a rank has the rows from 5 on."""
    for first_query, first_key in itertools.product((0, 5, 32), (0, 32, 64)):
        queries, keys = min(m - first_query, 40), min(n - first_key, 70)
        if queries > 0 and keys > 0:
            yield Crop(first_query, queries, first_key, keys, m, n, max(first_query - 5, 0), m - 5)


def part_of(x, crop):
    x = x[..., crop.first_query :, crop.first_key :] if x.ndim >= 2 else x
    return x[..., : crop.queries, : crop.keys]


def assert_cropped(mask, m, n):
    whole = mask.dense(m, n)
    for crop in crops(m, n):
        part = cropped(mask, crop)
        got, want = part.dense(crop.queries, crop.keys), part_of(whole, crop)
        np.testing.assert_array_equal(*np.broadcast_arrays(got, want), err_msg=f"{mask} {crop}")
        assert part._may_show(crop.queries, crop.keys) or not want.any()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("seed", range(3))
def test_masks(name, seed):
    draw = Draw(seed, 0, SMALL, np)
    draw.shapes(SMALL, square=name == "tree")
    draw.m, draw.n = (draw.m, draw.m) if name == "tree" else (100, 130)
    mask = as_mask(MASKS[name](draw))._fit((*draw.batch, draw.m, draw.n))
    assert_cropped(mask, draw.m, draw.n)
    assert_cropped(mask & na.Causal(), draw.m, draw.n)
    assert_cropped(mask | na.Window(3, 4), draw.m, draw.n) if name != "segments" else None


@pytest.mark.parametrize("keys", [None, [3, 40, 40, 101, 126]], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", SEGMENTED)
def test_masks_within_segments(name, keys):
    segments = na.Segments([0, 30, 33, 70, 100], keys)
    assert_cropped(SEGMENTED[name](segments), 100, 100 if keys is None else 130)


def test_what_shows_nothing_says_so():
    """So that it is neither computed nor sent."""
    assert not na.Causal(-40)._may_show(40, 40)
    assert na.Causal(-39)._may_show(40, 40)
    assert not na.Window(3, None, 50)._may_show(40, 47)
    assert na.Window(3, None, 50)._may_show(40, 48)
    assert not na.Lengths(keys=np.array([0, 0]))._may_show(40, 40)
    assert not na.Prefix(0, -40)._may_show(40, 40)
    assert na.Prefix(1, -40)._may_show(40, 40)
    assert not na.Segments([0, 0, 9], [0, 5, 5])._may_show(40, 40)
    assert na.Segments([0, 1, 9], [0, 5, 5])._may_show(40, 40)
    assert not (na.Causal(-40) & np.ones((40, 40), bool))._may_show(40, 40)
    assert (na.Causal(-40) | np.ones((40, 40), bool))._may_show(40, 40)
    assert not (na.Causal(-40) | na.Causal(-50))._may_show(40, 40)
    assert not na.BlockSparse(np.zeros((1, 1), bool))._may_show(40, 40)


def test_rows_of_one_rank_alone():
    """Dense, Bits, Intervals and Bias may hold the rows of one rank, here those from 5 on."""
    rng, crop = np.random.default_rng(0), Crop(37, 20, 64, 30, 100, 130, 32, 95)
    visible, first = rng.random((100, 130)) < 0.5, rng.integers(0, 99, 100)
    for mask in (na.Dense(visible), na.Bits.pack(visible), na.Intervals(first, first + 30)):
        rows = type(mask)(*[x[5:] for x in mask._arrays().values()])
        assert (cropped(rows, crop).dense(20, 30) == cropped(mask, crop).dense(20, 30)).all()
    bias = na.Bias(rng.random((100, 130)))
    np.testing.assert_array_equal(na.Bias(bias.bias[5:])._cropped(crop, None).bias, bias._cropped(crop, None).bias)


@pytest.mark.parametrize(("mask", "message"), [
    (np.ones((7, 130), bool), "mask: Dense: got 7 rows for queries, expected 100, all of them, or 95"),
    (np.ones((100, 7), bool), "mask: Dense: got 7 columns for keys, expected 130"),
    (na.Bits(np.ones((100, 2), np.uint32)), "mask: Bits words: got 2 words a row, expected 5"),
    (na.BlockSparse(np.ones((1, 1), bool)), r"mask: BlockSparse blocks: got the shape \(1, 1\)"),
    (na.Intervals([1, 2], [3, 4]), "mask: Intervals first: got 2 rows"),
])  # fmt: skip
def test_what_does_not_fit(mask, message):
    with pytest.raises(ValueError, match=message):
        cropped(as_mask(mask), Crop(0, 10, 0, 10, 100, 130, 0, 95))


def test_a_distance_within_unequal_segments_has_no_offset_to_crop():
    with pytest.raises(ValueError, match=r"score: got Alibi.* without an offset within Segments"):
        na.Alibi(1.0)._cropped(Crop(0, 10, 0, 10, 20, 30), na.Segments([0, 20], [0, 30]))


# ------------------------------------------------------------------------------------------------------------ in calls
def far_and_near(s, batch, head, i, j, table):
    return s * (1 + 0.1 * batch + 0.2 * head) - table[i] * abs(i - j)


SCORES = {
    "alibi": [na.Alibi(np.array([0.1, 0.2])), na.Softcap(3.0)],
    "relative": [na.RelativeBias(np.linspace(-1, 1, 41)), na.Bias(np.sin(np.arange(100.0))[:, None])],
    "function": [na.Score(far_and_near, arrays=[np.linspace(0, 0.1, 100)])],
}


def part_passes(q, k, v, do, query, key, size, whole, mask, score, dropout):
    """o, lse and gradients of queries from `query` on and keys from `key` on, so many of each."""
    crop = Crop(query, min(size, 100 - query), key, min(size, 100 - key), 100, 100)
    origin = Origin(query, key, heads=2)
    q, do = (x[..., query : query + size, :] for x in (q, do))
    k, v = (x[..., key : key + size, :] for x in (k, v))
    score = [part._cropped(crop, mask._segments) for part in score]
    problem, inputs = describe(q, k, v, False, cropped(mask, crop), None, dropout, score, origin=origin, wide=True)
    o, saved = passes.forward(problem, inputs)
    final = Saved(problem, inputs, whole.o[..., query : query + size, :].astype(o.dtype),
                  np.ascontiguousarray(whole.lse[..., query : query + size]))  # fmt: skip
    return o, saved.lse, passes.backward(final, do)


def assert_parts_make_the_whole(rng, dtype, tolerance, score, dropout, size=48):
    q, k, v, do = rng.standard_normal((4, 2, 2, 100, 8)).astype(dtype)
    mask = na.Segments([0, 30, 100]) & na.Causal()
    score = [part._like(q) for part in SCORES[score]]
    o, saved = na.attention_forward(q, k, v, mask=mask, score=score, dropout=dropout)
    grads = na.attention_backward(do, saved)
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    of_score = [np.zeros(x.shape) for part in score if part._wants_gradient for x in part._weights]
    for query in range(0, 100, size):
        states = []
        for key in range(0, 100, size):
            o_part, lse, (x, y, z) = found = part_passes(q, k, v, do, query, key, size, saved, mask, score, dropout)
            states.append((o_part, lse))
            dq[..., query : query + size, :] += x
            dk[..., key : key + size, :] += y
            dv[..., key : key + size, :] += z
            assert o_part.dtype == x.dtype == lse.dtype
            parts = [dx for dx in found[2].score if dx is not None]
            for sums, dx in zip(of_score, parts):
                rows = slice(query, query + size) if sums.shape == (100, 1) else ...
                sums[rows] += dx
        merged, lse = na.merge(states)
        np.testing.assert_allclose(merged, o[..., query : query + size, :].astype(merged.dtype), atol=tolerance)
        np.testing.assert_allclose(lse, saved.lse[..., query : query + size], atol=tolerance)
    wanted = [*grads, *(dx for dx in grads.score if dx is not None)]
    for got, want in zip([dq, dk, dv, *of_score], wanted, strict=True):
        np.testing.assert_allclose(got, want.astype(np.float64), atol=tolerance * max(1, abs(want).max()))


@pytest.mark.parametrize("dropout", [None, na.Dropout(0.3, 5, 2)], ids=["", "dropout"])
@pytest.mark.parametrize("score", SCORES)
def test_parts_make_the_whole(rng, score, dropout):
    assert_parts_make_the_whole(rng, np.float64, 1e-13, score, dropout)


@pytest.mark.parametrize("dtype", [np.float16, pytest.param(ml_dtypes.bfloat16, marks=pytest.mark.slow)])
def test_results_of_the_dtype_of_sums(rng, dtype):
    """What is rounded is the whole that parts are compared with."""
    assert_parts_make_the_whole(rng, dtype, 8 * float(ml_dtypes.finfo(dtype).eps), "alibi", na.Dropout(0.3, 5, 2))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2), st.integers(0, 1), st.integers(0, 3), st.integers(0, 3))
def test_heads_and_elements_of_the_batch(batch, head, query, key):
    """Of a part of the heads and of the batch, wherever it begins."""
    assert_part_of_heads(np.float64, 1e-13, Origin(16 * query, 16 * key, batch, head, heads=3))


def assert_part_of_heads(dtype, tolerance, origin, size=80, heads=2, backward=False):
    """Some heads of three of two elements of a batch of four, against their part of the whole in float64."""
    rng, options = np.random.default_rng(0), {"dropout": na.Dropout(0.5, 8)}
    options["score"] = na.Score(far_and_near, arrays=[np.linspace(0, 0.1, size)])
    queries, keys = (np.s_[origin.batch : origin.batch + 2, origin.head : origin.head + heads, first:]
                     for first in (origin.query, origin.key))  # fmt: skip
    q, k, v, do, seen = rng.standard_normal((5, 4, 3, size, 4)).astype(dtype)
    seen[:] = 0
    seen[queries] = 1
    visible = np.zeros((size, size), bool)
    visible[origin.query :, origin.key :] = True
    want, _ = reference.attention_forward(q, k, v, mask=visible, **options)
    problem, inputs = describe(q[queries], k[keys], v[keys], origin=origin, wide=True, **options)
    o, saved = passes.forward(problem, inputs)
    np.testing.assert_allclose(o, want[queries], atol=tolerance)
    if backward:
        grads = passes.backward(saved, do[queries], None, False)
        wanted = reference.attention_backward(do * seen, q, k, v, mask=visible, **options)
        for got, want, part in zip(grads, wanted, (queries, keys, keys), strict=True):
            np.testing.assert_allclose(got, want[part], atol=tolerance * max(1, abs(want).max()))


def test_an_origin_compiles_nothing():
    """It is a number of the call, like a seed."""
    from numbattn.cpu.forward import forward_kernel

    x, dropout = np.zeros((2, 40, 4)), na.Dropout(0.5, 8)
    na.attention(x, x, x)
    compiled = list(forward_kernel.entries)
    for origin in (None, Origin(32, 64, 1, 2, 8)):
        problem, inputs = describe(x, x, x, dropout=dropout, origin=origin)
        passes.forward(problem, inputs)
    assert list(forward_kernel.entries) == compiled
    assert problem == describe(x, x, x, dropout=dropout)[0]


FAULTS = {
    ("test_masks", "test_masks_within_segments", "test_rows_of_one_rank_alone", "test_what_does_not_fit"): {
        "return whole + self.first_query - self.first_key": "return whole + self.first_query",
        "self.seqlen_k - self.seqlen_q if offset is None": "self.keys - self.queries if offset is None",
        "clip(clip(count, 0, FAR) - self.first_key, 0, self.keys)": "clip(clip(count, 0, FAR), 0, self.keys)",
        "clip(clip(count, 0, FAR) - self.first_query, 0, self.queries)": "clip(clip(count, 0, FAR), 0, self.queries)",
        "self.first_query if size == self.seqlen_q else self.first_row": "self.first_query",
        "if size not in (self.seqlen_q, self.rows)": "if size not in (self.seqlen_q, size)",
        "self.first_key : self.first_key + self.keys]": "self.first_query : self.first_query + self.keys]",
    },
}

"""Intervals of keys in the CUDA kernels: simulated on small problems, and on a GPU. The masks are those of
tests/masks/calls.py."""

import itertools

import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.problem import DTYPES
from tests.tools import device as tools
from tests.tools.device import BY_UNIT, HOPPER, TURING, on
from tests.tools.launch import simulated_only, world_of

from ..accuracy import assert_equal, check, random
from ..masks import calls as masks
from ..masks.calls import MASKS, ONE_KEY, OTHER_MASKS, SCORES, SEGMENTS

try:
    import cupy
except ImportError:
    cupy = None



# ------------------------------------------------------------------------------------------------------ without a GPU
@pytest.fixture
def small(monkeypatch):
    for name, size in zip("BHMN", (1, 2, 70, 135)):
        monkeypatch.setattr(masks, name, size)


@simulated_only
@pytest.mark.parametrize(("device", "kind"), [("CUDA cores", "segments by head"), ("tensor cores", "intervals"),
                                              ("warpgroups", "prefix offsets")])
def test_small_problems(rng, small, device, kind):
    dtype = np.float16 if device == "warpgroups" else np.float32
    with world_of("simulated"), on(BY_UNIT[device]):
        check(*masks.qkv(rng, dtype, heads_k=1), rng, mask=MASKS[kind](rng), causal=True, bits=ONE_KEY)


@pytest.mark.parametrize(("kind", "dropout"), [
    ("segments by batch", None), ("segments by head", na.Dropout(0.2, 3)), ("intervals", na.Dropout(0.2, 3)),
])  # fmt: skip
def test_compiled(rng, small, kind, dropout):
    """As the PTX says."""
    with world_of("compiled"), on(HOPPER):
        check(*masks.qkv(rng, np.float16, heads_k=1), rng, mask=MASKS[kind](rng), causal=True, bits=ONE_KEY,
              dropout=dropout)  # fmt: skip


UNIONS = "stream", "segments"


@pytest.mark.parametrize("kind", UNIONS)
def test_unions(rng, small, kind):
    """Two intervals a query, with a gap between them; on Hopper, and compiled."""
    with world_of("compiled"), on(HOPPER):
        check(*masks.qkv(rng, np.float16, heads_k=1), rng, mask=masks.UNIONS[kind](rng), bits=ONE_KEY)


@simulated_only
@pytest.mark.parametrize(("device", "kind"), [("CUDA cores", "stream"), ("tensor cores", "segments")])
def test_small_unions(rng, monkeypatch, device, kind):
    for name, size in zip("BHMN", (1, 1, 34, 40)):
        monkeypatch.setattr(masks, name, size)
    monkeypatch.setitem(masks.UNIONS, "segments", lambda rng: na.Segments([0, 20, 34], [0, 30, 40]) & (
        na.Window(2, 0) | na.Prefix(2)))  # fmt: skip
    with world_of("simulated"), on(BY_UNIT[device]):
        check(*masks.qkv(rng, np.float32), rng, mask=masks.UNIONS[kind](rng), bits=ONE_KEY)


@pytest.mark.parametrize("mask", [
    na.Causal() & (na.Window(20, 0) | na.Lengths(keys=4)),
    na.Segments(np.array([0, 30, 400])) & (na.Window(20, 0) | na.Prefix(4)) & na.Causal(),
], ids=["stream", "within segments"])  # fmt: skip
def test_tiles_in_the_gap_are_empty(mask):
    """By the states that kernels loop by, from the side of queries and from that of keys."""
    kept, visible = set(), mask.dense(400, 400)

    def run_states(key, source, grid, *arguments):
        if key.name in ("intervals", "tile_states"):
            tools.execute(key, source, grid, *arguments)
        if key.name == "tile_states":
            about, (sight, *_) = dict(key.parameters), arguments
            assert_states(sight.states[0][0, 0], visible, about["tile_m"], about["tile_n"], about["kept"])
            kept.add(about["kept"])

    q = np.zeros((1, 1, 400, 64), np.float16)
    with world_of("compiled"), on(HOPPER, run_states):
        _, saved = na.attention_forward(q, q, q, mask=mask)
        na.attention_backward(q, saved)
    assert kept == {"q", "k"}


def assert_states(words, visible, tile_m, tile_n, kept):
    tiles = np.array([[visible[m0 : m0 + tile_m, n0 : n0 + tile_n].any() for n0 in range(0, visible.shape[1], tile_n)]
                      for m0 in range(0, visible.shape[0], tile_m)])  # fmt: skip
    tiles = tiles if kept == "q" else tiles.T
    bits = words[:, ::2, None] >> np.arange(32, dtype=np.uint32) & 1
    assert_equal(bits.reshape(len(words), -1)[:, : tiles.shape[1]], tiles)


PACKED_PARTS = {"sink": [na.Sink], "slopes and sink": [na.Alibi, na.Sink]}


@pytest.mark.parametrize(("kinds", "heads_k", "d"), [*((kinds, 1, 24) for kinds in PACKED_PARTS),
                                                      ("slopes and sink", 2, 40)])
def test_gradients_of_scores_that_need_no_kernel_of_their_own(rng, small, kinds, heads_k, d):
    """Sequences are computed as matrices of their own; some are empty, some tokens are in none."""
    score = [kind(random(rng, 2, np.float16) / 9) for kind in PACKED_PARTS[kinds]]
    mask = na.Segments(np.array([3, 3, 40, 68]), np.array([0, 20, 90, 130])) & na.Causal()
    with world_of("compiled"), on(HOPPER):
        q, k, v = masks.qkv(rng, np.float16, heads_k=heads_k, d=d, e=d)
        check(q, k, v, rng, mask=mask, score=score, bits=ONE_KEY)


@pytest.mark.parametrize(("device", "dtype", "kinds", "entries"), [
    (TURING, np.float32, "slopes and table", 3), (HOPPER, np.float16, "table", 301),
])  # fmt: skip
def test_distances_within_segments_of_unequal_lengths(rng, device, dtype, kinds, entries):
    """Where tiles lie in several of them, each query has an offset of its own; no key may be as far as an entry."""
    q, k, v = (random(rng, (1, n, 8), dtype) for n in (40, 70, 70))
    score = [na.RelativeBias(random(rng, (1, entries), dtype))]
    score += [na.Alibi(random(rng, 1, dtype) / 9)] * ("slopes" in kinds)
    mask = na.Segments(np.array([3, 3, 20, 38]), np.array([0, 9, 40, 66]))
    with world_of("compiled"), on(device):
        check(q, k, v, rng, mask=mask, score=score, bits=ONE_KEY)


@pytest.mark.parametrize("mask", [
    na.Segments([0, 7, 20], [0, 9, 30]), na.BlockSparse(np.eye(3, 4, dtype=bool)[None], (8, 8)),
])  # fmt: skip
def test_kernels_of_different_tiles_look_up_their_own(rng, mask):
    """The gradient of a bias has 64 x 32 here, that of slopes 64 x 16."""
    q, k, v = (random(rng, (1, n, 128), np.float64) for n in (20, 30, 30))
    score = [na.Bias(random(rng, (1, 20, 30), np.float64)), na.Alibi(np.array([0.1]))]
    with world_of("simulated"), on(HOPPER):
        check(q, k, v, rng, mask=mask, score=score)


def results_of(arrays, xp, **options):
    """o, lse and the gradients as NumPy arrays."""
    q, k, v, do = (xp.asarray(arrays[name]) for name in ("q", "k", "v", "do"))
    o, saved = na.attention_forward(q, k, v, **options)
    grads = na.attention_backward(do, saved, deterministic=True)
    return [xp.asnumpy(x) if xp is cupy else x for x in (o, saved.lse[..., None], *grads)]


def assert_nan_stays_in_its_segment(rng, where, xp, bounds, d, heads, **options):
    """And that of tokens in no segment there, too. where: the names of the arrays that hold it."""
    length = bounds[-1] + 5
    heads = {"q": heads, "k": 1, "v": 1, "do": heads}
    arrays = {name: random(rng, (heads[name], length, d), np.float16) for name in heads}
    options |= {"mask": na.Segments(xp.asarray(bounds)) & na.Causal()}
    wanted = results_of(arrays, xp, **options)
    assert all(np.isfinite(x[:, bounds[0] : bounds[-1]]).all() for x in wanted)
    qkv, mask = [arrays[name] for name in "qkv"], na.Segments(bounds) & na.Causal()
    o, _ = reference.attention_forward(*qkv, mask=mask)
    grads = reference.attention_backward(arrays["do"], *qkv, mask=mask)
    for got, want in zip((wanted[0], *wanted[2:]), (o, *grads)):
        np.testing.assert_allclose(got, want, atol=2e-2, rtol=2e-2)
    poisoned = {name: x.copy() for name, x in arrays.items()}
    others = np.ones(length, bool)
    for first, end in ((0, bounds[0]), (bounds[1], bounds[2]), (bounds[-1], length)):
        others[first:end] = False
        for name in where:
            poisoned[name][:, first:end] = np.nan
    for got, want in zip(results_of(poisoned, xp, **options), wanted):
        assert_equal(got[:, others], want[:, others])


@simulated_only
def test_nan_stays_in_its_segment_simulated(rng):
    with world_of("simulated"), on(HOPPER):
        assert_nan_stays_in_its_segment(rng, ("q", "k", "v", "do"), np, np.array([3, 40, 60], np.int32), 16, 1)


# ----------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("where", [("q",), ("k",), ("v",), ("do",), ("q", "k", "v", "do")], ids="-".join)
def test_nan_stays_in_its_segment(rng, where, d):
    bounds = np.array([3, 70, 171, 171, 300, 1000], np.int32)
    assert_nan_stays_in_its_segment(rng, where, cupy, bounds, d, 2)


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "deterministic"), [(24, False), (64, True), (128, False), (256, False)])
@pytest.mark.parametrize("kind", MASKS)
def test_head_dims(rng, kind, d, deterministic):
    check(*masks.qkv(rng, np.float16, heads_k=2, d=d, e=d), rng, cupy, mask=MASKS[kind](rng), causal=True,
          deterministic=deterministic, bits=ONE_KEY)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_masks(rng, kind, dtype):
    check(*masks.qkv(rng, dtype), rng, cupy, mask=MASKS[kind](rng), dropout=na.Dropout(0.5, 2), bits=ONE_KEY)


@pytest.mark.gpu
@pytest.mark.parametrize(("one", "other"), [*itertools.product(["segments by batch", "intervals"], OTHER_MASKS)])
def test_pairs_of_masks(rng, one, other):
    mask = MASKS[one](rng) & OTHER_MASKS[other](rng)
    check(*masks.qkv(rng, np.float16, heads_k=2), rng, cupy, mask=mask, bits=ONE_KEY)


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", ["segments", "prefix", "intervals"])
def test_scores(rng, kind, score):
    check(*masks.qkv(rng, np.float16, heads_k=2), rng, cupy, mask=MASKS[kind](rng), causal=True,
          score=SCORES[score](rng, np.float16), bits=ONE_KEY)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [24, 64, 128, 256])
@pytest.mark.parametrize("kinds", PACKED_PARTS)
def test_gradients_by_segment(rng, kinds, d, deterministic):
    heads_k = 2 if deterministic else 4
    q, k, v = (random(rng, (1, heads, 1000, d), np.float16) for heads in (4, heads_k, heads_k))
    score = [kind(random(rng, 4, np.float16) / 9) for kind in PACKED_PARTS[kinds]]
    mask = na.Segments(np.array([3, 70, 171, 171, 300, 990])) & na.Causal()
    check(q, k, v, rng, cupy, mask=mask, score=score, deterministic=deterministic, bits=ONE_KEY)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SEGMENTS)
def test_offsets_of_any_integers_on_the_gpu_or_not(rng, kind):
    """And no more than there are tokens, whatever they say."""
    q, k, v = (cupy.asarray(x) for x in masks.qkv(rng, np.float16))
    mask = MASKS[kind](rng)
    want = na.attention(q, k, v, mask=mask)
    for dtype in (np.int32, np.int64, np.uint16):
        queries, keys = (cupy.asarray(x, dtype) for x in (mask.queries, mask.keys))
        assert_equal(na.attention(q, k, v, mask=na.Segments(queries, keys)), want)
    queries, keys = (cupy.asarray(x) for x in (mask.queries, mask.keys))
    queries[..., -1], keys[..., -1] = 2**40, 2**50
    clamped = na.Segments(cupy.minimum(queries, q.shape[-2]), cupy.minimum(keys, k.shape[-2]))
    assert_equal(na.attention(q, k, v, mask=na.Segments(queries, keys)), na.attention(q, k, v, mask=clamped))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_offsets_may_be_edited_between_calls(rng, dtype):
    """What a mask remembers is not what lies in its arrays."""
    q = cupy.asarray(random(rng, (2, 300, 64), np.float16))
    offsets = cupy.asarray([0, 100, 300], dtype)
    mask = na.Segments(offsets)
    before = na.attention(q, q, q, mask=mask)
    offsets[1] = 33
    after = na.attention(q, q, q, mask=mask)
    assert (before != after).any()
    assert_equal(after, na.attention(q, q, q, mask=na.Segments([0, 33, 300])))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_packed_is_separate(rng, d):
    lengths = [1, 0, 700, 129, 64, 1, 1000, 3]
    sequences = [[cupy.asarray(random(rng, (4, n, d), np.float16)) for _ in range(4)] for n in lengths]
    (q, offsets), (k, _), (v, _), (do, _) = (na.pack(x) for x in zip(*sequences))
    o, backprop = na.attention_vjp(q, k, v, causal=True, mask=na.Segments(offsets))
    results = o, *backprop(do)
    wanted = []
    for q, k, v, do in sequences:
        o, backprop = na.attention_vjp(q, k, v, causal=True)
        wanted.append((o, *backprop(do)))
    for packed, separate in zip(results, zip(*wanted)):
        for x, y in zip(na.unpack(packed, offsets), separate, strict=True):
            np.testing.assert_allclose(x.get(), y.get(), rtol=2e-2, atol=4e-3)


@pytest.mark.gpu
def test_more_than_2_31_elements(rng):
    if cupy.cuda.runtime.memGetInfo()[0] < 60 << 30:
        pytest.skip("takes 60 GB of memory")
    count, length, d = 17_000, 1000, 128
    first, last = (cupy.asarray(random(rng, (length, d), np.float16)) for _ in range(2))
    x = cupy.empty((count * length, d), np.float16)
    x.reshape(count, length, d)[...] = first
    x[-length:] = last
    assert x.size > 2**31
    offsets = cupy.arange(0, len(x) + 1, length, dtype=np.int32)
    o, backprop = na.attention_vjp(x, x, x, causal=True, mask=na.Segments(offsets))
    results = [na.unpack(packed, offsets) for packed in (o, *backprop(x))]
    for segment, alone in ((0, first), (count - 2, first), (count - 1, last)):
        o, backprop = na.attention_vjp(alone, alone, alone, causal=True)
        for packed, separate in zip(results, (o, *backprop(alone)), strict=True):
            np.testing.assert_allclose(packed[segment].get(), separate.get(), rtol=2e-2, atol=1e-2)


@pytest.mark.gpu
def test_in_a_graph(rng):
    """The offsets of the replay are those that lie there then."""
    q, k, v, do = (cupy.asarray(random(rng, (4, 300, 64), np.float16)) for _ in range(4))
    offsets = cupy.asarray([0, 100, 300], np.int32)
    mask = na.Segments(offsets) & na.Causal()

    def run():
        o, saved = na.attention_forward(q, k, v, mask=mask)
        return o, *na.attention_backward(do, saved, deterministic=True)

    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.cuda.Device().synchronize()
        run()
        stream.begin_capture()
        got = run()
        graph = stream.end_capture()
        offsets[1] = 33
        graph.launch()
        stream.synchronize()
        want = run()
        stream.synchronize()
    for one, other in zip(got, want):
        assert_equal(one, other)

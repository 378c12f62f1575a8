"""Slots of packed arrays: every tile of every segment is in one of them, and what a segment's queries see."""

import itertools
from functools import partial

import cupy
import numpy as np
import pytest
from hypothesis import given, settings

import numbattn as na
from numbattn import reference
from numbattn.cuda.kernels.shared.segments import Segment, count_step, mask_within_step, slot_step
from numbattn.cuda.kernels.shared.visibility import FARTHEST, PACKED, MaskArgs, Packing
from numbattn.cuda.plan import tier
from numbattn.cuda.plan.masks import mask_and_arrays
from numbattn.cuda.tile import block_index, index, thread_index
from numbattn.cuda.words.spec import PADDED
from tests.accuracy import assert_equal, check, random
from tests.masks import calls
from tests.masks.calls import MASKS, ONE_KEY, SEGMENTS
from tests.masks.examples import segments
from tests.tools.device import AMPERE, HOPPER, TURING, on
from tests.tools.graphs import capture, own_stream
from tests.tools.launch import compiled_only, launch, simulated_only

FIELDS = (*Segment._fields, "tile")


def packing_of(queries, keys, m, n, lo=-FARTHEST, hi=FARTHEST):
    offsets = (np.array(x, np.int32)[None, None] for x in (queries, keys))
    return Packing(*offsets, *map(np.int32, (m, n, lo, hi)))


def slots_of(packing, side, tile, by_warp=True):
    """Of each slot the Segment and the number of its tile, as dicts: asked for by a thread each, or by a warp each."""
    segment_of, slots = slot_step((PACKED,), side, tile, by_warp), count_step((PACKED,), tile)
    BY_WARP = by_warp
    length = packing.seqlen_q if side == "q" else packing.seqlen_k
    count = int(length) // tile + packing.queries.shape[-1] + 1

    def kernel(packing, length, out, counted):
        slot = index(block_index() if BY_WARP else thread_index())
        counted[0] = slots(packing, length)
        if slot < out.shape[0]:
            segment, which = segment_of(packing, index(0), slot, length)
            out[slot, 0], out[slot, 1] = segment.first_query, segment.queries
            out[slot, 2], out[slot, 3] = segment.first_key, segment.keys
            out[slot, 4], out[slot, 5] = segment.first_padded_row, which

    out, counted = np.full((count, len(FIELDS)), -1, np.int32), np.zeros(1, np.int32)
    blocks, threads = (count, 32) if by_warp else (1, 32 * -(-count // 32))
    launch(kernel, (blocks, 1, 1), threads, 0, (packing,), length, out, counted)
    assert counted[0] == count
    return [dict(zip(FIELDS, row)) for row in out.tolist()]


def assert_every_tile_is_in_a_slot(queries, keys, m, n, side, tile, by_warp):
    slots = slots_of(packing_of(queries, keys, m, n), side, tile, by_warp)
    kept, length = (queries, m) if side == "q" else (keys, n)
    first, count = ("first_query", "queries") if side == "q" else ("first_key", "keys")
    tiles = [slot for slot in slots if slot["tile"] * tile < slot[count]]
    rows = [slot[first] + row for slot in tiles
            for row in range(slot["tile"] * tile, min((slot["tile"] + 1) * tile, slot[count]))]  # fmt: skip
    assert rows == [*range(length)]
    known = dict(zip(itertools.pairwise(map(int, queries)), itertools.pairwise(map(int, keys))))
    by_keys = {of_keys: of_queries for of_queries, of_keys in known.items()}
    for slot in tiles:
        of_queries = slot["first_query"], slot["first_query"] + slot["queries"]
        of_keys = slot["first_key"], slot["first_key"] + slot["keys"]
        in_segment = kept[0] <= slot[first] < kept[-1]
        if side == "q":
            assert of_keys == known[of_queries] if in_segment else slot["keys"] == 0
        else:
            assert of_queries == by_keys[of_keys] if in_segment else slot["queries"] == 0


BY_WARP = pytest.mark.parametrize("by_warp", [False, True], ids=["by thread", "by warp"])


@BY_WARP
@pytest.mark.parametrize("tile", [4, 128])
@pytest.mark.parametrize("side", ["q", "k"])
def test_slots(side, tile, by_warp):
    assert_every_tile_is_in_a_slot([3, 7, 7, 12, 21], [0, 8, 9, 9, 30], 23, 31, side, tile, by_warp)


@BY_WARP
@pytest.mark.parametrize("count", [31, 32, 33, 70])
def test_slots_of_many_segments(rng, count, by_warp):
    lengths = rng.integers(0, 9, count)
    offsets = np.cumsum([2, *lengths])
    assert_every_tile_is_in_a_slot(offsets, offsets, offsets[-1] + 3, offsets[-1] + 3, "k", 4, by_warp)


@simulated_only
@BY_WARP
@settings(max_examples=20, deadline=None, derandomize=True)
@given(segments())
def test_slots_of_any_segments(by_warp, call):
    """Empty ones, too, and tokens before and after all of them."""
    for side, tile in itertools.product("qk", (2, 4)):
        assert_every_tile_is_in_a_slot(*call, side, tile, by_warp)


def test_padded_lines_do_not_meet():
    """Tiles of PADDED queries, each segment's from a multiple of its own on."""
    lengths = [1, 127, 0, 128, 129, 0, 300]
    queries = np.cumsum([5, *lengths])
    m = queries[-1] + 5
    slots = slots_of(packing_of(queries, queries, m, m), "q", PADDED)
    tiles = [slot["first_padded_row"] // PADDED + slot["tile"] for slot in slots]
    assert tiles == [*range(len(slots))]


@BY_WARP
def test_offsets_that_nobody_checked_stay_within_the_arrays(by_warp):
    for slot in slots_of(packing_of([-4, 50, 2], [9, -3, 99], 10, 20), "q", 4, by_warp):
        assert slot["tile"] >= 0
        assert 0 <= slot["first_query"] <= slot["first_query"] + max(slot["queries"], 0) <= 10
        assert 0 <= slot["first_key"] <= slot["first_key"] + max(slot["keys"], 0) <= 20


@simulated_only
@pytest.mark.parametrize("seed", range(40))
def test_mask_within(seed):
    """A segment's band: its own, and that of the packed arrays."""
    rng = np.random.default_rng(seed)
    queries, keys = (np.sort(rng.integers(0, 41, 4)) for _ in range(2))
    left, right, offset = (int(x) for x in rng.integers(-2, 12, 3))
    right = max(right, -left)
    lengths = na.Lengths(int(rng.integers(41)), int(rng.integers(41)))
    mask = na.Segments(queries, keys) & na.Window(left, right) & na.Window(left + 9, right, offset) & lengths
    (*sides, _, _, own_lo, own_hi), *_ = mask_and_arrays(mask, 40, 40)[0]
    packing = packing_of(queries, keys, 40, 40, own_lo, own_hi)
    given, want = MaskArgs(*map(np.int32, sides), packing=(packing,)), mask.dense(40, 40)
    for (m0, m_end), (n0, n_end) in zip(itertools.pairwise(queries), itertools.pairwise(keys)):
        segment = Segment(*map(np.int32, (m0, m_end - m0, n0, n_end - n0, 0)))
        for rows in (1, 16):
            lo, hi, some, length, *_ = mask_within_step((PACKED,), rows)(given, segment)
            assert some <= -(-segment.queries // rows) * rows
            i, j = np.ogrid[: m_end - m0, : n_end - n0]
            seen = (i + lo <= j) & (j <= i + hi) & (i < some) & (j < length)
            np.testing.assert_array_equal(seen, want[m0:m_end, n0:n_end])


# ----------------------------------------------------------------------------------------------------------- in calls
GIVEN_SLOPES = partial(na.Alibi, gradient=False)
PACKED_PARTS = {"sink": [na.Sink], "slopes and sink": [GIVEN_SLOPES, na.Sink], "slopes": [GIVEN_SLOPES]}


@compiled_only
@pytest.mark.parametrize(("device", "dtype", "heads_k", "d", "parts"), [
    pytest.param(HOPPER, np.float16, 1, 24, "slopes and sink", id="warpgroups in two", marks=pytest.mark.slow),
    pytest.param(HOPPER, np.float16, 2, 40, "slopes and sink", id="warpgroups", marks=pytest.mark.slow),
    pytest.param(AMPERE, np.float16, 1, 40, "sink", id="warps", marks=pytest.mark.slow),
    pytest.param(TURING, np.float32, 1, 24, "slopes", id="CUDA cores", marks=pytest.mark.slow),
])  # fmt: skip
def test_gradients_without_own_kernels(rng, sizes, device, dtype, heads_k, d, parts):
    """Sequences are computed as matrices of their own; some are empty, some tokens are in none."""
    score = [kind(random(rng, 2, dtype) / 9) for kind in PACKED_PARTS[parts]]
    mask = na.Segments(np.array([3, 3, 40, 68]), np.array([0, 20, 90, 130])) & na.Causal()
    sizes(1, 2, 70, 135)
    with on(device):
        q, k, v = calls.qkv(rng, dtype, heads_k=heads_k, d=d, e=d)
        check(q, k, v, rng, mask=mask, score=score, bits=ONE_KEY)


def results_of(arrays, xp, mask):
    """o, lse and the gradients as NumPy arrays."""
    q, k, v, do = (xp.asarray(arrays[name]) for name in ("q", "k", "v", "do"))
    o, saved = na.attention_forward(q, k, v, mask=mask)
    grads = na.attention_backward(do, saved, deterministic=True)
    return [xp.asnumpy(x) if xp is cupy else x for x in (o, saved.lse[..., None], *grads)]


def assert_nan_stays_in_its_segment(rng, where, xp, bounds, d, heads, dtype):
    """And that of tokens in no segment there, too. where: the names of the arrays that hold it."""
    length = bounds[-1] + 5
    heads = {"q": heads, "k": 1, "v": 1, "do": heads}
    arrays = {name: random(rng, (heads[name], length, d), dtype) for name in heads}
    wanted = results_of(arrays, xp, na.Segments(xp.asarray(bounds)) & na.Causal())
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
    for got, want in zip(results_of(poisoned, xp, na.Segments(xp.asarray(bounds)) & na.Causal()), wanted):
        assert_equal(got[:, others], want[:, others])


@simulated_only
@pytest.mark.parametrize(("device", "dtype"), [
    pytest.param(HOPPER, np.float16, id="warpgroups"),
    pytest.param(AMPERE, np.float16, id="warps", marks=pytest.mark.slow),
    pytest.param(TURING, np.float32, id="CUDA cores", marks=pytest.mark.slow),
])  # fmt: skip
def test_nan_stays_in_its_segment_simulated(rng, device, dtype):
    """With dQ by a kernel of its own; where it is added up, the same one loads what might be NaN."""
    with on(device):
        assert_nan_stays_in_its_segment(rng, ("q", "k", "v", "do"), np, np.array([3, 30, 50], np.int32), 16, 1, dtype)


# ----------------------------------------------------------------------------------------------------------- on a GPU
KERNELS = pytest.mark.parametrize(("dtype", "latest"), [
    (np.float16, "wgmma"), (np.float16, "mma"), (np.float32, "mma"), (np.float64, "mma")
], ids=["wgmma", "mma", "float32", "float64"])  # fmt: skip


@pytest.mark.gpu
@KERNELS
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("where", [("q",), ("k",), ("v",), ("do",), ("q", "k", "v", "do")], ids="-".join)
def test_nan_stays_in_its_segment(rng, where, d, dtype, latest):
    bounds = np.array([3, 70, 171, 171, 300, 1000], np.int32)
    with tier(latest):
        assert_nan_stays_in_its_segment(rng, where, cupy, bounds, d, 2, dtype)


@pytest.mark.gpu
@KERNELS
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [24, 128])
@pytest.mark.parametrize("kinds", PACKED_PARTS)
def test_gradients_by_segment(rng, kinds, d, deterministic, dtype, latest):
    heads_k = 2 if deterministic else 4
    q, k, v = (random(rng, (1, heads, 1000, d), dtype) for heads in (4, heads_k, heads_k))
    score = [kind(random(rng, 4, dtype) / 30) for kind in PACKED_PARTS[kinds]]
    mask = na.Segments(np.array([3, 70, 171, 171, 300, 990])) & na.Causal()
    with tier(latest):
        check(q, k, v, rng, cupy, mask=mask, score=score, deterministic=deterministic, bits=ONE_KEY)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SEGMENTS)
def test_offsets_of_any_integers_on_the_gpu_or_not(rng, kind):
    """And no more than there are tokens, whatever they say."""
    q, k, v = (cupy.asarray(x) for x in calls.qkv(rng, np.float16))
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

    with own_stream() as stream:
        run()
        got, graph = capture(run)
        offsets[1] = 33
        graph.launch()
        stream.synchronize()
        want = run()
        stream.synchronize()
    for one, other in zip(got, want):
        assert_equal(one, other)


FAULTS = {
    "inside(offsets[t - 1], length)": "offsets[t - 1]",
    "if t > 0 else 0": "if t > 1 else 0",
    "if t < count else length": "if t < count - 1 else length",
    "low, high = index(1), count + 1": "low, high = index(1), count",
    "// TILE + t > slot": "// TILE + t >= slot",
    "(thread_index() % WARP + 1) * step": "thread_index() % WARP * step",
    "ballot(later)) * step, step - 1": "ballot(later)) * step, index(0)",
    "if t == 0 or t == count:": "if t == 0:",
    "(count_q, index(0)) if KEEPS_Q": "(index(0), count_k) if KEEPS_Q",
    "// TILE - t": "// TILE",
    "(first_query // PADDED + t)": "(first_query // PADDED)",
    "length // TILE + count + 1": "length // TILE + count",
    "maximum(packing.lo + shift, mask.lo + apart)": "packing.lo + shift",
    "minimum(packing.hi + shift, mask.hi + apart)": "packing.hi + shift",
    "segment.keys - segment.queries, segment": "segment.keys, segment",
    "left if left < segment.queries": "left if left > segment.queries",
    "mask.keys - segment.first_key": "mask.keys",
}

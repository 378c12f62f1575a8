"""The keys that each query sees, as the masks say it."""

import itertools

import cupy
import numpy as np
import pytest
from hypothesis import given, settings

import numbattn as na
from numbattn.call.problem import DTYPES
from numbattn.cuda.kernels.any.intervals import QUERIES, Parts, count_of_gaps, intervals
from numbattn.cuda.plan.masks import mask_and_arrays
from numbattn.cuda.words.steps import array_of_mask
from numbattn.masks import All
from tests.accuracy import check
from tests.masks import calls
from tests.masks.calls import ONE_KEY
from tests.masks.examples import INTERVALS as KINDS
from tests.masks.examples import WINDOWS, segments
from tests.tools.device import BY_UNIT, HOPPER, on
from tests.tools.launch import compiled_only, launch, simulated_only

LENGTHS, SHIFTS = np.array([[1], [4]]), np.array([[0, -2, 3]])
MASKS = {
    "segments": KINDS[0],
    "segments by batch": KINDS[1] & na.Causal(),
    "within": KINDS[0] & na.Prefix(LENGTHS) & na.Window(2, None),
    "first": KINDS[0] & na.First(LENGTHS),
    "far": KINDS[0] & na.First(np.array([[2**31 - 1], [-(2**31)]], np.int32)),
    "window": na.Segments([0, 1, 5], [0, 1, 6]) & na.Window(1, 0),
    "prefix": na.Prefix(2),
    "prefixes": na.Prefix(LENGTHS, SHIFTS) & na.Prefix(LENGTHS[::-1]),
    "offsets": na.Prefix(1, SHIFTS),
    "intervals": KINDS[4],
    "all of them": KINDS[0] & na.Causal() & na.Prefix(1, SHIFTS) & KINDS[4],
}


def found(mask, m, n):
    """first and end for 2 x 3 matrices of m queries and n keys."""
    mask = mask._fit((2, 3, m, n))
    masked, arrays = mask_and_arrays(mask, m, n)
    parts = [
        tuple(
            np.int32(x) if x is not None else np.broadcast_to(held, (2, 3, *held.shape[2:]))
            for which, x in enumerate(part.numbers)
            for held in [arrays.get(array_of_mask(number, which))]
        )
        for number, part in enumerate(masked.intervals)
    ]
    kinds = tuple(part.kind for part in masked.intervals)
    first, end, offsets, *gaps = (np.full((2, 3, m), 99, np.int32) for _ in range(3 + 2 * count_of_gaps(kinds)))
    given = Parts(first, end, *map(np.int32, masked.numbers[-2:]), tuple(gaps), (offsets,), tuple(parts))
    source = intervals(parts=kinds, offsets=True)
    launch(source.function, (6 * -(-m // QUERIES), 1, 1), source.threads, 0, given, np.int32(m), np.int32(n))
    return first, end, *gaps, offsets


def assert_found(mask, m, n):
    i, mask = np.arange(m), mask._fit((2, 3, m, n))
    *got, offsets = found(mask, m, n)
    for x, want in zip(got, mask._interval(i, n), strict=True):
        np.testing.assert_array_equal(x, np.broadcast_to(want, x.shape))
    if mask._segments is not None:
        first, end, own = mask._segments._rows(i, n)
        np.testing.assert_array_equal(*np.broadcast_arrays(np.where(first < end, offsets, 0),
                                                           np.where(first < end, own - i, 0)))  # fmt: skip


UNIONS = {  # band, and arrays of one; intervals of both kinds; windows and prefixes within segments; two gaps
    "bands": na.Window(0, 0) | na.Lengths(2, 4),
    "arrays": na.Lengths(LENGTHS, SHIFTS + 2) | na.Causal(SHIFTS) & na.Window(1, None, LENGTHS - 3),
    "intervals": KINDS[4] & na.Window(2, 2) | na.Prefix(LENGTHS, SHIFTS),
    "within": KINDS[1] & (na.Window(0, 0) & na.Window(1, 1) | na.Prefix(1) & na.Causal()),
    "first": KINDS[1] & na.Causal() & (na.Window(0, 0) | na.First(LENGTHS)),
    "without": KINDS[0] & (na.Causal(-1) | na.Window(0, None, 2)),
    "two": (na.Window(0, 0) | na.Lengths(1)) & na.Window(4, 1) & (na.Causal() | KINDS[4]),
}


@pytest.mark.parametrize("name", UNIONS)
def test_unions(world, name):
    """An interval, and the gaps in it; what no band shows."""
    mask, j = UNIONS[name]._fit((2, 3, 5, 6)), np.arange(6)
    first, end, *gaps, _ = (x[..., None] for x in found(mask, 5, 6))
    visible = (first <= j) & (j < end)
    for gap, gap_end in zip(gaps[::2], gaps[1::2], strict=True):
        visible &= ~((gap <= j) & (j < gap_end))
    band = All(tuple(part for part in mask._others if part._edges(5, 6)))
    np.testing.assert_array_equal(visible & band.dense(5, 6), np.broadcast_to(mask.dense(5, 6), visible.shape))
    assert len(gaps) == 2 * len(mask._gaps(np.arange(5), 6))


@pytest.mark.parametrize("name", MASKS)
def test_masks(world, name):
    assert_found(MASKS[name], 5, 6)


@simulated_only
@settings(max_examples=5, deadline=None, derandomize=True)
@given(segments(), WINDOWS)
def test_segments(call, ends):
    queries, keys, m, n = call
    for mask in (na.Causal(), na.Window(*ends), na.Prefix(min(n, 2)), na.First(2)):
        assert_found(na.Segments(queries, keys) & mask, max(m, 1), n)


def test_many_segments(rng, world):
    """More than a block has threads, most of them empty."""
    queries, keys = (np.sort(rng.integers(0, 301, 400)) for _ in range(2))
    assert_found(na.Segments(queries, keys) & na.Causal(), 300, 300)


# ----------------------------------------------------------------------------------------------------------- in calls
@simulated_only
@pytest.mark.parametrize(("device", "kind"), [
    ("CUDA cores", "segments by head"), pytest.param("tensor cores", "intervals", marks=pytest.mark.slow),
    ("warpgroups", "prefix offsets"),
])  # fmt: skip
def test_small_problems(rng, sizes, device, kind):
    dtype = np.float16 if device == "warpgroups" else np.float32
    sizes(1, 2, *((70, 135) if device == "warpgroups" else (34, 70)))
    with on(BY_UNIT[device]):
        check(*calls.qkv(rng, dtype, heads_k=1), rng, mask=calls.MASKS[kind](rng), causal=True, bits=ONE_KEY)


@compiled_only
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["segments by head", "intervals"])
def test_compiled(rng, sizes, kind):
    """As the PTX says. Segments of all heads, which are packed: shared/test_segments."""
    sizes(1, 2, 70, 135)
    with on(HOPPER):
        check(*calls.qkv(rng, np.float16, heads_k=1), rng, mask=calls.MASKS[kind](rng), causal=True, bits=ONE_KEY,
              dropout=na.Dropout(0.2, 3))  # fmt: skip


@compiled_only
@pytest.mark.parametrize(("unit", "kind"), [
    pytest.param(unit, kind, marks=pytest.mark.slow)
    for unit, kind in (("tensor cores", "sinks"), *(("warpgroups", kind) for kind in ("stream", "segments", "sinks")))
])  # fmt: skip
def test_unions_of_calls(rng, sizes, unit, kind):
    """Two intervals a query, with a gap between them."""
    sizes(1, 2, 70, 135)
    with on(BY_UNIT[unit]):
        check(*calls.qkv(rng, np.float16, heads_k=1), rng, mask=calls.UNIONS[kind](rng), bits=ONE_KEY)


@pytest.mark.slow
@simulated_only
def test_a_small_union(rng, sizes):
    sizes(1, 1, 34, 40)
    mask = na.Segments([0, 20, 34], [0, 30, 40]) & (na.Window(2, 0) | na.First(2))
    with on(BY_UNIT["tensor cores"]):
        check(*calls.qkv(rng, np.float32), rng, mask=mask, bits=ONE_KEY)


# ----------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize(("d", "deterministic"), [(24, False), (64, True), (128, False), (256, False)])
@pytest.mark.parametrize("kind", calls.MASKS)
def test_head_dims(rng, kind, d, deterministic):
    check(*calls.qkv(rng, np.float16, heads_k=2, d=d, e=d), rng, cupy, mask=calls.MASKS[kind](rng), causal=True,
          deterministic=deterministic, bits=ONE_KEY)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", calls.MASKS)
def test_masks_of_calls(rng, kind, dtype):
    check(*calls.qkv(rng, dtype), rng, cupy, mask=calls.MASKS[kind](rng), dropout=na.Dropout(0.5, 2), bits=ONE_KEY)


@pytest.mark.gpu
@pytest.mark.parametrize(("one", "other"), [*itertools.product(["segments by batch", "intervals"], calls.OTHER_MASKS)])
def test_pairs_of_masks(rng, one, other):
    mask = calls.MASKS[one](rng) & calls.OTHER_MASKS[other](rng)
    check(*calls.qkv(rng, np.float16, heads_k=2), rng, cupy, mask=mask, bits=ONE_KEY)


@pytest.mark.gpu
@pytest.mark.parametrize("score", calls.SCORES)
@pytest.mark.parametrize("kind", ["segments", "prefix", "intervals"])
def test_scores(rng, kind, score):
    check(*calls.qkv(rng, np.float16, heads_k=2), rng, cupy, mask=calls.MASKS[kind](rng), causal=True,
          score=calls.SCORES[score](rng, np.float16), bits=ONE_KEY)  # fmt: skip


FAULTS = {
    "queries[middle] <= i": "queries[middle] < i",
    "minimum(low, count - 1)": "minimum(low, count - 2)",
    "segment.own + mask.lo": "segment.own + mask.lo + 1",
    "segment.own + mask.hi + 1": "segment.own + mask.hi",
    "own = i + end - inside(queries[after], seqlen_q)": "own = i + end",
    "i + offset_of(offset, batch, head) + 1": "i + offset_of(offset, batch, head)",
    "maximum(segment.first + length_of": "maximum(length_of",
    "segment.first + inside(n_of": "inside(n_of",
    "inside(n_of(n, batch, head), segment.end - segment.first)": "n_of(n, batch, head)",
    "return maximum(first, other_first)": "return first",
    "first if some else seqlen_k": "first",
    "masks/test_rolling.py::test_on_devices": {
        "end = hidden + size - window": "end = hidden + size - window + 1",
        "first if begins_again else hidden": "hidden",
    },
}

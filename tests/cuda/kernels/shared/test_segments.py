"""Slots of packed arrays: every tile of every segment is in one of them, and what a segment's queries see."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

import numbattn as na
from numbattn.cuda.kernels.shared.segments import Segment, count_step, sight_step, slot_step
from numbattn.cuda.kernels.shared.visibility import FARTHEST, PACKED, Packing, Sight
from numbattn.cuda.plan.masks import numbers_and_arrays
from numbattn.cuda.plan.spec import PADDED
from numbattn.cuda.tile import block_index, index, thread_index
from tests.masks.examples import segments
from tests.tools.launch import launch, simulated_only

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
            out[slot, 4], out[slot, 5] = segment.first_line, which

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
    """Empty ones, too, and tokens before and behind all of them."""
    for side, tile in itertools.product("qk", (2, 4)):
        assert_every_tile_is_in_a_slot(*call, side, tile, by_warp)


def test_padded_lines_do_not_meet():
    """Tiles of PADDED queries, each segment's from a line of its own on."""
    lengths = [1, 127, 0, 128, 129, 0, 300]
    queries = np.cumsum([5, *lengths])
    m = queries[-1] + 5
    slots = slots_of(packing_of(queries, queries, m, m), "q", PADDED)
    lines = [slot["first_line"] // PADDED + slot["tile"] for slot in slots]
    assert lines == [*range(len(slots))]


@BY_WARP
def test_offsets_that_nobody_checked_stay_within_the_arrays(by_warp):
    for slot in slots_of(packing_of([-4, 50, 2], [9, -3, 99], 10, 20), "q", 4, by_warp):
        assert slot["tile"] >= 0
        assert 0 <= slot["first_query"] <= slot["first_query"] + max(slot["queries"], 0) <= 10
        assert 0 <= slot["first_key"] <= slot["first_key"] + max(slot["keys"], 0) <= 20


@simulated_only
@pytest.mark.parametrize("seed", range(40))
def test_sight(seed):
    """A segment's band: its own, and that of the packed arrays."""
    rng = np.random.default_rng(seed)
    queries, keys = (np.sort(rng.integers(0, 41, 4)) for _ in range(2))
    left, right, offset = (int(x) for x in rng.integers(-2, 12, 3))
    lengths = na.Lengths(int(rng.integers(41)), int(rng.integers(41)))
    mask = na.Segments(queries, keys) & na.Window(left, right) & na.Window(left + 9, right, offset) & lengths
    (*sides, _, _, own_lo, own_hi), *_ = numbers_and_arrays(mask, 40, 40)[0]
    packing = packing_of(queries, keys, 40, 40, own_lo, own_hi)
    sight, want = Sight(*map(np.int32, sides), packing=(packing,)), mask.dense(40, 40)
    for (m0, m_end), (n0, n_end) in zip(itertools.pairwise(queries), itertools.pairwise(keys)):
        segment = Segment(*map(np.int32, (m0, m_end - m0, n0, n_end - n0, 0)))
        for rows in (1, 16):
            lo, hi, some, length, *_ = sight_step((PACKED,), rows)(sight, segment)
            assert some <= -(-segment.queries // rows) * rows
            i, j = np.ogrid[: m_end - m0, : n_end - n0]
            seen = (i + lo <= j) & (j <= i + hi) & (i < some) & (j < length)
            np.testing.assert_array_equal(seen, want[m0:m_end, n0:n_end])

import itertools

import ml_dtypes
import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn.base.origin import Origin
from numbattn.call.problem import describe
from numbattn.cpu import arguments, operands, tile
from numbattn.masks import All
from tests.tools.process import printed


@numba.njit
def float8_of(bits):
    return np.array([tile.float_of_float8(x) for x in bits])


def test_every_float8():
    bits = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(float8_of(bits), bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("nothing", [operands.NO_MATRICES, operands.NO_TANGENTS], ids=["matrices", "tangents"])
def test_what_is_not_given_is_not_read(monkeypatch, nothing):
    """Its offsets, of which there are none, neither: of many matrices they would be far away."""
    matrix, axes = (tile.matrix, tile.matrix_along)[nothing.offsets.ndim - 2], nothing.offsets.ndim
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    at = (np.int8(3),) * axes  # a type that is compiled for this test
    assert numba.njit(lambda x, at, like: matrix(x, *at, like.dtype).shape)(nothing, at, np.zeros(0)) == (0, 0)


FLOATS = """
import numba, numpy as np
from numbattn.cpu import tile
bits = np.arange(2**16, dtype=np.uint16)
floats = numba.njit(lambda bits: [tile.float_of_float16(x) for x in bits])(bits)
np.testing.assert_array_equal(floats, bits.view(np.float16).astype(np.float32))
print(tile.HAS_FLOAT16)
"""


@pytest.mark.parametrize("setting", [
    {"NUMBA_CPU_NAME": "generic"},
    pytest.param({"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_float16_where_numba_compiles_for_another_cpu(setting):
    """Which may lack the instruction that this one has: LLVM then ends the process."""
    assert printed(FLOATS, **setting) == ["False"]


@pytest.mark.parametrize("function", [tile.float_of_float16, tile.shifted_float16])
def test_every_float16(function):
    bits = np.arange(2**16).astype(np.uint16)
    floats = numba.njit(lambda bits: np.array([function(x) for x in bits]))(bits)
    np.testing.assert_array_equal(floats, bits.view(np.float16).astype(np.float32))


M0, M_END, N0, N_END = 5, 8, 6, 10  # a tile of queries and keys
SHIFTS = -20, *range(-9, 8), 20
BANDS = np.array(list(itertools.product(SHIFTS, SHIFTS, (0, *range(4, 10)), (0, *range(5, 12)))))


@numba.njit
def seen_of_bands(bands, S, ends):
    for n in range(len(bands)):
        band = bands[n, 0], bands[n, 1], bands[n, 2], bands[n, 3]
        tile.mask_band(S[n], band, M0, N0)
        ends[n, 0], ends[n, 1] = tile.visible_keys(band, np.zeros((0, 0), np.int64), M0, M_END, 0, 20)


def test_bands():
    """Of a tile that lies before, across and behind their ends: what is hidden, and which keys are visible."""
    S, ends = np.zeros((len(BANDS), N_END - N0, M_END - M0), np.float32), np.zeros((len(BANDS), 2), int)
    seen_of_bands(BANDS, S, ends)
    lo, hi, queries, keys = BANDS.T[..., None, None]
    i, j = np.arange(M0, M_END), np.arange(20)[:, None]
    seen = (i + lo <= j) & (j <= i + hi) & (i < queries) & (j < keys)
    np.testing.assert_array_equal(S == 0, seen[:, N0:N_END])
    assert np.isneginf(S[S != 0]).all()
    assert ends[:, 0].min() >= 0
    some, narrow = seen.any((1, 2)), BANDS[:, 0] > BANDS[:, 1]  # lo > hi: nobody sees anything
    visible = seen[some].any(2)
    np.testing.assert_array_equal(ends[some, 0], visible.argmax(1))
    np.testing.assert_array_equal(ends[some, 1], 20 - visible[:, ::-1].argmax(1))
    assert (ends[:, 0] >= ends[:, 1])[~some & ~narrow].all()


UNUSED = operands.NO_MATRICES, arguments.NO_CELLS, arguments.NO_GRIDS


@numba.njit
def seen_of_intervals(intervals, band, S):
    tile.mask_intervals(S, intervals, M0, N0)
    return tile.visible_keys(band, intervals, M0, M_END, 2, 14)


@settings(deadline=None)  # it compiles
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=M_END, max_size=M_END + 2))
@example([(N0, N_END)] * M_END)
@example([(N0, N_END - 1)] * M_END)
@example([(N0 + 1, N_END)] * M_END)
def test_intervals(intervals):
    """Within a segment of the keys 2 to 13, under a band."""
    intervals = np.array([pair if pair[0] < pair[1] else (20, 0) for pair in intervals]).T.copy()
    S = np.zeros((N_END - N0, M_END - M0), np.float32)
    first, end = seen_of_intervals(intervals, (-1, 7, 20, 15), S)
    i, j = np.arange(M0, M_END), np.arange(20)[:, None]
    seen = (intervals[0, i] <= j) & (j < intervals[1, i])
    np.testing.assert_array_equal(S == 0, seen[N0:N_END])
    assert np.isneginf(S[S != 0]).all()
    keys = np.flatnonzero(seen.any(axis=1))
    lowest, highest = (keys[0], keys[-1] + 1) if keys.size else (20, 0)
    assert (first, end) == (max(lowest, 2, M0 - 1), min(highest, 14))


@numba.njit
def seen_beside_gaps(mask, intervals, S):
    tile.mask_intervals(S, intervals, M0, N0)
    return tile.tile_state(mask, intervals, 0, 0, M0, M_END, N0, N_END)


@settings(deadline=None)  # it compiles
@given(st.integers(0, 2**32 - 1), st.integers(0, 2))
@example(0, 1)
def test_gaps(seed, count):
    """A tile in which one gap hides all that the intervals show is empty; `end` before `first` is no gap."""
    bounds = np.random.default_rng(seed).integers(4, 13, (1 + count, 2, M_END)).astype(np.int64)
    bounds[0].sort(axis=0)
    bounds[1:, :, :] += np.random.default_rng(seed).choice([0, 0, 5]) * np.array([[[-1], [1]]])
    mask, S = arguments.MaskArrays((0, 0, 0, 0), arguments.NO_BANDS, *UNUSED), np.zeros((4, 3), np.float32)
    state = seen_beside_gaps(mask, bounds.reshape(-1, M_END), S)
    j = np.arange(N0, N_END)[:, None]
    inside = (bounds[:, 0, None, M0:] <= j) & (j < bounds[:, 1, None, M0:])
    beside = [inside[0] & ~gap for gap in inside[1:]]
    np.testing.assert_array_equal(S == 0, inside[0] & ~inside[1:].any(axis=0))
    assert (state == tile.EMPTY) == any(not seen.any() for seen in beside)


@numba.njit
def state_and_tile(mask, m0, m_end, n0, n_end, S):
    tile.mask_cells(S, mask, 0, 0, m0, n0)
    return tile.tile_state(mask, tile.intervals_of(mask, 0, 0), 0, 0, m0, m_end, n0, n_end)


GRIDS = {
    "dense": lambda rng, share: na.Dense(rng.random((30, 30)) < share),
    "rows": lambda rng, share: na.Dense(np.broadcast_to(rng.random((30, 1)) < share, (30, 30))),
    "columns": lambda rng, share: na.Dense(np.broadcast_to(rng.random(30) < share, (30, 30))),
    "bits": lambda rng, share: na.Bits.pack(rng.random((30, 30)) < share),
    "blocks": lambda rng, share: na.BlockSparse(rng.random((10, 5)) < share, (3, 7)),
}


@pytest.mark.parametrize("share", [0, 0.05, 0.5, 0.95, 1])
@pytest.mark.parametrize("kinds", ["dense", "rows", "columns", "bits", "blocks", "dense blocks", "blocks bits rows"])
def test_grids(rng, kinds, share):
    mask = All(tuple(GRIDS[kind](rng, share) for kind in kinds.split()))
    problem, inputs = describe(*np.zeros((3, 30, 4)), mask=mask)
    given, _held = arguments._mask_arrays(problem, inputs.mask)
    whole = np.broadcast_to(mask.dense(30, 30), (30, 30))
    for m0, n0, (queries, keys) in itertools.product((0, 3, 8, 20), (0, 5, 8, 21), [(1, 1), (9, 4), (4, 9)]):
        S = np.zeros((keys, queries), np.float32)
        state = state_and_tile(given, m0, m0 + queries, n0, n0 + keys, S)
        visible = whole[m0 : m0 + queries, n0 : n0 + keys].T
        np.testing.assert_array_equal(S == 0, visible)
        assert state != tile.EMPTY or not visible.any()
        assert state != tile.FULL or visible.all()
        if "bits" not in kinds:                 # whose cells are bytes
            assert state == tile.FULL or not visible.all()
        if kinds in ("dense", "rows", "columns", "blocks") or share == 0:
            assert state == tile.EMPTY or visible.any()


@numba.njit
def draw(kept, words, drops, batch, head, m0, n0):
    tile.draw(kept, words, drops, batch, head, m0, n0)


@settings(max_examples=50, deadline=None)
@given(*[st.integers(0, 50), st.integers(1, 40)] * 2, st.integers(0, 1), st.integers(0, 2), st.integers(0, 40))
@example(0, 40, 0, 40, 0, 0, 0)
def test_draw(m0, queries, n0, keys, batch, head, first):
    """Also where what is drawn is the threshold, as by an element of the example."""
    dropout = na.Dropout(26206 / 65536, seed=2**40 + 1, offset=6)
    origin = Origin(first, first + 1, batch=1, head=1, heads=4)
    drops, _, scale = arguments.numbers_of(dropout, origin, 1.0).arguments
    kept = np.full((keys, queries), 9, np.uint8)
    draw(kept, np.empty(2 * 64, np.uint64), drops, batch, head, m0, n0)
    whole = na.dropout_mask(dropout, (3, 4, 140, 140))[1 + batch, 1 + head]
    want = whole[first + m0 :, first + 1 + n0 :][:queries, :keys].T
    np.testing.assert_array_equal(kept, want)
    assert scale == dropout.scale


FAULTS = {
    "m_end = min(m_end, queries)\n": "pass\n",
    "max(m0 + lo, first), min(m_end + hi, keys, end)": "m0 + lo, min(m_end + hi, keys, end)",
    "first), min(m_end + hi, keys, end)": "first), min(m_end + hi - 1, keys, end)",
    "min(m_end + hi, keys, end)": "min(m_end + hi, keys)",
    "min_of(intervals[0, m0:m_end])": "intervals[0, m0]",
    "max_of(intervals[1, m0:m_end])": "intervals[1, m_end - 1]",
    "max_of(first) > n0": "min_of(first) > n0",
    "n0 + rows > min_of(end)": "n0 + rows > max_of(end)",
    "S[j, i] if first[i] <= n0 + j < end[i]": "S[j, i] if first[i] < n0 + j < end[i]",
    "m0 + cols - 1 + lo <= n0": "m0 + cols - 2 + lo <= n0",
    "n0 + rows - 1 <= m0 + hi": "n0 + rows - 2 <= m0 + hi",
    "m0 + cols <= queries and": "m0 <= queries and",
    "and n0 + rows <= keys": "and n0 + rows <= keys + 1",
    "max(n0 + j - hi - m0, 0)": "max(n0 + j - hi + 1 - m0, 0)",
    "n0 + j - lo + 1 - m0, queries - m0": "n0 + j - lo - m0, queries - m0",
    "if n0 + j < keys else first": "if n0 + j <= keys else first",
    "(m_end + rows - 1) // rows": "m_end // rows",
    "(n_end + cols - 1) // cols": "n_end // cols",
    "cells[r, c] == whole if whole": "cells[r, c] != 0 if whole",
    "if every < total": "if every < some",
    "bit = (n0 + j) // cols, (n0 + j) % cols * packed": "bit = (n0 + j) // cols, j % cols * packed",
    "first, r = 0, m0 // rows": "first, r = 0, 0",
    "np.uint64(m0 // 16 * 8)": "np.uint64(m0 // 2)",
    "(before + cols + 15) // 16": "(cols + 15) // 16",
    "(n0 + rows + 15) // 16 * 4": "n0 // 16 * 4 + (rows + 15) // 16 * 4",
    "if not 0 <= j < rows:": "if j >= rows:",
    "8 * (number // 2 % 2)": "8 * (number // 4 % 2)",
    "16 * (number % 2)": "16 - 16 * (number % 2)",
    "drawn >= drops.threshold": "drawn > drops.threshold",
    "test_draw": {
        "(at.batch + batch) * at.heads + at.head + head": "(at.batch + batch) * at.heads + head",
        "at.query + m0, at.key + n0\n": "at.query + m0, n0\n",
    },
    "test_what_is_not_given_is_not_read": {
        "[batch, head] if x.rows else 0, x.rows, x.cols, x.stride": "[batch, head], x.rows, x.cols, x.stride",
        "offsets[t, batch, head] if x.rows else 0": "offsets[t, batch, head]",
    },
    "test_every_float16": {
        "0 if is_finite else 0x7F800000": "0",
    },
    "test_every_float8": {
        "if magnitude >= np.int32(8)": "if True",
        "if magnitude != np.int32(0x7F)": "if True",
    },
    ("caches/test_kv_cache.py::test_8_bits[16-1-int8]", "caches/test_kv_cache.py::test_dtypes[2-16-float64]"): {
        "first // x.page_size == (end - 1) // x.page_size": "True",
        "(row // x.page_size + 1) * x.page_size": "(row // x.page_size + 2) * x.page_size",
        "row % x.page_size * place.row_stride": "row * place.row_stride",
        "of_scale + x.scales.row_stride": "of_scale",
    },
}

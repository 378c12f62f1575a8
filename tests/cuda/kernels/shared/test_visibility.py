"""Which keys a tile of queries sees, and the other way round; what the states of tiles say of the next."""

import operator
from functools import cache, reduce
from itertools import product

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.shared.visibility import (
    Cells,
    MaskArgs,
    band_of,
    element_test,
    in_band,
    needs_test,
    next_tile,
    visible_keys,
    visible_queries,
    word_steps,
)
from numbattn.cuda.tile import WARPGROUP, block_index, index, save, simt, thread_index
from numbattn.cuda.words.numbers import SIDES
from tests.tools.launch import launch

from ..states import KEPT, TILE_M, TILE_N, WALKED, random_cells, shown, states_of

# ---------------------------------------------------------------------------------------------------------- the band
M0, M_END, N0, N_END = map(np.int32, (5, 8, 6, 10))  # a tile of queries and keys
SHIFTS = -20, *range(-9, 8), 20
BANDS = np.array(list(product(SHIFTS, SHIFTS, (0, *range(4, 10)), (0, *range(5, 12)))), np.int32)
EVERYTHING = np.arange(20)


def sees(bands, i, j):
    """[band, query, key], by the definition."""
    lo, hi, queries, keys = bands.T[..., None, None]
    i = i[:, None]
    return (i + lo <= j) & (j <= i + hi) & (i < queries) & (j < keys)


@pytest.fixture
def bounds(world):
    return bounds_in(world)


@cache
def bounds_in(world):
    """visible_keys, visible_queries and in_band of the tile, for each band."""

    def kernel(bands, out):
        n = block_index() * 1024 + thread_index()
        if n < bands.shape[0]:
            band = bands[n, 0], bands[n, 1], bands[n, 2], bands[n, 3]
            out[n, 0], out[n, 1] = visible_keys(band, M0, M_END)
            out[n, 2], out[n, 3] = visible_queries(band, N0, N_END)
            out[n, 4] = in_band(band, M0, M_END, N0, N_END)

    out = np.full((len(BANDS), 5), -99, np.int32)
    launch(kernel, (-(-len(BANDS) // 1024), 1, 1), 1024, 0, BANDS, out)
    return out


def test_a_tile_is_whole_where_each_of_its_queries_sees_each_of_its_keys(bounds):
    tile = sees(BANDS, np.arange(M0, M_END), np.arange(N0, N_END))
    np.testing.assert_array_equal(bounds[:, 4], tile.all((1, 2)))


@pytest.mark.parametrize("side", ["keys", "queries"])
def test_all_that_is_visible_and_no_more(bounds, side):
    if side == "keys":
        (first, end), seen = bounds.T[:2], sees(BANDS, np.arange(M0, M_END), EVERYTHING).any(1)
    else:
        (first, end), seen = bounds.T[2:4], sees(BANDS, EVERYTHING, np.arange(N0, N_END)).any(2)
    assert (first >= 0).all()
    assert (end >= 0).all()
    some, narrow = seen.any(1), BANDS[:, 0] > BANDS[:, 1]       # lo > hi: nobody sees anything
    np.testing.assert_array_equal(first[some], seen[some].argmax(1))
    np.testing.assert_array_equal(end[some], len(EVERYTHING) - seen[some, ::-1].argmax(1))
    assert (first >= end)[~some & ~narrow].all()


FAR = 2**31 - 1
OWN = {  # edges, shifts
    "all": ([-3, 7, 9, 12], (0, 0)), "shifted": ([4, 4, 9, 12], (-6, 5)), "none": ([None] * 4, (0, 0)),
    "some": ([None, 3, None, 5], (0, 1)), "wider": ([-20, 20, 30, 30], (0, 0)),
    "far": ([-FAR, FAR, FAR, FAR], (2**30, -(2**30))), "farther": ([FAR, -FAR - 1, -FAR, -FAR - 1], (2**30, -(2**30))),
}  # fmt: skip


@pytest.mark.parametrize("case", OWN)
def test_a_band_of_its_own_is_narrowed_by_that_of_all(case):
    """For one head; of the other the edges lie elsewhere."""
    edges, shifts = OWN[case]
    lo, hi, queries, keys = everyone = -12, 13, 14, 15
    sides = tuple(side for side, edge in zip(SIDES, edges) if edge is not None)
    band_at = band_of(sides)

    def kernel(mask, out):
        if thread_index() == 0:
            band = band_at(mask, np.int32(0), np.int32(1))
            for i in range(4):
                out[i] = band[i]

    arrays = tuple(np.array([[0, edge]], np.int32) for edge in edges if edge is not None)
    added = tuple(np.int32(shift) for side, shift in zip(SIDES, shifts) if side in sides)
    out = np.full(4, -99, np.int32)
    launch(kernel, (1, 1, 1), 32, 0, MaskArgs(*map(np.int32, everyone), arrays, added), out)
    own = [other if edge is None else edge + shift for edge, shift, other in zip(edges, (*shifts, 0, 0), everyone)]
    wanted = [max(lo, min(own[0], keys)), min(hi, max(own[1], -queries)), max(min(own[2], queries), 0),
              max(min(own[3], keys), 0)]  # fmt: skip
    np.testing.assert_array_equal(out, wanted)


TILE = simt(4, 8, 32, 8, 1)


def turned(tiles, transposed):
    return tiles.swapaxes(1, 2) if transposed else tiles


@pytest.mark.parametrize("transposed", [False, True], ids=["upright", "on its side"])
def test_elements_of_a_band(transposed):
    """Of a tile that lies before, across and after the ends of the bands."""
    test, bands = element_test((), TILE, transposed), BANDS[::37]

    def kernel(bands, out):
        for n in range(bands.shape[0]):
            band = bands[n, 0], bands[n, 1], bands[n, 2], bands[n, 3]
            save(out[n], test((), band, np.int32(0), np.int32(0), M0, N0), 0)

    out = np.zeros((len(bands), *TILE.shape), np.bool_)
    launch(kernel, (1, 1, 1), TILE.threads, 0, bands, out)
    m, n = turned(out, transposed).shape[1:]
    np.testing.assert_array_equal(turned(out, transposed), sees(bands, M0 + np.arange(m), N0 + np.arange(n)))


# --------------------------------------------------------------------------------------------------------- the grids
M, N = 14, 60
MASKS = {
    "dense": lambda rng: na.Dense(rng.random((2, 3, M, N)) < 0.5),
    "bits": lambda rng: na.Bits.pack(rng.random((2, 3, M, N)) < 0.5),
    "blocks": lambda rng: na.BlockSparse(rng.random((2, 3, 5, 9)) < 0.5, block_size=(3, 7)),
    "tail": lambda rng: na.Tail(na.Bits.pack(rng.random((2, 3, M, M)) < 0.5)),
}


@pytest.mark.parametrize("transposed", [False, True], ids=["upright", "on its side"])
@pytest.mark.parametrize("kinds", [("dense",), ("bits",), ("blocks",), ("tail",), ("dense", "bits")], ids="+".join)
def test_elements_of_grids(rng, kinds, transposed):
    """As `dense` shows them, with a band; beyond the matrix there is nothing."""
    mask = reduce(operator.and_, [MASKS[kind](rng) for kind in kinds], na.Window(4, 45, offset=0))
    cells = [Cells(grid.cells, np.int32(grid.rows), np.int32(grid.cols)) for grid in mask._grids()]
    given = MaskArgs(*map(np.int32, mask._band(M, N)), grids=tuple(cells))
    test = element_test(kinds, TILE, transposed)

    def kernel(mask, places, out):
        band = mask.lo, mask.hi, mask.queries, mask.keys
        for n in range(places.shape[0]):
            batch, head, i0, j0 = places[n, 0], places[n, 1], places[n, 2], places[n, 3]
            save(out[n], test(mask, band, batch, head, i0, j0), 0)

    places = np.array([(0, 0, 0, 0), (0, 2, 5, 9), (0, 1, 10, 2), (1, 1, 6, 40), (1, 2, 12, 56)], np.int32)
    out = np.zeros((len(places), *TILE.shape), np.bool_)
    launch(kernel, (1, 1, 1), TILE.threads, 0, given, places, out)
    whole = np.pad(mask.dense(M, N), [(0, 0), (0, 0), (0, 8), (0, 8)])
    for tile, (batch, head, i0, j0) in zip(turned(out, transposed), places):
        m, n = tile.shape
        np.testing.assert_array_equal(tile, whole[batch, head, i0 : i0 + m, j0 : j0 + n])


# ---------------------------------------------------------------------------------------------------- states of tiles
def test_next_tile(rng):
    cells = random_cells(rng)
    mask, _ = states_of(cells, "q")
    some, _ = shown(cells)
    left = np.full((2, KEPT, WALKED), -1, np.int32)

    def walk(mask, left, end):
        tile = thread_index()
        if tile < left.shape[2]:
            for head in range(left.shape[0]):
                for kept in range(left.shape[1]):
                    left[head, kept, tile] = next_tile(mask, 0, head, kept, tile, end - tile)

    for end in (WALKED, WALKED - 7):
        launch(walk, (1, 1, 1), WARPGROUP, 0, mask, left, np.int32(end))
        for head, kept, tile in np.ndindex(2, KEPT, end):
            ahead = np.flatnonzero(some[head, kept, tile:end])
            assert left[head, kept, tile] == (ahead[0] if ahead.size else end - tile)


def test_words_of_tiles(rng):
    """Those that one of two kept tiles shows, each with what is known of the second, or the last there is."""
    cells = random_cells(rng)
    mask, _ = states_of(cells, "q")
    some, whole = shown(cells)
    first, after, _ = word_steps(2)

    def walk(mask, found, end):
        head, kept = thread_index() // KEPT, thread_index() % KEPT
        if head < found.shape[0]:
            tile, words = first(mask, 0, head, kept, kept + 1, index(2), end)
            while tile < end:
                found[head, kept, tile] = 1 + 2 * (words.own & np.uint32(1)) + 4 * (words.full & np.uint32(1))
                tile, words = after(mask, 0, head, kept, kept + 1, tile, words, end)

    for end in (WALKED, WALKED - 7):
        found = np.zeros((2, KEPT, WALKED), np.int32)
        launch(walk, (1, 1, 1), WARPGROUP, 0, mask, found, np.int32(end))
        own = np.minimum(np.arange(KEPT) + 1, KEPT - 1)
        want = (some | some[:, own]) * (1 + 2 * some[:, own] + 4 * whole[:, own])
        want[..., :2], want[..., end:] = 0, 0
        np.testing.assert_array_equal(found, want)


def test_tiles_are_whole_if_grids_and_band_say_so(rng):
    cells = random_cells(rng)
    mask, _ = states_of(cells, "q")
    _, whole = shown(cells)
    band, tested = (-9, 300, 1000, 1000), np.ones((2, KEPT, WALKED), np.bool_)
    lo, hi, queries, keys = map(np.int32, band)
    test = needs_test(("blocks",))

    def ask(mask, tested):
        tile = thread_index()
        if tile < tested.shape[2]:
            n0 = tile * TILE_N
            for head in range(tested.shape[0]):
                for kept in range(tested.shape[1]):
                    m0 = index(kept) * TILE_M
                    tested[head, kept, tile] = test(
                        mask, (lo, hi, queries, keys), 0, head, kept, tile, m0, m0 + TILE_M, n0, n0 + TILE_N
                    )

    launch(ask, (1, 1, 1), WARPGROUP, 0, mask, tested)
    i, j = np.arange(KEPT * TILE_M), np.arange(WALKED * TILE_N)
    in_band = sees(np.array([band]), i, j)[0].reshape(KEPT, TILE_M, WALKED, TILE_N).all((1, 3))
    np.testing.assert_array_equal(tested, ~(whole & in_band))
    assert (whole & in_band).any()
    assert (whole & ~in_band).any()


@pytest.mark.parametrize("kinds", [("tail",), ("tail", "blocks"), ("tail", "dense")], ids="+".join)
def test_tiles_of_a_tail_need_a_test(kinds):
    """And those before it as the rest of the mask says, which here shows all."""
    states = np.full((1, 1, 1, 2), 2**32 - 1, np.uint32)
    mask, test = MaskArgs(0, 0, 0, 0, states=(states,)), needs_test(kinds)

    def ask(mask, tested):
        n0 = thread_index() * TILE_N
        if thread_index() < tested.shape[0]:
            band = np.int32(-999), np.int32(999), np.int32(2 * TILE_N), np.int32(5 * TILE_N)
            tested[thread_index()] = test(mask, band, 0, 0, 0, thread_index(), 0, TILE_M, n0, n0 + TILE_N)

    tested = np.zeros(5, np.bool_)
    launch(ask, (1, 1, 1), WARPGROUP, 0, mask, tested)
    assert tested.tolist() == ([True] * 5 if "dense" in kinds else [False, False, False, True, True])


FAULTS = {
    "cuda/kernels/shared/visibility/band.py": {
        "maximum(mask.lo, lo_of(mask, batch, head, mask.lo))": "lo_of(mask, batch, head, mask.lo)",
        "minimum(mask.hi, hi_of(mask, batch, head, mask.hi))": "hi_of(mask, batch, head, mask.hi)",
        "minimum(mask.edges[at][batch, head], mask.keys - shift)": "mask.edges[at][batch, head]",
        "maximum(edge, -mask.queries - shift) + shift": "edge + shift",
        "return maximum(minimum(mask.edges[at][batch, head], otherwise), 0)":
            "return minimum(mask.edges[at][batch, head], otherwise)",
        "last = minimum(m_end, queries) - 1": "last = m_end - 1",
        "return maximum(m0 + lo, 0)": "return m0 + lo",
        "minimum(last + hi + 1, keys)": "minimum(last + hi, keys)",
        "if m0 <= last": "if m0 < last",
        "last = minimum(n_end, keys) - 1": "last = n_end - 1",
        "maximum(n0 - hi, 0)": "maximum(n0 - hi + 1, 0)",
        "minimum(last - lo + 1, queries)": "minimum(last - lo, queries)",
        "m_end - 1 + lo <= n0": "m_end - 2 + lo <= n0",
        "n_end <= m0 + hi + 1": "n_end <= m0 + hi + 2",
        "right and m_end <= queries": "right and m_end <= queries + 1",
        "and n_end <= keys\n": "\n",
        "where(i < queries, ": "where(i <= queries, ",
        "minimum(i + hi, keys - 1)": "minimum(i + hi, keys)",
        "cols_between(layout, n0, i + lo, last)": "cols_between(layout, n0, i + lo + 1, last)",
        "where(j < keys, ": "where(j <= keys, ",
        "minimum(j - lo, queries - 1)": "minimum(j - lo, queries)",
        "cols_between(layout, m0, j - hi, last)": "cols_between(layout, m0, j - hi - 1, last)",
    },
    "cuda/kernels/shared/visibility/cells.py": {
        "1 << (j & 7)": "128 >> (j & 7)",
        "head], i // rows, j // cols": "head], i // cols, j // rows",
        "one(mask, band, batch, head, i, j) & other": "one(mask, band, batch, head, i, j) | other",
        "j = j - first_of_tail(band)": "pass",
        "(j < 0) | bits": "bits",
        "seen_in_band(band, m0, n0) & looked_up(mask": "looked_up(mask",
        "cuda/kernels/any/test_intervals.py::test_small_problems[simulated-CUDA cores-segments by head]": {
            "i = minimum(i, seqlen_q - 1)": "pass",
            "(take(first[batch, head], i) <= j)": "(take(first[batch, head], i) < j)",
            "(j < take(end[batch, head], i))": "(j <= take(end[batch, head], i))",
        },
    },
    "cuda/kernels/shared/visibility/states.py": {
        "test_words_of_tiles": {
            "return minimum(number, kept_tiles - 1)": "return minimum(number, kept_tiles - 2)",
            "kept_tile(mask, kept + row)": "kept_tile(mask, kept)",
            "unread = (unread // WORD + 1) * WORD": "unread = unread + WORD",
            "tile, words, unread, end)": "tile, words, tile, end)",
            "moved(words, 1), (tile + WORD - 1)": "moved(words, 1), (tile + WORD)",
            "return minimum(tile + steps, end), moved(words, steps)": "return minimum(tile + steps, end), words",
        },
        "n_end > first_of_tail(band) or tested": "n_end > first_of_tail(band) or not tested",
        "WORD - at % WORD": "WORD",
        "minimum(steps, count)": "steps",
        "2 * (tile // WORD) + which": "2 * (tile // WORD) + 1 - which",
        "not (whole and in_band(band, m0, m_end, n0, n_end))": "not whole",
        "tile, which) & np.uint32(1)) != 0": "tile, which)) != 0",
        "cuda/kernels/any/test_score_gradient.py::test_gradients_where_tiles_are_empty": {
            "has_state(mask, batch, head, kept, tile, 0)": "has_state(mask, batch, head, kept, tile, 1)",
        },
    },
}

"""Every tile of every matrix is somebody's work, once."""

import numpy as np
import pytest

from numbattn.cuda.kernels.shared.schedule import (
    count_staggered,
    finish,
    next_number,
    place,
    place_grouped,
    place_staggered,
)
from numbattn.cuda.tile import WARP, block_index, grid_size, thread_index
from tests.tools.launch import launch

TILES, HEADS, BATCHES = 5, 3, 2
MATRICES = HEADS * BATCHES


def places(of, *more, count=TILES * MATRICES):
    def kernel(out):
        for number in range(thread_index(), out.shape[0], WARP):
            tile, batch, head = of(number, *more)
            out[number, 0] = tile
            out[number, 1] = batch
            out[number, 2] = head

    out = np.full((count, 3), -1, np.int32)
    launch(kernel, (1, 1, 1), 32, 0, out)
    return [tuple(row) for row in out.tolist()]


EVERY = [(tile, batch, head) for tile in range(TILES) for batch in range(BATCHES) for head in range(HEADS)]


def test_place_counts_tiles_slowest():
    assert places(place, np.int32(MATRICES), np.int32(HEADS)) == EVERY


@pytest.mark.parametrize("at_once", [1, 2, 4, 6, 100])
def test_place_near_counts_tiles_slowest_among_few_matrices(at_once):
    found = places(place_grouped, np.int32(TILES), np.int32(MATRICES), np.int32(HEADS), np.int32(at_once))
    assert sorted(found) == EVERY
    matrices = [batch * HEADS + head for _, batch, head in found]
    assert [m // at_once for m in matrices] == sorted(m // at_once for m in matrices)
    for group in range(-(-MATRICES // at_once)):
        tiles = [tile for (tile, _, _), m in zip(found, matrices) if m // at_once == group]
        assert tiles == sorted(tiles)


@pytest.mark.parametrize("at_once", [2, 4, 6, 100])
@pytest.mark.parametrize("tiles", [TILES, TILES - 1])
def test_staggered_places_count_tiles_slowest_among_few_matrices(at_once, tiles):
    """Half of which are half of their tiles behind the others."""
    about, half = [np.int32(x) for x in (tiles, MATRICES, HEADS, at_once)], -(-tiles // 2)
    found = places(place_staggered, *about, count=int(count_staggered(about[0], about[1], about[3])))
    found = [(number, tile, batch * HEADS + head) for number, (tile, batch, head) in enumerate(found) if tile >= 0]
    assert sorted(place for _, *place in found) == [[t, m] for t in range(tiles) for m in range(MATRICES)]
    for number, tile, matrix in found:
        assert number // at_once == matrix // (at_once // 2) * half + tile


def test_what_is_drawn_is_drawn_once_and_the_counters_are_set_back():
    def kernel(counters, taken):
        if thread_index() == 0:
            number = block_index()
            while number < taken.shape[0]:
                taken[number] += 1
                number = next_number(counters, grid_size())
            finish(counters, grid_size())

    counters, taken = np.zeros(2, np.uint32), np.zeros(20, np.int32)
    for _ in range(2):
        launch(kernel, (3, 1, 1), 32, 0, counters, taken)
        assert counters.tolist() == [0, 0]
    assert taken.tolist() == [2] * 20


FAULTS = {
    "return whole, number % size": "return whole, number",
    "split(matrix, heads)\n    return tile, batch, head\n\n\n@device\ndef place_grouped":
        "split(matrix, heads)\n    return tile, head, batch\n\n\n@device\ndef place_grouped",
    "at_once * tiles": "at_once",
    "minimum(at_once, matrices - first)": "at_once",
    "first + matrix": "matrix",
    "first + atomic_add": "atomic_add",
    "counters, 1, workers - 1)": "counters, 1, workers)",
    "counters[0] = 0": "pass",
    "matrix < 0 or matrix >= matrices or tile >= tiles": "matrix < 0 or matrix >= matrices",
    "(group - behind) * side + lane": "group * side + lane",
    "(matrices + side - 1) // side + 1)": "(matrices + side - 1) // side)",
    "cuda/plan/test_planner.py": {
        "if not has_band(problem):": "if False:",
        "min(max(4, L2_BYTES // max(nbytes_of_queries(problem), 1)), 8)":
            "min(L2_BYTES // max(nbytes_of_queries(problem), 1), 8)",
    },
    "cuda/test_passes.py::test_out[40-warpgroups]": {
        "    wait_on_dependencies()\n": "",
    },
}

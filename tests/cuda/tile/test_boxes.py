"""Tiles of boxes: where their elements lie, and moving them from and to registers."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    WARPGROUP,
    RaceError,
    SharedMemory,
    allocate,
    clear,
    copy_layout,
    get,
    load,
    put,
    save,
    sync_threads,
    wgmma,
)
from numbattn.cuda.tile.boxes import ALIGNMENT, Boxes
from tests.tools.launch import launch, poisoned, simulated_only


@pytest.mark.parametrize(("rows", "cols", "dtype"), [(64, 64, np.float16), (80, 192, np.float16), (16, 64, np.float32)])
def test_every_element_has_a_place(rows, cols, dtype):
    plan = Boxes(rows, cols, np.dtype(dtype), 0)
    places = plan.place(*np.ogrid[:rows, :cols])
    np.testing.assert_array_equal(np.sort(places, axis=None), np.arange(plan.nbytes // plan.dtype.itemsize))


def test_chunks_of_eight_rows_are_swizzled():
    """Chunk c of row r lies where chunk c ^ (r % 8) would; the next 64 columns come after all rows."""
    plan = Boxes(24, 128, np.dtype(np.float16), 0)
    for r, box, c in np.ndindex(24, 2, 8):
        chunk = plan.place(r, box * 64 + c * 8 + np.arange(8)) * 2
        np.testing.assert_array_equal(chunk, box * 24 * 128 + r * 128 + (c ^ r % 8) * 16 + 2 * np.arange(8))


def test_parts_of_a_tile():
    shared = SharedMemory()
    plan = shared.boxes(16, 192, np.float16, stages=2)
    parts = plan.parts(64)
    assert (parts.shape, parts.stages, parts.offset) == ((16, 64), 6, plan.offset)
    for stage, part in np.ndindex(2, 3):
        start = parts.offset + (stage * 3 + part) * parts.stride
        assert start == plan.offset + stage * plan.stride + 2 * plan.place(0, 64 * part)


def test_some_rows_of_a_tile():
    plan = SharedMemory().boxes(48, 128, np.float16, stages=2)
    rows = plan.some_rows(16, 24)
    assert (rows.shape, rows.box, rows.stride) == ((24, 128), (1, 1, 24, 64), plan.stride)
    row, col = np.ogrid[:24, :128]
    np.testing.assert_array_equal(
        rows.offset + 2 * rows.place(row, col), plan.offset + 2 * plan.place(16 + row, col)
    )
    assert (rows.loaded, plan.loaded) == (24 * 256, 48 * 256)


def test_boxes_start_where_the_pattern_does():
    shared = SharedMemory()
    shared.tile(1, 8, np.float32)
    tiles = [shared.boxes(8, 64, np.float16, stages=3), shared.boxes(64, 64, np.float16)]
    assert [tile.offset for tile in tiles] == [ALIGNMENT, 4 * ALIGNMENT]
    assert shared.nbytes == 12 * ALIGNMENT


@pytest.mark.parametrize("layout", [wgmma(128), copy_layout(16, 128, WARPGROUP, 8)], ids=str)
def test_rows_are_moved_and_cleared(layout):
    """The rest of a tile stays as it is."""
    shared, rows = SharedMemory(), layout.rows.size
    TILE, COPY = shared.boxes(80, 128, np.float16), copy_layout(80, 128, WARPGROUP, 8)
    ROWS = TILE.some_rows(16, rows)

    def move(x, y):
        put(allocate(TILE), load(y, COPY, 0))
        sync_threads()
        put(allocate(ROWS), load(x, layout, 0))
        sync_threads()
        clear(allocate(ROWS), 5)
        sync_threads()
        save(y, get(allocate(TILE), COPY), 0)

    x, y = (np.random.default_rng(0).standard_normal((n, 128)).astype(np.float16) for n in (rows, 80))
    want = np.concatenate([y[:16], x[:5], np.zeros((rows - 5, 128), np.float16), y[16 + rows :]])
    launch(move, (1, 1, 1), WARPGROUP, shared.nbytes, x, y)
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("layout", [wgmma(128), copy_layout(64, 128, WARPGROUP, 8)], ids=str)
def test_put_and_get(layout):
    shared = SharedMemory()
    TILE, OTHER = shared.boxes(64, 128, np.float16, stages=2), copy_layout(64, 128, WARPGROUP, 2)

    def move(x, y):
        for stage in range(2):
            put(allocate(TILE, stage), load(x, layout, 64 * stage))
        sync_threads()
        for stage in range(2):
            save(y, get(allocate(TILE, stage), OTHER), 64 * stage)

    x = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float16)
    y = poisoned((128, 128), np.float16)
    launch(move, (1, 1, 1), WARPGROUP, shared.nbytes, x, y)
    np.testing.assert_array_equal(y, x)


@simulated_only
def test_boxes_are_watched():
    shared = SharedMemory()
    TILE, PUT, GET = shared.boxes(64, 64, np.float16), wgmma(64), copy_layout(64, 64, WARPGROUP, 8)

    def move(x, y):
        tile = allocate(TILE)
        put(tile, load(x, PUT, 0))
        save(y, get(tile, GET), 0)

    x = np.zeros((64, 64), np.float16)
    with pytest.raises(RaceError, match=r"thread \d+ reads"):
        launch(move, (1, 1, 1), WARPGROUP, shared.nbytes, x, x.copy())


def test_sums_of_a_warpgroup_are_put_as_matrices():
    shared = SharedMemory()
    TILE, SUMS, COPY = shared.boxes(64, 128, np.float16), wgmma(128), copy_layout(64, 128, WARPGROUP, 8)

    def move(x, y):
        put(allocate(TILE), load(x, SUMS, 0))
        sync_threads()
        save(y, get(allocate(TILE), COPY), 0)

    x, y = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32), poisoned((64, 128), np.float16)
    known = launch(move, (1, 1, 1), WARPGROUP, shared.nbytes, x, y, cc=(9, 0, "a"))
    np.testing.assert_array_equal(y, x.astype(np.float16))
    if known:
        assert known.count("stmatrix") == 8
        assert not any(known.conflicts.values())


@pytest.mark.parametrize("first", [0, 5, 79, 80])
def test_rows_are_cleared(first):
    shared = SharedMemory()
    TILE, COPY = shared.boxes(80, 128, np.float16), copy_layout(80, 128, WARPGROUP, 8)

    def keep(x, y, first):
        put(allocate(TILE), load(x, COPY, 0))
        sync_threads()
        clear(allocate(TILE), first)
        sync_threads()
        save(y, get(allocate(TILE), COPY), 0)

    x, y = np.ones((80, 128), np.float16), poisoned((80, 128), np.float16)
    launch(keep, (1, 1, 1), WARPGROUP, shared.nbytes, x, y, np.int32(first))
    np.testing.assert_array_equal(y[:, 0], np.arange(80) < first)
    assert (y == y[:, :1]).all()


FAULTS = {
    "stages=self.stages * (self.cols // cols), room=0": "room=0",
    "cuda/tile/test_copies.py": {
        "turn = down % PERIOD, across % plan.width": "turn = 0, across % plan.width",
        "(across // plan.width * plan.box_rows + down - turn[0])": "(down - turn[0])",
    },
    "above=self.above or self.rows": "above=0",
    "self.offset + first * ROW_BYTES": "self.offset",
    "self.nbytes // self.box_rows * self.rows": "self.nbytes",
}

"""Tiles through the memory that a block shares: put and got as they are, turned, in stages."""

from dataclasses import replace

import numpy as np
import pytest

from numbattn.cuda.tile import SharedMemory, allocate, columns, dot, get, line, load, mma, put, save, simt, sync_threads
from numbattn.cuda.tile.shared_memory import TileType
from tests.tools.launch import MISUSED, compiled_only, launch, poisoned

from .tiles import ALL_LAYOUTS, DTYPES, THREADS, numbers, start


@compiled_only
def test_types_of_different_places_differ(world):
    """Though messages call them by one name: Numba takes equal types for one."""
    one = SharedMemory().boxes(64, 40, np.float16)
    places = [replace(one, room=room, stages=stages) for room, stages in ((0, 1), (128, 1), (0, 2))]
    kept = [TileType(place) for place in places]
    assert [kind.plan for kind in kept] == places


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("way_in", ["copy_layout", "simt in blocks"])
def test_through_shared_memory(dtype, transposed, way_in):
    shared = SharedMemory()
    shared.tile(3, 5, np.float16)  # something before it
    TILE = shared.tile(32, 32, dtype)
    IN, OUT = ALL_LAYOUTS[way_in], ALL_LAYOUTS["mma"]
    x, y = numbers((32, 32)), poisoned((32, 32))

    def straight(source, target):
        tile = allocate(TILE)
        put(tile, load(source, IN, 0))
        sync_threads()
        save(target, get(tile, OUT), 0)

    def turned(source, target):
        tile = allocate(TILE)
        put(tile.T, load(source, IN, 0))
        sync_threads()
        save(target, get(tile, OUT), 0)

    launch(turned if transposed else straight, (1, 1, 1), THREADS, shared.nbytes, x, y)
    np.testing.assert_array_equal(y, (x.T if transposed else x).astype(dtype).astype(np.float32))


def test_stages_lie_apart():
    shared, layout = SharedMemory(), ALL_LAYOUTS["copy_layout"]
    TILE = shared.tile(32, 32, np.float32, stages=2)
    x, y = numbers((64, 32)), poisoned((64, 32))

    def copy(source, target):
        for stage in range(2):
            put(allocate(TILE, stage), load(source, layout, 32 * stage))
        for stage in range(2):
            save(target, get(allocate(TILE, stage), layout), 32 * stage)

    launch(copy, (1, 1, 1), THREADS, shared.nbytes, x, y)
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_products_of_some_columns(dtype):
    """Summed over the parts it is the whole one."""
    shared, layout = SharedMemory(), ALL_LAYOUTS["copy_layout"]
    PLACE, SUMS = shared.tile(32, 32, dtype), mma(32, 32, THREADS)
    x, y = np.rint(numbers((32, 32)) % 7).astype(np.float32), poisoned((32, 32))

    def square(source, target):
        put(allocate(PLACE), load(source, layout, 0))
        sync_threads()
        total = dot(SUMS, columns(allocate(PLACE), 0, 2), columns(allocate(PLACE), 0, 2).T)
        save(target, dot(total, columns(allocate(PLACE), 1, 2), columns(allocate(PLACE), 1, 2).T), 0)

    launch(square, (1, 1, 1), THREADS, shared.nbytes, x, y)
    np.testing.assert_array_equal(y, x @ x.T)


def test_parts_of_columns_are_whole_vectors():
    PLACE, LAYOUT = SharedMemory().tile(32, 24, np.float16), ALL_LAYOUTS["mma"]

    def kernel(x):
        put(columns(allocate(PLACE), 0, 2), load(x, LAYOUT, 0))

    with pytest.raises(MISUSED, match="columns: float16 32x24 at 0 has no 2 parts of whole vec"):
        start(kernel, THREADS, 1 << 12, numbers((32, 32)))


def test_vectors_through_shared_memory():
    shared = SharedMemory()
    LINE = shared.tile(1, 32, np.float32)
    layout = ALL_LAYOUTS["mma"]
    ROWS, COLS = layout.row_vector(), layout.col_vector()
    x, down, across = numbers(32), poisoned(32), poisoned(32)

    def turn(source, down, across):
        line = allocate(LINE)
        put(line, load(source, COLS, 0))
        sync_threads()
        save(across, get(line, COLS), 0)
        save(down, get(line.T, ROWS), 0)

    launch(turn, (1, 1, 1), THREADS, shared.nbytes, x, down, across)
    np.testing.assert_array_equal(down, x)
    np.testing.assert_array_equal(across, x)


@compiled_only
def test_shared_tiles_move_in_vectors_without_conflicts():
    shared = SharedMemory()
    TILE = shared.tile(32, 32, np.float32)
    layout = ALL_LAYOUTS["copy_layout"]

    def copy(source, target):
        tile = allocate(TILE)
        put(tile, load(source, layout, 0))
        sync_threads()
        save(target, get(tile, layout), 0)

    x, y = numbers((32, 32)), poisoned((32, 32))
    kernel = launch(copy, (1, 1, 1), THREADS, shared.nbytes, x, y)
    assert kernel.count(r"st\.shared\.v4") == kernel.count(r"ld\.shared\.v4") == 4
    assert not +kernel.conflicts


def test_lines():
    """As rows and as columns, and of some columns."""
    shared = SharedMemory()
    TILE, IN = shared.tile(32, 32, np.float32), ALL_LAYOUTS["simt in blocks"]
    ROW, COLUMN, HALF = IN.col_vector(), IN.row_vector(), simt(1, 16, THREADS, 16, 1)
    x, rows, turned, halves = numbers((32, 32)), *(poisoned((32, 32)) for _ in range(2)), poisoned((32, 16))

    def kernel(source, rows, turned, halves):
        put(allocate(TILE), load(source, IN, 0))
        sync_threads()
        for row in range(32):
            own = line(allocate(TILE), row)
            save(rows[row], get(own, ROW), 0)
            save(turned[row], get(own.T, COLUMN), 0)
            save(halves[row], get(line(columns(allocate(TILE), 1, 2), row), HALF), 0)

    launch(kernel, (1, 1, 1), THREADS, shared.nbytes, x, rows, turned, halves)
    for found in (rows, turned):
        np.testing.assert_array_equal(found, x)
    np.testing.assert_array_equal(halves, x[:, 16:])


def test_what_has_no_lines():
    shared = SharedMemory()
    TILE, BOXES, ROW = shared.tile(4, 64, np.float16), shared.boxes(4, 64, np.float16), simt(1, 64, 32, 32, 1)

    def turned(y):
        save(y, get(line(allocate(TILE).T, 0), ROW), 0)

    def of_boxes(y):
        save(y, get(line(allocate(BOXES), 0), ROW), 0)

    for kernel in (turned, of_boxes):
        with pytest.raises(MISUSED, match=r"line: .* has no rows one after the other"):
            launch(kernel, (1, 1, 1), 32, shared.nbytes, poisoned(64))


FAULTS = {
    "test_lines": {
        "tile.places[row : row + 1]": "tile.places[:1]",
        "b.mul(row, I32(pitch))": "row",
    },
    "test_what_has_no_lines": {"SharedTile) or plan.transposed:": "SharedTile):"},
    "first = int(part) * plan.cols": "first = 0",
    "b.mul(part, I32(plan.cols))": "I32(0)",
    "plan.transposed or plan.cols % (parts * plan.vector)": "plan.transposed",
    "b.mul(stage, I32(plan.stride))": "I32(0)",
    "    @property\n    def key(self):\n        return self.plan\n": "",
    "cuda/tile/places.py": {
        "cols + self.vector if self.rows > 1": "cols if self.rows > 1",
        "self.whole or self.cols": "self.cols",
        "(1, self.pitch) if self.transposed": "(1, self.cols) if self.transposed",
    },
    "cuda/tile/test_copies.py": {
        "down * down_step + across * across_step": "down * down_step",
    },
    ("cuda/tile/test_shared_memory.py", "cuda/tile/test_boxes.py"): {
        "self.memory.note_read(self.granules[at], self.pages, work, by)": "pass",
        "plan.offset + stage * plan.stride": "plan.offset",
    },
}

"""Tiles in register order, and adding them up in the background."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    WARPGROUP,
    RaceError,
    SharedMemory,
    add_lines,
    add_registers,
    allocate,
    bulk_add,
    bulk_store,
    fence_async_proxy,
    get_registers,
    load,
    load_lines,
    load_registers,
    mma,
    put_registers,
    save,
    sync_warpgroup,
    thread_index,
    tma_store_wait,
    wgmma,
)
from tests.tools.launch import MISUSED, launch, poisoned, simulated_only

from .tiles import SEEDS, numbers, start

TILE, SIZE = wgmma(64), 64 * 64


def adder(without=""):
    """sums[1] += x twice; y is what lies in shared memory, z what sums[1] is."""
    shared = SharedMemory()
    PLACE = shared.tile(1, SIZE, np.float32)
    fences, meets, waits = (without != step for step in ("fence_async_proxy", "sync_warpgroup", "tma_store_wait"))

    def add(x, sums, y, z):
        place, leads = allocate(PLACE), thread_index() == 0
        for _ in range(2):
            put_registers(place, load(x, TILE, 0))
            if fences:
                fence_async_proxy()
            if meets:
                sync_warpgroup()
            if leads:
                bulk_add(sums, 1, place)
                if waits:
                    tma_store_wait()
            sync_warpgroup()
        save(y, get_registers(place, TILE), 0)
        save(z, load_registers(sums, 1, TILE), 0)

    return add, shared.nbytes


def run_adder(seed=None, **faults):
    x, sums = numbers((64, 64)), np.zeros(3 * SIZE, np.float32)
    y, z = poisoned((64, 64)), poisoned((64, 64))
    kernel, nbytes = adder(**faults)
    start(kernel, WARPGROUP, nbytes, x, sums, y, z, seed=seed)
    return x, sums, y, z


@pytest.mark.parametrize(("add", "read", "cc", "instruction"), [
    (add_registers, load_registers, (9, 0), r"red\.global\.add\.v4\.f32"),
    (add_registers, load_registers, (8, 0), r"red\.global\.add\.f32"),
    (add_lines, load_lines, (9, 0), r"red\.global\.add\.f32"),
], ids=["four at once", "one by one", "lines"])  # fmt: skip
def test_threads_add_their_registers(add, read, cc, instruction):
    """By two blocks, to the second of two tiles; of a layout of several rows."""
    LAYOUT, SIZE = mma(32, 32, 64), 32 * 32

    def kernel(x, sums):
        add(sums, 1, load(x, LAYOUT, 0))

    def reader(sums, y):
        save(y, read(sums, 1, LAYOUT), 0)

    x, sums, y = numbers((32, 32)), np.zeros(2 * SIZE, np.float32), poisoned((32, 32))
    found = launch(kernel, (2, 1, 1), 64, 0, x, sums, cc=cc)
    assert not sums[:SIZE].any()
    assert sorted(sums[SIZE:]) == sorted(2 * x.ravel())
    first = [sums[SIZE + 4 * i] for i in range(2)] if add is add_registers else sums[SIZE : SIZE + 2]
    np.testing.assert_array_equal(first, [2 * x[0, 0], 2 * x[0, 2]])    # of threads 0 and 1
    launch(reader, (1, 1, 1), 64, 0, sums, y, cc=cc)
    np.testing.assert_array_equal(y, 2 * x)
    if found:
        assert found.count(instruction) == found.count(r"red\.") == SIZE // 64 // (4 if "v4" in instruction else 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_add_counts(seed):
    x, sums, y, z = run_adder(seed)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(z, 2 * x)
    assert not sums[:SIZE].any()
    assert not sums[2 * SIZE :].any()


@simulated_only
@pytest.mark.parametrize(("without", "text"), [
    ("fence_async_proxy", r"thread 0 reads what thread \d+ wrote .* no fence_async_proxy\(\) before"),
    ("sync_warpgroup", "thread 0 reads"),
    ("tma_store_wait", "overwrites what a store of thread 0 reads"),
])  # fmt: skip
def test_what_adding_needs(without, text):
    with pytest.raises(RaceError, match=text):
        run_adder(without=without)


@pytest.mark.parametrize(("size", "dtype"), [(SIZE // 2, np.float32), (SIZE, np.float64)])
def test_a_place_holds_the_whole_tile(size, dtype):
    PLACE = SharedMemory().tile(1, size, dtype)

    def kernel(x):
        put_registers(allocate(PLACE), load(x, TILE, 0))

    with pytest.raises(MISUSED, match=f"put_registers: no {size} float.* hold {SIZE} float32"):
        start(kernel, WARPGROUP, 1 << 16, numbers((64, 64)))


def test_added_to_are_float32():
    def kernel(x, sums):
        add_registers(sums, 0, load(x, TILE, 0))

    with pytest.raises(MISUSED, match=f"add_registers: no .*float64 hold {SIZE} float32"):
        start(kernel, WARPGROUP, 0, numbers((64, 64)), np.zeros(SIZE))


@pytest.mark.parametrize(("rows", "sums"), [
    (1, np.zeros(SIZE)), (1, np.zeros((2, SIZE), np.float32)), (2, np.zeros(SIZE, np.float32)),
], ids=["float64", "of two axes", "two rows"])  # fmt: skip
def test_what_is_added_is_part_of_a_line(rows, sums):
    PLACE = SharedMemory().tile(rows, SIZE // rows, np.float32)

    def kernel(sums):
        bulk_add(sums, 0, allocate(PLACE))

    with pytest.raises(MISUSED, match=f"bulk_add: float32 {rows}x.* is no part of a line"):
        start(kernel, WARPGROUP, 1 << 15, sums)


def test_what_is_stored_takes_the_place_of_what_was_there():
    shared = SharedMemory()
    PLACE, x, sums = shared.tile(1, SIZE, np.float32), numbers((64, 64)), np.full(3 * SIZE, np.nan, np.float32)

    def kernel(x, sums):
        put_registers(allocate(PLACE), load(x, TILE, 0))
        fence_async_proxy()
        sync_warpgroup()
        if thread_index() == 0:
            bulk_store(sums, 1, allocate(PLACE))
            tma_store_wait()

    start(kernel, WARPGROUP, shared.nbytes, x, sums)
    assert np.isnan(sums.reshape(3, SIZE)[[0, 2]]).all()
    np.testing.assert_array_equal(np.sort(sums[SIZE : 2 * SIZE]), np.sort(x.ravel()))


def test_only_float32_is_added():
    PLACE = SharedMemory().tile(1, SIZE, np.int32)

    def kernel(sums):
        bulk_add(sums, 0, allocate(PLACE))

    with pytest.raises(MISUSED, match="bulk_add: got int32, expected float32"):
        start(kernel, WARPGROUP, 1 << 15, np.zeros(SIZE, np.int32))


FAULTS = {
    "run + i % run\n": "run\n",
    "_places(tile.layout)] +=": "_places(tile.layout)] =",
    "_places(tile.layout, 1)] +=": "_places(tile.layout)] +=",
    "run if capability() >= (9, 0) else 1": "1",
    "(i // run * tile.layout.threads) * run + i % run": "i * tile.layout.threads",
    "_check(word, tile.layout, array)": "pass",
    "array[int(number) * cols :][:cols] +=": "array[:cols] +=",
    'bulk_group.add.f32"': 'bulk_group.add.u32"',
    "array[int(number) * cols :][:cols] = ": "array[:cols] = ",
    'shared::cta.bulk_group"))': 'shared::cta.bulk_group.add.f32"))',
    "I64(plan.cols)": "I64(1)",
    "I64(prod(layout.shape))": "I64(0)",
    "b.mul(b.and_(thread_index(b), I32(layout.threads - 1)), I32(run))": "b.and_(thread_index(b), I32(127))",
    'if name_of(array.dtype) != "float32":': "if False:",
}

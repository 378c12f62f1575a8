"""Tiles that are stored in the background, and the fence before it; loads fill the stages of test_pipeline."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    WARPGROUP,
    Pipeline,
    RaceError,
    SharedMemory,
    acquire,
    advance,
    allocate,
    bulk_load,
    convert,
    fence_async_proxy,
    get,
    index,
    init_pipelines,
    load,
    put,
    release,
    save,
    simt,
    simulate,
    stage,
    sync_threads,
    sync_warpgroup,
    thread_index,
    tma_load,
    tma_load_pages,
    tma_store,
    tma_store_wait,
    wait,
    warpgroup_index,
    wgmma,
)
from tests.tools.launch import MISUSED, poisoned, simulated_only, tensor_map

from .tiles import SEEDS, start

ROWS = np.int32(64)
TILE = wgmma(64)
COLS = TILE.col_vector()


def sender(without="", late=""):
    """Rows of x + 1 to rows of matrices, 64 after 64, through one tile that is sent."""
    shared = SharedMemory()
    BOXES = shared.boxes(64, 64, np.float16)
    shares, shares_late = "fence_async_proxy" not in (without, late), late == "fence_async_proxy"
    steps = "first sync_warpgroup", "tma_store_wait", "second sync_warpgroup"
    meets, waits, meets_again = (without != step for step in steps)

    def move(x, mY, count):
        tile, n = allocate(BOXES), index(0)
        leads = thread_index() == 0
        while n < count:
            put(tile, load(x, TILE, n * ROWS))
            if shares:
                fence_async_proxy()
            if meets:
                sync_warpgroup()
            if shares_late:
                fence_async_proxy()
            if leads:
                tma_store(mY, tile, 0, 1, n * ROWS)
                if waits:
                    tma_store_wait()
            if meets_again:
                sync_warpgroup()
            n = n + 1

    return move, shared.nbytes


def run_sender(x, y, seed=None, **faults):
    kernel, nbytes = sender(**faults)
    start(kernel, WARPGROUP, nbytes, x, tensor_map(y, (1, 1, 64, 64)), np.int32(3), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_send_stops_at_the_end(rng, seed):
    x = rng.standard_normal((150, 56)).astype(np.float16)
    y = poisoned((1, 2, 150, 56), np.float16)
    run_sender(x, y, seed)
    np.testing.assert_array_equal(y[0, 1], x)
    assert np.isnan(y[0, 0]).all()


@simulated_only
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fault", "text"), [
    ({"without": "fence_async_proxy"}, r"thread 0 reads what thread \d+ wrote .* no fence_async_proxy\(\) before"),
    ({"late": "fence_async_proxy"}, r"thread 0 reads what thread \d+ wrote .* no fence_async_proxy\(\) before"),
    ({"without": "first sync_warpgroup"}, r"thread 0 reads"),
    ({"without": "tma_store_wait"}, "overwrites what a store of thread 0 reads"),
    ({"without": "second sync_warpgroup"}, "overwrites what a store of thread 0 reads|thread 0 reads what"),
], ids=str)  # fmt: skip
def test_what_storing_needs(fault, text, seed):
    x = np.zeros((192, 64), np.float16)
    with pytest.raises(RaceError, match=text):
        run_sender(x, np.zeros((1, 2, 192, 64), np.float16), seed, **fault)


@simulated_only
def test_a_stage_that_was_written_to_needs_sharing_before_it_is_filled():
    def kernel(shared):
        shared_memory = SharedMemory()
        PIPELINE = Pipeline.within(shared_memory, shared_memory.boxes(64, 64, np.float16), readers=1)

        def refill(x):
            init_pipelines(PIPELINE)
            sync_threads()
            X = stage(PIPELINE, 0)
            put(X.tile, load(x[0, 0], TILE, 0))
            if shared:
                fence_async_proxy()
            sync_warpgroup()
            if thread_index() == 0:
                tma_load(X, x, 0, 0, 0)

        return refill, shared_memory.nbytes

    x = np.zeros((1, 1, 64, 64), np.float16)
    for shared in (True, False):
        refill, nbytes = kernel(shared)
        if shared:
            simulate(refill, (1, 1, 1), WARPGROUP, nbytes, x)
        else:
            with pytest.raises(RaceError, match=r"overwrites what thread \d+ wrote .* no fence_async_proxy"):
                simulate(refill, (1, 1, 1), WARPGROUP, nbytes, x)


def adder_of_lines():
    """y = x + line, 64 rows and as many elements of the line at a time: both fill a stage."""
    shared = SharedMemory()
    PIPELINE = Pipeline.within(shared, shared.boxes(64, 64, np.float16, 2), readers=1, fills=2)
    LINE = shared.tile(1, 64, np.float32, 2)

    def add(mX, line, y, count):
        init_pipelines(PIPELINE)
        sync_threads()
        X, n = stage(PIPELINE, 0), index(0)
        if warpgroup_index() == 1:
            if thread_index() == WARPGROUP:
                while n < count:
                    acquire(X)
                    tma_load(X, mX, 0, 0, n * ROWS)
                    bulk_load(X, allocate(LINE, X.index), line, n * ROWS)
                    X, n = advance(X), n + 1
        else:
            while n < count:
                wait(X)
                total = convert(get(X.tile, TILE), np.float32) + get(allocate(LINE, X.index), COLS)
                sync_warpgroup()
                release(X)
                save(y, total, n * ROWS)
                X, n = advance(X), n + 1

    return add, shared.nbytes


@pytest.mark.parametrize("seed", SEEDS)
def test_lines_beside_a_tile(rng, seed):
    x, line = rng.standard_normal((1, 1, 320, 64)).astype(np.float32), rng.standard_normal(320).astype(np.float32)
    y = poisoned((320, 64))
    kernel, nbytes = adder_of_lines()
    x = x.astype(np.float16)
    start(kernel, 2 * WARPGROUP, nbytes, tensor_map(x, (1, 1, 64, 64)), line, y, np.int32(5), seed=seed)
    want = x[0, 0].astype(np.float32) + np.repeat(line.reshape(5, 1, 64), 64, axis=1).reshape(320, 64)
    np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3)


@simulated_only
def test_a_line_is_long_enough(rng):
    kernel, nbytes = adder_of_lines()
    x, y = np.zeros((1, 1, 128, 64), np.float16), poisoned((128, 64))
    with pytest.raises(ValueError, match="bulk_load: a line of 100 has no 64 contiguous elements from 64 on"):
        start(kernel, 2 * WARPGROUP, nbytes, tensor_map(x, (1, 1, 64, 64)), np.zeros(100, np.float32), y, np.int32(2))


# ------------------------------------------------------------------------------------------------------------- pages
def loader_of_pages(rows, page_size, once=False):
    """A tile from row `first` on of head 1 of a matrix in pages."""
    shared, layout = SharedMemory(), simt(rows, 128, 32, 8, 8)
    PIPELINE = Pipeline.within(shared, shared.boxes(rows, 128, np.float16), readers=1, once=once)

    def move(pages, table, y, first):
        init_pipelines(PIPELINE)
        sync_threads()
        X = stage(PIPELINE, 0)
        if thread_index() == 0:
            tma_load_pages(X, pages, table, 1, first, page_size)
        wait(X)
        save(y, get(X.tile, layout), 0)

    return move, shared.nbytes


@pytest.mark.parametrize(("rows", "page_size", "first"), [(32, 8, 32), (32, 64, 96), (16, 16, 0), (32, 16, 64)])
@pytest.mark.parametrize("once", [False, True])
def test_pages(rng, once, rows, page_size, first):
    """After the table is its last page; pages that do not exist are zeros."""
    pages = rng.standard_normal((5, 2, page_size, 120)).astype(np.float16)
    table = np.array([4, 2, 99, 1, 0, -3, 3], np.int32)[: (first + rows) // page_size]
    y = poisoned((rows, 128))
    kernel, nbytes = loader_of_pages(rows, page_size, once)
    start(kernel, 32, nbytes, tensor_map(pages, (1, 1, min(rows, page_size), 64)), table, y, np.int32(first))
    known = np.zeros((100, page_size, 128))
    known[:5, :, :120] = pages[:, 1]
    numbers = table[np.minimum(np.arange(first, first + rows) // page_size, len(table) - 1)]
    np.testing.assert_array_equal(y, known[numbers, np.arange(first, first + rows) % page_size])


def test_pages_that_no_tile_consists_of():
    kernel, nbytes = loader_of_pages(32, 24)
    pages = tensor_map(np.zeros((5, 2, 24, 128), np.float16), (1, 1, 24, 64))
    with pytest.raises(MISUSED, match=r"boxes 32x128 .*is no tile of pages of 24 rows"):
        start(kernel, 32, nbytes, pages, np.zeros(2, np.int32), poisoned((32, 128)), np.int32(0))


FAULTS = {
    "    simulator.shared_memory().share()\n": "    pass\n",
    "memory.note_end(unit, memory.clocks[0, unit, unit])": "pass",
    "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads[compiled-sums]": {
        "b.add(col, right)": "col",
    },
    "test_pages": {
        "I64(0x12F0000000000000)": "I64(0)",
        "b.urem(row, I32(size))": "I32(0)",
        'b.select(b.icmp_signed("<", place, last), place, last)': "place",
        "I32(down * ROW_BYTES)": "I32(0)",
        "min(place, len(table) - 1)": "place",
        "if 0 <= page < len(pages)": "if page < len(pages)",
    },
    ("cuda/tile/test_hopper.py", "cuda/tile/test_tma.py"): {
        "head, row):\n        index, _ = unpack(b, value)\n        filled = emit_expect(b, stage.pipeline, "
        "index, I32(plan.nbytes))":
            "head, row):\n        index, _ = unpack(b, value)\n        filled = emit_expect(b, stage.pipeline, "
            "index, I32(plan.nbytes // 2))",
        "    emit_arrival_of_bytes(b, filled, nbytes)\n": "",
        "b.add(start, I32(i * plan.box_bytes))": "start",
        'asm(b, "fence.proxy.async.shared::cta;", VOID, effect=True)': "None",
        'asm(b, "cp.async.bulk.commit_group;", VOID, effect=True)': "pass",
        "wait_group.read 0;": "wait_group.read 1;",
    },
}

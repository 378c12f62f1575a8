"""Kernels that run one thread at a time, and what is said of barriers that not everybody comes to."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    DeadlockError,
    RaceError,
    SharedMemory,
    allocate,
    copy_layout,
    get,
    grid_size,
    load,
    put,
    row_max,
    save,
    simt,
    simulate,
    sync_threads,
    sync_warp,
    thread_index,
)
from tests.tools.launch import simulated_only

pytestmark = simulated_only
THREADS = 64
ROWS, COLS = copy_layout(32, 32, THREADS, 4), simt(32, 32, THREADS, 2, 1)
shared = SharedMemory()
TILE = shared.tile(32, 32, np.float32)
x = np.arange(1024, dtype=np.float32).reshape(32, 32)


def run(kernel, *arguments, **options):
    y = np.full_like(x, np.nan)
    simulate(kernel, (1, 1, 1), THREADS, shared.nbytes, x, y, *arguments, **options)
    return y


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_right_kernel_in_any_order(seed):
    def turn(x, y):
        tile = allocate(TILE)
        for _ in range(3):
            put(tile, load(x, ROWS, 0))
            sync_threads()
            save(y, get(tile.T, COLS), 0)
            sync_threads()

    np.testing.assert_array_equal(run(turn, seed=seed), x.T)


def test_a_warp_has_a_barrier_of_its_own():
    WARPS = simt(32, 32, THREADS, 2, 4)  # rows 0 to 15 in warp 0

    def turn(x, y):
        tile = allocate(TILE)
        put(tile, load(x, WARPS, 0))
        sync_warp()
        save(y, get(tile, COLS), 0)

    np.testing.assert_array_equal(run(turn), x)

    def across(x, y):
        tile = allocate(TILE)
        put(tile, load(x, WARPS, 0))
        sync_warp()
        save(y, get(tile.T, COLS), 0)

    with pytest.raises(RaceError):
        run(across)


def test_a_barrier_that_some_threads_miss():
    def wait(x, y):
        if thread_index() < 33:
            sync_threads()
        else:
            sync_warp()

    with pytest.raises(DeadlockError, match=r"threads 32 wait for sync_threads\(\)|0-32 wait for sync_threads"):
        run(wait)


def test_a_warp_operation_that_some_lanes_miss():
    def reduce(x, y):
        tile = load(x, COLS, 0)
        if thread_index() < 40:
            tile = tile - row_max(tile, 0)
        sync_threads()

    with pytest.raises(DeadlockError, match="threads 32-39 wait for a warp operation of warp 1"):
        run(reduce)


def test_threads_that_end_are_not_waited_for():
    def leave(x, y):
        if thread_index() >= 32:
            return
        sync_threads()
        if thread_index() == 0:
            y[0, 0] = grid_size() * 64

    assert run(leave)[0, 0] == THREADS


def test_errors_name_the_thread():
    def fail(x, y):
        if thread_index() == 5:
            raise ZeroDivisionError("here")
        sync_threads()

    with pytest.raises(ZeroDivisionError, match="here") as caught:
        run(fail)
    assert getattr(caught.value, "__notes__", [""])[0] in ("", "in thread 5 of block (0, 0, 0)")

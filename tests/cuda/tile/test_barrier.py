"""Warpgroups: barriers of their own, and turns."""

import numpy as np
import pytest
from numba import cuda

from numbattn.cuda.tile import (
    WARPGROUP,
    DeadlockError,
    RaceError,
    SharedMemory,
    allocate,
    copying,
    get,
    give_registers,
    load,
    pass_turn,
    put,
    save,
    simt,
    sync_warpgroup,
    take_registers,
    take_turn,
    warpgroup_index,
)
from tests.tools.launch import launch, poisoned, simulated_only

ROWS, COLS = copying(32, 32, WARPGROUP, 4), simt(32, 32, WARPGROUP, 2, 1)
shared = SharedMemory()
TILE = shared.tile(32, 32, np.float32)
x = np.arange(1024, dtype=np.float32).reshape(32, 32)


def run(kernel, groups=2):
    y = poisoned((32, 32))
    launch(kernel, (1, 1, 1), groups * WARPGROUP, shared.nbytes, x, y, cc=(9, 0, "a"))
    return y


def turner(syncs):
    def turn(x, y):
        tile = allocate(TILE)
        if warpgroup_index() == 1:
            put(tile, load(x, ROWS, 0))
            if syncs:
                sync_warpgroup()
            save(y, get(tile.T, COLS), 0)

    return turn


def test_a_warpgroup_has_a_barrier_of_its_own():
    np.testing.assert_array_equal(run(turner(syncs=True)), x.T)


@simulated_only
def test_a_barrier_of_a_warpgroup_that_is_missing():
    with pytest.raises(RaceError, match=r"thread \d+ reads"):
        run(turner(syncs=False))


@simulated_only
def test_a_barrier_of_a_warpgroup_orders_nobody_else():
    def across(x, y):
        tile = allocate(TILE)
        if warpgroup_index() == 1:
            put(tile, load(x, ROWS, 0))
        sync_warpgroup()
        if warpgroup_index() == 0:
            save(y, get(tile, ROWS), 0)

    with pytest.raises(RaceError):
        run(across)


@simulated_only
def test_a_barrier_that_a_part_of_the_warpgroup_misses():
    def wait(x, y):
        if cuda.threadIdx.x < 100:
            sync_warpgroup()

    with pytest.raises(DeadlockError, match=r"threads 0-99 wait for sync_warpgroup\(\) of warpgroup 0"):
        run(wait)


def counter(groups, without=""):
    """Each warpgroup in its turn adds its number to a tile, and doubles it; three rounds."""
    starts, takes, passes = (without != step for step in ("first pass_turn", "take_turn", "pass_turn"))
    LAST = np.int32(groups - 1)

    def count(x, y):
        tile, group = allocate(TILE), warpgroup_index()
        if group == LAST:
            put(tile, load(x, ROWS, 0))
            if starts:
                pass_turn(groups)
        for _ in range(3):
            if takes:
                take_turn(groups)
            put(tile, (get(tile, ROWS) + np.float32(group)) * np.float32(2))
            if passes:
                pass_turn(groups)
        cuda.syncthreads()
        save(y, get(tile, ROWS), 0)

    return count


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_turns(groups):
    want = x
    for group in [*range(groups)] * 3:
        want = (want + group) * 2
    np.testing.assert_array_equal(run(counter(groups), groups), want)


@simulated_only
def test_a_turn_that_is_not_waited_for():
    with pytest.raises(RaceError):
        run(counter(2, without="take_turn"))


@simulated_only
@pytest.mark.parametrize("without", ["first pass_turn", "pass_turn"])
def test_a_turn_that_is_not_passed(without):
    with pytest.raises(DeadlockError, match="wait for the turn of warpgroup 0"):
        run(counter(2, without))


@simulated_only
def test_registers_come_in_eights():
    def kernel(count):
        def give(x, y):
            give_registers(24)
            take_registers(count)

        return give

    run(kernel(240))
    for count in (20, 100, 248):
        with pytest.raises(ValueError, match=f"take_registers: got {count}"):
            run(kernel(count))

"""Warpgroups: barriers and registers of their own; votes of a warp."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    WARPGROUP,
    DeadlockError,
    RaceError,
    SharedMemory,
    allocate,
    ballot,
    copy_layout,
    decrease_registers,
    get,
    increase_registers,
    index,
    load,
    lowest_bit,
    put,
    save,
    simt,
    sync_warp,
    sync_warpgroup,
    sync_warpgroups,
    thread_index,
    warpgroup_index,
)
from tests.tools.launch import compiled_only, launch, poisoned, ptx_of, simulated_only

ROWS, COLS = copy_layout(32, 32, WARPGROUP, 4), simt(32, 32, WARPGROUP, 2, 1)
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


def across_all(syncs):
    def across(x, y):
        tile, group = allocate(TILE), warpgroup_index()
        if group == 1:
            put(tile, load(x, ROWS, 0))
        if group < 2:
            if syncs:
                sync_warpgroups(2)
            if group == 0:
                save(y, get(tile.T, COLS), 0)

    return across


def test_the_first_warpgroups_have_a_barrier_together():
    np.testing.assert_array_equal(run(across_all(syncs=True), groups=3), x.T)


@simulated_only
def test_a_barrier_of_the_first_warpgroups_that_is_missing():
    with pytest.raises(RaceError, match=r"thread \d+ reads"):
        run(across_all(syncs=False), groups=3)


def test_barriers_do_not_mix():
    """Warpgroup 1 waits for both, while warpgroup 0 still has a barrier of its own to pass."""

    def meet(x, y):
        sync_warpgroup()
        n, group = index(0), warpgroup_index()
        while n < 2:
            if n + group == 1:
                sync_warpgroups(2)
            if n + group == 0:
                sync_warpgroup()
            n = n + 1
        thread = index(thread_index())
        y[thread // 32, thread % 32] = n

    assert (run(meet)[: 2 * WARPGROUP // 32] == 2).all()


@compiled_only
def test_instructions():
    """Threads that run in step do not miss a barrier."""

    def wait(x, y):
        decrease_registers(24)
        sync_warp()
        sync_warpgroup()
        sync_warpgroups(2)
        increase_registers(240)

    found = ptx_of(wait, 2 * WARPGROUP, x, x, cc=(9, 0, "a"))
    for instruction in (r"bar\.warp\.sync 0xffffffff", r"bar\.sync %r\d+, 128", r"bar\.sync 1, 256",
                        r"setmaxnreg\.dec\.\S+ 24", r"setmaxnreg\.inc\.\S+ 240"):  # fmt: skip
        assert found.count(instruction) == 1


@simulated_only
def test_a_barrier_that_a_part_of_the_warpgroup_misses():
    def wait(x, y):
        if thread_index() < 100:
            sync_warpgroup()

    with pytest.raises(DeadlockError, match=r"threads 0-99 wait for sync_warpgroup\(\) of warpgroup 0"):
        run(wait)


@simulated_only
def test_registers_come_in_eights():
    def kernel(count):
        def give(x, y):
            decrease_registers(24)
            increase_registers(count)

        return give

    run(kernel(240))
    for count in (20, 100, 248):
        with pytest.raises(ValueError, match=f"increase_registers: got {count}"):
            run(kernel(count))


def test_ballot_and_lowest_bit():
    votes, lowest = np.zeros(2, np.uint32), np.zeros(4, np.int32)
    words = np.array([0, 1, 2**31, 40], np.uint32)

    def kernel(words, votes, lowest):
        lane = thread_index() % 32
        found = ballot(thread_index() % 3 == 1)
        if lane == 0:
            votes[thread_index() // 32] = found
        if thread_index() < 4:
            lowest[lane] = lowest_bit(words[lane])

    launch(kernel, (1, 1, 1), 64, 0, words, votes, lowest)
    assert votes.tolist() == [sum(1 << i for i in range(32) if (32 * w + i) % 3 == 1) for w in range(2)]
    assert lowest.tolist() == [32, 0, 31, 3]


FAULTS = {
    "ALL_WARPGROUPS, FIRST_OF_WARPGROUPS = 1, 2": "ALL_WARPGROUPS, FIRST_OF_WARPGROUPS = 1, 1",
    "b.add(emit_warpgroup(b), I32(FIRST_OF_WARPGROUPS))": "I32(FIRST_OF_WARPGROUPS)",
    'asm(b, "bar.warp.sync 0xffffffff;", VOID, effect=True)': "pass",
    'asm(b, f"bar.sync $0, {WARPGROUP};", VOID, barrier, effect=True)': "pass",
    "lambda b, _: asm(b, text, VOID, effect=True)\n\n\n@primitive\ndef wait_on":
        "lambda b, _: None\n\n\n@primitive\ndef wait_on",
    '_lower_registers("dec")': '_lower_registers("inc")',
    "WARPGROUP).sync()\n\n\n@sync_warpgroup.": "WARPGROUP // 2).sync()\n\n\n@sync_warpgroup.",
    "count * WARPGROUP).sync()": "WARPGROUP).sync()",
    "range(24, 241, 8)": "range(24, 249, 8)",
}

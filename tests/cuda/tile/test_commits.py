"""Stages that threads fill: with integers, or together, each warpgroup with its part."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    WARPGROUP,
    DeadlockError,
    Pipeline,
    RaceError,
    SharedMemory,
    acquire,
    advance,
    allocate,
    commit,
    get,
    index,
    init_pipelines,
    load,
    put,
    read,
    release,
    save,
    stage,
    sync_threads,
    sync_warpgroup,
    thread_index,
    wait,
    warpgroup_index,
    wgmma,
)
from tests.tools.launch import poisoned, simulated_only

from .tiles import SEEDS, start

ROWS = np.int32(64)
TILE = wgmma(64)


def teller(meets):
    """Rows of x are told, one after the other; each warpgroup saves the sums to its row of y."""
    shared = SharedMemory()
    PIPELINE = Pipeline.within(shared, shared.tile(1, 4, np.int32, stages=2), readers=2)

    def pass_on(x, y):
        init_pipelines(PIPELINE)
        sync_threads()
        X, n, group = stage(PIPELINE, 0), index(0), warpgroup_index()
        if thread_index() == 2 * WARPGROUP:
            while n < x.shape[0]:
                acquire(X)
                commit(X, (x[n, 0], x[n, 1], x[n, 2], x[n, 3]))
                X = advance(X, 1)
                n = n + 1
        elif group < 2:
            while n < x.shape[0]:
                wait(X)
                a, b, c, d = read(X)
                if meets:
                    sync_warpgroup()
                release(X)
                X = advance(X, 1)
                if thread_index() % WARPGROUP == 100:
                    y[group, n] = a + 10 * b + 100 * c + 1000 * d
                n = n + 1

    return pass_on, 3 * WARPGROUP, shared.nbytes


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_are_told(rng, seed):
    x, y = rng.integers(10, size=(6, 4)).astype(np.int32), np.zeros((2, 6), np.int32)
    start(*teller(meets=True), x, y, seed=seed)
    np.testing.assert_array_equal(y, np.broadcast_to(x @ np.int32([1, 10, 100, 1000]), y.shape))


@simulated_only
@pytest.mark.parametrize("seed", SEEDS)
def test_all_have_read_what_they_are_told(seed):
    with pytest.raises(RaceError, match=r"thread 256 overwrites what thread \d+ reads"):
        start(*teller(meets=False), np.zeros((6, 4), np.int32), np.zeros((2, 6), np.int32), seed=seed)


def exchange(without=""):
    """Two warpgroups put their halves of a matrix into a stage, and each saves the other one's."""
    shared = SharedMemory()
    HALVES = shared.boxes(64, 64, np.float16, stages=4)
    PIPELINE = Pipeline.within(shared, HALVES.of_stages(2), readers=2, fills=2)
    meets, waits, frees = (without != step for step in ("sync_warpgroup", "wait", "release"))

    def swap(x, y, count):
        init_pipelines(PIPELINE)
        sync_threads()
        X, n, me = stage(PIPELINE, 0), index(0), warpgroup_index()
        while n < count:
            acquire(X)
            put(allocate(HALVES, X.index * 2 + me), load(x, TILE, (2 * n + me) * ROWS))
            if meets:
                sync_warpgroup()
            commit(X)
            if waits:
                wait(X)
            save(y, get(allocate(HALVES, X.index * 2 + 1 - me), TILE), (2 * n + me) * ROWS)
            sync_warpgroup()
            if frees:
                release(X)
            X, n = advance(X), n + 1

    return swap, shared.nbytes


def run_exchange(rng, seed=None, **faults):
    x = rng.standard_normal((5 * 128, 64)).astype(np.float16)
    y = poisoned(x.shape, np.float16)
    kernel, nbytes = exchange(**faults)
    start(kernel, 2 * WARPGROUP, nbytes, x, y, np.int32(5), seed=seed)
    return x, y


@pytest.mark.parametrize("seed", SEEDS)
def test_warpgroups_fill_a_stage_together(rng, seed):
    x, y = run_exchange(rng, seed)
    np.testing.assert_array_equal(y.reshape(5, 2, 64, 64), x.reshape(5, 2, 64, 64)[:, ::-1])


@simulated_only
@pytest.mark.parametrize(("without", "error", "text"), [
    ("sync_warpgroup", RaceError, r"thread \d+ reads what thread \d+ wrote"),
    ("wait", RaceError, r"reads (what thread \d+ wrote|.* which nobody has written)"),
    ("release", DeadlockError, "wait for free of stage 0"),
])  # fmt: skip
def test_what_filling_together_needs(rng, without, error, text):
    with pytest.raises(error, match=text):
        run_exchange(rng, without=without)


FAULTS = {
    "elif simulator.thread_index() % WARPGROUP:": "elif simulator.thread_index():",
    "emit_arrival_of_group(b, stage, value, False)": "emit_arrival_of_group(b, stage, value, True)",
    "        emit_arrival(b, stage.pipeline, index, False)\n": "",
    "cuda/tile/pipeline.py": {
        "if pipeline.in_cluster else pipeline.fills": "if pipeline.in_cluster else 1",
    },
}

"""Pipelines: stages that one thread fills and warpgroups read."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    WARP,
    WARPGROUP,
    DeadlockError,
    Pipeline,
    RaceError,
    SharedMemory,
    acquire,
    advance,
    bfloat16,
    get,
    index,
    init_pipelines,
    release,
    save,
    stage,
    sync_threads,
    sync_warpgroup,
    thread_index,
    tma_load,
    wait,
    warpgroup_index,
    wgmma,
)
from tests.tools.launch import poisoned, simulated_only, tensor_map
from tests.tools.ptx import AccessError

from .tiles import SEEDS, start

ROWS = np.int32(64)
TILE = wgmma(64)
ERRORS = {
    "init_pipelines": (RaceError, "uses a pipeline of 2 float16 boxes .* no barrier says that it is open"),
    "syncthreads": (RaceError, "no barrier says that it is open"),
    "acquire": (RaceError, r"thread 128 overwrites what (thread \d+ reads|the load of stage \d .* wrote)"),
    "tma_load": (DeadlockError, "threads 0-127 wait for filled of stage 0 of a pipeline of 2 float16 boxes 64x64 at 0"),
    "wait": (RaceError, "reads (what the load of stage 0 of a pipeline .* wrote|.* which nobody has written)"),
    "sync_warpgroup": (RaceError, r"thread 128 overwrites what thread \d+ reads"),
    "release": (DeadlockError, "threads 128 wait for free of stage 0 of a pipeline of 2 float16 boxes"),
}


def copier(dtype=np.float16, stages=2, readers=1, reads=True, without=""):
    """y = a matrix, tile by tile through a pipeline; `readers` warpgroups copy all of it, each to its own y.

    Or they only pass the tiles.
    """
    shared = SharedMemory()
    PIPELINE, READERS = Pipeline.within(shared, shared.boxes(64, 64, dtype, stages), readers), np.int32(readers)
    opens, syncs, acquires, fills, waits, meets, releases = (without != step for step in ERRORS)

    def copy(mX, y, count):
        if opens:
            init_pipelines(PIPELINE)
        if syncs:
            sync_threads()
        X, n, group = stage(PIPELINE, 0), index(0), warpgroup_index()
        if group == READERS:
            if thread_index() == READERS * WARPGROUP:
                while n < count:
                    if acquires:
                        acquire(X)
                    if fills:
                        tma_load(X, mX, 1, 0, n * ROWS)
                    X = advance(X, 1)
                    n = n + 1
        else:
            while n < count:
                if waits:
                    wait(X)
                if reads:
                    save(y[group], get(X.tile, TILE), n * ROWS)
                if meets:
                    sync_warpgroup()
                if releases:
                    release(X)
                X = advance(X, 1)
                n = n + 1

    return copy, (readers + 1) * WARPGROUP, shared.nbytes


def copied(x, count, dtype=np.float16, seed=None, **options):
    kernel, threads, nbytes = copier(dtype, **options)
    y = poisoned((options.get("readers", 1), count * 64, 64))
    start(kernel, threads, nbytes, tensor_map(x, (1, 1, 64, 64)), y, np.int32(count), seed=seed)
    return y


@pytest.fixture
def x(rng):
    return rng.standard_normal((2, 1, 5 * 64, 64)).astype(np.float16)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("stages", "readers"), [(1, 1), (2, 2), (3, 1)])
def test_a_ring_in_any_order(x, seed, stages, readers):
    y = copied(x, 5, stages=stages, readers=readers, seed=seed)
    np.testing.assert_array_equal(y, np.broadcast_to(x[1, 0], y.shape))


@pytest.mark.parametrize("rows", [1, 64, 100])
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_beyond_the_matrix_are_zeros(rng, dtype, rows):
    x = rng.standard_normal((2, 1, rows, 48)).astype(dtype)[..., :40]
    y = copied(x.view(np.uint16), 2, dtype)
    np.testing.assert_array_equal(y[0, :rows, :40], x[1, 0])
    assert not y[0, rows:].any()
    assert not y[0, :, 40:].any()


@simulated_only
def test_stages_follow_each_other_and_rounds_alternate():
    shared = SharedMemory()
    PIPELINE = Pipeline.within(shared, shared.boxes(8, 64, np.float16, stages=3), readers=1)
    X = stage(PIPELINE, 1)
    assert [(X.index, X.round)] == [(1, 0)]
    assert [(Y.index, Y.round) for Y in (advance(X), advance(X, 2), advance(advance(X), 3))] == [
        (2, 0), (0, 1), (2, 1)
    ]  # fmt: skip
    assert PIPELINE.tile.box == (1, 1, 8, 64)


@simulated_only
@pytest.mark.parametrize("seed", SEEDS)
def test_who_passes_a_stage_unread_misses_no_round(x, seed):
    """A thread that still waits when the stage is filled anew would wait for the round after."""
    copied(x, 5, reads=False, seed=seed)
    with pytest.raises(RaceError, match=r"thread 128 overwrites what thread \d+ reads at byte \d+"):
        copied(x, 5, reads=False, without="sync_warpgroup", seed=seed)


@simulated_only
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("without", ERRORS)
def test_what_a_pipeline_needs(x, without, seed):
    error, text = ERRORS[without]
    with pytest.raises(error, match=text):
        copied(x, 5, without=without, seed=seed)


def turns(acquires):
    """y = x[1, 0], tile by tile, by two warpgroups in turn: with 3 stages, each stage goes from one to the other."""
    shared = SharedMemory()
    PIPELINE = Pipeline.within(shared, shared.boxes(64, 64, np.float16, stages=3), readers=1)

    def copy(mX, y, count):
        init_pipelines(PIPELINE)
        sync_threads()
        n, group = index(0), warpgroup_index()
        X = stage(PIPELINE, 0)
        if group == 2:
            if thread_index() == 2 * WARPGROUP:
                while n < count:
                    acquire(X)
                    tma_load(X, mX, 1, 0, n * ROWS)
                    X = advance(X, 1)
                    n = n + 1
        else:
            n, X = group, advance(X, group)
            while n < count:
                if acquires:
                    acquire(X)
                wait(X)
                save(y, get(X.tile, TILE), n * ROWS)
                sync_warpgroup()
                release(X)
                X = advance(X, 2)
                n = n + 2

    return copy, 3 * WARPGROUP, shared.nbytes


def test_nobody_waits_for_tiles_of_no_columns(x):
    """Nor are there any: no load fills them, no reader releases them."""
    shared = SharedMemory()
    PIPELINE = Pipeline.within(shared, shared.boxes(64, 0, np.float16, 2), readers=2)

    def kernel(x, y):
        init_pipelines(PIPELINE)
        sync_threads()
        S = stage(PIPELINE, 0)
        for _ in range(5):
            acquire(S)
            if thread_index() == 0:
                tma_load(S, x, 0, 0, 0)
            wait(S)
            release(S)
            S = advance(S)
        y[thread_index()] = S.index

    y = poisoned(WARPGROUP)
    start(kernel, WARPGROUP, shared.nbytes, np.zeros((1, 1, 64, 0), np.float16), y)
    assert (y == 1).all()
    assert shared.nbytes == PIPELINE.end == 4 * 8


@pytest.mark.parametrize("seed", SEEDS)
def test_warps_release(seed):
    shared = SharedMemory()
    PIPELINE = Pipeline.within(shared, shared.boxes(8, 64, np.float16), readers=3)

    def kernel(y):
        init_pipelines(PIPELINE)
        sync_threads()
        if thread_index() < WARP:
            acquire(advance(stage(PIPELINE, 0), 1))
            y[thread_index()] = 1
        else:
            release(stage(PIPELINE, 0), WARP)

    y = poisoned(WARP)
    start(kernel, WARPGROUP, shared.nbytes, y, seed=seed)
    assert (y == 1).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_readers_that_take_turns(x, seed):
    y = poisoned((5 * 64, 64))
    start(*turns(acquires=True), tensor_map(x, (1, 1, 64, 64)), y, np.int32(5), seed=seed)
    np.testing.assert_array_equal(y, x[1, 0])


@pytest.mark.parametrize("seed", SEEDS)
def test_readers_that_take_turns_acquire(x, seed):
    """Warpgroup 1 may be done with stage 1 before stage 0 has been filled for warpgroup 0, and go on to stage 0."""
    with pytest.raises((RaceError, AccessError), match=r"cannot know that phase 0 is over|nobody has written"):
        start(*turns(acquires=False), tensor_map(x, (1, 1, 64, 64)), poisoned((5 * 64, 64)), np.int32(5), seed=seed)


FAULTS = {
    '("free", pipeline.readers)': '("free", 1)',
    "stage.index + int(steps), stage.pipeline.tile.stages": "stage.index + 1, stage.pipeline.tile.stages",
    "stage.barrier(free=True).wait(stage.round - 1)": "pass",
    "stage.barrier(free=False).wait(stage.round)": "pass",
    "    stage.note_wait()\n": "",
    "simulator.thread_index() % threads == 0": "simulator.thread_index() % WARPGROUP == 0",
    "        return self.tile.nbytes == 0": "        return False",
    ("cuda/tile/test_hopper.py", "cuda/tile/test_pipeline.py"): {
        "2 * tile.stages * BARRIER_BYTES": "tile.stages * BARRIER_BYTES",
        "free * pipeline.tile.stages * BARRIER_BYTES": "free * BARRIER_BYTES",
        "enumerate((pipeline.fills, pipeline.readers))": "enumerate((pipeline.fills, 1))",
        'icmp_unsigned(">=", index, I32(count))': 'icmp_unsigned(">", index, I32(count))',
        "b.select(beyond, b.xor(parity, I32(1)), parity)": "parity",
        "stage.pipeline, index, True), b.xor(parity, I32(1))": "stage.pipeline, index, True), parity",
        "filled = emit_barrier(b, stage.pipeline, index, False)":
            "filled = emit_barrier(b, stage.pipeline, index, True)",
        "    with if_first_of(b, threads):": "    with if_first_of(b, 32):",
        "emit_arrival_of_group(b, stage, value, True,": "emit_arrival_of_group(b, stage, value, False,",
        'asm(b, "fence.mbarrier_init.release.cluster;", VOID, effect=True)': "pass",
    },
}

"""What the interpreter of PTX finds in pipelines and in TMA stores; their words are tested in test_pipeline."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    WARPGROUP,
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    decrease_registers,
    device,
    fence_async_proxy,
    get,
    increase_registers,
    index,
    init_pipelines,
    load,
    put,
    release,
    save,
    stage,
    sync_threads,
    sync_warpgroup,
    thread_index,
    tma_load,
    tma_store,
    tma_store_wait,
    wait,
    warpgroup_index,
    wgmma,
)
from tests.tools.launch import compiled_only, launch, poisoned
from tests.tools.ptx import AccessError, DeadlockError, TensorMap

pytestmark = compiled_only
CC = (9, 0, "a")
TILE, ROWS = wgmma(64), np.int32(64)


def run(kernel, threads, nbytes, *arguments):
    return launch(kernel, (1, 1, 1), threads, nbytes, *arguments, cc=CC)


@device
def nothing(slot):
    """Instead of a word that is left out."""


def words(without):
    return [nothing if without == word.__name__ else word for word in (acquire, wait, release)]


def copier(stages, without=""):
    """y = a matrix, tile by tile through a pipeline."""
    shared = SharedMemory()
    PIPELINE = Pipeline.within(shared, shared.boxes(64, 64, np.float16, stages), readers=1)
    _acquire, _wait, _release = words(without)

    def copy(mX, y, count):
        init_pipelines(PIPELINE)
        sync_threads()
        X, n = stage(PIPELINE, 0), index(0)
        if warpgroup_index() == 1:
            decrease_registers(40)
            if thread_index() == WARPGROUP:
                while n < count:
                    _acquire(X)
                    tma_load(X, mX, 1, 0, n * ROWS)
                    X = advance(X, 1)
                    n = n + 1
        else:
            increase_registers(232)
            while n < count:
                _wait(X)
                save(y, get(X.tile, TILE), n * ROWS)
                sync_warpgroup()
                _release(X)
                X = advance(X, 1)
                n = n + 1

    return copy, 2 * WARPGROUP, shared.nbytes


@pytest.mark.parametrize("stages", [1, 3])
def test_a_ring(rng, stages):
    x, y = rng.standard_normal((2, 1, 150, 40)).astype(np.float16), poisoned((256, 64))
    run(*copier(stages), TensorMap(x, (1, 1, 64, 64)), y, np.int32(4))
    np.testing.assert_array_equal(y[:150, :40], x[1, 0])
    assert not y[150:].any()
    assert not y[:, 40:].any()


@pytest.mark.parametrize(("without", "error"), [("wait", AccessError), ("release", DeadlockError)])
def test_what_a_ring_needs(without, error):
    x = TensorMap(np.zeros((2, 1, 150, 64), np.float16), (1, 1, 64, 64))
    with pytest.raises(error):
        run(*copier(2, without), x, poisoned((256, 64)), np.int32(4))


def sender(without=""):
    """Rows of x to rows of a matrix, 64 after 64, through one tile that is sent."""
    shared = SharedMemory()
    BOXES = shared.boxes(64, 128, np.float16)
    WIDE = wgmma(128)

    def move(x, mY, count):
        tile, n = allocate(BOXES), index(0)
        leads = thread_index() == 0
        while n < count:
            put(tile, load(x, WIDE, n * ROWS))
            if without != "fence_async_proxy":
                fence_async_proxy()
            sync_warpgroup()
            if leads:
                tma_store(mY, tile, 0, 1, n * ROWS)
                if without != "tma_store_wait":
                    tma_store_wait()
            sync_warpgroup()
            n = n + 1

    return move, WARPGROUP, shared.nbytes


def test_tiles_are_sent(rng):
    x, y = rng.standard_normal((150, 104)).astype(np.float16), poisoned((1, 2, 150, 104), np.float16)
    run(*sender(), x, TensorMap(y, (1, 1, 64, 64)), np.int32(3))
    np.testing.assert_array_equal(y[0, 1], x)
    assert np.isnan(y[0, 0]).all()


@pytest.mark.parametrize(("without", "text"), [
    ("fence_async_proxy", "without a fence"), ("tma_store_wait", "on its way"),
])  # fmt: skip
def test_what_sending_needs(without, text):
    y = TensorMap(np.zeros((1, 2, 150, 104), np.float16), (1, 1, 64, 64))
    with pytest.raises(AccessError, match=text):
        run(*sender(without), np.zeros((150, 104), np.float16), y, np.int32(3))

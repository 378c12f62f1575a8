"""What the simulator says of wrong kernels: accesses that no barrier orders, and reads of what nobody wrote."""

from dataclasses import replace

import numpy as np
import pytest

from numbattn.cuda.tile import (
    RaceError,
    SharedMemory,
    allocate,
    copy_layout,
    get,
    load,
    put,
    save,
    simt,
    simulate,
    sync_threads,
    thread_index,
)
from tests.tools.launch import simulated_only

pytestmark = simulated_only
THREADS = 64
ROWS, COLS = copy_layout(32, 32, THREADS, 4), simt(32, 32, THREADS, 2, 1)
shared = SharedMemory()
TILE, OTHER = shared.tile(32, 32, np.float32), shared.tile(32, 32, np.float32)
LAST_ROW = replace(TILE, rows=1, offset=TILE.offset + TILE.nbytes // 32 * 31)
x = np.arange(1024, dtype=np.float32).reshape(32, 32)


def run(kernel, **options):
    y = np.full_like(x, np.nan)
    simulate(kernel, (1, 1, 1), THREADS, shared.nbytes, x, y, **options)
    return y


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_read_too_early(seed):
    def turn(x, y):
        tile = allocate(TILE)
        put(tile, load(x, ROWS, 0))
        save(y, get(tile.T, COLS), 0)

    with pytest.raises(RaceError, match=r"thread \d+ reads (what thread \d+ wrote at )?byte \d+ of shared memory"):
        run(turn, seed=seed)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_write_too_early(seed):
    def turn(x, y):
        tile = allocate(TILE)
        put(tile, load(x, ROWS, 0))
        sync_threads()
        save(y, get(tile.T, COLS), 0)
        put(tile, load(x, ROWS, 0))

    with pytest.raises(RaceError, match=r"thread \d+ (overwrites|reads) what thread \d+ (reads|wrote) at byte \d+"):
        run(turn, seed=seed)


def test_a_write_to_the_end_of_what_is_read():
    def turn(x, y):
        tile, everything = allocate(TILE), (slice(None), slice(None))
        if thread_index() == 0:
            tile.write(*everything, 1)
        sync_threads()
        if thread_index() == THREADS - 1:  # the last one to come goes on
            tile.read(*everything)
        elif thread_index() == 0:
            allocate(LAST_ROW).write(*everything, 2)

    with pytest.raises(RaceError, match=rf"thread 0 overwrites what thread {THREADS - 1} reads"):
        run(turn)


def test_a_read_of_what_nobody_wrote():
    def read(x, y):
        save(y, get(allocate(OTHER), ROWS), 0)

    with pytest.raises(RaceError, match="which nobody has written"):
        run(read)


FAULTS = {
    ("cuda/tile/test_races.py", "cuda/tile/test_pipeline.py", "cuda/tile/test_warpgroup.py"): {
        "self.last_read[pages, who] = when": "when",
        "granules.max() >> PAGE_BITS) + 1)": "granules.min() >> PAGE_BITS) + 1)",
        "self.clocks[time, by].min(0)": "self.clocks[time, by].max(0)",
        "self.clocks[..., NOBODY] = -1": "pass",
    },
}

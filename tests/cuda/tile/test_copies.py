"""Tiles copied from global to shared memory in the background."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    Alignment,
    RaceError,
    SharedMemory,
    aligned,
    allocate,
    commit_copies,
    copy_async,
    copy_layout,
    get,
    save,
    simt,
    sync_threads,
    wait_copies,
)
from tests.tools.launch import compiled_only, launch, poisoned, ptx_of, simulated
from tests.tools.ptx import AccessError

from .tiles import DTYPES, THREADS, as_device, numbers


def fetcher(layout, dtype, alignment, stages=1, in_boxes=False):
    """Fetch a tile into the last stage, and save what has arrived."""
    shared = SharedMemory()
    PLACE = (shared.boxes if in_boxes else shared.tile)(*layout.shape, dtype, stages)
    ALIGNMENT = Alignment(alignment)

    def kernel(source, target, first):
        tile = allocate(PLACE, stages - 1)
        copy_async(tile, aligned(source, ALIGNMENT), layout, first)
        wait_copies()
        sync_threads()
        save(target, get(tile, layout), 0)

    return kernel, shared.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alignment", [0, 16])
@pytest.mark.parametrize("cc", [(7, 5), (8, 0)])
def test_fetch_brings_a_tile_and_zeros_beyond_the_end(dtype, alignment, cc):
    source, target = numbers((50, 24), dtype), poisoned((32, 32), dtype)
    kernel, nbytes = fetcher(copy_layout(32, 32, THREADS, 16 // np.dtype(dtype).itemsize), dtype, alignment, stages=2)
    launch(kernel, (1, 1, 1), THREADS, nbytes, as_device(source), as_device(target), np.int32(30), cc=cc)
    wanted = np.zeros((32, 32), dtype)
    wanted[:20, :24] = source[30:]
    np.testing.assert_array_equal(target, wanted)


@pytest.mark.parametrize(("in_boxes", "alignment"), [(False, 16), (True, 16), (True, 0)])
def test_fetch_of_several_vectors_a_row(in_boxes, alignment):
    """By each thread; the columns end between them."""
    source, target = numbers((50, 72), np.float16), poisoned((32, 96), np.float16)
    kernel, nbytes = fetcher(copy_layout(32, 96, THREADS, 8), np.float16, alignment, in_boxes=in_boxes)
    launch(kernel, (1, 1, 1), THREADS, nbytes, source, target, np.int32(30))
    wanted = np.zeros((32, 96), np.float16)
    wanted[:20, :72] = source[30:]
    np.testing.assert_array_equal(target, wanted)


@compiled_only
@pytest.mark.parametrize("in_boxes", [False, True])
def test_fetch_of_whole_lines(in_boxes):
    """Rows of boxes are lines of 128 bytes, padded ones but for the first of eight are two halves."""
    source, target = numbers((32, 128), np.float16), poisoned((32, 128), np.float16)
    kernel, nbytes = fetcher(copy_layout(32, 128, THREADS, 8), np.float16, 16, in_boxes=in_boxes)
    found = launch(kernel, (1, 1, 1), THREADS, nbytes, source, target, np.int32(0))
    np.testing.assert_array_equal(target, source)
    assert found.split_lines == (0 if in_boxes else 28 * 2)
    assert not sum(n for op, n in found.conflicts.items() if "cp" in op)


def test_fetch_of_a_vector():
    layout = simt(32, 32, THREADS, 8, 1).col_vector()
    source, target = numbers(50), poisoned(32)
    PLACE = SharedMemory().tile(1, 32, np.float32)

    def lines(source, target, first):
        tile = allocate(PLACE)
        copy_async(tile, source, layout, first)
        wait_copies()
        sync_threads()
        save(target, get(tile, layout), 0)

    launch(lines, (1, 1, 1), THREADS, PLACE.nbytes, source, target, np.int32(30))
    np.testing.assert_array_equal(target, np.concatenate([source[30:], np.zeros(12, np.float32)]))


def test_fetch_of_a_column():
    """Into a row: neighbours are neighbours."""
    layout, COLUMN = simt(32, 32, THREADS, 8, 1).col_vector(), simt(32, 1, THREADS, 1, 1)
    source, target = numbers((50, 1)), poisoned(32)
    PLACE = SharedMemory().tile(1, 32, np.float32)

    def kernel(source, target, first):
        copy_async(allocate(PLACE).T, source, COLUMN, first)
        wait_copies()
        sync_threads()
        save(target, get(allocate(PLACE), layout), 0)

    launch(kernel, (1, 1, 1), THREADS, PLACE.nbytes, source, target, np.int32(30))
    np.testing.assert_array_equal(target, [*source[30:, 0], *[0] * 12])


@compiled_only
def test_fetch_goes_past_the_registers():
    kernel, _ = fetcher(copy_layout(32, 32, THREADS, 8), np.float16, 16)
    source = np.zeros((50, 32), np.float16)
    for cc, copies in (((7, 5), 0), ((8, 0), 32 * 32 // 8 // THREADS)):
        found = ptx_of(kernel, THREADS, source, source, np.int32(0), cc=cc)
        assert found.count(r"cp\.async\.cg\.shared\.global\.L2::128B .*, 16, ") == copies
        assert found.count("cp.async.wait_all") == (copies > 0)


@compiled_only
def test_aligned_rows_take_a_sum_and_a_comparison_each():
    """Beside the copy itself."""
    kernel, _ = fetcher(copy_layout(64, 64, THREADS, 8), np.float16, 16)
    source = np.zeros((50, 64), np.float16)
    found, rows = ptx_of(kernel, THREADS, source, source, np.int32(0)), 64 * 64 // 8 // THREADS
    assert found.count(r"cp\.async\.cg") == found.count(r"mad\.wide\.s32") == rows
    assert found.count(r"setp\.le\.s32 .*ends") == rows


def test_what_is_not_waited_for_has_not_arrived():
    PLACE, layout = SharedMemory().tile(32, 32, np.float32), copy_layout(32, 32, THREADS, 4)

    def kernel(source, target):
        tile = allocate(PLACE)
        copy_async(tile, source, layout, 0)
        sync_threads()
        save(target, get(tile, layout), 0)

    error, match = (RaceError, "not waited for") if simulated() else (AccessError, "reads what nobody has written")
    with pytest.raises(error, match=match):
        launch(kernel, (1, 1, 1), THREADS, PLACE.nbytes, numbers((32, 32)), poisoned((32, 32)))


def test_groups_arrive_in_their_order():
    """All but the last one are there; what is in it has not arrived."""
    PLACES, LAYOUT = SharedMemory().tile(32, 32, np.float32, stages=2), copy_layout(32, 32, THREADS, 4)
    x, y = numbers((64, 32)), poisoned((32, 32))

    def kernel(source, target, which):
        for stage in range(2):
            copy_async(allocate(PLACES, stage), source, LAYOUT, 32 * stage)
            commit_copies()
        wait_copies(1)
        sync_threads()
        save(target, get(allocate(PLACES, which), LAYOUT), 0)
        wait_copies()

    def run(which):
        launch(kernel, (1, 1, 1), THREADS, 2 * PLACES.nbytes, x, y, np.int32(which))

    run(0)
    np.testing.assert_array_equal(y, x[:32])
    with pytest.raises((RaceError, AccessError)):
        run(1)


FAULTS = {
    "setp.le.s32 ends, $2, {down}": "setp.lt.s32 ends, $2, {down}",
    'b.icmp_signed("<", I32(x), cols_left)': 'b.icmp_signed("<=", I32(x), cols_left)',
    "rows_left, I32(0)) for x in": "rows_left, rows_left) for x in",
    "places = further * item, across * item": "places = 0, across * item",
    "to=further * item": "to=0",
    '{down}, $2;", I64, stride, origin)': '1, $2;", I64, stride, origin)',
    "I64, row0, stride, column)": "I64, first, stride, column)",
    "b.gep(source.data, [col0])": "b.gep(source.data, [I32(0)])",
    "b.zext(inside, I32),": "I32(1),",
    'f"cp.async.wait_group {count};" if count else "cp.async.wait_all;"': '"cp.async.wait_group 7;"',
    'f"cp.async.wait_group {count};" if count else': "",
    'asm(b, "cp.async.commit_group;", VOID, effect=True)': "pass",
    "len(run) * item >= 4": "len(run) * item >= 16",
    ("cuda/tile/test_copies.py", "cuda/tile/test_boxes.py"): {
        "    simulator.shared_memory().note_arrival(pending or None)\n": "    pass\n",
        "    simulator.shared_memory().note_group()\n": "    pass\n",
        "shared.memory.note_fetch(shared.granules_of(*places(layout)))": "pass",
    },
}

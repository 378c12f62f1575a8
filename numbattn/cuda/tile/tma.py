"""The tensor memory accelerator (TMA): tiles of boxes, copied in the background by one thread's order."""

import numpy as np
from numba.cuda import types
from numba.cuda.core.errors import TypingError

from . import simulator
from .boxes import Boxes
from .emit import I32, VOID, asm
from .pipeline import emit_barrier, unpack
from .shared_memory import emit_stage
from .world import primitive


@primitive
def prefetch_tensor_map(matrices):
    """Prefetch a tensor map that will be used soon."""


@prefetch_tensor_map.lowering
def prefetch_tensor_map(matrices):
    def generate(b, tensor_map):
        asm(b, "prefetch.tensormap [$0];", VOID, tensor_map, effect=True)

    return types.void(types.uint64), generate


@primitive
def tma_load(stage, matrices, batch, head, row):
    """Start to copy rows `row`... of a matrix into the stage; beyond the matrix are zeros. By one thread.

    matrices: a tensor map of (batch, heads, rows, columns), with boxes of (1, 1, rows of the tile, 128 bytes). In plain
    Python an array of that shape. See `pipeline`.
    """
    check_boxes("tma_load", stage.pipeline.tile)
    tile, memory, filled = stage.tile, simulator.shared_memory(), stage.barrier(free=False)
    part, values = _rows(matrices, tile.plan, batch, head, row), np.zeros(tile.plan.shape, tile.plan.dtype)
    values[: part.shape[0], : part.shape[1]] = part
    stage.next_round()
    unit, number = memory.start_work(f"the load of stage {stage.index} of a {stage.pipeline}")
    tile.write(slice(None), slice(None), values, (unit, number))
    known = memory.tell()
    known[:, unit] = number
    filled.arrive(known)


def check_boxes(word, plan):
    if not isinstance(plan, Boxes) or plan.transposed:
        raise TypingError(f"{word}: {plan} is no tile of boxes")


def _rows(matrices, plan, batch, head, row):
    """The part of a matrix that a tile covers; dtypes are those of the tile, whatever the array calls its bits."""
    matrix = np.asarray(matrices)[batch, head].view(plan.dtype)
    return matrix[int(row) : int(row) + plan.rows, : plan.cols]


@tma_load.lowering
def tma_load(stage, matrices, batch, head, row):
    plan = stage.pipeline.tile
    check_boxes("tma_load", plan)

    def generate(b, value, tensor_map, batch, head, row):
        index, _ = unpack(b, value)
        filled = emit_barrier(b, stage.pipeline, index, False)
        text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
        asm(b, text, VOID, filled, I32(plan.nbytes), effect=True)
        text = (
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[$0], [$1, {$2, $3, $4, $5}], [$6];"
        )
        for col, box in boxes_of(b, plan, emit_stage(b, plan, index)):
            asm(b, text, VOID, box, tensor_map, col, row, head, batch, filled, effect=True)

    index = types.int32
    return types.void(stage, types.uint64, index, index, index), generate


def boxes_of(b, plan, pointer):
    """The first column and the address of each box of a tile."""
    start = b.ptrtoint(pointer, I32)
    for i, col in enumerate(range(0, plan.cols, plan.width)):
        yield I32(col), b.add(start, I32(i * plan.box_bytes))


@primitive
def fence_async_proxy():
    """What this thread has written to shared memory may be stored by TMA, or multiplied by wgmma, after a barrier."""
    simulator.shared_memory().share()


@fence_async_proxy.lowering
def fence_async_proxy():
    return types.void(), lambda b: asm(b, "fence.proxy.async.shared::cta;", VOID, effect=True)


@primitive
def tma_store(matrices, shared, batch, head, row):
    """Start to copy a tile of boxes to rows `row`... of a matrix, as far as it goes. By one thread. See `pipeline`."""
    check_boxes("tma_store", shared.plan)
    values = shared.read(slice(None), slice(None), shared.memory.start_work(_stores()))
    part = _rows(matrices, shared.plan, batch, head, row)
    part[...] = values[: part.shape[0], : part.shape[1]]


def _stores():
    return f"a store of thread {simulator.thread_index()}"


@tma_store.lowering
def tma_store(matrices, shared, batch, head, row):
    plan = shared.plan
    check_boxes("tma_store", plan)

    def generate(b, tensor_map, pointer, batch, head, row):
        text = "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [$0, {$1, $2, $3, $4}], [$5];"
        for col, box in boxes_of(b, plan, pointer):
            asm(b, text, VOID, tensor_map, col, row, head, batch, box, effect=True)
        asm(b, "cp.async.bulk.commit_group;", VOID, effect=True)

    index = types.int32
    return types.void(types.uint64, shared, index, index, index), generate


@primitive
def tma_store_wait():
    """Wait until the tiles that this thread stores may be overwritten."""
    memory = simulator.shared_memory()
    unit = memory.unit(_stores())
    memory.note_end(unit, memory.clocks[0, unit, unit])


@tma_store_wait.lowering
def tma_store_wait():
    return types.void(), lambda b: asm(b, "cp.async.bulk.wait_group.read 0;", VOID, effect=True)

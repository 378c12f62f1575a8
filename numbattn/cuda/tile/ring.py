"""Rings: stages of shared memory that the tensor memory accelerator (TMA) fills and warpgroups read.

    producer, one thread                    consumers, whole warpgroups
    K = slot(RING, 0)                       K = slot(RING, 0)
    acquire(K)    # its readers are done    wait(K)       # it is filled
    fill(K, mK, batch, head, row)           ... K.tile ...
    K = following(K)                        release(K)
                                            K = following(K)

A Slot is one use of a stage: it knows which stage, and whether that stage goes through an even or an odd round. Each
stage has two barriers (mbarrier): `filled` counts bytes, `free` counts the warpgroups that have released it.

An mbarrier is waited for by the parity of its phase, which is also that of the phase two before. So who waits has to
know that the phase in between is over. A consumer that reads a stage in every round knows. Where consumers take turns,
each acquires a stage before it waits: its last reader has then seen it filled.
"""

from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import core_models, intrinsic, overload_attribute, register_model

from . import simulator
from .boxes import Boxes
from .emit import I32, VOID, asm, load_vector, shared_memory, store_vector, thread_index
from .fragment import constant
from .layout import WARPGROUP
from .memory import TileType, allocate, emit_stage
from .simulator import Barrier, RaceError
from .world import primitive

BARRIER_BYTES = 8


@constant
@dataclass(frozen=True)
class Ring:
    """Where the stages and their barriers lie, and how many warpgroups read each of them."""

    tile: Boxes
    barriers: int  # offset in shared memory: those of `filled` first, then those of `free`
    readers: int

    def __str__(self):
        return f"ring of {self.tile.stages} {self.tile}, {self.readers} readers"

    @classmethod
    def within(cls, shared, tile, readers):
        return cls(tile, shared.reserve(2 * tile.stages * BARRIER_BYTES), readers)


@dataclass(frozen=True)
class Slot:
    """In plain Python."""

    ring: Ring
    stage: int
    round: int  # how often the stage has been used before; on a GPU only whether that is odd

    @property
    def tile(self):
        return allocate(self.ring.tile, self.stage)

    def barrier(self, free):
        memory, ring = simulator.shared_memory(), self.ring
        barriers, who, when = memory.rings.get(ring, (None, 0, np.inf))
        if memory.clocks[0, simulator.thread_index(), who] < when:
            raise RaceError(f"thread {simulator.thread_index()} uses a {ring}, and no barrier says that it is open")
        return barriers[free][self.stage]

    @property
    def parity(self):
        """Where the barrier of `filled` keeps its parity: a wait reads it."""
        at = self.ring.barriers + self.stage * BARRIER_BYTES
        return simulator.shared_memory().granules[at // simulator.GRANULE]

    def next_round(self):
        """The stage is filled anew: who still waits for the round before would wait for ever."""
        simulator.shared_memory().note_write(self.parity, of=(0, 2))


class SlotType(types.Type):
    def __init__(self, ring):
        self.ring = ring
        super().__init__(f"Slot({ring})")

    @property
    def key(self):
        return self.ring


@register_model(SlotType)
class SlotModel(core_models.PrimitiveModel):
    """The stage and the parity of its round."""

    def __init__(self, manager, ty):
        super().__init__(manager, ty, ir.LiteralStructType([I32, I32]))


def emit_slot(b, stage, parity):
    value = ir.Constant(ir.LiteralStructType([I32, I32]), ir.Undefined)
    return b.insert_value(b.insert_value(value, stage, 0), parity, 1)


def unpack(b, slot):
    return b.extract_value(slot, 0), b.extract_value(slot, 1)


def emit_barrier(b, ring, stage, free):
    """The address of a barrier."""
    start = shared_memory(b, ring.barriers + free * ring.tile.stages * BARRIER_BYTES)
    return b.add(b.ptrtoint(start, I32), b.mul(stage, I32(BARRIER_BYTES)))


@primitive
def open_ring(ring):
    """Make a ring ready: by all threads of a block, before a barrier of the block."""
    me, memory = simulator.thread_index(), simulator.shared_memory()
    if me == 0:
        kinds = ("filled", 1), ("free", ring.readers)
        barriers = [
            [Barrier(f"{name} of stage {stage} of a {ring}", count) for stage in range(ring.tile.stages)]
            for name, count in kinds
        ]
        memory.rings[ring] = barriers, me, memory.tell()[0, me]


@open_ring.lowering
def open_ring(ring):
    plan = ring.value

    def generate(b, _):
        with b.if_then(b.icmp_unsigned("==", thread_index(b), I32(0))):
            for stage in range(plan.tile.stages):
                for free, count in enumerate((1, plan.readers)):
                    at = emit_barrier(b, plan, I32(stage), free)
                    asm(b, "mbarrier.init.shared::cta.b64 [$0], $1;", VOID, at, I32(count), effect=True)
            asm(b, "fence.mbarrier_init.release.cluster;", VOID, effect=True)

    return types.void(ring), generate


@primitive
def slot(ring, stage):
    """The first use of a stage."""
    return Slot(ring, int(stage), 0)


@slot.lowering
def slot(ring, stage):
    return SlotType(ring.value)(ring, types.int32), lambda b, _, stage: emit_slot(b, stage, I32(0))


@primitive
def following(slot, steps=1):
    """The slot so many stages further in the ring."""
    rounds, stage = divmod(slot.stage + int(steps), slot.ring.tile.stages)
    return Slot(slot.ring, stage, slot.round + rounds)


@following.lowering
def following(slot, steps=1):
    count = slot.ring.tile.stages

    def generate(b, value, steps):
        stage, parity = unpack(b, value)
        stage = b.add(stage, steps)
        beyond = b.icmp_unsigned(">=", stage, I32(count))
        return emit_slot(b, b.select(beyond, b.sub(stage, I32(count)), stage),
                         b.select(beyond, b.xor(parity, I32(1)), parity))

    return slot(slot, types.int32), generate


def emit_wait(b, barrier, parity):
    """Until the barrier's phase of this parity is over."""
    text = """{
        .reg .pred over;
    again:
        mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1;
        @over bra done;
        bra again;
    done:
    }"""
    asm(b, text, VOID, barrier, parity, effect=True)


@primitive
def acquire(slot):
    """Wait until the stage's readers have released what it held before."""
    slot.barrier(free=True).wait(slot.round - 1)


@acquire.lowering
def acquire(slot):
    def generate(b, value):
        stage, parity = unpack(b, value)
        emit_wait(b, emit_barrier(b, slot.ring, stage, True), b.xor(parity, I32(1)))

    return types.void(slot), generate


@primitive
def wait(slot):
    """Wait until the stage is filled."""
    slot.barrier(free=False).wait(slot.round)
    simulator.shared_memory().note_read(slot.parity)


@wait.lowering
def wait(slot):
    def generate(b, value):
        stage, parity = unpack(b, value)
        emit_wait(b, emit_barrier(b, slot.ring, stage, False), parity)

    return types.void(slot), generate


@primitive
def release(slot):
    """This warpgroup has read the stage. All of its threads come here; what the first of them knows is what counts."""
    if simulator.thread_index() % WARPGROUP == 0:
        slot.barrier(free=True).arrive()


@release.lowering
def release(slot):
    def generate(b, value):
        first = b.icmp_unsigned("==", b.and_(thread_index(b), I32(WARPGROUP - 1)), I32(0))
        with b.if_then(first):
            at = emit_barrier(b, slot.ring, unpack(b, value)[0], True)
            asm(b, "mbarrier.arrive.shared::cta.b64 _, [$0];", VOID, at, effect=True)

    return types.void(slot), generate


@intrinsic
def _tile_of(typingctx, slot):
    plan = slot.ring.tile
    return TileType(plan)(slot), lambda context, b, signature, values: emit_stage(b, plan, unpack(b, values[0])[0])


@overload_attribute(SlotType, "tile")
def _slot_tile(slot):
    return lambda slot: _tile_of(slot)


@intrinsic
def _stage_of(typingctx, slot):
    return types.int32(slot), lambda context, b, signature, values: unpack(b, values[0])[0]


@overload_attribute(SlotType, "stage")
def _slot_stage(slot):
    return lambda slot: _stage_of(slot)


# ---------------------------------------------------------------------------------------------------------- messages
@primitive
def tell(slot, numbers):
    """Fill a stage of int32 with these numbers. By one thread."""
    slot.next_round()
    slot.tile.write(0, np.arange(len(numbers)), np.array(numbers, np.int32))
    slot.barrier(free=False).arrive()


@tell.lowering
def tell(slot, numbers):
    if any(kind != types.int32 for kind in numbers):
        raise TypingError(f"tell: got {numbers}, expected a tuple of int32")

    def generate(b, value, values):
        stage, _ = unpack(b, value)
        start = emit_stage(b, slot.ring.tile, stage)
        for i in range(len(numbers)):
            store_vector(b, [b.extract_value(values, i)], b.gep(start, [I32(i)]))
        filled = emit_barrier(b, slot.ring, stage, False)
        asm(b, "mbarrier.arrive.shared::cta.b64 _, [$0];", VOID, filled, effect=True)

    return types.void(slot, numbers), generate


@primitive
def told(slot):
    """The numbers in a stage."""
    return tuple(slot.tile.read(0, np.arange(slot.ring.tile.cols)))


@told.lowering
def told(slot):
    plan = slot.ring.tile
    out = types.UniTuple(types.int32, plan.cols)

    def generate(b, value):
        start = emit_stage(b, plan, unpack(b, value)[0])
        numbers = ir.Constant(ir.ArrayType(I32, plan.cols), ir.Undefined)
        for i in range(plan.cols):
            (number,) = load_vector(b, b.gep(start, [I32(i)]), 1)
            numbers = b.insert_value(numbers, number, i)
        return numbers

    return out(slot), generate


# ------------------------------------------------------------------------------------- the tensor memory accelerator
@primitive
def expect(matrices):
    """The tensor map will be used soon: let the TMA know it before."""


@expect.lowering
def expect(matrices):
    def generate(b, tensor_map):
        asm(b, "prefetch.tensormap [$0];", VOID, tensor_map, effect=True)

    return types.void(types.uint64), generate


@primitive
def fill(slot, matrices, batch, head, row):
    """Start to copy rows `row`... of a matrix into the stage; beyond the matrix are zeros. By one thread.

    matrices: a tensor map of (batch, heads, rows, columns), with boxes of (1, 1, rows of the tile, 128 bytes). In plain
    Python an array of that shape.
    """
    tile, memory, filled = slot.tile, simulator.shared_memory(), slot.barrier(free=False)
    part, values = _rows(matrices, tile.plan, batch, head, row), np.zeros(tile.plan.shape, tile.plan.dtype)
    values[: part.shape[0], : part.shape[1]] = part
    slot.next_round()
    unit, number = memory.start_work(f"the fill of stage {slot.stage} of a {slot.ring}")
    tile.write(slice(None), slice(None), values, (unit, number))
    known = memory.tell()
    known[:, unit] = number
    filled.arrive(known)


def _rows(matrices, plan, batch, head, row):
    """The part of a matrix that a tile covers; dtypes are those of the tile, whatever the array calls its bits."""
    matrix = np.asarray(matrices)[batch, head].view(plan.dtype)
    return matrix[int(row) : int(row) + plan.rows, : plan.cols]


@fill.lowering
def fill(slot, matrices, batch, head, row):
    plan = slot.ring.tile

    def generate(b, value, tensor_map, batch, head, row):
        stage, _ = unpack(b, value)
        filled = emit_barrier(b, slot.ring, stage, False)
        text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
        asm(b, text, VOID, filled, I32(plan.nbytes), effect=True)
        text = (
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[$0], [$1, {$2, $3, $4, $5}], [$6];"
        )
        for col, box in boxes_of(b, plan, emit_stage(b, plan, stage)):
            asm(b, text, VOID, box, tensor_map, col, row, head, batch, filled, effect=True)

    index = types.int32
    return types.void(slot, types.uint64, index, index, index), generate


def boxes_of(b, plan, pointer):
    """The first column and the address of each box of a tile."""
    start = b.ptrtoint(pointer, I32)
    for i, col in enumerate(range(0, plan.cols, plan.width)):
        yield I32(col), b.add(start, I32(i * plan.box_bytes))


@primitive
def share_with_tma():
    """What this thread has written to shared memory may be sent, or multiplied by warpgroups, after a barrier."""
    simulator.shared_memory().share()


@share_with_tma.lowering
def share_with_tma():
    return types.void(), lambda b: asm(b, "fence.proxy.async.shared::cta;", VOID, effect=True)


@primitive
def send(matrices, shared, batch, head, row):
    """Start to copy a tile of boxes to rows `row`... of a matrix, without what lies beyond it. By one thread."""
    values = shared.read(slice(None), slice(None), shared.memory.start_work(_sends()))
    part = _rows(matrices, shared.plan, batch, head, row)
    part[...] = values[: part.shape[0], : part.shape[1]]


def _sends():
    return f"a send of thread {simulator.thread_index()}"


@send.lowering
def send(matrices, shared, batch, head, row):
    plan = shared.plan

    def generate(b, tensor_map, pointer, batch, head, row):
        text = "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [$0, {$1, $2, $3, $4}], [$5];"
        for col, box in boxes_of(b, plan, pointer):
            asm(b, text, VOID, tensor_map, col, row, head, batch, box, effect=True)
        asm(b, "cp.async.bulk.commit_group;", VOID, effect=True)

    index = types.int32
    return types.void(types.uint64, shared, index, index, index), generate


@primitive
def sent():
    """Wait until the tiles that this thread sends may be overwritten."""
    memory = simulator.shared_memory()
    unit = memory.unit(_sends())
    memory.note_end(unit, memory.clocks[0, unit, unit])


@sent.lowering
def sent():
    return types.void(), lambda b: asm(b, "cp.async.bulk.wait_group.read 0;", VOID, effect=True)

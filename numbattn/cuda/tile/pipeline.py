"""Pipelines: stages of shared memory that the tensor memory accelerator (TMA) fills and warpgroups read.

    producer, one thread                    consumers, whole warpgroups
    K = stage(PIPELINE, 0)                  K = stage(PIPELINE, 0)
    acquire(K)    # its readers are done    wait(K)       # it is filled
    tma_load(K, mK, batch, head, row)       ... K.tile ...
    K = advance(K)                          release(K)
                                            K = advance(K)

A producer and a consumer, and the tile on its way back:

    >>> shared, ROWS = SharedMemory(), simt(8, 64, 128, 16, 4)
    >>> PIPELINE = Pipeline.within(shared, shared.boxes(8, 64, np.float16, stages=2), readers=1)
    >>> def kernel(x, y):
    ...     init_pipelines(PIPELINE)
    ...     sync_threads()
    ...     S = stage(PIPELINE, 0)
    ...     if warpgroup_index() == 1:
    ...         if thread_index() == 128:
    ...             for row in range(0, 32, 8):
    ...                 acquire(S)
    ...                 tma_load(S, x, 0, 0, row)
    ...                 S = advance(S)
    ...     else:
    ...         for row in range(0, 32, 8):
    ...             wait(S)
    ...             tile = get(S.tile, ROWS)
    ...             sync_warpgroup()
    ...             put(S.tile, convert(convert(tile, np.float32) * 2, np.float16))
    ...             fence_async_proxy()
    ...             sync_warpgroup()
    ...             if thread_index() == 0:
    ...                 tma_store(y, S.tile, 0, 0, row)
    ...                 tma_store_wait()
    ...             release(S)
    ...             S = advance(S)
    >>> x = np.arange(32 * 64).reshape(1, 1, 32, 64).astype(np.float16)
    >>> bool((run(kernel, x, np.zeros_like(x), threads=256) == 2 * x).all())
    True

A Stage is one use of a stage: its index, and whether that stage is in an even or an odd round (its phase). Each stage
has two barriers (mbarrier): `filled` counts loads and their bytes, or the warpgroups that have committed it; `free`
counts the warpgroups that have released it.

A wait for an mbarrier names the parity of a phase, which is also that of the phase two before. So whoever waits has to
know that the phase in between is over. A consumer that reads a stage in every round knows. Where consumers take turns,
each acquires a stage before it waits: then its last reader has seen it filled.
"""

from dataclasses import dataclass

import numpy as np

from ..compiler import define_attribute, held_as_llvm, ir, types
from . import simulator
from .boxes import Boxes
from .emit import I32, VOID, asm, if_first_of, shared_memory, thread_index
from .fragment import constant
from .integers import INDEX
from .layout import WARPGROUP
from .races import BARRIERS_OR_WAITS, GRANULE, NOBODY, RaceError, pages_of
from .shared_memory import TileType, allocate, emit_stage
from .simulator import Barrier
from .world import primitive

BARRIER_BYTES = 8


@constant
@dataclass(frozen=True)
class Pipeline:
    """The places of stages and their barriers, how many warpgroups read each stage, and how it is filled.

    >>> shared = SharedMemory()
    >>> print(Pipeline.within(shared, shared.tile(1, 4, np.int32, stages=2), readers=1))
    pipeline of 2 int32 1x4 at 0, 1 readers
    """

    tile: Boxes
    barriers: int  # offset in shared memory: first those of `filled`, then those of `free`
    readers: int
    fills: int = 1  # number of loads, or commits, that fill a stage
    once: bool = False  # whether nobody reads again what loads copy: the L2 cache gives it up first
    in_cluster: bool = False  # whether the other block of a cluster fills and releases its stages, see `cluster`

    def __str__(self):
        return f"pipeline of {self.tile.stages} {self.tile}, {self.readers} readers" + ", once" * self.once

    @property
    def end(self):
        """Bytes of shared memory up to the end of the last barrier."""
        return self.barriers + 2 * self.tile.stages * BARRIER_BYTES

    @property
    def is_empty(self):
        """Whether there is nothing to fill, of no columns: nobody waits for anything."""
        return self.tile.nbytes == 0

    @classmethod
    def within(cls, shared, tile, readers, fills=1, once=False, in_cluster=False):
        return cls(tile, shared.reserve(2 * tile.stages * BARRIER_BYTES), readers, fills, once, in_cluster)


@dataclass(frozen=True)
class Stage:
    """One use of a stage, in plain Python."""

    pipeline: Pipeline
    index: int
    round: int  # how often the stage has been used before; on a GPU only whether that is odd

    @property
    def tile(self):
        return allocate(self.pipeline.tile, self.index)

    def barrier(self, free, rank=None):
        """One of its barriers, in this block or in another one of the cluster."""
        memory, pipeline = simulator.shared_memory(), self.pipeline
        key = pipeline, simulator.rank() if rank is None else rank
        barriers, who, when = memory.pipelines.get(key, (None, 0, np.inf))
        if memory.clocks[0, simulator.thread_index(), who] < when:
            raise RaceError(f"thread {simulator.thread_index()} uses a {pipeline}, and no barrier says that it is open")
        return barriers[free][self.index]

    def parities(self, rank=None):
        """Where the barrier of `filled` keeps its parity, one for each warpgroup that fills: a wait reads it."""
        start, granule = simulator.block().shared_bytes * (simulator.rank() if rank is None else rank), GRANULE
        at = start + self.pipeline.barriers + self.index * BARRIER_BYTES
        return simulator.shared_memory().granules[at // granule : (at + BARRIER_BYTES) // granule]

    def next_round(self, rank=None):
        """The stage is filled anew: whoever still waits for the round before would wait for ever."""
        parities = self.parities(rank)
        mine = simulator.thread_index() // WARPGROUP % len(parities)
        granules = parities[mine : mine + 1]
        simulator.shared_memory().note_write(granules, pages_of(granules), of=BARRIERS_OR_WAITS)

    def note_wait(self):
        memory, parities = simulator.shared_memory(), self.parities()
        memory.note_read(parities[memory.writer[parities] != NOBODY], pages_of(parities))


@held_as_llvm
class StageType(types.Type):
    llvm = ir.LiteralStructType([I32, I32])  # the stage's index and the parity of its round

    def __init__(self, pipeline):
        self.pipeline = pipeline
        super().__init__(f"Stage({pipeline})")

    @property
    def key(self):
        return self.pipeline


def emit_stage_state(b, index, parity):
    value = ir.Constant(StageType.llvm, ir.Undefined)
    return b.insert_value(b.insert_value(value, index, 0), parity, 1)


def unpack(b, stage):
    return b.extract_value(stage, 0), b.extract_value(stage, 1)


def emit_barrier(b, pipeline, index, free):
    """The address of a barrier."""
    start = shared_memory(b, pipeline.barriers + free * pipeline.tile.stages * BARRIER_BYTES)
    return b.add(b.ptrtoint(start, I32), b.mul(index, I32(BARRIER_BYTES)))


@primitive
def init_pipelines(*pipelines):
    """Initialise pipelines: by all threads of a block, before a barrier of the block. See `pipeline`.

    >>> def kernel(y):
    ...     init_pipelines(RING)
    ...     sync_threads()
    ...     acquire(stage(RING, 1))  # at first every stage is free
    ...     y[0] = 1
    >>> run(kernel, np.zeros(1))
    array([1.])
    """
    me, memory = simulator.thread_index(), simulator.shared_memory()
    for pipeline in pipelines if simulator.index_in_block() == 0 else ():
        kinds = ("filled", WARPGROUP if pipeline.in_cluster else pipeline.fills), ("free", pipeline.readers)
        barriers = [
            [Barrier(f"{name} of stage {index} of a {pipeline}", count) for index in range(pipeline.tile.stages)]
            for name, count in kinds
        ]
        memory.pipelines[pipeline, simulator.rank()] = barriers, me, memory.tell()[0, me]


@init_pipelines.lowering
def init_pipelines(*pipelines):
    def generate(b, _):
        with b.if_then(b.icmp_unsigned("==", thread_index(b), I32(0))):
            for pipeline in (kind.value for kind in pipelines):
                for index in range(pipeline.tile.stages):
                    for free, count in enumerate((pipeline.fills, pipeline.readers)):
                        at = emit_barrier(b, pipeline, I32(index), free)
                        asm(b, "mbarrier.init.shared::cta.b64 [$0], $1;", VOID, at, I32(count), effect=True)
            asm(b, "fence.mbarrier_init.release.cluster;", VOID, effect=True)

    return types.void(types.StarArgTuple(pipelines)), generate


@primitive
def stage(pipeline, index):
    """The first use of a stage. See `pipeline`.

    >>> def kernel(y):
    ...     y[0] = stage(RING, 1).index
    >>> run(kernel, np.zeros(1))
    array([1.])
    """
    return Stage(pipeline, int(index), 0)


@stage.lowering
def stage(pipeline, index):
    return StageType(pipeline.value)(pipeline, types.int32), lambda b, _, index: emit_stage_state(b, index, I32(0))


@primitive
def advance(stage, steps=1):
    """The use `steps` stages further on, at most as many as there are. See `pipeline`.

    >>> def kernel(y):
    ...     S = stage(RING, 0)
    ...     y[0], y[1], y[2] = S.index, advance(S).index, advance(S, 2).index
    >>> run(kernel, np.zeros(3))
    array([0., 1., 0.])
    """
    if not 0 <= steps <= stage.pipeline.tile.stages:
        raise ValueError(f"advance: got {steps} steps, expected 0 to {stage.pipeline.tile.stages}")
    rounds, index = divmod(stage.index + int(steps), stage.pipeline.tile.stages)
    return Stage(stage.pipeline, index, stage.round + rounds)


@advance.lowering
def advance(stage, steps=1):
    count = stage.pipeline.tile.stages

    def generate(b, value, steps):
        index, parity = unpack(b, value)
        index = b.add(index, steps)
        beyond = b.icmp_unsigned(">=", index, I32(count))
        return emit_stage_state(b, b.select(beyond, b.sub(index, I32(count)), index),
                         b.select(beyond, b.xor(parity, I32(1)), parity))

    return stage(stage, types.int32), generate


@primitive
def alongside(stage, other):
    """The use of a stage of this one's pipeline at the same time as `other` of another, where both are advanced
    together: then one of them is kept in registers.

    >>> def kernel(y):
    ...     S = advance(stage(RING, 0), 1)
    ...     y[0], y[1] = S.index, alongside(stage(RING, 0), S).index
    >>> run(kernel, np.zeros(2))
    array([1., 1.])
    """
    return Stage(stage.pipeline, other.index, other.round)


@alongside.lowering
def alongside(stage, other):
    return stage(stage, other), lambda b, _, other: other


def emit_wait(b, pipeline, barrier, parity):
    """Wait until the barrier's phase of this parity is over."""
    scope = ".acquire.cluster" if pipeline.in_cluster else ""
    text = f"""{{
        .reg .pred over;
    again:
        mbarrier.try_wait.parity{scope}.shared::cta.b64 over, [$0], $1;
        @over bra done;
        bra again;
    done:
    }}"""
    asm(b, text, VOID, barrier, parity, effect=True)


@primitive
def acquire(stage):
    """Wait until the stage's readers have released what it held before. See `pipeline`.

    >>> def kernel(y):
    ...     init_pipelines(RING)
    ...     sync_threads()
    ...     if warpgroup_index() == 0:
    ...         y[0] = 4
    ...         release(stage(RING, 0))
    ...     else:
    ...         acquire(advance(stage(RING, 0), 2))  # the same stage in the next round
    ...         y[1] = y[0] + 1
    >>> run(kernel, np.zeros(2), threads=256)
    array([4., 5.])
    """
    if not stage.pipeline.is_empty:
        stage.barrier(free=True).wait(stage.round - 1)


@acquire.lowering
def acquire(stage):
    def generate(b, value):
        if stage.pipeline.is_empty:
            return
        index, parity = unpack(b, value)
        emit_wait(b, stage.pipeline, emit_barrier(b, stage.pipeline, index, True), b.xor(parity, I32(1)))

    return types.void(stage), generate


@primitive
def wait(stage):
    """Wait until the stage is filled. See `pipeline`.

    >>> ROW = simt(1, 4, 32, 4, 1)
    >>> def kernel(y):
    ...     init_pipelines(RING)
    ...     sync_threads()
    ...     S = stage(RING, 0)
    ...     if thread_index() == 31:
    ...         commit(S, (3, 4, 5, 6))
    ...     wait(S)
    ...     save(y, get(S.tile, ROW), 0)
    >>> run(kernel, np.zeros((1, 4)))
    array([[3., 4., 5., 6.]])
    """
    if not stage.pipeline.is_empty:
        stage.barrier(free=False).wait(stage.round)
        stage.note_wait()


@wait.lowering
def wait(stage):
    def generate(b, value):
        if stage.pipeline.is_empty:
            return
        index, parity = unpack(b, value)
        filled = emit_barrier(b, stage.pipeline, index, False)
        if stage.pipeline.in_cluster:
            with if_first_of(b, WARPGROUP):
                emit_arrival_of_bytes(b, filled, I32(stage.pipeline.tile.size))
        emit_wait(b, stage.pipeline, filled, parity)

    return types.void(stage), generate


@primitive
def release(stage, threads=WARPGROUP):
    """Say that this warpgroup, or warp, has read the stage. All of its threads call this; what the first of them knows
    counts.

    >>> def kernel(y):
    ...     init_pipelines(RING)
    ...     sync_threads()
    ...     S = stage(RING, 0)
    ...     release(S)
    ...     acquire(advance(S, 2))  # the same stage in the next round; without a release this waits for ever
    ...     y[0] = 1
    >>> run(kernel, np.zeros(1), threads=128)
    array([1.])
    """
    if simulator.thread_index() % threads == 0 and not stage.pipeline.is_empty:
        stage.barrier(free=True).arrive()


@release.lowering
def release(stage, threads=WARPGROUP):
    if isinstance(threads, types.Integer) and not isinstance(threads, types.IntegerLiteral):
        return None

    def generate(b, value, _):
        if not stage.pipeline.is_empty:
            emit_arrival_of_group(b, stage, value, True, getattr(threads, "literal_value", threads))

    return types.void(stage, types.int32 if threads == WARPGROUP else threads), generate


def emit_arrival(b, pipeline, index, free):
    asm(b, "mbarrier.arrive.shared::cta.b64 _, [$0];", VOID, emit_barrier(b, pipeline, index, free), effect=True)


def emit_arrival_of_bytes(b, filled, nbytes):
    """Arrive where so many bytes come, too."""
    asm(b, "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", VOID, filled, nbytes, effect=True)


def emit_arrival_of_group(b, stage, value, free, threads=WARPGROUP):
    """Arrive at a barrier by the first thread of a warpgroup, or warp."""
    with if_first_of(b, threads):
        emit_arrival(b, stage.pipeline, unpack(b, value)[0], free)


def _tile_of(stage):
    plan = stage.pipeline.tile
    return TileType(plan), lambda b, value: emit_stage(b, plan, unpack(b, value)[0])


define_attribute(StageType, "tile", _tile_of)
define_attribute(StageType, "index", lambda stage: (INDEX, lambda b, value: unpack(b, value)[0]))

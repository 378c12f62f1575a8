"""Clusters: two blocks that run together, each of which reaches the shared memory of the other one, its peer.

A Source with `cluster=2` has them. A pipeline `in_cluster` has stages that the peer fills, by `put_in_peer`; it arrives
in the background. The block that reads the stage says by `release_in_peer` that the peer may fill it again: for that
the peer waits for its own barrier, by `acquire`. Before the first of these words and after the last one all threads
`sync_cluster`: a block that has ended has no shared memory.

    >>> shared, ROW = SharedMemory(), simt(1, 128, 128, 1, 128)
    >>> PIPELINE = Pipeline.within(shared, shared.tile(1, 128, np.float32), readers=1, in_cluster=True)
    >>> def kernel(x, y):
    ...     init_pipelines(PIPELINE)
    ...     sync_cluster()
    ...     S = stage(PIPELINE, 0)
    ...     acquire(S)
    ...     put_in_peer(S, S.tile, load(x, ROW, cluster_rank()))
    ...     wait(S)
    ...     save(y, get(S.tile, ROW), cluster_rank())
    ...     sync_warpgroup()
    ...     release_in_peer(S)
    ...     sync_cluster()
    >>> x = np.arange(256, dtype=np.float32).reshape(2, 128)
    >>> run(kernel, x, np.zeros((2, 128)), threads=128, cluster=2)[:, :3]
    array([[128., 129., 130.],
           [  0.,   1.,   2.]])
"""

from ..compiler import types
from . import simulator
from .conversion import left_pairs, round_to, stored_values
from .emit import (
    I32,
    VOID,
    Index,
    asm,
    base,
    if_first_holder,
    if_first_of,
    shuffle_xor,
    thread_index,
    vector_of,
)
from .fragment import check_tile, element_type
from .fragment import registers as unpack
from .global_memory import holds_first_copy, places
from .integers import INDEX
from .layout import WARPGROUP
from .pipeline import emit_barrier
from .pipeline import unpack as unpack_stage
from .shared_memory import by_matrices, check_shape, shared_runs, tile_of_block
from .synchronisation import warpgroup_of
from .world import primitive

WORD = 4  # bytes of a store


@primitive
def cluster_rank():
    """Which of its cluster's blocks this is, 0 or 1. See `cluster`.

    >>> run(lambda y: save(y, full(TILE, cluster_rank()), cluster_rank()), np.zeros((2, 1)), cluster=2)
    array([[0.],
           [1.]])
    """
    return simulator.rank()


@cluster_rank.lowering
def cluster_rank():
    return INDEX(), emit_rank


@primitive
def sync_cluster():
    """Wait for all threads of the cluster: what they have written to shared memory is now seen by all. See `cluster`.

    >>> def kernel(y):
    ...     y[block_index() * 32 + thread_index()] = 1
    ...     sync_cluster()
    >>> run(kernel, np.zeros(64), cluster=2).sum()
    np.float64(64.0)
    """
    simulator.block().cluster.meet()


@sync_cluster.lowering
def sync_cluster():
    def generate(b):
        asm(b, "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;", VOID, effect=True)

    return types.void(), generate


@primitive
def put_in_peer(stage, shared, tile):
    """Start to put a tile that goes with a stage into the peer's shared memory, where `shared` is in this block's, by
    the threads of a warpgroup. It fills the peer's stage. Readers that multiply it call `fence_async_proxy` after they
    have waited. See `cluster`.

    >>> shared, ROW = SharedMemory(), simt(1, 128, 128, 1, 128)
    >>> PIPELINE = Pipeline.within(shared, shared.tile(1, 128, np.float32), readers=1, in_cluster=True)
    >>> def kernel(y):
    ...     init_pipelines(PIPELINE)
    ...     sync_cluster()
    ...     S = stage(PIPELINE, 0)
    ...     if cluster_rank() == 0:
    ...         put_in_peer(S, S.tile, full(ROW, np.float32(3)))
    ...     else:
    ...         wait(S)
    ...         save(y, get(S.tile, ROW), 0)
    ...     sync_cluster()
    >>> run(kernel, np.zeros((1, 128)), threads=128, cluster=2)[0, :4]
    array([3., 3., 3., 3.])
    """
    _check_put(shared.plan, tile)
    memory, peer = simulator.shared_memory(), 1 - simulator.rank()
    work = memory.start_work(simulator.of_block(f"what warpgroup {warpgroup_of()} puts in the peer"))
    if holds_first_copy(tile.layout):
        there = tile_of_block(peer, *shared.at)
        there = there.T if shared.plan.transposed else there
        values = round_to(shared.plan.dtype, tile.registers)
        there.write(*places(tile.layout), values, work, needs_fence=False)
    filled, (unit, number) = stage.barrier(False, peer), work
    if filled.arrived == 0:
        stage.next_round(peer)
    known = memory.tell()
    known[0, unit] = number
    filled.arrive(known)


@put_in_peer.lowering
def put_in_peer(stage, shared, tile):
    layout, plan = tile.layout, shared.plan
    _check_put(plan, tile)
    item, by_quads = plan.dtype.itemsize, by_matrices(plan, layout) and tile.dtype == types.float32

    def generate(b, value, pointer, registers):
        with if_first_holder(b, layout):
            write(b, value, pointer, unpack(b, tile, registers))

    def write(b, value, pointer, regs):
        start = emit_in_peer(b, b.ptrtoint(pointer, I32))
        filled = emit_in_peer(b, emit_barrier(b, stage.pipeline, unpack_stage(b, value)[0], False))
        if by_quads:
            put_quads(b, plan, layout, start, regs, filled)
            return
        for rows, cols, place in shared_runs(b, plan, layout):
            values = stored_values(b, tile.dtype, shared.dtype, [regs[r][c] for r in rows for c in cols])
            at = b.add(start, b.mul(place, I32(item)))
            for word, first in enumerate(range(0, len(values), WORD // item)):
                bits = b.bitcast(vector_of(b, values[first : first + WORD // item]), I32)
                emit_put(b, b.add(at, I32(WORD * word)), [bits], filled)

    return types.void(stage, shared, tile), generate


def put_quads(b, plan, layout, start, rows, filled):
    """Put a warpgroup's sums into boxes, 16 bytes at a time: in four lanes, each of which has two columns of 32, each
    gets eight next to each other."""
    lane, row0 = Index(b, b.and_(thread_index(b), I32(3))), Index(b, base(b, layout.rows))
    for down, row in zip(layout.rows.offsets, rows):
        pairs = left_pairs(b, element_type(plan.dtype), [row])
        for first in range(0, len(pairs), 4):
            place = plan.place(row0 + down, lane * 8 + layout.cols.offsets[2 * first])
            at = b.add(start, b.mul(place.value, I32(plan.dtype.itemsize)))
            emit_put(b, at, transposed(b, pairs[first : first + 4]), filled)


def emit_put(b, at, words, filled):
    """Start to store a word in the peer, or four, which count at a barrier there."""
    names = ", ".join(f"${number}" for number in range(1, len(words) + 1))
    form, names = ("", names) if len(words) == 1 else (f".v{len(words)}", f"{{{names}}}")
    text = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{form}.b32 [$0], {names}, [${len(words) + 1}];"
    asm(b, text, VOID, at, *words, filled, effect=True)


def transposed(b, words):
    """The transpose of a matrix of words of which each of four lanes has a column."""
    for bit in (1, 2):
        is_odd = b.icmp_unsigned("!=", b.and_(thread_index(b), I32(bit)), I32(0))
        for low in (i for i in range(4) if not i & bit):
            x, y = words[low], words[low | bit]
            other = shuffle_xor(b, b.select(is_odd, x, y), bit)
            words[low], words[low | bit] = b.select(is_odd, other, x), b.select(is_odd, y, other)
    return words


def _check_put(plan, tile):
    check_tile("put_in_peer", tile)
    check_shape("put_in_peer", plan, tile.layout)


def emit_rank(b):
    return asm(b, "mov.u32 $0, %cluster_ctarank;", I32)


def emit_in_peer(b, address):
    """The address of the same byte in the peer's shared memory."""
    return asm(b, "mapa.shared::cluster.u32 $0, $1, $2;", I32, address, b.xor(emit_rank(b), I32(1)))


@primitive
def release_in_peer(stage):
    """Tell the peer, who fills it, that this warpgroup has read a stage, after a barrier. See `cluster`.

    >>> shared, ROW = SharedMemory(), simt(1, 128, 128, 1, 128)
    >>> PIPELINE = Pipeline.within(shared, shared.tile(1, 128, np.float32), readers=1, in_cluster=True)
    >>> def kernel(y):
    ...     init_pipelines(PIPELINE)
    ...     sync_cluster()
    ...     S = stage(PIPELINE, 0)
    ...     for number in range(3):
    ...         if cluster_rank() == 0:
    ...             acquire(S)  # the peer has read what was there
    ...             put_in_peer(S, S.tile, full(ROW, np.float32(number)))
    ...         else:
    ...             wait(S)
    ...             save(y, get(S.tile, ROW), number)
    ...             sync_warpgroup()
    ...             release_in_peer(S)
    ...         S = advance(S, 1)
    ...     sync_cluster()
    >>> run(kernel, np.zeros((3, 128)), threads=128, cluster=2)[:, 0]
    array([0., 1., 2.])
    """
    if simulator.thread_index() % WARPGROUP == 0:
        stage.barrier(True, 1 - simulator.rank()).arrive()


@release_in_peer.lowering
def release_in_peer(stage):
    def generate(b, value):
        with if_first_of(b, WARPGROUP):
            barrier = emit_in_peer(b, emit_barrier(b, stage.pipeline, unpack_stage(b, value)[0], True))
            asm(b, "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];", VOID, barrier, effect=True)

    return types.void(stage), generate

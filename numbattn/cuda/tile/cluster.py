"""Clusters: two blocks that run together, each of which reaches the shared memory of the other one, its peer.

A Source with `cluster=2` has them. A pipeline `in_cluster` has stages that the peer fills: it has `put_in_peer` what
comes there, and says so by `commit_in_peer`. The block that reads the stage says by `release_in_peer` that the peer may
fill it again: for that the peer waits for its own barrier, by `acquire`. Before the first of these words and after the
last one all threads `sync_cluster`: a block that has ended has no shared memory.

    >>> shared, ROW = SharedMemory(), simt(1, 128, 128, 1, 128)
    >>> PIPELINE = Pipeline.within(shared, shared.tile(1, 128, np.float32), readers=1, in_cluster=True)
    >>> def kernel(x, y):
    ...     init_pipelines(PIPELINE)
    ...     sync_cluster()
    ...     S = stage(PIPELINE, 0)
    ...     acquire(S)
    ...     put_in_peer(S.tile, load(x, ROW, cluster_rank()))
    ...     sync_warpgroup()
    ...     commit_in_peer(S)
    ...     wait(S)
    ...     save(y, get(S.tile, ROW), cluster_rank())
    ...     release_in_peer(S)
    ...     sync_cluster()
    >>> x = np.arange(256, dtype=np.float32).reshape(2, 128)
    >>> run(kernel, x, np.zeros((2, 128)), threads=128, cluster=2)[:, :3]
    array([[128., 129., 130.],
           [  0.,   1.,   2.]])
"""

from ..compiler import types
from . import simulator
from .conversion import round_to, stored_values
from .emit import I32, VOID, asm, is_first_holder, thread_index, vector_of
from .fragment import check_tile
from .fragment import registers as unpack
from .global_memory import holds_first_copy, places
from .integers import INDEX
from .layout import WARPGROUP
from .pipeline import emit_barrier
from .pipeline import unpack as unpack_stage
from .shared_memory import check_shape, shared_runs, tile_of_block
from .world import primitive


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


def emit_rank(b):
    return asm(b, "mov.u32 $0, %cluster_ctarank;", I32)


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
def put_in_peer(shared, tile):
    """Like `put`, into the tile at the same place in the peer's shared memory. See `cluster`."""
    check_tile("put_in_peer", tile)
    check_shape("put_in_peer", shared.plan, tile.layout)
    there = tile_of_block(1 - simulator.rank(), *shared.at)
    if shared.plan.transposed:
        there = there.T
    if holds_first_copy(tile.layout):
        there.write(*places(tile.layout), round_to(shared.plan.dtype, tile.registers))


@put_in_peer.lowering
def put_in_peer(shared, tile):
    check_tile("put_in_peer", tile)
    layout, plan = tile.layout, shared.plan
    check_shape("put_in_peer", plan, layout)

    def write(b, pointer, regs):
        item = plan.dtype.itemsize
        start = emit_in_peer(b, b.ptrtoint(pointer, I32))
        for rows, cols, place in shared_runs(b, plan, layout):
            values = stored_values(b, tile.dtype, shared.dtype, [regs[r][c] for r in rows for c in cols])
            at = b.add(start, b.mul(place, I32(item)))
            for word, first in enumerate(range(0, len(values), 4 // item)):
                bits = b.bitcast(vector_of(b, values[first : first + 4 // item]), I32)
                asm(b, f"st.shared::cluster.b32 [$0+{4 * word}], $1;", VOID, at, bits, effect=True)

    def generate(b, pointer, value):
        mine, regs = is_first_holder(b, layout), unpack(b, tile, value)
        if mine is None:
            write(b, pointer, regs)
        else:
            with b.if_then(mine):
                write(b, pointer, regs)

    return types.void(shared, tile), generate


def emit_in_peer(b, address):
    """The address of the same byte in the peer's shared memory."""
    peer = b.xor(emit_rank(b), I32(1))
    return asm(b, "mapa.shared::cluster.u32 $0, $1, $2;", I32, address, peer)


@primitive
def fence_async_proxy_of_peer():
    """Like `fence_async_proxy`, of what this thread has put in the peer's shared memory. See `cluster`."""
    simulator.shared_memory().share()


@fence_async_proxy_of_peer.lowering
def fence_async_proxy_of_peer():
    return types.void(), lambda b: asm(b, "fence.proxy.async.shared::cluster;", VOID, effect=True)


@primitive
def commit_in_peer(stage):
    """Say that this warpgroup has put its part into the peer's stage, after a barrier. See `cluster`."""
    if simulator.thread_index() % WARPGROUP == 0:
        stage.next_round(1 - simulator.rank())
        stage.barrier(False, 1 - simulator.rank()).arrive()


@primitive
def release_in_peer(stage):
    """Tell the peer, who fills it, that this warpgroup has read a stage, after a barrier. See `cluster`."""
    if simulator.thread_index() % WARPGROUP == 0:
        stage.barrier(True, 1 - simulator.rank()).arrive()


def _lower_arrival(free):
    def lower(stage):
        def generate(b, value):
            first = b.icmp_unsigned("==", b.and_(thread_index(b), I32(WARPGROUP - 1)), I32(0))
            with b.if_then(first):
                barrier = emit_in_peer(b, emit_barrier(b, stage.pipeline, unpack_stage(b, value)[0], free))
                text = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];"
                asm(b, text, VOID, barrier, effect=True)

        return types.void(stage), generate

    return lower


commit_in_peer = commit_in_peer.lowering(_lower_arrival(free=False))
release_in_peer = release_in_peer.lowering(_lower_arrival(free=True))

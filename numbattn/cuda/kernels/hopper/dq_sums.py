"""dQ on Hopper as a sum of all blocks' parts, in global memory and in no fixed order; `round_dq` rounds it.

A fixed order: see `dq_turns`. The sums leave by bulk reduce-add: atomics from registers (red.v4) were slower by 8 to
15 %.
"""

from ...tile import (
    WARPGROUP,
    acquire,
    advance,
    allocate,
    bulk_add,
    commit,
    device,
    dot,
    fence_async_proxy,
    put,
    put_registers,
    release,
    sync_warpgroup,
    thread_index,
    tma_store_wait,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)
from ..any.round_dq import DqPart, round_spec
from .backward_steps import CONSUMERS, PART


@device
def is_first_of_warpgroup():
    return thread_index() % WARPGROUP == 0


@device
def wait_for_store():
    """The warpgroup's first thread, which stores sums, waits until their place may be overwritten."""
    if is_first_of_warpgroup():
        tma_store_wait()


def product_step(SHARED_DS, SHARED_K):
    """The device function (sdS) -> dS K of all keys of the block, in flight: the 64 queries and 64 columns that are
    this consumer's. sdS: the stage of dS."""
    DS_PARTS, K_PARTS = SHARED_DS.parts(PART), SHARED_K.parts(PART)
    ROW_PARTS, COL_PARTS, Q_TILE = SHARED_DS.cols // PART, SHARED_K.cols // PART, wgmma(PART)

    @device
    def start_dq(sdS):
        part = warpgroup_index()
        rows, cols, first = part // COL_PARTS, part % COL_PARTS, sdS.index * CONSUMERS
        wait(sdS)
        dQ = dot(Q_TILE, allocate(DS_PARTS, first * ROW_PARTS + rows).T, allocate(K_PARTS, cols))
        for consumer in range(1, CONSUMERS):
            dS, K = (first + consumer) * ROW_PARTS + rows, consumer * COL_PARTS + cols
            dQ = dot(dQ, allocate(DS_PARTS, dS).T, allocate(K_PARTS, K))
        return dQ

    return start_dq


def dq_steps(SHARED_DS, SHARED_DQ, start_dq, late):
    """Device functions of a consumer of `hopper_backward_kv`, which computes one part of each dQ: publish dS, store the
    part, drain what is left at the end of a tile of keys, and finish. late: see Variant."""
    TILE_M, LATE, PLACES = SHARED_DS.cols, late, 1 + late       # PLACES: of a consumer

    @device
    def dq_place(sdS, part):
        """The place of a consumer's part of dQ; if it has two, that of this stage of dS."""
        return allocate(SHARED_DQ, sdS.index % PLACES * CONSUMERS + part)

    @device
    def send_dq(sdS, of, mSums, tile):
        """Add dQ of the tile of queries `of`, if it is one, from shared memory to the sums in global memory."""
        part = warpgroup_index()
        if of.m_blocks > 0 and is_first_of_warpgroup():
            first = tile.segment.first_padded_row // TILE_M + of.m_block
            bulk_add(mSums[tile.batch, of.head], first * CONSUMERS + part, dq_place(sdS, part))

    @device
    def add_dq(sdS, of, mSums, tile):
        """`send_dq`, after the whole warpgroup has put it in shared memory."""
        fence_async_proxy()
        sync_warpgroup()
        send_dq(sdS, of, mSums, tile)

    @device
    def publish_ds(dS, sdS, walk, mSums, tile, mask):
        """Let all consumers read dS. If dQ is late, send the one that leaves, put a step ago."""
        acquire(sdS)
        wait_for_store()                                        # the next dQ may be put
        put(allocate(SHARED_DS, sdS.index * CONSUMERS + warpgroup_index()), dS)
        fence_async_proxy()
        sync_warpgroup()
        commit(sdS)
        if LATE:
            send_dq(sdS, walk.leaving, mSums, tile)

    @device
    def store_dq(dQ, sdS, of, mSums, tile):
        """Put dQ of the tile of queries `of` in shared memory and, unless it is late, add it to the sums."""
        release(sdS)
        if LATE:
            put_registers(dq_place(sdS, warpgroup_index()), dQ)
        elif of.m_blocks > 0:
            put_registers(dq_place(sdS, warpgroup_index()), dQ)
            add_dq(sdS, of, mSums, tile)

    @device
    def drain_dq(sdS, walk, mSums, tile, mask):
        """Send the dQ of the last tile of queries, and what has not been sent yet."""
        dQ = wgmma_wait(start_dq(advance(sdS, 1)), 0)
        if LATE:
            add_dq(sdS, walk.previous, mSums, tile)
        wait_for_store()
        sync_warpgroup()
        store_dq(dQ, advance(sdS, 1), walk.current, mSums, tile)
        if LATE:
            add_dq(advance(sdS, 1), walk.current, mSums, tile)

    @device
    def finish_dq(sdS):
        wait_for_store()

    return publish_ds, store_dq, drain_dq, finish_dq


SPEC = round_spec(lambda work: DqPart(PART, PART, WARPGROUP, across=1))

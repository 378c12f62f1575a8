"""tdQ = tdS K + dS tK on Hopper as a sum of all blocks' parts, in global memory and in no fixed order: see `dq_sums`.

What is added up is the transpose, K^T tdS^T + tK^T dS^T, in parts of 64 columns of tdQ: products with few queries need
not fill 64 rows. Each consumer computes a part; if there is only one, consumers take turns, since half a part would
read shared memory half as long again.
"""

import numpy as np

from ...tile import (
    WARPGROUP,
    acquire,
    allocate,
    beside,
    bulk_add,
    columns,
    commit,
    device,
    dot,
    fence_async_proxy,
    put,
    put_registers,
    release,
    sync_warpgroup,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)
from ..any.round_dq import DqPart, round_spec
from .backward_steps import CONSUMERS, PART, ROWS
from .dq_sums import is_first_of_warpgroup, wait_for_store


def product_step(K, SHARED_DS, tile_m):
    """The device function (sdS, part) -> 64 columns of tdQ, transposed, in flight, in a group for each factor of each
    consumer's keys. K: the places of K and tK; sdS: the stage of dS and tdS."""
    K_PARTS, TK_PARTS = (place.parts(PART) for place in K)
    BOXES, TILE, COLS, HALVES = SHARED_DS.parts(PART), wgmma(tile_m), K[0].cols // PART, PART // tile_m

    @device
    def operand_of(sdS, consumer, number):
        """dS, number 0, or tdS of a consumer's keys; both may be in one box."""
        box = (sdS.index * CONSUMERS + consumer) * 2 // HALVES + number // HALVES
        return columns(allocate(BOXES, box), number % HALVES, HALVES)

    @device
    def start(sdS, part):
        wait(sdS)
        tdQ = dot(TILE, allocate(K_PARTS, part).T, operand_of(sdS, 0, 1))
        tdQ = dot(tdQ, allocate(TK_PARTS, part).T, operand_of(sdS, 0, 0))
        for consumer in range(1, CONSUMERS):
            tdQ = dot(tdQ, allocate(K_PARTS, consumer * COLS + part).T, operand_of(sdS, consumer, 1))
            tdQ = dot(tdQ, allocate(TK_PARTS, consumer * COLS + part).T, operand_of(sdS, consumer, 0))
        return tdQ

    return start


def tdq_steps(shared, K, tile_m, dtype, started_later):
    """The places of dS and tdS; how many groups of products `start` has in flight; and device functions of a consumer,
    where `sdS` is a stage of these places, and `of` a tile of queries, or none:

    publish(dS, tdS, sdS)                  lets all consumers read both
    start(sdS)                             starts tdQ
    store(tdQ, sdS, of, tile, mSums)       adds it to the sums, after `started_later` other products
    drain(sdS, of, tile, mSums)            both, after all other products
    finish()                               waits until nothing reads shared memory any more
    """
    SHARED_DS = shared.boxes(ROWS, 2 * tile_m, dtype, 2 * CONSUMERS)
    SHARED_DQ = shared.tile(1, PART * tile_m, np.float32, CONSUMERS)
    start_part, PARTS, TILE_M, BOTH = product_step(K, SHARED_DS, tile_m), K[0].cols // PART, tile_m, wgmma(2 * tile_m)
    LATER = started_later

    @device
    def publish(dS, tdS, sdS):
        acquire(sdS)
        wait_for_store()                                        # the next tdQ may be put
        put(allocate(SHARED_DS, sdS.index * CONSUMERS + warpgroup_index()), beside(dS, tdS, BOTH))
        fence_async_proxy()
        sync_warpgroup()
        commit(sdS)

    @device
    def add(tdQ, part, sdS, of, tile, mSums):
        place = allocate(SHARED_DQ, warpgroup_index())
        release(sdS)
        if of.m_block >= 0:
            put_registers(place, tdQ)
            fence_async_proxy()
            sync_warpgroup()
            if is_first_of_warpgroup():
                first = tile.segment.first_padded_row // TILE_M + of.m_block
                bulk_add(mSums[tile.batch, of.head], first * PARTS + part, place)

    @device
    def start(sdS):
        return start_part(sdS, warpgroup_index())

    @device
    def store(tdQ, sdS, of, tile, mSums):
        add(wgmma_wait(tdQ, LATER), warpgroup_index(), sdS, of, tile, mSums)

    @device
    def drain(sdS, of, tile, mSums):
        wait_for_store()
        sync_warpgroup()
        add(wgmma_wait(start(sdS), 0), warpgroup_index(), sdS, of, tile, mSums)

    @device
    def start_nothing(sdS):
        return ()

    @device
    def store_in_turn(nothing, sdS, of, tile, mSums):
        if warpgroup_index() == sdS.index:
            add(wgmma_wait(start_part(sdS, 0), 0), 0, sdS, of, tile, mSums)
        else:
            release(sdS)

    @device
    def drain_in_turn(sdS, of, tile, mSums):
        wait_for_store()
        sync_warpgroup()
        store_in_turn((), sdS, of, tile, mSums)

    if PARTS < CONSUMERS:
        return SHARED_DS, 0, (publish, start_nothing, store_in_turn, drain_in_turn, wait_for_store)
    return SHARED_DS, 2 * CONSUMERS, (publish, start, store, drain, wait_for_store)


def round_spec_of(tile_m):
    """The Spec of the kernel that rounds the sums. tile_m: (work) -> queries of a part."""
    return round_spec(lambda work: DqPart(tile_m(work), PART, WARPGROUP, across=1, transposed=True), name="tdq")

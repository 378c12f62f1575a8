"""Sums of P over queries on Hopper (wgmma, TMA), as in `any.column_sums`: S and P are transposed, a row is a key.

One thread of the last warpgroup is the producer; each consumer keeps 64 keys and loops over the queries that see those
of the block. Their lse and weights are on their way a tile ahead, one of each in a thread, and then go through shared
memory: loaded as a tile of S needs them, they take longer than all else.
"""

import numpy as np

from ...tile import (
    WARPGROUP,
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    block_index,
    col_index,
    device,
    dot,
    full,
    get,
    load,
    maximum,
    part_sum,
    prefetch_tensor_map,
    put,
    release,
    row_sum,
    save,
    shape,
    simt,
    stage,
    sync_warpgroup,
    tma_load,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
    where,
)
from ...words.arguments import Statistic, TmaMatrix
from ...words.signatures import signature_of
from ...words.spec import Route, Spec
from ...words.tiers import WGMMA
from ..any.column_sums import blocks
from ..scores import SCORE, score_steps, within_segment
from ..shared.layouts import DTYPES
from ..shared.query_tiles import key_tile_step, queries_steps
from ..shared.recompute import recompute
from ..shared.schedule import place
from ..shared.segments import keys_of, mask_within_step, slot_step
from ..shared.softmax import log2_step
from ..shared.visibility import MASK, band_of, element_test
from ..shared.warps import source_of, warp_specialised
from ..tables import is_under_pressure
from .backward_steps import WgmmaTiles, size_of
from .forward import REGISTERS
from .forward_tiles import ROWS, is_for_hopper, parameters


def hopper_column_sums(*, dtype, head_dim, head_dim_v, tiles, mask, score, dropout):
    """The kernel for these WgmmaTiles and a head_dim rounded up to head_dim; the rest: as in `any.column_sums`."""
    dtype, ACC, (tile_m, tile_n, stages, _) = DTYPES[dtype], np.float32, tiles
    S_TILE, CONSUMERS, shared = wgmma(tile_m), tile_n // ROWS, SharedMemory()
    SHARED_K, SHARED_Q = shared.boxes(ROWS, head_dim, dtype, CONSUMERS), shared.boxes(tile_m, head_dim, dtype, stages)
    K_PIPELINE = Pipeline.within(shared, SHARED_K, readers=1)
    Q_PIPELINE = Pipeline.within(shared, SHARED_Q, CONSUMERS)
    SHARED_LSE, SHARED_WEIGHTS = (shared.tile(1, tile_m, ACC, 2 * CONSUMERS) for _ in range(2))
    TILE_M, COLUMNS, PARTS = tile_m, S_TILE.col_vector(), S_TILE.row_parts()
    BY_THREAD = simt(1, tile_m, WARPGROUP, WARPGROUP, 1).col_vector()
    INFINITE, ZERO = ACC(np.inf), ACC(0)
    band_at, sees = band_of(mask), element_test(mask, S_TILE, transposed=True)
    first_queries, next_queries, needs_mask = queries_steps(mask, tile_m, ROWS)
    apply, *_ = score_steps(score, S_TILE, ACC, transposed=True, after=len(score))
    to_log2, key_tile = log2_step(ACC), key_tile_step(tile_n)
    tile_of, mask_of, scores_of = slot_step(mask, "k", tile_n), mask_within_step(mask), within_segment(score)

    @device
    def load_tiles(mQ, mK, mask, tile, head_k):
        """The producer, one thread."""
        prefetch_tensor_map(mQ)
        K, Q = stage(K_PIPELINE, 0), stage(Q_PIPELINE, 0)
        for consumer in range(CONSUMERS):
            tma_load(K, mK, tile.batch, head_k, tile.segment.first_key + tile.first + consumer * ROWS)
            K = advance(K, 1)
        at = first_queries(mask, tile)
        while at.m_block < at.m_blocks:
            acquire(Q)
            tma_load(Q, mQ, tile.batch, at.head, tile.segment.first_query + at.m_block * TILE_M)
            Q, at = advance(Q, 1), next_queries(mask, tile, at)

    @device
    def rows_of(rows, tile, at, length):
        """lse and the weight of one query a thread, in flight."""
        (mLse, mWeights), query, m0 = rows, tile.segment.first_query, at.m_block * TILE_M
        lse = load(mLse[tile.batch, at.head][query : query + length], BY_THREAD, m0)
        return lse, load(mWeights[tile.batch, at.head][query : query + length], BY_THREAD, m0)

    @device
    def share(found, place, at, length):
        """What all threads of a consumer read of these: lse is in base 2, and infinite where nothing is seen."""
        lse, weights = found
        seen = (lse != -INFINITE) & (col_index(BY_THREAD, at.m_block * TILE_M) < length)
        put(allocate(SHARED_LSE, place), where(seen, to_log2(lse), INFINITE))
        put(allocate(SHARED_WEIGHTS, place), where(seen, weights, 0))
        sync_warpgroup()

    @device
    def compute(mSums, rows, mask, scores, tile, scale_log2):
        """The consumers, whole warpgroups."""
        batch, head, segment = tile.batch, tile.head, tile.segment
        n0, band = tile.first + warpgroup_index() * ROWS, band_at(mask, batch, head)
        length, place = maximum(band[2], 1), 2 * warpgroup_index()
        K, Q, at = stage(K_PIPELINE, warpgroup_index()), stage(Q_PIPELINE, 0), first_queries(mask, tile)
        found, total = rows_of(rows, tile, at, length), full(PARTS, ZERO)
        wait(K)
        while at.m_block < at.m_blocks:
            m0 = at.m_block * TILE_M
            share(found, place, at, length)
            wait(Q)
            S = dot(S_TILE, K.tile, Q.tile.T)                   # Alg. 4 line 11: S = Q K^T, transposed
            after = next_queries(mask, tile, at)
            found = rows_of(rows, tile, after, length)
            S = wgmma_wait(S, 0)
            release(Q)
            S, _ = apply(S, scores, batch, head, segment.first_query + m0, segment.first_key + n0)
            P = recompute(S, get(allocate(SHARED_LSE, place), COLUMNS), scale_log2)     # line 13: P = exp(S - lse)
            if needs_mask(mask, tile, at, n0):
                P = where(sees(mask, band, batch, head, m0, n0), P, 0)                  # line 12: MASK
            total = part_sum(P * get(allocate(SHARED_WEIGHTS, place), COLUMNS), total)
            Q, at, place = advance(Q, 1), after, place ^ 1
        first, end = keys_of(segment)
        save(mSums[batch, head][first:end], row_sum(total), n0)

    pipelines = K_PIPELINE, Q_PIPELINE
    begin, take_roles = warp_specialised(pipelines, CONSUMERS, REGISTERS[CONSUMERS], compute, load_tiles)

    def kernel(mQ, mK, mLse, mLow, mWeights, mSums, mask, scores, group_size, scale_log2):
        begin()
        (batches, heads, _), (_, _, seqlen_k) = shape(mLse), shape(mSums)
        number, batch, head = place(block_index(), batches * heads, heads)
        segment, n_block = tile_of(mask.packing, batch, number, seqlen_k)
        tile, mask = key_tile(batch, head, n_block, segment, 1), mask_of(mask, segment)
        if tile.first < tile.end:                               # else a slot without a tile
            of_consumers = mSums, (mLse, mWeights), mask, scores_of(scores, segment), tile, scale_log2
            take_roles(of_consumers, ((mQ, mK, mask, tile, head // group_size),))

    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, {}, mask=mask, score=score)
    return source_of(kernel, signature, CONSUMERS, shared, (SHARED_Q, SHARED_K))


TILES = {  # microseconds, as in `statistics`
    64: WgmmaTiles(128, 256, 3),                                    # 111; causal 64; three consumers 132, 70
    128: WgmmaTiles(128, 256, 3),                                   # 139; causal 80; three consumers 163, 86
    192: WgmmaTiles(128, 128, 2),
    256: WgmmaTiles(128, 128, 2),
}
UNDER_PRESSURE = TILES | {64: WgmmaTiles(128, 192, 4), 128: WgmmaTiles(128, 192, 4)}
SPEC = Spec(
    hopper_column_sums,
    (TmaMatrix("q"), TmaMatrix("k", "k"), Statistic("lse"), Statistic("lse_low"), Statistic("weights"),
     Statistic("column_sums", padded=True), MASK, SCORE, "group_size", "scale_log2"),
    tiles=lambda work: ((UNDER_PRESSURE if is_under_pressure(work) else TILES)[size_of(work)],),
    parameters=parameters,
    keeps="k",
    blocks=blocks,
    arch="a",
    packs=True,
)  # fmt: skip
ROUTE = Route(is_for_hopper, (SPEC,), WGMMA)

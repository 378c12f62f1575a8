"""What the rows of S say on Hopper (wgmma, TMA): their maxima, entropies of P and lse, as in `any.statistics`.

One thread of the last warpgroup is the producer; each consumer keeps 64 queries and loops over the keys. There is no
O: m is the maximum itself, since rescaling costs no more than some instructions a row.
"""

import numpy as np

from ...tile import (
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    block_index,
    device,
    dot,
    exp2,
    full,
    log2,
    maximum,
    minimum,
    opaque,
    part_sum,
    prefetch_tensor_map,
    reciprocal,
    release,
    row_max,
    row_sum,
    save,
    shape,
    stage,
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
from ..any.statistics import LEAST
from ..scores import SCORE, may_be_far, score_steps, sink_steps, within_segment
from ..scores.sink import SinkKind
from ..shared.layouts import DTYPES
from ..shared.schedule import place
from ..shared.segments import count_step, mask_within_step, queries_of, slot_step
from ..shared.softmax import LN_2, logsumexp, softmax_parts
from ..shared.visibility import MASK, band_of, element_test, needs_test
from ..shared.warps import source_of, warp_specialised
from ..tables import is_under_pressure
from .backward_steps import WgmmaTiles, size_of
from .forward import REGISTERS
from .forward_tiles import ROWS, is_for_hopper, parameters
from .walk import WorkTile, n_block_steps


def hopper_statistics(*, dtype, head_dim, head_dim_v, tiles, mask, score, dropout):
    """The kernel for these WgmmaTiles and a head_dim rounded up to head_dim; the rest: as in `any.statistics`."""
    dtype, ACC, (tile_m, tile_n, stages, _) = DTYPES[dtype], np.float32, tiles
    S_TILE, CONSUMERS, shared = wgmma(tile_n), tile_m // ROWS, SharedMemory()
    SHARED_Q, SHARED_K = shared.boxes(ROWS, head_dim, dtype, CONSUMERS), shared.boxes(tile_n, head_dim, dtype, stages)
    Q_PIPELINE = Pipeline.within(shared, SHARED_Q, readers=1)
    K_PIPELINE = Pipeline.within(shared, SHARED_K, CONSUMERS)
    TILE_M, TILE_N, VECTOR, PARTS = tile_m, tile_n, S_TILE.row_vector(), S_TILE.row_parts()
    NO_SCORE, LN2, LOW, ZERO = ACC(-np.inf), ACC(LN_2), ACC(LEAST), ACC(0)
    HAS_SINK, IS_FAR, (no_max, *_) = SinkKind() in score, may_be_far(score), softmax_parts(ACC, may_be_far(score))
    band_at, sees, tested = band_of(mask), element_test(mask, S_TILE), needs_test(mask)
    apply, *_ = score_steps(score, S_TILE, ACC, after=len(score))
    with_sink, _ = sink_steps(score, ACC)
    tiles_of, tile_of = count_step(mask, tile_m), slot_step(mask, "q", tile_m)
    mask_of, scores_of = mask_within_step(mask, ROWS), within_segment(score)
    visible_blocks, next_n_block = n_block_steps(mask, tile_n)

    @device
    def load_tiles(mQ, mK, mask, work, head_k):
        """The producer, one thread."""
        prefetch_tensor_map(mK)
        Q, K = stage(Q_PIPELINE, 0), stage(K_PIPELINE, 0)
        for consumer in range(CONSUMERS):
            tma_load(Q, mQ, work.batch, work.head, work.segment.first_query + work.m_block * TILE_M + consumer * ROWS)
            Q = advance(Q, 1)
        n_block = next_n_block(work, mask, work.n_block)
        while n_block < work.n_blocks:
            acquire(K)
            tma_load(K, mK, work.batch, head_k, work.segment.first_key + n_block * TILE_N)
            K, n_block = advance(K, 1), next_n_block(work, mask, opaque(n_block + 1))

    @device
    def relative(S, m, scale_log2):
        """log2(P), where what is masked is finite: 0 * inf is NaN."""
        return maximum((S - m) * scale_log2 if IS_FAR else S * scale_log2 - m * scale_log2, LOW)

    @device
    def compute(rows, mask, scores, work, scale_log2):
        """The consumers, whole warpgroups."""
        mRowMax, mEntropy, mLse = rows
        batch, head, m_block, n_block, n_blocks, segment = work
        m0, band = m_block * TILE_M + warpgroup_index() * ROWS, band_at(mask, batch, head)
        Q, K = stage(Q_PIPELINE, warpgroup_index()), stage(K_PIPELINE, 0)
        wait(Q)
        largest, m = full(VECTOR, NO_SCORE), full(VECTOR, no_max(scale_log2))
        l, t = full(PARTS, ZERO), full(PARTS, ZERO)
        n_block = next_n_block(work, mask, n_block)
        while n_block < n_blocks:
            n0 = n_block * TILE_N
            wait(K)
            S = wgmma_wait(dot(S_TILE, Q.tile, K.tile.T), 0)    # Alg. 2 line 10: S = Q K^T
            release(K)
            S, _ = apply(S, scores, batch, head, segment.first_query + m0, segment.first_key + n0)
            if tested(mask, band, batch, head, m_block, n_block, m0, m0 + ROWS, n0, n0 + TILE_N):
                S = where(sees(mask, band, batch, head, m0, n0), S, NO_SCORE)  # line 11: MASK(S)
            largest, before = row_max(S, largest), m
            m = maximum(largest, m)
            x, last = relative(S, m, scale_log2), maximum((before - m) * scale_log2, LOW)
            P, alpha = exp2(x), exp2(last)
            t = part_sum(P * x, (t + l * last) * alpha)
            l = part_sum(P, l * alpha)
            K, n_block = advance(K, 1), next_n_block(work, mask, opaque(n_block + 1))
        natural, l, t = m * (scale_log2 * LN2), row_sum(l), row_sum(t) * LN2
        last, total, alpha = with_sink(natural, l, scores, batch, head)
        if HAS_SINK:
            p = maximum(total - l * alpha, 0)                   # of the sink, relative to `last`
            t = (t + l * maximum(natural - last, LOW)) * alpha + p * maximum(log2(p) * LN2, LOW)
        seen, (first, end) = l > 0, queries_of(segment)
        entropy = where(seen, log2(total) * LN2 - t * reciprocal(total), 0)
        save(mEntropy[batch, head][first:end], entropy, m0)
        save(mRowMax[batch, head][first:end], where(seen, largest * (scale_log2 * LN2), NO_SCORE), m0)
        save(mLse[batch, head][first:end], logsumexp(last, total, LN2), m0)

    pipelines = Q_PIPELINE, K_PIPELINE
    begin, take_roles = warp_specialised(pipelines, CONSUMERS, REGISTERS[CONSUMERS], compute, load_tiles)

    def kernel(mQ, mK, mRowMax, mEntropy, mLse, mLow, mask, scores, group_size, scale_log2):
        begin()
        batches, heads, seqlen_q = shape(mLse)
        number, batch, head = place(block_index(), batches * heads, heads)
        tile = tiles_of(mask.packing, seqlen_q) - 1 - number    # the heaviest tiles of a causal mask first
        segment, m_block = tile_of(mask.packing, batch, tile, seqlen_q)
        m0, mask = m_block * TILE_M, mask_of(mask, segment)
        if m0 < segment.queries:                                # else a slot without a tile
            first, end = visible_blocks(mask, batch, head, m0, minimum(m0 + TILE_M, segment.queries))
            work = WorkTile(batch, head, m_block, first, end, segment)
            of_consumers = (mRowMax, mEntropy, mLse), mask, scores_of(scores, segment), work, scale_log2
            take_roles(of_consumers, ((mQ, mK, mask, work, head // group_size),))

    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, {}, mask=mask, score=score)
    return source_of(kernel, signature, CONSUMERS, shared, (SHARED_Q, SHARED_K))


TILES = {  # microseconds at 16 heads of 4096 tokens on an H200, and of lse alone: see bench/rotary.py
    64: WgmmaTiles(256, 128, 3),                                    # 121, 106; causal 70, 66; three consumers 139
    128: WgmmaTiles(256, 128, 3),                                   # 140, 149; causal 81, 82; three consumers 163
    192: WgmmaTiles(128, 128, 2),
    256: WgmmaTiles(128, 64, 3),
}
UNDER_PRESSURE = TILES | {64: WgmmaTiles(192, 128, 4), 128: WgmmaTiles(192, 128, 4)}
SPEC = Spec(
    hopper_statistics,
    (TmaMatrix("q"), TmaMatrix("k", "k"), Statistic("row_max"), Statistic("entropy"), Statistic("lse"),
     Statistic("lse_low"), MASK, SCORE, "group_size", "scale_log2"),
    tiles=lambda work: ((UNDER_PRESSURE if is_under_pressure(work) else TILES)[size_of(work)],),
    parameters=parameters,
    arch="a",
    packs=True,
)  # fmt: skip
ROUTE = Route(is_for_hopper, (SPEC,), WGMMA)

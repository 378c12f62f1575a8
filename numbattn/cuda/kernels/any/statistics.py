"""What the rows of S say on any GPU: their maxima, entropies of P and lse. The loop is that of `forward`, without P V.

Beside l = rowsum(exp(S - m)) a row has t = rowsum(exp(S - m) (S - m)), which becomes exp(-x) (t - l x) where m grows by
x. Its entropy is log(l) - t / l.
"""

import numpy as np

from ...build import Source
from ...tile import (
    SharedMemory,
    block_index,
    full,
    log2,
    maximum,
    minimum,
    part_sum,
    reciprocal,
    row_max,
    row_sum,
    save,
    shape,
    sync_threads,
    wait_copies,
    where,
)
from ...words.arguments import Matrix, Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..scores import SCORE, may_be_far, score_steps, sink_steps, within_segment
from ..scores.sink import SinkKind
from ..shared.layouts import DTYPES, buffers, product_step, sum_type
from ..shared.schedule import place
from ..shared.segments import count_step, mask_within_step, queries_of, slot_step
from ..shared.slices import sliced_product
from ..shared.softmax import LN_2, logsumexp, low_step, softmax_parts
from ..shared.visibility import MASK, band_of, element_test, needs_test, steps_to_next, visible_keys
from ..tables import Tiles, rows_of, sliced
from . import forward

LEAST = -1e30  # what -inf counts as where its exponential is 0


def statistics(*, dtype, head_dim, head_dim_v, tiles, mask, score, dropout, nbytes, by_slices=False):
    """The kernel for these Tiles and a head_dim rounded up to head_dim; the rest: as in `forward`."""
    dtype, ACC, (_, tile_m, tile_n, threads, *_) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    shared = SharedMemory()
    S_TILE, product = product_step(tiles, tile_m, tile_n, shared, ACC)
    of_q, of_k = (buffers(shared, dtype, threads, rows, [head_dim])[0] for rows in (tile_m, tile_n))
    fetch_q, fetch_k, product = sliced_product(by_slices, head_dim, S_TILE, product, of_q, of_k, ACC(0), nbytes)
    TILE_M, TILE_N, ROWS, PARTS = tile_m, tile_n, S_TILE.row_vector(), S_TILE.row_parts()
    NO_SCORE, LN2, LOW, ZERO = ACC(-np.inf), ACC(LN_2), ACC(LEAST), ACC(0)
    HAS_LOW, HAS_SINK, far = dtype.itemsize > 2, SinkKind() in score, may_be_far(score)
    band_at, sees, tested, steps = band_of(mask), element_test(mask, S_TILE), needs_test(mask), steps_to_next(mask)
    apply, *_ = score_steps(score, S_TILE, ACC, after=len(score))
    (no_max, new_max, exponentials), low_of = softmax_parts(ACC, far, exact=HAS_LOW), low_step(ACC, far)
    with_sink, inverse = sink_steps(score, ACC)
    tiles_of, tile_of = count_step(mask, tile_m), slot_step(mask, "q", tile_m)
    mask_of, scores_of = mask_within_step(mask), within_segment(score)

    def kernel(mQ, mK, mRowMax, mEntropy, mLse, mLow, mask, scores, group_size, scale_log2):
        batches, heads, seqlen_q = shape(mLse)
        tile, batch, head = place(block_index(), batches * heads, heads)
        number = tiles_of(mask.packing, seqlen_q) - 1 - tile   # the heaviest tiles of a causal mask first
        segment, m_block = tile_of(mask.packing, batch, number, seqlen_q)
        m0 = m_block * TILE_M
        if m0 >= segment.queries:                               # a slot without a tile
            return
        mask, scores = mask_of(mask, segment), scores_of(scores, segment)
        band = band_at(mask, batch, head)
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, segment.queries))
        head_k, key, (query, end_query) = head // group_size, segment.first_key, queries_of(segment)
        # without rows beyond a sequence's length, which may be NaN
        Q = mQ[batch, head][query : query + maximum(band[2], 1)]
        K = mK[batch, head_k][key : key + maximum(band[3], 1)]
        m, largest, l, t = full(ROWS, no_max(scale_log2)), full(ROWS, NO_SCORE), full(PARTS, ZERO), full(PARTS, ZERO)
        n_block = first // TILE_N
        n_blocks = (end + TILE_N - 1) // TILE_N
        n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
        fetch_q(0, Q, m0)
        while n_block < n_blocks:
            n0 = n_block * TILE_N
            fetch_k(0, K, n0)
            wait_copies()
            sync_threads()                                      # K has arrived
            S = product((0, 0), Q, K, m0, n0, 0)                # Alg. 2 line 10: S = Q K^T
            S, _ = apply(S, scores, batch, head, query + m0, key + n0)
            if tested(mask, band, batch, head, m_block, n_block, m0, m0 + TILE_M, n0, n0 + TILE_N):
                S = where(sees(mask, band, batch, head, m0, n0), S, NO_SCORE)  # line 11: MASK(S)
            before = m
            m, alpha, zero = new_max(S, m, scale_log2)          # which may lag behind the maximum
            largest = row_max(S, largest)
            P = exponentials(S, zero, scale_log2)
            t = (t + l * maximum((before - m) * scale_log2, LOW)) * alpha
            t = part_sum(P * maximum((S - m) * scale_log2, LOW), t)
            l = part_sum(P, l * alpha)
            n_block += 1
            n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
            sync_threads()                                      # all have read K
        natural, l, t = m * (scale_log2 * LN2), row_sum(l), row_sum(t) * LN2
        last, total, alpha = with_sink(natural, l, scores, batch, head)
        if HAS_SINK:
            p = maximum(total - l * alpha, 0)                   # of the sink, relative to `last`
            t = (t + l * maximum(natural - last, LOW)) * alpha + p * maximum(log2(p) * LN2, LOW)
        seen, lse = l > 0, logsumexp(last, total, LN2)
        entropy = where(seen, log2(total) * LN2 - t * reciprocal(total), 0)
        save(mEntropy[batch, head][query:end_query], entropy, m0)
        save(mRowMax[batch, head][query:end_query], where(seen, largest * (scale_log2 * LN2), NO_SCORE), m0)
        save(mLse[batch, head][query:end_query], lse, m0)
        if HAS_LOW:
            save(mLow[batch, head][query:end_query], low_of(lse, m, scale_log2, inverse(total, alpha)), m0)

    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, {}, mask=mask, score=score)
    return Source(kernel, signature, threads, tiles.blocks, shared.nbytes)


# As in `forward`, where half precision has kernels of its own
TILES = forward.TILES | {
    (2, 64): (Tiles("mma", 128, 64, 256),), (2, 128): (Tiles("mma", 128, 64, 256),),
    (2, 256): (Tiles("mma", 64, 32, 128),),
}  # fmt: skip
SPEC = Spec(
    statistics,
    (Matrix("q"), Matrix("k", "k"), Statistic("row_max"), Statistic("entropy"), Statistic("lse"), Statistic("lse_low"),
     MASK, SCORE, "group_size", "scale_log2"),
    tiles=lambda work: rows_of(TILES, forward.UNDER_PRESSURE, work),
    parameters=lambda work, tiles: sliced(work, tiles) | {"head_dim_v": 0},
    packs=True,
    slices=True,
)  # fmt: skip

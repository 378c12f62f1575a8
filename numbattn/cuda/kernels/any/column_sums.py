"""Sums of P over queries on any GPU: a block keeps a tile of keys, and loops over the queries that see it, as in the
backward pass. P is recomputed from lse, so that each sum is one block's: equal bit for bit from call to call."""

import numpy as np

from ...build import Source
from ...tile import (
    SharedMemory,
    block_index,
    col_index,
    full,
    load,
    maximum,
    minimum,
    part_sum,
    row_sum,
    save,
    shape,
    sync_threads,
    wait_copies,
    where,
)
from ...words.arguments import Matrix, Statistic
from ...words.numbers import LOG2_E
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..scores import SCORE, score_steps, within_segment
from ..shared.layouts import DTYPES, buffers, product_step, sum_type
from ..shared.recompute import low_steps
from ..shared.schedule import place
from ..shared.segments import keys_of, mask_within_step, slot_step
from ..shared.slices import sliced_product
from ..shared.softmax import log2_step
from ..shared.visibility import MASK, band_of, element_test, needs_test, steps_to_next, visible_queries
from ..tables import rows_of, sliced
from . import statistics
from .forward import UNDER_PRESSURE


def column_sums(*, dtype, head_dim, head_dim_v, tiles, mask, score, dropout, nbytes, low, by_slices=False):
    """The kernel; S and P are transposed: a row is a key, a column a query. low: whether what rounding took from lse is
    given; the rest: as in `statistics`."""
    dtype, ACC, (_, tile_m, tile_n, threads, *_) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    shared = SharedMemory()
    S_TILE, product = product_step(tiles, tile_n, tile_m, shared, ACC)
    of_k, of_q = (buffers(shared, dtype, threads, rows, [head_dim])[0] for rows in (tile_n, tile_m))
    fetch_k, fetch_q, product = sliced_product(by_slices, head_dim, S_TILE, product, of_k, of_q, ACC(0), nbytes)
    TILE_M, TILE_N, COLUMNS, PARTS = tile_m, tile_n, S_TILE.col_vector(), S_TILE.row_parts()
    INFINITE, ZERO, LOG2E, IS_GIVEN = ACC(np.inf), ACC(0), ACC(LOG2_E), low
    band_at, sees = band_of(mask), element_test(mask, S_TILE, transposed=True)
    tested, steps = needs_test(mask), steps_to_next(mask)
    apply, *_ = score_steps(score, S_TILE, ACC, transposed=True, after=len(score))
    (_, _, recompute), to_log2 = low_steps(dtype), log2_step(ACC)
    tile_of, mask_of, scores_of = slot_step(mask, "k", tile_n), mask_within_step(mask), within_segment(score)

    def kernel(mQ, mK, mLse, mLow, mWeights, mSums, mask, scores, group_size, scale_log2):
        (batches, heads, _), (_, _, seqlen_k) = shape(mLse), shape(mSums)
        tile, batch, head = place(block_index(), batches * heads, heads)
        segment, n_block = tile_of(mask.packing, batch, tile, seqlen_k)
        n0 = n_block * TILE_N
        if n0 >= segment.keys:                                  # a slot without a tile
            return
        mask, scores = mask_of(mask, segment), scores_of(scores, segment)
        query, (key, end_key) = segment.first_query, keys_of(segment)
        band = band_at(mask, batch, head)
        first, end = visible_queries(band, n0, minimum(n0 + TILE_N, segment.keys))
        length = maximum(band[2], 1)                            # without rows beyond a sequence's, which may be NaN
        K, Q = mK[batch, head // group_size][key:end_key], mQ[batch, head][query : query + length]
        end_query = query + length
        total = full(PARTS, ZERO)
        m_block, m_blocks = first // TILE_M, (end + TILE_M - 1) // TILE_M
        m_block += steps(mask, batch, head, n_block, m_block, m_blocks - m_block)
        fetch_k(0, K, n0)
        while m_block < m_blocks:
            m0 = m_block * TILE_M
            fetch_q(0, Q, m0)
            lse = load(mLse[batch, head][query:end_query], COLUMNS, m0)
            weights = load(mWeights[batch, head][query:end_query], COLUMNS, m0)
            seen = (lse != -INFINITE) & (col_index(COLUMNS, m0) < length)
            lse, weights, rest = where(seen, to_log2(lse), INFINITE), where(seen, weights, 0), full(COLUMNS, ZERO)
            if IS_GIVEN:
                rest = where(seen, load(mLow[batch, head][query:end_query], COLUMNS, m0) * LOG2E, 0)
            wait_copies()
            sync_threads()                                      # Q has arrived
            S = product((0, 0), K, Q, n0, m0, 0)                # Alg. 4 line 11: S = Q K^T, transposed
            S, _ = apply(S, scores, batch, head, query + m0, key + n0)
            P = recompute(S, lse, rest, scale_log2)             # line 13: P = exp(S - lse)
            if tested(mask, band, batch, head, n_block, m_block, m0, m0 + TILE_M, n0, n0 + TILE_N):
                P = where(sees(mask, band, batch, head, m0, n0), P, 0)      # line 12: MASK
            total = part_sum(P * weights, total)
            m_block += 1
            m_block += steps(mask, batch, head, n_block, m_block, m_blocks - m_block)
            sync_threads()                                      # all have read Q
        save(mSums[batch, head][key:end_key], row_sum(total), n0)

    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, {}, mask=mask, score=score)
    return Source(kernel, signature, threads, tiles.blocks, shared.nbytes)


def rows(work):
    """Those of `statistics`, with queries and keys exchanged."""
    found = rows_of(statistics.TILES, UNDER_PRESSURE, work)
    return tuple([tiles._replace(tile_m=tiles.tile_n, tile_n=tiles.tile_m) for tiles in found])


def blocks(work, tiles, m_blocks, n_blocks):
    """Blocks for one element of the batch, one for each head and tile of keys."""
    return work.problem.heads * n_blocks


SPEC = Spec(  # of column_sums no row beyond the queries is left out
    column_sums,
    (Matrix("q"), Matrix("k", "k"), Statistic("lse"), Statistic("lse_low"), Statistic("weights"),
     Statistic("column_sums", padded=True), MASK, SCORE, "group_size", "scale_log2"),
    tiles=rows,
    parameters=lambda work, tiles: sliced(work, tiles) | {"head_dim_v": 0, "low": "lse_low" in work.dtypes},
    keeps="k",
    blocks=blocks,
    packs=True,
    slices=True,
)  # fmt: skip

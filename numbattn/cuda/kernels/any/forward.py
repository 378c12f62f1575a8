"""Attention forward on any GPU: Algorithm 2, and 5 where the mask has blocks (lines 10 to 16 are the same in both).

One source serves tensor cores (float32, float64) and CUDA cores: the layouts of S and O decide. A block keeps a tile of
queries and loops over the keys that they see. V of a tile is in flight while S is computed, K of the next tile while O
is computed. O is divided by l once, in the epilogue. Tiles of packed arrays end with their segment.
"""

import numpy as np

from ...build import Source
from ...tile import (
    SharedMemory,
    allocate,
    copy_async,
    dot,
    maximum,
    minimum,
    row_sum,
    save,
    shape,
    sync_threads,
    wait_copies,
    where,
)
from ...words.arguments import O_BEFORE, Matrix, Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec, block_per_query_tile
from ..scores import SCORE, may_be_far, score_steps, sink_steps, within_segment
from ..shared.dropout import DROPOUT, drop_step
from ..shared.layouts import DTYPES, buffers, left_operand, product_step, sum_type, sums, vector
from ..shared.schedule import place
from ..shared.segments import count_step, mask_within_step, queries_of, slot_step
from ..shared.slices import slice_steps, sliced_product
from ..shared.softmax import LN_2, logsumexp, low_step, softmax_steps
from ..shared.start import start_step
from ..shared.visibility import MASK, band_of, element_test, needs_test, steps_to_next, visible_keys
from ..tables import FMA, Tiles, lse_alone, of_o, rows_of, sliced, slices_of


def forward(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, score, dropout, nbytes, resumes=False, by_slices=False
):  # fmt: skip
    """The kernel for these Tiles and head_dims rounded up to head_dim and head_dim_v.

    nbytes: alignment of the rows of all matrices. resumes: whether the loop starts from O and lse over other keys, see
    `shared.start`. by_slices: whether head_dims are those of slices, see `shared.slices`.
    """
    dtype, ACC, (_, tile_m, tile_n, threads, *_) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    O_TILE = sums(tiles, tile_m, head_dim_v, run=vector(dtype))
    shared = SharedMemory()
    S_TILE, product = product_step(tiles, tile_m, tile_n, shared, ACC)
    (of_q,) = buffers(shared, dtype, threads, tile_m, [head_dim])
    of_k, (SHARED_V, COPY_V) = buffers(shared, dtype, threads, tile_n, [head_dim, head_dim_v])
    (own_slice, slice_of), ZERO = slice_steps(by_slices, head_dim, nbytes), ACC(0)
    fetch_q, fetch_k, product = sliced_product(by_slices, head_dim, S_TILE, product, of_q, of_k, ZERO, nbytes)
    left = left_operand(S_TILE, shared, ACC, head_dim_v)
    TILE_M, TILE_N = tile_m, tile_n
    NO_SCORE, LN2, HAS_LOW, far = ACC(-np.inf), ACC(LN_2), dtype.itemsize > 2, may_be_far(score)
    band_at, sees, tested, steps = band_of(mask), element_test(mask, S_TILE), needs_test(mask), steps_to_next(mask)
    drop, (apply, *_) = drop_step(S_TILE, dropout), score_steps(score, S_TILE, ACC, after=len(score))
    (no_max, softmax_step), low_of = softmax_steps(ACC, far, exact=HAS_LOW), low_step(ACC, far)
    with_sink, inverse = sink_steps(score, ACC)
    tiles_of, tile_of = count_step(mask, tile_m), slot_step(mask, "q", tile_m)
    mask_of, scores_of = mask_within_step(mask), within_segment(score)
    start = start_step(S_TILE, O_TILE, ACC, no_max, resumes)

    def kernel(mQ, mK, mV, mO, before, mLse, mLow, mask, scores, drops, group_size, scale_log2, kept_scale):
        batches, heads, seqlen_q = shape(mLse)
        own, block = own_slice(mQ, mV)
        tile, batch, head = place(block, batches * heads, heads)
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
        V = slice_of(mV[batch, head_k][key : key + maximum(band[3], 1)], own)
        sV = allocate(SHARED_V)
        O, m, l = start(before, mLse, segment, batch, head, m0, scale_log2, kept_scale)
        n_block = first // TILE_N
        n_blocks = (end + TILE_N - 1) // TILE_N
        n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
        fetch_q(0, Q, m0)
        fetch_k(0, K, n_block * TILE_N)
        wait_copies()
        sync_threads()
        while n_block < n_blocks:
            n0 = n_block * TILE_N
            copy_async(sV, V, COPY_V, n0)                       # in flight while S is computed
            S = product((0, 0), Q, K, m0, n0, 0)                # Alg. 2 line 10: S = Q K^T
            S, _ = apply(S, scores, batch, head, query + m0, key + n0)
            if tested(mask, band, batch, head, m_block, n_block, m0, m0 + TILE_M, n0, n0 + TILE_N):
                S = where(sees(mask, band, batch, head, m0, n0), S, NO_SCORE)  # line 11: MASK(S)
            P, m, l, alpha = softmax_step(S, m, l, scale_log2)  # lines 12 and 13
            P = drop(P, drops, batch, head, m0, n0)             # line 14: dropout(P)
            wait_copies()
            sync_threads()                                      # V has arrived, all have read K
            n_block += 1
            n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
            fetch_k(0, K, n_block * TILE_N)                     # in flight while O is computed
            O = dot(O * alpha, left(P), sV)                     # line 15: O = alpha O + P V
            wait_copies()
            sync_threads()                                      # K has arrived, all have read V
        largest, total, alpha = with_sink(m * (scale_log2 * LN2), row_sum(l), scores, batch, head)
        factor, lse = inverse(total, alpha), logsumexp(largest, total, LN2)         # line 16
        O = O * (factor * kept_scale)                           # line 15: O = O / l
        save(slice_of(mO[batch, head][query:end_query], own), O, m0)
        if own == 0:
            save(mLse[batch, head][query:end_query], lse, m0)
            if HAS_LOW:
                save(mLow[batch, head][query:end_query], low_of(lse, m, scale_log2, factor), m0)

    dtypes = {"o": out_dtypes[0]}
    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, dtypes, mask=mask, score=score, resumes=resumes)
    return Source(kernel, signature, threads, tiles.blocks, shared.nbytes)


# {(bytes of an element, largest head_dim): rows, FMA: {bytes of a row: tiles}}. TFLOP/s: one batch, 16 heads, seqlen
# 4096, full
TILES = {
    (2, 128): (Tiles("mma", 64, 64, 128),),  # of slices alone
    (4, 64): (Tiles("mma", 128, 64, 256),),  # 52
    (4, 128): (Tiles("mma", 128, 64, 256), Tiles("mma", 128, 32, 256)),  # 55, 52
    (4, 256): (Tiles("mma", 128, 32, 256), Tiles("mma", 64, 16, 128)),  # 49; 128 x 16 45
    (8, 64): (Tiles("mma", 128, 64, 256), Tiles("mma", 64, 32, 128)),  # 35, 34
    (8, 128): (Tiles("mma", 128, 16, 256), Tiles("mma", 64, 16, 128)),  # 36, 36; 64 x 32 spills: 26
    (8, 256): (Tiles("fma", 32, 16, 128, 8), Tiles("fma", 16, 16, 64, 8)),  # a warp has no room for sums of 16 x 256
    FMA: {
        256: Tiles("fma", 64, 32, 128, 8), 512: Tiles("fma", 32, 32, 128, 8), 1024: Tiles("fma", 16, 16, 64, 8),
        2048: Tiles("fma", 16, 4, 64, 4),
    },
}
UNDER_PRESSURE = {
    (4, 128): (Tiles("mma", 128, 32, 256),), (4, 256): (Tiles("mma", 128, 16, 256),),
    (8, 64): (Tiles("mma", 64, 32, 128),),
}
# {(longest sequence, bytes of an element): {largest head_dim: row}}. us next to those of the rows above, in
# one run on an H100, 8 heads: n times batch 131072 with float32, d 32 and 64, and float64, d 32. A copy of as many
# bytes takes 187, 372, 369. "-": not measured
SHORT = {
    (32, 4): {
        32: Tiles("mma", 32, 32, 64, blocks=8),  # 192, 1147
        64: Tiles("mma", 32, 32, 64, blocks=6),  # 377, 1739
        128: Tiles("mma", 32, 32, 64, blocks=3),  # -
    },
    (32, 8): {64: Tiles("mma", 32, 32, 64, blocks=4)},  # 364, 1924
    (64, 4): {
        32: Tiles("mma", 64, 32, 128, blocks=4),  # 230, 608
        64: Tiles("mma", 64, 32, 128, blocks=3),  # 417, 935; warps of 32 rows 395, no register left
        128: Tiles("mma", 64, 32, 128, blocks=2),  # 428, 827: half of the batch
    },
    (64, 8): {32: Tiles("mma", 64, 32, 128, blocks=3), 64: Tiles("mma", 64, 32, 128, blocks=2)},  # -
    # warps of 32 rows split half as many right operands; of d 128 none was faster than the rows above
    (256, 4): {
        32: Tiles("mma", 64, 32, 64, blocks=4),  # n 128: 736, 985, twice the batch
        64: Tiles("mma", 64, 32, 64, blocks=4, parts=2),  # n 128: 657, 826; one part 668, and n 256 627, 737
    },
}
SPEC = Spec(
    forward,
    (Matrix("q"), Matrix("k", "k"), Matrix("v", "k", may_be_empty=True), Matrix("o", may_be_empty=True), O_BEFORE,
     Statistic("lse"), Statistic("lse_low"), MASK, SCORE, DROPOUT, "group_size", "scale_log2", "kept_scale"),
    tiles=lambda work: rows_of(TILES, UNDER_PRESSURE, work, SHORT),
    parameters=lambda work, tiles: sliced(work, tiles) | of_o(work) | lse_alone(work),
    blocks=lambda work, *tiles: block_per_query_tile(work, *tiles) * slices_of(work.problem),
    packs=True,
    slices=True,
)  # fmt: skip

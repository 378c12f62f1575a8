"""The tangent of attention forward on any GPU: the directional derivatives of O and lse, computed with O and lse.

Of tangents tQ, tK, tV of Q, K, V; Z is the mask of dropout over the share that it keeps, or 1:

    (1) S  = scale Q K^T                    (4) P    = exp(S - lse), lse = log(rowsum(exp(S)))
    (2) tS = scale (tQ K^T + Q tK^T)        (5) tlse = rowsum(P tS)
    (3) O  = (Z P) V                        (6) tO   = (Z P) tV + (Z P tS) V - tlse O

since tP = P (tS - tlse). The loop is that of `forward`: rowsum(P tS) and P tV + (P tS) V are summed relative to the
maximum so far, too, rescaled as the sums for l and O are, and divided by l in the epilogue: six products of tiles.
Those with a tangent that is not given, which is zero, are not compiled in.

One source for tensor cores and for CUDA cores. P and P tS are left operands: tensor cores of half precision take them
rounded to its dtype, relative to the maximum so far, where P is at most 2 and P tS as large as tS may be.
"""

import numpy as np

from ...build import Source
from ...tile import (
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    block_index,
    columns,
    copy_async,
    device,
    dot,
    dots,
    full,
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
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..scores import SCORE, may_be_far, score_steps, sink_steps, within_segment
from ..shared.dropout import DROPOUT, drop_step
from ..shared.layouts import DTYPES, buffers, left_operand, product_step, sum_type, sums, vector
from ..shared.schedule import place
from ..shared.segments import count_step, mask_within_step, queries_of, slot_step
from ..shared.softmax import LN_2, logsumexp, softmax_steps
from ..shared.visibility import MASK, band_of, element_test, needs_test, steps_to_next, visible_keys
from ..tables import dtypes_of, parameters, rows_of
from .tangent_tiles import SHORT, TILES


def with_tangent(shared, dtype, threads, rows, width, has_tangent):
    """Places of an operand's tile and of its tangent's, the same if there is none; and the layout that copies them."""
    (place, copy), *others = buffers(shared, dtype, threads, rows, [width] * (1 + has_tangent))
    return place, others[0][0] if others else place, copy


def products_step(layout, product, dtype, parts, has_tq, has_tk):
    """The device function (sQ, stQ, sK, stK): Q K^T, and tQ K^T + Q tK^T of what is given. A tile of K is read once for
    both products with it. parts: of the depth, see `product_step`."""
    PARTS, ZERO = parts, dtype(0)

    @device
    def with_tq(sQ, stQ, sK, stK):
        S, tS = full(layout, ZERO), full(layout, ZERO)
        for part in range(PARTS):
            queries = columns(sQ, part, PARTS), columns(stQ, part, PARTS)
            S, tS = dots((S, tS), queries, columns(sK, part, PARTS).T)
        return S, tS

    @device
    def with_tk(sQ, stQ, sK, stK):
        return product(sQ, sK), product(sQ, stK)

    @device
    def with_both(sQ, stQ, sK, stK):
        S, tS = with_tq(sQ, stQ, sK, stK)
        for part in range(PARTS):
            tS = dot(tS, columns(sQ, part, PARTS), columns(stK, part, PARTS).T)
        return S, tS

    @device
    def without(sQ, stQ, sK, stK):
        return product(sQ, sK), ZERO

    return {(True, True): with_both, (True, False): with_tq, (False, True): with_tk}.get((has_tq, has_tk), without)


def tangent(
    *, dtype, out_dtypes, head_dim, head_dim_v, tile_m, tile_n, threads, unit, lanes, tangents, mask, score, dropout,
    nbytes, blocks=1, parts=1,
):  # fmt: skip
    """The kernel for tiles of tile_m queries, tile_n keys and head_dims rounded up to head_dim and head_dim_v.

    tangents: which of "q", "k" and "v" have one. unit, lanes, nbytes: as in `forward`.
    """
    if score:
        raise NotImplementedError(f"score: got {', '.join(score)}; tangents on GPUs are those of calls without a score")
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    HAS_TQ, HAS_TK, HAS_TV = (name in tangents for name in "qkv")
    HAS_TS = HAS_TQ or HAS_TK
    O_TILE = sums(unit, lanes, tile_m, head_dim_v, threads, run=vector(dtype))
    shared = SharedMemory()
    S_TILE, product = product_step(unit, lanes, tile_m, tile_n, threads, False, shared, ACC, parts)
    SHARED_Q, SHARED_TQ, COPY_Q = with_tangent(shared, dtype, threads, tile_m, head_dim, HAS_TQ)
    SHARED_K, SHARED_TK, COPY_K = with_tangent(shared, dtype, threads, tile_n, head_dim, HAS_TK)
    SHARED_V, SHARED_TV, COPY_V = with_tangent(shared, dtype, threads, tile_n, head_dim_v, HAS_TV)
    products = products_step(S_TILE, product, ACC, parts, HAS_TQ, HAS_TK)
    left, left_tangent = left_operand(S_TILE, shared, ACC), left_operand(S_TILE, shared, ACC)
    TILE_M, TILE_N, ROWS_OF = tile_m, tile_n, Alignment(nbytes)
    PARTS, ZERO, NO_SCORE, LN2 = S_TILE.row_parts(), ACC(0), ACC(-np.inf), ACC(LN_2)
    band_at, sees, tested, steps = band_of(mask), element_test(mask, S_TILE), needs_test(mask), steps_to_next(mask)
    drop, (apply, *_) = drop_step(S_TILE, dropout), score_steps(score, S_TILE, ACC, after=len(score))
    (NO_MAX, softmax_step), (with_sink, inverse) = softmax_steps(ACC, may_be_far(score)), sink_steps(score, ACC)
    ROWS = S_TILE.row_vector()
    tiles_of, tile_of = count_step(mask, tile_m), slot_step(mask, "q", tile_m)
    mask_of, scores_of = mask_within_step(mask), within_segment(score)

    @device
    def fetch_k(K, tK, n0):
        copy_async(allocate(SHARED_K), K, COPY_K, n0)
        if HAS_TK:
            copy_async(allocate(SHARED_TK), tK, COPY_K, n0)

    @device
    def fetch_v(V, tV, n0):
        copy_async(allocate(SHARED_V), V, COPY_V, n0)
        if HAS_TV:
            copy_async(allocate(SHARED_TV), tV, COPY_V, n0)

    @device
    def fetch_q(Q, tQ, m0):
        copy_async(allocate(SHARED_Q), Q, COPY_Q, m0)
        if HAS_TQ:
            copy_async(allocate(SHARED_TQ), tQ, COPY_Q, m0)

    def kernel(
        mQ, mK, mV, mTQ, mTK, mTV, mO, mTO, mLse, mTLse, mask, scores, drops, group_size, scale, scale_log2, kept_scale
    ):
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
        # rows beyond a sequence's length are cut off: they may be NaN
        seen_q, seen_k = query + maximum(band[2], 1), key + maximum(band[3], 1)
        tQ = Q = aligned(mQ[batch, head][query:seen_q], ROWS_OF)
        tK = K = aligned(mK[batch, head_k][key:seen_k], ROWS_OF)
        tV = V = aligned(mV[batch, head_k][key:seen_k], ROWS_OF)
        if HAS_TQ:
            tQ = aligned(mTQ[0][batch, head][query:seen_q], ROWS_OF)
        if HAS_TK:
            tK = aligned(mTK[0][batch, head_k][key:seen_k], ROWS_OF)
        if HAS_TV:
            tV = aligned(mTV[0][batch, head_k][key:seen_k], ROWS_OF)
        sQ, sK, sV = allocate(SHARED_Q), allocate(SHARED_K), allocate(SHARED_V)
        stQ, stK, stV = allocate(SHARED_TQ), allocate(SHARED_TK), allocate(SHARED_TV)
        O, tO, m = full(O_TILE, ZERO), full(O_TILE, ZERO), full(ROWS, NO_MAX)
        l, tl = full(PARTS, ZERO), full(PARTS, ZERO)
        n_block = first // TILE_N
        n_blocks = (end + TILE_N - 1) // TILE_N
        n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
        fetch_q(Q, tQ, m0)
        fetch_k(K, tK, n_block * TILE_N)
        wait_copies()
        sync_threads()
        while n_block < n_blocks:
            n0 = n_block * TILE_N
            fetch_v(V, tV, n0)                                  # in flight while S and tS are computed
            S, tS = products(sQ, stQ, sK, stK)                  # (1) and (2)
            S, _ = apply(S, scores, batch, head, query + m0, key + n0)
            if tested(mask, band, batch, head, m_block, n_block, m0, m0 + TILE_M, n0, n0 + TILE_N):
                visible = sees(mask, band, batch, head, m0, n0)
                S = where(visible, S, NO_SCORE)
                if HAS_TS:
                    tS = where(visible, tS, ZERO)               # what is masked may be NaN
            P, m, l, alpha = softmax_step(S, m, l, scale_log2)  # (4), relative to the maximum so far
            if HAS_TS:
                tS = tS * scale
                tl = part_sum(P * tS, tl * alpha)               # (5)
            P = drop(P, drops, batch, head, m0, n0)
            wait_copies()
            sync_threads()                                      # V has arrived, all have read K
            n_block += 1
            n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
            fetch_k(K, tK, n_block * TILE_N)                    # in flight while O and tO are computed
            P_left, O, tO = left(P), O * alpha, tO * alpha
            if HAS_TS:                                          # (3) and (6): O += P V, tO += (P tS) V + P tV
                O, tO = dots((O, tO), (P_left, left_tangent(P * tS)), sV)
            else:
                O = dot(O, P_left, sV)
            if HAS_TV:
                tO = dot(tO, P_left, stV)
            wait_copies()
            sync_threads()                                      # K has arrived, all have read V
        m, total, alpha = with_sink(m * (scale_log2 * LN2), row_sum(l), scores, batch, head)
        over_l = inverse(total, alpha)
        O, tlse = O * (over_l * kept_scale), row_sum(tl) * over_l
        tO = tO * (over_l * kept_scale) - O * tlse              # (6)
        save(aligned(mO[batch, head][query:end_query], ROWS_OF), O, m0)
        save(aligned(mTO[batch, head][query:end_query], ROWS_OF), tO, m0)
        save(mLse[batch, head][query:end_query], logsumexp(m, total, LN2), m0)
        save(mTLse[batch, head][query:end_query], tlse, m0)

    given, dtypes = [f"t{name}" for name in tangents], dict(zip(("o", "to"), out_dtypes))
    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, dtypes, mask=mask, score=score, given=given)
    return Source(kernel, signature, threads, blocks, shared.nbytes)


def tangents_of(work):
    """The parameter that says which of q, k and v have a tangent."""
    return {"tangents": tuple([name for name in "qkv" if f"t{name}" in work.dtypes])}


SPEC = Spec(
    tangent,
    (Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("tq", optional=True), Matrix("tk", "k", optional=True),
     Matrix("tv", "k", optional=True), Matrix("o"), Matrix("to"), Statistic("lse"), Statistic("tlse"), MASK, SCORE,
     DROPOUT, "group_size", "scale", "scale_log2", "kept_scale"),
    tiles=lambda work: rows_of(TILES, {}, work, SHORT),
    parameters=lambda work, tiles: parameters(work, tiles) | dtypes_of(work, "o", "to") | tangents_of(work),
    packs=True,
)  # fmt: skip

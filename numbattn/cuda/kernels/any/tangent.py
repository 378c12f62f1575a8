"""The tangent of attention forward on any GPU: the directional derivatives of O and lse, computed with O and lse.

Given tangents tQ, tK, tV of Q, K, V; Z is the mask of dropout divided by the fraction that it keeps, or 1:

    (1) S  = scale Q K^T                    (4) P    = exp(S - lse), lse = log(rowsum(exp(S)))
    (2) tS = scale (tQ K^T + Q tK^T)        (5) tlse = rowsum(P tS)
    (3) O  = (Z P) V                        (6) tO   = (Z P) tV + (Z P tS) V - tlse O

since tP = P (tS - tlse). The loop is that of `forward`: rowsum(P tS) and P tV + (P tS) V are summed relative to the
maximum so far, too, rescaled as the sums for l and O are, and divided by l in the epilogue: six products of tiles.
Those with a tangent that is not given, and so zero, are not compiled in.

With `bends` it also computes the second derivative of O along Q + h tQ, K + h tK, V + h tV, with three more products:

    (7) S2 = 2 scale tQ tK^T, with a score f: f' S2 + f'' tS0^2;  P2 = P (S2 + tS^2)
    (8) O2 = (Z P2) V + 2 (Z P tS) tV - 2 tlse tO - rowsum(P2) O

One source for tensor cores and for CUDA cores. P and P tS are left operands: tensor cores of half precision take them
rounded to its dtype, relative to the maximum so far, where P is at most 2 and P tS as large as tS may be.
"""

from dataclasses import replace

import numpy as np

from ...build import Source
from ...tile import (
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    block_index,
    columns,
    convert,
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
from ..scores import (
    SCORE,
    TSCORE,
    may_be_far,
    parts_of,
    score_steps,
    sink_steps,
    sink_tangent_step,
    tangent_steps,
    within_segment,
)
from ..shared.dropout import DROPOUT, drop_step
from ..shared.layouts import DTYPES, buffers, left_operand, product_step, sum_type, sums, vector
from ..shared.schedule import place
from ..shared.segments import count_step, mask_within_step, queries_of, slot_step
from ..shared.softmax import LN_2, logsumexp, low_step, softmax_steps
from ..shared.visibility import MASK, band_of, element_test, needs_test, steps_to_next, visible_keys
from ..tables import dtypes_of, parameters, rows_of
from .tangent_tiles import SHORT, SHORT_SECOND, TILES, TILES_SECOND


def with_tangent(shared, dtype, threads, rows, width, has_tangent):
    """Places of an operand's tile and of its tangent's, the same if there is none; and the device function (X, tX,
    first) that starts to copy both."""
    (PLACE, COPY), *others = buffers(shared, dtype, threads, rows, [width] * (1 + has_tangent))
    TANGENT, HAS_TANGENT = others[0][0] if others else PLACE, has_tangent

    @device
    def fetch(X, tX, first):
        copy_async(allocate(PLACE), X, COPY, first)
        if HAS_TANGENT:
            copy_async(allocate(TANGENT), tX, COPY, first)

    return PLACE, TANGENT, fetch


def left_step(layout, shared, dtype):
    """Like `left_operand`, but in half precision a fragment is rounded at once, so that it takes half of the registers
    until it is multiplied."""
    HALF = dtype

    @device
    def rounded(P):
        return convert(P, HALF)

    return rounded if layout.unit == "mma" and dtype.itemsize == 2 else left_operand(layout, shared, sum_type(dtype))


@device
def dot_by_dot(sums, xs, y):
    return dot(sums[0], xs[0], y), dot(sums[1], xs[1], y)


def products_step(layout, product, both, dtype, tiles, tangents):
    """The device function (sQ, stQ, sK, stK): Q K^T, and tQ K^T + Q tK^T of the tangents that there are.

    product: see `product_step`; both: `dots`, or one by one.
    """
    PARTS, ZERO = tiles.parts, dtype(0)

    @device
    def together(sQ, stQ, sK):
        S, tS = full(layout, ZERO), full(layout, ZERO)
        for part in range(PARTS):
            queries = columns(sQ, part, PARTS), columns(stQ, part, PARTS)
            S, tS = both((S, tS), queries, columns(sK, part, PARTS).T)
        return S, tS

    @device
    def apart(sQ, stQ, sK):
        return product(sQ, sK), product(stQ, sK)

    @device
    def added(tS, sQ, stK):
        for part in range(PARTS):
            tS = dot(tS, columns(sQ, part, PARTS), columns(stK, part, PARTS).T)
        return tS

    @device
    def added_slices(tS, sQ, stK):
        return tS + product(sQ, stK)

    of_k, add_of_tk = (apart, added_slices) if tiles.sliced else (together, added)

    @device
    def with_both(sQ, stQ, sK, stK):
        S, tS = of_k(sQ, stQ, sK)
        return S, add_of_tk(tS, sQ, stK)

    @device
    def with_tq(sQ, stQ, sK, stK):
        return of_k(sQ, stQ, sK)

    @device
    def with_tk(sQ, stQ, sK, stK):
        return product(sQ, sK), product(sQ, stK)

    @device
    def without(sQ, stQ, sK, stK):
        return product(sQ, sK), full(layout, ZERO)

    with_tangents = {(True, True): with_both, (True, False): with_tq, (False, True): with_tk}
    return with_tangents.get(("q" in tangents, "k" in tangents), without)


def all_scores_step(score, tscore, layout, ACC, has_ts, bends):
    """The device function (S, tS, S2, scores, tscores, batch, head, m0, n0): S, tS and S2
    after all parts of the score. tS is returned as it is where it is zero anyway, and so is S2 without `bends`."""
    if has_ts and bends:
        return tangent_steps(score, tscore, layout, ACC, bends=True)
    value_of, *_ = score_steps(score, layout, ACC, after=len(score))
    both_of, _ = tangent_steps(score, tscore, layout, ACC, after=len(score))

    @device
    def value(S, tS, S2, scores, tscores, batch, head, m0, n0):
        S, _ = value_of(S, scores, batch, head, m0, n0)
        return S, tS, S2

    @device
    def value_and_tangent(S, tS, S2, scores, tscores, batch, head, m0, n0):
        S, tS, _ = both_of(S, tS, scores, tscores, batch, head, m0, n0)
        return S, tS, S2

    return value_and_tangent if has_ts else value


def tangent(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, tangents, mask, score, tscore, dropout, nbytes, bends=False
):  # fmt: skip
    """The kernel for these Tiles and head_dims rounded up to head_dim and head_dim_v.

    tangents: which of "q", "k" and "v" have one; tscore: see Work; bends: whether to compute O2, whose
    dtype is then the third of out_dtypes. nbytes: as in `forward`.
    """
    dtype, ACC, (unit, tile_m, tile_n, threads, *_) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    HAS_TQ, HAS_TK, HAS_TV = (name in tangents for name in "qkv")
    of_parts = tuple(filter(None, tscore))
    HAS_TS = bool(HAS_TQ or HAS_TK or parts_of(of_parts))
    O_TILE = sums(tiles, tile_m, head_dim_v, run=vector(dtype))
    shared = SharedMemory()
    S_TILE, product = product_step(tiles, tile_m, tile_n, shared, ACC)
    SHARED_Q, SHARED_TQ, fetch_q = with_tangent(shared, dtype, threads, tile_m, head_dim, HAS_TQ)
    SHARED_K, SHARED_TK, fetch_k = with_tangent(shared, dtype, threads, tile_n, head_dim, HAS_TK)
    SHARED_V, SHARED_TV, fetch_v = with_tangent(shared, dtype, threads, tile_n, head_dim_v, HAS_TV)
    both = dot_by_dot if unit == "mma" and dtype.itemsize > 2 else dots    # two left operands of words do not fit
    products = products_step(S_TILE, product, both, ACC, tiles, tangents)
    left, left_tangent = left_step(S_TILE, shared, dtype), left_step(S_TILE, shared, dtype)
    SAVES_O2, BENDS, HAS_S2, HALF, TWO = bends, bends and HAS_TS, bends and HAS_TQ and HAS_TK, ACC(0.5), ACC(2)
    left_second = left_step(S_TILE, shared, dtype) if BENDS else left
    TILE_M, TILE_N, ROWS_OF = tile_m, tile_n, Alignment(nbytes)
    PARTS, ZERO, NO_SCORE, LN2 = S_TILE.row_parts(), ACC(0), ACC(-np.inf), ACC(LN_2)
    band_at, sees, tested, steps = band_of(mask), element_test(mask, S_TILE), needs_test(mask), steps_to_next(mask)
    drop, apply = drop_step(S_TILE, dropout), all_scores_step(score, tscore, S_TILE, ACC, HAS_TS, bends)
    HAS_LOW, far, (with_sink, inverse) = dtype.itemsize > 2, may_be_far(score), sink_steps(score, ACC)
    (no_max, softmax_step), low_of = softmax_steps(ACC, far, exact=HAS_LOW), low_step(ACC, far)
    ROWS = S_TILE.row_vector()
    tiles_of, tile_of = count_step(mask, tile_m), slot_step(mask, "q", tile_m)
    mask_of, scores_of, tscores_of = mask_within_step(mask), within_segment(score), within_segment(of_parts)
    with_tsink = sink_tangent_step(tscore, ACC)

    def kernel(
        mQ, mK, mV, mTQ, mTK, mTV, mO, mTO, mO2, mLse, mLow, mTLse, mask, scores, tscores, drops, group_size, scale,
        scale_log2, kept_scale,
    ):  # fmt: skip
        batches, heads, seqlen_q = shape(mLse)
        tile, batch, head = place(block_index(), batches * heads, heads)
        number = tiles_of(mask.packing, seqlen_q) - 1 - tile   # the heaviest tiles of a causal mask first
        segment, m_block = tile_of(mask.packing, batch, number, seqlen_q)
        m0 = m_block * TILE_M
        if m0 >= segment.queries:                               # a slot without a tile
            return
        mask, scores, tscores = mask_of(mask, segment), scores_of(scores, segment), tscores_of(tscores, segment)
        band = band_at(mask, batch, head)
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, segment.queries))
        head_k, key, (query, end_query) = head // group_size, segment.first_key, queries_of(segment)
        # without rows beyond a sequence's length, which may be NaN
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
        O, tO, m = full(O_TILE, ZERO), full(O_TILE, ZERO), full(ROWS, no_max(scale_log2))
        l, tl = full(PARTS, ZERO), full(PARTS, ZERO)
        O2, l2 = tO, tl                                         # halves of these sums
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
            S2 = tS
            if HAS_S2:
                S2 = product(stQ, stK) * TWO                    # (7)
            elif BENDS:
                S2 = full(S_TILE, ZERO)
            S, tS, S2 = apply(S, tS, S2, scores, tscores, batch, head, query + m0, key + n0)
            if tested(mask, band, batch, head, m_block, n_block, m0, m0 + TILE_M, n0, n0 + TILE_N):
                visible = sees(mask, band, batch, head, m0, n0)
                S = where(visible, S, NO_SCORE)
                if HAS_TS:
                    tS = where(visible, tS, ZERO)               # what is masked may be NaN
                if BENDS:
                    S2 = where(visible, S2, ZERO)
            P, m, l, alpha = softmax_step(S, m, l, scale_log2)  # (4), relative to the maximum so far
            if HAS_TS:
                tS = tS * (scale_log2 * LN2)
                tl = part_sum(P * tS, tl * alpha)               # (5)
            if BENDS:
                S2 = (S2 * (scale_log2 * LN2) + tS * tS) * HALF
                l2 = part_sum(P * S2, l2 * alpha)
            P = drop(P, drops, batch, head, m0, n0)
            P_left = left(P)
            if HAS_TS:
                PtS = left_tangent(P * tS)
            if BENDS:
                P2 = left_second(P * S2)
            wait_copies()
            sync_threads()                                      # V has arrived, all have read K
            n_block += 1
            n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
            fetch_k(K, tK, n_block * TILE_N)                    # in flight while O and tO are computed
            O, tO = O * alpha, tO * alpha
            if HAS_TS:                                          # (3) and (6): O += P V, tO += (P tS) V + P tV
                O, tO = both((O, tO), (P_left, PtS), sV)
            else:
                O = dot(O, P_left, sV)
            if HAS_TV:
                tO = dot(tO, P_left, stV)
            if BENDS:                                           # (8)
                O2 = dot(O2 * alpha, P2, sV)
                if HAS_TV:
                    O2 = dot(O2, PtS, stV)
            wait_copies()
            sync_threads()                                      # K has arrived, all have read V
        largest, total, alpha = with_sink(m * (scale_log2 * LN2), row_sum(l), scores, batch, head)
        over_l, lse = inverse(total, alpha), logsumexp(largest, total, LN2)
        O, tlse = O * (over_l * kept_scale), row_sum(tl) * over_l
        tlse = with_tsink(tlse, largest, total, scores, tscores, batch, head)
        tO = tO * (over_l * kept_scale) - O * tlse              # (6)
        save(aligned(mO[batch, head][query:end_query], ROWS_OF), O, m0)
        save(aligned(mTO[batch, head][query:end_query], ROWS_OF), tO, m0)
        if SAVES_O2:
            O2 = (O2 * (over_l * kept_scale) - tO * tlse - O * (row_sum(l2) * over_l)) * TWO
            save(aligned(mO2[0][batch, head][query:end_query], ROWS_OF), O2, m0)
        save(mLse[batch, head][query:end_query], lse, m0)
        if HAS_LOW:
            save(mLow[batch, head][query:end_query], low_of(lse, m, scale_log2, over_l), m0)
        save(mTLse[batch, head][query:end_query], tlse, m0)

    given, dtypes = [f"t{name}" for name in tangents] + ["o2"] * bends, dict(zip(RESULTS, out_dtypes))
    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, dtypes, mask=mask, score=score, tscore=tscore,
                             given=given)  # fmt: skip
    return Source(kernel, signature, threads, tiles.blocks, shared.nbytes)


def tangents_of(work):
    """The parameters that say which of q, k and v have a tangent, and which parts of the score."""
    return {"tangents": tuple([name for name in "qkv" if f"t{name}" in work.dtypes]), "tscore": work.tscore}


RESULTS = "o", "to", "o2"


SPEC = Spec(
    tangent,
    (Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("tq", optional=True), Matrix("tk", "k", optional=True),
     Matrix("tv", "k", optional=True), Matrix("o"), Matrix("to"), Matrix("o2", optional=True), Statistic("lse"),
     Statistic("lse_low"), Statistic("tlse"), MASK, SCORE, TSCORE, DROPOUT, "group_size", "scale", "scale_log2",
     "kept_scale"),
    tiles=lambda work: rows_of(TILES, {}, work, SHORT),
    parameters=lambda work, tiles: parameters(work, tiles) | dtypes_of(work, "o", "to") | tangents_of(work),
    packs=True,
)  # fmt: skip
SPEC_SECOND = replace(
    SPEC,
    tiles=lambda work: rows_of(TILES_SECOND, {}, work, SHORT_SECOND),
    parameters=lambda work, tiles: {
        **parameters(work, tiles), **dtypes_of(work, *RESULTS), **tangents_of(work), "bends": True,
    },
)  # fmt: skip

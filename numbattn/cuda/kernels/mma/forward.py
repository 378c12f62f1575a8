"""Attention forward of half precision by mma.sync (8.0 and newer): Algorithm 2, and 5 where the mask has blocks.

A block keeps a tile of queries and loops over the keys that they see. K and V each have a place in shared memory, and
each is loaded during the other's product: V of a tile during Q K^T, K of the next tile during the softmax and P V. The
registers of S are the left operand of P V; if Q is held in registers, these are the left operand of Q K^T. O is divided
by l once, in the epilogue, and is stored through shared memory if its dtype is that of q.
"""

from typing import Any, NamedTuple

import numpy as np

from ...build import Source
from ...tile import (
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    block_index,
    copy_async,
    copy_layout,
    device,
    dot,
    get,
    maximum,
    minimum,
    mma,
    opaque,
    part_sum,
    put,
    rescaled,
    row_sum,
    save,
    shape,
    sync_threads,
    wait_copies,
    where,
)
from ...tile.alignment import VECTOR_BYTES
from ...words.arguments import O_BEFORE, AlignedMatrix, Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..scores import SCORE, may_be_far, sink_steps, softmax_score_steps, within_segment
from ..shared.dropout import DROPOUT, drop_step
from ..shared.layouts import DTYPES, vector
from ..shared.schedule import place_grouped
from ..shared.segments import count_step, mask_within_step, queries_of, slot_step
from ..shared.softmax import LN_2, logsumexp, softmax_parts
from ..shared.start import start_step
from ..shared.visibility import MASK, band_of, element_test, needs_test, steps_to_next, visible_keys
from ..tables import compiled_in, has_tensor_cores, head_dims, lse_alone, of_o
from .tiles import matrices_at_once, rows


class KeptQueries(NamedTuple):
    """A block's queries, from m0 of a segment on, and the visible tiles of keys, which end before n_blocks."""

    batch: Any
    head: Any
    m_block: Any
    m0: Any
    n_blocks: Any
    band: Any
    segment: Any


class ForwardCall(NamedTuple):
    """What all steps need: the left operand Q, the matrices K and V, and arguments of the kernel."""

    Q: Any
    K: Any
    V: Any
    mask: Any
    scores: Any
    drops: Any
    scale_log2: Any


def mma_forward(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, score, dropout, resumes=False
):  # fmt: skip
    """The kernel for these ForwardTiles and head_dims rounded up to head_dim and head_dim_v.

    resumes: whether the loop starts from O and lse over other keys, see `shared.start`.
    """
    dtype, ACC, (tile_m, tile_n, threads, held) = DTYPES[dtype], np.float32, tiles
    S_TILE, O_TILE, Q_TILE = (mma(tile_m, cols, threads) for cols in (tile_n, head_dim_v, head_dim))
    COPY_Q, COPY_O, COPY_K, COPY_V = (
        copy_layout(rows, cols, threads, vector(dtype))
        for rows in (tile_m, tile_n) for cols in (head_dim, head_dim_v)
    )  # fmt: skip
    shared = SharedMemory()
    SHARED_K, SHARED_V = (shared.boxes(tile_n, cols, dtype) for cols in (head_dim, head_dim_v))
    SHARED_Q = shared.boxes(tile_m, head_dim, dtype, at=SHARED_V if held else None)  # until V is loaded
    SHARED_O = shared.tile(tile_m, head_dim_v, dtype, at=SHARED_K)  # after the last product
    TILE_M, TILE_N, HELD, VECTORS = tile_m, tile_n, held, Alignment(VECTOR_BYTES)
    IS_STAGED = out_dtypes == (dtype.name,)
    NO_SCORE, LN2 = ACC(-np.inf), ACC(LN_2)
    band_at, sees, tested, steps = band_of(mask), element_test(mask, S_TILE), needs_test(mask), steps_to_next(mask)
    tiles_of, tile_of = count_step(mask, tile_m), slot_step(mask, "q", tile_m)
    mask_of, scores_of, drop = mask_within_step(mask, tile_m), within_segment(score), drop_step(S_TILE, dropout)
    look_up, apply = softmax_score_steps(score, S_TILE, ACC)
    no_max, new_max, exponentials = softmax_parts(ACC, may_be_far(score))
    with_sink, inverse = sink_steps(score, ACC)
    start = start_step(S_TILE, O_TILE, ACC, no_max, resumes)

    @device
    def next_n_block(tile, mask, n_block):
        return n_block + steps(mask, tile.batch, tile.head, tile.m_block, n_block, tile.n_blocks - n_block)

    @device
    def masked(S, tile, mask, n_block):
        m0, n0 = opaque(tile.m0), n_block * TILE_N              # opaque: else the rows' bounds are kept in registers
        n_end, batch, head = n0 + TILE_N, tile.batch, tile.head
        if tested(mask, tile.band, batch, head, tile.m_block, n_block, tile.m0, tile.m0 + TILE_M, n0, n_end):
            S = where(sees(mask, tile.band, batch, head, m0, n0), S, NO_SCORE)         # Alg. 2 line 11: MASK(S)
        return S

    @device
    def step(O, m, l, tile, call, n_block):
        """Add a tile of keys. Also returns the next one."""
        sK, sV, n0 = allocate(SHARED_K), allocate(SHARED_V), n_block * TILE_N
        wait_copies()
        sync_threads()                                          # K has arrived, all have read the last V
        copy_async(sV, call.V, COPY_V, n0)                      # in flight while S is computed
        S = dot(S_TILE, call.Q, sK.T)                           # line 10: S = Q K^T
        i, j = tile.segment.first_query + tile.m0, tile.segment.first_key + n0
        found = look_up(call.scores, (), tile.batch, tile.head, i, j)
        S, level, factor = apply(S, found, call.scores, tile.batch, tile.head, i, j)
        S = masked(S, tile, call.mask, n_block)
        wait_copies()
        sync_threads()                                          # V has arrived, all have read K
        n_block = next_n_block(tile, call.mask, n_block + 1)
        if n_block < tile.n_blocks:
            copy_async(sK, call.K, COPY_K, n_block * TILE_N)    # in flight while O is computed
        m, alpha, zero = new_max(S, m, call.scale_log2, level, factor)  # line 13
        O = rescaled(O, alpha)                                  # line 15: O = alpha O, a branch: before exp2, so that
        P = exponentials(S, zero, call.scale_log2, factor)      # line 12 interleaves with the product
        l = part_sum(P, l * alpha)                              # line 13: l = alpha l + rowsum(P)
        P = drop(P, call.drops, tile.batch, tile.head, tile.m0, n0)     # line 14: dropout(P)
        return dot(O, P, sV), m, l, n_block                     # line 15: O = O + P V

    @device
    def query_tile(mask, seqlen_q, heads, matrices, at_once):
        """This block's tile, the first tile of keys, and the mask within its segment."""
        m_blocks = tiles_of(mask.packing, seqlen_q)
        number, batch, head = place_grouped(block_index(), m_blocks, matrices, heads, at_once)
        number = m_blocks - 1 - number                          # the heaviest tiles of a causal mask first
        segment, m_block = tile_of(mask.packing, batch, number, seqlen_q)
        mask, m0 = mask_of(mask, segment), m_block * TILE_M
        band = band_at(mask, batch, head)
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, segment.queries))
        tile = KeptQueries(batch, head, m_block, m0, (end + TILE_N - 1) // TILE_N, band, segment)
        return tile, next_n_block(tile, mask, first // TILE_N), mask

    @device
    def left_operand(sQ):
        return get(sQ, Q_TILE) if HELD else sQ

    def kernel(mQ, mK, mV, mO, before, mLse, mask, scores, drops, group_size, scale_log2, kept_scale, at_once):
        batches, heads, seqlen_q = shape(mLse)
        tile, n_block, mask = query_tile(mask, seqlen_q, heads, batches * heads, at_once)
        segment, batch, head, head_k = tile.segment, tile.batch, tile.head, tile.head // group_size
        first, end = queries_of(segment)
        if tile.m0 >= segment.queries:                          # a slot without a tile
            return
        # without rows beyond a sequence's length, which may be NaN
        queries, keys = minimum(tile.band[2], segment.queries), segment.first_key + maximum(tile.band[3], 1)
        Q = aligned(mQ[batch, head][first : first + maximum(queries, 1)], VECTORS)
        K = aligned(mK[batch, head_k][segment.first_key : keys], VECTORS)
        V = aligned(mV[batch, head_k][segment.first_key : keys], VECTORS)
        sQ, sO = allocate(SHARED_Q), allocate(SHARED_O)
        copy_async(sQ, Q, COPY_Q, tile.m0)
        if n_block < tile.n_blocks:
            copy_async(allocate(SHARED_K), K, COPY_K, n_block * TILE_N)
        wait_copies()
        sync_threads()
        scores = scores_of(scores, segment)
        call = ForwardCall(left_operand(sQ), K, V, mask, scores, drops, scale_log2)
        O, m, l = start(before, mLse, segment, batch, head, tile.m0, scale_log2, kept_scale)
        while n_block < tile.n_blocks:
            O, m, l, n_block = step(O, m, l, tile, call, n_block)
        m, total, alpha = with_sink(m * (scale_log2 * LN2), row_sum(l), scores, batch, head)
        save(mLse[batch, head][first:end], logsumexp(m, total, LN2), tile.m0)   # line 16
        sync_threads()                                          # all have read Q, K and V
        O = O * (inverse(total, alpha) * kept_scale)            # line 15: O = O / l
        if IS_STAGED:
            put(sO, O)
            sync_threads()
        save(aligned(mO[batch, head][first:end], VECTORS), get(sO, COPY_O) if IS_STAGED else O, tile.m0)

    dtypes = {"o": out_dtypes[0]}
    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, dtypes, mask=mask, score=score, resumes=resumes)
    return Source(kernel, signature, threads, shared=shared.nbytes)


def takes(work):
    return work.problem.dtype.itemsize == 2 and has_tensor_cores(work.device)


SPEC = Spec(
    mma_forward,
    (AlignedMatrix("q"), AlignedMatrix("k", "k"), AlignedMatrix("v", "k", may_be_empty=True),
     AlignedMatrix("o", may_be_empty=True), O_BEFORE, Statistic("lse"), MASK, SCORE, DROPOUT, "group_size",
     "scale_log2", "kept_scale", "at_once"),
    tiles=rows,
    parameters=lambda work, tiles: compiled_in(work, tiles, head_dims(work.problem)) | of_o(work) | lse_alone(work),
    numbers=lambda work, tiles: {"at_once": matrices_at_once(work.problem)},
    packs=True,
)  # fmt: skip

"""Attention forward of many small matrices: Algorithm 0, with all of S in registers, a row's softmax at once.

A block of few warps computes one matrix after the other; Q, K and V of the next one are in flight meanwhile, where
there are two pipeline stages. Else several blocks share a multiprocessor, and compute while others load.
"""

from typing import Any, NamedTuple

import numpy as np

from ...build import Source
from ...tile import (
    Alignment,
    SharedMemory,
    allocate,
    block_index,
    commit_copies,
    device,
    dot,
    full,
    grid_size,
    index,
    mma,
    row_sum,
    rows_between,
    save,
    shape,
    wait_copies,
)
from ...words.arguments import Matrix, Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..scores import SCORE, may_be_far, sink_steps, within_segment
from ..shared.dropout import DROPOUT, drop_step
from ..shared.layouts import DTYPES, sum_type
from ..shared.segments import mask_within_step, queries_of
from ..shared.softmax import LN_2, logsumexp, low_step, softmax_steps
from ..shared.visibility import MASK, band_of
from ..tables import dtypes_of, lse_alone
from .steps import (
    SmallTiles,
    barrier_of,
    heads_apart,
    mask_steps,
    matrices_steps,
    parameters,
    place_steps,
    resident,
    rows_of,
    score_steps_of_block,
)


class QueryMatrix(NamedTuple):
    """The matrix that a block computes."""

    number: Any  # none is left from the number of Matrices on
    batch: Any
    head: Any
    segment: Any
    band: Any


def small_forward(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, score, dropout, nbytes, saves
):  # fmt: skip
    """The kernel for these SmallTiles and head_dims rounded up. saves: whether lse is wanted."""
    dtype, ACC, (threads, blocks, stages, keeps_score, size, *_) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    S_TILE, O_TILE = mma(size, size, threads), mma(size, head_dim_v, threads)
    shared, sync = SharedMemory(), barrier_of(threads)
    (SHARED_Q, fetch_q), (SHARED_K, fetch_k), (SHARED_V, fetch_v) = place_steps(
        shared, dtype, threads, size, (head_dim, head_dim, head_dim_v), nbytes, stages
    )
    AHEAD, ROWS_OF, SAVES = stages > 1, Alignment(nbytes), saves
    NO_SCORE, ZERO, LN2 = ACC(-np.inf), ACC(0), ACC(LN_2)
    HAS_LOW, far = dtype.itemsize > 2, may_be_far(score)
    band_at, (look_up, hide) = band_of(mask), mask_steps(mask, S_TILE)
    keep_score, apply, _ = score_steps_of_block(shared, score, S_TILE, ACC, keeps_score)
    (matrices_of, next_matrix), mask_of = matrices_steps(mask, tiles), mask_within_step(mask)
    scores_of, drop = within_segment(score), drop_step(S_TILE, dropout)
    (no_max, softmax_step), low_of = softmax_steps(ACC, far, exact=HAS_LOW), low_step(ACC, far)
    with_sink, inverse = sink_steps(score, ACC)
    ROWS, PARTS = S_TILE.row_vector(), S_TILE.row_parts()

    @device
    def fetch_after(number, matrices, group_size, stage, mQ, mK, mV, mask):
        """The QueryMatrix that a block computes after that of this number, once its copies are on their way."""
        number, batch, head, segment = next_matrix(number + grid_size(), matrices, mask)
        band = mask.lo, mask.hi, mask.queries, mask.keys
        if number < matrices.count:
            band = band_at(mask_of(mask, segment), batch, head)
            fetch_q(mQ, batch, head, segment.first_query, band[2], stage)
            fetch_k(mK, batch, head // group_size, segment.first_key, band[3], stage)
            fetch_v(mV, batch, head // group_size, segment.first_key, band[3], stage)
        commit_copies()
        return QueryMatrix(number, batch, head, segment, band)

    def kernel(mQ, mK, mV, mO, mLse, mLow, mask, scores, drops, group_size, scale_log2, kept_scale):
        batches, heads, queries = shape(mLse)
        matrices, stage = matrices_of(batches, heads, queries, mask.keys, mask), index(0)
        keep_score(scores, block_index() % heads)
        at = fetch_after(block_index() - grid_size(), matrices, group_size, stage, mQ, mK, mV, mask)
        while at.number < matrices.count:
            number, batch, head, segment, band = at
            first, end = queries_of(segment)
            sQ, sK, sV = allocate(SHARED_Q, stage), allocate(SHARED_K, stage), allocate(SHARED_V, stage)
            if AHEAD:
                stage = 1 - stage
                at = fetch_after(number, matrices, group_size, stage, mQ, mK, mV, mask)
            shown = look_up(mask, band, batch, head)
            wait_copies(AHEAD)
            sync()                                              # Q, K and V have arrived
            S = dot(S_TILE, sQ, sK.T)                           # Alg. 0 line 1: S = Q K^T
            S, _ = apply(S, scores_of(scores, segment), batch, head, first, segment.first_key)
            S = hide(S, NO_SCORE, shown, band)                  # MASK(S)
            P, m, l, _ = softmax_step(S, full(ROWS, no_max(scale_log2)), full(PARTS, ZERO), scale_log2)     # line 2
            largest, total, alpha = with_sink(m * (scale_log2 * LN2), row_sum(l), scores, batch, head)
            O = dot(O_TILE, drop(P, drops, batch, head, 0, 0), sV)              # line 3: O = P V
            sync()                                              # all have read Q, K and V
            if not AHEAD:
                at = fetch_after(number, matrices, group_size, stage, mQ, mK, mV, mask)
            factor = inverse(total, alpha)
            save(rows_between(mO, batch, head, first, end, ROWS_OF), O * (factor * kept_scale), 0)
            if SAVES:
                lse = logsumexp(largest, total, LN2)
                save(mLse[batch, head][first:end], lse, 0)
                if HAS_LOW:
                    save(mLow[batch, head][first:end], low_of(lse, m, scale_log2, factor), 0)

    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, {"o": out_dtypes[0]}, mask=mask, score=score)
    return Source(kernel, signature, threads, blocks, shared.nbytes)


# {(bytes of an element, size of the tile): {largest head_dim: row}}. Time over that of a copy of the same bytes, alone
# and with a bias by head (H100, 8 heads, 2**25 elements in an array, 2**26 of bfloat16; head_dim 32, then 64):
#            tiles of 16   32           64           64, 64       128          128, 64
# float32    1.06, 1.10    1.07, 1.10   1.12, 1.19   1.15, 1.30
# float64    1.05, -       1.07, 1.09   1.11, 1.27   1.12, 1.27
# bfloat16   1.16, 1.19    1.13, 1.17   1.13, 1.21   1.09, 1.11   1.32, 1.44   1.16, 1.57
TILES = {
    (2, 16): {32: SmallTiles(32, 28), 64: SmallTiles(32, 16)},
    (2, 32): {32: SmallTiles(64, 12), 64: SmallTiles(64, 10), 128: SmallTiles(32, 4, 2)},
    (2, 64): {32: SmallTiles(128, 5, 2), 64: SmallTiles(128, 4)},
    (2, 128): {64: SmallTiles(256, 2)},
    (4, 16): {32: SmallTiles(32, 24), 64: SmallTiles(32, 12)},
    (4, 32): {32: SmallTiles(64, 10), 64: SmallTiles(64, 8), 128: SmallTiles(64, 4)},
    (4, 64): {32: SmallTiles(64, 4), 64: SmallTiles(128, 3, keeps_score=False), 128: SmallTiles(128, 2)},
    (8, 16): {32: SmallTiles(32, 16), 64: SmallTiles(32, 8)},
    (8, 32): {32: SmallTiles(64, 6), 64: SmallTiles(64, 4), 128: SmallTiles(64, 2)},
    (8, 64): {32: SmallTiles(128, 3), 64: SmallTiles(128, 2, keeps_score=False)},
}
SPEC = Spec(
    small_forward,
    (Matrix("q"), Matrix("k", "k"), Matrix("v", "k", may_be_empty=True), Matrix("o", may_be_empty=True),
     Statistic("lse"), Statistic("lse_low"), MASK, SCORE, DROPOUT, "group_size", "scale_log2", "kept_scale"),
    tiles=lambda work: rows_of(TILES, work),
    parameters=lambda work, tiles: (
        parameters(work, tiles) | dtypes_of(work, "o") | lse_alone(work) | {"saves": "lse" in work.dtypes}
    ),
    persistent=True,
    multiple=lambda work: heads_apart(work.score_added, work),
    resident=lambda work, tiles: resident(SPEC, work, tiles),
    packs=True,
)  # fmt: skip

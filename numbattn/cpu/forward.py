"""Attention forward on the CPU: Algorithm 2, and 5 where the mask has blocks (lines 10 to 16 are the same in both).

O is divided by l once, in the epilogue.
"""

import numpy as np

from ..merging import merge_into
from ..problem import Saved
from ..values import rounded
from .arguments import drops_of, matrices_of, readable, scratch_of, sight_of, tokens_of
from .compile import kernel
from .decode import launch_decode, split
from .launch import launch
from .product import product, product_tn
from .score import score, sinks_of, steps_of
from .softmax import add_sink, epilogue, multiply, rescale, softmax_step
from .tile import (
    EMPTY,
    PARTIAL,
    band_of,
    clear,
    draw,
    fill,
    intervals_of,
    is_set,
    keys_in_sight,
    mask_band,
    mask_cells,
    mask_intervals,
    matrix,
    rows_of,
    tile,
    tile_state,
    transpose,
)

TILE_M, TILE_N = 128, 128  # queries, keys: of 64 to 256 the fastest, forward and backward, causal or not
EXPONENTIAL = 32  # the cost of one, in multiplications


def forward(problem, inputs, out=None, save=True, onto=None):
    """o, in `out` if given, and what the backward pass needs, if it is to be saved.

    onto: o and lse over other keys, in the dtype of sums, to which these are added: lse where it lies, and o, too, if
    it is `out`.
    """
    q, cache = readable(inputs.q, problem.sum_dtype), inputs.cache
    k, k_alive = tokens_of(inputs.k, problem, cache, cache and cache.k_scale)
    v, v_alive = tokens_of(inputs.v, problem, cache, cache and cache.v_scale)
    o = np.empty((*problem.matrices, problem.seqlen_q, problem.head_dim_v), problem.sum_dtype)
    lse = np.empty((*problem.matrices, problem.seqlen_q), problem.sum_dtype)
    many, few = split(problem, inputs.mask, TILE_M)
    sight, alive = sight_of(problem, inputs.mask)
    steps, also_alive = steps_of(problem, inputs.score, inputs.origin)
    drops, kept_scale = drops_of(inputs.dropout, inputs.origin)
    arrays = matrices_of(q, problem), k, v, o, lse
    options = sight, steps, sinks_of(problem, inputs.score), drops, inputs.scale, kept_scale
    features = problem.head_dim + problem.head_dim_v
    if len(many.table):
        scratch, work = scratch_of(problem, TILE_M, TILE_N), many.pairs * (features + EXPONENTIAL)
        launch(forward_kernel, len(many.table), work, scratch, *arrays, many.table, *options)
    if len(few.table):
        launch_decode(problem, few, arrays, options)
    o, lse = o.reshape(problem.out_shape), lse.reshape(problem.lse_shape)
    if onto is not None:
        before, lse_before = onto
        out = np.empty(o.shape, problem.result_dtype) if out is None else out
        merge_into(out, before, lse_before, o, lse)
        lse = lse_before
    elif out is None:
        out = rounded(o, problem.result_dtype)
    else:
        with np.errstate(under="ignore"):
            out[...] = o
    return out, Saved(problem, inputs, out, lse) if save else None


@kernel
def forward_kernel(
    first_block, end_block, stop, scratch, q, k, v, o, lse, tiles, sight, steps, sinks, drops, scale, kept_scale
):
    """Blocks [first_block, end_block); a block is a tile of queries of one (batch, head)."""
    dtype, one = lse.dtype, lse.dtype.type(1)
    for block in range(first_block, end_block):
        batch, head, m0, m_end, segment, segment_end, offset = tiles[block]
        O = o[batch, head, m0:m_end]
        QT = tile(scratch.QT, q.cols, m_end - m0)
        transpose(QT, matrix(q, batch, head, dtype)[m0:m_end], dtype.type(scale))
        vectors = tile(scratch.vectors, 4, m_end - m0)
        m, l, alpha, part = vectors[0], vectors[1], vectors[2], vectors[3]
        fill(m, np.finfo(dtype).min)                                        # finite, since (-inf) - (-inf) is NaN
        fill(l, 0)
        clear(O)
        band, intervals = band_of(sight, batch, head), intervals_of(sight, batch, head)
        first, end = keys_in_sight(band, intervals, m0, m_end, segment, segment_end)
        for n0 in range(first - (first - segment) % TILE_N, end, TILE_N):
            n_end = min(n0 + TILE_N, end)
            state = tile_state(sight, intervals, batch, head, m0, m_end, n0, n_end)
            if state == EMPTY:
                continue                                                    # Alg. 5 line 8
            if is_set(stop):
                return
            S = tile(scratch.S, n_end - n0, m_end - m0)
            K = rows_of(k, batch, head, n0, n_end, scratch.wide, dtype)
            product(S, K, QT, one, False)                                   # Alg. 2 line 10: S = scale Q K^T
            score(S, steps, scratch.slopes, batch, head, m0, n0, offset)
            mask_band(S, band, m0, n0)                                      # line 11: MASK(S)
            mask_intervals(S, intervals, m0, n0)
            if state == PARTIAL:
                mask_cells(S, sight, batch, head, m0, n0)
            softmax_step(S, m, l, alpha, part)                              # lines 12 and 13: S becomes P
            rescale(O, alpha)                                               # line 15: O = alpha O
            if drops.threshold > 0:
                Z = tile(scratch.Z, n_end - n0, m_end - m0)
                draw(Z, scratch.words, drops, batch, head, m0, n0)
                multiply(S, Z)                                              # line 14: dropout(P)
            V = rows_of(v, batch, head, n0, n_end, scratch.wide, dtype)
            product_tn(O, S, V, one, True)                                  # line 15: O = O + P V
        if sinks.size:
            add_sink(m, l, alpha, sinks[batch, head])
            rescale(O, alpha)
        epilogue(O, lse[batch, head, m0:m_end], m, l, kept_scale)

"""Attention forward on the CPU: Algorithm 2, and 5 where the mask has blocks (lines 10 to 16 are the same in both).

O is divided by l once, in the epilogue. Rows of more than LONG keys are summed in parts, to lose fewer digits.
"""

from typing import Any, NamedTuple

import numpy as np

from ..base.values import put, rounded
from ..call.problem import Saved
from ..merging import merge_into
from .arguments import LONG, mask_of, numbers_of, operands_of, scratch_of
from .compile import Kernel
from .decode import Operands, launch_decode, split
from .launch import launch
from .product import product, product_tn
from .score import score, sinks_of, steps_of
from .softmax import absorb, add_sink, epilogue, multiply, rescale, rows_of_lse, softmax_step
from .tile import (
    EMPTY,
    OF_SUMS,
    PARTIAL,
    band_of,
    clear,
    draw,
    fill,
    inline,
    intervals_of,
    is_set,
    mask_band,
    mask_cells,
    mask_intervals,
    matrix,
    prefetch,
    rows_of,
    tile,
    tile_state,
    visible_keys,
)
from .transposition import transpose

TILE_M, TILE_N = 128, 128  # queries, keys: the fastest of 64 to 256, forward and backward, causal or not
EXPONENTIAL = 32  # the cost of an exponential, in multiplications


def forward(problem, inputs, out=None, save=True, onto=None):
    """o, in `out` if given, and what the backward pass needs, or None unless `save`.

    onto: o and lse over other keys, in the dtype of sums, that these are added to: lse in place, and o, too, if it is
    `out`.
    """
    o = np.empty(problem.out_shape, problem.sum_dtype)
    rows = [np.empty((2, *problem.lse_shape), problem.sum_dtype)] if save or onto else []  # lse and its low part
    operands = operands_of(problem, inputs, o, *rows)
    many, few = split(problem, inputs.mask, TILE_M)
    options = (
        mask_of(problem, inputs.mask), steps_of(problem, inputs.score, inputs.origin),
        sinks_of(problem, inputs.score), numbers_of(inputs.dropout, inputs.origin, inputs.scale),
    )  # fmt: skip
    if many is not None:
        tiles, record = many
        scratch, memory = scratch_of(problem, min(TILE_M, problem.seqlen_q), min(TILE_N, problem.seqlen_k))
        work = tiles.pairs * (problem.head_dim + problem.head_dim_v + EXPONENTIAL)
        launch(forward_kernel.given(scratch, operands, record, *options), len(tiles.table), work, memory)
    if few is not None:
        launch_decode(problem, *few, operands, options)
    if onto:
        before, lse_before = onto
        out = np.empty(o.shape, problem.result_dtype) if out is None else out
        merge_into(out, before, lse_before, o, rows[0][0])
        rows = [(lse_before, None)]
    elif out is None:
        out = rounded(o, problem.result_dtype)
    else:
        put(out, o)
    return out, Saved(problem, inputs, out, rows[0][0], rows[0][1]) if save else None  # faster than *rows[0]


class Queries(NamedTuple):
    """A tile of queries [m0, m_end) of a head."""

    batch: Any
    head: Any
    m0: Any
    m_end: Any
    offset: Any  # of their segment
    band: Any
    intervals: Any
    QT: Any
    alpha: Any
    part: Any


@Kernel
def forward_kernel(
    first_block, end_block, stop, scratch, q, k, v, o, lse, tiles, mask, steps, sinks, drops, scale, kept_scale
):
    """Blocks [first_block, end_block); a block is a tile of queries of one (batch, head)."""
    dtype, given = lse.dtype, Operands(q, k, v, mask, steps, drops, scale)
    for block in range(first_block, end_block):
        if block + 1 < end_block:
            prefetch_inputs(given, tiles[block + 1], scratch, dtype)
        batch, head, m0, m_end, segment, segment_end, offset = tiles[block]
        O, O_next = o[batch, head, m0:m_end], tile(scratch.O, m_end - m0, o.shape[3])
        QT = tile(scratch.QT, q.cols, m_end - m0)
        transpose(QT, matrix(q, batch, head, dtype)[m0:m_end], dtype.type(scale), False)
        vectors = tile(scratch.vectors, 6, m_end - m0)
        m, l, alpha, part, m_next, l_next = vectors[0], vectors[1], vectors[2], vectors[3], vectors[4], vectors[5]
        band, intervals = band_of(mask, batch, head), intervals_of(mask, batch, head)
        first, end = visible_keys(band, intervals, m0, m_end, segment, segment_end)
        first -= (first - segment) % TILE_N
        at = Queries(batch, head, m0, m_end, offset, band, intervals, QT, alpha, part)
        for n_next in range(first, max(end, first + 1), LONG):
            own = (O, m, l) if n_next == first else (O_next, m_next, l_next)
            attend(*own, at, given, scratch, stop, n_next, min(n_next + LONG, end))
            if n_next != first:
                absorb(O, m, l, O_next, m_next, l_next)
        if sinks.size:
            add_sink(O, m, l, alpha, sinks[batch, head])
        epilogue(O, *rows_of_lse(lse, batch, head, m0, m_end), m, l, kept_scale)


@inline
def prefetch_inputs(given, row, scratch, dtype):
    """Prefetch the next tile of queries, if it is small and keys and values are read in place."""
    batch, head, m0, m_end, first, end, _ = row
    if 0 < end - first <= TILE_N and given.k.kind == OF_SUMS and end <= given.k.page_size:
        prefetch(matrix(given.q, batch, head, dtype)[m0:m_end])
        prefetch(rows_of(given.k, batch, head, first, end, scratch.wide, dtype))
        prefetch(rows_of(given.v, batch, head, first, end, scratch.wide, dtype))


@inline
def attend(O, m, l, at, given, scratch, stop, first, end):
    """O, m and l over keys [first, end), which begin with a tile."""
    batch, head, m0, m_end = at.batch, at.head, at.m0, at.m_end
    dtype, one = m.dtype, m.dtype.type(1)
    fill(m, np.finfo(dtype).min)                                            # finite, since (-inf) - (-inf) is NaN
    fill(l, 0)
    clear(O)
    for n0 in range(first, end, TILE_N):
        n_end = min(n0 + TILE_N, end)
        state = tile_state(given.mask, at.intervals, batch, head, m0, m_end, n0, n_end)
        if state == EMPTY:
            continue                                                        # Alg. 5 line 8
        if is_set(stop):
            return
        S = tile(scratch.S, n_end - n0, m_end - m0)
        K = rows_of(given.k, batch, head, n0, n_end, scratch.wide, dtype)
        product(S, K, at.QT, one, False)                                    # Alg. 2 line 10: S = scale Q K^T
        score(S, given.steps, scratch.slopes, batch, head, m0, n0, at.offset)
        mask_band(S, at.band, m0, n0)                                       # line 11: MASK(S)
        mask_intervals(S, at.intervals, m0, n0)
        if state == PARTIAL:
            mask_cells(S, given.mask, batch, head, m0, n0)
        softmax_step(S, m, l, at.alpha, at.part)                            # lines 12 and 13: S becomes P
        rescale(O, at.alpha)                                                # line 15: O = alpha O
        if given.drops.threshold > 0 and O.shape[1] > 0:                    # else lse alone is wanted
            Z = tile(scratch.Z, n_end - n0, m_end - m0)
            draw(Z, scratch.words, given.drops, batch, head, m0, n0)
            multiply(S, Z)                                                  # line 14: dropout(P)
        V = rows_of(given.v, batch, head, n0, n_end, scratch.wide, dtype)
        product_tn(O, S, V, one, True)                                      # line 15: O = O + P V

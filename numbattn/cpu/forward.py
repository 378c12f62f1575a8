"""Attention forward on the CPU: Algorithm 2, and 5 where the mask has blocks (lines 10 to 16 are the same in both).

O is divided by l once, in the epilogue. Rows of more than LONG keys are summed in parts, to lose fewer digits.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..base.values import put, rounded
from ..call.problem import Saved
from ..merging import merge_into
from .arguments import LONG, known
from .bfloat16 import (
    NO_PAIRS,
    PAIRS,
    begin,
    end,
    load_transpose,
    matmul_tn,
    matrix_in,
    pairs_of,
    scores,
    tokens_in,
    transpose_in,
)
from .compile import Kernel
from .decode import call_of as decode_call_of
from .decode import launch_decode, split
from .forward_directions import Directions, add_direction, add_values, columns, finish, load_directions, sums_of
from .launch import is_one_step, launch
from .operands import ForwardGiven, operands_of, record_of
from .record import Record
from .score import options_of, score, sinks_of
from .scratch import TILE_M, TILE_N, Lent, scratch_of
from .softmax import absorb, add_sink, multiply, normalise, rescale, save_lse, softmax_step
from .tile import (
    EMPTY,
    OF_SUMS,
    clear,
    draw,
    fill,
    hide,
    inline,
    is_set,
    keys_seen,
    matrix,
    prefetch,
    rows_of,
    tile,
    tile_state,
)

EXPONENTIAL = 32  # the cost of an exponential, in multiplications
NO_DIRECTIONS = (Record(None),)


def forward(problem, inputs, out=None, save=True, onto=None):
    """o, in `out` if given, and what the backward pass needs, or None unless `save`.

    onto: o and lse over other keys, in the dtype of sums, that these are added to: lse in place, and o, too, if it is
    `out`.
    """
    lent = Lent()
    rows = [np.empty((2, *problem.lse_shape), problem.sum_dtype)] if save or onto else []  # lse and its low part
    pairs = pairs_of(problem, inputs.q, inputs.k, inputs.v)
    if pairs is PAIRS and split(problem, inputs.mask, TILE_M)[1]:
        pairs = NO_PAIRS
    arrays, layouts = operands_of(problem, inputs, lent.new, narrow=pairs is PAIRS)
    many, few = calls_of(problem, inputs, layouts, len(rows), pairs)
    if can_take(out, problem.sum_dtype, many, few) and not onto:
        o = out
    else:
        is_result = out is None and problem.result_dtype == problem.sum_dtype and not onto
        o = (np.empty if is_result else lent.new)(problem.out_shape, problem.sum_dtype)
    if many is not None:
        launch(*many, (*arrays, o, *rows))
    if few is not None:
        launch_decode(few, (*arrays, o, *rows))
    if onto:
        before, lse_before = onto
        out = np.empty(o.shape, problem.result_dtype) if out is None else out
        merge_into(out, before, lse_before, o, rows[0][0])
        rows = [(lse_before, None)]
    elif out is None:
        out = rounded(o, problem.result_dtype)
    elif out is not o:
        put(out, o)
    lent.give_back()
    return out, Saved(problem, inputs, out, rows[0][0], rows[0][1]) if save else None  # faster than *rows[0]


def can_take(out, dtype, many, few):
    """Whether kernels may write to `out` itself: as it lies, and in calls that leave nothing half done."""
    if out is None or out.dtype != dtype or not out.flags.carray:
        return False
    calls = [call for call in (many, few and few.launched) if call]
    return len(calls) <= 1 and all(is_one_step(work) for _, _, work, _ in calls)


@known
def calls_of(problem, inputs, layouts, saves, pairs):
    """What to launch for tiles of many queries, as from `call_of`, and the DecodeCall for those of few, or None."""
    many, few = split(problem, inputs.mask, TILE_M)
    operands = record_of(problem, layouts, saves)
    given = operands, *options_of(problem, inputs), sinks_of(problem, inputs.score)
    return many and call_of(problem, given, *many, pairs), few and decode_call_of(problem, given, *few)


def call_of(problem, given, tiles, table, pairs, directions=NO_DIRECTIONS, *sizes):
    """The Call for WorkTiles, whose table is in a Record, its blocks, work and memory. given, directions: the Records
    of ForwardGiven and Directions; sizes: as for scratch_for."""
    scratch, nbytes, cost = scratch_for(problem, pairs is PAIRS, *sizes)
    call = forward_kernel.given(scratch, *given, *directions, *pairs, table)
    return call, len(tiles.table), tiles.pairs * cost, nbytes


@lru_cache(maxsize=64)
def scratch_for(problem, in_pairs=False, count=None, bends=0, slopes=0):
    """The scratch of a call, and its work for a pair of a query and a key.

    count: of directions, if there are any; bends: 1 for second derivatives; slopes: tiles of derivatives of scores.
    """
    along, width, depth = {}, problem.head_dim_v, problem.head_dim + problem.head_dim_v
    if count is not None:
        width = problem.head_dim_v * (1 + count + bends) + count + bends
        along = {"tS": 1, "S2": bends, "slopes": slopes, "tQT": count, "sums": width}
    next_sums = width * (problem.seqlen_k > LONG)
    scratch = scratch_of(problem, in_pairs=in_pairs, S=1, QT=1, vectors=6, wide=1, next_sums=next_sums, **along)
    return *scratch, depth + EXPONENTIAL + 2 * (count or 0) * depth


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
    pairs: Any  # of the kernel


@Kernel
def forward_kernel(
    first_block, end_block, stop, scratch, given: ForwardGiven, directions: Directions, pairs, tiles
):
    """Blocks [first_block, end_block); a block is a tile of queries of one (batch, head). directions: or None, for
    which the kernel is compiled apart; pairs: see `bfloat16`."""
    begin(pairs)
    dtype, sinks = given.lse.dtype, given.sinks
    for block in range(first_block, end_block):
        if directions is None and pairs is None and block + 1 < end_block:  # along directions it does not pay
            prefetch_inputs(given, tiles[block + 1], scratch, dtype)
        batch, head, m0, m_end, segment, segment_end, offset = tiles[block]
        O = given.o[batch, head, m0:m_end]
        sums = tile(O, m_end - m0, O.shape[1]) if directions is None else sums_of(scratch.sums, O, directions)
        next_sums = tile(scratch.next_sums, m_end - m0, sums.shape[1])
        Q = matrix_in(given.q, batch, head, m0, m_end, dtype, pairs)
        QT = transpose_in(scratch.QT, given.q.cols, m_end - m0, pairs)
        load_transpose(QT, Q, dtype.type(given.scale), scratch, pairs)
        vectors = tile(scratch.vectors, 6, m_end - m0)
        m, l, alpha, part, m_next, l_next = vectors[0], vectors[1], vectors[2], vectors[3], vectors[4], vectors[5]
        band, intervals, first, n_end = keys_seen(given.mask, batch, head, m0, m_end, segment, segment_end)
        first -= (first - segment) % TILE_N
        at = Queries(batch, head, m0, m_end, offset, band, intervals, QT, alpha, part, pairs)
        if directions is not None:
            load_directions(at, given, directions, scratch)
        for n_next in range(first, max(n_end, first + 1), LONG):
            own = (sums, m, l) if n_next == first else (next_sums, m_next, l_next)
            attend(*own, at, given, directions, scratch, stop, n_next, min(n_next + LONG, n_end))
            if n_next != first:
                absorb(sums, m, l, next_sums, m_next, l_next)
        if sinks.size:
            add_sink(sums, m, l, alpha, sinks[batch, head])
        save_lse(given.lse[0, batch, head, m0:m_end], given.lse[1, batch, head, m0:m_end], m, l)
        if directions is None:
            normalise(O, l, given.kept_scale, 0)
        else:
            finish(O, sums, m, l, at, given, directions)
    end(pairs)


@inline
def prefetch_inputs(given, row, scratch, dtype):
    """Prefetch the next tile of queries, if it is small and keys and values are read in place."""
    batch, head, m0, m_end, first, end, _ = row
    if 0 < end - first <= TILE_N and given.k.kind == OF_SUMS and end <= given.k.page_size:
        prefetch(matrix(given.q, batch, head, dtype)[m0:m_end])
        prefetch(rows_of(given.k, batch, head, first, end, scratch.wide, dtype))
        prefetch(rows_of(given.v, batch, head, first, end, scratch.wide, dtype))


@inline
def attend(sums, m, l, at, given, directions, scratch, stop, first, end):
    """All sums, m and l over keys [first, end), which begin with a tile."""
    batch, head, m0, m_end = at.batch, at.head, at.m0, at.m_end
    dtype, features = m.dtype, given.v.cols
    has_drops = given.drops.threshold > 0 and sums.shape[1] > 0             # else lse alone is wanted
    fill(m, np.finfo(dtype).min)                                            # finite, since (-inf) - (-inf) is NaN
    fill(l, 0)
    clear(sums)
    for n0 in range(first, end, TILE_N):
        n_end = min(n0 + TILE_N, end)
        state = tile_state(given.mask, at.intervals, batch, head, m0, m_end, n0, n_end)
        if state == EMPTY:
            continue                                                        # Alg. 5 line 8
        if is_set(stop):
            return
        S, Z = tile(scratch.S, n_end - n0, m_end - m0), tile(scratch.Z, n_end - n0, m_end - m0)
        K = tokens_in(given.k, batch, head, n0, n_end, scratch.wide, dtype, at.pairs)
        scores(S, K, at.QT, dtype.type(given.scale), scratch, at.pairs)     # Alg. 2 line 10: S = scale Q K^T
        score(S, given.steps, scratch.slopes, batch, head, m0, n0, at.offset)
        hide(S, given.mask, at, n0, state)                                  # line 11: MASK(S)
        softmax_step(S, m, l, at.alpha, at.part)                            # lines 12 and 13: S becomes P
        rescale(sums, at.alpha)                                             # line 15: O = alpha O
        V = tokens_in(given.v, batch, head, n0, n_end, scratch.wide, dtype, at.pairs)
        if has_drops:
            draw(Z, scratch.words, given.drops, batch, head, m0, n0)
        if directions is not None:
            for t in range(directions.to.shape[0]):
                add_direction(sums, S, Z, K, V, t, at, given, directions, scratch, n0, n_end)
        if has_drops:
            multiply(S, Z)                                                  # line 14: dropout(P)
        matmul_tn(columns(sums, 0, features), S, V, dtype.type(1), scratch, at.pairs)  # line 15: O = O + P V
        if directions is not None:
            for t in range(directions.to.shape[0]):
                add_values(sums, S, t, at, directions, n0, n_end)

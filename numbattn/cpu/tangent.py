"""The tangent of attention on the CPU, and its second derivatives: Algorithm 2 with more columns.

S and P of each tile are computed once for several directions. Sums over keys are side by side in one matrix, which is
rescaled like O: O, its tangents and second derivatives, then the first and second derivatives of l.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..base.values import rounded
from ..call.tangents import parts_of
from ..functions.compiled.exponentials import exp
from .arguments import LONG, directions, matrices, memory_of, readable, tiles_of
from .compile import Kernel
from .forward import EXPONENTIAL, TILE_M, TILE_N, Queries
from .launch import launch
from .product import product, product_tn
from .record import Later, Record
from .score import kept_in, nonlinear_in, options_of, score, sinks_of
from .score_tangents import differentiate_score, numbered_tile, tangents_of_sinks, tangents_of_steps
from .softmax import SUMMED, absorb, add_sink, multiply, rescale, save_lse, softmax_step
from .tile import (
    EMPTY,
    PARTIAL,
    address_of,
    band_of,
    clear,
    draw,
    fill,
    inline,
    inline_in_place,
    inline_view,
    intervals_of,
    is_set,
    mask_band,
    mask_cells,
    mask_intervals,
    matrix,
    strided_view,
    tile,
    tile_state,
    visible_keys,
)
from .transposition import transpose

AT_ONCE = 4  # directions: more would drive tiles out of the cache


def tangent(problem, inputs, given, tangents, bends=False):
    """o, lse, its low part, and the tangents of o and lse, by name; with `bends` o2, too, a sum of second derivatives
    of o for each AT_ONCE directions."""
    shapes = problem.out_shape, problem.lse_shape
    o, lse, low = (np.empty(shape, problem.sum_dtype) for shape in (*shapes, shapes[1]))
    to, tlse = (np.empty((tangents.count, *shape), problem.sum_dtype) for shape in shapes)
    tiles, starts = tiles_of(problem, inputs.mask, TILE_M), range(0, max(tangents.count, 1), AT_ONCE)
    seconds = np.empty((len(starts), *shapes[0]), problem.sum_dtype) if bends else ()
    given = *options_of(problem, inputs, order=1 + bends), sinks_of(problem, inputs.score)
    table, depth = Record(tiles.table), problem.head_dim + problem.head_dim_v
    for number, first in enumerate(starts):
        some, end = tangents.some(first, first + AT_ONCE), first + AT_ONCE
        results = [o, lse, low, to[first:end], tlse[first:end], *seconds[number : number + 1]]
        operands = operands_of(problem, inputs, some, results)
        slopes = nonlinear_in(inputs.score) + kept_in(inputs.score)
        scratch, memory = scratch_of(problem, some.count, slopes, bends)
        tparts = [parts_of(inputs, some, number) for number in range(some.count)]
        of_score = tangents_of_steps(problem, inputs, tparts), tangents_of_sinks(problem, tparts)
        work = tiles.pairs * (depth + EXPONENTIAL + 2 * some.count * depth)
        launch(tangent_kernel.given(scratch, operands, *given, *of_score, table), len(tiles.table), work, memory)
    o, to = rounded(o, problem.result_dtype), rounded(to, problem.result_dtype)
    return {"o": o, "lse": lse, "lse_low": low, "to": to, "tlse": tlse, "o2": seconds}


def operands_of(problem, inputs, tangents, results):
    """The Record of results, and of q, k, v and their tangents."""
    given = inputs.q, inputs.k, inputs.v, tangents.q, tangents.k, tangents.v
    arrays = [x if x is None else readable(x, problem.sum_dtype) for x in given]
    layouts = [x if x is None else (x.shape, x.strides) for x in arrays]
    found = [x for x in arrays if x is not None]
    return _operands(problem, tangents.count, len(results), *layouts).filled(*results, *found)


@lru_cache(maxsize=64)
def _operands(problem, count, results, q, k, v, *tangents):
    """The Record of calls on arrays of these shapes and strides, or None, with this number of results."""
    rows, dtype = (*problem.matrices, problem.seqlen_q), problem.sum_dtype
    wholes = [matrices(problem, *layout, dtype.itemsize) for layout in (q, k, v)]
    shapes = (*rows, problem.head_dim_v), rows, rows, (count, *rows, problem.head_dim_v), (count, *rows)
    second = Later(shapes[0], dtype) if results > len(shapes) else np.zeros((0, 0, 0, 0), dtype)
    return Record(*[Later(shape, dtype) for shape in shapes], second, *wholes,
                  *[directions(problem, count, layout) for layout in tangents], problem.matrices[0], count,
                  results - len(shapes))  # fmt: skip


class TangentScratch(NamedTuple):
    """Memory of one thread, for one tile at a time."""

    S: Any  # then P
    tS: Any  # then P tS
    S2: Any  # the second derivative along a direction
    slopes: Any  # derivatives of scores
    QT: Any
    tQT: Any  # of all directions
    sums: Any
    next_sums: Any  # of further keys, where rows are long
    vectors: Any  # one number a query
    Z: Any  # uint8
    words: Any  # uint64


@lru_cache(maxsize=64)
def scratch_of(problem, count, slopes, bends):
    """The Record of a TangentScratch for `count` directions, and a function that allocates its memory. slopes: how many
    tiles, twice as many with `bends`."""
    rows, keys = min(TILE_M, problem.seqlen_q), min(TILE_N, problem.seqlen_k)
    elements, dropped = rows * keys, rows * keys if problem.dropout else 0
    sums = rows * ((1 + count + bends) * problem.head_dim_v + count + bends)
    sizes = (elements, elements, elements * bends, elements * slopes * (1 + bends), rows * problem.head_dim,
             count * rows * problem.head_dim, sums, sums * (problem.seqlen_k > LONG), 6 * rows)  # fmt: skip
    dtypes = *[problem.sum_dtype] * len(sizes), np.dtype(np.uint8), np.dtype(np.uint64)
    return memory_of(TangentScratch, (*sizes, dropped, 2 * (rows + 16) if dropped else 0), dtypes)


# ------------------------------------------------------------------------------------------------------------- kernel
class TangentGiven(NamedTuple):
    """The inputs of a call, in the order of its Records."""

    q: Any
    k: Any
    v: Any
    tq: Any  # direction t and element b of the batch have number t * batches + b; zero has no rows
    tk: Any
    tv: Any
    batches: Any
    count: Any  # of directions
    bends: Any  # 1 if second derivatives are wanted, or 0
    mask: Any
    steps: Any
    drops: Any
    scale: Any
    kept_scale: Any
    sinks: Any
    tsteps: Any
    tsinks: Any


@Kernel
def tangent_kernel(
    first_block, end_block, stop, scratch, o, lse, low, to, tlse, second, given: TangentGiven, tiles
):
    """Blocks [first_block, end_block); a block is a tile of queries of one (batch, head)."""
    dtype, count, bends, sinks, tsinks = lse.dtype, given.count, given.bends, given.sinks, given.tsinks
    width = (1 + count + bends) * given.v.cols + count + bends
    for block in range(first_block, end_block):
        batch, head, m0, m_end, segment, segment_end, offset = tiles[block]
        sums, next_sums = tile(scratch.sums, m_end - m0, width), tile(scratch.next_sums, m_end - m0, width)
        QT = tile(scratch.QT, given.q.cols, m_end - m0)
        transpose(QT, matrix(given.q, batch, head, dtype)[m0:m_end], dtype.type(given.scale), False)
        for t in range(count if given.tq.rows else 0):
            tQ = matrix(given.tq, t * given.batches + batch, head, dtype)[m0:m_end]
            transpose(numbered_tile(scratch.tQT, t, QT), tQ, dtype.type(given.scale), False)
        vectors = tile(scratch.vectors, 6, m_end - m0)
        m, l, alpha, part, m_next, l_next = vectors[0], vectors[1], vectors[2], vectors[3], vectors[4], vectors[5]
        band, intervals = band_of(given.mask, batch, head), intervals_of(given.mask, batch, head)
        first, end = visible_keys(band, intervals, m0, m_end, segment, segment_end)
        first -= (first - segment) % TILE_N
        at = Queries(batch, head, m0, m_end, offset, band, intervals, QT, alpha, part)
        for n_next in range(first, max(end, first + 1), LONG):
            own = (sums, m, l) if n_next == first else (next_sums, m_next, l_next)
            attend(*own, at, given, scratch, stop, n_next, min(n_next + LONG, end))
            if n_next != first:
                absorb(sums, m, l, next_sums, m_next, l_next)
        tl, l2 = sums[:, width - bends - count : width - bends], sums[:, width - 1]
        if sinks.size:
            add_sink(sums, m, l, alpha, sinks[batch, head])
        for t in range(tsinks.shape[0]):
            add_tangent_of_sink(tl[:, t], m, l, sinks[batch, head], tsinks[t, batch, head])
        O, tO = o[batch, head, m0:m_end], to[:, batch, head, m0:m_end]
        save_lse(lse[batch, head, m0:m_end], low[batch, head, m0:m_end], m, l)
        finish(O, sums, l, given.kept_scale, count + bends)
        for t in range(count):
            finish_tangent(tO[t], tlse[t, batch, head, m0:m_end], O, columns(sums, 1 + t, given.v.cols), tl[:, t])
        if bends:
            finish_second(second[batch, head, m0:m_end], O, tO, columns(sums, 1 + count, given.v.cols), tl, l2)


@inline_view
def columns(sums, number, count):
    """`count` columns of sums: of O, of tangent number - 1 of O, or of the second derivatives after these."""
    address = address_of(sums) + number * count * sums.itemsize
    return strided_view(address, sums.shape[0], count, sums.shape[1], sums.dtype)


@inline_in_place
def attend(sums, m, l, at, given, scratch, stop, first, end):
    """All sums, m and l over keys [first, end), which begin with a tile."""
    batch, head, m0, m_end = at.batch, at.head, at.m0, at.m_end
    dtype, one, features = m.dtype, m.dtype.type(1), given.v.cols
    fill(m, np.finfo(dtype).min)                                            # finite, since (-inf) - (-inf) is NaN
    fill(l, 0)
    clear(sums)
    for n0 in range(first, end, TILE_N):
        n_end = min(n0 + TILE_N, end)
        state = tile_state(given.mask, at.intervals, batch, head, m0, m_end, n0, n_end)
        if state == EMPTY:
            continue
        if is_set(stop):
            return
        S, Z = tile(scratch.S, n_end - n0, m_end - m0), tile(scratch.Z, n_end - n0, m_end - m0)
        K, V = matrix(given.k, batch, head, dtype)[n0:n_end], matrix(given.v, batch, head, dtype)[n0:n_end]
        product(S, K, at.QT, one, False)                                    # S = scale Q K^T
        score(S, given.steps, scratch.slopes, batch, head, m0, n0, at.offset)
        mask_band(S, at.band, m0, n0)
        mask_intervals(S, at.intervals, m0, n0)
        if state == PARTIAL:
            mask_cells(S, given.mask, batch, head, m0, n0)
        softmax_step(S, m, l, at.alpha, at.part)                            # S becomes P
        rescale(sums, at.alpha)
        if given.drops.threshold > 0:
            draw(Z, scratch.words, given.drops, batch, head, m0, n0)
        for t in range(given.count):
            add_direction(sums, S, Z, K, V, t, at, given, scratch, n0, n_end)
        if given.drops.threshold > 0:
            multiply(S, Z)
        product_tn(columns(sums, 0, features), S, V, one, True)             # O = O + (Z P) V
        for t in range(given.count if given.tv.rows else 0):
            tV = matrix(given.tv, t * given.batches + batch, head, dtype)[n0:n_end]
            product_tn(columns(sums, 1 + t, features), S, tV, one, True)    # tO = tO + (Z P) tV


@inline
def add_direction(sums, P, Z, K, V, t, at, given, scratch, n0, n_end):
    """Add the terms of keys [n0, n_end) along a direction to sums, except (Z P) tV."""
    batch, head, features = t * given.batches + at.batch, at.head, given.v.cols
    dtype, one, two = P.dtype, P.dtype.type(1), P.dtype.type(2)
    tS, tQT = tile(scratch.tS, P.shape[0], P.shape[1]), numbered_tile(scratch.tQT, t, at.QT)
    S2 = tile(scratch.S2, P.shape[0] * given.bends, P.shape[1])
    tK = matrix(given.tk, batch, head, dtype)[n0:n_end] if given.tk.rows else K[:0]
    differentiate_products(tS, K, tK, at.QT, tQT, given.tq.rows > 0)        # tS = scale (tQ K^T + Q tK^T)
    if given.tq.rows and given.tk.rows and given.bends:
        product(S2, tK, tQT, two, False)                                    # S2 = 2 scale tQ tK^T
    else:
        clear(S2)
    differentiate_score(tS, S2, given.steps, given.tsteps, t, scratch.slopes, scratch.slopes[:0], at.batch, head,
                        at.m0, n0, at.offset)  # fmt: skip
    weigh(P, tS, S2, sums, t, given.count, at.part)                         # tl = tl + rowsum(P tS)
    if given.drops.threshold > 0:
        multiply(tS, Z)
        multiply(S2, Z)
    product_tn(columns(sums, 1 + t, features), tS, V, one, True)            # tO = tO + (Z P tS) V
    if given.bends:
        second = columns(sums, 1 + given.count, features)
        product_tn(second, S2, V, one, True)                                # (Z P (S2 + tS^2)) V + 2 (Z P tS) tV
        if given.tv.rows:
            product_tn(second, tS, matrix(given.tv, batch, head, dtype)[n0:n_end], two, True)


@inline
def differentiate_products(tS, K, tK, QT, tQT, has_tQ):
    """tS = K tQ^T + tK Q^T, transposed; tK may be empty."""
    one = tS.dtype.type(1)
    if has_tQ:
        product(tS, K, tQT, one, False)
    else:
        clear(tS)
    if tK.shape[0]:
        product(tS, tK, QT, one, True)


@inline
def weigh(P, tS, S2, sums, t, count, part):
    """P tS in place of tS, 0 where P is 0, and P (S2 + tS^2) in place of S2; add their sums over keys."""
    keys, queries = tS.shape
    bends, zero = 1 if S2.shape[0] else 0, tS.dtype.type(0)
    own = sums.shape[1] - bends - count + t
    for first in range(0, keys, SUMMED):
        end = min(first + SUMMED, keys)
        if bends:
            fill(part, 0)
            for j in range(first, end):
                for i in range(queries):
                    S2[j, i] = P[j, i] * (S2[j, i] + tS[j, i] * tS[j, i]) if P[j, i] != zero else zero
                    part[i] += S2[j, i]
            for i in range(queries):
                sums[i, sums.shape[1] - 1] += part[i]
        fill(part, 0)
        for j in range(first, end):
            for i in range(queries):
                tS[j, i] = P[j, i] * tS[j, i] if P[j, i] != zero else zero
                part[i] += tS[j, i]
        for i in range(queries):
            sums[i, own] += part[i]


@inline
def add_tangent_of_sink(tl, m, l, logit, tangent):
    """tl = tl + exp(logit - m) times the tangent of the logit, where a row has seen anything."""
    for i in range(m.size):
        if l[i] != 0:
            tl[i] += exp(logit - m[i]) * tangent


@inline
def finish(O, sums, l, kept_scale, statistics):
    """O = O / l, and likewise all sums; dropout does not scale the last `statistics` ones. 0 where nothing is seen."""
    width = sums.shape[1] - statistics
    for i in range(l.size):
        inverse = O.dtype.type(1 / l[i] if l[i] != 0 else 0.0)
        factor = O.dtype.type(kept_scale * inverse)
        for c in range(width):
            sums[i, c] *= factor
        for c in range(width, sums.shape[1]):
            sums[i, c] *= inverse
        for c in range(O.shape[1]):
            O[i, c] = sums[i, c]


@inline
def finish_tangent(tO, tlse, O, sums, tl):
    """tlse = tl / l, tO = tO / l - tlse O. sums: of the direction."""
    for i in range(tlse.size):
        tlse[i] = tl[i]
        for c in range(O.shape[1]):
            tO[i, c] = sums[i, c] - tl[i] * O[i, c]


@inline
def finish_second(out, O, tO, sums, tl, l2):
    """The sum of (Z P2) V + 2 (Z P tS) tV - 2 tlse tO - rowsum(P2) O over all directions, P2 = P (S2 + tS^2)."""
    for i in range(l2.size):
        for c in range(O.shape[1]):
            out[i, c] = sums[i, c] - l2[i] * O[i, c]
        for t in range(tl.shape[1]):
            twice = out.dtype.type(2) * tl[i, t]
            for c in range(O.shape[1]):
                out[i, c] -= twice * tO[t, i, c]

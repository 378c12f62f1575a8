"""Attention over the edges of a graph on NumPy arrays: a thread takes a range of rows, and vectors run along head_dim.

A row is a query with its keys, or in the transposed lists a key with its queries: it adds to its own rows of results
alone, so that sums have one order. Gradients of keys and values are sums of rows of q and do times factors that the
pass by query leaves for each edge, so that arrays of edges are read once, in their order. All arrays are read, and
results added to, through the addresses of their rows, of which kernels make no arrays, whose references would be
counted. Heads that share a matrix share its sums.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..base.values import rounded, rowsum
from ..dropout import Dropout
from ..functions.compiled.exponentials import exp
from ..graphs import edge
from ..graphs.edge import Edge
from ..graphs.problem import AXES
from ..graphs.score import gradients_of
from .compile import Kernel
from .edge_score import WORDS, EdgeScore, add_reads, score_of, scored, scored_twice
from .edges import (
    add_ends,
    add_number,
    add_to,
    edge_at,
    kept,
    keys_of,
    row,
    row_or_zeros,
    sum_of_products,
    weight_of,
)
from .launch import launch
from .operands import MATRIX, Operands
from .product import add_multiple, dot
from .record import Record
from .scratch import Lent, memory_of
from .subnormals import flush_subnormals, restore
from .tile import address_of, fill, inline, is_set

NO_DROPOUT = Dropout(0, 0)
EXPONENTIAL = 32  # the cost of an edge beside its products, in multiplications
AT_ONCE = 1 << 20  # bytes of factors of edges: those of as many matrices as fit are computed at once

gradients, tangents, second = inline(edge.gradients), inline(edge.tangents), inline(edge.second)


# ---------------------------------------------------------------------------------------------------------- arguments
class Arrays(NamedTuple):
    """The arrays of a call, in the order of its Records: Matrices, without rows where nothing is given."""

    q: Any
    k: Any
    v: Any
    bias: Any  # of one column
    factor: Any
    k_edge: Any
    v_edge: Any
    do: Any


class Drops(NamedTuple):
    """The numbers of a Dropout."""

    drops: int  # whether there is one
    scale: float
    threshold: Any  # uint64, as those after it
    offset: Any
    key_low: Any
    key_high: Any


class EdgeLists(NamedTuple):
    """Lists of edges, see `numbattn.graphs.graph.Lists`."""

    starts: Any
    others: Any


class Options(NamedTuple):
    """All else of a call."""

    scale: float
    softmax: int
    drops: Drops
    lists: EdgeLists
    score: EdgeScore


class Rows(NamedTuple):
    """Rows of a call's results, (batch, heads, queries) or with features, or of their tangents, side by side."""

    o: Any
    lse: Any
    to: Any
    tlse: Any


class Statistics(NamedTuple):
    """Numbers of each query, (batch, heads, queries), and their tangents."""

    lse: Any
    D: Any
    tlse: Any
    tD: Any


class EdgeScratch(NamedTuple):
    """Memory of one thread: rows of keys and values with what edges add, and zeros."""

    k: Any
    v: Any
    tk: Any
    tv: Any
    zeros: Any
    score: Any  # see `edge_score.scored`


ARRAYS = Operands(**dict.fromkeys(Arrays._fields, MATRIX))


def record_of(problem, **arrays):
    """The Record of Arrays by name."""
    columns = {name: x[..., None] for name, x in arrays.items() if x is not None and AXES.get(name) == 1}
    return ARRAYS.record(problem, {**arrays, **columns})


def by_query(kernel, problem, inputs, order, *records, moving=(), adds=False, matrices=None):
    """Call a kernel for all queries; returns sums for the gradients of arrays in the score, if it adds to them.
    order, moving, adds: see `edge_score.score_of`; matrices: how many it computes, if not all."""
    graph, dropout = inputs.graph, inputs.dropout or NO_DROPOUT
    drops = Drops(int(dropout is not NO_DROPOUT), dropout.scale, *map(np.uint64, dropout._numbers))
    score, sums, held = score_of(problem, inputs, graph.queries, order, moving, adds)
    lists = EdgeLists(graph.indptr, graph.indices)
    options = Record(Options(inputs.scale, int(problem.softmax), drops, lists, score), held=held)
    start(kernel, problem, len(sums) if sums.size else graph.queries, order, matrices, options, *records)
    return sums.sum(axis=0)


def start(kernel, problem, blocks, order, matrices, *records):
    """Call a kernel for all rows of lists."""
    width = max(problem.head_dim, problem.head_dim_v, WORDS)
    scratch, nbytes = memory_of(EdgeScratch, [(width, problem.sum_dtype)] * len(EdgeScratch._fields))
    cost = (2 + 2 * (order > 1)) * (problem.head_dim + problem.head_dim_v) + EXPONENTIAL
    work = (matrices or math.prod(problem.matrices)) * (problem.edges + blocks) * cost
    launch(kernel.given(scratch, *records), blocks, work, nbytes)


# ------------------------------------------------------------------------------------------------------------- passes
def forward(problem, inputs, out=None):
    """o, and lse or None."""
    exact = out is not None and out.dtype == problem.sum_dtype and out.flags.c_contiguous
    o = out if exact else np.empty(problem.out_shape, problem.sum_dtype)
    lse = np.empty(problem.lse_shape, problem.sum_dtype)
    arrays = record_of(problem, **inputs.arrays)
    by_query(forward_kernel, problem, inputs, 0, arrays, in_heads(problem, o, lse))
    if out is None:
        out = rounded(o, problem.result_dtype)
    elif not exact:
        out[...] = rounded(o, problem.dtype)
    return out, lse if problem.softmax else None


def tangent(problem, inputs, moving, o, lse, o2=None):
    """to and tlse, o and lse being known; o2: where what `laplacian` says is put, if it is wanted."""
    to, tlse = np.empty(problem.out_shape, problem.sum_dtype), np.zeros(problem.lse_shape, problem.sum_dtype)
    lse = tlse if lse is None else lse
    arrays, moved = record_of(problem, **inputs.arrays), record_of(problem, **moving.arrays)
    rows = in_heads(problem, o.astype(problem.sum_dtype, copy=False), lse, to, tlse)
    second = Record(None) if o2 is None else in_heads(problem, o2)
    by_query(tangent_kernel, problem, inputs, 2 + (o2 is not None), arrays, moved, rows, second, moving=moving.score)
    return rounded(to, problem.result_dtype), tlse if problem.softmax else None


def laplacian(problem, inputs, moving, o, lse):
    """to and tlse, and the second derivative of o plus 2 tlse to."""
    o2 = np.empty(problem.out_shape, problem.sum_dtype)
    return *tangent(problem, inputs, moving, o, lse, o2), o2


def backward(problem, inputs, do, o, lse, dlse):
    """The gradients of all arrays, by name."""
    D = delta(problem, ((do, o),), dlse)
    return _backward(problem, inputs, {"do": do}, None, lse, D, D)


def backward_tangent(problem, inputs, moving, do, o, lse, dlse, to, tlse, tdo, tdlse):
    """The tangents of the gradients of all arrays, by name."""
    D, tD = delta(problem, ((do, o),), dlse), delta(problem, ((do, to), (tdo, o)), tdlse)
    moved = {**moving.arrays, "do": tdo}
    return _backward(problem, inputs, {"do": do}, moved, lse, D, tD, tlse, moving.score)


def delta(problem, pairs, dlse):
    """D = rowsum(do o) - dlse, or its tangent; 0 without a softmax."""
    D = np.zeros(problem.lse_shape, problem.sum_dtype)
    for x, y in pairs if problem.softmax else ():
        if x is not None:
            D += rowsum(*(a.astype(problem.sum_dtype, copy=False) for a in (x, y)))
    return D if dlse is None else D - dlse


def _backward(problem, inputs, do, moved, lse, D, tD, tlse=None, moving=()):
    results = {name: np.zeros(x.shape, problem.sum_dtype) for name, x in inputs.arrays.items()}
    none, graph, order = np.zeros_like(D), inputs.graph, 1 + (moved is not None)
    rows = in_heads(problem, *(none if x is None else x for x in (lse, D, tlse, tD)))
    moved = Record(None) if moved is None else record_of(problem, **moved)
    arrays = record_of(problem, **inputs.arrays, **do), moved, record_of(problem, **results)
    lists, lent, reads = graph._by_key, Lent(), 0
    count, shape = math.prod(problem.matrices), (problem.edges, 2 * order)
    fit = max(AT_ONCE // (math.prod(shape) * problem.sum_dtype.itemsize), 1)
    memory = lent.new((min(fit, count), *shape), problem.sum_dtype)
    for first in range(0, count, fit):
        factors = memory[: count - first]
        some, matrices = Record(first, factors), len(factors)
        reads += by_query(backward_kernel, problem, inputs, order, *arrays, rows, some,
                          moving=moving, adds=True, matrices=matrices)  # fmt: skip
        of_keys = Record(EdgeLists(lists.starts, lists.others), lists.numbers)
        start(keys_kernel, problem, graph.keys, order, matrices, of_keys, *arrays, some)
    lent.give_back()
    found = {name: rounded(x, problem.dtype) for name, x in results.items()}
    return found | {"score": gradients_of(inputs.score, reads)}


def in_heads(problem, *arrays):
    """The Record of arrays with all batch axes, (batch, heads, rows) or (batch, heads, rows, features)."""
    axes = len(problem.batch)
    return Record(*[np.ascontiguousarray(x).reshape(*problem.matrices, *x.shape[axes:]) for x in arrays])


# ------------------------------------------------------------------------------------------------------------ kernels
@Kernel
def forward_kernel(first, end, stop, scratch, options, given: Arrays, o, lse):
    """The online softmax, edge by edge: Algorithm 1 of FlashAttention."""
    before, real, zeros, d = flush_subnormals(), lse.dtype.type, scratch.zeros, given.q.cols
    scale, starts = real(options.scale), options.lists.starts
    for i in range(first, end):
        if is_set(stop):
            break
        for batch in range(lse.shape[0]):
            for head in range(lse.shape[1]):
                O, m, l = o[batch, head, i], real(-np.inf), real(0)
                fill(O, 0)
                for number in range(starts[i], starts[i + 1]):
                    at = edge_at(options, batch, head, i, number)
                    k, v, bias, factor = keys_of(given, at, (scratch.k, scratch.v), 1, zeros)
                    S = scale * dot(row(given.q, at, i, zeros), k, d, zeros.dtype) + bias
                    S, _, _, _ = scored(options.score, scratch.score, at, S, real(0))
                    P = S
                    if options.softmax:
                        if m < S:
                            alpha, m = exp(m - S), S
                            l *= alpha
                            for c in range(O.size):
                                O[c] *= alpha
                        P = exp(S - m) if -np.inf != S else real(0)             # NaN stays NaN
                        l += P
                    factor *= kept(given, options.drops, at, zeros)
                    add_multiple(address_of(O), factor * P, v, O.size)
                if options.softmax:
                    inverse = 1 / l if l != 0 else real(0)
                    for c in range(O.size):
                        O[c] *= inverse
                lse[batch, head, i] = m + np.log(l) if l != 0 else -np.inf
    restore(before)


@Kernel
def tangent_kernel(first, end, stop, scratch, options, given: Arrays, moved: Arrays, rows: Rows, o2):
    """tlse = rowsum(P tS), tO = sum of tfactor P v + factor (P' tS v + P tv), less tlse O; and O2 + 2 tlse tO."""
    before, real, zeros, d = flush_subnormals(), rows.lse.dtype.type, scratch.zeros, given.q.cols
    scale, starts = real(options.scale), options.lists.starts
    fill(zeros, 0)
    for i in range(first, end):
        if is_set(stop):
            break
        for batch in range(rows.lse.shape[0]):
            for head in range(rows.lse.shape[1]):
                tO, total, total2 = rows.to[batch, head, i], real(0), real(0)
                fill(tO, 0)
                if o2 is not None:
                    O2 = o2[batch, head, i]
                    fill(O2, 0)
                for number in range(starts[i], starts[i + 1]):
                    at = edge_at(options, batch, head, i, number)
                    k, v, bias, factor = keys_of(given, at, (scratch.k, scratch.v), 1, zeros)
                    tk, tv, tbias, tfactor = keys_of(moved, at, (scratch.tk, scratch.tv), 0, zeros)
                    q, tq = row(given.q, at, i, zeros), row_or_zeros(moved.q, at, i, zeros)
                    Z, S = kept(given, options.drops, at, zeros), scale * dot(q, k, d, zeros.dtype) + bias
                    factor, tfactor = Z * factor, Z * tfactor
                    tS = scale * sum_of_products(tq, k, q, tk, d, zeros) + tbias
                    if o2 is None:
                        S, tS, _, _ = scored(options.score, scratch.score, at, S, tS)
                    else:
                        S2 = real(2) * scale * dot(tq, tk, d, zeros.dtype)
                        S, tS, S2 = scored_twice(options.score, scratch.score, at, S, tS, S2)
                    P, slope, bend = weight_of(S, rows.lse[batch, head, i], options.softmax, zeros)
                    total += slope * tS
                    add_multiple(address_of(tO), tfactor * P + factor * slope * tS, v, tO.size)
                    add_multiple(address_of(tO), factor * P, tv, tO.size)
                    if o2 is not None:
                        P2, of_v, of_tv = second(P, slope, bend, factor, tfactor, tS, S2)
                        total2 += P2
                        add_multiple(address_of(O2), of_v, v, tO.size)
                        add_multiple(address_of(O2), of_tv, tv, tO.size)
                if options.softmax:
                    rows.tlse[batch, head, i] = total
                    add_multiple(address_of(tO), -total, address_of(rows.o[batch, head, i]), tO.size)
                    if o2 is not None:
                        add_multiple(address_of(O2), -total2, address_of(rows.o[batch, head, i]), tO.size)
    restore(before)


@Kernel
def backward_kernel(
    first, end, stop, scratch, options, given: Arrays, moved: Arrays, sums: Arrays, rows: Statistics, matrix, factors
):  # fmt: skip
    """Add to the gradients of queries and edges, or to their tangents, and write the factors of those of keys."""
    before, real, zeros, d, e = flush_subnormals(), rows.lse.dtype.type, scratch.zeros, given.q.cols, given.v.cols
    scale, starts, size = real(options.scale), options.lists.starts, options.score.rows
    fill(zeros, 0)
    for i in range(first * size, min(end * size, starts.size - 1)):
        if is_set(stop):
            break
        for own in range(len(factors)):
            batch, head = divmod(matrix + own, given.q.offsets.shape[1])
            lse, D = rows.lse[batch, head, i], rows.D[batch, head, i]
            tlse, tD = rows.tlse[batch, head, i], rows.tD[batch, head, i]
            for number in range(starts[i], starts[i + 1]):
                at = edge_at(options, batch, head, i, number)
                q, do = row(given.q, at, i, zeros), row(given.do, at, i, zeros)
                k, v, bias, factor = keys_of(given, at, (scratch.k, scratch.v), 1, zeros)
                S, tS = scale * dot(q, k, d, zeros.dtype) + bias, real(0)
                if moved is not None:
                    tk, tv, tbias, tfactor = keys_of(moved, at, (scratch.tk, scratch.tv), 0, zeros)
                    tq, tdo = row_or_zeros(moved.q, at, i, zeros), row_or_zeros(moved.do, at, i, zeros)
                    tS = scale * sum_of_products(tq, k, q, tk, d, zeros) + tbias
                S, tS, F, tF = scored(options.score, scratch.score, at, S, tS)
                dP, Z, tdS = dot(do, v, e, zeros.dtype), kept(given, options.drops, at, zeros), real(0)
                P, slope, bend = weight_of(S, lse, options.softmax, zeros)
                factor, found = Z * factor, factors[own, number]
                weight, dS, dfactor = gradients(P, slope, factor, dP, D)
                if moved is not None:
                    found[2], found[3] = scale * (F * dS), weight
                    add_to(sums.q, at, i, found[2], tk, zeros)
                    add_ends(sums.k_edge, sums.v_edge, at, number, found[2:], tq, tdo, zeros)
                    tdP, moves = sum_of_products(tdo, v, do, tv, e, zeros), tS - tlse
                    weight, tdS, dfactor = tangents(P, slope, bend, factor, Z * tfactor, dP, tdP, D, tD, moves)
                add_reads(options.score, scratch.score, at, i, dS, tdS)
                dS = F * dS if moved is None else F * tdS + tF * dS
                found[0], found[1] = scale * dS, weight
                add_to(sums.q, at, i, found[0], k, zeros)
                add_ends(sums.k_edge, sums.v_edge, at, number, found, q, do, zeros)
                add_number(sums.bias, at, dS, zeros)
                add_number(sums.factor, at, Z * dfactor, zeros)
    restore(before)


@Kernel
def keys_kernel(
    first, end, stop, scratch, lists, numbers, given: Arrays, moved: Arrays, sums: Arrays, matrix, factors
):  # fmt: skip
    """Add to the gradients of keys and values, or to their tangents."""
    before, zeros = flush_subnormals(), scratch.zeros
    fill(zeros, 0)
    for j in range(first, end):
        if is_set(stop):
            break
        for own in range(len(factors)):
            batch, head = divmod(matrix + own, given.q.offsets.shape[1])
            for entry in range(lists.starts[j], lists.starts[j + 1]):
                at = Edge(batch, head, np.int64(lists.others[entry]), j, np.int64(numbers[entry]))
                found, q, do = factors[own, at.number], row(given.q, at, at.i, zeros), row(given.do, at, at.i, zeros)
                add_ends(sums.k, sums.v, at, j, found, q, do, zeros)
                if moved is not None:
                    tq, tdo = row_or_zeros(moved.q, at, at.i, zeros), row_or_zeros(moved.do, at, at.i, zeros)
                    add_ends(sums.k, sums.v, at, j, found[2:], tq, tdo, zeros)
    restore(before)

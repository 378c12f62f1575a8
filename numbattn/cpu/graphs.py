"""Attention over the edges of a graph on NumPy arrays: a thread takes a range of rows, and vectors run along head_dim.

A row is a query with its keys, or in the transposed lists a key with its queries: it adds to its own rows of results
alone, so that sums have one order. All arrays are read, and results added to, through the addresses of their rows, of
which kernels make no arrays, whose references would be counted. Heads that share a matrix share its sums.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..base.values import rounded, rowsum
from ..dropout import Dropout
from ..functions.compiled.exponentials import exp
from ..graphs import edge
from ..graphs.problem import AXES
from ..graphs.score import gradients_of
from .compile import Kernel
from .edge_score import WORDS, EdgeScore, add_reads, score_of, scored
from .launch import launch
from .operands import MATRIX, Operands
from .product import add_multiple, dot
from .record import Record
from .scratch import memory_of
from .subnormals import flush_subnormals, restore
from .tile import address_of, contiguous_view, fill, inline, is_set, philox4x32

NO_DROPOUT = Dropout(0, 0)
EXPONENTIAL = 32  # the cost of an edge beside its products, in multiplications

gradients, tangents = inline(edge.gradients), inline(edge.tangents)


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


class Numbers(NamedTuple):
    """The numbers of a call."""

    scale: float
    softmax: int
    drops: int  # whether there is dropout
    kept_scale: float
    threshold: Any  # uint64, as those after it
    offset: Any
    key_low: Any
    key_high: Any


class EdgeLists(NamedTuple):
    """Lists of edges, see `numbattn.graphs.graph.Lists`."""

    starts: Any
    others: Any
    numbers: Any  # without elements, where edges are in the order of their numbers
    by_key: int


class EdgeScratch(NamedTuple):
    """Memory of one thread: rows of keys and values with what edges add, of sums for the ends of edges, and zeros."""

    k: Any
    v: Any
    tk: Any
    tv: Any
    dx: Any  # dq or dk
    dv: Any
    zeros: Any
    score: Any  # see `edge_score.scored`


ARRAYS = Operands(**dict.fromkeys(Arrays._fields, MATRIX))


def record_of(problem, **arrays):
    """The Record of Arrays by name."""
    columns = {name: x[..., None] for name, x in arrays.items() if x is not None and AXES.get(name) == 1}
    return ARRAYS.record(problem, {**arrays, **columns})


def run(kernel, problem, lists, inputs, order, *records, moving=(), adds=False):
    """Call a kernel for all rows of lists; returns sums for the gradients of arrays in the score, if it adds to them.
    order, moving, adds: see `edge_score.score_of`."""
    scale, dropout = inputs.scale, inputs.dropout or NO_DROPOUT
    drops = int(dropout is not NO_DROPOUT), dropout.scale, *map(np.uint64, dropout._numbers)
    width = max(problem.head_dim, problem.head_dim_v)
    scratch, nbytes = memory_of(EdgeScratch, [(max(width, WORDS), problem.sum_dtype)] * len(EdgeScratch._fields))
    numbers = np.empty(0, np.int32) if lists.numbers is None else lists.numbers
    lists, rows = Record(lists.starts, lists.others, numbers, int(lists.numbers is not None)), len(lists.starts) - 1
    score, sums = score_of(problem, inputs, rows, order, moving, adds)
    cost = (2 + 2 * (order > 1)) * (problem.head_dim + problem.head_dim_v) + EXPONENTIAL
    work = math.prod(problem.matrices) * (problem.edges + rows) * cost
    given = scratch, Record(scale, int(problem.softmax), *drops), score, lists, *records
    launch(kernel.given(*given), len(sums) if sums.size else rows, work, nbytes)
    return sums


# ------------------------------------------------------------------------------------------------------------- passes
def forward(problem, inputs, out=None):
    """o, and lse or None."""
    exact = out is not None and out.dtype == problem.sum_dtype and out.flags.c_contiguous
    o = out if exact else np.empty(problem.out_shape, problem.sum_dtype)
    lse = np.empty(problem.lse_shape, problem.sum_dtype)
    arrays = record_of(problem, **inputs.arrays)
    run(forward_kernel, problem, inputs.graph._by_query, inputs, 0, arrays, *in_heads(problem, o, lse))
    if out is None:
        out = rounded(o, problem.dtype)
    elif not exact:
        out[...] = rounded(o, problem.dtype)
    return out, lse if problem.softmax else None


def tangent(problem, inputs, moving, o, lse):
    """to and tlse, o and lse being known."""
    to, tlse = np.empty(problem.out_shape, problem.sum_dtype), np.zeros(problem.lse_shape, problem.sum_dtype)
    lse = tlse if lse is None else lse
    arrays, moved = record_of(problem, **inputs.arrays), record_of(problem, **moving.arrays)
    rows = in_heads(problem, o.astype(problem.sum_dtype, copy=False), lse, to, tlse)
    run(tangent_kernel, problem, inputs.graph._by_query, inputs, 2, arrays, moved, *rows, moving=moving.score)
    return rounded(to, problem.dtype), tlse if problem.softmax else None


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
    lse = np.zeros_like(D) if lse is None else lse
    rows = in_heads(problem, lse, D, np.zeros_like(D) if tlse is None else tlse, tD)
    moved = Record(None) if moved is None else record_of(problem, **moved)
    arrays = record_of(problem, **inputs.arrays, **do)
    found = {}
    for lists, names in ((inputs.graph._by_query, {"q", *AXES}), (inputs.graph._by_key, {"k", "v"})):
        sums = record_of(problem, **{name: x for name, x in results.items() if name in names})
        order, adds = 1 + (moved.arguments != (None,)), "q" in names
        records = arrays, moved, sums, *rows
        reads = run(backward_kernel, problem, lists, inputs, order, *records, moving=moving, adds=adds)
        if adds:
            found["score"] = gradients_of(inputs.score, reads.sum(axis=0))
    return found | {name: rounded(x, problem.dtype) for name, x in results.items()}


def in_heads(problem, *arrays):
    """Records of arrays with all batch axes, (batch, heads, rows) or (batch, heads, rows, features)."""
    axes = len(problem.batch)
    return [Record(np.ascontiguousarray(x).reshape(*problem.matrices, *x.shape[axes:])) for x in arrays]


# ------------------------------------------------------------------------------------------------------------ kernels
class Edge(NamedTuple):
    """Where an edge is, and its number: kernels' `at`."""

    batch: Any
    head: Any
    i: Any
    j: Any
    number: Any


@inline
def edge_at(lists, batch, head, line, entry):
    """An entry of a row's list."""
    if lists.by_key:
        return Edge(batch, head, np.int64(lists.others[entry]), np.int64(line), np.int64(lists.numbers[entry]))
    return Edge(batch, head, np.int64(line), np.int64(lists.others[entry]), np.int64(entry))


@inline
def row(x, at, number, like):
    """The address of a row of one of the Arrays."""
    return x.address + x.offsets[at.batch, at.head] + number * x.stride * like.itemsize


@inline
def row_or_zeros(x, at, number, zeros):
    return row(x, at, number, zeros) if x.rows else address_of(zeros)


@inline
def with_edge(address, of_edges, at, buffer):
    """The address of a row plus that of an edge, if edges have any."""
    if of_edges.rows == 0:
        return address
    cols = of_edges.cols
    x = contiguous_view(address, 1, cols, cols, buffer.dtype)
    y = contiguous_view(row(of_edges, at, at.number, buffer), 1, cols, cols, buffer.dtype)
    for c in range(cols):
        buffer[c] = x[0, c] + y[0, c]
    return address_of(buffer)


@inline
def number_of(x, at, otherwise, like):
    """A number of an edge."""
    if x.rows == 0:
        return like.dtype.type(otherwise)
    return contiguous_view(row(x, at, at.number, like), 1, 1, 1, like.dtype)[0, 0]


@inline
def add_to(sums, at, number, factor, x, like):
    """Add factor x to a row of results, if they are wanted."""
    if sums.rows:
        add_multiple(row(sums, at, number, like), factor, x, sums.cols)


@inline
def add_number(sums, at, x, like):
    if sums.rows:
        contiguous_view(row(sums, at, at.number, like), 1, 1, 1, like.dtype)[0, 0] += x


@inline
def add_products(sums, lists, at, dS, weight, ends, scratch):
    """dk += dS q and dv += weight do, or of a query dq += dS k, and what its edges add to k and v. ends: q, k, do."""
    q, k, do = ends
    if lists.by_key:
        add_multiple(address_of(scratch.dx), dS, q, sums.k.cols)
        add_multiple(address_of(scratch.dv), weight, do, sums.v.cols)
    else:
        add_multiple(address_of(scratch.dx), dS, k, sums.q.cols)
        add_to(sums.k_edge, at, at.number, dS, q, scratch.zeros)
        add_to(sums.v_edge, at, at.number, weight, do, scratch.zeros)


@inline
def kept(numbers, given, at, like):
    """What dropout multiplies P of an edge by, see `numbattn.dropout_mask`: the element (0, number) of a matrix."""
    real, number = like.dtype.type, at.number
    if not numbers.drops:
        return real(1)
    matrix, zero = np.uint64(at.batch * given.q.offsets.shape[1] + at.head), np.uint64(0)
    counter = np.uint64(number // 16 * 4 + number // 2 % 4), zero, matrix, numbers.offset
    left, right, _, _ = philox4x32(*counter, numbers.key_low, numbers.key_high)
    drawn = (right if number // 8 % 2 else left) >> np.uint64(number % 2 * 16) & np.uint64(0xFFFF)
    return real(numbers.kept_scale if drawn >= numbers.threshold else 0)


@inline
def keys_of(arrays, at, buffers, factor, like):
    """Of an edge k + k_edge, v + v_edge, bias and factor, or the tangents of these; factor: where none is given."""
    k = with_edge(row_or_zeros(arrays.k, at, at.j, like), arrays.k_edge, at, buffers[0])
    v = with_edge(row_or_zeros(arrays.v, at, at.j, like), arrays.v_edge, at, buffers[1])
    return k, v, number_of(arrays.bias, at, 0, like), number_of(arrays.factor, at, factor, like)


@inline
def sum_of_products(x, y, z, w, cols, like):
    """x y + z w"""
    return dot(x, y, cols, like.dtype) + dot(z, w, cols, like.dtype)


@inline
def weight_of(S, lse, softmax, like):
    """P of an edge, and its first and second derivative by S; 0 where no edge of a query has any weight."""
    zero = like.dtype.type(0)
    if softmax:
        P = exp(S - lse) if lse != -np.inf else zero
        return P, P, P
    return S, like.dtype.type(1), zero


@Kernel
def forward_kernel(first, end, stop, scratch, numbers: Numbers, score: EdgeScore, lists: EdgeLists, given: Arrays, o,
                   lse):  # fmt: skip
    """The online softmax, edge by edge: Algorithm 1 of FlashAttention."""
    before, real, zeros, d = flush_subnormals(), lse.dtype.type, scratch.zeros, given.q.cols
    scale = real(numbers.scale)
    for i in range(first, end):
        if is_set(stop):
            break
        for batch in range(lse.shape[0]):
            for head in range(lse.shape[1]):
                O, m, l = o[batch, head, i], real(-np.inf), real(0)
                fill(O, 0)
                for entry in range(lists.starts[i], lists.starts[i + 1]):
                    at = edge_at(lists, batch, head, i, entry)
                    k, v, bias, factor = keys_of(given, at, (scratch.k, scratch.v), 1, zeros)
                    S = scale * dot(row(given.q, at, i, zeros), k, d, zeros.dtype) + bias
                    S, _, _, _ = scored(score, scratch.score, at, S, real(0))
                    P = S
                    if numbers.softmax:
                        if m < S:
                            alpha, m = exp(m - S), S
                            l *= alpha
                            for c in range(O.size):
                                O[c] *= alpha
                        P = exp(S - m) if -np.inf != S else real(0)             # NaN stays NaN
                        l += P
                    factor *= kept(numbers, given, at, zeros)
                    add_multiple(address_of(O), factor * P, v, O.size)
                if numbers.softmax:
                    inverse = 1 / l if l != 0 else real(0)
                    for c in range(O.size):
                        O[c] *= inverse
                lse[batch, head, i] = m + np.log(l) if l != 0 else -np.inf
    restore(before)


@Kernel
def tangent_kernel(
    first, end, stop, scratch, numbers: Numbers, score: EdgeScore, lists: EdgeLists, given: Arrays, moved: Arrays,
    o, lse, to, tlse,
):  # fmt: skip
    """tlse = rowsum(P tS), tO = sum of tfactor P v + factor (P' tS v + P tv), less tlse O."""
    before, real, zeros, d = flush_subnormals(), lse.dtype.type, scratch.zeros, given.q.cols
    scale = real(numbers.scale)
    fill(zeros, 0)
    for i in range(first, end):
        if is_set(stop):
            break
        for batch in range(lse.shape[0]):
            for head in range(lse.shape[1]):
                tO, total = to[batch, head, i], real(0)
                fill(tO, 0)
                for entry in range(lists.starts[i], lists.starts[i + 1]):
                    at = edge_at(lists, batch, head, i, entry)
                    k, v, bias, factor = keys_of(given, at, (scratch.k, scratch.v), 1, zeros)
                    tk, tv, tbias, tfactor = keys_of(moved, at, (scratch.tk, scratch.tv), 0, zeros)
                    q, tq = row(given.q, at, i, zeros), row_or_zeros(moved.q, at, i, zeros)
                    Z, S = kept(numbers, given, at, zeros), scale * dot(q, k, d, zeros.dtype) + bias
                    factor, tfactor = Z * factor, Z * tfactor
                    tS = scale * sum_of_products(tq, k, q, tk, d, zeros) + tbias
                    S, tS, _, _ = scored(score, scratch.score, at, S, tS)
                    P, slope, _ = weight_of(S, lse[batch, head, i], numbers.softmax, zeros)
                    total += slope * tS
                    add_multiple(address_of(tO), tfactor * P + factor * slope * tS, v, tO.size)
                    add_multiple(address_of(tO), factor * P, tv, tO.size)
                if numbers.softmax:
                    tlse[batch, head, i] = total
                    add_multiple(address_of(tO), -total, address_of(o[batch, head, i]), tO.size)
    restore(before)


@Kernel
def backward_kernel(
    first, end, stop, scratch, numbers: Numbers, score: EdgeScore, lists: EdgeLists, given: Arrays, moved: Arrays,
    sums: Arrays, lse, D, tlse, tD,
):  # fmt: skip
    """Add to the gradients that are wanted, those of queries and edges or those of keys, or to their tangents."""
    before, real, zeros, d, e = flush_subnormals(), lse.dtype.type, scratch.zeros, given.q.cols, given.v.cols
    scale = real(numbers.scale)
    fill(zeros, 0)
    for line in range(first * score.rows, min(end * score.rows, lists.starts.size - 1)):
        if is_set(stop):
            break
        for batch in range(lse.shape[0]):
            for head in range(lse.shape[1]):
                fill(scratch.dx, 0)
                fill(scratch.dv, 0)
                for entry in range(lists.starts[line], lists.starts[line + 1]):
                    at = edge_at(lists, batch, head, line, entry)
                    q, do = row(given.q, at, at.i, zeros), row(given.do, at, at.i, zeros)
                    k, v, bias, factor = keys_of(given, at, (scratch.k, scratch.v), 1, zeros)
                    S, tS = scale * dot(q, k, d, zeros.dtype) + bias, real(0)
                    if moved is not None:
                        tk, tv, tbias, tfactor = keys_of(moved, at, (scratch.tk, scratch.tv), 0, zeros)
                        tq, tdo = row_or_zeros(moved.q, at, at.i, zeros), row_or_zeros(moved.do, at, at.i, zeros)
                        tS = scale * sum_of_products(tq, k, q, tk, d, zeros) + tbias
                    S, tS, F, tF = scored(score, scratch.score, at, S, tS)
                    dP, Z = dot(do, v, e, zeros.dtype), kept(numbers, given, at, zeros)
                    delta, tdS = D[batch, head, at.i], real(0)
                    P, slope, bend = weight_of(S, lse[batch, head, at.i], numbers.softmax, zeros)
                    factor *= Z
                    weight, dS, dfactor = gradients(P, slope, factor, dP, delta)
                    if moved is not None:
                        add_products(sums, lists, at, scale * (F * dS), weight, (tq, tk, tdo), scratch)
                        tdP, moves = sum_of_products(tdo, v, do, tv, e, zeros), tS - tlse[batch, head, at.i]
                        weight, tdS, dfactor = tangents(
                            P, slope, bend, factor, Z * tfactor, dP, tdP, delta, tD[batch, head, at.i], moves
                        )
                    add_reads(score, scratch.score, at, line, dS, tdS)
                    dS = F * dS if moved is None else F * tdS + tF * dS
                    add_products(sums, lists, at, scale * dS, weight, (q, k, do), scratch)
                    add_number(sums.bias, at, dS, zeros)
                    add_number(sums.factor, at, Z * dfactor, zeros)
                at = Edge(batch, head, 0, 0, 0)
                if lists.by_key:
                    add_to(sums.k, at, line, real(1), address_of(scratch.dx), zeros)
                    add_to(sums.v, at, line, real(1), address_of(scratch.dv), zeros)
                else:
                    add_to(sums.q, at, line, real(1), address_of(scratch.dx), zeros)
    restore(before)

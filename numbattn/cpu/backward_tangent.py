"""The tangent of the gradients on the CPU: Algorithm 4 along several directions, which share P and dP of each tile.

The equations are those of `attention_backward_jvp`; blocks, and the order of all sums, are those of `backward`.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..base.gradients import sum_to
from ..base.values import put
from ..call.tangents import parts_of
from .arguments import directions, memory_of, readable
from .backward import (
    TILE_M,
    TILE_N,
    BackwardGiven,
    BackwardWork,
    gradients_of_score,
    load_queries,
    operands_of,
    plan_of,
    queries_of,
    recompute,
)
from .compile import Kernel
from .forward import EXPONENTIAL
from .launch import launch
from .product import product, product_tn, row_dots
from .record import Later, Record, data_address
from .score import kept_in, nonlinear_in, options_of
from .score_gradients import Sums, merged, shapes_of
from .score_tangents import differentiate_score, numbered_tile, pull_back_tangents, tangents_of_steps
from .softmax import multiply
from .subnormals import flush_subnormals, restore
from .tangent import AT_ONCE, differentiate_products
from .tile import EMPTY, clear, draw, inline, is_set, matrix, tile, tile_state
from .transposition import transpose


def backward_tangent(problem, inputs, given, tangents):
    """The tangents of dq, dk, dv and of gradients of parts of the score, by name, with an axis of directions in front;
    given: arrays by name."""
    if tangents.count <= AT_ONCE:
        return along(problem, inputs, given, tangents)
    found = []
    for first in range(0, tangents.count, AT_ONCE):
        end = first + AT_ONCE
        some = {name: x if x is None or name[0] != "t" else x[first:end] for name, x in given.items()}
        found.append(along(problem, inputs, some, tangents.some(first, end)))
    return {name: np.concatenate([x[name] for x in found]) for name in found[0]}


def along(problem, inputs, given, tangents):
    """The results of `backward_tangent` for at most AT_ONCE directions."""
    count = tangents.count
    tparts = [parts_of(inputs, tangents, number, backward=True) for number in range(count)]
    of_tangents = operands_of_tangents(problem, count, given), tangents_of_steps(problem, inputs, tparts, order=2)
    given = operands_of(problem, inputs, given), *options_of(problem, inputs, order=2)
    scratch, memory = scratch_of(problem, count, nonlinear_in(inputs.score), kept_in(inputs.score))
    plan = plan_of(problem, inputs.mask, shapes_of(inputs.score), (count,))
    depth = problem.head_dim + problem.head_dim_v
    work = plan.pairs * (depth + EXPONENTIAL + count * (6 * problem.head_dim + 4 * problem.head_dim_v))
    tdq, tdk, tdv = [plan.new(shape, problem.sum_dtype) for shape in plan.shapes]
    sums = [[np.zeros(*layout) for layout in plan.sums] for _ in range(count)]
    addresses = np.array([[*map(data_address, own)] for own in sums], np.int64)
    record = plan.work.filled(addresses, tdq, tdk, tdv, held=sums)
    launch(backward_tangent_kernel.given(scratch, *given, *of_tangents, record), plan.blocks, work, memory)
    tdq = tdq[:, 0] if tdq.shape[1] == 1 else tdq.sum(axis=1)
    of = (tdq, inputs.q), (tdk, inputs.k), (tdv, inputs.v)
    grads = [joined([sum_to(x, like.shape) for x in each], like.shape, problem.result_dtype) for each, like in of]
    tgrads = dict(zip(("tdq", "tdk", "tdv"), grads))
    summed = [np.array([merged(own[number], firsts) for own in sums]) for number, firsts in enumerate(plan.firsts)]
    return tgrads | gradients_of_score(inputs.score, summed, (count,)) if summed else tgrads


@np.errstate(under="ignore")
def joined(found, shape, dtype):
    """Arrays of this shape as one with an axis in front."""
    out = np.empty((len(found), *shape), dtype)
    for number, x in enumerate(found):
        put(out[number, ...], x)
    return out


def operands_of_tangents(problem, count, given):
    """The Record of tangents: of q, k, v, o and do, of lse and dlse."""
    arrays = [given[name] for name in ("tq", "tk", "tv", "to", "tdo")]
    arrays = [x if x is None else readable(x, problem.sum_dtype) for x in arrays]
    statistics = [np.ascontiguousarray(x) for x in (given["tlse"], given["tdlse"]) if x is not None]
    layouts = [x if x is None else (x.shape, x.strides) for x in arrays]
    found = [x for x in arrays if x is not None]
    return _operands(problem, count, len(statistics), *layouts).filled(*found, *statistics)


@lru_cache(maxsize=64)
def _operands(problem, count, statistics, *layouts):
    """The Record of calls on arrays of these shapes and strides, or None, with or without tdlse."""
    rows = Later((count, *problem.matrices, problem.seqlen_q), problem.sum_dtype)
    tdlse = rows if statistics == 2 else np.zeros((0, 0, 0, 0), problem.sum_dtype)
    matrices = [directions(problem, count, layout) for layout in layouts]
    return Record(*matrices, rows, tdlse, count, problem.matrices[0])


class BackwardTangentScratch(NamedTuple):
    """Memory of one thread, for one tile at a time. Names are those of the tiles in the kernels."""

    S: Any  # then P
    dP: Any  # then dP - D
    dS: Any
    tS: Any  # then tP
    tdP: Any  # then tdS
    slopes: Any  # derivatives of scores, then S and tS before functions whose arrays have gradients
    bends: Any  # tangents of their slopes
    QT: Any
    dOT: Any
    tQT: Any  # for all directions
    tdOT: Any
    vectors: Any  # one number a query: lse, low, D
    tD: Any  # likewise, for all directions and one more
    Z: Any  # uint8
    words: Any  # uint64


@lru_cache(maxsize=64)
def scratch_of(problem, count, nonlinear, kept):
    """The Record of a BackwardTangentScratch for `count` directions, and a function that allocates its memory.
    nonlinear, kept: how many parts of the score are not linear, and how many need S before them."""
    rows, keys = min(TILE_M, problem.seqlen_q), min(TILE_N, problem.seqlen_k)
    elements, dropped = rows * keys, rows * keys if problem.dropout else 0
    of_q, of_do = rows * problem.head_dim, rows * problem.head_dim_v
    sizes = (*[elements] * 5, 2 * elements * (nonlinear + kept), elements * nonlinear, of_q, of_do, count * of_q,
             count * of_do, 3 * rows, (count + 1) * rows)  # fmt: skip
    dtypes = *[problem.sum_dtype] * len(sizes), np.dtype(np.uint8), np.dtype(np.uint64)
    return memory_of(BackwardTangentScratch, (*sizes, dropped, 2 * (rows + 16) if dropped else 0), dtypes)


# ------------------------------------------------------------------------------------------------------------- kernel
class Directions(NamedTuple):
    """The inputs of a call along its directions, in the order of its Records. Matrices for direction t and element b of
    the batch have number t * batches + b; those of zero have no rows."""

    q: Any
    k: Any
    v: Any
    o: Any
    do: Any
    lse: Any
    dlse: Any  # or nothing
    count: Any
    batches: Any
    steps: Any


@Kernel
def backward_tangent_kernel(
    first_block, end_block, stop, scratch, given: BackwardGiven, tangents: Directions, work: BackwardWork
):
    """Blocks [first_block, end_block). work: its gradients have an axis of directions in front."""
    before, heads_k, pairs = flush_subnormals(), work.dk.shape[2], work.pairs
    for block in range(first_block, end_block):
        chunk, share = block % work.chunks, block // work.chunks
        for number in range(work.shares[share], work.shares[share + 1]):
            batch, head_k = pairs[number] // heads_k, pairs[number] % heads_k
            add_gradients(batch, head_k, chunk, stop, scratch, given, tangents, work)
    restore(before)


@inline
def add_gradients(batch, head_k, chunk, stop, scratch, given, tangents, work):
    """Add the tangents of the gradients of every chunks-th tile of keys of a (batch, key head), as in `backward`."""
    tdq, tdk, tdv, starts, chunks = work.dq, work.dk, work.dv, work.starts, work.chunks
    count, _, _, heads, _, _ = tdq.shape
    group_size = heads // tdk.shape[2]
    if chunks == 1:
        for t in range(count):
            clear(tdk[t, batch, head_k])
            clear(tdv[t, batch, head_k])
    for head in range(head_k * group_size, (head_k + 1) * group_size):
        number = batch * heads + head
        if chunks == 1:
            for t in range(count):
                clear(tdq[t, 0, batch, head])
        for row in range(starts[number], starts[number + 1]):
            at = queries_of(scratch, given, work.tiles[row])
            part = (chunk - at.segment // TILE_N) % chunks
            n_block = (at.first - at.segment) // TILE_N
            n_first = at.segment + (n_block + (part - n_block) % chunks) * TILE_N
            if max(n_first, at.first) >= at.end:
                continue
            load_queries(at, given)
            load_tangents(at, given, tangents, scratch)
            for n_tile in range(n_first, at.end, chunks * TILE_N):
                if is_set(stop):
                    return
                n0, n_end = max(n_tile, at.first), min(n_tile + TILE_N, at.end)
                state = tile_state(given.mask, at.intervals, batch, head, at.m0, at.m_end, n0, n_end)
                if state != EMPTY:
                    add_tile(n0, n_end, state, head_k, chunk, part, at, scratch, given, tangents, work)


@inline
def load_tangents(at, given, tangents, scratch):
    """tQ and tdO, transposed, and tD of each direction."""
    head, dtype = at.head, given.lse.dtype
    dO = matrix(given.do, at.batch, head, dtype)[at.m0 : at.m_end]
    O = matrix(given.o, at.batch, head, dtype)[at.m0 : at.m_end]
    vectors = tile(scratch.tD, tangents.count + 1, at.D.size)
    more = vectors[tangents.count]
    for t in range(tangents.count):
        batch, tD = t * tangents.batches + at.batch, vectors[t]
        row_dots(tD, dO, matrix(tangents.o, batch, head, dtype)[at.m0 : at.m_end])      # tD = rowsum(dO tO + tdO O)
        if tangents.q.rows:
            tQ = matrix(tangents.q, batch, head, dtype)[at.m0 : at.m_end]
            transpose(numbered_tile(scratch.tQT, t, at.QT), tQ, dtype.type(given.scale), False)
        if tangents.do.rows:
            tdO = matrix(tangents.do, batch, head, dtype)[at.m0 : at.m_end]
            transpose(numbered_tile(scratch.tdOT, t, at.dOT), tdO, dtype.type(given.kept_scale), False)
            row_dots(more, tdO, O)
            for i in range(tD.size):
                tD[i] += more[i]
        if tangents.dlse.size:
            tdlse = tangents.dlse[t, at.batch, head, at.m0 : at.m_end]
            for i in range(tD.size):
                tD[i] -= tdlse[i]


@inline
def add_tile(n0, n_end, state, head_k, chunk, part, at, scratch, given, tangents, work):
    """Add the terms of the tile of keys [n0, n_end) along all directions."""
    batch, head, dtype, sums, tdv = at.batch, at.head, given.lse.dtype, work.sums, work.dv
    kept_scale, has_drops = dtype.type(given.kept_scale), given.drops.threshold > 0
    P, dP = tile(scratch.S, n_end - n0, at.m_end - at.m0), tile(scratch.dP, n_end - n0, at.m_end - at.m0)
    Z = tile(scratch.Z, n_end - n0, at.m_end - at.m0)
    K, V = matrix(given.k, batch, head, dtype)[n0:n_end], matrix(given.v, batch, head, dtype)[n0:n_end]
    recompute(P, state, K, scratch, given, at, n0)
    product(dP, V, at.dOT, dtype.type(1), False)                            # dP = Z (dO V^T), then dP - D
    if has_drops:
        draw(Z, scratch.words, given.drops, batch, head, at.m0, n0)
        multiply(dP, Z)
    subtract(dP, at.D)
    for t in range(tangents.count):
        dQ, dK = work.dq[t, part, batch, head, at.m0 : at.m_end], work.dk[t, batch, head_k, n0:n_end]
        own = Sums(sums.numbers, sums.addresses[t], sums.places)
        add_direction(t, P, dP, Z, K, V, n0, chunk, at, scratch, given, tangents, own, dQ, dK,
                      tdv[t, batch, head_k, n0:n_end])  # fmt: skip
    if tangents.do.rows:
        if has_drops:
            multiply(P, Z)
        for t in range(tangents.count):                                     # tdV = tdV + (Z P)^T tdO
            tdO = matrix(tangents.do, t * tangents.batches + batch, head, dtype)[at.m0 : at.m_end]
            product(tdv[t, batch, head_k, n0:n_end], P, tdO, kept_scale, True)


@inline
def add_direction(t, P, dP, Z, K, V, n0, chunk, at, scratch, given, tangents, sums, tdQ, tdK, tdV):
    """Add the terms of a tile of keys along a direction, except (Z P)^T tdO. dP: dP - D."""
    batch, head, dtype, n_end = t * tangents.batches + at.batch, at.head, P.dtype, n0 + P.shape[0]
    scale, kept_scale = dtype.type(given.scale), dtype.type(given.kept_scale)
    tQT, tdOT = numbered_tile(scratch.tQT, t, at.QT), numbered_tile(scratch.tdOT, t, at.dOT)
    tlse, tD = tangents.lse[t, at.batch, head, at.m0 : at.m_end], tile(scratch.tD, tangents.count, at.D.size)[t]
    dS, tS, tdP = numbered_tile(scratch.dS, 0, P), numbered_tile(scratch.tS, 0, P), numbered_tile(scratch.tdP, 0, P)
    Q = matrix(given.q, at.batch, head, dtype)[at.m0 : at.m_end]
    dO = matrix(given.do, at.batch, head, dtype)[at.m0 : at.m_end]
    tK = matrix(tangents.k, batch, head, dtype)[n0:n_end] if tangents.k.rows else K[:0]
    tV = matrix(tangents.v, batch, head, dtype)[n0:n_end] if tangents.v.rows else V[:0]
    differentiate_products(tS, K, tK, at.QT, tQT, tangents.q.rows > 0)      # tS = scale (tQ K^T + Q tK^T)
    differentiate_score(tS, tS[:0], given.steps, tangents.steps, t, scratch.slopes, scratch.bends, at.batch, head,
                        at.m0, n0, at.offset)  # fmt: skip
    differentiate_products(tdP, V, tV, at.dOT, tdOT, tangents.do.rows > 0)  # tdP = Z (dO tV^T + tdO V^T)
    if given.drops.threshold > 0:
        multiply(tdP, Z)
    differentiate(P, dP, tS, tdP, dS, tlse, tD)
    if given.drops.threshold > 0:
        multiply(tS, Z)
    product(tdV, tS, dO, kept_scale, True)                                  # tdV = tdV + (Z tP)^T dO
    pull_back_tangents(dS, tdP, given.steps, tangents.steps, t, scratch.slopes, scratch.bends, sums, at.batch, head,
                       chunk, at.m0, n0, at.offset)  # fmt: skip
    product(tdK, tdP, Q, scale, True)                                       # tdK = tdK + scale (tdS^T Q + dS^T tQ)
    if tangents.q.rows:
        product(tdK, dS, matrix(tangents.q, batch, head, dtype)[at.m0 : at.m_end], scale, True)
    product_tn(tdQ, tdP, K, scale, True)                                    # tdQ = tdQ + scale (tdS K + dS tK)
    if tK.shape[0]:
        product_tn(tdQ, dS, tK, scale, True)


@inline
def subtract(dP, D):
    for j in range(dP.shape[0]):
        for i in range(dP.shape[1]):
            dP[j, i] -= D[i]


@inline
def differentiate(P, dP, tS, tdP, dS, tlse, tD):
    """tP = P (tS - tlse) in place of tS, tdS = tP (dP - D) + P (tdP - tD) in place of tdP, and dS = P (dP - D), all 0
    where P is 0. dP: dP - D."""
    zero = P.dtype.type(0)
    for j in range(P.shape[0]):
        for i in range(P.shape[1]):
            seen = P[j, i] != zero
            tS[j, i] = P[j, i] * (tS[j, i] - tlse[i]) if seen else zero
            tdP[j, i] = tS[j, i] * dP[j, i] + P[j, i] * (tdP[j, i] - tD[i]) if seen else zero
            dS[j, i] = P[j, i] * dP[j, i] if seen else zero

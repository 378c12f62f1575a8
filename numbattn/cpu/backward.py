"""Attention backward on the CPU: Algorithm 4, P recomputed from lse."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..base.gradients import sum_to
from ..base.values import rounded
from ..call.passes import gradient_of_part
from ..functions.compiled.exponentials import exp
from .arguments import kept, matrices, readable, scratch_of, tiles_of
from .compile import Kernel
from .forward import EXPONENTIAL
from .launch import launch
from .product import product, product_tn, row_dots
from .record import Later, Record, data_address
from .score import kept_in, nonlinear_in, options_of, score
from .score_gradients import merged, pull_back, shape_of, shapes_of, shares_of, sums_for
from .subnormals import flush_subnormals, restore
from .tile import (
    EMPTY,
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
    tile,
    tile_state,
    visible_keys,
)
from .transposition import transpose

TILE_M, TILE_N = 128, 128
SUMMED = 2**25  # elements of sums that all blocks together may have
BLOCKS = 16  # at least, even for few heads: a constant, so that gradients do not depend on the number of threads


def backward(problem, inputs, given, tangents=None):
    """dq, dk, dv, and gradients of parts of the score, by name; given: arrays by name."""
    given = operands_of(problem, inputs, given), *options_of(problem, inputs, order=1, sums=True)
    sizes = min(TILE_M, problem.seqlen_q), min(TILE_N, problem.seqlen_k)
    slopes = nonlinear_in(inputs.score) + kept_in(inputs.score)
    scratch, memory = scratch_of(problem, *sizes, backward=True, slopes=slopes)
    plan = plan_of(problem, inputs.mask, shapes_of(inputs.score))
    work = plan.pairs * (3 * problem.head_dim + 2 * problem.head_dim_v + EXPONENTIAL)
    dq, dk, dv = [plan.new(shape, problem.sum_dtype) for shape in plan.shapes]
    sums = [np.zeros(*layout) for layout in plan.sums]
    record = plan.work.filled(np.array([*map(data_address, sums)], np.int64), dq, dk, dv, held=sums)
    launch(backward_kernel.given(scratch, *given, record), plan.blocks, work, memory)
    dq = dq[0] if len(dq) == 1 else dq.sum(axis=0)
    of = ("dq", dq, inputs.q), ("dk", dk, inputs.k), ("dv", dv, inputs.v)
    grads = {name: rounded(sum_to(dx, x.shape), problem.result_dtype) for name, dx, x in of}
    return grads | gradients_of_score(inputs.score, map(merged, sums, plan.firsts)) if sums else grads


def operands_of(problem, inputs, given):
    """The Record of q, k, v, do, o, lse, its low part and dlse."""
    arrays = [readable(x, problem.sum_dtype) for x in (inputs.q, inputs.k, inputs.v, given["do"], given["o"])]
    rows = given["lse"], given["lse_low"], given["dlse"]
    given = [x is not None for x in rows]
    rows = [np.ascontiguousarray(x) for x in rows if x is not None]
    return _operands(problem, *given, *[(x.shape, x.strides) for x in arrays]).filled(*arrays, *rows)


@lru_cache(maxsize=64)
def _operands(problem, lse, low, dlse, *layouts):
    """The Record of calls on arrays of these shapes and strides, with which of lse, its low part and dlse."""
    row = Later((*problem.matrices, problem.seqlen_q), problem.sum_dtype)
    rows = [row if is_given else np.zeros((0, 0, 0), row.dtype) for is_given in (lse, low, dlse)]
    return Record(*[matrices(problem, *layout, problem.sum_dtype.itemsize) for layout in layouts], *rows)


class BackwardPlan(NamedTuple):
    """What calls with a problem, a mask and the shapes of a score's arrays have in common."""

    pairs: int  # of a query and a key
    blocks: int
    work: Record  # the BackwardWork, but for sums and gradients, which are filled in later
    shapes: list  # of dq, in parts, dk and dv
    new: Any  # the function that allocates these
    sums: list  # shape and dtype of the sums for each wanted gradient
    firsts: tuple  # as in Shares


@kept
def plan_of(problem, mask, shapes, lead=()):
    """The BackwardPlan. shapes: of the arrays of steps, as from shapes_of; lead: an axis in front of all results."""
    tiles, shares, (batches, heads) = tiles_of(problem, mask, TILE_M), shares_of(problem, shapes), problem.matrices
    n_blocks, longest = -(-problem.seqlen_k // TILE_N), -(-tiles.longest // TILE_N)
    chunks = max(1, min(n_blocks, BLOCKS // max(len(shares.starts) - 1, 1)))
    largest = max([shape[-1] for shape in shapes if shape is not None and shape[-2] == 1], default=1)
    chunks = max(1, min(chunks, SUMMED // max(largest, 1)))  # each chunk has its own sums for a function's arrays
    if tiles.by_head:
        chunks = 1  # the heads of a group divide their keys differently: no two blocks may add to one dK
    parts = max(1, min(chunks, longest))
    sizes = [((*lead, parts), (heads, problem.seqlen_q, problem.head_dim)),
             (lead, (problem.heads_k, problem.seqlen_k, problem.head_dim)),
             (lead, (problem.heads_k, problem.seqlen_k, problem.head_dim_v))]  # fmt: skip
    grads = [Later((*first, batches, *size), problem.sum_dtype) for first, size in sizes]
    sums, layouts = sums_for(problem, shapes, shares, chunks, lead)
    record = Record(tiles.table, tiles.starts, shares.order, shares.starts, chunks, sums, *grads)
    new = np.empty if chunks == 1 else np.zeros  # blocks with a dK of their own clear it
    shapes = [(*first, *problem.batch[:-1], *size) for first, size in sizes]
    return BackwardPlan(
        tiles.pairs, (len(shares.starts) - 1) * chunks, record, shapes, new, layouts, shares.firsts
    )  # fmt: skip


def gradients_of_score(parts, summed, lead=()):
    """The gradients of parts of the score that have a step, by name; summed: by kernels; lead: axes in front."""
    found, summed = {}, iter(summed)
    for number, part in enumerate(parts):
        if part._wants_gradient and part._has_step:
            x = next(summed)
            x = x if x.size else np.zeros((*lead, *shape_of(part)), x.dtype)  # without any scores
            found[gradient_of_part(number)] = x
    return found


class BackwardGiven(NamedTuple):
    """The inputs of a call, in the order of its Records."""

    q: Any
    k: Any
    v: Any
    do: Any
    o: Any
    lse: Any
    low: Any  # or nothing
    dlse: Any  # or nothing
    mask: Any
    steps: Any
    drops: Any
    scale: Any
    kept_scale: Any


class BackwardWork(NamedTuple):
    """Blocks, each every chunks-th tile of keys of some (batch, key head) pairs, and what they add to."""

    tiles: Any  # WorkTiles.table
    starts: Any  # WorkTiles.starts
    pairs: Any  # Shares.order
    shares: Any  # Shares.starts
    chunks: Any
    sums: Any
    dq: Any
    dk: Any
    dv: Any


class BackwardQueries(NamedTuple):
    """A tile of queries [m0, m_end) of a head, which sees the keys [first, end)."""

    batch: Any
    head: Any
    m0: Any
    m_end: Any
    segment: Any  # its first key
    offset: Any  # of the segment
    first: Any
    end: Any
    band: Any
    intervals: Any
    QT: Any
    dOT: Any
    lse: Any
    low: Any
    D: Any


@Kernel
def backward_kernel(first_block, end_block, stop, scratch, given: BackwardGiven, work: BackwardWork):
    """Blocks [first_block, end_block)."""
    before, heads_k, pairs = flush_subnormals(), work.dk.shape[1], work.pairs
    for block in range(first_block, end_block):
        chunk, share = block % work.chunks, block // work.chunks
        for number in range(work.shares[share], work.shares[share + 1]):
            if number + 1 < len(pairs):
                prefetch_inputs(given, pairs[number + 1], heads_k)
            batch, head_k = pairs[number] // heads_k, pairs[number] % heads_k
            add_gradients(batch, head_k, chunk, stop, scratch, given, work)
    restore(before)


@inline
def prefetch_inputs(given, pair, heads_k):
    """Prefetch the inputs of a pair's first head, if they are few."""
    heads = given.lse.shape[1]
    batch, head, dtype = pair // heads_k, pair % heads_k * (heads // heads_k), given.lse.dtype
    if given.q.rows <= TILE_M and given.k.rows <= TILE_N:
        for x in (given.q, given.k, given.v, given.do, given.o):
            prefetch(matrix(x, batch, head, dtype))


@inline
def add_gradients(batch, head_k, chunk, stop, scratch, given, work):
    """Add the gradients of every chunks-th tile of keys of a (batch, key head).

    Each part of a segment's tiles of keys has its own dq. Unlike in the paper queries are the outer loop: Q and dO are
    transposed once for all keys.
    """
    dq, starts, chunks, dtype = work.dq, work.starts, work.chunks, given.lse.dtype
    heads, group_size = dq.shape[2], dq.shape[2] // work.dk.shape[1]
    scale, kept_scale = dtype.type(given.scale), dtype.type(given.kept_scale)
    dK, dV = work.dk[batch, head_k], work.dv[batch, head_k]
    if chunks == 1:
        clear(dK)
        clear(dV)
    for head in range(head_k * group_size, (head_k + 1) * group_size):
        K, number = matrix(given.k, batch, head, dtype), batch * heads + head
        if chunks == 1:
            clear(dq[0, batch, head])
        for row in range(starts[number], starts[number + 1]):               # Alg. 4 line 9
            at = queries_of(scratch, given, work.tiles[row])
            part = (chunk - at.segment // TILE_N) % chunks                  # a segment has tiles of keys 0, 1, ...
            n_block = (at.first - at.segment) // TILE_N
            n_first = at.segment + (n_block + (part - n_block) % chunks) * TILE_N
            if max(n_first, at.first) >= at.end:
                continue
            load_queries(at, given)                                         # line 10
            Q = matrix(given.q, batch, head, dtype)[at.m0 : at.m_end]
            dO = matrix(given.do, batch, head, dtype)[at.m0 : at.m_end]
            dQ = dq[part, batch, head, at.m0 : at.m_end]
            for n_tile in range(n_first, at.end, chunks * TILE_N):          # line 6
                if is_set(stop):
                    return
                n0, n_end = max(n_tile, at.first), min(n_tile + TILE_N, at.end)
                S, dP = differentiate_tile(scratch, given, at, n0, n_end)
                if S.size == 0:
                    continue
                product(dV[n0:n_end], S, dO, kept_scale, True)              # line 16: dV += (P Z)^T dO
                pull_back(dP, given.steps, scratch.slopes, work.sums, batch, head, chunk, at.m0, n0, at.offset)
                product(dK[n0:n_end], dP, Q, scale, True)                   # line 22: dK += scale dS^T Q
                product_tn(dQ, dP, K[n0:n_end], scale, True)                # line 21: dQ += scale dS K


@inline
def queries_of(scratch, given, row):
    """The BackwardQueries in a row of WorkTiles.table, not loaded yet."""
    batch, head, m0, m_end, segment, segment_end, offset = row
    band, intervals = band_of(given.mask, batch, head), intervals_of(given.mask, batch, head)
    m_end = max(min(m_end, band[2]), m0)
    first, end = visible_keys(band, intervals, m0, m_end, segment, segment_end)
    QT, dOT = tile(scratch.QT, given.q.cols, m_end - m0), tile(scratch.dOT, given.do.cols, m_end - m0)
    vectors = tile(scratch.vectors, 3, m_end - m0)
    lse, low, D = vectors[0], vectors[1], vectors[2]
    return BackwardQueries(batch, head, m0, m_end, segment, offset, first, end, band, intervals, QT, dOT, lse, low, D)


@inline
def load_queries(at, given):
    """Q and dO, transposed, lse, low and D. A query that sees nothing has lse = inf here: P = 0."""
    dtype = given.lse.dtype
    dO = matrix(given.do, at.batch, at.head, dtype)[at.m0 : at.m_end]
    O = matrix(given.o, at.batch, at.head, dtype)[at.m0 : at.m_end]
    transpose(at.QT, matrix(given.q, at.batch, at.head, dtype)[at.m0 : at.m_end], dtype.type(given.scale), False)
    transpose(at.dOT, dO, dtype.type(given.kept_scale), False)
    row_dots(at.D, dO, O)                                                   # line 19: delta = rowsum(dO * O)
    if given.dlse.size:
        dlse = given.dlse[at.batch, at.head, at.m0 : at.m_end]
        for i in range(at.D.size):
            at.D[i] -= dlse[i]                                              # the gradient of lse
    lse = given.lse[at.batch, at.head, at.m0 : at.m_end]
    for i in range(at.D.size):
        at.D[i] = at.D[i] if lse[i] != -np.inf else dtype.type(0)
        at.lse[i] = lse[i] if lse[i] != -np.inf else dtype.type(np.inf)
    fill(at.low, 0)
    if given.low.size:
        low = given.low[at.batch, at.head, at.m0 : at.m_end]
        for i in range(at.D.size):
            at.low[i] = low[i]


@inline
def differentiate_tile(scratch, given, at, n0, n_end):
    """P Z and dS after the score, for the tile of keys [n0, n_end); without keys if nobody sees any of them."""
    batch, head, dtype, one = at.batch, at.head, given.lse.dtype, given.lse.dtype.type(1)
    state = tile_state(given.mask, at.intervals, batch, head, at.m0, at.m_end, n0, n_end)
    n_end = n0 if state == EMPTY else n_end
    S, dP = tile(scratch.S, n_end - n0, at.m_end - at.m0), tile(scratch.dP, n_end - n0, at.m_end - at.m0)
    if state == EMPTY:
        return S, dP
    recompute(S, state, matrix(given.k, batch, head, dtype)[n0:n_end], scratch, given, at, n0)
    V = matrix(given.v, batch, head, dtype)[n0:n_end]
    product(dP, V, at.dOT, one, False)                                      # line 17: dP = dO V^T, transposed
    if given.drops.threshold > 0:
        Z = tile(scratch.Z, n_end - n0, at.m_end - at.m0)
        draw(Z, scratch.words, given.drops, batch, head, at.m0, n0)         # line 14
        drop_and_differentiate(S, dP, Z, at.D)                              # lines 15, 18 and 20
    else:
        differentiate(S, dP, at.D)                                          # line 20
    return S, dP


@inline
def recompute(S, state, K, scratch, given, at, n0):
    """P, for the tile of keys from n0 on, in S."""
    batch, head = at.batch, at.head
    product(S, K, at.QT, S.dtype.type(1), False)                            # line 11: S = scale Q K^T, transposed
    score(S, given.steps, scratch.slopes, batch, head, at.m0, n0, at.offset)
    mask_band(S, at.band, at.m0, n0)                                        # line 12: MASK(S)
    mask_intervals(S, at.intervals, at.m0, n0)
    if state == PARTIAL:
        mask_cells(S, given.mask, batch, head, at.m0, n0)
    exponentiate(S, at.lse, at.low)                                                 # line 13: P = exp(S - lse)


@inline
def exponentiate(S, lse, low):
    """Alg. 4 line 13: P = exp(S - lse), in place of S. It is at most 1, even where lse has too few digits and no low
    part."""
    zero = S.dtype.type(0)
    if is_large(low):
        for j in range(S.shape[0]):
            for i in range(S.shape[1]):
                x = (S[j, i] - lse[i]) - low[i]                             # the first difference is exact
                S[j, i] = exp(zero if x > zero else x)
        return
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            x = S[j, i] - lse[i]
            S[j, i] = exp(zero if x > zero else x)


@inline
def is_large(low):
    """Whether it matters: one more difference takes up to 5 % of the time."""
    largest = low.dtype.type(0)
    for i in range(low.size):
        largest = max(largest, abs(low[i]))
    return largest > 4 * np.finfo(low.dtype).eps


@inline
def differentiate(P, dP, D):
    """Alg. 4 line 20: dS = P (dP - D), in place of dP."""
    for j in range(P.shape[0]):
        for i in range(P.shape[1]):
            dP[j, i] = P[j, i] * (dP[j, i] - D[i])


@inline
def drop_and_differentiate(P, dP, Z, D):
    """Alg. 4 lines 15, 18 and 20: dS = P (dP Z - D), in place of dP; P Z, in place of P."""
    for j in range(P.shape[0]):
        for i in range(P.shape[1]):
            dP[j, i] = P[j, i] * (dP[j, i] * Z[j, i] - D[i])
            P[j, i] *= Z[j, i]

"""Attention backward on the CPU: Algorithm 4, P recomputed from lse."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..gradients import Gradients, sum_to
from ..scores import Sink
from ..values import rounded
from .arguments import kept, matrices, numbers_of, readable, scratch_of, sight_of, tiles_of
from .compile import Kernel
from .forward import EXPONENTIAL
from .launch import launch
from .product import product, product_tn
from .record import Later, Record
from .score import collect, curved_in, pull_back, score, shape_of, steps_of, sums_for
from .subnormals import flush_subnormals, restore
from .tile import (
    EMPTY,
    PARTIAL,
    band_of,
    draw,
    exp,
    inline,
    intervals_of,
    is_set,
    keys_in_sight,
    mask_band,
    mask_cells,
    mask_intervals,
    matrix,
    tile,
    tile_state,
    transpose,
)

TILE_M, TILE_N = 128, 128
BLOCKS = 16  # at least, however few heads: a constant, so that gradients do not depend on the number of threads


def backward(saved, do, dlse=None, deterministic=True):
    """The Gradients, bitwise reproducible."""
    problem, inputs = saved.problem, saved.inputs
    operands, lse, delta = operands_of(saved, do, dlse)
    given = (
        operands, sight_of(problem, inputs.mask), steps_of(problem, inputs.score, inputs.origin, derivatives=True),
        numbers_of(inputs.dropout, inputs.origin, inputs.scale),
    )  # fmt: skip
    sizes = min(TILE_M, problem.seqlen_q), min(TILE_N, problem.seqlen_k)
    scratch, memory = scratch_of(problem, *sizes, backward=True, slopes=curved_in(inputs.score))
    pairs, blocks, results, shapes = blocks_of(problem, inputs.mask)
    work = pairs * (3 * problem.head_dim + 2 * problem.head_dim_v + EXPONENTIAL)
    dq, dk, dv = [np.zeros(shape, problem.sum_dtype) for shape in shapes]
    launch(backward_kernel.given(scratch, *given, results.filled(dq, dk, dv)), blocks, work, memory)
    dq = dq[0] if len(dq) == 1 else dq.sum(axis=0)
    of = (dq, inputs.q), (dk, inputs.k), (dv, inputs.v)
    grads = [rounded(sum_to(dx, x.shape), problem.result_dtype) for dx, x in of]

    def add_up(sums):
        launch(score_kernel.given(scratch, *given, sums), len(sums.arguments[0].starts) - 1, work, memory)

    return Gradients(*grads, tuple(gradients_of_score(saved, lse, delta, add_up)))


def operands_of(saved, do, dlse):
    """The Record of q, k, v, do, lse and delta; the latter two."""
    problem, inputs = saved.problem, saved.inputs
    arrays = [readable(x, problem.sum_dtype) for x in (inputs.q, inputs.k, inputs.v, do)]
    lse = np.ascontiguousarray(saved.lse.reshape(*problem.matrices, problem.seqlen_q))
    delta = np.einsum("...mc,...mc->...m", arrays[3], saved.o.astype(problem.sum_dtype, copy=False))   # Alg. 4 line 19
    delta = delta.reshape(lse.shape)
    delta = np.ascontiguousarray(delta if dlse is None else delta - dlse.reshape(lse.shape))       # the gradient of lse
    return _operands(problem, *[(x.shape, x.strides) for x in arrays]).filled(*arrays, lse, delta), lse, delta


@lru_cache(maxsize=64)
def _operands(problem, *layouts):
    """The Record of calls on arrays of these shapes and strides."""
    row = Later((*problem.matrices, problem.seqlen_q), problem.sum_dtype)
    return Record(*[matrices(problem, *layout, problem.sum_dtype.itemsize) for layout in layouts], row, row)


@kept
def blocks_of(problem, mask):
    """How many pairs of a query and a key there are, how many blocks, the Record of their tiles and results, and the
    shapes of dq, in parts, dk and dv."""
    tiles, (batches, heads) = tiles_of(problem, mask, TILE_M), problem.matrices
    n_blocks, longest = -(-problem.seqlen_k // TILE_N), -(-tiles.longest // TILE_N)
    chunks = max(1, min(n_blocks, BLOCKS // max(batches * problem.heads_k, 1)))
    if tiles.by_head:
        chunks = 1  # the heads of a group cut their keys at different places: no two blocks may add to one dK
    parts = max(1, min(chunks, longest))
    sizes = [((parts,), (heads, problem.seqlen_q, problem.head_dim)),
             ((), (problem.heads_k, problem.seqlen_k, problem.head_dim)),
             ((), (problem.heads_k, problem.seqlen_k, problem.head_dim_v))]  # fmt: skip
    grads = [Later((*lead, batches, *size), problem.sum_dtype) for lead, size in sizes]
    shapes = [(*lead, *problem.batch[:-1], *size) for lead, size in sizes]
    results = Record(tiles.table, tiles.starts, chunks, *grads)
    return tiles.pairs, batches * problem.heads_k * chunks, results, shapes


def gradients_of_score(saved, lse, delta, add_up):
    """The gradient of each array in the score; None where it is not wanted. add_up: launches the kernel that does."""
    problem, parts = saved.problem, saved.inputs.score
    for number, part in enumerate(parts):
        if not part._wants_gradient:
            yield from [None] * len(part._weights)
            continue
        (array,) = part._weights
        if isinstance(part, Sink):
            dx = part._gradient(None, *[x.reshape(problem.lse_shape) for x in (lse, delta)])
        else:
            step = sum(not isinstance(before, Sink) for before in parts[:number])
            sums = sums_of(problem, saved.inputs.mask, shape_of(part), step, curved_in(parts[:number]))
            later = sums.arguments[0].dx
            dx = np.zeros(later.shape, later.dtype)
            add_up(sums.filled(dx))
            dx = dx[0] if len(dx) == 1 else dx.sum(axis=0)
            dx = dx.reshape(array.shape)
        yield dx if problem.wide else rounded(dx, array.dtype)


@kept
def sums_of(problem, mask, shape, step, curved_before):
    """The Record of the Sums for an array of this shape, of its step, and of how many before it are curved."""
    tiles = tiles_of(problem, mask, TILE_M, at_multiples=True)
    return Record(sums_for(problem, shape, tiles.table, TILE_M), step, curved_before)


class Given(NamedTuple):
    """What both kernels take."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    sight: Any
    steps: Any
    drops: Any
    scale: Any
    kept_scale: Any


class Queries(NamedTuple):
    """A tile of queries [m0, m_end) of a head, in whose sight are the keys [first, end)."""

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
    D: Any


@Kernel
def backward_kernel(
    first_block, end_block, stop, scratch, q, k, v, do, lse, delta, sight, steps, drops, scale, kept_scale, tiles,
    starts, chunks, dq, dk, dv,
):  # fmt: skip
    """Blocks [first_block, end_block)."""
    before, given = flush_subnormals(), Given(q, k, v, do, lse, delta, sight, steps, drops, scale, kept_scale)
    for block in range(first_block, end_block):
        add_gradients(block, stop, scratch, given, tiles, starts, chunks, dq, dk, dv)
    restore(before)


@inline
def add_gradients(block, stop, scratch, given, tiles, starts, chunks, dq, dk, dv):
    """Of a block, every chunks-th tile of keys of a (batch, key head).

    Each part of a segment's tiles of keys has its own dq. Unlike in the paper queries are the outer loop: Q and dO are
    transposed once for all keys.
    """
    _, _, heads, _, _ = dq.shape
    _, heads_k, _, _ = dk.shape
    group_size, dtype = heads // heads_k, given.lse.dtype
    scale, kept_scale = dtype.type(given.scale), dtype.type(given.kept_scale)
    chunk, head_k, batch = block % chunks, block // chunks % heads_k, block // chunks // heads_k
    dK, dV = dk[batch, head_k], dv[batch, head_k]
    for head in range(head_k * group_size, (head_k + 1) * group_size):
        K, number = matrix(given.k, batch, head, dtype), batch * heads + head
        for row in range(starts[number], starts[number + 1]):               # Alg. 4 line 9
            at = queries_of(scratch, given, tiles[row])
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
                pull_back(dP, scratch.slopes, 0, given.steps.curved)
                product(dK[n0:n_end], dP, Q, scale, True)                   # line 22: dK += scale dS^T Q
                product_tn(dQ, dP, K[n0:n_end], scale, True)                # line 21: dQ += scale dS K


@Kernel
def score_kernel(
    first_block, end_block, stop, scratch, q, k, v, do, lse, delta, sight, steps, drops, scale, kept_scale, sums, step,
    curved_before,
):  # fmt: skip
    """Blocks [first_block, end_block)."""
    before, given = flush_subnormals(), Given(q, k, v, do, lse, delta, sight, steps, drops, scale, kept_scale)
    for block in range(first_block, end_block):
        add_gradient_of_array(block, stop, scratch, given, sums, step, curved_before)
    restore(before)


@inline
def add_gradient_of_array(block, stop, scratch, given, sums, step, curved_before):
    """Of a step, which has so many curved ones before it.

    A block is a share of the tiles of queries of one of the array's own matrices; it sums over all score matrices to
    which that one is broadcast.
    """
    parts = sums.dx.shape[0]
    dx = sums.dx[block % parts, block // sums.shares]
    for row in range(sums.starts[block], sums.starts[block + 1]):
        at = queries_of(scratch, given, sums.tiles[row])
        if at.first >= at.end:
            continue
        load_queries(at, given)
        for n_tile in range(at.first - (at.first - at.segment) % TILE_N, at.end, TILE_N):
            if is_set(stop):
                return
            n0, n_end = max(n_tile, at.first), min(n_tile + TILE_N, at.end)
            _, dP = differentiate_tile(scratch, given, at, n0, n_end)
            pull_back(dP, scratch.slopes, curved_before, given.steps.curved)
            collect(dx, dP, given.steps, step, at.batch, at.head, at.m0, n0, at.offset)


@inline
def queries_of(scratch, given, row):
    """The Queries in a row of WorkTiles.table, not loaded yet."""
    batch, head, m0, m_end, segment, segment_end, offset = row
    band, intervals = band_of(given.sight, batch, head), intervals_of(given.sight, batch, head)
    m_end = max(min(m_end, band[2]), m0)
    first, end = keys_in_sight(band, intervals, m0, m_end, segment, segment_end)
    QT, dOT = tile(scratch.QT, given.q.cols, m_end - m0), tile(scratch.dOT, given.do.cols, m_end - m0)
    vectors = tile(scratch.vectors, 2, m_end - m0)
    lse, D = vectors[0], vectors[1]
    return Queries(batch, head, m0, m_end, segment, offset, first, end, band, intervals, QT, dOT, lse, D)


@inline
def load_queries(at, given):
    """Q and dO, transposed, lse and D. A query that sees nothing has lse = inf here: P = 0."""
    dtype = given.lse.dtype
    transpose(at.QT, matrix(given.q, at.batch, at.head, dtype)[at.m0 : at.m_end], dtype.type(given.scale))
    transpose(at.dOT, matrix(given.do, at.batch, at.head, dtype)[at.m0 : at.m_end], dtype.type(given.kept_scale))
    for i in range(at.m_end - at.m0):
        lse = given.lse[at.batch, at.head, at.m0 + i]
        at.lse[i] = np.inf if lse == -np.inf else lse
        at.D[i] = 0 if lse == -np.inf else given.delta[at.batch, at.head, at.m0 + i]


@inline
def differentiate_tile(scratch, given, at, n0, n_end):
    """P Z and dS behind the score, of the tile of keys [n0, n_end); of no keys if nobody sees any of them."""
    batch, head, dtype, one = at.batch, at.head, given.lse.dtype, given.lse.dtype.type(1)
    state = tile_state(given.sight, at.intervals, batch, head, at.m0, at.m_end, n0, n_end)
    n_end = n0 if state == EMPTY else n_end
    S, dP = tile(scratch.S, n_end - n0, at.m_end - at.m0), tile(scratch.dP, n_end - n0, at.m_end - at.m0)
    if state == EMPTY:
        return S, dP
    K, V = matrix(given.k, batch, head, dtype)[n0:n_end], matrix(given.v, batch, head, dtype)[n0:n_end]
    product(S, K, at.QT, one, False)                                        # line 11: S = scale Q K^T, transposed
    score(S, given.steps, scratch.slopes, batch, head, at.m0, n0, at.offset)
    mask_band(S, at.band, at.m0, n0)                                        # line 12: MASK(S)
    mask_intervals(S, at.intervals, at.m0, n0)
    if state == PARTIAL:
        mask_cells(S, given.sight, batch, head, at.m0, n0)
    exponentiate(S, at.lse)                                                 # line 13: P = exp(S - lse)
    product(dP, V, at.dOT, one, False)                                      # line 17: dP = dO V^T, transposed
    if given.drops.threshold > 0:
        Z = tile(scratch.Z, n_end - n0, at.m_end - at.m0)
        draw(Z, scratch.words, given.drops, batch, head, at.m0, n0)         # line 14
        drop_and_differentiate(S, dP, Z, at.D)                              # lines 15, 18 and 20
    else:
        differentiate(S, dP, at.D)                                          # line 20
    return S, dP


@inline
def exponentiate(S, lse):
    """Alg. 4 line 13: P = exp(S - lse), in place of S. It is at most 1, also where lse has lost the digits for that."""
    zero = S.dtype.type(0)
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            x = S[j, i] - lse[i]
            S[j, i] = exp(zero if x > zero else x)


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

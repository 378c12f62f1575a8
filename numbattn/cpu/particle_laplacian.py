"""The Laplacian of attention on the CPU by the coordinates of particles, each of which moves its own rows alone.

Along coordinate c of particle p, of the queries and keys of p alone, with A = scale jQ K^T and B = scale Q jK^T,

    jS_ij = [i of p] A_ij + [j of p] B_ij,  jlse_i = [i of p] rowsum(P A)_i + (sum of P_ij B_ij over keys j of p),
    jO_i = [i of p] ((P A) V - rowsum(P A) O)_i + (sum of P_ij jV_j + P_ij B_ij (V_j - O_i) over keys j of p):

A key is in the second sum of one particle only, so that all of jO takes as long as one tangent of it. Of the terms of
the second derivatives, see `numbattn.attention_laplacian`, the sums over all coordinates are those of each c over

    S2 + jS^2 = A^2 + B^2 + [i and j of one particle] 2 (A B + scale jQ_i jK_j),
    jS jV = (B + [i and j of one particle] A) jV_j.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..base.values import rounded
from ..call.tangents import Tangents
from .arguments import record_of_tiles
from .backward_tile import exponentiate
from .compile import Kernel
from .forward import EXPONENTIAL
from .launch import launch
from .operands import RESULT, RESULT_ALONG, ROWS, TANGENT, ForwardGiven, Operands, operands_of, record_of
from .product import add_multiple, product, product_tn
from .record import Record
from .score import numbered_tile, options_of, sinks_of
from .scratch import TILE_N, Lent, scratch_of
from .statistics import VECTORS, queries_of, scores_of
from .tangent import tangent
from .tile import (
    EMPTY,
    address_of,
    clear,
    contiguous_view,
    fill,
    inline,
    inline_view,
    is_set,
    matrix_along,
    rows_of,
    tile,
    tile_state,
)
from .transposition import transpose

TILE_M = 32  # queries, whose P is there for all keys


class Moving(NamedTuple):
    """The results and inputs of a call along coordinates, in the order of its Records. Zero has no rows."""

    jo: Any  # (particles x coordinates, batch, heads, queries, features)
    o2: Any
    lse: Any
    lse_low: Any
    jq: Any  # Matrices, along the coordinates of a particle
    jk: Any
    jv: Any


class Owners(NamedTuple):
    """The Particles of rows."""

    queries: Any
    keys: Any
    order: Any
    starts: Any
    coordinates: int  # of each


ARRAYS = Operands(jo=RESULT_ALONG, o2=RESULT, lse=ROWS, lse_low=ROWS, jq=TANGENT, jk=TANGENT, jv=TANGENT)  # of Moving


def particle_laplacian(problem, inputs, given, tangents):
    """o, its tangents, and o2, the sum of its second derivatives, by name."""
    particles, dtype, lent = given["particles"], problem.sum_dtype, Lent()
    none = Tangents(None, None, None, (None,) * len(tangents.score), 0)
    known = tangent(replace(problem, wide=True), inputs, {}, none)  # in the dtype of sums throughout, as here
    o = known["o"]
    new = np.empty if problem.result_dtype == dtype else lent.new
    jo, o2 = new((particles.total * tangents.count, *o.shape), dtype), np.empty((1, *o.shape), dtype)
    arrays, layouts = operands_of(problem, inputs, lent.new, widened=True)
    tiles, of_tiles = record_of_tiles(problem, inputs.mask, TILE_M)
    moving = ARRAYS.record(problem, {"jo": jo, "o2": o2[0], "lse": known["lse"], "lse_low": known["lse_low"],
                                     "jq": tangents.q, "jk": tangents.k, "jv": tangents.v}, lent.new)  # fmt: skip
    owners = Record(particles.queries, particles.keys, particles.order, particles.starts, tangents.count)
    scratch, nbytes = scratch_for(problem)
    options = record_of(problem, layouts, False), *options_of(problem, inputs), sinks_of(problem, ())
    call = particle_laplacian_kernel.given(scratch, *options, moving, owners, of_tiles)
    cost = (1 + 6 * tangents.count) * (problem.head_dim + problem.head_dim_v) + EXPONENTIAL
    launch(call, len(tiles.table), tiles.pairs * cost, nbytes, (*arrays, o))
    o, jo = rounded(o, problem.result_dtype), rounded(jo, problem.result_dtype)
    lent.give_back()
    return {"o": o, "to": jo, "o2": o2}


@lru_cache(maxsize=64)
def scratch_for(problem):
    """The scratch of a call, and its bytes."""
    size = min(TILE_M, problem.seqlen_q), problem.seqlen_k
    return scratch_of(problem, size, S=1, tS=3, S2=1, QT=1, tQT=1, sums=problem.head_dim_v, vectors=VECTORS)


@Kernel
def particle_laplacian_kernel(
    first_block, end_block, stop, scratch, given: ForwardGiven, moving: Moving, owners: Owners, tiles
):
    """Blocks [first_block, end_block); a block is a tile of queries of one (batch, head), and all its keys."""
    dtype, features = moving.o2.dtype, moving.o2.shape[3]
    one, two = dtype.type(1), dtype.type(2)
    for block in range(first_block, end_block):
        at, first, end = queries_of(tiles[block], given, scratch)
        batch, head, m0, m_end, end = at.batch, at.head, at.m0, at.m_end, max(first, end)
        P, W = tile(scratch.S, end - first, m_end - m0), tile(scratch.S2, end - first, m_end - m0)
        A, B, C = numbered_tile(scratch.tS, 0, P), numbered_tile(scratch.tS, 1, P), numbered_tile(scratch.tS, 2, P)
        jQT, own = tile(scratch.tQT, given.q.cols, m_end - m0), tile(scratch.sums, m_end - m0, features)
        vectors = tile(scratch.vectors, VECTORS, m_end - m0)
        a, b, sums, nothing = vectors[0], vectors[1], vectors[2], vectors[3]
        K = rows_of(given.k, batch, head, first, end, scratch.wide, dtype)
        V = rows_of(given.v, batch, head, first, end, scratch.wide, dtype)
        O, O2 = given.o[batch, head, m0:m_end], moving.o2[batch, head, m0:m_end]
        exponentials(P, at, given, moving, scratch, first, end)
        clear(W)
        fill(nothing, 0)
        for c in range(owners.coordinates):
            if is_set(stop):
                return
            for x in (A, B, C):
                clear(x)
            if moving.jq.rows:
                jQ = matrix_along(moving.jq, c, batch, head, dtype)[m0:m_end]
                transpose(jQT, jQ, dtype.type(given.scale), False)
                product(A, K, jQT, one, False)                              # A = scale jQ K^T
            if moving.jk.rows:
                jK = matrix_along(moving.jk, c, batch, head, dtype)[first:end]
                product(B, jK, at.QT, one, False)                           # B = scale Q jK^T
                if moving.jq.rows:
                    product(C, jK, jQT, two, False)                         # C = 2 scale jQ jK^T
            weigh(P, A, B, C, W, a, b, owners, m0, first)
            product_tn(own, A, V, one, False)                               # own = (P A) V - a O
            subtract(own, a, O, one)
            jV = matrix_along(moving.jv, c, batch, head, dtype)[first:end] if moving.jv.rows else V[:0]
            for p in range(owners.starts.size - 1):
                jO = moving.jo[p * owners.coordinates + c, batch, head, m0:m_end]
                keys = owners.order[owners.starts[p] : owners.starts[p + 1]]
                move(jO, sums, P, B, C, W, V, jV, O, nothing, keys, first)
            product_tn(O2, C[: jV.shape[0]], jV, two, c > 0)
            for i in range(m_end - m0):
                p = owners.queries[m0 + i]
                if p >= 0:
                    jO = moving.jo[p * owners.coordinates + c, batch, head, m0 + i : m0 + i + 1]
                    add_multiple(address_of(jO), one, address_of(own[i]), features)
                    subtract(O2[i : i + 1], a[i : i + 1], jO, two)
                    subtract(O2[i : i + 1], b[i : i + 1], own[i : i + 1], two)
        fill(a, 0)
        for j in range(end - first):
            add(a, W[j])
        product_tn(O2, W, V, one, owners.coordinates > 0)                   # W V - rowsum(W) O
        subtract(O2, a, O, one)


@inline
def exponentials(P, at, given, moving, scratch, first, end):
    """Alg. 4 line 13: P = exp(S - lse), for all keys [first, end)."""
    lse, low = at.alpha, at.part
    for i in range(lse.size):
        x = moving.lse[at.batch, at.head, at.m0 + i]
        lse[i] = x if x != -np.inf else np.inf                              # P = 0
        low[i] = moving.lse_low[at.batch, at.head, at.m0 + i]
    for n0 in range(first, end, TILE_N):
        n_end = min(n0 + TILE_N, end)
        S = P[n0 - first : n_end - first]
        state = tile_state(given.mask, at.intervals, at.batch, at.head, at.m0, at.m_end, n0, n_end)
        if state == EMPTY:
            clear(S)
        else:
            scores_of(S, at, given, scratch, n0, n_end, state)
            exponentiate(S, lse, low)


@inline
def weigh(P, A, B, C, W, a, b, owners, m0, first):
    """A = P A, B = P B, 0 where P is 0, and a = rowsum(P A). W = W + P (A^2 + B^2) and C = P B; where query and key are
    of one particle W = W + P ((A + B)^2 + C) and C = P (A + B), and b is the sum of P B."""
    zero, one = P.dtype.type(0), P.dtype.type(1)
    fill(a, 0)
    fill(b, 0)
    for j in range(P.shape[0]):
        for i in range(P.shape[1]):
            p, same = P[j, i], one if owners.keys[first + j] == owners.queries[m0 + i] else zero
            x, y, z = (A[j, i], B[j, i], C[j, i]) if p != zero else (zero, zero, zero)
            W[j, i] += p * (x * x + y * y + same * (x * y + x * y + z))
            A[j, i], B[j, i], C[j, i] = p * x, p * y, p * (y + same * x)
            a[i] += p * x
            b[i] += same * (p * y)


@inline
def move(jO, b, P, B, C, W, V, jV, O, nothing, keys, first):
    """jO = P jV + B (V - O) over the keys of a particle, B: P B. With b = rowsum(B) over these, a part of jlse, the
    terms - 2 jlse jO of second derivatives: C = C - b P, W = W - 2 b B."""
    adds, two = False, P.dtype.type(2)
    fill(b, 0)
    for key in keys:
        if 0 <= key - first < P.shape[0]:
            add(b, B[key - first])
    for key in keys:
        j = key - first
        if 0 <= j < P.shape[0]:
            for i in range(b.size):
                C[j, i] -= b[i] * P[j, i]
                W[j, i] -= two * b[i] * B[j, i]
            p, x = (P[j], row(jV, j)) if jV.shape[0] else (nothing, row(V, j))
            weigh_differences(jO, p, x, B[j], row(V, j), O, adds)
            adds = True
    if not adds:
        clear(jO)


@inline_view
def row(x, j):
    """A row, in which loops are vectorised."""
    return contiguous_view(address_of(x[j]), 1, x.shape[1], x.shape[1], x.dtype)[0]


@inline
def weigh_differences(out, p, x, w, y, z, adds):
    """out = p x + w (y - z), row by row, plus out if it adds."""
    zero = out.dtype.type(0)
    for i in range(p.size):
        of_x, of_rest = p[i], w[i]
        for c in range(x.size):
            total = out[i, c] if adds else zero
            out[i, c] = total + of_x * x[c] + of_rest * (y[c] - z[i, c])


@inline
def add(out, x):
    for i in range(out.size):
        out[i] += x[i]


@inline
def subtract(out, factors, x, scale):
    """out = out - scale factors x, row by row."""
    for i in range(factors.size):
        add_multiple(address_of(out[i]), -scale * factors[i], address_of(x[i]), x.shape[1])

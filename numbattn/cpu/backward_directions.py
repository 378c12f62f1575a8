"""A tile of the backward pass along directions, which share its P and dP: tangents of gradients.

The equations are those of `attention_backward_jvp`.
"""

from typing import Any, NamedTuple

from .backward_tile import recompute
from .forward_directions import differentiate_products
from .product import product, product_tn, row_dots
from .score import numbered_tile
from .score_gradients import sums_along
from .score_tangents import differentiate_score, pull_back_tangents
from .softmax import multiply
from .tile import draw, inline, matrix, matrix_along, tile
from .transposition import transpose


class BackwardDirections(NamedTuple):
    """The inputs of a call along its directions, in the order of its Records; Matrices of zero have no rows."""

    tq: Any
    tk: Any
    tv: Any
    to: Any
    tdo: Any
    tlse: Any
    tdlse: Any  # or nothing
    tsteps: Any


@inline
def load_directions(at, given, directions, scratch):
    """tQ and tdO, transposed, and tD of each direction."""
    batch, head, dtype, count = at.batch, at.head, at.D.dtype, directions.tlse.shape[0]
    dO = matrix(given.do, batch, head, dtype)[at.m0 : at.m_end]
    O = matrix(given.o, batch, head, dtype)[at.m0 : at.m_end]
    vectors = tile(scratch.tD, count + 1, at.D.size)
    more = vectors[count]
    for t in range(count):
        tD, tO = vectors[t], matrix_along(directions.to, t, batch, head, dtype)[at.m0 : at.m_end]
        row_dots(tD, dO, tO)                                                # tD = rowsum(dO tO + tdO O)
        if directions.tq.rows:
            tQ = matrix_along(directions.tq, t, batch, head, dtype)[at.m0 : at.m_end]
            transpose(numbered_tile(scratch.tQT, t, at.QT), tQ, dtype.type(given.scale), False)
        if directions.tdo.rows:
            tdO = matrix_along(directions.tdo, t, batch, head, dtype)[at.m0 : at.m_end]
            transpose(numbered_tile(scratch.tdOT, t, at.dOT), tdO, dtype.type(given.kept_scale), False)
            row_dots(more, tdO, O)
            for i in range(tD.size):
                tD[i] += more[i]
        if directions.tdlse.size:
            tdlse = directions.tdlse[t, batch, head, at.m0 : at.m_end]
            for i in range(tD.size):
                tD[i] -= tdlse[i]


@inline
def add_tile_along(keys, at, scratch, given, directions, work):
    """Add the terms of a tile to the tangents of gradients along all directions."""
    batch, head, n0, n_end, dtype = at.batch, at.head, keys.n0, keys.n_end, at.D.dtype
    kept_scale, has_drops, count = dtype.type(given.kept_scale), given.drops.threshold > 0, directions.tlse.shape[0]
    P, dP = tile(scratch.S, n_end - n0, at.m_end - at.m0), tile(scratch.dP, n_end - n0, at.m_end - at.m0)
    Z = tile(scratch.Z, n_end - n0, at.m_end - at.m0)
    recompute(P, keys, scratch, given, at)
    product(dP, keys.V, at.dOT, dtype.type(1), False)                       # dP = Z (dO V^T), then dP - D
    if has_drops:
        draw(Z, scratch.words, given.drops, batch, head, at.m0, n0)
        multiply(dP, Z)
    subtract(dP, at.D)
    for t in range(count):
        add_direction(t, P, dP, Z, keys, at, scratch, given, directions, work)
    if directions.tdo.rows:
        if has_drops:
            multiply(P, Z)
        for t in range(count):                                              # tdV = tdV + (Z P)^T tdO
            tdO = matrix_along(directions.tdo, t, batch, head, dtype)[at.m0 : at.m_end]
            product(work.dv[t, batch, keys.head_k, n0:n_end], P, tdO, kept_scale, True)


@inline
def add_direction(t, P, dP, Z, keys, at, scratch, given, directions, work):
    """Add the terms of a tile along a direction, except (Z P)^T tdO. dP: dP - D."""
    batch, head, m0, m_end, n0, n_end, dtype = at.batch, at.head, at.m0, at.m_end, keys.n0, keys.n_end, P.dtype
    scale, kept_scale = dtype.type(given.scale), dtype.type(given.kept_scale)
    tdQ, tdK = work.dq[t, keys.part, batch, head, m0:m_end], work.dk[t, batch, keys.head_k, n0:n_end]
    tdV, sums = work.dv[t, batch, keys.head_k, n0:n_end], sums_along(work.sums, t)
    tQT, tdOT = numbered_tile(scratch.tQT, t, at.QT), numbered_tile(scratch.tdOT, t, at.dOT)
    tlse, tD = directions.tlse[t, batch, head, m0:m_end], tile(scratch.tD, t + 1, at.D.size)[t]
    dS, tS, tdP = numbered_tile(scratch.dS, 0, P), numbered_tile(scratch.tS, 0, P), numbered_tile(scratch.tdP, 0, P)
    Q, dO = matrix(given.q, batch, head, dtype)[m0:m_end], matrix(given.do, batch, head, dtype)[m0:m_end]
    tK = matrix_along(directions.tk, t, batch, head, dtype)[n0:n_end] if directions.tk.rows else keys.K[:0]
    tV = matrix_along(directions.tv, t, batch, head, dtype)[n0:n_end] if directions.tv.rows else keys.V[:0]
    differentiate_products(tS, keys.K, tK, at.QT, tQT, directions.tq.rows > 0)  # tS = scale (tQ K^T + Q tK^T)
    differentiate_score(tS, tS[:0], given.steps, directions.tsteps, t, scratch.slopes, scratch.bends, batch, head, m0,
                        n0, at.offset)  # fmt: skip
    differentiate_products(tdP, keys.V, tV, at.dOT, tdOT, directions.tdo.rows > 0)  # tdP = Z (dO tV^T + tdO V^T)
    if given.drops.threshold > 0:
        multiply(tdP, Z)
    differentiate(P, dP, tS, tdP, dS, tlse, tD)
    if given.drops.threshold > 0:
        multiply(tS, Z)
    product(tdV, tS, dO, kept_scale, True)                                  # tdV = tdV + (Z tP)^T dO
    pull_back_tangents(dS, tdP, given.steps, directions.tsteps, t, scratch, sums, at, keys.chunk, n0)
    product(tdK, tdP, Q, scale, True)                                       # tdK = tdK + scale (tdS^T Q + dS^T tQ)
    if directions.tq.rows:
        product(tdK, dS, matrix_along(directions.tq, t, batch, head, dtype)[m0:m_end], scale, True)
    product_tn(tdQ, tdP, keys.K, scale, True)                               # tdQ = tdQ + scale (tdS K + dS tK)
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

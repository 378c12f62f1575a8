"""The forward pass along directions: tangents and second derivatives of sums over keys, beside those of `forward`.

S and P of each tile are computed once for several directions. Sums are side by side in one matrix, which is rescaled
like O: O, its tangents and second derivatives, then the first and second derivatives of l.
"""

from typing import Any, NamedTuple

from ..functions.compiled.exponentials import exp
from .product import product, product_tn
from .score import numbered_tile
from .score_tangents import differentiate_score
from .softmax import SUMMED, multiply, normalise
from .tile import address_of, clear, fill, inline, inline_view, matrix_along, strided_view, tile
from .transposition import transpose


class Directions(NamedTuple):
    """The results and inputs of a call along its directions, in the order of its Records. Zero has no rows."""

    to: Any
    tlse: Any
    o2: Any  # second derivatives, or nothing
    tq: Any  # Matrices
    tk: Any
    tv: Any
    tsteps: Any
    tsinks: Any


# ---------------------------------------------------------------------------------------------------------------- sums
@inline
def count_of(directions):
    """How many directions there are, and 1 if second derivatives are wanted, or 0."""
    return directions.to.shape[0], 1 if directions.o2.shape[0] else 0


@inline_view
def sums_of(buffer, O, directions):
    """The matrix of all sums, beside that of O."""
    count, bends = count_of(directions)
    return tile(buffer, O.shape[0], (1 + count + bends) * O.shape[1] + count + bends)


@inline_view
def columns(sums, number, count):
    """`count` columns of sums: of O, of tangent number - 1 of O, or of the second derivatives after these."""
    address = address_of(sums) + number * count * sums.itemsize
    return strided_view(address, sums.shape[0], count, sums.shape[1], sums.dtype)


@inline
def load_directions(at, given, directions, scratch):
    """tQ of each direction, transposed."""
    for t in range(directions.tq.offsets.shape[0]):
        tQ = matrix_along(directions.tq, t, at.batch, at.head, at.QT.dtype)[at.m0 : at.m_end]
        transpose(numbered_tile(scratch.tQT, t, at.QT), tQ, at.QT.dtype.type(given.scale), False)


@inline
def add_direction(sums, P, Z, K, V, t, at, given, directions, scratch, n0, n_end):
    """Add the terms of keys [n0, n_end) along a direction to sums, except (Z P) tV."""
    batch, head, features, (count, bends) = at.batch, at.head, V.shape[1], count_of(directions)
    dtype, one, two = P.dtype, P.dtype.type(1), P.dtype.type(2)
    tS, tQT = tile(scratch.tS, P.shape[0], P.shape[1]), numbered_tile(scratch.tQT, t, at.QT)
    S2 = tile(scratch.S2, P.shape[0] * bends, P.shape[1])
    tK = matrix_along(directions.tk, t, batch, head, dtype)[n0:n_end] if directions.tk.rows else K[:0]
    differentiate_products(tS, K, tK, at.QT, tQT, directions.tq.rows > 0)   # tS = scale (tQ K^T + Q tK^T)
    if directions.tq.rows and directions.tk.rows and bends:
        product(S2, tK, tQT, two, False)                                    # S2 = 2 scale tQ tK^T
    else:
        clear(S2)
    differentiate_score(tS, S2, given.steps, directions.tsteps, t, scratch.slopes, scratch.slopes[:0], batch, head,
                        at.m0, n0, at.offset)  # fmt: skip
    weigh(P, tS, S2, sums, t, count, at.part)                               # tl = tl + rowsum(P tS)
    if given.drops.threshold > 0:
        multiply(tS, Z)
        multiply(S2, Z)
    product_tn(columns(sums, 1 + t, features), tS, V, one, True)            # tO = tO + (Z P tS) V
    if bends:
        second = columns(sums, 1 + count, features)
        product_tn(second, S2, V, one, True)                                # (Z P (S2 + tS^2)) V + 2 (Z P tS) tV
        if directions.tv.rows:
            product_tn(second, tS, matrix_along(directions.tv, t, batch, head, dtype)[n0:n_end], two, True)


@inline
def add_values(sums, P, t, at, directions, n0, n_end):
    """tO = tO + (Z P) tV along a direction. P: Z P."""
    if directions.tv.rows:
        tV = matrix_along(directions.tv, t, at.batch, at.head, P.dtype)[n0:n_end]
        product_tn(columns(sums, 1 + t, tV.shape[1]), P, tV, P.dtype.type(1), True)


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
def finish(O, sums, m, l, at, given, directions):
    """O, its tangents and second derivatives, and the tangents of lse, from all sums."""
    batch, head, features, (count, bends) = at.batch, at.head, O.shape[1], count_of(directions)
    width = sums.shape[1] - count - bends
    tl, l2 = sums[:, width : width + count], sums[:, sums.shape[1] - 1]
    for t in range(directions.tsinks.shape[0]):
        add_tangent_of_sink(tl[:, t], m, l, given.sinks[batch, head], directions.tsinks[t, batch, head])
    normalise(sums, l, given.kept_scale, count + bends)                     # dropout does not touch statistics
    for i in range(O.shape[0]):
        for c in range(features):
            O[i, c] = sums[i, c]
    tO, tlse = directions.to[:, batch, head, at.m0 : at.m_end], directions.tlse[:, batch, head, at.m0 : at.m_end]
    for t in range(count):
        finish_tangent(tO[t], tlse[t], O, columns(sums, 1 + t, features), tl[:, t])
    if bends:
        second = directions.o2[batch, head, at.m0 : at.m_end]
        finish_second(second, O, tO, columns(sums, 1 + count, features), tl, l2)


@inline
def finish_tangent(tO, tlse, O, sums, tl):
    """tlse = tl and tO = tO - tlse O. sums: of the direction."""
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

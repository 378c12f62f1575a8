"""Tiles of pairs of points that move by tangents: see points/tangents.py.

Squared distances move by tt_ij = 2 <x_i - y_j, tx_i - ty_j>, products by <tx_i, y_j> + <x_i, ty_j>. As distances, tt is
computed from differences for few features and for near pairs, and else from products of points of unit length.
"""

from ...points.kinds import DIFFERENCES
from ..product import product, row_dots
from ..softmax import multiply
from ..tile import clear, inline, matrix, tile
from .kinds import apply
from .pairs import FEW, points_apart


@inline
def tangents_of(given, at, n0, n_end, scratch):
    """tx and ty of a tile."""
    real = scratch.S.dtype
    TX = matrix(given.tx, at.batch, at.head, real)[at.m0 : at.m_end]
    return TX, matrix(given.ty, at.batch, at.head, real)[n0:n_end]


@inline
def multiply_moves(S, given, at, n0, near, scratch, factor):
    """S *= tt. near: as from `pairs_of`; factor: of the differences of points whose differences are taken."""
    moves = tile(scratch.moves, S.shape[0], S.shape[1])
    find_moves(moves, given, at, n0, near, scratch, S.dtype.type(2 * factor))
    multiply(S, moves)


@inline
def find_moves(moves, given, at, n0, near, scratch, twice):
    real, (keys, size), is_of_product = moves.dtype.type, moves.shape, given.step.is_of_product
    TX, TY = tangents_of(given, at, n0, n0 + keys, scratch)
    X, Y = points_apart(given, at, n0, n0 + keys, real)
    if not is_of_product and (X.shape[1] <= DIFFERENCES or near > FEW):
        clear(moves)
        XT = at.XT if X.shape[1] <= DIFFERENCES else tile(scratch.apart, X.shape[1], size)
        for j in range(keys):
            for f in range(X.shape[1]):
                y, ty = Y[j, f], TY[j, f]
                for i in range(size):
                    moves[j, i] += twice * (XT[f, i] - y) * (at.TXT[f, i] - ty)
        return
    factor = real(1 if is_of_product else -2)
    units = matrix(given.y, at.batch, at.head, real)[n0 : n0 + keys]
    product(moves, TY, at.XT, factor, False)
    product(moves, units, at.TXT, factor, True)
    if not is_of_product:
        of_x, of_y = at.vectors[1], tile(scratch.lines, 1, keys)[0]
        row_dots(of_x, matrix(given.x, at.batch, at.head, real)[at.m0 : at.m_end], TX)
        row_dots(of_y, units, TY)
        for j in range(keys):
            for i in range(size):
                moves[j, i] += 2 * (of_x[i] + of_y[j])
        for pair in scratch.near[:near]:
            (j, i), t = divmod(pair, size), real(0)
            for f in range(X.shape[1]):
                t += (X[i, f] - Y[j, f]) * (TX[i, f] - TY[j, f])
            moves[j, i] = t * twice


@inline
def find_slopes(slopes, S, given, at, columns):
    """kappa' of a tile of t."""
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            slopes[j, i] = S[j, i]
    apply(slopes, given.slope, at.rows, columns)


@inline
def add_moved(dXT, XT, Y, S, TXT, TY, slopes, W):
    """dX_i += sum_j W_ij (S_ij (x_i - y_j) + slopes_ij (tx_i - ty_j)). Of points close to each other the two nearly
    cancel: so each pair's are added first."""
    for j in range(S.shape[0]):
        for f in range(dXT.shape[0]):
            y, ty = Y[j, f], TY[j, f]
            for i in range(S.shape[1]):
                dXT[f, i] += W[j, i] * (S[j, i] * (XT[f, i] - y) + slopes[j, i] * (TXT[f, i] - ty))

"""dx_i = sum_j kappa'_ij <c_i, b_j> 2 (x_i - y_j), or with y_j in place of 2 (x_i - y_j) for a function of x . y; if
points move, its tangent: see `moves`."""

import numpy as np

from ...points.kinds import CURVATURE, DERIVATIVE, DIFFERENCES
from ..product import product
from ..softmax import multiply
from ..tile import clear, fill, inline, is_set, matrix, scaled, tile
from ..transposition import transpose
from .differences import add_differences
from .kinds import apply, step_of
from .moves import add_moved, find_slopes, multiply_moves, tangents_of
from .pairs import FEW, LONG, TILE_N, add_part, over_tiles, pairs_of, parts_of, points_apart, run, store
from .sums import add_products


def gradient(problem, inputs, kind, c, rows=None, columns=None, tangents=None, apart=None):
    """dx, (..., m, d), in the dtype of sums, or its tangent. The options are those of `run`."""
    dx = np.empty((*problem.batch, problem.seqlen_q, problem.head_dim), problem.sum_dtype)
    slope = step = step_of(kind, DERIVATIVE, problem.sum_dtype)
    if tangents is not None:
        step = step_of(kind, CURVATURE, problem.sum_dtype)
    given = {"b": inputs.v, "c": c, "rows": rows, "columns": columns, "tangents": tangents, "apart": apart}
    run(gradient_kernel, problem, inputs, step, dx, slope=slope, **given)
    return dx


@over_tiles
def gradient_kernel(given, mask, at, scratch, stop, dx):
    """dX over all points of y."""
    dX = dx[at.batch, at.head, at.m0 : at.m_end]
    dtype = dX.dtype
    dXT, lost, part = parts_of(scratch, dX.shape[1], dX.shape[0])
    CT = tile(scratch.CT, given.c.cols, dX.shape[0])
    transpose(CT, matrix(given.c, at.batch, at.head, dtype)[at.m0 : at.m_end], dtype.type(1), False)
    Y, B = matrix(given.y, at.batch, at.head, dtype), matrix(given.b, at.batch, at.head, dtype)
    totals, slopes, is_moved = at.vectors[2:4], tile(scratch.slopes, 0, 0), scratch.moves.size > 0
    for n_next in range(at.first, at.end, LONG):
        clear(part)
        clear(totals)
        for n0 in range(n_next, min(n_next + LONG, at.end), TILE_N):
            if is_set(stop):
                return
            n_end = min(n0 + TILE_N, at.end)
            S, columns, near = pairs_of(given, mask, at, n0, n_end, scratch)
            if S.size:
                W = tile(scratch.weights, S.shape[0], S.shape[1])
                product(W, B[n0:n_end], CT, dtype.type(1), False)
                if is_moved:
                    slopes = tile(scratch.slopes, S.shape[0], S.shape[1])
                    find_slopes(slopes, S, given, at, columns)
                apply(S, given.step, at.rows, columns)
                if is_moved:
                    multiply_moves(S, given, at, n0, near, scratch, given.rate)
                else:
                    multiply(S, W)
                add_gradient(part, totals, S, slopes, W, Y[n0:n_end], given, at, n0, near, scratch)
        if not given.step.is_of_product and given.x.cols > DIFFERENCES:
            add_points(part, at.XT, totals[0])
            if is_moved:
                add_points(part, at.TXT, totals[1])
        add_part(dXT, lost, part)
    factor = given.factor if given.x.cols <= DIFFERENCES and not is_moved else 1
    store(dX, dXT, dtype.type(1 if given.step.is_of_product else 2 * factor), mask, at)


@inline
def add_gradient(dXT, totals, S, slopes, W, Y, given, at, n0, near, scratch):
    """Add the terms of a tile, with weights S, to dX: sum_j S_ij (x_i - y_j), or only the second term, the first being
    x_i times the total of S. If points move, the same of tangents, with the weights `slopes`; S then has the factors of
    both differences, that of tt and this one, and both are still to be multiplied by W."""
    real, (keys, size), factor = dXT.dtype.type, S.shape, dXT.dtype.type(1 if slopes.size else given.factor)
    X, apart_y = points_apart(given, at, n0, n0 + keys, real)
    TX, TY = tangents_of(given, at, n0, n0 + keys if slopes.size else n0, scratch)
    if not given.step.is_of_product and (dXT.shape[0] <= DIFFERENCES or near > FEW):
        XT = at.XT if dXT.shape[0] <= DIFFERENCES else tile(scratch.apart, X.shape[1], size)
        if slopes.size:
            add_moved(dXT, XT, apart_y, S, at.TXT, TY, slopes, W)
            return
        if dXT.shape[0] > DIFFERENCES:
            scaled(S, S, factor)
        add_differences(dXT, XT, apart_y, S)
        return
    for pair in scratch.near[:near]:
        j, i = divmod(pair, size)
        for f in range(X.shape[1]):
            term = factor * S[j, i] * (X[i, f] - apart_y[j, f])
            dXT[f, i] += W[j, i] * (term + slopes[j, i] * (TX[i, f] - TY[j, f])) if slopes.size else term
        S[j, i] = 0
        if slopes.size:
            slopes[j, i] = 0
    if slopes.size:
        multiply(S, W)
        multiply(slopes, W)
        add_rows(dXT, totals[1:], slopes, TY, given, scratch.lines)
    add_rows(dXT, totals[:1], S, Y, given, scratch.lines)


@inline
def add_rows(dXT, total, S, Y, given, lines):
    if given.step.is_of_product:
        add_products(dXT, Y, S, S.dtype.type(1))
    else:
        ones = tile(lines, S.shape[0], 1)
        fill(ones[:, 0], 1)
        add_products(dXT, Y, S, S.dtype.type(-1))
        add_products(total, ones, S, S.dtype.type(1))


@inline
def add_points(dXT, XT, total):
    """dX += total x"""
    for f in range(dXT.shape[0]):
        for i in range(total.size):
            dXT[f, i] += total[i] * XT[f, i]

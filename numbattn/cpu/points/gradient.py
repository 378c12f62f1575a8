"""dx_i = sum_j kappa'_ij <c_i, b_j> 2 (x_i - y_j), or with y_j in place of 2 (x_i - y_j) for a function of x . y"""

import numpy as np

from ...points.kinds import DIFFERENCES
from ..compile import Kernel
from ..product import product
from ..softmax import multiply
from ..subnormals import flush_subnormals, restore
from ..tile import clear, fill, inline, is_set, matrix, tile
from ..transposition import transpose
from .differences import add_differences
from .kinds import DERIVATIVE, apply, step_of
from .pairs import LONG, TILE_N, Points, add_part, pairs_of, parts_of, queries_of, run, sees_nothing
from .sums import add_products


def gradient(problem, inputs, kind, c, rows=None, columns=None):
    """dx, (..., m, d), in the dtype of sums."""
    dx = np.empty((*problem.batch, problem.seqlen_q, problem.head_dim), problem.sum_dtype)
    step = step_of(kind, DERIVATIVE, problem.sum_dtype)
    run(gradient_kernel, problem, inputs, step, dx, b=inputs.v, c=c, rows=rows, columns=columns)
    return dx


@Kernel
def gradient_kernel(first_block, end_block, stop, scratch, x, y, b, c, rows, columns, mask, step, tiles, dx):
    """Blocks [first_block, end_block); a block is a tile of points of x."""
    before, given = flush_subnormals(), Points(x, y, b, c, rows, columns, mask, step)
    for block in range(first_block, end_block):
        at = queries_of(given, tiles[block], scratch)
        differentiate(dx[at.batch, at.head, at.m0 : at.m_end], given, at, scratch, stop)
    restore(before)


@inline
def differentiate(dX, given, at, scratch, stop):
    """dX over all points of y."""
    dtype = dX.dtype
    dXT, lost, part = parts_of(scratch, dX.shape[1], dX.shape[0])
    CT = tile(scratch.CT, given.c.cols, dX.shape[0])
    transpose(CT, matrix(given.c, at.batch, at.head, dtype)[at.m0 : at.m_end], dtype.type(1), False)
    Y, B = matrix(given.y, at.batch, at.head, dtype), matrix(given.b, at.batch, at.head, dtype)
    total = at.vectors[:1]
    for n_next in range(at.first, at.end, LONG):
        clear(part)
        clear(total)
        for n0 in range(n_next, min(n_next + LONG, at.end), TILE_N):
            if is_set(stop):
                return
            n_end = min(n0 + TILE_N, at.end)
            S, columns = pairs_of(given, at, n0, n_end, scratch)
            if S.size:
                apply(S, given.step, at.rows, columns)
                W = tile(scratch.weights, S.shape[0], S.shape[1])
                product(W, B[n0:n_end], CT, dtype.type(1), False)
                multiply(S, W)
                add_gradient(part, total, at.XT, S, Y[n0:n_end], given.step.is_of_product, scratch.lines)
        if not given.step.is_of_product and given.x.cols > DIFFERENCES:
            add_points(part, at.XT, total[0])
        add_part(dXT, lost, part)
    transpose(dX, dXT, dtype.type(1 if given.step.is_of_product else 2), False)
    for i in range(dX.shape[0]):
        if sees_nothing(at, i):
            fill(dX[i], 0)


@inline
def add_gradient(dXT, total, XT, S, Y, is_of_product, lines):
    """Add the terms of the points Y, with weights S, to dX: sum_j S_ij (x_i - y_j), or only the second term, the first
    being x_i times the total of S."""
    one = dXT.dtype.type(1)
    if is_of_product:
        add_products(dXT, Y, S, one)
    elif dXT.shape[0] <= DIFFERENCES:
        add_differences(dXT, XT, Y, S)
    else:
        ones = tile(lines, S.shape[0], 1)
        fill(ones[:, 0], 1)
        add_products(dXT, Y, S, -one)
        add_products(total, ones, S, one)


@inline
def add_points(dXT, XT, total):
    """dX += total x"""
    for f in range(dXT.shape[0]):
        for i in range(total.size):
            dXT[f, i] += total[i] * XT[f, i]

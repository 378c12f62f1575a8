"""o_i = sum_j kappa_ij b_j; and its tangent, if points move: see `moves`."""

import numpy as np

from ...points.kinds import DERIVATIVE, VALUE
from ..product import product_tn, product_tn_row
from ..tile import clear, inline, is_set, matrix
from .kinds import apply, step_of
from .moves import multiply_moves
from .pairs import LONG, TILE_N, add_part, over_tiles, pairs_of, parts_of, run, store

FEW = 4  # columns; fewer are summed one by one


def sums(problem, inputs, kind, rows=None, columns=None, tangents=None, apart=None):
    """o, (..., m, e), in the dtype of sums, or its tangent. The options are those of `run`."""
    o = np.empty(problem.out_shape, problem.sum_dtype)
    step = step_of(kind, DERIVATIVE if tangents else VALUE, problem.sum_dtype)
    given = {"b": inputs.v, "rows": rows, "columns": columns, "tangents": tangents, "apart": apart}
    run(sums_kernel, problem, inputs, step, o, **given)
    return o


@over_tiles
def sums_kernel(given, mask, at, scratch, stop, o):
    """O over all points of y."""
    O = o[at.batch, at.head, at.m0 : at.m_end]
    one, B = O.dtype.type(1), matrix(given.b, at.batch, at.head, O.dtype)
    OT, lost, part = parts_of(scratch, O.shape[1], O.shape[0])
    for n_next in range(at.first, at.end, LONG):
        clear(part)
        for n0 in range(n_next, min(n_next + LONG, at.end), TILE_N):
            if is_set(stop):
                return
            n_end = min(n0 + TILE_N, at.end)
            S, columns, near = pairs_of(given, mask, at, n0, n_end, scratch)
            if S.size:
                apply(S, given.step, at.rows, columns)
                if scratch.moves.size:
                    multiply_moves(S, given, at, n0, near, scratch, given.factor)
                add_products(part, B[n0:n_end], S, one)
        add_part(OT, lost, part)
    store(O, OT, one, mask, at)


@inline
def add_products(out, a, b, alpha):
    """out += alpha a^T b"""
    rows = out.shape[0]
    if rows < FEW:
        for row in range(rows):
            product_tn_row(out[row : row + 1], a[:, row : row + 1], b, alpha, True)
    else:
        product_tn(out, a, b, alpha, True)

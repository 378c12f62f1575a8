"""log sum_j exp(columns_j) kappa_ij, by an online softmax over the points of y"""

import numpy as np

from ...points.kinds import LOGARITHM
from ..softmax import absorb, save_lse, softmax_step
from ..tile import fill, is_set, tile
from .kinds import apply, step_of
from .pairs import LONG, TILE_N, over_tiles, pairs_of, run


def logsumexp(problem, inputs, kind, columns=None, apart=None):
    """(..., m), in the dtype of sums, -inf where nothing is seen, and what its rounding took."""
    lse, low = (np.empty(problem.lse_shape, problem.sum_dtype) for _ in range(2))
    step = step_of(kind, LOGARITHM, problem.sum_dtype)
    run(logsumexp_kernel, problem, inputs, step, lse[..., None], low[..., None], columns=columns, apart=apart)
    return lse, low


@over_tiles
def logsumexp_kernel(given, mask, at, scratch, stop, lse, low):
    """lse and low over all points of y."""
    rows = at.batch, at.head, slice(at.m0, at.m_end), 0
    own, vectors = lse[rows], at.vectors
    O = tile(scratch.sums, own.size, 0)
    m, l, m_next, l_next, alpha, part = vectors[0], vectors[1], vectors[2], vectors[3], vectors[4], vectors[5]
    fill(m, np.finfo(lse.dtype).min)                                # finite, since (-inf) - (-inf) is NaN
    fill(l, 0)
    for n_next in range(at.first, at.end, LONG):
        fill(m_next, np.finfo(lse.dtype).min)
        fill(l_next, 0)
        for n0 in range(n_next, min(n_next + LONG, at.end), TILE_N):
            if is_set(stop):
                return
            S, columns, _ = pairs_of(given, mask, at, n0, min(n0 + TILE_N, at.end), scratch)
            if S.size:
                apply(S, given.step, at.rows, columns)
                softmax_step(S, m_next, l_next, alpha, part)
        absorb(O, m, l, O, m_next, l_next)
    save_lse(own, low[rows], m, l)

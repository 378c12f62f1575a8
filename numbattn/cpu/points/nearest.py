"""The k nearest points of y, in one pass over them; of equally near points, those with the lower numbers."""

import numpy as np

from ...points import formula
from ..tile import fill, inline, is_set, tile
from .kinds import NO_STEP
from .pairs import TILE_N, over_tiles, pairs_of, run

INSERTED = 200  # neighbours, at most: the time to insert grows with the square
SOME = 32  # points of x that are updated one by one if any of them has a nearer point


def nearest(problem, inputs, k, apart=None):
    """t and j, (..., m, k), in the dtype of sums and int32: squared distances in ascending order, and the numbers of
    the points; inf and -1 if fewer than k are visible."""
    if k > INSERTED:
        return formula.nearest(problem, inputs, k)
    t, j = (np.empty((*problem.batch, problem.seqlen_q, k), dtype) for dtype in (problem.sum_dtype, np.int32))
    run(nearest_kernel, problem, inputs, (NO_STEP, None), t, j, apart=apart)
    return t, j


@over_tiles
def nearest_kernel(given, mask, at, scratch, stop, t, j):
    """The nearest of all points of y: their t, in ascending order, and their numbers."""
    size, k = at.m_end - at.m0, t.shape[3]
    best, numbers = tile(scratch.sums, k, size), tile(scratch.numbers, k, size)
    for place in range(best.shape[0]):
        fill(best[place], np.inf)
        fill(numbers[place], -1)
    for n0 in range(at.first, at.end, TILE_N):
        if is_set(stop):
            return
        S, _, _ = pairs_of(given, mask, at, n0, min(n0 + TILE_N, at.end), scratch)
        for row in range(S.shape[0]):
            if best.shape[0] == 1:
                replace(best[0], numbers[0], S[row], n0 + row)
            else:
                insert_some(best, numbers, S[row], n0 + row)
    T, J = t[at.batch, at.head, at.m0 : at.m_end], j[at.batch, at.head, at.m0 : at.m_end]
    for i in range(size):
        for place in range(k):
            T[i, place], J[i, place] = best[place, i], numbers[place, i]


@inline
def replace(best, numbers, t, number):
    """Hidden pairs have t = -inf."""
    zero, number = t.dtype.type(0), np.int32(number)
    for i in range(t.size):
        is_nearer = zero <= t[i] < best[i]
        best[i] = t[i] if is_nearer else best[i]
        numbers[i] = number if is_nearer else numbers[i]


@inline
def insert_some(best, numbers, t, number):
    """Insert a point after all that are equally near."""
    last = best.shape[0] - 1
    for first in range(0, t.size, SOME):
        some = slice(first, min(first + SOME, t.size))
        if any_nearer(t[some], best[last, some]):
            for i in range(some.start, some.stop):
                if 0 <= t[i] < best[last, i]:
                    place = last
                    while place > 0 and best[place - 1, i] > t[i]:
                        best[place, i], numbers[place, i] = best[place - 1, i], numbers[place - 1, i]
                        place -= 1
                    best[place, i], numbers[place, i] = t[i], number


@inline
def any_nearer(t, farthest):
    zero, found = t.dtype.type(0), False
    for i in range(t.size):
        found |= (zero <= t[i]) & (t[i] < farthest[i])                      # not `and`, so that it is vectorised
    return found

"""Tiles of pairs of points: how kernels are called, and the steps of a tile that all of them share.

As everywhere in cpu/ tiles are transposed: a row is a point of y, a column a point of x.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from ...call.problem import NOTHING_HIDDEN
from ...points.kinds import DIFFERENCES, NEAR
from ..arguments import NO_MATRICES, kept, mask_of, matrices_of, memory_of, readable, tiles_of
from ..launch import launch
from ..product import distances, product, row_dots
from ..record import Record
from ..tile import (
    EMPTY,
    FULL,
    OPTIONS,
    PARTIAL,
    band_of,
    clear,
    fill,
    inline,
    intervals_of,
    mask_band,
    mask_cells,
    mask_intervals,
    matrix,
    tile,
    tile_state,
    visible_keys,
)
from ..transposition import transpose

TILE_M, TILE_N = 128, 64  # points of x, of y: 128 x 64 to 512 x 32 are equally fast
LONG = 1024  # points of y that are summed before the sum is added to others, to lose fewer digits
EXPONENTIAL = 32  # the cost of an exponential, in multiplications
PARTS, VECTORS, LINES = 3, 8, 2  # of a PointsScratch
FEW = 256  # near pairs of a tile, which are recomputed one by one


# ---------------------------------------------------------------------------------------------------------- arguments
class Points(NamedTuple):
    """The inputs of a call: Matrices, without rows where nothing is given, a MaskArrays and a Step."""

    x: Any
    y: Any
    b: Any  # a row for each point of y
    c: Any  # a row for each point of x
    rows: Any  # logarithms: one row, a number for each point of x
    columns: Any  # and for each point of y
    mask: Any  # or () for none
    step: Any
    apart: Any  # an Apart


class Apart(NamedTuple):
    """Points whose differences are taken: those of Points, without rows here, or, beyond DIFFERENCES features, the
    points as they were given. And tangents of points of unit length, without rows if there are none."""

    x: Any  # Matrices
    y: Any
    tx: Any
    ty: Any
    slope: Any  # the Step of kappa', beside that of kappa''
    factor: Any  # of differences, for unit length
    rate: Any  # of their squares


class PointsScratch(NamedTuple):
    """Memory of one thread, for one tile at a time."""

    S: Any  # t, then the function of a kind
    weights: Any  # of a tile like S
    XT: Any
    CT: Any
    sums: Any  # PARTS tiles of a row for each column of a result
    vectors: Any  # numbers of points of x, VECTORS of them
    lines: Any  # numbers of points of y, LINES of them
    apart: Any  # as XT, of an Apart
    tangents: Any
    moves: Any  # of a tile like S
    slopes: Any  # likewise
    again: Any  # t of a tile, by differences
    numbers: Any  # int32, a row for each column of a result
    near: Any  # int32, FEW pairs


def run(
    kernel, problem, inputs, step, *results, b=None, c=None, rows=None, columns=None, apart=None, slope=None,
    tangents=None,
):  # fmt: skip
    """Call a kernel of (first block, end block, stop, scratch, Points, tiles, results).

    step, slope: as from step_of; results: arrays (..., m, columns). apart: a `kinds.Apart`; tangents: of x and of y.
    """
    (step, function), (slope, other) = step, slope or step
    vectors = [None if x is None else x[..., None, :] for x in (rows, columns)]
    x, y, rate = apart or (inputs.q, inputs.k, 1.0)
    others = (x, y) if problem.head_dim > DIFFERENCES else (None, None)
    given = inputs.q, inputs.k, b, c, *vectors, *others, *(tangents or (None, None))
    given = [None if x is None else readable(x, problem.sum_dtype) for x in given]
    *matrices, x, y, tx, ty = [NO_MATRICES if x is None else matrices_of(x, problem) for x in given]
    of_heads = [x.reshape(*problem.matrices, *x.shape[-2:]) for x in results]
    tiles, pairs = tiles_record(problem, inputs.mask)
    moves = tangents is not None
    scratch, memory = scratch_of(problem, results[0].shape[-1], results[-1].dtype, c is not None, moves)
    mask = Record(()) if inputs.mask is NOTHING_HIDDEN else mask_of(problem, inputs.mask)
    apart = Apart(x, y, tx, ty, slope, math.sqrt(rate), rate)
    records = (
        Record(*matrices, held=given), mask, Record(step, apart, held=(function, other)),
        tiles, Record(*of_heads),
    )  # fmt: skip
    cost = problem.head_dim + results[0].shape[-1] + (0 if b is None else b.shape[-1]) + EXPONENTIAL
    launch(kernel.given(scratch, *records), len(tiles.arguments[0]), pairs * cost, memory)


@kept
def tiles_record(problem, mask):
    """The Record of tiles of points of x, and how many pairs they have."""
    tiles = tiles_of(problem, mask, TILE_M)
    return Record(tiles.table), tiles.pairs


def scratch_of(problem, columns, dtype, has_weights, moves):
    """The Record of a PointsScratch, whose addresses count from its beginning, and a function that allocates its
    memory. columns, dtype: of the results."""
    tile_m, tile_n = min(TILE_M, problem.seqlen_q), min(TILE_N, problem.seqlen_k)
    points, pairs, is_wide = tile_m * problem.head_dim, tile_m * tile_n, problem.head_dim > DIFFERENCES
    sizes = (pairs, pairs * has_weights, points, tile_m * problem.head_dim_v * has_weights, PARTS * tile_m * columns,
             tile_m * VECTORS, LINES * tile_n, points * is_wide, points * moves, pairs * moves, pairs * moves,
             pairs * is_wide, tile_m * columns * (dtype == np.int32), FEW * is_wide)  # fmt: skip
    return memory_of(PointsScratch, sizes, [problem.sum_dtype] * (len(sizes) - 2) + [np.dtype(np.int32)] * 2)


# -------------------------------------------------------------------------------------------------------------- masks
def by_mask(masked, whole):
    """A function in compiled code: `masked`, or `whole` without a mask, which is the first argument. Steps of masks
    take a third of a kernel's compile time."""

    def chosen(mask, *others):
        raise NotImplementedError

    @overload(chosen, jit_options=dict(OPTIONS), strict=False)
    def of_kind(mask, *others):
        return whole if mask == types.Tuple(()) else masked

    return chosen


def visible_points(mask, batch, head, m0, m_end, first, end):
    band, intervals = band_of(mask, batch, head), intervals_of(mask, batch, head)
    first, end = visible_keys(band, intervals, m0, m_end, first, end)
    return band, intervals, first, end


def all_points(mask, batch, head, m0, m_end, first, end):
    return (), (), first, end


def masked_state(mask, at, n0, n_end):
    return tile_state(mask, at.intervals, at.batch, at.head, at.m0, at.m_end, n0, n_end)


def full_state(mask, at, n0, n_end):
    return FULL


def hide(mask, S, at, n0, state):
    """S = -inf where it is hidden."""
    mask_band(S, at.band, at.m0, n0)
    mask_intervals(S, at.intervals, at.m0, n0)
    if state == PARTIAL:
        mask_cells(S, mask, at.batch, at.head, at.m0, n0)


def hide_nothing(mask, S, at, n0, state):
    pass


def is_blind(band, intervals, m):
    return m >= band[2] or (intervals.size > 0 and intervals[0, m] >= intervals[1, m])


def sees_all(band, intervals, m):
    return False


points_seen, state_of = by_mask(visible_points, all_points), by_mask(masked_state, full_state)
hide_masked, sees_none = by_mask(hide, hide_nothing), by_mask(is_blind, sees_all)


# -------------------------------------------------------------------------------------------------------------- tiles
class PointsQueries(NamedTuple):
    """A tile of points [m0, m_end) of x, which see points [first, end) of y."""

    batch: Any
    head: Any
    m0: Any
    m_end: Any
    first: Any
    end: Any
    band: Any
    intervals: Any
    XT: Any
    TXT: Any  # of tangents, empty without them
    norms: Any
    rows: Any  # logarithms
    vectors: Any  # more memory like these


@inline
def queries_of(given, row, scratch):
    """The PointsQueries of a row of WorkTiles.table."""
    batch, head, m0, m_end, segment, segment_end, _ = row
    dtype, size = scratch.S.dtype, m_end - m0
    band, intervals, first, end = points_seen(given.mask, batch, head, m0, m_end, segment, segment_end)
    X, XT = matrix(given.x, batch, head, dtype)[m0:m_end], tile(scratch.XT, given.x.cols, size)
    transpose(XT, X, dtype.type(1), False)
    TXT = tile(scratch.tangents, given.apart.tx.cols, size)
    if TXT.size:
        transpose(TXT, matrix(given.apart.tx, batch, head, dtype)[m0:m_end], dtype.type(1), False)
    vectors = tile(scratch.vectors, VECTORS, size)
    norms, rows = vectors[0], vectors[1]
    row_dots(norms, X, X)
    load(rows, given.rows, batch, head, m0)
    return PointsQueries(batch, head, m0, m_end, first, end, band, intervals, XT, TXT, norms, rows, vectors[2:])


@inline
def sees_nothing(at, i):
    """Whether the point m0 + i of x is outside of the mask's band or has an empty interval, and may be NaN."""
    return sees_none(at.band, at.intervals, at.m0 + i)


@inline
def load(out, x, batch, head, first):
    """Load the numbers of points from `first` on, or zeros if none are given."""
    fill(out, 0)
    if x.rows:
        given = matrix(x, batch, head, out.dtype)[0]
        for i in range(out.size):
            out[i] = given[first + i]


@inline
def pairs_of(given, at, n0, n_end, scratch):
    """t of pairs with the points [n0, n_end) of y, -inf where hidden, which no t is, and the logarithms of these
    points; both are empty if everything is hidden. And how many pairs are near each other."""
    state = state_of(given.mask, at, n0, n_end)
    n_end = n0 if state == EMPTY else n_end
    S, lines = tile(scratch.S, n_end - n0, at.m_end - at.m0), tile(scratch.lines, LINES, n_end - n0)
    norms, columns, near = lines[0], lines[1], 0
    if state == EMPTY:
        return S, columns, near
    Y = matrix(given.y, at.batch, at.head, S.dtype)[n0:n_end]
    if given.step.is_of_product:
        product(S, Y, at.XT, S.dtype.type(1), False)
    elif given.x.cols <= DIFFERENCES:
        distances(S, Y, at.XT, S.dtype.type(given.apart.rate), False)
    else:
        product(S, Y, at.XT, S.dtype.type(-2), False)
        row_dots(norms, Y, Y)
        if add_norms(S, at.norms, norms):
            near = recompute(S, given, at, n0, norms, scratch)
    hide_masked(given.mask, S, at, n0, state)
    load(columns, given.columns, at.batch, at.head, n0)
    return S, columns, near


@inline
def recompute(S, given, at, n0, norms, scratch):
    """t of near pairs, from the differences of points: they are the first of scratch.near, and their number is
    returned. t of other pairs stays: passes over the same pairs are to agree on it, whatever the tile."""
    real, count, size, bound = S.dtype.type, 0, S.shape[1], S.dtype.type(NEAR)
    for j in range(S.shape[0]):
        for i in range(size):
            if S[j, i] < bound * (at.norms[i] + norms[j]):
                if count < FEW:
                    scratch.near[count] = j * size + i
                count += 1
    X, Y = points_apart(given, at, n0, n0 + S.shape[0], real)
    if count > FEW:
        XT, again = tile(scratch.apart, X.shape[1], size), tile(scratch.again, S.shape[0], size)
        transpose(XT, X, real(1), False)
        distances(again, Y, XT, real(given.apart.rate), False)
        for j in range(S.shape[0]):
            for i in range(size):
                S[j, i] = again[j, i] if S[j, i] < bound * (at.norms[i] + norms[j]) else S[j, i]
        return count
    for pair in scratch.near[:count]:
        (j, i), t = divmod(pair, size), real(0)
        for f in range(X.shape[1]):
            t += (X[i, f] - Y[j, f]) * (X[i, f] - Y[j, f])
        S[j, i] = t * real(given.apart.rate)
    return count


@inline
def points_apart(given, at, n0, n_end, dtype):
    """Points x and y of a tile, whose differences are taken: as they were given, if that is not their place."""
    x, y = (given.apart.x, given.apart.y) if given.x.cols > DIFFERENCES else (given.x, given.y)
    return matrix(x, at.batch, at.head, dtype)[at.m0 : at.m_end], matrix(y, at.batch, at.head, dtype)[n0:n_end]


@inline
def parts_of(scratch, rows, cols):
    """Tiles for a sum, for its rounding error, and for a part of it."""
    size = rows * cols
    total, lost = tile(scratch.sums, rows, cols), tile(scratch.sums[size:], rows, cols)
    clear(total)
    clear(lost)
    return total, lost, tile(scratch.sums[2 * size :], rows, cols)


@inline
def add_part(total, lost, part):
    """total += part. The rounding error is added to the next part, so that no digits are lost in many parts."""
    for row in range(part.shape[0]):
        for i in range(part.shape[1]):
            x = part[row, i] - lost[row, i]
            new = total[row, i] + x
            rest = (new - total[row, i]) - x
            total[row, i], lost[row, i] = new, rest if rest == rest else part.dtype.type(0)     # of infinite sums NaN


@inline
def store(out, total, factor, at):
    """A sum of a tile, times a factor; 0 for points that see nothing, which may be NaN."""
    transpose(out, total, factor, False)
    for i in range(out.shape[0]):
        if sees_nothing(at, i):
            fill(out[i], 0)


@inline
def add_norms(S, of_x, of_y):
    """|x|**2 + |y|**2 - 2 x y, and whether any is so small that few digits are left. S: the last term."""
    bound, is_near = S.dtype.type(NEAR), False
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            norms = of_x[i] + of_y[j]
            t = S[j, i] + norms
            is_near |= t < bound * norms
            S[j, i] = t
    return is_near

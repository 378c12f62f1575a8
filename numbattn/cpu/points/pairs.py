"""Tiles of pairs of points: how kernels are called, and the steps of a tile that all of them share.

As everywhere in cpu/ tiles are transposed: a row is a point of y, a column a point of x.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ...call.problem import NOTHING_HIDDEN
from ...points.kinds import DIFFERENCES, NEAR
from ..arguments import mask_of, record_of_tiles
from ..compile import Kernel
from ..launch import launch
from ..operands import MATRIX, Operands
from ..product import distances, product, row_dots
from ..record import Record
from ..scratch import memory_of
from ..subnormals import flush_subnormals, restore
from ..tile import EMPTY, FULL, clear, contiguous_view, fill, hide, inline, keys_seen, matrix, tile, tile_state
from ..transposition import transpose

TILE_M, TILE_N = 128, 64  # points of x, of y: 128 x 64 to 512 x 32 are equally fast
LONG = 1024  # points of y that are summed before the sum is added to others, to lose fewer digits
EXPONENTIAL = 32  # the cost of an exponential, in multiplications
PARTS, VECTORS, LINES = 3, 8, 2  # of a PointsScratch
FEW = 256  # near pairs of a tile, which are recomputed one by one


# ---------------------------------------------------------------------------------------------------------- arguments
class Points(NamedTuple):
    """The inputs of a call, in the order of its Records: Matrices, without rows where nothing is given, and Steps."""

    x: Any
    y: Any
    b: Any  # a row for each point of y
    c: Any  # a row for each point of x
    rows: Any  # logarithms: one row, a number for each point of x
    columns: Any  # and for each point of y
    apart_x: Any  # beyond DIFFERENCES features, points as they were given, whose differences are taken
    apart_y: Any
    tx: Any  # tangents of points of unit length
    ty: Any
    step: Any
    slope: Any  # of kappa', beside that of kappa''
    factor: Any  # of differences, for unit length
    rate: Any  # of their squares


ARRAYS = Operands(**dict.fromkeys(Points._fields[:10], MATRIX))


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
    """Call a kernel from `over_tiles`.

    step, slope: as from step_of; results: arrays (..., m, columns). apart: a `kinds.Apart`; tangents: of x and of y.
    """
    (step, function), (slope, other) = step, slope or step
    (x, y, rate), arrays = apart or (inputs.q, inputs.k, 1.0), {"x": inputs.q, "y": inputs.k, "b": b, "c": c}
    arrays |= {name: None if x is None else x[..., None, :] for name, x in (("rows", rows), ("columns", columns))}
    if problem.head_dim > DIFFERENCES:
        arrays |= {"apart_x": x, "apart_y": y}
    if tangents is not None:
        arrays["tx"], arrays["ty"] = tangents
    tiles, table = record_of_tiles(problem, inputs.mask, TILE_M)
    scratch, nbytes = scratch_of(problem, results[0].shape[-1], results[-1].dtype, c is not None, tangents is not None)
    records = (
        ARRAYS.record(problem, arrays), Record(step, slope, math.sqrt(rate), rate, held=(function, other)),
        Record(None) if inputs.mask is NOTHING_HIDDEN else mask_of(problem, inputs.mask), table,
        Record(*[x.reshape(*problem.matrices, *x.shape[-2:]) for x in results]),
    )  # fmt: skip
    cost = problem.head_dim + results[0].shape[-1] + (0 if b is None else b.shape[-1]) + EXPONENTIAL
    launch(kernel.given(scratch, *records), len(tiles.table), tiles.pairs * cost, nbytes)


def scratch_of(problem, columns, dtype, has_weights, moves):
    """The Record of a PointsScratch, whose addresses count from its beginning, and its bytes. columns, dtype: of the
    results."""
    tile_m, tile_n = min(TILE_M, problem.seqlen_q), min(TILE_N, problem.seqlen_k)
    points, pairs, is_wide = tile_m * problem.head_dim, tile_m * tile_n, problem.head_dim > DIFFERENCES
    sizes = (pairs, pairs * has_weights, points, tile_m * problem.head_dim_v * has_weights, PARTS * tile_m * columns,
             tile_m * VECTORS, LINES * tile_n, points * is_wide, points * moves, pairs * moves, pairs * moves,
             pairs * is_wide, tile_m * columns * (dtype == np.int32), FEW * is_wide)  # fmt: skip
    dtypes = [problem.sum_dtype] * (len(sizes) - 2) + [np.dtype(np.int32)] * 2
    return memory_of(PointsScratch, zip(sizes, dtypes))


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


def over_tiles(function):
    """Decorate a function (given, mask, at, scratch, stop, *results) of a tile of points of x: it becomes the Kernel
    that is called for all of them. mask: or None, for which the kernel is compiled apart, in two thirds of the time."""
    of_tile = inline(function)

    def kernel(first_block, end_block, stop, scratch, given: Points, mask, tiles, *results):
        before = flush_subnormals()
        for block in range(first_block, end_block):
            of_tile(given, mask, queries_of(given, mask, tiles[block], scratch), scratch, stop, *results)
        restore(before)

    kernel.__name__ = kernel.__qualname__ = function.__name__
    return Kernel(kernel)


@inline
def queries_of(given, mask, row, scratch):
    """The PointsQueries of a row of WorkTiles.table."""
    batch, head, m0, m_end, segment, segment_end, _ = row
    dtype, size = scratch.S.dtype, m_end - m0
    if mask is None:
        band, intervals, first, end = (0, 0, 0, 0), contiguous_view(0, 0, 0, 0, np.int64), segment, segment_end
    else:
        band, intervals, first, end = keys_seen(mask, batch, head, m0, m_end, segment, segment_end)
    X, XT = matrix(given.x, batch, head, dtype)[m0:m_end], tile(scratch.XT, given.x.cols, size)
    transpose(XT, X, dtype.type(1), False)
    TXT = tile(scratch.tangents, given.tx.cols, size)
    if TXT.size:
        transpose(TXT, matrix(given.tx, batch, head, dtype)[m0:m_end], dtype.type(1), False)
    vectors = tile(scratch.vectors, VECTORS, size)
    norms, rows = vectors[0], vectors[1]
    row_dots(norms, X, X)
    load(rows, given.rows, batch, head, m0)
    return PointsQueries(batch, head, m0, m_end, first, end, band, intervals, XT, TXT, norms, rows, vectors[2:])


@inline
def sees_nothing(mask, at, i):
    """Whether the point m0 + i of x is outside of the mask's band or has an empty interval, and may be NaN."""
    if mask is None:
        return False
    m = at.m0 + i
    return m >= at.band[2] or (at.intervals.size > 0 and at.intervals[0, m] >= at.intervals[1, m])


@inline
def load(out, x, batch, head, first):
    """Load the numbers of points from `first` on, or zeros if none are given."""
    fill(out, 0)
    if x.rows:
        given = matrix(x, batch, head, out.dtype)[0]
        for i in range(out.size):
            out[i] = given[first + i]


@inline
def pairs_of(given, mask, at, n0, n_end, scratch):
    """t of pairs with the points [n0, n_end) of y, -inf where hidden, which no t is, and the logarithms of these
    points; both are empty if everything is hidden. And how many pairs are near each other."""
    state = FULL
    if mask is not None:
        state = tile_state(mask, at.intervals, at.batch, at.head, at.m0, at.m_end, n0, n_end)
    n_end = n0 if state == EMPTY else n_end
    S, lines = tile(scratch.S, n_end - n0, at.m_end - at.m0), tile(scratch.lines, LINES, n_end - n0)
    norms, columns, near = lines[0], lines[1], 0
    if state == EMPTY:
        return S, columns, near
    Y = matrix(given.y, at.batch, at.head, S.dtype)[n0:n_end]
    if given.step.is_of_product:
        product(S, Y, at.XT, S.dtype.type(1), False)
    elif given.x.cols <= DIFFERENCES:
        distances(S, Y, at.XT, S.dtype.type(given.rate), False)
    else:
        product(S, Y, at.XT, S.dtype.type(-2), False)
        row_dots(norms, Y, Y)
        if add_norms(S, at.norms, norms):
            near = recompute(S, given, at, n0, norms, scratch)
    if mask is not None:
        hide(S, mask, at, n0, state)
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
        distances(again, Y, XT, real(given.rate), False)
        for j in range(S.shape[0]):
            for i in range(size):
                S[j, i] = again[j, i] if S[j, i] < bound * (at.norms[i] + norms[j]) else S[j, i]
        return count
    for pair in scratch.near[:count]:
        (j, i), t = divmod(pair, size), real(0)
        for f in range(X.shape[1]):
            t += (X[i, f] - Y[j, f]) * (X[i, f] - Y[j, f])
        S[j, i] = t * real(given.rate)
    return count


@inline
def points_apart(given, at, n0, n_end, dtype):
    """Points x and y of a tile, whose differences are taken: as they were given, if that is not their place."""
    x, y = (given.apart_x, given.apart_y) if given.x.cols > DIFFERENCES else (given.x, given.y)
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
def store(out, total, factor, mask, at):
    """A sum of a tile, times a factor; 0 for points that see nothing, which may be NaN."""
    transpose(out, total, factor, False)
    for i in range(out.shape[0]):
        if sees_nothing(mask, at, i):
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

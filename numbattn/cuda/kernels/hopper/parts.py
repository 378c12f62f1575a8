"""Points of float32 as sums of three bfloat16 parts, whose products wgmma computes; and a number for each point.

Three times 8 bits are the 24 of float32. The terms of a product x y that count are x1 y1, x1 y2 + x2 y1 and x1 y3 +
x2 y2 + x3 y1; the others are less than a rounding error of float32.

Points may have a short form, too, which is all that a faster kernel needs: the first of these parts, if points have
no more digits; or two parts of float16, twice 11 bits and their signs, with the terms x1 y1 and x1 y2 + x2 y1. float16
has few exponents, so the device counts points that are not their short form to within a rounding error of float32: too
large ones, those not finite, and those whose second part is subnormal beside their length. If there are any, the kernel
for all parts computes what the faster one leaves.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from ...build import Source
from ...compiler import types
from ...tile import (
    Alignment,
    aligned,
    anywhere,
    atomic_add,
    bfloat16,
    block_index,
    convert,
    device,
    full,
    load,
    row_index,
    row_sum,
    save,
    shape,
    simt,
    where,
)
from ...tile.alignment import VECTOR_BYTES
from ...words.arguments import Argument, Matrix
from ...words.numbers import LOG2_E
from ...words.signatures import array_type, signature_of
from ...words.spec import Spec
from ..points.arguments import COLUMNS, VECTORS
from ..points.norms import LANES, THREADS, TILES, Norms, padded_length
from ..shared.schedule import overlap_launches, place

PARTS, WIDTH = 3, 64  # WIDTH: columns of a box
FIRST, SHORT = 1, 2  # how many parts short forms have; 0: none
DTYPES_OF_PARTS = {FIRST: bfloat16, SHORT: np.dtype(np.float16), PARTS: bfloat16}
SCALES = {FIRST: 1.0, SHORT: 64.0, PARTS: 1.0}  # of points: all of length 0.03 to 1,000 are in range
ROUNDING = 2.0**-23  # of a point's length
MOST_ROOM = 8
HALF_NORMS, LOGARITHMS = "half norms", "logarithms"


def point_parts(*, dim, nbytes, numbers, given=(), short=0):
    """The kernel for rows of dim columns, a multiple of WIDTH; nbytes: alignment of the rows.

    numbers: HALF_NORMS, -|x|^2 / 2; LOGARITHMS, (columns - |y|^2 / 2) log2(e), -inf after the last point, with columns
    if these are given; or "", none. short: the short form; its parts of float16 are saved as well.
    """
    ACC, HAS_COLUMNS, OF_Y, HAS_LINE = np.float32, COLUMNS in given, numbers == LOGARITHMS, numbers != ""
    OF_HALVES, HAS_SHORT, IS_SAVED = short == FIRST, short > 0, short == SHORT
    TILE_M, ROWS_OF, COLS, CHUNKS = TILES.tile_m, Alignment(nbytes), WIDTH, dim // WIDTH
    TILE = simt(TILES.tile_m, COLS, THREADS, LANES, 8)
    ROWS, ZERO, HALF, LOG2E, NOTHING = TILE.row_vector(), ACC(0), ACC(-1 / 2), ACC(LOG2_E), ACC(-np.inf)
    ONE, SQUARE = np.uint32(1), ACC(ROUNDING**2)
    save_parts, (save_short, left_of) = parts_step(PARTS)[0], parts_step(short or FIRST)

    @device
    def numbers_of(norms, vectors, scales, batch, head, m0, length):
        if not OF_Y:
            return norms * HALF
        found = norms * HALF
        if OF_HALVES:
            found = found * scales[0]
        if HAS_COLUMNS:
            found = found + load(vectors.columns[0][batch, head], ROWS, m0)
        return where(row_index(ROWS, m0) < length, found * LOG2E, NOTHING)

    def kernel(mX, vectors, mParts, lines, counts, scales, mShort):
        overlap_launches()
        batches, heads, _, _ = shape(mParts)
        tile, batch, head = place(block_index(), batches * heads, heads)
        X, parts, m0 = mX[batch, head], mParts[batch, head], tile * TILE_M
        norms, left = full(ROWS, ZERO), full(ROWS, ZERO)
        for chunk in range(CHUNKS):
            points, columns = load(aligned(X[:, chunk * COLS :], ROWS_OF), TILE, m0), chunk * COLS
            norms = norms + row_sum(points * points)
            save_parts(points, parts[:, columns:], m0)
            if IS_SAVED:
                save_short(points, mShort[0][batch, head][:, columns:], m0)
            if HAS_SHORT:
                rest = left_of(points)
                left = left + row_sum(rest * rest)
        if HAS_SHORT and anywhere(~(left <= norms * SQUARE)):      # so is NaN
            atomic_add(counts[0], 0, ONE)
        if HAS_LINE:
            length, _ = shape(X)
            save(lines[0][batch, head], numbers_of(norms, vectors, scales, batch, head, m0, length), m0)

    spec = {(HALF_NORMS, 0): OF_X, (HALF_NORMS, FIRST): OF_X_IN_HALVES, (HALF_NORMS, SHORT): OF_X_AND_SHORT,
            (LOGARITHMS, 0): OF_Y_AND_COLUMNS, (LOGARITHMS, FIRST): OF_Y_IN_HALVES,
            (LOGARITHMS, SHORT): OF_Y_AND_SHORT, ("", 0): OF_B}[numbers, short]  # fmt: skip
    return Source(kernel, signature_of(kernel, spec.arguments, np.dtype(ACC), ACC, given=given), THREADS, overlaps=True)


def parts_step(count):
    """Device functions: (points, matrix, m0) saves `count` parts of points, one below the other; (points) -> what is
    left without them."""
    COUNT, DTYPE, SCALE, ACC = count, DTYPES_OF_PARTS[count], np.float32(SCALES[count]), np.float32
    INVERSE, VECTORS_OF = np.float32(1 / SCALES[count]), Alignment(VECTOR_BYTES)

    @device
    def save_parts(points, matrix, m0):
        (rows, _), rest = shape(matrix), points * SCALE
        for number in range(COUNT):
            part = convert(rest, DTYPE)
            save(aligned(matrix, VECTORS_OF), part, number * (rows // COUNT) + m0)
            rest = rest - convert(part, ACC)

    @device
    def left_of(points):
        rest = points * SCALE
        for _ in range(COUNT):
            rest = rest - convert(convert(rest, DTYPE), ACC)
        return rest * INVERSE

    return save_parts, left_of


def feature_lines(*, count):
    """The kernel that copies each of `count` features of b to a line of its own, with zeros after the last row."""
    COUNT, ACC, TILE_M = count, np.float32, TILES.tile_m
    ROWS = simt(TILES.tile_m, LANES, THREADS, LANES, 1).row_vector()

    def kernel(mB, mLines):
        overlap_launches()
        batches, heads, length = shape(mLines)
        tile, batch, head = place(block_index(), batches * heads, heads)
        B, line, m0 = mB[batch, head], mLines[batch, head], tile * TILE_M
        for number in range(COUNT):
            save(line, load(B[:, number], ROWS, m0), number * (length // COUNT) + m0)

    return Source(kernel, signature_of(kernel, AS_LINES.arguments, np.dtype(ACC), ACC), THREADS, overlaps=True)


@dataclass(frozen=True)
class PartsOfRows(Argument):
    """A temporary for the parts, one below the other, or its tensor map."""

    name: str
    heads: str
    columns: str = "head_dim"  # how many there are
    count: int = PARTS
    is_map: bool = False

    def find(self, planner, work):
        problem = work.problem
        rows = self.count * padded_length(problem, self.heads)
        shape = *problem.lse_shape[:-1], rows, whole_boxes(getattr(problem, self.columns))
        planner.add_temporary(self.name, shape, DTYPES_OF_PARTS[self.count])

    def flat(self, planner, work):
        yield planner.at(self.name, self.heads)

    def type(self, about):
        return types.uint64 if self.is_map else array_type(DTYPES_OF_PARTS[self.count], 4)

    @property
    def map(self):
        return replace(self, is_map=True)


def whole_boxes(columns):
    """The number of columns, rounded up to whole boxes."""
    return -(-columns // WIDTH) * WIDTH


def take_little_room(problem):
    """Whether the parts of all points have at most MOST_ROOM times the elements of the inputs. They have more for many
    small matrices, which are padded, and for points that many matrices share."""
    rows = padded_length(problem, "q") + padded_length(problem, "k")
    given = sum(
        math.prod(size for size, stride in zip(shape, strides) if stride)
        for shape, strides in zip(problem.shapes, problem.strides)
    )
    return math.prod(problem.batch) * rows * whole_boxes(problem.head_dim) <= MOST_ROOM * given


def fits_parts(problem):
    """Whether wgmma may multiply parts of these points: without masks, so that every y is in sight."""
    return problem.dtype == np.float32 and not problem.mask_kinds and take_little_room(problem)


class FeatureLines(Norms):
    """A temporary for the features of b, one line after the other: (batch, heads, features * padded length)."""

    def find(self, planner, work):
        problem = work.problem
        size = problem.head_dim_v * padded_length(problem, self.heads)
        planner.add_temporary(self.name, (*problem.lse_shape[:-1], size), problem.sum_dtype)


def blocks_of(heads):
    """As Spec.blocks: one for each tile of rows with the heads of "q" or of "k"."""
    return lambda work, tiles, m_blocks, n_blocks: (
        work.problem.heads * padded_length(work.problem, heads) // TILES.tile_m
    )


class InexactPoints(Argument):
    """A temporary that is 0 if all points are their short form."""

    name = "inexact points"

    def find(self, planner, work):
        planner.add_temporary(self.name, (1,), np.dtype(np.uint32), is_zero=True)

    def flat(self, planner, work):
        yield planner.whole(self.name)

    def type(self, about):
        return array_type(np.uint32, 1)


INEXACT_POINTS = InexactPoints()


def spec_of(matrix, parts, numbers, line=(), vectors=(), short=0, saved=()):
    """The Spec for the parts of a Matrix and the line of its numbers; short: the short form, with its parts if saved.
    """
    return Spec(
        point_parts,
        (matrix, vectors, parts, line, (INEXACT_POINTS,) * (short > 0), ("scale",) * (short == FIRST), saved),
        tiles=lambda work: (TILES,),
        parameters=lambda work, tiles: {
            "dim": whole_boxes(getattr(work.problem, parts.columns)), "nbytes": work.nbytes, "numbers": numbers,
            "given": (COLUMNS,) * (vectors is VECTORS and COLUMNS in work.dtypes), "short": short,
        },
        blocks=blocks_of(parts.heads),
    )  # fmt: skip


LINE_OF_X, LINE_OF_Y, LINES_OF_B = Norms("line of x", "q"), Norms("line of y", "k"), FeatureLines("lines of b", "k")
PARTS_OF_X, PARTS_OF_Y = PartsOfRows("parts of x", "q"), PartsOfRows("parts of y", "k")
PARTS_OF_B = PartsOfRows("parts of b", "k", "head_dim_v")
OF_X, OF_Y = (spec_of(Matrix(name, parts.heads), parts, HALF_NORMS, (line,)) for name, parts, line in (
    ("q", PARTS_OF_X, LINE_OF_X), ("k", PARTS_OF_Y, LINE_OF_Y)))  # fmt: skip
OF_Y_AND_COLUMNS = spec_of(Matrix("k", "k"), PARTS_OF_Y, LOGARITHMS, (LINE_OF_Y,), VECTORS)
OF_X_IN_HALVES = spec_of(Matrix("q"), PARTS_OF_X, HALF_NORMS, (LINE_OF_X,), short=FIRST)
OF_Y_IN_HALVES = spec_of(Matrix("k", "k"), PARTS_OF_Y, LOGARITHMS, (LINE_OF_Y,), VECTORS, FIRST)
SHORT_OF_X, SHORT_OF_Y = PartsOfRows("short x", "q", count=SHORT), PartsOfRows("short y", "k", count=SHORT)
OF_X_AND_SHORT = spec_of(Matrix("q"), PARTS_OF_X, HALF_NORMS, (LINE_OF_X,), (), SHORT, (SHORT_OF_X,))
OF_Y_AND_SHORT = spec_of(Matrix("k", "k"), PARTS_OF_Y, LOGARITHMS, (LINE_OF_Y,), VECTORS, SHORT, (SHORT_OF_Y,))
OF_B = spec_of(Matrix("v", "k"), PARTS_OF_B, "")
AS_LINES = Spec(
    feature_lines,
    (Matrix("v", "k"), LINES_OF_B),
    tiles=lambda work: (TILES,),
    parameters=lambda work, tiles: {"count": work.problem.head_dim_v},
    blocks=blocks_of("k"),
)

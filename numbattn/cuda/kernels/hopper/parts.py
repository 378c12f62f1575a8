"""Points of float32 as sums of three bfloat16 parts, whose products wgmma computes; and a number for each point.

Three times 8 bits are the 24 of float32. The terms of a product x y that count are x1 y1, x1 y2 + x2 y1 and x1 y3 +
x2 y2 + x3 y1; the others are less than a rounding error of float32.
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
MOST_ROOM = 8
HALF_NORMS, LOGARITHMS = "half norms", "logarithms"


def point_parts(*, dim, nbytes, numbers, given=(), of_halves=False):
    """The kernel for rows of dim columns, a multiple of WIDTH; nbytes: alignment of the rows.

    numbers: HALF_NORMS, -|x|^2 / 2; LOGARITHMS, (columns - |y|^2 / 2) log2(e), -inf after the last point, with columns
    if these are given; or "", none. of_halves: see `hopper_logsumexp`.
    """
    BFLOAT16, ACC, HAS_COLUMNS = bfloat16, np.float32, COLUMNS in given
    OF_Y, HAS_LINE, OF_HALVES = numbers == LOGARITHMS, numbers != "", of_halves
    TILE_M, ROWS_OF, VECTORS_OF = TILES.tile_m, Alignment(nbytes), Alignment(VECTOR_BYTES)
    COLS, CHUNKS = WIDTH, dim // WIDTH
    TILE = simt(TILES.tile_m, COLS, THREADS, LANES, 8)
    ROWS, ZERO, HALF, LOG2E, NOTHING = TILE.row_vector(), ACC(0), ACC(-1 / 2), ACC(LOG2_E), ACC(-np.inf)
    ONE = np.uint32(1)

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

    @device
    def count(inexact, rest, number):
        if number == 0 and anywhere(rest != ZERO):
            atomic_add(inexact, 0, ONE)

    def kernel(mX, vectors, mParts, lines, counts, scales):
        overlap_launches()
        batches, heads, rows, _ = shape(mParts)
        tile, batch, head = place(block_index(), batches * heads, heads)
        X, parts, m0 = mX[batch, head], mParts[batch, head], tile * TILE_M
        norms = full(ROWS, ZERO)
        for chunk in range(CHUNKS):
            rest = load(aligned(X[:, chunk * COLS :], ROWS_OF), TILE, m0)
            norms = norms + row_sum(rest * rest)
            for number in range(PARTS):
                part = convert(rest, BFLOAT16)
                save(aligned(parts[:, chunk * COLS :], VECTORS_OF), part, number * (rows // PARTS) + m0)
                rest = rest - convert(part, ACC)
                if OF_HALVES:
                    count(counts[0], rest, number)
        if HAS_LINE:
            length, _ = shape(X)
            save(lines[0][batch, head], numbers_of(norms, vectors, scales, batch, head, m0, length), m0)

    spec = {(HALF_NORMS, False): OF_X, (HALF_NORMS, True): OF_X_IN_HALVES, (LOGARITHMS, False): OF_Y_AND_COLUMNS,
            (LOGARITHMS, True): OF_Y_IN_HALVES, ("", False): OF_B}[numbers, of_halves]  # fmt: skip
    return Source(kernel, signature_of(kernel, spec.arguments, np.dtype(ACC), ACC, given=given), THREADS, overlaps=True)


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
    is_map: bool = False

    def find(self, planner, work):
        problem = work.problem
        rows = PARTS * padded_length(problem, self.heads)
        shape = *problem.lse_shape[:-1], rows, whole_boxes(getattr(problem, self.columns))
        planner.add_temporary(self.name, shape, bfloat16)

    def flat(self, planner, work):
        yield planner.at(self.name, self.heads)

    def type(self, about):
        return types.uint64 if self.is_map else array_type(bfloat16, 4)

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
    """A temporary that is 0 if all points are equal to their first parts."""

    name = "inexact points"

    def find(self, planner, work):
        planner.add_temporary(self.name, (1,), np.dtype(np.uint32), is_zero=True)

    def flat(self, planner, work):
        yield planner.whole(self.name)

    def type(self, about):
        return array_type(np.uint32, 1)


INEXACT_POINTS = InexactPoints()


def spec_of(matrix, parts, numbers, line=(), vectors=(), of_halves=False):
    """The Spec for the parts of a Matrix and the line of its numbers."""
    return Spec(
        point_parts,
        (matrix, vectors, parts, line, (INEXACT_POINTS,) * of_halves, ("scale",) * of_halves),
        tiles=lambda work: (TILES,),
        parameters=lambda work, tiles: {
            "dim": whole_boxes(getattr(work.problem, parts.columns)), "nbytes": work.nbytes, "numbers": numbers,
            "given": (COLUMNS,) * (vectors is VECTORS and COLUMNS in work.dtypes), "of_halves": of_halves,
        },
        blocks=blocks_of(parts.heads),
    )  # fmt: skip


LINE_OF_X, LINE_OF_Y, LINES_OF_B = Norms("line of x", "q"), Norms("line of y", "k"), FeatureLines("lines of b", "k")
PARTS_OF_X, PARTS_OF_Y = PartsOfRows("parts of x", "q"), PartsOfRows("parts of y", "k")
PARTS_OF_B = PartsOfRows("parts of b", "k", "head_dim_v")
OF_X, OF_Y = (spec_of(Matrix(name, parts.heads), parts, HALF_NORMS, (line,)) for name, parts, line in (
    ("q", PARTS_OF_X, LINE_OF_X), ("k", PARTS_OF_Y, LINE_OF_Y)))  # fmt: skip
OF_Y_AND_COLUMNS = spec_of(Matrix("k", "k"), PARTS_OF_Y, LOGARITHMS, (LINE_OF_Y,), VECTORS)
OF_X_IN_HALVES = spec_of(Matrix("q"), PARTS_OF_X, HALF_NORMS, (LINE_OF_X,), of_halves=True)
OF_Y_IN_HALVES = spec_of(Matrix("k", "k"), PARTS_OF_Y, LOGARITHMS, (LINE_OF_Y,), VECTORS, of_halves=True)
OF_B = spec_of(Matrix("v", "k"), PARTS_OF_B, "")
AS_LINES = Spec(
    feature_lines,
    (Matrix("v", "k"), LINES_OF_B),
    tiles=lambda work: (TILES,),
    parameters=lambda work, tiles: {"count": work.problem.head_dim_v},
    blocks=blocks_of("k"),
)

"""Points of float32 as sums of three bfloat16, whose products with others' parts wgmma computes; and a number of each.

8 bits each are the 24 of float32. Of a product x y the parts that count are x1 y1, x1 y2 + x2 y1 and x1 y3 + x2 y2 +
x3 y1; what is left out is less than a rounding of float32.
"""

from dataclasses import dataclass

import numpy as np
from numba.cuda import types

from ...build import Source
from ...tile import (
    Alignment,
    aligned,
    bfloat16,
    block_index,
    convert,
    device,
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

PARTS = 3


def point_parts(*, dim, nbytes, of_y, given=()):
    """The kernel; nbytes: alignment of the rows of points.

    of_y: numbers are (columns - |y|^2 / 2) log2(e), -inf after the last point, with the columns that are given; else
    they are -|x|^2 / 2.
    """
    BFLOAT16, ACC, OF_Y, HAS_COLUMNS = bfloat16, np.float32, of_y, COLUMNS in given
    TILE_M, ROWS_OF, VECTORS_OF = TILES.tile_m, Alignment(nbytes), Alignment(VECTOR_BYTES)
    TILE = simt(TILES.tile_m, dim, THREADS, LANES, 8)
    ROWS, HALF, LOG2E, NOTHING = TILE.row_vector(), ACC(-1 / 2), ACC(LOG2_E), ACC(-np.inf)

    @device
    def numbers(norms, vectors, batch, head, m0, count):
        if not OF_Y:
            return norms * HALF
        found = norms * HALF
        if HAS_COLUMNS:
            found = found + load(vectors.columns[0][batch, head], ROWS, m0)
        return where(row_index(ROWS, m0) < count, found * LOG2E, NOTHING)

    def kernel(mX, vectors, mParts, mLine):
        overlap_launches()
        batches, heads, apart = shape(mLine)
        tile, batch, head = place(block_index(), batches * heads, heads)
        X, m0 = mX[batch, head], tile * TILE_M
        count, _ = shape(X)
        rest = load(aligned(X, ROWS_OF), TILE, m0)
        save(mLine[batch, head], numbers(row_sum(rest * rest), vectors, batch, head, m0, count), m0)
        for number in range(PARTS):
            part = convert(rest, BFLOAT16)
            save(aligned(mParts[batch, head], VECTORS_OF), part, number * apart + m0)
            rest = rest - convert(part, ACC)

    spec = OF_Y_SPEC if of_y else OF_X_SPEC
    return Source(kernel, signature_of(kernel, spec.arguments, np.dtype(ACC), ACC, given=given), THREADS, overlaps=True)


@dataclass(frozen=True)
class PartsOfPoints(Argument):
    """A temporary for them, one part below the other, or its tensor map."""

    name: str
    heads: str
    is_map: bool = False

    def find(self, planner, work):
        problem = work.problem
        rows = PARTS * padded_length(problem, self.heads)
        planner.add_temporary(self.name, (*problem.lse_shape[:-1], rows, dim_of(problem)), bfloat16)

    def flat(self, planner, work):
        yield planner.at(self.name, self.heads)

    def type(self, about):
        return types.uint64 if self.is_map else array_type(bfloat16, 4)


def dim_of(problem):
    """Dimensions, rounded up to whole boxes."""
    return -(-problem.head_dim // 64) * 64


def spec_of(points, vectors, parts, line):
    """The Spec for a Matrix of points."""
    of_y = line.heads == "k"
    return Spec(
        point_parts,
        (points, vectors, parts, line),
        tiles=lambda work: (TILES,),
        parameters=lambda work, tiles: {"dim": dim_of(work.problem), "nbytes": work.nbytes, "of_y": of_y}
            | ({"given": (COLUMNS,) * (COLUMNS in work.dtypes)} if of_y else {}),
        blocks=lambda work, tiles, m_blocks, n_blocks:
            work.problem.heads * padded_length(work.problem, line.heads) // TILES.tile_m,
    )  # fmt: skip


LINE_OF_X, LINE_OF_Y = Norms("line of x", "q"), Norms("line of y", "k")
OF_X_SPEC = spec_of(Matrix("q"), (), PartsOfPoints("parts of x", "q"), LINE_OF_X)
OF_Y_SPEC = spec_of(Matrix("k", "k"), VECTORS, PartsOfPoints("parts of y", "k"), LINE_OF_Y)
MAP_OF_X, MAP_OF_Y = PartsOfPoints("parts of x", "q", is_map=True), PartsOfPoints("parts of y", "k", is_map=True)

"""Squared norms of points, which turn products into distances. After the last point they are infinite, so that it is
never nearest."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ....points.kinds import DIFFERENCES
from ...build import Source
from ...tile import Alignment, aligned, block_index, convert, load, row_index, row_sum, save, shape, simt, where
from ...words.arguments import Argument, Matrix
from ...words.signatures import signature_of
from ...words.spec import Route, Spec, everything
from ..shared.layouts import DTYPES, sum_type, vector
from ..shared.schedule import overlap_launches, place
from ..tables import rounded
from .arguments import X_NORMS, Y_NORMS

PADDED = 768  # a divisor of their number and a multiple of the points of any tile, since whole tiles are copied


class PointRows(NamedTuple):
    """The tile of a block."""

    tile_m: int
    tile_n: int = 1


TILES = PointRows(32)
THREADS, LANES = 4 * TILES.tile_m, 8


def squared_norms(*, dtype, head_dim, nbytes, factor):
    """The kernel. nbytes: alignment of the rows; factor: of the norms."""
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    TILE_M, ROWS_OF, INFINITE, FACTOR = TILES.tile_m, Alignment(nbytes), ACC(np.inf), ACC(factor)
    TILE = simt(TILES.tile_m, head_dim, THREADS, LANES, vector(dtype))
    ROWS = TILE.row_vector()

    def kernel(mX, mNorms):
        overlap_launches()
        batches, heads, _ = shape(mNorms)
        tile, batch, head = place(block_index(), batches * heads, heads)
        X, m0 = mX[batch, head], tile * TILE_M
        count, _ = shape(X)
        points = convert(load(aligned(X, ROWS_OF), TILE, m0), ACC)
        norms = row_sum(points * points) * FACTOR
        save(mNorms[batch, head], where(row_index(ROWS, m0) < count, norms, INFINITE), m0)

    return Source(kernel, signature_of(kernel, OF_X.arguments, dtype, ACC), THREADS, overlaps=True)


@dataclass(frozen=True)
class Norms(Argument):
    """A temporary for the norms, (batch, heads, padded length)."""

    name: str
    heads: str
    factor: float = 1.0

    def find(self, planner, work):
        problem = work.problem
        shape = *problem.lse_shape[:-1], padded_length(problem, self.heads)
        planner.add_temporary(self.name, shape, problem.sum_dtype)

    def flat(self, planner, work):
        yield planner.at(self.name, self.heads, own=1)

    def type(self, about):
        return about.sums_of(3)


def padded_length(problem, heads):
    count = problem.seqlen_q if heads == "q" else problem.seqlen_k
    return -(-count // PADDED) * PADDED


def spec_of(points, norms):
    """The Spec for a Matrix of points."""
    return Spec(
        squared_norms,
        (points, norms),
        tiles=lambda work: (TILES,),
        parameters=lambda work, tiles: {
            "dtype": work.problem.dtype.name, "head_dim": rounded("features", work.problem.head_dim),
            "nbytes": work.nbytes, "factor": norms.factor,
        },
        blocks=lambda work, tiles, m_blocks, n_blocks:
            work.problem.heads * padded_length(work.problem, norms.heads) // TILES.tile_m,
    )  # fmt: skip


OF_X, OF_Y = spec_of(Matrix("q"), Norms(X_NORMS, "q")), spec_of(Matrix("k", "k"), Norms(Y_NORMS, "k"))
HALF_NORMS_OF_Y = Norms("half norms of y", "k", 0.5)
HALF_OF_Y = spec_of(Matrix("k", "k"), HALF_NORMS_OF_Y)


def takes_distances(work):
    """Whether squared distances come from products."""
    return work.problem.head_dim > DIFFERENCES and not work.kind.is_of_product


def point_routes(spec):
    """The Routes of a kernel over pairs, with the norms that it needs."""
    return Route(takes_distances, (OF_X, OF_Y, spec)), Route(everything, (spec,))

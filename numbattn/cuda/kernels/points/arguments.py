"""The arguments of kernels over pairs of points, rows of their tables, and what is compiled in."""

from typing import Any, NamedTuple

from ....points.kinds import DIFFERENCES
from ...compiler import types
from ...words.arguments import Argument, Matrix
from ...words.signatures import several
from ..tables import has_tensor_cores, rounded

FEW = 4  # features up to which each thread sums its own products
SMALLEST = 16  # features of a tile that tensor cores multiply
ROWS, COLUMNS, X_NORMS, Y_NORMS = "rows", "columns", "norms of x", "norms of y"


class PointTiles(NamedTuple):
    """A row of a table: tiles of tile_m rows and tile_n columns, in `chunks` one after the other."""

    unit: str  # as in tables.Tiles
    tile_m: int
    tile_n: int
    threads: int
    lanes: int = 0
    chunks: int = 1  # of a tile's columns, each a tile in registers
    stages: int = 2
    blocks: int = 1

    sliced, parts = False, 1


WITHOUT_VECTORS = PointTiles("mma", 64, 64, 128, blocks=2)  # before the next, for kernels that sum none
TENSOR_CORES = (
    PointTiles("mma", 64, 32, 128), PointTiles("mma", 64, 16, 128), PointTiles("mma", 64, 16, 128, stages=1),
    PointTiles("mma", 64, 8, 128, stages=1), PointTiles("mma", 32, 16, 64),
)  # fmt: skip
CUDA_CORES = (
    PointTiles("fma", 64, 64, 128, lanes=8), PointTiles("fma", 32, 32, 128, lanes=8),
    PointTiles("fma", 16, 16, 64, lanes=8, stages=1), PointTiles("fma", 8, 8, 64, lanes=8, stages=1),
    PointTiles("fma", 4, 8, 32, lanes=8, stages=1),
)  # fmt: skip


class PairVectors(NamedTuple):
    """Numbers for rows or columns of a matrix, each an array (batch, heads, length) in a tuple of its own, or nothing.
    """

    rows: Any  # logarithms, added to that of kappa
    columns: Any
    x_norms: Any  # squared
    y_norms: Any


class VectorsArgument(Argument):
    """The fields of PairVectors."""

    def flat(self, planner, work):
        for name, heads in HEADS.items():
            if name in planner.layouts:
                yield planner.at(name, heads, own=1)

    def type(self, about):
        return types.NamedTuple([several(about.sums_of(3), name in about.given) for name in HEADS], PairVectors)


APART = Matrix("apart x"), Matrix("apart y", "k")  # see points.kinds.Apart
PLACES = tuple([matrix.name for matrix in APART])
HEADS = {ROWS: "q", COLUMNS: "k", X_NORMS: "q", Y_NORMS: "k"}  # of PairVectors, by name
VECTORS = VectorsArgument()


def rows_of(table, work, *smaller):
    """The row for this work, from {(few dimensions of points, few features of b, bytes of an element): {largest size:
    row}}; then, for less shared memory, `smaller` and those of TENSOR_CORES and CUDA_CORES, which have not been
    measured. The size is the sum of both if both are few, else the larger one of those that are not. Before 8.0 CUDA
    cores multiply."""
    problem = work.problem
    sizes, nbytes = sizes_of(problem), problem.dtype.itemsize
    few = sizes[0] <= DIFFERENCES, sizes[1] <= FEW
    on_tensor_cores = has_tensor_cores(work.device) and not all(few)
    found = table[(*few, nbytes)] if all(few) or on_tensor_cores else {}
    size = sum(sizes) if all(few) else max(size for size, is_few in zip(sizes, few) if not is_few)
    rows = [found[largest] for largest in sorted(found) if size <= largest][:1]
    return *rows, *((*smaller, *TENSOR_CORES) if rows and on_tensor_cores else ()), *CUDA_CORES


def sizes_of(problem):
    """Dimensions of points, and features of b, as kernels are compiled for them: rounded up, unless they are few."""
    few = (problem.head_dim, DIFFERENCES), (problem.head_dim_v, FEW)
    return tuple([max(size, 1) if size <= most else SMALLEST if size <= SMALLEST else rounded("features", size)
                  for size, most in few])  # fmt: skip


def parameters(work, tiles):
    """The parameters of factories of kernels over pairs."""
    dim, dim_b = sizes_of(work.problem)
    given = tuple([name for name in HEADS if name in work.dtypes])
    return {
        "dtype": work.problem.dtype.name, "dim": dim, "dim_b": dim_b, "tiles": tiles, "kind": work.kind, "given": given,
        "mask": work.mask, "nbytes": work.nbytes,
    }  # fmt: skip

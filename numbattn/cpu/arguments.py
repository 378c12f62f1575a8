"""Arrays, masks and dropout as kernels take them: one type for all shapes, strides and broadcasts."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..masks import Grid


class Matrices(NamedTuple):
    """An array as the addresses of its matrices, one for each (batch, head)."""

    address: int
    offsets: Any  # int64 (batch, heads), bytes
    rows: int
    cols: int
    stride: int  # elements from one row to the next


class Sight(NamedTuple):
    """A mask, as kernels take it."""

    band: tuple  # lo, hi, queries, keys
    bands: Any  # int64 (batch, heads, 4), instead of `band` where bands differ; else empty
    cells: Any  # int64 (grids, batch, heads), addresses of uint8 matrices
    grids: Any  # int64 (grids, 5): rows and row stride of the cells; rows, columns and packed of a cell


class Drops(NamedTuple):
    """A Dropout, as kernels take it; threshold 0 drops nothing."""

    threshold: Any
    offset: Any
    key_low: Any
    key_high: Any


class Scratch(NamedTuple):
    """Memory of one thread, for one tile at a time. Names are those of the tiles in the kernels."""

    S: Any  # then P
    dP: Any  # then dS
    slopes: Any  # derivatives of scores
    QT: Any
    dOT: Any
    vectors: Any  # one number a query
    Z: Any  # uint8
    words: Any  # uint64


NO_BANDS, NO_CELLS, NO_GRIDS = (np.zeros(shape, np.int64) for shape in ((0, 0, 4), (0, 0, 0), (0, 5)))
NO_DROPS = Drops(*[np.uint64(0)] * 4)


def readable(x, dtype):
    """x itself if products can read its matrices in `dtype`, else a copy."""
    rows, cols = x.shape[-2:]
    row, col = x.strides[-2:]
    item = x.itemsize
    if x.dtype == dtype and (col == item or cols <= 1) and (row >= cols * item or rows <= 1) and x.flags.aligned:
        return x
    return x.astype(dtype, order="C")


def matrices_of(x, problem):
    """The Matrices of an array (..., heads, rows, columns), broadcast to the problem's batch axes. Keep x alive."""
    *_, rows, cols = x.shape
    offsets = _offsets(x.shape[:-2], x.strides[:-2], problem.batch, problem.heads)
    return Matrices(x.ctypes.data, offsets, rows, cols, max(x.strides[-2] // x.itemsize, cols, 1))


@lru_cache(maxsize=256)
def _offsets(shape, strides, batch, heads):
    """Of the matrices of an array with these batch axes; the heads of a group share one."""
    steps = [np.arange(size) * stride for size, stride in zip(shape, strides)] or [np.zeros(1, np.int64)]
    steps[-1] = np.repeat(steps[-1], heads // max(steps[-1].size, 1))
    batch = batch or (1,)
    offsets = np.broadcast_to(sum(np.ix_(*steps)), batch)
    return np.ascontiguousarray(offsets.reshape(-1, heads) if offsets.size else np.zeros((0, heads)), np.int64)


def sight_of(problem, mask):
    """The Sight of a mask, and the arrays to keep alive."""
    band, bands = mask._band(problem.seqlen_q, problem.seqlen_k), NO_BANDS
    if not all(isinstance(number, int) for number in band):
        numbers = [np.broadcast_to(np.asarray(x, np.int64), problem.batch).reshape(problem.matrices) for x in band]
        band, bands = (0, 0, 0, 0), np.stack(numbers, axis=-1)
    if not problem.mask_kinds or not (grids := mask._grids()):
        return Sight(tuple(band), bands, NO_CELLS, NO_GRIDS), ()
    grids = [_compact(grid) for grid in grids]
    matrices = [matrices_of(grid.cells, problem) for grid in grids]
    cells = np.stack([x.address + x.offsets for x in matrices])
    numbers = [(x.rows, x.stride, grid.rows, grid.cols, grid.packed) for grid, x in zip(grids, matrices)]
    return Sight(tuple(band), bands, cells, np.array(numbers, np.int64)), grids


def _compact(grid):
    """A Grid with readable cells; equal rows of cells, or columns, that share memory become one."""
    cells, rows, cols, packed = grid
    if cells.strides[-2] == 0 and cells.shape[-2] > 1:
        cells, rows = cells[..., :1, :], rows * cells.shape[-2]
    if cells.strides[-1] == 0 and cells.shape[-1] > 1 and not packed:
        cells, cols = cells[..., :1], cols * cells.shape[-1]
    return Grid(readable(cells, np.uint8), rows, cols, packed)


def drops_of(dropout):
    """The Drops of a Dropout or of None, and the scale of kept elements."""
    if dropout is None:
        return NO_DROPS, 1.0
    return Drops(*map(np.uint64, dropout._numbers)), dropout.scale


def scratch_of(problem, tile_m, tile_n, backward=False, slopes=0):
    """A function that allocates a Scratch."""
    elements, dropped = tile_m * tile_n, tile_m * tile_n if problem.dropout else 0
    sizes = (elements, elements * backward, elements * slopes, tile_m * problem.head_dim,
             tile_m * problem.head_dim_v * backward, 4 * tile_m)  # fmt: skip

    def scratch():
        floats = [np.empty(size, problem.sum_dtype) for size in sizes]
        return Scratch(*floats, np.empty(dropped, np.uint8), np.empty(2 * tile_m if dropped else 0, np.uint64))

    return scratch

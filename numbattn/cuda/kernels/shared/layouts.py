"""Layouts and types of tiles by dtype and unit. Nothing else in a kernel depends on the unit that multiplies."""

import numpy as np

from ....call import problem
from ...tile import (
    Alignment,
    aligned,
    allocate,
    col_index,
    columns,
    copy_layout,
    device,
    dot,
    full,
    get,
    get_registers,
    mma,
    opaque,
    put,
    put_registers,
    row_index,
    save,
    simt,
    sync_threads,
    sync_warp,
    thread_index,
)
from ...tile.alignment import VECTOR_BYTES

MMA_LANES = 4  # of a warp that share a row of an accumulator
DTYPES = {dtype.name: dtype for dtype in problem.DTYPES}


def sum_type(dtype):
    """The accumulator type of a dtype."""
    return np.float64 if dtype == np.float64 else np.float32


def vector(dtype):
    """Elements in a vector of 16 bytes."""
    return VECTOR_BYTES // dtype.itemsize


def buffers(shared, dtype, threads, rows, widths, stages=1):
    """For each width a place of tiles in shared memory, and the layout in which these threads copy one there."""
    return [
        (shared.tile(rows, cols, dtype, stages), copy_layout(rows, cols, threads, vector(dtype))) for cols in widths
    ]


def sums(tiles, rows, cols, run=1):
    """The layout of an accumulator: of mma.sync on tensor cores, of fused multiply-adds on CUDA cores. tiles: a row of
    `tables.Tiles`, which says which, and has the threads."""
    if tiles.unit == "mma":
        return mma(rows, cols, tiles.threads, across=max(tiles.lanes // MMA_LANES, 1))
    return simt(rows, cols, tiles.threads, tiles.lanes, run)


def product_step(tiles, rows, cols, shared, dtype):
    """The layout of S and dP, and the device function (x, y): x y^T in it. tiles: as for `sums`.

    Warps that share rows have some columns each. If sliced, each sums a slice of the depth, for all columns; then they
    add up the slices through shared memory, and all have whole rows: left operands that need not go there.

    With several `parts` of the depth, summed one after the other, a left operand takes fewer registers: in float32,
    which is split for tensor cores, 64 registers for a depth of 64.
    """
    if not tiles.sliced:
        TILE, PARTS, ZERO = sums(tiles, rows, cols), tiles.parts, dtype(0)

        @device
        def part_by_part(x, y):
            total = full(TILE, ZERO)
            for part in range(PARTS):
                total = dot(total, columns(x, part, PARTS), columns(y, part, PARTS).T)
            return total

        if PARTS > 1:
            return TILE, part_by_part

        @device
        def product(x, y):
            return dot(TILE, x, y.T)

        return TILE, product

    SLICES = tiles.lanes // MMA_LANES
    THREADS = tiles.threads // SLICES  # of a slice
    TILE, PLACE = mma(rows, cols, THREADS), shared.tile(1, rows * cols, dtype, SLICES)

    @device
    def sum_of_slices(x, y):
        mine = opaque(thread_index() // THREADS)                # else addresses are kept in registers across loops
        S = dot(TILE, columns(x, mine, SLICES), columns(y, mine, SLICES).T)
        sync_threads()                                          # all have read the last ones
        put_registers(allocate(PLACE, mine), S)
        sync_threads()
        total = get_registers(allocate(PLACE, 0), TILE)
        for other in range(1, SLICES):
            total = total + get_registers(allocate(PLACE, other), TILE)
        return total

    return TILE, sum_of_slices


def warps_across(rows, cols, threads):
    """How many warps should share rows of sums of mma.sync on 16 bits: a warp has 32 rows, so that a right operand read
    from shared memory serves two instructions, or 16 if it would otherwise not have a multiple of 16 columns.
    """
    sixteens = cols // 16
    return min(max(threads // rows, 1), sixteens & -sixteens)


def places_of(transposed):
    """The device function (layout, m0, n0) -> the queries i and keys j of a tile from query m0 and key n0 on.

    The tile's rows are queries, or keys if it is transposed.
    """

    @device
    def queries_by_keys(layout, m0, n0):
        return row_index(layout, m0), col_index(layout, n0)

    @device
    def keys_by_queries(layout, m0, n0):
        return col_index(layout, m0), row_index(layout, n0)

    return keys_by_queries if transposed else queries_by_keys


def left_operand(layout, shared, dtype, cols=None):
    """The device function (tile) that turns an accumulator into the left operand of the next product, which has `cols`
    columns.

    Tensor cores read it from registers, where it already is. CUDA cores read it from shared memory, each row in the
    warp that wrote it; so do tensor cores if several warps share a row, after a barrier. A product without columns
    reads nothing.
    """
    if (layout.unit == "mma" and layout.has_whole_rows) or cols == 0:

        @device
        def left(P):
            return P

        return left

    PLACE = shared.tile(*layout.shape, dtype)
    arrive = sync_threads if layout.unit == "mma" else sync_warp

    @device
    def left(P):
        sP = allocate(PLACE)
        put(sP, P)
        arrive()
        return sP

    return left


def save_sums_step(dtype, out, rows, cols, threads, nbytes, sync=sync_threads, transposed=False):
    """The device function (matrix, tile, place, first): save the sums of these threads, rounded to dtype `out`.

    They go through a place in shared memory, if that has the same dtype, so that whole vectors of rows are stored.
    transposed: whether they are those of the transpose; the place has that dtype then.
    """
    ROWS_OF, COPY = Alignment(nbytes), copy_layout(rows, cols, threads, vector(dtype))

    @device
    def save_rows(matrix, place, first):
        sync()
        save(aligned(matrix, ROWS_OF), get(place, COPY), first)

    @device
    def by_rows(matrix, tile, place, first):
        put(place, tile)
        save_rows(matrix, place, first)

    @device
    def by_columns(matrix, tile, place, first):
        put(place.T, tile)
        save_rows(matrix, place, first)

    @device
    def as_it_is(matrix, tile, place, first):
        save(aligned(matrix, ROWS_OF), tile, first)

    if transposed:
        return by_columns
    return by_rows if DTYPES[out] == dtype else as_it_is

"""What the rows of a block are together."""

from ...tile import WARP, allocate, device, get, put, simt, sync_threads


def transposed(layout, threads):
    """The layout of a tile's transpose, whose row vector has a number for each column."""
    rows, cols = layout.shape
    return simt(cols, rows, threads, min(rows, WARP), 1)


def reduce_rows_step(shared, layout, ACC, threads, reduce):
    """The device function (tile) -> what reduce, row_sum or row_max, makes of each of its columns: a row vector, of the
    transposed tile. All threads of the block call it."""
    rows, cols = layout.shape
    PLACE, TRANSPOSED = shared.tile(rows, cols, ACC), transposed(layout, threads)

    @device
    def reduced(x):
        sync_threads()                                          # all have read what was there
        put(allocate(PLACE), x)
        sync_threads()
        return reduce(get(allocate(PLACE).T, TRANSPOSED))

    return reduced

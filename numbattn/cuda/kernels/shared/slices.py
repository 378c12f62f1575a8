"""Head_dims larger than those that kernels are compiled for, a slice of their columns at a time.

S = Q K^T and dP = dO V^T are sums over all slices. Of the results, O, dQ, or dK and dV, each block computes one slice,
its own. That comes last in the sums, so that it is still in shared memory where P or dS is multiplied by it. S is
recomputed for each slice of the results: no head_dim is refused, but large ones take their square.
"""

from ...tile import (
    Alignment,
    aligned,
    allocate,
    block_index,
    copy_async,
    device,
    dot,
    full,
    grid_size,
    index,
    maximum,
    shape,
    sync_threads,
    wait_copies,
)
from .schedule import split


def slice_steps(by_slices, width, nbytes):
    """Device functions: (X, Y) -> the number of this block's slice, and its own number among the blocks of this slice,
    if X and Y have the most columns; (X, number) -> a slice of a matrix, or all of it if nothing is sliced.

    nbytes: alignment of rows.
    """
    WIDTH, ROWS_OF = width, Alignment(nbytes)

    @device
    def own_slice(X, Y):
        slices = (maximum(shape(X)[3], shape(Y)[3]) + WIDTH - 1) // WIDTH
        return split(block_index(), grid_size() // slices)

    @device
    def slice_of(X, number):
        return aligned(X[:, number * WIDTH :], ROWS_OF)

    @device
    def all_columns(X, Y):
        return index(0), block_index()

    @device
    def whole(X, number):
        return aligned(X, ROWS_OF)

    return (own_slice, slice_of) if by_slices else (all_columns, whole)


def sliced_product(by_slices, width, layout, product, left, right, zero, nbytes):
    """Device functions: (stage, X, x0) starts to copy the tile of X from row x0 on to a stage of the left operand;
    likewise for the right one; (stages, X, Y, x0, y0, own) -> the product, in this layout, of the tiles of X and Y,
    which have arrived in these stages. own: the number of the slice that remains there.

    left, right: places and layouts, see `layouts.buffers`; product: see `layouts.product_step`; zero: of its dtype;
    nbytes: alignment of rows.
    """
    (LEFT, COPY_LEFT), (RIGHT, COPY_RIGHT), (_, slice_of) = left, right, slice_steps(by_slices, width, nbytes)
    LAYOUT, WIDTH, ZERO = layout, width, zero

    @device
    def fetch_left(stage, X, x0, number=0):
        copy_async(allocate(LEFT, stage), slice_of(X, number), COPY_LEFT, x0)

    @device
    def fetch_right(stage, Y, y0, number=0):
        copy_async(allocate(RIGHT, stage), slice_of(Y, number), COPY_RIGHT, y0)

    @device
    def whole(stages, X, Y, x0, y0, own):
        return product(allocate(LEFT, stages[0]), allocate(RIGHT, stages[1]))

    @device
    def fetch_later(stage, X, x0):
        pass

    @device
    def sum_of_slices(stages, X, Y, x0, y0, own):
        slices = (shape(X)[1] + WIDTH - 1) // WIDTH
        total = full(LAYOUT, ZERO)
        for number in range(own + 1, own + 1 + slices):
            sync_threads()                                      # all have read the last slices
            fetch_left(stages[0], X, x0, number % slices)
            fetch_right(stages[1], Y, y0, number % slices)
            wait_copies()
            sync_threads()
            total = dot(total, allocate(LEFT, stages[0]), allocate(RIGHT, stages[1]).T)
        return total

    return (fetch_later, fetch_later, sum_of_slices) if by_slices else (fetch_left, fetch_right, whole)

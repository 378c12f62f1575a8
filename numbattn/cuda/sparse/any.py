"""Products with block-sparse matrices on any GPU: by mma.sync, in float32 as three products of TF32, or on CUDA cores.

A block of threads computes some rows of a block column of Y, or a block of dW. While it multiplies one chunk of the
depth, the next one is copied to shared memory.
"""

from typing import Any, NamedTuple

import numpy as np

from ..kernel import kernel_factory
from ..kernels.shared.layouts import sum_type, vector, warps_across
from ..tile import (
    WARP,
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    block_index,
    copy_async,
    copy_layout,
    device,
    dot,
    full,
    index,
    load,
    minimum,
    mma,
    rows_between,
    save,
    shape,
    simt,
    sync_threads,
    wait_copies,
)
from ..tile.alignment import VECTOR_BYTES

TILE_M, SUMS_OF_A_THREAD, LANES = 64, 64, 8
CHUNK = {2: 32, 4: 32, 8: 16}  # of the depth, by bytes of an element
CHUNK_ROWS = {2: 32, 4: 16, 8: 8}  # the same in rows of X and dY, for dW: both are as wide as blocks
ROWS_OF_SUM = 8  # that a block of `sum_of_parts` adds up
VECTORS = Alignment(VECTOR_BYTES)


class SparseKernel(NamedTuple):
    """A kernel, and how it is launched."""

    function: Any
    threads: int
    shared_bytes: int
    lay_out: Any  # (device, *arrays) -> the grid, and the kernel's arguments


def panels(x, size):
    """A matrix as panels of `size` columns, (1, panels, rows, size), not copied."""
    return x.reshape(len(x), -1, size).swapaxes(0, 1)[None]


def chunks(w, size, transposed):
    """Blocks as panels of `size` rows, (blocks, panels, size, width), or if transposed of `size` columns, (blocks,
    panels, height, size)."""
    blocks, height, width = w.shape
    return w.reshape(blocks, height, -1, size).swapaxes(1, 2) if transposed else w.reshape(blocks, -1, size, width)


def rows_of_part(rows, count, chunk):
    """How many rows each of `count` parts but the last one has, in whole chunks."""
    return np.int32(-(-rows // (count * chunk)) * chunk)


def sums_of(unit, rows, cols):
    """The layout of sums, and the number of threads."""
    threads = min(max(rows * cols // SUMS_OF_A_THREAD, WARP), 8 * WARP)
    if unit == "mma":
        return mma(rows, cols, threads, min(warps_across(rows, cols, threads), threads // WARP)), threads
    return simt(rows, cols, threads, LANES, 1), threads


def chunk_of(dtype, depth):
    """The chunk of a depth that is multiplied at once."""
    return min(CHUNK[dtype.itemsize], depth)


def summing(SUMS, ZERO, copy, product):
    """The device function (given, steps) -> the sum of products of `steps` chunks. copy(stage, given, step) starts to
    copy the operands of a step, product(sums, stage) adds their product."""

    @device
    def add_up(given, steps):
        sums, at = full(SUMS, ZERO), index(0)
        if steps > 0:
            copy(0, given, index(0))
        while at < steps:
            wait_copies()
            sync_threads()                                      # this chunk has arrived, all have read the last one
            if at + 1 < steps:
                copy((at + 1) % 2, given, at + 1)
            sums, at = product(sums, at % 2), at + 1
        return sums

    return add_up


@kernel_factory
def product(dtype, unit, depth, width, transposed):
    """The SparseKernel of Y = X W, or X W^T, for blocks of this depth and width: each block of threads computes TILE_M
    rows of a block column of Y.

    Arrays: x, w, y; where the entries of each block column of Y start, (block columns + 1,); and the entries, (blocks,
    2): a block column of X and a block of W.
    """
    ACC, chunk = sum_type(dtype), chunk_of(dtype, depth)
    SUMS, threads = sums_of(unit, TILE_M, width)
    rows_of_w, cols_of_w = (width, chunk) if transposed else (chunk, width)
    shared, ZERO = SharedMemory(), ACC(0)
    X_PLACE, W_PLACE = shared.tile(TILE_M, chunk, dtype, 2), shared.tile(rows_of_w, cols_of_w, dtype, 2)
    COPY_X = copy_layout(TILE_M, chunk, threads, vector(dtype))
    COPY_W = copy_layout(rows_of_w, cols_of_w, threads, vector(dtype))
    CHUNKS, ROWS_OF_W, TRANSPOSED = depth // chunk, rows_of_w, transposed

    @device
    def copy(stage, given, step):
        mX, mW, entries, first = given
        entry, part = first + step // CHUNKS, step % CHUNKS
        _, _, rows, _ = shape(mX)
        X = rows_between(mX, 0, index(entries[entry, 0]) * CHUNKS + part, 0, rows, VECTORS)
        W = rows_between(mW, index(entries[entry, 1]), part, 0, ROWS_OF_W, VECTORS)
        copy_async(allocate(X_PLACE, stage), X, COPY_X, block_index(0) * TILE_M)
        copy_async(allocate(W_PLACE, stage), W, COPY_W, 0)

    @device
    def multiply(sums, stage):
        sW = allocate(W_PLACE, stage)
        return dot(sums, allocate(X_PLACE, stage), sW.T if TRANSPOSED else sW)

    add_up = summing(SUMS, ZERO, copy, multiply)

    def sparse_product(mX, mW, mY, starts, entries):
        column = block_index(1)
        first, end = index(starts[column]), index(starts[column + 1])
        sums = add_up((mX, mW, entries, first), (end - first) * CHUNKS)
        save(aligned(mY[0, column], VECTORS), sums, block_index(0) * TILE_M)

    def lay_out(device, x, w, y, *lists):
        arrays = panels(x, chunk), chunks(w, chunk, transposed), panels(y, width)
        return (-(-len(x) // TILE_M), y.shape[1] // width), (*arrays, *lists)

    return SparseKernel(sparse_product, threads, shared.nbytes, lay_out)


@kernel_factory
def gradient(dtype, unit, rows, cols):
    """The SparseKernel of dW = X^T dY for blocks of this size: each block of threads computes a block of dW over a part
    of the rows of X.

    Arrays: x, dy; the sums of each part, (parts, blocks, rows, cols); the place of each block in W, (blocks, 2).
    """
    ACC, chunk = sum_type(dtype), CHUNK_ROWS[dtype.itemsize]
    SUMS, threads = sums_of(unit, rows, cols)
    shared, ZERO, DEPTH = SharedMemory(), ACC(0), chunk
    X_PLACE, DY_PLACE = shared.tile(chunk, rows, dtype, 2), shared.tile(chunk, cols, dtype, 2)
    COPY_X, COPY_DY = (copy_layout(chunk, size, threads, vector(dtype)) for size in (rows, cols))

    @device
    def copy(stage, given, step):
        X, dY, first = given
        copy_async(allocate(X_PLACE, stage), X, COPY_X, first + step * DEPTH)
        copy_async(allocate(DY_PLACE, stage), dY, COPY_DY, first + step * DEPTH)

    @device
    def multiply(sums, stage):
        return dot(sums, allocate(X_PLACE, stage).T, allocate(DY_PLACE, stage))

    add_up = summing(SUMS, ZERO, copy, multiply)

    def sparse_gradient(mX, mDY, mParts, places, rows_of_part):
        block, part = block_index(0), block_index(1)
        first, (_, _, rows, _) = part * rows_of_part, shape(mX)
        end = minimum(first + rows_of_part, rows)
        X = rows_between(mX, 0, index(places[block, 0]), 0, end, VECTORS)
        dY = rows_between(mDY, 0, index(places[block, 1]), 0, end, VECTORS)
        sums = add_up((X, dY, first), (end - first + DEPTH - 1) // DEPTH)
        save(aligned(mParts[part, block], VECTORS), sums, 0)

    def lay_out(device, x, dy, sums, places):
        count, blocks, _, _ = sums.shape
        size = rows_of_part(len(x), count, chunk)
        return (blocks, count), (panels(x, rows), panels(dy, cols), sums, places, size)

    return SparseKernel(sparse_gradient, threads, shared.nbytes, lay_out)


@kernel_factory
def sum_of_parts(dtype, cols):
    """The SparseKernel that adds up parts (parts, blocks, rows, cols) into dW (blocks, rows, cols) of a dtype."""
    threads = 4 * WARP
    TILE, ROWS = copy_layout(ROWS_OF_SUM, cols, threads, 4), ROWS_OF_SUM

    def sparse_sum(mParts, mSum):
        parts, _, _ = shape(mParts)
        first = block_index() * ROWS
        total = load(aligned(mParts[0], VECTORS), TILE, first)
        for part in range(1, parts):
            total = total + load(aligned(mParts[part], VECTORS), TILE, first)
        save(aligned(mSum, VECTORS), total, first)

    def lay_out(device, parts, dw):
        rows = dw.size // cols
        return -(-rows // ROWS_OF_SUM), (parts.reshape(len(parts), rows, cols), dw.reshape(rows, cols))

    return SparseKernel(sparse_sum, threads, 0, lay_out)

"""Steps of losses over pairs on a GPU, see `numbattn.points.blocks`: cuBLAS multiplies, and between its products a
kernel reads each block of scores once."""

import math
from typing import Any

import numpy as np

from .kernel import kernel_factory, launch
from .kernels.shared.layouts import sum_type, vector
from .kernels.shared.schedule import split
from .kernels.shared.softmax import softmax_parts
from .products import product as product
from .tile import (
    WARP,
    Alignment,
    aligned,
    block_index,
    col_index,
    device,
    exp2,
    full,
    index,
    load,
    map_elements,
    maximum,
    minimum,
    part_sum,
    reciprocal,
    row_index,
    row_sum,
    save,
    shape,
    simt,
    where,
)
from .tile.alignment import alignment_of
from .words.numbers import LOG2_E

BYTES = 1 << 28  # of a block of scores
THREADS = 256
WARPS = THREADS // WARP
ROWS, COLS = 16, 256  # of a tile of `absorb_kernel`
RUN, ROWS_OF_A_BLOCK = 8, 128  # a thread's columns, and rows of a block of threads of `gradient_kernel`


def room_for_gradient(R: Any, dtype: Any) -> Any:
    """Where dR is put, with rows that lie as those of R; dtype: of points."""
    return R if R.dtype == dtype else np.empty_like(R.base, dtype=dtype)[:, : R.shape[1]]


# ------------------------------------------------------------------------------------------------------------- kernels
def absorb(R: Any, given: Any, known: Any) -> None:
    """As `numbattn.points.blocks.absorb`. R, as in `gradient`, is part of an array with longer rows."""
    *vectors, sigmoid = given
    kernel = absorb_kernel(R.dtype, sigmoid, alignment_of(R.base))
    launch(kernel, (-(-len(R) // ROWS), 1, 1), THREADS, 0, R.base, *vectors, *known)


def gradient(dR: Any, R: Any, given: Any, weights: Any, dw: Any) -> None:
    """As `numbattn.points.blocks.gradient`."""
    (rows, cols), (*vectors, sigmoid) = R.shape, given
    kernel = gradient_kernel(dR.dtype, sigmoid, alignment_of(R.base), alignment_of(dR.base))
    parts, tiles = -(-rows // ROWS_OF_A_BLOCK), -(-cols // (WARP * RUN))
    sums = np.empty_like(dw, shape=(parts * WARPS, cols))
    launch(kernel, (parts * tiles, 1, 1), THREADS, 0, dR.base, R.base, sums, *vectors, *weights)
    dw += sums.sum(axis=0)


@device
def log1p(u, i, j):
    return math.log1p(u)


@kernel_factory
def absorb_kernel(dtype, sigmoid, nbytes):
    """The kernel for scores of this dtype: a warp has some rows."""
    ACC, ROWS_OF, TILE_M, TILE_N, SIGMOID = dtype.type, Alignment(nbytes), ROWS, COLS, sigmoid
    TILE = simt(TILE_M, TILE_N, THREADS, WARP, vector(dtype))
    ROW, COLUMN, PARTS = TILE.row_vector(), TILE.col_vector(), TILE.row_parts()
    ZERO, LOG2E, INFINITE = ACC(0), ACC(LOG2_E), ACC(np.inf)
    _, new_max, exponentials = softmax_parts(ACC, far=True)

    def absorb_scores(mR, mA, mB, mW, mTargets, mHighest, mTotal, mChosen):
        (cols,), row, n0 = shape(mB), block_index() * TILE_M, index(0)
        A, m, before, target = (
            load(mA, ROW, row), load(mHighest, ROW, row), load(mTotal, ROW, row), load(mTargets, ROW, row)
        )  # fmt: skip
        l, chosen = full(PARTS, ZERO), full(PARTS, ZERO)
        while n0 < cols:
            j = col_index(TILE, n0)
            T = load(aligned(mR[:, n0 : n0 + TILE_N], ROWS_OF), TILE, row) * A * load(mB, COLUMN, n0)
            T = where(j < cols, T + load(mW, COLUMN, n0), -INFINITE)
            chosen = part_sum(where((j == target) & (j < cols), T, ZERO), chosen)
            if SIGMOID:
                u = exp2(abs(T) * -LOG2E)
                l = part_sum(maximum(T, ZERO) + map_elements(log1p, u, 0, 0, (1, 1), ()), l)   # log(1 + exp(T))
            else:
                m, alpha, zero = new_max(T, m, LOG2E)
                before, l = before * alpha, part_sum(exponentials(T, zero, LOG2E), l * alpha)
            n0 = n0 + TILE_N
        save(mHighest, m, row)
        save(mTotal, row_sum(l) + before, row)
        save(mChosen, load(mChosen, ROW, row) + row_sum(chosen), row)

    return absorb_scores


@kernel_factory
def gradient_kernel(dtype, sigmoid, nbytes, nbytes_of_gradient):
    """The kernel for a gradient of this dtype. Each thread sums up its columns over the rows that it sees."""
    ACC, of_R, of_gradient, SIGMOID = sum_type(dtype), Alignment(nbytes), Alignment(nbytes_of_gradient), sigmoid
    TILE_M, TILE_N, MOST, ZERO, ONE, LOG2E = WARPS, WARP * RUN, ROWS_OF_A_BLOCK, ACC(0), ACC(1), ACC(LOG2_E)
    TILE = simt(TILE_M, TILE_N, THREADS, WARP, RUN)
    ROW, COLUMN = TILE.row_vector(), TILE.col_vector()

    def gradient_of_scores(mGradient, mR, mSums, mA, mB, mW, mTargets, mF, mLow, mC):
        (rows,), (cols,) = shape(mA), shape(mB)
        part, tile = split(block_index(), (cols + TILE_N - 1) // TILE_N)
        n0, row, end = tile * TILE_N, part * MOST, minimum(part * MOST + MOST, rows)
        B, W, total = load(mB, COLUMN, n0), load(mW, COLUMN, n0), full(TILE, ZERO)
        while row < end:
            A, c = load(mA, ROW, row), load(mC, ROW, row)
            T = load(aligned(mR[:, n0 : n0 + TILE_N], of_R), TILE, row) * A * B + W
            if SIGMOID:
                P = reciprocal(exp2(T * -LOG2E) + ONE)
            else:
                P = exp2((T - load(mF, ROW, row)) * LOG2E - load(mLow, ROW, row) * LOG2E)
            G = where(col_index(TILE, n0) == load(mTargets, ROW, row), P - ONE, P) * c
            total = total + where(row_index(TILE, row) < rows, G, ZERO)
            save(aligned(mGradient[:, n0 : n0 + TILE_N], of_gradient), G * A * B, row)
            row = row + TILE_M
        save(mSums[:, n0 : n0 + TILE_N], total, part * TILE_M)

    return gradient_of_scores

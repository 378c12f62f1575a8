"""Steps of losses over pairs on a GPU, see `numbattn.points.blocks`: cuBLAS multiplies, and between its products a
kernel reads each block of scores once."""

from typing import Any

import numpy as np

from ..base.checks import DTYPES
from .kernel import kernel_factory, launch
from .kernels.shared.layouts import sum_type, vector
from .kernels.shared.schedule import split
from .kernels.shared.softmax import softmax_parts
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
COLS, RUN = 512, 8  # of a tile of `absorb_kernel`; of a thread's columns in `gradient_kernel`
TILES_OF_A_BLOCK = 16  # of rows of `gradient_kernel`
TERMS = {np.float32: 7, np.float64: 16}  # of a series, whose rest is below half a bit


def room_for_gradient(R: Any, dtype: Any) -> Any:
    """Its rows lie as those of R."""
    return R if R.dtype == dtype else np.empty_like(R.base, dtype=dtype)[:, : R.shape[1]]


# ------------------------------------------------------------------------------------------------------------- kernels
def absorb(R: Any, factors: Any, known: Any) -> None:
    """As `numbattn.points.blocks.absorb`."""
    a, b, w, targets, sigmoid = factors
    kernel = absorb_kernel(R.dtype, w is not None, targets is not None, sigmoid, alignment_of(R.base))
    given = a, b, b if w is None else w, a if targets is None else targets
    launch(kernel, (-(-len(R) // WARPS), 1, 1), THREADS, 0, R.base, *given, *known)


def gradient(dR: Any, R: Any, factors: Any, weights: Any, dw: Any) -> None:
    """As `numbattn.points.blocks.gradient`."""
    (rows, cols), (a, b, w, targets, sigmoid) = R.shape, factors
    f, low, c, of_target, *of_columns = weights
    has_columns, nbytes = of_columns[0] is not None, tuple(map(alignment_of, (R.base, dR.base)))
    has = w is not None, targets is not None, has_columns, dw is not None
    kernel, tile_n = gradient_kernel(dR.dtype, *has, sigmoid, nbytes)
    blocks = -(-rows // (WARPS * TILES_OF_A_BLOCK))
    sums = np.empty_like(R, shape=(blocks * WARPS, cols) if dw is not None else (1, 1))
    of_columns = of_columns if has_columns else (b, b, b)
    given = a, b, b if w is None else w, a if targets is None else targets, f, low, c, of_target, *of_columns
    launch(kernel, (blocks * -(-cols // tile_n), 1, 1), THREADS, 0, dR.base, R.base, sums, *given)
    if dw is not None:
        dw += sums.sum(axis=0)


@kernel_factory
def absorb_kernel(dtype, has_w, has_targets, sigmoid, nbytes):
    """The kernel for scores of this dtype: a warp has a row."""
    ACC, ROWS_OF, HAS_W, HAS_TARGETS, SIGMOID = dtype.type, Alignment(nbytes), has_w, has_targets, sigmoid
    TILE, TILE_N = simt(WARPS, COLS, THREADS, WARP, vector(dtype)), COLS
    ROW, COLUMN, PARTS = TILE.row_vector(), TILE.col_vector(), TILE.row_parts()
    ZERO, LOG2E, INFINITE, softplus = ACC(0), ACC(LOG2_E), ACC(np.inf), softplus_step(ACC)
    _, new_max, exponentials = softmax_parts(ACC, far=True)

    def absorb_scores(mR, mA, mB, mW, mTargets, mHighest, mTotal, mChosen):
        (cols,), row, n0 = shape(mB), block_index() * WARPS, index(0)
        A, m, before = load(mA, ROW, row), load(mHighest, ROW, row), load(mTotal, ROW, row)
        l, chosen, target = full(PARTS, ZERO), full(PARTS, ZERO), load(mTargets, ROW, row)
        target = where(target < cols, target, -1)               # T is anything beyond the last column
        while n0 < cols:
            T = load(aligned(mR[:, n0 : n0 + TILE_N], ROWS_OF), TILE, row) * A * load(mB, COLUMN, n0)
            if HAS_W:
                T = T + load(mW, COLUMN, n0)
            if HAS_TARGETS:
                chosen = part_sum(where(col_index(TILE, n0) == target, T, ZERO), chosen)
            T = where(col_index(TILE, n0) < cols, T, -INFINITE)
            if SIGMOID:
                l = part_sum(softplus(T), l)
            else:
                m, alpha, zero = new_max(T, m, LOG2E)
                before, l = before * alpha, part_sum(exponentials(T, zero, LOG2E), l * alpha)
            n0 = n0 + TILE_N
        save(mHighest, m, row)
        save(mTotal, row_sum(l) + before, row)
        if HAS_TARGETS:
            save(mChosen, load(mChosen, ROW, row) + row_sum(chosen), row)

    return absorb_scores


@kernel_factory
def gradient_kernel(dtype, has_w, has_targets, has_columns, has_sums, sigmoid, nbytes):
    """The kernel for a gradient of this dtype, and how many columns a block of threads has. Each thread keeps the sums
    of its columns, over the rows that it sees."""
    ACC, of_R, of_gradient = sum_type(dtype), *map(Alignment, nbytes)
    HAS_W, HAS_TARGETS, HAS_COLUMNS, HAS_SUMS, SIGMOID = has_w, has_targets, has_columns, has_sums, sigmoid
    TILE_N, ZERO, ONE, LOG2E = WARP * RUN, ACC(0), ACC(1), ACC(LOG2_E)
    TILE = simt(WARPS, TILE_N, THREADS, WARP, RUN)
    ROW, COLUMN = TILE.row_vector(), TILE.col_vector()

    @device
    def exponential(T, f, low):
        return exp2((T - f) * LOG2E - low * LOG2E)

    def gradient_of_scores(
        mGradient, mR, mSums, mA, mB, mW, mTargets, mF, mLow, mC, mOfTarget, mFColumns, mLowColumns, mCColumns
    ):
        ((cols,), (rows,)) = shape(mB), shape(mA)
        part, tile = split(block_index(), (cols + TILE_N - 1) // TILE_N)
        n0, first = tile * TILE_N, part * (WARPS * TILES_OF_A_BLOCK)
        B, W, total = load(mB, COLUMN, n0), load(mW, COLUMN, n0), full(TILE, ZERO)
        f_columns, low_columns, c_columns = (
            load(mFColumns, COLUMN, n0), load(mLowColumns, COLUMN, n0), load(mCColumns, COLUMN, n0)
        )  # fmt: skip
        row, end = first, minimum(first + WARPS * TILES_OF_A_BLOCK, rows)
        while row < end:
            R, A = load(aligned(mR[:, n0 : n0 + TILE_N], of_R), TILE, row), load(mA, ROW, row)
            T = R * A * B
            if HAS_W:
                T = T + W
            if SIGMOID:
                G = reciprocal(exp2(T * -LOG2E) + ONE) * load(mC, ROW, row)
            else:
                G = exponential(T, load(mF, ROW, row), load(mLow, ROW, row)) * load(mC, ROW, row)
            if HAS_COLUMNS:
                G = G + exponential(T, f_columns, low_columns) * c_columns
            if HAS_TARGETS:
                own = col_index(TILE, n0) == load(mTargets, ROW, row)
                G = where(own, G - load(mOfTarget, ROW, row), G)
            if HAS_SUMS:
                total = total + where(row_index(TILE, row) < rows, G, ZERO)
            save(aligned(mGradient[:, n0 : n0 + TILE_N], of_gradient), G * A * B, row)
            row = row + WARPS
        if HAS_SUMS:
            save(mSums[:, n0 : n0 + TILE_N], total, part * WARPS)

    return gradient_of_scores, TILE_N


def softplus_step(ACC):
    """The device function log(1 + exp(T)) = max(T, 0) + log(1 + u), u = exp(-abs(T)). With s = u / (2 + u) the last is
    2 (s + s**3 / 3 + s**5 / 5 + ...)."""
    ZERO, TWO, LOG2E = ACC(0), ACC(2), ACC(LOG2_E)
    series = polynomial(ACC, [2 / (2 * k + 1) for k in range(TERMS[ACC])])

    @device
    def softplus(T):
        u = exp2(abs(T) * -LOG2E)
        s = u * reciprocal(u + TWO)
        return maximum(T, ZERO) + s * series(s * s)

    return softplus


def polynomial(ACC, coefficients):
    """The device function x -> c[0] + c[1] x + ..."""
    first, *others = coefficients
    FIRST = ACC(first)
    if not others:
        return device(lambda x: x * ACC(0) + FIRST)
    rest = polynomial(ACC, others)
    return device(lambda x: rest(x) * x + FIRST)


# ------------------------------------------------------------------------------------------------------------ products
DATA_TYPES = dict(zip(DTYPES, (2, 14, 0, 1)))  # cudaDataType_t
NUMBERS = {  # 1, 0, and the cublasComputeType_t, without TF32, by bytes of a sum
    4: (np.float32([1]), np.float32([0]), 68), 8: (np.float64([1]), np.float64([0]), 70),
}  # fmt: skip


def product(out: Any, a: Any, b: Any, add: bool = False) -> None:
    """As `numbattn.points.blocks.product`, of matrices of one dtype; rows of `out` are contiguous. cuBLAS has columns
    where these have rows: it computes the transpose."""
    if not out.size:
        return
    if not a.shape[1]:
        out[...] *= add
        return
    from cupy.cuda import cublas, device

    (a, ld_a, is_a_turned), (b, ld_b, is_b_turned) = operand(a), operand(b)
    one, zero, compute_type = NUMBERS[out.itemsize]
    cublas.gemmEx(
        device.get_cublas_handle(), is_b_turned, is_a_turned, out.shape[1], len(out), a.shape[1],
        one.ctypes.data, b.data.ptr, DATA_TYPES[b.dtype], ld_b, a.data.ptr, DATA_TYPES[a.dtype], ld_a,
        (one if add else zero).ctypes.data, out.data.ptr, DATA_TYPES[out.dtype], leading(out), compute_type,
        cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip


def operand(x: Any) -> tuple[Any, int, bool]:
    """The matrix, copied if cuBLAS does not read it as it lies, its leading dimension, and whether it is transposed."""
    for turned, rows in ((False, x), (True, x.T)):
        if leading(rows):
            return x, leading(rows), turned
    x = x.copy()
    return x, x.shape[1], False


def leading(x: Any) -> int:
    """How many elements lie between rows, which are contiguous; else 0."""
    (step, near), (rows, cols) = x.strides, x.shape
    if cols > 1 and near != x.itemsize:
        return 0
    if rows == 1:
        return cols
    return step // x.itemsize if step >= cols * x.itemsize and step % x.itemsize == 0 else 0

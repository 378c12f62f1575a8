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
ROWS, COLS = 16, 256  # of a tile of `absorb_kernel`
RUN, ROWS_OF_A_BLOCK = 8, 128  # a thread's columns, and rows of a block of threads of `gradient_kernel`
TERMS = {np.float32: 7, np.float64: 16}  # of a series, whose rest is below half a bit


def room_for_gradient(R: Any, dtype: Any) -> Any:
    """Its rows lie as those of R."""
    return R if R.dtype == dtype else np.empty_like(R.base, dtype=dtype)[:, : R.shape[1]]


# ------------------------------------------------------------------------------------------------------------- kernels
def absorb(R: Any, factors: Any, known: Any) -> None:
    """As `numbattn.points.blocks.absorb`."""
    kernel = absorb_kernel(R.dtype, *kind_of(factors), alignment_of(R.base))
    blocks, given = -(-len(R) // ROWS), arguments(factors, known.total)
    launch(kernel, (blocks, 1, 1), THREADS, 0, R.base, np.int32(R.shape[1]), *given, *known)


def gradient(dR: Any, R: Any, factors: Any, weights: Any, dw: Any) -> None:
    """As `numbattn.points.blocks.gradient`."""
    rows, cols = R.shape
    has, nbytes = (weights.f_columns is not None, dw is not None), tuple(map(alignment_of, (R.base, dR.base)))
    kernel = gradient_kernel(dR.dtype, *kind_of(factors), *has, nbytes)
    parts, tiles = -(-rows // ROWS_OF_A_BLOCK), -(-cols // (WARP * RUN))
    sums = np.empty_like(R, shape=(parts * WARPS, cols) if dw is not None else (1, 1))
    given = [weights.c if x is None else x for x in weights]
    launch(kernel, (parts * tiles, 1, 1), THREADS, 0, dR.base, R.base, np.int32(cols), sums,
           *arguments(factors, weights.c), *given)  # fmt: skip
    if dw is not None:
        dw += sums.sum(axis=0)


def kind_of(factors: Any) -> tuple[bool, ...]:
    """What is compiled in of Factors."""
    return factors.a is not None, factors.w is not None, factors.targets is not None, factors.sigmoid


def arguments(factors: Any, other: Any) -> tuple[Any, ...]:
    """Factors as kernels take them, with another vector in place of those that are None."""
    scale, *vectors, _ = factors
    return scale, *[other if x is None else x for x in vectors]


@kernel_factory
def absorb_kernel(dtype, has_factors, has_w, has_targets, sigmoid, nbytes):
    """The kernel for scores of this dtype: a warp has some rows."""
    ACC, ROWS_OF, TILE_M, TILE_N = dtype.type, Alignment(nbytes), ROWS, COLS
    TILE = simt(TILE_M, TILE_N, THREADS, WARP, vector(dtype))
    ROW, COLUMN, PARTS = TILE.row_vector(), TILE.col_vector(), TILE.row_parts()
    ZERO, LOG2E, INFINITE, softplus = ACC(0), ACC(LOG2_E), ACC(np.inf), softplus_step(ACC)
    HAS_FACTORS, HAS_W, HAS_TARGETS, SIGMOID = has_factors, has_w, has_targets, sigmoid
    _, new_max, exponentials = softmax_parts(ACC, far=True)

    def absorb_scores(mR, cols, scale, mA, mB, mW, mTargets, mHighest, mTotal, mChosen):
        row, n0 = block_index() * TILE_M, index(0)
        m, before, A = load(mHighest, ROW, row), load(mTotal, ROW, row), load(mA, ROW, row)
        l, chosen, target = full(PARTS, ZERO), full(PARTS, ZERO), load(mTargets, ROW, row)
        target = where(target < cols, target, -1)               # T is anything beyond the last column
        while n0 < cols:
            T = load(aligned(mR[:, n0 : n0 + TILE_N], ROWS_OF), TILE, row) * scale
            if HAS_FACTORS:
                T = T * A * load(mB, COLUMN, n0)
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
def gradient_kernel(dtype, has_factors, has_w, has_targets, sigmoid, has_columns, has_sums, nbytes):
    """The kernel for a gradient of this dtype. Each thread keeps the sums of its columns over the rows that it sees."""
    ACC, of_R, of_gradient = sum_type(dtype), *map(Alignment, nbytes)
    TILE_M, TILE_N, MOST, ZERO, ONE, LOG2E = WARPS, WARP * RUN, ROWS_OF_A_BLOCK, ACC(0), ACC(1), ACC(LOG2_E)
    TILE = simt(TILE_M, TILE_N, THREADS, WARP, RUN)
    ROW, COLUMN = TILE.row_vector(), TILE.col_vector()
    HAS_FACTORS, HAS_W, HAS_TARGETS, SIGMOID = has_factors, has_w, has_targets, sigmoid
    HAS_COLUMNS, HAS_SUMS = has_columns, has_sums

    @device
    def exponential(T, f, low):
        return exp2((T - f) * LOG2E - low * LOG2E)

    def gradient_of_scores(
        mGradient, mR, cols, mSums, scale, mA, mB, mW, mTargets, mF, mLow, mC, mOfTarget, mFColumns, mLowColumns,
        mCColumns,
    ):  # fmt: skip
        rows, _ = shape(mR)
        part, tile = split(block_index(), (cols + TILE_N - 1) // TILE_N)
        n0, row, end = tile * TILE_N, part * MOST, minimum(part * MOST + MOST, rows)
        B, W, total = load(mB, COLUMN, n0), load(mW, COLUMN, n0), full(TILE, ZERO)
        f_columns, low_columns = load(mFColumns, COLUMN, n0), load(mLowColumns, COLUMN, n0)
        c_columns = load(mCColumns, COLUMN, n0)
        while row < end:
            c, A = load(mC, ROW, row), load(mA, ROW, row)
            T = load(aligned(mR[:, n0 : n0 + TILE_N], of_R), TILE, row) * scale
            if HAS_FACTORS:
                T = T * A * B
            if HAS_W:
                T = T + W
            if SIGMOID:
                G = reciprocal(exp2(T * -LOG2E) + ONE) * c
            else:
                G = exponential(T, load(mF, ROW, row), load(mLow, ROW, row)) * c
            if HAS_COLUMNS:
                G = G + exponential(T, f_columns, low_columns) * c_columns
            if HAS_TARGETS:
                G = where(col_index(TILE, n0) == load(mTargets, ROW, row), G - load(mOfTarget, ROW, row), G)
            if HAS_SUMS:
                total = total + where(row_index(TILE, row) < rows, G, ZERO)
            if HAS_FACTORS:
                G = G * A * B
            save(aligned(mGradient[:, n0 : n0 + TILE_N], of_gradient), G * scale, row)
            row = row + TILE_M
        if HAS_SUMS:
            save(mSums[:, n0 : n0 + TILE_N], total, part * TILE_M)

    return gradient_of_scores


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

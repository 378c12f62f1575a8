"""Matrix products by cuBLAS, in the digits of their sums: without TF32."""

from functools import cache
from typing import Any

import numpy as np

from ..base.checks import DTYPES, dtype_of_sums
from ..base.values import address_of

DATA_TYPES = dict(zip(DTYPES, (2, 14, 0, 1)))  # cudaDataType_t
COMPUTE_TYPES = {4: 68, 8: 70}  # cublasComputeType_t without TF32, by bytes of a sum


@cache
def has_cublas() -> bool:
    """Whether cuBLAS is installed, which CuPy does not bring."""
    try:
        from cupy.cuda import cublas  # noqa: F401
    except ImportError:
        return False
    return True


def product(out: Any, a: Any, b: Any, add: bool = False, factor: float = 1.0) -> None:
    """out = factor a b, or out += factor a b, of matrices of one dtype, or of stacks of them with one axis in front;
    rows of `out` are contiguous. cuBLAS has columns where these have rows: it computes the transpose."""
    if not out.size:
        return
    if not a.shape[-1]:
        if not add:
            out.fill(0)
        return
    from cupy.cuda import cublas, device

    (a, ld_a, is_a_turned), (b, ld_b, is_b_turned) = operand(a), operand(b)
    dtype = dtype_of_sums(out.dtype)
    alpha, beta = np.array([factor], dtype), np.array([add], dtype)
    apart = [x.strides[0] // x.itemsize if x.ndim > 2 else 0 for x in (b, a, out)]
    cublas.gemmStridedBatchedEx(
        device.get_cublas_handle(), is_b_turned, is_a_turned, out.shape[-1], out.shape[-2], a.shape[-1],
        address_of(alpha), address_of(b), DATA_TYPES[b.dtype], ld_b, apart[0],
        address_of(a), DATA_TYPES[a.dtype], ld_a, apart[1], address_of(beta),
        address_of(out), DATA_TYPES[out.dtype], leading(out), apart[2],
        len(out) if out.ndim > 2 else 1, COMPUTE_TYPES[dtype.itemsize], cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip


def operand(x: Any) -> tuple[Any, int, bool]:
    """The matrices, copied if cuBLAS does not read them as they lie, their leading dimension, and whether they are
    transposed."""
    for turned, rows in ((False, x), (True, x.swapaxes(-2, -1))):
        if leading(rows) and x.strides[0] % x.itemsize == 0:
            return x, leading(rows), turned
    x = x.copy()
    return x, x.shape[-1], False


def leading(x: Any) -> int:
    """How many elements lie between rows, which are contiguous; else 0."""
    (step, near), (rows, cols) = x.strides[-2:], x.shape[-2:]
    if cols > 1 and near != x.itemsize:
        return 0
    if rows == 1:
        return cols
    return step // x.itemsize if step >= cols * x.itemsize and step % x.itemsize == 0 else 0

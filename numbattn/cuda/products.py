"""Matrix products by cuBLAS, in the digits of their sums: without TF32."""

from functools import cache, lru_cache
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
    dtype, (ld_out, _) = dtype_of_sums(out.dtype), order(out.shape, out.strides, out.itemsize)
    alpha, beta = number(factor, dtype), number(add, dtype)
    apart = [x.strides[0] // x.itemsize if x.ndim > 2 else 0 for x in (b, a, out)]
    cublas.gemmStridedBatchedEx(
        device.get_cublas_handle(), is_b_turned, is_a_turned, out.shape[-1], out.shape[-2], a.shape[-1],
        address_of(alpha), address_of(b), DATA_TYPES[b.dtype], ld_b, apart[0],
        address_of(a), DATA_TYPES[a.dtype], ld_a, apart[1], address_of(beta),
        address_of(out), DATA_TYPES[out.dtype], ld_out, apart[2],
        len(out) if out.ndim > 2 else 1, COMPUTE_TYPES[dtype.itemsize], cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip


@lru_cache(maxsize=256)
def number(value: float, dtype: Any) -> Any:
    """A factor as cuBLAS reads it."""
    return np.array([value], dtype)


def operand(x: Any) -> tuple[Any, int, bool]:
    """The matrices, copied if cuBLAS does not read them as they lie, their leading dimension, and whether they are
    transposed."""
    found = order(x.shape, x.strides, x.itemsize)
    if found is None:
        x = x.copy()
        return x, x.shape[-1], False
    return x, *found


@lru_cache(maxsize=4096)
def order(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, bool] | None:
    """The leading dimension of matrices that lie so, and whether they are transposed; None if they have none."""
    for is_turned, rows in ((False, slice(None)), (True, slice(None, None, -1))):
        leading = leading_of(shape[-2:][rows], strides[-2:][rows], itemsize)
        if leading and strides[0] % itemsize == 0:
            return leading, is_turned
    return None


def leading_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """How many elements lie between rows, which are contiguous; else 0."""
    (step, near), (rows, cols) = strides, shape
    if cols > 1 and near != itemsize:
        return 0
    if rows == 1:
        return cols
    return step // itemsize if step >= cols * itemsize and step % itemsize == 0 else 0

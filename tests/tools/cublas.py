"""cuBLAS, as far as numbattn.cuda.products calls it, on NumPy arrays."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np

from numbattn.cuda.products import DATA_TYPES


def emulated(monkeypatch):
    """As long as a monkeypatch lasts, CuPy's cuBLAS is NumPy."""
    cuda = SimpleNamespace(cublas=SimpleNamespace(gemmStridedBatchedEx=gemm, CUBLAS_GEMM_DEFAULT=-1),
                           device=SimpleNamespace(get_cublas_handle=lambda: 0))  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


def gemm(handle, turn_a, turn_b, m, n, k, alpha, a, type_a, ld_a, far_a, b, type_b, ld_b, far_b, beta, c, type_c, ld_c,
         far_c, count, compute, _):  # fmt: skip
    """As cuBLAS' gemmStridedBatchedEx, of matrices of columns."""
    dtypes = dict(zip(DATA_TYPES.values(), DATA_TYPES))
    real = {68: np.float32, 70: np.float64}[compute]
    alpha, beta = (np.frombuffer((ctypes.c_byte * real().itemsize).from_address(at), real)[0] for at in (alpha, beta))

    def matrix(address, dtype, rows, cols, ld):
        assert ld >= rows
        size = dtypes[dtype].itemsize
        memory = (ctypes.c_byte * ((ld * (cols - 1) + rows) * size)).from_address(address)
        return np.ndarray((rows, cols), dtypes[dtype], memory, strides=(size, ld * size))

    for number in range(count):
        given = (a, far_a, type_a), (b, far_b, type_b), (c, far_c, type_c)
        at_a, at_b, at_c = (x + number * far * dtypes[kind].itemsize for x, far, kind in given)
        A = matrix(at_a, type_a, *((k, m) if turn_a else (m, k)), ld_a).astype(real)
        B = matrix(at_b, type_b, *((n, k) if turn_b else (k, n)), ld_b).astype(real)
        C = matrix(at_c, type_c, m, n, ld_c)
        C[...] = alpha * (A.T if turn_a else A) @ (B.T if turn_b else B) + (beta * C if beta else 0)

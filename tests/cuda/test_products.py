"""Products by cuBLAS, which is emulated: how matrices are passed to it. Seen on a GPU by test_by_cublas and losses."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn.base.checks import DTYPES
from numbattn.cuda import products as module

FLOAT64 = DTYPES[-1]


def gemm(handle, turn_a, turn_b, m, n, k, alpha, a, type_a, ld_a, far_a, b, type_b, ld_b, far_b, beta, c, type_c, ld_c,
         far_c, count, compute, _):  # fmt: skip
    """As cuBLAS' gemmStridedBatchedEx, of matrices of columns."""
    dtypes = dict(zip(module.DATA_TYPES.values(), module.DATA_TYPES))
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


@pytest.fixture(params=["NumPy", "cuBLAS"])
def product(request, monkeypatch):
    """The product of NumPy arrays, and how CuPy's are passed on."""
    if request.param == "NumPy":
        return module.product
    cuda = SimpleNamespace(cublas=SimpleNamespace(gemmStridedBatchedEx=gemm, CUBLAS_GEMM_DEFAULT=-1),
                           device=SimpleNamespace(get_cublas_handle=lambda: 0))  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return module.multiply


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize(("m", "n", "k"), [(6, 9, 5), (1, 1, 1), (1, 7, 3), (7, 1, 2)])
def test_products(rng, product, dtype, lead, m, n, k):
    """Of parts of larger arrays, transposed, and copied where cuBLAS does not read them."""
    sums = np.dtype(np.float64 if dtype == FLOAT64 else np.float32)
    whole = rng.standard_normal((*lead, m, n + 3)).astype(sums)
    a, b = rng.standard_normal((*lead, m, 2 * k)).astype(dtype), rng.standard_normal((*lead, n, k)).astype(dtype)
    columns = np.ascontiguousarray(a.swapaxes(-2, -1)).swapaxes(-2, -1)
    for left in (a[..., :k], a[..., ::2], columns[..., :k], np.broadcast_to(a[..., :1, :k], a[..., :k].shape)):
        for right in (b.swapaxes(-2, -1), np.ascontiguousarray(b.swapaxes(-2, -1))):
            for add, factor in ((False, 1), (True, 0.5)):
                found, wanted = whole.copy()[..., :n], factor * (left.astype(sums) @ right.astype(sums))
                wanted += found if add else 0
                product(found, left, right, add, factor)
                assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("m", "n", "k"), [(4, 5, 0), (0, 3, 2)])
def test_nothing_is_multiplied(m, n, k):
    out = np.full((2, m, n), 2.0)
    module.product(out, np.zeros((2, m, k)), np.zeros((2, k, n)), add=True)
    assert (out == 2).all()
    out.fill(np.nan)
    module.product(out, np.zeros((2, m, k)), np.zeros((2, k, n)))
    assert (out == 0).all()


def test_how_cublas_reads_a_matrix():
    x = np.zeros((6, 8), np.float32)
    assert [module.operand(z)[1:] for z in (x, x.T, x[::2], x[:, 2:5], x[:1], x[:, :1])] == [
        (8, False), (8, True), (16, False), (8, False), (8, False), (8, False)
    ]  # fmt: skip
    for odd in (x[:, ::2], x[::-1], np.broadcast_to(x[0], (3, 8))):
        copy, ld, turned = module.operand(odd)
        assert (ld, turned) == (odd.shape[1], False)
        assert_array_equal(copy, odd)


FAULTS = {
    "test_how_cublas_reads_a_matrix": {"step >= cols * x.itemsize": "step > cols * x.itemsize"},
    "test_products": {
        "np.array([add], dtype)": "np.array([1], dtype)",
        "np.array([factor], dtype)": "np.array([1], dtype)",
        "is_b_turned, is_a_turned,": "0, 0,",
        "x.strides[0] // x.itemsize if": "0 if",
        "out + found if add else found": "found",
    },
}

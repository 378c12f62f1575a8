"""Products with block-sparse matrices are those with the dense matrix that has zeros elsewhere."""

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn import sparse
from numbattn.base.checks import dtype_of_sums
from numbattn.call.problem import DTYPES

from ..accuracy import to_numpy


def drawn(rng, dtype, shape=(4, 5), block_size=(32, 16), lead=(3, 7), share=0.4):
    """x, w, dy and a pattern, one column of which has no block."""
    blocks = rng.random(shape) < share
    blocks[:, 1] = False
    pattern = sparse.Pattern(na.BlockSparse(blocks, block_size))
    shapes = (*lead, pattern.shape[0]), (pattern.count, *block_size), (*lead, pattern.shape[1])
    return *(rng.standard_normal(shape).astype(dtype) for shape in shapes), pattern


def plain(x, w, dy, pattern):
    """y, dx and dw by the dense matrix."""
    W, rows, drows = pattern.dense(w), x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return x @ W, dy @ W.T, pattern.values(rows.T @ drows)


def assert_right(found, given, pattern):
    """Up to one rounding of sums in float32, or in float64. Of n products each partial sum is rounded, by eps / 2 of at
    most about the root of all their squares, r. In any order these n errors come to about eps / 2 * sqrt(n) * r; four
    times as much is allowed."""
    dtype, exact = given[0].dtype, [to_numpy(a).astype(np.float64) for a in given]
    of_sums, about = np.finfo(dtype_of_sums(dtype)), ml_dtypes.finfo(dtype)
    terms = exact[0].shape[-1], exact[2].shape[-1], exact[0][..., 0].size
    for got, wanted, squares, n in zip(found, plain(*exact, pattern), plain(*(a * a for a in exact), pattern), terms,
                                       strict=True):  # fmt: skip
        assert got.dtype == dtype
        rounding = float(about.eps) / 2 * np.abs(wanted) + float(about.smallest_subnormal)
        assert (np.abs(to_numpy(got) - wanted) <= rounding + 2 * float(of_sums.eps) * np.sqrt(n * squares)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_and_gradients(rng, dtype):
    x, w, dy, pattern = drawn(rng, dtype)
    y, backprop = sparse.product_vjp(x, w, pattern)
    assert_right((y, *backprop(dy)), (x, w, dy), pattern)
    assert_array_equal(sparse.product(x, w, pattern), y)


def test_rows_of_any_strides_and_none(rng):
    x, w, dy, pattern = drawn(rng, np.float64)
    y, backprop = sparse.product_vjp(x[:, ::-2], w[::1], pattern)
    assert_allclose(y, sparse.product(x, w, pattern)[:, ::-2], rtol=1e-12, atol=1e-12)
    assert backprop(dy[:, ::-2])[0].shape == x[:, ::-2].shape
    y, backprop = sparse.product_vjp(x[:, :0], w, pattern)
    dx, dw = backprop(y)
    assert (y.shape, dx.shape) == ((3, 0, 80), (3, 0, 128))
    assert not dw.any()
    assert sparse.product(x[0, 0], w, pattern).shape == (80,)


def test_no_blocks(xp, rng):
    pattern = sparse.Pattern(na.BlockSparse(np.zeros((2, 3), bool), (16, 16)))
    y, backprop = sparse.product_vjp(xp.ones((5, 32)), pattern.values(xp.ones((32, 48))), pattern)
    dx, dw = backprop(xp.ones((5, 48)))
    assert (y.shape, dx.shape, dw.shape) == ((5, 48), (5, 32), (0, 16, 16))
    assert not y.any()
    assert not dx.any()


def test_underflow_raises_nothing(rng):
    x, w, dy, pattern = drawn(rng, np.float16)
    x, w, dy = (a * np.float16(1e-3) for a in (x, w, dy))
    with np.errstate(all="raise"):
        sparse.product_vjp(x, w, pattern)[1](dy)


def test_wrong_arguments(rng):
    x, w, dy, pattern = drawn(rng, np.float32)
    for error, words, arguments in (
        (TypeError, "pattern: got numpy.ndarray of float32, expected a sparse.Pattern", (x, w, w)),
        (TypeError, "x: got int64, allowed float16", (x.astype(int), w, pattern)),
        (TypeError, "w: got float64, expected float32, the dtype of x", (x, w.astype(float), pattern)),
        (TypeError, "w: got 3.0", (x, 3.0, pattern)),
        (ValueError, r"x: got the shape \(3, 7, 80\), expected \(..., 128\)", (dy, w, pattern)),
        (ValueError, "w: got the shape .*, the blocks that are there", (x, w[1:], pattern)),
    ):
        with pytest.raises(error, match=words):
            sparse.product(*arguments)
    _, backprop = sparse.product_vjp(x, w, pattern)
    with pytest.raises(ValueError, match=r"dy: got the shape .*, the shape of y"):
        backprop(x)
    with pytest.raises(TypeError, match="dy: got int64, allowed"):
        backprop(dy.astype(int))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [(16, 32), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(rng, dtype, block_size):
    """The same calls; also in a CUDA graph, and twice the same bits."""
    import cupy

    *given, pattern = drawn(rng, dtype, block_size=block_size, lead=(3, 301))
    x, w, dy = map(cupy.asarray, given)

    def call():
        y, backprop = sparse.product_vjp(x, w, pattern)
        return y, *backprop(dy)

    found, stream = call(), cupy.cuda.Stream(non_blocking=True)
    assert_right(found, given, pattern)
    stream.wait_event(cupy.cuda.get_current_stream().record())
    with stream:
        stream.begin_capture()
        again = call()
        stream.end_capture().launch()
        stream.synchronize()
    for one, other in zip(found, again):
        assert_array_equal(to_numpy(one).view(np.uint8), to_numpy(other).view(np.uint8))


FAULTS = {
    'run("backward_x", dY, w, pattern, x.shape)': 'run("forward", _rows(x), w, pattern, y.shape)',
    "sparse/formula.py": {
        "dw[numbers] = found": "dw[numbers[::-1]] = found",
        "w.swapaxes(1, 2), pattern._by_row": "w.swapaxes(1, 2), pattern._by_column",
    },
}

"""The kernels of products with block-sparse matrices, by device: warpgroups, tensor cores, CUDA cores."""

from unittest.mock import patch

import numpy as np
import pytest

from numbattn.cuda import kernel
from numbattn.cuda.sparse import products
from numbattn.cuda.sparse.products import Products
from tests.sparse.test_product import assert_right, drawn
from tests.tools.device import AMPERE, GPU, HOPPER, TURING
from tests.tools.launch import mostly_simulated, simulated, simulated_only

pytestmark = pytest.mark.usefixtures("world")


def check(rng, device, dtype, block_size, *, rows=70, shape=(2, 3), multiprocessors=4):
    """All three products of a call. Kernels are launched on NumPy arrays, or their PTX is interpreted."""
    x, w, dy, pattern = drawn(rng, dtype, shape, block_size, lead=(rows,))
    gpu = GPU(device._replace(multiprocessors=multiprocessors))

    def interpreted(function, grid, threads, shared_bytes, *arguments):
        grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1)
        kernel.run(gpu, function, grid, threads, shared_bytes, arguments)

    by = Products(lambda: gpu)
    with patch.object(products, "launch", products.launch if simulated() else interpreted):
        found = by.forward(x, w, pattern), by.backward_x(dy, w, pattern), by.backward_w(x, dy, pattern)
    assert_right(found, (x, w, dy), pattern)


@pytest.mark.parametrize(("device", "dtype", "block_size"), [
    pytest.param(AMPERE, "float16", (16, 32)), pytest.param(AMPERE, "float32", (32, 16)),
    pytest.param(AMPERE, "float64", (16, 32), marks=simulated_only),
    pytest.param(TURING, "float32", (16, 32), marks=simulated_only),
])  # fmt: skip
def test_by_warps(rng, device, dtype, block_size):
    check(rng, device, np.dtype(dtype), block_size)


@mostly_simulated
@pytest.mark.parametrize("block_size", [(64, 64), (64, 128), (128, 64)], ids=str)
def test_by_warpgroups(rng, block_size):
    check(rng, HOPPER, np.dtype(np.float16), block_size, rows=100, multiprocessors=2)


@simulated_only
def test_several_consumers_in_turn(rng, monkeypatch):
    """Tiles of two consumers, with fewer stages than a tile has chunks."""
    monkeypatch.setattr(Products, "consumers", lambda self, rows, columns: 2)
    check(rng, HOPPER, np.dtype(np.float16), (64, 64), rows=150, shape=(6, 2), multiprocessors=2)


def test_parts_keep_all_multiprocessors_busy():
    by = Products(lambda: GPU(HOPPER._replace(multiprocessors=132)))
    assert by.parts(16384, 59, 64) == (2, 8192)                 # 118 tiles
    assert by.parts(64, 59, 64) == (1, 64)
    count, rows = by.parts(16384, 1, 64)
    assert (count - 1) * rows < 16384 <= count * rows
    assert count == 32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_rows(rng, dtype):
    """Tiles of four consumers, more of them than multiprocessors."""
    import cupy
    import ml_dtypes  # noqa: F401, the name of a dtype

    from numbattn import sparse

    *given, pattern = drawn(rng, np.dtype(dtype), (8, 8), (128, 128), lead=(9001,))
    x, w, dy = map(cupy.asarray, given)
    y, backprop = sparse.product_vjp(x, w, pattern)
    assert_right((y, *backprop(dy)), given, pattern)


FAULTS = {
    "return y\n": "y[-1] = 0\n        return y\n",
}

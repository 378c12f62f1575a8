"""A kernel in the tile language, compiled by numba-cuda and, as an experiment, by numba-cuda-mlir."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

THREADS, ROOT = 128, Path(__file__).parents[2]
SCRIPT = "import tests.tools.mlir; from tests.cuda.test_mlir import compiled_product; print(compiled_product()[0])"


def product():
    """The kernel Z = exp2(X @ Y.T) / 2 by mma.sync and cp.async, and its bytes of shared memory."""
    from numbattn.cuda import tile

    shared, rows, sums = tile.SharedMemory(), tile.copy_layout(64, 32, THREADS, 8), tile.mma(64, 64, THREADS)
    place_x, place_y = (shared.tile(64, 32, np.float16) for _ in range(2))

    @tile.device
    def halved_power(x):
        return tile.exp2(x) * np.float32(0.5)

    def kernel(x, y, z):
        m0 = tile.block_index() * 64
        tile.copy_async(tile.allocate(place_x), x, rows, m0)
        tile.copy_async(tile.allocate(place_y), y, rows, 0)
        tile.commit_copies()
        tile.wait_copies()
        tile.sync_threads()
        s = tile.dot(tile.full(sums, np.float32(0)), tile.allocate(place_x), tile.allocate(place_y).T)
        tile.save(z, halved_power(s), m0)

    return kernel, shared.nbytes


def compiled_product():
    """PTX of the kernel by the compiler of this process, and its bytes of shared memory."""
    from numbattn.cuda.compiler import to_ptx, types

    halves, floats = types.Array(types.float16, 2, "A"), types.Array(types.float32, 2, "A")
    kernel, nbytes = product()
    return to_ptx(kernel, types.void(halves, halves, floats), (8, 0), THREADS, 1), nbytes


def numbers_of(array, address):
    """What numba-cuda-mlir passes of an array: two addresses, an offset, its shape, and strides in elements."""
    return address, address, 0, *array.shape, *(stride // array.itemsize for stride in array.strides)


@pytest.mark.skipif(find_spec("numba_cuda_mlir") is None, reason="needs numba-cuda-mlir")
def test_mlir_compiles_the_same_kernel(rng):
    from tests.tools import ptx

    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    here, nbytes = compiled_product()
    x, y = (rng.standard_normal((rows, 32)).astype(np.float16) for rows in (100, 64))
    found = []
    for text, of_array in (here, ptx.numbers_of), (done.stdout, numbers_of):
        z = np.full((100, 64), np.nan, np.float32)
        kernel = ptx.interpret(text, (2, 1, 1), THREADS, nbytes, x, y, z, numbers_of=of_array)
        found.append((z, [kernel.count(rf"^{word}\.") for word in ("mma", "ldmatrix", "cp", "ex2", "bar")]))
    (one, counts), (other, counts_there) = found
    np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(one, np.exp2(x.astype(np.float64) @ y.T.astype(np.float64)) / 2, rtol=1e-5)
    assert counts == counts_there

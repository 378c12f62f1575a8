"""What the tests of this folder have in common: layouts, numbers, and kernels with a way to run them."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    SharedMemory,
    allocate,
    bfloat16,
    copy_layout,
    dot,
    load,
    mma,
    put,
    save,
    simt,
    simulate,
    sync_threads,
)
from tests.tools.launch import launch, simulated_only

DTYPES = [np.float16, bfloat16, np.float32, np.float64]
SHAPE = 32, 32
THREADS = 64
LAYOUTS = {
    "simt": simt(*SHAPE, THREADS, 8, 1),
    "simt in blocks": simt(*SHAPE, THREADS, 8, 2, row_vector=4),
    "mma": mma(*SHAPE, THREADS),
}
ALL_LAYOUTS = LAYOUTS | {  # and those that tiles are only moved in
    "simt in vectors": simt(*SHAPE, THREADS, 8, 4),
    "copy_layout": copy_layout(*SHAPE, THREADS, 8),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
SEEDS = [None, *(pytest.param(seed, marks=simulated_only) for seed in (1, 2))]  # of the order of threads


def numbers(shape, dtype=np.float32, seed=0):
    """Integers of 32 bits, or normally distributed."""
    if np.dtype(dtype).kind in "ui":
        return np.random.default_rng(seed).integers(0, 2**32, shape).astype(dtype)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def as_device(x):
    """What a kernel is given: bfloat16 as uint16."""
    return x.view(np.uint16) if x.dtype == bfloat16 else x


def run(kernel, *arrays, out=np.float32):
    """One block of a kernel of these arrays and a result of SHAPE, which is returned."""
    result = np.full(SHAPE, 7).astype(out)
    launch(kernel, (1, 1, 1), THREADS, 0, *arrays, result)
    return result


def start(kernel, threads, nbytes, *arguments, seed=None):
    """One block on Hopper; with a seed it is simulated, with the threads in another order."""
    if seed is None:
        launch(kernel, (1, 1, 1), threads, nbytes, *arguments, cc=(9, 0, "a"))
    else:
        simulate(kernel, (1, 1, 1), threads, nbytes, *arguments, seed=seed)


M, N, K = 32, 48, 64
FORMS = [(False, False), (False, True), (True, False), (True, True)]  # which operands of a product are transposed


def multiplier(acc_layout, x_dtype, y_dtype, x_transposed, y_transposed, acc_dtype, depth=K, in_boxes=False):
    """z += x y, with x or y held transposed in shared memory."""
    m, n = acc_layout.shape
    shared = SharedMemory()
    place = shared.boxes if in_boxes else shared.tile
    X = place(*((depth, m) if x_transposed else (m, depth)), x_dtype)
    Y = place(*((n, depth) if y_transposed else (depth, n)), y_dtype)
    COPY_X, COPY_Y = (copy_layout(t.rows, t.cols, acc_layout.threads, 4) for t in (X, Y))

    def multiply(x, y, z):
        sX, sY = allocate(X), allocate(Y)
        put(sX, load(x, COPY_X, 0))
        put(sY, load(y, COPY_Y, 0))
        sync_threads()
        acc = load(z, acc_layout, 0)
        if x_transposed and y_transposed:
            acc = dot(acc, sX.T, sY.T)
        elif x_transposed:
            acc = dot(acc, sX.T, sY)
        elif y_transposed:
            acc = dot(acc, sX, sY.T)
        else:
            acc = dot(acc, sX, sY)
        save(z, acc, 0)

    arrays = numbers((X.rows, X.cols), x_dtype), numbers((Y.rows, Y.cols), y_dtype, 1), numbers((m, n), acc_dtype, 2)
    given = [as_device(a) for a in arrays]
    x, y, z = (a.astype(np.float64) for a in arrays)
    want = z + (x.T if x_transposed else x) @ (y.T if y_transposed else y)
    return multiply, shared.nbytes, given, want

"""dot: operands either way round, on CUDA cores; those on tensor cores are in test_tensor_cores."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    SharedMemory,
    allocate,
    bfloat16,
    copy_layout,
    dot,
    full,
    load,
    put,
    save,
    simt,
    sync_threads,
)
from tests.tools.launch import compiled_only, launch, poisoned, ptx_of

from .tiles import FORMS, THREADS, K, M, N, multiplier, numbers

FMA = {
    "k in turn": simt(M, N, THREADS, 16, 1),
    "vectors": simt(M, 64, THREADS, 8, 4),
    "blocks": simt(M, 64, THREADS, 8, 4, row_vector=4),
}


@pytest.mark.parametrize(("layout", "x_transposed", "y_transposed", "dtype"), [
    (layout, *form, (np.float32, np.float64)[(i + j) % 2])
    for i, layout in enumerate(FMA) for j, form in enumerate(FORMS)
])  # fmt: skip
def test_cuda_cores(layout, x_transposed, y_transposed, dtype):
    layout = FMA[layout]
    kernel, nbytes, (x, y, z), want = multiplier(layout, dtype, dtype, x_transposed, y_transposed, dtype)
    launch(kernel, (1, 1, 1), THREADS, nbytes, x, y, z)
    np.testing.assert_allclose(z, want, atol=200 * np.finfo(dtype).eps)


@pytest.mark.parametrize("x_dtype", [np.float16, bfloat16, np.float32])
@pytest.mark.parametrize("y_dtype", [np.float16, bfloat16])
def test_cuda_cores_convert_their_operands(x_dtype, y_dtype):
    kernel, nbytes, (x, y, z), want = multiplier(FMA["vectors"], x_dtype, y_dtype, False, True, np.float32)
    launch(kernel, (1, 1, 1), THREADS, nbytes, x, y, z)
    np.testing.assert_allclose(z, want, atol=2e-5)


@compiled_only
@pytest.mark.parametrize("layout", FMA.values(), ids=FMA)
def test_cuda_cores_read_vectors_and_fuse(layout):
    kernel, _, arrays, _ = multiplier(layout, np.float32, np.float32, False, True, np.float32)
    found = ptx_of(kernel, THREADS, *arrays)
    rows, cols = layout.slots
    assert found.count(r"ld\.shared\.v4\.[bf]32") == rows + cols  # four steps of k at once
    assert found.count(r"fma\.rn\.f32") == 4 * rows * cols
    assert found.count(r"ld\.shared\.[bf]32|\.local|mul\.f32|add\.f32") == 0


@compiled_only
def test_outer_products_read_vectors_along_rows_and_columns():
    layout = FMA["blocks"]
    kernel, _, arrays, _ = multiplier(layout, np.float32, np.float32, True, False, np.float32)
    found = ptx_of(kernel, THREADS, *arrays)
    rows, cols = layout.slots
    assert found.count(r"ld\.shared\.v4\.[bf]32") == 4 * (rows + cols) // 4
    assert found.count(r"ld\.shared\.[bf]32") == 0


@compiled_only
def test_a_tile_is_turned_on_its_way_without_conflicts():
    """What outer products want: two lanes read 32 bytes of a row, 16 rows fill the banks."""
    COPY = simt(M, K, THREADS, 2, 4)
    shared = SharedMemory()
    TILE = shared.tile(K, M, np.float32)

    def turn(x):
        put(allocate(TILE).T, load(x, COPY, 0))

    found = launch(turn, (1, 1, 1), THREADS, shared.nbytes, numbers((M, K), np.float32))
    assert found.count(r"st\.shared\.[bf]32") == M * K // THREADS
    assert not +found.conflicts


def test_shapes_have_to_fit():
    shared = SharedMemory()
    A = shared.tile(M, K, np.float32)

    def square(x, z):
        tile = allocate(A)
        put(tile, load(x, copying_a, 0))
        sync_threads()
        save(z, dot(full(acc, np.float32(0)), tile, tile), 0)

    copying_a, acc = copy_layout(M, K, THREADS, 4), FMA["vectors"]
    with pytest.raises(Exception, match="dot: 32x64 @ 32x64 is no fma 32x64"):
        launch(square, (1, 1, 1), THREADS, shared.nbytes, numbers((M, K), np.float32), poisoned((M, K)))

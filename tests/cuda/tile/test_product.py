"""dot: operands either way round, on CUDA cores; those on tensor cores are in test_tensor_cores. dots: on both."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    SharedMemory,
    allocate,
    bfloat16,
    copy_async,
    copy_layout,
    dot,
    dots,
    full,
    load,
    mma,
    put,
    rescaled,
    row_index,
    save,
    simt,
    sync_threads,
    wait_copies,
)
from tests.tools.launch import compiled_only, launch, poisoned, ptx_of

from .tiles import FORMS, THREADS, K, M, N, as_device, multiplier, numbers

TWO = np.float32(2)
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


def several_products(unit, dtype, in_registers, several=True):
    """The kernel z = [x y + 1, w y + 2], by one word or by two, its nbytes and arrays, and what is to come out."""
    make = mma if unit == "mma" else lambda *shape: simt(*shape, 8, 4)
    SUM, LEFT, shared = make(M, K, THREADS), mma(M, K, THREADS), SharedMemory()
    X, W, Y = (shared.tile(*shape, dtype) for shape in ((M, K), (M, K), (K, K)))
    COPY_X, COPY_Y = copy_layout(M, K, THREADS, 4), copy_layout(K, K, THREADS, 4)
    ACC = np.float64 if dtype == np.float64 else np.float32

    def multiply(x, w, y, z):
        sX, sW, sY = allocate(X), allocate(W), allocate(Y)
        put(sX, load(x, COPY_X, 0))
        put(sW, load(w, COPY_X, 0))
        put(sY, load(y, COPY_Y, 0))
        sync_threads()
        one, two = full(SUM, ACC(1)), full(SUM, ACC(2))
        left, other = (load(x, LEFT, 0), load(w, LEFT, 0)) if in_registers else (sX, sW)
        one, two = dots((one, two), (left, other), sY.T) if several else (dot(one, left, sY.T), dot(two, other, sY.T))
        save(z[0], one, 0)
        save(z[1], two, 0)

    x, w, y = arrays = [numbers(shape, dtype, seed) for seed, shape in enumerate(((M, K), (M, K), (K, K)))]
    want = [a.astype(np.float64) @ y.astype(np.float64).T + i for i, a in ((1, x), (2, w))]
    return multiply, shared.nbytes, [*map(as_device, arrays), poisoned((2, M, K), ACC)], want


SEVERAL = pytest.mark.parametrize(("unit", "dtype", "in_registers"), [
    ("fma", np.float32, False), ("mma", np.float16, False), ("mma", np.float32, True), ("mma", np.float64, True),
    *(pytest.param(*which, marks=pytest.mark.slow) for which in (
        ("fma", np.float16, False), ("mma", bfloat16, True), ("mma", np.float32, False), ("mma", np.float64, False),
    )),
])  # fmt: skip


@SEVERAL
def test_several_products(unit, dtype, in_registers):
    """They read their right operand once."""
    kernel, nbytes, arrays, want = several_products(unit, dtype, in_registers)
    one = launch(kernel, (1, 1, 1), THREADS, nbytes, *arrays, cc=(9, 0))
    np.testing.assert_allclose(arrays[-1], want, atol=1e-13 if dtype == np.float64 else 5e-5)
    if one is None:
        return
    kernel, _, arrays, _ = several_products(unit, dtype, in_registers, several=False)
    two = ptx_of(kernel, THREADS, *arrays, cc=(9, 0))
    loads, sums = r"ld\.shared|ldmatrix", r"fma\.rn|mma\.sync"
    assert one.count(sums) == two.count(sums)
    if in_registers:
        assert one.count(loads) == two.count(loads) / 2
    else:
        assert two.count(loads) / 2 < one.count(loads) < two.count(loads)


@compiled_only
def test_several_products_are_alike():
    shared, HALF, ONE = SharedMemory(), np.float16(0), np.float32(0)
    X, Y, LEFT = shared.tile(M, K, np.float16), shared.tile(K, N, np.float16), mma(M, K, THREADS)
    SUM, OTHER = mma(M, N, THREADS), simt(M, N, THREADS, 4, 4)

    def other_sums(z):
        dots((full(SUM, ONE), full(OTHER, ONE)), (full(LEFT, HALF), full(LEFT, HALF)), allocate(Y))

    def other_operands(z):
        dots((full(SUM, ONE), full(SUM, ONE)), (full(LEFT, HALF), allocate(X)), allocate(Y))

    def more_operands(z):
        dots((full(SUM, ONE), full(SUM, ONE)), (allocate(X), allocate(X), allocate(X)), allocate(Y))

    for kernel in other_sums, other_operands, more_operands:
        with pytest.raises(Exception, match=r"dots: got .* and .*, expected as many tiles, alike"):
            ptx_of(kernel, THREADS, poisoned((M, N)))


@pytest.mark.parametrize(("unit", "dtype"), [("fma", np.float32), ("mma", np.float16)])
def test_of_no_columns(unit, dtype):
    """As of V where lse alone is wanted: nothing is copied, multiplied or saved."""
    shared = SharedMemory()
    X, Y = shared.tile(M, K, dtype), shared.tile(K, 0, dtype)
    SUM = {"fma": simt(M, 0, THREADS, 8, 4), "mma": mma(M, 0, THREADS)}[unit]
    COPY_X, COPY_Y, ROWS = copy_layout(M, K, THREADS, 8), copy_layout(K, 0, THREADS, 8), SUM.row_vector()

    def kernel(x, y, z, rows):
        copy_async(allocate(X), x, COPY_X, 0)
        copy_async(allocate(Y), y, COPY_Y, 0)
        wait_copies()
        sync_threads()
        acc = full(ROWS, TWO) * dot(full(SUM, TWO), allocate(X), allocate(Y))
        acc, _ = dots((acc, acc), (allocate(X), allocate(X)), allocate(Y))
        save(z, rescaled(acc + dot(SUM, allocate(X), allocate(Y)), full(ROWS, TWO)), 0)
        save(rows, row_index(ROWS, 0), 0)

    assert shared.nbytes == X.nbytes
    x, y, z, rows = numbers((M, K), dtype), numbers((K, 0), dtype), poisoned((M, 5)), poisoned((M,))
    launch(kernel, (1, 1, 1), THREADS, shared.nbytes, x, y, z, rows)
    assert np.isnan(z).all()
    np.testing.assert_array_equal(rows, np.arange(M))


@compiled_only
@pytest.mark.parametrize("unit", ["fma", "mma"])
def test_what_has_no_columns_takes_no_instructions(unit):
    shared = SharedMemory()
    X, Y = shared.tile(M, K, np.float32), shared.tile(K, 0, np.float32)
    SUM, COPY = {"fma": simt(M, 0, THREADS, 8, 4), "mma": mma(M, 0, THREADS)}[unit], copy_layout(K, 0, THREADS, 4)
    ROWS = SUM.row_vector()

    def kernel(y, z):
        copy_async(allocate(Y), y, COPY, 0)
        acc = dot(full(SUM, TWO), allocate(X), allocate(Y))
        save(z, rescaled(acc, full(ROWS, TWO)), 0)

    found = ptx_of(kernel, THREADS, numbers((K, 0)), poisoned((M, 5)))
    assert found.count(r"mma|fma|shared|global|vote|cvt") == 0


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


FAULTS = {
    "test_of_no_columns": {
        "return not acc.layout.cols.size": "return False",
        "cuda/tile/layout.py": {
            "hands = max(min(hands, size // run), 1)": "hands = min(hands, size // run)",
            "max(vectors & -vectors, 1)": "(vectors & -vectors)",
        },
        "cuda/tile/fragment.py": {"if axis.size != 1}": "if axis.size > 1}"},
        "cuda/tile/places.py": {"        if not self.cols:\n            return 0\n": ""},
    },
    "test_what_has_no_columns_takes_no_instructions": {
        "cuda/tile/elementwise.py": {"        if not cols:\n            return tile\n": ""},
    },
}

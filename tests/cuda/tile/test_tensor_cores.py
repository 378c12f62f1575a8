"""dot by mma.sync: operands either way round, chained through registers."""

from collections import Counter

import ml_dtypes
import numpy as np
import pytest

from numbattn.cuda.tile import (
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    bfloat16,
    copy_async,
    copy_layout,
    dot,
    full,
    load,
    mma,
    put,
    save,
    sync_threads,
    wait_copies,
)
from tests.tools.launch import compiled_only, launch, poisoned, ptx_of

from .tiles import FORMS, THREADS, K, M, N, as_device, multiplier, numbers


@pytest.mark.parametrize(("dtype", "m", "x_transposed", "y_transposed", "in_boxes"), [
    *((dtype, m, *form, m == 32) for dtype, m in ((np.float16, 64), (bfloat16, 32)) for form in FORMS),
    (np.float16, 32, True, True, False), (bfloat16, 64, False, False, True),
])  # fmt: skip
def test_tensor_cores(dtype, x_transposed, y_transposed, m, in_boxes):
    layout = mma(m, N, THREADS)
    kernel, nbytes, (x, y, z), want = multiplier(
        layout, dtype, dtype, x_transposed, y_transposed, np.float32, in_boxes=in_boxes
    )
    found = launch(kernel, (1, 1, 1), THREADS, nbytes, x, y, z)
    np.testing.assert_allclose(z, want, atol=2e-5)
    if found:
        name = "bf16" if dtype == bfloat16 else "f16"
        assert found.count(rf"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{name}\.{name}\.f32") == m * N * K // (
            16 * 8 * 16 * THREADS // 32
        )
        assert sum(n for op, n in found.conflicts.items() if "ldmatrix" in op) == 0


@pytest.mark.parametrize("in_boxes", [False, True])
@pytest.mark.parametrize(("dtype", "across", "n", "x_transposed", "y_transposed"), [
    (np.float16, 2, 64, False, False), (bfloat16, 2, 96, True, True), (np.float16, 4, 64, False, True),
    (bfloat16, 4, 128, True, False),
])  # fmt: skip
def test_warps_share_rows(dtype, across, n, x_transposed, y_transposed, in_boxes):
    """Two rows of pieces in a warp; which reads only its own columns."""
    threads = 32 * across
    layout = mma(32, n, threads, across)
    kernel, nbytes, (x, y, z), want = multiplier(
        layout, dtype, dtype, x_transposed, y_transposed, np.float32, in_boxes=in_boxes
    )
    found = launch(kernel, (1, 1, 1), threads, nbytes, x, y, z)
    np.testing.assert_allclose(z, want, atol=2e-5)
    if found:
        assert found.count("mma.sync") == 2 * n * K // (8 * 16 * across)
        assert found.count("ldmatrix") == K // 16 * (2 + n // (16 * across))
        assert sum(n for op, n in found.conflicts.items() if "ldmatrix" in op) == 0


# dtype, compute capability, error, the instruction, how many of it make a product of 16x8x8
WORDS = {
    "float32": (np.float32, (8, 0), 2e-5, "m16n8k8.row.col.f32.tf32.tf32.f32", 3),
    "float64": (np.float64, (9, 0), 1e-13, "m16n8k8.row.col.f64.f64.f64.f64", 1),
    "float64 before 9.0": (np.float64, (8, 0), 1e-13, "m8n8k4.row.col.f64.f64.f64.f64", 4),
}


def check_words(words, kernel, nbytes, arrays, want, products):
    """Run x, y, z -> z += x y, made of so many products of 16x8x8 a warp."""
    _, cc, error, instruction, count = words
    found = launch(kernel, (1, 1, 1), THREADS, nbytes, *arrays, cc=cc)
    np.testing.assert_allclose(arrays[2], want, atol=error)
    if found:
        executed = {op: n for op, n in found.executed.items() if op.startswith("mma")}
        assert executed == {f"mma.sync.aligned.{instruction}": count * products}
    return found


# one step of k; a whole chunk; one and a rest, of which float64 is read in another order; chunks. m = 64: two rows of
# pieces in a warp
STEP, CHUNK, REST, CHUNKS = (32, 8, 8), (32, 48, 64), (64, 32, 72), (64, 64, 128)


@pytest.mark.parametrize(("words", "sizes", "x_transposed", "y_transposed"), [
    (words, sizes, *form) for words, by_form in {
        "float32": [(CHUNKS,), (REST, CHUNK), (STEP,), (CHUNK, REST)],
        "float64": [(STEP, REST), (REST,), (CHUNK,), (CHUNKS,)],
        "float64 before 9.0": [(CHUNK,), (CHUNKS, STEP), (REST, CHUNKS), (STEP,)],
    }.items() for form, some in zip(FORMS, by_form) for sizes in some
])  # fmt: skip
def test_tensor_cores_multiply_words(words, sizes, x_transposed, y_transposed):
    """Of words, sizes and forms each two meet."""
    words, (m, n, depth) = WORDS[words], sizes
    dtype, products = words[0], m * n * depth // (16 * 8 * 8 * THREADS // 32)
    layout = mma(m, n, THREADS)
    made = multiplier(layout, dtype, dtype, x_transposed, y_transposed, dtype, depth)
    check_words(words, *made, products)


ROW, ROWS, COPIES = (16, 48, 1), (32, 16, 1), (16, 8, 2)


@pytest.mark.parametrize(("words", "sizes", "x_transposed", "y_transposed"), [
    (words, sizes, *form) for words, by_form in {
        "float32": [ROW, ROWS, COPIES, ROW], "float64": [ROWS, COPIES, ROW, ROWS],
        "float64 before 9.0": [COPIES, ROW, ROWS, COPIES],
    }.items() for form, sizes in zip(FORMS, by_form)
])  # fmt: skip
def test_warps_share_rows_of_words(words, sizes, x_transposed, y_transposed):
    words, (m, n, copies) = WORDS[words], sizes
    dtype, products = words[0], m * n * K * copies // (16 * 8 * 8 * THREADS // 32)
    layout = mma(m, n, THREADS, across=2)
    check_words(words, *multiplier(layout, dtype, dtype, x_transposed, y_transposed, dtype), products)


@pytest.mark.parametrize(("words", "sizes", "y_transposed"), [
    ("float32", STEP, True), ("float32", CHUNK, False), ("float32", REST, True), ("float32", (32, 64, 128), False),
    ("float64", STEP, False), ("float64", CHUNK, True), ("float64", REST, False), ("float64", (32, 64, 128), True),
    ("float64 before 9.0", STEP, True), ("float64 before 9.0", REST, False),
])  # fmt: skip
def test_tensor_cores_multiply_a_fragment_of_words(words, sizes, y_transposed):
    words, (m, n, depth) = WORDS[words], sizes
    made = fragment_multiplier(m, n, depth, y_transposed, words[0])
    found = check_words(words, *made, m * n * depth // (16 * 8 * 8 * THREADS // 32))
    assert not found or found.count("shfl|ldmatrix") == 0


def fragment_multiplier(m, n, depth, y_transposed, dtype, across=1):
    """z += x y, x in registers."""
    LEFT, SUM = mma(m, depth, THREADS, across), mma(m, n, THREADS, across)
    shared = SharedMemory()
    Y = shared.tile(*((n, depth) if y_transposed else (depth, n)), dtype)
    COPY = copy_layout(Y.rows, Y.cols, THREADS, 2)

    def multiply(x, y, z):
        sY = allocate(Y)
        put(sY, load(y, COPY, 0))
        sync_threads()
        acc, left = load(z, SUM, 0), load(x, LEFT, 0)
        save(z, dot(acc, left, sY.T) if y_transposed else dot(acc, left, sY), 0)

    arrays = numbers((m, depth), dtype), numbers(Y.shape, dtype, 1), numbers((m, n), dtype, 2)
    x, y, z = (a.astype(np.float64) for a in arrays)
    return multiply, shared.nbytes, arrays, z + x @ (y.T if y_transposed else y)


@compiled_only
@pytest.mark.parametrize(("x_transposed", "y_transposed"), FORMS)
def test_float32_operands_are_read_once(x_transposed, y_transposed):
    """Two rows of pieces in a warp. Only left operands, of which there is less to read, may wait for banks."""
    layout, f32 = mma(64, 32, THREADS), np.float32
    kernel, nbytes, arrays, _ = multiplier(layout, f32, f32, x_transposed, y_transposed, f32)
    found = launch(kernel, (1, 1, 1), THREADS, nbytes, *arrays)
    left, right = 64 * K // THREADS, 32 * K // 32  # a lane's words
    matrices, pairs, words = (found.count(op) for op in ("ldmatrix", r"ld\.shared\.v2", r"ld\.shared\.[bf]32"))
    assert 4 * matrices + 2 * pairs + words == left + right
    assert 4 * matrices == right * y_transposed + left * (y_transposed and not x_transposed)
    slow = {op.split(".", 2)[2] for op, n in found.conflicts.items() if n and op.startswith("ld")}
    assert len(slow) == (x_transposed == y_transposed)
    assert not slow or (words == left if x_transposed else pairs == left // 2)


@compiled_only
@pytest.mark.parametrize(("x_transposed", "y_transposed"), FORMS)
def test_float64_operands_are_read_once(x_transposed, y_transposed):
    layout, f64 = mma(64, 32, THREADS), np.float64
    kernel, nbytes, arrays, _ = multiplier(layout, f64, f64, x_transposed, y_transposed, f64)
    found = launch(kernel, (1, 1, 1), THREADS, nbytes, *arrays)
    left, right = 64 * K // THREADS, 32 * K // 32  # a lane's elements
    loads = Counter()
    for op, n in found.executed.items():
        if op.startswith("ld.shared"):
            loads["v2" in op] += n
    pairs, words = loads[True], loads[False]
    assert (2 * pairs, words) == (
        left * (not x_transposed) + right * y_transposed, left * x_transposed + right * (not y_transposed)
    )  # fmt: skip
    slow = {op.split(".", 2)[2] for op, n in found.conflicts.items() if n and op.startswith("ld")}
    assert len(slow) == (x_transposed == y_transposed)
    assert not slow or (words == left if x_transposed else pairs == left // 2)


@compiled_only
def test_float64_right_operands_of_fragments_are_read_without_conflicts():
    kernel, nbytes, arrays, _ = fragment_multiplier(32, 32, K, False, np.float64)
    found = launch(kernel, (1, 1, 1), THREADS, nbytes, *arrays)
    assert not sum(n for op, n in found.conflicts.items() if op.startswith("ld"))


@pytest.mark.parametrize("kind", ["normal", "positive"])
def test_float32_products_are_as_good_as_those_of_cuda_cores(kind):
    """64x64x128. The interpreter's tensor cores cut their sums off, as the real ones do."""
    layout = mma(64, 64, THREADS)
    kernel, nbytes, (x, y, z), _ = multiplier(layout, np.float32, np.float32, False, True, np.float32, 128)
    if kind == "positive":
        x, y = (np.random.default_rng(i).uniform(size=a.shape).astype(np.float32) for i, a in enumerate((x, y)))
    z[:] = 0
    launch(kernel, (1, 1, 1), THREADS, nbytes, x, y, z)
    want = x.astype(np.float64) @ y.T.astype(np.float64)
    error, plain = (np.sqrt(np.mean((found - want) ** 2)) for found in (z, x @ y.T))
    assert error <= 2 * plain


@compiled_only
def test_tensor_cores_take_whole_steps():
    for dtype, acc, depth, cols in (
        (np.float32, np.float32, 4, 32), (np.float64, np.float64, 4, 32), (np.float16, np.float32, 24, 32),
        (np.float16, np.float32, 16, 8),
    ):  # fmt: skip
        kernel, _, arrays, _ = multiplier(mma(32, cols, THREADS), dtype, dtype, False, False, acc, depth)
        with pytest.raises(Exception, match=f"multiples of .* not {depth}x{cols}"):
            ptx_of(kernel, THREADS, *arrays)


@compiled_only
def test_shared_rows_are_no_fragments_and_of_halves_16_columns_each():
    kernel, _, arrays, _ = multiplier(mma(32, 48, THREADS, across=2), np.float16, np.float16, False, False, np.float32)
    with pytest.raises(Exception, match="warps that share rows add to 16 columns each"):
        ptx_of(kernel, THREADS, *arrays)
    kernel, _, arrays, _ = fragment_multiplier(16, 32, 32, False, np.float32, across=2)
    with pytest.raises(Exception, match="no left operand"):
        ptx_of(kernel, THREADS, *arrays)


@compiled_only
def test_tensor_cores_refuse_other_dtypes():
    f16, f32, f64 = np.float16, np.float32, np.float64
    for x_dtype, y_dtype, acc in ((f64, f64, f32), (f32, f32, f64), (f32, f64, f64), (f16, f32, f32), (f32, f16, f32)):
        kernel, _, arrays, _ = multiplier(mma(32, 32, THREADS), x_dtype, y_dtype, False, False, acc)
        with pytest.raises(Exception, match="tensor cores multiply float16, bfloat16 or float32"):
            ptx_of(kernel, THREADS, *arrays)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_sums_are_the_next_left_operand(dtype):
    """(x y) y^T, the product in the middle never leaving the registers but for being rounded."""
    INNER, OUTER = mma(M, N, THREADS), mma(M, K, THREADS)
    shared = SharedMemory()
    X, Y = shared.tile(M, K, dtype), shared.tile(K, N, dtype)
    COPY_X, COPY_Y = copy_layout(M, K, THREADS, 8), copy_layout(K, N, THREADS, 1)
    ZERO = np.float32(0)

    def multiply(x, y, z):
        sX, sY = allocate(X), allocate(Y)
        put(sX, load(x, COPY_X, 0))
        put(sY, load(y, COPY_Y, 0))
        sync_threads()
        inner = dot(full(INNER, ZERO), sX, sY)
        save(z, dot(full(OUTER, ZERO), inner, sY.T), 0)

    x, y, z = numbers((M, K), dtype), numbers((K, N), dtype, 1), poisoned((M, K))
    given = (a.view(np.uint16) if a.dtype == bfloat16 else a for a in (x, y))
    launch(multiply, (1, 1, 1), THREADS, shared.nbytes, *given, z)
    inner = (x.astype(np.float32) @ y.astype(np.float32)).astype(dtype).astype(np.float64)
    want = inner @ y.astype(np.float64).T
    np.testing.assert_allclose(z, want, atol=np.abs(want).max() * (2e-2 if dtype == bfloat16 else 2e-3))


# --------------------------------------------------------------------------------------------- right operands of 8 bits
def widened_products(held, dtype, d=64, n=48, order=(True, True)):
    """The kernel (q, k, v, s, o): S = Q K^T and O = P V, P = S / 256, of K (n, d) and V (n, d) of 8 bits; and nbytes.
    order: whether the layouts of Q and of O are by_fours, as they should be."""
    shared = SharedMemory()
    K_TILE, V_TILE = (shared.tile(n, d, held, widened=dtype) for _ in range(2))
    Q_TILE, O_TILE = (mma(M, d, THREADS).by_fours() if by_fours else mma(M, d, THREADS) for by_fours in order)
    S_TILE, COPY, ROWS_OF = mma(M, n, THREADS), copy_layout(n, d, THREADS, 16), Alignment(16)

    def multiply(q, k, v, s, o):
        sK, sV = allocate(K_TILE), allocate(V_TILE)
        copy_async(sK, aligned(k, ROWS_OF), COPY, 0)
        copy_async(sV, aligned(v, ROWS_OF), COPY, 0)
        wait_copies()
        sync_threads()
        S = dot(S_TILE, load(q, Q_TILE, 0), sK.T)
        save(s, S, 0)
        save(o, dot(O_TILE, S / 256, sV), 0)

    return multiply, shared.nbytes


def of_8_bits(held, shape, rng):
    """All numbers that there are, but NaN, and the same in float64."""
    bits = rng.permutation(np.arange(np.prod(shape)) % 256).astype(np.uint8).reshape(shape)
    if held == np.int8:
        return bits.view(np.int8), bits.view(np.int8).astype(np.float64)
    bits[bits & 0x7F == 0x7F] ^= 1
    return bits, bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@pytest.mark.parametrize(("held", "dtype", "cc"), [
    (np.int8, np.float16, (8, 0)), (np.int8, bfloat16, (8, 0)), (np.uint8, np.float16, (8, 0)),
    (np.uint8, np.float16, (8, 9)), (np.uint8, bfloat16, (8, 0)),
])  # fmt: skip
def test_right_operands_of_8_bits(rng, held, dtype, cc):
    kernel, nbytes = widened_products(held, dtype)
    q, (k, exact_k), (v, exact_v) = numbers((M, 64), dtype), *(of_8_bits(held, (48, 64), rng) for _ in range(2))
    s, o = poisoned((M, 48)), poisoned((M, 64))
    found = launch(kernel, (1, 1, 1), THREADS, nbytes, as_device(q), k, v, s, o, cc=cc)
    want = q.astype(np.float64) @ exact_k.T
    np.testing.assert_allclose(s, want, atol=1e-6 * np.abs(want).max())
    want = (s / np.float32(256)).astype(dtype).astype(np.float64) @ exact_v
    np.testing.assert_allclose(o, want, atol=1e-6 * np.abs(want).max())
    if found:
        assert sum(n for op, n in found.conflicts.items() if "ldmatrix" in op) == 0
        assert (found.count("e4m3x2") > 0) == (cc == (8, 9))


@pytest.mark.parametrize("held", [np.int8, np.uint8, np.float16, bfloat16])
def test_right_operands_that_are_widened_to_float32(rng, held):
    """They are exact in TF32: two products, not three."""
    kernel, nbytes = widened_products(held, np.float32, order=(False, False))
    q = rng.standard_normal((M, 64), np.float32)
    if np.dtype(held).itemsize == 1:
        (k, exact_k), (v, exact_v) = (of_8_bits(held, (48, 64), rng) for _ in range(2))
    else:
        k, v = rng.standard_normal((2, 48, 64)).astype(held)
        exact_k, exact_v = k.astype(np.float64), v.astype(np.float64)
    s, o = poisoned((M, 48)), poisoned((M, 64))
    found = launch(kernel, (1, 1, 1), THREADS, nbytes, q, as_device(k), as_device(v), s, o)
    want = q.astype(np.float64) @ exact_k.T
    np.testing.assert_allclose(s, want, atol=1e-6 * np.abs(want).max())
    want = (s / np.float32(256)).astype(np.float64) @ exact_v
    np.testing.assert_allclose(o, want, atol=1e-6 * np.abs(want).max())
    if found:
        assert found.count("mma.sync") == 2 * 2 * M * 48 * 64 // (16 * 8 * 8 * THREADS // 32)
        assert sum(n for op, n in found.conflicts.items() if "ld.shared" in op) == 0


def check_refused(match, *factory, **options):
    kernel, nbytes = widened_products(*factory, **options)
    d, n = options.get("d", 64), options.get("n", 48)
    q, k, v = np.zeros((M, d), np.float16), *np.zeros((2, n, d), factory[0])
    with pytest.raises(Exception, match=match):
        launch(kernel, (1, 1, 1), THREADS, nbytes, q, k, v, np.zeros((M, n), np.float32), np.zeros((M, d), np.float32))


def test_layouts_beside_right_operands_of_8_bits():
    check_refused("with .*, the left operand is of a layout by_fours", np.int8, np.float16, order=(False, True))
    check_refused("with .*, the sum is of a layout by_fours", np.int8, np.float16, order=(True, False))
    check_refused("the left operand is not of a layout by_fours", np.float16, None)
    check_refused("tensor cores multiply float16, bfloat16 or float32", np.int8, None)


@compiled_only
def test_right_operands_of_8_bits_in_whole_steps():
    check_refused("multiples of 32x16, not 48x64", np.int8, np.float16, d=48, n=64)


FAULTS = {
    "by_fours != (found.cols.run == 4)": "False",
    "(32, 16) if right.transposed else (16, 32)": "(16, 16)",
    "8 * down, beside * across": "8 * down, 8 * across",
    "b.mul(first_col, I32(across))": "I32(0)",
    "starts[1] - starts[0]": "8",
    "and not layout.has_whole_rows and layout.cols.slots % 4": "and False",
    "col ^ within": "col",
    "right * beside": "right * 8",
    "(box * plan.rows + at_row)": "at_row",
    "cuda/tile/pieces.py": {
        "slice(c, c + apart + 1, apart)": "slice(c, c + 2)",
        "for i in (0, 2) for four in fours": "for four in fours for i in (0, 2)",
    },
}

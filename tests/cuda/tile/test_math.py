"""Operators, functions, reductions, masks, random numbers: on every layout."""

import operator

import numpy as np
import pytest

from numbattn.cuda.tile import (
    ballot,
    bfloat16,
    col_index,
    cols_between,
    convert,
    copy_layout,
    device,
    exp2,
    full,
    index,
    load,
    log2,
    lowest_bit,
    maximum,
    minimum,
    mma,
    opaque,
    part_sum,
    reciprocal,
    rescaled,
    row_index,
    row_max,
    row_sum,
    save,
    shape,
    simt,
    thread_index,
    where,
    wide_product,
)
from tests.tools.launch import compiled_only, launch, poisoned, ptx_of

THREADS = 64
LAYOUTS = {
    "simt": simt(32, 32, THREADS, 8, 1),
    "simt in blocks": simt(32, 32, THREADS, 8, 2, row_vector=4),
    "mma": mma(32, 32, THREADS),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
ONE_BLOCK = (1, 1, 1)


def numbers(dtype=np.float32, seed=0):
    if np.dtype(dtype).kind in "ui":
        return np.random.default_rng(seed).integers(0, 2**32, (32, 32)).astype(dtype)
    return np.random.default_rng(seed).standard_normal((32, 32)).astype(dtype)


def run(kernel, *arrays, out=np.float32):
    result = np.full((32, 32), 7).astype(out)
    launch(kernel, ONE_BLOCK, THREADS, 0, *arrays, result)
    return result


ARITHMETIC = [operator.add, operator.sub, operator.mul]
BITWISE = [operator.and_, operator.or_, operator.xor]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("op", ARITHMETIC + BITWISE, ids=lambda op: op.__name__)
def test_operators(op, dtype):
    if op in BITWISE and np.dtype(dtype).kind == "f":
        pytest.skip("no such operator")
    layout, TWO = LAYOUTS["simt"], dtype(2)

    def kernel(x, y, z):
        X, Y = load(x, layout, 0), load(y, layout, 0)
        save(z, op(op(X, Y), TWO), 0)

    x, y = numbers(dtype), numbers(dtype, 1)
    with np.errstate(over="ignore"):
        want = op(op(x, y), TWO)
    np.testing.assert_array_equal(run(kernel, x, y, out=dtype), want)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
@pytest.mark.parametrize("op", COMPARISONS, ids=lambda op: op.__name__)
def test_comparisons(op, dtype):
    layout = LAYOUTS["simt"]

    def kernel(x, y, z):
        save(z, op(load(x, layout, 0), load(y, layout, 0)), 0)

    x, y = numbers(dtype), numbers(dtype, 1)
    y[:8] = x[:8]
    if dtype == np.float32:
        y[0] = np.nan
    np.testing.assert_array_equal(run(kernel, x, y, out=np.bool_), op(x, y))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint64])
def test_shifts_and_signs(dtype):
    layout, THREE, FIVE = LAYOUTS["simt"], dtype(3), dtype(5)

    def kernel(x, z):
        X = load(x, layout, 0)
        save(z, (X << THREE) + (X >> FIVE) - (-X) + ~X, 0)

    x = numbers(dtype)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(run(kernel, x, out=dtype), (x << THREE) + (x >> FIVE) - (0 - x) + ~x)


def test_scalars_come_from_either_side_and_in_place():
    layout, TWO = LAYOUTS["simt"], np.float32(2)

    def kernel(x, z):
        X = load(x, layout, 0)
        Y = TWO - X
        Y += X * TWO
        Y *= 3
        Y -= 1
        save(z, -Y, 0)

    x = numbers()
    np.testing.assert_allclose(run(kernel, x), -(3 * (2 - x + 2 * x) - 1), rtol=1e-6, atol=1e-6)


@each_layout
def test_vectors_broadcast(layout):
    def kernel(z):
        i, j = row_index(layout, 100), col_index(layout, 7)
        save(z, i * 1000 + j, 0)

    want = (100 + np.arange(32))[:, None] * 1000 + 7 + np.arange(32)
    np.testing.assert_array_equal(run(kernel, out=np.int32), want)


def test_tiles_of_two_layouts_or_dtypes_do_not_mix():
    A, B = LAYOUTS["simt"], LAYOUTS["mma"]

    def layouts(x, z):
        save(z, load(x, A, 0) + load(x, B, 0), 0)

    def dtypes(x, z):
        save(z, load(x, A, 0) + row_index(A, 0), 0)

    for kernel in layouts, dtypes:
        with pytest.raises(Exception, match=r"do not mix|different registers|No implementation|not mix"):
            run(kernel, numbers())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions(dtype):
    layout = LAYOUTS["mma"]

    def kernel(x, a, b, c, d, e):
        X = load(x, layout, 0)
        save(a, exp2(X), 0)
        save(b, log2(X * X), 0)
        save(c, reciprocal(X), 0)
        save(d, maximum(X, -X), 0)
        save(e, minimum(X, 0.5), 0)

    x = numbers(dtype)
    x[0, :2], x[1, 0] = 0, np.nan
    out = [poisoned((32, 32), dtype) for _ in range(5)]
    launch(kernel, ONE_BLOCK, THREADS, 0, x, *out)
    with np.errstate(divide="ignore"):
        want = np.exp2(x), np.log2(x * x), np.where(x == 0, 0, 1 / x), np.fmax(x, -x), np.fmin(x, 0.5)
    for got, expected in zip(out, want):
        np.testing.assert_allclose(got, expected, rtol=4 * np.finfo(dtype).eps)


@compiled_only
def test_functions_are_single_instructions():
    layout = LAYOUTS["simt"]

    def kernel(x, z):
        X = load(x, layout, 0)
        save(z, maximum(exp2(X), reciprocal(log2(X))), 0)

    found = ptx_of(kernel, THREADS, numbers(), numbers())
    slots = 32 * 32 // THREADS
    for instruction in "ex2.approx.ftz.f32", "lg2.approx.ftz.f32", "rcp.approx.ftz.f32", "max.f32":
        assert found.count(rf"{instruction}\b") == slots
    assert found.count(r"\bcall|\.local") == 0


def test_scalars():
    def kernel(z):
        n, _ = shape(z)
        z[0, 0] = maximum(n - 40, 0)
        z[0, 1] = minimum(n, 100)
        z[0, 2] = n // 5

    assert run(kernel, out=np.int32)[0, :3].tolist() == [0, 32, 6]


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float64, np.int32, np.uint64])
def test_convert(dtype):
    layout = LAYOUTS["simt"]

    def kernel(x, z):
        save(z, convert(load(x, layout, 0), np.float32) * 2, 0)

    x = numbers(dtype)
    given = x.view(np.uint16) if dtype == bfloat16 else x
    np.testing.assert_array_equal(run(kernel, given), x.astype(np.float32) * 2)


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS.values(), mma(32, 80, THREADS), simt(32, 160, THREADS, 2, 4), simt(32, 8, THREADS, 2, 4)],
    ids=[*LAYOUTS, "mma of 80 columns", "80 columns a thread", "one run a thread"],
)
def test_columns_between_ends_of_each_row(layout):
    ROWS, START = layout.row_vector(), np.int32(100)

    def kernel(ends, y):
        first, last = load(ends[0], ROWS, 0), load(ends[1], ROWS, 0)
        save(y, convert(cols_between(layout, START, first, last), np.int32), 0)

    cols = layout.cols.size
    far = [(-(2**30), 2**30), (2**30, -(2**30)), (100, 99 + cols), (101, 98 + cols), (99, 99), (100, 100)]
    ends = np.random.default_rng(0).integers(90, 110 + cols, (2, 32)).astype(np.int32)
    ends[:, : len(far)] = np.transpose(far)
    y, j = np.full((32, cols), 7, np.int32), np.arange(100, 100 + cols)
    launch(kernel, ONE_BLOCK, THREADS, 0, ends, y)
    np.testing.assert_array_equal(y, (j >= ends[0][:, None]) & (j <= ends[1][:, None]))


@each_layout
@pytest.mark.parametrize("ones", ["all", "some", "none"])
def test_rescaled(layout, ones):
    ROWS = layout.row_vector()

    def kernel(x, factors, y):
        save(y, rescaled(load(x, layout, 0), load(factors, ROWS, 0)), 0)

    x, factors = numbers(), np.ones(32, np.float32)
    factors[{"all": 32, "some": 20, "none": 0}[ones] :] = 0.5
    np.testing.assert_array_equal(run(kernel, x, factors), x * factors[:, None])


@compiled_only
def test_loops_over_the_unforeseen_are_not_unrolled():
    def counting(step):
        def kernel(y, n):
            i = index(0)
            while i < n:
                y[i] = index(y[i]) // n
                i = step(i)

        return ptx_of(kernel, 32, np.zeros(2, np.int32), np.int32(9)).count(r"div\.u32")

    assert counting(device(lambda i: opaque(i + 1))) == 1


@each_layout
def test_where(layout):
    def kernel(x, z):
        X, i, j = load(x, layout, 0), row_index(layout, 0), col_index(layout, 0)
        X = where((j <= i) & (j != 3), X, -np.inf)
        save(z, where(j > 28, -X, X), 0)

    x, (i, j) = numbers(), np.indices((32, 32))
    want = np.where((j <= i) & (j != 3), x, -np.inf)
    np.testing.assert_array_equal(run(kernel, x), np.where(j > 28, -want, want))


@each_layout
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_along_the_rows(layout, dtype):
    ROWS, PARTS, ZERO = layout.row_vector(), layout.row_parts(), dtype(0)

    def kernel(x, seed, top, total, parts):
        X, start = load(x, layout, 0), load(seed, ROWS, 0)
        save(top, row_max(X, start), 0)
        save(total, row_sum(X, start), 0)
        twice = part_sum(X, part_sum(X, full(PARTS, ZERO)) * start)
        save(parts, row_sum(twice, ZERO), 0)

    x, seed = numbers(dtype), numbers(dtype, 1)[0]
    x[3], x[4, 7] = -np.inf, np.nan
    top, total, parts = (poisoned(32, dtype) for _ in range(3))
    launch(kernel, ONE_BLOCK, THREADS, 0, x, seed, top, total, parts)
    np.testing.assert_array_equal(top, np.fmax(np.fmax.reduce(x, 1), seed))
    bound = {"atol": 64 * np.finfo(dtype).eps, "rtol": 0}
    np.testing.assert_allclose(total, x.sum(1) + seed, **bound)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(parts, x.sum(1) * seed + x.sum(1), **bound)


@compiled_only
@each_layout
def test_reductions_shuffle_once_a_row_and_step(layout):
    ROWS = layout.row_vector()

    def kernel(x, top):
        save(top, row_max(load(x, layout, 0), load(top, ROWS, 0)), 0)

    found = ptx_of(kernel, THREADS, numbers(), poisoned(32))
    assert found.count("shfl.sync.bfly") == layout.rows.slots * len(layout.row_lane_bits())


# ------------------------------------------------------------------------------------------------------------- bits
def test_products_of_words_are_wide():
    x, high, low = np.array([[0, 1, 2**31, 2**32 - 1]], np.uint32).repeat(4, 0), *np.ones((2, 4, 4), np.uint32)
    layout = simt(4, 4, 32, 4, 1)

    def kernel(x, high, low):
        upper, lower = wide_product(load(x, layout, 0), np.uint64(0xD2511F53))
        save(high, upper, 0)
        save(low, lower, 0)

    launch(kernel, ONE_BLOCK, 32, 0, x, high, low)
    product = x.astype(np.uint64) * np.uint64(0xD2511F53)
    np.testing.assert_array_equal((high, low), (product >> np.uint64(32), product & np.uint64(2**32 - 1)))


def test_ballot_and_lowest_bit():
    votes, lowest = np.zeros(2, np.uint32), np.zeros(4, np.int32)
    words = np.array([0, 1, 2**31, 40], np.uint32)

    def kernel(words, votes, lowest):
        lane = thread_index() % 32
        found = ballot(thread_index() % 3 == 1)
        if lane == 0:
            votes[thread_index() // 32] = found
        if thread_index() < 4:
            lowest[lane] = lowest_bit(words[lane])

    launch(kernel, ONE_BLOCK, 64, 0, words, votes, lowest)
    assert votes.tolist() == [sum(1 << i for i in range(32) if (32 * w + i) % 3 == 1) for w in range(2)]
    assert lowest.tolist() == [32, 0, 31, 3]


def test_copying_deals_small_tiles_to_part_of_the_threads():
    layout = copy_layout(4, 8, 64, 1)
    x, z = numbers()[:4, :8].copy(), np.zeros((4, 8), np.float32)

    def kernel(x, z):
        save(z, load(x, layout, 0), 0)

    launch(kernel, ONE_BLOCK, 64, 0, x, z)
    np.testing.assert_array_equal(z, x)

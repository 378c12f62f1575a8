"""Functions of each element; where scalars are taken instead, see test_integers."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    beside,
    capped,
    col_index,
    column_halves,
    column_pairs,
    convert,
    exp2,
    load,
    log2,
    maximum,
    minimum,
    mma,
    paired,
    reciprocal,
    rescaled,
    row_index,
    save,
    shifted,
    simt,
    transposed_halves,
    where,
    wide_product,
)
from tests.tools.launch import compiled_only, launch, poisoned, ptx_of

from .tiles import LAYOUTS, SHAPE, THREADS, each_layout, numbers, run


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

    x = numbers(SHAPE, dtype)
    x[0, :2], x[1, 0] = 0, np.nan
    out = [poisoned((32, 32), dtype) for _ in range(5)]
    launch(kernel, (1, 1, 1), THREADS, 0, x, *out)
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

    found = ptx_of(kernel, THREADS, numbers(SHAPE), numbers(SHAPE))
    slots = 32 * 32 // THREADS
    for instruction in "ex2.approx.ftz.f32", "lg2.approx.ftz.f32", "rcp.approx.ftz.f32", "max.f32":
        assert found.count(rf"{instruction}\b") == slots
    assert found.count(r"\bcall|\.local") == 0


def test_products_of_words_are_wide():
    x, high, low = np.array([[0, 1, 2**31, 2**32 - 1]], np.uint32).repeat(4, 0), *np.ones((2, 4, 4), np.uint32)
    layout = simt(4, 4, 32, 4, 1)

    def kernel(x, high, low):
        upper, lower = wide_product(load(x, layout, 0), np.uint64(0xD2511F53))
        save(high, upper, 0)
        save(low, lower, 0)

    launch(kernel, (1, 1, 1), 32, 0, x, high, low)
    product = x.astype(np.uint64) * np.uint64(0xD2511F53)
    np.testing.assert_array_equal((high, low), (product >> np.uint64(32), product & np.uint64(2**32 - 1)))


@pytest.mark.parametrize("lane", [1, 4, 16])
def test_halves_of_words_in_two_lanes(lane):
    layout = simt(32, 2, 32, 1, 2)                              # a row a lane

    def kernel(x, z):
        save(z, transposed_halves(load(x, layout, 0), lane), 0)

    x = numbers((32, 2), np.uint32)
    z = np.zeros_like(x)
    launch(kernel, (1, 1, 1), 32, 0, x, z)
    halves, want = x.view(np.uint16).reshape(32, 2, 2), np.empty((32, 2, 2), np.uint16)
    for row in range(32):
        want[row] = halves[[row & ~lane, row | lane], :, int(row & lane > 0)].T
    np.testing.assert_array_equal(z, want.reshape(32, 4).view(np.uint32))


@each_layout
def test_halves_of_columns(layout):
    def kernel(x, z):
        left, right = column_halves(load(x, layout, 0))
        save(z, beside(right, -left, layout), 0)

    x = numbers(SHAPE)
    np.testing.assert_array_equal(run(kernel, x), np.hstack([x[:, 16:], -x[:, :16]]))


@pytest.mark.parametrize("layout", [simt(32, 32, 32, 4, 2), simt(32, 32, 32, 1, 8), mma(32, 32, 32)], ids=str)
def test_pairs_of_columns(layout):
    pairs = layout.without(cols=1)

    def kernel(x, z):
        even, odd = column_pairs(load(x, layout, 0))
        save(z, paired(odd, even + convert(col_index(pairs, 0), np.float32), layout), 0)

    x = numbers(SHAPE)
    want = np.stack([x[:, 1::2], x[:, ::2] + np.arange(0, 32, 2, np.float32)], axis=-1)
    np.testing.assert_array_equal(run(kernel, x), want.reshape(32, 32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_capped(dtype):
    layout = LAYOUTS["mma"]

    def kernel(x, z):
        save(z, capped(load(x, layout, 0), -0.25), 0)

    x, z = numbers(SHAPE, dtype), poisoned(SHAPE, dtype)
    x[0, :3] = np.nan, -np.inf, np.inf
    launch(kernel, (1, 1, 1), THREADS, 0, x, z)
    np.testing.assert_array_equal(z, np.minimum(x, dtype(-0.25)))   # np.minimum keeps NaN


@each_layout
def test_where(layout):
    def kernel(x, z):
        X, i, j = load(x, layout, 0), row_index(layout, 0), col_index(layout, 0)
        X = where((j <= i) & (j != 3), X, -np.inf)
        save(z, where(j > 28, -X, X), 0)

    x, (i, j) = numbers(SHAPE), np.indices((32, 32))
    want = np.where((j <= i) & (j != 3), x, -np.inf)
    np.testing.assert_array_equal(run(kernel, x), np.where(j > 28, -want, want))


@each_layout
@pytest.mark.parametrize("ones", ["all", "some", "none"])
def test_rescaled(layout, ones):
    ROWS = layout.row_vector()

    def kernel(x, factors, y):
        save(y, rescaled(load(x, layout, 0), load(factors, ROWS, 0)), 0)

    x, factors = numbers(SHAPE), np.ones(32, np.float32)
    factors[{"all": 32, "some": 20, "none": 0}[ones] :] = 0.5
    np.testing.assert_array_equal(run(kernel, x, factors), x * factors[:, None])


def test_shifted():
    layout = simt(64, 5, THREADS, 1, 5)

    def kernel(x, y):
        save(y, shifted(load(x, layout, 0), 7), 0)

    x, y = numbers((64, 5)), poisoned((64, 5))
    launch(kernel, (1, 1, 1), THREADS, 0, x, y)
    np.testing.assert_array_equal(y, np.hstack([np.full((64, 1), 7), x[:, :-1]]))

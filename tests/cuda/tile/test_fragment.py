"""Operators of fragments: with each other and with scalars."""

import operator

import numpy as np
import pytest

from numbattn.cuda.tile import load, row_index, save

from .tiles import LAYOUTS, SHAPE, numbers, run

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

    x, y = numbers(SHAPE, dtype), numbers(SHAPE, dtype, 1)
    with np.errstate(over="ignore"):
        want = op(op(x, y), TWO)
    np.testing.assert_array_equal(run(kernel, x, y, out=dtype), want)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
@pytest.mark.parametrize("op", COMPARISONS, ids=lambda op: op.__name__)
def test_comparisons(op, dtype):
    layout = LAYOUTS["simt"]

    def kernel(x, y, z):
        save(z, op(load(x, layout, 0), load(y, layout, 0)), 0)

    x, y = numbers(SHAPE, dtype), numbers(SHAPE, dtype, 1)
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

    x = numbers(SHAPE, dtype)
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

    x = numbers(SHAPE)
    np.testing.assert_allclose(run(kernel, x), -(3 * (2 - x + 2 * x) - 1), rtol=1e-6, atol=1e-6)


def test_tiles_of_two_layouts_or_dtypes_do_not_mix():
    A, B = LAYOUTS["simt"], LAYOUTS["mma"]

    def layouts(x, z):
        save(z, load(x, A, 0) + load(x, B, 0), 0)

    def dtypes(x, z):
        save(z, load(x, A, 0) + row_index(A, 0), 0)

    for kernel in layouts, dtypes:
        with pytest.raises(Exception, match=r"do not mix|different registers|No implementation|not mix"):
            run(kernel, numbers(SHAPE))


FAULTS = {
    "cuda/tile/test_agreement.py": {
        "if len({*names}) > 1:": "if False:",
        "elif not isinstance(x, A_NUMBER):": "elif False:",
        "    if both.shape != layout.shape:": "    if False:",
    },
}

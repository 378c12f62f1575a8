"""Functions, operators and choices of new words, element by element, against float64."""

import operator
from functools import partial

import numpy as np
import pytest

from numbattn.cuda.tile import (
    device,
    exp,
    exp2,
    load,
    log,
    log2,
    part_sum,
    reciprocal,
    row_max,
    row_sum,
    save,
    simt,
    sqrt,
    tanh,
    where,
)
from tests.tools.launch import launch

TILE = simt(8, 16, 32, 4, 1)
LARGE = {np.float32: 80.0, np.float64: 700.0}  # whose exponential is still finite
each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def run(function, *arrays):
    """What a function makes of tiles."""
    z = np.full((8, 16), 99, arrays[0].dtype)
    function = device(function) if function.__module__ == __name__ else function

    def one(x, z):
        save(z, function(load(x, TILE, 0)), 0)

    def two(x, y, z):
        save(z, function(load(x, TILE, 0), load(y, TILE, 0)), 0)

    launch({1: one, 2: two}[len(arrays)], (1, 1, 1), 32, 0, *arrays, z)
    return z


def numbers(dtype, *edges, scale=1.0):
    """Of all sizes and both signs, and edges."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(128) * scale * 10.0 ** rng.uniform(-6, 0, 128)
    x[: len(edges)] = edges
    return x.reshape(8, 16).astype(dtype)


def check(function, exact, x, rtol, atol=0.0):
    with np.errstate(all="ignore"):
        want = exact(x.astype(np.float64)).astype(x.dtype).astype(np.float64)
    got = run(function, x).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)
    zero = want == 0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


@each_dtype
def test_exp(dtype):
    x = numbers(dtype, 0.0, -0.0, np.inf, -np.inf, np.nan, LARGE[dtype], -LARGE[dtype], 1000, -1000, scale=20)
    bound = 2e-7 + 1e-7 * LARGE[dtype] if dtype == np.float32 else 1e-15
    check(exp, np.exp, x, bound)
    check(exp2, np.exp2, x, 2e-7 if dtype == np.float32 else 1e-15)


@each_dtype
def test_log(dtype):
    tiny, huge = np.finfo(dtype).tiny, np.finfo(dtype).max
    x = numbers(dtype, 0.0, -0.0, np.inf, -1.0, np.nan, 1.0, tiny, huge, 1.001, 0.999, scale=20)
    x.flat[10:] = abs(x.flat[10:])
    for function, exact in (log, np.log), (log2, np.log2):
        check(function, exact, x, 3e-7 if dtype == np.float32 else 1e-15, 3e-7 if dtype == np.float32 else 1e-17)


@each_dtype
def test_tanh(dtype):
    tiny = np.finfo(dtype).tiny
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, tiny, -tiny, 0.55, 0.6, -0.55, -0.6, 9, 9.1, 44, -89, 20]
    check(tanh, np.tanh, numbers(dtype, *edges, scale=4), 3e-7 if dtype == np.float32 else 1e-15)


@each_dtype
def test_sqrt(dtype):
    x = numbers(dtype, 0.0, -0.0, np.inf, -1.0, np.nan, np.finfo(dtype).tiny, np.finfo(dtype).max)
    x.flat[7:] = abs(x.flat[7:])
    check(sqrt, np.sqrt, x, 2e-7 if dtype == np.float32 else 1e-15)


@each_dtype
def test_reciprocal(dtype):
    x = numbers(dtype, np.inf, -np.inf, np.nan, 1e30, -1e-30)
    check(reciprocal, lambda x: 1 / x, x, 2e-7 if dtype == np.float32 else 1e-15)
    assert not run(reciprocal, np.zeros((8, 16), dtype)).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint32, np.int64, np.uint64])
def test_abs_and_negative(dtype):
    x = numbers(np.float64, 0.0, -0.0, 5, -5, scale=100)
    if np.dtype(dtype).kind == "f":
        x.flat[4:7] = np.inf, -np.inf, np.nan
    x = x.astype(np.int64).astype(dtype) if np.dtype(dtype).kind in "iu" else x.astype(dtype)
    for function in abs, operator.neg:
        got, want = run(function, x), function(x)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@each_dtype
def test_division_of_floats(dtype):
    x, y = numbers(dtype, 0.0, 1.0, -1.0, np.inf, np.inf), numbers(dtype, 0.0, 0.0, -0.0, np.inf, 2.0)[:, ::1]
    y.flat[5:] = y.flat[5:][::-1]
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(run(lambda X, Y: X / Y, x, y), x / y, rtol=1e-7)
        np.testing.assert_allclose(run(lambda X: 1 / (X / 3), x), 1 / (x / 3), rtol=3e-7)


def test_division_in_place():
    def halved(X):
        X /= 2
        return X

    x = numbers(np.float32)
    np.testing.assert_array_equal(run(halved, x), x / 2)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_division_of_integers(dtype):
    x = np.arange(128).reshape(8, 16).astype(dtype) * 3

    def divided(X):
        X //= 2
        return 1000 // (X // 5 + 1)

    np.testing.assert_array_equal(run(divided, x), 1000 // (x // 2 // 5 + 1))


CHOICES = {
    "two tiles": lambda X: where(X > 0, X, -X), "a number on the right": lambda X: where(X > 0, X, 0.25),
    "a number on the left": lambda X: where(X > 0, 0.25, X), "infinity": lambda X: where(X > 0, -np.inf, X),
    "an index of Python's": lambda X: where(X > 0, 1, X), "a row vector": lambda X: where(X > 0, row_max(X), X),
    "of vectors": lambda X: X + where(row_max(X) > 1, 2, row_sum(X)),
}  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
@each_dtype
def test_where(choice, dtype):
    x = numbers(dtype)
    top, total = x.max(1, keepdims=True), x.sum(1, keepdims=True)
    want = {
        "two tiles": abs(x), "a number on the right": np.where(x > 0, x, 0.25),
        "a number on the left": np.where(x > 0, 0.25, x), "infinity": np.where(x > 0, -np.inf, x),
        "an index of Python's": np.where(x > 0, 1, x), "a row vector": np.where(x > 0, top, x),
        "of vectors": x + np.where(top > 1, 2, total),
    }  # fmt: skip
    got = run(CHOICES[choice], x)
    np.testing.assert_allclose(got, want[choice], rtol=0, atol=16 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint32, np.int64, np.uint64])
def test_reductions_without_a_seed(dtype):
    x = numbers(np.float64, -3, scale=100)
    x = abs(x).astype(dtype) if np.dtype(dtype).kind == "u" else x.astype(dtype)

    def kernel(x, top, total, parts):
        X = load(x, TILE, 0)
        save(top, row_max(X), 0)
        save(total, row_sum(X), 0)
        save(parts, row_sum(part_sum(X, part_sum(X))), 0)

    top, total, parts = (np.full(8, 99, dtype) for _ in range(3))
    launch(kernel, (1, 1, 1), 32, 0, x, top, total, parts)
    np.testing.assert_array_equal(top, x.max(1))
    close = partial(np.testing.assert_allclose, rtol=1e-5 if dtype == np.float32 else 1e-13)
    close(total, x.sum(1, dtype=dtype))
    close(parts, 2 * x.sum(1, dtype=dtype))

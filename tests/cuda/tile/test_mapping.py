"""Functions of numbers over the elements of tiles: integers that are floats, too, are as Python's."""

import math

import numpy as np
import pytest
from numba.core.errors import NumbaError

from numbattn.cuda.tile import device, full, holds, index, load, map_elements, save, where
from numbattn.functions.compiled.derivative import compiled_of, derivative_of, linked
from numbattn.functions.compiled.errors import naming
from numbattn.functions.frozen import frozen
from tests.tools.assembler import compile_ptx
from tests.tools.launch import compiled_only, launch, poisoned

from .tiles import LAYOUTS, SHAPE, THREADS, each_layout, numbers

ROW, COL, SIZES = 5, 2, (200, 300)


def in_place(s, i, j, weights):
    d = i - j
    d += 3
    d = abs(d)
    if d > 4:
        d = 4
    e = j
    e *= 2
    e //= 3
    e %= 5
    e **= 2
    s -= d + e
    return s


FUNCTIONS = {
    "sums": lambda s, i, j, weights: s + (i - j) + (j - 3) + (2 - i) + (-j) + (+i),
    "abs": lambda s, i, j, weights: s - 0.5 * abs(i - j) + abs(3 - j),
    "products": lambda s, i, j, weights: s + (i * j) % 7 + 2 * i + j * 3 + i**2 + 2**j,
    "quotients": lambda s, i, j, weights: s + i // 2 + (j - 7) // 4 + (j - 7) % 4 + i / 8 + 4 / (j + 1) + 9 // (j + 1)
        + divmod(j - 7, 3)[1] - divmod(s, 3.5)[0],
    "bits": lambda s, i, j, weights: s + (i & 3) + (j | 1) + (i ^ j) + (1 << (j % 4)) + (j >> 1) + (~i),
    "comparisons": lambda s, i, j, weights: s + (i > j) + 2 * (i <= 9) + 4 * (j == 3) + 8 * (j != i) + 16 * (j > 2.5),
    "smaller, larger": lambda s, i, j, weights: s + min(i, 3) + max(i, j) + min(j - i, -1) + max(0.5, i) + min(j, s),
    "branches": lambda s, i, j, weights: j if i == 7 else -1.5 if j > 20 else i - j if i > j else s,
    "floats": lambda s, i, j, weights: s * i - 2.5 * j + (i - 0.5) * j + float(i) - (j - s),
    "int": lambda s, i, j, weights: s + int(i) * int(j) / 2 + int(s),
    "functions": lambda s, i, j, weights: (
        s + math.sqrt(i) + np.tanh(i - j) + math.exp(-j) + abs(s) ** 1.5 - 0.5**j + math.asinh(s)
    ),
    "look up": lambda s, i, j, weights: s + weights[i, 0] * weights[j, 1] + weights[(-i) % 50, j % 2],
    "a place": lambda s, i, j, weights: i,
    "a difference": lambda s, i, j, weights: i - j,
    "a truth": lambda s, i, j, weights: i > j,
    "in place": in_place,
}


def run(function, x, weights, layout=LAYOUTS["mma"], sizes=SIZES):
    function, z = device(function), poisoned(SHAPE, x.dtype)

    def kernel(x, weights, z):
        ends = (index(sizes[0]), index(sizes[1]))
        save(z, map_elements(function, load(x, layout, 0), index(ROW), index(COL), ends, (weights,)), 0)

    launch(kernel, (1, 1, 1), THREADS, 0, x, weights, z)
    return z


def wanted(function, x, weights):
    i, j = np.ogrid[ROW : ROW + SHAPE[0], COL : COL + SHAPE[1]]
    return np.vectorize(lambda *x: float(function(*x, weights)))(x.astype(np.float64), i, j)


@pytest.fixture
def weights(rng):
    return rng.random((50, 2))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(weights, name, dtype):
    x, function = numbers(SHAPE, dtype), FUNCTIONS[name]
    want = wanted(function, x, weights)
    np.testing.assert_allclose(run(function, x, weights), want, rtol=0, atol=4 * np.finfo(dtype).eps * abs(want).max())


@compiled_only
def test_a_place_is_a_float_without_conversion():
    """One for the first row and one for the first column, none for each element."""
    function = device(lambda s, i, j, slope: s - slope * abs(i - j))

    layout = LAYOUTS["mma"]

    def kernel(x, slope):
        ends = (index(99), index(99))
        save(x, map_elements(function, load(x, layout, 0), index(0), index(0), ends, (slope,)), 0)

    text = compile_ptx(kernel, (poisoned(SHAPE), np.float32(1)), THREADS, (8, 0))
    assert text.count("cvt.rn.f32.s32") == 2
    assert "cvt.rn.f32.s64" not in text
    assert ".f64" not in text


def test_sums_with_large_integers_have_64_bits(rng):
    """Which are no int32, nor, from 2**24 on, a float32."""
    far = rng.integers(2**33, 2**34, (50, 1))
    functions = (
        lambda s, i, j, far: s + (far[j, 0] - i) % 97,
        lambda s, i, j, far: s + (i + 2**24 + 1 - 2**24) % 5 + (j - 2**40) % 1009,
        lambda s, i, j, far: s + min(j, far[i, 0]) + max(i - far[j, 0], -far[i, 0]) % 31,
    )
    x = numbers(SHAPE, np.float32)
    for function in functions:
        np.testing.assert_allclose(run(function, x, far), wanted(function, x, far), rtol=1e-6)


@each_layout
def test_layouts(weights, layout):
    x, function = numbers(SHAPE, np.float32), FUNCTIONS["look up"]
    np.testing.assert_allclose(run(function, x, weights, layout), wanted(function, x, weights), rtol=1e-6)


def test_beyond_the_matrix_it_looks_up_what_is_there(weights):
    """Of a matrix of 9 x 8 elements: the interpreter would find a load outside of the weights, NumPy, too."""
    x = numbers(SHAPE, np.float32)
    got = run(lambda s, i, j, weights: s + weights[i, 0] + weights[j, 1], x, weights[:9], sizes=(9, 8))
    i, j = (np.minimum(np.arange(n) + first, size - 1) for n, first, size in zip(SHAPE, (ROW, COL), (9, 8)))
    np.testing.assert_allclose(got, x + weights[i, 0][:, None] + weights[j, 1], rtol=1e-6)


def test_what_is_looked_up_may_follow_from_a_float(weights):
    """Its floats are those of the integers that branches compare, so log(0) is not taken of what is at least 8."""
    def bucket(s, i, j, weights):
        d = abs(i - j)
        return s + weights[d if d < 8 else 8 + int(math.log(d / 8.0)), 0]

    x, sizes = numbers(SHAPE, np.float32), (30, 9)
    got = run(bucket, x, weights, sizes=sizes)
    i, j = (np.minimum(np.arange(n) + first, size - 1) for n, first, size in zip(SHAPE, (ROW, COL), sizes))
    expected = np.vectorize(lambda s, i, j: bucket(s, int(i), int(j), weights))(x, i[:, None], j)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_derivatives(weights):
    """Functions that Numba has compiled already, with dual numbers in them."""
    slope = derivative_of(compiled_of(frozen(lambda s, i, j: s * s * (i - j) if j > 9 else min(s, 0.5) + i)))
    x = numbers(SHAPE, np.float32)
    got = run(lambda s, i, j, weights: slope(s, i, j), x, weights)
    i, j = np.ogrid[ROW : ROW + SHAPE[0], COL : COL + SHAPE[1]]
    np.testing.assert_allclose(got, np.where(j > 9, 2 * x * (i - j), np.where(x <= 0.5, 1, 0)), rtol=1e-6)


USERS = {  # what math, NumPy and Python have for numbers, in functions of the user's own
    "exponentials": lambda s, i, j, weights: (
        math.exp(-s * s) + np.exp(s / 9) + np.exp2(s / 9) + math.expm1(s / 9) + np.logaddexp(s, i - j) + 1.1**s
        + math.log2(s * s + i + 1) + np.log10(s * s + 1) + np.log1p(s * s) + math.sqrt(s * s + j) + np.sqrt(i + 1)
    ),
    "angles": lambda s, i, j, weights: (
        math.tan(s / 99) + np.sinh(s / 9) + math.cosh(s / 9) + np.arcsin(s / 99) + math.acos(s / 99) + np.arctan(s)
        + math.atan2(s, i + 1) + np.arctan2(j, s * s + 1) + np.hypot(s, i + 1) + math.erfc(s) + np.deg2rad(s)
        + math.copysign(s, i - j) + math.asinh(s) + np.arctanh(s / 99)
    ),
    "steps": lambda s, i, j, weights: (
        math.floor(s) + np.floor(s) * np.ceil(s + i) + round(s * 3) + np.rint(s) + int(s) + np.trunc(s) + s * np.sign(s)
        + s % 3 + s // 2 + np.mod(s, 7) + np.round(s) + math.trunc(s) + np.sign(i - j) + round(i) + np.floor(j)
        + sum(divmod(s, 3.5)) + sum(np.divmod(s, i + 1)) + sum(divmod(i - j, 3)) + divmod(s, j + 1)[0]
    ),
    "choices": lambda s, i, j, weights: (
        np.where(i > j, s, -0.5) + np.clip(s, -1, i) + np.minimum(s, j) + np.maximum(0, s) + np.fmin(i, s)
        + (0 if math.isnan(s) or np.isinf(s) else s) + (2 * s if np.isfinite(s) else s) + np.minimum(i, j)
        + min(s, 1, i) + np.fmax(s, 1) + np.less(s, i) + np.equal(i, j) + np.bitwise_xor(i, j)
    ),
    "arithmetic": lambda s, i, j, weights: (
        np.abs(i - j) + np.abs(s) + np.square(s) + np.square(i) + np.negative(s) + np.add(s, i) + np.multiply(j, s)
        + np.divide(s, i + 1) + np.power(s * s, 1.5) + math.pow(s, 2) + pow(s, 2) + np.reciprocal(s * s + 1)
    ),
}  # fmt: skip


@compiled_only
@pytest.mark.parametrize("name", USERS)
def test_functions_of_math_and_numpy(weights, name):
    """Libdevice has them all, and their derivatives; what these are is tested on CPUs."""
    made, layout = frozen(USERS[name]), LAYOUTS["mma"]
    value, slope = device(linked(made)), derivative_of(compiled_of(made))

    def kernel(x, weights, z):
        ends = (index(200), index(300))
        S = load(x, layout, 0)
        save(x, map_elements(value, S, index(0), index(0), ends, (weights,)), 0)
        save(z, map_elements(slope_of, S, index(0), index(0), ends, (weights,)), 0)

    slope_of = device(lambda s, i, j, weights: slope(s, i, j, weights))
    x = poisoned(SHAPE, np.float32)
    assert ".extern .func" not in compile_ptx(kernel, (x, weights, x), THREADS, (8, 0))


@compiled_only
@pytest.mark.parametrize("function", [lambda s, i, j, weights: (s, i), lambda s, i, j, weights: s.nothing])
def test_what_is_no_function_of_numbers(weights, function):
    with pytest.raises(NumbaError):
        run(function, numbers(SHAPE, np.float32), weights)


@compiled_only
def test_what_gpus_do_not_have_is_named(weights):
    def negative(s, i, j, weights):
        return np.signbit(s)

    words = r"^score: .*negative, line \d+ of .*, uses np.signbit, which GPUs do not have$"
    with pytest.raises(TypeError, match=words), naming(negative):
        run(negative, numbers(SHAPE, np.float32), weights)


@pytest.mark.parametrize("name", LAYOUTS)
def test_truths_of_places(rng, name):
    """What of a float is made is as in Python; within a tile as beyond it."""
    truths, z = rng.random((210, 301)) < 0.5, poisoned(SHAPE, np.dtype(np.float32))
    layout, held = LAYOUTS[name], device(lambda i, j, truths: truths[i, j] and i / 3 < j + 0.1)

    def kernel(truths, z):
        found = holds(held, layout, index(ROW), index(COL), (index(SIZES[0]), index(SIZES[1])), (truths,))
        save(z, where(found, full(layout, np.float32(1)), np.float32(0)), 0)

    launch(kernel, (1, 1, 1), THREADS, 0, truths, z)
    i, j = (np.minimum(first + np.arange(32), size - 1) for first, size in zip((ROW, COL), SIZES))
    i = i[:, None]
    np.testing.assert_array_equal(z, truths[i, j] & (i / 3 < j + 0.1))


FAULTS = {
    'operator.sub: emit_sum("sub")': 'operator.sub: emit_sum("add")',
    'min: emit_chosen("<")': 'min: emit_chosen(">")',
    'b.select(b.icmp_signed("<", whole, I32(0)), b.neg(whole), whole)': "whole",
    "place(b, b.neg(whole), *[": "place(b, whole, *[",
    "emit_minimum(b, types.int32, b.add(start, I32(offset)), last)": "b.add(start, I32(offset))",
    "np.minimum(places, size - 1)": "places",
    "isinstance(x, Dual | types.Float) for x in args)": "isinstance(x, Dual) for x in args)",
    "operator.not_, divmod,": "operator.not_,",
    "test_sums_with_large_integers_have_64_bits": {
        "abs(x.literal_value) <= SMALL": "True",
        "isinstance(x, types.IntegerLiteral) and abs(x.literal_value) <= SMALL": "isinstance(x, types.Integer)",
    },
    "test_what_gpus_do_not_have_is_named": {
        "functions/compiled/errors.py": {"not functions or not isinstance(error.args[0], np.ufunc)": "True"},
    },
}

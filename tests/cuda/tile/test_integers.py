"""Indices stay 32-bit, in both worlds alike; what scalars can do otherwise."""

import operator

import numpy as np
import pytest

from numbattn.cuda.tile import convert, device, index, maximum, minimum, opaque, shape, thread_index
from tests.tools.launch import compiled_only, launch, ptx_of

from .tiles import run

OPERATORS = [operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor]
DIVISIONS = [operator.floordiv, operator.mod]
SHIFTS = [operator.lshift, operator.rshift]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
EDGES = [0, 1, -1, 5, 31, 2**16, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize(
    ("op", "number"),
    [*((op, 7) for op in OPERATORS + DIVISIONS + SHIFTS + COMPARISONS), *((op, 8) for op in DIVISIONS)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_operators_are_those_of_int32(rng, op, number):
    """Of two indices, and with a Python number on either side."""

    def kernel(x, y, out):
        i = thread_index()
        if i < x.shape[0]:
            a, b = index(x[i]), index(y[i])
            out[0, i], out[1, i], out[2, i] = index(op(a, b)), index(op(a, number)), index(op(number, b))

    x, y = (np.concatenate([EDGES, rng.integers(-(2**31), 2**31, 24)]).astype(np.int32) for _ in range(2))
    rng.shuffle(y)
    if op in DIVISIONS:
        y = np.maximum(y & 0x7FFFFFFF, 1)
    if op in SHIFTS:
        y %= 32
    out = np.full((3, len(x)), -99, np.int32)
    launch(kernel, (1, 1, 1), 32, 0, x, y, out)
    np.testing.assert_array_equal(out, [op(x, y), op(x, np.int32(number)), op(np.int32(number), y)])


def test_what_numba_has_takes_indices():
    """Elements, slices, ranges, truths, two values of a variable, conversions."""

    def kernel(x, y, n):
        rows, cols = shape(x)
        if thread_index() == 0:
            for i in range(n, rows):
                y[i] = x[i, i % cols]
            last = n - 1 if n else -1
            y[rows] = last
            y[rows + 1] = shape(x[n:])[0]
            y[rows + 4] = x[n - 2, 0]
            n += 1
            y[rows + 2] = convert(-n, np.uint32) // np.uint32(2)
            y[rows + 3] = convert(n, np.float32) / np.float32(2)

    x, y = np.arange(12.0).reshape(4, 3), np.full(9, -1.0)
    launch(kernel, (1, 1, 1), 32, 0, x, y, np.int32(1))
    assert y.tolist() == [-1, 4, 8, 9, 0, 3, 2**31 - 1, 1, 9]


def test_scalars():
    def kernel(z):
        n, _ = shape(z)
        z[0, 0] = maximum(n - 40, 0)
        z[0, 1] = minimum(n, 100)
        z[0, 2] = n // 5

    assert run(kernel, out=np.int32)[0, :3].tolist() == [0, 32, 6]


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


@compiled_only
def test_numbers_of_more_bits_are_refused():
    limit = 2**31

    def kernel(x, y):
        y[0] = index(x[0]) <= limit

    with pytest.raises(Exception, match="got 2147483648, expected an index of 32 bits"):
        ptx_of(kernel, 32, np.zeros(1, np.int32), np.zeros(1, np.int32))


FAULTS = {
    "if not -(2**31) <= number < 2**31:": "if False:",
    "operator.rshift: ir.IRBuilder.ashr": "operator.rshift: ir.IRBuilder.lshr",
    "operator.mod: modulo": "operator.mod: floor_divided",
    "(b.sext if signed else b.zext)": "b.zext",
    "b.icmp_signed(sign, x, y)": "b.icmp_unsigned(sign, x, y)",
    "return self if isinstance(other, types.Integer) else None": "return None",
    "cuda/tile/emit.py": {
        "return b.ashr(x, ir.Constant(x.type, y.constant": "return b.lshr(x, ir.Constant(x.type, y.constant",
        "return b.xor(b.udiv(b.xor(x, sign), y), sign)": "return b.udiv(x, y)",
        "b.and_(y, sign)": "ir.Constant(x.type, 0)",
    },
}

"""Functions of each element."""

from functools import partial

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError

from .emit import F32, F64, I32, I64, asm, call, computed_if
from .fragment import Fragment, FragmentType, apply, broadcast, elementwise, fragment, is_float, is_signed, registers
from .integers import INDEX, INTEGERS
from .world import primitive


def emit_exp2(b, dtype, x):
    return asm(b, "ex2.approx.ftz.f32 $0, $1;", F32, x) if x.type == F32 else call(b, "__nv_exp2", F64, x)


def emit_log2(b, dtype, x):
    return asm(b, "lg2.approx.ftz.f32 $0, $1;", F32, x) if x.type == F32 else call(b, "__nv_log2", F64, x)


def emit_reciprocal(b, dtype, x):
    y = asm(b, "rcp.approx.ftz.f32 $0, $1;", F32, x) if x.type == F32 else b.fdiv(ir.Constant(F64, 1.0), x)
    zero = ir.Constant(x.type, 0.0)
    return b.select(b.fcmp_ordered("==", x, zero), zero, y)


@primitive
def exp2(x):
    """2**x."""
    return apply(np.exp2, x)


exp2 = exp2.lowering(lambda x: elementwise(emit_exp2)(x))


@primitive
def log2(x):
    """The base-2 logarithm; -inf of 0."""
    return apply(np.log2, x)


log2 = log2.lowering(lambda x: elementwise(emit_log2)(x))


@primitive
def reciprocal(x):
    """1/x, and 0 where x is 0."""
    return apply(lambda v: np.where(v == 0, v, 1 / v), x)


reciprocal = reciprocal.lowering(lambda x: elementwise(emit_reciprocal)(x))


def emit_extremum(name, sign):
    def emit(b, dtype, x, y):
        if is_float(dtype):
            return asm(b, f"{name}.{'f32' if x.type == F32 else 'f64'} $0, $1, $2;", x.type, x, y)
        return b.select((b.icmp_signed if is_signed(dtype) else b.icmp_unsigned)(sign, x, y), x, y)

    return emit


emit_maximum, emit_minimum = emit_extremum("max", ">"), emit_extremum("min", "<")


def _elementwise_or_scalar(emit):
    def lower(x, y):
        found = elementwise(emit)(x, y)
        if found is None:  # two numbers
            counts = all(isinstance(ty, INTEGERS) for ty in (x, y))
            both, dtype = (INDEX, types.int32) if counts else (x, x)
            found = both(both, both), lambda b, x, y: emit(b, dtype, x, y)
        return found

    return lower


@primitive
def maximum(x, y):
    """The larger of two, tiles or scalars; a NaN loses."""
    return apply(np.fmax, x, y)


maximum = maximum.lowering(_elementwise_or_scalar(emit_maximum))


@primitive
def minimum(x, y):
    """The smaller of two, tiles or scalars; a NaN loses."""
    return apply(np.fmin, x, y)


minimum = minimum.lowering(_elementwise_or_scalar(emit_minimum))


@primitive
def wide_product(x, factor):
    """The high and the low halves of products of uint32."""
    product = x.registers.astype(np.uint64) * np.uint64(factor)
    return tuple(Fragment(x.layout, half.astype(np.uint32)) for half in (product >> np.uint64(32), product))


@wide_product.lowering
def wide_product(x, factor):
    if not isinstance(x, FragmentType) or x.dtype != types.uint32:
        return None

    def generate(b, value, factor):
        low, high = [], []
        for row in registers(b, x, value):
            products = [asm(b, "mul.wide.u32 $0, $1, $2;", I64, register, factor) for register in row]
            low.append([b.trunc(product, I32) for product in products])
            high.append([b.trunc(b.lshr(product, I64(32)), I32) for product in products])
        halves = ir.Constant(ir.ArrayType(x.llvm, 2), ir.Undefined)
        for i, half in enumerate((high, low)):
            halves = b.insert_value(halves, fragment(b, x, half), i)
        return halves

    return types.UniTuple(x, 2)(x, types.uint32), generate


@primitive
def where(condition, x, y):
    """x where the condition holds, else y. x is a tile, y a tile or a scalar."""
    y = y.registers if isinstance(y, Fragment) else x.dtype.type(y)
    layout = broadcast(condition.layout, x.layout)
    return Fragment(layout, np.where(condition.registers, x.registers, y))


@where.lowering
def where(condition, x, y):
    tiles = [ty for ty in (condition, x, y) if isinstance(ty, FragmentType)]
    out = FragmentType(broadcast(*(ty.layout for ty in tiles)), x.dtype)
    inputs = condition, x, y if isinstance(y, FragmentType) else x.dtype

    def generate(b, *values):
        spread = [registers(b, ty, value, out.layout.slots) for ty, value in zip(inputs, values)]
        return fragment(b, out, [[b.select(*three) for three in zip(*rows)] for rows in zip(*spread)])

    return out(*inputs), generate


@primitive
def spread(x, layout):
    """Element (i, j) is element (i & ~rows, j & ~cols) of x, whose layout is layout.without(rows, cols).

    So a value that serves a group of elements is computed once: every thread has what it needs.
    """
    return Fragment(layout, x.registers[np.ix_(*_coarse_slots(layout, x.layout))])


@spread.lowering
def spread(x, layout):
    out = FragmentType(layout.value, x.dtype)
    rows, cols = _coarse_slots(layout.value, x.layout)

    def generate(b, value, _):
        coarse = registers(b, x, value)
        return fragment(b, out, [[coarse[r][c] for c in cols] for r in rows])

    return out(x, layout), generate


def _coarse_slots(fine, coarse):
    """For each slot of the fine rows and columns the slot of the coarse ones."""
    slots = []
    for small, large in ((coarse.rows, fine.rows), (coarse.cols, fine.cols)):
        mask = large.position_bits() & ~small.position_bits()
        if large.without(mask) != small:
            raise TypingError(f"spread: {coarse} is no coarser layout of {fine}")
        slots.append([small.offsets.index(offset & ~mask) for offset in large.offsets])
    return slots


@primitive
def rescaled(x, factor):
    """x * factor, a row vector. Rows in the same registers of a warp take no time if it is 1 for all of them."""
    return x * factor


@rescaled.lowering
def rescaled(x, factor):
    def differs(b, f):
        """Whether it is not 1, in any lane of this warp."""
        other = b.zext(b.fcmp_unordered("une", f, ir.Constant(f.type, 1.0)), I32)
        text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
        return b.icmp_unsigned("!=", asm(b, text, I32, other, effect=True), I32(0))

    def generate(b, tile, by):
        def product(row, f):
            return [b.fmul(value, f) for value in row]

        factors = [(f, differs(b, f)) for (f,) in registers(b, factor, by)]
        rows = [
            computed_if(b, some_other, row, partial(product, row, f))
            for row, (f, some_other) in zip(registers(b, x, tile), factors)
        ]
        return fragment(b, x, rows)

    return x(x, factor), generate

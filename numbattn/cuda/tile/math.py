"""What is done to fragments: made, converted, elementwise functions, sums and maxima along the rows."""

from functools import partial

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError

from .emit import F32, F64, I1, I16, I32, I64, asm, base, call, capability, computed_if, shuffle_xor
from .fragment import (
    LLVM,
    Fragment,
    FragmentType,
    apply,
    broadcast,
    elementwise,
    fragment,
    is_float,
    is_signed,
    registers,
)
from .index import INDEX, INTEGERS
from .simulator import exchange, gather_lanes, thread_index
from .world import primitive

HALVES = {types.float16: "f16", types.bfloat16: "bf16"}


# ------------------------------------------------------------------------------------------------------- making them
@primitive
def full(layout, value):
    """A tile whose elements are all `value`, of value's dtype; a row or column vector is repeated."""
    if isinstance(value, Fragment):
        broadcast(layout, value.layout)
        value = value.registers
    return Fragment(layout, np.asarray(value))


@full.lowering
def full(layout, value):
    is_vector = isinstance(value, FragmentType)
    if is_vector:
        broadcast(layout.value, value.layout)
    out = FragmentType(layout.value, value.dtype if is_vector else value)
    return out(layout, value), lambda b, _, x: fragment(b, out, registers(b, value, x, out.layout.slots))


@primitive
def row_index(layout, first):
    """Row vector of int32: the row of each register, the tile starting at row `first`."""
    rows = int(first) + layout.rows.base(thread_index()) + np.array(layout.rows.offsets)
    return Fragment(layout.row_vector(), rows.astype(np.int32)[:, None])


@row_index.lowering
def row_index(layout, first):
    out = FragmentType(layout.value.row_vector(), types.int32)

    def generate(b, _, first):
        start = b.add(first, base(b, out.layout.rows))
        return fragment(b, out, [[b.add(start, I32(offset)) for offset in out.layout.rows.offsets]])

    return out(layout, types.int32), generate


@primitive
def col_index(layout, first):
    """Column vector of int32: the column of each register, the tile starting at column `first`."""
    cols = int(first) + layout.cols.base(thread_index()) + np.array(layout.cols.offsets)
    return Fragment(layout.col_vector(), cols.astype(np.int32)[None, :])


@col_index.lowering
def col_index(layout, first):
    out = FragmentType(layout.value.col_vector(), types.int32)

    def generate(b, _, first):
        start = b.add(first, base(b, out.layout.cols))
        return fragment(b, out, [[b.add(start, I32(offset)) for offset in out.layout.cols.offsets]])

    return out(layout, types.int32), generate


@primitive
def cols_between(layout, start, first, last):
    """Which columns of a tile that starts at column `start` lie between the row vectors first and last, ends included.

    As (col_index(layout, start) >= first) & ..., but the columns take no registers.
    """
    cols = int(start) + layout.cols.base(thread_index()) + np.array(layout.cols.offsets)
    return Fragment(layout, (cols >= first.registers) & (cols <= last.registers))


@cols_between.lowering
def cols_between(layout, start, first, last):
    out = FragmentType(layout.value, types.boolean)
    axis = out.layout.cols

    def slots_before(b, position):
        """The number of this thread's slots before a position of its own."""
        inside = emit_minimum(b, types.int32, emit_maximum(b, types.int32, position, I32(0)), I32(axis.size))
        run, period = axis.run, axis.period
        return b.add(
            b.mul(b.udiv(inside, I32(period)), I32(run)),
            emit_minimum(b, types.int32, b.urem(inside, I32(period)), I32(run)),
        )

    def slots_from(b, slot, word):
        """A bit for each slot of a word, from number `slot` on."""
        left = emit_maximum(b, types.int32, b.sub(slot, I32(32 * word)), I32(0)) if word else slot
        return asm(b, "shl.b32 $0, $1, $2;", I32, I32(-1), left)  # nothing is left after 32, other than LLVM's

    def truths(b, first, last):
        """One for each slot, a bit of a word: a test of one bit, where the two ends would take a comparison each."""
        begin, end = slots_before(b, first), slots_before(b, b.add(last, I32(1)))
        for slot in range(axis.slots):
            if slot % 32 == 0:
                word = b.and_(slots_from(b, begin, slot // 32), b.not_(slots_from(b, end, slot // 32)))
            yield b.icmp_unsigned("!=", b.and_(word, I32(1 << slot % 32)), I32(0))

    def generate(b, _, start, *ends):
        mine = b.add(start, base(b, axis))  # this thread's first column
        ends = ([b.sub(x, mine) for (x,) in registers(b, ty, end)] for ty, end in zip((first, last), ends))
        return fragment(b, out, [truths(b, *row) for row in zip(*ends)])

    return out(layout, types.int32, first, last), generate


# --------------------------------------------------------------------------------------------------------- converting
def round_to(dtype, values):
    """Registers or memory to another dtype, to the nearest even: plain Python's."""
    return values.astype(dtype)


def emit_convert(b, source, target, x):
    """One register to another dtype."""
    if source == target:
        return x
    to = LLVM[target]
    if source == types.bfloat16:
        x = b.bitcast(b.shl(b.zext(x, I32), I32(16)), F32)
        return emit_convert(b, types.float32, target, x)
    if source == types.float16:
        return emit_convert(b, types.float32, target, asm(b, "cvt.f32.f16 $0, $1;", F32, x))
    if target in (types.float16, types.bfloat16):
        x = emit_convert(b, source, types.float32, x)
        return asm(b, "cvt.rn.f16.f32 $0, $1;", I16, x) if target == types.float16 else emit_bfloat16(b, x)
    if is_float(source) and is_float(target):
        return b.fpext(x, to) if to == F64 else b.fptrunc(x, to)
    if is_float(source):
        return b.fptosi(x, to) if is_signed(target) else b.fptoui(x, to)
    if is_float(target):
        return b.sitofp(x, to) if is_signed(source) else b.uitofp(x, to)
    if to.width <= x.type.width:
        if target == types.boolean:
            return b.icmp_unsigned("!=", x, ir.Constant(x.type, 0))
        return b.trunc(x, to) if to.width < x.type.width else x
    return b.sext(x, to) if is_signed(source) else b.zext(x, to)


def emit_pair(b, dtype, values):
    """Two float32 registers, rounded to float16 or bfloat16, in one: the first in the low half."""
    return asm(b, f"cvt.rn.{HALVES[dtype]}x2.f32 $0, $1, $2;", I32, values[1], values[0])


def left_pairs(b, dtype, rows):
    """Pairs of columns as a left operand has them: for each 8 columns one of every row of slots."""
    return [emit_pair(b, dtype, row[c : c + 2]) for c in range(0, len(rows[0]), 2) for row in rows]


def emit_bfloat16(b, x):
    if capability() >= (8, 0):
        packed = asm(b, "cvt.rn.bf16x2.f32 $0, $1, $2;", I32, ir.Constant(F32, 0.0), x)
        return b.trunc(packed, I16)
    bits = b.bitcast(x, I32)  # to the nearest even by adding; NaN would overflow
    even = b.and_(b.lshr(bits, I32(16)), I32(1))
    rounded = b.lshr(b.add(b.add(bits, I32(0x7FFF)), even), I32(16))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), I32(0x7FFF), rounded), I16)


@primitive
def convert(x, dtype):
    """A fragment, or a number, in another dtype: np.float32, np.int32, ... Floats are rounded to the nearest."""
    return Fragment(x.layout, round_to(dtype, x.registers)) if isinstance(x, Fragment) else dtype(x)


@convert.lowering
def convert(x, dtype):
    if not isinstance(x, FragmentType):
        source = types.int32 if x == INDEX else x
        return dtype.dtype(source, dtype), lambda b, value, _: emit_convert(b, source, dtype.dtype, value)
    out = FragmentType(x.layout, dtype.dtype)
    return out(x, dtype), lambda b, value, _: fragment(
        b, out, [[emit_convert(b, x.dtype, out.dtype, v) for v in row] for row in registers(b, x, value)]
    )


# -------------------------------------------------------------------------------------------------------- elementwise
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
def ballot(truth):
    """Which lanes of this warp say yes: a bit for each of them, as uint32."""
    return np.uint32(sum(bool(yes) << lane for lane, yes in gather_lanes(truth).items()))


@ballot.lowering
def ballot(truth):
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return types.uint32(types.boolean), lambda b, truth: asm(b, text, I32, b.zext(truth, I32), effect=True)


@primitive
def lowest_bit(word):
    """The number of the lowest bit of a uint32 that is set, 32 if none is."""
    word = int(word)
    return np.int32((word & -word).bit_length() - 1 if word else 32)


@lowest_bit.lowering
def lowest_bit(word):
    return INDEX(types.uint32), lambda b, word: b.cttz(word, I1(0))


@primitive
def opaque(x):
    """An index of which the compiler knows nothing: a loop that counts with it is not unrolled."""
    return np.int32(x)


@opaque.lowering
def opaque(x):
    return INDEX(INDEX), lambda b, x: asm(b, "mov.u32 $0, $1;", I32, x, effect=True)


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


# ------------------------------------------------------------------------------------------------- along the rows
def _reduce_rows(function, x, seed):
    total = function.reduce(x.registers, axis=1, keepdims=True)
    for bit in x.layout.row_lane_bits():
        total = function(total, exchange(total, 1 << bit))
    return apply(function, Fragment(x.layout.row_vector(), total), seed)


def _lower_reduction(emit, chains=1):
    def lower(x, seed):
        out = FragmentType(x.layout.row_vector(), x.dtype)
        lanes = x.layout.row_lane_bits()
        start = seed if isinstance(seed, FragmentType) else x.dtype

        def generate(b, tile, first):
            sums = []
            for row, (s,) in zip(registers(b, x, tile), registers(b, start, first, out.layout.slots)):
                total = fold(b, emit, x.dtype, row, chains)
                for bit in lanes:
                    total = emit(b, x.dtype, total, shuffle_xor(b, total, 1 << bit))
                sums.append([emit(b, x.dtype, total, s)])
            return fragment(b, out, sums)

        return out(x, start), generate

    return lower


def fold(b, emit, dtype, values, chains=1):
    """All of them together, in so many chains of operations that do not wait for each other."""
    totals = values[:chains]
    for i, value in enumerate(values[chains:]):
        totals[i % chains] = emit(b, dtype, totals[i % chains], value)
    return totals[0] if len(totals) == 1 else fold(b, emit, dtype, totals, chains // 2)


def emit_add(b, dtype, x, y):
    return b.fadd(x, y) if is_float(dtype) else b.add(x, y)


@primitive
def row_max(x, seed):
    """Row vector: the largest of each row and of `seed`, a row vector or a scalar; a NaN loses."""
    return _reduce_rows(np.fmax, x, seed)


row_max = row_max.lowering(_lower_reduction(emit_maximum, chains=4))


@primitive
def row_sum(x, seed):
    """Row vector: the sum of each row, plus `seed`, a row vector or a scalar."""
    return _reduce_rows(np.add, x, seed)


row_sum = row_sum.lowering(_lower_reduction(emit_add))


@primitive
def part_sum(x, seed):
    """What this THREAD holds of each row, added to `seed`: a tile of layout x.layout.row_parts(). `row_sum` ends it."""
    return Fragment(seed.layout, seed.registers + x.registers.sum(axis=1, keepdims=True, dtype=x.dtype))


@part_sum.lowering
def part_sum(x, seed):
    if seed.layout != x.layout.row_parts():
        raise TypingError(f"part_sum: the sums of {x.layout} have the layout {x.layout.row_parts()}, not {seed.layout}")

    def generate(b, tile, first):
        rows = zip(registers(b, x, tile), registers(b, seed, first))
        return fragment(b, seed, [[fold(b, emit_add, x.dtype, start + row)] for row, start in rows])

    return seed(x, seed), generate

"""From one dtype to another."""

from llvmlite import ir
from numba.cuda import types

from .emit import F32, F64, I16, I32, asm, capability
from .fragment import LLVM, Fragment, FragmentType, fragment, is_float, is_signed, registers
from .integers import INDEX
from .world import primitive

HALVES = {types.float16: "f16", types.bfloat16: "bf16"}


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

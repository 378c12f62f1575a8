"""Conversion from one dtype to another."""

import ml_dtypes
import numpy as np

from ..compiler import TypingError, capability, ir, types
from .emit import F32, F64, I8, I16, I32, asm
from .fragment import (
    ANY,
    LLVM,
    Fragment,
    FragmentType,
    check_dtype,
    check_tile,
    fragment,
    is_float,
    is_number,
    is_signed,
    is_tile,
    registers,
)
from .integers import INDEX
from .world import primitive

HALVES = {types.float16: "f16", types.bfloat16: "bf16"}
WORDS_OF_32 = frozenset({"float32", "int32", "uint32"})


def round_to(dtype, values):
    """Convert registers or memory to another dtype, rounded to nearest even, in plain Python."""
    return values.astype(dtype)


def emit_convert(b, source, target, x):
    """Convert one register to another dtype."""
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
    if is_float(source) and target == types.boolean:
        return b.fcmp_unordered("!=", x, ir.Constant(x.type, 0.0))
    if is_float(source):
        return b.fptosi(x, to) if is_signed(target) else b.fptoui(x, to)
    if is_float(target):
        return b.sitofp(x, to) if is_signed(source) else b.uitofp(x, to)
    if to.width <= x.type.width:
        if target == types.boolean:
            return b.icmp_unsigned("!=", x, ir.Constant(x.type, 0))
        return b.trunc(x, to) if to.width < x.type.width else x
    return b.sext(x, to) if is_signed(source) else b.zext(x, to)


def emit_pair(b, dtype, values, relu=False):
    """Round two float32 registers to float16 or bfloat16 in one register: the first in the low half."""
    return asm(b, f"cvt.rn{'.relu' * relu}.{HALVES[dtype]}x2.f32 $0, $1, $2;", I32, values[1], values[0])


def left_pairs(b, dtype, rows, relu=False):
    """Pairs of columns as a left operand has them: for each 8 columns, one pair for every row of slots."""
    return [emit_pair(b, dtype, row[c : c + 2], relu) for c in range(0, len(rows[0]), 2) for row in rows]


def emit_bfloat16(b, x):
    if capability() >= (8, 0):
        packed = asm(b, "cvt.rn.bf16x2.f32 $0, $1, $2;", I32, ir.Constant(F32, 0.0), x)
        return b.trunc(packed, I16)
    bits = b.bitcast(x, I32)  # to the nearest even by adding; NaN would overflow
    even = b.and_(b.lshr(bits, I32(16)), I32(1))
    rounded = b.lshr(b.add(b.add(bits, I32(0x7FFF)), even), I32(16))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), I32(0x7FFF), rounded), I16)


def stored_values(b, source, target, values):
    if source == types.float32 and target in HALVES and len(values) % 2 == 0 and capability() >= (8, 0):
        pairs = [emit_pair(b, target, values[i : i + 2]) for i in range(0, len(values), 2)]
        return [half for pair in pairs for half in halves_of(b, pair)]
    values = [emit_convert(b, source, target, value) for value in values]
    return [b.zext(value, I8) for value in values] if target == types.boolean else values


def halves_of(b, pair):
    pair = b.bitcast(pair, ir.VectorType(I16, 2))
    return [b.extract_element(pair, I32(i)) for i in range(2)]


# ------------------------------------------------------------------------------------------------- elements of 8 bits
def widen(dtype, values):
    """Widen int8, or uint8, which is float8_e4m3fn, or a float of 16 bits, in plain Python."""
    return (values.view(ml_dtypes.float8_e4m3fn) if values.dtype == np.uint8 else values).astype(dtype)


def emit_widened(b, source, target, word, i, j):
    """Widen bytes i and j of a register, (0, 1) and (2, 3) or (0, 2) and (1, 3), to two float16 or bfloat16: exactly,
    except that NaN in float8 may become 480."""
    return WIDEN[source, target](b, word, i, j)


def emit_widened_words(b, source, values):
    """Elements of 8 or 16 bits, in a register each, as float32: exactly, but for NaN in float8."""
    if source != types.uint8:
        return [emit_convert(b, source, types.float32, x) for x in values]
    words = [b.zext(x, I32) for x in values]
    pairs = [emit_widened(b, source, types.float16, word, 0, 1) for word in words]
    return [emit_convert(b, types.float16, types.float32, halves_of(b, pair)[0]) for pair in pairs]


def _int8_as_float16(b, word, i, j):
    pair = _spread(b, b.xor(word, _both(0x8080)), i, j, above=0x64)   # 1024 + 128 + x
    return _fma_of_pairs(b, "f16", pair, _both(0x3C00), _both(0xE480))   # 1 and -1152


def _int8_as_bfloat16(b, word, i, j):
    """128 plus the low 7 bits, minus 128, or minus 256 for negative numbers."""
    pair = _spread(b, word, i, j, above=0x43)
    low, base = b.and_(pair, _both(0xFF7F)), b.and_(pair, _both(0xFF80))
    return _fma_of_pairs(b, "bf16", base, _both(0xBF80), low)


def _float8_as_float16(b, word, i, j):
    if capability() < (8, 9):
        return _float8_as(b, "f16", _spread(b, word, i, j, below=0), 1, 0x3F80, 0x5C00)     # by 2**8
    if j != i + 1:
        word, i = asm(b, "prmt.b32 $0, $1, $1, 0x3120;", I32, word), 2 * i
    return asm(b, "cvt.rn.f16x2.e4m3x2 $0, $1;", I32, b.trunc(b.lshr(word, I32(8 * i)), I16))


def _float8_as_bfloat16(b, word, i, j):
    return _float8_as(b, "bf16", _spread(b, word, i, j, below=0), 4, 0x07F0, 0x7B80)        # by 2**120


def _float8_as(b, kind, pair, shift, bits, factor):
    """Move exponent and mantissa to where they belong; a factor then corrects the exponent's bias."""
    size = b.and_(b.lshr(pair, I32(shift)), _both(bits))
    return _fma_of_pairs(b, kind, b.or_(b.and_(pair, _both(0x8000)), size), _both(factor), _both(0x8000))


WIDEN = {
    (types.int8, types.float16): _int8_as_float16, (types.int8, types.bfloat16): _int8_as_bfloat16,
    (types.uint8, types.float16): _float8_as_float16, (types.uint8, types.bfloat16): _float8_as_bfloat16,
}  # fmt: skip


def _spread(b, word, i, j, above=None, below=None):
    """Bytes i and j of a register, each with a known byte above or below it."""
    known, select = (below, f"{j}4{i}4") if above is None else (above, f"4{j}4{i}")
    return asm(b, f"prmt.b32 $0, $1, $2, 0x{select};", I32, word, _both(known * 0x0101))


def _both(half):
    return I32(half * 0x10001)


def _fma_of_pairs(b, kind, x, y, z):
    return asm(b, f"fma.rn.{kind}x2 $0, $1, $2, $3;", I32, x, y, z)


@primitive
def convert(x, dtype):
    """Convert a tile, or a number, to another dtype: np.float32, np.int32, ... Floats are rounded to nearest.

    >>> show(lambda x: convert(x, np.int32) // 2)
    array([[0, 0, 1, 1],
           [2, 2, 3, 3]], dtype=int32)
    """
    _check_convert(x, np.dtype(dtype))
    return Fragment(x.layout, round_to(dtype, x.registers)) if is_tile(x) else dtype(x)


@convert.lowering
def convert(x, dtype):
    _check_convert(x, dtype.dtype)
    if not is_tile(x):
        source = types.int32 if x == INDEX else types.unliteral(x)
        return dtype.dtype(source, dtype), lambda b, value, _: emit_convert(b, source, dtype.dtype, value)
    if dtype.dtype == types.boolean and LLVM[x.dtype] == I32:
        return FragmentType(x.layout, types.boolean, in_words=True)(x, dtype), lambda b, value, _: value
    out = FragmentType(x.layout, dtype.dtype)
    return out(x, dtype), lambda b, value, _: fragment(
        b, out, [[emit_convert(b, x.dtype, out.dtype, v) for v in row] for row in registers(b, x, value)]
    )


def _check_convert(x, dtype):
    if not is_tile(x) and not is_number(x):
        raise TypingError(f"convert: got {x}, expected a tile or a number")
    check_dtype("convert", dtype, ANY)


@primitive
def bitcast(x, dtype):
    """Reinterpret the bits of a tile of 32-bit numbers as another such dtype.

    >>> show(lambda x: bitcast(x, np.uint32) >> 23)         # exponents: 127 is that of 1
    array([[  0, 127, 128, 128],
           [129, 129, 129, 129]], dtype=uint32)
    """
    _check_bitcast(x, np.dtype(dtype))
    return Fragment(x.layout, x.registers.view(dtype))


@bitcast.lowering
def bitcast(x, dtype):
    _check_bitcast(x, dtype.dtype)
    out = FragmentType(x.layout, dtype.dtype)
    return out(x, dtype), lambda b, value, _: fragment(
        b, out, [[b.bitcast(v, LLVM[out.dtype]) for v in row] for row in registers(b, x, value)]
    )


def _check_bitcast(x, dtype):
    check_tile("bitcast", x, WORDS_OF_32)
    check_dtype("bitcast", dtype, WORDS_OF_32)

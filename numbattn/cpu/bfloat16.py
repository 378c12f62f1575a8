"""Products of bfloat16 matrices by instructions that multiply pairs: AMX's tiles, or dot products of AVX512-BF16.

Operands are matrices of words, two bfloat16 each, which are neighbours along the summed axis: a is (rows, depth / 2), b
is (depth / 2, columns). Both are padded to two tiles each way, by zeros along the depth, else by whatever is there.

In a kernel `pairs` is None where products are of the dtype of sums. It is compiled apart for these, and for pairs.
"""

import ctypes
import sys
from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from ..base.checks import DTYPES
from ..functions.compiled.linked import linked
from .product import INT, LONG, ROWS, VECTORS, Elements, Vectors, along, clamped, product_of
from .product import product as float_product
from .product import product_tn as float_product_tn
from .record import Record
from .target import CPU, FEATURES
from .tile import (
    LINE,
    OPTIONS,
    address_of,
    address_of_row,
    contiguous_view,
    inline,
    inline_view,
    matrix,
    rows_of,
    strided_view,
    tile,
)
from .transposition import transpose

SIDE = 16  # rows of AMX's tiles, and words in a row
BYTE, SHORT, FLOAT, POINTER = ir.IntType(8), ir.IntType(16), ir.FloatType(), ir.IntType(8).as_pointer()
ASK = 158, 0x1023, 18  # Linux' arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
HAS_BFLOAT16 = "avx512bf16" in FEATURES
HAS_AMX = HAS_BFLOAT16 and "amx-bf16" in FEATURES and sys.platform == "linux"
HAS_DOTS = HAS_BFLOAT16 and CPU.startswith("znver")  # on Intel's CPUs they have half the speed of float32
PAIRS, NO_PAIRS = (Record(1),), (Record(None),)


@cache
def has_pairs():
    """Whether products are of pairs here. Linux has to be asked for AMX's tiles, for the whole process."""
    return not ctypes.CDLL(None).syscall(*ASK) if HAS_AMX else HAS_DOTS


def pairs_of(problem, *arrays):
    """The Records of `pairs` of a call on these arrays."""
    takes = problem.dtype == DTYPES[1] and problem.cache is None and all(x.dtype == DTYPES[1] for x in arrays)
    return PAIRS if takes and has_pairs() else NO_PAIRS


class Bfloat16(ir.Type):
    """LLVM's type, which llvmlite lacks."""

    def _to_string(self):
        return "bfloat"


BFLOAT16 = Bfloat16()


# --------------------------------------------------------------------------------------------------------- dot products
def add_dots(unit, x, y, total):
    """total plus the products of pairs."""
    x, y = (unit.b.bitcast(each, ir.VectorType(BFLOAT16, 2 * unit.width)) for each in (x, y))
    return unit.call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * unit.width}", unit.type, total, x, y)


product_by_dots = product_of(False, "product_by_dots", ROWS, VECTORS, add_dots)  # out = alpha a b, plus out if `add`


# ------------------------------------------------------------------------------------------------------------------ AMX
CONFIG = bytes([1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8])  # 8 tiles: bytes of a row, rows


def amx(builder, name, *operands):
    kind = ir.FunctionType(ir.VoidType(), [x.type for x in operands])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), operands)


@intrinsic
def begin(typingctx, pairs):
    """Configure the tiles of AMX for this thread, if they are used."""

    def generate(context, builder, signature, args):
        if HAS_AMX and pairs != types.none:
            config = cgutils.global_constant(builder, "amx_config", cgutils.make_bytearray(CONFIG))
            amx(builder, "ldtilecfg", builder.bitcast(config, POINTER))
        return context.get_dummy_value()

    return types.void(pairs), generate


@intrinsic
def end(typingctx, pairs):
    """Leave the tiles of AMX to others."""

    def generate(context, builder, signature, args):
        if HAS_AMX and pairs != types.none:
            amx(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(pairs), generate


@intrinsic
def block(typingctx, out, a, b, alpha, add, row, col):
    """out = alpha a b, plus out if `add`, for the 2 x 2 tiles at (row, col)."""

    def generate(context, builder, signature, args):
        mOut, mA, mB = (Elements(context, builder, kind, x) for kind, x in zip(signature.args, args[:3]))
        alpha, add, row, col = args[3:]
        (height, width), both, size, zero = mOut.shape, range(2), LONG(2 * SIDE), LONG(0)
        rows, cols = ([builder.add(first, LONG(SIDE * n)) for n in both] for first in (row, col))
        sums = {(m, n): BYTE(2 * m + n) for m in both for n in both}
        lefts, rights = (BYTE(4), BYTE(5)), (BYTE(6), BYTE(7))
        for total in sums.values():
            amx(builder, "tilezero", total)
        with cgutils.for_range_slice(builder, zero, mB.shape[0], LONG(SIDE)) as (k, _):
            for n in both:
                amx(builder, "tileloadd64", lefts[n], builder.bitcast(mA.element(rows[n], k), POINTER), mA.strides[0])
                amx(builder, "tileloadd64", rights[n], builder.bitcast(mB.element(k, cols[n]), POINTER), mB.strides[0])
            for (m, n), total in sums.items():
                amx(builder, "tdpbf16ps", total, lefts[m], rights[n])
        found = cgutils.alloca_once(builder, ir.ArrayType(ir.ArrayType(FLOAT, 2 * SIDE), 2 * SIDE))
        found.align = LINE
        for (m, n), total in sums.items():
            place = builder.gep(found, [zero, LONG(m * SIDE), LONG(n * SIDE)])
            amx(builder, "tilestored64", total, builder.bitcast(place, POINTER), LONG(2 * LINE))
        unit, left = Vectors(builder, out.dtype), builder.sub(height, row)
        count = builder.select(builder.icmp_signed("<", left, size), left, size)
        widths = [builder.sub(width, col) for col in cols]
        readers, writers = ([Vectors(builder, out.dtype, width) for width in some]
                            for some in ([builder.select(add, width, zero) for width in widths], widths))  # fmt: skip
        with cgutils.for_range(builder, count) as loop:
            for n in both:
                value = unit.load(builder.gep(found, [zero, loop.index, LONG(n * SIDE)]))
                value = builder.fmul(value, unit.splat(alpha))
                place = mOut.element(builder.add(row, loop.index), cols[n])
                writers[n].store(builder.fadd(value, readers[n].load(place)), place)
        return context.get_dummy_value()

    return types.void(out, a, b, out.dtype, types.boolean, types.intp, types.intp), generate


@linked
def product_by_amx(out, a, b, alpha, add):
    """out = alpha a b, plus out if `add`"""
    for row in range(0, out.shape[0], 2 * SIDE):
        for col in range(0, out.shape[1], 2 * SIDE):
            block(out, a, b, alpha, add, row, col)


product = product_by_amx if HAS_AMX else product_by_dots


# ------------------------------------------------------------------------------------------------------------- operands
def loader(generate_row):
    """The intrinsic (out, x, row): a row of words, of a matrix x of bfloat16 or float32."""

    @intrinsic
    def load(typingctx, out, x, row):
        def generate(context, builder, signature, args):
            mOut, mX = (Elements(context, builder, kind, given) for kind, given in zip(signature.args, args[:2]))

            def bits(unit, row, col):
                found = unit.load(mX.element(row, col))
                if x.dtype == types.float32:
                    found = builder.fptrunc(found, ir.VectorType(BFLOAT16, SIDE))
                return builder.bitcast(found, ir.VectorType(SHORT, SIDE))

            def store(value, word):
                builder.store(value, builder.bitcast(mOut.element(args[2], word), value.type.as_pointer()), align=2)

            generate_row(builder, x.dtype, mX.shape, mOut.shape[1], args[2], bits, store)
            return context.get_dummy_value()

        return types.void(out, x, types.intp), generate

    return load


@loader
def load_row(builder, dtype, shape, words, row, bits, store):
    """Of a, from the same row."""
    store(ir.Constant(ir.VectorType(SHORT, SIDE), None), builder.sub(words, LONG(SIDE // 2)))  # padding, if it is
    along(builder, dtype, shape[1], lambda unit, col: store(bits(unit, row, col), builder.udiv(col, LONG(2))), SIDE)


@loader
def load_pairs(builder, dtype, shape, words, row, bits, store):
    """Of b, from two rows; 0 for those beyond the last."""
    height, first, kind = shape[0], builder.mul(row, LONG(2)), ir.VectorType(INT, SIDE)
    rows, is_there = clamped(builder, first, 2, height), [builder.icmp_signed("<", builder.add(first, LONG(n)), height)
                                                          for n in range(2)]  # fmt: skip

    def load(unit, col):
        low, high = (builder.and_(builder.zext(bits(unit, r, col), kind), unit.splat(builder.sext(there, INT)))
                     for r, there in zip(rows, is_there))  # fmt: skip
        store(builder.or_(low, builder.shl(high, kind([16] * SIDE))), col)

    along(builder, dtype, shape[1], load, SIDE)


@inline
def padded(n):
    """n rows, columns or numbers that are summed, with padding."""
    return (n + 2 * SIDE - 1) // (2 * SIDE) * (2 * SIDE)


@inline_view
def words_in(buffer, rows, cols):
    return contiguous_view(address_of(buffer), rows, cols, cols, np.uint32)


@inline_view
def rows_in(buffer, x):
    """x as a."""
    out = words_in(buffer, padded(x.shape[0]), padded(x.shape[1]) // 2)
    for row in range(x.shape[0] if x.shape[1] else 0):
        load_row(out, x, row)
    return out


@inline_view
def pairs_in(buffer, x):
    """x as b."""
    out = words_in(buffer, padded(x.shape[0]) // 2, padded(x.shape[1]))
    for row in range(out.shape[0]):
        load_pairs(out, x, row)
    return out


@inline_view
def turned_in(buffer, words):
    """x^T as b or a, for x as a or b."""
    out = words_in(buffer, words.shape[1], words.shape[0])
    transpose(out, words, np.uint32(1), False)
    return out


# ------------------------------------------------------------------------------------------------------ for either kind
def or_in_pairs(of_pairs):
    """Decorate a function of kernels, (*arguments, pairs): for pairs it is `of_pairs`."""

    def decorate(function):
        @overload(function, jit_options={**OPTIONS, "_nrt": True}, strict=False)
        def choose(*arguments):
            return function if arguments[-1] == types.none else of_pairs

        return function

    return decorate


@or_in_pairs(lambda x, batch, head, first, end, dtype, pairs: matrix(x, batch, head, np.uint16)[first:end])
def matrix_in(x, batch, head, first, end, dtype, pairs):
    """Rows [first, end) of the matrix of (batch, head) of an input, which for pairs is bfloat16."""
    return matrix(x, batch, head, dtype)[first:end]


def tokens_in_place(x, batch, head, first, end, buffer, dtype, pairs):
    address = address_of_row(x, x.place, batch, head, first)
    return strided_view(address, end - first, x.cols, x.place.row_stride // 2, np.uint16)


@or_in_pairs(tokens_in_place)
def tokens_in(x, batch, head, first, end, buffer, dtype, pairs):
    """Rows [first, end) of K or V of (batch, head), which for pairs are bfloat16."""
    return rows_of(x, batch, head, first, end, buffer, dtype)


@or_in_pairs(lambda buffer, rows, cols, pairs: words_in(buffer, padded(rows) // 2, padded(cols)))
def transpose_in(buffer, rows, cols, pairs):
    """A matrix of these rows and columns, for `load_transpose`."""
    return tile(buffer, rows, cols)


@or_in_pairs(lambda out, x, factor, scratch, pairs: transpose(out, rows_in(scratch.rows, x), np.uint32(1), False))
def load_transpose(out, x, factor, scratch, pairs):
    """out = factor x^T; for pairs without the factor."""
    transpose(out, x, factor, False)


@or_in_pairs(lambda out, a, b, factor, scratch, pairs: product(out, rows_in(scratch.rows, a), b, factor, False))
def scores(out, a, b, factor, scratch, pairs):
    """out = a b, for b as from `load_transpose` with this factor."""
    float_product(out, a, b, out.dtype.type(1), False)


def matmul_in_pairs(out, a, b, alpha, scratch, pairs):
    product(out, rows_in(scratch.rows, a), pairs_in(scratch.pairs, b), alpha, True)


@or_in_pairs(matmul_in_pairs)
def matmul(out, a, b, alpha, scratch, pairs):
    """out = out + alpha a b"""
    float_product(out, a, b, alpha, True)


def matmul_tn_in_pairs(out, a, b, alpha, scratch, pairs):
    rows = turned_in(scratch.rows, pairs_in(scratch.pairs, a))
    product(out, rows, pairs_in(scratch.pairs, b), alpha, True)


@or_in_pairs(matmul_tn_in_pairs)
def matmul_tn(out, a, b, alpha, scratch, pairs):
    """out = out + alpha a^T b"""
    float_product_tn(out, a, b, alpha, True)

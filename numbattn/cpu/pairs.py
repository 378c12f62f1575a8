"""Products of bfloat16 tiles by instructions that multiply pairs: AMX's tiles, or AVX512-BF16's dot products.

An operand is an array of words, float32 in type, of two bfloat16 that are neighbours along the summed axis: a is
(rows, depth / 2), b is (depth / 2, columns). Both have whole squares of SIDE words: beyond the depth these are 0, beyond
the last row or column anything.
"""

import ctypes
import sys

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from ..base.checks import DTYPES
from .linked import linked
from .product import (
    CPU,
    FEATURES,
    INT,
    LONG,
    ROWS,
    VECTORS,
    Elements,
    Vectors,
    along,
    clamped,
    product,
    product_of,
    product_tn,
)
from .record import Record
from .tile import (
    LINE,
    OPTIONS,
    address_of,
    address_of_row,
    contiguous_view,
    float_of_bfloat16,
    inline,
    inline_view,
    matrix,
    rows_of,
    strided_view,
    tile,
)
from .transposition import transpose, transpose_words

SIDE = 16  # rows of AMX's tiles, and words in a row
BYTE, SHORT, FLOAT, BYTES = ir.IntType(8), ir.IntType(16), ir.FloatType(), ir.IntType(8).as_pointer()
PERMIT = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of Linux


class Bfloat16(ir.Type):
    """LLVM's type, which llvmlite lacks."""

    def _to_string(self):
        return "bfloat"


BFLOAT16 = Bfloat16()


def may_use_amx():
    """Whether this process may use AMX' tiles; Linux wants to be asked."""
    has_amx = {"amx-bf16", "avx512bf16"} <= FEATURES and sys.platform == "linux"
    return has_amx and ctypes.CDLL(None).syscall(*PERMIT) == 0


HAS_AMX = may_use_amx()
HAS_DOTS = "avx512bf16" in FEATURES and CPU.startswith("znver")  # Intel's have half the speed of float32
HAS_PAIRS = HAS_AMX or HAS_DOTS


# --------------------------------------------------------------------------------------------------------- dot products
def add_pairs(unit, x, y, total):
    """total plus the products of pairs."""
    x, y = (unit.b.bitcast(each, ir.VectorType(BFLOAT16, 2 * unit.width)) for each in (x, y))
    return unit.call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * unit.width}", unit.type, total, x, y)


product_by_dots = product_of(False, "product_by_dots", ROWS, VECTORS, add_pairs)  # out = alpha a b, plus out if `add`


# ------------------------------------------------------------------------------------------------------------------ AMX
CONFIG = bytes([1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8])  # of 8 tiles bytes in a row, and rows


def amx(builder, name, *operands):
    kind = ir.FunctionType(ir.VoidType(), [x.type for x in operands])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), operands)


@intrinsic
def configure(typingctx):
    """Begin to use the tiles of AMX in this thread."""

    def generate(context, builder, signature, args):
        config = cgutils.global_constant(builder, "amx_config", cgutils.make_bytearray(CONFIG))
        amx(builder, "ldtilecfg", builder.bitcast(config, BYTES))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def release(typingctx):
    """Leave the tiles of AMX to others."""

    def generate(context, builder, signature, args):
        amx(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def block(typingctx, out, a, b, alpha, add, row, col):
    """out = alpha a b, plus out if `add`, for the 2 x 2 tiles at (row, col)."""

    def generate(context, builder, signature, args):
        mOut, mA, mB = (Elements(context, builder, kind, x) for kind, x in zip(signature.args, args[:3]))
        alpha, add, row, col = args[3:]
        (height, width), (depth, _), both = mOut.shape, mB.shape, (0, 1)
        rows, cols = ([builder.add(first, LONG(SIDE * n)) for n in both] for first in (row, col))
        sums = {(m, n): BYTE(2 * m + n) for m in both for n in both}
        for total in sums.values():
            amx(builder, "tilezero", total)
        with cgutils.for_range_slice(builder, LONG(0), depth, LONG(SIDE)) as (k, _):
            lefts, rights = (dict(zip(both, map(BYTE, numbers))) for numbers in ((4, 5), (6, 7)))
            for m, left in lefts.items():
                amx(builder, "tileloadd64", left, builder.bitcast(mA.element(rows[m], k), BYTES), mA.strides[0])
            for n, right in rights.items():
                amx(builder, "tileloadd64", right, builder.bitcast(mB.element(k, cols[n]), BYTES), mB.strides[0])
            for (m, n), total in sums.items():
                amx(builder, "tdpbf16ps", total, lefts[m], rights[n])
        found = cgutils.alloca_once(builder, ir.ArrayType(ir.ArrayType(FLOAT, 2 * SIDE), 2 * SIDE))
        found.align = LINE
        for (m, n), total in sums.items():
            place = builder.gep(found, [LONG(0), LONG(m * SIDE), LONG(n * SIDE)])
            amx(builder, "tilestored64", total, builder.bitcast(place, BYTES), LONG(2 * LINE))
        rest = builder.sub(height, row)
        count = builder.select(builder.icmp_signed("<", rest, LONG(2 * SIDE)), rest, LONG(2 * SIDE))
        widths = [builder.sub(width, col) for col in cols]
        unit, parts = Vectors(builder, out.dtype), [Vectors(builder, out.dtype, width) for width in widths]
        befores = [Vectors(builder, out.dtype, builder.select(add, width, LONG(0))) for width in widths]
        with cgutils.for_range(builder, count) as loop:
            for n, (part, before) in enumerate(zip(parts, befores)):
                value = unit.load(builder.gep(found, [LONG(0), loop.index, LONG(n * SIDE)]))
                place = mOut.element(builder.add(row, loop.index), cols[n])
                part.store(builder.fadd(builder.fmul(value, unit.splat(alpha)), before.load(place)), place)
        return context.get_dummy_value()

    return types.void(out, a, b, out.dtype, types.boolean, types.intp, types.intp), generate


@linked
def product_by_amx(out, a, b, alpha, add):
    """out = alpha a b, plus out if `add`"""
    for row in range(0, out.shape[0], 2 * SIDE):
        for col in range(0, out.shape[1], 2 * SIDE):
            block(out, a, b, alpha, add, row, col)


product_of_pairs = product_by_amx if HAS_AMX else product_by_dots


# ------------------------------------------------------------------------------------------------------------- operands
def bits_of(builder, x):
    """The bits of the nearest bfloat16 of float32 numbers; those of bfloat16 as they are."""
    if x.type.element == FLOAT:
        x = builder.bitcast(builder.fptrunc(x, ir.VectorType(BFLOAT16, SIDE)), ir.VectorType(SHORT, SIDE))
    return x


@intrinsic
def load_row(typingctx, out, x, row):
    """A row of the words of a, from a matrix of bfloat16 or float32."""

    def generate(context, builder, signature, args):
        mOut, mX = (Elements(context, builder, kind, given) for kind, given in zip(signature.args, args[:2]))
        row, some = args[2], ir.VectorType(SHORT, SIDE)

        def store(bits, word):
            builder.store(bits, builder.bitcast(mOut.element(row, word), some.as_pointer()), align=2)

        def load(unit, col):
            store(bits_of(builder, unit.load(mX.element(row, col))), builder.udiv(col, LONG(2)))

        store(ir.Constant(some, None), builder.sub(mOut.shape[1], LONG(SIDE // 2)))  # where there may be no numbers
        along(builder, x.dtype, mX.shape[1], load, SIDE)
        return context.get_dummy_value()

    return types.void(out, x, types.intp), generate


@intrinsic
def load_pairs(typingctx, out, x, row):
    """A row of the words of b, from two rows of a matrix of bfloat16 or float32."""

    def generate(context, builder, signature, args):
        mOut, mX = (Elements(context, builder, kind, given) for kind, given in zip(signature.args, args[:2]))
        first, height, words = builder.mul(args[2], LONG(2)), mX.shape[0], ir.VectorType(INT, SIDE)
        is_there = [builder.icmp_signed("<", builder.add(first, LONG(n)), height) for n in (0, 1)]

        def load(unit, col):
            found = []
            for row, there in zip(clamped(builder, first, 2, height), is_there):
                bits = builder.zext(bits_of(builder, unit.load(mX.element(row, col))), words)
                found.append(builder.and_(bits, unit.splat(builder.sext(there, INT))))
            word = builder.or_(found[0], builder.shl(found[1], words([16] * SIDE)))
            builder.store(word, builder.bitcast(mOut.element(args[2], col), words.as_pointer()), align=4)

        along(builder, x.dtype, mX.shape[1], load, SIDE)
        return context.get_dummy_value()

    return types.void(out, x, types.intp), generate


@inline
def whole(n):
    """n, or the next multiple of two of AMX's tiles."""
    return (n + 2 * SIDE - 1) // (2 * SIDE) * (2 * SIDE)


@inline_view
def rows_in(buffer, x):
    """The words of a, for a matrix of bfloat16 or float32."""
    out = tile(buffer, whole(x.shape[0]), whole(x.shape[1]) // 2)
    for row in range(x.shape[0]):
        load_row(out, x, row)
    return out


@inline_view
def pairs_in(buffer, x):
    """The words of b, for a matrix of bfloat16 or float32."""
    out = tile(buffer, whole(x.shape[0]) // 2, whole(x.shape[1]))
    for row in range(out.shape[0]):
        load_pairs(out, x, row)
    return out


@inline_view
def turned_in(buffer, words):
    """The words of b or a, for the transpose of those of a or b."""
    out = tile(buffer, words.shape[1], words.shape[0])
    transpose_words(out, words)
    return out


# ------------------------------------------------------------------------- operands and products as a kernel takes them
def or_in_pairs(of_pairs):
    """Decorate a function of kernels, (*arguments, pairs): where that is not None, it is `of_pairs`."""

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


@or_in_pairs(lambda buffer, x, factor, scratch, pairs: turned_in(buffer, rows_in(scratch.rows, x)))
def transposed(buffer, x, factor, scratch, pairs):
    """factor x^T, as b; for pairs without the factor."""
    out = tile(buffer, x.shape[1], x.shape[0])
    transpose(out, x, factor, False)
    return out


@or_in_pairs(lambda buffer, rows, cols, pairs: tile(buffer, whole(rows) // 2, whole(cols)))
def place_in(buffer, rows, cols, pairs):
    """Where `transposed` puts its result, of these rows and columns."""
    return tile(buffer, rows, cols)


@or_in_pairs(lambda buffer, x, pairs: tile(buffer, whole(x.shape[0]) // 2, whole(x.shape[1])))
def paired(buffer, x, pairs):
    """x, as b, once it is there."""
    return x


@or_in_pairs(lambda buffer, x, pairs: pairs_in(buffer, x))
def load_paired(buffer, x, pairs):
    return x


@or_in_pairs(lambda factor, one, pairs: one * factor)
def left_out(factor, one, pairs):
    """What is left of a factor for a product with what is `transposed`."""
    return one


def matmul_in_pairs(out, a, b, alpha, add, scratch, pairs):
    product_of_pairs(out, rows_in(scratch.rows, a), b, alpha, add)


@or_in_pairs(matmul_in_pairs)
def matmul(out, a, b, alpha, add, scratch, pairs):
    """out = alpha a b, plus out if `add`; b as from `transposed` or `right`."""
    product(out, a, b, alpha, add)


def matmul_tn_in_pairs(out, a, b, alpha, add, scratch, pairs):
    rows = turned_in(scratch.rows, pairs_in(scratch.pairs, a))
    product_of_pairs(out, rows, pairs_in(scratch.pairs, b), alpha, add)


@or_in_pairs(matmul_tn_in_pairs)
def matmul_tn(out, a, b, alpha, add, scratch, pairs):
    """out = alpha a^T b, plus out if `add`"""
    product_tn(out, a, b, alpha, add)


def widened_in(buffer, x, pairs):
    out = tile(buffer, x.shape[0], x.shape[1])
    for row in range(x.shape[0]):
        bits = contiguous_view(address_of(x) + row * x.strides[0], 1, x.shape[1], x.shape[1], x.dtype)[0]
        numbers = out[row]
        for col in range(x.shape[1]):
            numbers[col] = float_of_bfloat16(bits[col])
    return out


@or_in_pairs(widened_in)
def widened(buffer, x, pairs):
    """A matrix as float32."""
    return x


@inline
def begin_pairs(pairs):
    """Take the tiles of AMX, where they are used."""
    if HAS_AMX:
        if pairs is not None:
            configure()


@inline
def end_pairs(pairs):
    """Leave the tiles of AMX to others."""
    if HAS_AMX:
        if pairs is not None:
            release()


def products_of(problem, *arrays):
    """The Record of `pairs`: of 1 if the products of a call on these arrays are of pairs, else of None."""
    return PAIRS if HAS_PAIRS and problem.cache is None and {x.dtype for x in arrays} == {DTYPES[1]} else NO_PAIRS


PAIRS, NO_PAIRS = (Record(1),), (Record(None),)

"""Numbers that count threads, rows, columns and tiles: 32-bit integers that stay 32 bits wide.

In plain Python an index is an np.int32, and with a Python number it makes another one: NumPy's rule. Numba would make
the sum of two int32 64 bits wide, so compiled code has a type of its own with the same rule. `//` and `%` expect
numbers that are not negative.
"""

import operator

import numpy as np

from ..compiler import TypingError, array_part, extend, extend_by_conversion, held_as_llvm, ir, lower_cast, types
from .emit import I1, I32, asm, floor_divided, modulo
from .emit import always as emit_always
from .world import primitive


class Counting(types.Type):
    """The base of the types of integers that index arrays."""


@held_as_llvm
class IndexType(Counting):
    llvm = I32

    def __init__(self):
        super().__init__("index")

    def unify(self, typingctx, other):
        """The type of a variable that has two types, on two paths to a line."""
        return self if isinstance(other, types.Integer) else None


INDEX = IndexType()
INTEGERS = types.Integer, IndexType


@primitive
def index(x):
    """An integer as an index: where a variable starts from a Python number.

    >>> index(3) + 1
    np.int32(4)
    """
    return _as_index(x)


def _as_index(x):
    if not isinstance(x, int | np.integer | np.bool_):
        raise TypingError(f"got {x}, expected an integer")
    return np.int32(x)


@index.lowering
def index(x):
    return INDEX(INDEX), lambda b, x: x


@primitive
def shape(array):
    """The shape of an array, as indices.

    >>> shape(np.zeros((2, 3)))
    (np.int32(2), np.int32(3))
    """
    return tuple(map(np.int32, array.shape))


@shape.lowering
def shape(array):
    def generate(b, value):
        extents = array_part(b, array, value, "shape")
        found = ir.Constant(ir.ArrayType(I32, array.ndim), ir.Undefined)
        for i in range(array.ndim):
            found = b.insert_value(found, b.trunc(b.extract_value(extents, i), I32), i)
        return found

    return types.UniTuple(INDEX, array.ndim)(array), generate


@primitive
def lowest_bit(word):
    """The number of the lowest bit of a uint32 that is set, 32 if none is.

    >>> lowest_bit(np.uint32(40))
    np.int32(3)
    """
    word = int(word) & 0xFFFFFFFF
    return np.int32((word & -word).bit_length() - 1 if word else 32)


@lowest_bit.lowering
def lowest_bit(word):
    return INDEX(types.uint32), lambda b, word: b.cttz(word, I1(0))


@primitive
def opaque(x):
    """An index that is opaque to the optimiser: a loop that counts with it is not unrolled.

    >>> opaque(index(3))
    np.int32(3)
    """
    return _as_index(x)


@opaque.lowering
def opaque(x):
    return INDEX(INDEX), lambda b, x: asm(b, "mov.u32 $0, $1;", I32, x, effect=True)


@primitive
def always():
    """True, opaque to the optimiser: `if always():` makes a basic block, across whose ends it moves nothing.

    >>> always()
    True
    """
    return True


@always.lowering
def always():
    return types.boolean(), emit_always


# ------------------------------------------------------------------------------------------------------- conversions
@lower_cast(types.Integer, IndexType)
def from_integer(context, b, source, target, x):
    return constant(x.constant) if isinstance(x, ir.Constant) else resized(b, x, 32, source.signed)


@lower_cast(types.Boolean, IndexType)
def from_truth(context, b, source, target, x):
    return resized(b, x, 32, signed=False)


@lower_cast(types.IntegerLiteral, IndexType)
def from_literal(context, b, source, target, x):
    return constant(source.literal_value)


def constant(number):
    if not -(2**31) <= number < 2**31:
        raise TypingError(f"got {number}, expected an index of 32 bits")
    return I32(number)


@lower_cast(IndexType, types.Integer)
def to_integer(context, b, source, target, x):
    return resized(b, x, target.bitwidth, signed=True)


def resized(b, x, bits, signed):
    if bits <= x.type.width:
        return x if bits == x.type.width else b.trunc(x, ir.IntType(bits))
    return (b.sext if signed else b.zext)(x, ir.IntType(bits))


@lower_cast(IndexType, types.Float)
def to_float(context, b, source, target, x):
    return b.sitofp(x, context.get_value_type(target))


@lower_cast(IndexType, types.Boolean)
def to_truth(context, b, source, target, x):
    return b.icmp_signed("!=", x, I32(0))


# --------------------------------------------------------------------------------------------------------- operators
RESULTS = {
    operator.add: ir.IRBuilder.add, operator.sub: ir.IRBuilder.sub, operator.mul: ir.IRBuilder.mul,
    operator.floordiv: floor_divided, operator.mod: modulo,
    operator.and_: ir.IRBuilder.and_, operator.or_: ir.IRBuilder.or_, operator.xor: ir.IRBuilder.xor,
    operator.lshift: ir.IRBuilder.shl, operator.rshift: ir.IRBuilder.ashr,
}  # fmt: skip
COMPARISONS = {operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
               operator.ne: "!="}  # fmt: skip


def _define(op, result, emit):
    def lowering(*args):
        if any(isinstance(x, IndexType) for x in args) and all(isinstance(x, INTEGERS) for x in args):
            return result(*[INDEX] * len(args)), emit
        return None

    extend(op, lowering, (INDEX, INDEX))


for op, emit in RESULTS.items():
    for form in op, getattr(operator, f"i{op.__name__.strip('_')}"):
        _define(form, INDEX, emit)
for op, sign in COMPARISONS.items():
    _define(op, types.boolean, lambda b, x, y, sign=sign: b.icmp_signed(sign, x, y))


def _define_unary(op, result, emit):
    extend(op, lambda *args: (result(INDEX), emit) if args == (INDEX,) else None, (INDEX,))


_define_unary(operator.neg, INDEX, lambda b, x: b.neg(x))
for op in bool, operator.truth:
    _define_unary(op, types.boolean, lambda b, x: b.icmp_signed("!=", x, I32(0)))


def _takes_indices(function, plain):
    """Let a function of Numba's own take indices as integers of the type `plain`."""

    def converted(*args):
        return tuple(plain if x == INDEX else x for x in args) if INDEX in args else None

    extend_by_conversion(function, converted)


_takes_indices(range, types.int32)
_takes_indices(slice, types.intp)


# ------------------------------------------------------------------------------------------------- elements of arrays
def _plain(ty):
    """The type that Numba indexes arrays with in place of `ty`."""
    if isinstance(ty, types.BaseTuple):
        return types.Tuple.from_types([_plain(part) for part in ty])
    return types.intp if isinstance(ty, Counting) else ty


def _got(array, place):
    if not isinstance(array, types.Array | types.BaseTuple) or _plain(place) == place:
        return None
    return array, _plain(place)


def _set(array, place, value):
    plain = types.int32 if isinstance(value, IndexType) else value
    if not isinstance(array, types.Array) or (_plain(place), plain) == (place, value):
        return None
    return array, _plain(place), plain


extend_by_conversion(operator.getitem, _got)
extend_by_conversion(operator.setitem, _set)

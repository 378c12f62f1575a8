"""Operators on tiles: + - * / // unary - abs, comparisons, & | ^ ~ << >>, also in place.

`/` is for floats, `//` for integers: it rounds down and takes positive divisors. & | ^ ~ are for integers and truths,
shifts for integers.
"""

import operator

from ..compiler import extend, ir, types
from .emit import F32, call, floor_divided
from .fragment import BITS, FLOATS, INTEGERS, NUMBERS, Fragment, FragmentType, Operation, is_float, is_signed
from .integers import COMPARISONS

ARITHMETIC = {  # binary: LLVM's instructions for signed integers, unsigned integers and floats
    operator.add: (NUMBERS, "add", "add", "fadd"), operator.sub: (NUMBERS, "sub", "sub", "fsub"),
    operator.mul: (NUMBERS, "mul", "mul", "fmul"), operator.truediv: (FLOATS, None, None, "fdiv"),
    operator.floordiv: (INTEGERS, floor_divided, "udiv", None), operator.and_: (BITS, "and_", "and_", None),
    operator.or_: (BITS, "or_", "or_", None), operator.xor: (BITS, "xor", "xor", None),
    operator.lshift: (INTEGERS, "shl", "shl", None), operator.rshift: (INTEGERS, "ashr", "lshr", None),
}  # fmt: skip


def emit_binary(signed, unsigned, floats):
    def emit(b, dtype, x, y):
        how = floats if is_float(dtype) else signed if is_signed(dtype) else unsigned
        return how(b, x, y) if callable(how) else getattr(b, how)(x, y)

    return emit


def emit_comparison(sign):
    def emit(b, dtype, x, y):
        if is_float(dtype):  # as in NumPy, NaN is unequal to everything
            return (b.fcmp_unordered if sign == "!=" else b.fcmp_ordered)(sign, x, y)
        return (b.icmp_signed if is_signed(dtype) else b.icmp_unsigned)(sign, x, y)

    return emit


def emit_negative(b, dtype, x):
    return b.fsub(ir.Constant(x.type, -0.0), x) if is_float(dtype) else b.sub(ir.Constant(x.type, 0), x)


def emit_invert(b, dtype, x):
    return b.xor(x, ir.Constant(x.type, -1))


def emit_abs(b, dtype, x):
    if is_float(dtype):
        return call(b, "__nv_fabsf" if x.type == F32 else "__nv_fabs", x.type, x)
    negative = b.icmp_signed("<", x, ir.Constant(x.type, 0))
    return b.select(negative, emit_negative(b, dtype, x), x) if is_signed(dtype) else x


def _define(op, operation, *inputs):
    """Tell the compiler what an operator does with tiles; anything else is looked up elsewhere."""

    def lowering(*args):
        return operation.lower(*args) if any(isinstance(x, FragmentType) for x in args) else None

    extend(op, lowering, *inputs)


def _define_binary(op, name, operation):
    setattr(Fragment, f"__{name}__", lambda x, y: operation(x, y))
    _define(op, operation, (FragmentType, FragmentType), (FragmentType, types.Any), (types.Any, FragmentType))


def _define_unary(op, name, operation):
    setattr(Fragment, f"__{name}__", lambda x: operation(x))
    _define(op, operation, (FragmentType,))


for _op, (_takes, *_names) in ARITHMETIC.items():
    _name = _op.__name__.strip("_")
    _operation = Operation(_name, _op, emit_binary(*_names), _takes)
    _define_binary(_op, _name, _operation)
    setattr(Fragment, f"__r{_name}__", lambda x, y, operation=_operation: operation(y, x))
    _define_binary(getattr(operator, f"i{_name}"), f"i{_name}", _operation)
for _op, _sign in COMPARISONS.items():
    _define_binary(_op, _op.__name__, Operation(_sign, _op, emit_comparison(_sign), NUMBERS | BITS, types.boolean))
for _op, _emit, _takes in (
    (operator.neg, emit_negative, NUMBERS), (operator.invert, emit_invert, BITS), (abs, emit_abs, NUMBERS)
):  # fmt: skip
    _define_unary(_op, _op.__name__, Operation(_op.__name__, _op, _emit, _takes))

"""Fragments: this thread's registers of a tile, with operators. Row and column vectors are fragments with an axis ONE.

Broadcasting is NumPy's: an axis of two operands is the same Axis, or ONE in one of them. Scalars take the fragment's
dtype; fragments of two dtypes do not mix (see `convert`). Nothing computes in float16 and bfloat16: they are storage.
"""

import operator
import zlib

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import core_models, lower_builtin, register_model, typeof_impl
from numba.cuda.np import numpy_support
from numba.cuda.typing.templates import AbstractTemplate, infer_global

from .emit import F32, F64, I1, I8, I16, I32, I64
from .layout import Layout

bfloat16 = np.dtype(ml_dtypes.bfloat16)
LLVM = {
    types.float32: F32, types.float64: F64, types.float16: I16, types.bfloat16: I16, types.boolean: I1,
    types.int8: I8, types.uint8: I8, types.int32: I32, types.uint32: I32, types.int64: I64, types.uint64: I64,
}  # fmt: skip


def element_type(dtype):
    """Numba's name of a NumPy dtype."""
    return types.bfloat16 if dtype == bfloat16 else numpy_support.from_dtype(np.dtype(dtype))


def broadcast(*layouts):
    def common(axes, what):
        long = {axis for axis in axes if axis.size > 1}
        if len(long) > 1:
            raise TypingError(f"the {what} of the tiles lie in different registers: " + ", ".join(map(str, long)))
        return long.pop() if long else axes[0]

    rows, cols = (common([getattr(layout, what) for layout in layouts], what) for what in ("rows", "cols"))
    unit = next((layout.unit for layout in layouts if layout.unit != "fma"), "fma")
    return Layout(rows, cols, layouts[0].threads, unit)


# ------------------------------------------------------------------------------------------------- plain Python
class Fragment:
    """registers: array of layout.slots."""

    __slots__ = ("layout", "registers")
    __array_ufunc__ = None  # np.float32(2) * fragment is ours

    def __init__(self, layout, registers):
        self.layout, self.registers = layout, np.broadcast_to(registers, layout.slots)

    def __repr__(self):
        return f"Fragment({self.layout}, {self.registers})"

    @property
    def dtype(self):
        return self.registers.dtype


def apply(function, *operands):
    """A NumPy function over fragments and scalars; over scalars alone too."""
    fragments = [x for x in operands if isinstance(x, Fragment)]
    if not fragments:
        return function(*operands)
    dtype = fragments[0].dtype
    if any(f.dtype != dtype for f in fragments):
        raise TypingError(f"fragments of {', '.join(str(f.dtype) for f in fragments)} do not mix")
    values = [x.registers if isinstance(x, Fragment) else np.asarray(x).astype(dtype) for x in operands]
    return Fragment(broadcast(*(f.layout for f in fragments)), function(*values))


# ---------------------------------------------------------------------------------------------------------- LLVM
class FragmentType(types.Type):
    def __init__(self, layout, dtype):
        self.layout, self.dtype = layout, dtype
        super().__init__(f"{dtype} {layout} #{zlib.crc32(repr(layout).encode()):x}")

    @property
    def key(self):
        return self.layout, self.dtype

    @property
    def llvm(self):
        rows, cols = self.layout.slots
        return ir.ArrayType(LLVM[self.dtype], rows * cols)


@register_model(FragmentType)
class FragmentModel(core_models.PrimitiveModel):
    def __init__(self, manager, ty):
        super().__init__(manager, ty, ty.llvm)


class ConstantType(types.Dummy):
    """The type of a Python object that is known to the compiler: a Layout, a place in shared memory."""

    def __init__(self, value):
        self.value = value
        super().__init__(f"{type(value).__name__} {value} #{zlib.crc32(repr(value).encode()):x}")

    @property
    def key(self):
        return self.value


register_model(ConstantType)(core_models.OpaqueModel)


def constant(cls):
    """Lets kernels capture objects of a frozen dataclass as constants."""
    typeof_impl.register(cls)(lambda value, context: ConstantType(value))
    return cls


constant(Layout)


def registers(b, ty, value, slots=None):
    """The registers of a fragment as a list of rows; broadcast to `slots`. A scalar is a single one."""
    if isinstance(ty, FragmentType):
        rows, cols = ty.layout.slots
        flat = [b.extract_value(value, i) for i in range(rows * cols)]
    else:
        rows, cols, flat = 1, 1, [value]
    if slots is None:
        slots = rows, cols
    grid = [flat[i * cols : (i + 1) * cols] for i in range(rows)]
    return [[grid[r if rows > 1 else 0][c if cols > 1 else 0] for c in range(slots[1])] for r in range(slots[0])]


def fragment(b, ty, rows):
    value = ir.Constant(ty.llvm, ir.Undefined)
    for i, register in enumerate(register for row in rows for register in row):
        value = b.insert_value(value, register, i)
    return value


def elementwise(emit, result=None):
    """The lowering of an operation on each element: emit(builder, dtype, *registers) -> register of dtype `result`."""

    def lower(*operands):
        fragments = [ty for ty in operands if isinstance(ty, FragmentType)]
        if not fragments:
            return None
        dtype = fragments[0].dtype
        if any(f.dtype != dtype for f in fragments):
            raise TypingError(f"fragments of {', '.join(str(f.dtype) for f in fragments)} do not mix")
        out = FragmentType(broadcast(*(f.layout for f in fragments)), result or dtype)
        inputs = [ty if isinstance(ty, FragmentType) else dtype for ty in operands]

        def generate(b, *values):
            spread = [registers(b, ty, value, out.layout.slots) for ty, value in zip(inputs, values)]
            return fragment(b, out, [[emit(b, dtype, *xs) for xs in zip(*rows)] for rows in zip(*spread)])

        return out(*inputs), generate

    return lower


def is_float(dtype):
    return isinstance(dtype, types.Float)


def is_signed(dtype):
    return isinstance(dtype, types.Integer) and dtype.signed


# ----------------------------------------------------------------------------------------------- both: operators
ARITHMETIC = {operator.add: "add", operator.sub: "sub", operator.mul: "mul"}
QUOTIENTS = (operator.truediv, operator.floordiv)  # of floats; of integers that are not negative
BITWISE = {operator.and_: "and_", operator.or_: "or_", operator.xor: "xor"}
SHIFTS = {operator.lshift: "shl", operator.rshift: "shr"}
COMPARISONS = {operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
               operator.ne: "!="}  # fmt: skip
IN_PLACE = {operator.add: operator.iadd, operator.sub: operator.isub, operator.mul: operator.imul,
            operator.and_: operator.iand, operator.or_: operator.ior, operator.xor: operator.ixor,
            operator.lshift: operator.ilshift, operator.rshift: operator.irshift}  # fmt: skip
UNARY = (operator.neg, operator.invert)


def emit_binary(op):
    if op in ARITHMETIC:
        return lambda b, dtype, x, y: getattr(b, ("f" if is_float(dtype) else "") + ARITHMETIC[op])(x, y)
    if op in QUOTIENTS:
        return lambda b, dtype, x, y: (b.fdiv if is_float(dtype) else b.udiv)(x, y)
    if op in BITWISE:
        return lambda b, dtype, x, y: getattr(b, BITWISE[op])(x, y)
    if op is operator.lshift:
        return lambda b, dtype, x, y: b.shl(x, y)
    if op is operator.rshift:
        return lambda b, dtype, x, y: b.ashr(x, y) if is_signed(dtype) else b.lshr(x, y)

    def compare(b, dtype, x, y):
        if is_float(dtype):  # as in NumPy, NaN differs from everything
            return (b.fcmp_unordered if op is operator.ne else b.fcmp_ordered)(COMPARISONS[op], x, y)
        return (b.icmp_signed if is_signed(dtype) else b.icmp_unsigned)(COMPARISONS[op], x, y)

    return compare


def emit_negative(b, dtype, x):
    return b.fsub(ir.Constant(x.type, -0.0), x) if is_float(dtype) else b.sub(ir.Constant(x.type, 0), x)


def emit_invert(b, dtype, x):
    return b.xor(x, ir.Constant(x.type, -1))


def _overload_operator(op, lower, *inputs):
    @infer_global(op)
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            found = lower(*args)
            return found and found[0]

    for pair in inputs:
        lower_builtin(op, *pair)(lambda context, b, signature, values: lower(*signature.args)[1](b, *values))


def _define_operators():
    one, two = [(FragmentType,)], [(FragmentType, FragmentType), (FragmentType, types.Any), (types.Any, FragmentType)]
    for op in [*ARITHMETIC, *QUOTIENTS, *BITWISE, *SHIFTS, *COMPARISONS]:
        name = op.__name__.strip("_")
        setattr(Fragment, f"__{name}__", lambda x, y, op=op: apply(op, x, y))
        if op not in COMPARISONS:
            setattr(Fragment, f"__r{name}__", lambda x, y, op=op: apply(op, y, x))
        lower = elementwise(emit_binary(op), types.boolean if op in COMPARISONS else None)
        _overload_operator(op, lower, *two)
        if op in IN_PLACE:
            _overload_operator(IN_PLACE[op], lower, *two)
    for op, emit in zip(UNARY, (emit_negative, emit_invert)):
        setattr(Fragment, f"__{op.__name__}__", lambda x, op=op: apply(op, x))
        _overload_operator(op, elementwise(emit), *one)


_define_operators()

"""Fragments: this thread's registers of a tile. Row and column vectors are fragments with an axis ONE.

Broadcasting is NumPy's: an axis of two operands is the same Axis, or ONE in one of them. Numbers take the fragment's
dtype; fragments of two dtypes do not mix (see `convert`). Nothing computes in float16 and bfloat16: they are storage.

A mistake in one meaning of a word is one in the other: both call the same check, on Fragments or FragmentTypes.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from ..compiler import TypingError, captured_as, from_dtype, held_as_llvm, ir, known_when_compiled, types
from .emit import F32, F64, I1, I8, I16, I32, I64
from .integers import IndexType
from .layout import Layout

bfloat16 = np.dtype(ml_dtypes.bfloat16)
LLVM = {
    types.float32: F32, types.float64: F64, types.float16: I16, types.bfloat16: I16, types.boolean: I1,
    types.int8: I8, types.uint8: I8, types.int32: I32, types.uint32: I32, types.int64: I64, types.uint64: I64,
}  # fmt: skip
FLOATS = frozenset({"float32", "float64"})  # dtypes by name, which are the same in NumPy and Numba: see `name_of`
HALF_FLOATS = frozenset({"float16", "bfloat16"})
WORDS = frozenset({"int32", "uint32", "int64", "uint64"})
BYTES = frozenset({"int8", "uint8"})
INTEGERS = WORDS | BYTES
TRUTHS = frozenset({"bool"})
NUMBERS, BITS, ANY = FLOATS | INTEGERS, INTEGERS | TRUTHS, FLOATS | HALF_FLOATS | INTEGERS | TRUTHS


def element_type(dtype):
    """Numba's type for a NumPy dtype."""
    return types.bfloat16 if dtype == bfloat16 else from_dtype(np.dtype(dtype))


@cache
def name_of(dtype):
    """Name of a NumPy or Numba dtype."""
    return dtype.name.removeprefix("__nv_")


# --------------------------------------------------------------------------------------------- checks, of both worlds
@cache
def broadcast(*layouts):
    def common(axes, what):
        long = {axis for axis in axes if axis.size != 1}
        if len(long) > 1:
            raise TypingError(f"the {what} of the tiles lie in different registers: " + ", ".join(map(str, long)))
        return long.pop() if long else axes[0]

    rows, cols = (common([getattr(layout, what) for layout in layouts], what) for what in ("rows", "cols"))
    unit = next((layout.unit for layout in layouts if layout.unit != "fma"), "fma")
    return Layout(rows, cols, layouts[0].threads, unit)


def is_tile(x):
    return isinstance(x, Fragment) or type(x) is FragmentType  # an instance of an ABC takes longer to tell


def is_number(x):
    return not is_tile(x) and isinstance(x, A_NUMBER)


def check_dtype(word, dtype, takes):
    if name_of(dtype) not in takes:
        raise TypingError(f"{word}: got {name_of(dtype)}, expected one of {', '.join(sorted(takes))}")


def check_tile(word, x, takes=ANY):
    if not is_tile(x):
        raise TypingError(f"{word}: got {x}, expected a tile in registers")
    check_dtype(word, x.dtype, takes)


def check_operands(word, takes, *operands):
    """Check tiles of one dtype and numbers. Returns the dtype, and the layout of the result."""
    tiles = []
    for x in operands:
        if is_tile(x):
            tiles.append(x)
        elif not isinstance(x, A_NUMBER):
            raise TypingError(f"{word}: got {x}, expected a tile or a number")
    if not tiles:
        raise TypingError(f"{word}: got numbers only, expected a tile")
    return _check_tiles(word, takes, tuple([x.dtype for x in tiles]), tuple([x.layout for x in tiles]))


@cache
def _check_tiles(word, takes, dtypes, layouts):
    check_dtype(word, dtypes[0], takes)
    names = [name_of(dtype) for dtype in dtypes]
    if len({*names}) > 1:
        raise TypingError(f"{word}: tiles of {', '.join(names)} do not mix")
    return dtypes[0], broadcast(*layouts)


def check_repeats(word, x, layout):
    """Check a tile or vector that may be repeated to fill a layout."""
    both = broadcast(layout, x.layout)
    if both.shape != layout.shape:
        raise TypingError(f"{word}: {x.layout} does not fit into {layout}")


# plain ones first: whether one is Numba's takes longer to tell
A_NUMBER = (int, float, np.integer, np.floating, np.bool_, types.Integer, types.Float, types.Boolean, IndexType)


# ------------------------------------------------------------------------------------------------- plain Python
class Fragment:
    """This thread's registers, an array of shape layout.slots."""

    __slots__ = ("layout", "registers")
    __array_ufunc__ = None  # np.float32(2) * fragment is ours

    def __init__(self, layout, registers):
        if registers.shape != layout.slots:
            registers = np.broadcast_to(registers, layout.slots)
        self.layout, self.registers = layout, registers

    def __repr__(self):
        return f"Fragment({self.layout}, {self.registers})"

    @property
    def dtype(self):
        return self.registers.dtype

    def __bool__(self):
        raise TypeError("a tile has no truth of its own: write &, | and ~ for `and`, `or` and `not`, where() for `if`")


# ---------------------------------------------------------------------------------------------------------- LLVM
@held_as_llvm
class FragmentType(types.Type):
    """in_words: whether truths are words that are not 0, bits of larger ones, which only `where` takes as they are."""

    def __init__(self, layout, dtype, in_words=False):
        self.layout, self.dtype, self.in_words = layout, dtype, in_words
        super().__init__(f"{dtype}{' words' * in_words} {layout} #{zlib.crc32(repr(layout).encode()):x}")

    @property
    def key(self):
        return self.layout, self.dtype, self.in_words

    @property
    def llvm(self):
        rows, cols = self.layout.slots
        return ir.ArrayType(I32 if self.in_words else LLVM[self.dtype], rows * cols)


@known_when_compiled
class ConstantType(types.Dummy):
    """The type of a Python object that is known to the compiler: a Layout, a place in shared memory."""

    def __init__(self, value):
        self.value = value
        super().__init__(f"{type(value).__name__} {value} #{zlib.crc32(repr(value).encode()):x}")

    @property
    def key(self):
        return self.value


def constant(cls):
    """Lets kernels capture objects of a frozen dataclass as constants."""
    captured_as(cls, ConstantType)
    return cls


constant(Layout)


def registers(b, ty, value, slots=None):
    """The registers of a fragment as a list of rows, broadcast to `slots`. A scalar is a single register."""
    found = words(b, ty, value, slots)
    if getattr(ty, "in_words", False):
        return [[b.icmp_unsigned("!=", word, I32(0)) for word in row] for row in found]
    return found


def words(b, ty, value, slots=None):
    """`registers` as they are held."""
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


def is_float(dtype):
    return isinstance(dtype, types.Float)


def is_signed(dtype):
    return isinstance(dtype, types.Integer) and dtype.signed


# ---------------------------------------------------------------------------------------------------------------- both
@dataclass(frozen=True)
class Operation:
    """An operation on each element of tiles and numbers, at least one tile: called in plain Python, or lowered.

    Attributes
    ----------
    word : str
        Its name in errors.
    plain : function of NumPy arrays
    emit : emit(builder, dtype, *registers) -> register
    takes : names of dtypes
    result : the dtype of the result, if not that of the operands
    """

    word: str
    plain: Callable
    emit: Callable
    takes: frozenset
    result: Any = None
    checked: dict = field(default_factory=dict, init=False, repr=False, compare=False)  # what operands are good for

    def __call__(self, *operands):
        kinds = tuple([(x.layout, x.registers.dtype) if isinstance(x, Fragment) else type(x) for x in operands])
        if kinds not in self.checked:
            self.checked[kinds] = check_operands(self.word, self.takes, *operands)
        dtype, layout = self.checked[kinds]
        values = [x.registers if isinstance(x, Fragment) else np.asarray(x).astype(dtype) for x in operands]
        return Fragment(layout, self.plain(*values))

    def lower(self, *operands):
        dtype, layout = check_operands(self.word, self.takes, *operands)
        out = FragmentType(layout, self.result or dtype)
        inputs = [ty if isinstance(ty, FragmentType) else dtype for ty in operands]

        def generate(b, *values):
            spread = [registers(b, ty, value, layout.slots) for ty, value in zip(inputs, values)]
            return fragment(b, out, [[self.emit(b, dtype, *xs) for xs in zip(*rows)] for rows in zip(*spread)])

        return out(*inputs), generate

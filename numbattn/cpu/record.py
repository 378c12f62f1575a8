"""Arguments of kernels as records: numbers of 8 bytes, one after the other, which compiled code reads back.

A record is kept from call to call, with holes for the addresses that come with each call.
"""

import ctypes
import itertools
import math
import struct
from array import array

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .tile import INT64, array_at

HEAD = object.__basicsize__  # bytes of a Python object's head, after which NumPy's arrays have their data's address
_int64_at = ctypes.c_int64.from_address


def data_address(x):
    """The address of a NumPy array's first element; x.ctypes.data takes eight times as long."""
    return _int64_at(id(x) + HEAD).value


class Hole(int):
    """An address that comes with the call."""


HOLE = Hole()
CODES = {int: "q", np.int64: "q", Hole: "q", float: "d", np.uint64: "Q"}
ARRAY_CODES = ["q" * (1 + 2 * ndim) for ndim in range(9)]  # address, shape and strides


class At:
    """A contiguous array at an address."""

    def __init__(self, address, shape, dtype):
        self.address, self.shape, self.dtype = address, shape, np.dtype(dtype)
        self.strides = tuple([self.dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))])


def Later(shape, dtype):
    """A contiguous array that comes with the call."""
    return At(HOLE, shape, dtype)


class Record:
    """Arguments: numbers, contiguous arrays, None, tuples of them.

    It keeps arrays in them alive, and `held`, the arrays that addresses in them refer to.
    """

    __slots__ = "arguments", "form", "held", "holes", "words"

    def __init__(self, *arguments, held=None):
        self.arguments, self.held = arguments, held
        numbers, codes, form, holes = [], [], [], []
        for x in arguments:
            _add(x, numbers, codes, form, holes)
        self.words, self.form = array("q", struct.pack("".join(codes), *numbers)), " ".join(form)
        self.holes = holes

    def filled(self, *arrays, held=None):
        """The same, with the addresses of these arrays in its holes, in order."""
        words, found = self.words[:], object.__new__(Record)
        for hole, x in zip(self.holes, arrays, strict=True):
            words[hole] = data_address(x)
        found.words, found.form, found.holes = words, self.form, ()
        found.arguments, found.held = self.arguments, (arrays, held)
        return found


def _add(x, numbers, codes, form, holes):
    """Add the numbers of an argument; `form` describes their types."""
    code = CODES.get(type(x))
    if code is not None:
        if x is HOLE:
            holes.append(len(numbers))
        numbers.append(x)
        codes.append(code)
        form.append(code)
    elif isinstance(x, tuple):
        form.append(type(x).__name__)
        for each in x:
            _add(each, numbers, codes, form, holes)
        form.append(")")
    elif x is None:
        form.append("None")
    else:
        if isinstance(x, At):
            address = x.address
        elif x.flags.c_contiguous:
            address = data_address(x)
        else:
            raise ValueError(f"kernels take contiguous arrays: got strides {x.strides} for the shape {x.shape}")
        if address is HOLE:
            holes.append(len(numbers))
        numbers += address, *x.shape, *x.strides
        codes.append(ARRAY_CODES[len(x.shape)])
        form.append(x.dtype.char + codes[-1])


# ------------------------------------------------------------------------------------------------------ compiled code
def kind_of(x):
    """The type of an argument, as Numba has it."""
    if isinstance(x, tuple):
        return types.BaseTuple.from_types([kind_of(each) for each in x], type(x) if hasattr(x, "_fields") else None)
    if isinstance(x, np.ndarray | At):
        return types.Array(numba.from_dtype(x.dtype), len(x.shape), "C")
    if x is None:
        return types.none
    return {"q": types.int64, "d": types.float64, "Q": types.uint64}[CODES[type(x)]]


def reader(kinds):
    """The intrinsic (address of a record, base): a tuple of these types.

    base: what is added to addresses of arrays in the first one.
    """
    out = types.Tuple(kinds)

    @intrinsic
    def read(typingctx, record, base):
        def generate(context, builder, signature, args):
            at = builder.inttoptr(args[0], INT64.as_pointer())
            words = (builder.load(builder.gep(at, [INT64(number)])) for number in itertools.count())
            bases = itertools.chain(args[1:], itertools.repeat(INT64(0)))
            made = [_made(context, builder, kind, words, base) for kind, base in zip(kinds, bases)]
            return context.make_tuple(builder, out, made)

        return out(types.int64, types.int64), generate

    return read


def _made(context, builder, kind, words, base):
    """A value of a type, from the next numbers of a record."""
    if isinstance(kind, types.BaseTuple):
        return context.make_tuple(builder, kind, [_made(context, builder, each, words, base) for each in kind])
    if isinstance(kind, types.Array):
        address = builder.add(next(words), base)
        shape, strides = ([next(words) for _ in range(kind.ndim)] for _ in range(2))
        return array_at(context, builder, kind, address, shape, strides)
    if kind == types.none:
        return context.get_dummy_value()
    word = next(words)
    return builder.bitcast(word, ir.DoubleType()) if kind == types.float64 else word

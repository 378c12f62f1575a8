"""A user's function of one score, compiled for tiles.

Kernels call it by its address: so they are compiled once for all functions, and a function without a kernel.
"""

from functools import lru_cache

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..dual import compiled, derivative_of, naming
from .tile import INT64, array_at, contiguous_view

SIGNATURE = types.void(*[types.int64] * 9)


def tile_function(score, dtype):
    """The cfunc (S, slopes, rows, cols, batch, head, m0, n0, record) of a numbattn.Score.

    S: address of a tile of keys x queries of this dtype. slopes: of one for the derivative; or 0, where none is wanted.
    record: of what `record_of` makes of the arrays.
    """
    kinds = tuple([types.Array(numba.from_dtype(x.dtype), x.ndim, "A") for x in score.arrays])
    with naming(score.function):
        return _tile_function(score._identity, kinds, np.dtype(dtype))


def applied(score, S):
    """S (..., heads, seqlen_q, seqlen_k), in NumPy arrays, behind a numbattn.Score, as kernels compute it."""
    function, record = tile_function(score, S.dtype), record_of(score.arrays)
    tiles = np.array(S.swapaxes(-2, -1), order="C")  # of all keys x all queries
    *_, heads, keys, queries = tiles.shape
    for number, tile in enumerate(tiles.reshape(-1, keys, queries) if tiles.size else ()):
        function.ctypes(tile.ctypes.data, 0, keys, queries, *divmod(number, heads), 0, 0, record.ctypes.data)
    return tiles.swapaxes(-2, -1)


@lru_cache(maxsize=256)
def _tile_function(identity, kinds, dtype):
    """identity: a scores.Identity of function and derivative; kinds: the types of the arrays."""
    function, derivative = identity.functions
    real, arrays_of, value_of = dtype.type, arrays_at(kinds), compiled(function)
    slope = derivative_of(function) if derivative is None else compiled(derivative)

    @numba.cfunc(SIGNATURE, error_model="numpy")
    def apply(S, slopes, rows, cols, batch, head, m0, n0, record):
        S, arrays = contiguous_view(S, rows, cols, cols, real), arrays_of(record)
        if slopes != 0:
            F = contiguous_view(slopes, rows, cols, cols, real)
            for j in range(rows):
                for i in range(cols):
                    F[j, i] = slope(S[j, i], batch, head, m0 + i, n0 + j, *arrays)
        for j in range(rows):
            for i in range(cols):
                S[j, i] = value_of(S[j, i], batch, head, m0 + i, n0 + j, *arrays)

    return apply


def record_of(arrays):
    """Address, shape and strides of each array, one after the other, int64."""
    numbers = [number for x in arrays for number in (x.ctypes.data, *x.shape, *x.strides)]
    return np.array(numbers or [0], np.int64)


def arrays_at(kinds):
    """The intrinsic (address of a record): a tuple of arrays of these types."""
    out = types.Tuple(kinds)

    @intrinsic
    def arrays(typingctx, record):
        def generate(context, builder, signature, args):
            at, made = builder.inttoptr(args[0], INT64.as_pointer()), []
            for kind in kinds:
                numbers = [builder.load(builder.gep(at, [ir.Constant(INT64, n)])) for n in range(1 + 2 * kind.ndim)]
                at = builder.gep(at, [ir.Constant(INT64, len(numbers))])
                address, shape, strides = numbers[0], numbers[1 : 1 + kind.ndim], numbers[1 + kind.ndim :]
                made.append(array_at(context, builder, kind, address, shape, strides))
            return context.make_tuple(builder, out, made)

        return out(types.int64), generate

    return arrays


@intrinsic
def call_at(typingctx, address, S, slopes, rows, cols, batch, head, m0, n0, record):
    """Call the cfunc at an address."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [INT64] * 9)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate

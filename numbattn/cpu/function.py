"""A user's function of one score, compiled for tiles.

Kernels call it by its address, so that they are compiled once for all functions, and a function without a kernel.
"""

import ctypes
from functools import lru_cache

import numba
import numpy as np
from numba import types

from ..functions.compiled.element import check, differentiated_element
from ..functions.compiled.errors import naming
from ..functions.compiled.numpy_functions import INSTEAD
from ..functions.compiled.reads import by_read
from ..functions.compiled.reads import check as check_reads
from ..functions.compiled.strict import Compiler, compiled
from ..functions.compiled.wide import seen
from .compile import c_function
from .record import data_address, reader
from .tile import contiguous_view

ARGUMENTS = [ctypes.c_int64] * 9  # of a tile_function
SUMMED_ARGUMENTS = [ctypes.c_int64] * 11  # of a gradient_function


def tile_function(score, dtype, order=0):
    """The CFunction (S, F, rows, cols, batch, head, m0, n0, record) of a FunctionPart.

    S: address of a tile of keys x queries of this dtype, which the function is applied to in place. With order 1 its
    derivative is written to F, another such tile; with order 2 the second derivative, too, to the tile after F. record:
    the address of the arrays' `record_of`.
    """
    with naming(score._function):
        return _tile_function(score._identity_of(dtype), kinds_of(score._looked_up), np.dtype(dtype), order)


def kinds_of(arrays):
    """The types of the arrays."""
    return tuple([types.Array(numba.from_dtype(x.dtype), x.ndim, "A") for x in arrays])


@lru_cache(maxsize=256)
def _tile_function(identity, kinds, dtype, order):
    """identity: a function.Identity; kinds: the types of the arrays."""

    def make():
        for each in {min(order, 1), order}:
            check(identity, numba.from_dtype(dtype), kinds, each)
        real, arrays_of, hidden, has_second = dtype.type, reader(kinds), -np.inf, order > 1
        value_of, slope_of, bend_of = (differentiated_element(identity, each) for each in range(3))

        def apply(S, F, rows, cols, batch, head, m0, n0, record):
            S, arrays = contiguous_view(S, rows, cols, cols, real), arrays_of(record, 0)
            for j in range(rows):
                for i in range(cols):
                    S[j, i] = value_of(S[j, i], batch, head, m0 + i, n0 + j, arrays)

        def differentiate(S, F, rows, cols, batch, head, m0, n0, record):
            S, arrays = contiguous_view(S, rows, cols, cols, real), arrays_of(record, 0)
            F = contiguous_view(F, order * rows, cols, cols, real)
            for j in range(rows):
                for i in range(cols):
                    seen = S[j, i] != hidden  # elsewhere derivatives may be NaN
                    F[j, i] = slope_of(S[j, i], batch, head, m0 + i, n0 + j, arrays) if seen else 0
                    if has_second:
                        F[rows + j, i] = bend_of(S[j, i], batch, head, m0 + i, n0 + j, arrays) if seen else 0

        return differentiate if order else apply

    return c_function((identity.digest, kinds, dtype.str, order), ARGUMENTS, make)


def gradient_function(score, dtype):
    """The CFunction (S, dS, sums, elements, rows, cols, batch, head, m0, n0, record) of a FunctionPart, which adds to
    the gradients of its arrays.

    S, dS: addresses of tiles, before the function and after it; sums: address of `elements` float64, for all wanted
    gradients one after the other.
    """
    function = score._identity_of(dtype).function
    return _gradient_function(function, score._counted, kinds_of(score._looked_up), np.dtype(dtype))


@lru_cache(maxsize=256)
def _gradient_function(function, wanted, kinds, dtype):
    """function: a Frozen; kinds: the types of the arrays."""

    def make():
        check_reads(function, wanted, numba.from_dtype(dtype), kinds)
        real, hidden, arrays_of, derivative_of = dtype.type, -np.inf, reader(kinds), by_read(function, wanted)

        def add(S, dS, sums, elements, rows, cols, batch, head, m0, n0, record):
            S, dS = contiguous_view(S, rows, cols, cols, real), contiguous_view(dS, rows, cols, cols, real)
            sums, arrays = contiguous_view(sums, 1, elements, elements, np.float64), arrays_of(record, 0)
            for j in range(rows):
                for i in range(cols):
                    seen = dS[j, i] != 0 and S[j, i] != hidden  # elsewhere derivatives may be NaN
                    number, count = 0, 1 if seen else 0
                    while number < count:
                        slope, element, count = derivative_of(
                            S[j, i], batch, head, m0 + i, n0 + j, arrays, number
                        )
                        if number < count:
                            sums[0, element] += slope * dS[j, i]
                        number += 1

        return add

    return c_function((function.digest, wanted, kinds, dtype.str), SUMMED_ARGUMENTS, make)


# -------------------------------------------------------------------------------------------------------------- checks
checked = numba.njit(error_model="numpy", boundscheck=True, pipeline_class=Compiler)


def element(score, order=0):
    """The function of a FunctionPart, or its first or second derivative, for one (s, batch, head, i, j), as kernels
    compute it in float64."""
    function, record = tile_function(score, np.float64, order), record_of(score._looked_up)
    found = np.zeros(3)  # s or its function, and both derivatives

    def of_one(s, batch, head, i, j):
        found[0], address = s, found.ctypes.data
        function.ctypes(address, address + found.itemsize, 1, 1, batch, head, i, j, record.ctypes.data)
        return float(found[order])

    return of_one


def place_outside(function, arrays, shape, walks, S=None):
    """A place (batch, head, i, j) of `shape` where a Frozen reads outside of its arrays, or None. walks: steps along
    each axis; S: scores, for a function of these."""
    at, walk = np.zeros(4, np.int64), _walk(function, S is not None)
    for steps in walks:
        try:
            walk(np.zeros(1) if S is None else S, shape, steps, at, arrays)
        except IndexError:
            return at.tolist()
    return None


@lru_cache(maxsize=64)
def _walk(function, of_scores):
    of_user = checked(function.linked(checked, INSTEAD))

    @compiled
    def call_with_score(S, at, arrays):
        of_user(S[(at[2] + at[3]) % S.size], at[0], at[1], at[2], at[3], *seen(arrays))

    @compiled
    def call_without(S, at, arrays):
        of_user(at[0], at[1], at[2], at[3], *seen(arrays))

    call = call_with_score if of_scores else call_without

    @compiled
    def walk(S, shape, steps, at, arrays):
        """Call the function at places that are these steps apart, and at the last ones."""
        last = shape[0] - 1, shape[1] - 1, shape[2] - 1, shape[3] - 1
        for batch in range(0, last[0] + steps[0], steps[0]):
            at[0] = min(batch, last[0])
            for head in range(0, last[1] + steps[1], steps[1]):
                at[1] = min(head, last[1])
                for i in range(0, last[2] + steps[2], steps[2]):
                    at[2] = min(i, last[2])
                    for j in range(0, last[3] + steps[3], steps[3]):
                        at[3] = min(j, last[3])
                        call(S, at, arrays)

    return walk


def record_of(arrays):
    """Address, shape and strides of each array, one after the other, int64."""
    numbers = [number for x in arrays for number in (data_address(x), *x.shape, *x.strides)]
    return np.array(numbers or [0], np.int64)

"""A user's function of one score along tangents of its arrays, compiled for tiles: see `function`."""

import ctypes
from functools import lru_cache

import numba
import numpy as np
from numba import types

from ..functions.compiled.reads import along, by_read_along, check_along, check_by_read_along
from .compile import c_function
from .function import kinds_of
from .record import reader
from .tile import contiguous_view

ARGUMENTS = [ctypes.c_int64] * 10  # of an along_function
SUMMED_ARGUMENTS = [ctypes.c_int64] * 12  # of a gradient_along_function


def along_function(tangent, dtype, has_second):
    """The CFunction (S, tS, F, rows, cols, batch, head, m0, n0, record) of a ScoreTangent, which adds the tangent of
    the function along its arrays to tS, and with has_second that of its derivative to F.

    S, tS, F: addresses of tiles of keys x queries of this dtype, S before the function; record: of the arrays and their
    tangents.
    """
    score = tangent._score
    about = score._identity_of(dtype), score._counted, kinds_of(score._looked_up), tangent._tangents.dtype
    return _along_function(*about, np.dtype(dtype), has_second)


@lru_cache(maxsize=256)
def _along_function(identity, wanted, kinds, of_tangents, dtype, has_second):
    """identity: a function.Identity; kinds: the types of the arrays."""
    tangents = kind_of_tangents(of_tangents)

    def make():
        for order in range(1 + has_second):
            check_along(identity, wanted, numba.from_dtype(dtype), kinds, tangents, order)
        real, given_of, hidden = dtype.type, reader((*kinds, tangents)), -np.inf
        of_value, of_derivative = (along(identity, wanted, order) for order in range(2))

        def add(S, tS, F, rows, cols, batch, head, m0, n0, record):
            S, tS = contiguous_view(S, rows, cols, cols, real), contiguous_view(tS, rows, cols, cols, real)
            F, given = contiguous_view(F, rows, cols, cols, real), given_of(record, 0)
            for j in range(rows):
                for i in range(cols):
                    if S[j, i] != hidden:  # elsewhere tangents may be NaN
                        tS[j, i] += of_value(S[j, i], batch, head, m0 + i, n0 + j, given[:-1], given[-1])
                        if has_second:
                            F[j, i] += of_derivative(S[j, i], batch, head, m0 + i, n0 + j, given[:-1], given[-1])

        return add

    name = "along", identity.digest, wanted, kinds, of_tangents.str, dtype.str, has_second
    return c_function(name, ARGUMENTS, make)


def gradient_along_function(tangent, dtype):
    """The CFunction (S, dS, tdS, sums, elements, rows, cols, batch, head, m0, n0, record) of a ScoreTangent, which adds
    to the tangents of the gradients of the function's arrays.

    S, dS, tdS: addresses of tiles, S before the function, with its tangent in the tile after it, and the others after
    the function; sums: as for a `gradient_function`; record: as for an `along_function`.
    """
    score = tangent._score
    about = score._identity_of(dtype).function, score._counted, kinds_of(score._looked_up), tangent._tangents.dtype
    return _gradient_along_function(*about, np.dtype(dtype))


@lru_cache(maxsize=256)
def _gradient_along_function(function, wanted, kinds, of_tangents, dtype):
    """function: a Frozen; kinds: the types of the arrays."""
    tangents = kind_of_tangents(of_tangents)

    def make():
        check_by_read_along(function, wanted, numba.from_dtype(dtype), kinds, tangents)
        real, hidden, given_of = dtype.type, -np.inf, reader((*kinds, tangents))
        derivative_of = by_read_along(function, wanted)

        def add(S, dS, tdS, sums, elements, rows, cols, batch, head, m0, n0, record):
            S = contiguous_view(S, 2 * rows, cols, cols, real)
            dS, tdS = contiguous_view(dS, rows, cols, cols, real), contiguous_view(tdS, rows, cols, cols, real)
            sums, given = contiguous_view(sums, 1, elements, elements, np.float64), given_of(record, 0)
            for j in range(rows):
                for i in range(cols):
                    seen = (dS[j, i] != 0 or tdS[j, i] != 0) and S[j, i] != hidden  # elsewhere derivatives may be NaN
                    number, count = 0, 1 if seen else 0
                    while number < count:
                        slope, tslope, element, count = derivative_of(
                            S[j, i], S[rows + j, i], batch, head, m0 + i, n0 + j, given[:-1], given[-1], number
                        )
                        if number < count:
                            sums[0, element] += slope * tdS[j, i] + tslope * dS[j, i]
                        number += 1

        return add

    return c_function(("along", function.digest, wanted, kinds, of_tangents.str, dtype.str), SUMMED_ARGUMENTS, make)


def kind_of_tangents(dtype):
    return types.Array(numba.from_dtype(dtype), 1, "A")

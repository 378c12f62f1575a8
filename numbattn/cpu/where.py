"""A user's function as a mask, compiled for tiles; and the states of its blocks.

Kernels call it by its address, like functions of scores: see `function`.
"""

import ctypes
from functools import lru_cache

import numpy as np

from ..functions.compiled.errors import naming
from ..functions.compiled.truth import check, truth_element
from .compile import c_function
from .function import record_of
from .record import data_address, reader
from .tile import EMPTY, FULL, PARTIAL, contiguous_view

ARGUMENTS = [ctypes.c_int64] * 8


def tile_function(mask, dtype):
    """The CFunction (S, rows, cols, batch, head, m0, n0, record) of a Where.

    S: address of a tile of keys x queries of this dtype, which becomes -inf where it is hidden. record: the address of
    the arrays' `record_of`.
    """
    with naming(mask.function, of="mask"):
        return _tile_function(mask._identity, mask._kinds_of_arrays, np.dtype(dtype))


@lru_cache(maxsize=256)
def _tile_function(function, kinds, dtype):
    """function: a Frozen; kinds: the types of the arrays."""

    def make():
        check(function, kinds)
        real, arrays_of, hidden, test = dtype.type, reader(kinds), dtype.type(-np.inf), truth_element(function)

        def apply(S, rows, cols, batch, head, m0, n0, record):
            S, arrays = contiguous_view(S, rows, cols, cols, real), arrays_of(record, 0)
            for j in range(rows):
                for i in range(cols):
                    S[j, i] = S[j, i] if test(batch, head, m0 + i, n0 + j, arrays) else hidden

        return apply

    return c_function(("mask", function.digest, kinds, dtype.str), ARGUMENTS, make, "a function of a mask")


def states_of_blocks(mask):
    """The states of a fitted Where's blocks, uint8 (..., rows, columns)."""
    return mask._states_kept("cpu", lambda mask: _states(mask, mask.block_size))


def shown_by_function(mask):
    """The booleans of a fitted Where, (..., seqlen_q, seqlen_k)."""
    return _states(mask, 1) == FULL


def _states(mask, size):
    """The states of blocks of this size."""
    with naming(mask.function, of="mask"):
        function = _states_function(mask._identity, mask._kinds_of_arrays)
    states, record, at = np.empty(mask._blocks(size), np.uint8), record_of(mask.arrays), mask._at
    batches, heads = mask._matrices
    for number, matrix in enumerate(states.reshape(batches * heads, *states.shape[-2:]) if states.size else ()):
        batch, head = divmod(number, heads)
        function.ctypes(data_address(matrix), *mask._sizes, size, at.batch + batch, at.head + head, at.query, at.key,
                        data_address(record))  # fmt: skip
    return states


def one_test(mask):
    """The function (batch, head, i, j) of a Where, as kernels compute it."""
    with naming(mask.function, of="mask"):
        function = _states_function(mask._identity, mask._kinds_of_arrays)
    state, record = np.empty((1, 1), np.uint8), record_of(mask.arrays)

    def test(*place):
        function.ctypes(data_address(state), 1, 1, 1, *place, data_address(record))
        return bool(state[0, 0] == FULL)

    return test


@lru_cache(maxsize=256)
def _states_function(function, kinds):
    """The CFunction (states, seqlen_q, seqlen_k, size, batch, head, first_query, first_key, record)."""

    def make():
        check(function, kinds)
        arrays_of, test = reader(kinds), truth_element(function)

        def find(states, seqlen_q, seqlen_k, size, batch, head, first_query, first_key, record):
            rows, cols, arrays = (seqlen_q + size - 1) // size, (seqlen_k + size - 1) // size, arrays_of(record, 0)
            states = contiguous_view(states, rows, cols, cols, np.uint8)
            for r in range(rows):
                for c in range(cols):
                    m0, n0, some, every = r * size, c * size, False, True
                    for i in range(m0, min(m0 + size, seqlen_q)):
                        for j in range(n0, min(n0 + size, seqlen_k)):
                            if test(batch, head, first_query + i, first_key + j, arrays):
                                some = True
                            else:
                                every = False
                        if some and not every:
                            break
                    states[r, c] = FULL if every else PARTIAL if some else EMPTY

        return find

    name = "states", function.digest, kinds
    return c_function(name, [ctypes.c_int64] * 9, make, "a function of a mask")

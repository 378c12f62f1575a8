"""Bias: S + bias, which is read in place, in its own dtype."""

import numpy as np

from ...base.checks import DTYPES
from ...scores.bias import Bias
from ..operands import compact
from ..tile import float_of_bfloat16, float_of_float16, inline
from ..transposition import transpose
from .kind import CPUScoreKind, LoweredStep, aligned, matrix_at, matrix_of

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = range(4)
NUMBERS = dict(zip(DTYPES, (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)))
QUERIES_AT_ONCE = 8  # whose rows of a bias are read together: more would evict each other from the cache


def lower(part, problem, order, sums):
    x = aligned(compact(matrix_of(part)))
    return LoweredStep(x.shape, x.strides, numbers=(NUMBERS[x.dtype], 0)), x, None


@inline
def apply(S, slopes, row, batch, head, m0, n0):
    if row.one == FLOAT32:
        add_floats(S, matrix_at(row, np.float32), m0, n0)
    elif row.one == FLOAT64:
        add_floats(S, matrix_at(row, np.float64), m0, n0)
    elif row.one == FLOAT16:
        add_bits(S, matrix_at(row, np.uint16), float_of_float16, m0, n0)
    else:
        add_bits(S, matrix_at(row, np.uint16), float_of_bfloat16, m0, n0)


@inline
def add_floats(S, bias, m0, n0):
    if bias.shape[0] > 1 and bias.shape[1] > 1 and bias.strides[1] == bias.itemsize:
        transpose(S, bias[m0 : m0 + S.shape[1], n0 : n0 + S.shape[0]], S.dtype.type(1), True)
        return
    one_query, one_key = bias.shape[0] == 1, bias.shape[1] == 1
    step = S.shape[1] if one_query else QUERIES_AT_ONCE
    for first in range(0, S.shape[1], step):
        for j in range(S.shape[0]):
            for i in range(first, min(first + step, S.shape[1])):
                S[j, i] += S.dtype.type(bias[0 if one_query else m0 + i, 0 if one_key else n0 + j])


@inline
def add_bits(S, bits, float_of, m0, n0):
    """Add a bias in float16 or bfloat16, which Numba does not know on CPUs."""
    one_query, one_key = bits.shape[0] == 1, bits.shape[1] == 1
    step = S.shape[1] if one_query else QUERIES_AT_ONCE
    for first in range(0, S.shape[1], step):
        for j in range(S.shape[0]):
            for i in range(first, min(first + step, S.shape[1])):
                S[j, i] += S.dtype.type(float_of(bits[0 if one_query else m0 + i, 0 if one_key else n0 + j]))


@inline
def collect(dx, dS, S, row, batch, head, m0, n0):
    one_query, one_key = dx.shape[0] == 1, dx.shape[1] == 1
    for j in range(dS.shape[0]):
        for i in range(dS.shape[1]):
            dx[0 if one_query else m0 + i, 0 if one_key else n0 + j] += dS[j, i]


KIND = CPUScoreKind(Bias, lower, apply, collect)

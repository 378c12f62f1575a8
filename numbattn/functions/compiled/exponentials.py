"""exp and expm1 of an element, for loops that are vectorised."""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

LN_2_TAIL = 2.3190468138462996e-17  # ln(2) - math.log(2)


@intrinsic
def bits_of(typingctx, x):
    """The bits of a float as an integer."""
    out = types.int32 if x == types.float32 else types.int64
    return out(x), lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(out.bitwidth))


@intrinsic
def float_of(typingctx, bits):
    """The float with these bits."""
    out = types.float32 if bits == types.int32 else types.float64
    to = ir.FloatType() if out == types.float32 else ir.DoubleType()
    return out(bits), lambda context, builder, signature, args: builder.bitcast(args[0], to)


def exp(x):
    """e**x for x below 88, and 0 below the normal numbers; NaN stays NaN. Vectorised, unlike np.exp in Numba."""
    return np.exp(x)


def _polynomial_exp(dtype, integer, degree):
    """2**n e**r, n an integer, |r| <= ln(2) / 2: Taylor's polynomial for e**r, n added to the exponent's bits."""
    LOWEST, ZERO = dtype(np.finfo(dtype).minexp), dtype(0)
    LOG2_E, ROUND, LN_2, LN_2_REST, SHIFT, (first, *rest) = _numbers_of_exp(dtype, integer, degree)
    rest = tuple(rest)

    def exp(x):
        shifted = x * LOG2_E + ROUND  # n is in the last bits
        n = shifted - ROUND
        r = x - n * LN_2 - n * LN_2_REST
        y = first
        for c in rest:
            y = y * r + c
        y = float_of(integer(bits_of(y) + (bits_of(shifted) << SHIFT)))
        return ZERO if n < LOWEST else y if x == x else x  # adding to the bits of a NaN might make a number

    return exp


def _numbers_of_exp(dtype, integer, degree):
    """log2(e), the number whose addition rounds to integers, ln(2) in two parts, the first with so few digits that its
    product with n is exact, the bits of a mantissa, Taylor's polynomial for e**r, highest power first."""
    mantissa = np.finfo(dtype).nmant
    ln_2 = round(math.log(2) * 2 ** (mantissa - 12)) / 2 ** (mantissa - 12)
    polynomial = [dtype(1 / math.factorial(k)) for k in range(degree, -1, -1)]
    return (dtype(math.log2(math.e)), dtype(1.5 * 2**mantissa), dtype(ln_2), dtype(math.log(2) - ln_2 + LN_2_TAIL),
            integer(mantissa), polynomial)  # fmt: skip


def expm1(x):
    """exp(x) - 1 for |x| up to 40, clamped beyond. Vectorised, unlike np.expm1 in Numba."""
    return np.expm1(x)


def _polynomial_expm1(dtype, integer, degree):
    """2**n (e**r - 1) + (2**n - 1), as in _polynomial_exp: near 0, n is 0, and no digits are lost."""
    LOG2_E, ROUND, LN_2, LN_2_REST, SHIFT, (first, *rest, ONE) = _numbers_of_exp(dtype, integer, degree)
    rest, FARTHEST = tuple(rest), dtype(40)

    def expm1(x):
        inside = min(max(x, -FARTHEST), FARTHEST)
        shifted = inside * LOG2_E + ROUND
        n = shifted - ROUND
        r = inside - n * LN_2 - n * LN_2_REST
        y = first
        for c in rest:
            y = y * r + c
        power = float_of(integer(bits_of(ONE) + (bits_of(shifted) << SHIFT)))
        return power * (y * r) + (power - ONE) if x == x else x

    return expm1


DEGREES = {types.float32: (np.float32, np.int32, 7), types.float64: (np.float64, np.int64, 13)}
_EXP = {kind: _polynomial_exp(*about) for kind, about in DEGREES.items()}
_EXPM1 = {kind: _polynomial_expm1(*about) for kind, about in DEGREES.items()}


@overload(exp, jit_options={"fastmath": {"contract"}})
def _exp_overload(x):
    return _EXP.get(x)


@overload(expm1, jit_options={"fastmath": {"contract"}})
def _expm1_overload(x):
    return _EXPM1.get(x)

"""Logarithms, and powers of an element that is not negative, in loops that are vectorised."""

import math

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from .exponentials import DEGREES, _numbers_of_exp, bits_of, float_of

OPTIONS = {"fastmath": {"contract"}, "forceinline": True}  # or loops are not vectorised
TERMS = {types.float32: 6, types.float64: 12}  # of the series; the rest is below half a bit


def log1p(x):
    """log(1 + x) for x >= 0. Vectorised, unlike np.log1p in Numba."""
    return np.log1p(x)


def power(x, exponent):
    """x**exponent for x >= 0, and 0 where x is 0, for any exponent; infinity counts as a large number. Vectorised,
    unlike x**exponent in Numba."""
    return x**exponent if x > 0 else 0 * x


def _logarithm(dtype, integer, terms):
    """The device function of x = 2**n m, m from sqrt(1/2) to sqrt(2): n and log(m) = 2 (s + s**3 / 3 + s**5 / 5 + ...),
    s = (m - 1) / (m + 1)."""
    ONE, LEAST, SHIFT = dtype(1), integer(dtype(math.sqrt(0.5)).view(integer)), integer(np.finfo(dtype).nmant)
    first, *rest = [dtype(2 / (2 * k + 1)) for k in range(terms - 1, -1, -1)]
    rest = tuple(rest)

    @register_jitable(**OPTIONS)
    def logarithm(x):
        n = (bits_of(x) - LEAST) >> SHIFT
        m = float_of(integer(bits_of(x) - (n << SHIFT)))
        s = (m - ONE) / (m + ONE)
        z, y = s * s, first
        for c in rest:
            y = y * z + c
        return dtype(n), s * y

    return logarithm


def _series_log(dtype, integer, degree, terms):
    """log(x), and -inf below the normal numbers."""
    logarithm, ends = _logarithm(dtype, integer, terms), _with_ends(dtype)
    _, _, LN_2, LN_2_REST, _, _ = _numbers_of_exp(dtype, integer, degree)

    def log(x):
        n, log_m = logarithm(x)
        return ends(x, n * LN_2 + (n * LN_2_REST + log_m))

    return log


def _series_log2(dtype, integer, degree, terms):
    logarithm, ends, LOG2_E = _logarithm(dtype, integer, terms), _with_ends(dtype), dtype(math.log2(math.e))

    def log2(x):
        n, log_m = logarithm(x)
        return ends(x, n + LOG2_E * log_m)

    return log2


def _with_ends(dtype):
    """The device function (x, y) -> y, the logarithm of x, or what it is for an x that is no positive normal number."""
    ZERO, INFINITE, NAN, SMALLEST = map(dtype, (0, np.inf, np.nan, np.finfo(dtype).tiny))

    @register_jitable(**OPTIONS)
    def ends(x, y):
        y = y if x < INFINITE else x
        y = y if not x < SMALLEST else -INFINITE
        return y if not x < ZERO else NAN

    return ends


def _series_log1p(dtype, integer, degree, terms):
    ONE, INFINITE, logarithm = dtype(1), dtype(np.inf), _logarithm(dtype, integer, terms)
    _, _, LN_2, LN_2_REST, _, _ = _numbers_of_exp(dtype, integer, degree)

    def log1p(x):
        w = ONE + x
        n, log_m = logarithm(w)
        lost = (x - (w - ONE)) / w  # by rounding 1 + x
        y = n * LN_2 + (n * LN_2_REST + (log_m + lost))
        return y if x < INFINITE else x

    return log1p


def _power(dtype, integer, degree, terms):
    """2**k e**r, as in exp: k + r / log(2) = exponent log2(x), where the product of n and the leading bits of the
    exponent is exact."""
    about, logarithm = np.finfo(dtype), _logarithm(dtype, integer, terms)
    LOG2_E, ROUND, _, _, SHIFT, (first, *rest) = _numbers_of_exp(dtype, integer, degree)
    rest, LN_2, LEADING = tuple(rest), dtype(math.log(2)), integer(-1 << (about.nmant // 2 + 1))
    ZERO, BELOW, INFINITE, MOST, SMALLEST = map(dtype, (0, about.minexp - 1, np.inf, about.maxexp, about.tiny))

    def power(x, exponent):
        leading = float_of(integer(bits_of(exponent) & LEADING))
        n, log_m = logarithm(x)
        whole, part = leading * n, (exponent - leading) * n + exponent * (LOG2_E * log_m)
        k = whole + part
        k = k if k > BELOW else BELOW  # Python's min and max are not vectorised here
        k = k if k < MOST else MOST
        shifted = k + ROUND
        k = shifted - ROUND
        r, y = ((whole - k) + part) * LN_2, first
        for c in rest:
            y = y * r + c
        y = float_of(integer(bits_of(y) + (bits_of(shifted) << SHIFT)))
        y = ZERO if k == BELOW else y
        y = INFINITE if k == MOST else y
        y = ZERO if x < SMALLEST else y
        return y if x == x else x

    return power


LOG, LOG2, _LOG1P, _POWERS = ({kind: make(*DEGREES[kind], terms) for kind, terms in TERMS.items()}
                              for make in (_series_log, _series_log2, _series_log1p, _power))  # fmt: skip


@overload(log1p, jit_options=OPTIONS)
def _log1p_overload(x):
    return _LOG1P.get(x)


@overload(power, jit_options=OPTIONS)
def _power_overload(x, exponent):
    return _POWERS.get(x)

"""The function that kernels apply to a tile of t, compiled apart from them for each kind.

Kernels call it by its address: they are compiled once for all kinds, including a user's own functions. Hidden pairs,
and no others, have t = -inf; they become 0, or -inf for a logarithm.
"""

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...functions.compiled import elementary
from ...functions.compiled.elementwise import of_one
from ...functions.compiled.errors import naming
from ...functions.compiled.exponentials import exp
from ...functions.compiled.logarithms import log1p, power
from ...points import kinds
from ..compile import c_function
from ..tile import address_of, call_at, contiguous_view, inline

VALUE, DERIVATIVE, CURVATURE, LOGARITHM = "value", "derivative", "curvature", "log_value"
ORDERS = {VALUE: 0, DERIVATIVE: 1, CURVATURE: 2}
DIFFERENTIATED = {VALUE: DERIVATIVE, DERIVATIVE: CURVATURE}
ARGUMENTS = [ctypes.c_int64] * 6  # of a CFunction here


# --------------------------------------------------------------------------------------------------------------- steps
class Step(NamedTuple):
    """A kind as kernels take it."""

    function: int  # address
    numbers: Any  # float64, of the kind's own
    is_of_product: int  # whether t is a product


def step_of(kind, what, dtype):
    """The Step of a kind, and what has to live as long. what: VALUE, DERIVATIVE, CURVATURE or LOGARITHM."""
    if isinstance(kind, kinds.Derivative):
        return step_of(kind.of, DIFFERENTIATED[what], dtype)
    numbers = np.zeros(2)
    numbers[: len(kind.numbers)] = kind.numbers
    if isinstance(kind, kinds.Radial):
        with naming(kind.function.python):
            function = function_of_user(kind.function.of(dtype), what, dtype)
    else:
        degree = kind.degree if isinstance(kind, kinds.Polynomial) else 0
        function = function_of(type(kind), degree, what, dtype)
    return Step(function.address, numbers, int(kind.is_of_product)), function


NO_STEP = Step(0, np.zeros(2), 0)  # t alone


@inline
def apply(S, step, rows, columns):
    """Turn S, which holds t, into kappa, kappa' or the logarithm of kappa, with exp(rows + columns)."""
    numbers = address_of(step.numbers)
    call_at(step.function, (address_of(S), S.shape[0], S.shape[1], address_of(rows), address_of(columns), numbers))


# ------------------------------------------------------------------------------------------------------------ elements
# As points/kinds.py has it for arrays, for one number: the value of a kind, its derivative and its curvature, or those
# of its logarithm if it is an exponential, at t and with the two numbers of the kind. Literals have the dtype, or
# everything would be float64.
def gaussian(real, degree):
    half, zero = real(-0.5), real(0)
    return lambda t, a, b: half * t, lambda t, a, b: half, lambda t, a, b: zero


def exponential(real, degree):
    half, quarter, zero = real(-0.5), real(0.25), real(0)

    def log_curvature(t, a, b):
        return quarter / np.sqrt(t) / t if t > zero else zero                 # with the rounding of log_derivative

    return lambda t, a, b: -np.sqrt(t), lambda t, a, b: half / np.sqrt(t) if t > zero else zero, log_curvature


def of_power(real, degree):
    half, quarter, two, zero = real(0.5), real(0.25), real(2), real(0)

    def log_derivative(t, p, b):
        return -half * (power(t, half * p) / t) if t > zero else zero

    def log_curvature(t, p, b):
        return quarter * (two - p) * (power(t, half * p) / t / t) if t > zero else zero

    return lambda t, p, b: -power(t, half * p) / p, log_derivative, log_curvature


def matern32(real, degree):
    one, three, slope, zero = map(real, (1, 3, -1.5, 0))

    def value(t, a, b):
        r = np.sqrt(three * t)
        return (one + r) * exp(-r)

    def curvature(t, a, b):
        r = np.sqrt(three * t)
        return slope * slope * exp(-r) / r if t > zero else zero

    return value, lambda t, a, b: slope * exp(-np.sqrt(three * t)), curvature


def matern52(real, degree):
    one, five, third, slope, bend = map(real, (1, 5, 5 / 3, -5 / 6, 25 / 12))

    def value(t, a, b):
        r = np.sqrt(five * t)
        return (one + r + third * t) * exp(-r)

    def derivative(t, a, b):
        r = np.sqrt(five * t)
        return slope * (one + r) * exp(-r)

    return value, derivative, lambda t, a, b: bend * exp(-np.sqrt(five * t))


def cauchy(real, degree):
    one, two = real(1), real(2)

    def derivative(t, a, b):
        value = one / (one + t)
        return -value * value

    def curvature(t, a, b):
        value = one / (one + t)
        return two * value * value * value

    return lambda t, a, b: one / (one + t), derivative, curvature


def rational(real, degree):
    one, half, quarter, two = map(real, (1, 0.5, 0.25, 2))

    def value(t, alpha, b):
        return exp(-alpha * log1p(half * t / alpha))

    def derivative(t, alpha, b):
        return -half * exp(-(alpha + one) * log1p(half * t / alpha))

    def curvature(t, alpha, b):
        return quarter * (alpha + one) / alpha * exp(-(alpha + two) * log1p(half * t / alpha))

    return value, derivative, curvature


def polynomial(real, degree):
    def times_power(factor, exponent):
        factor = real(factor)

        def of_t(t, a, offset):
            x, y = t + offset, factor
            for _ in range(exponent):
                y *= x
            return y

        return of_t

    return times_power(1, degree), times_power(degree, degree - 1), times_power(degree * (degree - 1), degree - 2)


ELEMENTS = {
    kinds.Gaussian: gaussian, kinds.Exponential: exponential, kinds.Power: of_power, kinds.Matern32: matern32,
    kinds.Matern52: matern52, kinds.Cauchy: cauchy, kinds.RationalQuadratic: rational, kinds.Polynomial: polynomial,
}  # fmt: skip


def _with_logarithms(log_value, log_derivative, log_curvature, what):
    """The function (t, rows + columns, a, b) of one element, for a kind that is an exponential."""

    def curvature(t, more, a, b):
        slope = log_derivative(t, a, b)
        return (slope * slope + log_curvature(t, a, b)) * elementary.exp(log_value(t, a, b) + more)

    return {
        VALUE: lambda t, more, a, b: elementary.exp(log_value(t, a, b) + more),
        DERIVATIVE: lambda t, more, a, b: log_derivative(t, a, b) * elementary.exp(log_value(t, a, b) + more),
        CURVATURE: curvature,
        LOGARITHM: lambda t, more, a, b: log_value(t, a, b) + more,
    }[what]


@lru_cache(maxsize=256)
def function_of(kind, degree, what, dtype):
    """The CFunction (S, keys, queries, rows, columns, numbers) of a kind: all addresses but for two."""

    def make():
        elements = [*map(inline, ELEMENTS[kind](dtype.type, degree))]
        if kind.is_exponential:
            element = inline(_with_logarithms(*elements, what))
        else:
            of_t = elements[ORDERS[what]]
            element = inline(lambda t, more, a, b: of_t(t, a, b))
        return _over_tiles(element, what, dtype.type)

    name = f"{__name__}.{kind.__name__}", degree, what, dtype.str
    return c_function(name, ARGUMENTS, make, f"{kind.__name__} for points, {what}")


@lru_cache(maxsize=256)
def function_of_user(function, what, dtype):
    """The CFunction of a Frozen."""

    def make():
        of_number = of_one(function, ORDERS[what])
        zero, infinite = dtype.type(0), dtype.type(np.inf)

        @inline
        def slope(t, more, a, b):
            x = of_number(t)
            return x if t > zero or abs(x) < infinite else zero

        return _over_tiles(inline(lambda t, more, a, b: of_number(t)) if what == VALUE else slope, what, dtype.type)

    return c_function((function.digest, what, dtype.str), ARGUMENTS, make, "a function of points")


def _over_tiles(element, what, real):
    hidden, nothing = real(-np.inf), real(-np.inf if what == LOGARITHM else 0)

    def apply(S, keys, queries, rows, columns, numbers):
        S, numbers = contiguous_view(S, keys, queries, queries, real), contiguous_view(numbers, 1, 2, 2, np.float64)[0]
        rows = contiguous_view(rows, 1, queries, queries, real)[0]
        columns = contiguous_view(columns, 1, keys, keys, real)[0]
        a, b = real(numbers[0]), real(numbers[1])
        for j in range(keys):
            for i in range(queries):
                t = S[j, i]
                x = element(t, rows[i] + columns[j], a, b)
                S[j, i] = nothing if t == hidden else x

    return apply

"""Replacements for NumPy's functions of numbers and dual numbers in compiled code: Numba lacks some of them on CPUs or
on GPUs."""

import math
import operator

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from .dual import FUNCTIONS, LN_2, ONE, Dual, rule_of_two, value
from .elementary import ELEMENTARY, exp, log1p
from .strict import power, round_to

ALL_WHOLE = 2.0**52  # a float from here on is an integer


@register_jitable
def where(condition, x, y):
    return x if condition else y


@register_jitable
def minimum(x, y):
    return x if x <= y or x != x else y


@register_jitable
def maximum(x, y):
    return x if x >= y or x != x else y


@register_jitable
def fmin(x, y):
    return x if x <= y or y != y else y


@register_jitable
def fmax(x, y):
    return x if x >= y or y != y else y


@register_jitable
def clip(x, low, high):
    return minimum(maximum(x, low), high)


@register_jitable
def sign(x):
    return 1 if x > 0 else -1 if x < 0 else 0 * x


@register_jitable
def square(x):
    return x * x


def logaddexp(x, y):
    return np.logaddexp(x, y)


@overload(logaddexp)
def _logaddexp(x, y):
    if not isinstance(x, Dual) and not isinstance(y, Dual):
        def of_numbers(x, y):
            larger = float(max(x, y))
            return larger + log1p(exp(-abs(float(x) - float(y)))) if x != y else larger + type(larger)(LN_2)

        return of_numbers


rule_of_two(logaddexp, lambda x, y, z: exp(x - z) if x != z else ONE,
            lambda x, y, z: exp(y - z) if y != z else ONE)  # fmt: skip


def reciprocal(x):
    return 1 / x


@overload(reciprocal)
def _reciprocal(x):
    return (lambda x: 1 / x) if isinstance(x, types.Float | Dual) else None


def whole(to_integer):
    """np.floor and the like: floats that are integers."""

    def function(x):
        return float(to_integer(x))

    @overload(function)
    def of_number(x):
        if isinstance(x, Dual):
            return lambda x: function(value(x))
        if isinstance(x, types.Float):
            kind = x
            return lambda x: kind(to_integer(x)) if abs(x) < ALL_WHOLE else x
        return lambda x: float(x)

    return function


floor, ceil, trunc, rint = map(whole, (math.floor, math.ceil, math.trunc, round))


@register_jitable
def rounded(x, decimals=0):
    return rint(x) if decimals == 0 else round_to(x, decimals)


INSTEAD = {  # replacements, by NumPy's names
    np.where: where, np.clip: clip, np.sign: sign, np.square: square, np.logaddexp: logaddexp,
    np.minimum: minimum, np.maximum: maximum, np.fmin: fmin, np.fmax: fmax,
    np.floor: floor, np.ceil: ceil, np.trunc: trunc, np.rint: rint, np.round: rounded, np.around: rounded,
    np.reciprocal: reciprocal,
    np.abs: abs, np.negative: operator.neg, np.positive: operator.pos, np.add: operator.add,
    np.subtract: operator.sub, np.multiply: operator.mul, np.divide: operator.truediv, np.power: power, math.pow: power,
    np.mod: operator.mod, np.floor_divide: operator.floordiv, np.divmod: divmod, np.logical_not: operator.not_,
    np.less: operator.lt, np.less_equal: operator.le, np.greater: operator.gt, np.greater_equal: operator.ge,
    np.equal: operator.eq, np.not_equal: operator.ne, np.left_shift: operator.lshift, np.right_shift: operator.rshift,
    np.bitwise_and: operator.and_, np.bitwise_or: operator.or_, np.bitwise_xor: operator.xor,
    np.arcsin: math.asin, np.arccos: math.acos, np.arctan: math.atan, np.arctan2: math.atan2,
    np.arcsinh: math.asinh, np.arccosh: math.acosh, np.arctanh: math.atanh,
    np.deg2rad: math.radians, np.rad2deg: math.degrees,
}  # fmt: skip
OF_ONE_NAME = *FUNCTIONS, "isnan", "isinf", "isfinite", "copysign", "hypot"
INSTEAD |= {getattr(np, name): getattr(math, name) for name in OF_ONE_NAME if hasattr(np, name) and hasattr(math, name)}
INSTEAD |= {getattr(module, name): function for module in (math, np) for name, function in ELEMENTARY.items()}

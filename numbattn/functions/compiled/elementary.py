"""Elementary functions as a user's own functions call them: on CPUs they are vectorised, unlike those of math in Numba;
on GPUs they are those of math.

Where math raises errors they are inf or NaN, as NumPy's. Numbers below the normal ones count as 0.
"""

import math

import numpy as np
from numba import types
from numba.extending import overload

from . import exponentials, logarithms
from .dual import FUNCTIONS, REAL, rule_of_one
from .exponentials import DEGREES
from .logarithms import OPTIONS
from .strict import power


def elementary(name, of_kind):
    """math's function of this name. of_kind: Numba's type of a float -> the function on CPUs."""
    in_math = getattr(math, name)

    def function(x):
        return in_math(x)

    @overload(function, target="cpu", jit_options=OPTIONS)
    def on_cpu(x):
        return (lambda x: function(np.float64(x))) if isinstance(x, types.Integer | types.Boolean) else of_kind.get(x)

    @overload(function, target="cuda")
    def on_gpu(x):
        return (lambda x: in_math(x)) if isinstance(x, REAL) else None

    function.__name__ = name  # that of a global of this module, by which numba-cuda finds it
    rule_of_one(function, FUNCTIONS[name])
    return function


def of_kinds(make):
    return {kind: make(dtype) for kind, (dtype, *_) in DEGREES.items()}


def _exp(dtype):
    LARGEST, INFINITE, of_smaller = dtype(math.log(np.finfo(dtype).max)), dtype(np.inf), exponentials.exp

    def exp(x):
        y = of_smaller(x)
        return INFINITE if x > LARGEST else y

    return exp


def _expm1(dtype):
    FAR, of_smaller = dtype(40), exponentials.expm1

    def expm1(x):
        y, z = of_smaller(x), exp(x)
        return z if x > FAR else y

    return expm1


def _tanh(dtype):
    """With e = exp(2 x) - 1, tanh(x) = e / (e + 2)."""
    TWO, expm1 = dtype(2), exponentials.expm1

    def tanh(x):
        e = expm1(TWO * x)
        return e / (e + TWO)

    return tanh


def _log1p(dtype):
    (LEAST, INFINITE, NAN), of_larger = map(dtype, (-1, np.inf, np.nan)), logarithms.log1p

    def log1p(x):
        y = of_larger(x)
        y = y if x > LEAST else -INFINITE
        return y if x >= LEAST else NAN

    return log1p


exp = elementary("exp", of_kinds(_exp))
expm1 = elementary("expm1", of_kinds(_expm1))
tanh = elementary("tanh", of_kinds(_tanh))
log = elementary("log", logarithms.LOG)
log2 = elementary("log2", logarithms.LOG2)
log1p = elementary("log1p", of_kinds(_log1p))
ELEMENTARY = {function.__name__: function for function in (exp, expm1, tanh, log, log2, log1p)}


@overload(power, target="cpu", jit_options=OPTIONS)
def power_of_float32(x, y):
    """In float64, where it is exact enough."""
    if x != types.float32 or y != types.float32:
        return None
    of_positive, FAR = logarithms.power, 1e30  # an even number, as is infinity

    def power(x, y):
        size, exponent = abs(np.float64(x)), np.float64(y)
        exponent = exponent if exponent < FAR else FAR
        exponent = exponent if exponent > -FAR else -FAR
        half = exponent / 2
        z = of_positive(size, exponent)
        z = (np.inf if exponent < 0 else z) if size == 0 else z
        z = (np.inf if exponent > 0 else 0.0) if size == np.inf else z
        is_whole, is_odd = np.floor(exponent) == exponent, np.floor(half) != half
        z = z if x >= 0 or not is_whole or not is_odd else -z
        z = z if x >= 0 or size == np.inf or is_whole else np.nan
        z = z if y == y else np.nan
        z = x if y == 1 else x * x if y == 2 else z  # which is all that is left if y is a constant
        return np.float32(1.0 if exponent == 0 or x == 1 else z)

    return power

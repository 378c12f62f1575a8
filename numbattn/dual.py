"""Dual numbers for Numba: a value and its derivative, so that a function of numbers also gives its derivative.

A function that is called with a Dual is compiled for it, for CPUs and GPUs alike: operators and the functions of math
and NumPy follow the rules of calculus, comparisons compare values, and branches are those of the value. Called with a
Shifted it is only compiled if its derivative is 1 everywhere.
"""

import math
import operator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.core.errors import NumbaError
from numba.core.typeconv import Conversion
from numba.extending import intrinsic, lower_cast, models, overload, register_model

LN_2, SQRT_PI = math.log(2), math.sqrt(math.pi)
REAL = (types.Float, types.Integer, types.Boolean)
compiled = njit(error_model="numpy")


class Dual(types.Type):
    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(f"Dual({dtype})")

    def unify(self, typingctx, other):
        """A branch may give a number: its derivative is 0."""
        return self if isinstance(other, REAL) else None

    def can_convert_from(self, typingctx, other):
        """Not as well as to another number: a call with numbers is not one with a Dual."""
        return Conversion.unsafe if isinstance(other, REAL) else None


@register_model(Dual)
class DualModel(models.StructModel):
    def __init__(self, dmm, kind):
        super().__init__(dmm, kind, [("value", kind.dtype), ("slope", kind.dtype)])


@intrinsic
def dual(typingctx, value, slope):
    """A Dual of two floats."""
    out = Dual(value)

    def generate(context, builder, signature, args):
        made = cgutils.create_struct_proxy(out)(context, builder)
        made.value, made.slope = args
        return made._getvalue()

    return out(value, value), generate


def part_of(name):
    @intrinsic
    def part(typingctx, x):
        def generate(context, builder, signature, args):
            return getattr(cgutils.create_struct_proxy(x)(context, builder, args[0]), name)

        return x.dtype(x), generate

    return part


value, slope = part_of("value"), part_of("slope")


def slope_of(x):
    """The derivative of a Dual; 0 of a number."""


@overload(slope_of)
def _slope_of(x):
    return (lambda x: slope(x)) if isinstance(x, Dual) else (lambda x: 0.0)


@lower_cast(types.Number, Dual)
@lower_cast(types.Boolean, Dual)
def number_to_dual(context, builder, given, out, number):
    made = cgutils.create_struct_proxy(out)(context, builder)
    made.value = context.cast(builder, number, given, out.dtype)
    made.slope = context.get_constant(out.dtype, 0)
    return made._getvalue()


# --------------------------------------------------------------------------------------------------- of one, of two
def rule_of_one(function, rule):
    """rule(x, dx) -> value, slope"""
    rule = compiled(rule)

    @overload(function)
    def of_dual(x):
        if isinstance(x, Dual):
            return lambda x: dual(*rule(value(x), slope(x)))


def rule_of_two(function, rule):
    """rule(x, dx, y, dy) -> value, slope"""
    rule = compiled(rule)

    @overload(function)
    def of_duals(x, y):
        if isinstance(x, Dual) and isinstance(y, Dual):
            return lambda x, y: dual(*rule(value(x), slope(x), value(y), slope(y)))
        if isinstance(x, Dual) and isinstance(y, REAL):
            kind = x.dtype
            return lambda x, y: dual(*rule(value(x), slope(x), kind(y), kind(0)))
        if isinstance(x, REAL) and isinstance(y, Dual):
            kind = y.dtype
            return lambda x, y: dual(*rule(kind(x), kind(0), value(y), slope(y)))


def comparison(function):
    @overload(function)
    def of_duals(x, y):
        if isinstance(x, Dual) and isinstance(y, Dual):
            return lambda x, y: function(value(x), value(y))
        if isinstance(x, Dual) and isinstance(y, REAL):
            return lambda x, y: function(value(x), y)
        if isinstance(x, REAL) and isinstance(y, Dual):
            return lambda x, y: function(x, value(y))


for function in operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne:
    comparison(function)
rule_of_one(operator.pos, lambda x, dx: (x, dx))
rule_of_one(operator.neg, lambda x, dx: (-x, -dx))
rule_of_one(abs, lambda x, dx: (abs(x), dx if x >= 0 else -dx))
rule_of_one(float, lambda x, dx: (x, dx))
FUNCTIONS = {
    "exp": lambda x, dx: (math.exp(x), math.exp(x) * dx),
    "exp2": lambda x, dx: (2.0**x, 2.0**x * LN_2 * dx),
    "log": lambda x, dx: (math.log(x), dx / x),
    "log1p": lambda x, dx: (math.log1p(x), dx / (1 + x)),
    "expm1": lambda x, dx: (math.expm1(x), math.exp(x) * dx),
    "sqrt": lambda x, dx: (math.sqrt(x), dx / (2 * math.sqrt(x))),
    "tanh": lambda x, dx: (math.tanh(x), (1 - math.tanh(x) ** 2) * dx),
    "sin": lambda x, dx: (math.sin(x), math.cos(x) * dx),
    "cos": lambda x, dx: (math.cos(x), -math.sin(x) * dx),
    "atan": lambda x, dx: (math.atan(x), dx / (1 + x * x)),
    "erf": lambda x, dx: (math.erf(x), 2 / SQRT_PI * math.exp(-x * x) * dx),
    "fabs": lambda x, dx: (abs(x), dx if x >= 0 else -dx),
}
for name, rule in FUNCTIONS.items():
    for module in math, np:
        if hasattr(module, name):
            rule_of_one(getattr(module, name), rule)


def power(x, dx, y, dy):
    found = x**y
    return found, (y * x ** (y - 1) * dx if dx != 0 else 0 * dx) + (found * math.log(x) * dy if dy != 0 else 0 * dy)


OPERATORS = {
    "add": lambda x, dx, y, dy: (x + y, dx + dy),
    "sub": lambda x, dx, y, dy: (x - y, dx - dy),
    "mul": lambda x, dx, y, dy: (x * y, dx * y + x * dy),
    "truediv": lambda x, dx, y, dy: (x / y, (dx - x / y * dy) / y),
    "pow": power,
}
for name, rule in OPERATORS.items():
    rule_of_two(getattr(operator, name), rule)
    rule_of_two(getattr(operator, f"i{name}"), rule)
for smaller in min, np.minimum:
    rule_of_two(smaller, lambda x, dx, y, dy: (x, dx) if x <= y else (y, dy))
for larger in max, np.maximum:
    rule_of_two(larger, lambda x, dx, y, dy: (x, dx) if x >= y else (y, dy))


# ---------------------------------------------------------------------------------------------------------- functions
@contextmanager
def naming(*functions):
    """Where Numba cannot compile, say which functions of the user's own it may be."""
    try:
        yield
    except NumbaError as error:
        if not functions:
            raise
        codes = [(f.__qualname__, f.__code__.co_firstlineno, f.__code__.co_filename) for f in functions]
        where = " or ".join(f"{name}, line {line} of {file}" for name, line, file in codes)
        raise TypeError(f"score: Numba cannot compile {where}: {error}") from None


@lru_cache(maxsize=256)
def derivative_of(function):
    """The derivative by the first argument, compiled for dual numbers."""
    value_of = compiled(function)

    @compiled
    def derivative(s, *others):
        return slope_of(value_of(dual(s, type(s)(1)), *others))

    return derivative


class Shifted(types.Type):
    """The first argument plus what does not depend on it. Nothing else can be done with it."""

    def __init__(self):
        super().__init__("Shifted")


SHIFTED = Shifted()
register_model(Shifted)(models.OpaqueModel)


@intrinsic
def shifted(typingctx):
    """A Shifted. It has no value: only its type is of use."""
    return SHIFTED(), lambda context, builder, signature, args: context.get_dummy_value()


def keeps_shifted(function, *, first_only):
    @overload(function)
    def of_shifted(x, y):
        if (x == SHIFTED and isinstance(y, REAL)) or (not first_only and isinstance(x, REAL) and y == SHIFTED):
            return lambda x, y: shifted()


for function in operator.add, operator.iadd:
    keeps_shifted(function, first_only=False)
for function in operator.sub, operator.isub:
    keeps_shifted(function, first_only=True)


@lru_cache(maxsize=256)
def is_additive(function, kinds):
    """Whether function(s, ...) - s does not depend on s, as types tell. kinds: those of its other arguments."""
    value_of = compiled(function)
    try:
        value_of.compile((SHIFTED, *kinds))
    except NumbaError:
        return False
    (found,) = value_of.nopython_signatures
    return found.return_type == SHIFTED

"""Dual numbers for Numba: a value and its derivative, so that a function of numbers also gives its derivative.

A function that is called with a Dual is compiled for it: operators and the functions of math and NumPy follow the
rules of calculus, comparisons compare values, and branches are those of the value.
"""

import math
import operator

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.core.typeconv import Conversion
from numba.extending import intrinsic, lower_cast, models, overload, register_model

LN_2, SQRT_PI = math.log(2), math.sqrt(math.pi)
REAL = (types.Float, types.Integer, types.Boolean)


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
    rule = njit(error_model="numpy")(rule)

    @overload(function)
    def of_dual(x):
        if isinstance(x, Dual):
            return lambda x: dual(*rule(value(x), slope(x)))


def rule_of_two(function, rule):
    """rule(x, dx, y, dy) -> value, slope"""
    rule = njit(error_model="numpy")(rule)

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

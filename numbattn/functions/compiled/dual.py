"""Dual numbers for Numba: a value and its derivative, so that a function of numbers also gives its derivative.

A function that is called with a Dual is compiled for it, for CPUs and GPUs alike: operators and the functions of math
follow the rules of calculus, comparisons compare values, and branches are those of the value. NumPy's functions are in
`numpy_functions`. Value and slope may be Duals themselves: so a derivative is differentiated once more, and the rules
are written for both.
"""

import math
import operator
from functools import lru_cache

import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.typeconv import Conversion
from numba.extending import intrinsic, lower_cast, models, overload, register_model

from .strict import compiled, power, round_to

REAL = (types.Float, types.Integer, types.Boolean)
LN_2, LN_10, SQRT_PI = math.log(2), math.log(10), math.sqrt(math.pi)
ZERO, HALF, ONE = map(np.float32, (0, 0.5, 1))  # numbers combined with them keep their type


class Dual(types.Type):
    is_dual = True

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(f"Dual({dtype})")

    def unify(self, typingctx, other):
        """A branch may give a number, whose derivative is 0."""
        return self if isinstance(other, REAL) else None

    def can_convert_from(self, typingctx, other):
        """A worse conversion than to another number, so that calls with numbers do not become calls with Duals."""
        return Conversion.unsafe if isinstance(other, REAL) else None


@register_model(Dual)
class DualModel(models.StructModel):
    def __init__(self, dmm, kind):
        super().__init__(dmm, kind, [("value", kind.dtype), ("slope", kind.dtype)])


@intrinsic
def dual(typingctx, value, slope):
    """A Dual of two floats, or of two Duals."""
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


def value_of(x):
    """The value of a Dual; a number itself."""


@overload(value_of)
def _value_of(x):
    return (lambda x: value(x)) if isinstance(x, Dual) else (lambda x: x)


@lower_cast(types.Number, Dual)
@lower_cast(types.Boolean, Dual)
def number_to_dual(context, builder, given, out, number):
    made = cgutils.create_struct_proxy(out)(context, builder)
    made.value = context.cast(builder, number, given, out.dtype)
    made.slope = context.cast(builder, context.get_constant(types.int64, 0), types.int64, out.dtype)
    return made._getvalue()


@intrinsic
def like(typingctx, x, y):
    """The number y in the type of x."""
    return x(x, y), lambda context, builder, signature, args: context.cast(builder, args[1], y, x)


def real(x, y):
    """The number y, a constant, in the type of the floats in x."""


@overload(real)
def _real(x, y):
    return (lambda x, y: real(value(x), y)) if isinstance(x, Dual) else (lambda x, y: like(x, y))


# --------------------------------------------------------------------------------------------------- of one, of two
def term(partial, change):
    """A term of the chain rule. A change of 0 adds nothing, even if its factor is inf or NaN."""


@overload(term)
def _term(partial, change):
    if not isinstance(change, Dual):
        return lambda partial, change: partial * change if change != 0 else change
    if not isinstance(partial, Dual):
        return lambda partial, change: dual(term(partial, value(change)), term(partial, slope(change)))
    return lambda partial, change: dual(
        term(value(partial), value(change)), term(value(partial), slope(change)) + term(slope(partial), value(change))
    )


def depth_of(x):
    """How deeply a type nests Duals."""
    return 1 + depth_of(x.dtype) if isinstance(x, Dual) else 0


def at_each_depth(partial):
    """A partial derivative, compiled apart for each depth of Duals, since it may call its own function on inner Duals:
    on a GPU functions do not call themselves, even for other types."""
    return lru_cache(maxsize=None)(lambda depth: compiled(partial))


def rule_of_one(function, partial):
    """partial(x, z): the derivative of z = function(x)."""
    partial_at = at_each_depth(partial)

    @overload(function)
    def of_dual(x):
        if isinstance(x, Dual):
            partial = partial_at(depth_of(x))

            def rule(x):
                z = like(value(x), function(value(x)))
                return dual(z, term(partial(value(x), z), slope(x)))

            return rule


def rule_of_two(function, by_x, by_y, *others):
    """by_x(x, y, z) and by_y(x, y, z): the derivatives of z = function(x, y); others: equal functions."""
    by_x_at, by_y_at = at_each_depth(by_x), at_each_depth(by_y)

    def of_duals(x, y):
        depth = max(depth_of(x), depth_of(y))
        by_x, by_y = by_x_at(depth), by_y_at(depth)
        if isinstance(x, Dual) and isinstance(y, Dual):
            def rule(x, y):
                a, b = value(x), like(value(x), value(y))
                z = like(a, function(a, b))
                return dual(z, term(by_x(a, b, z), slope(x)) + term(by_y(a, b, z), like(a, slope(y))))

            return rule
        if isinstance(x, Dual) and isinstance(y, REAL):
            def rule_by_x(x, y):
                a, b = value(x), like(value(x), y)
                z = like(a, function(a, b))
                return dual(z, term(by_x(a, b, z), slope(x)))

            return rule_by_x
        if isinstance(x, REAL) and isinstance(y, Dual):
            def rule_by_y(x, y):
                a, b = like(value(y), x), value(y)
                z = like(b, function(a, b))
                return dual(z, term(by_y(a, b, z), slope(y)))

            return rule_by_y

    for each in function, *others:
        overload(each)(of_duals)


def of_values(*functions):
    """Functions whose derivative is 0 wherever there is one."""

    def define(function):
        @overload(function)
        def of_one(x):
            if isinstance(x, Dual):
                return lambda x: function(value(x))

        @overload(function)
        def of_two(x, y):
            if isinstance(x, Dual) and isinstance(y, Dual):
                return lambda x, y: function(value(x), value(y))
            if isinstance(x, Dual) and isinstance(y, REAL):
                return lambda x, y: function(value(x), y)
            if isinstance(x, REAL) and isinstance(y, Dual):
                return lambda x, y: function(x, value(y))

    for function in functions:
        define(function)


def chosen_by(first):
    """The meaning of min and max: as in Python, the first of two equal ones."""

    def of_two(x, y):
        if isinstance(x, Dual) or isinstance(y, Dual):
            return lambda x, y: y if first(y, x) else x

    return of_two


of_values(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.not_)
of_values(operator.floordiv, operator.ifloordiv, bool, int, round, round_to, math.floor, math.ceil, math.trunc)
of_values(math.isnan, math.isinf, math.isfinite)
FUNCTIONS = {  # of math: their derivatives by x, where they are z
    "exp": lambda x, z: z,
    "exp2": lambda x, z: z * real(x, LN_2),
    "expm1": lambda x, z: z + ONE,
    "log": lambda x, z: ONE / x,
    "log2": lambda x, z: ONE / (x * real(x, LN_2)),
    "log10": lambda x, z: ONE / (x * real(x, LN_10)),
    "log1p": lambda x, z: ONE / (ONE + x),
    "sqrt": lambda x, z: HALF / z,
    "sin": lambda x, z: math.cos(x),
    "cos": lambda x, z: -math.sin(x),
    "tan": lambda x, z: ONE + z * z,
    "asin": lambda x, z: ONE / math.sqrt(ONE - x * x),
    "acos": lambda x, z: -ONE / math.sqrt(ONE - x * x),
    "atan": lambda x, z: ONE / (ONE + x * x),
    "sinh": lambda x, z: math.cosh(x),
    "cosh": lambda x, z: math.sinh(x),
    "tanh": lambda x, z: ONE - z * z,
    "asinh": lambda x, z: ONE / math.sqrt(x * x + ONE),
    "acosh": lambda x, z: ONE / math.sqrt(x * x - ONE),
    "atanh": lambda x, z: ONE / (ONE - x * x),
    "erf": lambda x, z: real(x, 2 / SQRT_PI) * math.exp(-x * x),
    "erfc": lambda x, z: real(x, -2 / SQRT_PI) * math.exp(-x * x),
    "fabs": lambda x, z: ONE if x >= 0 else -ONE,
    "degrees": lambda x, z: real(x, 180 / math.pi),
    "radians": lambda x, z: real(x, math.pi / 180),
}
for name, partial in FUNCTIONS.items():
    if hasattr(math, name):
        rule_of_one(getattr(math, name), partial)
rule_of_one(operator.pos, lambda x, z: ONE)
rule_of_one(operator.neg, lambda x, z: -ONE)
rule_of_one(abs, FUNCTIONS["fabs"])
rule_of_one(float, lambda x, z: ONE)

rule_of_two(operator.add, lambda x, y, z: ONE, lambda x, y, z: ONE, operator.iadd)
rule_of_two(operator.sub, lambda x, y, z: ONE, lambda x, y, z: -ONE, operator.isub)
rule_of_two(operator.mul, lambda x, y, z: y, lambda x, y, z: x, operator.imul)
rule_of_two(operator.truediv, lambda x, y, z: ONE / y, lambda x, y, z: -z / y, operator.itruediv)
rule_of_two(operator.mod, lambda x, y, z: ONE, lambda x, y, z: (z - x) / y, operator.imod)
rule_of_two(
    power,
    lambda x, y, z: y * power(x, y - ONE) if y != 0 else ZERO,
    lambda x, y, z: z * math.log(x) if z != 0 else ZERO,
    operator.pow, operator.ipow, pow, math.pow,
)  # fmt: skip
rule_of_two(math.atan2, lambda x, y, z: y / (x * x + y * y), lambda x, y, z: -x / (x * x + y * y))
rule_of_two(math.hypot, lambda x, y, z: x / z if z != 0 else z, lambda x, y, z: y / z if z != 0 else z)
rule_of_two(math.copysign, lambda x, y, z: ONE if (x < 0) == (z < 0) else -ONE, lambda x, y, z: ZERO)
overload(min)(chosen_by(operator.lt))
overload(max)(chosen_by(operator.gt))


@overload(divmod)
def _divided(x, y):
    return (lambda x, y: (x // y, x % y)) if isinstance(x, Dual) or isinstance(y, Dual) else None


@overload(min)
def _least_of_three(x, y, z):
    return (lambda x, y, z: min(min(x, y), z)) if any(isinstance(a, Dual) for a in (x, y, z)) else None


@overload(max)
def _largest_of_three(x, y, z):
    return (lambda x, y, z: max(max(x, y), z)) if any(isinstance(a, Dual) for a in (x, y, z)) else None

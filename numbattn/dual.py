"""Dual numbers for Numba: a value and its derivative, so that a function of numbers also gives its derivative.

A function that is called with a Dual is compiled for it, for CPUs and GPUs alike: operators and the functions of math
and NumPy follow the rules of calculus, comparisons compare values, and branches are those of the value. Called with a
Shifted it is only compiled if its derivative is 1 everywhere.
"""

import math
import operator
import os
import re
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.errors import NumbaError, TypingError
from numba.core.typeconv import Conversion
from numba.extending import intrinsic, lower_cast, models, overload, register_jitable, register_model

from .checks import UserTypeError
from .compiling import check_setting
from .functions import IS_A_MASK
from .strict import REFUSED, compiled, power, round_to

REAL = (types.Float, types.Integer, types.Boolean)
LN_2, LN_10, SQRT_PI = math.log(2), math.log(10), math.sqrt(math.pi)
ZERO, HALF, ONE = map(np.float32, (0, 0.5, 1))  # so that what they are combined with keeps its type
RETURNS_NONE = "may return None: let it return a number on every way, s, say"
ALL_WHOLE = 2.0**52  # a float from here on is an integer


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
@compiled
def term(partial, slope):
    """Of the chain rule. What does not depend on s adds nothing, be its factor inf or NaN."""
    return partial * slope if slope != 0 else slope


def rule_of_one(function, partial):
    """partial(x, z): the derivative of z = function(x)."""
    partial = compiled(partial)

    @overload(function)
    def of_dual(x):
        if isinstance(x, Dual):
            kind = x.dtype

            def rule(x):
                z = kind(function(value(x)))
                return dual(z, term(partial(value(x), z), slope(x)))

            return rule


def rule_of_two(function, by_x, by_y, *others):
    """by_x(x, y, z) and by_y(x, y, z): the derivatives of z = function(x, y); others: that do the same."""
    by_x, by_y = compiled(by_x), compiled(by_y)

    def of_duals(x, y):
        if isinstance(x, Dual) and isinstance(y, Dual):
            kind = x.dtype

            def rule(x, y):
                a, b = value(x), kind(value(y))
                z = kind(function(a, b))
                return dual(z, term(by_x(a, b, z), slope(x)) + term(by_y(a, b, z), kind(slope(y))))

            return rule
        if isinstance(x, Dual) and isinstance(y, REAL):
            kind = x.dtype

            def rule_by_x(x, y):
                a, b = value(x), kind(y)
                z = kind(function(a, b))
                return dual(z, term(by_x(a, b, z), slope(x)))

            return rule_by_x
        if isinstance(x, REAL) and isinstance(y, Dual):
            kind = y.dtype

            def rule_by_y(x, y):
                a, b = kind(x), value(y)
                z = kind(function(a, b))
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
    """Of min and max: as Python, the first of two that are equal."""

    def of_two(x, y):
        if isinstance(x, Dual) or isinstance(y, Dual):
            return lambda x, y: y if first(y, x) else x

    return of_two


of_values(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.not_)
of_values(operator.floordiv, operator.ifloordiv, bool, int, round, round_to, math.floor, math.ceil, math.trunc)
of_values(math.isnan, math.isinf, math.isfinite)
FUNCTIONS = {  # of math: their derivatives by x, where they are z
    "exp": lambda x, z: z,
    "exp2": lambda x, z: z * type(x)(LN_2),
    "expm1": lambda x, z: z + ONE,
    "log": lambda x, z: ONE / x,
    "log2": lambda x, z: ONE / (x * type(x)(LN_2)),
    "log10": lambda x, z: ONE / (x * type(x)(LN_10)),
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
    "erf": lambda x, z: type(x)(2 / SQRT_PI) * math.exp(-x * x),
    "erfc": lambda x, z: type(x)(-2 / SQRT_PI) * math.exp(-x * x),
    "fabs": lambda x, z: ONE if x >= 0 else -ONE,
    "degrees": lambda x, z: type(x)(180 / math.pi),
    "radians": lambda x, z: type(x)(math.pi / 180),
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
    operator.pow,
    lambda x, y, z: y * x ** (y - ONE) if y != 0 else type(x)(0),
    lambda x, y, z: z * math.log(x) if z != 0 else type(x)(0),
    operator.ipow, pow, math.pow,
)  # fmt: skip
rule_of_two(math.atan2, lambda x, y, z: y / (x * x + y * y), lambda x, y, z: -x / (x * x + y * y))
rule_of_two(math.hypot, lambda x, y, z: x / z if z != 0 else z, lambda x, y, z: y / z if z != 0 else z)
rule_of_two(math.copysign, lambda x, y, z: ONE if (x < 0) == (z < 0) else -ONE, lambda x, y, z: ZERO)
overload(min)(chosen_by(operator.lt))
overload(max)(chosen_by(operator.gt))


@overload(min)
def _least_of_three(x, y, z):
    return (lambda x, y, z: min(min(x, y), z)) if any(isinstance(a, Dual) for a in (x, y, z)) else None


@overload(max)
def _largest_of_three(x, y, z):
    return (lambda x, y, z: max(max(x, y), z)) if any(isinstance(a, Dual) for a in (x, y, z)) else None


# -------------------------------------------------------------------------------------------------------------- NumPy
# Of numbers, for CPUs and GPUs alike: Numba has not all of them on both. Dual numbers go through them.
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
            return larger + math.log1p(math.exp(-abs(float(x) - float(y)))) if x != y else larger + type(larger)(LN_2)

        return of_numbers


rule_of_two(logaddexp, lambda x, y, z: math.exp(x - z) if x != z else type(x)(1),
            lambda x, y, z: math.exp(y - z) if y != z else type(x)(1))  # fmt: skip


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


INSTEAD = {  # what compiled functions call for what NumPy calls so
    np.where: where, np.clip: clip, np.sign: sign, np.square: square, np.logaddexp: logaddexp,
    np.minimum: minimum, np.maximum: maximum, np.fmin: fmin, np.fmax: fmax,
    np.floor: floor, np.ceil: ceil, np.trunc: trunc, np.rint: rint, np.round: rounded, np.around: rounded,
    np.reciprocal: reciprocal,
    np.abs: abs, np.negative: operator.neg, np.positive: operator.pos, np.add: operator.add,
    np.subtract: operator.sub, np.multiply: operator.mul, np.divide: operator.truediv, np.power: power, math.pow: power,
    np.mod: operator.mod, np.floor_divide: operator.floordiv, np.logical_not: operator.not_,
    np.arcsin: math.asin, np.arccos: math.acos, np.arctan: math.atan, np.arctan2: math.atan2,
    np.arcsinh: math.asinh, np.arccosh: math.acosh, np.arctanh: math.atanh,
    np.deg2rad: math.radians, np.rad2deg: math.degrees,
}  # fmt: skip
OF_ONE_NAME = *FUNCTIONS, "isnan", "isinf", "isfinite", "copysign", "hypot"
INSTEAD |= {getattr(np, name): getattr(math, name) for name in OF_ONE_NAME if hasattr(np, name) and hasattr(math, name)}


# ---------------------------------------------------------------------------------------------------------- functions
def number_of(x):
    """What a score function returns, unless it is True or False."""
    if isinstance(x, bool | np.bool_):
        raise TypeError(IS_A_MASK)
    return x


@overload(number_of)
def _number_of(x):
    if isinstance(x, types.Boolean):
        raise TypingError(IS_A_MASK)
    if isinstance(x, types.NoneType | types.Optional):
        raise TypingError(RETURNS_NONE)
    return lambda x: x


@contextmanager
def naming(*functions):
    """Where Numba cannot compile, say which functions of the user's own it may be, and what can be done."""
    try:
        yield
    except NumbaError as error:
        if not functions:
            raise
        text = str(error)
        codes = [(f.__qualname__, f.__code__.co_firstlineno, f.__code__.co_filename) for f in functions]
        where = " or ".join(f"{name}, line {line} of {file}" for name, line, file in codes)
        for refusal in (IS_A_MASK, RETURNS_NONE, *REFUSED):
            if refusal in text:
                raise UserTypeError(f"score: {where}, {refusal}{_line(text, refusal)}") from None
        if "Dual(" in text:
            raise UserTypeError(f"score: the derivative of {where}, cannot be found:\n{without_rule(text)}\n"
                                "Write it down: Score(function, derivative=...), and compare both by "
                                "check_score") from None
        raise UserTypeError(f"score: Numba cannot compile {where}: {error}") from None


def _line(text, refusal):
    """Where Numba says that something is, refused by an operator."""
    found = re.search(r'File "(.*)", line (\d+)', text[text.index(refusal) :]) if refusal in REFUSED else None
    return f" (line {found[2]} of {os.path.basename(found[1])})" if found else ""


def without_rule(text):
    """What of an error of Numba's says that something has no meaning for dual numbers."""
    found = re.findall(r">>> (\S+\(.*Dual\(.*\))", text) or re.findall(r"attribute '\w+' of type Dual\(\w+\)", text)
    return f"{found[-1]} has no rule here" if found else text.strip().splitlines()[0]


def linked(function):
    """A Frozen as a Python function that Numba can compile: it calls what is compiled, and of NumPy what works."""
    check_setting("DISABLE_JIT")
    return function.linked(compiled, INSTEAD)


@lru_cache(maxsize=256)
def compiled_of(function):
    """A Frozen, compiled when it is called."""
    return compiled(linked(function))


@lru_cache(maxsize=256)
def derivative_of(function):
    """The derivative of a Frozen by the first argument, compiled for dual numbers."""
    value_of = compiled_of(function)

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
    """Whether function(s, ...) - s of a Frozen does not depend on s, as types tell. kinds: of its other arguments."""
    value_of, arguments = compiled_of(function), (SHIFTED, *kinds)
    try:
        value_of.compile(arguments)
    except NumbaError:
        return False
    return value_of.overloads[arguments].signature.return_type == SHIFTED

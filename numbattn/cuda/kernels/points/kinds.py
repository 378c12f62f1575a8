"""Kinds of functions of pairs of points, as steps over tiles: kappa of t = |x - y|^2, or of x . y, and its derivatives.

Only the name of a kind is compiled in; its number, if it has one, comes with each call. Most are functions of E, a
power of 2: logarithms of rows and columns are added to its exponent, so that nothing overflows.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ....functions.compiled.derivative import compiled_of, derivative_of
from ....functions.compiled.errors import number_of
from ....points.kinds import Derivative, Polynomial, Radial
from ...tile import device, exp2, log2, map_elements, reciprocal, sqrt, where
from ...words.numbers import LOG2_E
from ..scores.function import inlined

KNOWN = {}  # the Frozen functions of Radial kernels of this process, by digest


class Steps(NamedTuple):
    """Device functions of a tile T of t."""

    exponent: Any  # (T, number) -> log2(E); None without an E
    value: Any  # (T, E, number) -> kappa
    slope: Any  # (T, E, number) -> its derivative by t, 0 where it is not finite at t = 0
    curvature: Any  # (T, E, number) -> the derivative of that, likewise


@device
def power_itself(T, E, number):
    return E


def gaussian(ACC):
    """exp(-t / 2)"""
    RATE, HALF, QUARTER = ACC(-LOG2_E / 2), ACC(-1 / 2), ACC(1 / 4)

    @device
    def exponent(T, number):
        return T * RATE

    @device
    def slope(T, E, number):
        return E * HALF

    @device
    def curvature(T, E, number):
        return E * QUARTER

    return Steps(exponent, power_itself, slope, curvature)


def exponential(ACC):
    """exp(-r), r the distance"""
    RATE, HALF, QUARTER = ACC(-LOG2_E), ACC(-1 / 2), ACC(1 / 4)

    @device
    def exponent(T, number):
        return sqrt(T) * RATE

    @device
    def slope(T, E, number):
        return E * (HALF * reciprocal(sqrt(T)))                 # reciprocal(0) is 0

    @device
    def curvature(T, E, number):
        return E * (QUARTER * reciprocal(T) * (reciprocal(sqrt(T)) + 1))

    return Steps(exponent, power_itself, slope, curvature)


def matern32(ACC):
    """(1 + a) exp(-a), a = sqrt(3) r"""
    RATE, ROOT, SLOPE, BEND = map(ACC, (-math.sqrt(3) * LOG2_E, math.sqrt(3), -3 / 2, 9 / 4 / math.sqrt(3)))

    @device
    def exponent(T, number):
        return sqrt(T) * RATE

    @device
    def value(T, E, number):
        return (sqrt(T) * ROOT + 1) * E

    @device
    def slope(T, E, number):
        return E * SLOPE

    @device
    def curvature(T, E, number):
        return E * (BEND * reciprocal(sqrt(T)))

    return Steps(exponent, value, slope, curvature)


def matern52(ACC):
    """(1 + a + a^2 / 3) exp(-a), a = sqrt(5) r"""
    RATE, ROOT, SQUARE = ACC(-math.sqrt(5) * LOG2_E), ACC(math.sqrt(5)), ACC(5 / 3)
    SLOPE, BEND = ACC(-5 / 6), ACC(25 / 12)

    @device
    def exponent(T, number):
        return sqrt(T) * RATE

    @device
    def value(T, E, number):
        return (T * SQUARE + (sqrt(T) * ROOT + 1)) * E

    @device
    def slope(T, E, number):
        return (sqrt(T) * ROOT + 1) * (E * SLOPE)

    @device
    def curvature(T, E, number):
        return E * BEND

    return Steps(exponent, value, slope, curvature)


def cauchy(ACC):
    """1 / (1 + t)"""

    @device
    def value(T, E, number):
        return reciprocal(T + 1)

    @device
    def slope(T, E, number):
        kappa = reciprocal(T + 1)
        return -(kappa * kappa)

    @device
    def curvature(T, E, number):
        kappa = reciprocal(T + 1)
        return kappa * kappa * (kappa + kappa)

    return Steps(None, value, slope, curvature)


def rational_quadratic(ACC):
    """(1 + t / (2 alpha))^-alpha; its number is alpha"""
    HALF, QUARTER = ACC(1 / 2), ACC(1 / 4)

    @device
    def exponent(T, alpha):
        return log2(T * (HALF / alpha) + 1) * -alpha

    @device
    def slope(T, E, alpha):
        return -(E * HALF * reciprocal(T * (HALF / alpha) + 1))

    @device
    def curvature(T, E, alpha):
        step = reciprocal(T * (HALF / alpha) + 1)
        return E * (QUARTER * (alpha + 1) / alpha) * (step * step)

    return Steps(exponent, power_itself, slope, curvature)


def power(ACC):
    """exp(-r^p / p); its number is p"""
    RATE, HALF = ACC(-LOG2_E), ACC(1 / 2)

    @device
    def exponent(T, p):
        return exp2(log2(T) * (p * HALF)) * (RATE / p)

    @device
    def slope(T, E, p):
        return -(E * HALF * (exp2(log2(T) * (p * HALF)) * reciprocal(T)))

    @device
    def curvature(T, E, p):
        step = exp2(log2(T) * (p * HALF)) * reciprocal(T) * HALF
        return E * step * (step - reciprocal(T) * (p * HALF - 1))

    return Steps(exponent, power_itself, slope, curvature)


def polynomial(ACC, degree):
    """(x . y + offset)^degree, of the products instead of the distances; its number is the offset"""
    degree = int(degree)
    to_degree, to_less, to_least = raised(degree), raised(degree - 1), raised(max(degree - 2, 0))
    DEGREE, TWICE = ACC(degree), ACC(degree * (degree - 1))

    @device
    def value(T, E, offset):
        return to_degree(T + offset)

    @device
    def slope(T, E, offset):
        return to_less(T + offset) * DEGREE

    @device
    def curvature(T, E, offset):
        return to_least(T + offset) * TWICE

    return Steps(None, value, slope, curvature)


def raised(degree):
    """The device function (x) -> x to this power, which is not negative."""
    if degree < 2:

        @device
        def one_or_x(x):
            return x if degree else x * 0 + 1

        return one_or_x

    to_half, is_odd = raised(degree // 2), degree % 2

    @device
    def of_halves(x):
        half = to_half(x)
        return half * half * x if is_odd else half * half

    return of_halves


def radial(ACC, digest):
    """A user's own function, and its derivatives by dual numbers"""
    function, INFINITE = KNOWN[digest].of(ACC), ACC(np.inf)
    of_one, slope_of_one = inlined(function), derivative_of(compiled_of(function))

    @device
    def value_of_each(t, i, j):
        return number_of(of_one(t))

    @device
    def value(T, E, number):
        return map_elements(value_of_each, T, 0, 0, (1, 1), ())

    def finite_at_0(slope_of_one):
        @device
        def slope_of_each(t, i, j):
            return slope_of_one(t)

        @device
        def slope(T, E, number):
            found = map_elements(slope_of_each, T, 0, 0, (1, 1), ())
            return where((T > 0) | (abs(found) < INFINITE), found, 0)

        return slope

    return Steps(None, value, finite_at_0(slope_of_one), finite_at_0(derivative_of(slope_of_one)))


def derivative(ACC, name, *about):
    """The derivative of another kind"""
    steps = KINDS[name](ACC, *about)
    return Steps(steps.exponent, steps.slope, steps.curvature, None)


KINDS = {
    "Gaussian": gaussian, "Exponential": exponential, "Matern32": matern32, "Matern52": matern52, "Cauchy": cauchy,
    "RationalQuadratic": rational_quadratic, "Power": power, "Polynomial": polynomial, "Radial": radial,
    "Derivative": derivative,
}  # fmt: skip


def lowered(kind):
    """The string that is compiled in of a `points.kinds.Kind`, with its name, and its number."""
    name, numbers = type(kind).__name__, kind.numbers
    if isinstance(kind, Derivative):
        of, number = lowered(kind.of)
        return f"{name} {of}", number
    if isinstance(kind, Radial):
        KNOWN[kind.function.digest] = kind.function
        return f"{name} {kind.function.digest}", 0.0
    if isinstance(kind, Polynomial):
        return f"{name} {kind.degree}", float(kind.offset)
    return name, numbers[0] if numbers else 0.0


def of_products(kind):
    """Whether a kind, given by its string, is a function of x . y."""
    return Polynomial.__name__ in kind.split()


def steps_of(kind, ACC):
    """The Steps of a kind, given by its string."""
    name, *about = kind.split()
    return KINDS[name](ACC, *about)


def exponential_step(exponent, shifted):
    """The device function (T, shift, number) -> E, if `shifted` with logarithms to base 2 added to its exponent."""

    @device
    def plain(T, shift, number):
        return exp2(exponent(T, number))

    @device
    def with_shift(T, shift, number):
        return exp2(exponent(T, number) + shift)

    @device
    def nothing(T, shift, number):
        return ()

    return nothing if exponent is None else with_shift if shifted else plain


def pair_step(steps, shifted=False, derivative=False):
    """The device function (T, shift, number) -> kappa, or its derivative, of each element of a tile of t, by Steps."""
    E_of, made_of = exponential_step(steps.exponent, shifted), steps.slope if derivative else steps.value

    @device
    def of_pairs(T, shift, number):
        return made_of(T, E_of(T, shift, number), number)

    return of_pairs


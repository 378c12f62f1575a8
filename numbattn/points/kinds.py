"""Kernels of points of unit length: functions of t, the squared distance of two points, or their product.

Each is written once, in the `Words` of a backend: for NumPy and CuPy arrays, an element on CPUs, or a tile on GPUs.
Derivatives, the second being the curvature, are by t, and 0 at t = 0 where they are not finite. A kind is hashable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..base.values import moved
from ..functions.frozen import Frozen

DIFFERENCES = 8  # features up to which distances are sums of squared differences; beyond |x|^2 + |y|^2 - 2 x.y
NEAR = 1 / 64  # of |x|^2 + |y|^2: smaller squared distances lose digits there, and are computed from differences
VALUE, DERIVATIVE, CURVATURE, LOGARITHM = "value", "derivative", "curvature", "logarithm"


class Apart(NamedTuple):
    """Points whose differences are taken, as they were given: the same points moved to a centre and divided by a length
    have other rounding errors."""

    x: Any
    y: Any
    rate: float = 1.0  # factor of squared distances


class Words(NamedTuple):
    """What formulas are written in."""

    function: Callable[[Any], Any]  # decorates a function that others call
    real: Callable[[float], Any]  # a constant
    log_e: float  # the logarithm of e to the base of `exp` and `log1p`
    exp: Any  # of what is not positive
    exp_of_sum: Any  # of any number
    log1p: Any
    sqrt: Any
    reciprocal: Any  # of what is positive
    quotient: Any  # by what is not negative; 0 by 0
    power: Any  # of what is not negative; 0 of 0
    where: Any
    of_users: Any  # (a Frozen, the order of its derivative) -> function of t


class Formula(NamedTuple):
    """Functions of t, of E, the exponential of the exponent times that of a shift, and of the number of the kind."""

    exponent: Any  # (t, number) -> to the base of `Words.exp`; None without an E, which is () then
    value: Any  # (t, E, number)
    derivative: Any
    curvature: Any


class Kind:
    """What all kinds share."""

    is_exponential = False  # whether its value is E
    is_of_product = False  # whether t is the product of two points
    is_of_pairs = False  # whether t is what users compute, see OfPairs
    number = 0.0  # comes with each call: one that changes compiles nothing

    @property
    def exchanged(self) -> Kind:
        """The kind with the roles of two points exchanged."""
        return self

    @property
    def form(self) -> Kind:
        """The kind that is compiled in: itself without its number."""
        return replace(self, number=0.0) if "number" in vars(self) else self  # type: ignore[type-var]

    def check(self, dtype: Any, order: int) -> None:
        """Refuse what cannot be computed in this dtype, up to the derivative of this order."""

    def formula(self, words: Words) -> Formula:
        raise NotImplementedError

    def value(self, t: Any, shift: Any = None) -> Any:
        """The weights of pairs of points, in arrays; times exp(shift), if the kind is an exponential."""
        return self._of_arrays(VALUE, t, shift)

    def derivative(self, t: Any, shift: Any = None) -> Any:
        return self._of_arrays(DERIVATIVE, t, shift)

    def curvature(self, t: Any, shift: Any = None) -> Any:
        return self._of_arrays(CURVATURE, t, shift)

    def logarithm(self, t: Any) -> Any:
        """That of the value of an exponential."""
        return self._of_arrays(LOGARITHM, t, None)

    def _of_arrays(self, what: str, t: Any, shift: Any) -> Any:
        return pair_function(self, ARRAYS, what, shift is not None)(t, shift, self.number)


@dataclass(frozen=True)
class Gaussian(Kind):
    """exp(-t / 2)"""

    is_exponential = True

    def formula(self, words: Words) -> Formula:
        RATE, HALF, QUARTER = map(words.real, (-words.log_e / 2, -1 / 2, 1 / 4))
        return Formula(
            exponent=lambda t, number: t * RATE,
            value=lambda t, E, number: E,
            derivative=lambda t, E, number: E * HALF,
            curvature=lambda t, E, number: E * QUARTER,
        )


@dataclass(frozen=True)
class Exponential(Kind):
    """exp(-sqrt(t))"""

    is_exponential = True

    def formula(self, words: Words) -> Formula:
        RATE, HALF, QUARTER, ONE = map(words.real, (-words.log_e, -1 / 2, 1 / 4, 1))
        sqrt, quotient = words.sqrt, words.quotient
        return Formula(
            exponent=lambda t, number: sqrt(t) * RATE,
            value=lambda t, E, number: E,
            derivative=lambda t, E, number: E * quotient(HALF, sqrt(t)),
            curvature=lambda t, E, number: E * (quotient(QUARTER, t) * (quotient(ONE, sqrt(t)) + ONE)),
        )


@dataclass(frozen=True)
class ExponentialOfProduct(Kind):
    """exp(t), where t is the product of two points"""

    is_exponential = is_of_product = True

    def formula(self, words: Words) -> Formula:
        RATE, of_E = words.real(words.log_e), lambda t, E, number: E
        return Formula(lambda t, number: t * RATE, of_E, of_E, of_E)


@dataclass(frozen=True)
class OfPairs(Kind):
    """exp(-t), where t is computed of blocks of points, by ``costs(x, y)``; for NumPy and CuPy arrays alone."""

    costs: Callable[[Any, Any], Any]
    vjp: Any  # (x, y, dt) -> dx, dy
    is_turned: bool = False

    is_exponential = is_of_pairs = True

    @property
    def exchanged(self) -> Kind:
        return replace(self, is_turned=not self.is_turned)

    def of_points(self, x: Any, y: Any) -> Any:
        """t"""
        return np.swapaxes(self.costs(y, x), -2, -1) if self.is_turned else self.costs(x, y)

    def gradient(self, x: Any, y: Any, dt: Any) -> Any:
        """The gradient of points x."""
        return self.vjp(y, x, np.swapaxes(dt, -2, -1))[1] if self.is_turned else self.vjp(x, y, dt)[0]

    def formula(self, words: Words) -> Formula:
        RATE = words.real(-words.log_e)
        return Formula(
            exponent=lambda t, number: t * RATE,
            value=lambda t, E, number: E,
            derivative=lambda t, E, number: -E,
            curvature=lambda t, E, number: E,
        )


@dataclass(frozen=True)
class Power(Kind):
    """exp(-sqrt(t)**p / p), p its number"""

    number: float

    is_exponential = True

    def formula(self, words: Words) -> Formula:
        RATE, HALF, ONE = map(words.real, (-words.log_e, 1 / 2, 1))
        quotient, power = words.quotient, words.power

        def curvature(t: Any, E: Any, p: Any) -> Any:
            step = quotient(ONE, t) * power(t, p * HALF) * HALF
            return E * step * (step - quotient(p * HALF - ONE, t))

        return Formula(
            # not times RATE / p: a product is rounded, or not, where something is added to it
            exponent=lambda t, p: power(t, p * HALF) / p * RATE,
            value=lambda t, E, p: E,
            derivative=lambda t, E, p: -(quotient(ONE, t) * (power(t, p * HALF) * (E * HALF))),
            curvature=curvature,
        )


@dataclass(frozen=True)
class Matern32(Kind):
    """(1 + r) exp(-r), r = sqrt(3 t)"""

    def formula(self, words: Words) -> Formula:
        ROOT = math.sqrt(3)
        RATE, SLOPE, BEND, ROOT, ONE = map(words.real, (-ROOT * words.log_e, -3 / 2, 9 / 4 / ROOT, ROOT, 1))
        sqrt, quotient = words.sqrt, words.quotient
        return Formula(
            exponent=lambda t, number: sqrt(t) * RATE,
            value=lambda t, E, number: (sqrt(t) * ROOT + ONE) * E,
            derivative=lambda t, E, number: E * SLOPE,
            curvature=lambda t, E, number: E * quotient(BEND, sqrt(t)),
        )


@dataclass(frozen=True)
class Matern52(Kind):
    """(1 + r + r**2 / 3) exp(-r), r = sqrt(5 t)"""

    def formula(self, words: Words) -> Formula:
        RATE, ROOT, ONE = map(words.real, (-math.sqrt(5) * words.log_e, math.sqrt(5), 1))
        SQUARE, SLOPE, BEND, sqrt = *map(words.real, (5 / 3, -5 / 6, 25 / 12)), words.sqrt
        return Formula(
            exponent=lambda t, number: sqrt(t) * RATE,
            value=lambda t, E, number: (t * SQUARE + (sqrt(t) * ROOT + ONE)) * E,
            derivative=lambda t, E, number: (sqrt(t) * ROOT + ONE) * (E * SLOPE),
            curvature=lambda t, E, number: E * BEND,
        )


@dataclass(frozen=True)
class Cauchy(Kind):
    """1 / (1 + t)"""

    def formula(self, words: Words) -> Formula:
        ONE, reciprocal = words.real(1), words.reciprocal

        def derivative(t: Any, E: Any, number: Any) -> Any:
            kappa = reciprocal(t + ONE)
            return -(kappa * kappa)

        def curvature(t: Any, E: Any, number: Any) -> Any:
            kappa = reciprocal(t + ONE)
            return kappa * kappa * (kappa + kappa)

        return Formula(None, lambda t, E, number: reciprocal(t + ONE), derivative, curvature)


@dataclass(frozen=True)
class RationalQuadratic(Kind):
    """(1 + t / (2 alpha))**-alpha, alpha its number"""

    number: float

    def formula(self, words: Words) -> Formula:
        HALF, QUARTER, ONE = map(words.real, (1 / 2, 1 / 4, 1))
        log1p, reciprocal = words.log1p, words.reciprocal

        def curvature(t: Any, E: Any, alpha: Any) -> Any:
            step = reciprocal(t * (HALF / alpha) + ONE)
            return E * (QUARTER * (alpha + ONE) / alpha) * (step * step)

        return Formula(
            exponent=lambda t, alpha: log1p(t * (HALF / alpha)) * -alpha,
            value=lambda t, E, alpha: E,
            derivative=lambda t, E, alpha: -(E * HALF * reciprocal(t * (HALF / alpha) + ONE)),
            curvature=curvature,
        )


@dataclass(frozen=True)
class Polynomial(Kind):
    """(t + offset)**degree, where t is the product of two points, degree a whole number > 0, and offset its number."""

    degree: int
    number: float

    is_of_product = True

    def formula(self, words: Words) -> Formula:
        degree, real = int(self.degree), words.real
        to_degree, to_less, to_least = (_raised(words, max(degree - less, 0)) for less in range(3))
        DEGREE, TWICE = map(real, (degree, degree * (degree - 1)))
        return Formula(
            exponent=None,
            value=lambda t, E, offset: to_degree(t + offset),
            derivative=lambda t, E, offset: to_less(t + offset) * DEGREE,
            curvature=lambda t, E, offset: to_least(t + offset) * TWICE,
        )


def _raised(words: Words, degree: int) -> Any:
    """The function x -> x to this power, which is not negative."""
    ZERO, ONE = map(words.real, (0, 1))
    if degree < 2:
        return words.function((lambda x: x) if degree else (lambda x: x * ZERO + ONE))
    to_half, is_odd = _raised(words, degree // 2), degree % 2

    @words.function
    def of_halves(x: Any) -> Any:
        half = to_half(x)
        return half * half * x if is_odd else half * half

    return of_halves


@dataclass(frozen=True)
class Radial(Kind):
    """function(t), a user's own function: its derivative follows by dual numbers."""

    function: Frozen

    def check(self, dtype: Any, order: int) -> None:
        from ..functions.compiled.elementwise import check  # Numba is not imported before it is needed

        for one in range(order + 1):
            check("Radial function", self.function.of(dtype), dtype, one)

    def formula(self, words: Words) -> Formula:
        (ZERO, INFINITE), where = map(words.real, (0, math.inf)), words.where

        def finite_at_0(order: int) -> Any:
            slope = words.of_users(self.function, order)

            @words.function
            def finite(t: Any, E: Any, number: Any) -> Any:
                found = slope(t)
                return where((t > ZERO) | (abs(found) < INFINITE), found, ZERO)

            return finite

        value = words.of_users(self.function, 0)
        return Formula(None, lambda t, E, number: value(t), finite_at_0(1), finite_at_0(2))


@dataclass(frozen=True)
class Times(Kind):
    """A product of kinds, each of so many features of its own: see `factors`."""

    factors: tuple[tuple[Kind, int], ...]

    @property
    def features(self) -> int:
        return sum(count for _, count in self.factors)

    def check(self, dtype: Any, order: int) -> None:
        for kind, _ in self.factors:
            kind.check(dtype, order)


@dataclass(frozen=True)
class Derivative(Kind):
    """The derivative of a kind as a kind, for sums of tangents. It has no logarithm."""

    of: Kind

    @property
    def is_of_product(self) -> bool:  # type: ignore[override]
        return self.of.is_of_product

    @property
    def number(self) -> float:  # type: ignore[override]
        return self.of.number

    @property
    def form(self) -> Kind:
        return Derivative(self.of.form)

    def check(self, dtype: Any, order: int) -> None:
        self.of.check(dtype, order + 1)

    def formula(self, words: Words) -> Formula:
        exponent, _, derivative, curvature = self.of.formula(words)
        return Formula(exponent, derivative, curvature, None)


def pair_function(kind: Kind, words: Words, what: str, shifted: bool = False) -> Any:
    """The function (t, shift, number) of pairs that gives the VALUE, DERIVATIVE, CURVATURE or LOGARITHM of a kind.

    shifted: whether a logarithm, the shift, is added to the exponent, to the base of `words.exp`.
    """
    formula = kind.formula(words)
    if formula.exponent is None:
        made_of = words.function(getattr(formula, what))
        return words.function(lambda t, shift, number: made_of(t, (), number))
    exponent = words.function(formula.exponent)

    @words.function
    def logarithm(t: Any, shift: Any, number: Any) -> Any:
        return exponent(t, number) + shift if shifted else exponent(t, number)

    if what == LOGARITHM:
        return logarithm
    exp, made_of = words.exp_of_sum if shifted else words.exp, words.function(getattr(formula, what))
    return words.function(lambda t, shift, number: made_of(t, exp(logarithm(t, shift, number)), number))


def _reciprocal(x: Any) -> Any:
    return 1 / x


def _quotient(x: Any, y: Any) -> Any:
    return np.where(y > 0, x / np.where(y > 0, y, 1), 0)


def _of_each(function: Frozen, order: int) -> Any:
    from ..functions.compiled.elementwise import elementwise

    of_array = elementwise(function, order)
    return lambda t: moved(of_array(moved(t, np.empty(0))), t)


ARRAYS = Words(
    function=lambda function: function, real=float, log_e=1.0, exp=np.exp, exp_of_sum=np.exp, log1p=np.log1p,
    sqrt=np.sqrt, reciprocal=_reciprocal, quotient=_quotient, power=np.power, where=np.where, of_users=_of_each,
)  # fmt: skip
GAUSSIAN, EXPONENTIAL, MATERN32, MATERN52, CAUCHY = Gaussian(), Exponential(), Matern32(), Matern52(), Cauchy()
LINEAR, EXPONENTIAL_OF_PRODUCT = Polynomial(1, 0.0), ExponentialOfProduct()

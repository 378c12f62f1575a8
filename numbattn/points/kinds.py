"""Kernels of points of unit length: functions of t, the squared distance of two points.

Each is defined here by elementary functions of arrays of t; kernels for CPUs and GPUs have the same for one number.
Derivatives, the second being the curvature, are by t, and 0 at t = 0 where they are not finite. A kind is hashable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..base.values import moved
from ..functions.frozen import Frozen

DIFFERENCES = 8  # features up to which distances are sums of squared differences; beyond |x|^2 + |y|^2 - 2 x.y
NEAR = 1 / 64  # of |x|^2 + |y|^2: smaller squared distances lose digits there, and are computed from differences


class Apart(NamedTuple):
    """Points whose differences are taken, as they were given: the same points moved to a centre and divided by a length
    have other rounding errors."""

    x: Any
    y: Any
    rate: float = 1.0  # factor of squared distances


class Kind:
    """What all kinds share."""

    is_exponential = False  # whether there are log_value and log_derivative
    is_of_product = False  # whether t is the product of two points

    @property
    def numbers(self) -> tuple[float, ...]:
        """Its numbers, which change without compiling anything."""
        return tuple([float(x) for x in vars(self).values()])

    def check(self, dtype: Any, order: int) -> None:
        """Refuse what cannot be computed in this dtype, up to the derivative of this order."""

    def value(self, t: Any) -> Any:
        """The weight of two points."""
        raise NotImplementedError

    def derivative(self, t: Any) -> Any:
        raise NotImplementedError

    def curvature(self, t: Any) -> Any:
        raise NotImplementedError


class Exponent(Kind):
    """The exponential of log_value, times that of a shift."""

    is_exponential = True

    def log_value(self, t: Any) -> Any:
        raise NotImplementedError

    def log_derivative(self, t: Any) -> Any:
        raise NotImplementedError

    def log_curvature(self, t: Any) -> Any:
        raise NotImplementedError

    def value(self, t: Any, shift: Any = 0) -> Any:
        return np.exp(self.log_value(t) + shift)

    def derivative(self, t: Any, shift: Any = 0) -> Any:
        return self.value(t, shift) * self.log_derivative(t)

    def curvature(self, t: Any, shift: Any = 0) -> Any:
        return self.value(t, shift) * (self.log_derivative(t) ** 2 + self.log_curvature(t))


@dataclass(frozen=True)
class Gaussian(Exponent):
    """exp(-t / 2)"""

    def log_value(self, t: Any) -> Any:
        return -t / 2

    def log_derivative(self, t: Any) -> Any:
        return 0 * t - 0.5

    def log_curvature(self, t: Any) -> Any:
        return 0 * t


@dataclass(frozen=True)
class Exponential(Exponent):
    """exp(-sqrt(t))"""

    def log_value(self, t: Any) -> Any:
        return -np.sqrt(t)

    def log_derivative(self, t: Any) -> Any:
        return -_power(t, -0.5) / 2

    def log_curvature(self, t: Any) -> Any:
        return _power(t, -1.5) / 4


@dataclass(frozen=True)
class Power(Exponent):
    """exp(-sqrt(t)**p / p)"""

    p: float

    def log_value(self, t: Any) -> Any:
        return -(t ** (self.p / 2)) / self.p

    def log_derivative(self, t: Any) -> Any:
        return -_power(t, self.p / 2 - 1) / 2

    def log_curvature(self, t: Any) -> Any:
        return (2 - self.p) / 4 * _power(t, self.p / 2 - 2)


@dataclass(frozen=True)
class Matern32(Kind):
    """(1 + r) exp(-r), r = sqrt(3 t)"""

    def value(self, t: Any) -> Any:
        r = np.sqrt(3 * t)
        return (1 + r) * np.exp(-r)

    def derivative(self, t: Any) -> Any:
        return -3 / 2 * np.exp(-np.sqrt(3 * t))

    def curvature(self, t: Any) -> Any:
        return 9 / 4 * np.exp(-np.sqrt(3 * t)) * _power(3 * t, -0.5)


@dataclass(frozen=True)
class Matern52(Kind):
    """(1 + r + r**2 / 3) exp(-r), r = sqrt(5 t)"""

    def value(self, t: Any) -> Any:
        r = np.sqrt(5 * t)
        return (1 + r + 5 / 3 * t) * np.exp(-r)

    def derivative(self, t: Any) -> Any:
        r = np.sqrt(5 * t)
        return -5 / 6 * (1 + r) * np.exp(-r)

    def curvature(self, t: Any) -> Any:
        return 25 / 12 * np.exp(-np.sqrt(5 * t))


@dataclass(frozen=True)
class Cauchy(Kind):
    """1 / (1 + t)"""

    def value(self, t: Any) -> Any:
        return 1 / (1 + t)

    def derivative(self, t: Any) -> Any:
        return -1 / (1 + t) ** 2

    def curvature(self, t: Any) -> Any:
        return 2 / (1 + t) ** 3


@dataclass(frozen=True)
class RationalQuadratic(Kind):
    """(1 + t / (2 alpha))**-alpha"""

    alpha: float

    def value(self, t: Any) -> Any:
        return np.exp(-self.alpha * np.log1p(t / (2 * self.alpha)))

    def derivative(self, t: Any) -> Any:
        return -np.exp(-(self.alpha + 1) * np.log1p(t / (2 * self.alpha))) / 2

    def curvature(self, t: Any) -> Any:
        factor = (self.alpha + 1) / (4 * self.alpha)
        return factor * np.exp(-(self.alpha + 2) * np.log1p(t / (2 * self.alpha)))


@dataclass(frozen=True)
class Polynomial(Kind):
    """(t + offset)**degree, where t is the product of two points, and degree is a whole number > 0."""

    degree: int
    offset: float

    is_of_product = True

    def value(self, t: Any) -> Any:
        return (t + self.offset) ** self.degree

    def derivative(self, t: Any) -> Any:
        return self.degree * (t + self.offset) ** (self.degree - 1)

    def curvature(self, t: Any) -> Any:
        return self.degree * (self.degree - 1) * (t + self.offset) ** max(self.degree - 2, 0)


@dataclass(frozen=True)
class Radial(Kind):
    """function(t), a user's own function: its derivative follows by dual numbers."""

    function: Frozen

    numbers = ()

    def check(self, dtype: Any, order: int) -> None:
        from ..functions.compiled.elementwise import check  # Numba is not imported before it is needed

        for one in range(order + 1):
            check("Radial function", self.function.of(dtype), dtype, one)

    def value(self, t: Any) -> Any:
        return self._of_each(0, t)

    def derivative(self, t: Any) -> Any:
        return self._finite_at_0(1, t)

    def curvature(self, t: Any) -> Any:
        return self._finite_at_0(2, t)

    def _finite_at_0(self, order: int, t: Any) -> Any:
        slope = self._of_each(order, t)
        return np.where((t > 0) | np.isfinite(slope), slope, 0)

    def _of_each(self, order: int, t: Any) -> Any:
        from ..functions.compiled.elementwise import elementwise

        return moved(elementwise(self.function, order)(moved(t, np.empty(0))), t)


@dataclass(frozen=True)
class Derivative(Kind):
    """The derivative of a kind as a kind, for sums of tangents. It has no logarithm."""

    of: Any  # a Kind

    @property
    def is_of_product(self) -> bool:  # type: ignore[override]
        return bool(self.of.is_of_product)

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(self.of.numbers)

    def check(self, dtype: Any, order: int) -> None:
        self.of.check(dtype, order + 1)

    def value(self, t: Any, *shift: Any) -> Any:
        return self.of.derivative(t, *shift)

    def derivative(self, t: Any, *shift: Any) -> Any:
        return self.of.curvature(t, *shift)


def _power(t: Any, exponent: float) -> Any:
    """t**exponent; 0 where t is."""
    return np.where(t > 0, np.where(t > 0, t, 1) ** exponent, 0)


GAUSSIAN, EXPONENTIAL, MATERN32, MATERN52, CAUCHY = Gaussian(), Exponential(), Matern32(), Matern52(), Cauchy()
LINEAR = Polynomial(1, 0.0)

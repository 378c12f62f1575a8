"""Kinds against finite differences, which are the definition of kernels on CPUs and GPUs, too."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn.points import kinds

from . import plain

KINDS = [*plain.KINDS, plain.radial()]
R = np.array([0.3, 0.9, 1.7, 2.5])
VALUES = {
    kinds.GAUSSIAN: np.exp(-(R**2) / 2),
    kinds.EXPONENTIAL: np.exp(-R),
    kinds.Power(1.5): np.exp(-(R**1.5) / 1.5),
    kinds.MATERN32: (1 + math.sqrt(3) * R) * np.exp(-math.sqrt(3) * R),
    kinds.MATERN52: (1 + math.sqrt(5) * R + 5 * R**2 / 3) * np.exp(-math.sqrt(5) * R),
    kinds.CAUCHY: 1 / (1 + R**2),
    kinds.RationalQuadratic(0.7): (1 + R**2 / 1.4) ** -0.7,
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_values(kind):
    assert_allclose(kind.value(R**2), VALUES[kind])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_derivatives(kind):
    t, h = np.array([0.1, 0.2, 0.9, 1.7, 4.0]), 1e-6
    assert_allclose(kind.derivative(t), (kind.value(t + h) - kind.value(t - h)) / (2 * h), rtol=1e-6)
    if kind.is_exponential:
        assert_allclose(np.exp(kind.log_value(t)), kind.value(t))
        assert_allclose(kind.log_derivative(t), (kind.log_value(t + h) - kind.log_value(t - h)) / (2 * h), rtol=1e-6)
    one = kinds.Derivative(kind)
    one.check(t.dtype, 1)
    assert_array_equal(one.value(t), kind.derivative(t))
    assert_allclose(one.derivative(t), (kind.derivative(t + h) - kind.derivative(t - h)) / (2 * h), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_derivatives_at_0_are_finite(kind, dtype):
    with np.errstate(divide="raise", invalid="raise"):
        found, second = kind.derivative(np.zeros(3, dtype)), kind.curvature(np.zeros(3, dtype))
        assert kind.value(np.ones(3, dtype)).dtype == found.dtype == second.dtype == dtype
    assert np.isfinite([found, second]).all()
    if kind in (kinds.EXPONENTIAL, kinds.Power(1.5)):
        assert_array_equal([found, second], np.zeros((2, 3)))


def test_they_are_values():
    assert kinds.Power(1.5) == kinds.Power(1.5) != kinds.Power(1.6)
    assert len({*KINDS, *KINDS, plain.radial()}) == len(KINDS)
    assert kinds.RationalQuadratic(2).numbers == (2.0,)
    assert kinds.Polynomial(3, 0.5).numbers == (3.0, 0.5)
    assert plain.radial().numbers == kinds.GAUSSIAN.numbers == ()
    assert kinds.Derivative(kinds.RationalQuadratic(2)).numbers == (2.0,)


FAULTS = {
    "return -3 / 2 * np.exp(": "return -np.exp(",
    "return -5 / 6 * (1 + r)": "return -5 / 6 * (1 - r)",
    "return 25 / 12 * np.exp(": "return 25 / 6 * np.exp(",
    "self.log_derivative(t) ** 2 + self.log_curvature(t)": "self.log_derivative(t) ** 2",
    "return -_power(t, self.p / 2 - 1) / 2": "return -_power(t, self.p / 2) / 2",
    "return np.where(t > 0, np.where(t > 0, t, 1) ** exponent, 0)": "return t**exponent",
}

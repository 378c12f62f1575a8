"""Kinds of arrays against the formulas of kernels and finite differences."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn.points import kinds

from . import plain

KINDS = [*plain.KINDS, plain.radial()]


ALONE = [kernel for kernel in plain.KERNELS if len(kernel._terms) == 1]
ONE = [kernel for kernel in ALONE if not isinstance(kernel._kind_of(3), kinds.Times)]


@pytest.mark.parametrize("kernel", ONE, ids=repr)
def test_values(rng, kernel):
    x, y = rng.standard_normal((2, 5, 3))
    units = [kernel._unit(np.stack([z, z]) if kernel._is_centred is None else z) for z in (x, y)]
    _, kappa, _ = plain.pairs(kernel._kind_of(3), *units, True)
    assert_allclose(kappa, plain.KERNELS[kernel](x, y))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_derivatives(kind):
    t, h = np.array([0.1, 0.2, 0.9, 1.7, 4.0]), 1e-6
    assert_allclose(kind.derivative(t), (kind.value(t + h) - kind.value(t - h)) / (2 * h), rtol=1e-6)
    if kind.is_exponential:
        assert_allclose(np.exp(kind.logarithm(t)), kind.value(t))
        assert_allclose(kind.value(t + 2000, -kind.logarithm(t + 2000)), np.ones(5))
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
    assert kinds.RationalQuadratic(2.0).number == kinds.Derivative(kinds.RationalQuadratic(2.0)).number == 2
    assert plain.radial().number == kinds.GAUSSIAN.number == 0


def test_forms():
    """Numbers that change compile nothing."""
    forms = [kind.form for kind in KINDS]
    assert kinds.Power(3.0).form == kinds.Power(1.5).form == forms[2] == forms[3]
    assert kinds.Polynomial(3, 0.5).form == kinds.Polynomial(3, 0.7).form != kinds.Polynomial(2, 0.5).form
    assert kinds.Derivative(kinds.Power(3.0)).form == kinds.Derivative(kinds.Power(1.5)).form not in forms
    assert len({*forms}) == len({*map(repr, forms)}) == len(forms) - 1
    several = kinds.LINEAR, kinds.CAUCHY, kinds.Derivative(kinds.LINEAR), kinds.Derivative(kinds.CAUCHY)
    assert [kind.is_of_product for kind in several] == [True, False] * 2


FAULTS = {
    "-3 / 2, 9 / 4": "-1, 9 / 4",
    "5 / 3, -5 / 6, 25 / 12": "5 / 3, -5 / 6, 25 / 6",
    "(sqrt(t) * ROOT + ONE) * (E * SLOPE)": "E * SLOPE",
    "(quotient(ONE, sqrt(t)) + ONE)": "quotient(ONE, sqrt(t))",
    "E * step * (step - quotient(p * HALF - ONE, t))": "E * step * step",
    "return -(kappa * kappa)": "return kappa * kappa",
    "kappa * kappa * (kappa + kappa)": "kappa * kappa * kappa",
    "-(E * HALF * reciprocal(t * (HALF / alpha) + ONE))": "-(E * HALF * reciprocal(t * HALF + ONE))",
    "half * half * x if is_odd": "half * half if is_odd",
    "Formula(exponent, derivative, curvature, None)": "Formula(exponent, derivative, derivative, None)",
    "np.where(y > 0, x / np.where(y > 0, y, 1), 0)": "x / y",
    "exponent(t, number) + shift if shifted": "exponent(t, number) if shifted",
}

"""Each kind and its derivative in tiles, as `numbattn.points.kinds` has them."""

import math

import numpy as np
import pytest

from numbattn.cuda.kernels.points.kinds import lowered, of_products, pair_step, steps_of
from numbattn.cuda.tile import load, save, simt
from numbattn.functions.frozen import frozen
from numbattn.points import kinds
from tests.points import plain
from tests.tools.launch import launch, poisoned, simulated_only

TILE = simt(4, 8, 32, 8, 1)


def applied(kind, t, dtype, shift=None, derivative=False):
    """kappa of each element of t, or its derivative."""
    text, number = lowered(kind)
    step = pair_step(steps_of(text, dtype), shifted=shift is not None, derivative=derivative)

    def kernel(x, y, shifts, number):
        save(y, step(load(x, TILE, 0), load(shifts, TILE, 0), number), 0)

    out, t = poisoned(TILE.shape, dtype), t.astype(dtype)
    launch(kernel, (1, 1, 1), 32, 0, t, out, t if shift is None else shift.astype(dtype), dtype(number))
    return out


def drawn(rng, kind):
    """t, 0 among them."""
    t = rng.standard_normal(TILE.shape) if kind.is_of_product else rng.uniform(0, 5, TILE.shape)
    t[0, :3] = 0
    return t


def values(kind, t):
    """What is applied: a kind, whether its derivative, and what that gives."""
    slope = kinds.Derivative(kind)
    return (kind, False, kind.value(t)), (kind, True, kind.derivative(t)), (slope, True, kind.curvature(t))


@simulated_only
@pytest.mark.parametrize("kind", [*plain.KINDS, kinds.Polynomial(2, 1.0), kinds.Polynomial(6, 0.1)], ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_each(rng, kind, dtype):
    t = drawn(rng, kind)
    for of, derivative, wanted in values(kind, t):
        got = applied(of, t, dtype, derivative=derivative)
        np.testing.assert_allclose(got, wanted, rtol=50 * np.finfo(dtype).eps, atol=4 * np.finfo(dtype).eps)


def bumpy(t):
    return t / (1 + t) if t > 0.25 else math.sqrt(t)


RADIAL = kinds.Radial(frozen(bumpy, "function"))


@pytest.mark.parametrize("kind", [kinds.EXPONENTIAL, kinds.Power(3.0), RADIAL], ids=["r", "r^3", "own"])
def test_some_in_both_worlds(rng, kind):
    t = drawn(rng, kind)
    for of, derivative, wanted in values(kind, t):
        got = applied(of, t, np.float32, derivative=derivative)
        np.testing.assert_allclose(got, wanted, rtol=5e-6, atol=5e-7)


@simulated_only
@pytest.mark.parametrize("kind", [kind for kind in plain.KINDS if kind.is_exponential], ids=repr)
def test_shifts(rng, kind):
    """Logarithms of base 2, which are added to the exponent: kappa alone would be 0."""
    t, shift = drawn(rng, kind) + 1000, rng.uniform(200, 300, TILE.shape)
    t[0, 0], shift[0, 0] = 1, -np.inf
    got = applied(kind, t, np.float64, shift)
    np.testing.assert_allclose(got, np.exp(kind.log_value(t) + shift * np.log(2)), rtol=1e-11)


def test_names():
    """Numbers that change compile nothing."""
    assert lowered(kinds.Power(1.5)) == ("Power", 1.5)
    assert lowered(kinds.Polynomial(3, 0.5)) == ("Polynomial 3", 0.5)
    assert lowered(kinds.GAUSSIAN) == ("Gaussian", 0.0)
    assert lowered(kinds.Derivative(kinds.Power(1.5))) == ("Derivative Power", 1.5)
    several = kinds.LINEAR, kinds.CAUCHY, kinds.Derivative(kinds.LINEAR), kinds.Derivative(kinds.CAUCHY)
    assert [of_products(lowered(kind)[0]) for kind in several] == [True, False] * 2


FAULTS = {
    "test_some_in_both_worlds": {
        "functions/compiled/dual.py": {"depth = max(depth_of(x), depth_of(y))": "depth = 0"},
    },
    "E * (HALF * reciprocal(sqrt(T)))": "E * (HALF / sqrt(T))",
    "(T * SQUARE + (sqrt(T) * ROOT + 1)) * E": "(sqrt(T) * ROOT + 1) * E",
    "return -(kappa * kappa)": "return kappa * kappa",
    "return -(E * HALF * reciprocal(T * (HALF / alpha) + 1))": "return -(E * HALF * reciprocal(T * HALF + 1))",
    "step - reciprocal(T) * (p * HALF - 1)": "step - reciprocal(T) * p * HALF",
    "(kappa + kappa)": "kappa",
    "steps.exponent, steps.slope, steps.curvature": "steps.exponent, steps.value, steps.slope",
    "half * half * x if is_odd": "half * half if is_odd",
    "where((T > 0) | (abs(found) < INFINITE), found, 0)": "found",
    "exponent(T, number) + shift": "exponent(T, number)",
    "steps.slope if derivative else steps.value": "steps.value if derivative else steps.slope",
}

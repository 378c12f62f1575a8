"""Each kind and its derivative in tiles, as `numbattn.points.kinds` has them."""

import math

import numpy as np
import pytest

from numbattn.cuda.kernels.points.kinds import pair_step
from numbattn.cuda.tile import load, save, simt
from numbattn.functions.frozen import frozen
from numbattn.points import kinds
from tests.points import plain
from tests.tools.launch import launch, poisoned, simulated_only

TILE = simt(4, 8, 32, 8, 1)


def applied(kind, t, dtype, what=kinds.VALUE, shift=None):
    """kappa of each element of t, or its derivative."""
    step = pair_step(kind.form, dtype, what, shifted=shift is not None)

    def kernel(x, y, shifts, number):
        save(y, step(load(x, TILE, 0), load(shifts, TILE, 0), number), 0)

    out, t = poisoned(TILE.shape, dtype), t.astype(dtype)
    launch(kernel, (1, 1, 1), 32, 0, t, out, t if shift is None else shift.astype(dtype), dtype(kind.number))
    return out


def drawn(rng, kind):
    """t, 0 among them."""
    t = rng.standard_normal(TILE.shape) if kind.is_of_product else rng.uniform(0, 5, TILE.shape)
    t[0, :3] = 0
    return t


def values(kind, t):
    """What is applied, and what that gives."""
    slope = kinds.Derivative(kind)
    wanted = kind.value(t), kind.derivative(t), kind.curvature(t)
    return zip((kind, kind, slope), (kinds.VALUE, kinds.DERIVATIVE, kinds.DERIVATIVE), wanted)


@simulated_only
@pytest.mark.parametrize("kind", [*plain.KINDS, kinds.Polynomial(2, 1.0), kinds.Polynomial(6, 0.1)], ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_each(rng, kind, dtype):
    t = drawn(rng, kind)
    for of, what, wanted in values(kind, t):
        got = applied(of, t, dtype, what)
        np.testing.assert_allclose(got, wanted, rtol=50 * np.finfo(dtype).eps, atol=4 * np.finfo(dtype).eps)


def bumpy(t):
    return t / (1 + t) if t > 0.25 else math.sqrt(t)


RADIAL = kinds.Radial(frozen(bumpy, "function"))


@pytest.mark.parametrize("kind", [kinds.EXPONENTIAL, kinds.Power(3.0), RADIAL], ids=["r", "r^3", "own"])
def test_some_in_both_worlds(rng, kind):
    t = drawn(rng, kind)
    for of, what, wanted in values(kind, t):
        got = applied(of, t, np.float32, what)
        np.testing.assert_allclose(got, wanted, rtol=5e-6, atol=5e-7)


@simulated_only
@pytest.mark.parametrize("kind", [kind for kind in plain.KINDS if kind.is_exponential], ids=repr)
def test_shifts(rng, kind):
    """Logarithms of base 2, which are added to the exponent: kappa alone would be 0."""
    t, shift = drawn(rng, kind) + 1000, rng.uniform(200, 300, TILE.shape)
    t[0, 0], shift[0, 0] = 1, -np.inf
    logarithm = kind.logarithm(t) / np.log(2) + shift
    for what, wanted in ((kinds.VALUE, np.exp2(logarithm)), (kinds.LOGARITHM, logarithm)):
        np.testing.assert_allclose(applied(kind, t, np.float64, what, shift), wanted, rtol=1e-11)


FAULTS = {
    "test_some_in_both_worlds": {
        "functions/compiled/dual.py": {"depth = max(depth_of(x), depth_of(y))": "depth = 0"},
    },
    "log2(x + 1)": "log2(x)",
    "exp2(log2(x) * y)": "exp2(log2(x))",
}

"""How far sums of a plan may be from weights."""

import copy
import math
import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import minimize_scalar

from numbattn import points
from numbattn.points.marginals import EXACT, sides_of

SIDES = [points.KL(0.3), points.TV(0.3), EXACT]
EPSILON, P = 0.2, np.array([-2.0, -0.31, -0.2, 0.0, 0.1, 0.29, 3.0])


@pytest.mark.parametrize("side", SIDES, ids=repr)
def test_an_update_maximises_the_objective(side):
    """h(f) - epsilon exp((f - p) / epsilon), f being -rho or more for total variation."""
    f = side._prox(P, EPSILON)
    for p, found in zip(P, f):
        low = max(p - 3, -side.rho if isinstance(side, points.TV) else -math.inf)
        best = minimize_scalar(lambda f: EPSILON * np.exp((f - p) / EPSILON) - side._value(f),  # noqa: B023
                               bounds=(low, max(p, 0) + 3), method="bounded", options={"xatol": 1e-9})  # fmt: skip
        assert_allclose(found, best.x, atol=1e-6)
    h = 1e-6
    slope = (side._prox(P + h, EPSILON) - side._prox(P - h, EPSILON)) / (2 * h)
    assert_allclose(side._slope(P, EPSILON), slope, atol=1e-8)
    if not isinstance(side, points.TV):
        assert_allclose(np.broadcast_to(side._share(f), P.shape), np.exp((f - P) / EPSILON))


@pytest.mark.parametrize(("one", "other"), [
    (points.KL(0.3), points.KL(0.7)), (points.KL(0.3), EXACT), (points.TV(0.3), points.TV(0.2)),
    (points.TV(0.3), EXACT),
], ids=repr)  # fmt: skip
def test_a_shift_is_the_best_constant(xp, rng, one, other):
    """Of each element of a batch; points without weight have no say."""
    a, b = rng.random((9, 6)), rng.random((9, 8)) * rng.choice([0.5, 1, 3], (9, 1))
    f, g = one._prox(rng.standard_normal((9, 6)), 0.1), other._prox(rng.standard_normal((9, 8)), 0.1)
    f[:, 0], a[:, 0] = (9.0 if isinstance(one, points.KL) else 0.3), 0
    shift = one._shift(other, *map(xp.asarray, (a, b, f, g)))
    assert isinstance(shift, xp.ndarray)
    shift = shift.get() if xp is not np else shift

    def objective(constant):
        F, G = f + constant, g - constant
        found = np.where(a > 0, a * one._value(F), 0).sum(-1) + (b * other._value(G)).sum(-1)
        for side, z, w in ((one, F, a), (other, G, b)):
            if isinstance(side, points.TV):
                found = np.where(np.where(w > 0, z, 0).min(-1) < -side.rho - 1e-9, -np.inf, found)
        return found

    best = np.max([objective(shift + step) for step in np.linspace(-1, 1, 2001)], axis=0)
    assert_allclose(objective(shift), best, atol=1e-6)
    assert np.isfinite(objective(shift)).all()


def test_equal_sums_within_total_variation_stay(rng):
    """Where a constant changes nothing, rounding does not."""
    a = rng.random(50).astype(np.float32)
    f, g = 0.1 * rng.standard_normal((2, 50)).astype(np.float32)
    assert_array_equal(points.TV(1.0)._shift(points.TV(1.0), a, a[::-1], f, g), 0)


def test_nothing_has_no_shift():
    assert_array_equal(points.KL(0.3)._shift(points.KL(0.3), np.zeros(3), np.zeros(2), np.ones(3), np.ones(2)), 0)


def test_sides():
    kl, tv = points.KL(1), points.TV(0.5)
    assert sides_of(None) == (EXACT, EXACT)
    assert sides_of(kl) == (kl, kl)
    assert sides_of((None, tv)) == (EXACT, tv)
    assert (points.KL(1.0), hash(points.KL(1.0))) == (kl, hash(kl))
    assert points.KL(0.5) != tv
    assert repr(kl) == "KL(rho=1.0)"
    assert copy.copy(kl) == pickle.loads(pickle.dumps(kl)) == kl
    assert pickle.loads(pickle.dumps(EXACT))._is_exact


@pytest.mark.parametrize(("given", "found"), [
    (0.5, "0.5"), ((points.KL(1.0),), "tuple"), ((points.KL(1.0), points.TV(1.0)), "tuple"),
    (points.Cauchy(), r"Cauchy\(length=1.0\)"),
])  # fmt: skip
def test_errors(given, found):
    with pytest.raises(TypeError, match=rf"marginals: got {found}, expected points.KL\(rho\), points.TV\(rho\), None"):
        sides_of(given)


@pytest.mark.parametrize("rho", [0, -1.0, math.inf])
def test_errors_of_values(rho):
    for kind in (points.KL, points.TV):
        with pytest.raises(ValueError, match=f"{kind.__name__} rho: got {rho}, allowed finite and > 0"):
            kind(rho)


FAULTS = {
    "test_an_update_maximises_the_objective": {
        "return p / (1 + epsilon / self.rho)": "return p / (1 + self.rho / epsilon)",
        "np.full_like(p, 1 / (1 + epsilon / self.rho))": "np.ones_like(p)",
        "np.clip(p, -self.rho, self.rho)": "np.minimum(p, self.rho)",
        "return np.minimum(f, self.rho)": "return f",
        "return np.exp(-f / self.rho)": "return np.exp(f / self.rho)",
    },
    "test_a_shift_is_the_best_constant": {
        "np.log(ratio) / (1 / self.rho + 1 / other.rho)": "np.log(ratio) / (1 / self.rho)",
        "np.where(a > 0, -self.rho - f, -math.inf)": "-self.rho - f",
        "np.where(w > 0, w * side._share(z), 0)": "side._share(z)",
    },
    "test_equal_sums_within_total_variation_stay": {
        "enough in (lost >= total - rounding, lost > total + rounding)": "enough in (lost >= total, lost > total)",
    },
    "test_nothing_has_no_shift": {"some = (first > 0) & (second > 0)": "some = True"},
    "test_errors": {"len(kinds) > 1 or": ""},
}

"""What kernels make of tiles of t, against what points/kinds.py says of arrays."""

import numpy as np
import pytest

from numbattn.cpu.points.kinds import ARGUMENTS, step_of
from numbattn.functions.frozen import frozen
from numbattn.points import kinds
from numbattn.points.kinds import CURVATURE, DERIVATIVE, LOGARITHM, VALUE
from tests.accuracy import assert_accurate
from tests.points import plain

ORDERS = VALUE, DERIVATIVE, CURVATURE
KINDS = [*plain.KINDS, kinds.Power(0.5), kinds.Power(2.0), kinds.RationalQuadratic(200.0), kinds.Polynomial(5, -1.0)]
ALL = [(kind, what) for kind in KINDS for what in (*ORDERS, LOGARITHM) if what != LOGARITHM or
       kind.is_exponential]  # fmt: skip


def applied(kind, what, t, rows=None, columns=None):
    step, function = step_of(kind, what, t.dtype)
    S = np.array(t)
    keys, queries = S.shape
    rows, columns = (np.zeros(n, t.dtype) if x is None else x for x, n in ((rows, queries), (columns, keys)))
    addresses = [x.ctypes.data for x in (rows, columns, step.number)]
    assert len(ARGUMENTS) == 3 + len(addresses)
    function.ctypes(S.ctypes.data, keys, queries, *addresses)
    return S


@pytest.mark.parametrize(("kind", "what"), ALL, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_each_kind(rng, kind, what, dtype):
    t = np.exp(rng.uniform(-20, 4, (5, 70))).astype(dtype)
    t[0, :2] = 0
    t = rng.standard_normal(t.shape).astype(dtype) if kind.is_of_product else t
    got, wide = applied(kind, what, t), np.longdouble if dtype == np.float64 else np.float64
    with np.errstate(all="ignore"):
        exact, other = (getattr(kind, what)(x) for x in (t.astype(wide), t))
    for row in (slice(0, 1), slice(1, None)):
        assert_accurate(str(kind), got[row], exact[row], other[row], dtype, bits=2)


@pytest.mark.parametrize(("kind", "what"), [*ALL, *[(plain.radial(), what) for what in ORDERS]], ids=str)
def test_what_is_hidden(kind, what):
    got = applied(kind, what, np.array([[-np.inf, 1.0], [2.0, -np.inf]]))
    assert (got[[0, 1], [0, 1]] == (-np.inf if what == LOGARITHM else 0)).all()
    assert np.isfinite(got[[0, 1], [1, 0]]).all()


@pytest.mark.parametrize("what", [*ORDERS, LOGARITHM])
def test_logarithms_are_added(what):
    t, rows, columns = np.ones((2, 3)), np.array([0.0, 0.5, 1000.0]), np.array([0.25, -1000.0])
    got = applied(kinds.GAUSSIAN, what, t, rows, columns)
    logarithm = -0.5 + rows + columns[:, None]
    with np.errstate(over="ignore"):
        kappa = np.exp(logarithm)
        exact = {VALUE: kappa, DERIVATIVE: -kappa / 2, CURVATURE: kappa / 4, LOGARITHM: logarithm}[what]
    np.testing.assert_allclose(got, exact)


def test_derivatives_are_kinds():
    t = np.array([[0.5, 2.0]])
    for kind in (kinds.Power(1.5), kinds.Polynomial(3, 0.5)):
        for what, wanted in ((VALUE, kind.derivative(t)), (DERIVATIVE, kind.curvature(t))):
            np.testing.assert_allclose(applied(kinds.Derivative(kind), what, t), wanted)


def logarithm(t):
    return np.log(t)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_function_of_the_users_own(dtype):
    kind, t = kinds.Radial(frozen(logarithm, "Radial function")), np.array([[0, 0.5, 2]], dtype)
    np.testing.assert_allclose(applied(kind, VALUE, t), np.log(t, where=t > 0, out=np.full_like(t, -np.inf)), rtol=1e-6)
    np.testing.assert_allclose(applied(kind, DERIVATIVE, t), [[0, 2, 0.5]])  # 0 where it is not finite, at t = 0
    np.testing.assert_allclose(applied(kind, CURVATURE, t), [[0, -4, -0.25]])


FAULTS = {
    "test_each_kind[float64-Exponential()-derivative]": {
        "x / y if y > ZERO else ZERO": "x / y",
    },
    "test_derivatives_are_kinds": {
        "step_of(kind.of, DIFFERENTIATED[what], dtype)": "step_of(kind.of, what, dtype)",
    },
    "test_logarithms_are_added": {
        "rows[i] + columns[j]": "rows[i]",
    },
    "test_what_is_hidden": {
        "nothing if t == hidden else x": "x",
    },
    "test_a_function_of_the_users_own": {
        "x if condition else y": "x",
        "points/kinds.py": {"where((t > ZERO) | (abs(found) < INFINITE), found, ZERO)": "found"},
    },
}

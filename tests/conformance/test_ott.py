"""OTT's own tests, with sums over pairs of points by numbattn; and its transport beside numbattn's: its cost is the
squared distance, twice that of Cost(2), so that epsilon is twice as large, too."""

from importlib.metadata import version

import numpy as np
import pytest
from numpy.testing import assert_allclose

from numbattn import points

from .suites import Counts, check, checkout, run

pytest.importorskip("ott")
FILES = (
    "geometry/pointcloud", "geometry/scaling_cost", "solvers/linear/sinkhorn", "solvers/linear/sinkhorn_diff",
    "solvers/linear/sinkhorn_misc", "tools/sinkhorn_divergence", "tools/soft_sort",
)  # fmt: skip
EPSILON, OPTIONS = 0.3, {"threshold": 1e-10, "max_iterations": 10_000}
COST, LIMITS = points.Cost(2, EPSILON / 2), {"tol": 1e-10, "max_iterations": 10_000}


@pytest.fixture
def clouds(rng):
    return rng.random((30, 2)), rng.random((20, 2)) + 0.3, np.full(30, 1 / 30), rng.dirichlet(np.ones(20))


def test_transport(clouds, count):
    """Costs, plans and gradients."""
    import jax
    from ott.geometry.pointcloud import PointCloud
    from ott.solvers import linear

    x, y, a, b = clouds

    def transported(x):
        found = linear.solve(PointCloud(x, y, epsilon=EPSILON), a, b, **OPTIONS)
        return found.reg_ot_cost, found.matrix

    with jax.enable_x64(True):
        (cost, plan), dx = jax.value_and_grad(transported, has_aux=True)(x)
    r, backprop = points.sinkhorn_vjp(*clouds, COST, **LIMITS)
    C = ((x[:, None] - y) ** 2).sum(-1)
    assert_allclose(2 * r.cost, cost, rtol=1e-7)
    assert_allclose(a[:, None] * b * np.exp((2 * (r.f[:, None] + r.g) - C) / EPSILON), plan, atol=1e-9)
    assert_allclose(2 * backprop().dx, dx, atol=1e-8)
    count("OTT", f"ott-jax {version('ott-jax')}", Counts(1, 0))


@pytest.mark.slow
def test_divergences(clouds, count):
    import jax
    from ott.tools.sinkhorn_divergence import sinkdiv

    x, y, a, b = clouds
    with jax.enable_x64(True):
        divergence, _ = sinkdiv(x, y, a=a, b=b, epsilon=EPSILON, solve_kwargs=OPTIONS)
    r = points.sinkhorn(*clouds, COST, debias=True, **LIMITS)
    assert_allclose(2 * r.cost, divergence, rtol=1e-6)
    count("OTT", f"ott-jax {version('ott-jax')}", Counts(1, 0))


@pytest.mark.slow
def test_unbalanced_transport(clouds, count):
    """Costs, plans, gradients and divergences. Of weights of 1: OTT's entropy is not relative to others."""
    import jax
    from ott.geometry.pointcloud import PointCloud
    from ott.solvers import linear
    from ott.tools.sinkhorn_divergence import sinkdiv

    x, y, *_ = clouds
    a, b, rhos = np.ones(30), np.ones(20), (0.5, 2.0)
    tau_a, tau_b = (rho / (rho + EPSILON) for rho in rhos)

    def transported(x):
        found = linear.solve(PointCloud(x, y, epsilon=EPSILON), a, b, **OPTIONS, tau_a=tau_a, tau_b=tau_b)
        return found.reg_ot_cost, found.matrix

    with jax.enable_x64(True):
        (cost, plan), dx = jax.value_and_grad(transported, has_aux=True)(x)
        alike = OPTIONS | {"tau_a": tau_a, "tau_b": tau_a}
        divergence, _ = sinkdiv(x, y, a=a, b=b, epsilon=EPSILON, solve_kwargs=alike)
    marginals = tuple([points.KL(rho / 2) for rho in rhos])
    r, backprop = points.sinkhorn_vjp(x, y, a, b, COST, **LIMITS, marginals=marginals)
    ((_, _, found),) = r.plan()
    assert_allclose(2 * r.cost, cost, rtol=1e-7)
    assert_allclose(found, plan, rtol=1e-6)
    assert_allclose(2 * backprop().dx, dx, atol=1e-7)
    r = points.sinkhorn(x, y, a, b, COST, **LIMITS, marginals=marginals[0], debias=True)
    assert_allclose(2 * r.cost, divergence, rtol=1e-6)
    count("OTT", f"ott-jax {version('ott-jax')}", Counts(1, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_sums_over_pairs(name, count):
    tests = checkout("ott-jax/ott", f"tests/{name}_test.py")
    found = run("ott", tests, "--import-mode=importlib", JAX_PLATFORMS="cpu")
    check(count, "OTT", f"ott-jax {version('ott-jax')}", found)

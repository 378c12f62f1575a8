"""Transport by POT's functions of points and weights: its regularisation weighs entropy twice as Cost's epsilon, since
Cost(2) is half the squared distance, so that its costs are twice as large."""

from importlib.metadata import version

import numpy as np
import pytest
from numpy.testing import assert_allclose

from numbattn import points

from .suites import Counts

ot = pytest.importorskip("ot")
OPTIONS = {"tol": 1e-11, "max_iterations": 10_000}


@pytest.fixture
def clouds(rng):
    return rng.random((30, 2)), rng.random((20, 2)) + 0.3, ot.unif(30), rng.dirichlet(np.ones(20))


def plan_and_cost(x, y, a, b, reg):
    """The plan, and its cost with that of its entropy relative to a b^T."""
    M = ot.dist(x, y)
    plan = ot.sinkhorn(a, b, M, reg, method="sinkhorn_log", stopThr=1e-11, numItermax=10_000)
    return plan, (plan * M).sum() + reg * (plan * np.log(plan / (a[:, None] * b))).sum()


@pytest.mark.parametrize("reg", [0.05, 0.5, 2.0])
def test_transport(clouds, reg, count):
    x, y, a, b = clouds
    plan, cost = plan_and_cost(*clouds, reg)
    r, backprop = points.sinkhorn_vjp(*clouds, points.Cost(2, reg / 2), **OPTIONS)
    assert_allclose(a[:, None] * b * np.exp((2 * (r.f[:, None] + r.g) - ot.dist(x, y)) / reg), plan, atol=1e-9)
    assert_allclose(2 * r.cost, cost, rtol=1e-7)
    assert_allclose(backprop().dx, a[:, None] * x - plan @ y, atol=1e-8)
    count("POT", f"POT {version('POT')}", Counts(1, 0))


def test_divergences(clouds, count):
    x, y, a, b = clouds
    costs = [plan_and_cost(*given, 1.0)[1] for given in (clouds, (x, x, a, a), (y, y, b, b))]
    r = points.sinkhorn(*clouds, points.Cost(2, 0.5), debias=True, **OPTIONS)
    assert_allclose(2 * r.cost, costs[0] - (costs[1] + costs[2]) / 2, rtol=1e-7)
    count("POT", f"POT {version('POT')}", Counts(1, 0))


@pytest.mark.parametrize("rho", [0.05, 1.0, (0.1, 5.0)])
def test_unbalanced_transport(clouds, rho, count):
    """Of other masses; POT's result is the plan, from which the cost follows."""
    x, y, a, b = clouds
    a, b, M, reg = 2 * a, 3 * b, ot.dist(x, y), 0.3
    plan = ot.unbalanced.sinkhorn_unbalanced(a, b, M, reg, rho, reg_type="kl", stopThr=1e-13, numItermax=10_000)
    rhos = rho if isinstance(rho, tuple) else (rho, rho)
    r, backprop = points.sinkhorn_vjp(x, y, a, b, points.Cost(2, reg / 2), **OPTIONS,
                                      marginals=tuple([points.KL(one / 2) for one in rhos]))  # fmt: skip

    def kl(p, q):
        return (p * np.log(p / q) - p + q).sum()

    cost = (plan * M).sum() + reg * kl(plan, a[:, None] * b)
    cost += rhos[0] * kl(plan.sum(1), a) + rhos[1] * kl(plan.sum(0), b)
    ((_, _, found),) = r.plan()
    assert_allclose(found, plan, atol=1e-8)
    assert_allclose(2 * r.cost, cost, rtol=1e-7)
    assert_allclose(backprop().dx, plan.sum(1)[:, None] * x - plan @ y, atol=1e-8)
    count("POT", f"POT {version('POT')}", Counts(1, 0))


@pytest.mark.filterwarnings("ignore:scipy.optimize")  # an option that POT gives it
def test_total_variation(clouds, count):
    """POT minimises over plans, to fewer digits."""
    x, y, a, b = clouds
    a, b, M, reg, rho = 2 * a, 3 * b, ot.dist(x, y), 0.3, 0.4
    plan, log = ot.unbalanced.lbfgsb_unbalanced(a, b, M, reg, rho, c=a[:, None] * b, reg_div="kl", regm_div="tv",
                                                numItermax=10_000, stopThr=1e-14, log=True)  # fmt: skip
    r = points.sinkhorn(x, y, a, b, points.Cost(2, reg / 2), marginals=points.TV(rho / 2), **OPTIONS)
    assert 2 * r.cost <= log["total_cost"] + 1e-9
    assert_allclose(2 * r.cost, log["total_cost"], rtol=1e-3)
    count("POT", f"POT {version('POT')}", Counts(1, 0))

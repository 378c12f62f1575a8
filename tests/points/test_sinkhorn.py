"""Entropic optimal transport."""

import math
import warnings

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn import points
from numbattn.base import backends
from numbattn.points import clouds as clouds_module
from numbattn.points import formula

from ..accuracy import to_numpy
from . import plain

COST = points.Cost(2, 0.1)


def clouds(rng, m=20, n=30, d=2, batch=()):
    x, y = rng.random((*batch, m, d)), rng.random((*batch, n, d)) + 0.5
    a, b = (rng.random((*batch, count)) + 0.1 for count in (m, n))
    return [x, y, a / a.sum(-1, keepdims=True), b / b.sum(-1, keepdims=True)]


def exact_cost(x, y, a, b, cost, iterations=3000):
    """By the plain formula, without annealing."""
    C = plain.distances(x, y, 1) ** cost.power / cost.power
    K, u, v = np.exp(-C / cost.epsilon), np.ones_like(a), np.ones_like(b)
    for _ in range(iterations):
        u = 1 / (K @ (b * v)[..., None])[..., 0]
        v = 1 / (plain.T(K) @ (a * u)[..., None])[..., 0]
    return cost.epsilon * ((a * np.log(u)).sum(-1) + (b * np.log(v)).sum(-1))


@pytest.mark.parametrize("power", [1, 1.5, 2, 3])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["", "batch"])
def test_costs(xp, rng, power, batch):
    given, cost = clouds(rng, batch=batch), points.Cost(power, 0.1)
    r = points.sinkhorn(*map(xp.asarray, given), cost, tol=1e-9)
    assert r.converged
    assert r.iterations < 1000
    assert all(isinstance(found, xp.ndarray) for found in (r.f, r.g, r.cost))
    assert (r.f.shape, r.g.shape, r.cost.shape) == ((*batch, 20), (*batch, 30), batch)
    assert_allclose(to_numpy(r.cost), exact_cost(*given, cost), rtol=1e-7)


def test_the_plan_has_the_marginals(rng):
    x, y, a, b = clouds(rng)
    r = points.sinkhorn(x, y, a, b, COST, tol=1e-10)
    plan = a[:, None] * b * np.exp((r.f[:, None] + r.g - plain.squares(x, y, 1) / 2) / 0.1)
    assert_allclose(plan.sum(0), b, atol=1e-10)
    assert_allclose(plan.sum(1), a, atol=1e-10)


def dense(r, *shape):
    found = np.full(shape, np.nan)
    for i, j, block in r.plan():
        found[..., i, j] = to_numpy(block)
    return found


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize(("power", "d"), [(1.5, 2), (2, 9)])
def test_plans_and_what_they_carry(xp, rng, monkeypatch, debias, power, d):
    """In blocks, of a batch of which x is no part."""
    monkeypatch.setattr(formula, "ROWS", 7)
    x, y, a, b = clouds(rng, d=d, batch=(2,))
    x, cost = x[0], points.Cost(power, 0.1)
    r = points.sinkhorn(*map(xp.asarray, (x, y, a, b)), cost, tol=1e-11, debias=debias)
    between = points.sinkhorn(x, y, a, b, cost, tol=1e-11)
    C = plain.distances(x, y, 1) ** power / power
    plan = a[..., None] * b[:, None] * np.exp((between.f[..., None] + between.g[:, None] - C) / 0.1)
    assert_allclose(dense(r, 2, 20, 30), plan, rtol=1e-6, atol=1e-12)
    assert_allclose(to_numpy(r.primal()), (plan * C).sum((-2, -1)), rtol=1e-7)
    v, u = rng.standard_normal((30, 4)), rng.standard_normal((2, 20, 1))
    assert_allclose(to_numpy(r.apply(xp.asarray(v))), plan @ v / plan.sum(-1)[..., None], rtol=1e-6, atol=1e-9)
    carried = r.apply(xp.asarray(u), transposed=True)
    assert_allclose(to_numpy(carried), plain.T(plan) @ u / plan.sum(-2)[..., None], rtol=1e-6, atol=1e-9)


def test_plans_of_segments(rng):
    one, other = clouds(rng), clouds(rng, m=15, n=10)
    together = [np.concatenate(pair) for pair in zip(one, other)]
    r = points.sinkhorn(*together, COST, tol=1e-9, mask=na.Segments([0, 20, 35], [0, 30, 40]))
    alone = [points.sinkhorn(*given, COST, tol=1e-9) for given in (one, other)]
    plan = dense(r, 35, 40)
    assert_allclose(plan[:20, :30], dense(alone[0], 20, 30), atol=1e-9)
    assert_array_equal(plan[:20, 30:], 0)
    assert_allclose(r.primal(), sum(found.primal() for found in alone), rtol=1e-6)
    assert_allclose(r.apply(together[1])[20:], alone[1].apply(other[1]), rtol=1e-6)


SOFT = [
    points.KL(0.5), (points.KL(0.3), None), (None, points.KL(0.2)), points.TV(0.3), points.TV(0.05),
    (points.TV(0.2), points.TV(0.5)), (points.TV(0.2), None),
]  # fmt: skip


def unbalanced(rng, **options):
    x, y, a, b = clouds(rng, **options)
    return [x, y, 2 * a, 3 * b]


def primal_cost(plan, C, a, b, epsilon, marginals):
    def kl(p, q):
        return (p * np.log(np.where(p > 0, p / q, 1)) - p + q).sum()

    found, sides = (plan * C).sum() + epsilon * kl(plan, a[:, None] * b), marginals
    for side, r, w in zip(sides if isinstance(sides, tuple) else (sides, sides), (plan.sum(1), plan.sum(0)), (a, b)):
        if side is None:
            assert_allclose(r, w, rtol=1e-6)
        else:
            found += side.rho * (kl(r, w) if isinstance(side, points.KL) else abs(r - w).sum())
    return found


@pytest.mark.parametrize("marginals", SOFT, ids=repr)
@pytest.mark.parametrize("epsilon", [0.1, 0.01])
def test_unbalanced_costs(xp, rng, marginals, epsilon):
    """No plan costs less than the dual objective, so that theirs are equal at the best of both; and however large a
    constant potentials have to get, they get it soon."""
    x, y, a, b = unbalanced(rng)
    r = points.sinkhorn(*map(xp.asarray, (x, y, a, b)), points.Cost(2, epsilon), marginals=marginals, tol=1e-9)
    assert r.converged
    C = plain.squares(x, y, 1) / 2
    plan = a[:, None] * b * np.exp((to_numpy(r.f)[:, None] + to_numpy(r.g) - C) / epsilon)
    assert_allclose(to_numpy(r.cost), primal_cost(plan, C, a, b, epsilon, marginals), rtol=1e-7)
    assert_allclose(dense(r, 20, 30), plan, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("marginals", [points.KL(1e3), points.TV(1e3), (None, points.KL(1e3))], ids=repr)
def test_constants_of_unbalanced_transport_are_found_soon(rng, marginals):
    given = unbalanced(rng)
    r = points.sinkhorn(*given, COST, marginals=marginals, tol=1e-9)
    assert (r.converged, r.iterations < 200) == (True, True)


def test_mass_that_is_sure_to_stay_is_transported(rng):
    given = clouds(rng)
    exact = points.sinkhorn(*given, COST, tol=1e-9).cost
    for marginals in (points.KL(1e7), points.TV(1e3)):
        assert_allclose(points.sinkhorn(*given, COST, marginals=marginals, tol=1e-9).cost, exact, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:sinkhorn")  # more iterations than it takes
@pytest.mark.parametrize("marginals", SOFT, ids=repr)
@pytest.mark.parametrize("debias", [False, True])
def test_unbalanced_gradients_are_those_of_finite_differences(rng, debias, marginals):
    arrays, options = unbalanced(rng, m=6, n=7, batch=(2,)), {"marginals": marginals, "debias": debias, "tol": 1e-12}
    dcost = rng.standard_normal(2)

    def loss(*now, epsilon=0.2):
        return (dcost * points.sinkhorn(*now, points.Cost(1.5, epsilon), **options).cost).sum()

    grads = points.sinkhorn_vjp(*arrays, points.Cost(1.5, 0.2), **options)[1](dcost)
    for at, (gradient, array) in enumerate(zip(grads, arrays)):
        direction = rng.standard_normal(array.shape) * (array if at > 1 else 1)
        exact = plain.slope(loss, arrays, at, direction, h=1e-4)
        assert_allclose((gradient * direction).sum(), exact, rtol=1e-5)
    ends = [loss(*arrays, epsilon=0.2 + step) for step in (1e-4, -1e-4)]
    assert_allclose(grads.kernel, (ends[0] - ends[1]) / 2e-4, rtol=1e-5)


@pytest.mark.parametrize("marginals", [points.KL(0.5), points.TV(0.2), (points.KL(0.5), None)], ids=repr)
def test_unbalanced_divergences_are_not_negative(xp, rng, marginals):
    x, _, a, _ = clouds(rng, batch=(20,))
    given = x, x + 1e-3 * rng.standard_normal(x.shape), a, (1 + 1e-3 * rng.standard_normal((20, 1))) * a
    options = {"marginals": marginals, "debias": True}
    r = points.sinkhorn(*map(xp.asarray, given), points.Cost(2, 0.02), tol=0.1, **options)
    assert r.converged
    assert to_numpy(r.cost).min() > -1e-12


def test_unbalanced_divergences_are_of_three_costs(rng):
    """Each cloud alone has its own penalty on both sides; and the squared difference of their masses."""
    (x, y, a, b), sides = unbalanced(rng), (points.KL(0.3), points.KL(0.8))
    r = points.sinkhorn(x, y, a, b, COST, marginals=sides, tol=1e-10, debias=True)
    between, first, second = (points.sinkhorn(*given, COST, marginals=marginals, tol=1e-10).cost for given, marginals in
                              (((x, y, a, b), sides), ((x, x, a, a), sides[0]), ((y, y, b, b), sides[1])))
    assert_allclose(r.cost, between - (first + second) / 2 + 0.1 / 2 * (a.sum() - b.sum()) ** 2, rtol=1e-9)


@pytest.mark.parametrize("marginals", [points.KL(0.5), points.TV(0.2)], ids=repr)
def test_unbalanced_divergences_of_a_cloud_and_itself(rng, marginals):
    """Of any mass; for total variation the cost by weights has a kink there."""
    x, _, a, _ = clouds(rng)
    r, backprop = points.sinkhorn_vjp(x, x[::-1], 3 * a, 3 * a[::-1], COST, tol=1e-10, debias=True, marginals=marginals)
    assert_allclose(r.cost, 0, atol=1e-9)
    for gradient in backprop()[: 4 if isinstance(marginals, points.KL) else 2]:
        assert_allclose(gradient, 0 * gradient, atol=1e-8)


@pytest.mark.parametrize(("marginals", "rtol"), [(points.KL(0.5), 3e-6), (points.TV(0.3), 1e-5)], ids=repr)
@pytest.mark.parametrize("far", [1e2, 1e5])
def test_mass_that_is_far_off_stays_there(xp, rng, marginals, rtol, far):
    """In float32 its large potentials do not count as rounding errors of others, and of it all is paid for."""
    x, y, a, b = unbalanced(rng)
    more = np.concatenate([x, x[:2] + far]), np.concatenate([a, [0.2, 0.3]])
    given = [z.astype(np.float32) for z in (more[0], y, more[1], b)]
    r = points.sinkhorn(*map(xp.asarray, given), COST, marginals=marginals)
    assert r.converged
    here = points.sinkhorn(x, y, a, b, COST, marginals=marginals, tol=1e-9).cost
    mass = 0.1 * 0.5 * 3  # of a b^T, epsilon times
    assert_allclose(to_numpy(r.cost), here + 0.5 * marginals.rho + mass, rtol=rtol)


@pytest.mark.parametrize("marginals", [points.KL(0.5), points.TV(0.2)], ids=repr)
def test_points_that_see_nothing_stay(rng, marginals):
    x, y, a, b = unbalanced(rng)
    visible = np.ones((20, 30), bool)
    visible[:5] = False
    r, backprop = points.sinkhorn_vjp(x, y, a, b, COST, marginals=marginals, tol=1e-10, mask=visible)
    some, backprop_of_some = points.sinkhorn_vjp(x[5:], y, a[5:], b, COST, marginals=marginals, tol=1e-10)
    assert r.converged
    stays = marginals.rho + 0.1 * b.sum()
    assert_allclose(r.cost, some.cost + a[:5].sum() * stays, rtol=1e-9)
    grads, found = backprop(), backprop_of_some()
    assert_allclose(grads.dx, np.concatenate([0 * x[:5], found.dx]), atol=1e-8)
    assert_allclose(grads.da, np.concatenate([np.full(5, stays), found.da]), rtol=1e-7)
    tgrads, tfound = backprop.hvp(x, y, a, b), backprop_of_some.hvp(x[5:], y, a[5:], b)
    assert_allclose(tgrads.da, np.concatenate([np.full(5, 0.1 * b.sum()), tfound.da]), rtol=1e-6)
    assert_allclose(tgrads.dx, np.concatenate([0 * x[:5], tfound.dx]), atol=1e-6)


@pytest.mark.parametrize("marginals", [points.KL(0.5), points.TV(0.2)], ids=repr)
def test_unbalanced_clouds_of_unequal_size(rng, marginals):
    """What is beyond lengths does not count."""
    arrays, moves = unbalanced(rng), clouds(rng)
    padded, tpadded = ([np.concatenate([array, np.full((5, *array.shape[1:]), fill)]) for array in given]
                       for given, fill in ((arrays, np.nan), (moves, 0.0)))  # fmt: skip
    found, alone = (points.sinkhorn_vjp(*given, COST, marginals=marginals, tol=1e-10, mask=mask)
                    for given, mask in ((padded, na.Lengths(30, 20)), (arrays, None)))  # fmt: skip
    assert_allclose(found[0].cost, alone[0].cost, rtol=1e-9)
    for got, wanted in zip((*found[1](), *found[1].hvp(*tpadded)), (*alone[1](), *alone[1].hvp(*moves))):
        assert_allclose(got, np.concatenate([wanted, np.zeros((5, *wanted.shape[1:]))]), atol=1e-6)


def test_small_epsilons_sort_points_on_a_line(rng):
    x, y, a = rng.random((200, 1)), 3 + rng.random((200, 1)), np.full(200, 1 / 200)
    r = points.sinkhorn(x, y, a, a, points.Cost(2, 1e-3), tol=1e-2)
    assert r.converged
    assert_allclose(r.cost, ((np.sort(x, 0) - np.sort(y, 0)) ** 2).mean() / 2, rtol=2e-3)


@pytest.mark.parametrize("make", [lambda: points.Cost(2, 2e-3), lambda: points.PairCost(of_pairs, 2e-3)])
def test_annealing_saves_iterations(rng, monkeypatch, make):
    given = clouds(rng, 100, 100)
    given[2:] = np.full((2, 100), 0.01)
    found = []
    for shrinkage in (2, 1e9):
        monkeypatch.setattr(clouds_module, "SHRINKAGE", shrinkage)
        found.append(points.sinkhorn(*given, make(), tol=1e-3))
    assert_allclose(found[0].cost, found[1].cost, rtol=1e-3)
    assert found[0].iterations < 0.9 * found[1].iterations


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("power", [1.5, 2])
def test_gradients_are_those_of_finite_differences(rng, debias, power):
    x, y, a, b = clouds(rng, m=6, n=7, batch=(2,))
    arrays = x[0], y, a, b
    cost, dcost = points.Cost(power, 0.2), rng.standard_normal(2)

    def loss(*now, cost=cost):
        return (dcost * points.sinkhorn(*now, cost, tol=1e-12, debias=debias).cost).sum()

    r, backprop = points.sinkhorn_vjp(*arrays, cost, tol=1e-12, debias=debias)
    grads = backprop(dcost)
    assert grads._fields == ("dx", "dy", "da", "db")
    for at, (gradient, array) in enumerate(zip(grads, arrays)):
        assert gradient.shape == array.shape
        direction = rng.standard_normal(array.shape)
        if at > 1:
            direction -= direction.mean(-1, keepdims=True)
        exact = plain.slope(loss, arrays, at, direction, h=1e-4)
        assert_allclose((gradient * direction).sum(), exact, rtol=1e-5)
    h = 1e-4
    ends = [loss(*arrays, cost=points.Cost(power, 0.2 + step)) for step in (h, -h)]
    assert_allclose(grads.kernel, (ends[0] - ends[1]) / (2 * h), rtol=1e-5)
    for one, other in zip(backprop(), backprop(np.ones(2))):
        assert_array_equal(one, other)


@pytest.mark.parametrize("far", [1e2, 1e3, 1e6])
def test_points_far_from_others_keep_the_digits_of_the_cost(xp, rng, far):
    """Annealing begins with their distance, and leaves nothing of its size. In float32 they are on both sides, so that
    the others are near the centre."""
    x, y, a, b = clouds(rng)
    x, y = (np.concatenate([z, z[:2] + far, z[:2] - far]) for z in (x, y))
    a, b = (np.concatenate([w, [0.1, 0.2, 0.1, 0.2]]) for w in (a, b))
    groups = [slice(-4), slice(-4, -2), slice(-2, None)]
    for dtype, rtol in [(np.float64, 1e-6), (np.float32, 1e-4)][: 2 if far < 1e6 else 1]:
        given = [z.astype(dtype) for z in (x, y, a, b)]
        r = points.sinkhorn(*map(xp.asarray, given), COST)
        assert r.converged
        exact = sum(exact_cost(*(z[some].astype(np.float64) for z in given), COST) for some in groups)
        assert_allclose(to_numpy(r.cost), exact, rtol=rtol)
        assert max(abs(to_numpy(z)).max() for z in (r.f, r.g)) < 50


def test_constants_are_of_each_group_and_element_of_a_batch(rng):
    """Groups of points on a line, each with other sums of weights; in the second element mass has to cross."""
    x = np.stack([1e4 * np.arange(8.0)[:, None]] * 2)
    y, a = x + rng.random((2, 8, 1)), rng.random((2, 8)) + 0.1
    b = a.copy()
    b[1, :2] = a[1, 1::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        r = points.sinkhorn(x, y, a, b, COST, max_iterations=200)
    assert_allclose(r.cost[0], exact_cost(x[0], y[0], a[0], b[0], COST, 5), rtol=1e-9)
    assert r.cost[1] > 1e6


def test_too_few_digits_are_no_convergence(rng):
    """Nor worth more iterations."""
    x, y, a, b = (z.astype(np.float32) for z in clouds(rng))
    with pytest.warns(UserWarning, match="or float64 where points are many epsilons apart"):
        r = points.sinkhorn(x, y + 1000, a, b, COST)
    assert (r.converged, r.iterations < 100) == (False, True)
    assert_allclose(r.cost, exact_cost(*map(np.float64, (x, y, a, b)), COST) + 1e6, rtol=1e-2)


def test_divergences_are_not_negative_by_the_tolerance(xp, rng):
    x, _, a, _ = clouds(rng, batch=(20,))
    given = x, x + 1e-3 * rng.standard_normal(x.shape), a, a
    r = points.sinkhorn(*map(xp.asarray, given), points.Cost(2, 0.02), tol=0.1, debias=True)
    assert r.converged
    assert to_numpy(r.cost).min() > -1e-12


def test_weights_of_any_sum(rng):
    x, y, a, b = clouds(rng)
    r, backprop = points.sinkhorn_vjp(x, y, 5 * a, 5 * b, COST, tol=1e-12)
    one, backprop_one = points.sinkhorn_vjp(x, y, a, b, COST, tol=1e-12)
    assert_allclose(backprop().dx, 5 * backprop_one().dx, atol=1e-9)
    assert_allclose(backprop().kernel, 5 * (backprop_one().kernel - math.log(5)), rtol=1e-9)
    nothing = points.sinkhorn(x, y, 0 * a, 0 * b, COST)
    assert nothing.converged
    assert nothing.cost == 0


def test_both_potentials_are_within_total_variation():
    """After a constant moved them, too. The cost is by the minimum over plans of one row."""
    y, a, b = np.array([[0.88], [0.86], [1.722]]), np.array([2.0]), np.array([0.886, 1.208, 0.906])
    r = points.sinkhorn(np.zeros((1, 1)), y, a, b, points.Cost(2, 1.0), marginals=points.TV(1.0), tol=1e-12)
    assert r.g.max() <= 1
    assert_allclose(r.cost, 3.832936245)
    for seed in 69, 429:
        x, y = np.random.default_rng(seed).standard_normal((2, 4, 1))
        a, b = np.random.default_rng(seed).random((2, 4)) + 0.5
        r = points.sinkhorn(x[:1], y, a[:1], b, points.Cost(2, 1.0), marginals=points.TV(0.7), tol=1e-12)
        assert max(r.f.max(), r.g.max()) <= 0.7


def test_debiased_costs_are_divergences(rng):
    x, y, a, b = clouds(rng)
    again = points.sinkhorn_vjp(x, x[::-1], a, a[::-1], COST, tol=1e-10, debias=True)
    assert_allclose(again[0].cost, 0, atol=1e-9)
    assert_allclose(again[1]().dx, 0 * x, atol=1e-9)
    cost = exact_cost(x, y, a, b, COST) - (exact_cost(x, x, a, a, COST) + exact_cost(y, y, b, b, COST)) / 2
    r = points.sinkhorn(x, y, a, b, COST, tol=1e-10, debias=True)
    assert_allclose(r.cost, cost, rtol=1e-7)
    assert_allclose(r.cost, (a * r.f).sum() + (b * r.g).sum())


def test_points_without_weight_change_nothing(rng):
    x, y, a, b = clouds(rng)
    r, backprop = points.sinkhorn_vjp(x, y, a, b, COST, tol=1e-9)
    more, some = np.concatenate([x, x[:3] + 0.1]), np.concatenate([a, np.zeros(3)])
    again, backprop_again = points.sinkhorn_vjp(more, y, some, b, COST, tol=1e-9)
    assert_allclose(again.cost, r.cost, rtol=1e-6)
    assert np.isfinite(again.f).all()
    grads = backprop_again()
    assert_array_equal(grads.dx[20:], np.zeros((3, 2)))
    assert_allclose(grads.dx[:20], backprop().dx, atol=1e-6)


@pytest.mark.parametrize(("marginals", "without"), [
    (None, "ab"), (points.KL(0.5), "a"), (points.KL(0.5), "b"), (points.KL(0.5), "ab"), ((points.KL(0.5), None), "b"),
    ((None, points.KL(0.5)), "a"), ((None, points.KL(0.5)), "ab"), (points.TV(0.5), "a"), ((points.TV(0.5), None), "b"),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("debias", [False, True])
def test_clouds_without_weight_carry_nothing(xp, rng, marginals, without, debias):
    """One element of a batch with such clouds, beside one without and one of points that they share."""
    x, y, a, b = clouds(rng, m=6, n=7, batch=(3,))
    a[1], b[1] = a[1] * ("a" not in without), b[1] * ("b" not in without)
    options = {"marginals": marginals, "tol": 1e-10, "debias": debias}
    r, backprop = points.sinkhorn_vjp(*map(xp.asarray, (x[0], y, a, b)), COST, **options)
    assert r.converged
    some = [0, 2]
    own, backprop_of_some = points.sinkhorn_vjp(*(z[some] for z in (np.stack([x[0]] * 3), y, a, b)), COST, **options)
    assert_allclose(to_numpy(r.cost)[some], own.cost, rtol=1e-6)
    potentials = np.concatenate([to_numpy(r.f)[1], to_numpy(r.g)[1]])
    assert not np.isnan(potentials).any()
    assert_array_equal(sum(to_numpy(plan)[1].sum() for *_, plan in r.plan()), 0)
    grads, wanted = [*map(to_numpy, backprop())], backprop_of_some()
    assert all(np.isfinite(gradient).all() for gradient in grads)
    if not debias:  # which has clouds alone
        assert_allclose(to_numpy(r.cost)[1], (a[1].sum() + b[1].sum()) * 0.5)
        assert_allclose(grads[0], wanted.dx.sum(axis=0), atol=1e-6)
        assert_array_equal(grads[1][1], 0)
    assert_allclose(grads[1][some], wanted.dy, atol=1e-6)
    moves = [xp.asarray(rng.standard_normal(z.shape)) for z in (x[0], y)]
    assert all(np.isfinite(to_numpy(z)).all() for z in backprop.hvp(*moves))
    for name, gradient, w in (("a", grads[2], a), ("b", grads[3], b)):
        if name in without and "TV" not in repr(marginals):  # whose potentials are finite
            assert_array_equal(gradient[1], 0 * w[1])


def of_pairs(x, y):
    return ((x[..., :, None, :] - y[..., None, :, :]) ** 2).sum(-1) / 2


def of_pairs_vjp(x, y, dcosts):
    apart = dcosts[..., None] * (x[..., :, None, :] - y[..., None, :, :])
    return apart.sum(-2), -apart.sum(-3)


@pytest.mark.parametrize(("options", "n"), [
    ({}, 40), ({"debias": True}, 20), ({"marginals": points.KL(0.3), "debias": True}, 20),
    ({"marginals": (points.TV(0.3), None), "mask": na.Lengths(40, 20)}, 45),
], ids=repr)  # fmt: skip
def test_a_cost_of_ones_own(xp, rng, monkeypatch, options, n):
    """That of Cost is the same: in blocks, of a batch of which x is no part."""
    monkeypatch.setattr(formula, "ROWS", 7)
    monkeypatch.setattr(formula, "COLUMNS", 32)
    x, y, a, b = clouds(rng, n=n, batch=(2,))
    x, a = x[0], a[0]
    if "mask" in options:
        y[:, 40:], b[:, 40:] = np.nan, np.nan
        b /= b[:, :40].sum(-1, keepdims=True)
    given, dcost = [*map(xp.asarray, (x, y, a, b))], xp.asarray(rng.standard_normal(2))
    found, wanted = (points.sinkhorn_vjp(*given, cost, tol=1e-9, **options)
                     for cost in (points.PairCost(of_pairs, 0.1, of_pairs_vjp), COST))  # fmt: skip
    assert found[0].converged
    got, want = ((*backprop(dcost), backprop(dcost).kernel, r.cost, r.primal(), r.f, r.g, r.apply(given[1] * 0 + 1))
                 for r, backprop in (found, wanted))  # fmt: skip
    for one, other in zip(got, want, strict=True):
        assert isinstance(one, xp.ndarray)
        assert_allclose(to_numpy(one), to_numpy(other), rtol=1e-6, atol=1e-8)
    assert_allclose(dense(found[0], 2, 20, n), dense(wanted[0], 2, 20, n), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("marginals", [None, points.KL(0.5)], ids=repr)
def test_gradients_of_a_cost_that_is_not_symmetric(rng, marginals):
    x, y, a, b = arrays = clouds(rng, m=6, n=7)

    def cost(x, y):
        return np.exp(x[:, None, 0] - y[:, 1])

    def vjp(x, y, dcosts):
        found = dcosts * cost(x, y)
        return np.stack([found.sum(1), 0 * x[:, 1]], -1), np.stack([0 * y[:, 0], -found.sum(0)], -1)

    def call(*now, vjp=None):
        return points.sinkhorn_vjp(*now, points.PairCost(cost, 0.1, vjp), marginals=marginals, tol=1e-11)

    grads = call(*arrays, vjp=vjp)[1]()
    for at, gradient in enumerate(grads):
        move = rng.standard_normal(gradient.shape)
        move -= move.mean() if at > 1 else 0
        wanted = plain.slope(lambda *now: call(*now)[0].cost, arrays, at, move, h=1e-4)
        assert_allclose((gradient * move).sum(), wanted, rtol=1e-5)


def test_a_cost_need_not_be_symmetric(rng):
    """Without a vjp there are the other gradients."""
    x, y, a, b = clouds(rng)

    def cost(x, y):
        return np.abs(x[:, None, 0] - y[:, 1]) + x[:, None, 1] ** 2 * y[:, 0]

    def loss(a, b, epsilon=0.01):
        return points.sinkhorn(x, y, a, b, points.PairCost(cost, epsilon), tol=1e-9, max_iterations=5000).cost

    r, backprop = points.sinkhorn_vjp(x, y, a, b, points.PairCost(cost, 0.01), tol=1e-9, max_iterations=5000)
    plan = dense(r, 20, 30)
    assert_allclose(plan.sum(1), a, rtol=1e-6)
    assert_allclose(r.cost, (plan * cost(x, y)).sum() + 0.01 * (plan * np.log(plan / a[:, None] / b)).sum(), rtol=1e-6)
    grads, move = backprop(), np.linspace(-1e-3, 1e-3, 20)
    assert grads.dx is grads.dy is None
    assert_allclose((grads.da * move).sum(), plain.slope(loss, [a, b], 0, move, h=1e-2), rtol=1e-4)
    ends = [loss(a, b, 0.01 + step) for step in (1e-5, -1e-5)]
    assert_allclose(grads.kernel, (ends[0] - ends[1]) / 2e-5, rtol=1e-4)
    with pytest.raises(TypeError, match=r"hvp: got PairCost\(.*cost, epsilon=0.01\), expected points.Cost, whose"):
        backprop.hvp(x, y)


def of_vjp(vjp):
    return points.sinkhorn_vjp(X, X, W, W, points.PairCost(of_pairs, 0.1, vjp))[1]()


@pytest.mark.parametrize(("make", "kind", "message"), [
    (lambda: points.PairCost(1.0, 0.1), TypeError, "PairCost function: got 1.0, expected a function"),
    (lambda: points.PairCost(of_pairs, 0.1, 2), TypeError, "PairCost vjp: got 2, expected a function"),
    (lambda: of_vjp(lambda x, y, dcosts: (x[:2], y)), ValueError,
     r"PairCost vjp: got arrays of the shapes \[\(2, 3\), \(4, 3\)\], expected two, \(4, 3\) and \(4, 3\), the gra"),
    (lambda: of_vjp(lambda x, y, dcosts: x), ValueError, "PairCost vjp: got numpy.ndarray of float64, expected two, "),
    (lambda: points.PairCost(of_pairs, 0.0), ValueError, "PairCost epsilon: got 0.0, allowed finite and > 0"),
    (lambda: points.product(X, X, X, points.PairCost(of_pairs, 1.0)), TypeError, r"kernel: got PairCost\(of_pairs, "),
    (lambda: points.sinkhorn(X, X, W, W, points.PairCost(lambda x, y: x @ y.T @ y, 0.1)), ValueError,
     r"PairCost function: got the shape \(4, 3\), of float64, expected \(4, 4\), of float64, for x \(4, 3\) and y"),
    (lambda: points.sinkhorn(X, X, W, W, points.PairCost(lambda x, y: 3.0, 0.1)), ValueError, "function: got 3.0, exp"),
    (lambda: points.sinkhorn(X, X, W, W, points.PairCost(lambda x, y: np.inf + x @ y.T, 0.1)), ValueError,
     "cost: got PairCost.*, whose values are not finite in float64, divided by epsilon"),
])  # fmt: skip
def test_errors_of_costs_of_ones_own(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_segments_are_problems_of_their_own(rng):
    one, other = clouds(rng), clouds(rng, m=15, n=10)
    together = [np.concatenate(pair) for pair in zip(one, other)]
    mask = na.Segments([0, 20, 35], [0, 30, 40])
    r, backprop = points.sinkhorn_vjp(*together, COST, tol=1e-9, mask=mask)
    assert_allclose(r.cost, sum(exact_cost(*given, COST) for given in (one, other)), rtol=1e-7)
    dx = [points.sinkhorn_vjp(*given, COST, tol=1e-9)[1]().dx for given in (one, other)]
    assert_allclose(backprop().dx, np.concatenate(dx), atol=1e-6)


def test_what_is_beyond_lengths_may_be_nan(rng):
    x, y, a, b = clouds(rng)
    padded = [np.concatenate([array, np.full((5, *array.shape[1:]), np.nan)]) for array in (x, y, a, b)]
    r, backprop = points.sinkhorn_vjp(*padded, COST, tol=1e-9, mask=na.Lengths(30, 20))
    assert_allclose(r.cost, exact_cost(x, y, a, b, COST), rtol=1e-7)
    assert all(np.isfinite(gradient).all() for gradient in backprop())


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_single_precision_converges(rng, dtype):
    """To what rounding leaves of the tolerance."""
    x, y, _, _ = clouds(rng, d=20)
    given = [array.astype(dtype) for array in (x, y, np.full(20, 1 / 20), np.full(30, 1 / 30))]
    r, backprop = points.sinkhorn_vjp(*given, points.Cost(2, 0.5))
    assert r.converged
    assert r.cost.dtype == np.float32
    wide = [array.astype(np.float64) for array in given]
    assert_allclose(r.cost, points.sinkhorn(*wide, points.Cost(2, 0.5), tol=1e-9).cost, rtol=3e-6)
    assert {gradient.dtype for gradient in backprop()} == {np.dtype(dtype)}
    x, y, *weights = given
    _, backprop = points.sinkhorn_vjp(x, y, *[w.astype(np.float32) for w in weights], points.Cost(2, 0.5))
    assert [gradient.dtype for gradient in backprop()] == [dtype] * 2 + [np.float32] * 2


def test_an_iteration_is_two_passes(rng, monkeypatch):
    passes, run = [], backends.run_points
    monkeypatch.setattr("numbattn.points.pairs.run_points", lambda *args, **options: (
        passes.append(args[1]) or run(*args, **options)))  # fmt: skip
    with pytest.warns(UserWarning, match="sinkhorn: not converged to 0 within 10 iterations: allow more") as found:
        r = points.sinkhorn(*clouds(rng), COST, tol=0, max_iterations=10)
    assert found[0].filename == __file__
    assert not r.converged
    assert r.iterations == 10
    assert passes == ["logsumexp"] * 20


@pytest.mark.parametrize("marginals", [points.KL(1.0), points.TV(1.0), (None, points.TV(1.0))], ids=repr)
@pytest.mark.parametrize(("m", "n"), [(0, 0), (0, 3), (3, 0)])
def test_no_points_on_a_side(marginals, m, n):
    """All mass of the other side stays, at the cost of its penalty; where it may not, there is none."""
    x, y = np.zeros((m, 2)), np.zeros((n, 2))
    a = np.full(m, 0.5 * (not isinstance(marginals, tuple)))
    r, backprop = points.sinkhorn_vjp(x, y, a, np.full(n, 0.5), COST, marginals=marginals)
    assert_allclose(r.cost, a.sum() + n / 2)
    assert [*map(np.shape, backprop())] == [(m, 2), (n, 2), (m,), (n,)]


def test_no_points():
    x, a = np.zeros((0, 2)), np.zeros(0)
    r, backprop = points.sinkhorn_vjp(x, x, a, a, COST)
    assert (r.converged, float(r.cost)) == (True, 0.0)
    assert backprop().dx.shape == (0, 2)


X, W = np.zeros((4, 3)), np.full(4, 0.25)
NAN_IN_ONE = np.array([1, np.nan, 1, 1])[:, None]


@pytest.mark.parametrize(("given", "options", "kind", "message"), [
    ((X, X, W[:3], W, COST), {}, ValueError, r"a: got the shape \(3,\), expected \(..., 4\), a number for each poi"),
    ((X, X, W, 2 * W, COST), {}, ValueError, "b: got weights whose sum is 2, expected 1, the sum of a, or marginals"),
    ((X, X, W, W, COST), {"marginals": 1.0}, TypeError, "marginals: got 1.0, expected points.KL"),
    ((X, X, W, -W, COST), {"marginals": points.KL(1)}, ValueError, "b: got weights from -0.25 to -0.25, allowed"),
    ((X, X, W, 0 * W, COST), {"marginals": (None, points.KL(1))}, ValueError, "b: got weights whose sum is 0, expect"),
    ((X, X, 0 * W, W, COST), {"marginals": (points.TV(1), None)}, ValueError, "b: got weights whose sum is 1, expect"),
    ((X, X, W, W - 1, COST), {}, ValueError, "b: got weights from -0.75 to -0.75, allowed finite and >= 0"),
    ((X, X, W, np.full(4, np.nan), COST), {}, ValueError, "b: got weights from nan to nan"),
    ((X, X + 1, W, W, points.Cost(2, 1e-310)), {}, ValueError, "x, y: got points that are not finite in float64, div"),
    ((X, X + np.nan, W, W, COST), {}, ValueError, "x, y: got points that are not finite in float64, divided by eps"),
    ((X, X * NAN_IN_ONE, W, W, COST), {}, ValueError, "x, y: got points that are not finite in float64, divided by"),
    ((X * NAN_IN_ONE, X, W, W, COST), {}, ValueError, "x, y: got points that are not finite in float64, divided by"),
    ((X, X + 1, W, W, points.Cost(2, 1e-310)), {}, ValueError, r"\(1 / power\), 1e-155, and .* epsilon than 1e-310"),
    ((*map(np.float32, (X, X, W, W)), points.Cost(0.5, 1e-30)), {}, ValueError, "the length 1e-60, allowed 1.18e-38"),
    ((X, X, W, W, points.Gaussian()), {}, TypeError, r"cost: got Gaussian\(length=1.0\), expected points.Cost"),
    ((X, X, W, W, 2 * COST), {}, TypeError, r"cost: got 2 \* Cost\(power=2.0, epsilon=0.1\), expected points.Cost"),
    ((X, X, W, W, COST), {"tol": -1.0}, ValueError, "tol: got -1.0, allowed finite and >= 0"),
    ((X, X, W, W, COST), {"max_iterations": 0}, ValueError, "max_iterations: got 0, allowed 1 or more"),
    ((X, X, W, W, COST), {"debias": 1}, TypeError, "debias: got 1, expected True or False"),
    ((X, X, W, W, COST), {"debias": True, "mask": na.Causal()}, ValueError, "debias: got True with a mask"),
])  # fmt: skip
def test_errors(given, options, kind, message):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kind, match=message):
            points.sinkhorn(*given, **options)


def test_errors_of_gradients(rng):
    r, backprop = points.sinkhorn_vjp(*clouds(rng), COST)
    with pytest.raises(ValueError, match=r"values: got the shape \(20, 1\), .* 30, columns\), a row for each point"):
        r.apply(np.ones((20, 1)))
    with pytest.raises(TypeError, match="values: got float32, expected float64, the dtype of x"):
        r.apply(np.ones((20, 1), np.float32), transposed=True)
    with pytest.raises(ValueError, match=r"values: got the batch axes \(3,\), allowed are those of the plan, \(\)"):
        r.apply(np.ones((3, 30, 1)))
    with pytest.raises(ValueError, match=r"dcost: got the shape \(2,\), expected \(\), the shape of cost"):
        backprop(np.ones(2))
    with pytest.raises(TypeError, match="dcost: got 'one', expected a number"):
        backprop("one")


FAULTS = {
    "test_errors_of_costs_of_ones_own": {"points/kernels.py": {"if shapes != [x.shape, y.shape]:": "if not shapes:"}},
    "test_no_points_on_a_side": {"points/clouds.py": {"if not all(self.pairs.sizes):": "if False:"}},
    "test_both_potentials_are_within_total_variation": {
        "points/clouds.py": {"if is_done and self.is_balanced:": "if is_done:"},
    },
    "test_plans_and_what_they_carry": {
        "averages, (of, points) = potentials.over_x": "averages, (of, points) = potentials.over_y",
        "points/potentials.py": {
            "clouds, solution = self.clouds.of_whole_batch": "clouds, solution = self.clouds",
        },
    },
    "test_points_without_weight_change_nothing": {
        "points/clouds.py": {
            "np.where((weights > 0) & ~np.isposinf(potential), np.log(weights) + potential, -math.inf)": (
                "np.log(weights + 1e-30) + potential"
            ),
        },
    },
    "test_clouds_without_weight_carry_nothing": {
        "np.where(np.isposinf(one), one, one - of_x(own)) for": "one - of_x(own) for",
        "seen & ((w > 0) | np.isfinite(potential))": "seen",
        "(clouds.of_a._is_exact & (a > 0) & (b == 0))": "(clouds.of_a._is_exact & (b == 0))",
        "points/clouds.py": {"(weights > 0) & ~np.isposinf(potential)": "weights > 0"},
    },
    "test_a_cost_of_ones_own": {
        "depsilon = -(dcost * (between - sum(alone) / 2)).sum()": "depsilon = -(dcost * between).sum()",
        "points/pairs.py": {
            "self.kind, self.features, self.exchanged = other.kind.exchanged,": (
                "self.kind, self.features, self.exchanged = other.kind,"
            ),
        },
        "points/kernels.py": {"[gradient / self.epsilon for gradient": "[gradient for gradient"},
        "points/formula.py": {"np.where(kappa == 0, 0, kappa * distances(block, kind))": "kappa * block.x.sum()"},
    },
    "test_gradients_of_a_cost_that_is_not_symmetric": {
        "points/clouds.py": {'vars(found)["term"] = self.term.exchanged': "pass"},
        "points/kinds.py": {"self.vjp(y, x, np.swapaxes(dt, -2, -1))[1] if": "self.vjp(x, y, dt)[1] if"},
    },
    "test_a_cost_need_not_be_symmetric": {
        "points/kinds.py": {"np.swapaxes(self.costs(y, x), -2, -1) if": "self.costs(x, y) if"},
    },
    "test_debiased_costs_are_divergences": {
        "np.where(np.isposinf(one), one, one - of_x(own)) for one": "one - of_x(alone[1]) for one",
    },
    "test_weights_of_any_sum": {
        "depsilon = depsilon + (dcost * (cost - paid)).sum() / clouds.cost.epsilon": "pass",
    },
    "test_unbalanced_costs": {
        "for value, mass in zip(found, masses)": "for value, mass in zip(found, [0, 0])",
        "points/potentials.py": {"np.exp(self.solution.f / self.clouds.cost.epsilon - rows)": "np.exp(0 * rows)"},
    },
    "test_constants_of_unbalanced_transport_are_found_soon": {
        "points/clouds.py": {"f, g = self.shifted(f, g)": "pass"},
    },
    "test_unbalanced_gradients_are_those_of_finite_differences": {
        "(dcost * (cost - paid)).sum()": "(dcost * cost).sum()",
        "self.values(self.solved, 1.0)": "self.values(self.solved, 0.5)",
    },
    "test_unbalanced_divergences_are_of_three_costs": {
        "if self.debias or not part:": "if not part:",
        "points/clouds.py": {"self.cost, self.of_a, self.of_a)": "self.cost, self.of_b, self.of_a)"},
    },
    "test_mass_that_is_far_off_stays_there": {
        "points/clouds.py": {
            "np.where(w > 0, np.minimum(side._share(z), 1), 0)": "np.where(w > 0, np.ones_like(z), 0)",
        },
    },
    "test_points_that_see_nothing_stay": {
        "points/clouds.py": {"np.where(rows > 0, rows * np.abs(": "np.where(self.a > 0, rows * np.abs("},
        "points/potentials.py": {"np.where(np.isneginf(rows), 0, np.exp(": "np.where(False, 0, np.exp("},
    },
    "test_unbalanced_clouds_of_unequal_size": {
        "np.where(seen & np.isfinite(gradient), gradient, 0)": "np.where(np.isfinite(gradient), gradient, 0)",
    },
    "test_single_precision_converges": {
        "clouds = replace(clouds, b=_of_sum(second, first))": "pass",
        "max(rounding, EQUAL) * np": "0 * np",
    },
    "test_points_far_from_others_keep_the_digits_of_the_cost": {
        "points/clouds.py": {
            "f, g = self.without_gaps(f, g, epsilon)": "pass",
            "(m + n - 1) // 2 : (m + n) // 2 + 1": ":1",
        },
    },
    "test_constants_are_of_each_group_and_element_of_a_batch": {
        "points/clouds.py": {"spare = np.where(is_free, np.maximum(": "spare = np.where(True, np.maximum("},
    },
    "test_too_few_digits_are_no_convergence": {
        "points/clouds.py": {"(self.rounding(f, g) <= max(tol, TRUSTED)).all()": "True"},
    },
    "test_divergences_are_not_negative_by_the_tolerance": {
        "if is_negative.any():": "if False:",
    },
    "test_annealing_saves_iterations": {
        "points/clouds.py": {
            "epsilon = last * SHRINKAGE**at": "epsilon = last",
            "return math.log(max(largest, 1), SHRINKAGE)": "return 0.0",
        },
    },
}

"""How the potentials of optimal transport change with the points, and Hessian-vector products of its cost."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn import points
from numbattn.base import backends
from numbattn.points.potentials import conjugate_gradients

from ..accuracy import to_numpy
from .test_sinkhorn import SOFT, clouds, unbalanced

COST = points.Cost(2, 0.1)
EXACT = {"tol": 1e-13, "max_iterations": 3000}


def without_mean(x):
    return x - x.mean(-1, keepdims=True)


@pytest.mark.filterwarnings("ignore:sinkhorn")  # more iterations than it takes
@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("power", [1, 1.5, 2, 3])
def test_hessians_are_those_of_finite_differences(xp, rng, power, debias):
    """By points and weights, of a batch that shares x, and with points without weight."""
    x, y, a, b = clouds(rng, m=6, n=7, batch=(2,))
    a[1, 2] = b[1, 3] = 0
    a, b = (weights / weights.sum(-1, keepdims=True) for weights in (a, b))
    dcost, cost, given, h = rng.standard_normal(2), points.Cost(power, 0.3), (x[0], y, a, b), 1e-4
    moves = [rng.standard_normal(z.shape) for z in given[:2]]
    moves += [0.1 * weights * without_mean(rng.standard_normal(weights.shape)) for weights in given[2:]]
    moves[2:] = [move - weights * move.sum(-1, keepdims=True) for move, weights in zip(moves[2:], given[2:])]

    def backprop_at(step, of=np.asarray):
        now = (of(z + step * move) for z, move in zip(given, moves))
        return points.sinkhorn_vjp(*now, cost, **EXACT, debias=debias)[1]

    ahead, behind = (backprop_at(step)(dcost) for step in (h, -h))
    found = backprop_at(0, xp.asarray).hvp(*map(xp.asarray, moves), dcost=xp.asarray(dcost), tol=1e-10)
    assert found.kernel is None
    for at, (got, *ends) in enumerate(zip(found, ahead, behind, strict=True)):
        assert isinstance(got, xp.ndarray)
        got, exact = to_numpy(got), (ends[0] - ends[1]) / (2 * h)
        if at > 1:
            got, exact = without_mean(got), without_mean(exact)
        assert_allclose(got, exact, rtol=1e-4, atol=3e-5 * np.abs(exact).max())


@pytest.mark.filterwarnings("ignore:sinkhorn")  # more iterations than it takes
@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("marginals", SOFT, ids=repr)
def test_hessians_of_unbalanced_transport(rng, debias, marginals):
    """Are those of finite differences, with points without weight."""
    given, dcost, h = unbalanced(rng, m=6, n=7, batch=(2,)), rng.standard_normal(2), 1e-5
    given[2][1, 2] = given[3][0, 3] = 0
    moves = [rng.standard_normal(z.shape) * (0.1 * z if at > 1 else 1) for at, z in enumerate(given)]

    def backprop_at(step):
        now = (z + step * move for z, move in zip(given, moves))
        return points.sinkhorn_vjp(*now, points.Cost(1.5, 0.3), **EXACT, debias=debias, marginals=marginals)[1]

    ahead, behind = (backprop_at(step)(dcost) for step in (h, -h))
    for got, *ends in zip(backprop_at(0).hvp(*moves, dcost=dcost, tol=1e-10), ahead, behind, strict=True):
        exact = (ends[0] - ends[1]) / (2 * h)
        assert_allclose(got, exact, rtol=1e-4, atol=3e-5 * np.abs(exact).max())


def test_hessians_within_total_variation_are_those_without(rng):
    """But for constants of the potentials, which conjugate gradients leave out."""
    (x, y, a, b), moves = clouds(rng), clouds(rng)[:2]
    soft, exact = (points.sinkhorn_vjp(x, y, a, b, COST, tol=1e-11, marginals=marginals)[1].hvp(*moves, tol=1e-9)
                   for marginals in (points.TV(10.0), None))  # fmt: skip
    for got, wanted in zip(soft[:2], exact):
        assert_allclose(got, wanted, rtol=1e-6, atol=1e-8)
    assert_allclose(without_mean(soft.da), without_mean(exact.da), atol=1e-8)


@pytest.mark.parametrize("debias", [False, True])
def test_hessians_are_symmetric(rng, debias):
    x, y, a, b = clouds(rng, d=10)
    _, backprop = points.sinkhorn_vjp(x, y, a, b, points.Cost(2, 0.5), tol=1e-9, debias=debias)
    one, other = ([rng.standard_normal(z.shape) for z in (x, y)] for _ in range(2))
    one += [0.1 * without_mean(rng.standard_normal(z.shape)) for z in (a, b)]
    other += [None, without_mean(rng.standard_normal(b.shape))]
    there, back = (sum((u * v).sum() for u, v in zip(backprop.hvp(*from_, tol=1e-9), to) if v is not None)
                   for from_, to in ((one, other), (other, one)))  # fmt: skip
    assert_allclose(there, back, rtol=1e-8)


def test_the_cost_of_moving_both_clouds_does_not_change(rng):
    """By the same vector."""
    x, y, a, b = clouds(rng)
    _, backprop = points.sinkhorn_vjp(x, y, a, b, COST, tol=1e-10)
    move = rng.standard_normal(2)
    for found in backprop.hvp(*(np.broadcast_to(move, z.shape) for z in (x, y)))[:2]:
        assert_allclose(found, 0, atol=1e-10)
    alone = backprop.hvp(np.broadcast_to(move, x.shape), None, tol=1e-9).dx  # each point by its weight
    assert_allclose(alone.sum(0), move, rtol=1e-6)


def test_nothing_moves(rng):
    _, backprop = points.sinkhorn_vjp(*clouds(rng), COST, debias=True)
    for found in backprop.hvp(None, None):
        assert_array_equal(found, 0 * found)


def test_segments_are_problems_of_their_own(rng):
    """One of them without weights."""
    one, other = clouds(rng), clouds(rng, m=15, n=10)
    together = [np.concatenate(three) for three in zip(one, other, [*one[:2], 0 * one[2], 0 * one[3]])]
    tx, ty = (rng.standard_normal(z.shape) for z in together[:2])
    mask = na.Segments([0, 20, 35, 55], [0, 30, 40, 70])
    found = points.sinkhorn_vjp(*together, COST, tol=1e-10, mask=mask)[1].hvp(tx, ty, tol=1e-9)
    parts = [points.sinkhorn_vjp(*given, COST, tol=1e-10)[1].hvp(*ts, tol=1e-9).dx
             for given, ts in ((one, (tx[:20], ty[:30])), (other, (tx[20:35], ty[30:40])))]  # fmt: skip
    assert_allclose(found.dx, np.concatenate([*parts, 0 * one[0]]), atol=1e-7)
    assert all(np.isfinite(gradient).all() for gradient in found)


def test_points_without_weight_have_potentials(rng):
    """Conjugate gradients do not find these."""
    (x, y, a, b), h = clouds(rng, m=2, n=3), 1e-4
    b = np.array([0.4, 0.6, 0.0])
    ty = rng.standard_normal(y.shape)
    ahead, zero, behind = (points.sinkhorn_vjp(x, y + step * ty, a, b, COST, tol=1e-12)[1] for step in (h, 0, -h))
    found, exact = zero.hvp(None, ty, tol=1e-10).db, (ahead().db - behind().db) / (2 * h)
    assert_allclose(found - found[0], exact - exact[0], atol=1e-6)


def test_what_is_beyond_lengths_may_be_nan(rng):
    given = clouds(rng)
    given += [rng.standard_normal(z.shape) for z in given[:2]]
    padded = [np.concatenate([array, np.full((5, *array.shape[1:]), np.nan)]) for array in given]
    found, wanted = (points.sinkhorn_vjp(*arrays[:4], COST, tol=1e-10, mask=mask)[1].hvp(*arrays[4:], tol=1e-9)
                     for arrays, mask in ((padded, na.Lengths(30, 20)), (given, None)))  # fmt: skip
    for whole, part in zip(found, wanted):
        assert np.isfinite(whole).all()
        assert_allclose(whole[: len(part)], part, atol=1e-8)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("d", [2, 20])
def test_single_precision(xp, rng, dtype, d):
    x, y, _, _ = clouds(rng, d=d)
    tx, ty = (rng.standard_normal(z.shape) for z in (x, y))
    given = [array.astype(dtype) for array in (x, y, np.full(20, 1 / 20), np.full(30, 1 / 30), tx, ty)]
    cost = points.Cost(2, 0.05 * d)
    found, exact = (points.sinkhorn_vjp(*arrays[:4], cost, tol=tol)[1].hvp(*arrays[4:], tol=tol)
                    for tol, arrays in ((1e-6, [*map(xp.asarray, given)]), (1e-11, [z.astype(float) for z in given])))
    for got, wanted in zip(found[:2], exact):
        assert got.dtype == dtype
        atol = (1e-3 if dtype == np.float16 else 3e-5) * np.abs(wanted).max()
        assert_allclose(to_numpy(got).astype(float), wanted, rtol=0, atol=atol)


def test_conjugate_gradients(rng):
    """Of a batch, each with weights of its own: as many iterations as there are unknowns; one of them weighs nothing.
    """
    weights, side = rng.random((3, 6)) + 0.1, rng.standard_normal((3, 6))
    weights[:, 5] = 0
    A = rng.standard_normal((3, 6, 6))
    A[:, 5], A[:, :, 5] = 0, 0
    A = (A @ np.swapaxes(A, -2, -1)) / np.where(weights > 0, weights, 1)[..., None]
    x, is_found = conjugate_gradients(lambda v: (A @ v[..., None])[..., 0], (side, 0 * side), weights, 1e-6, 5)
    assert is_found
    assert_allclose((A @ x[..., None])[:, :5, 0], side[:, :5], atol=1e-6)
    _, is_found = conjugate_gradients(lambda v: (A @ v[..., None])[..., 0], (side,), weights, 1e-6, 4)
    assert not is_found


def test_what_is_found_stays(rng, monkeypatch):
    """On a GPU, where nobody looks at each iteration, and where others of a batch take more of them."""
    x, y, a, b = clouds(rng, m=6, n=7)
    _, backprop = points.sinkhorn_vjp(x, y, a, b, COST, tol=1e-9)
    tx, ty = rng.standard_normal(x.shape), rng.standard_normal(y.shape)
    wanted = backprop.hvp(tx, ty, tol=1e-9)
    monkeypatch.setattr("numbattn.points.potentials.should_check", lambda array, at, last: at == last)
    for found, exact in zip(backprop.hvp(tx, ty, tol=1e-9, max_iterations=100), wanted):
        assert_array_equal(found, exact)


def test_iterations_are_two_passes(rng, monkeypatch):
    passes, run = [], backends.run_points
    monkeypatch.setattr("numbattn.points.pairs.run_points", lambda *args, **options: (
        passes.append(args[1]) or run(*args, **options)))  # fmt: skip
    x, y, a, b = clouds(rng)
    _, backprop = points.sinkhorn_vjp(x, y, a, b, COST)
    counts = []
    for count in (2, 5):
        passes.clear()
        with pytest.warns(UserWarning, match=rf"hvp: .* converged to 0 within {count} iterations: allow more") as found:
            backprop.hvp(x, y, tol=0, max_iterations=count)
        assert found[0].filename == __file__
        counts.append(len(passes))
    assert counts == [2 + 9 + 2 * 2, 9 + 2 * 5]  # potentials are normalised once


@pytest.mark.parametrize(("given", "options", "kind", "message"), [
    ((np.zeros((3, 2)), None), {}, ValueError, r"tx: got the shape \(3, 2\), expected \(20, 2\), the shape of x"),
    ((None, None), {"tol": -1.0}, ValueError, "tol: got -1.0, allowed finite and >= 0"),
    ((None, None), {"max_iterations": 0}, ValueError, "max_iterations: got 0, allowed 1 or more"),
    ((None, None), {"dcost": np.ones(2)}, ValueError, r"dcost: got the shape \(2,\), expected \(\), the shape of cost"),
])  # fmt: skip
def test_errors(rng, given, options, kind, message):
    _, backprop = points.sinkhorn_vjp(*clouds(rng), COST)
    with pytest.raises(kind, match=message):
        backprop.hvp(*given, **options)


FAULTS = {
    "test_hessians_of_unbalanced_transport": {
        "v - of_g * Q(of_f * R(v))": "v - Q(of_f * R(v))",
        "without_mean(-of_g * Q(of_f * rx))": "without_mean(-of_g * Q(rx))",
        "return (tF, self.share * tp), (of_g": "return (tF, tp), (of_g",
        "lambda v: v + of_f * R(v)": "lambda v: v + R(v)",
        "np.where(is_free[0] & is_free[1],": "np.where(True,",
        "f = clouds.of_a._prox(epsilon * self.over_y.rows, epsilon)": "f = epsilon * self.over_y.rows",
        "points/sinkhorn.py": {
            "if not (alone or clouds.is_balanced):": "if False:",
            "values[side] = values[side] - tf": "pass",
        },
    },
    "test_points_without_weight_have_potentials": {
        "(of_g * tq, self.exchanged.share * tq)": "(tG, tG)",
    },
    "test_hessians_are_those_of_finite_differences[numpy-2-False]": {
        "rhs = without_mean(of_g * ry), without_mean(-of_g * Q(of_f * rx))": "rhs = without_mean(ry), 0 * ry",
        "logs(clouds.a, f / epsilon)": "logs(clouds.a, 0 * f)",
        "(b, c, tG, c * tF, *logarithms)": "(b, c, tG, tF, *logarithms)",
        "moved.b, self.rows, self.columns)": "None, self.rows, self.columns)",
    },
    "test_hessians_are_those_of_finite_differences[numpy-2-True]": {
        "lambda v: v + of_f * R(v)": "lambda v: v - of_f * R(v)",
        "points/sinkhorn.py": {"found[side] = found[side] - pot": "found[side] = found[side] + pot"},
    },
    "test_iterations_are_two_passes": {
        "bool((now <= allowed).all())": "bool((now < before).all())",
    },
    "test_what_is_found_stays": {
        "np.where(before > allowed, _ratio(before, dot(p, q)), 0)": "_ratio(before, dot(p, q))",
    },
    "test_conjugate_gradients": {
        "_ratio(now, before) * p": "0 * p",
        "return weighed(weights, u * v)[..., None]": "return (u * v).sum(-1)[..., None]",
    },
    "test_segments_are_problems_of_their_own": {
        "np.where(np.isneginf(logarithms), -np.inf, -logarithms)": "-logarithms",
    },
}

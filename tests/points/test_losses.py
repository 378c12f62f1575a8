"""Cross-entropy over pairs of points."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn import points

from ..accuracy import to_numpy
from . import plain

LINEAR, COSINE = plain.SCORES


def exact_of(x, y, targets, kernel, w, sigmoid):
    """By the plain formula."""
    S = plain.SCORES[kernel](x, y) + (0 if w is None else w)
    of_rows = np.logaddexp(0, S).sum(-1) if sigmoid else np.logaddexp.reduce(S, axis=-1)
    own = np.take_along_axis(S, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return np.where(targets < 0, 0, of_rows - own)


def drawn(rng, batch=(2, 3), m=7, n=20, d=5):
    arrays = rng.standard_normal((*batch, m, d)), rng.standard_normal((n, d)), rng.standard_normal(n)
    targets = rng.integers(0, n, (*batch, m))
    targets[..., 0] = -100
    return arrays, targets


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("kernel", plain.SCORES, ids=repr)
def test_losses(xp, rng, kernel, sigmoid):
    (x, y, w), targets = drawn(rng)
    given = xp.asarray(x), xp.asarray(y), xp.asarray(targets)
    for own in (w, None):
        f = points.cross_entropy(*given, kernel, w=None if own is None else xp.asarray(own), sigmoid=sigmoid)
        assert isinstance(f, xp.ndarray)
        assert_allclose(to_numpy(f), exact_of(x, y, targets, kernel, own, sigmoid), rtol=1e-12)
    f = points.cross_entropy(given[0], given[1][:7], None, kernel, sigmoid=sigmoid)
    wanted = exact_of(x, y[:7], np.broadcast_to(np.arange(7), x.shape[:-1]), kernel, None, sigmoid)
    assert_allclose(to_numpy(f), wanted, rtol=1e-12)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("kernel", plain.SCORES, ids=repr)
def test_derivatives_are_those_of_finite_differences(xp, rng, kernel, sigmoid):
    arrays, targets = drawn(rng)
    tangents, h = [rng.standard_normal(z.shape) for z in arrays], 1e-5
    targets, df, tdf = xp.asarray(targets), *rng.standard_normal((2, *targets.shape))

    def call(step, kernel=kernel):
        x, y, w = (xp.asarray(z + step * tz) for z, tz in zip(arrays, tangents))
        return points.cross_entropy_vjp(x, y, targets, kernel, w=w, sigmoid=sigmoid)

    (_, backprop), ends = call(0), [call(step) for step in (h, -h)]
    (f, df_of), (f_back, df_back) = [(to_numpy(f), b(xp.asarray(df + s * tdf))) for (f, b), s in zip(ends, (h, -h))]
    grads = backprop(xp.asarray(df))
    assert [g.shape for g in grads] == [z.shape for z in arrays]
    along = sum((to_numpy(g) * t).sum() for g, t in zip(grads, tangents))
    assert_allclose(along, (df * (f - f_back)).sum() / (2 * h), rtol=1e-6)
    tgrads = backprop.hvp(xp.asarray(df), *map(xp.asarray, tangents), tdf=xp.asarray(tdf))
    for found, ahead, behind in zip(tgrads, df_of, df_back, strict=True):
        assert_allclose(to_numpy(found), to_numpy(ahead - behind) / (2 * h), atol=1e-6)
    scaled = [to_numpy(call(0, replace(kernel, scale=kernel.scale + step))[0]) for step in (h, -h)]
    assert_allclose(to_numpy(grads.kernel), (df * (scaled[0] - scaled[1])).sum() / (2 * h), rtol=1e-6)
    some = backprop.hvp(xp.asarray(df), xp.asarray(tangents[0]), None, None)
    zeros = [0 * xp.asarray(t) for t in tangents[1:]]
    for one, other in zip(some, backprop.hvp(xp.asarray(df), xp.asarray(tangents[0]), *zeros)):
        assert_array_equal(to_numpy(one), to_numpy(other))


@pytest.mark.parametrize("kernel", plain.SCORES, ids=repr)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_errors_are_at_most_twice_those_of_the_plain_formula(rng, dtype, kernel):
    """With S in float32, and P and results rounded; with a scale at which some P are near 1."""
    (x, y, w), targets = drawn(rng, (), 60, 200, 300)
    kernel = replace(kernel, scale=0.3 if kernel == LINEAR else 20.0)
    x, y, w = (z.astype(dtype) for z in (x, y, w))
    df = np.full(60, 1 / 60, np.float32)
    f, backprop = points.cross_entropy_vjp(x, y, targets, kernel, w=w)

    def formula(work, rounding):
        X, Y = (z.astype(work) for z in (x, y))
        if kernel.scale == 20:
            X, Y = X / plain.norms(X), Y / plain.norms(Y)
        S = work(kernel.scale) * X @ Y.T + w.astype(work)
        E = np.exp(S - S.max(-1, keepdims=True))
        own = np.arange(200) == targets[:, None]
        G = (E / E.sum(-1, keepdims=True) - own) * np.where(targets < 0, 0, df.astype(work))[:, None]
        G = G.astype(rounding).astype(work)
        losses = np.log(E.sum(-1)) + S.max(-1) - np.where(own, S, 0).sum(-1)
        grads = [work(kernel.scale) * G @ Y, work(kernel.scale) * G.T @ X, G.sum(0)]
        if kernel.scale == 20:
            for at, (U, z) in enumerate(((X, x), (Y, y))):
                along = (U * grads[at]).sum(-1, keepdims=True)
                grads[at] = (grads[at] - U * along) / plain.norms(z.astype(work))
        return [np.where(targets < 0, 0, losses), *(g.astype(rounding) for g in grads)]

    exact, rounded = formula(np.float64, np.float64), formula(np.float32, dtype)
    for found, want, other in zip((f, *backprop(df)), exact, rounded, strict=True):
        error, allowed = (z.astype(np.float64) - want for z in (found, other))
        floor = 1e-7 * abs(want).max()
        assert abs(error).max() <= 2 * abs(allowed).max() + floor
        assert np.sqrt((error**2).mean()) <= 2 * np.sqrt((allowed**2).mean()) + floor


def test_large_scores_and_what_has_no_weight(rng):
    (x, y, w), targets = drawn(rng, ())
    w[3:] = -np.inf
    targets[:] = [0, 1, 2, 0, 1, 2, 5]
    f, backprop = points.cross_entropy_vjp(x, y, targets, points.Linear(1e4), w=w)
    assert_allclose(f[:-1], exact_of(x * 1e4 / 0.7, y, targets, LINEAR, w, False)[:-1])
    assert f[-1] == np.inf
    dx, dy, dw = backprop(np.ones(7))
    assert np.isfinite(dx).all()
    for gradient in (dw[3:], dy[3:], dx[-1]):
        assert_array_equal(gradient, 0 * gradient)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("d", [5, 300])
def test_targets_without_weight_have_infinite_losses_and_no_gradients(xp, rng, d, sigmoid):
    """Even where no other has weight either."""
    (x, y, w), targets = drawn(rng, (), d=d)
    w[targets[1]] = -np.inf
    has_target = targets != targets[1]
    given = [*map(xp.asarray, (x, y, targets))]
    for own in (w, np.full_like(w, -np.inf)):
        f, backprop = points.cross_entropy_vjp(*given, LINEAR, w=xp.asarray(own), sigmoid=sigmoid)
        has_target &= (own > -np.inf).any() | (targets < 0)
        assert_array_equal(np.isfinite(to_numpy(f)), has_target)
        assert_array_equal(to_numpy(f)[~has_target], np.inf)
        df, move = xp.asarray(rng.standard_normal(f.shape)), xp.asarray(rng.standard_normal(x.shape))
        found, wanted = ([*backprop(g), *backprop.hvp(g, move, None, None)] for g in (df, df * xp.asarray(has_target)))
        for one, other in zip(found, wanted):
            assert_array_equal(to_numpy(one), to_numpy(other))
            assert np.isfinite(to_numpy(one)).all()
        assert_array_equal(to_numpy(found[0])[~has_target], 0)


@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (3, 1), (0, 0)])
@pytest.mark.parametrize("kernel", plain.SCORES, ids=repr)
def test_few_points(xp, rng, m, n, kernel):
    x, y, w = (xp.asarray(rng.standard_normal(shape)) for shape in ((m, 5), (n, 5), (n,)))
    targets = np.zeros(m, int) - (n == 0)
    f, backprop = points.cross_entropy_vjp(x, y, xp.asarray(targets), kernel, w=w)
    assert_allclose(to_numpy(f), np.zeros(m), atol=1e-12)
    for found in (backprop(f), backprop.hvp(f + 1, x, y, w)):
        for gradient, z in zip(found, (x, y, w)):
            assert gradient.shape == z.shape
            assert_allclose(to_numpy(gradient), 0 * to_numpy(z), atol=1e-12)


def test_a_point_of_zeros_has_no_angle(rng):
    (x, y, w), targets = drawn(rng, ())
    x[1], y[2] = 0, 0
    f, backprop = points.cross_entropy_vjp(x, y, targets, COSINE, w=w)
    dx, dy, _ = backprop(np.ones(7))
    assert_allclose(f[1], np.logaddexp.reduce(w) - w[targets[1]])
    assert np.isfinite(f).all()
    assert_array_equal(dx[1], 0)
    assert_array_equal(dy[2], 0)
    assert abs(dx[2]).min() > 0


def test_arrays_lie_as_they_like(xp, rng):
    (x, y, w), targets = drawn(rng, (4, 3), 6, 20, 300)
    wanted, backprop = points.cross_entropy_vjp(x, y, targets, LINEAR, w=w)
    odd = (np.empty((6, 600, 4, 3))[:, ::-2].transpose(2, 3, 0, 1), np.empty((300, 41))[:, 1::2].T, np.empty(60)[::-3])
    for z, own in zip(odd, (x, y, w)):
        z[...] = own
    *odd, targets = map(xp.asarray, (*odd, targets.astype(np.int16)))
    f, other = points.cross_entropy_vjp(*odd[:2], targets, LINEAR, w=odd[2])
    assert_allclose(to_numpy(f), wanted, rtol=1e-12)
    df = rng.standard_normal(f.shape)
    for found, want in zip(other(xp.asarray(df)), backprop(df)):
        assert_allclose(to_numpy(found), want, atol=1e-12)


X, T = np.zeros((4, 3)), np.zeros(4, int)


@pytest.mark.parametrize(("given", "options", "kind", "message"), [
    ((X, X[:3], None, LINEAR), {}, ValueError, "targets: got None for 4 points of x and 3 of y, expected as many"),
    ((X, X, T[:3], LINEAR), {}, ValueError, r"targets: got the shape \(3,\), expected \(4,\), one for each point of x"),
    ((X, X, T + 4, LINEAR), {}, ValueError, "targets: got 4, allowed less than 4; rows of negative ones are ignored"),
    ((X, X, T + 0.5, LINEAR), {}, TypeError, "targets: got numpy.ndarray of float64, expected an int or an int"),
    ((X, X, T, points.Gaussian()), {}, TypeError, r"kernel: got Gaussian\(length=1.0\), expected Linear or Cosine"),
    ((X, X[None], T, LINEAR), {}, ValueError, r"y: got the shape \(1, 4, 3\), expected \(points, features\)"),
    ((X, X, T, LINEAR), {"w": X}, ValueError, r"w: got the shape \(4, 3\), expected \(4,\), a number for each point"),
    ((X, X, T, LINEAR), {"sigmoid": "yes"}, TypeError, "sigmoid: got 'yes', expected True or False"),
])  # fmt: skip
def test_errors(given, options, kind, message):
    with pytest.raises(kind, match=message):
        points.cross_entropy(*given, **options)


FAULTS = {
    "test_errors": {"targets.max() >= n": "targets.max() > n", "if m != n:": "if m < n:"},
    "test_losses[numpy-Linear(scale=0.7)-False]": {"clip(targets, -1, n)": "clip(targets, 0, n)"},
    "test_large_scores_and_what_has_no_weight": {
        "points/blocks.py": {"highest = np.maximum(known.highest, T.max(axis=1))": "highest = known.highest + 0"},
    },
    "test_targets_without_weight_have_infinite_losses_and_no_gradients": {
        "points/scores.py": {
            "weights._replace(c=counts & has_weight)": "weights._replace(c=counts)",
            "np.where(has_weight, f - chosen, math.inf)": "f - chosen",
        },
    },
    "test_a_point_of_zeros_has_no_angle": {
        "points/kernels.py": {"np.where(factors == 0, 1, factors)": "factors"},
    },
    "test_derivatives_are_those_of_finite_differences[numpy-Cosine(scale=3.0)-True]": {
        "points/scores.py": {
            "tT * (1 - P) if self.given.sigmoid": "tT if self.given.sigmoid",
            "if tz is not None and not self.kernel._is_linear:": "if False:",
            "weights.c[i, None] * slopes,": "weights.c[i, None] * P,",
        },
        "points/blocks.py": {"np.multiply(G, given.b,": "np.multiply(G, 1,"},
    },
}

"""Tangents of sums over pairs and of their gradients."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn import points
from numbattn.base import backends
from numbattn.points import tangents

from ..accuracy import to_numpy
from . import plain


def drawn(rng, *shapes):
    """Arrays, and tangents of these."""
    return [[rng.standard_normal(shape) for shape in shapes] for _ in range(2)]


def slopes(function, arrays, moves, h=1e-5):
    """By finite differences: of all that a function of arrays returns."""
    ends = [function(*(x if t is None else x + step * t for x, t in zip(arrays, moves))) for step in (h, -h)]
    return [(ahead - behind) / (2 * h) for ahead, behind in zip(*ends)]


def product(kernel, mask=None):
    """Sums and gradients of x, y, b and ds."""

    def function(x, y, b, ds):
        s, backprop = points.product_vjp(x, y, b, kernel, mask=mask)
        return s, *backprop(ds)

    return function


@pytest.mark.parametrize("kernel", plain.KERNELS, ids=repr)
def test_products_of_each_kernel(xp, rng, kernel):
    arrays, moves = drawn(rng, (2, 6, 3), (7, 3), (1, 7, 2), (2, 6, 2))
    exact = slopes(product(kernel), arrays, moves)
    (x, y, b, ds), (tx, ty, tb, tds) = ([*map(xp.asarray, given)] for given in (arrays, moves))
    s, ts = points.product_jvp(x, y, b, kernel, tx, ty, tb)
    value, backprop = points.product_vjp(x, y, b, kernel)
    assert_array_equal(to_numpy(s), to_numpy(value))
    tgrads = backprop.hvp(ds, tx, ty, tb, tds=tds)
    assert tgrads._fields == ("dx", "dy", "db")
    assert tgrads.kernel is None
    for found, wanted in zip((ts, *tgrads), exact, strict=True):
        assert isinstance(found, xp.ndarray)
        assert_allclose(to_numpy(found), wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("given", [(0,), (1,), (2,), (3,), (0, 3), ()], ids=str)
@pytest.mark.parametrize("kernel", [points.Matern(2.5), points.Polynomial(2), points.Cosine()], ids=repr)
def test_what_does_not_move(rng, given, kernel):
    arrays, moves = drawn(rng, (6, 3), (7, 3), (7, 2), (6, 2))
    moves = [t if at in given else None for at, t in enumerate(moves)]
    exact = slopes(product(kernel), arrays, moves)
    *those, ds = arrays
    found = [points.product_jvp(*those, kernel, *moves[:3])[1]]
    found += points.product_vjp(*those, kernel)[1].hvp(ds, *moves[:3], tds=moves[3])
    for one, wanted in zip(found, exact, strict=True):
        assert_allclose(one, wanted, atol=1e-7)


@pytest.mark.parametrize("kernel", plain.EXPONENTIALS, ids=repr)
@pytest.mark.parametrize("mask", [None, na.Causal(-1)], ids=["", "mask"])
def test_logarithms_of_each_kernel(rng, kernel, mask):
    arrays, moves = drawn(rng, (2, 6, 3), (7, 3), (1, 7), (2, 6))
    arrays[2][0, 1] = -np.inf

    def function(x, y, w, df):
        f, backprop = points.logsumexp_vjp(x, y, w, kernel, mask=mask)
        return np.where(np.isneginf(f), 0, f), *backprop(df)

    exact = slopes(function, arrays, moves)
    (x, y, w, df), (tx, ty, tw, tdf) = arrays, moves
    f, tf = points.logsumexp_jvp(x, y, w, kernel, tx, ty, tw, mask=mask)
    assert_array_equal(f, points.logsumexp(x, y, w, kernel, mask=mask))
    tgrads = points.logsumexp_vjp(x, y, w, kernel, mask=mask)[1].hvp(df, tx, ty, tw, tdf=tdf)
    for found, wanted in zip((tf, *tgrads), exact, strict=True):
        assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


def test_logarithms_without_weights(rng):
    (x, y, df), (tx, _, _) = drawn(rng, (6, 3), (7, 3), (6,))
    cost, w = points.Cost(2, 0.5), np.zeros(7)
    tgrads = points.logsumexp_vjp(x, y, None, cost)[1].hvp(df, tx, None, None)
    assert tgrads.dw is None
    for found, wanted in zip(tgrads[:2], points.logsumexp_vjp(x, y, w, cost)[1].hvp(df, tx, None, 0 * w)):
        assert_allclose(found, wanted, atol=1e-12)
    with pytest.raises(ValueError, match="tw: got the tangent of a w that is None"):
        points.logsumexp_jvp(x, y, None, cost, tx, None, w)


DENSE = np.random.default_rng(0).random((20, 30)) < 0.5


@pytest.mark.parametrize("d", [3, 9])
def test_what_sees_nothing_does_not_move(rng, d):
    x, y, b, ds = rng.random((4, 6, d), np.float32)
    _, backprop = points.product_vjp(x, y, b, points.Gaussian(1.0), mask=np.zeros((6, 6), bool))
    for tangent in backprop.hvp(ds, x, y, b, tds=ds):
        assert_array_equal(tangent, 0)


@pytest.mark.parametrize("mask", [na.Segments([0, 5, 20], [0, 20, 30]), DENSE], ids=["segments", "dense"])
def test_hessians_are_symmetric_whatever_the_mask(rng, mask):
    arrays, one = drawn(rng, (20, 9), (30, 9), (30, 2))
    _, other = drawn(rng, (20, 9), (30, 9), (30, 2))
    ds = rng.standard_normal((20, 2))
    _, backprop = points.product_vjp(*arrays, points.Gaussian(3.0) + 0.5 * points.Linear(), mask=mask)
    there, back = (sum((u * v).sum() for u, v in zip(backprop.hvp(ds, *from_), to))
                   for from_, to in ((one, other), (other, one)))  # fmt: skip
    assert_allclose(there, back)
    assert abs(there) > 1


@pytest.mark.parametrize("by_features", [False, True])
def test_what_nobody_sees_may_be_nan(rng, monkeypatch, by_features):
    """Of tangents, too; also as products of features, which GPUs take."""
    if by_features:
        monkeypatch.setattr("numbattn.points.tangents.Moving.own", None)
    (x, y, b), (tx, ty, tb) = drawn(rng, (2, 9, 3), (2, 9, 3), (2, 9, 2))
    ds, mask, seen = rng.random((2, 9, 2)), na.Lengths(keys=np.array([6, 4]), queries=np.array([5, 7])), np.arange(9)
    clean = x, y, b, tx, ty, tb, ds
    hidden = [np.where((seen < np.array(lengths)[:, None])[..., None], array, np.nan)
              for array, lengths in zip(clean, ([5, 7], [6, 4], [6, 4]) * 2 + ([5, 7],))]  # fmt: skip
    for kernel in (points.Laplacian(), points.Polynomial(2), points.Cosine()):
        found = []
        for *three, tx, ty, tb, ds in (clean, hidden):
            _, ts = points.product_jvp(*three, kernel, tx, ty, tb, mask=mask)
            found.append((ts, *points.product_vjp(*three, kernel, mask=mask)[1].hvp(ds, tx, ty, tb, tds=ds)))
        for whole, other in zip(*found):
            assert_allclose(other, whole, atol=1e-12)


@pytest.mark.parametrize(("kernel", "d"), [(points.Gaussian(), 3), (points.Laplacian(), 3), (points.Matern(1.5), 20)],
                         ids=str)  # fmt: skip
def test_points_that_coincide(rng, kernel, d):
    """Derivatives at r = 0 that are not finite are 0."""
    (x, b), (tx, tb) = drawn(rng, (5, d), (5, 2))
    tgrads = points.product_vjp(x, x, b, kernel)[1].hvp(b, tx, tx, tb)
    assert all(np.isfinite(found).all() for found in tgrads)


@pytest.mark.parametrize("sizes", [(0, 2, 2, 1), (2, 0, 2, 1), (2, 2, 0, 1), (2, 2, 2, 0)], ids=str)
def test_nothing(rng, sizes):
    m, n, d, e = sizes
    (x, y, b, ds), _ = drawn(rng, (m, d), (3, n, d), (n, e), (3, m, e))
    for kernel in (points.Gaussian(), points.Linear(), points.Polynomial(2)):
        tgrads = points.product_vjp(x, y, b, kernel)[1].hvp(ds, x, y, b, tds=ds)
        assert [found.shape for found in tgrads] == [x.shape, y.shape, b.shape]
    f, tf = points.logsumexp_jvp(x, y, None, points.Cost(2, 0.1), x, y, None)
    assert tf.shape == f.shape
    assert np.isfinite(tf).all()


def test_many_columns_and_features_are_taken_some_at_a_time(rng, monkeypatch):
    (x, y, b, ds), (tx, ty, _, _) = drawn(rng, (6, 9), (7, 9), (7, 5), (6, 5))
    widths, run = [], backends.run_points
    monkeypatch.setattr("numbattn.points.pairs.run_points", lambda problem, *args, **options: (
        widths.append(problem.head_dim_v) or run(problem, *args, **options)))  # fmt: skip
    found = []
    for widest in (256, 45):
        monkeypatch.setattr(tangents, "WIDEST", widest)
        found.append(points.product_vjp(x, y, b, points.Gaussian(3.0))[1].hvp(ds, tx, ty, None))
        assert max(widths) <= widest
        widths.clear()
    for one, other in zip(*found):
        assert_allclose(one, other)


def test_it_is_three_passes(rng, monkeypatch):
    (x, y, b, ds), (tx, ty, tb, tds) = drawn(rng, (6, 3), (7, 3), (7, 1), (6, 1))
    passes, run = [], backends.run_points
    monkeypatch.setattr("numbattn.points.pairs.run_points", lambda *args, **options: (
        passes.append(args[1]) or run(*args, **options)))  # fmt: skip
    _, backprop = points.product_vjp(x, y, b, points.Gaussian())
    for given, more, count in (((tx, ty, None), None, 3), ((tx, ty, tb), tds, 6), ((None, None, tb), None, 2)):
        passes.clear()
        backprop.hvp(ds, *given, tds=more)
        assert len(passes) == count


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("d", [3, 20])
def test_errors_are_those_of_rounding(xp, rng, dtype, d):
    given = [array.astype(dtype) for array in (rng.random(shape) for shape in [(60, d), (70, d), (70, 2), (60, 2)] * 2)]
    kernel = points.Gaussian(0.5 * d**0.5)

    def function(x, y, b, ds, tx, ty, tb, tds):
        _, ts = points.product_jvp(x, y, b, kernel, tx, ty, tb)
        return ts, *points.product_vjp(x, y, b, kernel)[1].hvp(ds, tx, ty, tb, tds=tds)

    for found, exact in zip(function(*map(xp.asarray, given)), function(*(x.astype(np.float64) for x in given))):
        assert found.dtype == dtype
        error = np.abs(to_numpy(found).astype(np.float64) - exact).max()
        assert error < (2 if dtype == np.float16 else 10) * np.finfo(dtype).eps * np.abs(exact).max()


X, B = np.zeros((4, 3)), np.zeros((4, 2))


@pytest.mark.parametrize(("given", "kind", "message"), [
    ((B, None, None), ValueError, r"tx: got the shape \(4, 2\), expected \(4, 3\), the shape of x"),
    ((None, X.astype(int), None), TypeError, "ty: got int64, allowed float16, bfloat16, float32, float64; pass ty.as"),
    ((None, None, [1.0]), TypeError, "tb: got list, expected a numpy.ndarray or a cupy.ndarray"),
])  # fmt: skip
def test_errors(given, kind, message):
    with pytest.raises(kind, match=message):
        points.product_jvp(X, X, B, points.Gaussian(), *given)
    with pytest.raises(kind, match=message):
        points.product_vjp(X, X, B, points.Gaussian())[1].hvp(B, *given)
    with pytest.raises(ValueError, match=r"tds: got the shape \(4, 3\), expected \(4, 2\), the shape of s"):
        points.product_vjp(X, X, B, points.Gaussian())[1].hvp(B, X, None, None, tds=X)


FAULTS = {
    "test_it_is_three_passes": {"or self.tx is self.ty is None": ""},
    "test_products_of_each_kernel[numpy-Matern(nu=1.5, length=0.9)]": {
        "2 * ((0 if tx is None else tx * total[..., :1]) - of_y)": "(0 if tx is None else tx * total[..., :1]) - of_y",
        "return sum_broadcast(of_y, self.term.x.shape)": "return of_y",
    },
    "test_products_of_each_kernel[numpy-Cosine(scale=1.0)]": {
        "if not kernel._is_linear and self.tx is not None:": "if False:",
        "points/kernels.py": {"+ _across(x, gradient) * dots(unit, tx)": ""},
    },
    "test_what_nobody_sees_may_be_nan[False]": {"cpu/points/pairs.py": {"if sees_nothing(mask, at, i):": "if False:"}},
    "test_what_nobody_sees_may_be_nan[True]": {
        "c = pairs.only_seen(0, c)": "pass",
        "points/kernels.py": {
            "x, tx = _with(gradient, x), _with(gradient, tx)\n        unit": "x = _with(gradient, x)\n        unit",
        },
        "x, y = (pairs.only_seen(side, points) for": "x, y = (points for",
    },
    "test_many_columns_and_features_are_taken_some_at_a_time": {
        "step = max(WIDEST // max(features, 1), 1)": "step = WIDEST",
        "_times(phi, c[..., some])": "_times(phi, c[..., : b[..., some].shape[-1]])",
    },
    "test_logarithms_of_each_kernel[-Cost(power=2.0, epsilon=0.3)]": {
        "points/logsumexp.py": {
            "tdF = -dF * self": "tdF = dF * self",
            "tdw if tw is None else tdw + tw * self.term.exchanged.sums(dF, W, rows)": "tdw",
        },
    },
}

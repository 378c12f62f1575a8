"""Points as backends sum over them."""

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn import points
from numbattn.points import pairs
from numbattn.points.pairs import Pairs, Term


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_points_of_half_precision_stay_about_the_origin(rng, dtype):
    x, y = rng.standard_normal((2, 500, 3)).astype(dtype)
    far = (y.astype(np.float32) + 9).astype(dtype)
    near, off = Pairs.of(x, y, ()).centre, Pairs.of(x, far, ()).centre
    assert near.dtype == off.dtype == np.float32
    assert (near == 0).all() == (dtype != np.float32)
    assert_allclose(off, np.median(far.astype(np.float64), axis=0, keepdims=True), atol=0.6)


def test_a_centre_of_some_points(rng, monkeypatch):
    """Also where elements of the batch share them."""
    monkeypatch.setattr(pairs, "ENOUGH", 10)
    x, y = rng.standard_normal((3, 50, 2)), rng.standard_normal((1, 35, 2))
    assert_allclose(Pairs.of(x, y, (3,)).centre, np.sort(y[:, ::3], axis=1)[:, 6:7])
    assert_allclose(Pairs.of(y, x[:1], (1,)).centre, np.sort(x[:1, ::5], axis=1)[:, 5:6])


def test_the_centre_is_a_median_of_what_counts(rng):
    """Outliers do not move it, nor do points that nobody sees."""
    x = rng.standard_normal((2, 40, 3)) + 5
    x[:, 35:], x[:, :4] = np.nan, 1e9
    centre = Pairs.of(x, x, (2,), na.Lengths(keys=np.array([35, 35]), queries=np.array([35, 35]))).centre
    assert_array_equal(centre, np.sort(x[:, :35], axis=1)[:, 17:18])
    hidden = na.Lengths(keys=np.array([0, 35]), queries=np.array([0, 35]))
    assert (Pairs.of(x, x, (2,), hidden).centre[0] == 0).all()


def clusters(rng, d):
    """Points of two clusters far apart, the smaller one at the origin, a few of them twice; kernels see their
    differences alone."""
    x = rng.standard_normal((300, d))
    x[:270] += 1e4
    x[::7], x[::31] = x[1::7][: len(x[::7])], x[:10] * 0 - 1e6
    return x.astype(np.float32)


def near_pairs(x, y, kernel, b, ds):
    """Results by the plain formula in float64, of kappa(r)."""
    kappa, slope = kernel
    difference = x[:, None].astype(float) - y.astype(float)
    r = np.sqrt((difference**2).sum(-1))
    with np.errstate(all="ignore"):
        weights = np.where(r > 0, slope(r) / r, 0) * (ds @ b.T)
    return kappa(r) @ b, (weights[..., None] * difference).sum(1)


@pytest.mark.parametrize("d", [2, 12])
@pytest.mark.parametrize(("kernel", "plain"), [
    (points.Gaussian(3.0), (lambda r: np.exp(-(r**2) / 18), lambda r: -r / 9 * np.exp(-(r**2) / 18))),
    (points.Laplacian(3.0), (lambda r: np.exp(-r / 3), lambda r: -np.exp(-r / 3) / 3)),
])  # fmt: skip
def test_points_far_off_take_no_digits(rng, d, kernel, plain):
    """Neither those of the centre's cluster nor those of another one, in products, gradients and neighbours."""
    x = clusters(rng, d)
    b, ds = rng.standard_normal((2, 300, 2)).astype(np.float32)
    s, backprop = points.product_vjp(x, x, b, kernel)
    wanted = near_pairs(x, x, plain, b.astype(float), ds.astype(float))
    for got, want in zip((s, backprop(ds).dx), wanted):
        assert_allclose(got, want, atol=5e-6 * abs(want).max())
    r = np.sqrt(((x[:, None].astype(float) - x) ** 2).sum(-1))
    distances, _ = points.nearest(x, x, 3)
    assert_allclose(distances, np.sort(r, axis=1)[:, :3], rtol=1e-6)
    assert (distances[:, 0] == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("more", [0, 9])
def test_second_derivatives_of_near_points(rng, dtype, more):
    """Of points that coincide, and of points close to each other, whatever the number of features."""
    x, tx = np.pad(rng.standard_normal((2, 40, 2)), ((0, 0), (0, 0), (0, more))).astype(dtype)
    x[20:30], x[30] = x[:10], x[31] + 1e-3
    b, ds = rng.standard_normal((2, 40, 1)).astype(dtype)
    tdx = points.product_vjp(x, x, b, points.Laplacian(1.3))[1].hvp(ds, tx, None, None).dx
    X, T = x.astype(np.longdouble), tx.astype(np.longdouble)
    u, moves = X[:, None] - X, np.broadcast_to(T[:, None], (40, 40, 2 + more))
    r = np.sqrt((u * u).sum(-1))
    with np.errstate(all="ignore"):
        w = np.where(r > 0, -np.exp(-r / 1.3) / 1.3 / r, 0) * (ds @ b.T)
        along = (u * moves).sum(-1) * np.where(r > 0, -(1 / 1.3 + 1 / r) / r, 0)
    want = (w[..., None] * (along[..., None] * u + moves)).sum(1)
    assert_allclose(tdx, want, atol=float(400 * np.finfo(dtype).eps * abs(want).max()))


@pytest.mark.parametrize("kernel", [points.Gaussian(0.3), points.Cost(1.5, 7.0), points.Gaussian([0.3, 0.4])])
def test_points_of_half_precision_on_gpus(rng, monkeypatch, kernel):
    """Keep their digits; what is left of the length comes with them. Lengths of each feature are no such factor."""
    x, y = rng.standard_normal((2, 20, 2)).astype(ml_dtypes.bfloat16)
    term = Term(Pairs.of(x, y, ()), kernel)
    monkeypatch.setattr(pairs, "library", lambda x: "cupy")
    X, Y, options = term.in_halves
    if kernel._one_length is None:
        assert X is term.x
        assert not options
        return
    assert_array_equal(X.astype(x.dtype), X)
    assert_allclose((X - Y) ** 2 * options["rate"], (term.x - term.y) ** 2, rtol=1e-5)


def test_exchanged_points_are_those_of_their_twin(rng, monkeypatch):
    """Moved to one centre; of unit length only where they are asked for."""
    x, y = rng.standard_normal((2, 20, 2)).astype(np.float16) + np.float16(9)
    term = Term(Pairs.of(x, y, ()), points.Gaussian(0.3))
    monkeypatch.setattr(pairs, "library", lambda x: "cupy")
    assert all(a is b for a, b in zip(term.exchanged.in_halves[1::-1], term.in_halves[:2]))
    assert "units" not in vars(term)
    assert all(a is b for a, b in zip(term.exchanged.units[::-1], term.units))
    assert "centre" not in vars(term.pairs.exchanged)
    assert term.exchanged.exchanged is term


FAULTS = {
    "return self.exchanged.units[::-1]": "return self.exchanged.units",
    "return y, x, options": "return x, y, options",
    "return Apart(y, x, rate)": "return Apart(x, y, rate)",
    "centre = np.take_along_axis(lines, (count // 2)": "centre = np.take_along_axis(lines, (count * 0)",
    "return Apart(x, y, math.ldexp(length, -exponent) ** -2)": "return Apart(self.x, self.y)",
    "2 * (centre * centre)": "0 * (centre * centre)",
    "is_near[..., None], 0, centre": "is_near[..., None], centre, 0",
    "mantissa**-2": "mantissa**-1",
    "points/test_sinkhorn.py::test_errors": {"length < least": "False"},
    "_given(points) * 2.0**-exponent": "_given(points) * 2.0**exponent",
    "max(points.shape[-2] // ENOUGH, 1)": "1",
}

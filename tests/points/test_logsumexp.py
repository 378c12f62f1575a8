"""Logarithms of kernel sums and their gradients."""


import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn import points

from ..accuracy import to_numpy
from . import plain

COST = points.Cost(2, 0.05)


def exact_of(kernel, x, y, w, visible=True):
    with np.errstate(divide="ignore"):
        return np.log((np.where(visible, plain.EXPONENTIALS[kernel](x, y), 0) * np.exp(w)[..., None, :]).sum(-1))


@pytest.mark.parametrize("kernel", plain.EXPONENTIALS, ids=repr)
def test_kernels(xp, rng, kernel):
    x, y, w = rng.standard_normal((2, 5, 3)), rng.standard_normal((7, 3)), rng.standard_normal((2, 7))
    w[:, 2] = -np.inf
    f = points.logsumexp(*map(xp.asarray, (x, y, w)), kernel)
    assert isinstance(f, xp.ndarray)
    assert_allclose(to_numpy(f), exact_of(kernel, x, y, w))
    assert_allclose(points.logsumexp(x, y, None, kernel), exact_of(kernel, x, y, np.zeros(7)))


@pytest.mark.parametrize("kernel", plain.EXPONENTIALS, ids=repr)
@pytest.mark.parametrize("mask", [None, na.Causal(-1)], ids=["", "mask"])
def test_gradients_are_those_of_finite_differences(rng, kernel, mask):
    arrays = x, y, w = rng.standard_normal((2, 6, 3)), rng.standard_normal((7, 3)), rng.standard_normal((1, 7))
    w[0, 1] = -np.inf
    f, backprop = points.logsumexp_vjp(*arrays, kernel, mask=mask)
    assert_array_equal(f, points.logsumexp(*arrays, kernel, mask=mask))
    df, seen = rng.standard_normal(f.shape), np.isfinite(f)
    grads = backprop(np.where(seen, df, np.nan))
    assert grads._fields == ("dx", "dy", "dw")

    def loss(*now, kernel=kernel):
        return (df * points.logsumexp(*now, kernel, mask=mask))[seen].sum()

    for at, (gradient, array) in enumerate(zip(grads, arrays)):
        assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype)
        direction = rng.standard_normal(array.shape)
        assert_allclose((gradient * direction).sum(), plain.slope(loss, arrays, at, direction), rtol=1e-6, atol=1e-7)
    assert grads.dw[0, 1] == 0
    plain.assert_gradient(rng, grads.kernel, lambda kernel: loss(*arrays, kernel=kernel), kernel)


@pytest.mark.parametrize("kernel", [
    points.Gaussian([[0.5, 0.8, 1.2], [0.3, 0.9, 0.7]]), points.Laplacian([[0.5], [0.8]]),
    points.Periodic([[0.5], [0.8]], 2.0) * points.Gaussian([1.0, 2.0]).on([0, 2]),
], ids=repr)  # fmt: skip
def test_lengths_of_a_batch_are_those_of_its_elements(xp, rng, kernel):
    x, y, w, tx, ty, tw = (rng.standard_normal(shape) for shape in [(6, 3), (2, 7, 3), (7,)] * 2)
    df = rng.standard_normal((2, 6))

    def found(kernel, df, y, ty):
        x_, y, w_, df, tx_, ty, tw_ = map(xp.asarray, (x, y, w, df, tx, ty, tw))
        f, backprop = points.logsumexp_vjp(x_, y, w_, kernel)
        _, tf = points.logsumexp_jvp(x_, y, w_, kernel, tx_, ty, tw_)
        return [[*map(to_numpy, z)] for z in ((f, tf), backprop(df), backprop.hvp(df, tx_, ty, tw_))]

    of_elements = []
    for at in range(2):
        lengths = plain.of_each(lambda z: (z if z.ndim < 2 else z[at])[()], plain.parameters(kernel))  # noqa: B023
        of_elements.append(found(plain.with_parameters(kernel, lengths), df[at], y[at], ty[at]))
    for got, one, other in zip(found(kernel, df, y, ty), *of_elements):
        for z, first, second in zip(got, one, other, strict=True):
            wanted = first + second if z.shape == first.shape else np.stack([first, second])
            assert_allclose(z, wanted, rtol=1e-9, atol=1e-9)
    f, backprop = points.logsumexp_vjp(x, y, w, kernel)
    gradient = backprop(df).kernel
    plain.assert_gradient(rng, gradient, lambda kernel: (df * points.logsumexp(x, y, w, kernel)).sum(), kernel)


def test_small_epsilons_do_not_overflow(rng):
    x, y, w = rng.random((20, 3)), rng.random((30, 3)), 1e4 * rng.random(30)
    epsilon = 1e-5
    f, backprop = points.logsumexp_vjp(x, y, w, points.Cost(2, epsilon))
    logs = w - plain.squares(x, y, 1) / 2 / epsilon
    assert_allclose(f, logs.max(-1), rtol=1e-6)
    assert_allclose(backprop(np.ones(20)).dw.sum(), 20)


def test_what_sees_nothing_is_minus_infinity(rng):
    x, y = rng.random((4, 3)), rng.random((5, 3))
    for n, weight, mask in ((0, 0.0, None), (5, -np.inf, None), (5, 0.0, na.Lengths(0))):
        f, backprop = points.logsumexp_vjp(x, y[:n], np.full(n, weight), COST, mask=mask)
        assert_array_equal(f, np.full(4, -np.inf))
        for gradient in backprop(np.full(4, np.nan)):
            assert_array_equal(gradient, np.zeros(gradient.shape))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_results_are_of_the_dtype_of_sums(rng, dtype):
    x, y, w = (rng.random(shape).astype(dtype) for shape in ((50, 20), (60, 20), (60,)))
    f, backprop = points.logsumexp_vjp(x, y, w, points.Cost(2, 0.5))
    assert f.dtype == np.float32
    assert_allclose(f, points.logsumexp(*(z.astype(np.float64) for z in (x, y, w)), points.Cost(2, 0.5)), atol=2e-6)
    assert {gradient.dtype for gradient in backprop(f)} == {np.dtype(dtype)}


def test_weights_of_half_precision_points_may_be_single(rng):
    x, y, w = rng.random((50, 20)).astype(np.float16), rng.random((60, 20)).astype(np.float16), 100 + rng.random(60)
    f, backprop = points.logsumexp_vjp(x, y, w.astype(np.float32), points.Cost(2, 0.5))
    assert_allclose(f, points.logsumexp(x.astype(float), y.astype(float), w, points.Cost(2, 0.5)), rtol=1e-6)
    assert [gradient.dtype for gradient in backprop(f)] == [np.float16, np.float16, np.float32]


def test_no_weights_have_no_gradient(rng):
    x, df = rng.random((5, 2)), rng.random(5)
    grads = points.logsumexp_vjp(x, x, None, COST)[1](df)
    with_weights = points.logsumexp_vjp(x, x, np.zeros(5), COST)[1](df)
    assert grads.dw is None
    assert_array_equal(grads[:2], with_weights[:2])


@pytest.mark.parametrize("far", [1e2, 1e3, 1e5])
def test_weights_of_far_points_sum_to_1(rng, far):
    x, y = np.array([[far, 0], [0, -far]], np.float32), rng.random((64, 2), np.float32)
    f, backprop = points.logsumexp_vjp(x, y, np.zeros(64, np.float32), points.Gaussian(1.0))
    df = np.array([1, 2], np.float32)
    assert_allclose(backprop(df).dw.sum(), 3, rtol=1e-5)
    _, tf = points.logsumexp_jvp(x, y, np.zeros(64, np.float32), points.Gaussian(1.0), None, None, np.ones(64, "f"))
    assert_allclose(tf, 1, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "far"), [(np.float32, 300.0), (np.float64, 3e5)])
@pytest.mark.parametrize("power", [1.5, 3])
def test_passes_agree_on_powers(dtype, far, power):
    """Of which some are rounded where others are added to them."""
    given = np.array([[far]], dtype), np.zeros((1, 1), dtype), np.zeros(1, dtype)
    grads = points.logsumexp_vjp(*given, points.Cost(power, 0.5))[1](np.ones(1, dtype))
    assert grads.dw == 1
    assert_allclose(grads.dx, -(far ** (power - 1)) / 0.5, rtol=1e-6)


def test_passes_agree_on_far_points_beside_near_ones(rng):
    """Whether their pairs lie in tiles with many near pairs, which are computed anew, or not."""
    x = np.repeat(rng.standard_normal((2, 20)), 35, axis=0)
    y = x[:65].astype(np.float32)
    x[-3:] += 6e4 * rng.standard_normal((3, 20))
    x, df = x.astype(np.float32), np.ones(70, np.float32)
    grads = points.logsumexp_vjp(x, y, np.zeros(65, np.float32), points.Cost(2, 0.02))[1](df)
    assert_allclose(grads.dw.sum(), 70, rtol=1e-5)
    assert np.isfinite(grads.dx).all()
    assert np.isfinite(grads.dy).all()


X, W = np.zeros((4, 3)), np.zeros(4)


@pytest.mark.parametrize(("given", "kind", "message"), [
    ((X, X, W, points.Gaussian(1e-310)), ValueError, r"^Gaussian\(length=1e-310\): got the length 1e-310, allowed 2"),
    ((X, X, W[:3], COST), ValueError, r"w: got the shape \(3,\), expected \(..., 4\), a number for each point of y"),
    ((X, X, W.astype(int), COST), TypeError, r"w: got int64, allowed .*; pass w.astype\(np.float32\)"),
    ((X.astype("f2"), X.astype("f2"), W, COST), TypeError, "w: got float64, expected float16, .*, or float32; pass w"),
    ((X, X, W.astype("f4"), COST), TypeError, "w: got float32, expected float64, the dtype of x"),
    ((X, X, W, points.Matern(1.5)), TypeError, r"kernel: got Matern.*, expected Cost, Gaussian, Periodic, Laplac"),
    ((X, X, W, 2 * COST), TypeError, r"kernel: got 2 \* Cost.*, expected Cost, Gaussian"),
    ((X, X, np.zeros((2, 4)), COST, np.zeros((3, 4, 4))), TypeError, "takes"),
])  # fmt: skip
def test_errors(given, kind, message):
    with pytest.raises(kind, match=message):
        points.logsumexp(*given)


FAULTS = {
    "test_what_sees_nothing_is_minus_infinity": {
        "np.where(self.seen, rounded(df, self.pairs.dtype) * np.exp(-self.low), 0)": "rounded(df, self.pairs.dtype)",
    },
    "test_weights_of_far_points_sum_to_1": {
        "rounded(df, self.pairs.dtype) * np.exp(-self.low)": "rounded(df, self.pairs.dtype)",
        "[..., 0] * np.exp(-self.low)": "[..., 0]",
    },
    "test_passes_agree_on_powers": {
        "points/kinds.py": {"power(t, p * HALF) / p * RATE": "power(t, p * HALF) * (RATE / p)"},
    },
    "test_gradients_are_those_of_finite_differences": {
        "dy = self.term.exchanged.gradient(dF, one, W, rows)": "dy = self.term.exchanged.gradient(dF, one, rows=W)",
    },
}

"""Sums and products of kernels, and kernels of some features."""

import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose

from numbattn import points

from ..accuracy import to_numpy

X = np.zeros((3, 2))


def test_sums_and_multiples():
    one, other = points.Gaussian(0.5), points.Linear()
    assert repr(2 * (one + 3 * other)) == "2 * Gaussian(length=0.5) + 6 * Linear(scale=1.0)"
    assert np.float32(2) * one == one * 2
    with pytest.raises(TypeError, match="unsupported operand"):
        one + 1
    with pytest.raises(TypeError, match="kernel: factor: got 'two', expected a number"):
        "two" * one


def test_kernels_of_some_features():
    one, other = points.Gaussian(0.5), points.Periodic(2.0)
    assert repr((one * other).on(slice(1))) == f"{one.on(slice(1))} * {other.on(slice(1))}"
    assert (one + 2 * other).on([0]) == one.on([0]) + 2 * other.on([0])
    assert one.on([0, 1]) == one.on(np.array([0, 1])) != one.on([1, 0])
    assert one.on(slice(0, 2)) != one.on(slice(0, 3))
    assert hash(one.on(slice(0, 2))) == hash(points.Gaussian(0.5).on(slice(0, 2)))


def test_products():
    one, other, third = points.Gaussian(0.5), points.Periodic(2.0), points.Cost(2, 0.1)
    assert one * (other * third) == (one * other) * third != third * other * one
    assert (2 * one) * third == 2 * (one * third) != one * third
    assert (one + 2 * other) * (3 * third) == 3 * (one * third) + 6 * (other * third)
    assert isinstance((one * other).on([0]), type(one * other))


def test_factors_of_a_batch_are_those_of_its_elements(xp, rng):
    """Of points that all elements share or not, with gradients and tangents of both."""
    factors, shapes = rng.standard_normal((2, 1)), [(6, 3), (2, 7, 3), (2, 2, 7, 4)]
    given, moving = ([rng.standard_normal(shape) for shape in shapes] for _ in range(2))
    ds, tds = rng.standard_normal((2, 2, 2, 6, 4))
    one, other = points.Gaussian(0.8), points.Linear()

    def found(kernel, *arrays):
        *points_and_b, tx, ty, tb, ds, tds = map(xp.asarray, arrays)
        s, backprop = points.product_vjp(*points_and_b, kernel)
        _, ts = points.product_jvp(*points_and_b, kernel, tx, ty, tb)
        grads = backprop(ds)
        return [to_numpy(z) for z in (s, ts, *grads, *backprop.hvp(ds, tx, ty, tb, tds=tds))], grads.factor

    (s, ts, *together), (of_one, of_other) = found(factors * one + 2 * other, *given, *moving, ds, tds)
    assert (of_one.shape, of_other.shape) == ((2, 1), ())
    wanted, of_factor = [0 * z for z in together], np.zeros((2, 1))
    for at in np.ndindex(2, 2):
        own = [np.broadcast_to(z, (2, 2, *z.shape[-2:]))[at] for z in (*given, *moving, ds, tds)]
        of_each = [found(kernel, *own)[0] for kernel in (one, other)]
        s_own, ts_own, *grads = (factors[at[0], 0] * z + 2 * w for z, w in zip(*of_each))
        assert_allclose(s[at], s_own, rtol=1e-10, atol=1e-12)
        assert_allclose(ts[at], ts_own, rtol=1e-10, atol=1e-12)
        of_factor[at[0]] += (ds[at] * of_each[0][0]).sum()
        for total, z in zip(wanted, grads):
            total[at[4 - total.ndim :]] += z
    assert_allclose(to_numpy(of_one), of_factor, rtol=1e-9)
    for got, want in zip(together, wanted, strict=True):
        assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_factors_of_a_batch_in_solutions_and_determinants(rng):
    """Gradients are those of finite differences; x has no batch axes, the factor has."""
    x, b, factor = rng.random((8, 2)), rng.random((8, 2)), np.array([0.5, 2.0])
    direction, ds, dlog = rng.standard_normal(2), rng.standard_normal((2, 8, 2)), rng.standard_normal(2)

    def solved(factor):
        return points.solve_vjp(x, b, factor * points.Matern(2.5, 0.5), ridge=0.3, tol=1e-13)

    def determined(factor):
        return points.log_determinant_vjp(x, factor * points.Matern(2.5, 0.5), ridge=0.3, rank=8, tol=1e-12)

    for function, gradient, value in ((solved, ds, lambda r: r.x), (determined, dlog, lambda found: found)):
        _, backprop = function(factor)
        ends = [(gradient * value(function(factor + h * direction)[0])).sum() for h in (1e-5, -1e-5)]
        assert_allclose(backprop(gradient).factor[0] @ direction, (ends[0] - ends[1]) / 2e-5, rtol=1e-6)


def test_factors_are_values():
    factor = np.array([1.0, 2.0], np.float32)
    kernel = factor * points.Gaussian(0.5)
    assert kernel == factor * points.Gaussian(0.5) != factor.copy() * points.Gaussian(0.5)
    assert repr(pickle.loads(pickle.dumps(kernel))) == repr(kernel) == "<float32 array (2,)> * Gaussian(length=0.5)"
    assert repr(2 * (np.array(3.0) * points.Gaussian(0.5))) == "<float64 array ()> * Gaussian(length=0.5)"
    assert repr([1.0, 2.0] * points.Gaussian(0.5)) == "<float64 array (2,)> * Gaussian(length=0.5)"
    x = np.ones((2, 3, 1), np.float32)
    s, backprop = points.product_vjp(x, x, x, [1.0, 2.0] * points.Gaussian())
    assert_allclose(s[:, 0, 0], [3, 6])
    grads = backprop(s)
    assert (s.dtype, grads.dx.dtype, grads.factor[0].dtype) == (np.float32, np.float32, np.float64)


@pytest.mark.parametrize("length", [0.03, 0.3, 1.0])
@pytest.mark.parametrize("origin", [0, 1000])
def test_rounding_errors_of_products(rng, length, origin):
    """Of a periodic kernel and another are at most those of the plain formula in float32, twice."""
    x, y = ((5 * rng.standard_normal((400, 1)) + origin).astype(np.float32) for _ in range(2))
    b = rng.standard_normal((400, 3)).astype(np.float32)

    def formula(x, y, b, real):
        apart = x - y.T
        return np.exp(-2 * np.sin(real(np.pi) * apart) ** 2 / real(length) ** 2 - apart**2 / real(18)) @ b

    exact = formula(*(z.astype(np.float64) for z in (x, y, b)), np.float64)
    found = points.product(x, y, b, points.Periodic(1.0, length) * points.Gaussian(3.0))
    assert np.abs(found - exact).max() <= 2 * np.abs(formula(x, y, b, np.float32) - exact).max()


@pytest.mark.parametrize(("make", "kind", "message"), [
    (lambda: points.Gaussian() * points.PairCost(max, 0.1).on([0]), TypeError,
     r"kernel: got a product with PairCost\(max, epsilon=0.1\), which sinkhorn alone takes"),
    (lambda: points.logsumexp(X, X, None, points.Cauchy() * points.Laplacian()), TypeError, "got Cauchy.*product of"),
    (lambda: points.Gaussian().on([0, 0]), ValueError, r"features: got \[0, 0\], expected a slice, or numbers of feat"),
    (lambda: points.Gaussian().on(1), ValueError, "features: got 1, expected a slice, or numbers of features"),
    (lambda: points.Gaussian().on([0.5]), TypeError, "features: got"),
    (lambda: points.Gaussian().on([]), (TypeError, ValueError), "features: got"),
    (lambda: points.product(X, X, X, points.Gaussian().on([2])), ValueError, r"features: got \(2,\), of points of 2"),
    (lambda: points.product(X, X, X, points.Gaussian().on([-1, 1])), ValueError, r"features: got \(-1, 1\), .* each"),
    (lambda: points.product(X, X, X, points.Gaussian().on(slice(2, 9))), ValueError, r"features: got slice\(2, 9, Non"),
    (lambda: np.nan * points.Gaussian(), ValueError, "kernel: factor: got nan, allowed finite"),
    (lambda: np.array([1, np.inf]) * points.Gaussian(), ValueError, "kernel: factor: got .*inf.*, allowed finite"),
    (lambda: np.ones(2, bool) * points.Gaussian(), TypeError, "kernel: factor: got"),
    (lambda: points.product(np.stack([X] * 3), X, X, np.ones(2) * points.Gaussian()), ValueError,
     r"batch axes of x \(3,\), y \(\), b \(\), .*factor of Gaussian\(length=1.0\) \(2,\) do not"),
    (lambda: points.operator(X, X, np.ones(2) * points.Gaussian()), ValueError, "expected lengths and factors without"),
    (lambda: (1e200 * points.Gaussian()) * (1e200 * points.Gaussian()), ValueError, "factor: got inf, allowed finite"),
    (lambda: points.product(X, X, X, points.Gaussian([1.0] * 3).on(slice(2))), ValueError, r"expected .* \(..., 2\)"),
])  # fmt: skip
def test_errors(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


FAULTS = {
    "test_factors_of_a_batch_are_those_of_its_elements": {
        "points/product.py": {
            "db, own = term.exchanged.sums(dS), factor * dS": "db, own = term.exchanged.sums(dS), dS",
            "None if tdS is None else factor * tdS": "tdS",
            "sum_broadcast(of_factor, np.shape(factor))": "of_factor",
        },
    },
    "test_factors_are_values": {
        "(identity(factor), kernel) for": "(str(factor), kernel) for",
        "else found[...]": "else found",
        "points/pairs.py": {"moved(factor, pairs.x).astype(pairs.dtype)[": "moved(factor, pairs.x)["},
    },
    "test_products": {
        "len(terms) == 1 and _is_one(terms[0][0]) else": "len(terms) == 1 else",
        "return self.factors\n": "return ((self, ALL),)\n",
    },
    "test_kernels_of_some_features": {
        "[(kernel, str(own)) for": "[kernel for",
        "any(own != ALL for _, own in self.factors)": "True",
    },
    "test_errors": {
        "or len({*found.tolist()}) < found.size": "",
        "all(-features <= at < features for at in numbers) and": "",
        "and (numbers or own == ALL)": "",
        "or len({at % features for at in numbers}) < len(numbers)": "",
        "kernel._check(len(numbers))": "pass",
        "isinstance(factor, float | np.ndarray) and not np.isfinite(factor).all()": "np.any(factor != factor)",
    },
    "test_rounding_errors_of_products": {
        "return first if all(one == first for one in others) else None": "return first or all(others)",
        "x[int(kernel._is_centred)] if": "x[0] if",
    },
    "points/test_product.py::test_gradients_of_lengths": {
        "[_some(z, own) for z in points]": "points",
        "first += count": "first = count",
    },
    "points/test_product.py::test_gradients_are_those_of_finite_differences": {
        "found[..., to] = gradient[..., at]": "found[..., at] = gradient[..., at]",
    },
}

"""Sums and products of kernels, and kernels of some features."""

import numpy as np
import pytest

from numbattn import points

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
    assert (one + 2 * other) * (3 * third) == 3 * (one * third) + 6 * (other * third)
    assert isinstance((one * other).on([0]), type(one * other))


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
    (lambda: points.Gaussian() * points.Matern(1.5), TypeError, r"got a product with Matern\(.*, expected Gaussian "),
    (lambda: points.Gaussian().on([0, 0]), ValueError, r"features: got \[0, 0\], expected a slice, or numbers of feat"),
    (lambda: points.Gaussian().on(1), ValueError, "features: got 1, expected a slice, or numbers of features"),
    (lambda: points.Gaussian().on([0.5]), TypeError, "features: got"),
    (lambda: points.Gaussian().on([]), (TypeError, ValueError), "features: got"),
    (lambda: points.product(X, X, X, points.Gaussian().on([2])), ValueError, r"features: got \(2,\), of points of 2"),
    (lambda: points.product(X, X, X, points.Gaussian().on([-1, 1])), ValueError, r"features: got \(-1, 1\), .* each"),
    (lambda: points.product(X, X, X, points.Gaussian().on(slice(2, 9))), ValueError, r"features: got slice\(2, 9, Non"),
    (lambda: np.nan * points.Gaussian(), ValueError, "kernel: factor: got nan, allowed finite"),
    (lambda: (1e200 * points.Gaussian()) * (1e200 * points.Gaussian()), ValueError, "factor: got inf, allowed finite"),
    (lambda: points.product(X, X, X, points.Gaussian([1.0] * 3).on(slice(2))), ValueError, r"expected .* \(..., 2\)"),
])  # fmt: skip
def test_errors(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


FAULTS = {
    "test_products": {
        "terms[0][0] != 1": "False",
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
        "if not math.isfinite(factor):": "if factor != factor:",
    },
    "test_rounding_errors_of_products": {
        "return None if others and not (first and all(others)) else first": "return first or all(others)",
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

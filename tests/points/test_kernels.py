"""What kernels take."""

import copy
import math
import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose

from numbattn import points

from ..accuracy import to_numpy
from . import plain

X = np.zeros((3, 2))


def test_kernels_are_values():
    assert points.Gaussian(0.5) == points.Gaussian(0.5) != points.Gaussian(0.6)
    assert points.Gaussian(0.5) != points.Laplacian(0.5)
    assert len({points.Matern(1.5, 2), points.Matern(1.5, 2.0), points.Matern(0.5, 2)}) == 2
    assert points.Radial(plain.multiquadric) == points.Radial(plain.multiquadric)
    for kernel in plain.KERNELS:
        again = pickle.loads(pickle.dumps(kernel))
        assert repr(again) == repr(kernel) == repr(copy.copy(kernel))


def test_copies_have_the_function_that_was_taken():
    slope = 1.0
    kernel = points.Radial(lambda t: 1 / (1 + slope * t), np.array([1.0, 2.0]))
    slope = 2.0
    again = copy.deepcopy(kernel)
    assert copy.copy(kernel) == kernel != again
    assert again._kind == kernel._kind
    again.length[:] = 5
    assert kernel.length[0] == 1


BATCHES = [
    points.Gaussian, lambda L: points.Matern(2.5, L[:, :1]), lambda L: points.Polynomial(2, 0.5, L),
    lambda L: points.Periodic(L, 2.0), lambda L: points.Periodic(2.0, L[:, :1]),
    lambda L: points.Cauchy(L[:, :2]).on([2, 0]),
    lambda L: points.Gaussian(L[:, None, :1]) * points.Periodic(L[0, :2], L[:, :2]).on([0, 2]),
    lambda L: 2 * points.Laplacian(L[0]) + points.Gaussian(L[:, None]),
]  # fmt: skip


@pytest.mark.parametrize("d", [3, 9])
@pytest.mark.parametrize("make", BATCHES)
def test_lengths_of_a_batch_are_those_of_its_elements(xp, rng, make, d):
    """Of points that all elements share or not, with gradients and tangents of both."""
    kernel, shapes = make(rng.random((2, d)) + 0.5), [(6, d), (2, 7, d), (2, 2, 7, 4)]
    given, moving = ([rng.standard_normal(shape) for shape in shapes] for _ in range(2))
    ds, tds = rng.standard_normal((2, 2, 2, 6, 4))

    def cut(z, at, axes):
        return np.broadcast_to(z, (2, 2, *z.shape[z.ndim - axes :]))[at]

    def of_element(at):
        lengths = plain.of_each(lambda z: cut(z, at, 1) if z.ndim > 1 else z, plain.parameters(kernel))
        return plain.with_parameters(kernel, lengths)

    def found(kernel, *arrays):
        *points_and_b, tx, ty, tb, ds, tds = arrays
        s, backprop = points.product_vjp(*points_and_b, kernel)
        _, ts = points.product_jvp(*points_and_b, kernel, tx, ty, tb)
        return s, ts, backprop(ds), backprop.hvp(ds, tx, ty, tb, tds=tds)

    together = found(kernel, *map(xp.asarray, (*given, *moving, ds, tds)))
    wanted = [0 * to_numpy(z) for z in (*together[2], *together[3])]
    for at in np.ndindex(2, 2):
        s, ts, *grads = found(of_element(at), *[cut(z, at, 2) for z in (*given, *moving, ds, tds)])
        assert_allclose(to_numpy(together[0])[at], s, rtol=1e-10)
        assert_allclose(to_numpy(together[1])[at], ts, rtol=1e-10, atol=1e-10)
        for total, own in zip(wanted, (*grads[0], *grads[1])):
            total[at[4 - total.ndim :]] += own
    for got, want in zip((*together[2], *together[3]), wanted, strict=True):
        assert_allclose(to_numpy(got), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", BATCHES)
def test_gradients_of_lengths_of_a_batch(rng, make):
    x, y, b = (rng.standard_normal((2, n, size)) for n, size in ((6, 3), (7, 3), (7, 4)))
    kernel = make(rng.random((2, 3)) + 0.5)
    s, backprop = points.product_vjp(x, y, b, kernel)
    ds = rng.standard_normal(s.shape)
    gradient = backprop(ds).kernel
    plain.assert_gradient(rng, gradient, lambda kernel: (ds * points.product(x, y, b, kernel)).sum(), kernel)


@pytest.mark.parametrize("kernel", [points.Periodic(0.5, 0.7), points.Gaussian(2.0) * points.Periodic([0.5, 0.7], 2.0)],
                         ids=repr)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_periods_that_are_far_off(xp, rng, kernel, dtype):
    """Hundreds of them, of points around any origin, cost no digits but those that points have."""
    x, y = ((rng.standard_normal((n, 2)) + origin).astype(dtype) for n, origin in ((50, 40), (60, 41)))
    b = rng.standard_normal((60, 1)).astype(dtype)
    wide = [z.astype(np.float64) for z in (x, y)]
    factors = [one for one, _ in kernel._factors]
    exponents = [plain.squares(*wide, one.length) / 2 if isinstance(one, points.Gaussian) else
                 2 * ((np.sin(np.pi * plain.apart(*wide) / np.asarray(one.period)) / one.length) ** 2).sum(-1)
                 for one in factors]  # fmt: skip
    exact = np.exp(-sum(exponents)) @ b.astype(np.float64)
    found = to_numpy(points.product(*map(xp.asarray, (x, y, b)), kernel)).astype(np.float64)
    rounding = max(float(np.finfo(dtype).eps), 3e-6 if dtype == np.float32 else 1e-14)
    assert_allclose(found, exact, atol=rounding * np.abs(exact).max())


@pytest.mark.parametrize(("make", "kind", "message"), [
    (lambda: points.Gaussian(0), ValueError, "Gaussian length: got 0, allowed finite and > 0"),
    (lambda: points.Laplacian(-1.0), ValueError, "Laplacian length: got -1.0, allowed finite and > 0"),
    (lambda: points.Cauchy(math.nan), ValueError, "Cauchy length: got nan, allowed finite and > 0"),
    (lambda: points.Gaussian([1.0, 0.0]), ValueError, "Gaussian length: got values from 0.0 to 1.0, allowed finite"),
    (lambda: points.product(X, X, X, points.Gaussian(np.ones((4, 3)))), ValueError, r"length: got the shape \(4, 3\)"),
    (lambda: points.product(np.stack([X] * 3), X, X, points.Gaussian(np.ones((4, 2)))), ValueError,
     r"batch axes of x \(3,\), y \(\), b \(\), Gaussian\(length=<float64 array \(4, 2\)>\) length \(4,\) do not"),
    (lambda: points.operator(X, X, points.Gaussian(np.ones((4, 2)))), ValueError, "and factors without batch axes"),
    (lambda: points.Gaussian("long"), TypeError, "Gaussian length: got 'long', expected a number"),
    (lambda: points.Matern(1.0), ValueError, "Matern nu: got 1.0, allowed 0.5, 1.5, 2.5"),
    (lambda: points.RationalQuadratic(0.0), ValueError, "RationalQuadratic alpha: got 0.0, allowed finite and > 0"),
    (lambda: points.Polynomial(0), ValueError, "Polynomial degree: got 0, allowed 1 or more"),
    (lambda: points.Polynomial(2, math.inf), ValueError, "Polynomial offset: got inf, allowed finite"),
    (lambda: points.Polynomial(1.5), TypeError, "Polynomial degree: got 1.5, expected an integer"),
    (lambda: points.Cost(2, 0.0), ValueError, "Cost epsilon: got 0.0, allowed finite and > 0"),
    (lambda: points.Cost(1e-3, 4), ValueError, "Cost epsilon: got 4 with the power 0.001, expected"),
    (lambda: points.Cost(-1, 0.1), ValueError, "Cost power: got -1, allowed finite and > 0"),
    (lambda: points.Periodic(0.0), ValueError, "Periodic period: got 0.0, allowed finite and > 0"),
    (lambda: points.product(X, X, X, points.Periodic([1.0] * 3)), ValueError, r"Periodic period: got the shape \(3,"),
    (lambda: points.Radial(math.exp), TypeError, "Radial function: got .*, expected a Python function"),
    (lambda: points.Radial(lambda s, t: s), TypeError, r"<lambda>\(s, t\) cannot be called as \(t\)"),
])  # fmt: skip
def test_errors(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_functions_that_might_raise_are_refused_before_anything_runs():
    x, table = np.zeros((3, 2)), (1.0, 2.0)

    def looked_up(t):
        return table[int(t)]

    with pytest.raises(TypeError, match="Radial function: looked_up, line"):
        points.product(x, x, x, points.Radial(looked_up))
    with pytest.raises(TypeError, match=r"kernel: is_near, line .*, returns True or False: let it return a number"):
        points.product(x, x, x, points.Radial(is_near))


def test_derivatives_are_asked_of_functions_only_for_gradients(rng):
    x, b, kernel = rng.random((4, 2)), rng.random((4, 1)), points.Radial(gamma)
    exact = np.vectorize(math.gamma)(1 + plain.squares(x, x, 1)) @ b
    assert_allclose(points.product(x, x, b, kernel), exact)
    assert_allclose(points.operator(x, x, kernel) @ b, exact)
    for call in (lambda: points.product_vjp(x, x, b, kernel), lambda: points.product_jvp(x, x, b, kernel, x, x, b)):
        with pytest.raises(TypeError, match=r"(?s)kernel: the derivative of gamma.* no rule here\nWrite the function"):
            call()


def is_near(t):
    return t < 1


def gamma(t):
    return math.gamma(1 + t)


def test_functions_have_branches_and_derivatives(rng):
    x, y, b = rng.random((3, 20, 2))
    kernel = points.Radial(wendland, 0.5)
    t = plain.squares(x, y, 0.5)
    r = np.sqrt(t)
    assert_allclose(points.product(x, y, b, kernel), np.where(r < 1, (1 - r) ** 4 * (4 * r + 1), 0) @ b, atol=1e-12)
    _, backprop = points.product_vjp(x, x, b, kernel)
    assert all(np.isfinite(gradient).all() for gradient in backprop(b))


def wendland(t):
    r = math.sqrt(t)
    return (1 - r) ** 4 * (4 * r + 1) if t < 1 else 0.0


FAULTS = {
    "test_lengths_of_a_batch_are_those_of_its_elements": {
        "return length[..., None, :] if length.ndim > 1 else length": "return length",
        "points/pairs.py": {
            "sum_broadcast(found, self.x.shape)": "sum_broadcast(found, self.pairs.x.shape)",
            "return sum_broadcast(dx, pairs.x.shape)": "return dx",
        },
        "points/tangents.py": {"return sum_broadcast(found, term.pairs.x.shape)": "return found"},
        "points/composition.py": {"np.broadcast_to(x, (*batch, x.shape[-1])) for x in": "x for x in"},
    },
    "test_gradients_of_lengths_of_a_batch": {
        "(*np.shape(length)[:-1], *products.shape[-2:])": "products.shape[-2:]",
    },
    "test_errors": {"if shape and shape[-1] not in (1, features):": "if shape and shape[-1] < features:"},
    "test_periods_that_are_far_off": {"angle = np.fmod(x, period) * (": "angle = x * ("},
    "points/test_product.py::test_gradients_of_lengths": {
        "(cos * of_sin - sin * of_cos) * (2": "(cos * of_sin + sin * of_cos) * (2",
    },
    "points/test_product.py::test_gradients_are_those_of_finite_differences": {
        "(cos * of_sin - sin * of_cos) * rate": "(cos * of_sin - sin * of_cos)",
    },
    "points/test_tangents.py::test_products_of_each_kernel": {
        "-(cos * of_cos + sin * of_sin) * (rate * rate * tx)": "0 * x",
        "np.concatenate([-sin * (rate * tx), cos * (rate * tx)], axis=-1)": "0 * np.concatenate([cos, sin], axis=-1)",
    },
}

"""Sums over pairs of points by the plain formula: all pairs at once, in float64."""

import math
from dataclasses import replace

import numpy as np
from numpy.testing import assert_allclose

from numbattn import points
from numbattn.functions.frozen import frozen
from numbattn.points import kinds
from numbattn.points.composition import Product, Sum

KINDS = [
    kinds.GAUSSIAN, kinds.EXPONENTIAL, kinds.Power(1.5), kinds.Power(3.0), kinds.MATERN32, kinds.MATERN52,
    kinds.CAUCHY, kinds.RationalQuadratic(0.7), kinds.Polynomial(3, 0.5), kinds.LINEAR, kinds.EXPONENTIAL_OF_PRODUCT,
]  # fmt: skip


def multiquadric(t):
    return -((1 + t) ** 0.5) if t > 0.25 else -1 - t / 2


def radial():
    return kinds.Radial(frozen(multiquadric, "Radial function"))


def pairs(kind, x, y, visible, rows=None, columns=None):
    """t, kappa and kappa' of all pairs."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    t = x @ np.swapaxes(y, -2, -1) if kind.is_of_product else ((x[..., :, None, :] - y[..., None, :, :]) ** 2).sum(-1)
    weight = np.exp((0 if rows is None else rows[..., None]) + (0 if columns is None else columns[..., None, :]))
    return t, *(np.where(visible, f * weight, 0) for f in (kind.value(t), kind.derivative(t)))


def sums(kind, x, y, b, visible=True, rows=None, columns=None):
    return pairs(kind, x, y, visible, rows, columns)[1] @ b.astype(np.float64)


def gradient(kind, x, y, b, c, visible=True, rows=None, columns=None):
    weights = pairs(kind, x, y, visible, rows, columns)[2] * (c.astype(np.float64) @ np.swapaxes(b, -2, -1))
    if kind.is_of_product:
        return weights @ y
    return 2 * np.einsum("...ij,...ijf->...if", weights, x[..., :, None, :] - y[..., None, :, :].astype(np.float64))


def logsumexp(kind, x, y, visible=True, columns=None):
    with np.errstate(divide="ignore"):
        return np.log(pairs(kind, x, y, visible, None, columns)[1].sum(-1))


def nearest(x, y, k, visible=True):
    t = np.where(visible, pairs(kinds.GAUSSIAN, x, y, True)[0], math.inf)
    t = np.concatenate([t, np.full((*t.shape[:-1], k), math.inf)], axis=-1)
    j = np.argsort(t, axis=-1, kind="stable")[..., :k]
    t = np.take_along_axis(t, j, -1)
    return t, np.where(np.isinf(t), -1, j)


# ------------------------------------------------------------------------------------------- kernels, by their formulas
LENGTHS = np.array([0.7, 1.3, 0.4])
KERNELS = {
    points.Gaussian(0.8): lambda x, y: np.exp(-squares(x, y, 0.8) / 2),
    points.Gaussian(LENGTHS): lambda x, y: np.exp(-squares(x, y, LENGTHS) / 2),
    points.Laplacian(0.5): lambda x, y: np.exp(-distances(x, y, 0.5)),
    points.Matern(0.5, LENGTHS): lambda x, y: np.exp(-distances(x, y, LENGTHS)),
    points.Matern(1.5, 0.9): lambda x, y: matern(math.sqrt(3) * distances(x, y, 0.9), 0),
    points.Matern(2.5, LENGTHS): lambda x, y: matern(math.sqrt(5) * distances(x, y, LENGTHS), 1),
    points.Cauchy(1.2): lambda x, y: 1 / (1 + squares(x, y, 1.2)),
    points.RationalQuadratic(0.6, 1.1): lambda x, y: (1 + squares(x, y, 1.1) / 1.2) ** -0.6,
    points.Radial(multiquadric, LENGTHS): lambda x, y: np.vectorize(multiquadric)(squares(x, y, LENGTHS)),
    points.Polynomial(3, 0.5, LENGTHS): lambda x, y: ((x / LENGTHS) @ T(y / LENGTHS) + 0.5) ** 3,
    points.Linear(): lambda x, y: x @ T(y),
    points.Cosine(): lambda x, y: x @ T(y) / norms(x) / T(norms(y)),
    points.Cost(1.5, 0.3): lambda x, y: np.exp(-distances(x, y, 1) ** 1.5 / 1.5 / 0.3),
    points.Cost(2, 0.3): lambda x, y: np.exp(-squares(x, y, 1) / 2 / 0.3),
    points.Cost(1, 0.3): lambda x, y: np.exp(-distances(x, y, 1) / 0.3),
    points.Periodic(0.9, 0.8): lambda x, y: np.exp(-2 * (np.sin(np.pi * apart(x, y) / 0.9) ** 2).sum(-1) / 0.8**2),
    points.Periodic(LENGTHS, 2 * LENGTHS).on([2, 0, 1]): (
        lambda x, y: np.exp(-((np.sin(np.pi * apart(x, y)[..., [2, 0, 1]] / LENGTHS) / LENGTHS) ** 2).sum(-1) / 2)
    ),
    points.Matern(2.5, LENGTHS[:2]).on([2, 0]): (
        lambda x, y: matern(math.sqrt(5) * distances(x[..., [2, 0]], y[..., [2, 0]], LENGTHS[:2]), 1)
    ),
    points.Laplacian(0.5).on(slice(1, None)): lambda x, y: np.exp(-distances(x[..., 1:], y[..., 1:], 0.5)),
    points.Gaussian(0.8) * (points.Periodic(0.9, 0.8) * points.Gaussian(LENGTHS[:2])).on([0, 2]): (
        lambda x, y: np.exp(-squares(x, y, 0.8) / 2 - squares(x[..., [0, 2]], y[..., [0, 2]], LENGTHS[:2]) / 2
                            - 2 * (np.sin(np.pi * apart(x, y)[..., [0, 2]] / 0.9) ** 2).sum(-1) / 0.8**2)
    ),
    points.Matern(1.5, 0.9).on([2]) * points.Matern(2.5, LENGTHS[:2]).on([0, 1]): (
        lambda x, y: matern(math.sqrt(3) * distances(x[..., [2]], y[..., [2]], 0.9), 0)
        * matern(math.sqrt(5) * distances(x[..., :2], y[..., :2], LENGTHS[:2]), 1)
    ),
    (points.Periodic(0.9, 0.8) * points.RationalQuadratic(0.6, 1.1)).on([2, 0]) * points.Polynomial(2, 0.5, LENGTHS): (
        lambda x, y: np.exp(-2 * (np.sin(np.pi * apart(x, y)[..., [2, 0]] / 0.9) ** 2).sum(-1) / 0.8**2)
        * (1 + squares(x[..., [2, 0]], y[..., [2, 0]], 1.1) / 1.2) ** -0.6 * ((x / LENGTHS) @ T(y / LENGTHS) + 0.5) ** 2
    ),
    2 * points.Gaussian(0.5) + np.float64(-0.25) * (points.Linear() + 3 * points.Laplacian(LENGTHS)): (
        lambda x, y: 2 * np.exp(-squares(x, y, 0.5) / 2) - x @ T(y) / 4 - 0.75 * np.exp(-distances(x, y, LENGTHS))
    ),
}
EXPONENTIALS = {kernel: value for kernel, value in KERNELS.items()
                if len(kernel._terms) == 1 and kernel._exponential == kernel._kind_of(3)}  # fmt: skip
SCORES = {  # whose exponentials are taken
    points.Linear(0.7): lambda x, y: 0.7 * x @ T(y),
    points.Cosine(3.0): lambda x, y: 3 * x @ T(y) / norms(x) / T(norms(y)),
}  # fmt: skip
EXPONENTIALS |= {kernel: lambda x, y, score=score: np.exp(score(x, y)) for kernel, score in SCORES.items()}


def apart(x, y):
    return x[..., :, None, :].astype(np.float64) - y[..., None, :, :]


def squares(x, y, length):
    x, y = (points.astype(np.float64) / length for points in (x, y))
    return ((x[..., :, None, :] - y[..., None, :, :]) ** 2).sum(-1)


def distances(x, y, length):
    return np.sqrt(squares(x, y, length))


def matern(s, order):
    return (1 + s + order * s**2 / 3) * np.exp(-s)


def T(x):
    return np.swapaxes(x, -2, -1)


def norms(x):
    return np.linalg.norm(x, axis=-1, keepdims=True)


# ----------------------------------------------------------------------------------------------- parameters of kernels
def parameters(kernel):
    """What a gradient of a kernel is the gradient of, of the same structure."""
    match kernel:
        case Product(((one, _),)):
            return parameters(one)
        case Sum() | Product():
            return tuple([parameters(part) for part in parts(kernel)])
        case points.Periodic():
            return np.asarray(kernel.period), np.asarray(kernel.length)
    name = name_of_parameter(kernel)
    return None if name is None else np.asarray(getattr(kernel, name))


def name_of_parameter(kernel):
    return next((name for name in ("length", "epsilon", "scale") if hasattr(kernel, name)), None)


def with_parameters(kernel, now):
    match kernel:
        case Sum():
            return Sum(tuple([(factor, with_parameters(*one)) for (factor, _), one in
                              zip(kernel.terms, zip(parts(kernel), now))]))  # fmt: skip
        case Product():
            now = now if len(kernel.factors) > 1 else (now,)
            return Product(tuple([(with_parameters(one, own), of) for (one, of), own in zip(kernel.factors, now)]))
        case points.Periodic():
            return points.Periodic(*now)
    return kernel if now is None else replace(kernel, **{name_of_parameter(kernel): now[()]})


def parts(kernel):
    return [one for one, _ in kernel.factors] if isinstance(kernel, Product) else [one for _, one in kernel.terms]


def of_each(function, *trees):
    """The tree of what a function of the leaves returns."""
    if isinstance(trees[0], tuple):
        return tuple([of_each(function, *branches) for branches in zip(*trees, strict=True)])
    return None if trees[0] is None else function(*trees)


def assert_gradient(rng, gradient, loss, kernel, h=1e-5):
    """That of the parameters of the kernel in loss(kernel), by finite differences."""
    now, found = parameters(kernel), []
    moves = of_each(lambda value: rng.standard_normal(value.shape), now)
    ends = [loss(with_parameters(kernel, of_each(lambda value, move: value + step * move, now, moves)))  # noqa: B023
            for step in (h, -h)]  # fmt: skip

    def add(value, move, own):
        assert isinstance(own, np.ndarray)
        assert own.shape == value.shape
        found.append((own * move).sum())

    of_each(add, now, moves, gradient)
    assert_allclose(sum(found), (ends[0] - ends[1]) / (2 * h), rtol=1e-6, atol=1e-7)


def slope(function, arrays, at, direction, h=1e-5):
    """Of a number that depends on arrays, along a direction of one of them."""
    ends = [function(*arrays[:at], arrays[at] + step * direction, *arrays[at + 1 :]) for step in (h, -h)]
    return (ends[0] - ends[1]) / (2 * h)

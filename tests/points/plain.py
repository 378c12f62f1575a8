"""Sums over pairs of points by the plain formula: all pairs at once, in float64."""

import math

import numpy as np

from numbattn import points
from numbattn.functions.frozen import frozen
from numbattn.points import kinds

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
    2 * points.Gaussian(0.5) + np.float64(-0.25) * (points.Linear() + 3 * points.Laplacian(LENGTHS)): (
        lambda x, y: 2 * np.exp(-squares(x, y, 0.5) / 2) - x @ T(y) / 4 - 0.75 * np.exp(-distances(x, y, LENGTHS))
    ),
}
EXPONENTIALS = {kernel: value for kernel, value in KERNELS.items()
                if len(kernel._terms) == 1 and kernel._kind.is_exponential}  # fmt: skip
SCORES = {  # whose exponentials are taken
    points.Linear(0.7): lambda x, y: 0.7 * x @ T(y),
    points.Cosine(3.0): lambda x, y: 3 * x @ T(y) / norms(x) / T(norms(y)),
}  # fmt: skip
EXPONENTIALS |= {kernel: lambda x, y, score=score: np.exp(score(x, y)) for kernel, score in SCORES.items()}


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


def slope(function, arrays, at, direction, h=1e-5):
    """Of a number that depends on arrays, along a direction of one of them."""
    ends = [function(*arrays[:at], arrays[at] + step * direction, *arrays[at + 1 :]) for step in (h, -h)]
    return (ends[0] - ends[1]) / (2 * h)

"""Sums over pairs of points by the plain formula: all pairs at once, in float64."""

import math

import numpy as np

from numbattn.points import kinds
from numbattn.scores.frozen import frozen

KINDS = [
    kinds.GAUSSIAN, kinds.EXPONENTIAL, kinds.Power(1.5), kinds.Power(3.0), kinds.MATERN32, kinds.MATERN52,
    kinds.CAUCHY, kinds.RationalQuadratic(0.7), kinds.Polynomial(3, 0.5), kinds.LINEAR,
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

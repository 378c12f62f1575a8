"""Steps of losses over pairs, for a block of all pairs, by array operations of NumPy or CuPy; kernels for GPUs, in
`numbattn.cuda.losses`, are compared with them.

    R_ij = <x_i, y_j>                                       a matrix product, of which rows have
    T_ij = a_i b_j R_ij + w_j                               scores,
    f_i  = log sum_j exp(T_ij), P_ij = exp(T_ij - f_i)      or sum_j log(1 + exp(T_ij)), 1 / (1 + exp(-T_ij)), and with
    G_ij = c_i (P_ij - [j = targets_i])                     the gradient of T, and
    dR_ij = a_i b_j G_ij

Vectors are in the dtype of sums. A target that is not in the block is no number of its columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .formula import quiet

BYTES = 1 << 25  # of a block of T


class Given(NamedTuple):
    """What scores and losses are made of besides R."""

    a: Any
    b: Any
    w: Any
    targets: Any
    sigmoid: bool

    def of(self, i: slice, j: slice) -> Given:
        return Given(self.a[i], self.b[j], self.w[j], self.targets[i] - j.start, self.sigmoid)


class Statistics(NamedTuple):
    """What is known of rows after some blocks."""

    highest: Any  # of T, finite
    total: Any  # of exp(T - highest), or of log(1 + exp(T))
    chosen: Any  # T of the target


class Weights(NamedTuple):
    """Of rows."""

    f: Any  # inf where it is -inf
    low: Any  # what rounding took from f
    c: Any


def product(out: Any, a: Any, b: Any, add: bool = False) -> None:
    """out = a b, or out += a b."""
    a, b = (x.astype(out.dtype, copy=False) for x in (a, b))
    if add:
        out += a @ b
    else:
        np.matmul(a, b, out=out)


def room_for_gradient(R: Any, dtype: Any) -> Any:
    """Where dR is put; dtype: of points."""
    return R


@quiet
def absorb(R: Any, given: Given, known: Statistics) -> None:
    """Add a block to the Statistics of its rows. R is lost, here and below."""
    T = scores(R, given)
    near = np.clip(given.targets, 0, T.shape[1] - 1)
    own = np.take_along_axis(T, near[:, None], axis=1)[:, 0]
    known.chosen[...] += np.where(near == given.targets, own, 0)
    if given.sigmoid:
        known.total[...] += np.logaddexp(T.dtype.type(0), T).sum(axis=1)
        return
    highest = np.maximum(known.highest, T.max(axis=1))
    known.total[...] *= np.exp(known.highest - highest)
    T -= highest[:, None]
    known.total[...] += np.exp(T, out=T).sum(axis=1)
    known.highest[...] = highest


@quiet
def gradient(dR: Any, R: Any, given: Given, weights: Weights, dw: Any) -> None:
    """Put dR in its place, and add the gradient of w to dw."""
    G = probabilities(scores(R, given), given, weights)
    G -= is_target(G, given)
    G *= weights.c[:, None]
    dw += G.sum(axis=0)
    G *= given.a[:, None]
    np.multiply(G, given.b, out=dR, casting="unsafe")


def scores(R: Any, given: Given) -> Any:
    """T in the place of R."""
    R *= given.a[:, None]
    R *= given.b
    R += given.w
    return R


def is_target(T: Any, given: Given) -> Any:
    return np.arange(T.shape[1], like=T) == given.targets[:, None]


def probabilities(T: Any, given: Given, weights: Weights) -> Any:
    """P in the place of T."""
    if given.sigmoid:
        return np.divide(1, 1 + np.exp(-T), out=T)
    T -= weights.f[:, None]
    T -= weights.low[:, None]
    return np.exp(T, out=T)

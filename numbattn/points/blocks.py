"""Steps of losses over pairs by array operations, of NumPy or CuPy arrays, for a block of all pairs. Kernels for GPUs,
in `numbattn.cuda.losses`, are compared with them.

    R_ij = <x_i, y_j>                                                       by a matrix product, with
    T_ij = scale a_i b_j R_ij + w_j                                         scores, of which each row has
    f_i  = log sum_j exp(T_ij), or sum_j log(1 + exp(T_ij)) of a sigmoid, and the gradient
    G_ij = c_i (P_ij - [j = t_i]), P = exp(T_ij - f_i), or 1 / (1 + exp(-T_ij)),
    dR_ij = scale a_i b_j G_ij

Vectors are in the dtype of sums. A target t_i outside of a block is outside of 0 to its number of columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

quiet = np.errstate(all="ignore")  # for rows that see nothing, and for numbers too small for the dtype
BYTES = 1 << 26  # of a block of T


class Factors(NamedTuple):
    """What makes T of R, and the targets: of all rows and columns, or of some."""

    scale: Any
    a: Any  # or None, and so is b
    b: Any
    w: Any  # or None
    targets: Any  # integers, or None
    sigmoid: bool

    def of(self, i: slice, j: slice) -> Factors:
        given = (self.a, i), (self.b, j), (self.w, j), (self.targets, i)
        a, b, w, targets = (None if x is None else x[at] for x, at in given)
        return Factors(self.scale, a, b, w, None if targets is None else targets - j.start, self.sigmoid)


class Statistics(NamedTuple):
    """What is known of rows after some blocks."""

    highest: Any  # of T, finite
    total: Any  # of exp(T - highest), or of log(1 + exp(T))
    chosen: Any  # T of the target


class Weights(NamedTuple):
    """Vectors of rows; and, of a loss in both directions, of columns, which else are None."""

    f: Any  # inf where it is -inf
    low: Any  # what rounding took from f
    c: Any
    of_target: Any  # what c is for the target, c or 2 c
    f_columns: Any = None
    low_columns: Any = None
    c_columns: Any = None

    def of(self, i: slice, j: slice) -> Weights:
        return Weights(*[None if x is None else x[i if at < 4 else j] for at, x in enumerate(self)])


def product(out: Any, a: Any, b: Any, add: bool = False) -> None:
    """out = a b, or out += a b."""
    a, b = (x.astype(out.dtype, copy=False) for x in (a, b))
    if add:
        out += a @ b
    else:
        np.matmul(a, b, out=out)


def scores(R: Any, factors: Factors) -> Any:
    T = factored(R, factors)
    return T if factors.w is None else T + factors.w


def factored(R: Any, factors: Factors) -> Any:
    return R * factors.scale if factors.a is None else R * factors.scale * factors.a[:, None] * factors.b


def at_targets(R: Any, targets: Any) -> Any:
    """Which columns are targets of their rows."""
    return np.arange(R.shape[1], like=R) == targets[:, None]


@quiet
def absorb(R: Any, factors: Factors, known: Statistics) -> None:
    """Add a block of R to the Statistics of its rows."""
    T = scores(R, factors)
    if factors.targets is not None:
        known.chosen[...] += np.where(at_targets(R, factors.targets), T, 0).sum(axis=1)
    if factors.sigmoid:
        known.total[...] += np.logaddexp(T.dtype.type(0), T).sum(axis=1)
        return
    highest = np.maximum(known.highest, T.max(axis=1))
    known.total[...] *= np.exp(known.highest - highest)
    known.total[...] += np.exp(T - highest[:, None]).sum(axis=1)
    known.highest[...] = highest


@quiet
def gradient(dR: Any, R: Any, factors: Factors, weights: Weights, dw: Any) -> None:
    """Put dR of a block in its place; add the gradient of w to dw, if it is not None."""
    G = gradient_of_scores(scores(R, factors), factors, weights)
    if dw is not None:
        dw += G.sum(axis=0)
    dR[...] = factored(G, factors)


def gradient_of_scores(T: Any, factors: Factors, weights: Weights) -> Any:
    P, of_columns = probabilities(T, factors, weights)
    G = P * weights.c[:, None]
    if of_columns is not None:
        G += of_columns * weights.c_columns
    if factors.targets is not None:
        G -= np.where(at_targets(T, factors.targets), weights.of_target[:, None], 0)
    return G


def probabilities(T: Any, factors: Factors, weights: Weights) -> tuple[Any, Any]:
    """P, and that of columns or None."""
    if factors.sigmoid:
        return 1 / (1 + np.exp(-T)), None
    of_rows = np.exp((T - weights.f[:, None]) - weights.low[:, None])
    if weights.f_columns is None:
        return of_rows, None
    return of_rows, np.exp((T - weights.f_columns) - weights.low_columns)


def room_for_gradient(R: Any, dtype: Any) -> Any:
    """Where dR is put; dtype: of points."""
    return R

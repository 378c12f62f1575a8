"""The four sums over pairs of points by array operations, block by block, of NumPy or CuPy arrays.

Kernels are compared with them, and they compute where there is no kernel. All else in this folder follows from these:

    sums       o_i  = sum_j kappa_ij b_j
    gradient   dx_i = sum_j kappa'_ij <c_i, b_j> 2 (x_i - y_j)      for a Polynomial ... y_j
    logsumexp  log sum_j exp(columns_j) kappa_ij
    nearest    the k smallest t_ij of each row, ascending, and their j

kappa_ij = value(t_ij) exp(rows_i + columns_j), and kappa' has the derivative of a kind in place of its value: see
`kinds`. rows and columns, (..., m) and (..., n), are logarithms, only for kinds that are exponentials; None is 0. The
points x, y are q, k of a Problem, b is its v; batch axes are broadcast, there are no grouped heads, and results have
its sum_dtype. Hidden pairs add nothing, even if they are NaN; without visible pairs sums are 0, logarithms -inf, t inf
and j -1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..base.origin import Crop
from ..call.problem import NOTHING_HIDDEN, Inputs, Problem
from ..masks import Mask, cropped, visible
from .kinds import DIFFERENCES, GAUSSIAN, Kind

ROWS, COLUMNS, PAIRS = 1024, 4096, 2**22  # of a block, at most; COLUMNS is a multiple of 32, as Bits need it
ON_GPUS = 3  # times as many rows and columns of a block there: a GPU is quicker than its host launches small ones
quiet = np.errstate(all="ignore")  # for what is not seen, and for numbers too small for the dtype


class PairBlock(NamedTuple):
    """Rows i and columns j of all pairs."""

    i: slice
    j: slice
    x: Any  # (..., rows, features)
    y: Any
    b: Any
    visible: Any  # (..., rows, columns); None where nothing is hidden

    def only_visible(self, kappa: Any, hidden: float = 0) -> Any:
        return kappa if self.visible is None else np.where(self.visible, kappa, hidden)


@quiet
def sums(problem: Problem, inputs: Inputs, kind: Kind, rows: Any = None, columns: Any = None) -> Any:
    o = zeros(inputs, (*problem.batch, problem.seqlen_q, problem.head_dim_v), problem.sum_dtype)
    for block in blocks(problem, inputs):
        o[..., block.i, :] += _kappa(block, kind, rows, columns) @ block.b
    return o


def weights(
    problem: Problem, inputs: Inputs, kind: Kind, rows: Any = None, columns: Any = None
) -> Iterator[tuple[slice, slice, Any]]:
    """kappa_ij, block by block: rows i, columns j, and the array."""
    for block in blocks(problem, inputs):
        yield block.i, block.j, _kappa(block, kind, rows, columns)


@quiet
def total(problem: Problem, inputs: Inputs, kind: Kind, rows: Any, columns: Any) -> Any:
    """sum_ij kappa_ij t_ij of each element of the batch."""
    found = zeros(inputs, problem.batch, problem.sum_dtype)
    for block in blocks(problem, inputs):
        kappa = _kappa(block, kind, rows, columns)
        found += np.where(kappa == 0, 0, kappa * distances(block, kind)).sum(axis=(-2, -1))
    return found


@quiet
def largest(problem: Problem, inputs: Inputs, kind: Kind) -> Any:
    """That of abs(t)."""
    found = zeros(inputs, (), problem.sum_dtype)
    for block in blocks(problem, inputs):
        found = np.maximum(found, abs(block.only_visible(distances(block, kind))).max())
    return found


@quiet
def gradient(problem: Problem, inputs: Inputs, kind: Any, c: Any, rows: Any = None, columns: Any = None) -> Any:
    dx = zeros(inputs, (*problem.batch, problem.seqlen_q, problem.head_dim), problem.sum_dtype)
    for block in blocks(problem, inputs):
        product = c[..., block.i, :].astype(problem.sum_dtype, copy=False) @ np.swapaxes(block.b, -2, -1)
        weights = block.only_visible(_kappa(block, kind, rows, columns, derivative=True) * product)
        dx[..., block.i, :] += displaced(block, kind, weights)
    return dx


@quiet
def logsumexp(problem: Problem, inputs: Inputs, kind: Any, columns: Any = None) -> Any:
    shape = *problem.batch, problem.seqlen_q
    highest, total = zeros(inputs, shape, problem.sum_dtype) - math.inf, zeros(inputs, shape, problem.sum_dtype)
    for block in blocks(problem, inputs):
        logs = sum(_shift(block, None, columns), kind.logarithm(distances(block, kind)))
        logs = block.only_visible(logs, -math.inf)
        before = highest[..., block.i]
        new = np.maximum(before, logs.max(axis=-1))
        finite = np.where(np.isneginf(new), 0, new)
        total[..., block.i] *= np.exp(before - finite)
        total[..., block.i] += np.exp(logs - finite[..., None]).sum(axis=-1)
        highest[..., block.i] = new
    return np.where(np.isneginf(highest), -math.inf, highest + np.log(total))


@quiet
def nearest(problem: Problem, inputs: Inputs, k: int) -> tuple[Any, Any]:
    shape = *problem.batch, problem.seqlen_q, k
    t, j = zeros(inputs, shape, problem.sum_dtype) + math.inf, zeros(inputs, shape, np.int32) - 1
    for block in blocks(problem, inputs):
        here = block.only_visible(distances(block), math.inf)
        numbers = np.broadcast_to(np.arange(block.j.start, block.j.stop, dtype=np.int32, like=here), here.shape)
        ts, js = (np.concatenate([x[..., block.i, :], y], axis=-1) for x, y in ((t, here), (j, numbers)))
        if ts.shape[-1] > 2 * k:
            ts, js = _smallest(ts, js, k)
        first = np.argsort(ts, axis=-1, kind="stable")[..., :k]  # of equal ones the lowest number; -1 for inf
        t[..., block.i, :], j[..., block.i, :] = (np.take_along_axis(x, first, axis=-1) for x in (ts, js))
    return t, j


def _smallest(ts: Any, js: Any, k: int) -> list[Any]:
    """The k smallest of each row, in the order of columns, and of equal ones the first."""
    last = np.partition(ts, k - 1, axis=-1)[..., k - 1 : k]
    less, equal = ts < last, ts == last
    chosen = less | (equal & (equal.cumsum(axis=-1) <= k - less.sum(axis=-1, keepdims=True)))
    return [x[chosen].reshape(*x.shape[:-1], k) for x in (ts, js)]


def blocks(problem: Problem, inputs: Inputs, pairs: int = PAIRS) -> Iterator[PairBlock]:
    m, n, batch = problem.seqlen_q, problem.seqlen_k, problem.batch
    times = 1 if problem.xp == "numpy" else ON_GPUS
    columns = min(n, times * COLUMNS)
    rows = min(m, times * ROWS, max(times**2 * pairs // max(math.prod(batch) * columns, 1), 1))
    for first_row in range(0, m if n else 0, max(rows, 1)):
        i = slice(first_row, min(first_row + rows, m))
        x = _rows(inputs.q, i, problem)
        for first_column in range(0, n, columns):
            j = slice(first_column, min(first_column + columns, n))
            seen = _visible(inputs.mask, i, j, m, n, x)
            y, b = (_rows(points, j, problem) for points in (inputs.k, inputs.v))
            if seen is None:
                yield PairBlock(i, j, x, y, b, None)
                continue
            by_column = seen.any(axis=-2)[..., None]  # points that are not seen may be NaN
            yield PairBlock(i, j, np.where(seen.any(axis=-1)[..., None], x, 0), np.where(by_column, y, 0),
                        np.where(by_column, b, 0), seen)  # fmt: skip


def _rows(points: Any, at: slice, problem: Problem) -> Any:
    points = np.broadcast_to(points, (*problem.batch, *points.shape[-2:]))
    return points[..., at, :].astype(problem.sum_dtype, copy=False)


def _visible(mask: Mask, i: slice, j: slice, m: int, n: int, array: Any) -> Any:
    if mask is NOTHING_HIDDEN:
        return None
    rows, columns = i.stop - i.start, j.stop - j.start
    return visible(cropped(mask, Crop(i.start, rows, j.start, columns, m, n)), rows, columns, array)


@quiet
def _kappa(block: PairBlock, kind: Any, rows: Any, columns: Any, derivative: bool = False) -> Any:
    """kappa, or kappa'."""
    of_t = kind.derivative if derivative else kind.value
    return block.only_visible(of_t(distances(block, kind), *_shift(block, rows, columns)))


def _shift(block: PairBlock, rows: Any, columns: Any) -> list[Any]:
    """The logarithms to add to that of kappa, if any."""
    found = [] if rows is None else [rows[..., block.i, None]]
    found += [] if columns is None else [columns[..., None, block.j]]
    return [sum(found)] if found else []


def distances(block: PairBlock, kind: Any = GAUSSIAN) -> Any:
    """t: squared distances, or products, or what users compute."""
    x, y = block.x, block.y
    features = x.shape[-1]
    if kind.is_of_product:
        return x @ np.swapaxes(y, -2, -1)
    if kind.is_of_pairs:
        return kind.of_points(x, y)
    if features > DIFFERENCES:
        norms = np.einsum("...f,...f->...", x, x)[..., None] + np.einsum("...f,...f->...", y, y)[..., None, :]
        return np.maximum(norms - 2 * (x @ np.swapaxes(y, -2, -1)), 0)
    t = np.zeros((*x.shape[:-1], y.shape[-2]), x.dtype, like=x)
    for f in range(features):
        t += apart(block, f) ** 2
    return t


def displaced(block: PairBlock, kind: Any, weights: Any) -> Any:
    """sum_j weights_ij dt_ij / dx_i. Points that are not finite may be hidden, or have weights that are not either."""
    if kind.is_of_pairs:
        return kind.gradient(block.x, block.y, weights)
    x, y = (np.where(np.isfinite(z), z, 0) for z in (block.x, block.y))
    block = block._replace(x=x, y=y)
    if kind.is_of_product:
        return weights @ y
    if x.shape[-1] > DIFFERENCES:
        return 2 * (x * weights.sum(axis=-1)[..., None] - weights @ y)
    found = np.zeros_like(x)
    for f in range(x.shape[-1]):
        found[..., f] = 2 * (weights * apart(block, f)).sum(axis=-1)
    return found


def apart(block: PairBlock, f: int) -> Any:
    """Differences of a feature."""
    return block.x[..., :, None, f] - block.y[..., None, :, f]


def zeros(inputs: Inputs, shape: tuple[int, ...], dtype: Any) -> Any:
    return np.zeros(shape, dtype, like=inputs.q)

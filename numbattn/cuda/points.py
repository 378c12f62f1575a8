"""Sums over pairs of points on CuPy arrays, see `numbattn.points`: passes over a Problem whose q, k and v are points x
and y, and b."""

import math
from typing import Any

import numpy as np

from ..base.checks import MOST_AXES
from ..call.passes import QKV, Pass
from ..call.problem import NOTHING_HIDDEN, describe
from ..points import formula
from ..points.kinds import Apart
from .clusters import clusters
from .kernels import hopper
from .kernels.points.arguments import COLUMNS, PLACES, ROWS
from .kernels.points.nearest import Nearest
from .kernels.tables import HEAD_DIMS, is_wide
from .passes import LSE, Passes, empties
from .words.numbers import KindNumbers
from .words.tiers import WGMMA, is_allowed, latest

SUMS = Pass("sums", takes=(*QKV, ROWS, COLUMNS, *PLACES), gives=("o",))
GRADIENT = Pass("gradient", takes=(*QKV, "c", ROWS, COLUMNS, *PLACES), gives=("dq",))
LOGSUMEXP = Pass("logsumexp", takes=(*QKV, COLUMNS, *PLACES), gives=LSE)
LOGSUMEXP_OF_HALVES = Pass("logsumexp_of_halves", LOGSUMEXP.takes, LSE)
NEAREST = Pass("nearest", takes=(*QKV, *PLACES), gives=("r2", "j"))
ROWS_OF_A_BLOCK, BLOCKS_OF_A_MULTIPROCESSOR = 64, 2
COLUMNS_AT_LEAST = 2048  # of a part
IN_REGISTERS = 32  # neighbours, at most
SLICES = 3  # of the features of b, at most: kappa is recomputed for each


class PointsBackend:
    """The backend for points on GPUs. `current` returns the GPU of a call, normally a launch.GPU."""

    def __init__(self, current: Any) -> None:
        self.current, self.passes = current, Passes(current)

    def sums(self, problem, inputs, kind, rows=None, columns=None, apart=None):
        """o_i = sum_j kappa_ij b_j, in the dtype of sums; kappa_ij is multiplied by exp(rows_i + columns_j)."""
        most = self.features_at_once(problem, kind, rows is None and columns is None)
        if not most:
            return formula.sums(problem, inputs, kind, rows, columns)
        if problem.head_dim_v > most:
            slices = [inputs.v[..., at : at + most] for at in range(0, problem.head_dim_v, most)]
            calls = [describe(inputs.q, inputs.k, b, mask=inputs.mask) for b in slices]
            return np.concatenate([self.sums(*call, kind, rows, columns, apart) for call in calls], axis=-1)
        if (count := self.parts(problem, inputs)) > 1:
            calls = divided(problem, inputs, count, rows, columns, apart)
            return sum([self.sums(*call, kind, *vectors).sum(axis=-3) for call, vectors in calls])
        o = self.current().empty(problem.out_shape, problem.sum_dtype)
        self.run(SUMS, problem, inputs, kind, {"o": o}, apart, rows=rows, columns=columns)
        return o

    def gradient(self, problem, inputs, kind, c, rows=None, columns=None, apart=None):
        """dx_i = sum_j kappa'_ij <c_i, b_j> 2 (x_i - y_j), or y_j for a function of x . y, in the dtype of sums."""
        if is_wide(problem):    # then cuBLAS multiplies, block by block
            return formula.gradient(problem, inputs, kind, c, rows, columns)
        if (count := self.parts(problem, inputs)) > 1:
            calls = divided(problem, inputs, count, rows, columns, apart)
            return sum([self.gradient(*call, kind, for_all_parts(c, call[0].batch[-1], 2), *vectors).sum(axis=-3)
                        for call, vectors in calls])  # fmt: skip
        shape = *problem.batch, problem.seqlen_q, problem.head_dim
        dx, c = self.current().empty(shape, problem.sum_dtype), c.astype(problem.dtype, copy=False)
        self.run(GRADIENT, problem, inputs, kind, {"dq": dx}, apart, c=c, rows=rows, columns=columns)
        return dx

    def logsumexp(self, problem, inputs, kind, columns=None, rate=None, apart=None):
        """log sum_j exp(columns_j) kappa_ij, in the dtype of sums, and what its rounding took.

        rate: for points of half precision, times a power of two, the factor of t.
        """
        pass_ = LOGSUMEXP
        if rate is not None and self.has_wgmma and hopper.logsumexp.fits_short(problem, kind):
            pass_, inputs = LOGSUMEXP_OF_HALVES, inputs._replace(scale=rate)
        elif rate is not None:
            problem, inputs = of_unit_length(inputs, rate)
        if is_wide(problem) and not (self.has_wgmma and hopper.logsumexp.fits(problem, kind)):
            lse = formula.logsumexp(problem, inputs, kind, columns)
            return lse, np.zeros_like(lse)
        results = empties(self.current(), dict.fromkeys(LSE, (problem.lse_shape, problem.sum_dtype)))
        results["lse_low"].fill(0)  # kernels for Hopper leave it
        self.run(pass_, problem, inputs, kind, results, apart, columns=columns)
        return results["lse"], results["lse_low"]

    def nearest(self, problem, inputs, k, apart=None):
        """The squared distances of the k nearest y_j for each x_i, in the dtype of sums, ascending, and their j."""
        if is_wide(problem) or k > IN_REGISTERS:
            problem, inputs = in_dtype_of_sums(problem, inputs)
            if not (self.has_wgmma and hopper.nearest.fits(problem, k)):
                return formula.nearest(problem, inputs, k)
        gpu, shape = self.current(), (*problem.lse_shape, k)
        r2, j = gpu.empty(shape, problem.sum_dtype), gpu.empty(shape, np.dtype(np.int32))
        self.run(NEAREST, problem, inputs, Nearest(k), {"r2": r2, "j": j}, apart)
        return r2, j

    def clusters(self, problem, inputs, labels, weights):
        """Sums over the points of each label: see `points.kmeans`."""
        return clusters(problem, inputs, labels, weights)

    def features_at_once(self, problem, kind, is_plain):
        """How many features of b kernels sum in one pass; 0: products of cuBLAS, block by block, are faster.

        is_plain: whether there are no logarithms of rows or columns.
        """
        if problem.head_dim <= HEAD_DIMS[-1]:
            return HEAD_DIMS[-1]
        width = hopper.sums.WIDTH
        fits = self.has_wgmma and is_plain and hopper.sums.fits(problem, kind)
        return width if fits and problem.head_dim_v <= SLICES * width else 0

    @property
    def has_wgmma(self):
        """Whether kernels for Hopper may be used."""
        return self.current().device.cc == (9, 0) and is_allowed(WGMMA, latest.get())

    def parts(self, problem, inputs):
        """How many parts columns are divided into, so that even few rows occupy the whole GPU."""
        if inputs.mask is not NOTHING_HIDDEN or problem.is_empty or inputs.q.ndim == MOST_AXES:
            return 1
        blocks = math.prod(problem.batch) * -(-problem.seqlen_q // ROWS_OF_A_BLOCK)
        room = BLOCKS_OF_A_MULTIPROCESSOR * self.current().device.multiprocessors
        return max(min(room // blocks, problem.seqlen_k // COLUMNS_AT_LEAST), 1)

    def run(self, pass_, problem, inputs, kind, results, apart, **given):
        """Compute the results of a pass, arrays by name. apart: a `kinds.Apart`; given: other arrays by name, or None.
        """
        apart = apart or Apart(inputs.q, inputs.k)
        given = {place: x for place, x in (*given.items(), *zip(PLACES, apart)) if x is not None}
        kind = kind.form, KindNumbers(kind.number, apart.rate)
        self.passes.compute(self.current(), pass_, problem, inputs, given, results, kind=kind)


def divided(problem, inputs, count, rows, columns, apart):
    """The Problem and Inputs of `count` parts of the columns as one more batch axis, the last one, with logarithms of
    rows and columns, and the Apart; and the same for the columns that are left over."""
    apart = apart or Apart(inputs.q, inputs.k)
    whole = problem.seqlen_k // count * count
    for first, end, parts in ((0, whole, count), (whole, problem.seqlen_k, 1)):
        if first == end:
            continue
        lead, size = (*problem.batch, parts), (end - first) // parts
        y, b, own_y = (x[..., first:end, :].reshape(*lead, size, x.shape[-1]) for x in (inputs.k, inputs.v, apart.y))
        x, own_x = for_all_parts(inputs.q, parts, 2), for_all_parts(apart.x, parts, 2)
        own_rows = rows if rows is None else for_all_parts(rows, parts, 1)
        own_columns = columns if columns is None else columns[..., first:end].reshape(*lead, size)
        yield describe(x, y, b), (own_rows, own_columns, Apart(own_x, own_y, apart.rate))


def in_dtype_of_sums(problem, inputs):
    """The Problem and Inputs of points of half precision, in float32."""
    if problem.dtype == problem.sum_dtype:
        return problem, inputs
    return describe(*(x.astype(problem.sum_dtype) for x in (inputs.q, inputs.k, inputs.v)), mask=inputs.mask)


def of_unit_length(inputs, rate):
    """The Problem and Inputs of points scaled so that squared distances need no factor `rate`."""
    x, y = (points * math.sqrt(rate) for points in (inputs.q, inputs.k))
    return describe(x, y, inputs.v, mask=inputs.mask)


def for_all_parts(x, parts, axes):
    """An array with one more axis before its last `axes`, along which it is the same."""
    lead = x.ndim - axes
    return np.broadcast_to(x[(..., None, *[slice(None)] * axes)], (*x.shape[:lead], parts, *x.shape[lead:]))

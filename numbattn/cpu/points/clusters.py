"""Means of the points of each label, in float64: of so many points at a time, whatever the number of threads."""

import math

import numpy as np

from ...base.values import rounded
from ..compile import Kernel
from ..launch import launch
from ..record import Record
from ..tile import inline, is_set

PART, MOST = 4096, 64  # points of a part, at least, and parts
COST = 4  # of an element, in multiplications


def clusters(problem, inputs, labels, weights):
    """The means of the points x of each label, the number of a y, (..., k, d), or that y; their counts, or sums of
    weights, (..., k); sum w |x - y|^2 over all points, (...), in the dtype of sums. weights: (..., m), in that dtype,
    or None for 1. Points with a label of -1 do not count."""
    m, k, d, problems = problem.seqlen_q, problem.seqlen_k, problem.head_dim, math.prod(problem.batch)
    x, y = (np.ascontiguousarray(z.reshape(problems, *z.shape[-2:]), problem.sum_dtype) for z in (inputs.q, inputs.k))
    w = np.ones((problems, 1)) if weights is None else np.ascontiguousarray(weights.reshape(problems, m), np.float64)
    parts = min(max(m // max(PART, 4 * k), 1), MOST)
    sums = np.zeros((problems, parts, k + 1, d + 1))  # with sums of weights, and of squares by feature
    given = Record(x, y, np.ascontiguousarray(labels.reshape(problems, m)), w, sums)
    launch(clusters_kernel.given(Record(None), given), problems * parts, x.size * COST, 0)
    sums = sums.sum(axis=1).reshape(*problem.batch, k + 1, d + 1)
    mass, inertia = sums[..., :k, d], sums[..., k, :d].sum(axis=-1)
    means = inputs.k + sums[..., :k, :d] / np.where(mass > 0, mass, 1)[..., None]
    counts = mass.astype(np.int64 if weights is None else problem.sum_dtype)
    return rounded(means, problem.dtype), counts, inertia.astype(problem.sum_dtype)[...]


@Kernel
def clusters_kernel(first_block, end_block, stop, scratch, x, y, labels, weights, sums):
    parts, m = sums.shape[1], x.shape[1]
    for block in range(first_block, end_block):
        at, part = divmod(block, parts)
        for i in range(part * m // parts, (part + 1) * m // parts):
            if is_set(stop):
                break
            label, weight = labels[at, i], weights[at, min(i, weights.shape[1] - 1)]
            if label >= 0:
                sums[at, part, label, -1] += weight
                add(sums[at, part, label], sums[at, part, -1], x[at, i], y[at, label], weight)


@inline
def add(moves, squares, x, y, weight):
    for f in range(x.size):
        move = float(x[f]) - float(y[f])
        moves[f] += weight * move
        squares[f] += weight * (move * move)

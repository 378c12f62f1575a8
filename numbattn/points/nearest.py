"""Nearest neighbours by brute force: exact, of any dimension."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..base.backends import run_points
from ..base.checks import A, Array, integer, library
from ..call.problem import describe
from ..masks import Mask
from .checks import batch_of, check_points
from .formula import quiet
from .kinds import DIFFERENCES, Apart
from .pairs import Pairs

MOST = 2048  # neighbours
ELEMENTS = 2**24  # of differences computed at once


def nearest(x: A, y: A, k: int = 1, *, mask: Mask | Array | None = None) -> tuple[A, A]:
    """Nearest neighbours: the k points y_j that are closest to each x_i, in memory linear in the number of points.

    Parameters
    ----------
    x : array, (..., m, d)
    y : array, (..., n, d)
        NumPy arrays or CuPy arrays of one dtype, with any strides; batch axes broadcast. y may be x: then each point is
        its own first neighbour, unless a mask hides it.
    k : int, optional
        1 to 2048. On GPUs more than 32 are sorted out of blocks of all distances, which takes longer.
    mask : a mask of numbattn's, or a boolean array, optional
        Which points y_j each x_i sees.

    Returns
    -------
    distances : array, (..., m, k), float32, or float64 for float64
        Euclidean distances, ascending; inf where fewer than k points are visible.
    indices : array of int32, (..., m, k)
        The lower index first where distances are equal; -1 where fewer than k points are visible.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Notes
    -----
    Squared distances are compared: float32 holds distances from 1e-19 to 1e19, others count as 0 or as unseen. Beyond 8
    features neighbours are found by squared distances with the errors that `product` has: two neighbours whose
    distances differ by as little may change places. Distances are then recomputed from the differences, but for float16
    and bfloat16 on a GPU.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x = np.array([[0.0, 0.0], [3.0, 4.0]])
    >>> points.nearest(x, x, k=2)
    (array([[0., 5.],
           [0., 5.]]), array([[0, 1],
           [1, 0]], dtype=int32))
    """
    check_points(x, y)
    k = integer("k", k, low=1, high=MOST)
    pairs = Pairs.of(x, y, batch_of(x=x.shape[:-2], y=y.shape[:-2]), mask)
    squares, j = found(pairs, k)
    if _is_centred(pairs):
        squares, j = _recomputed(pairs, j)
    return np.sqrt(squares), j


def found(pairs: Pairs, k: int) -> tuple[Any, Any]:
    """Squared distances and numbers as backends find them."""
    x, y = pairs.x, pairs.y
    X, Y = map(pairs.broadcast, map(pairs.centred, pairs.points) if _is_centred(pairs) else (x, y))
    problem, inputs = describe(X, Y, Y[..., :0], mask=pairs.mask)
    squares, j = run_points(problem, "nearest", inputs, k, Apart(*map(pairs.broadcast, (x, y))))
    return squares, j


def _is_centred(pairs: Pairs) -> bool:
    return pairs.x.shape[-1] > DIFFERENCES and (pairs.x.dtype == pairs.dtype or library(pairs.x) == "numpy")


@quiet
def _recomputed(pairs: Pairs, j: Any) -> tuple[Any, Any]:
    """Squared distances of neighbours from the differences, and both in their order."""
    m, n = pairs.sizes
    (X, Y), k, features = pairs.points, j.shape[-1], pairs.x.shape[-1]
    j = np.where(j < 0, n, j)
    j.sort(axis=-1)  # so that the lower index comes first where distances are equal
    x, flat = pairs.broadcast(X), Y.reshape(-1, features)
    own = pairs.y.shape[:-2]
    first = pairs.broadcast(n * np.arange(math.prod(own), like=flat).reshape(*own, 1, 1))
    squares = np.empty(j.shape, pairs.dtype, like=x)
    rows = max(ELEMENTS // max(math.prod(pairs.batch) * k * features, 1), 1)
    for at in range(0, m if n else 0, rows):
        part = slice(at, at + rows)
        found = flat[first + np.minimum(j[..., part, :], n - 1)] - x[..., part, None, :]
        squares[..., part, :] = np.einsum("...f,...f->...", found, found)
    squares = np.where(j < n, squares, math.inf)
    order = np.argsort(squares, axis=-1, kind="stable")
    squares, j = (np.take_along_axis(array, order, -1) for array in (squares, j))
    return squares, np.where(j < n, j, -1).astype(np.int32)

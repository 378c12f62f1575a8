"""A step of k-means: labels by the nearest centre, and the means of all points of a label."""

from __future__ import annotations

from typing import Generic, NamedTuple

from ..base.backends import run_points
from ..base.checks import A
from ..base.values import rounded
from ..call.problem import describe
from .checks import batch_of, check_finite, check_points, check_vector, check_weights
from .nearest import found
from .pairs import Pairs


class KMeansStep(NamedTuple, Generic[A]):
    """The result of `kmeans_step`.

    Attributes
    ----------
    labels : array of int32, (..., m)
        The number of the nearest centre of each point; of equally near ones the lowest. -1 for a point that is too far
        from all of them, see `nearest`: it does not count.
    centres : array, (..., k, d)
        The mean of the points of each label, of the dtype of the centres given; a centre without points stays.
    counts : array, (..., k)
        How many points each label has, int64; or the sum of their weights, of the dtype of sums. 0 is an empty cluster.
    inertia : array, (...)
        The sum of squared distances of points from the centres given, times weights, in the dtype of sums.
    """

    labels: A
    centres: A
    counts: A
    inertia: A


def kmeans_step(x: A, centres: A, *, weights: A | None = None) -> KMeansStep[A]:
    """A step of k-means (Lloyd's algorithm): the nearest centre of each point, and the means of points as new centres.

    Parameters
    ----------
    x : array, (..., m, d)
    centres : array, (..., k, d)
        NumPy arrays or CuPy arrays of one dtype, as for `nearest`, finite; k is 1 or more. Batch axes broadcast. CuPy
        arrays are not checked: a point that is not finite has the label -1, and such a centre no points.
    weights : array, (..., m), optional
        Of points, finite and 0 or more, of the dtype of x, or float32 for points in half precision. Default: 1. CuPy
        arrays are not checked: others are multiplied by as they are.

    Returns
    -------
    step : KMeansStep
        A tuple: labels, centres, counts, inertia. What to do about empty clusters, whose counts are 0, is up to you.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Notes
    -----
    Labels have the errors of `nearest`. Means are sums of differences from the centres given, so that they have few
    rounding errors, whatever the origin, and they have the same bits each time. On a GPU the host does not wait.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x = np.random.default_rng(0).standard_normal((1000, 2)) + np.repeat([[0, 0], [9, 0]], 500, axis=0)
    >>> centres = x[:2].copy()
    >>> for _ in range(10):
    ...     labels, centres, counts, inertia = points.kmeans_step(x, centres)
    >>> np.sort(counts), np.sort(centres[:, 0].round().astype(int))
    (array([500, 500]), array([0, 9]))
    """
    check_points(x, centres, {} if weights is None else {"weights": weights}, "centres")
    batches = {"x": x.shape[:-2], "centres": centres.shape[:-2]}
    if weights is not None:
        check_vector("weights", weights, x.shape[-2], "x")
        batches["weights"] = weights.shape[:-1]
    batch = batch_of(**batches)
    if not centres.shape[-2]:
        raise ValueError(f"centres: got the shape {centres.shape}, expected 1 or more")
    check_finite("x", x)
    check_finite("centres", centres)
    check_weights("weights", weights)
    pairs = Pairs.of(x, centres, batch)
    labels, w = found(pairs, 1)[1][..., 0], None
    if weights is not None:
        w = pairs.broadcast(rounded(weights, pairs.dtype), axes=1)
    X, Y = map(pairs.broadcast, (x, centres))
    problem, inputs = describe(X, Y, Y[..., :0])
    return KMeansStep(labels, *run_points(problem, "clusters", inputs, labels, w))

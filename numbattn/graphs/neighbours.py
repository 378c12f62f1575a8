"""Graphs of near points: lists of neighbours within a radius, by cells, in periodic boxes or none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..base.checks import A, Array, check_values, number, same_library, words_for
from ..base.values import moved
from .graph import TAKER, Graph
from .positions import DTYPES, check_box, vectors_of

MARGIN = 1e-5  # of the radius, by which cells are wider, so that rounding loses nothing
MOST_CELLS = 2**20  # along an axis
FARTHEST = 2**29  # boxes that a point may be away: shifts are int32


class Cells(NamedTuple):
    """The cell of each point, and what is near it."""

    places: Any  # int64 (points, d)
    sizes: Any  # cells along each axis, on the host
    reach: list[int]  # how many cells away neighbours may be, along each axis
    wraps: Any  # int64 (points, d): in which image of the box a point is


def radius_graph(
    x: A, radius: float, *, box: A | None = None, segments: Array | None = None
) -> tuple[Graph, Any]:
    """The graph of all pairs of points nearer than a radius, in both directions, and the images that their keys are in.

    Parameters
    ----------
    x : array, (points, d)
        Positions, float32 or float64, of NumPy or CuPy, finite; they need not lie in the box.
    radius : float
        Finite and > 0. In a periodic box it may exceed the box: then a point sees several images of another one, and of
        itself.
    box : array, (d, d) or (d,), optional
        The vectors that span a periodic box, row by row, or their lengths if they lie along the axes.
    segments : array of integers, (structures + 1,), optional
        Where each of several structures begins, from 0 on, and the last one ends, with the points: points see those of
        their own structure.

    Returns
    -------
    graph : Graph
        Of as many queries as keys; the edges of a query ascend by key, and those to one key by shifts.
    shifts : array of int32, (edges, d)
        ``differences(x, graph, shifts=shifts, box=box)`` are the vectors along edges, all shorter than the radius up
        to rounding. 0 without a box.

    Raises
    ------
    TypeError, ValueError
        For what does not fit. Both errors name the argument, what it got and what it takes.

    Notes
    -----
    Points are sorted by cells that are at least a radius wide; a point is compared with those in the cells around its
    own. The host waits for a GPU, since it has to know how many edges there are.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> x = np.array([[0.1], [0.9], [2.0]])
    >>> graph, shifts = graphs.radius_graph(x, 1.0, box=np.array([3.0]))
    >>> graph.indptr, graph.indices, shifts.T
    (array([0, 1, 2, 2], dtype=int32), array([1, 0], dtype=int32), array([[0, 0]], dtype=int32))
    """
    radius, owners = _checked(x, radius, box, segments)
    points, cells = x.shape[0], _cells(x, radius, box)
    found = [_near(x, radius, box, *pairs) for pairs in _candidates(cells, owners)]
    i, j, shifts = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(i * max(points, 1) + j, kind="stable")
    rows = np.arange(points + 1, like=i)
    graph = Graph(np.searchsorted(i[order], rows), j[order], points)
    return graph, shifts[order].astype(np.int32)


def _checked(x: Any, radius: Any, box: Any, segments: Any) -> tuple[float, Any]:
    """The radius, and the structure of each point."""
    given = {name: array for name, array in (("box", box), ("segments", segments)) if array is not None}
    same_library(TAKER, x=x, **given)
    radius = number("radius", radius)
    if not 0 < radius < math.inf:
        raise ValueError(f"radius: got {radius}, allowed finite and > 0")
    if x.dtype not in DTYPES:
        raise TypeError(f"x: got {x.dtype}, allowed float32, float64")
    if x.ndim != 2 or not x.shape[1]:
        raise ValueError(f"x: got the shape {x.shape}, expected (points, d)")
    d = x.shape[1]
    if box is not None:
        check_box(box, x)
    if not np.isfinite(x).all():
        raise ValueError("x: got positions that are not finite")
    if box is not None:
        vectors = _on_host(vectors_of(box)).astype(np.float64)
        if not np.isfinite(vectors).all() or np.linalg.matrix_rank(vectors) < d:
            raise ValueError(f"box: got {vectors.tolist()}, expected finite vectors that span a box")
    if segments is None:
        return radius, np.zeros(len(x), np.int64, like=x)
    if segments.dtype.kind not in "iu" or segments.ndim != 1:
        raise TypeError(f"segments: got {words_for(segments)} {segments.shape}, expected integers (structures + 1,)")
    offsets = _on_host(segments)
    check_values("segments", offsets, len(x), rising=True)
    if not offsets.size or offsets[0] != 0 or offsets[-1] != len(x):
        got = f"from {offsets[0]} to {offsets[-1]}" if offsets.size else "none"
        raise ValueError(f"segments: got offsets {got}, expected from 0 to {len(x)}, as many as there are points")
    places = np.arange(len(x), dtype=segments.dtype, like=x)
    return radius, np.searchsorted(segments, places, side="right").astype(np.int64)


def _on_host(x: Any) -> Any:
    return moved(x, np.zeros(0))


def _cells(x: Any, radius: float, box: Any) -> Cells:
    """Cells that are wider than the radius if there is room, of the box or of all points."""
    width = radius * (1 + MARGIN)
    if box is None:
        low = x.min(axis=0) if len(x) else np.zeros_like(x, shape=x.shape[1:])
        places = np.minimum((x - low).astype(np.float64) / width, MOST_CELLS).astype(np.int64)
        most = _on_host(places).max(axis=0, initial=0) if len(x) else np.zeros(x.shape[1], np.int64)
        return Cells(places, most + 1, [1] * x.shape[1], np.zeros_like(places))
    inverse = np.linalg.inv(_on_host(vectors_of(box)).astype(np.float64))
    heights = 1 / np.sqrt((inverse**2).sum(axis=0))  # between opposite sides of the box
    sizes = np.clip(heights // width, 1, MOST_CELLS).astype(np.int64)
    fractions = x.astype(np.float64) @ moved(inverse, x)
    wraps = np.floor(fractions)
    if (np.abs(wraps) > FARTHEST).any():
        raise ValueError(f"x: got points more than {FARTHEST} boxes away")
    all_sizes = moved(sizes, x)
    places = np.clip(((fractions - wraps) * all_sizes).astype(np.int64), 0, all_sizes - 1)
    return Cells(places, sizes, np.ceil(width * sizes / heights).astype(int).tolist(), wraps.astype(np.int64))


def _candidates(cells: Cells, owners: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Pairs of points i and j in cells that are near each other, and the shifts of j, for each place of such cells
    relative to each other in turn."""
    sizes, numbers = moved(cells.sizes, owners), _numbers(cells.places, owners, cells.sizes)
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    for offset in itertools.product(*(range(-reach, reach + 1) for reach in cells.reach)):
        others = cells.places + moved(np.array(offset), owners)
        images = others // sizes
        target = _numbers(others - images * sizes, owners, cells.sizes)
        first, end = (np.searchsorted(ordered, target, side=side) for side in ("left", "right"))
        counts = end - first
        ends = counts.cumsum()
        pairs = np.arange(int(ends[-1]) if len(ends) else 0, like=ends)
        i = np.searchsorted(ends, pairs, side="right")
        j = order[pairs - (ends - counts)[i] + first[i]]
        yield i, j, images[i] - cells.wraps[j] + cells.wraps[i]


def _numbers(places: Any, owners: Any, sizes: Any) -> Any:
    """A number for each cell of each structure."""
    found = owners
    for axis, size in enumerate(sizes.tolist()):
        found = found * size + places[:, axis]
    return found


def _near(x: Any, radius: float, box: Any, i: Any, j: Any, shifts: Any) -> tuple[Any, Any, Any]:
    """Those pairs that are nearer than the radius, but for points and themselves."""
    between = x[j] - x[i]
    if box is None:
        seen = (i != j) & (shifts == 0).all(axis=-1)
    else:
        between = between + shifts.astype(x.dtype) @ vectors_of(box)
        seen = (i != j) | (shifts != 0).any(axis=-1)
    seen &= ((between / radius) ** 2).sum(axis=-1) < 1                  # squares of lengths may be out of range
    return i[seen], j[seen], shifts[seen]

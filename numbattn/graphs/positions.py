"""Positions of nodes: differences along edges with their derivatives, and the sums of edges that these are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..base.checks import DTYPES as FLOATS
from ..base.checks import A, Array, no_floats, other_dtype, same_library, words_for
from .attention import attention
from .graph import TAKER, Graph, check_graph

DTYPES = np.dtype("float32"), np.dtype("float64")


def sum_by_query(e: A, graph: Graph) -> A:
    """The sum over the edges of each query, in their order: the same bits each time.

    Parameters
    ----------
    e : array, (..., edges, features)
        NumPy or CuPy, of float16, bfloat16, float32 or float64, as for `attention`.
    graph : Graph

    Returns
    -------
    sums : array, (..., queries, features), of the dtype of e
        0 for a query without edges.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> g = graphs.Graph(np.array([0, 2, 2, 3]), np.array([0, 2, 1]))
    >>> graphs.sum_by_query(np.array([[1.0], [2.0], [3.0]]), g).T
    array([[3., 0., 3.]])
    """
    _check(e, graph)
    *batch, edges, features = e.shape

    def constant(value: float, *shape: int) -> Any:
        like: Any = e
        return (np.zeros(shape, np.float32, like=like) + np.float32(value)).astype(e.dtype)  # CuPy adds no bfloat16

    q, k, v = constant(0, *batch, graph.queries, 1), constant(0, graph.keys, 1), constant(0, graph.keys, features)
    return attention(q, k, v, graph, bias=constant(1, edges), v_edge=e, softmax=False)  # sums of P v_edge, P = 1


def sum_by_key(e: A, graph: Graph) -> A:
    """The sum over the edges of each key, likewise.

    Parameters
    ----------
    e : array, (..., edges, features)
    graph : Graph
        As for `sum_by_query`.

    Returns
    -------
    sums : array, (..., keys, features), of the dtype of e

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> g = graphs.Graph(np.array([0, 2, 2, 3]), np.array([0, 2, 0]))
    >>> graphs.sum_by_key(np.array([[1.0], [2.0], [3.0]]), g).T
    array([[4., 0., 2.]])
    """
    _check(e, graph)
    array: Any = e
    words = array.view(f"u{e.dtype.itemsize}")  # CuPy does not index all dtypes
    ordered: A = words[..., graph._by_key.numbers, :].view(e.dtype)
    return sum_by_query(ordered, graph._transposed)


def differences(x: A, graph: Graph, *, shifts: Array | None = None, box: A | None = None) -> A:
    """The vector along each edge, from its query to its key: ``x[j] - x[i] + shifts @ box``.

    Parameters
    ----------
    x : array, (..., nodes, d)
        Positions, float32 or float64: the graph has as many queries as keys.
    graph : Graph
    shifts : array of integers, (edges, d), optional
        In which periodic image the key of each edge is, in lengths of the box.
    box : array, (d, d) or (d,), optional
        The vectors that span it, row by row, or their lengths if they lie along the axes; given if there are shifts.

    Returns
    -------
    e : array, (..., edges, d), of the dtype of x

    Raises
    ------
    TypeError, ValueError
        For what does not fit. Both errors name the argument, what it got and what it takes.

    Notes
    -----
    It is linear in x and box together: ``differences(tx, graph, shifts=shifts, box=tbox)`` is its tangent.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> ring = graphs.Graph(np.arange(4), np.array([1, 2, 0]))
    >>> x, shifts = np.array([[0.0], [1.0], [2.5]]), np.array([[0], [0], [1]])
    >>> graphs.differences(x, ring, shifts=shifts, box=np.array([3.0])).T
    array([[1. , 1.5, 0.5]])
    """
    _check_positions(x, graph, shifts, box)
    found: Any = x[..., graph.indices, :] - x[..., graph._rows, :]
    return found if shifts is None else found + _shifts(shifts, x) @ vectors_of(box)


def differences_vjp(
    x: A, graph: Graph, *, shifts: Array | None = None, box: A | None = None
) -> tuple[A, Callable[[A], tuple[A, A | None]]]:
    """`differences` with its gradients as a closure.

    Parameters
    ----------
    x, graph, shifts, box
        As in `differences`.

    Returns
    -------
    e : array, (..., edges, d)
    backprop : function
        ``backprop(de)`` returns dx and dbox, of the shapes and dtypes of x and box, None without a box: sums of edges,
        equal bit for bit from call to call. They are linear in de: the gradient of <ddx, dx> by de is
        ``differences(ddx, graph)``.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `differences`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> ring = graphs.Graph(np.arange(4), np.array([1, 2, 0]))
    >>> e, backprop = graphs.differences_vjp(np.array([[0.0], [1.0], [2.5]]), ring)
    >>> dx, _ = backprop(e)                                     # of (e**2).sum() / 2
    >>> dx.T
    array([[-3.5, -0.5,  4. ]])
    """
    e = differences(x, graph, shifts=shifts, box=box)

    def backprop(de: Any) -> Any:
        same_library(TAKER, e=e, de=de)
        if de.shape != e.shape:
            raise ValueError(f"de: got the shape {de.shape}, expected {e.shape}, the shape of e")
        if de.dtype != e.dtype:
            raise other_dtype("de", de.dtype, e.dtype, "e")
        dx: Any = sum_by_key(de, graph)
        dx = dx - sum_by_query(de, graph)
        if box is None or shifts is None:
            return dx, box if box is None else np.zeros_like(box)
        dbox = _shifts(shifts, x).T @ de.sum(axis=tuple(range(de.ndim - 2)))
        return dx, dbox if box.ndim == 2 else dbox.diagonal().copy()

    return e, backprop


def _check(e: Any, graph: Any) -> None:
    check_graph(graph)
    same_library(TAKER, e=e, graph=graph.indptr)
    if e.dtype not in FLOATS:
        raise no_floats("e", e.dtype)
    if e.ndim < 2 or e.shape[-2] != graph.edges:
        raise ValueError(f"e: got the shape {e.shape}, expected (..., {graph.edges}, features), a row for each edge")


def _check_positions(x: Any, graph: Any, shifts: Any, box: Any) -> None:
    check_graph(graph)
    given = {name: array for name, array in (("shifts", shifts), ("box", box)) if array is not None}
    same_library(TAKER, x=x, graph=graph.indptr, **given)
    if x.dtype not in DTYPES:
        raise TypeError(f"x: got {x.dtype}, allowed float32, float64")
    if graph.queries != graph.keys:
        raise ValueError(f"graph: got {graph}, expected as many keys as queries")
    if x.ndim < 2 or x.shape[-2] != graph.keys:
        raise ValueError(f"x: got the shape {x.shape}, expected (..., {graph.keys}, d), a row for each node")
    d = x.shape[-1]
    if shifts is not None and box is None:
        raise ValueError("box: got None with shifts, expected the box that they are lengths of")
    if shifts is not None and shifts.dtype.kind not in "iu":
        raise TypeError(f"shifts: got {words_for(shifts)}, expected an array of integers")
    if shifts is not None and shifts.shape != (graph.edges, d):
        raise ValueError(f"shifts: got the shape {shifts.shape}, expected {(graph.edges, d)}")
    if box is not None:
        check_box(box, x)


def check_box(box: Any, x: Any) -> None:
    """Check a box for positions x."""
    d = x.shape[-1]
    if box.dtype != x.dtype:
        raise other_dtype("box", box.dtype, x.dtype, "x")
    if box.shape not in ((d, d), (d,)):
        raise ValueError(f"box: got the shape {box.shape}, expected {(d, d)} or {(d,)}")


def _shifts(shifts: Any, x: Any) -> Any:
    return shifts.astype(x.dtype)


def vectors_of(box: Any) -> Any:
    """The vectors that span a box."""
    return box if box.ndim == 2 else np.diag(box)

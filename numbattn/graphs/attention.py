"""Attention over the edges of a graph, and its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from ..base.checks import A, Array
from ..dropout import Dropout
from ..scores import Scores
from . import passes
from .gradients import GraphGradients
from .graph import Graph
from .jets import GraphSecondBackprop, attention_backward_vjp
from .problem import EdgeArrays, GraphSaved, checked_rows, describe_graph


def attention(
    q: A, k: A, v: A, graph: Graph, *, bias: A | None = None, k_edge: A | None = None, v_edge: A | None = None,
    factor: A | None = None, softmax: bool = True, scale: float | None = None, dropout: Dropout | None = None,
    score: Scores = None, out: A | None = None,
) -> A:  # fmt: skip
    """Attention in which each query sees the keys at the ends of its edges: time and memory follow the edges.

    With S = scale q . (k + k_edge) + bias for each edge, after `score`, P the softmax of S over the edges of a query, o
    is the sum of factor P (v + v_edge). factor does not enter the softmax: where it goes to 0 smoothly, as keys move
    out of reach, so does what an edge adds to o. For its part in the softmax to do so, too, add log(factor) to bias.

    Parameters
    ----------
    q : array, (..., queries, head_dim)
    k : array, (..., keys, head_dim)
    v : array, (..., keys, head_dim_v)
        NumPy arrays or CuPy arrays, all of one dtype: float16, bfloat16 (of ml_dtypes), float32 or float64, with any
        strides. Batch axes and heads, axis -3, are those of `numbattn.attention`: they broadcast, and k and v may have
        fewer heads. All see along the same graph.
    graph : Graph
        Of arrays of the same library.
    bias, factor : arrays, (..., edges), optional
        A number for each edge, in the order of the graph's, with batch axes and q's heads, which broadcast: an array
        (edges,) is for all heads. Of the dtype of q. A bias of -inf hides an edge from a softmax.
    k_edge : array, (..., edges, head_dim), optional
    v_edge : array, (..., edges, head_dim_v), optional
        What an edge adds to its key and value, likewise.
    softmax : bool, optional
        Whether P is a softmax. If not, P is S: an activation is an `EdgeScore`.
    scale : float, optional
        Finite and > 0. Default: 1 / sqrt(head_dim).
    dropout : Dropout, optional
        Which elements of P to drop: edge number e is that of ``dropout_mask(dropout, (..., 1, edges))[..., 0, e]``.
    score : numbattn.Softcap or EdgeScore, or a list of these, optional
        Functions of S after scale and bias, in order. Arrays in them are of the same library; those of an `EdgeScore`
        have gradients, if it wants them. Other scores are refused: a bias is `bias`.
    out : array, (..., queries, head_dim_v), optional
        Where to put the result. It must not overlap itself or an array of the call, of its graph or score.

    Returns
    -------
    o : array, (..., queries, head_dim_v), of the dtype of q
        0 for a query without edges.

    Raises
    ------
    TypeError
        For arguments that are not arrays or a Graph, or of the wrong kind or dtype.
    ValueError
        For shapes and numbers that do not fit. Both errors name the argument, what it got and what it takes.

    Notes
    -----
    Sums are accumulated in float32, or in float64 for float64, in one order: results are equal bit for bit from call to
    call. On CPUs float16 and bfloat16 are computed from copies in float32.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> g = graphs.Graph(np.array([0, 2, 2, 3]), np.array([0, 2, 1]))
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 3, 8))      # 4 heads
    >>> graphs.attention(q, k, v, g, bias=np.zeros(3)).shape
    (4, 3, 8)
    """
    of_edges = EdgeArrays(bias, factor, k_edge, v_edge)
    o: Any = passes.forward(*describe_graph(q, k, v, graph, of_edges, softmax, scale, dropout, score, out), out).o
    return o


def attention_forward(
    q: A, k: A, v: A, graph: Graph, *, bias: A | None = None, k_edge: A | None = None, v_edge: A | None = None,
    factor: A | None = None, softmax: bool = True, scale: float | None = None, dropout: Dropout | None = None,
    score: Scores = None, out: A | None = None,
) -> tuple[A, GraphSaved[A]]:  # fmt: skip
    """`attention`, and what `attention_backward` needs.

    Parameters
    ----------
    q, k, v, graph, bias, k_edge, v_edge, factor, softmax, scale, dropout, score, out
        As in `attention`.

    Returns
    -------
    o : array, (..., queries, head_dim_v)
    saved : GraphSaved
        For `attention_backward`. ``saved.lse``, (..., queries), is the natural logarithm of the sum of exponentials of
        the scores of a query's edges: float32, or float64 for float64; -inf where it has none; None without a softmax.
        `saved` refers to the arrays of the call and to o: editing them in place between the two calls changes the
        gradients.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.
    """
    of_edges = EdgeArrays(bias, factor, k_edge, v_edge)
    saved = passes.forward(*describe_graph(q, k, v, graph, of_edges, softmax, scale, dropout, score, out), out)
    return saved.o, saved


def attention_backward(do: Array, saved: GraphSaved[A], *, dlse: Array | None = None) -> GraphGradients:
    """The exact gradients of `attention_forward`.

    Parameters
    ----------
    do : array, (..., queries, head_dim_v)
        The gradient of o. Another floating dtype is converted.
    saved : GraphSaved
        What `attention_forward` returned.
    dlse : array, (..., queries), optional
        The gradient of ``saved.lse``, converted likewise; ignored where lse is -inf.

    Returns
    -------
    dq, dk, dv : arrays
        Of the shapes and dtypes of q, k, v, summed over broadcast axes. The tuple has the attributes `bias`, `factor`,
        `k_edge` and `v_edge`: the gradients of these, likewise; None for one that was not given. `score` is a tuple of
        those of the arrays in the score, None for one that is not wanted.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Notes
    -----
    dS = P (factor do . (v + v_edge) - delta) with delta = rowsum(do o) - dlse, or factor do . (v + v_edge) without a
    softmax, times the derivative of the score. Two passes recompute P: one by query, for dq and the gradients of edges,
    one by key for dk and dv.
    """
    do, dlse = checked_rows(saved, do, dlse)
    found: GraphGradients = GraphGradients._of(passes.backward(saved, do, dlse))
    return found


@dataclass(frozen=True)
class GraphBackprop(Generic[A]):
    """The closure that `attention_vjp` returns: the gradients, as from `attention_backward`, and `vjp` for theirs."""

    saved: GraphSaved[A]

    def __call__(self, do: Array, dlse: Array | None = None) -> GraphGradients:
        return attention_backward(do, self.saved, dlse=dlse)

    def vjp(self, do: Array, dlse: Array | None = None) -> tuple[GraphGradients, GraphSecondBackprop]:
        """Gradients, and theirs as a closure: see `attention_backward_vjp`."""
        return attention_backward_vjp(do, self.saved, dlse=dlse)


def attention_vjp(
    q: A, k: A, v: A, graph: Graph, *, bias: A | None = None, k_edge: A | None = None, v_edge: A | None = None,
    factor: A | None = None, softmax: bool = True, scale: float | None = None, dropout: Dropout | None = None,
    score: Scores = None, out: A | None = None,
) -> tuple[A, GraphBackprop[A]]:  # fmt: skip
    """`attention` with its gradients as a closure.

    Parameters
    ----------
    q, k, v, graph, bias, k_edge, v_edge, factor, softmax, scale, dropout, score, out
        As in `attention`.

    Returns
    -------
    o : array, (..., queries, head_dim_v)
    backprop : GraphBackprop
        ``backprop(do, dlse=None)`` returns dq, dk, dv, with the gradients of edges as attributes: see
        `attention_backward`. ``backprop.vjp``, called the same way, returns these and a closure for their own
        gradients: see `attention_backward_vjp`. It refers to the arrays of the call and to o.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> g = graphs.Graph(np.array([0, 2, 2, 3]), np.array([0, 2, 1]))
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 3, 8))
    >>> o, backprop = graphs.attention_vjp(q, k, v, g, bias=np.zeros(3))
    >>> grads = backprop(o)                                     # of (o**2).sum() / 2
    >>> dq, dk, dv = grads
    >>> dk.shape, grads.bias.shape
    ((4, 3, 8), (3,))
    """
    of_edges = EdgeArrays(bias, factor, k_edge, v_edge)
    saved = passes.forward(*describe_graph(q, k, v, graph, of_edges, softmax, scale, dropout, score, out), out)
    return saved.o, GraphBackprop(saved)

"""Tangents of attention over the edges of a graph and of its gradients: for forward mode, Hessian-vector products and
gradients of gradients, as of forces. The arithmetic is in edge.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol

import numpy as np

from ..base.checks import A, Array, same_library, words_for
from ..base.values import rounded
from ..call.tangents import GivenTangent, checked_along, of_score, weights_of
from ..dropout import Dropout
from ..scores import Scores
from . import passes
from .gradients import GraphGradients, GraphSecondGradients
from .graph import TAKER, Graph
from .passes import Moving
from .problem import EdgeArrays, GraphInputs, GraphProblem, GraphSaved, checked_rows, describe_graph, rows_like


@dataclass(frozen=True, eq=False, repr=False)
class GraphSavedTangents(Generic[A]):
    """What the tangent of the forward pass leaves for the tangent of the backward pass. It refers to arrays, and does
    not copy them.

    Attributes
    ----------
    to : array, (..., queries, head_dim_v)
        The tangent of o; for several tangents with their axis in front.
    tlse : array, (..., queries), float32, or float64 for float64; None without a softmax
        The tangent of lse, likewise; 0 where a query has no edges.
    """

    problem: GraphProblem
    moving: list[Moving]
    to: A
    tlse: A | None
    several: bool  # whether there is an axis of tangents

    def __repr__(self) -> str:
        count = f"{len(self.moving)} tangents" if self.several else "a tangent"
        return f"<GraphSavedTangents: {count} of {self.to.dtype}, {self.problem.xp}>"


def attention_jvp(
    q: A, k: A, v: A, graph: Graph, tq: Array | None, tk: Array | None, tv: Array | None, *,
    bias: A | None = None, k_edge: A | None = None, v_edge: A | None = None, factor: A | None = None,
    tbias: Array | None = None, tk_edge: Array | None = None, tv_edge: Array | None = None,
    tfactor: Array | None = None, tscore: Sequence[Array | None] = (), softmax: bool = True, scale: float | None = None,
    dropout: Dropout | None = None, score: Scores = None,
) -> tuple[A, A]:  # fmt: skip
    """`attention` and its tangent: forward-mode differentiation, a Jacobian-vector product.

    Parameters
    ----------
    q, k, v, graph, bias, k_edge, v_edge, factor, softmax, scale, dropout, score
        As in `attention`.
    tq, tk, tv, tbias, tk_edge, tv_edge, tfactor : arrays or None
        The tangents of q, k, v and of the arrays of edges: of the shape and dtype of each; None is zero. For several
        tangents at once, all that are given have one more axis in front.
    tscore : list or tuple, optional
        The tangents of the arrays in the score, likewise, of those whose gradients are wanted.

    Returns
    -------
    o : array, (..., queries, head_dim_v), of the dtype of q
    to : array, likewise
        The tangent of o; for several tangents with their axis in front. 0 for a query without edges.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> g = graphs.Graph(np.array([0, 2, 2, 3]), np.array([0, 2, 1]))
    >>> q, k, v, tk = np.random.default_rng(0).standard_normal((4, 3, 8))
    >>> o, to = graphs.attention_jvp(q, k, v, g, None, tk, None)
    >>> h = 1e-5
    >>> ahead, behind = (graphs.attention(q, k + x * tk, v, g) for x in (h, -h))
    >>> np.allclose(to, (ahead - behind) / (2 * h), atol=1e-6)
    True
    """
    of_edges, moving = EdgeArrays(bias, factor, k_edge, v_edge), EdgeArrays(tbias, tfactor, tk_edge, tv_edge)
    saved, tsaved = _forward(q, k, v, graph, of_edges, (tq, tk, tv), moving, tscore, softmax, scale, dropout, score)
    return saved.o, tsaved.to


def attention_forward_jvp(
    q: A, k: A, v: A, graph: Graph, tq: Array | None, tk: Array | None, tv: Array | None, *,
    bias: A | None = None, k_edge: A | None = None, v_edge: A | None = None, factor: A | None = None,
    tbias: Array | None = None, tk_edge: Array | None = None, tv_edge: Array | None = None,
    tfactor: Array | None = None, tscore: Sequence[Array | None] = (), softmax: bool = True, scale: float | None = None,
    dropout: Dropout | None = None, score: Scores = None,
) -> tuple[A, A, GraphSaved[A], GraphSavedTangents[A]]:  # fmt: skip
    """`attention_jvp`, and what `attention_backward_jvp` needs.

    Parameters
    ----------
    q, k, v, graph, tq, tk, tv, bias, k_edge, v_edge, factor, tbias, tk_edge, tv_edge, tfactor, tscore,
    softmax, scale, dropout, score
        As in `attention_jvp`.

    Returns
    -------
    o, to : arrays, (..., queries, head_dim_v)
        As from `attention_jvp`.
    saved : GraphSaved
        As from `attention_forward`.
    tsaved : GraphSavedTangents
        ``tsaved.tlse`` is the tangent of ``saved.lse``. Both refer to the arrays that the call was given and returned.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.
    """
    of_edges, moving = EdgeArrays(bias, factor, k_edge, v_edge), EdgeArrays(tbias, tfactor, tk_edge, tv_edge)
    saved, tsaved = _forward(q, k, v, graph, of_edges, (tq, tk, tv), moving, tscore, softmax, scale, dropout, score)
    return saved.o, tsaved.to, saved, tsaved


def attention_backward_jvp(
    do: Array, saved: GraphSaved[A], tsaved: GraphSavedTangents[A], *, tdo: Array | None = None,
    dlse: Array | None = None, tdlse: Array | None = None,
) -> tuple[GraphGradients, GraphGradients]:  # fmt: skip
    """The gradients of `attention_forward`, and their tangents: forward over reverse, Hessian-vector products.

    Parameters
    ----------
    do, saved, dlse
        As in `attention_backward`.
    tsaved : GraphSavedTangents
        What `attention_forward_jvp` returned along with saved.
    tdo : array, (..., queries, head_dim_v), optional
        The tangent of do, with an axis of tangents in front if the others have one. Another floating dtype is
        converted. Default: zero.
    tdlse : array, (..., queries), optional
        The tangent of dlse, which is then given too, likewise.

    Returns
    -------
    grads : GraphGradients
        As from `attention_backward`.
    tgrads : GraphGradients
        The tangents of dq, dk, dv, of the gradients of edges and of arrays in the score; for several tangents with
        their axis in front.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Notes
    -----
    If tdo and tdlse are zero this is the Hessian of <do, o> + <dlse, lse> times the tangents.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> g = graphs.Graph(np.array([0, 2, 2, 3]), np.array([0, 2, 1]))
    >>> q, k, v, tq, do = np.random.default_rng(0).standard_normal((5, 3, 8))
    >>> o, to, saved, tsaved = graphs.attention_forward_jvp(q, k, v, g, tq, None, None)
    >>> (dq, dk, dv), (tdq, tdk, tdv) = graphs.attention_backward_jvp(do, saved, tsaved)
    >>> h = 1e-5
    >>> ahead, behind = (graphs.attention_vjp(q + x * tq, k, v, g)[1](do) for x in (h, -h))
    >>> np.allclose(tdk, (ahead.dk - behind.dk) / (2 * h), atol=1e-6)
    True
    """
    tgrads = tangents_of_gradients(do, saved, tsaved, tdo, dlse, tdlse)
    do, dlse = checked_rows(saved, do, dlse)
    return GraphGradients._of(passes.backward(saved, do, dlse)), tgrads


def tangents_of_gradients(
    do: Any, saved: GraphSaved[A], tsaved: GraphSavedTangents[A], tdo: Any, dlse: Any, tdlse: Any
) -> GraphGradients:
    """The second result of `attention_backward_jvp`."""
    do, dlse = checked_rows(saved, do, dlse)
    if not isinstance(tsaved, GraphSavedTangents):
        raise TypeError(f"tsaved: got {words_for(tsaved)}, expected what graphs.attention_forward_jvp returned")
    if tsaved.problem != saved.problem:
        raise ValueError(f"tsaved: got {tsaved} of another call than saved, {saved}")
    if tdlse is not None and dlse is None:
        raise ValueError(f"tdlse: got {words_for(tdlse)} without dlse, whose tangent it is: pass dlse, too")
    rows = rows_like(saved, "t", tdo, tdlse, tsaved.to.shape[:1] if tsaved.several else ())
    tgrads: GraphGradients = GraphGradients._of(_along(saved, tsaved, do, dlse, *rows))
    return tgrads


class GraphSecondBackprop(Protocol):
    """The closure that `attention_backward_vjp` returns."""

    def __call__(
        self, ddq: Array | None, ddk: Array | None, ddv: Array | None, *, ddbias: Array | None = None,
        ddfactor: Array | None = None, ddk_edge: Array | None = None, ddv_edge: Array | None = None,
        ddscore: Sequence[Array | None] = (),
    ) -> GraphSecondGradients: ...  # fmt: skip


def attention_backward_vjp(
    do: Array, saved: GraphSaved[A], *, dlse: Array | None = None
) -> tuple[GraphGradients, GraphSecondBackprop]:
    """`attention_backward` with its own gradients as a closure: reverse over reverse, as for training on forces.

    Parameters
    ----------
    do, saved, dlse
        As in `attention_backward`.

    Returns
    -------
    grads : GraphGradients
        As from `attention_backward`.
    backprop2 : function
        ``backprop2(ddq, ddk, ddv, *, ddbias=None, ddfactor=None, ddk_edge=None, ddv_edge=None, ddscore=())`` takes the
        gradients of a function of dq, dk, dv and of all other gradients with respect to these: of the shape and dtype
        of each, None is zero. It returns those with respect to q, k, v and do, a tuple with the attributes `bias`,
        `factor`, `k_edge`, `v_edge`, `dlse` and `score`. There may be several at once, as in `attention_jvp`.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Notes
    -----
    The gradients are those of <do, o> + <dlse, lse>, whose Hessian is symmetric: so those of a function of them are the
    tangents that `attention_backward_jvp` returns in the direction ddq, ddk, ..., and the gradients with respect to do
    and dlse are the tangents of o and lse in that direction.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> g = graphs.Graph(np.array([0, 2, 2, 3]), np.array([0, 2, 1]))
    >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 3, 8))
    >>> o, saved = graphs.attention_forward(q, k, v, g)
    >>> (dq, dk, dv), backprop2 = graphs.attention_backward_vjp(do, saved)
    >>> gq, gk, gv, gdo = backprop2(2 * dq, None, None)         # of the penalty (dq**2).sum()
    >>> gdo.shape
    (3, 8)
    """
    do, dlse = checked_rows(saved, do, dlse)
    grads: GraphGradients = GraphGradients._of(passes.backward(saved, do, dlse))

    def backprop2(
        ddq: Array | None, ddk: Array | None, ddv: Array | None, *, ddbias: Array | None = None,
        ddfactor: Array | None = None, ddk_edge: Array | None = None, ddv_edge: Array | None = None,
        ddscore: Sequence[Array | None] = (),
    ) -> GraphSecondGradients:  # fmt: skip
        of_edges = EdgeArrays(ddbias, ddfactor, ddk_edge, ddv_edge)
        tsaved = tangents_of(saved, *checked_moving(saved.inputs, (ddq, ddk, ddv), of_edges, ddscore, "dd"))
        found: GraphSecondGradients = GraphSecondGradients._of(
            _along(saved, tsaved, do, dlse), tsaved.to, dlse=tsaved.tlse
        )
        return found

    return grads, backprop2


def attention_laplacian(
    q: A, k: A, v: A, graph: Graph, jq: Array | None, jk: Array | None, jv: Array | None, lq: Array | None = None,
    lk: Array | None = None, lv: Array | None = None, *, bias: A | None = None, k_edge: A | None = None,
    v_edge: A | None = None, factor: A | None = None, jbias: Array | None = None, jk_edge: Array | None = None,
    jv_edge: Array | None = None, jfactor: Array | None = None, jscore: Sequence[Array | None] = (),
    lbias: Array | None = None, lk_edge: Array | None = None, lv_edge: Array | None = None,
    lfactor: Array | None = None, lscore: Sequence[Array | None] = (), softmax: bool = True,
    scale: float | None = None, dropout: Dropout | None = None, score: Scores = None,
) -> tuple[A, A, A]:  # fmt: skip
    """`attention` with its tangents and its Laplacian: see `numbattn.attention_laplacian`.

    All arrays depend on coordinates x_1, ..., x_T. Given their first derivatives by each, and their Laplacians, the
    sums of second derivatives, it returns both for o.

    Parameters
    ----------
    q, k, v, graph, bias, k_edge, v_edge, factor, softmax, scale, dropout, score
        As in `attention`.
    jq, jk, jv, jbias, jk_edge, jv_edge, jfactor : arrays, (T, ...), or None
        The derivatives of q, k, v and of the arrays of edges by each coordinate, of their dtype; None is zero.
    lq, lk, lv, lbias, lk_edge, lv_edge, lfactor : arrays or None, optional
        Their Laplacians, of the shape and dtype of each; None is zero.
    jscore, lscore : list or tuple, optional
        Likewise of the arrays in the score, as tscore in `attention_jvp`.

    Returns
    -------
    o : array, (..., queries, head_dim_v), of the dtype of q
    jo : array, (T, ..., queries, head_dim_v)
        The derivatives of o.
    lo : array, (..., queries, head_dim_v)
        Its Laplacian.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Notes
    -----
    lo is the tangent of o along the Laplacians plus the sum over coordinates of its second derivatives along q + h jq,
    k + h jk, and so on. Scores are computed once for each coordinate.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> g = graphs.Graph(np.array([0, 2, 2, 3]), np.array([0, 2, 1]))
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 3, 8))
    >>> jbias = np.eye(3)                                       # by the elements of bias themselves
    >>> o, jo, lo = graphs.attention_laplacian(q, k, v, g, None, None, None, bias=np.zeros(3), jbias=jbias)
    >>> jo.shape, lo.shape
    ((3, 3, 8), (3, 8))
    """
    problem, inputs = describe_graph(q, k, v, graph, EdgeArrays(bias, factor, k_edge, v_edge), softmax, scale, dropout,
                                     score)  # fmt: skip
    of_edges = EdgeArrays(jbias, jfactor, jk_edge, jv_edge), EdgeArrays(lbias, lfactor, lk_edge, lv_edge)
    moving, _ = checked_moving(inputs, (jq, jk, jv), of_edges[0], jscore, "j", several=True)
    (along,), _ = checked_moving(inputs, (lq, lk, lv), of_edges[1], lscore, "l", several=False)
    saved, dtype, jo = passes.forward(replace(problem, wide=True), inputs), problem.dtype, list[Any]()
    lo, _ = passes.tangent(saved, along)
    for each in moving:
        to, o2 = passes.laplacian(saved, each)
        jo.append(rounded(to, dtype))
        lo += o2
    o = rounded(saved.o, dtype)
    return o, _joined(jo, o, True), rounded(lo, dtype)


def _forward(
    q: Any, k: Any, v: Any, graph: Any, of_edges: EdgeArrays, of_nodes: tuple[Any, ...], moving: EdgeArrays,
    tscore: Sequence[Any], softmax: Any, scale: Any, dropout: Any, score: Scores,
) -> tuple[GraphSaved[Any], GraphSavedTangents[Any]]:  # fmt: skip
    problem, inputs = describe_graph(q, k, v, graph, of_edges, softmax, scale, dropout, score)
    moves = checked_moving(inputs, of_nodes, moving, tscore, "t")
    saved = passes.forward(problem, inputs)
    return saved, tangents_of(saved, *moves)


def checked_moving(
    inputs: GraphInputs, of_nodes: tuple[Any, ...], of_edges: EdgeArrays, score: Sequence[Any], prefix: str,
    several: bool | None = None,
) -> tuple[list[Moving], bool]:  # fmt: skip
    """The tangents of a call, checked, one by one; whether they have an axis in front. several: whether they must, if
    it is known."""
    tangents, given, weights = {**dict(zip("qkv", of_nodes)), **of_edges._asdict()}, [], weights_of(inputs)
    score = of_score(f"{prefix}score", score, inputs)
    for name, x in tangents.items():
        if x is not None and name not in inputs.arrays:
            raise ValueError(f"{prefix}{name}: got {words_for(x)} without {name}, whose tangent it is: pass both")
        if x is not None:
            same_library(TAKER, q=inputs.q, **{f"{prefix}{name}": x})
            given.append(GivenTangent(f"{prefix}{name}", x, inputs.arrays[name], name))
    for number, ((part, weight), x) in enumerate(zip(weights, score)):
        if x is not None:
            given.append(GivenTangent(f"{prefix}score[{number}]", x, weight, type(part).__name__))
    several, count = checked_along(given, inputs, several)
    found = []
    for number in range(count):
        each = (x[number] if several and x is not None else x for x in (*tangents.values(), *score))
        q, k, v, bias, factor, k_edge, v_edge, *own = each
        found.append(Moving(q, k, v, EdgeArrays(bias, factor, k_edge, v_edge), tuple(own)))
    return found, several


def tangents_of(saved: GraphSaved[Any], moving: list[Moving], several: bool) -> GraphSavedTangents[Any]:
    """The tangents of o and lse."""
    found = [passes.tangent(saved, along) for along in moving]
    to = _joined([to for to, _ in found], saved.o, several)
    tlse = None if saved.lse is None else _joined([tlse for _, tlse in found], saved.lse, several)
    return GraphSavedTangents(saved.problem, moving, to, tlse, several)


def _along(
    saved: GraphSaved[Any], tsaved: GraphSavedTangents[Any], do: Any, dlse: Any, tdo: Any = None, tdlse: Any = None
) -> dict[str, Any]:
    """The tangents of the gradients by name, each joined."""
    rows, found = (tsaved.to, tsaved.tlse, tdo, tdlse), list[dict[str, Any]]()
    for number, moving in enumerate(tsaved.moving):
        own = (x[number] if tsaved.several and x is not None else x for x in rows)
        found.append(passes.backward_tangent(saved, moving, do, dlse, *own))
    wanted = [wanted for part in saved.inputs.score for wanted in part._wanted]
    score = [_joined([x["score"][at] for x in found], weight, tsaved.several) if wanted[at] else None
             for at, (_, weight) in enumerate(weights_of(saved.inputs))]  # fmt: skip
    return {"score": tuple(score), **{name: _joined([x[name] for x in found], array, tsaved.several)
                                      for name, array in saved.inputs.arrays.items()}}  # fmt: skip


def _joined(found: list[Any], like: Any, several: bool) -> Any:
    """Results along each tangent, with an axis in front if there are several."""
    if not several:
        return found[0]
    joined = np.empty((len(found), *like.shape), like.dtype, like=like)
    for number, x in enumerate(found):
        joined[number] = x
    return joined

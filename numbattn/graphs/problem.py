"""Arrays and options of a call -> one frozen GraphProblem. Whatever does not fit is refused here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Generic, NamedTuple

from ..base.checks import A, flag, other_dtype, same_library, words_for
from ..base.values import broadcasts
from ..call.problem import Problem, converted, describe, refuse_overlap
from ..dropout import Dropout
from ..scores import Part, Scores
from .graph import TAKER, Graph, check_graph
from .score import checked_score

AXES = {"bias": 1, "factor": 1, "k_edge": 2, "v_edge": 2}  # of arrays of edges, and how many axes each has of its own


@dataclass(frozen=True)
class GraphProblem(Problem):
    """A Problem of q, k and v whose queries see the keys of a graph: all that kernels are compiled for and more."""

    edges: int = 0
    given: tuple[str, ...] = ()  # arrays of edges
    softmax: bool = True


class EdgeArrays(NamedTuple):
    """What a call has of each edge, or None; and what is made of these, gradients and tangents."""

    bias: Any = None  # (..., edges)
    factor: Any = None
    k_edge: Any = None  # (..., edges, head_dim)
    v_edge: Any = None  # (..., edges, head_dim_v)


def given_arrays(q: Any, k: Any, v: Any, of_edges: EdgeArrays) -> dict[str, Any]:
    """Those that are not None, by name."""
    found = {"q": q, "k": k, "v": v, **of_edges._asdict()}
    return {name: x for name, x in found.items() if x is not None}


class GraphInputs(NamedTuple):
    """The arrays of a call as given, and its numbers."""

    q: Any
    k: Any
    v: Any
    graph: Graph
    of_edges: EdgeArrays
    scale: float
    dropout: Dropout | None = None
    score: tuple[Part, ...] = ()

    @property
    def arrays(self) -> dict[str, Any]:
        """All that have gradients, by name."""
        return given_arrays(self.q, self.k, self.v, self.of_edges)


@dataclass(frozen=True, eq=False, repr=False)
class GraphSaved(Generic[A]):
    """What the forward pass leaves for the backward pass. It refers to the arrays of the call and to o, not to copies.

    Attributes
    ----------
    o : array, (..., queries, head_dim_v)
    lse : array, (..., queries), float32, or float64 for float64; None without a softmax
        The natural logarithm of the sum of exponentials of the scores of each query's edges; -inf where it has none.
    """

    problem: GraphProblem
    inputs: GraphInputs
    o: A
    lse: A | None

    def __repr__(self) -> str:
        q, k, v = self.problem.shapes
        return f"<GraphSaved: q {q}, k {k}, v {v}, {self.inputs.graph}, {self.problem.dtype}, {self.problem.xp}>"


def describe_graph(
    q: Any, k: Any, v: Any, graph: Any, of_edges: EdgeArrays, softmax: Any = True, scale: Any = None,
    dropout: Any = None, score: Scores = None, out: Any = None,
) -> tuple[GraphProblem, GraphInputs]:
    """Check a call; return its GraphProblem and its GraphInputs."""
    check_graph(graph)
    same_library(TAKER, q=q, k=k, v=v, graph=graph.indptr)
    problem, inputs = describe(q, k, v, scale=scale, dropout=dropout, out=out)
    for name, got, wanted, rows in (("q", problem.seqlen_q, graph.queries, "queries"),
                                    ("k", problem.seqlen_k, graph.keys, "keys")):  # fmt: skip
        if got != wanted:
            raise ValueError(f"{name}: got {got} rows, expected {wanted}, as many as the graph has {rows}")
    sizes = {"k_edge": (problem.head_dim,), "v_edge": (problem.head_dim_v,)}
    given = {name: x for name, x in of_edges._asdict().items() if x is not None}
    for name, x in given.items():
        same_library(TAKER, q=q, **{name: x})
        if x.dtype != q.dtype:
            raise other_dtype(name, x.dtype, q.dtype, "q")
        shape, own = (*problem.batch, graph.edges, *sizes.get(name, ())), AXES[name]
        if x.ndim < own or x.shape[-own:] != shape[-own:] or not broadcasts(x.shape, shape):
            raise ValueError(f"{name}: got the shape {x.shape}, expected one that broadcasts to {shape}, edge by edge")
    parts = () if score is None else checked_score(score, q)
    if out is not None:
        refuse_overlap(out, given, (graph, *parts))
    found = _graph_problem(problem, graph.edges, tuple(given), flag("softmax", softmax))
    return found, GraphInputs(q, k, v, graph, of_edges, inputs.scale, dropout, parts)


@lru_cache(maxsize=1024)
def _graph_problem(problem: Problem, edges: int, given: tuple[str, ...], softmax: bool) -> GraphProblem:
    own = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return GraphProblem(**own, edges=edges, given=given, softmax=softmax)


def checked_rows(saved: GraphSaved[Any], do: Any, dlse: Any) -> tuple[Any, Any]:
    """do and dlse, checked, in the dtypes of o and lse."""
    if not isinstance(saved, GraphSaved):
        raise TypeError(f"saved: got {words_for(saved)}, expected what graphs.attention_forward returned")
    return rows_like(saved, "", do, dlse)


def rows_like(saved: GraphSaved[Any], prefix: str, do: Any, dlse: Any, lead: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """do and dlse, or tangents of theirs with an axis in front, checked, in the dtypes of o and lse."""
    problem, inputs = saved.problem, saved.inputs
    if do is not None or not prefix:
        do = converted(f"{prefix}do", do, "o", (*lead, *problem.out_shape), problem.dtype, inputs)  # type: ignore[arg-type]
    if dlse is not None and not problem.softmax:
        raise ValueError(f"{prefix}dlse: got {words_for(dlse)} without a softmax, where there is no lse: expected None")
    if dlse is not None:
        shape = (*lead, *problem.lse_shape)
        dlse = converted(f"{prefix}dlse", dlse, "lse", shape, problem.sum_dtype, inputs)  # type: ignore[arg-type]
    return do, dlse

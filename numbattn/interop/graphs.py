"""Attention over the edges of a graph, in place of attention in what differentiates it: arrays of edges that are given
are further arrays with a gradient, after those of the score."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..base.checks import dtype_of_sums, flag, library, words_for
from ..base.gradients import Gradients
from ..graphs import Graph, attention_backward, attention_forward, attention_forward_jvp, attention_laplacian
from ..graphs.graph import check_graph
from ..graphs.jets import GraphSavedTangents, checked_moving, tangents_of, tangents_of_gradients
from ..graphs.problem import AXES, EdgeArrays, GraphSaved, describe_graph
from .options import Functions, Options, taken_apart


@dataclass(frozen=True)
class GraphOptions(Options):
    """The options of a call over a graph, see `taken_apart_of_graph`; with the names of the arrays of edges."""

    graph: Graph
    softmax: bool
    names: tuple[str, ...]

    @property
    def on_gpu(self) -> bool:  # type: ignore[override]
        return library(self.graph.indptr) == "cupy"

    @property
    def functions(self) -> Functions:
        return FUNCTIONS

    @property
    def parts(self) -> list[Any]:
        return [*super().parts, *[None] * len(self.names)]

    def given(self, arrays: Any) -> dict[str, Any]:
        given, edges = super().given(arrays), arrays[len(arrays) - len(self.names) :]
        del given["causal"], given["mask"]
        return {**given, "graph": self.graph, "softmax": self.softmax, **dict(zip(self.names, edges))}


def taken_apart_of_graph(
    graph: Any, softmax: bool, scale: Any, dropout: Any, score: Any, **edges: Any
) -> tuple[GraphOptions, list[Any]]:
    """GraphOptions and the arrays of a call: those of the score, then those of edges."""
    check_graph(graph)
    apart, arrays = taken_apart(scale=scale, dropout=dropout, score=score)
    names = tuple([name for name in AXES if edges[name] is not None])
    for name in names:
        if not hasattr(edges[name], "shape"):
            raise TypeError(f"{name}: got {words_for(edges[name])}, expected an array")
    own = {field.name: getattr(apart, field.name) for field in fields(apart)}
    own["own_axes"] += tuple([AXES[name] for name in names])
    own["weights"] += tuple(range(len(arrays), len(arrays) + len(names)))
    own["wanted"] += (True,) * len(names)
    options = GraphOptions(**own, graph=graph, softmax=flag("softmax", softmax), names=names)
    return options, [*arrays, *[edges[name] for name in names]]


# ---------------------------------------------------------------------------------------------------------- functions
def forward(q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, Any]:
    o, saved = attention_forward(q, k, v, **_beside(q, given))
    return o, replace(saved, lse=_lse(saved.lse, o))


def forward_jvp(q: Any, k: Any, v: Any, *tqkv: Any, tscore: Any, graph: Any, **given: Any) -> Any:
    of_score, moving = _taken_apart(tscore, given)
    given |= {f"t{name}": x for name, x in moving.items()}
    o, to, saved, tsaved = attention_forward_jvp(q, k, v, graph, *tqkv, tscore=of_score, **_beside(q, given))
    return o, to, replace(saved, lse=_lse(saved.lse, o)), replace(tsaved, tlse=_lse(tsaved.tlse, to))


def tangent(q: Any, k: Any, v: Any, o: Any, lse: Any, *tqkv: Any, tscore: Any, **given: Any) -> tuple[Any, Any]:
    saved = saved_of(q, k, v, o, lse, **given)
    of_score, moving = _taken_apart(tscore, saved.inputs.arrays)
    tsaved = tangents_of(saved, *checked_moving(saved.inputs, tqkv, EdgeArrays(**moving), of_score, "t"))
    return tsaved.to, _lse(tsaved.tlse, tsaved.to)


def saved_of(q: Any, k: Any, v: Any, o: Any, lse: Any, **given: Any) -> GraphSaved[Any]:
    problem, inputs = _described(q, k, v, **given)
    return GraphSaved(problem, inputs, o, lse if problem.softmax else None)


def backward(do: Any, saved: Any, *, dlse: Any, deterministic: bool) -> Gradients[Any]:
    return _in_order(attention_backward(do, saved, dlse=dlse if saved.problem.softmax else None), saved)


def saved_tangents(saved: Any, tq: Any, tk: Any, tv: Any, tscore: Any, to: Any, tlse: Any) -> GraphSavedTangents[Any]:
    of_score, moving = _taken_apart(tscore, saved.inputs.arrays)
    found, several = checked_moving(saved.inputs, (tq, tk, tv), EdgeArrays(**moving), of_score, "t")
    return GraphSavedTangents(saved.problem, found, to, tlse, several)


def gradients_along(
    do: Any, saved: Any, tsaved: Any, tdo: Any, dlse: Any, tdlse: Any, deterministic: bool
) -> Gradients[Any]:
    dlse, tdlse = (dlse, tdlse) if saved.problem.softmax else (None, None)
    return _in_order(tangents_of_gradients(do, saved, tsaved, tdo, dlse, tdlse), saved)


def described(q: Any, k: Any, v: Any, *, graph: Any, may_wait: bool, **given: Any) -> Any:
    """Of arrays that have no elements yet."""
    like, zeros = object.__new__(Graph), np.zeros((), np.int32)
    like._set(indptr=np.broadcast_to(zeros, graph.indptr.shape), indices=np.broadcast_to(zeros, graph.indices.shape),
              keys=graph.keys)  # fmt: skip
    return _described(q, k, v, graph=like, **given)


def laplacian(q: Any, k: Any, v: Any, *jl: Any, jscore: Any, lscore: Any, graph: Any, **given: Any) -> Any:
    """jl: the first derivatives of q, k and v, then their Laplacians."""
    (jscore, first), (lscore, second) = _taken_apart(jscore, given), _taken_apart(lscore, given)
    moving = {f"j{name}": x for name, x in first.items()} | {f"l{name}": x for name, x in second.items()}
    options: Any = {"jscore": jscore, "lscore": lscore, **moving, **_beside(q, given)}
    return attention_laplacian(q, k, v, graph, *jl, **options)


def coordinates(inputs: Any, first: Any, second: Any) -> int:
    counts = []
    for prefix, several, (*tangents, tscore) in ("j", True, first), ("l", False, second):
        of_score, moving = _taken_apart(tscore, inputs.arrays)
        found, _ = checked_moving(inputs, tuple(tangents), EdgeArrays(**moving), of_score, prefix, several)
        counts.append(len(found))
    return counts[0]


FUNCTIONS = Functions(forward, forward_jvp, tangent, saved_of, backward, saved_tangents, gradients_along, described,
                      laplacian, coordinates)  # fmt: skip


def _described(q: Any, k: Any, v: Any, *, graph: Any, **given: Any) -> Any:
    of_edges = EdgeArrays(**{name: given.pop(name, None) for name in AXES})
    return describe_graph(q, k, v, graph, of_edges, **_beside(q, given))


def _beside(q: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Options whose score has its arrays in the library of q, where a framework gives NumPy's beside those on a GPU."""
    return {**given, "score": [part._like(q) for part in given["score"]]}


def _lse(lse: Any, o: Any) -> Any:
    """lse, or its tangent; zeros without a softmax, since frameworks take no None."""
    return np.zeros(o.shape[:-1], dtype_of_sums(o.dtype), like=o) if lse is None else lse


def _taken_apart(tscore: Any, given: Any) -> tuple[list[Any], dict[str, Any]]:
    """Tangents of the arrays in the score, and those of arrays of edges by name."""
    names = [name for name in AXES if name in given]
    first = len(tscore) - len(names)
    return list(tscore[:first]), dict(zip(names, tscore[first:]))


def _in_order(grads: Any, saved: Any) -> Gradients[Any]:
    names = [name for name in AXES if name in saved.inputs.arrays]
    dq, dk, dv = grads
    return Gradients(dq, dk, dv, (*grads.score, *[getattr(grads, name) for name in names]))

"""Attention over the edges of a graph in plain NumPy, edge by edge: every test compares with it.

S = scale q . (k + k_edge) + bias, P its softmax over the edges of a query or S itself, and o the sum of factor P
(v + v_edge).
It may compute in complex numbers, whose imaginary parts are then tangents, of gradients too: all steps are analytic.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..base.gradients import sum_to
from ..dropout import dropout_mask
from . import edge
from .problem import GraphInputs, GraphProblem


class Edges(NamedTuple):
    """What the forward pass knows of each edge, (batch, heads, edges) or with features after these."""

    q: Any
    k: Any  # k + k_edge
    v: Any
    factor: Any
    Z: Any  # what dropout multiplies P by
    P: Any
    i: Any  # the query
    j: Any  # the key


def forward(problem: GraphProblem, inputs: GraphInputs, work: Any = np.float64) -> tuple[Any, Any, Edges]:
    """o (batch, heads, queries, features), lse (batch, heads, queries), and the Edges, in the dtype `work`."""
    graph, of_edges = inputs.graph, inputs.of_edges
    j, i = graph.indices, np.repeat(np.arange(graph.queries), np.diff(graph.indptr))
    q, k, v = (heads(x, problem, work)[:, :, rows] for x, rows in zip(inputs[:3], (i, j, j)))
    k = k if of_edges.k_edge is None else k + heads(of_edges.k_edge, problem, work)
    v = v if of_edges.v_edge is None else v + heads(of_edges.v_edge, problem, work)
    S = work(inputs.scale) * (q * k).sum(-1)
    S = S if of_edges.bias is None else S + heads(of_edges.bias[..., None], problem, work)[..., 0]
    factor = np.ones_like(S) if of_edges.factor is None else heads(of_edges.factor[..., None], problem, work)[..., 0]
    Z = np.ones_like(S)
    if inputs.dropout is not None:
        kept = dropout_mask(inputs.dropout, (*problem.batch, 1, graph.edges)).reshape(*problem.matrices, graph.edges)
        Z = kept * work(inputs.dropout.scale)
    shape, lse, P, at = (*problem.matrices, graph.queries), None, S, (slice(None), slice(None), i)
    if problem.softmax:
        m: Any = np.full(shape, -math.inf)
        np.maximum.at(m, at, S.real)  # type: ignore[arg-type]
        m = np.where(np.isneginf(m), 0, m).astype(work)
        l = added(np.exp(S - m[..., i])[..., None], i, graph.queries)[..., 0]
        sees = l != 0
        lse = np.where(sees, m + np.log(np.where(sees, l, 1)), -math.inf)
        P = np.where(np.isneginf(S.real), 0, np.exp(S - np.where(sees, lse, 0)[..., i]))
    o = added((Z * factor * P)[..., None] * v, i, graph.queries)
    return o, lse, Edges(q, k, v, factor, Z, P, i, j)


def backward(problem: GraphProblem, inputs: GraphInputs, do: Any, dlse: Any = None, work: Any = np.float64) -> Any:
    """The gradients of the arrays of the call by name, in their shapes and the dtype `work`."""
    o, _, (q, k, v, factor, Z, P, i, j) = forward(problem, inputs, work)
    do = heads(do, problem, work)
    D: Any = (do * o).sum(-1) if problem.softmax else np.zeros(do.shape[:-1], work)
    if dlse is not None:
        D = D - heads(dlse[..., None], problem, work)[..., 0]
    dO, scale, n = do[:, :, i], work(inputs.scale), problem.seqlen_k
    slope = P if problem.softmax else np.ones_like(P)
    weight, dS, dfactor = edge.gradients(P, slope, Z * factor, (dO * v).sum(-1), D[..., i])
    dk_edge, dv_edge = scale * dS[..., None] * q, weight[..., None] * dO
    dq, dk, dv = added(scale * dS[..., None] * k, i, problem.seqlen_q), added(dk_edge, j, n), added(dv_edge, j, n)
    found = {"q": dq, "k": dk, "v": dv, "bias": dS, "factor": Z * dfactor, "k_edge": dk_edge, "v_edge": dv_edge}
    return {name: summed(found[name], x.shape, problem) for name, x in inputs.arrays.items()}


def heads(x: Any, problem: GraphProblem, work: Any) -> Any:
    """x as (batch, heads, rows, columns), each query head with its key head."""
    x = x.reshape((1,) * (3 - x.ndim) + x.shape).astype(work)
    x = np.repeat(x, problem.heads // x.shape[-3], axis=-3) if x.shape[-3] else x
    shape = *problem.batch[:-1], problem.heads, *x.shape[-2:]
    return np.broadcast_to(x, shape).reshape(*problem.matrices, *x.shape[-2:])


def added(terms: Any, rows: Any, count: int) -> Any:
    """Sums of terms (batch, heads, edges, features) by row."""
    sums = np.zeros((*terms.shape[:2], count, terms.shape[-1]), terms.dtype)
    np.add.at(sums, (slice(None), slice(None), rows), terms)  # type: ignore[arg-type]
    return sums


def summed(x: Any, shape: tuple[int, ...], problem: GraphProblem) -> Any:
    """A gradient (batch, heads, rows, ...) summed to the shape of an array, over groups of heads and broadcast axes."""
    if x.ndim == 3:
        return summed(x[..., None], (*shape, 1), problem)[..., 0]
    return sum_to(x.reshape(*problem.batch, *x.shape[2:]), shape)

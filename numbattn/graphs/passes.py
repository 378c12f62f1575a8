"""The passes of a call, by the backend for its arrays: forward, backward, the tangent of each, and the Laplacian."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..base.backends import GRAPHS, run
from ..base.interrupts import imported
from .problem import EdgeArrays, GraphInputs, GraphProblem, GraphSaved, given_arrays
from .score import elements_of, gradients_of


class Moving(NamedTuple):
    """A direction in which the arrays of a call move; None is zero."""

    q: Any
    k: Any
    v: Any
    of_edges: EdgeArrays
    score: tuple[Any, ...] = ()  # of each array in the score

    @property
    def arrays(self) -> dict[str, Any]:
        """Those that move, by name, but for those in the score."""
        return given_arrays(*self[:4])


def forward(problem: GraphProblem, inputs: GraphInputs, out: Any = None) -> GraphSaved[Any]:
    """o, and lse, which is None without a softmax."""
    if _is_empty(problem):
        o = np.zeros(problem.out_shape, problem.result_dtype, like=inputs.q) if out is None else out
        o[...] = 0
        lse = np.zeros(problem.lse_shape, problem.sum_dtype, like=inputs.q) - np.inf if problem.softmax else None
    else:
        o, lse = _run("forward", problem, inputs, out)
    return GraphSaved(problem, inputs, o, lse)


def backward(saved: GraphSaved[Any], do: Any, dlse: Any) -> dict[str, Any]:
    """The gradients of all arrays that are given, by name."""
    problem, inputs = saved.problem, saved.inputs
    if _is_empty(problem):
        count = sum(map(elements_of, inputs.score))
        score = gradients_of(inputs.score, np.zeros_like(inputs.q, problem.sum_dtype, shape=(count,)))
        return {"score": score, **{name: np.zeros_like(x, shape=x.shape) for name, x in inputs.arrays.items()}}
    found: dict[str, Any] = _run("backward", problem, inputs, do, saved.o, saved.lse, dlse)
    return found


def tangent(saved: GraphSaved[Any], moving: Moving) -> tuple[Any, Any]:
    """The tangents of o and lse."""
    problem, inputs = saved.problem, saved.inputs
    if _is_empty(problem):
        tlse = np.zeros(problem.lse_shape, problem.sum_dtype, like=inputs.q) if problem.softmax else None
        return np.zeros_like(saved.o), tlse
    to, tlse = _run("tangent", problem, inputs, moving, saved.o, saved.lse)
    return to, tlse


def laplacian(saved: GraphSaved[Any], moving: Moving) -> tuple[Any, Any]:
    """The tangent of o, and its second derivative along it, in the dtype of sums."""
    problem, inputs = saved.problem, saved.inputs
    if _is_empty(problem):
        return np.zeros_like(saved.o), np.zeros_like(saved.o, problem.sum_dtype)
    to, tlse, o2 = _run("laplacian", problem, inputs, moving, saved.o, saved.lse)
    return to, o2 if tlse is None else o2 - 2 * tlse[..., None] * to


def backward_tangent(
    saved: GraphSaved[Any], moving: Moving, do: Any, dlse: Any, to: Any, tlse: Any, tdo: Any = None, tdlse: Any = None
) -> dict[str, Any]:
    """The tangents of the gradients, by name."""
    problem, inputs = saved.problem, saved.inputs
    if _is_empty(problem):
        return backward(saved, do, dlse)
    rows = do, saved.o, saved.lse, dlse, to, tlse, tdo, tdlse
    found: dict[str, Any] = _run("backward_tangent", problem, inputs, moving, *rows)
    return found


def _is_empty(problem: GraphProblem) -> bool:
    return problem.is_empty or not problem.edges


def _run(name: str, problem: GraphProblem, *args: Any) -> Any:
    return run(name, problem, *args, chosen=imported(GRAPHS[problem.xp]))

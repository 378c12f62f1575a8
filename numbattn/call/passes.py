"""The passes of attention: what each takes and gives, and how it is run, whoever computes it.

A backend finds the kernels of a pass by its name: see `numbattn.cpu.run` and `numbattn.cuda.kernels.routes_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ..base.backends import run
from ..base.gradients import Gradients
from ..base.values import put, rounded, rowsum
from ..dropout import dropout_mask
from ..scores import Part
from ..scores.bias import Bias
from ..scores.sink import Sink
from .order import Ordered, as_it_is, computed_in_order, gradient_of_part
from .particles import Particles
from .problem import Inputs, Problem, Saved, describe
from .tangents import Tangents, parts_of

QKV, SAVED = ("q", "k", "v"), ("o", "lse", "lse_low")
BEFORE = "o before"  # O over other keys; its lse is the call's


def no_part(part: Part) -> bool:
    return False


@dataclass(frozen=True, eq=False)
class Pass:
    """What to compute of a problem: the names of arrays, whose shapes and dtypes are in ARRAYS."""

    name: str
    takes: tuple[str, ...]  # if a call lacks one, no kernel reads it
    gives: tuple[str, ...]  # statistics that are not wanted are not kept
    differentiates: Callable[[Part], bool] = no_part  # whether kernels may compute the gradient of a part's array


FORWARD = Pass("forward", takes=(*QKV, BEFORE), gives=SAVED)
BACKWARD = Pass(
    "backward",
    takes=(*QKV, *SAVED, "do", "dlse"),
    gives=("dq", "dk", "dv"),
    differentiates=lambda part: True,
)
TANGENT = Pass(
    "tangent",
    takes=(*QKV, "tq", "tk", "tv"),
    gives=(*SAVED, "to", "tlse"),
)
BACKWARD_TANGENT = Pass(
    "backward_tangent",
    takes=(*BACKWARD.takes, "tq", "tk", "tv", "to", "tlse", "tdo", "tdlse"),
    gives=("tdq", "tdk", "tdv"),
    differentiates=lambda part: part._has_step,  # array operations compute that of a sink
)
LAPLACIAN = Pass(
    "laplacian",
    takes=TANGENT.takes,
    gives=(*TANGENT.gives, "o2"),  # terms whose sum is that of the second derivatives of o
)
PARTICLE_LAPLACIAN = Pass(
    "particle_laplacian",  # along coordinates of Particles
    takes=(*TANGENT.takes, *SAVED),
    gives=("to", "o2"),
)
STATISTICS = Pass("statistics", takes=QKV, gives=("row_max", "entropy", "lse", "lse_low"))
COLUMN_SUMS = Pass("column_sums", takes=(*QKV, "lse", "lse_low", "weights"), gives=("column_sums",))
PASSES = {pass_.name: pass_ for pass_ in (FORWARD, BACKWARD, TANGENT, BACKWARD_TANGENT, LAPLACIAN)}
ARRAYS: dict[str, Callable[[Problem], Any]] = {  # shape and dtype, of arrays that follow from the problem
    "q": lambda problem: (problem.shapes[0], problem.dtype),
    "k": lambda problem: (problem.shapes[1], problem.dtype),
    "v": lambda problem: (problem.shapes[2], problem.dtype),
    "o": lambda problem: (problem.out_shape, problem.result_dtype),
    "do": lambda problem: (problem.out_shape, problem.dtype),
    "lse": lambda problem: (problem.lse_shape, problem.sum_dtype),
    "lse_low": lambda problem: (problem.lse_shape, problem.sum_dtype),  # what rounding took from it
    "row_max": lambda problem: (problem.lse_shape, problem.sum_dtype),
    "entropy": lambda problem: (problem.lse_shape, problem.sum_dtype),
    "column_sums": lambda problem: ((*problem.batch, problem.seqlen_k), problem.sum_dtype),
    "dq": lambda problem: (problem.shapes[0], problem.result_dtype),
    "dk": lambda problem: (problem.shapes[1], problem.result_dtype),
    "dv": lambda problem: (problem.shapes[2], problem.result_dtype),
    "o2": lambda problem: (problem.out_shape, problem.sum_dtype),
}
ARRAYS |= {f"t{name}": about for name, about in ARRAYS.items() if name != "do"}  # tangents are alike


# ------------------------------------------------------------------------------------------------------------- running
def run_pass(
    pass_: Pass, problem: Problem, inputs: Inputs, given: dict[str, Any], tangents: Tangents | None = None,
    deterministic: bool = False, whole: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The results of a pass by name, those of parts of the score by `gradient_of_part`.

    given: the arrays that it takes, by name, but for q, k, v and their tangents; None is zero. With tangents it is run
    along each: arrays named t..., and all results but those in SAVED, have their axis in front. whole: see `Saved`.
    """

    def in_boxes(call: Ordered) -> dict[str, Any]:
        arrays, along = call.of_arrays(given), call.of_tangents(tangents)
        return run_pass(pass_, call.problem, call.inputs, arrays, along, deterministic, whole)

    if inputs.mask._windows is not None:
        order, found = computed_in_order(problem, inputs, in_boxes)
        if order is not None:
            return order.back(found)
        inputs = as_it_is(problem, inputs)
    if tangents is not None:
        given = given | {"tq": tangents.q, "tk": tangents.k, "tv": tangents.v}
    results: dict[str, Any] = run("run", problem, pass_, inputs, given, tangents, deterministic, whole)
    return results


def forward(
    problem: Problem, inputs: Inputs, out: Any = None, save: bool = True, onto: tuple[Any, Any] | None = None
) -> tuple[Any, Any]:  # fmt: skip
    """o, in `out` if given, and what the backward pass needs, or None unless `save`.

    onto: o and lse over other keys, in the dtype of sums, that these are added to: lse in place, and o, too, if it
    is `out`.
    """
    if inputs.mask._windows is not None:
        order, found = computed_in_order(problem, inputs, lambda call: forward(call.problem, call.inputs, None, save))
        if order is not None:
            o, saved = found
            return order.saved(problem, inputs, o, saved, out)
        inputs = as_it_is(problem, inputs)
    results: tuple[Any, Any] = run("forward", problem, inputs, out, save, onto)
    return results


def backward(saved: Saved[Any], do: Any, dlse: Any = None, deterministic: bool = False) -> Gradients[Any]:
    """The Gradients."""
    given = {"o": saved.o, "lse": saved.lse, "lse_low": saved.lse_low, "do": do, "dlse": dlse}
    found = run_pass(BACKWARD, saved.problem, saved.inputs, given, None, deterministic, saved.whole)
    return _gradients(BACKWARD, saved, given, found)


@np.errstate(under="ignore")
def weights(problem: Problem, inputs: Inputs) -> Any:
    """P as it multiplies v, of a call without a v: the gradient of lse by S, and so by a Bias that is the last part."""
    q, k, v = inputs[:3]
    if inputs.cache is not None:  # numbers of 8 bits times their scales have more digits than 16 bits hold
        q, k = (rounded(x, problem.sum_dtype) for x in (q, inputs.cache._dense()[0]))
        v = k[..., :0]
    bias = Bias(np.broadcast_to(np.zeros((), problem.dtype, like=q), problem.score_shape))
    score = [*[part._asking((False,) * len(part._weights)) for part in inputs.score], bias]
    o, saved = forward(*describe(q, k, v, mask=inputs.mask, scale=inputs.scale, score=score))
    P: Any = backward(saved, np.zeros_like(o), np.ones_like(saved.lse)).score[-1]
    if inputs.dropout is not None:
        P *= np.asarray(dropout_mask(inputs.dropout, P.shape) * inputs.dropout.scale, P.dtype, like=P)
    return P


def tangent(problem: Problem, inputs: Inputs, tangents: Tangents) -> tuple[Saved[Any], Any, Any]:
    """What is saved of the forward pass, and to and tlse for all Tangents, their axis in front."""
    found = run_pass(TANGENT, problem, inputs, {}, tangents)
    return Saved(problem, inputs, found["o"], found["lse"], found.get("lse_low")), found["to"], found["tlse"]


def laplacian(
    problem: Problem, inputs: Inputs, tangents: Tangents, laplacians: Tangents, particles: Particles | None = None
) -> tuple[Any, Any, Any]:  # fmt: skip
    """o, to for all Tangents, and the Laplacian of o; laplacians: of q, k and v, as Tangents in one direction.

    particles: whose coordinates the Tangents are along, each those of all of them at once.
    """
    if particles is None:
        found = run_pass(LAPLACIAN, problem, inputs, {}, tangents)
    else:
        inputs, tangents = as_it_is(problem, inputs), particles.own(tangents)
        found = run_pass(PARTICLE_LAPLACIAN, problem, inputs, {"particles": particles}, tangents)
    lo = found["o2"].sum(axis=0) if len(found["o2"]) > 1 else found["o2"][0, ...]
    for number in range(tangents.count):
        for part, tpart in zip(inputs.score, parts_of(inputs, tangents, number)):
            if tpart is not None and not part._has_step:  # a sink's logit bends its own share of P alone
                bent = cast(Sink, part)._share(found["lse"]) * tpart._logits(found["lse"]) ** 2
                lo -= bent[..., None] * rounded(found["o"], lo.dtype)
    if any(x is not None for x in (*laplacians[:3], *laplacians.score)):
        _, (more,), _ = tangent(replace(problem, wide=True), inputs, laplacians)
        lo += more
    return found["o"], found["to"], rounded(lo, problem.result_dtype)


def backward_tangent(
    saved: Saved[Any], do: Any, dlse: Any, tangents: Tangents, to: Any, tlse: Any, tdo: Any = None, tdlse: Any = None,
    deterministic: bool = False,
) -> Gradients[Any]:  # fmt: skip
    """The tangents of the Gradients, with the axis of the Tangents in front, as in to, tlse, tdo and tdlse."""
    given = {"o": saved.o, "lse": saved.lse, "lse_low": saved.lse_low, "do": do, "dlse": dlse,
             "to": to, "tlse": tlse, "tdo": tdo, "tdlse": tdlse}  # fmt: skip
    problem, inputs = saved.problem, saved.inputs
    found = run_pass(BACKWARD_TANGENT, problem, inputs, given, tangents, deterministic, saved.whole)
    return _gradients(BACKWARD_TANGENT, saved, given, found, tangents)


def _gradients(
    pass_: Pass, saved: Saved[Any], given: dict[str, Any], found: dict[str, Any], tangents: Tangents | None = None
) -> Gradients[Any]:  # fmt: skip
    """The Gradients, or their tangents, from the arrays that a pass was given and its results."""
    of_score: list[Any] = []
    lead = () if tangents is None else (tangents.count,)
    for number, part in enumerate(saved.inputs.score):
        dx = found.get(gradient_of_part(number))
        if dx is None and part._wants_gradient:  # of a sink, unless kernels sum it
            dx = _gradient_of_sink(saved, number, given, tangents)
        for grad, x in zip(part._gradients(dx, lead), part._weights):
            of_score.append(grad if grad is None or saved.problem.wide else rounded(grad, x.dtype))
    dq, dk, dv = map(found.__getitem__, pass_.gives)
    return Gradients(dq, dk, dv, tuple(of_score))


@np.errstate(under="ignore")
def _gradient_of_sink(saved: Saved[Any], number: int, given: dict[str, Any], tangents: Tangents | None) -> Any:
    """-rowsum(P D), P that of the sink, score part `number`; or the tangents of that."""
    sink: Any = saved.inputs.score[number]
    lse: Any = saved.lse
    wide: list[Any] = [None if x is None else x.astype(lse.dtype, copy=False)
                       for x in map(given.get, ("do", "o", "to", "tdo"))]  # fmt: skip
    do, o, to, tdo = wide
    D = rowsum(do, o)
    if given["dlse"] is not None:
        D -= given["dlse"]
    if tangents is None:
        return sink._gradient(None, lse, saved._exactly(D))
    D = np.where(np.isfinite(lse), D, 0)  # dlse may be anything where a query sees nothing
    found = np.empty((tangents.count, *sink._array.shape), lse.dtype, like=lse)
    for which in range(tangents.count):
        tD = rowsum(do, to[which])
        if tdo is not None:
            tD += rowsum(tdo[which], o)
        if given["tdlse"] is not None:
            tD -= given["tdlse"][which]
        tangent = parts_of(saved.inputs, tangents, which)[number]
        logits = 0 if tangent is None else tangent._logits(lse)
        delta = saved._exactly((logits - given["tlse"][which]) * D + tD)
        put(found[which, ...], sink._gradient(None, lse, delta))
    return found

"""The passes, on NumPy or CuPy arrays, and their results."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np

from ...base.gradients import Gradients
from ...call.particles import checked_particles
from ...call.tangents import Tangents
from ...dropout import Dropout
from .operands import How, Operands, Pass, Results


def forward(x: Operands, how: How) -> Results:
    o, saved = how.options.functions.forward(x.q, x.k, x.v, **_given(x, how))
    return (o, saved.lse) if how.with_lse else (o,)


def tangent(x: Operands, how: How) -> Results:
    t: Any = x.tangents
    of = how.options.functions.tangent
    found: Results = of(x.q, x.k, x.v, x.o, x.lse, t.q, t.k, t.v, tscore=t.score, **_given(x, how))
    return found


def backward(x: Operands, how: How) -> Results:
    functions = how.options.functions
    saved = functions.saved(x.q, x.k, x.v, x.o, x.lse, **_given(x, how))
    return _wanted(functions.backward(x.do, saved, dlse=x.dlse, deterministic=how.deterministic), how)


def hessian(x: Operands, how: How) -> Results:
    """The Hessian of <do, o> + <dlse, lse>, also with respect to do and dlse, times tangents: a symmetric matrix."""
    _, to, saved, tsaved = _forward_tangent(x, how)
    along = how.options.functions.tangents_of_gradients
    tgrads = along(x.do, saved, tsaved, x.tdo, x.dlse, x.tdlse, how.deterministic)
    return *_wanted(tgrads, how), to, tsaved.tlse


def laplacian(x: Operands, how: How) -> Results:
    """o, its tangents and its Laplacian, from the tangents of all arrays and, in `second`, their Laplacians."""
    (*t, jscore), (*second, lscore) = cast(Any, (x.tangents, x.second))
    found: Results = how.options.functions.laplacian(
        x.q, x.k, x.v, *t, *second, jscore=jscore, lscore=lscore, **_particle(how), **_given(x, how)
    )
    return found


def second_tangent(x: Operands, how: How) -> Results:
    """The tangent of `tangent`, which does not exist; its transpose is a `hessian`."""
    raise NotImplementedError("a tangent of a tangent of attention, as in jvp of jvp: of second derivatives there are "
                              "jvp of grad, grad of jvp and grad of grad; for folx, whose Laplacian is one pass, call "
                              "numbattn.interop.jax.register_folx() before tracing")  # fmt: skip


def _forward_tangent(x: Operands, how: How) -> Any:
    t: Any = x.tangents
    forward_jvp = how.options.functions.forward_jvp
    return forward_jvp(x.q, x.k, x.v, t.q, t.k, t.v, tscore=t.score, **_given(x, how))


def _given(x: Operands, how: How) -> dict[str, Any]:
    """The options as numbattn's functions take them."""
    given = how.options.given(x.arrays)
    if x.seed is not None:
        low, high = map(int, x.seed)
        given["dropout"] = Dropout(given["dropout"].p, low | high << 32, int(x.offset))
    return given


def _particle(how: How) -> dict[str, Any]:
    """What says which particle moves which rows, if any does."""
    return {} if how.particle is None else {"particle": tuple(map(list, how.particle))}


def _wanted(grads: Gradients[Any], how: How) -> Results:
    return *grads, *(x for x, wanted in zip(grads.score, how.options.wanted) if wanted)


def run(compute: Pass, x: Operands, how: How) -> Results:
    """A pass, or one for each element of the axes in front."""
    if not how.loops:
        return compute(x, how)
    found = [np.empty(like.shape, like.dtype, like=x.q) for like in results_of(compute, x, how)]
    for index in np.ndindex(x.q.shape[: how.loops]):
        one = jax.tree.map(lambda a, index=index: a[index], x)
        for whole, result in zip(found, compute(one, how._replace(loops=0))):
            whole[index] = result
    return found


def results_of(compute: Pass, x: Operands, how: How) -> list[Any]:
    """The shapes and dtypes of a pass's results."""
    if compute in (forward, laplacian):
        return _results_by_inputs(compute, x, how)
    weights = [x.arrays[i] for i, wanted in zip(how.options.weights, how.options.wanted) if wanted]
    ends, starts = (x.o, x.lse), (x.q, x.k, x.v, *weights)
    likes = {tangent: ends, second_tangent: ends, backward: starts, hessian: (*starts, *ends)}[compute]
    loops, count = how.loops, ()
    if how.several:
        count = jax.tree.leaves(x.tangents)[0].shape[loops : loops + 1]
    return [jax.ShapeDtypeStruct((*a.shape[:loops], *count, *a.shape[loops:]), a.dtype) for a in likes]


def _results_by_inputs(compute: Pass, x: Operands, how: How) -> list[Any]:
    """The shapes and dtypes of the results of the forward pass or the Laplacian. Refuses what does not fit, before the
    elements of arrays are known."""
    lead = x.q.shape[: how.loops]
    x = jax.tree.map(lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape[how.loops :]), x)
    problem, inputs = how.options.functions.describe(x.q, x.k, x.v, **_given(x, how), may_wait=True)
    o = jax.ShapeDtypeStruct((*lead, *problem.out_shape), problem.dtype)
    if compute is laplacian:
        count = how.options.functions.coordinates(inputs, x.tangents, x.second)
        if how.particle is not None:
            given = _particle(how)["particle"]
            count *= checked_particles(given, problem, inputs, Tangents(*cast(Any, x.tangents))).total
        return [o, jax.ShapeDtypeStruct((*lead, count, *problem.out_shape), o.dtype), o]
    lse = jax.ShapeDtypeStruct((*lead, *problem.lse_shape), problem.sum_dtype)
    return [o, lse] if how.with_lse else [o]


def leads_of(compute: Pass, how: How, results: Results) -> list[int]:
    """How many axes of tangents each result has in front."""
    return [0, 1, 0] if compute is laplacian else [int(how.several)] * len(results)

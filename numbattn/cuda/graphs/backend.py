"""The backend for attention over the edges of graphs on CuPy arrays, see `numbattn.graphs.passes`."""

import math

import numpy as np

from ...base.gradients import sum_to
from ...graphs.problem import AXES
from ..kernel import launch
from ..kernels.shared.layouts import sum_type
from ..tile.alignment import alignment_of
from .backward import backward as backward_kernel
from .backward import delta as delta_kernel
from .forward import forward as forward_kernel
from .forward import tangent as tangent_kernel
from .steps import THREADS, Arrays, EdgeSteps, Form, Lists


def forward(problem, inputs, out=None):
    """o, and lse or None."""
    o = np.empty(problem.out_shape, problem.dtype, like=inputs.q) if out is None else out
    lse = np.empty(problem.lse_shape, problem.sum_dtype, like=inputs.q)
    arrays, mO, mLse = arrays_of(problem, inputs.arrays), in_heads(problem, o), in_heads(problem, lse)
    form = form_of(problem, [*features(arrays), mO])
    given = arrays, mO, mLse, scale_of(inputs)
    start(forward_kernel(form), form, problem, inputs.graph._by_query, problem.heads, *given)
    return o, lse if problem.softmax else None


def tangent(problem, inputs, moving, o, lse):
    """to and tlse, o and lse being known."""
    to = np.empty(problem.out_shape, problem.dtype, like=inputs.q)
    tlse = np.empty(problem.lse_shape, problem.sum_dtype, like=inputs.q)
    arrays, moved = arrays_of(problem, inputs.arrays), moved_of(problem, inputs, moving.arrays)
    rows = [in_heads(problem, x) for x in (o, tlse if lse is None else lse, to, tlse)]
    form = form_of(problem, [*features(arrays), *features(moved), rows[0], rows[2]])
    start(tangent_kernel(form), form, problem, inputs.graph._by_query, problem.heads, arrays, moved, *rows,
          scale_of(inputs))  # fmt: skip
    return to, tlse if problem.softmax else None


def backward(problem, inputs, do, o, lse, dlse):
    """The gradients of all arrays, by name."""
    statistics = (lse, delta(problem, ((do, o),), dlse)) if problem.softmax else ()
    return _backward(problem, inputs, do, None, statistics)


def backward_tangent(problem, inputs, moving, do, o, lse, dlse, to, tlse, tdo, tdlse):
    """The tangents of the gradients of all arrays, by name."""
    statistics = ()
    if problem.softmax:
        D = delta(problem, ((do, o),), dlse)
        statistics = lse, D, tlse, delta(problem, ((do, to), *([] if tdo is None else [(tdo, o)])), tdlse)
    return _backward(problem, inputs, do, {**moving.arrays, **({} if tdo is None else {"do": tdo})}, statistics)


def delta(problem, pairs, gradient):
    """D = rowsum(do o) - dlse, or its tangent, of one or two pairs of factors."""
    found = np.empty(problem.lse_shape, problem.sum_dtype, like=pairs[0][0])
    pairs = tuple([tuple([in_heads(problem, x) for x in pair]) for pair in pairs])
    gradients = () if gradient is None else (in_heads(problem, gradient),)
    form = form_of(problem, [x for pair in pairs for x in pair])
    rows = -(-problem.seqlen_q // EdgeSteps(form).V.rows.size)
    kernel = delta_kernel(form, len(pairs), bool(gradients))
    launch(kernel, (rows * problem.matrices[0] * problem.heads, 1, 1), THREADS, 0, pairs, gradients,
           in_heads(problem, found))  # fmt: skip
    return found


def _backward(problem, inputs, do, moved, statistics):
    arrays = arrays_of(problem, {**inputs.arrays, "do": do})
    moves = () if moved is None else moved_of(problem, inputs, {"do": None, **moved}, do)
    results = {name: empty_results(problem, name, x) for name, x in inputs.arrays.items()}
    sums = arrays_of(problem, results)
    statistics = tuple([in_heads(problem, x) for x in statistics])
    form = form_of(problem, [*features(arrays), *features(moves), *features(sums)], moved is not None)
    for lists, heads, by_key in ((inputs.graph._by_query, problem.heads, False),
                                 (inputs.graph._by_key, problem.heads_k, True)):  # fmt: skip
        start(backward_kernel(form, by_key), form, problem, lists, heads, arrays, moves, statistics, sums,
              scale_of(inputs))  # fmt: skip
    return {name: summed(problem, results[name], x) for name, x in inputs.arrays.items()}


# ---------------------------------------------------------------------------------------------------------- arguments
def start(kernel, form, problem, lists, heads, *arguments):
    """Launch a kernel for all rows of lists, of so many heads. Rows vary fastest: those of a head share keys."""
    starts, others, numbers = lists
    lists = Lists(starts, others, () if numbers is None else (numbers,))
    tiles = -(-(len(starts) - 1) // EdgeSteps(form).V.rows.size)
    launch(kernel, (tiles * problem.matrices[0] * heads, 1, 1), THREADS, 0, lists, *arguments)


def form_of(problem, arrays, moves=False):
    """The Form of a call. arrays: those whose rows of features are moved."""
    nbytes = min(map(alignment_of, arrays))
    return Form(problem.dtype, problem.head_dim, problem.head_dim_v, problem.given, problem.softmax, nbytes, moves)


def scale_of(inputs):
    return sum_type(inputs.q.dtype)(inputs.scale)


def features(arrays):
    """Those of these Arrays that are rows of features."""
    if not arrays:
        return []
    return [x for x in (arrays.q, arrays.k, arrays.v, arrays.do, *arrays.k_edge, *arrays.v_edge) if len(x)]


def arrays_of(problem, arrays):
    """The Arrays of a call by name, with all heads: those of keys may be fewer."""
    found = {name: with_heads(problem, x, AXES.get(name, 2), problem.heads_k if name in "kv" else problem.heads)
             for name, x in arrays.items()}  # fmt: skip
    return Arrays(**{name: (x,) if name in AXES else x for name, x in found.items()})


def moved_of(problem, inputs, moved, do=None):
    """The Arrays of tangents; one that is not given is zeros, a row of which is all there is in memory."""
    given = inputs.arrays if do is None else {**inputs.arrays, "do": do}
    found = {}
    for name, x in given.items():
        tangent = moved.get(name)
        if tangent is None:
            own = x.shape[-1:] if AXES.get(name, 2) == 2 else ()
            tangent = np.broadcast_to(np.zeros(own, x.dtype, like=x), x.shape)
        found[name] = tangent
    return arrays_of(problem, found)


def with_heads(problem, x, own, heads):
    """x as (batch, heads, *own axes), a view where there is one."""
    own_shape = x.shape[x.ndim - own :]
    if math.prod(x.shape[: x.ndim - own]) != problem.matrices[0] * heads:
        x = np.broadcast_to(x, (*problem.batch[:-1], heads, *own_shape))
    return x.reshape(problem.matrices[0], heads, *own_shape)


def in_heads(problem, x):
    """An array with all batch axes, (batch, heads, rows) or (batch, heads, rows, features)."""
    axes = len(problem.batch)
    return x.reshape(*problem.matrices, *x.shape[axes:])


def empty_results(problem, name, x):
    """Memory for a gradient with all batch axes, in the dtype of sums if some of them are still to be summed."""
    own, heads = AXES.get(name, 2), problem.heads_k if name in "kv" else problem.heads
    lead = (*problem.batch[:-1], heads) if problem.batch else ()
    shape = *lead, *x.shape[x.ndim - own :]
    return np.empty(shape, problem.dtype if x.size == math.prod(shape) else problem.sum_dtype, like=x)


def summed(problem, found, x):
    """A gradient of x, summed over the axes along which x is broadcast."""
    if found.size == x.size:
        return found.reshape(x.shape)
    if found.ndim - len(problem.batch) == 1:
        return sum_to(found[..., None], (*x.shape, 1))[..., 0].astype(x.dtype)
    return sum_to(found, x.shape).astype(x.dtype)

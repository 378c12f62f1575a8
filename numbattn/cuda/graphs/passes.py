"""Attention over the edges of graphs by the kernels for a GPU, see `numbattn.graphs.passes`."""

import math

import numpy as np

from ...base.checks import UserValueError
from ...base.gradients import sum_to
from ...base.values import rounded, sum_broadcast
from ...functions.compiled import chain
from ...functions.compiled.errors import naming
from ...graphs import graph
from ...graphs.problem import AXES
from ...graphs.score import elements_of, given_of, gradients_of, links_of
from ..compiler import from_dtype
from ..kernel import run, type_of
from ..kernels.shared import exact_sums
from ..kernels.shared.layouts import sum_type
from ..tile.alignment import alignment_of
from .backward import backward as backward_kernel
from .backward import delta as delta_kernel
from .forward import forward as forward_kernel
from .forward import tangent as tangent_kernel
from .steps import THREADS, Arrays, Drops, Form, Lists, rows_of_block


class GraphBackend:
    """The backend. `current` returns the GPU of a call, normally a launch.GPU."""

    def __init__(self, current):
        self.current = current

    def forward(self, problem, inputs, out=None):
        """o, and lse or None."""
        gpu, is_view = self.current(), out is not None and len(problem.batch) <= 2
        o = out if is_view else gpu.empty(problem.out_shape, problem.result_dtype)
        lse = gpu.empty(problem.lse_shape, problem.sum_dtype)
        arrays, mO, mLse = arrays_of(problem, inputs.arrays), in_heads(problem, o), in_heads(problem, lse)
        form = form_of(problem, [*features(arrays), mO])
        form, numbers = with_score(form, problem, inputs, 0)
        given = arrays, mO, mLse, *numbers
        self.over_rows(inputs.graph, "_by_query", form, forward_kernel(form), matrices(problem), *given)
        if out is not None and not is_view:                     # whose batch axes may be no single one
            out[...] = o
            o = out
        return o, lse if problem.softmax else None

    def laplacian(self, problem, inputs, moving, o, lse):
        """to and tlse, and the second derivative of o plus 2 tlse to."""
        o2 = self.current().empty(problem.out_shape, problem.sum_dtype)
        return *self.tangent(problem, inputs, moving, o, lse, (o2,)), o2

    def tangent(self, problem, inputs, moving, o, lse, o2=()):
        """to and tlse, o and lse being known; o2: (where to put what `laplacian` says,)."""
        gpu = self.current()
        to, tlse = gpu.empty(problem.out_shape, problem.result_dtype), gpu.empty(problem.lse_shape, problem.sum_dtype)
        arrays, moved = arrays_of(problem, inputs.arrays), self.moved(problem, inputs.arrays, moving.arrays)
        rows = [in_heads(problem, x) for x in (o, tlse if lse is None else lse, to, tlse)]
        second = [in_heads(problem, x) for x in o2]
        form = form_of(problem, [*features(arrays), *features(moved), rows[0], rows[2], *second])
        form, numbers = with_score(form, problem, inputs, 2 + len(o2), moving.score)
        given, kernel = (arrays, moved, *rows, *(second or [()]), *numbers), tangent_kernel(form, bool(o2))
        self.over_rows(inputs.graph, "_by_query", form, kernel, matrices(problem), *given)
        return to, tlse if problem.softmax else None

    def backward(self, problem, inputs, do, o, lse, dlse):
        """The gradients of all arrays, by name."""
        statistics = self.delta(problem, ((((do, o),), dlse, lse),)) if problem.softmax else ()
        return self.gradients(problem, inputs, do, None, statistics)

    def backward_tangent(self, problem, inputs, moving, do, o, lse, dlse, to, tlse, tdo, tdlse):
        """The tangents of the gradients of all arrays, by name."""
        moved, statistics = moving.arrays if tdo is None else {**moving.arrays, "do": tdo}, ()
        if problem.softmax:
            pairs = ((do, to),) if tdo is None else ((do, to), (tdo, o))
            statistics = self.delta(problem, ((((do, o),), dlse, lse), (pairs, tdlse, tlse)))
        return self.gradients(problem, inputs, do, moved, statistics, moving.score)

    def delta(self, problem, given):
        """lse and D = rowsum(do o) - dlse, and likewise their tangents, side by side; given: pairs of factors, a
        gradient of lse or None, and lse, or the tangents of these."""
        gpu, shape = self.current(), (*problem.lse_shape, 2 * len(given))
        with self.scratch_memory():
            found = in_heads(problem, gpu.empty(shape, problem.sum_dtype))
        statistics = [found[..., number] for number in range(2 * len(given))]
        for number, (pairs, gradient, lse) in enumerate(given):
            pairs = tuple([tuple([in_heads(problem, x) for x in pair]) for pair in pairs])
            gradients = () if gradient is None else (in_heads(problem, gradient),)
            form = form_of(problem, [x for pair in pairs for x in pair])
            kernel, blocks = delta_kernel(form, len(pairs), bool(gradients)), tiles_of(form, problem.seqlen_q)
            self.start(kernel, blocks * matrices(problem), pairs, gradients, in_heads(problem, lse),
                       *statistics[2 * number : 2 * number + 2])  # fmt: skip
        return tuple(statistics)

    def gradients(self, problem, inputs, do, moved, statistics, moving=()):
        """The gradients of all arrays, or their tangents if there are tangents, `moved`, by name."""
        given, count = {**inputs.arrays, "do": do}, matrices(problem)
        arrays, moves = arrays_of(problem, given), () if moved is None else self.moved(problem, given, moved)
        adds = any(math.prod(x.shape[: x.ndim - AXES[name]]) != count
                   for name, x in inputs.of_edges._asdict().items() if x is not None)  # fmt: skip
        shapes = {name: shape_of_result(problem, name, x, adds) for name, x in inputs.arrays.items()}
        results = {name: result_of(problem, name, x, shapes[name], adds) for name, x in inputs.arrays.items()
                   if shapes[name] == x.shape}  # fmt: skip
        with self.scratch_memory():
            results |= {name: result_of(problem, name, x, shapes[name], adds) for name, x in inputs.arrays.items()
                        if shapes[name] != x.shape}  # fmt: skip
        sums = arrays_of(problem, results)
        form = form_of(problem, [*features(arrays), *features(moves), *features(sums)], moved is not None)
        form, numbers = with_score(form, problem, inputs, 1 if moved is None else 2, moving, True)
        with self.scratch_memory():
            elements = sum(map(elements_of, inputs.score))
            reads = np.zeros_like(inputs.q, np.int64, shape=(elements * exact_sums.SIZE,))     # CuPy takes 0 for none
        together, group = count if adds else 1, problem.group_size
        rest = arrays, moves, statistics, sums, *numbers, reads if elements else ()
        by_query, by_key = backward_kernel(form, False, adds), backward_kernel(form, True)
        self.over_rows(inputs.graph, "_by_query", form, by_query, count // together, *rest, np.int32(together))
        self.over_rows(inputs.graph, "_by_key", form, by_key, count // group, *rest, np.int32(group))
        found = {name: summed(name, results[name], x) for name, x in inputs.arrays.items()}
        return found | {"score": gradients_of(inputs.score, exact_sums.rounded(reads))}

    def moved(self, problem, arrays, moved):
        """The Arrays of tangents; one that is not given is zeros, a row of which is all there is in memory."""
        found = {}
        for name, x in arrays.items():
            with self.scratch_memory():
                zeros = np.zeros(x.shape[-1:] if AXES.get(name, 2) == 2 else (), x.dtype, like=x)
            found[name] = moved[name] if name in moved else np.broadcast_to(zeros, x.shape)
        return arrays_of(problem, found)

    def scratch_memory(self):
        """Inside, CuPy's arrays are temporary: in a capture they belong to the CUDA graph."""
        gpu = self.current()
        return gpu.scratch_memory(gpu.stream().is_capturing())

    def over_rows(self, of, name, form, kernel, count, *arguments):
        """Start a kernel for all rows of a Graph's lists of this name, and so many matrices. Rows vary fastest: those
        of a head share keys."""
        if name not in vars(of) and self.current().stream().is_capturing():
            raise UserValueError("graph: its lists are made when it is first used, which a capture of a CUDA graph is "
                                 "too late for: call the function once before")  # fmt: skip
        lists = getattr(of, name)
        longest, numbers = lists.longest, () if lists.numbers is None else (lists.numbers,)
        blocks = (tiles_of(form, len(lists.starts) - 1) + len(longest)) * count
        lists = Lists(lists.starts, lists.others, numbers, longest, np.int32(graph.LONG))
        self.start(kernel, blocks, lists, *arguments)

    def start(self, kernel, blocks, *arguments):
        run(self.current(), kernel.function, (blocks, 1, 1), THREADS, kernel.nbytes, arguments, kernel.blocks)


# ---------------------------------------------------------------------------------------------------------- arguments
def tiles_of(form, count):
    """Blocks for so many rows."""
    return -(-count // rows_of_block(form))


def matrices(problem):
    return math.prod(problem.matrices)


def form_of(problem, arrays, moves=False):
    """The Form of a call. arrays: those whose rows of features are moved."""
    nbytes = min(map(alignment_of, arrays))
    return Form(problem.dtype, problem.head_dim, problem.head_dim_v, problem.given, problem.softmax, nbytes,
                problem.dropout, moves)  # fmt: skip


def with_score(form, problem, inputs, order, moving=(), gradients=False):
    """A Form with the score, and of dropout, if there is any, and of the score what kernels take, and the scale. order,
    moving, gradients: see `chain.check_all` and `given_of`."""
    links, real = links_of(inputs.score, problem.sum_dtype), sum_type(problem.dtype)
    given = given_of(inputs.score, real, problem.sum_dtype, moving if order > 1 else None)
    if links:
        with naming(*[part._function for part in inputs.score if hasattr(part, "_function")]):
            chain.check_all(links, type_of(given), from_dtype(problem.sum_dtype), order, gradients)
    drops, scale = numbers_of(inputs)
    return form._replace(score=links), (drops, given, scale)


def numbers_of(inputs):
    """Of dropout, if there is any, and the scale."""
    real, drops = sum_type(inputs.q.dtype), ()
    if inputs.dropout is not None:
        threshold, *others = inputs.dropout._numbers
        drops = Drops(np.uint32(threshold), *map(np.uint64, others), real(inputs.dropout.scale))
    return drops, real(inputs.scale)


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


def with_heads(problem, x, own, heads):
    """x as (batch, heads, *own axes), a view where there is one."""
    own_shape = x.shape[x.ndim - own :]
    if math.prod(x.shape[: x.ndim - own]) != problem.matrices[0] * heads:
        x = np.broadcast_to(x, (*problem.batch[:-1], heads, *own_shape))
    return with_columns(x.reshape(problem.matrices[0], heads, *own_shape))


def in_heads(problem, x):
    """An array with all batch axes, (batch, heads, rows) or (batch, heads, rows, features)."""
    axes = len(problem.batch)
    return with_columns(x.reshape(*problem.matrices, *x.shape[axes:]))


def with_columns(x):
    """x, with a column of zeros if it has none: kernels read some memory in any case."""
    return x if x.shape[-1] else np.zeros((*x.shape[:-1], 1), x.dtype, like=x)


def shape_of_result(problem, name, x, adds):
    """Of memory for a gradient of x: for nodes with all batch axes; for edges, if matrices add to it, with the axes of
    x, or with all where those make no (batch, heads). What x lacks is still to be summed."""
    if name not in AXES:
        heads = problem.heads_k if name in "kv" else problem.heads
        shape = *problem.batch[:-1], *[heads] * bool(problem.batch), *x.shape[-2:]
        return x.shape if x.size == math.prod(shape) else shape
    if not adds:
        return x.shape
    own, axes = x.ndim - AXES[name], len(problem.batch)
    *batch, heads = *(1,) * (axes - own), *x.shape[:own]
    if math.prod(batch) in (1, math.prod(problem.batch[:-1])):
        return x.shape
    return *problem.batch[:-1], heads, *x.shape[own:]


def result_of(problem, name, x, shape, adds):
    """That memory, zeros if matrices add to it; in the dtype of sums where there is something to be summed."""
    adds = adds and name in AXES
    dtype = problem.sum_dtype if adds or shape != x.shape else problem.dtype
    return (np.zeros if adds else np.empty)(shape, dtype, like=x)


def summed(name, found, x):
    """A gradient of x, summed over the axes along which x is broadcast."""
    if found.size == x.size:
        found = found.reshape(x.shape)
    else:
        found = (sum_broadcast if name in AXES else sum_to)(found, x.shape)
    return rounded(found, x.dtype)

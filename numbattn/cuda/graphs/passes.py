"""Attention over the edges of graphs by the kernels for a GPU, see `numbattn.graphs.passes`."""

import math
from functools import lru_cache

from ...base.checks import UserValueError
from ...base.gradients import sum_to
from ...base.values import rounded, sum_broadcast
from ...functions.compiled.errors import naming
from ...graphs.problem import AXES
from ...graphs.score import given_of, links_of
from ...scores.softcap import Softcap
from ..kernels.shared.layouts import sum_type
from ..passes import launch
from ..tile.alignment import layout_of
from ..words.numbers import MaskNumbers, OriginNumbers, numbers_of
from .plan import KEY, LISTS, QUERY, Lowered, LoweredPart, Planner, apart

LISTS_OF = {QUERY: "_by_query", KEY: "_by_key"}
NO_MASK, NO_ORIGIN = MaskNumbers(*[0] * 8), OriginNumbers(*[0] * 5)


class GraphBackend:
    """The backend. `current` returns the GPU of a call, normally a launch.GPU."""

    def __init__(self, current):
        self.current = current

    def forward(self, problem, inputs, out=None):
        """o, and lse or None."""
        gpu = self.current()
        o = gpu.empty(problem.out_shape, problem.result_dtype) if out is None else out
        lse = gpu.empty(problem.lse_shape, problem.sum_dtype)
        self.launch("forward", problem, inputs, inputs.arrays, {"o": o, "lse": lse})
        return o, lse if problem.softmax else None

    def laplacian(self, problem, inputs, moving, o, lse):
        """to and tlse, and the second derivative of o plus 2 tlse to."""
        o2 = self.current().empty(problem.out_shape, problem.sum_dtype)
        return *self.tangent(problem, inputs, moving, o, lse, o2), o2

    def tangent(self, problem, inputs, moving, o, lse, o2=None):
        """to and tlse, o and lse being known; o2: where to put what `laplacian` says."""
        gpu = self.current()
        to, tlse = gpu.empty(problem.out_shape, problem.result_dtype), gpu.empty(problem.lse_shape, problem.sum_dtype)
        given = inputs.arrays | tangents_of(moving.arrays) | {"o": o, "lse": tlse if lse is None else lse}
        name, second = ("tangent", {}) if o2 is None else ("laplacian", {"o2": o2})
        self.launch(name, problem, inputs, given, {"to": to, "tlse": tlse, **second}, moving.score)
        return to, tlse if problem.softmax else None

    def backward(self, problem, inputs, do, o, lse, dlse):
        """The gradients of all arrays, by name."""
        return self.gradients("backward", problem, inputs, {"do": do, "o": o, "lse": lse, "dlse": dlse})

    def backward_tangent(self, problem, inputs, moving, do, o, lse, dlse, to, tlse, tdo, tdlse):
        """The tangents of the gradients of all arrays, by name."""
        rows = {"do": do, "o": o, "lse": lse, "dlse": dlse, "to": to, "tlse": tlse, "tdo": tdo, "tdlse": tdlse}
        return self.gradients("backward_tangent", problem, inputs, tangents_of(moving.arrays) | rows, moving.score)

    def gradients(self, name, problem, inputs, given, moving=None):
        arrays, gpu, results = inputs.arrays, self.current(), {}
        given = arrays | {name: x for name, x in given.items() if x is not None}
        about = results_of(problem, tuple([(name, x.shape) for name, x in arrays.items()]))
        for name_of, (shape, dtype, adds) in about.items():
            kept = shape == arrays[name_of].shape and dtype == problem.dtype
            with self.scratch_memory(not kept):
                results[f"d{name_of}"] = (gpu.zeros if adds else gpu.empty)(shape, dtype)
        of_score = {(number, at): gpu.empty(x.shape, x.dtype) if wanted else None
                    for number, part in enumerate(inputs.score)
                    for at, (x, wanted) in enumerate(zip(part._weights, part._wanted))}  # fmt: skip
        results |= {f"score {number} gradient {at}": x for (number, at), x in of_score.items() if x is not None}
        adds = any(adds for _, _, adds in about.values())
        self.launch(name, problem, inputs, given, results, moving, adds, gradients=True)
        found = {name: summed(name, results[f"d{name}"], x) for name, x in arrays.items()}
        return found | {"score": tuple(of_score.values())}

    def launch(self, name, problem, inputs, given, results, moving=None, adds=False, gradients=False):
        """Launch the kernels of a pass, which are planned if there is no plan yet. given, results: arrays by name."""
        gpu = self.current()
        stream = gpu.stream()
        capturing = stream.is_capturing()
        with gpu.scratch_memory(capturing and bool(inputs.score)):
            score, of_score = lowered_score(problem, inputs, moving, gradients)
        arrays = given | results | self.lists(inputs.graph, gradients, capturing) | of_score
        addresses, _ = gpu.addresses(arrays)
        layouts = [layout_of(x, address) for x, address in zip(arrays.values(), addresses)]
        key = name, problem, score, adds, tuple(arrays), tuple(layouts)
        program = gpu.programs.get(key)
        if program is None:
            lowered = Lowered(name, problem, dict(zip(arrays, layouts)), score, adds)
            if odd := apart(problem, lowered.layouts):
                return self.launch_apart(odd, name, problem, inputs, given, results, moving, adds, gradients)
            with naming(*[part._function for part in inputs.score if hasattr(part, "_function")]):
                plan = Planner(gpu.device, lowered).plan
            program = gpu.load(plan, tuple(arrays), problem.sum_dtype)
            gpu.keep(key, program)
        numbers = numbers_of(NO_MASK, inputs.dropout, NO_ORIGIN, inputs.scale)
        launch(gpu, program, arrays, addresses, numbers, problem, ())

    def launch_apart(self, odd, name, problem, inputs, given, results, *rest):
        """`launch` with copies of the arrays that kernels cannot take as they lie."""
        with self.scratch_memory():
            copies = {name: x.copy() for name, x in (given | results).items() if name in odd}
        given, whole = ({name: copies.get(name, x) for name, x in arrays.items()} for arrays in (given, results))
        self.launch(name, problem, inputs, given, whole, *rest)
        for name, x in results.items():
            if name in copies:
                x[...] = copies[name]

    def scratch_memory(self, temporary=True):
        """Inside, CuPy's arrays are temporary: in a capture they belong to the CUDA graph."""
        gpu = self.current()
        return gpu.scratch_memory(temporary and gpu.stream().is_capturing())

    def lists(self, graph, gradients, capturing):
        """The arrays of its lists of edges by name."""
        found = {}
        for end in (QUERY, KEY) if gradients else (QUERY,):
            if capturing and LISTS_OF[end] not in vars(graph):
                raise UserValueError("graph: its lists are made when it is first used, which a capture of a CUDA graph "
                                     "is too late for: call the function once before")  # fmt: skip
            lists = getattr(graph, LISTS_OF[end])
            arrays = lists.rows, lists.others, lists.numbers, *lists.parts
            found |= {f"{end} {name}": x for name, x in zip(LISTS, arrays) if x is not None}
        return found


# ---------------------------------------------------------------------------------------------------------- arguments
def tangents_of(arrays):
    return {f"t{name}": x for name, x in arrays.items()}


def lowered_score(problem, inputs, moving, gradients):
    """A LoweredPart for each part of the score, and the arrays of all by name."""
    if not inputs.score:
        return (), {}
    links = links_of(inputs.score, problem.sum_dtype)
    given = given_of(inputs.score, sum_type(problem.dtype), problem.sum_dtype, moving)
    parts, arrays = [], {}
    for number, (link, part, (own, along, first)) in enumerate(zip(links, inputs.score, given)):
        if isinstance(part, Softcap):
            parts.append(LoweredPart(link, numbers=own))
            continue
        arrays |= {f"score {number} array {at}": x for at, x in enumerate(own)}
        arrays |= {f"score {number} along": x for x in along}
        found, at_first = [], first
        for at, (x, wanted) in enumerate(zip(own, part._wanted)):
            if gradients and wanted:
                found.append((at, at_first, x.size))
                at_first += x.size
        parts.append(LoweredPart(link, (), len(own), first, tuple(found)))
    return tuple(parts), arrays


def shape_of_result(problem, name, shape, adds):
    """Of memory for a gradient of an array of this shape: for nodes with all batch axes; for edges, if matrices add to
    it, with its own axes, or with all where those make no (batch, heads). What it lacks is still to be summed."""
    if name not in AXES:
        heads = problem.heads_k if name in "kv" else problem.heads
        whole = *problem.batch[:-1], *[heads] * bool(problem.batch), *shape[-2:]
        return shape if math.prod(shape) == math.prod(whole) else whole
    if not adds:
        return shape
    own, axes = len(shape) - AXES[name], len(problem.batch)
    *batch, heads = *(1,) * (axes - own), *shape[:own]
    if math.prod(batch) in (1, math.prod(problem.batch[:-1])):
        return shape
    return *problem.batch[:-1], heads, *shape[own:]


@lru_cache(maxsize=256)
def results_of(problem, shapes):
    """Shape and dtype of memory for the gradient of each array, by name, and whether matrices add to it; in the dtype
    of sums where there is something to be summed."""
    count, found = math.prod(problem.matrices), {}
    any_adds = any(math.prod(shape[: len(shape) - AXES[name]]) != count for name, shape in shapes if name in AXES)
    for name, shape in shapes:
        whole, adds = shape_of_result(problem, name, shape, any_adds), any_adds and name in AXES
        found[name] = whole, problem.sum_dtype if adds or whole != shape else problem.dtype, adds
    return found


def summed(name, found, x):
    """A gradient of x, summed over the axes along which x is broadcast."""
    if found.size == x.size:
        found = found.reshape(x.shape)
    else:
        found = (sum_broadcast if name in AXES else sum_to)(found, x.shape)
    return rounded(found, x.dtype)

"""Attention on CuPy arrays: what a pass consists of, in order.

Everything happens on CuPy's current device and stream, in CuPy's memory, and nothing waits for the device: a call may
be captured in a CUDA graph. What follows from shapes, strides and kinds is planned once, see `run`.
"""

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..dual import naming
from ..intervals import Intervals, Prefix
from ..masks import AnyOf, Window, _clip, band_of
from ..problem import Gradients, Saved, describe, sum_to
from ..scores import Score
from ..values import sum_broadcast
from .kernels import BACKWARD, FORWARD
from .kernels.intervals import CLOSE, OPEN, OR
from .kernels.scores import CLASSES
from .kernels.shared.visibility import FARTHEST
from .plan.planner import plan
from .plan.spec import SIDES
from .plan.steps import (
    Call,
    Part,
    array_of_mask,
    gradient_of_part,
    sums_by_row,
    sums_of_part,
)
from .plan.views import VECTOR_BYTES, contiguous, layout_of

LOG2_E = math.log2(math.e)
NO_DROPS, EVERYWHERE = (0, 0, 0, 0), (-FARTHEST, FARTHEST)


class Passes:
    """The backend for arrays on GPUs. `current` returns the GPU of a call, normally a launch.GPU."""

    def __init__(self, current: Any, forward: Any = FORWARD, backward: Any = BACKWARD) -> None:
        self.current, self.forward_plan, self.backward_plan = current, partial(plan, forward), partial(plan, backward)

    def forward(self, problem, inputs, out=None, save=True):
        """o, in `out` if given, and what the backward pass needs, if it is to be saved."""
        gpu, lse = self.current(), None
        o = gpu.empty(problem.out_shape, problem.dtype) if out is None else out
        if out is not None:
            gpu.addresses({"out": out})     # an error names it as the user does
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": o}
        if save:
            arrays["lse"] = lse = gpu.empty(problem.lse_shape, problem.sum_dtype)
        if not run(gpu, self.forward_plan, problem, inputs, arrays, (save, None if out is None else out.strides)):
            o.fill(0)
            if save:
                lse.fill(-math.inf)
        return o, Saved(problem, inputs, o, lse) if save else None

    def backward(self, saved, do, dlse=None, deterministic=False):
        """The Gradients."""
        problem, inputs, o, lse = saved.problem, saved.inputs, saved.o, saved.lse
        gpu, (q, k, v, *_) = self.current(), inputs
        dq, dk, dv = (gpu.empty(x.shape, x.dtype) for x in (q, k, v))
        arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, "dq": dq, "dk": dk, "dv": dv}
        of_score = []
        for number, part in enumerate(inputs.score):
            held = [gpu.empty(x.shape, x.dtype) if part._wants_gradient else None for x in part._weights]
            of_score += held
            if part._wants_gradient:
                (arrays[gradient_of_part(number)],) = held
        if dlse is not None:
            arrays["dlse"] = dlse
        strides = o.strides, lse.strides, do.strides, None if dlse is None else dlse.strides
        if not run(gpu, self.backward_plan, problem, inputs, arrays, strides, deterministic):
            for grad in (dq, dk, dv, *of_score):
                if grad is not None:
                    grad.fill(0)
        return Gradients(dq, dk, dv, tuple(of_score))


def run(gpu, plan_of, problem, inputs, arrays, strides, deterministic=True):
    """Launch a pass; plan it first, if there is no such plan yet. False if nobody sees anything: nothing is launched.

    arrays by name. strides: of the given arrays other than q, k and v, or None for those that are missing; all others
    are new and contiguous.
    """
    _, _, _, mask, scale, dropout, parts = inputs
    if mask._holds_arrays:
        masked, in_mask, places = known_numbers_and_arrays(mask, problem.seqlen_q, problem.seqlen_k)
        arrays.update(in_mask)
        strides = strides, places
    else:
        masked = numbers_of(mask, problem.seqlen_q, problem.seqlen_k)
    if problem.is_empty or not (masked.last_key and masked.last_query):
        gpu.addresses(arrays)
        return False
    score = ()
    if parts:
        score, in_score = score_and_arrays(parts, problem)
        arrays.update(in_score)
        strides = strides, score, tuple([(name, x.shape, x.strides) for name, x in in_score.items()])
    addresses, odd = gpu.addresses(arrays)
    if odd:
        strides = strides, tuple([address % VECTOR_BYTES for address in addresses])
    key = plan_of, problem, masked[1:], strides, deterministic
    program = gpu.programs.get(key)
    if program is None:
        layouts = {name: layout_of(x, address) for (name, x), address in zip(arrays.items(), addresses)}
        planned = plan_of(problem, gpu.device, Call(layouts, *masked[1:], deterministic, score))
        with naming(*[part.function for part in parts if isinstance(part, Score)]):
            program = gpu.load(planned, tuple(arrays), problem.sum_dtype)
        gpu.keep(key, program)
    planned, stream = program.plan, gpu.stream()
    drops, kept_scale = (NO_DROPS, 1.0) if dropout is None else (dropout._numbers, dropout.scale)
    ds_scale = scale if dropout is None else scale * kept_scale / 2
    numbers = *masked.numbers, *drops, scale, scale * LOG2_E, kept_scale, ds_scale, 2 / kept_scale, 1 / scale
    capturing = (planned.allocates or planned.uses_counters) and stream.is_capturing()
    counters = [gpu.counters(stream.ptr, capturing)] if planned.uses_counters else []
    if not planned.allocates:
        program([*addresses, gpu.sink, *counters], numbers, stream.ptr)
        return True
    with gpu.scratch_memory(capturing):
        results = allocate(gpu, planned, arrays)
        addresses, _ = gpu.addresses(arrays)
        program([*addresses, gpu.sink, *counters], numbers, stream.ptr)
        for given, whole in results:
            given[...] = sum_to(whole[..., : given.shape[-1]], given.shape)
        for number, part in enumerate(parts):
            if gradient_of_part(number) in arrays:
                finish_gradient(part, number, arrays, problem)
    return True


def allocate(gpu, planned, arrays):
    """Add stand-ins and temporaries to the arrays of a call. Returns (result, its stand-in) of each stand-in result."""
    results = []
    for name, shape, dtype, _, is_result in planned.stand_ins:
        given = arrays[name]
        if is_result:
            arrays[name] = gpu.empty(shape, dtype)
            results.append((given, arrays[name]))
        else:
            arrays[name] = copy = gpu.zeros(shape, dtype)
            copy[..., : given.shape[-1]] = given
    for name, shape, dtype, is_zero in planned.temporaries:
        arrays[name] = (gpu.zeros if is_zero else gpu.empty)(shape, dtype)
    return results


def plans(device, q, k, v, deterministic=False, **options):
    """The Plans of attention_forward and attention_backward on a Device, all arrays but q, k and v contiguous.
    Nothing is read."""
    problem, inputs = describe(q, k, v, **options)
    masked, in_mask = numbers_and_arrays(inputs.mask, problem.seqlen_q, problem.seqlen_k)
    score, in_score = score_and_arrays(inputs.score, problem)
    layouts = {name: layout_of(x, 0) for name, x in {"q": q, "k": k, "v": v, **in_mask, **in_score}.items()}
    o, lse = contiguous(problem.out_shape, problem.dtype), contiguous(problem.lse_shape, problem.sum_dtype)
    grads = {f"d{name}": contiguous(x.shape, x.dtype) for name, x in (("q", q), ("k", k), ("v", v))}
    wanted = [(number, part._array) for number, part in enumerate(inputs.score) if part._wants_gradient]
    grads |= {gradient_of_part(number): contiguous(x.shape, x.dtype) for number, x in wanted}
    forward, backward = (
        plan(routes, problem, device, Call(layouts | others, *masked[1:], deterministic, score))
        for routes, others in ((FORWARD, {"o": o, "lse": lse}), (BACKWARD, {"o": o, "lse": lse, "do": o, **grads}))
    )
    return forward, backward


# -------------------------------------------------------------------------------------------------------------- masks
class MaskNumbers(NamedTuple):
    """A mask without its arrays."""

    numbers: tuple  # lo, hi, queries, keys, lo_shift, hi_shift, own_lo, own_hi
    keys: int  # the most that a query sees, by the band alone
    last_key: int  # no query sees this one or any after it
    grids: tuple  # (rows, columns) of a cell of each grid
    last_query: int  # neither it nor any after it sees anything
    intervals: tuple  # a steps.Part for each part that gives intervals


@lru_cache(maxsize=1024)
def numbers_of(mask, seqlen_q, seqlen_k):
    """The MaskNumbers of a mask without arrays, which does not change."""
    found, _ = numbers_and_arrays(mask, seqlen_q, seqlen_k)
    return found


def known_numbers_and_arrays(mask, seqlen_q, seqlen_k):
    """As `numbers_and_arrays`, and where the arrays lie; kept with the mask where these are its own, on a GPU."""
    key = "numbers", seqlen_q, seqlen_k
    found = mask._known.get(key)
    if found is None:
        masked, arrays = numbers_and_arrays(mask, seqlen_q, seqlen_k)
        found = masked, arrays, tuple([(name, x.shape, x.strides) for name, x in arrays.items()])
        own = {id(x) for leaf in mask._leaves for x in leaf._arrays().values()}
        if mask._is_on_gpu and all(id(x) in own for x in arrays.values()):
            mask._remember(key, found)
    return found


def numbers_and_arrays(mask, seqlen_q, seqlen_k):
    """The MaskNumbers of a mask, and its arrays by name: of edges of the band, of grids, of intervals."""
    sizes = seqlen_q, seqlen_k
    edges, arrays, shifts = mask._edges(*sizes), {}, {"lo": 0, "hi": 0}
    band = band_of([edge for edge in edges if isinstance(edge.at, int)], *sizes)
    for side in SIDES:
        found = [edge for edge in edges if edge.side == side and not isinstance(edge.at, int)]
        if len(found) == 1 and found[0].at.dtype == np.int32:       # the kernel reads it as it is
            ((_, arrays[side], shift),) = found
            shifts[side] = max(-FARTHEST, min(shift, FARTHEST))
        elif found:
            arrays[side] = getattr(band_of(found, *sizes), side).astype(np.int32)
    own, intervals, of_intervals = intervals_and_arrays(mask, *sizes)
    keys = seqlen_k if arrays else max(min(seqlen_k, band.hi - band.lo + 1), 0)
    last_key = seqlen_k if "keys" in arrays else band.keys
    grids = mask._grids()
    arrays.update({f"cells {number}": grid.cells for number, grid in enumerate(grids)})
    arrays.update(of_intervals)
    sizes = tuple([(grid.rows, grid.cols) for grid in grids])
    last_query = seqlen_q if "queries" in arrays else band.queries
    numbers = *band, shifts["lo"], shifts["hi"], *own
    return MaskNumbers(numbers, keys, last_key, sizes, last_query, intervals), arrays


def intervals_and_arrays(mask, seqlen_q, seqlen_k):
    """Of windows that are aligned within segments lo and hi, a steps.Part for each part of a mask that gives intervals,
    and their arrays by name, as kernels take them."""
    found, arrays = [], {}

    def add(kind, **values):
        """A part; those of its values that are arrays are named in its kind."""
        numbers = []
        for which, (name, x) in enumerate(values.items()):
            is_int32 = not isinstance(x, int) and x.dtype == np.int32       # the kernel reads it as it is
            x = x if is_int32 else _clip(x, -FARTHEST, FARTHEST)
            numbers.append(x if isinstance(x, int) else None)
            if not isinstance(x, int):
                kind += f" {name}"
                arrays[array_of_mask(len(found), which)] = x.astype(np.int32, copy=False)
        found.append(Part(kind, tuple(numbers)))

    def add_all(mask):
        """All parts but segments, bands and windows within segments, whose lo and hi it returns."""
        for part in mask._others:
            if isinstance(part, Intervals):
                add("intervals", first=part.first, end=part.end)
            elif isinstance(part, Prefix):
                add("prefix", length=part.lengths, offset=seqlen_k - seqlen_q if part.offset is None else part.offset)
            elif isinstance(part, AnyOf):
                for sign, alternative in zip((OPEN, OR), part.of, strict=True):
                    add(sign)
                    add_alternative(alternative)
                add(CLOSE)
        for part in mask._within:
            if isinstance(part, Prefix):
                add("within", length=part.lengths)
        return own_band([part for part in mask._within if not isinstance(part, Prefix)])

    def add_alternative(mask):
        add("band", **mask._band(seqlen_q, seqlen_k)._asdict())
        lo, hi = add_all(mask)
        if (lo, hi) != EVERYWHERE:
            add("window", lo=lo, hi=hi)

    if (segments := mask._segments) is not None:
        add("segments", queries=segments.queries, keys=segments.queries if segments.keys is None else segments.keys)
    return add_all(mask), tuple(found), arrays


def own_band(windows):
    """lo and hi of windows, each of which holds: how far from its own key a query sees."""
    pairs = [(part.left, part.right) if isinstance(part, Window) else (None, 0) for part in windows]
    lo = max((-left for left, _ in pairs if left is not None), default=-FARTHEST)
    hi = min((right for _, right in pairs if right is not None), default=FARTHEST)
    return _clip(lo, -FARTHEST, FARTHEST), _clip(hi, -FARTHEST, FARTHEST)


# -------------------------------------------------------------------------------------------------------------- scores
def score_and_arrays(parts, problem):
    """A steps.Part for each part of a score, and their arrays by name, as kernels take them."""
    found, arrays = [], {}
    for number, part in enumerate(parts):
        kind, numbers, of_part = CLASSES[type(part)].lowered(part, number, problem)
        found.append(Part(kind, numbers, part._wants_gradient))
        arrays |= of_part
    return tuple(found), arrays


def finish_gradient(part, number, arrays, problem):
    """The gradient of a part's array, from what kernels have left of it."""
    grad, by_row = arrays[gradient_of_part(number)], arrays.get(sums_by_row(number))
    if by_row is None:
        CLASSES[type(part)].finish(part, grad, arrays.get(sums_of_part(number)), problem)
    else:
        grad[...] = sum_broadcast(by_row.sum(axis=-1), grad.shape)

"""Attention on CuPy arrays: what a pass consists of, in order.

Everything happens on CuPy's current device and stream, in CuPy's memory, and nothing waits for the device: a call may
be captured in a CUDA graph. What follows from shapes, strides and kinds is planned once, see `run`.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..caches.eight_bits import bits_of
from ..gradients import Gradients, sum_to
from ..problem import Saved, describe
from ..scores.compiled.errors import naming
from ..scores.function import Score
from .caches.gather import gather
from .kernels import BACKWARD, FORWARD
from .kernels.any.decode import reads
from .plan.masks import lowered_mask, numbers_of
from .plan.planner import plan
from .plan.scores import finish_gradients, lowered_part
from .tile.alignment import VECTOR_BYTES, layout_of
from .views import contiguous
from .words.steps import BEFORE, Call, gradient_of_part
from .words.tiers import latest

LOG2_E = math.log2(math.e)
NO_DROPS = 0, 0, 0, 0


class Passes:
    """The backend for arrays on GPUs. `current` returns the GPU of a call, normally a launch.GPU."""

    def __init__(self, current: Any, forward: Any = FORWARD, backward: Any = BACKWARD) -> None:
        self.current, self.forward_plan, self.backward_plan = current, partial(plan, forward), partial(plan, backward)

    def forward(self, problem, inputs, out=None, save=True, onto=None):
        """o, in `out` if given, and what the backward pass needs, if it is to be saved.

        onto: o and lse over other keys, in the dtype of sums, to which these are added: lse where it lies, and o, too,
        if it is `out`.
        """
        gpu, given, held = self.current(), (problem, inputs), {}
        before, lse = onto or (None, None)
        if problem.cache is not None and problem.cache != (problem.dtype, None) and not problem.is_empty:
            if reads(problem, gpu.device):
                held = arrays_of(inputs.cache)
            else:
                problem, inputs = dense(gpu, problem, inputs)
        o = gpu.empty(problem.out_shape, problem.result_dtype) if out is None else out
        if out is not None:
            gpu.addresses({"out": out})     # an error names it as the user does
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": o} | held
        strides = [x if x is None else x.strides for x in (out, before, lse)]
        if onto is not None:
            arrays[BEFORE] = before
        elif save:
            lse = gpu.empty(problem.lse_shape, problem.sum_dtype)
        if save:
            arrays["lse"] = lse
        strides = save, *strides, *[layout_of(x, 0) for x in held.values()]
        if not run(gpu, self.forward_plan, problem, inputs, arrays, strides):
            o[...] = 0 if onto is None else before
            if save and onto is None:
                lse.fill(-math.inf)
        return o, Saved(*given, o, lse, whole=onto is None) if save else None

    def backward(self, saved, do, dlse=None, deterministic=False):
        """The Gradients."""
        problem, inputs, o, lse = saved.problem, saved.inputs, saved.o, saved.lse
        gpu, (q, k, v, *_) = self.current(), inputs
        dq, dk, dv = (gpu.empty(x.shape, problem.result_dtype) for x in (q, k, v))
        arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, "dq": dq, "dk": dk, "dv": dv}
        of_score = []
        for number, part in enumerate(inputs.score):
            held = [None] * len(part._weights)
            if part._wants_gradient:
                (x,) = part._weights
                held = [gpu.empty(x.shape, problem.sum_dtype if problem.wide else x.dtype)]
                (arrays[gradient_of_part(number)],) = held
            of_score += held
        if dlse is not None:
            arrays["dlse"] = dlse
        strides = o.strides, lse.strides, do.strides, None if dlse is None else dlse.strides
        if not run(gpu, self.backward_plan, problem, inputs, arrays, strides, deterministic, saved.whole):
            for grad in (dq, dk, dv, *of_score):
                if grad is not None:
                    grad.fill(0)
        return Gradients(dq, dk, dv, tuple(of_score))


def arrays_of(cache):
    """By name, for kernels that read it where it lies."""
    arrays = {"k": bits_of(cache.k), "v": bits_of(cache.v), "table": cache.table, "k scale": cache.k_scale,
              "v scale": cache.v_scale}  # fmt: skip
    return {name: x for name, x in arrays.items() if x is not None}


def dense(gpu, problem, inputs):
    """The same call, with a cache in pages or of 8 bits as plain arrays of q's dtype."""
    cache, lead = inputs.cache, (*problem.batch[:-1], problem.heads_k, problem.seqlen_k)
    gpu.addresses(arrays_of(cache) | {"lengths": cache.lengths})    # an error names them as the user does
    with gpu.scratch_memory(gpu.stream().is_capturing()):
        k, v = (gpu.empty((*lead, size), problem.dtype) for size in (problem.head_dim, problem.head_dim_v))
    for x, held, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        gather(x, bits_of(held), cache.lengths, cache.table, scale)
    strides = problem.strides[0], k.strides, v.strides
    return replace(problem, strides=strides, cache=None), inputs._replace(k=k, v=v, cache=None)


def run(gpu, plan_of, problem, inputs, arrays, strides, deterministic=True, whole=False):
    """Launch a pass; plan it first, if there is no such plan yet. False if nobody sees anything: nothing is launched.

    arrays by name. strides: of the given arrays other than q, k and v, or None for those that are missing; all others
    are new and contiguous. whole: see problem.Saved.
    """
    _, _, _, mask, scale, dropout, parts, _, origin, _ = inputs
    score = of_mask = of_score = misaligned = ()
    with gpu.scratch_memory((mask._holds_arrays or parts) and gpu.stream().is_capturing()):
        if mask._holds_arrays:
            masked, in_mask, of_mask = lowered_mask(mask, problem.seqlen_q, problem.seqlen_k)
            arrays.update(in_mask)
        else:
            masked = numbers_of(mask, problem.seqlen_q, problem.seqlen_k)
        if problem.is_empty or not (masked.last_key and masked.last_query):
            gpu.addresses(arrays)
            return False
        for part in parts:
            lowered, in_part, of_part = lowered_part(part, len(score), problem)
            arrays.update(in_part)
            score, of_score = (*score, lowered), (*of_score, of_part)
    addresses, odd = gpu.addresses(arrays)
    if odd:
        misaligned = tuple([address % VECTOR_BYTES for address in addresses])
    tier = latest.get()
    key = plan_of, problem, masked[1:], score, deterministic, whole, strides, of_mask, of_score, misaligned, tier
    program = gpu.programs.get(key)
    if program is None:
        layouts = {name: layout_of(x, address) for (name, x), address in zip(arrays.items(), addresses)}
        planned = plan_of(problem, gpu.device, Call(layouts, *masked[1:], deterministic, score, tier, whole))
        with naming(*[part.function for part in parts if isinstance(part, Score)]):
            program = gpu.load(planned, tuple(arrays), problem.sum_dtype)
        gpu.keep(key, program)
    planned, stream = program.plan, gpu.stream()
    drops, kept_scale = (NO_DROPS, 1.0) if dropout is None else (dropout._numbers, dropout.scale)
    ds_scale = scale if dropout is None else scale * kept_scale / 2
    floats = scale, scale * LOG2_E, kept_scale, ds_scale, 2 / kept_scale, 1 / scale
    numbers = *masked.numbers, *drops, *origin, *floats
    capturing = (planned.allocates or planned.uses_counters) and stream.is_capturing()
    counters = [gpu.counters(stream.ptr, capturing)] if planned.uses_counters else []
    if not planned.allocates:
        program([*addresses, gpu.sink, *counters], numbers, stream.ptr)
        return True
    with gpu.scratch_memory(capturing):
        results = ()
        if planned.stand_ins:
            results = add_stand_ins(gpu, planned, arrays)
            addresses, _ = gpu.addresses(arrays)
        temporaries = gpu.temporaries(planned)
        program([*addresses, *temporaries.addresses, gpu.sink, *counters], numbers, stream.ptr)
        for given, whole in results:
            put(given, sum_to(whole[..., : given.shape[-1]], given.shape))
        if parts:
            finish_gradients(parts, arrays, temporaries, problem)
    return True


def add_stand_ins(gpu, planned, arrays):
    """To the arrays of a call. Returns (result, its stand-in) of each stand-in of a result."""
    results = []
    for name, shape, dtype, _, is_result in planned.stand_ins:
        given = arrays[name]
        if is_result:
            arrays[name] = gpu.empty(shape, dtype)
            results.append((given, arrays[name]))
        else:
            arrays[name] = copy = gpu.zeros(shape, dtype)
            put(copy[..., : given.shape[-1]], given)
    return results


@np.errstate(under="ignore")
def put(out, x):
    """x in out, in its dtype."""
    out[...] = x


def plans(device, q, k, v, deterministic=False, **options):
    """The Plans of attention_forward and attention_backward on a Device, all arrays but q, k and v contiguous.
    Nothing is read."""
    problem, inputs = describe(q, k, v, **options)
    masked, in_mask, _ = lowered_mask(inputs.mask, problem.seqlen_q, problem.seqlen_k)
    parts = [lowered_part(part, number, problem) for number, part in enumerate(inputs.score)]
    score, arrays = tuple([lowered for lowered, _, _ in parts]), {"q": q, "k": k, "v": v, **in_mask}
    for _, in_part, _ in parts:
        arrays |= in_part
    layouts = {name: layout_of(x, 0) for name, x in arrays.items()}
    o, lse = contiguous(problem.out_shape, problem.dtype), contiguous(problem.lse_shape, problem.sum_dtype)
    grads = {f"d{name}": contiguous(x.shape, x.dtype) for name, x in (("q", q), ("k", k), ("v", v))}
    wanted = [(number, part._array) for number, part in enumerate(inputs.score) if part._wants_gradient]
    grads |= {gradient_of_part(number): contiguous(x.shape, x.dtype) for number, x in wanted}
    forward, backward = (
        plan(routes, problem, device, Call(layouts | others, *masked[1:], deterministic, score, latest.get(), True))
        for routes, others in ((FORWARD, {"o": o, "lse": lse}), (BACKWARD, {"o": o, "lse": lse, "do": o, **grads}))
    )
    return forward, backward

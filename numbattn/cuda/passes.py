"""Attention on CuPy arrays: the passes, and how one is run.

Everything happens on CuPy's current device and stream, in CuPy's memory, and nothing waits for the device: a call may
be captured in a CUDA graph. What follows from shapes, strides and kinds is planned once, see `run`.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from ..base.gradients import Gradients, sum_to
from ..base.values import put
from ..caches.eight_bits import bits_of
from ..call.problem import Saved, describe
from ..call.tangents import Rows, gradients_of_sink, parts_of
from ..functions.compiled.errors import naming
from ..masks.where import Where
from ..scores import sink_of
from ..scores.function import Score
from . import kernels
from .caches.gather import gather
from .plan.masks import lowered_mask
from .plan.planner import plan
from .plan.scores import finish_gradients, lowered_part
from .tile.alignment import VECTOR_BYTES, layout_of
from .views import contiguous
from .where import shown_by_function, states
from .words.numbers import NO_KIND, numbers_of
from .words.spec import Pass
from .words.steps import BEFORE, LoweredCall, gradient_of_part, tangent_of_part
from .words.tiers import latest

FORWARD = Pass(
    "forward",
    kernels.FORWARD,
    takes=("q", "k", "v", BEFORE),
    gives=("o", "lse", "lse_low"),
)
BACKWARD = Pass(
    "backward",
    kernels.BACKWARD,
    takes=("q", "k", "v", "o", "lse", "lse_low", "do", "dlse"),
    gives=("dq", "dk", "dv"),
    differentiates=lambda part: True,
)
TANGENT = Pass(
    "tangent",
    kernels.TANGENT,
    takes=("q", "k", "v", "tq", "tk", "tv"),
    gives=("o", "lse", "lse_low", "to", "tlse"),
)
LAPLACIAN = Pass(  # o2 is the second derivative along each tangent
    "laplacian",
    kernels.LAPLACIAN,
    takes=("q", "k", "v", "tq", "tk", "tv"),
    gives=("o", "lse", "lse_low", "to", "tlse", "o2"),
)
BACKWARD_TANGENT = Pass(
    "backward_tangent",
    kernels.BACKWARD_TANGENT,
    takes=("q", "k", "v", "o", "lse", "lse_low", "do", "dlse", "tq", "tk", "tv", "to", "tlse", "tdo", "tdlse"),
    gives=("tdq", "tdk", "tdv"),
    differentiates=lambda part: part._has_step,  # array operations compute that of a sink
)
PASSES = {pass_.name: pass_ for pass_ in (FORWARD, BACKWARD, TANGENT, BACKWARD_TANGENT, LAPLACIAN)}
ARRAYS = {  # (problem, inputs) -> shape and dtype, of arrays that follow from the problem
    "q": lambda problem, inputs: (inputs.q.shape, problem.dtype),
    "k": lambda problem, inputs: (inputs.k.shape, problem.dtype),
    "v": lambda problem, inputs: (inputs.v.shape, problem.dtype),
    "o": lambda problem, inputs: (problem.out_shape, problem.result_dtype),
    "do": lambda problem, inputs: (problem.out_shape, problem.dtype),
    "lse": lambda problem, inputs: (problem.lse_shape, problem.sum_dtype),
    "lse_low": lambda problem, inputs: (problem.lse_shape, problem.sum_dtype),  # what rounding took from it
    "dq": lambda problem, inputs: (inputs.q.shape, problem.result_dtype),
    "dk": lambda problem, inputs: (inputs.k.shape, problem.result_dtype),
    "dv": lambda problem, inputs: (inputs.v.shape, problem.result_dtype),
}
LSE = "lse", "lse_low"
ARRAYS["o2"] = lambda problem, inputs: (problem.out_shape, problem.sum_dtype)
ARRAYS |= {f"t{name}": about for name, about in ARRAYS.items() if name != "do"}  # tangents are alike


class Passes:
    """The backend for arrays on GPUs. `current` returns the GPU of a call, normally a launch.GPU."""

    def __init__(self, current: Any, forward: Pass = FORWARD, backward: Pass = BACKWARD) -> None:
        self.current, self.forward_pass, self.backward_pass = current, forward, backward

    def forward(self, problem, inputs, out=None, save=True, onto=None):
        """o, in `out` if given, and what the backward pass needs, or None unless `save`.

        onto: o and lse over other keys, in the dtype of sums, that these are added to: lse in place, and o, too, if it
        is `out`.
        """
        gpu, given, held, low = self.current(), (problem, inputs), {}, None
        before, lse = onto or (None, None)
        if problem.cache is not None and problem.cache != (problem.dtype, None) and not problem.is_empty:
            if any(route.reads(problem, gpu.device) for route in self.forward_pass.routes):
                held = arrays_of(inputs.cache)
            else:
                problem, inputs = dense(gpu, problem, inputs)
        o = gpu.empty(*ARRAYS["o"](problem, inputs)) if out is None else out
        if out is not None:
            gpu.addresses({"out": out})     # an error names it as the user does
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": o} | held
        strides = [x if x is None else x.strides for x in (out, before, lse)]
        if onto is not None:
            arrays[BEFORE] = before
        elif save:
            rows = LSE if has_low(problem) else LSE[:1]
            found = empties(gpu, {name: ARRAYS[name](problem, inputs) for name in rows})
            lse, low = found["lse"], found.get("lse_low")
            arrays |= found
        if save:
            arrays["lse"] = lse
        strides = save, *strides, *[layout_of(x, 0) for x in held.values()]
        if not run(gpu, self.forward_pass, problem, inputs, arrays, strides):
            o[...] = 0 if onto is None else before
            if save and onto is None:
                lse.fill(-math.inf)
                low = None
        return o, Saved(*given, o, lse, low, whole=onto is None) if save else None

    def backward(self, saved, do, dlse=None, deterministic=False):
        """The Gradients."""
        problem, inputs = saved.problem, saved.inputs
        gpu, pass_ = self.current(), self.backward_pass
        made = {name: ARRAYS[name](problem, inputs) for name in pass_.gives}
        made |= gradients_of_score(pass_, problem, inputs.score)
        results = {name: gpu.empty(*about) for name, about in made.items()}
        arrays = given_to_backward(saved, do, dlse) | results
        strides = tuple([arrays[name].strides if name in arrays else None for name in pass_.takes[3:]])
        if not run(gpu, pass_, problem, inputs, arrays, strides, deterministic, saved.whole):
            for grad in results.values():
                grad.fill(0)
        return Gradients(*[results[name] for name in pass_.gives], found_gradients(problem, inputs.score, results))

    def place(self):
        """The device and stream for which results of this call may be kept; None in a capture, whose memory belongs to
        the graph."""
        gpu = self.current()
        stream = gpu.stream()
        return None if stream.is_capturing() else (gpu.device.index, stream.ptr)

    def states_of_blocks(self, mask):
        """The states of the blocks of a fitted Where, kept for later calls, if there may be any."""
        gpu, place = self.current(), self.place()
        return states(gpu, mask) if place is None else mask._states_kept(place, partial(states, gpu))

    def shown_by_function(self, mask):
        """The booleans of a fitted Where."""
        return shown_by_function(self.current(), mask)

    def tangent(self, problem, inputs, tangents):
        """What is saved of the forward pass, and to and tlse for all Tangents, their axis in front."""
        return self.forward_along(TANGENT, problem, inputs, tangents)

    def laplacian(self, problem, inputs, tangents, laplacians):
        """o, lse, to for all Tangents, and the Laplacian of o; laplacians: of q, k and v, as Tangents in one direction.
        """
        saved, to, _, o2 = self.forward_along(LAPLACIAN, problem, inputs, tangents)
        lo = o2.sum(axis=0)
        if any(x is not None for x in laplacians[:3]):
            _, (more,), _ = self.tangent(replace(problem, wide=True), inputs, laplacians)
            lo += more
        return saved.o, saved.lse, to, lo.astype(problem.result_dtype)

    def forward_along(self, pass_, problem, inputs, tangents):
        """What is saved of the forward pass, and the other results of a Pass such as TANGENT for all Tangents,
        their axis in front."""
        gpu, (o, lse, low, *others) = self.current(), pass_.gives
        rows = (o, lse, low) if has_low(problem) else (o, lse)
        about = {name: ARRAYS[name](problem, inputs) for name in (*rows, *others)}
        once = () if may_be_a_batch(problem, inputs, tangents) else rows            # else each element has them
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v} | empties(gpu, {name: about[name] for name in once})
        along = empty_along(gpu, tangents.count, {name: x for name, x in about.items() if name not in once})
        if not tangents.count:
            o, saved = self.forward(problem, inputs)
            return saved, *along.values()
        is_seen = run_along(gpu, pass_, problem, inputs, tangents, arrays, {}, along)
        o, lse, *low = (arrays[name] if name in once else along[name][0] for name in rows)
        if not is_seen:
            o.fill(0)
            lse.fill(-math.inf)
            low = []
        return Saved(problem, inputs, o, lse, *low), *[along[name] for name in others]

    def backward_tangent(self, saved, do, dlse, tangents, to, tlse, tdo=None, tdlse=None, deterministic=False):
        """The tangents of the Gradients, with the axis of the Tangents in front, as in to, tlse, tdo and tdlse."""
        problem, inputs, gpu, pass_ = saved.problem, saved.inputs, self.current(), BACKWARD_TANGENT
        arrays = given_to_backward(saved, do, dlse)
        given = {"to": to, "tlse": tlse, "tdo": tdo, "tdlse": tdlse}
        about = {name: ARRAYS[name](problem, inputs) for name in pass_.gives}
        along = empty_along(gpu, tangents.count, about | gradients_of_score(pass_, problem, inputs.score))
        run_along(gpu, pass_, problem, inputs, tangents, arrays, given, along, deterministic, saved.whole)
        if (sink := sink_of(inputs.score)) is not None and sink._wants_gradient:
            number, rows = inputs.score.index(sink), Rows(do, dlse, to, tlse, tdo, tdlse)
            along |= empty_along(gpu, tangents.count, {gradient_of_part(number): gradient_like(problem, sink)})
            tsinks = [parts_of(inputs, tangents, which)[number] for which in range(tangents.count)]
            for which, x in enumerate(gradients_of_sink(saved, rows, sink, tsinks)):
                put(along[gradient_of_part(number)][which, ...], x)
        of_score = found_gradients(problem, inputs.score, along, (tangents.count,))
        return Gradients(*[along[name] for name in pass_.gives], of_score)


def has_low(problem):
    """Whether kernels take what rounding took from lse: it is little in half precision."""
    return problem.dtype == problem.sum_dtype


def given_to_backward(saved, do, dlse):
    """The arrays of the backward pass by name, without what there is not."""
    inputs = saved.inputs
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": saved.o, "lse": saved.lse, "lse_low": saved.lse_low,
              "do": do, "dlse": dlse}  # fmt: skip
    return {name: x for name, x in arrays.items() if x is not None}


def empty_along(gpu, count, about):
    """Arrays by name for the results of `count` tangents; about: shape and dtype of each."""
    return empties(gpu, {name: ((count, *shape), dtype) for name, (shape, dtype) in about.items()})


def empties(gpu, about):
    """Arrays by name. lse and its low part share memory: a CUDA graph goes on to write both where one is kept."""
    found = {name: gpu.empty(*x) for name, x in about.items() if "lse_low" not in about or name not in LSE}
    if "lse_low" in about:
        shape, dtype = about["lse"]
        size, unit = math.prod(shape), VECTOR_BYTES // dtype.itemsize
        after = -(-size // unit) * unit
        both = gpu.empty((after + size,), dtype)
        found |= dict(zip(LSE, (both[:size].reshape(shape), both[after:].reshape(shape))))
    return found


def run_along(gpu, pass_, problem, inputs, tangents, arrays, given, along, *options):
    """Run a pass for each of Tangents. Returns False, with results of 0, if nothing is seen.

    arrays: the same for all tangents; given, along: inputs, or None, and results, with an axis of the tangents in
    front.
    """
    given = {"tq": tangents.q, "tk": tangents.k, "tv": tangents.v, **given}
    given = {name: x for name, x in given.items() if x is not None}
    runs = as_a_batch if may_be_a_batch(problem, inputs, tangents) else one_by_one
    for number, part, own in runs(problem, tangents, arrays, given, along):
        strides = tuple([own[name].strides if name in own else None for name in pass_.takes[3:]])   # after q, k, v
        tparts = parts_of(inputs, tangents, number, backward=pass_ is BACKWARD_TANGENT)
        if not run(gpu, pass_, part, inputs, own, strides, *options, tparts=tparts):
            for x in along.values():
                x.fill(0)
            return False
    return True


def one_by_one(problem, tangents, arrays, given, along):
    """The runs of `run_along`, one for each tangent: its number, the Problem and the arrays."""
    for number in range(tangents.count):
        yield number, problem, arrays | {name: x[number, ...] for name, x in (given | along).items()}


def may_be_a_batch(problem, inputs, tangents):
    """Whether Tangents may be one more axis of the batch, since nothing else differs between elements of the batch."""
    alike = not (problem.dropout or inputs.score or inputs.mask._holds_arrays)
    return alike and problem.batch and tangents.count > 1


def as_a_batch(problem, tangents, arrays, given, along):
    """The single run of Tangents that `may_be_a_batch`."""
    count, axes, own = tangents.count, len(problem.batch) + 3, given | along
    own |= {name: own[name][(slice(None), *[None] * (axes - own[name].ndim))]
            for name in ("tq", "tk", "tv", "tdq", "tdk", "tdv") if name in own}  # fmt: skip
    yield 0, replace(problem, batch=(count, *problem.batch)), arrays | own


def gradients_of_score(pass_, problem, parts):
    """Shape and dtype, by name, of the wanted gradients of a score's arrays that the kernels of a pass compute."""
    return {gradient_of_part(number): gradient_like(problem, part) for number, part in enumerate(parts)
            if part._wants_gradient and pass_.differentiates(part)}  # fmt: skip


def gradient_like(problem, part):
    """Shape and dtype of the gradient of a part's array; for a function of all its arrays, one after the other."""
    return part._gradient_like(problem.sum_dtype, problem.wide)


def found_gradients(problem, parts, found, lead=()):
    """The gradient of each array of a score, None where it is not wanted; found: of parts, by name, with these leading
    axes."""
    return tuple([dx for number, part in enumerate(parts)
                  for dx in part._rounded_gradients(found.get(gradient_of_part(number)), problem.wide, lead)]
                  )  # fmt: skip


def arrays_of(cache):
    """The arrays of a cache by name, for kernels that read it in place."""
    arrays = {"k": bits_of(cache.k), "v": bits_of(cache.v), "table": cache.table, "k scale": cache.k_scale,
              "v scale": cache.v_scale}  # fmt: skip
    return {name: x for name, x in arrays.items() if x is not None}


def dense(gpu, problem, inputs):
    """The call with its cache, in pages or of 8 bits, as plain arrays of q's dtype."""
    cache, lead = inputs.cache, (*problem.batch[:-1], problem.heads_k, problem.seqlen_k)
    gpu.addresses(arrays_of(cache) | {"lengths": cache.lengths})    # an error names them as the user does
    with gpu.scratch_memory(gpu.stream().is_capturing()):
        k, v = (gpu.empty((*lead, size), problem.dtype) for size in (problem.head_dim, problem.head_dim_v))
    for x, held, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        gather(x, bits_of(held), cache.lengths, cache.table, scale)
    strides = problem.strides[0], k.strides, v.strides
    return replace(problem, strides=strides, cache=None), inputs._replace(k=k, v=v, cache=None)


NO_PARTS = (), {}, ()  # what `lower_parts` returns for them


def run(gpu, pass_, problem, inputs, arrays, strides, deterministic=True, whole=False, tparts=(), kind=(None, NO_KIND)):
    """Launch a pass, after planning it if there is no plan yet. Returns False if nothing is seen and nothing is
    launched.

    arrays: by name. strides: of the given arrays other than q, k and v, or None for missing ones; all others are new
    and contiguous. whole: see problem.Saved; tparts: see tangents.parts_of; kind: the form of a kind of points, which
    is compiled in, and its KindNumbers.
    """
    with gpu.scratch_memory((inputs.mask._holds_arrays or inputs.score) and gpu.stream().is_capturing()):
        mask, score, found, lies = lower(problem, inputs)
        tscore, of_tangents, at = lower_parts(tparts, problem, tangent_of_part) if tparts else NO_PARTS
    arrays |= found | of_tangents
    addresses, odd = gpu.addresses(arrays)
    if sees_nothing(problem, mask):
        return False
    misaligned = tuple([address % VECTOR_BYTES for address in addresses]) if odd else ()
    tier = latest.get()
    key = pass_, problem, mask[1:], score, deterministic, whole, strides, lies, tscore, at, misaligned, tier, kind[0]
    program = gpu.programs.get(key)
    if program is None:
        layouts = {name: layout_of(x, address) for (name, x), address in zip(arrays.items(), addresses)}
        call = LoweredCall(layouts, *mask[1:], deterministic, score, tier, whole, tscore, kind[0])
        planned = plan(pass_, problem, gpu.device, call)
        with naming_functions(inputs):
            program = gpu.load(planned, tuple(arrays), problem.sum_dtype)
        gpu.keep(key, program)
    numbers = numbers_of(mask.numbers, inputs.dropout, inputs.origin, inputs.scale, kind[1])
    launch(gpu, program, arrays, addresses, numbers, problem, inputs.score)
    return True


def naming_functions(inputs):
    """Name the user's own functions in Numba's errors."""
    of_score = [part.function for part in inputs.score if isinstance(part, Score)]
    of_mask = [leaf.function for leaf in inputs.mask._leaves if isinstance(leaf, Where)]
    return naming(*of_score, *of_mask, of="score" if of_score else "mask")


def sees_nothing(problem, mask):
    return problem.is_empty or not (mask.last_key and mask.last_query)


def lower(problem, inputs):
    """A call's LoweredMask, a LoweredPart for each part of its score, the arrays of both by name, and their layouts."""
    mask, arrays, lies = lowered_mask(inputs.mask, problem.seqlen_q, problem.seqlen_k)
    if not inputs.score or sees_nothing(problem, mask):
        return mask, (), arrays, lies
    score, of_parts, at = lower_parts(inputs.score, problem)
    return mask, score, arrays | of_parts, (lies, *at)


def lower_parts(parts, problem, numbered=int):
    """A LoweredPart or None for each part or None, their arrays by name, and the layouts of these. numbered: turns a
    part's number into the one in names."""
    found = [part and lowered_part(part, numbered(number), problem) for number, part in enumerate(parts)]
    found = [each or (None, {}, ()) for each in found]
    arrays = {name: x for _, of_part, _ in found for name, x in of_part.items()}
    return tuple([lowered for lowered, _, _ in found]), arrays, tuple([at for _, _, at in found])


def launch(gpu, program, arrays, addresses, numbers, problem, parts):
    """Launch a Program, with the temporaries and stand-ins of its Plan; parts: of the score."""
    planned, stream = program.plan, gpu.stream()
    capturing = (planned.allocates or planned.uses_counters) and stream.is_capturing()
    counters = [gpu.counters(stream.ptr, capturing)] if planned.uses_counters else []
    if not planned.allocates:
        program([*addresses, gpu.scrap, *counters], numbers, stream.ptr)
        return
    with gpu.scratch_memory(capturing):
        results = ()
        if planned.stand_ins:
            results = add_stand_ins(gpu, planned, arrays)
            addresses, _ = gpu.addresses(arrays)
        temporaries = gpu.temporaries(planned)
        program([*addresses, *temporaries.addresses, gpu.scrap, *counters], numbers, stream.ptr)
        for given, whole in results:
            put(given, sum_to(whole[..., : given.shape[-1]], given.shape))
        if parts:
            finish_gradients(parts, arrays, temporaries, problem)


def add_stand_ins(gpu, planned, arrays):
    """Add stand-ins to the arrays of a call. Returns (result, stand-in) for each stand-in of a result."""
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


def plans(device, q, k, v, deterministic=False, passes=(FORWARD, BACKWARD), **options):
    """The Plan of each of these passes on a Device; all arrays but q, k and v are contiguous. No array is read."""
    problem, inputs = describe(q, k, v, **options)
    mask, score, found, _ = lower(problem, inputs)
    given = {name: layout_of(x, 0) for name, x in ({"q": q, "k": k, "v": v} | found).items()}

    def planned(pass_):
        made = {name: ARRAYS[name](problem, inputs) for name in (*pass_.takes, *pass_.gives)
                if name in ARRAYS and (name != "lse_low" or has_low(problem))}  # fmt: skip
        made |= gradients_of_score(pass_, problem, inputs.score)
        layouts = {name: contiguous(*about) for name, about in made.items()} | given
        tscore = (None,) * len(score)
        call = LoweredCall(layouts, *mask[1:], deterministic, score, latest.get(), True, tscore)
        return plan(pass_, problem, device, call)

    return tuple(map(planned, passes))

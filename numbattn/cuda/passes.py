"""Attention on CuPy arrays: how a pass is run.

Everything happens on CuPy's current device and stream, in CuPy's memory, and nothing waits for the device: a call may
be captured in a CUDA graph. What follows from shapes, strides and kinds is planned once, see `Passes.launch`.
"""

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..base.gradients import sum_to
from ..base.kept import kept
from ..base.values import moved, put, rounded
from ..caches.eight_bits import bits_of
from ..call.particles import by_products, in_order
from ..call.passes import (
    ARRAYS,
    BACKWARD,
    BACKWARD_TANGENT,
    BEFORE,
    FORWARD,
    PARTICLE_LAPLACIAN,
    QKV,
    SAVED,
    gradient_of_part,
    weights,
)
from ..call.problem import Saved, describe
from ..call.tangents import parts_of
from ..functions.compiled.errors import naming
from ..masks.where import Where
from ..scores.element import FunctionPart
from . import by_cublas, kernels
from .caches.gather import gather
from .kernels.any.particle_laplacian import OWNERS, TANGENTS
from .kernels.shared.smallest import NOBODY
from .kernels.tables import is_wide
from .merge import merge_into
from .plan.masks import lowered_mask
from .plan.planner import plan
from .plan.scores import finish_gradients, lowered_part
from .tile.alignment import VECTOR_BYTES, layout_of
from .views import contiguous
from .where import shown_by_function, states
from .words.numbers import NO_KIND, numbers_of
from .words.steps import LoweredCall, tangent_of_part
from .words.tiers import latest

LSE = "lse", "lse_low"
MOST_ROWS = 2**31 - 1  # of tangents of particles, which a kernel counts
# results where nothing is seen; all others are 0
NOTHING = {"lse": -math.inf, "row_max": -math.inf, "r2": math.inf, "j": NOBODY}


class Passes:
    """The backend for arrays on GPUs. `current` returns the GPU of a call, normally a launch.GPU; routes: of passes by
    name, in place of the usual ones."""

    def __init__(self, current: Any, **routes: Any) -> None:
        self.current, self.routes = current, routes

    def routes_of(self, pass_):
        return self.routes.get(pass_.name) or kernels.routes_of(pass_)

    def forward(self, problem, inputs, out=None, save=True, onto=None):
        """See `numbattn.call.passes.forward`."""
        if onto is not None and is_wide(problem):
            return self.forward_apart(problem, inputs, out, *onto)
        if onto is None and by_cublas.takes(problem, inputs) and self.may_multiply(FORWARD):
            return self.forward_by_cublas(problem, inputs, out, save)
        gpu, call, given = self.current(), (problem, inputs), {}
        if is_apart(problem):
            if any(route.reads(problem, gpu.device) for route in self.routes_of(FORWARD)):
                given = arrays_of(inputs.cache)
            else:
                problem, inputs = dense(gpu, problem, inputs)
        if out is not None:
            gpu.addresses({"out": out})     # an error names it as the user does
            given["o"] = out
        if onto is not None:
            given[BEFORE], given["lse"] = onto
        o = gpu.empty(problem.out_shape, problem.result_dtype) if out is None else out
        rows = empties(gpu, about_of(problem, LSE)) if save and onto is None else {}
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": o, **given, **rows}
        strides = (save, *given, *[layout_of(x, 0) for x in given.values()]) if given else save
        if not self.launch(gpu, FORWARD, problem, inputs, arrays, strides):
            if onto is None:
                fill({"o": o} | rows)
            else:
                o[...] = onto[0]
        return o, Saved(*call, o, arrays["lse"], rows.get("lse_low"), onto is None) if save else None

    def forward_apart(self, problem, inputs, out, before, lse):
        """`forward` of large head_dims, to which o over other keys is added afterwards: while one slice of it is
        written, blocks of others still read lse."""
        part, saved = self.forward(replace(problem, wide=True), inputs)
        o = self.current().empty(problem.out_shape, problem.result_dtype) if out is None else out
        merge_into(o, before, lse, part, saved.lse)
        return o, Saved(problem, inputs, o, lse)

    def may_multiply(self, pass_):
        """Whether matrix products of cuBLAS may compute a pass, in place of kernels. CuPy refuses them in a capture."""
        return pass_.name not in self.routes and not self.current().stream().is_capturing()

    def forward_by_cublas(self, problem, inputs, out, save):
        gpu = self.current()
        gpu.addresses({"q": inputs.q, "k": inputs.k, "v": inputs.v} | ({} if out is None else {"out": out}))
        o, rows = gpu.empty(problem.out_shape, problem.result_dtype), empties(gpu, about_of(problem, LSE))
        with self.scratch():
            by_cublas.forward(problem, inputs, o, *rows.values(), gpu.empty)
        if out is not None:
            put(out, o)
            o = out
        return o, Saved(problem, inputs, o, *rows.values(), whole=True) if save else None

    def run(self, problem, pass_, inputs, given, tangents=None, deterministic=False, whole=False):
        """See `numbattn.call.passes.run_pass`."""
        if pass_ is PARTICLE_LAPLACIAN:
            return self.along_particles(problem, inputs, given["particles"], tangents)
        gpu, given = self.current(), {name: x for name, x in given.items() if x is not None}
        if is_apart(problem):
            problem, inputs = dense(gpu, problem, inputs)
        about = about_of(problem, pass_.gives)
        if inputs.score:
            about = about | gradients_of_score(pass_, problem, inputs.score)
        if tangents is not None:
            return self.run_along(gpu, pass_, problem, inputs, given, about, tangents, deterministic, whole)
        results = empties(gpu, about)
        self.compute(gpu, pass_, problem, inputs, given, results, deterministic, whole)
        return results

    def along_particles(self, problem, inputs, particles, tangents):
        """o, its tangents along the coordinates of Particles, and o2, by name."""
        count, ordered = particles.total * tangents.count, in_order(inputs, tangents, particles)
        rows = count * math.prod(problem.lse_shape)
        if ordered is None or is_wide(problem) or rows > MOST_ROWS:
            found = by_products(problem, inputs, tangents, particles, weights(problem, inputs))
            return found | {"o": self.forward(problem, inputs)[0]}
        gpu, dtype, (inputs, tangents, particles) = self.current(), problem.sum_dtype, ordered
        given = dict(zip(QKV, inputs)) | {name: x if x is None else np.moveaxis(x, 0, -3)
                                          for name, x in zip(TANGENTS, tangents)}  # fmt: skip
        given = {name: rounded(x, dtype) for name, x in given.items() if x is not None}
        q, k, v = map(given.pop, QKV)
        wide = replace(problem, dtype=dtype, strides=(q.strides, k.strides, v.strides))
        inputs = inputs._replace(q=q, k=k, v=v)
        o, saved = self.forward(wide, inputs)
        given |= {"o": o, "lse": saved.lse, "lse_low": saved.lse_low}
        strides = [given[name].strides if name in given else None for name in TANGENTS]
        given |= owners_of(particles, q)
        results = {"to": gpu.empty((rows, problem.head_dim_v), dtype), "o2": gpu.empty(problem.out_shape, dtype)}
        jo = results["to"].reshape(count, *problem.out_shape)
        arrays = {"q": q, "k": k, "v": v} | given | results
        about = particles.total, tangents.count, *strides
        if not (jo.size and self.launch(gpu, PARTICLE_LAPLACIAN, wide, inputs, arrays, about)):
            fill(results)
        o, jo = rounded(o, problem.result_dtype), rounded(jo, problem.result_dtype)
        return {"o": o, "to": jo, "o2": results["o2"][None]}

    def run_along(self, gpu, pass_, problem, inputs, given, about, tangents, *how):
        """The results of a pass along tangents; about: shape and dtype of each along one."""
        is_batch, lead = may_be_a_batch(problem, inputs, tangents), (tangents.count,)
        once = () if is_batch else SAVED
        results = empties(gpu, {name: (shape if name in once else lead + shape, dtype)
                                for name, (shape, dtype) in about.items()})  # fmt: skip
        if not tangents.count and "o" in results:
            o, saved = self.forward(problem, inputs)
            return results | {"o": o, "lse": saved.lse, "lse_low": saved.lse_low}
        runs = as_a_batch if is_batch else one_by_one
        for number, part, *own in runs(problem, tangents, given, results, once):
            tparts = parts_of(inputs, tangents, number, backward=pass_ is BACKWARD_TANGENT)
            self.compute(gpu, pass_, part, inputs, *own, *how, tparts)
        return results | {name: results[name][0] for name in SAVED if name in results and is_batch}

    def compute(self, gpu, pass_, problem, inputs, given, results, deterministic=True, *how, **options):
        """Compute the results of a pass, arrays by name, from given ones; the rest: as for `launch`. The bits of cuBLAS
        may change where several streams use it."""
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **given, **results}
        by_kernels = deterministic or pass_ is not BACKWARD
        if not by_kernels and by_cublas.takes(problem, inputs, backward=True) and self.may_multiply(pass_):
            gpu.addresses(arrays)
            with self.scratch():
                by_cublas.backward(problem, inputs, given, results, gpu.empty)
            return
        strides = *given, *[x.strides for x in given.values()]
        if not self.launch(gpu, pass_, problem, inputs, arrays, strides, deterministic, *how, **options):
            fill(results)

    def launch(self, gpu, pass_, problem, inputs, arrays, strides, deterministic=True, whole=False, tparts=(),
               kind=(None, NO_KIND)):  # fmt: skip
        """Launch the kernels of a pass, after planning it if there is no plan yet. Returns False if nothing is seen and
        nothing is launched.

        arrays: by name. strides: the names and strides of the given ones other than q, k and v; all others are new and
        contiguous. whole: see problem.Saved; tparts: see tangents.parts_of; kind: the form of a kind of points, which
        is compiled in, and its KindNumbers.
        """
        options = problem, inputs.mask, inputs.scale, inputs.dropout, inputs.origin, kind[1]
        if inputs.mask._holds_arrays or inputs.score:
            with gpu.scratch_memory(gpu.stream().is_capturing()):
                lowered, found = lower(*options, inputs.score, tparts)
            arrays |= found
        else:
            lowered = lower_numbers(*options)
        addresses, odd = gpu.addresses(arrays)
        if lowered.sees_nothing:
            return False
        misaligned = tuple([address % VECTOR_BYTES for address in addresses]) if odd else ()
        tier = latest.get()
        key = self, pass_, problem, lowered.about, deterministic, whole, strides, misaligned, tier, kind[0]
        program = gpu.programs.get(key)
        if program is None:
            layouts = {name: layout_of(x, address) for (name, x), address in zip(arrays.items(), addresses)}
            mask, score, tscore, *_ = lowered
            call = LoweredCall(layouts, mask, deterministic, score, tier, whole, tscore, kind[0])
            planned = plan(pass_, self.routes_of(pass_), problem, gpu.device, call)
            with naming_functions(inputs):
                program = gpu.load(planned, tuple(arrays), problem.sum_dtype)
            gpu.keep(key, program)
        launch(gpu, program, arrays, addresses, lowered.numbers, problem, inputs.score)
        return True

    def place(self):
        """The device and stream for which results of this call may be kept; None in a capture, whose memory belongs to
        the graph."""
        return None if self.current().stream().is_capturing() else self.place_before()

    def place_before(self):
        """That of calls before the capture of this one."""
        gpu = self.current()
        return gpu.device.index, gpu.stream().ptr

    def scratch(self):
        """A context in which all memory of a capture belongs to the graph."""
        gpu = self.current()
        return gpu.scratch_memory(gpu.stream().is_capturing())

    def states_of_blocks(self, mask):
        """The states of the blocks of a fitted Where, kept for later calls, if there may be any."""
        gpu, place = self.current(), self.place()
        return states(gpu, mask) if place is None else mask._states_kept(place, partial(states, gpu))

    def shown_by_function(self, mask):
        """The booleans of a fitted Where."""
        return shown_by_function(self.current(), mask)


@lru_cache(maxsize=1024)
def about_of(problem, names):
    """Shape and dtype, by name, of those of these arrays that follow from the problem; nobody changes the dict. Of
    lse's low part there is little in half precision, and kernels do not take it."""
    found = {name: ARRAYS[name](problem) for name in names if name in ARRAYS}
    if problem.dtype != problem.sum_dtype:
        found.pop("lse_low", None)
    return found


def empties(gpu, about):
    """Arrays by name, of these shapes and dtypes."""
    if "lse_low" not in about:
        return {name: gpu.empty(*x) for name, x in about.items()}
    others = {name: gpu.empty(*x) for name, x in about.items() if name not in LSE}
    return others | dict(zip(LSE, gpu.pair(*about["lse"])))


def fill(results):
    """Results, arrays by name, where nothing is seen."""
    for name, x in results.items():
        x.fill(NOTHING.get(name, 0))


def may_be_a_batch(problem, inputs, tangents):
    """Whether Tangents may be one more axis of the batch, since nothing else differs between elements of the batch."""
    alike = not (problem.dropout or inputs.score or inputs.mask._holds_arrays)
    return alike and problem.batch and tangents.count > 1


def one_by_one(problem, tangents, given, results, once):
    """The runs of a pass, one for each tangent: its number, the Problem, the given arrays and the results; once: names
    of results without an axis of the tangents."""
    for number in range(tangents.count):
        yield (number, problem, {name: x[number, ...] if name.startswith("t") else x for name, x in given.items()},
               {name: x if name in once else x[number, ...] for name, x in results.items()})  # fmt: skip


def as_a_batch(problem, tangents, given, results, once):
    """The single run of Tangents that `may_be_a_batch`."""
    axes = len(problem.batch) + 3

    def placed(arrays):
        return {name: x[(slice(None), *[None] * (axes - x.ndim))] if name in OF_INPUTS else x
                for name, x in arrays.items()}  # fmt: skip

    yield 0, replace(problem, batch=(tangents.count, *problem.batch)), placed(given), placed(results)


OF_INPUTS = {"tq", "tk", "tv", "tdq", "tdk", "tdv"}  # which may have fewer axes of the batch than o


def gradients_of_score(pass_, problem, parts):
    """Shape and dtype, by name, of the wanted gradients of a score's arrays that the kernels of a pass compute; for a
    function of all its arrays, one after the other."""
    return {gradient_of_part(number): part._gradient_like(problem.sum_dtype, problem.wide)
            for number, part in enumerate(parts) if part._wants_gradient and pass_.differentiates(part)}  # fmt: skip


def arrays_of(cache):
    """The arrays of a cache by name, for kernels that read it in place."""
    arrays = {"k": bits_of(cache.k), "v": bits_of(cache.v), "table": cache.table, "k scale": cache.k_scale,
              "v scale": cache.v_scale}  # fmt: skip
    return {name: x for name, x in arrays.items() if x is not None}


def is_apart(problem):
    """Whether tokens of a cache lie in pages, or have 8 bits."""
    return problem.cache is not None and problem.cache != (problem.dtype, None) and not problem.is_empty


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


def naming_functions(inputs):
    """Name the user's own functions in Numba's errors."""
    of_score = [part._function for part in inputs.score if isinstance(part, FunctionPart)]
    of_mask = [leaf.function for leaf in inputs.mask._leaves if isinstance(leaf, Where)]
    return naming(*of_score, *of_mask, of="score" if of_score else "mask")


class Lowered(NamedTuple):
    """The options of a call as kernels take them, without their arrays."""

    mask: Any  # a LoweredMask
    score: tuple = ()  # a LoweredPart for each part
    tscore: tuple = ()  # of tangents, likewise, or None
    about: tuple = ()  # what a plan depends on: all of these, and the layouts of their arrays
    numbers: tuple = ()  # in the order of NUMBERS
    sees_nothing: bool = True


def lower(problem, mask, scale, dropout, origin, kind, score=(), tparts=()):
    """The Lowered of a call, and the arrays of its options by name. kind: KindNumbers; tparts: see `Passes.launch`."""
    mask, arrays, lies = lowered_mask(mask, problem.seqlen_q, problem.seqlen_k)
    if problem.is_empty or not (mask.last_key and mask.last_query):
        return Lowered(mask), arrays
    score, of_score, at = lower_parts(score, problem)
    tscore, of_tangents, tat = lower_parts(tparts, problem, tangent_of_part)
    about, numbers = (mask[1:], score, tscore, lies, at, tat), numbers_of(mask.numbers, dropout, origin, scale, kind)
    return Lowered(mask, score, tscore, about, numbers, False), {**arrays, **of_score, **of_tangents}


@lru_cache(maxsize=1024)
def lower_numbers(*options):
    """The Lowered of a call whose options are nothing but numbers."""
    return lower(*options)[0]


def lower_parts(parts, problem, numbered=int):
    """A LoweredPart or None for each part or None, their arrays by name, and the layouts of these. numbered: turns a
    part's number into the one in names."""
    if not parts:
        return (), {}, ()
    found = [part and lowered_part(part, numbered(number), problem) for number, part in enumerate(parts)]
    found = [each or (None, {}, ()) for each in found]
    arrays = {name: x for _, of_part, _ in found for name, x in of_part.items()}
    return tuple([lowered for lowered, _, _ in found]), arrays, tuple([at for _, _, at in found])


def launch(gpu, program, arrays, addresses, numbers, problem, parts):
    """Launch a Program, with the temporaries and stand-ins of its Plan; parts: of the score."""
    planned, stream = program.plan, gpu.stream()
    others = [gpu.scrap]
    if planned.uses_counters:
        others.append(gpu.counters(stream.ptr, stream.is_capturing()))
    if not planned.allocates:
        program.launch(addresses + others, numbers, stream.ptr)
        return
    with gpu.scratch_memory(stream.is_capturing()):
        results = ()
        if planned.stand_ins:
            results = add_stand_ins(gpu, planned, arrays)
            addresses, _ = gpu.addresses(arrays)
        temporaries = gpu.temporaries(planned)
        program.launch(addresses + temporaries.addresses + others, numbers, stream.ptr)
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
    lowered, found = lower(problem, inputs.mask, inputs.scale, inputs.dropout, inputs.origin, NO_KIND, inputs.score)
    given = {name: layout_of(x, 0) for name, x in ({"q": q, "k": k, "v": v} | found).items()}

    def planned(pass_):
        made = about_of(problem, (*pass_.takes, *pass_.gives)) | gradients_of_score(pass_, problem, inputs.score)
        layouts = {name: contiguous(*about) for name, about in made.items()} | given
        tscore = (None,) * len(lowered.score)
        call = LoweredCall(layouts, lowered.mask, deterministic, lowered.score, latest.get(), True, tscore)
        return plan(pass_, kernels.routes_of(pass_), problem, device, call)

    return tuple(map(planned, passes))


def owners_of(particles, q):
    """What a kernel reads of Particles, by name, where q is, by one copy."""
    owners = [x.astype(np.int32) for x in (particles.queries, particles.keys, particles.starts)]

    def copied():
        whole = moved(np.concatenate(owners), q)
        return dict(zip(OWNERS, np.split(whole, np.cumsum([x.size for x in owners])[:-1].tolist())))

    return kept((OWNERS, *[x.tobytes() for x in owners]), q, copied)

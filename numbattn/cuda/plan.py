"""Problem, device and layouts -> Plan: what a pass does, in order. Values, no CUDA: any machine can read a plan."""

import math
from typing import Any, NamedTuple

import numpy as np

from .build import Key
from .kernels.tile_states import STATES, states_shape
from .kernels.visibility import GRIDS, diagonals_of, sides_of
from .spec import COUNTERS, DROPOUT, MASK, NUMBERS, SIDES, Boxes, Device, Line, Matrix, Sums, Work, padded_length
from .views import VECTOR_BYTES, View, alignment, broadcast, contiguous, fits_tensor_map, pieces

UINT32 = np.dtype(np.uint32)
KB = 1024
DEVICES = {  # a typical one of each compute capability, to plan for without a GPU
    (7, 5): Device(0, (7, 5), 40, 64 * KB),
    (8, 0): Device(0, (8, 0), 108, 163 * KB),
    (8, 6): Device(0, (8, 6), 84, 99 * KB),
    (8, 9): Device(0, (8, 9), 128, 99 * KB),
    (9, 0): Device(0, (9, 0), 132, 227 * KB),
    (10, 0): Device(0, (10, 0), 148, 227 * KB),
    (12, 0): Device(0, (12, 0), 170, 99 * KB),
}
RESULTS = "o", "dq", "dk", "dv"
SINK, SINK_BYTES = "sink", 1 << 20  # device memory for results that nobody reads


class StandIn(NamedTuple):
    """An array that kernels take in place of a given one: a copy of an input, or what is summed into a result."""

    name: str
    shape: tuple
    dtype: Any
    why: str
    is_result: bool


class Temporary(NamedTuple):
    """An array that only exists during the pass."""

    name: str
    shape: tuple
    dtype: Any
    is_zero: bool = False  # at first

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.dtype.itemsize


class At(NamedTuple):
    """An argument: a View of an array of the call, by name; its pointer counts from the array's address."""

    array: str
    view: View


class Step(NamedTuple):
    """A launch."""

    key: Key
    tiles: Any
    blocks: Any  # their number, or along three axes
    arguments: tuple  # as in the kernel's signature, tuples flat: At, a name of NUMBERS, or a number


class Plan(NamedTuple):
    """A pass: fill the stand-ins of inputs, launch the steps, read the stand-ins of results."""

    stand_ins: tuple
    temporaries: tuple
    steps: tuple
    allocates: bool  # whether there are stand-ins or temporaries
    uses_counters: bool

    def names(self, arrays):
        """The names of all whose addresses its launches take, in order, for a call with arrays of these names."""
        return [*arrays, *(x.name for x in self.temporaries), SINK, *[COUNTERS.name] * self.uses_counters]


class Call(NamedTuple):
    """What a plan depends on, beside Problem and Device."""

    layouts: dict  # of all its arrays by name, without "lse" if it is not wanted
    keys: int  # the most that a query sees, by the mask's band alone
    last_key: int  # no query sees this one or any after it: there may be NaN
    grids: tuple = ()  # (rows, columns) of a cell of each grid of the mask
    last_query: int | None = None  # it and those after it see nothing: there may be NaN
    deterministic: bool = True


def plan(candidates, problem, device, call):
    """The Plan of a pass whose kernels are, in order, the first of the candidates that take the work."""
    return Planner(problem, device, call).plan(candidates)


class Planner:
    def __init__(self, problem, device, call):
        self.problem, self.device, self.call = problem, device, call
        self.layouts, self.stand_ins, self.temporaries, self.steps = dict(call.layouts), {}, {}, []
        self.axes, self.states = problem.batch[:-1] or (1,), None
        sides = [side for side in SIDES if side in self.layouts]
        self.mask = (*sides, *(GRIDS[kind] for kind in problem.mask_kinds if kind in GRIDS))

    def plan(self, candidates):
        chosen = [next(spec for spec in specs if spec.takes(self.work())) for specs in candidates]
        arguments = [argument for spec in chosen for argument in spec.arguments]
        # those of all steps first, since a stand-in takes an array's place in all of them: what tensor maps need most
        for argument in sorted(arguments, key=lambda argument: not isinstance(argument, Boxes)):
            self.find_array(argument)
        for spec in chosen:
            self.add(spec)
        stand_ins, temporaries = (tuple(found.values()) for found in (self.stand_ins, self.temporaries))
        counted = any(isinstance(x, At) and x.array == COUNTERS.name for step in self.steps for x in step.arguments)
        return Plan(stand_ins, temporaries, tuple(self.steps), bool(stand_ins or temporaries), counted)

    def find_array(self, argument):
        if isinstance(argument, Matrix | Boxes):
            self.find_matrix(argument)
        elif isinstance(argument, Line):
            self.find_line(argument)
        elif isinstance(argument, Sums):
            self.find_sums(argument)

    def add(self, spec):
        """The steps of a kernel."""
        work = self.work(spec)
        tiles = spec.fitting(work)
        if tiles is None:
            sizes = f"{self.problem.dtype} with head_dim {self.problem.head_dim}, {self.problem.head_dim_v}"
            room = f"{self.device.shared} bytes of shared memory"
            raise NotImplementedError(f"{spec.name}: no tiles of {sizes} in {room}")
        if "blocks" in self.mask and MASK in spec.arguments:
            self.find_states(spec, tiles, work)
        for more in spec.variants(work):
            self.add_launches(spec, work, tiles, spec.parameters(work, tiles) | more)

    def work(self, spec=None):
        """What `spec` has to do."""
        matrices = [] if spec is None else [x.name for x in spec.arguments if isinstance(x, Matrix)]
        aligned = all(alignment(self.layouts[name]) == VECTOR_BYTES for name in matrices)
        dtypes = {name: layout.dtype for name, layout in self.layouts.items()}
        nbytes = VECTOR_BYTES if aligned else 0
        return Work(
            self.problem, self.device, self.mask, self.call.keys, dtypes, nbytes, self.call.deterministic
        )

    # ------------------------------------------------------------------------------------------------------- arrays
    def find_matrix(self, argument):
        """Let the kernel take this array as it is given, or a stand-in."""
        name = argument.name
        if name in self.stand_ins:
            return
        given, is_result = self.layouts[name], name in RESULTS and not (name == "o" and "do" in self.layouts)
        shape, dtype, why = given.shape, given.dtype, None
        heads = self.problem.heads if argument.heads == "q" else self.problem.heads_k
        if name in ("dq", "dk", "dv") and shape[:-2] != (whole := self.batch(heads)):
            shape, dtype, why = (*whole, *shape[-2:]), self.problem.sum_dtype, "summed over the axes that are broadcast"
        if not shape[-1]:
            shape, why = (*shape[:-1], 1), "has no features"
        if isinstance(argument, Boxes) and not fits_tensor_map(given):
            columns = VECTOR_BYTES // dtype.itemsize
            shape = *shape[:-1], -(-shape[-1] // columns) * columns
            why = "does not lie as tensor maps need it"
        if why is not None:
            self.stand_ins[name] = StandIn(name, shape, dtype, why, is_result)
            self.layouts[name] = contiguous(shape, dtype)

    def find_line(self, argument):
        """Where the call has no such array: a temporary, or one line of the sink for all heads if it is not wanted."""
        name, shape, dtype = argument.name, self.problem.lse_shape, self.problem.sum_dtype
        if name in self.layouts or name == "dlse":
            return
        if argument.padded:
            shape = *shape[:-1], padded_length(shape[-1])
        if name == "lse" and shape[-1] * dtype.itemsize <= SINK_BYTES:
            self.layouts[SINK] = contiguous(shape[-1:], dtype)
            return
        self.add_temporary(name, shape, dtype)

    def find_sums(self, argument):
        size = padded_length(self.problem.seqlen_q) * max(64, -(-self.problem.head_dim // 64) * 64)
        self.add_temporary(argument.name, (*self.problem.lse_shape[:-1], size), self.problem.sum_dtype, is_zero=True)

    def add_temporary(self, name, shape, dtype, is_zero=False):
        self.temporaries[name] = Temporary(name, shape, dtype, is_zero)
        self.layouts[name] = contiguous(shape, dtype)

    def find_states(self, spec, tiles, work):
        """The temporary for the states of tiles, and the step that computes them."""
        m_blocks, n_blocks = self.tiles_of(tiles)
        kept_and_other = (m_blocks, n_blocks) if spec.keeps == "q" else (n_blocks, m_blocks)
        shape = *self.problem.batch, *states_shape(*kept_and_other)
        name, states = f"states of {spec.name}", STATES[spec.keeps]
        self.add_temporary(name, shape, UINT32)
        self.states = name
        self.add_launches(states, work, tiles, states.parameters(work, tiles))

    def batch(self, heads):
        """The batch axes of an array with this number of heads."""
        return (*self.problem.batch[:-1], heads) if self.problem.batch else ()

    # ----------------------------------------------------------------------------------------------------- launches
    def add_launches(self, spec, work, tiles, parameters):
        """A step for each piece of the batch."""
        key, numbers = Key.of(spec.factory, spec.cc(self.device), **parameters), spec.numbers(work, tiles)
        arguments = [x for argument in spec.arguments for x in self.flat(argument, numbers)]
        views = [x.view if isinstance(x, At) and x.array != COUNTERS.name else None for x in arguments]
        blocks = spec.blocks(work, tiles, *self.tiles_of(tiles))
        for piece in pieces(self.axes, views):
            own = tuple(
                piece.first * self.problem.heads if x == "first" else x if view is None else At(x.array, view)
                for x, view in zip(arguments, piece.views)
            )
            started = min(blocks * piece.batch, self.device.multiprocessors if spec.persistent else math.inf)
            self.steps.append(Step(key, tiles, started, own))

    def tiles_of(self, tiles):
        return -(-self.problem.seqlen_q // tiles.tile_m), -(-self.problem.seqlen_k // tiles.tile_n)

    def flat(self, argument, numbers):
        """An argument of a Spec as the signature has it: At, names of NUMBERS, numbers."""
        problem = self.problem
        if isinstance(argument, Boxes) and argument.heads == "k":
            yield self.at(argument.name, "k", rows=max(self.call.last_key, 1))
        elif isinstance(argument, Boxes) and argument.name in ("q", "do") and self.call.last_query is not None:
            yield self.at(argument.name, rows=max(self.call.last_query, 1))
        elif isinstance(argument, Matrix | Boxes):
            yield self.at(argument.name, argument.heads)
        elif isinstance(argument, Sums):
            yield self.at(argument.name, own=1)
        elif isinstance(argument, Line):
            other = {"lse": SINK, "dlse": "lse"}            # not wanted; not given, and no kernel reads it
            yield self.at(argument.name if argument.name in self.layouts else other[argument.name], own=1)
        elif argument is DROPOUT:
            yield from ("threshold", "offset", "key_low", "key_high", "first")
        elif argument is COUNTERS:
            yield At(COUNTERS.name, View(0, 4, (2,), (4,)))
        elif argument is MASK:
            yield from self.sight()
        elif argument in numbers:
            yield numbers[argument]
        else:
            yield argument if argument in NUMBERS else getattr(problem, argument)

    def sight(self):
        """The fields of a kernels.visibility.Sight."""
        yield from SIDES
        for side in sides_of(self.mask):
            yield self.at(side, own=0)
        for side in diagonals_of(self.mask):
            yield f"{side}_shift"
        for number, sizes in enumerate(self.call.grids):
            yield self.at(f"cells {number}")
            yield from sizes
        if "blocks" in self.mask:
            yield self.at(self.states)

    def at(self, name, heads="q", own=2, rows=None):
        """A View with all batch axes, stride 0 where it is broadcast, of `rows` rows of each matrix."""
        shape, strides, dtype, _ = self.layouts[name]
        if rows is not None:
            shape = *shape[:-2], min(rows, shape[-2]), shape[-1]
        heads = self.problem.heads if heads == "q" else self.problem.heads_k
        return At(name, broadcast(View(0, dtype.itemsize, shape, strides), (*self.axes, heads), own))

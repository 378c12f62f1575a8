"""A pass over the edges of a graph -> its Plan: kernels, their grids and arguments, temporaries. No array is read.

Arrays are known by name: those of the call, "do", "o", "lse", "dlse"; the tangents of these, "tq" and so on; gradients,
"dq" and so on. Lists of edges are "query starts" and so on, arrays of the score "score 0 array 0", their tangents
"score 0 along", their gradients "score 0 gradient 0".
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ...functions.compiled import chain
from ...graphs import graph
from ...graphs.problem import AXES
from ..compiler import from_dtype
from ..kernel import FromCall, is_number, step_of, type_of
from ..kernels.shared.exact_sums import SIZE
from ..kernels.shared.layouts import sum_type
from ..tile.alignment import ArrayLayout, alignment
from ..views import View, contiguous
from ..words.steps import At, Plan, Temporary, Workspace
from .backward import backward, delta, rounded
from .forward import forward, merge, tangent
from .steps import BLOCKS, THREADS, Arrays, Drops, Form, Lists, rows_of_block

QUERY, KEY = "query", "key"
STATISTICS, ZEROS, READS = "statistics", "zeros", "reads"
LISTS = "rows", "others", "numbers", "parts", "counts"


class Lowered(NamedTuple):
    """What a Plan depends on, besides the device."""

    pass_: str  # a method of Planner
    problem: Any
    layouts: dict  # of all arrays by name
    score: tuple = ()  # a LoweredPart for each of its parts
    adds: bool = False  # whether several score matrices add to the gradient of an array of edges


class LoweredPart(NamedTuple):
    """A part of a score."""

    link: Any
    numbers: tuple = ()  # in place of arrays
    arrays: int = 0  # how many
    first: int = 0  # where its elements begin among those of all gradients
    gradients: tuple = ()  # of each array with a gradient: its number, where its elements begin, and how many there are


class Held:
    """An array as kernels take it, so many bytes after the start of the memory of one by name."""

    def __init__(self, name, layout, offset=0):
        self.name, self.layout, self.offset = name, layout, offset
        self.dtype, self.ndim, self.shape = layout.dtype, len(layout.shape), layout.shape

    @property
    def given(self):
        return At(self.name, View(self.offset, self.dtype.itemsize, self.shape, self.layout.strides))


def of(name):
    """The name of what something is a gradient or tangent of."""
    return name if name in ("do", "dlse") or name[0] not in "dt" else name[1:]


def in_heads(problem, name, layout):
    """The layout of an array of this name as (batch, heads, *own axes); None if its strides have none."""
    name, (shape, strides, dtype, address) = of(name), layout
    own = 1 if name.endswith("lse") else AXES.get(name, 2)
    heads, given = problem.heads_k if name in ("k", "v") else problem.heads, len(shape) - own
    batch = (1, *problem.batch[:-1], heads)
    steps = [0] * (len(batch) - given) + [0 if n == 1 else step for n, step in zip(shape[:given], strides)]
    size, stride = 1, 0
    for n, step in zip(batch[-2::-1], steps[-2::-1]):
        if size > 1 and n > 1 and step != size * stride:
            return None
        size, stride = size * n, step if size == 1 else stride
    return ArrayLayout((size, heads, *shape[given:]), (stride, steps[-1], *strides[given:]), dtype, address)


def apart(problem, layouts):
    """Names of the arrays that kernels cannot take as they lie."""
    names = {*"qkv", "o", "lse", "do", "dlse", *problem.given}
    return [name for name, x in layouts.items() if of(name) in names and in_heads(problem, name, x) is None]


class Planner:
    """The Plan of a call."""

    def __init__(self, device, lowered):
        self.device, (_, self.problem, self.layouts, self.score, self.adds) = device, lowered
        self.steps, self.temporaries = [], {}
        getattr(self, lowered.pass_)()
        temporaries = sorted(self.temporaries.values(), key=lambda x: not x.is_zero)
        workspace = Workspace.of(temporaries)
        self.plan = Plan((), tuple(temporaries), tuple(self.steps), bool(temporaries), False, workspace)

    # ------------------------------------------------------------------------------------------------------- passes
    def forward(self):
        arrays, results = self.arrays(), [self.held("o"), self.held("lse")]
        form, numbers = self.form(0, *features(arrays), results[0])
        self.over_rows(QUERY, forward(form), form, 1, (arrays, *results), numbers, [results], form.softmax)

    def tangent(self, bends=False):
        arrays, moved, results = self.arrays(), self.arrays("t"), [self.held("to"), self.held("tlse")]
        given, second = (arrays, moved, self.held("o"), self.held("lse")), [self.held("o2")] if bends else []
        form, numbers = self.form(2 + bends, *features(given), results[0], *second)
        merged = [results, *[[x] for x in second]]
        self.over_rows(QUERY, tangent(form, bends), form, 1, (*given, *results, *(second or [()])), numbers, merged)

    def laplacian(self):
        self.tangent(bends=True)

    def backward(self):
        self.gradients((), [("do", "o")], None)

    def backward_tangent(self):
        pairs = [("do", "to"), *[("tdo", "o")] * ("tdo" in self.layouts)]
        self.gradients(self.arrays("t", "do"), [("do", "o")], pairs)

    def gradients(self, moved, *pairs):
        """The gradients of all arrays, or their tangents. pairs: of which D is made, and its tangent, if there are any.
        """
        arrays, sums, order = self.arrays("", "do"), self.arrays("d"), 2 if moved else 1
        form, numbers = self.form(order, *features(arrays), *features(moved), *features(sums), moves=bool(moved))
        statistics = self.statistics([x for x in pairs if x]) if self.problem.softmax else ()
        count, elements = math.prod(self.problem.matrices), sum(x[2] for part in self.score for x in part.gradients)
        reads = self.temporary(READS, (elements * SIZE,), np.dtype(np.int64), True) if elements else ()
        for end, adds, together, merged in (
            (QUERY, self.adds, count if self.adds else 1, [sums.q]),
            (KEY, False, self.problem.group_size, [sums.k, sums.v]),
        ):
            kernel, rest = backward(form, end == KEY, adds), (*numbers, reads, np.int32(together))
            self.over_rows(end, kernel, form, together, (arrays, moved, statistics, sums), rest, [[x] for x in merged])
        for number, part in enumerate(self.score):
            for at, first, size in part.gradients:
                out = f"score {number} gradient {at}"
                grad = Held(out, contiguous((size,), self.layouts[out].dtype))
                own = Held(READS, contiguous((size * SIZE,), reads.dtype), first * SIZE * reads.dtype.itemsize)
                self.start(rounded(), -(-size // THREADS), own, grad)

    def statistics(self, pairs):
        """lse and D = rowsum(do o) - dlse, and likewise their tangents, side by side."""
        *_, rows = self.layouts["lse"].shape
        shape = *self.problem.matrices, rows, 2 * len(pairs)
        whole = self.temporary(STATISTICS, shape, self.problem.sum_dtype)
        one = ArrayLayout(shape[:-1], whole.layout.strides[:-1], whole.dtype)
        found = [Held(STATISTICS, one, i * whole.dtype.itemsize) for i in range(shape[-1])]
        for number, of_pairs in enumerate(pairs):
            prefix, factors = "t" * number, tuple([tuple(map(self.held, pair)) for pair in of_pairs])
            gradient = (self.held(f"{prefix}dlse"),) if f"{prefix}dlse" in self.layouts else ()
            form, _ = self.form(0, *[x for pair in factors for x in pair])
            blocks = tiles_of(form, rows) * math.prod(self.problem.matrices)
            self.start(delta(form, len(factors), bool(gradient)), blocks, factors, gradient, self.held(f"{prefix}lse"),
                       *found[2 * number : 2 * number + 2])  # fmt: skip
        return tuple(found)

    # ---------------------------------------------------------------------------------------------------- arguments
    def form(self, order, *rows, moves=False):
        """The Form of a kernel that moves these arrays of rows, and what it takes of dropout, score, and the scale.
        order: of derivatives of the score."""
        problem, real = self.problem, sum_type(self.problem.dtype)
        nbytes, links = min(alignment(x.layout) for x in rows), tuple([part.link for part in self.score])
        form = Form(problem.dtype, problem.head_dim, problem.head_dim_v, problem.given, problem.softmax, nbytes,
                    problem.dropout, moves, links)  # fmt: skip
        names = ("threshold", np.uint32), *[(name, np.uint64) for name in Drops._fields[1:4]], ("kept_scale", real)
        drops = Drops(*[FromCall(*x) for x in names]) if problem.dropout else ()
        given = tuple([self.given(number, part, order) for number, part in enumerate(self.score)])
        if links:
            gradients = any(part.gradients for part in self.score)
            chain.check_all(links, type_of(given), from_dtype(problem.sum_dtype), order, gradients)
        return form, (drops, given, FromCall("scale", real))

    def given(self, number, part, order):
        """See `graphs.score.given_of`."""
        arrays = tuple([self.whole(f"score {number} array {at}") for at in range(part.arrays)])
        along = f"score {number} along"
        return part.numbers + arrays, (self.whole(along),) if along in self.layouts else (), part.first

    def arrays(self, prefix="", *more):
        """The Arrays of a call, or their tangents or gradients."""
        names = *"qkv", *more, *self.problem.given
        found = {name: self.held(prefix + name) for name in names}
        return Arrays(**{name: (x,) if name in AXES else x for name, x in found.items()})

    def held(self, name):
        """An array as (batch, heads, *own axes). Of a tangent that is not given, a row of zeros is in memory; of one
        without columns, a zero, since kernels read some memory in any case."""
        given = name if name in self.layouts else of(name)
        layout = in_heads(self.problem, given, self.layouts[given])
        if given == name and layout.shape[-1]:
            return Held(name, layout)
        *lead, last = layout.shape
        zeros = self.temporary(ZEROS, (max(self.problem.head_dim, self.problem.head_dim_v),), layout.dtype, True)
        strides = (*[0] * 3, *zeros.layout.strides)[: len(layout.shape)]          # numbers have no axis of features
        return Held(ZEROS, ArrayLayout((*lead, max(last, 1)), strides, layout.dtype))

    def whole(self, name):
        """An array as it lies."""
        return Held(name, self.layouts[name])

    def temporary(self, name, shape, dtype, is_zero=False):
        self.temporaries[name] = Temporary(name, shape, dtype, is_zero)
        return Held(name, contiguous(shape, dtype))

    # ------------------------------------------------------------------------------------------------------ kernels
    def over_rows(self, end, kernel, form, together, given, rest, merged, softmax=False):
        """Start a kernel for all rows of lists, and so many matrices at once. Rows vary fastest: those of a head share
        keys. merged: results of rows, each with its number or alone, which parts of long rows have, too."""
        found = {name: self.whole(f"{end} {name}") for name in LISTS if f"{end} {name}" in self.layouts}
        numbers, count = (found["numbers"],) if "numbers" in found else (), math.prod(self.problem.matrices) // together
        slots = min(found["parts"].shape[1], max(BLOCKS // count, 1))
        lists = Lists(**{**found, "numbers": numbers, "slots": np.int32(slots)})
        several = max(2 * lists.others.shape[0] // graph.PART, 1)
        parts = [[self.temporary(f"parts {end} {i} {j}", (*x.shape[:2], several, *x.shape[3:]), self.problem.sum_dtype)
                  for j, x in enumerate(results)] for i, results in enumerate(merged)]  # fmt: skip
        tiles = tiles_of(form, lists.rows.shape[1])
        self.start(kernel, (tiles + slots) * count, lists, *given, tuple(flat(map(tuple, parts))), *rest)
        for results, of_parts in zip(merged, parts) if lists.others.shape[0] > graph.PART else ():
            self.merge(lists, several, results, of_parts, softmax)

    def merge(self, lists, several, results, parts, softmax):
        """Merge what parts of rows have."""
        rows, matrices = results[0], math.prod(results[0].shape[:2])
        form = Form(self.problem.sum_dtype, 1, rows.shape[-1], (), softmax, alignment(rows.layout), False)
        count, slots = 1 + (len(results) > 1 and self.problem.softmax), min(several, max(BLOCKS // matrices, 1))
        self.start(merge(form, count > 1), slots * matrices, lists._replace(slots=np.int32(slots)),
                   tuple(results[:count]), tuple(parts[:count]))  # fmt: skip

    def start(self, kernel, blocks, *arguments):
        given = [x if is_number(x) else x.given for x in flat(arguments)]
        self.steps.append(step_of(self.device, kernel.function, (blocks, 1, 1), THREADS, kernel.nbytes,
                                  map(type_of, arguments), given, kernel.blocks))  # fmt: skip


def tiles_of(form, count):
    """Blocks for so many rows."""
    return -(-count // rows_of_block(form))


def features(arrays):
    """Those of these Arrays that are rows of features."""
    return [x for x in flat(arrays) if x.ndim == 4]


def flat(arguments):
    """All that is in tuples."""
    for x in arguments:
        yield from flat(x) if isinstance(x, tuple) else (x,)

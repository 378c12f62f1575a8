"""What a Plan consists of, and what it is made from. Values, no CUDA: any machine can read a plan."""

import math
from itertools import accumulate
from typing import Any, NamedTuple

from ..build import Key
from ..views import View
from .tiers import WGMMA

PLACE_BYTES = 512  # a temporary starts at a multiple of it, as what CuPy allocates does
SCRAP, SCRAP_BYTES = "scrap", 1 << 20  # device memory for results that nobody reads
COUNTERS_ARRAY = "counters"
BEFORE = "o before"  # over other keys, whose lse is that of the call: see kernels.shared.start
FIRST, END = "first key", "end of keys"  # of what each query sees, by intervals
GAPS = "first of gap {}", "end of gap {}"
SUMS_OF_DS = "sums of dS"  # over the batch, (..., heads or 1, seqlen_q, seqlen_k)
OFFSETS = "offsets of own keys"  # of each query, within its segment


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


class Workspace(NamedTuple):
    """One block of memory for all temporaries."""

    nbytes: int
    zeros: int  # so many bytes at its start are 0 at first
    offsets: tuple  # where each temporary is

    @classmethod
    def of(cls, temporaries):
        """For temporaries of which those that are 0 at first come first."""
        ends = list(accumulate(-(-x.nbytes // PLACE_BYTES) * PLACE_BYTES for x in temporaries))
        zeros = sum(x.is_zero for x in temporaries)
        return cls(ends[-1] if ends else 0, ends[zeros - 1] if zeros else 0, tuple([0, *ends][: len(ends)]))


class At(NamedTuple):
    """An argument: a View of an array of the call, by name; its pointer counts from the array's address."""

    array: str
    view: View
    has_batch: bool = True  # whether its first axes are those of the batch


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
    workspace: Workspace = Workspace(0, 0, ())

    def names(self, arrays):
        """The names of all whose addresses its launches take, in order, for a call with arrays of these names."""
        return [*arrays, *(x.name for x in self.temporaries), SCRAP, *[COUNTERS_ARRAY] * self.uses_counters]


class Lowered(NamedTuple):
    """A part of a score, or one of a mask that gives intervals, as kernels take it.

    Its array, if it has one, is "score 0" and so on, its offset, if that is an array, "score 0 offset"; those of a
    function are "score 0 array 0" ..., those of a mask's part "mask 0 0" ...
    """

    kind: str  # see kernels.scores, kernels.any.intervals
    numbers: tuple = ()  # in place of the arrays of a mask's part there is None
    gradient: Any = False  # whether that of its array is wanted; of a function's arrays, if any is, a bool for each


class LoweredGrid(NamedTuple):
    """A grid of a mask, as kernels take it. Its cells are "cells 0" and so on; arrays of a function are "function 0 0",
    "function 0 1" ...
    """

    kind: str  # see kernels.shared.visibility
    rows: int  # of a cell
    cols: int
    at: tuple | None = None  # from where a function counts, an Origin


class LoweredCall(NamedTuple):
    """A call as it is planned: what a plan depends on, besides Problem and Device."""

    layouts: dict  # of all its arrays by name, without "lse" if it is not wanted
    keys: int  # the most that a query sees, by the mask's band alone
    last_key: int  # no query sees this one or any after it: there may be NaN
    grids: tuple = ()  # a LoweredGrid for each grid of the mask
    last_query: int | None = None  # it and those after it see nothing: there may be NaN
    intervals: tuple = ()  # a Lowered for each of the mask's parts that give intervals
    deterministic: bool = True
    score: tuple = ()  # a Lowered for each of its parts
    tier: str = WGMMA  # the latest that may be taken: see tiers
    whole: bool = False  # whether lse is over these keys alone: see problem.Saved
    tscore: tuple = ()  # for each part of the score one with the tangent of its array in that one's place, or None
    kind: str = ""  # of a function of pairs of points: see kernels.points.kinds


def array_of_mask(number, which):
    """Its name: of those that give intervals."""
    return f"mask {number} {which}"


def array_of_grid(number, which):
    """Its name: of a function."""
    return f"function {number} {which}"


def array_of_part(number):
    """Its name."""
    return f"score {number}"


def array_of_offset(number):
    return f"{array_of_part(number)} offset"


def array_of_function(number, which):
    return f"{array_of_part(number)} array {which}"


def tangent_of_part(number):
    """What stands for its number in the names of arrays of one with a tangent in its array's place."""
    return f"{number} tangent"


def gradient_of_part(number):
    return f"gradient of score {number}"


def sums_by_row(number):
    """The name of what the gradient of a sink is summed from: numbers of rows."""
    return f"sums of score {number} by row"


def sums_of_part(number):
    """The name of what its gradient is summed from."""
    return f"sums of score {number}"


def partial_sums(name):
    """The name of those of an array (..., rows, cols): of each matrix (parts, rows, cols), see score_gradients."""
    return f"partial {name}"

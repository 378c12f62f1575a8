"""A Plan, its parts, and the lowered call that it is made from: values without CUDA, which any machine can read."""

import math
from itertools import accumulate
from typing import Any, NamedTuple

from ..build import Key
from ..views import View
from .numbers import MaskNumbers
from .tiers import WGMMA

PLACE_BYTES = 512  # temporaries start at multiples of it, as CuPy's allocations do
SCRAP, SCRAP_BYTES = "scrap", 1 << 20  # device memory for results that are not read
COUNTERS_ARRAY = "counters"
FIRST, END = "first key", "end of keys"  # that each query sees, by intervals
GAPS = "first of gap {}", "end of gap {}"
SUMS_OF_DS = "sums of dS"  # over the batch, (..., heads or 1, seqlen_q, seqlen_k)
OFFSETS = "offsets of own keys"  # for each query, within its segment


class StandIn(NamedTuple):
    """An array that kernels take in place of a given one: a copy of an input, or an array that is summed into a result.
    """

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
    zeros: int  # bytes at its start that are 0 at first
    offsets: tuple  # where each temporary is

    @classmethod
    def of(cls, temporaries):
        """For temporaries in this order: those that are 0 at first come first."""
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
        """The names of all arrays whose addresses its launches take, in order, for a call with arrays of these
        names."""
        return [*arrays, *(x.name for x in self.temporaries), SCRAP, *[COUNTERS_ARRAY] * self.uses_counters]


class LoweredPart(NamedTuple):
    """A part of a score, or one of a mask that gives intervals, as kernels take it.

    Its array, if it has one, is called "score 0" and so on; its offset, if that is an array, "score 0 offset"; a
    function's arrays are "score 0 array 0" ..., those of a mask's part "mask 0 0" ...
    """

    kind: Any  # a kernels.scores.ScoreKind, or a string of a part of a mask: see kernels.any.intervals
    numbers: tuple = ()  # with None in place of the arrays of a mask's part
    gradient: Any = False  # whether that of its array is wanted; for a function, if any is, a bool for each array


class LoweredGrid(NamedTuple):
    """A grid of a mask, as kernels take it. Its cells are "cells 0" and so on; arrays of a function are "function 0 0",
    "function 0 1" ...
    """

    kind: str  # see kernels.shared.visibility
    rows: int  # of a cell
    cols: int
    at: tuple | None = None  # the Origin that a function counts from


class LoweredMask(NamedTuple):
    """A mask without its arrays."""

    numbers: MaskNumbers  # which no plan depends on
    keys: int  # the most that a query sees, by the band alone
    last_key: int  # no query sees this key or any after it, which may be NaN
    grids: tuple = ()  # a LoweredGrid for each
    last_query: int | None = None  # this query and those after it see nothing, and may be NaN
    intervals: tuple = ()  # a LoweredPart for each part that gives intervals
    longest: int = 0  # the size of a small tile that all segments fit into; 0: it is not known, or there is none


class LoweredCall(NamedTuple):
    """What a plan depends on besides Problem and Device."""

    layouts: dict  # of all its arrays by name, without "lse" if it is not wanted
    mask: LoweredMask
    deterministic: bool = True
    score: tuple = ()  # a LoweredPart for each of its parts
    tier: str = WGMMA  # the latest that may be taken: see tiers
    whole: bool = False  # whether lse is over these keys alone: see problem.Saved
    tscore: tuple = ()  # for each part of the score one with the tangent in place of its array, or None
    kind: Any = None  # the form of a kind of function of pairs of points: see points.kinds


def array_of_mask(number, which):
    """The name of an array of part `number` of those that give intervals."""
    return f"mask {number} {which}"


def array_of_grid(number, which):
    """The name of an array of a function, grid `number`."""
    return f"function {number} {which}"


def array_of_part(number):
    """The name of the array of score part `number`."""
    return f"score {number}"


def array_of_offset(number):
    return f"{array_of_part(number)} offset"


def array_of_function(number, which):
    return f"{array_of_part(number)} array {which}"


def tangent_of_part(number):
    """What replaces a part's number in the names of arrays, if tangents are in their place."""
    return f"{number} tangent"


def sums_by_row(number):
    """The name of the numbers, one for each row, that the gradient of a sink is summed from."""
    return f"sums of score {number} by row"


def sums_of_part(number):
    """The name of the sums that a part's gradient is made from."""
    return f"sums of score {number}"


def partial_sums(name):
    """The name of the partial sums of an array (..., rows, cols), (parts, rows, cols) for each matrix: see
    score_gradients."""
    return f"partial {name}"

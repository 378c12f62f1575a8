"""Arguments, by which a kernel's file says what the kernel takes.

Each knows which arrays to find or make for a call, what it passes, and the type of that: kernels' signatures follow
from these, see signatures.py. Arguments with a type of their own, such as a mask, are in the file of that type:
`kernels.shared.visibility.MASK` and PACKING, `kernels.any.intervals.INTERVALS`, `kernels.scores.SCORE`,
`kernels.shared.dropout.DROPOUT`, `kernels.any.delta.SINK_SUMS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...call.passes import BEFORE
from ..compiler import types
from ..views import View, contiguous
from .signatures import array_type, several
from .steps import COUNTERS_ARRAY, SCRAP, SCRAP_BYTES, At, array_of_part

SMALLEST_TURN = 64  # queries of a tile that blocks add to in turn


class Argument:
    matrices = ()  # every MatrixOfCall in it: kernels depend on their layouts

    def find(self, planner, work):
        """Let the planner find or make the arrays, before all steps of a pass."""

    def flat(self, planner, work):
        """What the signature has of it, without tuples: At, names of spec.NUMBERS, numbers."""
        raise NotImplementedError

    def type(self, about):
        """Numba's type of it; about: a signatures.Compiled."""
        raise NotImplementedError


@dataclass(frozen=True)
class MatrixOfCall(Argument):
    """An array (batch, heads, rows, features), with the heads of "q" or of "k"; see Matrix and TmaMatrix."""

    name: str
    heads: str = "q"
    optional: bool = False  # whether a call may lack it: then nothing is passed
    may_be_empty: bool = False  # whether the kernel takes one without features as it is, else with one feature
    aligned = False  # whether its rows are moved in vectors of 16 bytes

    @property
    def matrices(self):
        return (self,)

    def is_given(self, planner):
        return not self.optional or self.name in planner.layouts

    def find(self, planner, work):
        if self.is_given(planner):
            planner.find_matrix(self.name, self.heads, self.aligned, self.may_be_empty)

    def flat(self, planner, work):
        if self.is_given(planner):
            yield planner.at(self.name, self.heads, rows=self.rows(planner.call))

    def type(self, about):
        kind = self.kind(about)
        return several(kind, self.name in about.given) if self.optional else kind

    def rows(self, call):
        """How many of its rows to pass; None for all."""

    def kind(self, about):
        """Numba's type of it, if it is given."""
        return about.matrix(self.name)


@dataclass(frozen=True)
class Matrix(MatrixOfCall):
    """A matrix that threads read or write, of any layout."""


@dataclass(frozen=True)
class Matrices(Matrix):
    """An array (batch, heads, several, rows, features)."""

    def find(self, planner, work):
        """It is taken as given."""

    def flat(self, planner, work):
        if self.is_given(planner):
            yield planner.at(self.name, self.heads, own=3)

    def kind(self, about):
        return array_type(about.dtype_of(self.name), 5)


@dataclass(frozen=True)
class AlignedMatrix(Matrix):
    """A Matrix whose rows are moved in vectors of 16 bytes."""

    aligned = True


@dataclass(frozen=True)
class TmaMatrix(MatrixOfCall):
    """A matrix that TMA moves, a tensor map, up to the last query or key that counts, since there may be NaN after it.

    A result of another dtype than the inputs, whose dtype tiles in shared memory have, is not a tensor map, nor is a
    matrix without features.
    """

    aligned = True

    def rows(self, call):
        inputs = "q", "do", "tq", "tdo"
        last = call.mask.last_key if self.heads == "k" else call.mask.last_query if self.name in inputs else None
        return None if last is None else max(last, 1)

    def kind(self, about):
        is_map = about.dtype_of(self.name) == about.dtype and not (self.may_be_empty and about.head_dim_v == 0)
        return types.uint64 if is_map else about.matrix(self.name)


@dataclass(frozen=True)
class RaggedMatrix(Argument):
    """A Matrix for rows that TMA cannot store, since a segment ends in their tile; nothing if arrays are not packed:
    see kernels.shared.segments."""

    name: str

    def flat(self, planner, work):
        if work.segments:
            yield planner.at(self.name)

    def type(self, about):
        return several(about.matrix(self.name), about.is_packed)


class OBefore(Argument):
    """O over other keys, from which a call resumes, a Matrix; else nothing: see kernels.shared.start."""

    def find(self, planner, work):
        if BEFORE in planner.layouts:
            planner.find_matrix(BEFORE, "q", aligned=True, may_be_empty=True)

    def flat(self, planner, work):
        if BEFORE in planner.layouts:
            yield planner.at(BEFORE)

    def type(self, about):
        return several(about.sums_of(4), about.resumes)


O_BEFORE = OBefore()


@dataclass(frozen=True)
class Statistic(Argument):
    """An array (batch, heads, seqlen_q), or longer if it is padded: see `spec.Work.padded_length`.

    One that the pass takes but the call does not give is not read, and a result that nobody wants is not needed: both
    are a row of scrap memory for all heads, if it fits. Others are temporaries.
    """

    name: str
    padded: bool = False
    has_low: bool = False  # whether a second half, but for half precision, has what rounding took from the first

    def find(self, planner, work):
        name, shape, dtype = self.name, planner.problem.lse_shape, planner.problem.sum_dtype
        if name in planner.layouts:
            return
        if self.padded:
            halves = 2 if self.has_low and dtype == planner.problem.dtype else 1
            shape = *shape[:-1], halves * work.padded_length
        fits = shape[-1] * dtype.itemsize <= SCRAP_BYTES
        if name in planner.pass_.takes or (name in planner.pass_.gives and fits):
            planner.layouts[SCRAP] = contiguous(shape[-1:], dtype)
        else:
            planner.add_temporary(name, shape, dtype)

    def flat(self, planner, work):
        name = self.name if self.name in planner.layouts else SCRAP
        yield planner.at(name, own=1, rows=None if self.padded else work.problem.seqlen_q)

    def type(self, about):
        return about.sums_of(3)


LSE_LOG2 = Statistic("lse_log2", padded=True, has_low=True)  # see kernels.shared.recompute


@dataclass(frozen=True)
class MatrixSums(Argument):
    """Sums for a matrix (batch, heads, seqlen_q, head_dim) that blocks add to: see tile.accumulation."""

    name: str
    is_zero: bool = True  # at first

    def find(self, planner, work):
        size = work.padded_length * max(64, -(-work.problem.head_dim // 64) * 64)
        shape = *work.problem.lse_shape[:-1], size
        planner.add_temporary(self.name, shape, work.problem.sum_dtype, self.is_zero)

    def flat(self, planner, work):
        yield planner.at(self.name, own=1)

    def type(self, about):
        return about.sums_of(3)


class Turns(Argument):
    """How many blocks have added to the sums of each tile of queries, 0 at first, where they take turns."""

    def find(self, planner, work):
        shape = *work.problem.lse_shape[:-1], work.padded_length // SMALLEST_TURN
        planner.add_temporary("turns", shape, np.dtype(np.uint32), is_zero=True)

    def flat(self, planner, work):
        yield planner.at("turns", own=1)

    def type(self, about):
        return array_type(np.uint32, 3)


@dataclass(frozen=True)
class TmaBias(Argument):
    """A bias whose tiles TMA loads, a tensor map, if there is one."""

    number: Callable  # (work) -> the number of its part, or None

    def flat(self, planner, work):
        if (number := self.number(work)) is not None:
            yield planner.at(array_of_part(number))

    def type(self, about):
        return several(types.uint64, about.bias_dtype != "")


@dataclass(frozen=True)
class Own(Argument):
    """An array (batch, heads, parts, rows, cols) with its own batch axes, of size 1 where it is broadcast."""

    name: str

    def flat(self, planner, work):
        yield planner.at(self.name, own=3)

    def type(self, about):
        return array_type(about.own_dtype, 5)


@dataclass(frozen=True)
class BlockScratch(Argument):
    """Memory for a kernel's blocks, a matrix each, planned with the launch under this name."""

    name: str

    def flat(self, planner, work):
        yield self.name

    def type(self, about):
        return about.sums_of(3)


@dataclass(frozen=True)
class Numbers(Argument):
    """The fields of a tuple of numbers: names of spec.NUMBERS, and "first", the first element of a piece of the batch.
    """

    names: tuple
    kind: Any  # its type

    def flat(self, planner, work):
        yield from self.names

    def type(self, about):
        return self.kind


class CountersArgument(Argument):
    """Two counters that persistent blocks draw work from: see counters.py."""

    def flat(self, planner, work):
        yield At(COUNTERS_ARRAY, View(0, 4, (2,), (4,)), has_batch=False)

    def type(self, about):
        return array_type(np.uint32, 1)


COUNTERS = CountersArgument()

"""The words in which a kernel's file says what the kernel takes. No CUDA here.

Each says what it needs found or made for a call, and what it passes. Words for what has a type of its own, as a mask
has, are beside that type: `kernels.shared.visibility.MASK` and PACKING, `kernels.any.intervals.INTERVALS`,
`kernels.scores.SCORE`, `kernels.shared.dropout.DROPOUT`, `kernels.any.delta.SINK_SUMS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..views import View, contiguous
from .steps import BEFORE, COUNTERS_ARRAY, SINK, SINK_BYTES, At, array_of_part


class Word:
    def find(self, planner, work):
        """Before all steps of a pass: let the planner find or make the arrays."""

    def flat(self, planner, work):
        """What the signature has of it, tuples flat: At, names of spec.NUMBERS, numbers."""
        raise NotImplementedError


@dataclass(frozen=True)
class Matrix(Word):
    """An array (batch, heads, rows, features), with the heads of "q" or of "k"."""

    name: str
    heads: str = "q"

    def find(self, planner, work):
        planner.find_matrix(self.name, self.heads)

    def flat(self, planner, work):
        yield planner.at(self.name, self.heads)


@dataclass(frozen=True)
class AlignedMatrix(Matrix):
    """A Matrix whose rows are moved in vectors of 16 bytes."""

    def find(self, planner, work):
        planner.find_matrix(self.name, self.heads, aligned=True)


@dataclass(frozen=True)
class TmaMatrix(Word):
    """A Matrix that TMA moves, a tensor map: up to the last query or key that counts, since behind it may be NaN."""

    name: str
    heads: str = "q"

    def find(self, planner, work):
        planner.find_matrix(self.name, self.heads, aligned=True)

    def flat(self, planner, work):
        call = planner.call
        last = call.last_key if self.heads == "k" else call.last_query if self.name in ("q", "do") else None
        yield planner.at(self.name, self.heads, rows=None if last is None else max(last, 1))


@dataclass(frozen=True)
class RaggedMatrix(Word):
    """A Matrix for rows that TMA cannot store, since a segment ends in their tile; nothing where arrays are not packed:
    see kernels.shared.segments."""

    name: str

    def flat(self, planner, work):
        if work.segments:
            yield planner.at(self.name)


class OBefore(Word):
    """O over other keys, from which a call goes on, a Matrix; nothing where it starts: see kernels.shared.start."""

    def find(self, planner, work):
        if BEFORE in planner.layouts:
            planner.find_matrix(BEFORE, "q", aligned=True)

    def flat(self, planner, work):
        if BEFORE in planner.layouts:
            yield planner.at(BEFORE)


O_BEFORE = OBefore()


@dataclass(frozen=True)
class Statistic(Word):
    """An array (batch, heads, seqlen_q), or longer if it is padded: see `spec.Work.padded_length`."""

    name: str
    padded: bool = False

    def find(self, planner, work):
        """Where the call has none: a temporary, or one row of the sink for all heads if it is not wanted."""
        name, shape, dtype = self.name, planner.problem.lse_shape, planner.problem.sum_dtype
        if name in planner.layouts or name == "dlse":
            return
        if self.padded:
            shape = *shape[:-1], work.padded_length
        if name == "lse" and shape[-1] * dtype.itemsize <= SINK_BYTES:
            planner.layouts[SINK] = contiguous(shape[-1:], dtype)
            return
        planner.add_temporary(name, shape, dtype)

    def flat(self, planner, work):
        instead = {"lse": SINK, "dlse": "lse"}              # not wanted; not given, and no kernel reads it
        name = self.name if self.name in planner.layouts else instead[self.name]
        yield planner.at(name, own=1, rows=None if self.padded else work.problem.seqlen_q)


@dataclass(frozen=True)
class MatrixSums(Word):
    """Sums for a matrix (batch, heads, seqlen_q, head_dim) to which blocks add, from zero: see tile.accumulation."""

    name: str

    def find(self, planner, work):
        size = work.padded_length * max(64, -(-work.problem.head_dim // 64) * 64)
        shape = *work.problem.lse_shape[:-1], size
        planner.add_temporary(self.name, shape, work.problem.sum_dtype, is_zero=True)

    def flat(self, planner, work):
        yield planner.at(self.name, own=1)


@dataclass(frozen=True)
class TmaBias(Word):
    """A bias whose tiles TMA loads, a tensor map, if there is one."""

    number: Callable  # (work) -> that of its part, or None

    def flat(self, planner, work):
        if (number := self.number(work)) is not None:
            yield planner.at(array_of_part(number))


@dataclass(frozen=True)
class Own(Word):
    """An array (batch, heads, parts, rows, cols) with axes of its own: of one matrix for all where it is broadcast."""

    name: str

    def flat(self, planner, work):
        yield planner.at(self.name, own=3)


@dataclass(frozen=True)
class Numbers(Word):
    """The fields of what consists of numbers alone: names of spec.NUMBERS, and "first", where a piece
    of the batch begins."""

    names: tuple

    def flat(self, planner, work):
        yield from self.names


class CountersWord(Word):
    """Two counters, from which persistent blocks draw work: see counters.py."""

    def flat(self, planner, work):
        yield At(COUNTERS_ARRAY, View(0, 4, (2,), (4,)), has_batch=False)


COUNTERS = CountersWord()

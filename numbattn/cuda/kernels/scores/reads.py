"""Gradients of the arrays that a function of the user's own reads, beside what else a kernel computes of dS."""

from typing import Any, NamedTuple

import numpy as np
from numba.cuda import types

from ...tile import block_index, device, shape
from ...words.arguments import Argument
from ...words.signatures import array_type
from ...words.steps import partial_sums
from ..shared.exact_sums import add_atomically
from .function import read_step
from .score import score_steps, units
from .traits import parts_of

MOST_SUMS, SUMS_BYTES = 128, 1 << 22  # of each element; in all, where there are several


class Reads(NamedTuple):
    """Which gradients of a function's arrays are wanted."""

    of: str  # name of the gradients, all elements of the arrays
    after: int  # the function's place among the parts of the score
    wanted: tuple  # of each array a bool
    sum_dtype: str


class ReadSums(Argument):
    """The sums to which gradients of a function's arrays are added; nothing where none are wanted."""

    def find(self, planner, work):
        if work.reads:
            planner.add_sums_of_reads(work.reads.of)

    def flat(self, planner, work):
        if work.reads:
            yield planner.whole(partial_sums(work.reads.of))

    def type(self, about):
        return array_type(Reads(*about.reads).sum_dtype, 2) if about.reads else types.Tuple(())


READ_SUMS = ReadSums()


def reads_steps(score, reads, layout):
    """Device functions: () -> what is pending before the first tile; (pending, S, dS, scores, sums, batch, head, m0,
    n0) -> what is pending after a tile, of S = Q K^T and dS after the function; and (pending, sums), which adds it."""
    if not reads:
        return nothing_at_first, nothing_read, nothing_last
    _, after, wanted, sum_dtype = reads
    SUM, ONE = np.dtype(sum_dtype).type, np.float32(1)
    ZERO, parts = SUM(0), parts_of(score)
    part, before = parts[after], parts[:after]
    (apply, *_), (_, natural) = score_steps(before, layout, np.float32, after=after), units(before, part)
    add_reads = read_step(part, after, wanted, np.float32, SUM, add_atomically)

    @device
    def none_pending():
        return np.int32(0), ZERO

    @device
    def add(pending, S, dS, scores, mSums, batch, head, m0, n0):
        (parts, _), (S, _) = shape(mSums), apply(S, scores, batch, head, m0, n0)
        sums = mSums[block_index() % parts]
        return add_reads(pending, S * natural(ONE, scores), dS, scores, sums, batch, head, m0, n0)

    @device
    def add_last(pending, mSums):
        parts, _ = shape(mSums)
        add_atomically(pending, mSums[block_index() % parts])

    return none_pending, add, add_last


@device
def nothing_at_first():
    return ()


@device
def nothing_read(pending, S, dS, scores, mSums, batch, head, m0, n0):
    return ()


@device
def nothing_last(pending, mSums):
    pass


def sums_of_each(elements, nbytes):
    """How many sums each of so many elements has, of so many bytes."""
    return min(max(SUMS_BYTES // max(elements * nbytes, 1), 1), MOST_SUMS)

"""The sums that kernels of the backward pass add the gradients of the arrays of one part to, beside other results."""

from typing import NamedTuple

import numpy as np

from ...compiler import types
from ...words.arguments import Argument
from ...words.signatures import array_type
from ...words.steps import partial_sums

MOST_SUMS, SUMS_BYTES = 128, 1 << 22  # most sums of an element; most bytes in all, if there are several


class Reads(NamedTuple):
    """Which gradients are added up."""

    of: str  # name of the gradients, of all elements of the arrays
    axes: int  # how many of its axes a matrix has
    after: int  # the part's place among those of the score
    wanted: tuple  # a bool for each array of a function; () for a part that has one, and is by distance
    sum_dtype: str
    columns: int  # the length of the last axis of the only array wanted; 0 if there are several


class ReadSums(Argument):
    """The sums for a function's arrays, (parts, elements); nothing if none are wanted."""

    axes = 2

    def are_added(self, work):
        return work.reads and work.reads.wanted

    def at(self, planner, reads):
        return planner.whole(partial_sums(reads.of))

    def find(self, planner, work):
        if self.are_added(work):
            planner.add_sums_of_reads(work.reads.of, np.dtype(work.reads.sum_dtype))

    def flat(self, planner, work):
        if self.are_added(work):
            yield self.at(planner, work.reads)

    def type(self, about):
        return array_type(about.read_dtype, self.axes) if about.read_dtype else types.Tuple(())


class DistanceSums(ReadSums):
    """The sums for what is read by distance, (batch, heads, parts, elements of a matrix), with strides of 0 where
    matrices share them; nothing if none are wanted."""

    axes = 4

    def are_added(self, work):
        return work.reads

    def at(self, planner, reads):
        return planner.sums_by_matrix(partial_sums(reads.of), reads.of, reads.axes)


READ_SUMS, DISTANCE_SUMS = ReadSums(), DistanceSums()


def sums_of_each(elements, nbytes):
    """How many sums, of `nbytes` each, an element has, if there are so many elements."""
    return min(max(SUMS_BYTES // max(elements * nbytes, 1), 1), MOST_SUMS)

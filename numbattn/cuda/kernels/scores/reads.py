"""The sums that kernels add the gradients of a user's function's arrays to."""

from typing import NamedTuple

from ...compiler import types
from ...words.arguments import Argument
from ...words.signatures import array_type
from ...words.steps import partial_sums

MOST_SUMS, SUMS_BYTES = 128, 1 << 22  # most sums of an element; most bytes in all, if there are several


class Reads(NamedTuple):
    """Which gradients of a function's arrays are wanted."""

    of: str  # name of the gradients, of all elements of the arrays
    after: int  # the function's place among the parts of the score
    wanted: tuple  # a bool for each array
    sum_dtype: str
    columns: int  # the length of the last axis of the only array wanted; 0 if there are several


class ReadSums(Argument):
    """The sums, (parts, elements), of a kernel that also computes something else; nothing if none are wanted."""

    def find(self, planner, work):
        if work.reads:
            planner.add_sums_of_reads(work.reads.of)

    def flat(self, planner, work):
        if work.reads:
            yield planner.whole(partial_sums(work.reads.of))

    def type(self, about):
        return array_type(about.read_dtype, 2) if about.read_dtype else types.Tuple(())


READ_SUMS = ReadSums()


def sums_of_each(elements, nbytes):
    """How many sums, of `nbytes` each, an element has, if there are so many elements."""
    return min(max(SUMS_BYTES // max(elements * nbytes, 1), 1), MOST_SUMS)

"""The numbers that come with each call: the name by which a kernel's Spec asks for each, its type and its value.

They are packed group by group, in this order; floats have the dtype of sums. To offer kernels another number, add it to
a group.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

LOG2_E = math.log2(math.e)


class MaskNumbers(NamedTuple):
    """The numbers that `plan.masks` finds in a mask. Key j is in the band of query i iff i + lo <= j <= i + hi,
    i < queries and j < keys."""

    lo: np.int32
    hi: np.int32
    queries: np.int32
    keys: np.int32
    lo_shift: np.int32  # added to edges that are arrays
    hi_shift: np.int32
    own_lo: np.int32  # of windows aligned within segments: see kernels.any.intervals
    own_hi: np.int32


class DropoutNumbers(NamedTuple):
    """A Dropout, or none."""

    threshold: np.uint32 = 0
    offset: np.uint64 = 0
    key_low: np.uint64 = 0
    key_high: np.uint64 = 0


class OriginNumbers(NamedTuple):
    """A `numbattn.base.origin.Origin`."""

    first_query: np.int32
    first_key: np.int32
    first_batch: np.int32
    first_head: np.int32
    heads_in_all: np.int32


class Factors(NamedTuple):
    """Factors of what kernels compute."""

    scale: float  # of Q K^T
    scale_log2: float  # the same, for exponents of 2
    kept_scale: float  # of what dropout keeps
    ds_scale: float  # of dQ and dK; with dropout kernels compute dS 2 / kept_scale times: see kernels.shared.dropout
    delta_scale: float  # of delta, for that
    inverse_scale: float  # of what is added to S before it is scaled


class KindNumbers(NamedTuple):
    """The number of a kind of function of pairs of points, and the factor of squared distances of an Apart: see
    `points.kinds`."""

    kind_number: float = 0.0
    rate: float = 1.0


GROUPS = MaskNumbers, DropoutNumbers, OriginNumbers, Factors, KindNumbers
NUMBERS = {name: kind for group in GROUPS for name, kind in group.__annotations__.items()}
SIDES, ORIGIN, NO_DROPOUT, NO_KIND = MaskNumbers._fields[:4], OriginNumbers._fields, DropoutNumbers(), KindNumbers()


def numbers_of(mask, dropout, origin, scale, kind=NO_KIND):
    """The values of a call, in the order of NUMBERS; mask: its MaskNumbers."""
    if dropout is None:
        return without_dropout(mask, origin, scale, kind)
    return *mask, *dropout._numbers, *origin, *factors(scale, dropout.scale, 2), *kind


@lru_cache(maxsize=1024)
def without_dropout(mask, origin, scale, kind):
    """The same object in calls that are alike, so that it is written once: see `launch.Launches`."""
    return *mask, *NO_DROPOUT, *origin, *factors(scale), *kind


@lru_cache(maxsize=1024)
def factors(scale, kept_scale=1.0, times=1):
    """The Factors of a call. times: with dropout, how many times too large kernels compute dS / kept_scale."""
    return Factors(scale, scale * LOG2_E, kept_scale, scale * kept_scale / times, 2 / kept_scale, 1 / scale)

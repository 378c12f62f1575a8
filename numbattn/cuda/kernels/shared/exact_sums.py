"""Sums that do not depend on the order of their terms: sums of integers.

A number is cut into parts, integers of at most WIDTH bits times powers of 2, and each part is added to an int64 of its
own. So a sum has SIZE int64: from the largest unit to the smallest, and one that counts terms that are not finite, or
too large. There must be fewer than 2**(63 - WIDTH) terms.
"""

import math

import numpy as np

from ...tile import add_element, device

WIDTH, PARTS = 30, 10
EXPONENT = 96
LARGEST_UNIT = 2.0**EXPONENT
LARGEST, STEP, SIZE = LARGEST_UNIT * 2.0**WIDTH, 2.0**WIDTH, PARTS + 1


@device
def add_exactly(pending, sums):
    """Add a number to a sum. pending: the number of the sum, and the term."""
    element, total = pending
    if total != 0:
        first, rest, unit = element * SIZE, float(total), LARGEST_UNIT
        if abs(rest) < LARGEST:
            for part in range(PARTS):
                whole = int(rest / unit)
                if whole != 0:
                    add_element(sums, first + part, whole)
                    rest -= whole * unit
                unit /= STEP
        else:
            add_element(sums, first + PARTS, 1)


@device
def add_atomically(pending, sums):
    """Add a number to a sum that is a float. pending: as for `add_exactly`."""
    element, total = pending
    if total != 0:
        add_element(sums, element, total)


@device
def rounded_sum(element, sums):
    """The sum of this number, a float64."""
    first, total, unit = element * SIZE, 0.0, LARGEST_UNIT
    for part in range(PARTS):
        total += float(sums[first + part]) * unit
        unit /= STEP
    return total if sums[first + PARTS] == 0 else math.nan


def rounded(sums):
    """The sums as float64, from int64 (1, sums * SIZE)."""
    parts = sums.reshape(-1, SIZE)
    exponents = EXPONENT - WIDTH * np.arange(PARTS, dtype=np.int32, like=sums)  # no copy from the host, for captures
    return np.where(parts[:, PARTS] == 0, np.ldexp(parts[:, :PARTS], exponents).sum(axis=1), np.nan)

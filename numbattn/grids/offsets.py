"""The pairs of tokens of two boxes, by their offset: how sums over all pairs of one offset are numbered.

A box of 64 tokens is eight rows of eight; `fields` says which bits of the number of a row, and of a token in it, count
along which axis. The pairs of rows of two boxes fall into classes, by their offsets along the fields of rows. Within a
class, 8x8 pairs of tokens fall into sums by their offsets along the fields of tokens: along each of these, cyclic
offsets, and for each of them those that wrap around and those that do not.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .axis import Sizes

BITS = 3  # of the number of a row of a box, and of a token in its row
ROW = 1 << BITS
MOST_FIELDS = 2  # of tokens in rows: sums that wrap around or not, along each, are in registers at once
AT_ONCE = 4  # classes whose sums are added up at once
Steps = tuple[int, ...]


class Field(NamedTuple):
    """Bits of a number that count along an axis."""

    axis: int
    unit: int  # tokens along the axis that one step of the field is
    shift: int
    bits: int

    def of(self, number: Any) -> Any:
        """Of ints and NumPy arrays."""
        return (number >> self.shift) & ((1 << self.bits) - 1)


def fields_of(sizes: Sizes) -> tuple[list[Field], list[Field]]:
    """The fields of rows and of tokens in them, of boxes of these sizes, in the order of the axes."""
    rows: list[Field] = []
    tokens: list[Field] = []
    end = 2 * BITS
    for axis, size in enumerate(sizes):
        start = end - size.bit_length() + 1
        if end > max(start, BITS):
            low = max(start, BITS)
            rows.append(Field(axis, 1 << (low - start), low - BITS, end - low))
        if min(end, BITS) > start:
            tokens.append(Field(axis, 1, start, min(end, BITS) - start))
        end = start
    return rows, tokens


def classes_of(rows: list[Field]) -> dict[Steps, list[tuple[int, int]]]:
    """Pairs of a row of one box and a row of another, by their offsets along fields: those of the second less those of
    the first."""
    found: dict[Steps, list[tuple[int, int]]] = {}
    for one, other in product(range(ROW), repeat=2):
        found.setdefault(tuple([field.of(other) - field.of(one) for field in rows]), []).append((one, other))
    return found


def is_summed(sizes: Sizes) -> bool:
    """Whether registers hold what wraps around along all fields of tokens at once."""
    return len(fields_of(sizes)[1]) <= MOST_FIELDS


def groups_of(sizes: Sizes) -> int:
    return -(-len(classes_of(fields_of(sizes)[0])) // AT_ONCE)


def sums_of(sizes: Sizes) -> int:
    """How many sums a group of classes has."""
    return AT_ONCE * ROW << len(fields_of(sizes)[1])


@lru_cache(maxsize=16)
def offsets_of(sizes: Sizes) -> NDArray[np.int64]:
    """The offset along each axis that each sum is of, (groups, sums, axes); 0 for those of no pairs.

    Sums are numbered by what wraps around, the class in its group, and the cyclic offset, its lowest bit first.
    """
    rows, tokens = fields_of(sizes)
    classes = [*classes_of(rows)]
    found = np.zeros((groups_of(sizes), 1 << len(tokens), AT_ONCE, 2, ROW // 2, len(sizes)), np.int64)
    for group, wraps, one, low, high in np.ndindex(found.shape[:-1]):
        if group * AT_ONCE + one < len(classes):
            offset = found[group, wraps, one, low, high]
            for field, steps in zip(rows, classes[group * AT_ONCE + one]):
                offset[field.axis] += steps * field.unit
            for number, field in enumerate(tokens):
                offset[field.axis] += field.of(2 * high + low) - (wraps >> number & 1) * (1 << field.bits)
    return found.reshape(len(found), sums_of(sizes), len(sizes))


@lru_cache(maxsize=16)
def numbers_of(sizes: Sizes) -> NDArray[np.int64]:
    """The number of the sum, among those of all groups, that each pair of tokens is in, (64, 64)."""
    rows, tokens = fields_of(sizes)
    classes = enumerate(classes_of(rows).values())
    numbers = {pair: divmod(number, AT_ONCE) for number, pairs in classes for pair in pairs}
    first, second = np.indices((ROW, ROW))
    cyclic, wraps = np.zeros_like(first), np.zeros_like(first)
    for number, field in enumerate(tokens):
        steps = field.of(second) - field.of(first)
        cyclic |= steps % (1 << field.bits) << field.shift
        wraps |= (steps < 0).astype(np.int64) << number
    found = np.empty((ROW, ROW, ROW, ROW), np.int64)                    # row and token of the first box, of the second
    for (one, other), (group, at) in numbers.items():
        place = (group << len(tokens) | wraps) * AT_ONCE + at
        found[one, :, other, :] = (place * 2 + cyclic % 2) * (ROW // 2) + cyclic // 2
    return found.reshape(ROW * ROW, ROW * ROW)

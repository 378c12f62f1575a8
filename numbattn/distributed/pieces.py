"""The part of a sequence that each rank holds: contiguous pieces, which begin at multiples of UNIT."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

UNIT = 32  # tokens: a word of Bits, two squares of dropout's generator
ZIGZAG, CONTIGUOUS = ORDERS = "zigzag", "contiguous"


class RankPlace(NamedTuple):
    """The rank's number, and how sequences are split over ranks."""

    rank: int
    ranks: int
    order: str

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks} in {self.order} order"

    def before(self, step: int) -> int:
        """The rank whose keys this one has in a step."""
        return (self.rank - step) % self.ranks

    def after(self, step: int) -> int:
        """The rank that has the keys of this one."""
        return (self.rank + step) % self.ranks


class TokenRange(NamedTuple):
    """Tokens [first, end) of the sequence, which begin at `row` of the rank's part."""

    first: int
    end: int
    row: int

    @property
    def length(self) -> int:
        return self.end - self.first

    @property
    def rows(self) -> slice:
        """The rows of the piece in the rank's part."""
        return slice(self.row, self.row + self.length)


@lru_cache(maxsize=256)
def pieces_of(length: int, ranks: int, order: str) -> tuple[tuple[TokenRange, ...], ...]:
    """The pieces of each rank that hold tokens, in the order of its part.

    In zigzag there are two, an early and a late one, so that a causal mask gives all ranks equal work.
    """
    count = 2 * ranks if order == ZIGZAG else ranks
    units = -(-length // UNIT)
    bounds = list(pairwise(min(length, UNIT * (number * units // count)) for number in range(count + 1)))
    found = []
    for rank in range(ranks):
        own, row = [], 0
        for first, end in [bounds[rank], bounds[-1 - rank]] if order == ZIGZAG else [bounds[rank]]:
            if first < end:
                own.append(TokenRange(first, end, row))
                row += end - first
        found.append(tuple(own))
    return tuple(found)


def lengths_of(length: int, ranks: int, order: str) -> list[int]:
    """How many tokens each rank has."""
    return list(map(tokens_of, pieces_of(length, ranks, order)))


def tokens_of(pieces: tuple[TokenRange, ...]) -> int:
    """How many tokens these have."""
    return sum(piece.length for piece in pieces)


def part_of(x: Any, pieces: tuple[TokenRange, ...], axis: int) -> Any:
    """A rank's part of an array: a copy, or a view of a single piece."""
    cut = [x[_along(x, axis, slice(piece.first, piece.end))] for piece in pieces] or [x[_along(x, axis, slice(0, 0))]]
    return cut[0] if len(cut) == 1 else np.concatenate(cut, axis=axis)


def joined(parts: list[Any], order: str, axis: int) -> Any:
    """The array that all ranks' parts make up."""
    pieces = pieces_of(sum(part.shape[axis] for part in parts), len(parts), order)
    cut = [(piece.first, part[_along(part, axis, piece.rows)])
           for part, own in zip(parts, pieces) for piece in own]  # fmt: skip
    cut = sorted(cut, key=lambda x: x[0]) or [(0, parts[0])]
    return np.concatenate([x for _, x in cut], axis=axis)


def _along(x: Any, axis: int, some: slice) -> tuple[slice, ...]:
    index = [slice(None)] * x.ndim
    index[axis] = some
    return tuple(index)

"""Sums over columns of products with a tile of pairs, P B: with few features on CUDA cores, else by products of tiles.
"""

from typing import Any, NamedTuple

from ...tile import aligned, device, dot, full, save
from ..shared.layouts import left_operand, sums, vector
from .features import no_sums_step, part_sums_step, save_sums_step, two_sums_step


class OuterSums(NamedTuple):
    """Device functions for sums over columns."""

    none: Any  # () -> sums of nothing
    begin: Any  # (sums) -> the sums that a tile begins with
    add: Any  # (sums, P, ...) -> the sums with those of P
    end: Any  # (sums, sums of a tile) -> both
    save: Any  # (matrix, sums, m0): save them to rows of a matrix from m0 on


@device
def same(sums):
    return sums


@device
def latest(sums, new):
    return new


def few_sums(layout, ACC, count, add, factor=1.0):
    """The OuterSums of `count` features on CUDA cores, times a factor. Each tile is summed on its own: one sum of
    all terms of a thread would lose more digits."""
    none = no_sums_step(layout, ACC, count)

    @device
    def begin(sums):
        return none()

    return OuterSums(none, begin, add, two_sums_step(count), save_sums_step(count, ACC(factor)))


def tile_of_sums(pairs, count):
    """The layout of a tile of sums of `count` features. pairs: a PairSteps."""
    return sums(pairs.tiles, pairs.tile_m, count, run=vector(pairs.dtype))


def outer(pairs, count, most):
    """The OuterSums of P B, with `count` features of B; more than `most` are many."""
    if count <= most:
        return few_sums(pairs.layout, pairs.ACC, count, part_sums_step(count))
    left, ZERO, ROWS_OF = left_operand(pairs.layout, pairs.shared, pairs.ACC, count), pairs.ACC(0), pairs.rows_of
    O_TILE = tile_of_sums(pairs, count)

    @device
    def none():
        return full(O_TILE, ZERO)

    @device
    def add(O, P, B):
        return dot(O, left(P), B)

    @device
    def save_tile(matrix, O, m0):
        save(aligned(matrix, ROWS_OF), O, m0)

    return OuterSums(none, same, add, latest, save_tile)

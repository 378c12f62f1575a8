"""Sums and maxima along the rows."""

import numpy as np
from numba.cuda import types
from numba.cuda.core.errors import TypingError

from .elementwise import emit_maximum
from .emit import shuffle_xor
from .fragment import (
    FLOATS,
    WORDS,
    Fragment,
    FragmentType,
    check_operands,
    check_repeats,
    check_tile,
    fragment,
    is_float,
    is_tile,
    name_of,
    registers,
)
from .layout import WARP
from .simulator import gather_lanes
from .simulator import thread_index as my_index
from .world import primitive

REDUCED = FLOATS | WORDS  # dtypes that lanes exchange


def _reduce_rows(word, function, x, seed):
    out = _check(word, x, seed)
    total = function.reduce(x.registers, axis=1, keepdims=True, dtype=x.dtype)
    total = _over_lanes(function, total, x.layout.row_lane_bits())
    if seed is not None:
        total = function(total, seed.registers if is_tile(seed) else np.asarray(seed).astype(x.dtype))
    return Fragment(out, total)


def _over_lanes(function, value, bits):
    """Combine the lanes whose numbers differ in these bits, in pairs as a GPU does, though all of them meet at once."""
    if not bits:
        return value
    values, peers = gather_lanes(value), [my_index() % WARP]
    for bit in bits:
        peers += [peer ^ 1 << bit for peer in peers]
    found = np.stack([values[peer] for peer in peers])
    while len(found) > 1:
        found = function(found[::2], found[1::2])
    return found[0]


def _lower_reduction(word, emit, chains=1):
    def lower(x, seed=None):
        seed = given(seed)
        out, lanes = FragmentType(_check(word, x, seed), x.dtype), x.layout.row_lane_bits()
        start = types.none if seed is None else seed if is_tile(seed) else x.dtype

        def generate(b, tile, first):
            sums, rows = [], out.layout.rows.slots
            starts = [[]] * rows if seed is None else registers(b, start, first, out.layout.slots)
            for row, seeds in zip(registers(b, x, tile), starts):
                total = fold(b, emit, x.dtype, row, chains)
                for bit in lanes:
                    total = emit(b, x.dtype, total, shuffle_xor(b, total, 1 << bit))
                sums.append([emit(b, x.dtype, total, s) for s in seeds] or [total])
            return fragment(b, out, sums)

        return out(x, start), generate

    return lower


def given(seed):
    """A compiled call's argument, or None if it is left out."""
    return None if isinstance(seed, types.NoneType | types.Omitted) else seed


def _check(word, x, seed):
    """Check that the seed, if there is one, suits the tile. Returns the layout of the sums."""
    check_tile(word, x, REDUCED)
    out = x.layout.row_vector()
    if seed is not None:
        check_operands(word, REDUCED, x, seed)
        if is_tile(seed):
            check_repeats(word, seed, out)
    return out


def fold(b, emit, dtype, values, chains=1):
    """Fold all values into one, in so many chains of operations that do not wait for each other."""
    totals = values[:chains]
    for i, value in enumerate(values[chains:]):
        totals[i % chains] = emit(b, dtype, totals[i % chains], value)
    return totals[0] if len(totals) == 1 else fold(b, emit, dtype, totals, chains // 2)


def emit_add(b, dtype, x, y):
    return b.fadd(x, y) if is_float(dtype) else b.add(x, y)


@primitive
def row_max(x, seed=None):
    """Row vector: the largest of each row, and of `seed`, a row vector or a number; a NaN loses.

    >>> show(lambda x: row_max(x, 5))
    array([[5.],
           [7.]], dtype=float32)
    """
    return _reduce_rows("row_max", np.fmax, x, seed)


row_max = row_max.lowering(_lower_reduction("row_max", emit_maximum, chains=4))


@primitive
def row_sum(x, seed=None):
    """Row vector: the sum of each row, plus `seed`, a row vector or a number.

    >>> show(lambda x: row_sum(x))
    array([[ 6.],
           [22.]], dtype=float32)
    """
    return _reduce_rows("row_sum", np.add, x, seed)


row_sum = row_sum.lowering(_lower_reduction("row_sum", emit_add))


@primitive
def part_sum(x, seed=None):
    """The sum of what this THREAD holds of each row, plus `seed`, such a sum. Lanes meet only in the final `row_sum`.

    The sums have the layout x.layout.row_parts(): a column for each lane that has a part of the row.

    >>> HALVES = simt(2, 4, 32, 2, 1)       # each row in 2 lanes
    >>> show(lambda x: part_sum(x, part_sum(x)), HALVES)
    array([[ 4.,  8.],
           [20., 24.]], dtype=float32)
    """
    out = _check_part(x, seed)
    total = x.registers.sum(axis=1, keepdims=True, dtype=x.dtype)
    return Fragment(out, total if seed is None else total + seed.registers)


@part_sum.lowering
def part_sum(x, seed=None):
    seed = given(seed)
    out = FragmentType(_check_part(x, seed), x.dtype)

    def generate(b, tile, first):
        starts = [[]] * out.layout.rows.slots if seed is None else registers(b, seed, first)
        return fragment(
            b, out, [[fold(b, emit_add, x.dtype, start + row)] for start, row in zip(starts, registers(b, x, tile))]
        )

    return out(x, types.none if seed is None else seed), generate


def _check_part(x, seed):
    """Check that the seed, if there is one, suits the tile. Returns the layout of the sums."""
    check_tile("part_sum", x, REDUCED)
    out = x.layout.row_parts()
    if seed is not None:
        check_tile("part_sum", seed, {name_of(x.dtype)})
        if seed.layout != out:
            raise TypingError(f"part_sum: the sums of {x.layout} have the layout {out}, not {seed.layout}")
    return out

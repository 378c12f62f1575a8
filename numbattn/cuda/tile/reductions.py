"""Sums, maxima and minima along the rows."""

import numpy as np

from ..compiler import TypingError, computed_if, ir, types
from .elementwise import emit_maximum, emit_minimum
from .emit import I32, any_lane, base, shuffle_xor
from .fragment import (
    FLOATS,
    TRUTHS,
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
    """Fold all values into one, in `chains` chains of operations that do not wait for each other."""
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


@primitive
def part_argmin(x, first, least, col):
    """Running minimum: the smallest of what this THREAD holds of each row of a tile whose columns are numbers `first`
    and on, and its number; or `least` and `col`, what this returned for the tiles before, where that is no larger. Of
    equal ones the first; a NaN loses. Both have the layout x.layout.row_parts(), see `part_sum`.

    Columns are searched only where one of the warp's rows has a new minimum.

    >>> PARTS = TILE.row_parts()
    >>> start = full(PARTS, np.float32(5)), full(PARTS, np.int32(-1))
    >>> show(lambda x: part_argmin(x, 8, *start)[0])                            # here a thread has one element
    array([[0., 1., 2., 3.],
           [4., 5., 5., 5.]], dtype=float32)
    >>> show(lambda x: part_argmin(x + 3, 8, *start)[1])
    array([[ 8,  9, -1, -1],
           [-1, -1, -1, -1]], dtype=int32)
    """
    _check_argmin(x, least, col)
    values = np.where(np.isnan(x.registers), x.dtype.type(np.inf), x.registers)
    at = values.argmin(axis=1, keepdims=True)
    found, (_, cols) = np.take_along_axis(values, at, 1), x.layout.positions(my_index())
    smaller = found < least.registers
    return (
        Fragment(least.layout, np.where(smaller, found, least.registers)),
        Fragment(col.layout, np.where(smaller, (cols[0][at] + int(first)).astype(np.int32), col.registers)),
    )


@part_argmin.lowering
def part_argmin(x, first, least, col):
    _check_argmin(x, least, col)
    both = types.Tuple((least, col))

    def generate(b, tile, first, seed, number):
        rows, offsets = registers(b, x, tile), x.layout.cols.offsets
        seeds, numbers = ([value for (value,) in registers(b, *given)] for given in ((least, seed), (col, number)))
        found = [fold(b, emit_minimum, x.dtype, row, chains=4) for row in rows]
        smaller = [b.fcmp_ordered("<", *two) for two in zip(found, seeds)]

        def compute():
            start, cols = b.add(first, base(b, x.layout.cols)), []
            for row, smallest, is_new, before in zip(rows, found, smaller, numbers):
                at = I32(offsets[-1])
                for value, offset in [*zip(row, offsets)][-2::-1]:
                    at = b.select(b.fcmp_ordered("==", value, smallest), I32(offset), at)
                cols.append(b.select(is_new, b.add(start, at), before))
            return [b.select(*three) for three in zip(smaller, found, seeds)] + cols

        chosen = computed_if(b, any_lane(b, smaller), [*seeds, *numbers], compute)
        result = ir.Constant(ir.LiteralStructType([least.llvm, col.llvm]), ir.Undefined)
        for i, (ty, values) in enumerate(((least, chosen[: len(rows)]), (col, chosen[len(rows) :]))):
            result = b.insert_value(result, fragment(b, ty, [[value] for value in values]), i)
        return result

    return both(x, types.int32, least, col), generate


def _check_argmin(x, least, col):
    """Check that a running minimum and its columns suit the tile."""
    check_tile("part_argmin", x, FLOATS)
    check_tile("part_argmin", least, {name_of(x.dtype)})
    check_tile("part_argmin", col, {"int32"})
    out = x.layout.row_parts()
    if least.layout != out or col.layout != out:
        raise TypingError(f"part_argmin: minima of {x.layout} have the layout {out}, not {least.layout}, {col.layout}")


@primitive
def anywhere(truths):
    """Whether a tile of truths is true anywhere in this warp: a number that is the same in all lanes.

    >>> show(lambda x: full(TILE, np.int32(1) if anywhere(x > 6) else np.int32(0)))[0]
    array([1, 1, 1, 1], dtype=int32)
    """
    check_tile("anywhere", truths, TRUTHS)
    return any(values.any() for values in gather_lanes(truths.registers).values())


@anywhere.lowering
def anywhere(truths):
    check_tile("anywhere", truths, TRUTHS)
    return types.boolean(truths), lambda b, value: any_lane(b, [x for row in registers(b, truths, value) for x in row])

"""Sums and maxima along the rows."""

import numpy as np
from numba.cuda.core.errors import TypingError

from .elementwise import emit_maximum
from .emit import shuffle_xor
from .fragment import Fragment, FragmentType, apply, fragment, is_float, registers
from .simulator import exchange
from .world import primitive


def _reduce_rows(function, x, seed):
    total = function.reduce(x.registers, axis=1, keepdims=True)
    for bit in x.layout.row_lane_bits():
        total = function(total, exchange(total, 1 << bit))
    return apply(function, Fragment(x.layout.row_vector(), total), seed)


def _lower_reduction(emit, chains=1):
    def lower(x, seed):
        out = FragmentType(x.layout.row_vector(), x.dtype)
        lanes = x.layout.row_lane_bits()
        start = seed if isinstance(seed, FragmentType) else x.dtype

        def generate(b, tile, first):
            sums = []
            for row, (s,) in zip(registers(b, x, tile), registers(b, start, first, out.layout.slots)):
                total = fold(b, emit, x.dtype, row, chains)
                for bit in lanes:
                    total = emit(b, x.dtype, total, shuffle_xor(b, total, 1 << bit))
                sums.append([emit(b, x.dtype, total, s)])
            return fragment(b, out, sums)

        return out(x, start), generate

    return lower


def fold(b, emit, dtype, values, chains=1):
    """All of them together, in so many chains of operations that do not wait for each other."""
    totals = values[:chains]
    for i, value in enumerate(values[chains:]):
        totals[i % chains] = emit(b, dtype, totals[i % chains], value)
    return totals[0] if len(totals) == 1 else fold(b, emit, dtype, totals, chains // 2)


def emit_add(b, dtype, x, y):
    return b.fadd(x, y) if is_float(dtype) else b.add(x, y)


@primitive
def row_max(x, seed):
    """Row vector: the largest of each row and of `seed`, a row vector or a scalar; a NaN loses."""
    return _reduce_rows(np.fmax, x, seed)


row_max = row_max.lowering(_lower_reduction(emit_maximum, chains=4))


@primitive
def row_sum(x, seed):
    """Row vector: the sum of each row, plus `seed`, a row vector or a scalar."""
    return _reduce_rows(np.add, x, seed)


row_sum = row_sum.lowering(_lower_reduction(emit_add))


@primitive
def part_sum(x, seed):
    """What this THREAD holds of each row, added to `seed`: a tile of layout x.layout.row_parts(). `row_sum` ends it."""
    return Fragment(seed.layout, seed.registers + x.registers.sum(axis=1, keepdims=True, dtype=x.dtype))


@part_sum.lowering
def part_sum(x, seed):
    if seed.layout != x.layout.row_parts():
        raise TypingError(f"part_sum: the sums of {x.layout} have the layout {x.layout.row_parts()}, not {seed.layout}")

    def generate(b, tile, first):
        rows = zip(registers(b, x, tile), registers(b, seed, first))
        return fragment(b, seed, [[fold(b, emit_add, x.dtype, start + row)] for row, start in rows])

    return seed(x, seed), generate

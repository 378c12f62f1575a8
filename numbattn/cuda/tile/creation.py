"""Fragments made from scratch: constants, row and column numbers."""

from dataclasses import replace

import numpy as np

from ..compiler import TypingError, ir, types
from .elementwise import emit_maximum, emit_minimum
from .emit import I32, asm, base
from .fragment import (
    LLVM,
    Fragment,
    FragmentType,
    check_repeats,
    check_tile,
    element_type,
    fragment,
    is_float,
    is_number,
    registers,
)
from .global_memory import places
from .integers import INDEX
from .world import primitive


@primitive
def full(layout, value):
    """A tile whose elements are all `value`, of value's dtype; a row or column vector is repeated.

    >>> show(lambda x: full(TILE, np.int32(7)))
    array([[7, 7, 7, 7],
           [7, 7, 7, 7]], dtype=int32)
    """
    _check_full(layout, value)
    value = value.registers if isinstance(value, Fragment) else value
    return Fragment(layout, np.asarray(value))


@full.lowering
def full(layout, value):
    _check_full(layout.value, value)
    if not isinstance(value, FragmentType):
        value = types.int32 if value == INDEX else types.unliteral(value)
    out = FragmentType(layout.value, getattr(value, "dtype", value))
    return out(layout, value), lambda b, _, x: fragment(b, out, registers(b, value, x, out.layout.slots))


def _check_full(layout, value):
    if isinstance(value, Fragment | FragmentType):
        check_repeats("full", value, layout)
    elif not is_number(value):
        raise TypingError(f"full: got {value}, expected a number or a vector")


@primitive
def row_index(layout, first):
    """Row vector of int32: the row of each register, the tile starting at row `first`.

    >>> show(lambda x: row_index(TILE, 10))
    array([[10],
           [11]], dtype=int32)
    """
    rows, _ = places(layout.indices, row=first)
    return Fragment(layout.row_vector(), rows.astype(np.int32))


@row_index.lowering
def row_index(layout, first):
    out = FragmentType(layout.value.row_vector(), types.int32)

    return out(layout, types.int32), lambda b, _, first: emit_positions(b, out, out.layout.rows.within, first)


@primitive
def fold_index(layout):
    """Row vector of int32: the tile of a folded layout that each row is in, see `Layout.folded`.

    >>> show(lambda x: fold_index(TILE.folded(1)))
    array([[0],
           [1]], dtype=int32)
    """
    _check_folded(layout)
    rows, _ = places(replace(layout, rows=layout.rows.outside))
    return Fragment(layout.row_vector(), rows.astype(np.int32))


@fold_index.lowering
def fold_index(layout):
    _check_folded(layout.value)
    out = FragmentType(layout.value.row_vector(), types.int32)

    return out(layout), lambda b, _: emit_positions(b, out, out.layout.rows.outside, I32(0))


def _check_folded(layout):
    if not layout.rows.fold:
        raise TypingError(f"fold_index: got {layout}, expected a folded layout")


def emit_positions(b, out, axis, first):
    """The vector of this thread's positions on an axis."""
    start = b.add(first, base(b, axis))
    return fragment(b, out, [[b.add(start, I32(offset)) for offset in axis.offsets]])


@primitive
def diagonal_index(layout, first):
    """Tile of column - row + first, of int32, or of floats if `first` is one: the diagonal of each element.

    It takes one instruction for each element and, unlike the difference of two vectors, no registers.

    >>> show(lambda x: diagonal_index(TILE, np.float32(0.5)))
    array([[ 0.5,  1.5,  2.5,  3.5],
           [-0.5,  0.5,  1.5,  2.5]], dtype=float32)
    """
    dtype = _check_diagonal(first)
    rows, cols = places(layout.indices)
    return Fragment(layout, (cols - rows).astype(dtype) + dtype(first))


@diagonal_index.lowering
def diagonal_index(layout, first):
    plain = _check_diagonal(first)
    out = FragmentType(layout.value, element_type(plain))

    def generate(b, _, first):
        rows, cols = out.layout.rows.within, out.layout.cols
        start, add = b.sub(base(b, cols), base(b, rows)), b.add
        if is_float(out.dtype):
            start, add = b.sitofp(start, LLVM[out.dtype]), b.fadd
        start = add(start, first)
        found = [[add(start, ir.Constant(start.type, col - row)) for col in cols.offsets] for row in rows.offsets]
        return fragment(b, out, found)

    return out(layout, out.dtype), generate


def _check_diagonal(first):
    """Check the start; returns the dtype."""
    if not is_number(first):
        raise TypingError(f"diagonal_index: got {first}, expected a number")
    doubles, singles = (float, types.float64), (np.float32, types.float32)
    if isinstance(first, doubles[0]) or first == doubles[1]:
        return np.float64
    return np.float32 if isinstance(first, singles[0]) or first == singles[1] else np.int32


@primitive
def col_index(layout, first):
    """Column vector of int32: the column of each register, the tile starting at column `first`.

    >>> show(lambda x: where(col_index(TILE, 0) <= row_index(TILE, 0), x, -np.inf))
    array([[  0., -inf, -inf, -inf],
           [  4.,   5., -inf, -inf]], dtype=float32)
    """
    _, cols = places(layout, col=first)
    return Fragment(layout.col_vector(), cols.astype(np.int32))


@col_index.lowering
def col_index(layout, first):
    out = FragmentType(layout.value.col_vector(), types.int32)

    return out(layout, types.int32), lambda b, _, first: emit_positions(b, out, out.layout.cols, first)


@primitive
def cols_between(layout, start, first, last):
    """Which columns of a tile that starts at column `start` are between the row vectors first and last, both included.

    Like (col_index(layout, start) >= first) & ..., but the columns take no registers.

    >>> show(lambda x: cols_between(TILE, 0, row_index(TILE, 0), row_index(TILE, 1)))
    array([[ True,  True, False, False],
           [False,  True,  True, False]])
    """
    _check_ends(layout, first, last)
    _, cols = places(layout, col=start)
    return Fragment(layout, (cols >= first.registers) & (cols <= last.registers))


@cols_between.lowering
def cols_between(layout, start, first, last):
    _check_ends(layout.value, first, last)
    out = FragmentType(layout.value, types.boolean, in_words=True)
    axis = out.layout.cols

    def slots_before(b, position):
        """The number of this thread's slots before one of its positions."""
        inside = emit_minimum(b, types.int32, emit_maximum(b, types.int32, position, I32(0)), I32(axis.size))
        run, period = axis.run, axis.period
        return b.add(
            b.mul(b.udiv(inside, I32(period)), I32(run)),
            emit_minimum(b, types.int32, b.urem(inside, I32(period)), I32(run)),
        )

    def slots_from(b, slot, word):
        """A word with a bit for each slot from number `slot` on."""
        left = emit_maximum(b, types.int32, b.sub(slot, I32(32 * word)), I32(0)) if word else slot
        return asm(b, "shl.b32 $0, $1, $2;", I32, I32(-1), left)  # shifting by 32 gives 0, unlike LLVM's shift

    def truths(b, first, last):
        """A truth for each slot, a bit of a word: one test, where the two ends would take a comparison each."""
        begin, end = slots_before(b, first), slots_before(b, b.add(last, I32(1)))
        for slot in range(axis.slots):
            if slot % 32 == 0:
                word = b.and_(slots_from(b, begin, slot // 32), b.not_(slots_from(b, end, slot // 32)))
            yield b.and_(word, I32(1 << slot % 32))

    def generate(b, _, start, *ends):
        rows, mine = out.layout.rows.slots, b.add(start, base(b, axis))  # this thread's first column
        ends = ([b.sub(x, mine) for (x,) in registers(b, ty, end, (rows, 1))] for ty, end in zip((first, last), ends))
        return fragment(b, out, [truths(b, *row) for row in zip(*ends)])

    return out(layout, types.int32, first, last), generate


def _check_ends(layout, *ends):
    for end in ends:
        check_tile("cols_between", end, {"int32"})
        check_repeats("cols_between", end, layout.row_vector())

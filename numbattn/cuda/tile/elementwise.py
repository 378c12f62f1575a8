"""Tiles and numbers, element by element: maxima, choices, and values that serve several elements at once."""

from dataclasses import replace
from functools import cache, partial
from itertools import chain

import numpy as np

from ..compiler import TypingError, capability, computed_if, ir, types
from .emit import F32, I32, I64, any_lane, asm, shuffle_xor, thread_index
from .fragment import (
    ANY,
    FLOATS,
    NUMBERS,
    TRUTHS,
    Fragment,
    FragmentType,
    Operation,
    broadcast,
    check_operands,
    check_repeats,
    check_tile,
    fragment,
    is_float,
    is_number,
    is_signed,
    name_of,
    registers,
    words,
)
from .integers import INDEX
from .simulator import exchange
from .simulator import thread_index as my_index
from .world import primitive


def emit_extremum(name, sign):
    def emit(b, dtype, x, y):
        if is_float(dtype):
            return asm(b, f"{name}.{'f32' if x.type == F32 else 'f64'} $0, $1, $2;", x.type, x, y)
        return b.select((b.icmp_signed if is_signed(dtype) else b.icmp_unsigned)(sign, x, y), x, y)

    return emit


emit_maximum, emit_minimum = emit_extremum("max", ">"), emit_extremum("min", "<")


class Extremum(Operation):
    """`maximum` or `minimum`; two integers give an index, other numbers a float, of 32 bits unless one has 64."""

    def __call__(self, x, y):
        if not (is_number(x) and is_number(y)):
            return super().__call__(x, y)
        floats = [a for a in (x, y) if isinstance(a, float | np.floating)]
        dtype = np.float64 if any(isinstance(a, float) for a in floats) else np.float32 if floats else np.int32
        return self.plain(dtype(x), dtype(y))

    def lower(self, x, y):
        if not (is_number(x) and is_number(y)):
            return super().lower(x, y)
        floats = [ty for ty in (x, y) if is_float(ty)]
        dtype = types.float64 if types.float64 in floats else types.float32 if floats else types.int32
        both = dtype if floats else INDEX
        return both(both, both), lambda b, x, y: self.emit(b, dtype, x, y)


_maximum = Extremum("maximum", np.fmax, emit_maximum, NUMBERS)
_minimum = Extremum("minimum", np.fmin, emit_minimum, NUMBERS)


@primitive
def maximum(x, y):
    """The larger of two, tiles or numbers; a NaN loses.

    >>> show(lambda x: maximum(x, 3))
    array([[3., 3., 3., 3.],
           [4., 5., 6., 7.]], dtype=float32)
    """
    return _maximum(x, y)


maximum = maximum.lowering(lambda x, y: _maximum.lower(x, y))


@primitive
def minimum(x, y):
    """The smaller of two, tiles or numbers; a NaN loses.

    >>> minimum(index(5), 3)
    np.int32(3)
    """
    return _minimum(x, y)


minimum = minimum.lowering(lambda x, y: _minimum.lower(x, y))


def emit_capped(b, dtype, x, limit):
    if x.type == F32 and capability() >= (8, 0):
        return asm(b, "min.NaN.f32 $0, $1, $2;", F32, x, limit)
    return b.select(b.fcmp_ordered(">", x, limit), limit, x)


_capped = Operation("capped", lambda x, limit: np.where(x > limit, limit, x), emit_capped, FLOATS)


@primitive
def capped(x, limit):
    """x, or the limit where x is larger; unlike in `minimum` a NaN stays.

    >>> show(lambda x: capped(x, 3))
    array([[0., 1., 2., 3.],
           [3., 3., 3., 3.]], dtype=float32)
    """
    return _capped(x, limit)


capped = capped.lowering(lambda x, limit: _capped.lower(x, limit))


@primitive
def wide_product(x, factor):
    """The high and the low halves of products of uint32.

    >>> show(lambda x: wide_product(convert(x, np.uint32), 2**31)[0])
    array([[0, 0, 1, 1],
           [2, 2, 3, 3]], dtype=uint32)
    """
    check_tile("wide_product", x, {"uint32"})
    product = x.registers.astype(np.uint64) * np.uint64(factor)
    high, low = (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)
    return Fragment(x.layout, high), Fragment(x.layout, low)


@wide_product.lowering
def wide_product(x, factor):
    check_tile("wide_product", x, {"uint32"})

    def generate(b, value, factor):
        low, high = [], []
        for row in registers(b, x, value):
            products = [asm(b, "mul.wide.u32 $0, $1, $2;", I64, register, factor) for register in row]
            for product in products:                            # equal ones are computed once
                product.attributes.add("readnone")
            low.append([b.trunc(product, I32) for product in products])
            high.append([b.trunc(b.lshr(product, I64(32)), I32) for product in products])
        halves = ir.Constant(ir.ArrayType(x.llvm, 2), ir.Undefined)
        for i, half in enumerate((high, low)):
            halves = b.insert_value(halves, fragment(b, x, half), i)
        return halves

    return types.UniTuple(x, 2)(x, types.uint32), generate


@primitive
def where(condition, x, y):
    """x where the condition, a tile of truths, holds, and y elsewhere: tiles or numbers, at least one tile.

    >>> show(lambda x: where(x > 2, x, -1))
    array([[-1., -1., -1.,  3.],
           [ 4.,  5.,  6.,  7.]], dtype=float32)
    """
    dtype, layout = _check_where(condition, x, y)
    chosen = [v.registers if isinstance(v, Fragment) else np.asarray(v).astype(dtype) for v in (x, y)]
    return Fragment(layout, np.where(condition.registers, *chosen))


@where.lowering
def where(condition, x, y):
    dtype, layout = _check_where(condition, x, y)
    out, inputs = FragmentType(layout, dtype), [ty if isinstance(ty, FragmentType) else dtype for ty in (x, y)]

    choose = choose_by_word if condition.in_words else ir.IRBuilder.select

    def generate(b, *values):
        spread = [words(b, ty, value, layout.slots) for ty, value in zip((condition, *inputs), values)]
        return fragment(b, out, [[choose(b, *three) for three in zip(*rows)] for rows in zip(*spread)])

    return out(condition, *inputs), generate


def choose_by_word(b, word, x, y):
    """x if the word is not 0, else y. Where words are bits of one and each is tested next to what it chooses, ptxas
    makes seven predicates in one instruction."""
    if x.type not in (F32, I32):
        return b.select(b.icmp_unsigned("!=", word, I32(0)), x, y)
    kind = "f32" if x.type == F32 else "b32"
    return asm(b, f"{{.reg .pred p; setp.ne.b32 p, $1, 0; selp.{kind} $0, $2, $3, p;}}", x.type, word, x, y)


def _check_where(condition, x, y):
    check_tile("where", condition, TRUTHS)
    dtype, layout = check_operands("where", ANY, x, y)
    return dtype, broadcast(condition.layout, layout)


@primitive
def spread(x, layout):
    """Element (i, j) is element (i & ~rows, j & ~cols) of x, whose layout is layout.without(rows, cols).

    A value that serves a group of elements is computed once: every thread already has what it needs.

    >>> PAIRS = TILE.without(cols=1)
    >>> show(lambda x: spread(col_index(PAIRS, 0), TILE.col_vector()))
    array([[0, 0, 2, 2]], dtype=int32)
    """
    check_tile("spread", x)
    return Fragment(layout, x.registers[_coarse_index(layout, x.layout)])


@spread.lowering
def spread(x, layout):
    check_tile("spread", x)
    out = FragmentType(layout.value, x.dtype)
    rows, cols = _coarse_slots(layout.value, x.layout)

    def generate(b, value, _):
        coarse = registers(b, x, value)
        return fragment(b, out, [[coarse[r][c] for c in cols] for r in rows])

    return out(x, layout), generate


def _coarse_slots(fine, coarse):
    """The coarse slot for each slot of the fine rows and columns."""
    slots = []
    for small, large in ((coarse.rows, fine.rows), (coarse.cols, fine.cols)):
        mask = large.position_bits() & ~small.position_bits()
        if large.without(mask) != small:
            raise TypingError(f"spread: {coarse} is no coarser layout of {fine}")
        slots.append([small.offsets.index(offset & ~mask) for offset in large.offsets])
    return slots


@cache
def _coarse_index(fine, coarse):
    return np.ix_(*_coarse_slots(fine, coarse))


@primitive
def column_halves(x):
    """The left and the right half of a tile's columns; `beside` puts them together again. No data moves.

    >>> show(lambda x: column_halves(x)[1] + 10, simt(2, 4, 32, 2, 1))
    array([[12., 13.],
           [16., 17.]], dtype=float32)
    """
    half = _half(x)
    return tuple(Fragment(half, registers) for registers in np.split(x.registers, 2, axis=1))


@column_halves.lowering
def column_halves(x):
    half = FragmentType(_half(x), x.dtype)
    middle = half.layout.cols.slots

    def generate(b, value):
        rows, halves = registers(b, x, value), ir.Constant(ir.ArrayType(half.llvm, 2), ir.Undefined)
        for i, part in enumerate(([row[:middle] for row in rows], [row[middle:] for row in rows])):
            halves = b.insert_value(halves, fragment(b, half, part), i)
        return halves

    return types.UniTuple(half, 2)(x), generate


def _half(x):
    check_tile("column_halves", x)
    return replace(x.layout, cols=x.layout.cols.half())


@primitive
def beside(left, right, layout):
    """The tile of this layout that has these `column_halves`.

    >>> LAYOUT = simt(2, 4, 32, 2, 1)
    >>> def swapped(x):
    ...     left, right = column_halves(x)
    ...     return beside(right, left, LAYOUT)
    >>> show(swapped, LAYOUT)
    array([[2., 3., 0., 1.],
           [6., 7., 4., 5.]], dtype=float32)
    """
    _check_beside(left, right, layout)
    return Fragment(layout, np.hstack([left.registers, right.registers]))


@beside.lowering
def beside(left, right, layout):
    _check_beside(left, right, layout.value)
    out = FragmentType(layout.value, left.dtype)

    def generate(b, one, other, _):
        return fragment(b, out, [x + y for x, y in zip(registers(b, left, one), registers(b, right, other))])

    return out(left, right, layout), generate


def _check_beside(left, right, layout):
    for half in left, right:
        check_tile("beside", half, {name_of(left.dtype)})
        if half.layout != replace(layout, cols=layout.cols.half()):
            raise TypingError(f"beside: {half.layout} is no half of {layout}")


@primitive
def column_pairs(x):
    """The even and the odd columns of a tile whose threads hold both of a pair, each in ``layout.without(cols=1)``;
    `paired` puts them together again. No data moves.

    >>> show(lambda x: column_pairs(x)[1] + 10, simt(2, 4, 32, 2, 2))   # odd ones, where the even ones were
    array([[11.,  1., 13.,  3.],
           [15.,  5., 17.,  7.]], dtype=float32)
    """
    check_tile("column_pairs", x)
    pairs, (even, odd) = _pairs(x.layout), _pair_slots(x.layout)
    return Fragment(pairs, x.registers[:, even]), Fragment(pairs, x.registers[:, odd])


@column_pairs.lowering
def column_pairs(x):
    check_tile("column_pairs", x)
    pair = FragmentType(_pairs(x.layout), x.dtype)

    def generate(b, value):
        rows, found = registers(b, x, value), ir.Constant(ir.ArrayType(pair.llvm, 2), ir.Undefined)
        for i, slots in enumerate(_pair_slots(x.layout)):
            found = b.insert_value(found, fragment(b, pair, [[row[slot] for slot in slots] for row in rows]), i)
        return found

    return types.UniTuple(pair, 2)(x), generate


@primitive
def paired(even, odd, layout):
    """The tile of this layout that has these `column_pairs`.

    >>> LAYOUT = simt(2, 4, 32, 2, 2)
    >>> def swapped(x):
    ...     even, odd = column_pairs(x)
    ...     return paired(odd, even, LAYOUT)
    >>> show(swapped, LAYOUT)
    array([[1., 0., 3., 2.],
           [5., 4., 7., 6.]], dtype=float32)
    """
    _check_paired(even, odd, layout)
    found = np.empty(layout.slots, even.dtype)
    for slots, x in zip(_pair_slots(layout), (even, odd)):
        found[:, slots] = x.registers
    return Fragment(layout, found)


@paired.lowering
def paired(even, odd, layout):
    _check_paired(even, odd, layout.value)
    out = FragmentType(layout.value, even.dtype)

    def generate(b, one, other, _):
        rows = [[None] * out.layout.cols.slots for _ in range(out.layout.rows.slots)]
        for slots, ty, value in zip(_pair_slots(out.layout), (even, odd), (one, other)):
            for row, found in zip(rows, registers(b, ty, value)):
                for slot, x in zip(slots, found):
                    row[slot] = x
        return fragment(b, out, rows)

    return out(even, odd, layout), generate


def _pairs(layout):
    """The layout of the even columns."""
    if 1 & sum(weight for _, bits, weight in layout.cols.fields if bits):
        raise TypingError(f"column_pairs: two neighbours of {layout} lie in different threads")
    return layout.without(cols=1)


@cache
def _pair_slots(layout):
    """The slots of the even and of the odd columns, in one order."""
    offsets = layout.cols.offsets
    even = [slot for slot, offset in enumerate(offsets) if not offset & 1]
    return even, [offsets.index(offsets[slot] + 1) for slot in even]


def _check_paired(even, odd, layout):
    for x in even, odd:
        check_tile("paired", x, {name_of(even.dtype)})
        if x.layout != _pairs(layout):
            raise TypingError(f"paired: {x.layout} is not that of pairs of {layout}")


@primitive
def shifted(x, first):
    """Each row moved one column on, with the number `first` in front; the last column is left out. A thread has whole
    rows: no data moves.

    >>> show(lambda x: shifted(x, 9), simt(2, 4, 32, 1, 4))
    array([[9., 0., 1., 2.],
           [9., 4., 5., 6.]], dtype=float32)
    """
    _check_shifted(x)
    front = np.full((len(x.registers), 1), first, x.dtype)
    return Fragment(x.layout, np.hstack([front, x.registers[:, :-1]]))


@shifted.lowering
def shifted(x, first):
    _check_shifted(x)
    return x(x, x.dtype), lambda b, value, first: fragment(b, x, [[first, *row[:-1]] for row in registers(b, x, value)])


def _check_shifted(x):
    check_tile("shifted", x)
    if x.layout.cols.offsets != tuple(range(x.layout.cols.size)):
        raise TypingError(f"shifted: a row of {x.layout} is not held by one thread")


@primitive
def transposed_halves(x, lane):
    """Transpose the 2x2 matrix of the 16-bit halves of uint32 in two lanes whose numbers differ in the bit `lane`.

    The lane without the bit gets both low halves, the other one both high ones, each with the former lane's half below.

    >>> show(lambda x: transposed_halves(convert(x, np.uint32) + 16 * 2**16, 4) & 0xFFFF)
    array([[ 0,  1,  2,  3],
           [16, 16, 16, 16]], dtype=uint32)
    """
    _check_halves(x, lane)
    mine, other = x.registers, exchange(x.registers, lane)
    high = (other >> np.uint32(16)) | (mine & np.uint32(0xFFFF0000))
    low = (mine & np.uint32(0xFFFF)) | (other << np.uint32(16))
    return Fragment(x.layout, high if my_index() & lane else low)


@transposed_halves.lowering
def transposed_halves(x, lane):
    if not isinstance(lane, types.IntegerLiteral):
        return None
    _check_halves(x, lane.literal_value)
    bit = lane.literal_value

    def generate(b, value, _):
        has_bit = b.icmp_unsigned("!=", b.and_(thread_index(b), I32(bit)), I32(0))
        selector = b.select(has_bit, I32(0x3276), I32(0x5410))      # bytes 0 to 3 are mine, 4 to 7 the other lane's
        rows = [
            [asm(b, "prmt.b32 $0, $1, $2, $3;", I32, word, shuffle_xor(b, word, bit), selector) for word in row]
            for row in registers(b, x, value)
        ]
        return fragment(b, x, rows)

    return x(x, lane), generate


def _check_halves(x, lane):
    check_tile("transposed_halves", x, {"uint32"})
    if lane not in (1, 2, 4, 8, 16):
        raise TypingError(f"transposed_halves: got {lane}, expected the bit of a lane's number")


@primitive
def rescaled(x, factor):
    """x * factor, a row vector of x. Rows in the same registers of a warp take no time if their factors are all 1.

    >>> show(lambda x: rescaled(x, row_max(x, 0)))
    array([[ 0.,  3.,  6.,  9.],
           [28., 35., 42., 49.]], dtype=float32)
    """
    _check_rescaled(x, factor)
    return x * factor


@rescaled.lowering
def rescaled(x, factor):
    _check_rescaled(x, factor)

    def differs(b, factors):
        """Whether any factor is not 1 in any lane of this warp."""
        return any_lane(b, [b.fcmp_unordered("!=", f, ir.Constant(f.type, 1.0)) for f in factors])

    def generate(b, tile, by):
        rows, (count, cols) = registers(b, x, tile), x.layout.slots
        if not cols:
            return tile
        factors = [f for (f,) in registers(b, factor, by, (count, 1))]

        def products(at):
            return [b.fmul(value, f) for row, f in zip(rows[at], factors[at]) for value in row]

        together = count if x.layout.unit == "mma" else 1       # with mma.sync all rows: one vote, one branch
        parts = [slice(first, first + together) for first in range(0, count, together)]
        wanted = [differs(b, factors[at]) for at in parts]
        flat = [value for at, some_other in zip(parts, wanted)
                for value in computed_if(b, some_other, [*chain(*rows[at])], partial(products, at))]  # fmt: skip
        return fragment(b, x, [flat[i : i + cols] for i in range(0, len(flat), cols)])

    return x(x, factor), generate


def _check_rescaled(x, factor):
    check_tile("rescaled", x, FLOATS)
    check_tile("rescaled", factor, {name_of(x.dtype)})
    check_repeats("rescaled", factor, x.layout.row_vector())

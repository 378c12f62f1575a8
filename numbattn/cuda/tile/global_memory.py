"""Moving tiles between global memory, shared memory and registers.

Global memory is NumPy-like arrays of two axes, or one, with any strides: `mQ[batch, head]`. uint16 arrays hold
bfloat16, which the compiler has no arrays of; all others hold their own dtype. Registers are rounded to the memory's
dtype when they are saved. Rows and columns of a tile beyond the end of an array are read as 0 and not written; no
memory is accessed there, since addresses are clamped. Arrays are not empty.
"""

from functools import partial

import numpy as np

from ..compiler import TypingError, types
from .arrays import check_array, stored
from .conversion import round_to, stored_values
from .emit import (
    I1,
    I8,
    I32,
    base,
    in_own_block,
    is_first_holder,
    load_vector,
    load_vector_or_zeros,
    store_vector,
)
from .fragment import (
    HALF_FLOATS,
    NUMBERS,
    TRUTHS,
    Fragment,
    FragmentType,
    broadcast,
    check_repeats,
    check_tile,
    is_number,
    is_tile,
)
from .fragment import fragment as pack
from .fragment import registers as unpack
from .matrices import GlobalMatrix, HeadRows, as_matrix, elements, first_of
from .simulator import thread_index as my_index
from .world import primitive

FEW = 8  # elements that are looked up together: more would take more registers


def places(layout, row=0, col=0):
    """Rows and columns of this thread's registers, as indices."""
    rows, cols = layout.positions(my_index())
    return rows + int(row) if row else rows, cols + int(col) if col else cols


@primitive
def load(matrix, layout, first):
    """Load rows first... of a matrix, or elements first... of a vector, as a tile; 0 beyond the end. In a folded layout
    each of its tiles gets these rows, but from `heads_as_rows` its own ones.

    >>> show(lambda x: load(ARRAY, TILE, 1))
    array([[4., 5., 6., 7.],
           [0., 0., 0., 0.]], dtype=float32)
    """
    check_array("load", matrix, layout)
    _check_first("load", first)
    array = as_matrix(matrix, layout)
    rows, cols = places(_read(matrix, layout), *first_of(layout, matrix.ndim, first))
    return _gather(array, rows, cols, layout)


def _read(matrix, layout):
    """The layout whose row positions are those that are read."""
    return layout if isinstance(matrix, HeadRows) or getattr(matrix, "fold", 0) else layout.indices


def _check_first(word, first):
    if first < 0:
        raise IndexError(f"{word}: a tile starts at {first}, before the array")


def _gather(array, rows, cols, layout):
    inside = (rows >= 0) & (rows < array.shape[0]) & (cols >= 0) & (cols < array.shape[1])
    return Fragment(layout, array[rows, cols] if inside.all() else elements(array, inside, rows, cols))


@load.lowering
def load(matrix, layout, first):
    layout_type, layout = layout, layout.value
    check_array("load", matrix, layout)
    out = FragmentType(layout, stored(matrix.dtype))

    def generate(b, value, _, first):
        source, read = GlobalMatrix(b, matrix, value, layout), _read(matrix, layout)
        tile = []
        for down in read.rows.offsets:
            values = []
            for run in layout.cols.runs(source.width):
                place, inside = source.clamped(read, first, down, layout.cols.offsets[run[0]])
                values += _loaded(b, matrix.dtype, load_vector(b, place, len(run), inside))
            tile.append(values)
        return pack(b, out, tile)

    return out(matrix, layout_type, types.int32), generate


def _loaded(b, dtype, values):
    """An element as registers hold it: booleans are bytes in memory, bits in registers."""
    return [b.icmp_unsigned("!=", value, I8(0)) for value in values] if dtype == types.boolean else values


@primitive
def has_bits(matrix, rows, cols, bits):
    """Whether some of these bits are set in the integers matrix[rows, cols]; outside of the matrix none are.

    rows, cols and bits are vectors of int32; bits may be a number. A truth takes one bit of a register.

    >>> WORDS = np.array([[1, 2], [3, 0]], np.uint8)
    >>> show(lambda x: has_bits(WORDS, row_index(TILE, 0), col_index(TILE, 0) >> 1, 2))
    array([[False, False,  True,  True],
           [ True,  True, False, False]])
    """
    _check_bits(matrix, rows, cols, bits)
    found = _gather(matrix, rows.registers, cols.registers, broadcast(rows.layout, cols.layout))
    return Fragment(found.layout, found.registers & getattr(bits, "registers", bits) != 0)


@has_bits.lowering
def has_bits(matrix, rows, cols, bits):
    _check_bits(matrix, rows, cols, bits)
    layout = broadcast(rows.layout, cols.layout)
    out, bits = FragmentType(layout, types.boolean), bits if isinstance(bits, FragmentType) else types.int32

    def generate(b, value, *vectors):
        source = GlobalMatrix(b, matrix, value)
        down, across, wanted = (unpack(b, ty, v, layout.slots) for ty, v in zip((rows, cols, bits), vectors))

        def test(slots):
            truths = I32(0)
            for n, (r, c) in enumerate(slots):
                row, col = down[r][c], across[r][c]
                inside = b.and_(b.icmp_unsigned("<", row, source.rows), b.icmp_unsigned("<", col, source.cols))
                place = source.place(b.select(inside, row, I32(0)), b.select(inside, col, I32(0)))
                (found,) = load_vector(b, place, 1, inside)
                found = b.and_(b.zext(found, I32), wanted[r][c])
                truths = b.or_(truths, b.select(b.icmp_unsigned("!=", found, I32(0)), I32(1 << n), I32(0)))
            return [truths]

        tile = [[None] * layout.cols.slots for _ in range(layout.rows.slots)]
        order = [(r, c) for c in range(layout.cols.slots) for r in range(layout.rows.slots)]
        for first in range(0, len(order), FEW):
            slots = order[first : first + FEW]
            (truths,) = in_own_block(b, [I32(0)], partial(test, slots))
            for n, (r, c) in enumerate(slots):
                tile[r][c] = b.trunc(b.lshr(truths, I32(n)), I1)
        return pack(b, out, tile)

    return out(matrix, rows, cols, bits), generate


def _check_bits(matrix, rows, cols, bits):
    check_array("has_bits", matrix, takes=TRUTHS | {"uint8", "int32", "uint32"})
    check_tile("has_bits", rows, {"int32"})
    check_tile("has_bits", cols, {"int32"})
    if is_tile(bits):
        check_tile("has_bits", bits, {"int32"})
        check_repeats("has_bits", bits, broadcast(rows.layout, cols.layout))
    elif not is_number(bits):
        raise TypingError(f"has_bits: got bits {bits}, expected a vector or a number")


@primitive
def take(vector, places):
    """Elements of a vector at the indices in a tile of int32, all within bounds.

    >>> show(lambda x: take(np.array([5.0, 6.0, 7.0]), minimum(col_index(TILE, 0), 2)))
    array([[5., 6., 7., 7.]])
    """
    _check_take(vector, places)
    return Fragment(places.layout, as_matrix(vector, places.layout).ravel()[places.registers])


@take.lowering
def take(vector, places):
    _check_take(vector, places)
    out = FragmentType(places.layout, stored(vector.dtype))

    def generate(b, value, tile):
        source, is_row = GlobalMatrix(b, vector, value, places.layout), places.layout.rows.size == 1
        found = [
            [load_vector(b, source.place(*((I32(0), at) if is_row else (at, I32(0)))), 1) for at in row]
            for row in unpack(b, places, tile)
        ]
        return pack(b, out, [[x for (x,) in row] for row in found])

    return out(vector, places), generate


def _check_take(vector, places):
    check_tile("take", places, {"int32"})
    check_array("take", vector, places.layout.row_vector(), takes=NUMBERS | HALF_FLOATS)
    if vector.ndim != 1:
        raise TypingError(f"take: got an array of {vector.ndim} axes, expected a vector")


@primitive
def gather(matrix, layout, rows):
    """Load the rows of a matrix, or elements of a vector, whose numbers are in `rows`, a row vector of int32; 0 where
    there is no such row.

    >>> show(lambda x: gather(ARRAY, TILE, 1 - row_index(TILE, 0)))
    array([[4., 5., 6., 7.],
           [0., 1., 2., 3.]], dtype=float32)
    """
    _check_numbers("gather", matrix, layout, rows)
    _, cols = places(layout)
    return _gather(as_matrix(matrix, layout), rows.registers, cols, layout)


@gather.lowering
def gather(matrix, layout, rows):
    layout_type, layout = layout, layout.value
    _check_numbers("gather", matrix, layout, rows)
    out = FragmentType(layout, stored(matrix.dtype))

    def generate(b, value, _, numbers):
        source, col0, tile = GlobalMatrix(b, matrix, value, layout), base(b, layout.cols), []
        for (row,) in unpack(b, rows, numbers):
            row_inside, values = b.icmp_unsigned("<", row, source.rows), []
            row = b.select(row_inside, row, I32(0))
            for run in layout.cols.runs(source.width):
                col = b.add(col0, I32(layout.cols.offsets[run[0]]))
                col_inside = b.icmp_signed("<", col, source.cols)
                place = source.place(row, b.select(col_inside, col, I32(0)))
                values += load_vector_or_zeros(b, b.and_(row_inside, col_inside), place, len(run))
            tile.append(values)
        return pack(b, out, tile)

    return out(matrix, layout_type, rows), generate


def _save_row(b, target, tile, row, inside, col0, values):
    """Save this thread's elements of a row of a tile, which starts at column col0."""
    for run in tile.layout.cols.runs(target.width):
        col = b.add(col0, I32(tile.layout.cols.offsets[run[0]]))
        rounded = stored_values(b, tile.dtype, target.dtype, [values[slot] for slot in run])
        with b.if_then(b.and_(inside, b.icmp_signed("<", col, target.cols))):
            store_vector(b, rounded, target.place(row, col))


@primitive
def scatter(matrix, tile, rows):
    """Save a tile to the rows of a matrix, or a row vector to the elements of a vector, whose numbers are in `rows`, a
    row vector of int32, each once; nothing where there is no such row.

    >>> run(lambda y: scatter(y, load(ARRAY, TILE, 0), 1 - row_index(TILE, 0)), np.zeros((2, 4)))
    array([[4., 5., 6., 7.],
           [0., 1., 2., 3.]])
    """
    layout = tile.layout
    _check_numbers("scatter", matrix, layout, rows)
    array, (_, cols) = as_matrix(matrix, layout), places(layout)
    if holds_first_copy(layout):
        numbers, cols = np.broadcast_arrays(rows.registers, cols)
        inside = (numbers >= 0) & (numbers < array.shape[0]) & (cols < array.shape[1])
        array[numbers[inside], cols[inside]] = round_to(array.dtype, tile.registers)[inside]


@scatter.lowering
def scatter(matrix, tile, rows):
    layout = tile.layout
    _check_numbers("scatter", matrix, layout, rows)

    def generate(b, value, tile_value, numbers):
        target, col0 = GlobalMatrix(b, matrix, value, layout), base(b, layout.cols)
        mine = is_first_holder(b, layout) or I1(1)
        for (row,), values in zip(unpack(b, rows, numbers), unpack(b, tile, tile_value)):
            _save_row(b, target, tile, row, b.and_(mine, b.icmp_unsigned("<", row, target.rows)), col0, values)

    return types.void(matrix, tile, rows), generate


def _check_numbers(word, matrix, layout, rows):
    check_array(word, matrix, layout)
    check_tile(word, rows, {"int32"})
    if rows.layout != layout.row_vector() or (getattr(matrix, "ndim", 2) == 1 and layout.cols.size > 1):
        raise TypingError(f"{word}: got {matrix} and rows of {rows.layout}, expected those of {layout}")


@primitive
def save(matrix, tile, first):
    """Save a tile to rows first... of a matrix, or a row or column vector to elements first... of a vector.

    >>> run(lambda y: save(y, row_index(TILE, 5), 0), np.zeros(2))
    array([5., 6.])
    """
    _check_save(matrix, tile)
    _check_first("save", first)
    layout, array = tile.layout, as_matrix(matrix, tile.layout)
    if not holds_first_copy(layout):
        return
    rows, cols = np.broadcast_arrays(*places(layout, *first_of(layout, np.ndim(matrix), first)))
    inside = (rows < array.shape[0]) & (cols < array.shape[1])
    array[rows[inside], cols[inside]] = round_to(array.dtype, tile.registers)[inside]


def _check_save(matrix, tile):
    check_tile("save", tile)
    check_array("save", matrix, tile.layout)


def holds_first_copy(layout):
    return layout.is_first_holder(my_index())


@save.lowering
def save(matrix, tile, first):
    _check_save(matrix, tile)
    layout = tile.layout

    def generate(b, value, tile_value, first):
        target = GlobalMatrix(b, matrix, value, layout)
        row0, col0 = first_of(layout, getattr(matrix, "ndim", 2), first)
        row0 = b.add(row0, base(b, layout.rows)) if row0 is first else base(b, layout.rows)
        col0 = b.add(col0, base(b, layout.cols)) if col0 is first else base(b, layout.cols)
        mine = is_first_holder(b, layout) or I1(1)
        for down, values in zip(layout.rows.offsets, unpack(b, tile, tile_value)):
            row = b.add(row0, I32(down))
            _save_row(b, target, tile, row, b.and_(mine, target.has_row(row)), col0, values)

    return types.void(matrix, tile, types.int32), generate

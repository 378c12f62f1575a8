"""Moving tiles between global memory, shared memory and registers.

Global memory is NumPy-like arrays of two axes, or one, with any strides: `mQ[batch, head]`. float16, float32, float64,
integers and booleans are themselves; uint16 is bfloat16, which the compiler has no arrays of. What leaves registers is
rounded to what the memory holds. Rows and columns of a tile beyond the end of an array read as 0 and are not written,
and nothing is read there: addresses are clamped. Arrays are not empty.
"""

from functools import partial

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError

from ..plan.views import VECTOR_BYTES
from .arrays import Alignment, MatrixType, check_array, memory_type, stored
from .conversion import round_to, stored_values
from .emit import (
    GLOBAL,
    I1,
    I8,
    I32,
    I64,
    base,
    in_own_block,
    is_first_holder,
    load_vector,
    size_of,
    store_vector,
)
from .fragment import (
    NUMBERS,
    TRUTHS,
    Fragment,
    FragmentType,
    bfloat16,
    broadcast,
    check_repeats,
    check_tile,
    is_number,
    is_tile,
)
from .fragment import fragment as pack
from .fragment import registers as unpack
from .integers import data_models
from .layout import log2, simt
from .simulator import thread_index as my_index
from .world import primitive

FEW = 8  # elements that are looked up together: more would take more registers


# -------------------------------------------------------------------------------------------------------- alignment
@primitive
def aligned(matrix, alignment):
    """The matrix, with a promise from the host: vectors are moved instead of elements.

    >>> show(lambda x: load(aligned(ARRAY, Alignment(16)), TILE, 0))
    array([[0., 1., 2., 3.],
           [4., 5., 6., 7.]], dtype=float32)
    """
    check_array("aligned", matrix)
    n = alignment.nbytes
    if n:
        held = Alignment.of(matrix)
        assert held.nbytes >= n, f"{n} bytes are promised, {held.nbytes} are held"
    return matrix


@aligned.lowering
def aligned(matrix, alignment):
    check_array("aligned", matrix)
    out = MatrixType(matrix.dtype, alignment.value)

    def generate(b, value, _):
        found = GlobalMatrix(b, matrix, value)
        return _packed(b, out, (found.data, found.rows, found.cols, found.row_stride, found.col_stride))

    return out(matrix, alignment), generate


@primitive
def rows_between(array, batch, head, first, end, alignment):
    """aligned(array[batch, head][first:end], alignment), where no number is negative or beyond the array: nothing is
    compared, which counts in a loop.

    >>> show(lambda x: load(rows_between(ARRAY[None, None], 0, 0, 1, 2, Alignment(16)), TILE, 0))
    array([[4., 5., 6., 7.],
           [0., 0., 0., 0.]], dtype=float32)
    """
    _check_axes("rows_between", array, 4)
    matrix = array[batch, head]
    if not 0 <= first <= end <= len(matrix):
        raise IndexError(f"rows_between: {first} to {end} of {len(matrix)}")
    return aligned(matrix[first:end], alignment)


@rows_between.lowering
def rows_between(array, batch, head, first, end, alignment):
    _check_axes("rows_between", array, 4)
    out = MatrixType(array.dtype, alignment.value)

    def generate(b, value, batch, head, first, end, _):
        data, (_, _, _, cols), (*strides, col_stride) = _parts(b, array, value)
        start = _moved(b, data, (batch, head, first), strides)
        return _packed(b, out, (start, b.sub(end, first), cols, strides[2], col_stride))

    return out(array, *[types.int32] * 4, alignment), generate


@primitive
def lines_of(array, batch, head, length):
    """array[batch, head], a vector, as a matrix of lines of this length, a literal. They are contiguous, each starts at
    a multiple of 16 bytes, and no number is negative or beyond the array.

    >>> show(lambda x: load(lines_of(ARRAY.reshape(1, 1, -1), 0, 0, 4), TILE, 1))
    array([[4., 5., 6., 7.],
           [0., 0., 0., 0.]], dtype=float32)
    """
    _check_axes("lines_of", array, 3)
    return aligned(array[batch, head].reshape(-1, length), Alignment(VECTOR_BYTES))


@lines_of.lowering
def lines_of(array, batch, head, length):
    if not isinstance(length, types.IntegerLiteral):
        return None
    _check_axes("lines_of", array, 3)
    out, cols = MatrixType(array.dtype, Alignment(VECTOR_BYTES)), length.literal_value

    def generate(b, value, batch, head, _):
        data, (*_, elements), strides = _parts(b, array, value)
        start, item = _moved(b, data, (batch, head), strides), size_of(data.type.pointee)
        return _packed(b, out, (start, b.udiv(elements, I32(cols)), I32(cols), I64(cols * item), I64(item)))

    return out(array, types.int32, types.int32, length), generate


def _check_axes(word, array, ndim):
    if getattr(array, "ndim", 0) != ndim:
        raise TypingError(f"{word}: got {array}, expected an array of {ndim} axes")


def _parts(b, ty, value):
    """An array's address, shape and strides."""
    get = data_models.lookup(ty).get
    data = b.addrspacecast(get(b, value, "data"), ir.PointerType(memory_type(ty.dtype), GLOBAL))
    extents = [b.trunc(b.extract_value(get(b, value, "shape"), i), I32) for i in range(ty.ndim)]
    return data, extents, [b.extract_value(get(b, value, "strides"), i) for i in range(ty.ndim)]


def _moved(b, data, numbers, strides):
    """The address so many strides further along each axis."""
    at = b.bitcast(data, ir.PointerType(I8, GLOBAL))
    for number, stride in zip(numbers, strides):
        at = b.gep(at, [b.mul(b.zext(number, I64), stride)])
    return b.bitcast(at, data.type)


def _packed(b, ty, parts):
    value = ir.Constant(ty.llvm, ir.Undefined)
    for i, part in enumerate(parts):
        value = b.insert_value(value, part, i)
    return value


class HeadRows:
    """In plain Python: matrices (heads, queries, columns) as one, row number r is row r % fold of matrix r // fold."""

    ndim = 2

    def __init__(self, array, fold):
        self.array, self.fold, self.dtype = array, fold, array.dtype
        self.shape = len(array) * fold, array.shape[2]

    def __getitem__(self, places):
        head, query, cols, inside = self._split(*places)
        return np.where(inside, self.array[head, query, cols], self.dtype.type(0))

    def __setitem__(self, places, values):
        *places, inside = self._split(*places)
        self.array[tuple(x[inside] for x in np.broadcast_arrays(*places))] = values[inside]

    def _split(self, rows, cols):
        (head, query), queries = np.divmod(rows, self.fold), self.array.shape[1]
        inside = np.broadcast_to(query < queries, np.broadcast(rows, cols).shape)
        return head, np.minimum(query, queries - 1), cols, inside


@primitive
def heads_as_rows(heads, alignment, fold):
    """Matrices (heads, queries, columns) as one matrix for tiles of a folded layout, see `Layout.folded`: row number r
    is row r % fold of matrix r // fold. Rows that no matrix has are as rows beyond the end.

    alignment: of all matrices, see `aligned`; fold: a power of two, at least the number of queries.

    >>> HEADS = np.arange(4, dtype=np.float32).reshape(2, 1, 2)
    >>> show(lambda x: load(heads_as_rows(HEADS, Alignment(0), 2), simt(4, 2, 8, 2, 1), 0))
    array([[0., 1.],
           [0., 0.],
           [2., 3.],
           [0., 0.]], dtype=float32)
    """
    _check_heads(heads, fold)
    for matrix in heads if alignment.nbytes else ():
        aligned(matrix, alignment)
    return HeadRows(heads.view(bfloat16) if heads.dtype == np.uint16 else heads, fold)


@heads_as_rows.lowering
def heads_as_rows(heads, alignment, fold):
    if not isinstance(fold, types.IntegerLiteral):
        return None
    _check_heads(heads, fold.literal_value)
    out = MatrixType(heads.dtype, alignment.value, fold.literal_value)

    def generate(b, value, *_):
        found = GlobalMatrix(b, heads, value)
        first = found.data, found.rows, found.cols, found.row_stride, found.col_stride
        return _packed(b, out, (*first, found.heads, found.head_stride))

    return out(heads, alignment, fold), generate


def _check_heads(heads, fold):
    if getattr(heads, "ndim", 0) != 3 or fold & (fold - 1) or fold < 1:
        raise TypingError(f"heads_as_rows: got {heads} and {fold}, expected an array of 3 axes and a power of two")


class PagedRows:
    """In plain Python: pages (pages, page_size, columns) as one matrix of `count` rows, in the order of a table."""

    ndim = 2

    def __init__(self, array, table, count):
        self.array, self.table, self.dtype = array, table, array.dtype
        self.shape = int(count), array.shape[2]

    def __getitem__(self, places):
        row, col = places
        page, row = np.divmod(row, self.array.shape[1])
        return self.array[np.minimum(self.table[page].astype(np.uint32), len(self.array) - 1), row, col]


@primitive
def rows_of_pages(pages, table, count, alignment, page_size):
    """Matrices (pages, page_size, columns) as one matrix of `count` rows, to read: row r is row r % page_size of the
    page table[r // page_size]. Page numbers are clamped.

    alignment: of all pages, see `aligned`; table: a vector of int32.

    >>> PAGES = np.arange(8, dtype=np.float32).reshape(4, 1, 2)
    >>> TABLE = np.array([2, 0, 99], np.int32)
    >>> show(lambda x: load(rows_of_pages(PAGES, TABLE, 2, Alignment(0), 1), simt(4, 2, 8, 2, 1), 0))
    array([[4., 5.],
           [0., 1.],
           [0., 0.],
           [0., 0.]], dtype=float32)
    """
    _check_pages(pages, table)
    for matrix in pages if alignment.nbytes else ():
        aligned(matrix, alignment)
    return PagedRows(pages.view(bfloat16) if pages.dtype == np.uint16 else pages, table, count)


@rows_of_pages.lowering
def rows_of_pages(pages, table, count, alignment, page_size):
    if not isinstance(page_size, types.IntegerLiteral):
        return None
    _check_pages(pages, table)
    out = MatrixType(pages.dtype, alignment.value, page_size=page_size.literal_value)

    def generate(b, value, table_value, count, *_):
        found, numbers = GlobalMatrix(b, pages, value), GlobalMatrix(b, table, table_value, simt(1, 1, 1, 1, 1))
        first = found.data, count, found.cols, found.row_stride, found.col_stride
        several = found.heads, found.head_stride, numbers.data, numbers.col_stride
        return _packed(b, out, (*first, *several))

    return out(pages, table, types.int32, alignment, page_size), generate


def _check_pages(pages, table):
    if getattr(pages, "ndim", 0) != 3:
        raise TypingError(f"rows_of_pages: got {pages}, expected an array of 3 axes")
    check_array("rows_of_pages", table, simt(1, 1, 1, 1, 1), {"int32"})


class GlobalMatrix:
    """The registers that a matrix comes down to: its address, its shape, its strides in bytes.

    A vector is a matrix of one column, or of one row where `layout` has a single row. With a fold there are several:
    see `heads_as_rows`; or pages: see `rows_of_pages`.
    """

    def __init__(self, b, ty, value, layout=None):
        self.b, self.ndim, self.fold = b, getattr(ty, "ndim", 2), getattr(ty, "fold", 0)
        self.page_size = getattr(ty, "page_size", 0)
        if isinstance(ty, MatrixType):
            parts = [b.extract_value(value, i) for i in range(len(ty.llvm.elements))]
            self.data, self.rows, self.cols, self.row_stride, self.col_stride, *several = parts
            self.heads, self.head_stride, self.table, self.table_stride = (*several, *[None] * 4)[:4]
            self.alignment = ty.alignment.nbytes
            return
        self.data, extents, strides = _parts(b, ty, value)
        if ty.ndim == 1:
            at = 0 if layout.rows.size == 1 else 1
            extents.insert(at, I32(1))
            strides.insert(at, I64(0))
        if ty.ndim == 3:
            self.heads, self.head_stride = extents.pop(0), strides.pop(0)
        (self.rows, self.cols), (self.row_stride, self.col_stride) = extents, strides
        self.alignment = 0

    @property
    def width(self):
        """Elements that may be moved at once."""
        return max(1, self.alignment // size_of(self.data.type.pointee))

    def clamped(self, layout, first, down, across):
        """Pointer to a register's element, or to another one where it lies outside, and whether it lies inside.

        The tile starts at `first`, see `_first`; the register is that of the offsets `down` and `across`.
        """
        b = self.b
        row0, col0 = self.start(layout, first)
        row, col = b.add(row0, I32(down)), b.add(col0, I32(across))
        row_inside, col_inside = self.has_row(row), b.icmp_signed("<", col, self.cols)
        last = I32(0) if self.fold else b.sub(self.rows, I32(1))
        row, col = b.select(row_inside, row, last), b.select(col_inside, col, I32(0))
        return self.place(row, col), b.and_(row_inside, col_inside)

    def has_row(self, row):
        b = self.b
        if not self.fold:
            return b.icmp_signed("<", row, self.rows)
        head, query = self.split(row)
        return b.and_(b.icmp_signed("<", head, self.heads), b.icmp_signed("<", query, self.rows))

    def split(self, row):
        """Of a folded matrix: which matrix, and its row."""
        return self.b.lshr(row, I32(log2(self.fold))), self.b.and_(row, I32(self.fold - 1))

    def in_page(self, row):
        """Of a matrix in pages: the number of a row's page, clamped, and its row there."""
        b, size = self.b, I32(self.page_size)
        at = b.mul(b.zext(b.udiv(row, size), I64), self.table_stride)
        (page,) = load_vector(b, b.bitcast(b.gep(b.bitcast(self.table, ir.PointerType(I8, GLOBAL)), [at]),
                                           self.table.type), 1)  # fmt: skip
        last = b.sub(self.heads, I32(1))
        page = b.select(b.icmp_unsigned("<", page, self.heads), page, last)
        return page, b.urem(row, size)

    def start(self, layout, first):
        """The row and the column of this thread's first element."""
        b = self.b
        row0, col0 = _first(layout, self.ndim, first)
        row0 = base(b, layout.rows) if row0 is not first else b.add(row0, base(b, layout.rows))
        return row0, base(b, layout.cols) if col0 is not first else b.add(col0, base(b, layout.cols))

    def place(self, row, col):
        """Pointer to an element."""
        b = self.b
        at = b.bitcast(self.data, ir.PointerType(I8, GLOBAL))
        if self.fold or self.page_size:
            head, row = self.split(row) if self.fold else self.in_page(row)
            at = b.gep(at, [b.mul(b.sext(head, I64), self.head_stride)])
        stride = b.sext(b.trunc(self.row_stride, I32), I64) if self.alignment else self.row_stride
        at = b.gep(at, [b.mul(b.sext(row, I64), stride)])
        if self.alignment:
            return b.gep(b.bitcast(at, self.data.type), [col])
        return b.bitcast(b.gep(at, [b.mul(b.sext(col, I64), self.col_stride)]), self.data.type)


def _as_matrix(array, layout):
    """What the plain meanings index: two axes, bfloat16 as such."""
    if isinstance(array, HeadRows | PagedRows):
        return array
    array = np.asarray(array)
    if array.dtype == np.uint16:
        array = array.view(bfloat16) if array.ndim else array
    if array.ndim == 1:
        array = array[None, :] if layout.rows.size == 1 else array[:, None]
    return array


def _first(layout, ndim, first):
    """Where a tile starts: the number counts along the axis of a vector, down the rows of a matrix."""
    return (0, first) if ndim == 1 and layout.rows.size == 1 else (first, 0)


def places(layout, row=0, col=0):
    """Rows and columns of this thread's registers, to index with."""
    rows, cols = layout.positions(my_index())
    return rows + int(row) if row else rows, cols + int(col) if col else cols


@primitive
def load(matrix, layout, first):
    """Rows first... of a matrix, or elements first... of a vector, as a tile; 0 beyond the end. In a folded layout each
    of its tiles has these rows, but of `heads_as_rows` its own ones.

    >>> show(lambda x: load(ARRAY, TILE, 1))
    array([[4., 5., 6., 7.],
           [0., 0., 0., 0.]], dtype=float32)
    """
    check_array("load", matrix, layout)
    _check_first("load", first)
    array = _as_matrix(matrix, layout)
    rows, cols = places(_read(matrix, layout), *_first(layout, matrix.ndim, first))
    return _gather(array, rows, cols, layout)


def _read(matrix, layout):
    """The layout in which rows are where they are read."""
    return layout if isinstance(matrix, HeadRows) or getattr(matrix, "fold", 0) else layout.indices


def _check_first(word, first):
    if first < 0:
        raise IndexError(f"{word}: a tile starts at {first}, before the array")


def _gather(array, rows, cols, layout):
    inside = (rows >= 0) & (rows < array.shape[0]) & (cols >= 0) & (cols < array.shape[1])
    if inside.all():
        return Fragment(layout, array[rows, cols])
    values = array[np.clip(rows, 0, array.shape[0] - 1), np.clip(cols, 0, array.shape[1] - 1)]
    return Fragment(layout, np.where(inside, values, array.dtype.type(0)))


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
    """Memory holds booleans in bytes, registers in bits."""
    return [b.icmp_unsigned("!=", value, I8(0)) for value in values] if dtype == types.boolean else values


@primitive
def has_bits(matrix, rows, cols, bits):
    """Whether some of these bits are set in the integers matrix[rows, cols]; outside of the matrix none are.

    rows, cols and bits are vectors of int32, bits may be a number. A truth takes a bit of a register.

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
    """Elements of a vector: a tile of int32 says which. None lies outside.

    >>> show(lambda x: take(np.array([5.0, 6.0, 7.0]), minimum(col_index(TILE, 0), 2)))
    array([[5., 6., 7., 7.]])
    """
    _check_take(vector, places)
    return Fragment(places.layout, _as_matrix(vector, places.layout).ravel()[places.registers])


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
    check_array("take", vector, places.layout.row_vector(), takes=NUMBERS)
    if vector.ndim != 1:
        raise TypingError(f"take: got an array of {vector.ndim} axes, expected a vector")


@primitive
def save(matrix, tile, first):
    """A tile to rows first... of a matrix, or a row or column vector to elements first... of a vector.

    >>> run(lambda y: save(y, row_index(TILE, 5), 0), np.zeros(2))
    array([5., 6.])
    """
    _check_save(matrix, tile)
    _check_first("save", first)
    layout, array = tile.layout, _as_matrix(matrix, tile.layout)
    if not holds_first_copy(layout):
        return
    rows, cols = np.broadcast_arrays(*places(layout, *_first(layout, np.ndim(matrix), first)))
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
        row0, col0 = _first(layout, getattr(matrix, "ndim", 2), first)
        row0 = b.add(row0, base(b, layout.rows)) if row0 is first else base(b, layout.rows)
        col0 = b.add(col0, base(b, layout.cols)) if col0 is first else base(b, layout.cols)
        mine = is_first_holder(b, layout) or I1(1)
        for down, values in zip(layout.rows.offsets, unpack(b, tile, tile_value)):
            row = b.add(row0, I32(down))
            row_inside = b.and_(mine, target.has_row(row))
            for run in layout.cols.runs(target.width):
                col = b.add(col0, I32(layout.cols.offsets[run[0]]))
                rounded = stored_values(b, tile.dtype, stored(matrix.dtype), [values[slot] for slot in run])
                with b.if_then(b.and_(row_inside, b.icmp_signed("<", col, target.cols))):
                    store_vector(b, rounded, target.place(row, col))

    return types.void(matrix, tile, types.int32), generate

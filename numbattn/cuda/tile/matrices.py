"""Matrices in global memory: promises about them, several as one, and the registers that describe them."""

import numpy as np

from ..compiler import TypingError, array_part, ir, types
from .alignment import VECTOR_BYTES
from .arrays import Alignment, MatrixType, check_array, memory_type, stored
from .emit import GLOBAL, I8, I32, I64, base, load_vector, size_of
from .fragment import bfloat16
from .layout import log2, simt
from .world import primitive


@primitive
def aligned(matrix, alignment):
    """The matrix with a promise from the host: vectors are moved instead of elements.

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
    """aligned(array[batch, head][first:end], alignment), where no number is negative or out of bounds: nothing is
    compared, which matters in a loop.

    >>> show(lambda x: load(rows_between(ARRAY[None, None], 0, 0, 1, 2, Alignment(16)), TILE, 0))
    array([[4., 5., 6., 7.],
           [0., 0., 0., 0.]], dtype=float32)
    """
    _check_axes("rows_between", array, 4)
    matrix = array[batch, head]
    if not 0 <= first < end <= len(matrix):
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
    """array[batch, head], a vector, as a matrix of lines of this length, a literal. Lines are contiguous, each begins
    at a multiple of 16 bytes, and no number is negative or out of bounds.

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
    data = b.addrspacecast(array_part(b, ty, value, "data"), ir.PointerType(memory_type(ty.dtype), GLOBAL))
    extents = [b.trunc(b.extract_value(array_part(b, ty, value, "shape"), i), I32) for i in range(ty.ndim)]
    strides = [b.extract_value(array_part(b, ty, value, "strides"), i) for i in range(ty.ndim)]
    if ty.layout == "C":
        strides[-1] = I64(size_of(data.type.pointee))
    return data, extents, strides


def _moved(b, data, numbers, strides):
    """The address `numbers` strides further along each axis."""
    at = b.bitcast(data, ir.PointerType(I8, GLOBAL))
    for number, stride in zip(numbers, strides):
        at = b.gep(at, [b.mul(b.zext(number, I64), stride)])
    return b.bitcast(at, data.type)


def _packed(b, ty, parts):
    value = ir.Constant(ty.llvm, ir.Undefined)
    for i, part in enumerate(parts):
        value = b.insert_value(value, part, i)
    return value


def elements(array, inside, *places):
    """Elements of an array, which may be empty, at these indices where they are `inside`; 0 elsewhere."""
    found = np.zeros(inside.shape, array.dtype)
    if inside.any():
        np.copyto(found, array[tuple([x * inside for x in places])], where=inside)
    return found


class HeadRows:
    """In plain Python: matrices (heads, queries, columns) as one, whose row r is row r % fold of matrix r // fold."""

    ndim = 2

    def __init__(self, array, fold):
        self.array, self.fold, self.dtype = array, fold, array.dtype
        self.shape = len(array) * fold, array.shape[2]

    def __getitem__(self, places):
        *places, inside = self._split(*places)
        return elements(self.array, inside, *places)

    def __setitem__(self, places, values):
        *places, inside = self._split(*places)
        self.array[tuple(x[inside] for x in np.broadcast_arrays(*places))] = values[inside]

    def _split(self, rows, cols):
        head, query = np.divmod(rows, self.fold)
        inside = np.broadcast_to(query < self.array.shape[1], np.broadcast(rows, cols).shape)
        return head, query, cols, inside


@primitive
def heads_as_rows(heads, alignment, fold):
    """Matrices (heads, queries, columns) as one matrix for tiles of a folded layout, see `Layout.folded`: row r
    is row r % fold of matrix r // fold. Rows that no matrix has count as rows beyond the end.

    alignment: that of all matrices, see `aligned`; fold: a power of two, at least the number of queries.

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
    """Matrices (pages, page_size, columns) as one matrix of `count` rows, read-only: row r is row r % page_size of the
    page table[r // page_size]. Page numbers are clamped.

    alignment: that of all pages, see `aligned`; table: a vector of int32.

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
    """The registers that describe a matrix: its address, its shape, its strides in bytes.

    A vector is a matrix of one column, or of one row where `layout` has a single row. With a fold there are several:
    see `heads_as_rows`; or pages: see `rows_of_pages`.
    """

    def __init__(self, b, ty, value, layout=None):
        self.b, self.ndim, self.fold = b, getattr(ty, "ndim", 2), getattr(ty, "fold", 0)
        self.page_size, self.dtype = getattr(ty, "page_size", 0), stored(ty.dtype)
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
        """Number of elements that may be moved at once."""
        return max(1, self.alignment // size_of(self.data.type.pointee))

    def clamped(self, layout, first, down, across):
        """Pointer to a register's element, or to another one if it is out of bounds, and whether it is inside.

        The tile starts at `first`, see `first_of`; the register is the one at offsets `down` and `across`.
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
        """For a row of a folded matrix: which matrix it is in, and which row of that."""
        return self.b.lshr(row, I32(log2(self.fold))), self.b.and_(row, I32(self.fold - 1))

    def in_page(self, row):
        """For a row of a matrix in pages: its page's number, clamped, and the row there."""
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
        row0, col0 = first_of(layout, self.ndim, first)
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


def as_matrix(array, layout):
    """What words index in plain Python: a matrix, with bfloat16 as its own dtype."""
    if isinstance(array, HeadRows | PagedRows):
        return array
    array = np.asarray(array)
    if array.dtype == np.uint16:
        array = array.view(bfloat16) if array.ndim else array
    if array.ndim == 1:
        array = array[None, :] if layout.rows.size == 1 else array[:, None]
    return array


def first_of(layout, ndim, first):
    """(row, column) where a tile starts: `first` counts along a vector, and down the rows of a matrix."""
    return (0, first) if ndim == 1 and layout.rows.size == 1 else (first, 0)

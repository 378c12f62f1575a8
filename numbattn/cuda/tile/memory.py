"""Moving tiles between global memory, shared memory and registers.

Global memory is NumPy-like arrays of two axes, or one, with any strides: `mQ[batch, head]`. float16, float32, float64,
integers and booleans are themselves; uint16 is bfloat16, which the compiler has no arrays of. What leaves registers is
rounded to what the memory holds. Rows and columns of a tile beyond the end of an array read as 0 and are not written,
and nothing is read there: addresses are clamped. Arrays are not empty.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.datamodel import default_manager
from numba.cuda.extending import core_models, intrinsic, overload_attribute, register_model
from numba.cuda.models import cuda_data_manager

from ..views import VECTOR_BYTES, alignment, layout_of
from . import simulator
from .boxes import ALIGNMENT as BOX_ALIGNMENT
from .boxes import CHUNK_BYTES, ROW_BYTES, Boxes, Place
from .emit import (
    GLOBAL,
    I1,
    I8,
    I16,
    I32,
    I64,
    SHARED,
    VOID,
    Index,
    asm,
    base,
    capability,
    in_own_block,
    is_first_holder,
    load_vector,
    shared_memory,
    size_of,
    store_vector,
    thread_index,
)
from .fragment import LLVM, Fragment, FragmentType, bfloat16, broadcast, constant, element_type
from .fragment import fragment as pack
from .fragment import registers as unpack
from .layout import WARPGROUP
from .math import HALVES, emit_convert, emit_pair, left_pairs, round_to
from .simulator import thread_index as my_index
from .world import primitive

FEW = 8  # elements that are looked up together: more would take more registers

data_models = cuda_data_manager.chain(default_manager)


# -------------------------------------------------------------------------------------------------------- alignment
@constant
@dataclass(frozen=True)
class Alignment:
    """What is promised of a matrix in global memory, so that vectors may be moved: see `aligned`.

    See `views.alignment`. Alignment(0) promises nothing.
    """

    nbytes: int

    @classmethod
    def of(cls, array):
        """The widest alignment that holds for all the matrices (last two axes) of a NumPy array."""
        return cls(alignment(layout_of(array, array.ctypes.data)))


class MatrixType(types.Type):
    """A matrix in global memory of which something is promised."""

    def __init__(self, dtype, alignment):
        self.dtype, self.alignment = dtype, alignment
        super().__init__(f"Matrix({dtype}, {alignment.nbytes})")


@register_model(MatrixType)
class MatrixModel(core_models.PrimitiveModel):
    def __init__(self, manager, ty):
        pointer = ir.PointerType(memory_type(ty.dtype), GLOBAL)
        super().__init__(manager, ty, ir.LiteralStructType([pointer, I32, I32, I64, I64]))


def stored(dtype):
    """Numba's dtype of an array -> that of the numbers in it."""
    return types.bfloat16 if dtype == types.uint16 else dtype


def memory_type(dtype):
    return I8 if dtype == types.boolean else LLVM[stored(dtype)]


@primitive
def aligned(matrix, alignment):
    """The matrix, with a promise from the host: vectors are moved instead of elements."""
    n = alignment.nbytes
    if n:
        held = Alignment.of(matrix)
        assert held.nbytes >= n, f"{n} bytes are promised, {held.nbytes} are held"
    return matrix


@aligned.lowering
def aligned(matrix, alignment):
    out = MatrixType(matrix.dtype, alignment.value)

    def generate(b, value, _):
        found = GlobalMatrix(b, matrix, value)
        packed = ir.Constant(ir.LiteralStructType([found.data.type, I32, I32, I64, I64]), ir.Undefined)
        for i, part in enumerate((found.data, found.rows, found.cols, found.row_stride, found.col_stride)):
            packed = b.insert_value(packed, part, i)
        return packed

    return out(matrix, alignment), generate


class GlobalMatrix:
    """The registers that a matrix comes down to: its address, its shape, its strides in bytes.

    A vector is a matrix of one column, or of one row where `layout` has a single row.
    """

    def __init__(self, b, ty, value, layout=None):
        self.b, self.ndim = b, getattr(ty, "ndim", 2)
        if isinstance(ty, MatrixType):
            parts = [b.extract_value(value, i) for i in range(5)]
            self.data, self.rows, self.cols, self.row_stride, self.col_stride = parts
            self.alignment = ty.alignment.nbytes
            return
        get = data_models.lookup(ty).get
        self.data = b.addrspacecast(get(b, value, "data"), ir.PointerType(memory_type(ty.dtype), GLOBAL))
        extents = [b.trunc(b.extract_value(get(b, value, "shape"), i), I32) for i in range(ty.ndim)]
        strides = [b.extract_value(get(b, value, "strides"), i) for i in range(ty.ndim)]
        if ty.ndim == 1:
            at = 0 if layout.rows.size == 1 else 1
            extents.insert(at, I32(1))
            strides.insert(at, I64(0))
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
        row0, col0 = _first(layout, self.ndim, first)
        row0 = base(b, layout.rows) if row0 is not first else b.add(row0, base(b, layout.rows))
        col0 = base(b, layout.cols) if col0 is not first else b.add(col0, base(b, layout.cols))
        row, col = b.add(row0, I32(down)), b.add(col0, I32(across))
        row_inside, col_inside = b.icmp_signed("<", row, self.rows), b.icmp_signed("<", col, self.cols)
        row, col = b.select(row_inside, row, b.sub(self.rows, I32(1))), b.select(col_inside, col, I32(0))
        return self.place(row, col), b.and_(row_inside, col_inside)

    def place(self, row, col):
        """Pointer to an element."""
        b = self.b
        stride = b.sext(b.trunc(self.row_stride, I32), I64) if self.alignment else self.row_stride
        at = b.gep(b.bitcast(self.data, ir.PointerType(I8, GLOBAL)), [b.mul(b.sext(row, I64), stride)])
        if self.alignment:
            return b.gep(b.bitcast(at, self.data.type), [col])
        return b.bitcast(b.gep(at, [b.mul(b.sext(col, I64), self.col_stride)]), self.data.type)


def emit_element(b, ty, value, index):
    """Pointer to an element of a vector."""
    get = data_models.lookup(ty).get
    data = b.addrspacecast(get(b, value, "data"), ir.PointerType(memory_type(ty.dtype), GLOBAL))
    stride = b.extract_value(get(b, value, "strides"), 0)
    at = b.gep(b.bitcast(data, ir.PointerType(I8, GLOBAL)), [b.mul(b.sext(index, I64), stride)])
    return b.bitcast(at, data.type)


def _as_matrix(array, layout):
    """What the plain meanings index: two axes, bfloat16 as such."""
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
    rows = int(row) + layout.rows.base(my_index()) + np.array(layout.rows.offsets)
    cols = int(col) + layout.cols.base(my_index()) + np.array(layout.cols.offsets)
    return rows[:, None], cols[None, :]


def _check_vector(matrix, layout):
    if isinstance(matrix, types.Array) and matrix.ndim == 1 and 1 not in layout.shape:
        raise TypingError(f"a vector is no tile of {layout}")


# ---------------------------------------------------------------------------------------------------- global memory
@primitive
def load(matrix, layout, first):
    """Rows first... of a matrix, or elements first... of a vector, as a tile; 0 beyond the end."""
    array = _as_matrix(matrix, layout)
    rows, cols = places(layout, *_first(layout, np.ndim(matrix), first))
    return _gather(array, rows, cols, layout)


def _gather(array, rows, cols, layout):
    inside = (rows >= 0) & (rows < array.shape[0]) & (cols >= 0) & (cols < array.shape[1])
    values = array[np.clip(rows, 0, array.shape[0] - 1), np.clip(cols, 0, array.shape[1] - 1)]
    return Fragment(layout, np.where(inside, values, array.dtype.type(0)))


@load.lowering
def load(matrix, layout, first):
    layout_type, layout = layout, layout.value
    _check_vector(matrix, layout)
    out = FragmentType(layout, stored(matrix.dtype))

    def generate(b, value, _, first):
        source = GlobalMatrix(b, matrix, value, layout)
        tile = []
        for down in layout.rows.offsets:
            values = []
            for run in layout.cols.runs(source.width):
                place, inside = source.clamped(layout, first, down, layout.cols.offsets[run[0]])
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

    rows is a row vector of int32, cols a column vector, bits one, too, or a number. A truth takes a bit of a register.
    """
    found = _gather(matrix, rows.registers, cols.registers, broadcast(rows.layout, cols.layout))
    return Fragment(found.layout, found.registers & getattr(bits, "registers", bits) != 0)


@has_bits.lowering
def has_bits(matrix, rows, cols, bits):
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


@primitive
def save(matrix, tile, first):
    """A tile to rows first... of a matrix, or a row or column vector to elements first... of a vector."""
    layout, array = tile.layout, _as_matrix(matrix, tile.layout)
    if not _holds_first_copy(layout):
        return
    rows, cols = np.broadcast_arrays(*places(layout, *_first(layout, np.ndim(matrix), first)))
    inside = (rows < array.shape[0]) & (cols < array.shape[1])
    array[rows[inside], cols[inside]] = round_to(array.dtype, tile.registers)[inside]


def _holds_first_copy(layout):
    return not any(my_index() >> bit & 1 for bit in layout.idle_bits())


@save.lowering
def save(matrix, tile, first):
    layout = tile.layout
    _check_vector(matrix, layout)

    def generate(b, value, tile_value, first):
        target = GlobalMatrix(b, matrix, value, layout)
        row0, col0 = _first(layout, getattr(matrix, "ndim", 2), first)
        row0 = b.add(row0, base(b, layout.rows)) if row0 is first else base(b, layout.rows)
        col0 = b.add(col0, base(b, layout.cols)) if col0 is first else base(b, layout.cols)
        mine = is_first_holder(b, layout) or I1(1)
        for down, values in zip(layout.rows.offsets, unpack(b, tile, tile_value)):
            row = b.add(row0, I32(down))
            row_inside = b.and_(mine, b.icmp_signed("<", row, target.rows))
            for run in layout.cols.runs(target.width):
                col = b.add(col0, I32(layout.cols.offsets[run[0]]))
                rounded = _stored_values(b, tile.dtype, stored(matrix.dtype), [values[slot] for slot in run])
                with b.if_then(b.and_(row_inside, b.icmp_signed("<", col, target.cols))):
                    store_vector(b, rounded, target.place(row, col))

    return types.void(matrix, tile, types.int32), generate


def _stored_values(b, source, target, values):
    if source == types.float32 and target in HALVES and len(values) % 2 == 0 and capability() >= (8, 0):
        pairs = [emit_pair(b, target, values[i : i + 2]) for i in range(0, len(values), 2)]
        return [half for pair in pairs for half in halves_of(b, pair)]
    values = [emit_convert(b, source, target, value) for value in values]
    return [b.zext(value, I8) for value in values] if target == types.boolean else values


def halves_of(b, pair):
    pair = b.bitcast(pair, ir.VectorType(I16, 2))
    return [b.extract_element(pair, I32(i)) for i in range(2)]


# ---------------------------------------------------------------------------------------------------- shared memory
@constant
@dataclass(frozen=True)
class SharedTile(Place):
    """The place of a row-major tile.

    Rows are 16 bytes longer than they look: a column of 16-byte vectors so touches every bank.
    """

    @property
    def pitch(self):
        return self.cols + self.vector if self.rows > 1 else self.cols

    @property
    def nbytes(self):
        """Of one stage."""
        return -(-self.rows * self.pitch * self.dtype.itemsize // VECTOR_BYTES) * VECTOR_BYTES

    def place(self, row, col):
        """Elements in memory from the first one to that at (row, col)."""
        return row * self.pitch + col

    def steps(self):
        """Elements in memory from one row of the shape to the next, and from one column to the next."""
        return (1, self.pitch) if self.transposed else (self.pitch, 1)


class SharedMemory:
    """Hands out places in the shared memory of a kernel, while the kernel is being made."""

    def __init__(self):
        self.nbytes = 0

    def tile(self, rows, cols, dtype, stages=1, at=None):
        """A tile, or several, behind all others, or where the tile `at` lies."""
        if np.dtype(dtype).itemsize < simulator.GRANULE:
            raise TypeError(f"shared memory holds elements of {simulator.GRANULE} bytes or more, not {dtype}")
        tile = SharedTile(rows, cols, np.dtype(dtype), self.nbytes if at is None else at.offset, stages)
        self.nbytes = max(self.nbytes, tile.offset + stages * tile.nbytes)
        return tile

    def boxes(self, rows, cols, dtype, stages=1, room=0):
        """A tile of boxes, or several, behind all others, each with room for one of `room` columns, too."""
        plan = Boxes(rows, cols, np.dtype(dtype), self.reserve(0, BOX_ALIGNMENT), stages, room=room)
        self.reserve(stages * plan.stride)
        return plan

    def reserve(self, nbytes, align=VECTOR_BYTES):
        """The offset of bytes behind all others."""
        start = -(-self.nbytes // align) * align
        self.nbytes = start + nbytes
        return start


class Tile:
    """A tile in simulated shared memory: every access is noted. The element at (row, col) lies at places[row, col].

    `work` is what reads or writes in the background, see simulator.SharedMemory.
    """

    def __init__(self, plan, memory, values, granules, places):
        self.plan, self.memory, self.values, self.granules, self.places = plan, memory, values, granules, places

    @property
    def T(self):
        plan = replace(self.plan, transposed=not self.plan.transposed)
        return Tile(plan, self.memory, self.values, self.granules, self.places.T)

    def granules_of(self, rows, cols):
        return self.granules[self.places[rows, cols]]

    def read(self, rows, cols, work=None):
        self.memory.note_read(self.granules_of(rows, cols), work)
        return self.values[self.places[rows, cols]]

    def write(self, rows, cols, values, work=None):
        self.memory.note_write(self.granules_of(rows, cols), work)
        self.values[self.places[rows, cols]] = values


class TileType(types.Type):
    def __init__(self, plan):
        self.plan, self.dtype = plan, element_type(plan.dtype)
        super().__init__(f"Tile({plan})")


@register_model(TileType)
class TileModel(core_models.PrimitiveModel):
    def __init__(self, manager, ty):
        super().__init__(manager, ty, ir.PointerType(LLVM[ty.dtype], SHARED))


@intrinsic
def _transpose(typingctx, tile):
    out = TileType(replace(tile.plan, transposed=not tile.plan.transposed))
    return out(tile), lambda context, b, signature, values: values[0]


@overload_attribute(TileType, "T")
def _tile_transposed(tile):
    return lambda tile: _transpose(tile)


@primitive
def allocate(plan, stage=0):
    """The tile of which `plan` is the place; tile.T is it transposed."""
    memory, item, start = simulator.shared_memory(), plan.dtype.itemsize, plan.offset + int(stage) * plan.stride

    def cut(flat, step):
        return flat[start // step :][: plan.nbytes // step]

    values = cut(memory.bytes, 1).view(plan.dtype)
    granules = cut(memory.granules, simulator.GRANULE)[:: item // simulator.GRANULE]
    return Tile(plan, memory, values, granules, _places_in(plan))


@lru_cache
def _places_in(plan):
    """Where the elements of a tile lie, counted from its first one: array of [row, col]."""
    rows, cols = np.ogrid[: plan.rows, : plan.cols]
    return plan.place(rows, cols)


@allocate.lowering
def allocate(plan, stage=0):
    return TileType(plan.value)(plan, types.int32), lambda b, _, stage: emit_stage(b, plan.value, stage)


def emit_stage(b, plan, stage):
    """The pointer to a stage."""
    at = b.gep(shared_memory(b, plan.offset), [b.mul(stage, I32(plan.stride))])
    return b.bitcast(at, ir.PointerType(LLVM[element_type(plan.dtype)], SHARED))


def _check_shape(name, plan, layout):
    if plan.shape != layout.shape:
        raise TypingError(f"{name}: a tile of {plan} is not {layout}")


def shared_runs(b, plan, layout):
    """How a thread walks over its part of a tile in memory: (rows of slots, columns of slots, element) for each run."""
    if isinstance(plan, Boxes):
        yield from box_runs(b, plan, layout)
        return
    down, across = plan.steps()
    start = shared_base(b, plan, layout)
    if down == 1:
        for c, offset in enumerate(layout.cols.offsets):
            for run in layout.rows.runs(plan.vector):
                yield run, (c,), b.add(start, I32(layout.rows.offsets[run[0]] + offset * across))
    else:
        for r, offset in enumerate(layout.rows.offsets):
            for run in layout.cols.runs(plan.vector):
                yield (r,), run, b.add(start, I32(offset * down + layout.cols.offsets[run[0]]))


def shared_base(b, plan, layout):
    """Element at which this thread's part starts."""
    down, across = plan.steps()
    return b.add(b.mul(base(b, layout.rows), I32(down)), b.mul(base(b, layout.cols), I32(across)))


def box_runs(b, plan, layout):
    if plan.transposed:
        raise TypingError(f"{plan} is only moved as it lies")
    row0, col0 = Index(b, base(b, layout.rows)), Index(b, base(b, layout.cols))
    for r, down in enumerate(layout.rows.offsets):
        for run in layout.cols.runs(plan.vector):
            yield (r,), run, plan.place(row0 + down, col0 + layout.cols.offsets[run[0]]).value


@primitive
def put(shared, tile):
    """A tile from registers into shared memory."""
    _check_shape("put", shared.plan, tile.layout)
    if _holds_first_copy(tile.layout):
        shared.write(*places(tile.layout), round_to(shared.plan.dtype, tile.registers))


@put.lowering
def put(shared, tile):
    layout, plan = tile.layout, shared.plan
    _check_shape("put", plan, layout)

    def write(b, pointer, value):
        regs = unpack(b, tile, value)
        if isinstance(plan, Boxes) and layout.unit != "fma" and tile.dtype == types.float32:
            put_matrices(b, plan, layout, pointer, regs)
            return
        for rows, cols, place in shared_runs(b, plan, layout):
            values = [regs[r][c] for r in rows for c in cols]
            store_vector(b, _stored_values(b, tile.dtype, shared.dtype, values), b.gep(pointer, [place]))

    def generate(b, pointer, value):
        mine = is_first_holder(b, layout)
        if mine is None:
            write(b, pointer, value)
        else:
            with b.if_then(mine):
                write(b, pointer, value)

    return types.void(shared, tile), generate


def put_matrices(b, plan, layout, pointer, rows):
    """Sums of a warpgroup into boxes: by 16x16, four matrices of 8x8 at a time, each lane with a row of one of them."""
    lane = Index(b, b.and_(thread_index(b), I32(31)))
    first = Index(b, base(b, replace(layout.rows, fields=layout.rows.fields[1:])))  # of the warp
    row, right = first + (lane & 7) + (lane & 8), (lane >> 4) * 8
    for c in range(0, layout.cols.slots, 4):
        pairs = left_pairs(b, element_type(plan.dtype), [row[c : c + 4] for row in rows])
        place = plan.place(row, right + layout.cols.offsets[c])
        at = b.ptrtoint(b.gep(pointer, [place.value]), I32)
        text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
        asm(b, text, VOID, at, *pairs, effect=True)


@primitive
def clear(shared, first):
    """Zeros to rows first... of a tile of boxes, by the threads of a warpgroup."""
    rows = np.arange(my_index() % WARPGROUP, shared.plan.rows, WARPGROUP)
    shared.write(rows[rows >= first][:, None], np.arange(shared.plan.cols), shared.plan.dtype.type(0))


@clear.lowering
def clear(shared, first):
    plan = shared.plan

    def generate(b, pointer, first):
        start = b.bitcast(pointer, ir.PointerType(I32, SHARED))
        for above in range(0, plan.rows, WARPGROUP):
            row = b.add(b.and_(thread_index(b), I32(WARPGROUP - 1)), I32(above))
            with b.if_then(b.and_(b.icmp_signed(">=", row, first), b.icmp_signed("<", row, I32(plan.rows)))):
                for at in range(0, plan.nbytes, plan.box_bytes):
                    for chunk in range(0, ROW_BYTES, CHUNK_BYTES):  # swizzled or not, it is the whole row
                        words = b.add(b.mul(row, I32(ROW_BYTES // 4)), I32((at + chunk) // 4))
                        store_vector(b, [I32(0)] * (CHUNK_BYTES // 4), b.gep(start, [words]))

    return types.void(shared, types.int32), generate


@primitive
def get(shared, layout):
    """A tile from shared memory into registers."""
    _check_shape("get", shared.plan, layout)
    return Fragment(layout, shared.read(*places(layout)))


@get.lowering
def get(shared, layout):
    layout_type, layout, plan = layout, layout.value, shared.plan
    _check_shape("get", plan, layout)
    out = FragmentType(layout, shared.dtype)

    def generate(b, pointer, _):
        tile = [[None] * layout.cols.slots for _ in range(layout.rows.slots)]
        for rows, cols, place in shared_runs(b, plan, layout):
            values = load_vector(b, b.gep(pointer, [place]), len(rows) * len(cols))
            for (r, c), value in zip([(r, c) for r in rows for c in cols], values):
                tile[r][c] = value
        return pack(b, out, tile)

    return out(shared, layout_type), generate


# ------------------------------------------------------------------------------------- from global to shared memory
@primitive
def copy_async(shared, matrix, layout, first):
    """put(shared, load(matrix, layout, first)), past the registers and in the background: see `wait_copies`.

    The tile and the matrix are of one dtype. GPUs before 8.0, and elements of 2 bytes that are not aligned to 4, take
    the way through the registers.
    """
    put(shared, load(matrix, layout, first))
    if _holds_first_copy(layout):
        shared.memory.note_fetch(shared.granules_of(*places(layout)))


@copy_async.lowering
def copy_async(shared, matrix, layout, first):
    layout_type, layout, plan = layout, layout.value, shared.plan
    _check_shape("copy_async", plan, layout)
    _check_vector(matrix, layout)
    if stored(matrix.dtype) != shared.dtype or plan.transposed:
        raise TypingError(f"fetch: a matrix of {stored(matrix.dtype)} does not go as it is to {plan}")

    def generate(b, pointer, value, _, first):
        source = GlobalMatrix(b, matrix, value, layout)
        start, item = shared_base(b, plan, layout), plan.dtype.itemsize
        in_background = capability() >= (8, 0)

        def copy_row(down):
            for run in layout.cols.runs(min(source.width, plan.vector)):
                across = layout.cols.offsets[run[0]]
                place, inside = source.clamped(layout, first, down, across)
                target = b.gep(pointer, [b.add(start, I32(down * plan.pitch + across))])
                if in_background and len(run) * item >= 4:
                    emit_copy(b, target, place, len(run) * item, inside)
                else:
                    store_vector(b, load_vector(b, place, len(run), inside), target)
            return []

        def write():
            for down in layout.rows.offsets:
                in_own_block(b, [], partial(copy_row, down))

        mine = is_first_holder(b, layout)
        if mine is None:
            write()
        else:
            with b.if_then(mine):
                write()

    return types.void(shared, matrix, layout_type, types.int32), generate


def emit_copy(b, target, place, nbytes, inside):
    """`nbytes` from global to shared memory; zeros where not `inside`."""
    how = "cg" if nbytes == VECTOR_BYTES else "ca"  # past the first cache, which only takes vectors
    text = f"cp.async.{how}.shared.global [$0], [$1], {nbytes}, $2;"
    size = b.select(inside, I32(nbytes), I32(0))
    asm(b, text, VOID, b.ptrtoint(target, I32), b.ptrtoint(place, I64), size, effect=True)


@primitive
def wait_copies():
    """What this thread has fetched has arrived. The others know after the next barrier."""
    simulator.shared_memory().note_arrival()


@wait_copies.lowering
def wait_copies():
    def generate(b):
        if capability() >= (8, 0):
            asm(b, "cp.async.wait_all;", VOID, effect=True)

    return types.void(), generate

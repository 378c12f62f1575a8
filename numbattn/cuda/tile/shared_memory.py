"""Tiles in the memory that the threads of a block share."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from ...base.forks import cached_property
from ..compiler import TypingError, define_attribute, held_as_llvm, ir, types
from . import simulator
from .boxes import CHUNK_BYTES, ROW_BYTES, Boxes, box_places, box_runs, get_matrices, put_matrices
from .conversion import round_to
from .emit import I32, SHARED, base, if_first_holder, load_vector, shared_memory, store_vector, thread_index
from .fragment import HALF_FLOATS, LLVM, Fragment, FragmentType, check_tile, element_type, name_of
from .fragment import fragment as pack
from .fragment import registers as unpack
from .global_memory import holds_first_copy, places, stored_values
from .integers import INDEX
from .layout import WARPGROUP
from .places import SharedTile
from .races import GRANULE, pages_of
from .simulator import thread_index as my_index
from .world import primitive


class Tile:
    """A tile in simulated shared memory: every access is recorded. The element at (row, col) is at places[row, col].

    `work` is the background work that reads or writes, see races.SharedMemory; `parts` has some of its columns.
    """

    def __init__(self, plan, memory, values, granules, places):
        self.plan, self.memory, self.values, self.granules, self.places = plan, memory, values, granules, places
        self.pages, self.parts = pages_of(granules), {}
        self.at = None  # the place and the stage, of whole tiles

    @cached_property
    def T(self):
        plan = replace(self.plan, transposed=not self.plan.transposed)
        turned = Tile(plan, self.memory, self.values, self.granules, self.places.T)
        turned.at = self.at
        return turned

    def granules_of(self, rows, cols):
        return self.granules[self.places[rows, cols]]

    def read(self, rows, cols, work=None, by=None):
        at = self.places[rows, cols]
        self.memory.note_read(self.granules[at], self.pages, work, by)
        return self.values[at]

    def write(self, rows, cols, values, work=None, needs_fence=True):
        at = self.places[rows, cols]
        self.memory.note_write(self.granules[at], self.pages, work, needs_fence=needs_fence)
        self.values[at] = values


@held_as_llvm
class TileType(types.Type):
    def __init__(self, plan):
        self.plan, self.dtype = plan, element_type(plan.dtype)
        super().__init__(f"Tile({plan})")

    @property
    def key(self):
        return self.plan

    @property
    def llvm(self):
        return ir.PointerType(LLVM[self.dtype], SHARED)


def _transposed(tile):
    return TileType(replace(tile.plan, transposed=not tile.plan.transposed)), lambda b, value: value


define_attribute(TileType, "T", _transposed)


@primitive
def allocate(plan, stage=0):
    """The tile whose place is `plan`; tile.T is its transpose.

    >>> LAYOUT = simt(4, 2, 32, 2, 1)
    >>> def transposed(x):
    ...     put(allocate(PLACE), x)
    ...     sync_threads()
    ...     return get(allocate(PLACE).T, LAYOUT)
    >>> show(transposed)
    array([[0., 4.],
           [1., 5.],
           [2., 6.],
           [3., 7.]], dtype=float32)
    """
    return tile_of_block(simulator.rank(), plan, int(stage))


def tile_of_block(rank, plan, stage):
    """The tile in the memory of a block of a cluster, in plain Python."""
    memory, key = simulator.shared_memory(), (rank, plan, stage)
    if key not in memory.tiles:
        start = rank * simulator.block().shared_bytes + plan.offset + stage * plan.stride
        memory.tiles[key] = _tile(plan, start, memory)
        memory.tiles[key].at = plan, stage
    return memory.tiles[key]


def _tile(plan, start, memory):
    item = plan.dtype.itemsize

    def cut(flat, step):
        return flat[start // step :][: plan.nbytes // step]

    values = cut(memory.bytes, 1).view(plan.dtype)
    granules = np.repeat(cut(memory.granules, GRANULE), GRANULE)[::item]
    return Tile(plan, memory, values, granules, _places_in(plan))


@lru_cache
def _places_in(plan):
    """Positions of a tile's elements in memory, counted from the first one: array of [row, col]."""
    rows, cols = np.ogrid[: plan.rows, : plan.cols]
    return plan.place(rows, cols)


@allocate.lowering
def allocate(plan, stage=0):
    return TileType(plan.value)(plan, types.int32), lambda b, _, stage: emit_stage(b, plan.value, stage)


def emit_stage(b, plan, stage):
    """The pointer to a stage."""
    at = b.gep(shared_memory(b, plan.offset), [b.mul(stage, I32(plan.stride))])
    return b.bitcast(at, ir.PointerType(LLVM[element_type(plan.dtype)], SHARED))


@primitive
def columns(tile, part, parts):
    """The columns of one of `parts` parts of a tile, a literal; each part has whole vectors of 16 bytes. Those of a box
    are operands of products by a warpgroup.

    >>> WIDE = SharedMemory().tile(2, 8, np.float32)
    >>> def kernel(x, y):
    ...     for part in range(2):
    ...         put(columns(allocate(WIDE), part, 2), load(x, TILE, 0))
    ...     sync_threads()
    ...     save(y, get(allocate(WIDE), simt(2, 8, 32, 4, 2)), 0)
    >>> run(kernel, ARRAY, np.zeros((2, 8)))[0]
    array([0., 1., 2., 3., 0., 1., 2., 3.])
    """
    plan = _part_of(tile.plan, parts)
    first = int(part) * plan.cols
    if (plan, first) not in tile.parts:
        places = tile.places[:, first : first + plan.cols]
        tile.parts[plan, first] = Tile(plan, tile.memory, tile.values, tile.granules, places)
    return tile.parts[plan, first]


@columns.lowering
def columns(tile, part, parts):
    if not isinstance(parts, types.IntegerLiteral):
        return None
    plan = _part_of(tile.plan, parts.literal_value)

    def generate(b, pointer, part, _):
        return b.gep(pointer, [b.mul(part, I32(plan.cols))])

    return TileType(plan)(tile, types.int32, parts), generate


def _part_of(plan, parts):
    is_box = isinstance(plan, Boxes) and plan.cols == plan.width
    if not (is_box or isinstance(plan, SharedTile)) or plan.transposed or plan.cols % (parts * plan.vector):
        raise TypingError(f"columns: {plan} has no {parts} parts of whole vectors")
    if is_box:
        return replace(plan, cols=plan.cols // parts, within=parts > 1)
    return replace(plan, cols=plan.cols // parts, whole=plan.whole or plan.cols)


@primitive
def line(tile, row):
    """A row of a tile, as a tile of one row.

    >>> def second(x):
    ...     put(allocate(PLACE), x)
    ...     sync_threads()
    ...     return get(line(allocate(PLACE), 1), TILE.col_vector())
    >>> show(second)
    array([[4., 5., 6., 7.]], dtype=float32)
    """
    plan, row = _line_of(tile.plan), int(row)
    if not 0 <= row < tile.plan.rows:
        raise IndexError(f"line: got row {row} of {tile.plan}")
    if (plan, row) not in tile.parts:
        places = tile.places[row : row + 1]
        tile.parts[plan, row] = Tile(plan, tile.memory, tile.values, tile.granules, places)
    return tile.parts[plan, row]


@line.lowering
def line(tile, row):
    plan, pitch = _line_of(tile.plan), tile.plan.pitch
    return TileType(plan)(tile, types.int32), lambda b, pointer, row: b.gep(pointer, [b.mul(row, I32(pitch))])


def _line_of(plan):
    if not isinstance(plan, SharedTile) or plan.transposed:
        raise TypingError(f"line: {plan} has no rows one after the other")
    return replace(plan, rows=1, stages=1, whole=0)


def check_shape(name, plan, layout):
    if isinstance(plan, Boxes) and plan.transposed and not (name == "get" and by_matrices(plan, layout)):
        raise TypingError(f"{name}: {plan} is only moved as it lies")
    if isinstance(plan, Boxes) and plan.within:
        raise TypingError(f"{name}: {plan} is a part of a box, which only products read")
    if plan.shape != layout.shape:
        raise TypingError(f"{name}: a tile of {plan} is not {layout}")


def shared_runs(b, plan, layout):
    """How a thread walks over its part of a tile in memory: (rows of slots, columns of slots, element) by run."""
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
    """The element at which this thread's part starts."""
    down, across = plan.steps()
    return b.add(b.mul(base(b, layout.rows), I32(down)), b.mul(base(b, layout.cols), I32(across)))


def shared_places(b, plan, layout, pointer):
    """A function (down, across) -> place of the element that many rows and columns from the first one of a
    thread's part: one of a few pointers, and elements from there."""
    if isinstance(plan, Boxes):
        return box_places(b, plan, layout, pointer)
    (down_step, across_step), start = plan.steps(), b.gep(pointer, [shared_base(b, plan, layout)])
    return lambda down, across: (start, down * down_step + across * across_step)


def by_matrices(plan, layout):
    """Whether 8x8 matrices are moved: for boxes of 2-byte elements, by warpgroups."""
    return isinstance(plan, Boxes) and layout.unit == "wgmma" and layout.rows.slots == 2 and plan.dtype.itemsize == 2


@primitive
def put(shared, tile):
    """Put a tile from registers into shared memory, rounded to the dtype there. For the transpose see `allocate`.

    >>> HALVES = SharedMemory().tile(2, 4, np.float16)
    >>> def rounded(x):
    ...     put(allocate(HALVES), x / 3)
    ...     sync_threads()
    ...     return get(allocate(HALVES), TILE)
    >>> show(rounded)[0]
    array([0.    , 0.3333, 0.6665, 1.    ], dtype=float16)
    """
    check_tile("put", tile)
    check_shape("put", shared.plan, tile.layout)
    if holds_first_copy(tile.layout):
        shared.write(*places(tile.layout), round_to(shared.plan.dtype, tile.registers))


@put.lowering
def put(shared, tile):
    check_tile("put", tile)
    layout, plan = tile.layout, shared.plan
    check_shape("put", plan, layout)

    def generate(b, pointer, value):
        with if_first_holder(b, layout):
            write(b, pointer, unpack(b, tile, value))

    def write(b, pointer, regs):
        if by_matrices(plan, layout) and tile.dtype == types.float32 and name_of(plan.dtype) in HALF_FLOATS:
            put_matrices(b, plan, layout, pointer, regs)
            return
        for rows, cols, place in shared_runs(b, plan, layout):
            values = [regs[r][c] for r in rows for c in cols]
            store_vector(b, stored_values(b, tile.dtype, shared.dtype, values), b.gep(pointer, [place]))

    return types.void(shared, tile), generate


@primitive
def clear(shared, first, threads=WARPGROUP):
    """Write zeros to rows first... of a tile of boxes, by the threads of a warpgroup, or of a warp.

    >>> LAYOUT = simt(8, 64, 128, 16, 4)
    >>> def kernel(y):
    ...     put(allocate(BOXES), full(LAYOUT, np.float16(1)))
    ...     sync_threads()
    ...     clear(allocate(BOXES), 2)
    ...     sync_threads()
    ...     save(y, get(allocate(BOXES), LAYOUT), 0)
    >>> run(kernel, np.zeros((4, 1)), threads=128)
    array([[1.],
           [1.],
           [0.],
           [0.]])
    """
    _check_clear(shared.plan)
    rows = np.arange(my_index() % threads, shared.plan.rows, threads)
    shared.write(rows[rows >= first][:, None], np.arange(shared.plan.cols), shared.plan.dtype.type(0))


@clear.lowering
def clear(shared, first, threads=WARPGROUP):
    if isinstance(threads, types.Integer) and not isinstance(threads, types.IntegerLiteral):
        return None
    plan, count = shared.plan, getattr(threads, "literal_value", threads)
    _check_clear(plan)

    def generate(b, pointer, first, _):
        start, chunks = b.bitcast(pointer, ir.PointerType(I32, SHARED)), ROW_BYTES // CHUNK_BYTES
        for above in range(0, plan.rows, count):
            row = b.add(b.and_(thread_index(b), I32(count - 1)), I32(above))
            with b.if_then(b.and_(b.icmp_signed(">=", row, first), b.icmp_signed("<", row, I32(plan.rows)))):
                for number in range(chunks):                    # from the row's own chunk on: no bank conflicts
                    chunk = b.and_(b.add(row, I32(number)), I32(chunks - 1))
                    words = b.add(b.mul(row, I32(ROW_BYTES // 4)), b.mul(chunk, I32(CHUNK_BYTES // 4)))
                    for at in range(0, plan.nbytes, plan.box_bytes):
                        store_vector(b, [I32(0)] * (CHUNK_BYTES // 4), b.gep(start, [b.add(words, I32(at // 4))]))

    return types.void(shared, types.int32, types.int32 if threads == WARPGROUP else threads), generate


def _check_clear(plan):
    if not isinstance(plan, Boxes):
        raise TypingError(f"clear: {plan} is no tile of boxes")


@primitive
def get(shared, layout):
    """Get a tile from shared memory into registers, in the dtype there, in any layout.

    >>> LAYOUT = simt(2, 4, 32, 2, 1)
    >>> def sums_of_lanes(x):
    ...     put(allocate(PLACE), x)
    ...     sync_threads()
    ...     return part_sum(get(allocate(PLACE), LAYOUT))
    >>> show(sums_of_lanes)  # 0 + 2, 1 + 3; 4 + 6, 5 + 7
    array([[ 2.,  4.],
           [10., 12.]], dtype=float32)
    """
    check_shape("get", shared.plan, layout)
    return Fragment(layout, shared.read(*places(layout)))


@get.lowering
def get(shared, layout):
    layout_type, layout, plan = layout, layout.value, shared.plan
    check_shape("get", plan, layout)
    out = FragmentType(layout, shared.dtype)

    def generate(b, pointer, _):
        if by_matrices(plan, layout):
            return pack(b, out, get_matrices(b, plan, layout, pointer))
        tile = [[None] * layout.cols.slots for _ in range(layout.rows.slots)]
        for rows, cols, place in shared_runs(b, plan, layout):
            values = load_vector(b, b.gep(pointer, [place]), len(rows) * len(cols))
            for (r, c), value in zip([(r, c) for r in rows for c in cols], values):
                tile[r][c] = value
        return pack(b, out, tile)

    return out(shared, layout_type), generate


# ---------------------------------------------------------------------------------------------------------- a number
@primitive
def put_number(shared, number):
    """Put an integer into a tile of one int32, by one thread; all threads may `get_number` after a barrier.

    >>> NUMBER = SharedMemory().tile(1, 1, np.int32)
    >>> def kernel(y):
    ...     if thread_index() == 5:
    ...         put_number(allocate(NUMBER), 7)
    ...     sync_threads()
    ...     y[thread_index()] = get_number(allocate(NUMBER))
    >>> bool((run(kernel, np.zeros(32)) == 7).all())
    True
    """
    _check_number("put_number", shared.plan)
    shared.write(0, 0, np.int32(number))


@put_number.lowering
def put_number(shared, number):
    _check_number("put_number", shared.plan)
    return types.void(shared, types.int32), lambda b, pointer, number: store_vector(b, [number], pointer)


@primitive
def get_number(shared):
    """Get the integer in a tile of one int32: see `put_number`.

    >>> NUMBER = SharedMemory().tile(1, 1, np.int32)
    >>> def kernel(y):
    ...     if thread_index() == 0:
    ...         put_number(allocate(NUMBER), 3)
    ...     sync_warp()
    ...     y[thread_index()] = 2 * get_number(allocate(NUMBER))
    >>> bool((run(kernel, np.zeros(32)) == 6).all())
    True
    """
    _check_number("get_number", shared.plan)
    return np.int32(shared.read(0, 0))


@get_number.lowering
def get_number(shared):
    _check_number("get_number", shared.plan)
    return INDEX(shared), lambda b, pointer: load_vector(b, pointer, 1)[0]


def _check_number(word, plan):
    if plan.shape != (1, 1) or plan.dtype != np.int32:
        raise TypingError(f"{word}: {plan} is no tile of one int32")

"""Sums of tiles in global memory that many blocks add to: an array of float32 that holds tiles in register order.

Register order depends on the layout: four registers of thread 0, of thread 1, ..., then the next four of each. So a
warp moves 512 bytes of a tile at a time, and a tile has to be read back in the same layout. A tile is put into shared
memory in that order and added from there in the background, started by one thread. Or each thread adds its own
registers, before 9.0 one by one: then lines are faster, one register of thread 0, of thread 1, ...

Shared memory, but not global memory, also holds float64 in that order: two registers of each thread.

    >>> TILE = simt(2, 64, 32, 16, 4)
    >>> PLACE = SharedMemory().tile(1, 128, np.float32)
    >>> def kernel(x, y):
    ...     put_registers(allocate(PLACE), full(TILE, np.float32(2)))
    ...     fence_async_proxy()
    ...     sync_threads()
    ...     if thread_index() == 0:
    ...         bulk_add(x, 1, allocate(PLACE))
    ...         tma_store_wait()
    ...     sync_threads()
    ...     save(y, load_registers(x, 1, TILE), 0)
    >>> run(kernel, np.ones(256, np.float32), np.zeros((2, 64)))[0, :4]
    array([3., 3., 3., 3.])
"""

from math import prod

import numpy as np

from ..compiler import TypingError, capability, ir, types
from .emit import F32, GLOBAL, I32, I64, VOID, asm, load_vector, store_vector, thread_index
from .fragment import FLOATS, Fragment, FragmentType, check_dtype, check_tile, name_of
from .fragment import fragment as pack
from .fragment import registers as unpack
from .simulator import thread_index as my_index
from .synchronisation import emit_element
from .tma import check_line, emit_commit, start_store
from .world import primitive

ADDED = {"float32": "f32", "float64": "f64", "int64": "u64"}  # dtypes that are added one by one, with PTX's names
RUN = 4  # registers of float32 that are moved at once


def _places(layout, run=RUN):
    """The positions of this thread's registers in register order."""
    i = np.arange(prod(layout.slots))
    return (i // run * layout.threads + my_index() % layout.threads) * run + i % run


def _check(word, layout, holder, cols=None, dtype="float32", run=RUN):
    size = prod(layout.shape)
    if name_of(holder.dtype) != dtype or (size if cols is None else cols) != size:
        raise TypingError(f"{word}: no {cols or ''} {holder.dtype} hold {size} {dtype} of {layout}")
    if prod(layout.slots) % run or layout.idle_bits():
        raise TypingError(f"{word}: {layout} has no multiple of {run} registers, each its own")


def _check_shared(word, shared, layout, dtype):
    """Check the place; returns how many registers are moved at once."""
    plan = shared.plan
    check_dtype(word, dtype, FLOATS)
    _check(word, layout, plan, plan.cols, name_of(dtype), plan.vector)
    if plan.rows > 1:
        raise TypingError(f"{word}: {plan} has more than one row")
    return plan.vector


@primitive
def put_registers(shared, tile):
    """Put a tile into shared memory, a place of one row, in register order. See `accumulation`.

    >>> LINE = SharedMemory().tile(1, 128, np.float32)
    >>> ROW, LAYOUT = simt(1, 128, 32, 32, 4), simt(2, 64, 32, 16, 2)
    >>> def kernel(x, y):
    ...     put_registers(allocate(LINE), load(x, LAYOUT, 0))
    ...     sync_threads()
    ...     save(y, get(allocate(LINE), ROW), 0)
    >>> run(kernel, np.arange(128, dtype=np.float32).reshape(2, 64), np.zeros((1, 8)))
    array([[ 0.,  1., 32., 33.,  2.,  3., 34., 35.]])
    """
    check_tile("put_registers", tile)
    run = _check_shared("put_registers", shared, tile.layout, tile.dtype)
    shared.write(0, _places(tile.layout, run), tile.registers.reshape(-1))


@put_registers.lowering
def put_registers(shared, tile):
    check_tile("put_registers", tile)
    run = _check_shared("put_registers", shared, tile.layout, tile.dtype)

    def generate(b, pointer, value):
        registers = [x for row in unpack(b, tile, value) for x in row]
        start = _mine(b, tile.layout, pointer, run)
        for at in range(0, len(registers), run):
            store_vector(b, registers[at : at + run], b.gep(start, [I32(at * tile.layout.threads)]))

    return types.void(shared, tile), generate


@primitive
def get_registers(shared, layout):
    """Get a tile from shared memory, where it is in register order. See `accumulation`.

    >>> LINE = SharedMemory().tile(1, 128, np.float32)
    >>> ROW, LAYOUT = simt(1, 128, 32, 32, 4), simt(2, 64, 32, 16, 2)
    >>> def kernel(x, y):
    ...     put(allocate(LINE), load(x, ROW, 0))
    ...     sync_threads()
    ...     save(y, get_registers(allocate(LINE), LAYOUT), 0)
    >>> run(kernel, np.arange(128, dtype=np.float32), np.zeros((1, 8)))
    array([[ 0.,  1.,  4.,  5.,  8.,  9., 12., 13.]])
    """
    run = _check_shared("get_registers", shared, layout, shared.plan.dtype)
    return Fragment(layout, shared.read(0, _places(layout, run)).reshape(layout.slots))


@get_registers.lowering
def get_registers(shared, layout):
    run = _check_shared("get_registers", shared, layout.value, shared.dtype)
    out = FragmentType(layout.value, shared.dtype)
    return out(shared, layout), lambda b, pointer, _: _gather(b, out, _mine(b, out.layout, pointer, run), run)


@primitive
def load_registers(array, number, layout):
    """Load tile number `number` of an array of tiles in register order. See `accumulation`.

    >>> LAYOUT = simt(2, 64, 32, 16, 2)
    >>> show(lambda x: load_registers(np.arange(256, dtype=np.float32), 1, LAYOUT))[0, :6]
    array([128., 129., 132., 133., 136., 137.], dtype=float32)
    """
    _check("load_registers", layout, array)
    return Fragment(layout, np.asarray(array)[_tile_start(number, layout) + _places(layout)].reshape(layout.slots))


@load_registers.lowering
def load_registers(array, number, layout):
    _check("load_registers", layout.value, array)
    return _load(array, layout, RUN)


@primitive
def add_registers(array, number, tile):
    """Add a tile to number `number` of an array of tiles in register order. See `accumulation`.

    >>> LAYOUT = simt(2, 64, 32, 16, 2)
    >>> def kernel(sums, y):
    ...     add_registers(sums, 1, full(LAYOUT, np.float32(2)))
    ...     save(y, load_registers(sums, 1, LAYOUT), 0)
    >>> run(kernel, np.ones(256, np.float32), np.zeros((1, 2)))
    array([[3., 3.]])
    """
    _check_added("add_registers", array, tile)
    np.asarray(array)[_tile_start(number, tile.layout) + _places(tile.layout)] += tile.registers.reshape(-1)


@add_registers.lowering
def add_registers(array, number, tile):
    _check_added("add_registers", array, tile)
    return _add(array, tile, RUN)


@primitive
def load_lines(array, number, layout):
    """Load tile number `number` of an array of tiles in lines. See `accumulation`.

    >>> LAYOUT = simt(2, 64, 32, 16, 2)
    >>> show(lambda x: load_lines(np.arange(256, dtype=np.float32), 1, LAYOUT))[0, :6]
    array([128., 160., 129., 161., 130., 162.], dtype=float32)
    """
    _check("load_lines", layout, array)
    return Fragment(layout, np.asarray(array)[_tile_start(number, layout) + _places(layout, 1)].reshape(layout.slots))


@load_lines.lowering
def load_lines(array, number, layout):
    _check("load_lines", layout.value, array)
    return _load(array, layout, 1)


@primitive
def add_lines(array, number, tile):
    """Add a tile to number `number` of an array of tiles in lines. See `accumulation`.

    >>> LAYOUT = simt(2, 64, 32, 16, 2)
    >>> def kernel(sums, y):
    ...     add_lines(sums, 1, full(LAYOUT, np.float32(2)))
    ...     save(y, load_lines(sums, 1, LAYOUT), 0)
    >>> run(kernel, np.ones(256, np.float32), np.zeros((1, 2)))
    array([[3., 3.]])
    """
    _check_added("add_lines", array, tile)
    np.asarray(array)[_tile_start(number, tile.layout) + _places(tile.layout, 1)] += tile.registers.reshape(-1)


@add_lines.lowering
def add_lines(array, number, tile):
    _check_added("add_lines", array, tile)
    return _add(array, tile, 1)


def _check_added(word, array, tile):
    check_tile(word, tile, {"float32"})
    _check(word, tile.layout, array)


def _load(array, layout, run):
    out = FragmentType(layout.value, types.float32)

    def generate(b, memory, number, _):
        return _gather(b, out, _mine(b, out.layout, _tile(b, array, memory, number, out.layout), run), run)

    return out(array, types.int32, layout), generate


def _add(array, tile, run):
    """Add by atomics on one float32, or on four if the GPU has these."""

    def generate(b, memory, number, value):
        registers = [x for row in unpack(b, tile, value) for x in row]
        start = _mine(b, tile.layout, _tile(b, array, memory, number, tile.layout), run)
        start, step = b.ptrtoint(start, I64), run if capability() >= (9, 0) else 1
        for i in range(0, len(registers), step):
            nbytes = 4 * ((i // run * tile.layout.threads) * run + i % run)
            names = ", ".join(f"${1 + j}" for j in range(step))
            text = f"red.global.add.v{step}.f32 [$0+{nbytes}], {{{names}}};" if step > 1 else (
                   f"red.global.add.f32 [$0+{nbytes}], {names};")  # fmt: skip
            asm(b, text, VOID, start, *registers[i : i + step], effect=True)

    return types.void(array, types.int32, tile), generate


@primitive
def bulk_add(array, number, shared):
    """Start to add a tile in shared memory to number `number` of an array of tiles. By one thread, like `tma_store`.

    >>> LINE, ROW = SharedMemory().tile(1, 4, np.float32), simt(1, 4, 32, 4, 1)
    >>> def kernel(sums):
    ...     put(allocate(LINE), full(ROW, np.float32(2)))
    ...     fence_async_proxy()
    ...     sync_threads()
    ...     if thread_index() == 0:
    ...         bulk_add(sums, 1, allocate(LINE))
    ...         tma_store_wait()
    >>> run(kernel, np.ones(8, np.float32))
    array([1., 1., 1., 1., 3., 3., 3., 3.], dtype=float32)
    """
    _check_sums("bulk_add", shared, array)
    cols = shared.plan.cols
    array[int(number) * cols :][:cols] += start_store(shared)[0]


def _check_sums(word, shared, array):
    check_line(word, shared, array)
    if name_of(array.dtype) != "float32":
        raise TypingError(f"{word}: got {array.dtype}, expected float32")


def _bulk(word, instruction):
    """How one of these is compiled."""

    def lower(array, number, shared):
        _check_sums(word, shared, array)
        plan, text = shared.plan, f"{instruction} [$0], [$1], $2;"

        def generate(b, memory, number, pointer):
            target = b.ptrtoint(emit_element(b, array, memory, b.mul(b.sext(number, I64), I64(plan.cols))), I64)
            asm(b, text, VOID, target, b.ptrtoint(pointer, I32), I32(plan.nbytes), effect=True)
            emit_commit(b)

        return types.void(array, types.int32, shared), generate

    return lower


bulk_add = bulk_add.lowering(_bulk("bulk_add", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"))


@primitive
def bulk_store(array, number, shared):
    """Like `bulk_add`, in place of what is there.

    >>> LINE, ROW = SharedMemory().tile(1, 4, np.float32), simt(1, 4, 32, 4, 1)
    >>> def kernel(sums):
    ...     put(allocate(LINE), full(ROW, np.float32(2)))
    ...     fence_async_proxy()
    ...     sync_threads()
    ...     if thread_index() == 0:
    ...         bulk_store(sums, 1, allocate(LINE))
    >>> run(kernel, np.ones(8, np.float32))
    array([1., 1., 1., 1., 2., 2., 2., 2.], dtype=float32)
    """
    _check_sums("bulk_store", shared, array)
    cols = shared.plan.cols
    array[int(number) * cols :][:cols] = start_store(shared)[0]


bulk_store = bulk_store.lowering(_bulk("bulk_store", "cp.async.bulk.global.shared::cta.bulk_group"))


@primitive
def add_element(array, index, value):
    """Add to an element of an array of floats or int64, in one step for all threads of the grid.

    >>> run(lambda sums: add_element(sums, 1, np.float32(0.5)), np.zeros(2, np.float32))
    array([ 0., 16.], dtype=float32)
    """
    _check_element(array)
    array[index] += array.dtype.type(value)


@add_element.lowering
def add_element(array, index, value):
    _check_element(array)

    def generate(b, memory, index, value):
        target, kind = b.ptrtoint(emit_element(b, array, memory, index), I64), ADDED[name_of(array.dtype)]
        asm(b, f"red.global.add.{kind} [$0], $1;", VOID, target, value, effect=True)

    return types.void(array, types.int64, array.dtype), generate


def _check_element(array):
    if array.ndim != 1 or name_of(array.dtype) not in ADDED:
        raise TypingError(f"add_element: got {array.dtype} of {array.ndim} axes, expected {' or '.join(ADDED)} of 1")


def _tile_start(number, layout):
    return int(number) * prod(layout.shape)


def _tile(b, array, memory, number, layout):
    """Pointer to tile number `number` of an array, which may have more than 2^31 elements."""
    start = emit_element(b, array, memory, b.mul(b.sext(number, I64), I64(prod(layout.shape))))
    return b.bitcast(start, ir.PointerType(F32, GLOBAL))


def _mine(b, layout, start, run=RUN):
    """Pointer to this thread's first register."""
    return b.gep(start, [b.mul(b.and_(thread_index(b), I32(layout.threads - 1)), I32(run))])


def _gather(b, out, start, run=RUN):
    (rows, cols), found = out.layout.slots, []
    for at in range(0, rows * cols, run):
        found += load_vector(b, b.gep(start, [I32(at * out.layout.threads)]), run)
    return pack(b, out, [found[r * cols : (r + 1) * cols] for r in range(rows)])

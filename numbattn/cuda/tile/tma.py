"""The tensor memory accelerator (TMA): tiles of boxes, copied in the background on one thread's order."""

import numpy as np

from ..compiler import TypingError, array_part, types
from . import simulator
from .boxes import ROW_BYTES, Boxes, fits_pages
from .emit import I32, I64, VOID, asm
from .fragment import name_of
from .pipeline import emit_arrival_of_bytes, emit_barrier, unpack
from .shared_memory import emit_stage
from .synchronisation import emit_element
from .world import primitive

EVICT_FIRST = I64(0x12F0000000000000)  # what createpolicy.fractional.L2::evict_first makes


@primitive
def prefetch_tensor_map(matrices):
    """Prefetch a tensor map that will be used soon.

    >>> def kernel(y):
    ...     prefetch_tensor_map(y)
    ...     clear(allocate(BOXES), 0)
    ...     fence_async_proxy()
    ...     sync_threads()
    ...     if thread_index() == 0:
    ...         tma_store(y, allocate(BOXES), 0, 0, 0)
    ...         tma_store_wait()
    >>> run(kernel, np.ones((1, 1, 8, 64), np.float16), threads=128)[0, 0, 0, :4]
    array([0., 0., 0., 0.], dtype=float16)
    """


@prefetch_tensor_map.lowering
def prefetch_tensor_map(matrices):
    def generate(b, tensor_map):
        asm(b, "prefetch.tensormap [$0];", VOID, tensor_map, effect=True)

    return types.void(types.uint64), generate


@primitive
def tma_load(stage, matrices, batch, head, row):
    """Start to copy rows `row`... of a matrix into the stage, zeros beyond the matrix. By one thread.

    matrices: a tensor map of (batch, heads, rows, columns), with boxes of (1, 1, rows of the tile, 128 bytes). In plain
    Python an array of that shape. See `pipeline`.

    >>> shared, LAYOUT = SharedMemory(), simt(8, 64, 32, 8, 8)
    >>> PIPELINE = Pipeline.within(shared, shared.boxes(8, 64, np.float16), readers=1)
    >>> def kernel(x, y):
    ...     init_pipelines(PIPELINE)
    ...     sync_threads()
    ...     if thread_index() == 0:
    ...         tma_load(stage(PIPELINE, 0), x, 0, 0, 4)
    ...     wait(stage(PIPELINE, 0))
    ...     save(y, get(stage(PIPELINE, 0).tile, LAYOUT), 0)
    >>> run(kernel, np.ones((1, 1, 8, 64), np.float16), np.zeros((8, 1)))[:, 0]
    array([1., 1., 1., 1., 0., 0., 0., 0.])
    """
    plan = stage.pipeline.tile
    check_boxes("tma_load", plan)
    if stage.pipeline.is_empty:
        return
    part, values = _part(matrices, plan, batch, head, row), np.zeros(plan.shape, plan.dtype)
    values[: part.shape[0], : part.shape[1]] = part
    _start_load(stage, stage.tile, values)


def check_boxes(word, plan):
    if not isinstance(plan, Boxes) or plan.transposed:
        raise TypingError(f"{word}: {plan} is no tile of boxes")


def _start_load(stage, shared, values):
    """Write elements in the background; whoever waits for the stage learns of it, too."""
    memory, filled = simulator.shared_memory(), stage.barrier(free=False)
    stage.next_round()
    unit, number = memory.start_work(simulator.of_block(f"the load of stage {stage.index} of a {stage.pipeline}"))
    shared.write(slice(None), slice(None), values, (unit, number))
    known = memory.tell()
    known[:, unit] = number
    filled.arrive(known)


def _part(matrices, plan, batch, head, row, col=0):
    """The part of a matrix that a tile covers, in the tile's dtype, whatever the array calls its bits."""
    matrix, row, col = np.asarray(matrices)[batch, head].view(plan.dtype), int(row), int(col)
    return matrix[row : row + plan.rows, col : col + plan.cols]


@tma_load.lowering
def tma_load(stage, matrices, batch, head, row):
    plan = stage.pipeline.tile
    check_boxes("tma_load", plan)

    index = types.int32
    if stage.pipeline.is_empty:                                 # nor is there a tensor map of no columns
        return types.void(stage, matrices, index, index, index), lambda b, *operands: None

    def generate(b, value, tensor_map, batch, head, row):
        index, _ = unpack(b, value)
        filled = emit_expect(b, stage.pipeline, index, I32(plan.nbytes))
        emit_load(b, stage, plan, emit_stage(b, plan, index), tensor_map, batch, head, row, I32(0), filled)

    return types.void(stage, types.uint64, index, index, index), generate


@primitive
def tma_load_part(stage, shared, matrices, batch, head, row, col):
    """Start to copy a part of a matrix, from (row, col) on, into a tile of boxes that goes with the stage, zeros beyond
    the matrix. By one thread; the stage is filled once all its loads are there, see `Pipeline.fills`.

    >>> shared, LAYOUT = SharedMemory(), simt(8, 64, 32, 8, 8)
    >>> PLACE = shared.boxes(8, 64, np.float16)
    >>> PIPELINE = Pipeline.within(shared, shared.tile(1, 4, np.int32), readers=1)
    >>> def kernel(x, y):
    ...     init_pipelines(PIPELINE)
    ...     sync_threads()
    ...     if thread_index() == 0:
    ...         tma_load_part(stage(PIPELINE, 0), allocate(PLACE), x, 0, 0, 4, 32)
    ...     wait(stage(PIPELINE, 0))
    ...     save(y, get(allocate(PLACE), LAYOUT), 0)
    >>> x = np.arange(512).reshape(1, 1, 8, 64).astype(np.float16)
    >>> run(kernel, x, np.zeros((8, 64)))[3:5, 31:33]
    array([[511.,   0.],
           [  0.,   0.]])
    """
    plan = shared.plan
    check_boxes("tma_load_part", plan)
    part, values = _part(matrices, plan, batch, head, row, col), np.zeros(plan.shape, plan.dtype)
    values[: part.shape[0], : part.shape[1]] = part
    _start_load(stage, shared, values)


@tma_load_part.lowering
def tma_load_part(stage, shared, matrices, batch, head, row, col):
    plan = shared.plan
    check_boxes("tma_load_part", plan)

    def generate(b, value, pointer, tensor_map, batch, head, row, col):
        index, _ = unpack(b, value)
        filled = emit_expect(b, stage.pipeline, index, I32(plan.loaded))
        emit_load(b, stage, plan, pointer, tensor_map, batch, head, row, col, filled)

    index = types.int32
    return types.void(stage, shared, types.uint64, index, index, index, index), generate


@primitive
def tma_load_pages(stage, pages, table, head, row, page_size):
    """Like `tma_load`, for a matrix in pages: its row r is row r % page_size of the page table[r // page_size].

    pages: a tensor map of (pages, heads, page_size, columns), with boxes of as many rows as the tile, or a page if that
    has fewer: a multiple of 8, such that from `row` on each box is in one page. table: a vector of int32. Beyond the
    table comes the last page again; a page that does not exist is zeros.

    >>> shared, LAYOUT = SharedMemory(), simt(16, 64, 32, 8, 8)
    >>> PIPELINE = Pipeline.within(shared, shared.boxes(16, 64, np.float16), readers=1)
    >>> def kernel(pages, table, y):
    ...     init_pipelines(PIPELINE)
    ...     sync_threads()
    ...     if thread_index() == 0:
    ...         tma_load_pages(stage(PIPELINE, 0), pages, table, 0, 0, 8)
    ...     wait(stage(PIPELINE, 0))
    ...     save(y, get(stage(PIPELINE, 0).tile, LAYOUT), 0)
    >>> pages = np.repeat(np.arange(3.0), 512).reshape(3, 1, 8, 64).astype(np.float16)
    >>> run(kernel, pages, np.array([2, 1], np.int32), np.zeros((16, 1)))[:, 0]
    array([2., 2., 2., 2., 2., 2., 2., 2., 1., 1., 1., 1., 1., 1., 1., 1.])
    """
    plan = stage.pipeline.tile
    parts, values = _parts("tma_load_pages", plan, page_size), np.zeros(plan.shape, plan.dtype)
    if stage.pipeline.is_empty:
        return
    for down in parts:
        place, first = divmod(int(row) + down, page_size)
        page = table[min(place, len(table) - 1)]
        if 0 <= page < len(pages):
            part = np.asarray(pages)[page, head, first : first + plan.rows, : plan.cols].view(plan.dtype)
            values[down : down + page_size, : part.shape[1]] = part[: plan.rows - down]
    _start_load(stage, stage.tile, values)


def _parts(word, plan, page_size):
    """The first rows of a tile's parts, each loaded from one page."""
    check_boxes(word, plan)
    if not fits_pages(plan.rows, page_size):
        raise TypingError(f"{word}: {plan} is no tile of pages of {page_size} rows")
    return range(0, plan.rows, page_size)


@tma_load_pages.lowering
def tma_load_pages(stage, pages, table, head, row, page_size):
    if not isinstance(page_size, types.IntegerLiteral):
        return None
    plan, size = stage.pipeline.tile, page_size.literal_value
    parts, index = _parts("tma_load_pages", plan, size), types.int32
    if stage.pipeline.is_empty:
        return types.void(stage, pages, table, index, index, page_size), lambda b, *operands: None

    def generate(b, value, tensor_map, numbers, head, row, _):
        index, _ = unpack(b, value)
        filled, pointer = emit_expect(b, stage.pipeline, index, I32(plan.nbytes)), emit_stage(b, plan, index)
        rows = [b.add(row, I32(down)) for down in parts]
        found = [emit_page(b, table, numbers, b.udiv(row, I32(size))) for row in rows]     # read before the first load
        for down, row, page in zip(parts, rows, found):
            emit_load(b, stage, plan, pointer, tensor_map, page, head, b.urem(row, I32(size)), I32(0), filled, down)

    return types.void(stage, types.uint64, table, index, index, page_size), generate


def emit_page(b, ty, table, place):
    """An element of a table, or its last one."""
    last = b.sub(b.trunc(b.extract_value(array_part(b, ty, table, "shape"), 0), I32), I32(1))
    return b.load(emit_element(b, ty, table, b.select(b.icmp_signed("<", place, last), place, last)))


def emit_load(b, stage, plan, pointer, tensor_map, batch, head, row, col, filled, down=0):
    """Emit the loads of a tile's boxes, or of a part of each, from the tile's row `down` on."""
    hint, policy = (".L2::cache_hint", ", $7") if stage.pipeline.once else ("", "")
    text = (
        f"cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes{hint} "
        f"[$0], [$1, {{$2, $3, $4, $5}}], [$6]{policy};"
    )
    last = [EVICT_FIRST] if policy else []
    for right, box in boxes_of(b, plan, pointer, down):
        asm(b, text, VOID, box, tensor_map, b.add(col, right), row, head, batch, filled, *last, effect=True)


def emit_expect(b, pipeline, index, nbytes):
    """Announce a load of `nbytes`; returns the barrier at which it arrives."""
    filled = emit_barrier(b, pipeline, index, False)
    emit_arrival_of_bytes(b, filled, nbytes)
    return filled


def boxes_of(b, plan, pointer, down=0):
    """The first column of each box of a tile, and the address of its row `down`."""
    start = b.add(b.ptrtoint(pointer, I32), I32(down * ROW_BYTES))
    for i, col in enumerate(range(0, plan.cols, plan.width)):
        yield I32(col), b.add(start, I32(i * plan.box_bytes))


@primitive
def bulk_load(stage, shared, line, first):
    """Start to copy elements `first`... of a line into a row-major tile of one row that goes with the stage.

    By one thread; the stage is filled once all its loads are there, see `Pipeline.fills`. The line is contiguous and
    long enough, and what is copied starts at a multiple of 16 bytes.

    >>> def kernel(line, y):
    ...     init_pipelines(RING)
    ...     sync_threads()
    ...     S = stage(RING, 0)
    ...     if thread_index() == 0:
    ...         bulk_load(S, S.tile, line, 4)
    ...     wait(S)
    ...     y[0], y[1], y[2], y[3] = read(S)
    >>> run(kernel, np.arange(8, dtype=np.int32), np.zeros(4))
    array([4., 5., 6., 7.])
    """
    check_line("bulk_load", shared, line)
    cols = shared.plan.cols
    values = np.asarray(line)[int(first) : int(first) + cols]
    if len(values) < cols or values.strides[0] != values.itemsize:
        raise ValueError(f"bulk_load: a line of {len(line)} has no {cols} contiguous elements from {first} on")
    _start_load(stage, shared, values)


def check_line(word, shared, line):
    plan = shared.plan
    if line.ndim != 1 or name_of(line.dtype) != name_of(plan.dtype) or plan.rows > 1:
        raise TypingError(f"{word}: {plan} is no part of a line of {line.dtype} of {line.ndim} axes")


@bulk_load.lowering
def bulk_load(stage, shared, line, first):
    check_line("bulk_load", shared, line)
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"

    def generate(b, value, pointer, array, first):
        nbytes = I32(shared.plan.nbytes)
        filled = emit_expect(b, stage.pipeline, unpack(b, value)[0], nbytes)
        source = b.ptrtoint(emit_element(b, line, array, first), I64)
        asm(b, text, VOID, b.ptrtoint(pointer, I32), source, nbytes, filled, effect=True)

    return types.void(stage, shared, line, types.int32), generate


@primitive
def fence_async_proxy():
    """After this and a barrier, what this thread has written to shared memory may be stored by TMA or multiplied by
    wgmma.

    >>> LAYOUT = simt(8, 64, 32, 8, 8)
    >>> def kernel(y):
    ...     put(allocate(BOXES), full(LAYOUT, np.float16(2)))
    ...     fence_async_proxy()
    ...     sync_threads()
    ...     if thread_index() == 0:
    ...         tma_store(y, allocate(BOXES), 0, 0, 0)
    ...         tma_store_wait()
    >>> run(kernel, np.zeros((1, 1, 8, 64), np.float16))[0, 0, 0, :4]
    array([2., 2., 2., 2.], dtype=float16)
    """
    simulator.shared_memory().share()


@fence_async_proxy.lowering
def fence_async_proxy():
    return types.void(), lambda b: asm(b, "fence.proxy.async.shared::cta;", VOID, effect=True)


@primitive
def tma_store(matrices, shared, batch, head, row, col=0):
    """Start to copy a tile of boxes to a part of a matrix, from (row, col) on, as far as it goes. By one thread. See
    `pipeline`.

    >>> def kernel(y):
    ...     clear(allocate(BOXES), 0)
    ...     fence_async_proxy()
    ...     sync_threads()
    ...     if thread_index() == 0:
    ...         tma_store(y, allocate(BOXES), 0, 0, 4)
    ...         tma_store_wait()
    >>> run(kernel, np.ones((1, 1, 8, 64), np.float16), threads=128)[0, 0, :, 0]
    array([1., 1., 1., 1., 0., 0., 0., 0.], dtype=float16)
    """
    check_boxes("tma_store", shared.plan)
    values, part = start_store(shared), _part(matrices, shared.plan, batch, head, row, col)
    part[...] = values[: part.shape[0], : part.shape[1]]


def start_store(shared):
    """Read a tile in the background."""
    return shared.read(slice(None), slice(None), shared.memory.start_work(_stores()))


def _stores():
    return f"a store of thread {simulator.thread_index()}"


@tma_store.lowering
def tma_store(matrices, shared, batch, head, row, col=0):
    plan = shared.plan
    check_boxes("tma_store", plan)

    def generate(b, tensor_map, pointer, batch, head, row, first):
        text = "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [$0, {$1, $2, $3, $4}], [$5];"
        for col, box in boxes_of(b, plan, pointer):
            asm(b, text, VOID, tensor_map, b.add(first, col), row, head, batch, box, effect=True)
        emit_commit(b)

    index = types.int32
    return types.void(types.uint64, shared, index, index, index, index), generate


def emit_commit(b):
    """Commit: whoever waits for this thread's stores waits for those up to here."""
    asm(b, "cp.async.bulk.commit_group;", VOID, effect=True)


@primitive
def tma_store_wait():
    """Wait until the tiles that this thread stores may be overwritten.

    >>> LAYOUT = simt(8, 64, 32, 8, 8)
    >>> def kernel(y):
    ...     for row in range(0, 24, 8):
    ...         put(allocate(BOXES), full(LAYOUT, np.float32(row)))
    ...         fence_async_proxy()
    ...         sync_threads()
    ...         if thread_index() == 0:
    ...             tma_store(y, allocate(BOXES), 0, 0, row)
    ...             tma_store_wait()
    ...         sync_threads()  # BOXES may be overwritten
    >>> run(kernel, np.ones((1, 1, 24, 64), np.float16))[0, 0, ::8, 0]
    array([ 0.,  8., 16.], dtype=float16)
    """
    memory = simulator.shared_memory()
    unit = memory.unit(_stores())
    memory.note_end(unit, memory.clocks[0, unit, unit])


@tma_store_wait.lowering
def tma_store_wait():
    return types.void(), lambda b: asm(b, "cp.async.bulk.wait_group.read 0;", VOID, effect=True)


@primitive
def tma_store_complete():
    """Like `tma_store_wait`, until they are in global memory.

    >>> run(lambda y: tma_store_complete(), np.ones(1))       # none are on their way
    array([1.])
    """
    tma_store_wait()


@tma_store_complete.lowering
def tma_store_complete():
    return types.void(), lambda b: asm(b, "cp.async.bulk.wait_group 0;", VOID, effect=True)

"""Asynchronous copies (cp.async) from global to shared memory."""

from functools import partial

from ..compiler import TypingError, capability, types
from . import simulator
from .alignment import VECTOR_BYTES
from .emit import I32, I64, VOID, asm, if_first_holder, in_own_block, load_vector, store_vector
from .fragment import name_of
from .global_memory import check_array, holds_first_copy, load, places
from .matrices import GlobalMatrix
from .shared_memory import check_shape, put, shared_places
from .synchronisation import demand_literal
from .world import primitive


@primitive
def copy_async(shared, matrix, layout, first):
    """put(shared, load(matrix, layout, first)), bypassing the registers, in the background: see `wait_copies`.

    The tile and the matrix have the same dtype; a transposed tile must be a column. GPUs before 8.0, and elements of
    less than 4 bytes that are not aligned to 4, go through the registers.

    >>> def kernel(x, y):
    ...     copy_async(allocate(PLACE), x, TILE, 0)
    ...     wait_copies()
    ...     sync_threads()
    ...     save(y, get(allocate(PLACE), TILE), 0)
    >>> run(kernel, ARRAY, np.zeros((1, 4)))
    array([[0., 1., 2., 3.]])
    """
    _check_copy(shared.plan, matrix, layout)
    put(shared, load(matrix, layout, first))
    if holds_first_copy(layout):
        shared.memory.note_fetch(shared.granules_of(*places(layout)))


@copy_async.lowering
def copy_async(shared, matrix, layout, first):
    layout_type, layout, plan = layout, layout.value, shared.plan
    _check_copy(plan, matrix, layout)

    def generate(b, pointer, value, _, first):
        source = GlobalMatrix(b, matrix, value, layout)
        item, in_background = plan.dtype.itemsize, capability() >= (8, 0)

        def copy_row(down):
            target_of = shared_places(b, plan, layout, pointer)
            for run in layout.cols.runs(min(source.width, plan.vector)):
                across = layout.cols.offsets[run[0]]
                place, inside = source.clamped(layout, first, down, across)
                target, further = target_of(down, across)
                if in_background and len(run) * item >= 4:
                    emit_copy(b, len(run) * item, b.ptrtoint(target, I32), b.ptrtoint(place, I64), b.zext(inside, I32),
                              to=further * item)  # fmt: skip
                else:
                    store_vector(b, load_vector(b, place, len(run), inside), b.gep(target, [I32(further)]))
            return []

        def copy_rows():
            """Copy by two instructions a row and two a vector: addresses are sums with constants, and nothing outside
            is read, so that none is clamped."""
            target_of, (row0, col0) = shared_places(b, plan, layout, pointer), source.start(layout, first)
            runs = layout.cols.runs(min(source.width, plan.vector))
            acrosses = [layout.cols.offsets[run[0]] for run in runs]
            rows_left, cols_left = b.sub(source.rows, row0), b.sub(source.cols, col0)
            lefts = [b.select(b.icmp_signed("<", I32(x), cols_left), rows_left, I32(0)) for x in acrosses]
            stride, column = b.trunc(source.row_stride, I32), b.ptrtoint(b.gep(source.data, [col0]), I64)
            origin = None if source.page_size else asm(b, "mad.wide.s32 $0, $1, $2, $3;", I64, row0, stride, column)
            for down in layout.rows.offsets:
                if source.page_size:
                    row = b.add(row0, I32(down))
                    last = b.sub(source.rows, I32(1))
                    row = b.select(b.icmp_signed("<", row, source.rows), row, last)
                    at = b.ptrtoint(source.place(row, col0), I64)
                else:  # not by LLVM, which would keep each multiple of the stride in a register
                    at = asm(b, f"mad.wide.s32 $0, $1, {down}, $2;", I64, stride, origin) if down else origin
                for run, across, left in zip(runs, acrosses, lefts):
                    target, further = target_of(down, across)
                    places = further * item, across * item
                    emit_copy(b, len(run) * item, b.ptrtoint(target, I32), at, left, down, *places)

        def write():
            if in_background and source.alignment == VECTOR_BYTES:
                copy_rows()
                return
            for down in layout.rows.offsets:
                in_own_block(b, [], partial(copy_row, down))

        with if_first_holder(b, layout):
            write()

    return types.void(shared, matrix, layout_type, types.int32), generate


def _check_copy(plan, matrix, layout):
    check_shape("copy_async", plan, layout)
    check_array("copy_async", matrix, layout, {name_of(plan.dtype)})
    if plan.transposed and layout.cols.size > 1:
        raise TypingError(f"copy_async: a matrix does not go as it is to {plan}")


def emit_copy(b, nbytes, target, place, left, down=0, to=0, of=0):
    """Copy `nbytes` from global address place + of to target + to in shared memory; zeros unless down < left."""
    how = "cg" if nbytes == VECTOR_BYTES else "ca"  # bypassing the L1 cache is for vectors only
    copy = f"cp.async.{how}.shared.global.L2::128B [$0+{to}], [$1+{of}], {nbytes}, ends;"
    asm(b, f"{{ .reg .pred ends; setp.le.s32 ends, $2, {down}; {copy} }}", VOID, target, place, left, effect=True)


@primitive
def commit_copies():
    """Make a group of what this thread has copied by `copy_async` since the last call: see `wait_copies`.

    >>> PLACES = SharedMemory().tile(2, 4, np.float32, stages=2)
    >>> def first_of_two(x):
    ...     copy_async(allocate(PLACES, 0), ARRAY, TILE, 0)
    ...     commit_copies()
    ...     copy_async(allocate(PLACES, 1), ARRAY, TILE, 0)
    ...     commit_copies()
    ...     wait_copies(1)
    ...     sync_threads()
    ...     return get(allocate(PLACES, 0), TILE)
    >>> show(first_of_two)[0]
    array([0., 1., 2., 3.], dtype=float32)
    """
    simulator.shared_memory().note_group()


@commit_copies.lowering
def commit_copies():
    def generate(b):
        if capability() >= (8, 0):
            asm(b, "cp.async.commit_group;", VOID, effect=True)

    return types.void(), generate


@primitive
def wait_copies(pending=0):
    """Wait until what this thread has copied by `copy_async` is there. The others know after the next barrier.

    pending: how many of the last groups may still be on their way, a literal; see `commit_copies`.

    >>> PLACES = SharedMemory().tile(2, 4, np.float32, stages=2)
    >>> def doubled(x):
    ...     copy_async(allocate(PLACES, 0), ARRAY, TILE, 0)
    ...     copy_async(allocate(PLACES, 1), ARRAY, TILE, 0)
    ...     wait_copies()
    ...     sync_threads()
    ...     return get(allocate(PLACES, 0), TILE) + get(allocate(PLACES, 1), TILE)
    >>> show(doubled)[0]
    array([0., 2., 4., 6.], dtype=float32)
    """
    demand_literal("wait_copies", pending)
    simulator.shared_memory().note_arrival(pending or None)


@wait_copies.lowering
def wait_copies(pending=0):
    if isinstance(pending, types.Integer) and not isinstance(pending, types.IntegerLiteral):
        return None
    count = getattr(pending, "literal_value", 0)

    def generate(b, _):
        if capability() >= (8, 0):
            asm(b, f"cp.async.wait_group {count};" if count else "cp.async.wait_all;", VOID, effect=True)

    return types.void(types.int32 if pending == 0 else pending), generate

"""Which thread this is; barriers, atomics, dependent launch, register reallocation.

A block has 16 named barriers: number 0 is for the whole block, the next for several warpgroups, then one for each
warpgroup.
"""

import numpy as np

from ..compiler import TypingError, array_part, capability, ir, types
from .arrays import memory_type
from .emit import GLOBAL, I8, I32, I64, VOID, asm, call, special_register
from .emit import thread_index as emit_thread_index
from .fragment import WORDS, name_of
from .integers import INDEX
from .layout import WARPGROUP, WARPGROUP_BITS
from .simulator import barrier, block, gather_lanes, index_in_block, rank, sync_lanes, thread
from .world import primitive

ALL_WARPGROUPS, FIRST_OF_WARPGROUPS = 1, 2


@primitive
def thread_index():
    """The number of this thread in its block.

    >>> def kernel(y):
    ...     y[thread_index()] = thread_index() * 2
    >>> run(kernel, np.zeros(32))[:4]
    array([0., 2., 4., 6.])
    """
    return np.int32(index_in_block())


@thread_index.lowering
def thread_index():
    return INDEX(), emit_thread_index


@primitive
def block_index(axis=0):
    """The number of this block in the grid along an axis, a literal: 0 (blockIdx.x), 1 or 2.

    >>> run(lambda y: save(y, full(TILE, block_index() + 8), 0), np.zeros((1, 2)))
    array([[8., 8.]])
    """
    demand_literal("block_index", axis)
    return np.int32(block().place[axis] + (rank() if axis == 0 else 0))


@primitive
def grid_size(axis=0):
    """The number of blocks in the grid along an axis, a literal.

    >>> run(lambda y: save(y, full(TILE, grid_size()), 0), np.zeros((1, 2)))
    array([[1., 1.]])
    """
    demand_literal("grid_size", axis)
    return np.int32(block().grid[axis])


def demand_literal(word, x):
    """Check an argument that the compiler has to know: an index computed in the kernel will not do."""
    if not isinstance(x, int):
        raise TypingError(f"{word}: got {x}, expected a literal")


def _lower_register(name):
    def lower(axis=0):
        if isinstance(axis, types.Integer) and not isinstance(axis, types.IntegerLiteral):
            return None
        register = f"{name}.{'xyz'[getattr(axis, 'literal_value', axis)]}"
        return INDEX(types.int32 if axis == 0 else axis), lambda b, _: special_register(b, register)

    return lower


block_index = block_index.lowering(_lower_register("ctaid"))


grid_size = grid_size.lowering(_lower_register("nctaid"))


@primitive
def sync_threads():
    """Wait for this block's threads: what they have written to shared or global memory is now seen by all. See `put`.

    >>> def kernel(x, y):
    ...     x[thread_index()] = thread_index()
    ...     sync_threads()
    ...     y[thread_index()] = x[31 - thread_index()]
    >>> run(kernel, np.zeros(32), np.zeros(32))[:4]
    array([31., 30., 29., 28.])
    """
    block().everyone_of(thread()).meet()


@sync_threads.lowering
def sync_threads():
    return types.void(), lambda b: call(b, "llvm.nvvm.barrier0", VOID)


def emit_element(b, ty, value, index):
    """Pointer to an element of a vector."""
    data = b.addrspacecast(array_part(b, ty, value, "data"), ir.PointerType(memory_type(ty.dtype), GLOBAL))
    stride = b.extract_value(array_part(b, ty, value, "strides"), 0)
    index = index if index.type == I64 else b.sext(index, I64)
    at = b.gep(b.bitcast(data, ir.PointerType(I8, GLOBAL)), [b.mul(index, stride)])
    return b.bitcast(at, data.type)


@primitive
def atomic_add(array, index, value):
    """Add to an element of an array of integers, in one step for all threads of the grid. Returns the old value.

    >>> run(lambda count: atomic_add(count, 0, 2), np.zeros(1, np.int32))
    array([64], dtype=int32)
    """
    check_atomic("atomic_add", array, WORDS)
    old = array[index]
    array[index] = old + array.dtype.type(value)
    return old


@atomic_add.lowering
def atomic_add(array, index, value):
    check_atomic("atomic_add", array, WORDS)
    return array.dtype(array, types.int32, array.dtype), lambda b, *values: b.atomic_rmw(
        "add", emit_element(b, array, *values[:2]), values[2], "monotonic")


@primitive
def atomic_inc(array, index, last):
    """Like `atomic_add` of 1, but `last` is followed by 0.

    >>> run(lambda count: atomic_inc(count, 0, 4), np.zeros(1, np.int32))       # 32 = 6 * 5 + 2
    array([2], dtype=int32)
    """
    check_atomic("atomic_inc", array, {"int32", "uint32"})
    old = array[index]
    array[index] = 0 if old >= last else old + 1
    return old


@atomic_inc.lowering
def atomic_inc(array, index, last):
    check_atomic("atomic_inc", array, {"int32", "uint32"})

    def generate(b, matrix, index, last):
        return call(b, "llvm.nvvm.atomic.load.inc.32.p1i32", I32, emit_element(b, array, matrix, index), last)

    return array.dtype(array, types.int32, array.dtype), generate


def check_atomic(word, array, takes):
    if array.ndim != 1 or name_of(array.dtype) not in takes:
        raise TypingError(f"{word}: got {array.dtype} of {array.ndim} axes, expected {' or '.join(sorted(takes))} of 1")


@primitive
def sync_warp():
    """Wait for the lanes of this warp: what they have written to shared memory is now seen by all. Like `sync_threads`.

    >>> def kernel(x, y):
    ...     if thread_index() < 32:  # one warp of two
    ...         put(allocate(PLACE), load(x, TILE, 0))
    ...         sync_warp()
    ...         save(y, get(allocate(PLACE), TILE), 0)
    >>> run(kernel, ARRAY, np.zeros((1, 4)), threads=64)
    array([[0., 1., 2., 3.]])
    """
    sync_lanes()


@sync_warp.lowering
def sync_warp():
    def generate(b):
        asm(b, "bar.warp.sync 0xffffffff;", VOID, effect=True)

    return types.void(), generate


@primitive
def ballot(truth):
    """The lanes of this warp whose argument is true: a bit for each of them, as uint32.

    >>> run(lambda y: save(y, full(TILE, ballot(thread_index() < 3)), 0), np.zeros((1, 2)))
    array([[7., 7.]])
    """
    return np.uint32(sum(bool(yes) << lane for lane, yes in gather_lanes(truth).items()))


@ballot.lowering
def ballot(truth):
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return types.uint32(types.boolean), lambda b, truth: asm(b, text, I32, b.zext(truth, I32), effect=True)


def warpgroup_of():
    return index_in_block() >> WARPGROUP_BITS


def emit_warpgroup(b):
    """The warpgroup's index, by a shuffle, so that ptxas knows that it is the same in all lanes."""
    number = b.lshr(emit_thread_index(b), I32(WARPGROUP_BITS))
    return asm(b, "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", I32, number, effect=True)


@primitive
def warpgroup_index():
    """Which warpgroup of the block this thread belongs to: 128 threads are one.

    >>> def kernel(y):
    ...     y[warpgroup_index()] = 1
    >>> run(kernel, np.zeros(4), threads=256)
    array([1., 1., 0., 0.])
    """
    return np.int32(warpgroup_of())


@warpgroup_index.lowering
def warpgroup_index():
    return INDEX(), emit_warpgroup


@primitive
def sync_warpgroup():
    """Wait for this warpgroup: what its threads have written to shared memory is now seen by all. Like `sync_threads`.

    >>> LAYOUT = simt(2, 4, 128, 4, 1)
    >>> def kernel(x, y):
    ...     if warpgroup_index() == 1:  # of two
    ...         put(allocate(PLACE), load(x, LAYOUT, 0))
    ...         sync_warpgroup()
    ...         save(y, get(allocate(PLACE), LAYOUT), 0)
    >>> run(kernel, ARRAY, np.zeros((1, 4)), threads=256)
    array([[0., 1., 2., 3.]])
    """
    barrier(f"sync_warpgroup() of warpgroup {warpgroup_of()}", WARPGROUP).sync()


@sync_warpgroup.lowering
def sync_warpgroup():
    def generate(b):
        barrier = b.add(emit_warpgroup(b), I32(FIRST_OF_WARPGROUPS))
        asm(b, f"bar.sync $0, {WARPGROUP};", VOID, barrier, effect=True)

    return types.void(), generate


@primitive
def sync_warpgroups(count):
    """Like `sync_threads`, for the block's first `count` warpgroups together, a literal.

    >>> def kernel(x, y):
    ...     x[thread_index()] = thread_index()
    ...     if warpgroup_index() < 2:  # of three
    ...         sync_warpgroups(2)
    ...         y[thread_index()] = x[255 - thread_index()]
    >>> run(kernel, np.zeros(384), np.zeros(256), threads=384)[:4]
    array([255., 254., 253., 252.])
    """
    demand_literal("sync_warpgroups", count)
    barrier(f"sync_warpgroups({count})", count * WARPGROUP).sync()


@sync_warpgroups.lowering
def sync_warpgroups(count):
    if not isinstance(count, types.IntegerLiteral):
        return None
    text = f"bar.sync {ALL_WARPGROUPS}, {count.literal_value * WARPGROUP};"
    return types.void(count), lambda b, _: asm(b, text, VOID, effect=True)


@primitive
def wait_on_dependencies():
    """Wait until the stream's previous kernel is over and what it has written is seen: see build.Source.overlaps.

    Before Hopper it is over when this one starts, so there is nothing to wait for.

    >>> def kernel(x, y):
    ...     wait_on_dependencies()  # x is what the kernel before this one has written
    ...     save(y, load(x, TILE, 0) * 2, 0)
    >>> run(kernel, ARRAY, np.zeros((1, 4)))
    array([[0., 2., 4., 6.]])
    """


@wait_on_dependencies.lowering
def wait_on_dependencies():
    return types.void(), lambda b: emit_for_overlap(b, "wait")


@primitive
def launch_dependents():
    """Let the stream's next kernel start, as far as this block is concerned, if it overlaps: it waits for this one.

    >>> def kernel(x, y):
    ...     wait_on_dependencies()
    ...     launch_dependents()  # the next kernel may start; before it reads y, it waits
    ...     save(y, load(x, TILE, 0) * 2, 0)
    >>> run(kernel, ARRAY, np.zeros((1, 4)))
    array([[0., 2., 4., 6.]])
    """


@launch_dependents.lowering
def launch_dependents():
    return types.void(), lambda b: emit_for_overlap(b, "launch_dependents")


def emit_for_overlap(b, what):
    if capability() >= (9, 0):
        asm(b, f"griddepcontrol.{what};", VOID, effect=True)


@primitive
def decrease_registers(left):
    """Release registers of this warpgroup, so that each thread keeps `left` of them.

    >>> def kernel(y):
    ...     if warpgroup_index() == 0:
    ...         decrease_registers(40)
    ...     y[warpgroup_index()] = 1
    >>> run(kernel, np.zeros(2), threads=256)
    array([1., 1.])
    """
    _check_registers("decrease_registers", left)


@primitive
def increase_registers(count):
    """Get registers for this warpgroup, so that each thread has `count` of them, once others have released enough.

    >>> def kernel(y):
    ...     if warpgroup_index() == 0:
    ...         decrease_registers(40)
    ...     else:
    ...         increase_registers(232)
    ...     y[warpgroup_index()] = 1
    >>> run(kernel, np.zeros(2), threads=256)
    array([1., 1.])
    """
    _check_registers("increase_registers", count)


def _check_registers(name, count):
    demand_literal(name, count)
    if count not in range(24, 241, 8):
        raise ValueError(f"{name}: got {count}, expected a multiple of 8 from 24 to 240")


def _lower_registers(how):
    def lower(count):
        if not isinstance(count, types.IntegerLiteral):
            return None
        _check_registers(how, count.literal_value)
        text = f"setmaxnreg.{how}.sync.aligned.u32 {count.literal_value};"
        return types.void(count), lambda b, _: asm(b, text, VOID, effect=True)

    return lower


decrease_registers = decrease_registers.lowering(_lower_registers("dec"))


increase_registers = increase_registers.lowering(_lower_registers("inc"))

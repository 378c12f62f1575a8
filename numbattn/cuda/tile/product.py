"""Products of tiles, added to fragments: `dot`, `dots`. The sum's layout says which unit multiplies.

On CUDA cores ("fma") both operands are in shared memory, of any dtype; they are converted on the way. On the
tensor cores ("mma") they are float16, bfloat16 or float64, or float32 by way of three products of TF32; the left one
may also be a fragment, whose accumulator registers are what the unit takes as its left operand. With a fragment the
right one may have fewer bits, widened in registers: TF32 holds it exactly, so that float32 takes two products. Either
operand may be transposed: `sK.T`.
"""

from itertools import product

import numpy as np

from ..compiler import TypingError, ir, loop, types
from .alignment import VECTOR_BYTES
from .conversion import emit_convert, round_to, widen
from .emit import I32, base, load_vector
from .fragment import FLOATS, ConstantType, Fragment, FragmentType, name_of
from .fragment import fragment as pack
from .fragment import registers as unpack
from .global_memory import places
from .layout import WARP, Layout
from .places import SharedTile
from .shared_memory import Tile, TileType
from .simulator import gather_lanes
from .simulator import thread_index as my_index
from .tensor_cores import check_mma, emit_mma
from .warpgroup import check_wgmma, emit_wgmma, start_product
from .world import primitive


@primitive
def dot(acc, x, y):
    """acc + x @ y, summed in acc's dtype. A layout as acc stands for a tile of zeros, float64 if y is, else float32.

    y is a tile in shared memory; so is x, or, on tensor cores, a fragment that is rounded to y's dtype. If a warpgroup
    multiplies, x is a tile or an `operand`, and the sum is there only after `wgmma_wait`.

    y may have fewer bits if it is widened: see `SharedMemory.tile`. If that is to 16 bits, x is, with y.T, a fragment
    with a layout `by_fours`; with y, the sum has such a layout.

    >>> SUMS = simt(2, 2, 32, 2, 1)
    >>> def kernel(x, z):
    ...     sX = allocate(PLACE)
    ...     put(sX, load(x, TILE, 0))
    ...     sync_threads()
    ...     save(z, dot(SUMS, sX, sX.T), 0)
    >>> run(kernel, ARRAY, np.zeros((2, 2)))
    array([[ 14.,  38.],
           [ 38., 126.]])
    """
    _check_operands(x, y)
    if isinstance(acc, Layout):
        acc = Fragment(acc, np.zeros(1, np.float64 if y.plan.dtype == np.float64 else np.float32))
    _check(acc, x, y)
    if acc.layout.unit == "wgmma":
        return start_product(acc, x, y)
    if is_empty(acc):
        return acc
    rows, cols = places(acc.layout)
    depth = np.arange(y.plan.shape[0])
    left = x.read(rows, depth) if isinstance(x, Tile) else round_to(y.plan.factor, whole_rows(x))
    right = y.read(depth[:, None], cols)
    if y.plan.is_widened:
        right = widen(y.plan.factor, right)
    return Fragment(acc.layout, acc.registers + left.astype(acc.dtype) @ right.astype(acc.dtype))


def whole_rows(x):
    """This thread's rows of a fragment, including the columns that other lanes hold."""
    bits, me = sum(1 << bit for bit in x.layout.row_lane_bits()), my_index() % WARP
    rows = np.empty((x.layout.rows.slots, x.layout.cols.size), x.dtype)
    for lane, registers in gather_lanes(x.registers).items():
        if (lane ^ me) & ~bits == 0:
            _, cols = x.layout.positions(lane)
            rows[:, cols[0]] = registers
    return rows


@dot.lowering
def dot(acc, x, y):
    _check_operands(x, y)
    given, from_zero = acc, isinstance(acc, ConstantType)
    if from_zero:
        acc = FragmentType(acc.value, types.float64 if y.dtype == types.float64 else types.float32)
    _check(acc, x, y)
    if acc.layout.unit == "wgmma":
        emit = emit_wgmma(acc, x, y)
        return acc(given, x, y), lambda b, value, *operands: emit(b, None if from_zero else value, *operands)
    zeros = ir.Constant(acc.llvm, None)
    if is_empty(acc):
        return acc(given, x, y), lambda b, *operands: zeros
    emit = EMIT[acc.layout.unit](acc, [x], y)

    def generate(b, value, x_value, y_pointer):
        sums = unpack(b, acc, zeros if from_zero else value)
        return pack(b, acc, emit(b, sums, [x_value], y_pointer))

    return acc(given, x, y), generate


@primitive
def dots(sums, xs, y):
    """dot(acc, x, y) for each acc of `sums` and x of `xs`, tuples of alike tiles: y is read once. Not by a warpgroup.

    >>> SUMS = simt(2, 2, 32, 2, 1)
    >>> def kernel(x, z):
    ...     sX = allocate(PLACE)
    ...     put(sX, load(x, TILE, 0))
    ...     sync_threads()
    ...     zeros = full(SUMS, np.float32(0))
    ...     one, other = dots((zeros, zeros + 1), (sX, sX), sX.T)
    ...     save(z, other - one, 0)
    >>> run(kernel, ARRAY, np.zeros((2, 2)))
    array([[1., 1.],
           [1., 1.]])
    """
    return tuple(dot(acc, x, y) for acc, x in zip(sums, xs, strict=True))


@dots.lowering
def dots(sums, xs, y):
    (acc, *others), kinds = sums, {isinstance(x, FragmentType) for x in xs}
    for x in xs:
        _check_operands(x, y)
        _check(acc, x, y)
    if any(other != acc for other in others) or len(xs) != len(sums) or len(kinds) > 1 or acc.layout.unit not in EMIT:
        raise TypingError(f"dots: got {sums} and {xs}, expected as many tiles, alike")
    if is_empty(acc):
        return sums(sums, xs, y), lambda b, values, *operands: values
    emit, rows = EMIT[acc.layout.unit](acc, list(xs), y), acc.layout.rows.slots

    def generate(b, values, x_values, y_pointer):
        registers = [row for i in range(len(sums)) for row in unpack(b, acc, b.extract_value(values, i))]
        found = emit(b, registers, [b.extract_value(x_values, i) for i in range(len(xs))], y_pointer)
        for i in range(len(sums)):
            values = b.insert_value(values, pack(b, acc, found[i * rows : (i + 1) * rows]), i)
        return values

    return sums(sums, xs, y), generate


def _check_operands(x, y):
    for operand in (x, y):
        if not isinstance(operand, Tile | TileType) and (operand is y or not hasattr(operand, "layout")):
            raise TypingError(f"dot: got {operand}, expected a tile")


def _check(acc, x, y):
    """Check operands in either world: acc has a layout, y a plan, the place of a shared tile, x one or the other."""
    left, right, layout = getattr(x, "plan", None) or x.layout, y.plan, acc.layout
    if (left.shape[0], right.shape[1]) != layout.shape or left.shape[1] != right.shape[0]:
        (m, k), (l, n) = left.shape, right.shape
        raise TypingError(f"dot: {m}x{k} @ {l}x{n} is no {layout}")
    if not is_empty(acc):
        {"fma": check_fma, "mma": check_mma, "wgmma": check_wgmma}[layout.unit](layout, name_of(acc.dtype), x, right)


def is_empty(acc):
    """Whether there is nothing to sum: a product of no columns."""
    return not acc.layout.cols.size


def check_fma(layout, total, x, right):
    for place in (getattr(x, "plan", None), right):
        if not isinstance(place, SharedTile) or place.is_widened:
            raise TypingError("dot: on CUDA cores both operands are row-major tiles in shared memory, not widened")
    if total not in FLOATS:
        raise TypingError(f"dot: a sum of {total}, expected float32 or float64")
    if right.shape[0] % depth_step(total):
        raise TypingError(f"dot: a depth of {right.shape[0]} is no multiple of {depth_step(total)}")


def depth_step(total):
    """How much of k one turn of the loop takes."""
    return VECTOR_BYTES // np.dtype(total).itemsize


# ----------------------------------------------------------------------------------------------------- CUDA cores
def reader(b, tile, pointer, axis, along, dtype):
    """The reader of a thread's part of an operand: read(k, count) -> [slot][k, k + 1, ...], registers of `dtype`.

    `axis` deals out the operand's axis number `along`; the other one is k. What is contiguous in memory is read in
    vectors: along k, or along the slots.
    """
    plan = tile.plan
    slot_step, k_step = plan.steps() if along == 0 else plan.steps()[::-1]
    start = b.mul(base(b, axis), I32(slot_step))

    def read(k, count):
        if k_step == 1:
            width = min(plan.vector, count)
            pieces = [((slot,), range(i, i + width)) for i in range(0, count, width) for slot in range(axis.slots)]
        else:
            pieces = [(run, (i,)) for i in range(count) for run in axis.runs(plan.vector)]
        first = b.add(start, b.mul(k, I32(k_step)))
        found = [[None] * count for _ in axis.offsets]
        for slots, ks in pieces:
            at = b.add(first, I32(axis.offsets[slots[0]] * slot_step + ks[0] * k_step))
            values = load_vector(b, b.gep(pointer, [at]), len(slots) * len(ks))
            for (slot, i), value in zip(product(slots, ks), values):
                found[slot][i] = emit_convert(b, tile.dtype, dtype, value)
        return found

    return read


def emit_fma(acc, lefts, y):
    """The function (builder, sums, pointers of the left operands, pointer) -> sums, rows of registers: as many for each
    of the left operands as `acc` has."""
    depth, step = y.plan.shape[0], depth_step(name_of(acc.dtype))

    def generate(b, sums, x_pointers, y_pointer):
        readers = [reader(b, x, at, acc.layout.rows, 0, acc.dtype) for x, at in zip(lefts, x_pointers)]
        read_y = reader(b, y, y_pointer, acc.layout.cols, 1, acc.dtype)

        def turn(k, sums):
            xs, ys = [row for read_x in readers for row in read_x(k, step)], read_y(k, step)
            for i, r, c in product(range(step), range(len(sums)), range(acc.layout.cols.slots)):
                sums[r][c] = b.fma(xs[r][i], ys[c][i], sums[r][c])
            return sums

        return loop(b, range(0, depth, step), sums, turn)

    return generate


EMIT = {"fma": emit_fma, "mma": emit_mma}

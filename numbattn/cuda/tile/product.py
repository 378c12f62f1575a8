"""Products of tiles, added to a fragment: `dot`. The layout of the sum says who multiplies.

On the ordinary cores ("fma") both operands lie in shared memory, of any dtype; they are converted on the way. On the
tensor cores ("mma") they are float16 or bfloat16; the left one may also be a fragment, whose accumulator registers are
what the unit wants as its left operand. Either operand may be transposed: `sK.T`.
"""

from itertools import chain, product

import numpy as np
from numba.cuda import types
from numba.cuda.core.errors import TypingError

from .emit import F32, I32, asm, base, load_vector, size_of, thread_index
from .fragment import LLVM, Fragment, FragmentType
from .fragment import fragment as pack
from .fragment import registers as unpack
from .layout import WARP_BITS
from .math import emit_convert, round_to
from .memory import VECTOR_BYTES, Tile, places
from .simulator import WARP, gather_lanes
from .simulator import thread_index as my_index
from .world import primitive

HALVES = {types.float16: "f16", types.bfloat16: "bf16"}


@primitive
def dot(acc, x, y):
    """acc + x @ y, summed in acc's dtype.

    y is a tile in shared memory, x one too, or, on tensor cores, a fragment: it is rounded to y's dtype.
    """
    _check_shapes(acc.layout, x.plan.shape if isinstance(x, Tile) else x.layout.shape, y.plan.shape)
    rows, cols = places(acc.layout)
    depth = np.arange(y.plan.shape[0])
    left = x.read(rows, depth) if isinstance(x, Tile) else round_to(y.plan.dtype, whole_rows(x))
    right = y.read(depth[:, None], cols)
    return Fragment(acc.layout, acc.registers + left.astype(acc.dtype) @ right.astype(acc.dtype))


def whole_rows(x):
    """This thread's rows of a fragment, with the columns that other lanes hold."""
    bits = sum(1 << bit for bit in x.layout.row_lane_bits())
    rows = np.empty((x.layout.rows.slots, x.layout.cols.size), x.dtype)
    for lane, registers in gather_lanes(x.registers).items():
        if (lane ^ my_index()) % WARP & ~bits == 0:
            rows[:, x.layout.cols.base(lane) + np.array(x.layout.cols.offsets)] = registers
    return rows


@dot.lowering
def dot(acc, x, y):
    _check_shapes(acc.layout, x.plan.shape if hasattr(x, "plan") else x.layout.shape, y.plan.shape)
    emit = {"fma": emit_fma, "mma": emit_mma}[acc.layout.unit]
    return acc(acc, x, y), emit(acc, x, y)


def _check_shapes(layout, x, y):
    if (x[0], y[1]) != layout.shape or x[1] != y[0]:
        raise TypingError(f"dot: {x[0]}x{x[1]} @ {y[0]}x{y[1]} is no {layout}")


# ------------------------------------------------------------------------------------------------- ordinary cores
def reader(b, tile, pointer, axis, along, dtype):
    """How a thread reads its part of an operand: read(k, count) -> [slot][k, k + 1, ...], registers of `dtype`.

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


def emit_fma(acc, x, y):
    if isinstance(x, FragmentType):
        raise TypingError("dot: on the ordinary cores both operands are tiles in shared memory")
    depth, element = y.plan.shape[0], LLVM[acc.dtype]
    step = VECTOR_BYTES // size_of(element)  # of k, in one turn of the loop
    if depth % step:
        raise TypingError(f"dot: a depth of {depth} is no multiple of {step}")

    def generate(b, value, x_pointer, y_pointer):
        read_x = reader(b, x, x_pointer, acc.layout.rows, 0, acc.dtype)
        read_y = reader(b, y, y_pointer, acc.layout.cols, 1, acc.dtype)
        starts = unpack(b, acc, value)
        before, loop, after = b.block, b.append_basic_block("dot"), b.append_basic_block("dot_end")
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(I32)
        k.add_incoming(I32(0), before)
        sums = [[b.phi(element) for _ in row] for row in starts]
        xs, ys = read_x(k, step), read_y(k, step)
        ends = [list(row) for row in sums]
        for i, r, c in product(range(step), range(acc.layout.rows.slots), range(acc.layout.cols.slots)):
            ends[r][c] = b.fma(xs[r][i], ys[c][i], ends[r][c])
        following = b.add(k, I32(step))
        k.add_incoming(following, loop)
        for phi, start, end in zip(*map(chain.from_iterable, (sums, starts, ends))):
            phi.add_incoming(start, before)
            phi.add_incoming(end, loop)
        b.cbranch(b.icmp_signed("<", following, I32(depth)), loop, after)
        b.position_at_end(after)
        return pack(b, acc, ends)

    return generate


# --------------------------------------------------------------------------------------------------- tensor cores
def ldmatrix(b, pointer, index, transposed):
    """Four 8x8 matrices of 16-bit elements, lanes 8i... giving the rows of matrix i: four registers of two elements."""
    address = b.ptrtoint(b.gep(pointer, [index]), I32)
    form = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    return asm(b, text, [I32] * 4, address, effect=True)


def mma_16_8_16(b, kind, d, a, c):
    """d + a @ c of 16x16 and 16x8 elements."""
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return asm(b, text, [F32] * 4, *a, *c, *d)


def emit_mma(acc, x, y):
    kind, in_registers = HALVES.get(y.dtype), isinstance(x, FragmentType)
    if kind is None or acc.dtype != types.float32 or not (in_registers or x.dtype == y.dtype):
        raise TypingError("dot: tensor cores multiply float16 or bfloat16 and add in float32")
    if in_registers and (x.layout.rows != acc.layout.rows or x.layout.unit != "mma"):
        raise TypingError(f"dot: {x.layout} is no left operand of {acc.layout}")
    rows, cols, depth = acc.layout.rows, acc.layout.cols, y.plan.shape[0]

    def generate(b, value, x_value, y_pointer):
        sums = unpack(b, acc, value)
        left = unpack(b, x, x_value) if in_registers else None
        thread = thread_index(b)
        warp_row = b.mul(b.lshr(thread, I32(WARP_BITS)), I32(16))

        def matrices(tile, pointer, first_row, as_rows):
            """Reads the 2x2 matrices at (row, col) of a tile; a thread gets neighbours of a row, or else of a column.

            Bits 3 and 4 of the lane say which matrix it points into, the lower ones which line of it.
            """
            down, across = tile.plan.steps()
            line, below, right = I32(max(down, across)), I32(8 * down), I32(8 * across)
            lane = b.mul(b.and_(thread, I32(7)), line)
            lane = b.add(lane, b.mul(b.and_(b.lshr(thread, I32(3)), I32(1)), below))
            lane = b.add(lane, b.mul(b.and_(b.lshr(thread, I32(4)), I32(1)), right))
            start = b.gep(pointer, [b.add(lane, b.mul(first_row, I32(down)))])
            transposed = as_rows != (across == 1)
            return lambda row, col: ldmatrix(b, start, I32(row * down + col * across), transposed)

        read_y = matrices(y, y_pointer, I32(0), as_rows=False)
        read_x = None if in_registers else matrices(x, x_value, warp_row, as_rows=True)

        def left_operand(r, k):
            if not in_registers:
                return read_x(rows.offsets[r], k)
            c = x.layout.cols.offsets.index(k)  # the sums of one product are the left operand of the next
            return [emit_pair(b, y.dtype, left[r + i][c + 2 * j : c + 2 * j + 2]) for j in range(2) for i in range(2)]

        for k in range(0, depth, 16):
            lefts = [left_operand(r, k) for r in range(0, rows.slots, 2)]
            for n in range(0, cols.size, 16):
                rights = read_y(k, n)
                for (r, a), half in product(zip(range(0, rows.slots, 2), lefts), range(2)):
                    c = cols.offsets.index(n + 8 * half)
                    d = [*sums[r][c : c + 2], *sums[r + 1][c : c + 2]]
                    d = mma_16_8_16(b, kind, d, a, rights[2 * half : 2 * half + 2])
                    sums[r][c : c + 2], sums[r + 1][c : c + 2] = d[:2], d[2:]
        return pack(b, acc, sums)

    return generate


def emit_pair(b, dtype, values):
    """Two float32 registers, rounded, in one: the first in the low half."""
    return asm(b, f"cvt.rn.{HALVES[dtype]}x2.f32 $0, $1, $2;", I32, values[1], values[0])

"""Sums of tiles in global memory, to which many blocks add: an array of float32 that holds tiles in register order.

Register order is that of a layout: four registers of thread 0, of thread 1, ..., then the next four of each. A warp so
adds 512 bytes at a time, and only a tile of the same layout finds its elements again.

    >>> TILE = simt(2, 64, 32, 16, 4)
    >>> def kernel(x, y):
    ...     accumulate(x, 1, full(TILE, np.float32(2)))
    ...     accumulate(x, 1, convert(col_index(TILE, 0), np.float32))
    ...     save(y, accumulated(x, 1, TILE), 0)
    >>> run(kernel, np.zeros(256, np.float32), np.zeros((2, 64)))[0, :4]
    array([2., 3., 4., 5.])
"""

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError

from .emit import F32, GLOBAL, I32, I64, VOID, asm, capability, load_vector, thread_index
from .fragment import Fragment, FragmentType, check_tile, name_of
from .fragment import fragment as pack
from .fragment import registers as unpack
from .simulator import thread_index as my_index
from .synchronisation import emit_element
from .world import primitive

RUN = 4  # registers that are added at once


def _places(layout, number):
    """Of this thread's registers."""
    count = layout.rows.slots * layout.cols.slots
    i = np.arange(count)
    at = int(number) * count * layout.threads + (i // RUN * layout.threads + my_index() % layout.threads) * RUN + i % RUN
    return at.reshape(layout.slots)


def _check(word, array, layout):
    rows, cols = layout.slots
    if array.ndim != 1 or name_of(array.dtype) != "float32":
        raise TypingError(f"{word}: got {array.dtype} of {array.ndim} axes, expected float32 of 1")
    if rows * cols % RUN or layout.idle_bits():
        raise TypingError(f"{word}: {layout} has {rows * cols} registers, expected a multiple of {RUN}, each its own")


@primitive
def accumulate(array, number, tile):
    """Add a tile to number `number` of the tiles in an array, which many may do at once. See `accumulation`."""
    check_tile("accumulate", tile, {"float32"})
    _check("accumulate", array, tile.layout)
    array[_places(tile.layout, number)] += tile.registers


@accumulate.lowering
def accumulate(array, number, tile):
    check_tile("accumulate", tile, {"float32"})
    _check("accumulate", array, tile.layout)

    def generate(b, memory, number, value):
        registers = [x for row in unpack(b, tile, value) for x in row]
        start = _start(b, array, memory, number, tile.layout)
        for at in range(0, len(registers), RUN):
            place, values = b.gep(start, [I32(at * tile.layout.threads)]), registers[at : at + RUN]
            if capability() >= (9, 0):
                text = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
                asm(b, text, VOID, b.ptrtoint(place, I64), *values, effect=True)
            else:
                for i, x in enumerate(values):
                    b.atomic_rmw("fadd", b.gep(place, [I32(i)]), x, "monotonic")

    return types.void(array, types.int32, tile), generate


@primitive
def accumulated(array, number, layout):
    """Tile number `number` of the tiles in an array. See `accumulation`."""
    _check("accumulated", array, layout)
    return Fragment(layout, np.asarray(array)[_places(layout, number)])


@accumulated.lowering
def accumulated(array, number, layout):
    layout_type, layout = layout, layout.value
    _check("accumulated", array, layout)
    rows, cols = layout.slots
    out = FragmentType(layout, types.float32)

    def generate(b, memory, number, _):
        start, found = _start(b, array, memory, number, layout), []
        for at in range(0, rows * cols, RUN):
            found += load_vector(b, b.gep(start, [I32(at * layout.threads)]), RUN)
        return pack(b, out, [found[r * cols : (r + 1) * cols] for r in range(rows)])

    return out(array, types.int32, layout_type), generate


def _start(b, array, memory, number, layout):
    """Pointer to this thread's first register."""
    rows, cols = layout.slots
    tile = emit_element(b, array, memory, b.mul(number, I32(rows * cols * layout.threads)))
    mine = b.and_(thread_index(b), I32(layout.threads - 1))
    return b.gep(b.bitcast(tile, ir.PointerType(F32, GLOBAL)), [b.mul(mine, I32(RUN))])

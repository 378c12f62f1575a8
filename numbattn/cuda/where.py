"""The states of the blocks of a mask function of the user's own, found once on a device: EMPTY, PARTIAL or FULL.

A warp looks at a block, each lane at some of its keys, until it has found both what is visible and what is not.
"""

import numpy as np
from numba.cuda import types

from ..scores.compiled.errors import naming
from .build import Key, Source
from .kernels.any.tile_states import EMPTY, FULL, PARTIAL
from .kernels.shared.schedule import split
from .kernels.shared.visibility import Function, function_type, lowered_function, pair_test
from .tile import ballot, block_index, minimum, shape, thread_index
from .tile.alignment import layout_of
from .views import View
from .words.numbers import NUMBERS
from .words.steps import At, Plan, Step, array_of_grid

WARP, THREADS = 32, 128
STATES = "states"
BYTES = types.Array(types.uint8, 4, "A")


def states_of_function(*, kind):
    """The kernel: the states of blocks of rows x cols elements, of all matrices, to the cells of a Function."""
    test, WARPS = pair_test(kind), THREADS // WARP

    def kernel(function):
        out = function.cells
        batches, heads, m_blocks, n_blocks = shape(out)
        lane = thread_index() % WARP
        rest, n_block = split(block_index() * WARPS + thread_index() // WARP, n_blocks)
        rest, m_block = split(rest, m_blocks)
        batch, head = split(rest, heads)
        if batch < batches:
            m0, n0 = m_block * function.rows, n_block * function.cols
            m_end = minimum(m0 + function.rows, function.seqlen_q)
            n_end = minimum(n0 + function.cols, function.seqlen_k)
            some, every = False, True
            for n in range(n0, n_end, WARP):
                if ballot(some) == 0 or ballot(not every) == 0:         # else it is known that it is partial
                    j = n + lane
                    if j < n_end:
                        i = m0
                        while i < m_end:                                # a range would count twice
                            seen = test(function, batch, head, i, j)
                            some, every = some or seen, every and seen
                            i += 1
            shown, hidden = ballot(some), ballot(not every)
            if lane == 0:
                out[batch, head, m_block, n_block] = FULL if hidden == 0 else PARTIAL if shown != 0 else EMPTY

    return Source(kernel, types.void(function_type(kind, BYTES)), THREADS)


def shown_by_function(gpu, mask):
    """What a fitted Where shows, booleans (..., seqlen_q, seqlen_k)."""
    return states(gpu, mask, 1) == FULL


def states(gpu, mask, size=None):
    """Of blocks of this size, or of its own: uint8 (..., rows, columns)."""
    size = mask.block_size if size is None else size
    with gpu.scratch_memory(gpu.stream().is_capturing()):
        found = gpu.empty(mask._blocks(size), np.dtype(np.uint8))
    if found.size:
        grid = lowered_function(mask._grids()[0]._replace(rows=size, cols=size))
        cells = found.reshape(*mask._matrices, *found.shape[-2:])
        arrays = {STATES: cells, **{array_of_grid(0, which): x for which, x in enumerate(mask.arrays)}}
        launch(gpu, mask, grid, arrays)
    return found


def launch(gpu, mask, grid, arrays):
    """Launch the kernel for a LoweredGrid of a fitted Where, arrays by name."""
    addresses, _ = gpu.addresses(arrays)
    layouts = tuple([layout_of(x, 0) for x in arrays.values()])
    key = states_of_function, grid, mask._sizes, layouts
    program = gpu.programs.get(key)
    if program is None:
        views = [At(name, View(0, x.itemsize, x.shape, x.strides), has_batch=False) for name, x in arrays.items()]
        given = Function(views[0], grid.rows, grid.cols, 0, grid.at, *mask._sizes, views[1:])
        arguments = tuple([x for part in given for x in (part if type(part) in (list, type(grid.at)) else (part,))])
        blocks = -(-arrays[STATES].size // (THREADS // WARP))
        step = Step(Key.of(states_of_function, gpu.device.cc, kind=grid.kind), None, blocks, arguments)
        with naming(mask.function, of="mask"):
            program = gpu.load(Plan((), (), (step,), False, False), tuple(arrays), np.float32)
        gpu.keep(key, program)
    program([*addresses, gpu.scrap], [0] * len(NUMBERS), gpu.stream().ptr)

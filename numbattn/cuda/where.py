"""The states of the blocks of a user's mask function, found once on a device."""

import numpy as np

from ..functions.compiled.errors import naming
from ..masks import Grid
from .build import Key
from .kernel import NO_NUMBERS
from .kernels.any.function_states import THREADS, WARP, states_of_function
from .kernels.any.tile_states import FULL
from .kernels.shared.visibility import Function, lowered_function
from .tile.alignment import layout_of
from .views import View
from .words.steps import At, Plan, Step, array_of_grid

STATES = "states"


def shown_by_function(gpu, mask):
    """The booleans of a fitted Where, (..., seqlen_q, seqlen_k)."""
    return states(gpu, mask, 1) == FULL


def states(gpu, mask, size=None):
    """The states of blocks of this size, or of the mask's own: uint8 (..., rows, columns)."""
    size = mask.block_size if size is None else size
    with gpu.scratch_memory(gpu.stream().is_capturing()):
        found = gpu.empty(mask._blocks(size), np.dtype(np.uint8))
    if found.size:
        grid = lowered_function(Grid(None, size, size, function=mask))
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
    program.launch([*addresses, gpu.scrap], NO_NUMBERS, gpu.stream().ptr)

"""The states of the blocks of a user's mask function: EMPTY, PARTIAL or FULL.

A warp tests the elements of a block, each lane some of its keys, until it has found both a visible and a hidden one.
"""

from ...build import Source
from ...compiler import types
from ...tile import ballot, block_index, minimum, shape, thread_index
from ..shared.schedule import split
from ..shared.visibility import function_type, pair_test
from .tile_states import EMPTY, FULL, PARTIAL

WARP, THREADS = 32, 128
BYTES = types.Array(types.uint8, 4, "A")


def states_of_function(*, kind):
    """The kernel: it writes the states of blocks of rows x cols elements, of all matrices, to a Function's cells."""
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
                if ballot(some) == 0 or ballot(not every) == 0:         # else the block is known to be partial
                    j = n + lane
                    if j < n_end:
                        i = m0
                        while i < m_end:                                # a range would keep a second counter
                            seen = test(function, batch, head, i, j)
                            some, every = some or seen, every and seen
                            i += 1
            shown, hidden = ballot(some), ballot(not every)
            if lane == 0:
                out[batch, head, m_block, n_block] = FULL if hidden == 0 else PARTIAL if shown != 0 else EMPTY

    return Source(kernel, types.void(function_type(kind, BYTES)), THREADS)

"""Which tile of which matrix a block works on."""

import numpy as np
from numba import cuda

from ..tile import device, minimum, quotient


@device
def place(block, matrices, heads):
    """(tile, batch, head) of a block. Tiles count slowest: tile 0 of every matrix starts before any tile 1."""
    tile = quotient(block, matrices)
    matrix = np.int32(block - tile * matrices)
    batch = quotient(matrix, heads)
    return tile, batch, np.int32(matrix - batch * heads)


@device
def place_near(number, tiles, matrices, heads, near):
    """As `place`, but tiles count slowest among `near` matrices only: their keys and values stay in the cache."""
    group = quotient(number, near * tiles)
    number, first = np.int32(number - group * near * tiles), np.int32(group * near)
    tile, _, near_by = place(number, minimum(near, matrices - first), matrices)
    matrix = np.int32(first + near_by)
    batch = quotient(matrix, heads)
    return tile, batch, np.int32(matrix - batch * heads)


# ------------------------------------------------------------------------------- blocks that work on many tiles
# Two ways to number the next job after `number`. `jobs` holds two counters, both 0 before and after a kernel.
@device
def in_turn(number, jobs):
    """All blocks in turn: where jobs are equal, or where the blocks of a cluster have to agree."""
    return np.int32(number + cuda.gridDim.x)


@device
def drawn(number, jobs):
    """Who is done first takes the next one."""
    return np.int32(cuda.gridDim.x + cuda.atomic.add(jobs, 0, 1))


@device
def leave(jobs):
    """This block takes no more jobs; the last one to leave sets the counters back."""
    if cuda.atomic.inc(jobs, 1, cuda.gridDim.x - 1) == cuda.gridDim.x - 1:
        jobs[0] = 0

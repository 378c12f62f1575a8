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


# ------------------------------------------------------------------------------------ blocks that do many tiles
# Block b starts with number b. `jobs` holds two counters, both 0 before and after a kernel.
@device
def draw(jobs):
    """The number of the next tile for the block that asks: who is done first, takes it."""
    return np.int32(cuda.gridDim.x + cuda.atomic.add(jobs, 0, 1))


@device
def leave(jobs):
    """This block draws no more; the last one to leave sets the counters back."""
    if cuda.atomic.inc(jobs, 1, cuda.gridDim.x - 1) == cuda.gridDim.x - 1:
        jobs[0] = 0

"""Which tile of which matrix a block works on."""

import numpy as np
from numba import cuda

from ..tile import device, minimum, quotient


@device
def split(number, size):
    """number // size and number % size."""
    whole = quotient(number, size)
    return whole, np.int32(number - whole * size)


@device
def place(block, matrices, heads):
    """(tile, batch, head) of a block. Tiles count slowest: tile 0 of every matrix starts before any tile 1."""
    tile, matrix = split(block, matrices)
    batch, head = split(matrix, heads)
    return tile, batch, head


@device
def place_near(number, tiles, matrices, heads, near):
    """As `place`, but tiles count slowest among `near` matrices only: their keys and values stay in the cache."""
    group, number = split(number, np.int32(near * tiles))
    first = np.int32(group * near)
    tile, matrix = split(number, minimum(near, matrices - first))
    batch, head = split(np.int32(first + matrix), heads)
    return tile, batch, head


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

"""Which tile of which matrix a block works on."""

import numpy as np

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
    """(tile, batch, head) of the number-th piece of work, for blocks that do several, one after the other.

    Tiles count slowest, but only among `near` matrices at a time, whose keys and values stay in the cache.
    """
    group = quotient(number, near * tiles)
    number = np.int32(number - group * near * tiles)
    first = np.int32(group * near)
    count = minimum(near, matrices - first)
    tile = quotient(number, count)
    matrix = np.int32(first + number - tile * count)
    batch = quotient(matrix, heads)
    return tile, batch, np.int32(matrix - batch * heads)

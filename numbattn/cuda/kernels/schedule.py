"""Which tile of which matrix a block works on."""

import numpy as np

from ..tile import device, quotient


@device
def place(block, matrices, heads):
    """(tile, batch, head) of a block. Tiles count slowest: tile 0 of every matrix starts before any tile 1."""
    tile = quotient(block, matrices)
    matrix = np.int32(block - tile * matrices)
    batch = quotient(matrix, heads)
    return tile, batch, np.int32(matrix - batch * heads)

"""The tile schedulers: which tile of which matrix a block works on."""

from ...tile import atomic_add, atomic_inc, device, grid_size, minimum


@device
def split(number, size):
    """number // size and number % size."""
    whole = number // size
    return whole, number % size


@device
def place(block, matrices, heads):
    """(tile, batch, head) of a block. The tile varies slowest: tile 0 of every matrix starts before any tile 1."""
    tile, matrix = split(block, matrices)
    batch, head = split(matrix, heads)
    return tile, batch, head


@device
def place_grouped(number, tiles, matrices, heads, at_once):
    """As `place`, for `at_once` matrices at a time, whose keys and values stay in the L2 cache."""
    group, number = split(number, at_once * tiles)
    first = group * at_once
    tile, matrix = split(number, minimum(at_once, matrices - first))
    batch, head = split(first + matrix, heads)
    return tile, batch, head


# ----------------------------------------------------------------------------------------------- persistent blocks
# Block b starts with tile number b. `counters` holds two counters, both 0 before and after a kernel.
@device
def next_number(counters):
    """The number of the next tile: the first block that is done takes it."""
    return grid_size() + atomic_add(counters, 0, 1)


@device
def finish(counters):
    """This block draws no more tiles; the last one to finish resets the counters."""
    if atomic_inc(counters, 1, grid_size() - 1) == grid_size() - 1:
        counters[0] = 0

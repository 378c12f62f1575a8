"""The tile schedulers: which tile of which matrix a block works on."""

from ...tile import atomic_add, atomic_inc, device, launch_dependents, minimum, wait_on_dependencies


@device
def overlap_launches():
    """With the stream's next kernel, whose blocks may start now; what the kernels before have written is there."""
    launch_dependents()
    wait_on_dependencies()


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


def at_once(work, tiles):
    """Matrices at a time, so that blocks that run together read the same Q and dO; see `place_grouped`.

    Of 1 to 32 none was faster than 8 by more than 5 %, at seqlen 512 to 16384; all at once take 1.4 times as long at
    2048. As a constant in the kernels it made them up to 3 % slower.
    """
    return {"at_once": 8}


# -------------------------------------------------------------------------------------------- persistent workers
# Worker w starts with number w. `counters` holds two counters, both 0 before and after a kernel.
@device
def next_number(counters, first, count=1):
    """The number of the next tile, from `first` on, or of so many: the first worker that is done takes them."""
    return first + atomic_add(counters, 0, count)


@device
def finish(counters, workers):
    """This worker draws no more tiles; the last one to finish resets the counters."""
    if atomic_inc(counters, 1, workers - 1) == workers - 1:
        counters[0] = 0

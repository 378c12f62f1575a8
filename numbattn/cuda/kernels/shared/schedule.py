"""The tile schedulers: which tile of which matrix a block works on."""

from ...tile import atomic_add, atomic_inc, device, launch_dependents, minimum, wait_on_dependencies
from .visibility import has_band


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


L2_BYTES, FLOAT = 16 << 20, 4  # of Q and dO that are read at once, and of dQ, to which blocks add


SCATTERED_BYTES = 32 << 20  # of matrices that are read in no order


def scattered(work):
    """How many matrices, of both that a kernel walks over by a list of blocks, stay in the L2 cache."""
    problem = work.problem
    features = problem.head_dim + problem.head_dim_v
    nbytes = max(problem.seqlen_q, problem.seqlen_k) * features * problem.dtype.itemsize
    return max(SCATTERED_BYTES // max(nbytes, 1), 1)


def at_once(work, tiles):
    """Matrices at a time in a backward pass, so that blocks that run together read the same Q and dO; see
    `place_grouped`.

    Without a band all blocks take equally long. 1 and 2 are as fast, 8 is slower by up to 7 % at head_dim 128 and 14 %
    at 256, and on one of three machines took twice as long at seqlen 65536. With one, long and short blocks of several
    matrices share a GPU better: at seqlen 2048 8 is faster than 4 by up to 12 %, from 4096 on 4 is as fast. As a
    constant in the kernels it made them up to 3 % slower.
    """
    problem = work.problem
    if work.cells:
        return {"at_once": min(scattered(work), 8)}
    if not has_band(problem):
        return {"at_once": 2}
    of_q_and_do = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    nbytes = problem.seqlen_q * (FLOAT * problem.head_dim + of_q_and_do)
    return {"at_once": min(max(4, L2_BYTES // max(nbytes, 1)), 8)}


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

"""Tile schedulers: which tile of which matrix a block works on."""

from ...tile import atomic_add, atomic_inc, device, launch_dependents, minimum, wait_on_dependencies
from .visibility import has_band


@device
def overlap_launches():
    """Let the blocks of the stream's next kernel start, and wait for what earlier kernels write."""
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


@device
def place_staggered(number, tiles, matrices, heads, at_once):
    """As `place_grouped`, for an even number of matrices at a time, half of which are half of their tiles behind: long
    and short tiles of a band are drawn side by side. The tile is -1 where there is none, in the first and last group
    or for an odd number of tiles."""
    half, side = (tiles + 1) // 2, at_once // 2
    group, number = split(number, half * at_once)
    tile, lane = split(number, at_once)
    behind, lane = split(lane, side)
    matrix, tile = (group - behind) * side + lane, tile + behind * half
    if matrix < 0 or matrix >= matrices or tile >= tiles:
        return -1, 0, 0
    batch, head = split(matrix, heads)
    return tile, batch, head


@device
def count_staggered(tiles, matrices, at_once):
    """How many numbers `place_staggered` takes."""
    half, side = (tiles + 1) // 2, at_once // 2
    return ((matrices + side - 1) // side + 1) * half * at_once


L2_BYTES, FLOAT = 16 << 20, 4  # of Q and dO that are read at once, and of dQ, to which blocks add


SCATTERED_BYTES = 32 << 20  # of matrices that are read in no order


def scattered(work):
    """How many pairs of matrices, such as K and V, stay in the L2 cache if a kernel reads them in no order."""
    problem = work.problem
    features = problem.head_dim + problem.head_dim_v
    nbytes = max(problem.seqlen_q, problem.seqlen_k) * features * problem.dtype.itemsize
    return max(SCATTERED_BYTES // max(nbytes, 1), 1)


def at_once(work, tiles):
    """How many matrices to compute at a time in a backward pass, so that blocks that run together read the same Q and
    dO; see `place_grouped`.

    Without a band all blocks take equally long: 1 and 2 are equally fast, 8 is up to 7 % slower at head_dim 128, up to
    14 % at 256, and took twice as long on one of three machines at seqlen 65536. With a band, long and short blocks of
    several matrices share a GPU better: 8 is up to 12 % faster than 4 at seqlen 2048, and equally fast from 4096 on. As
    a constant in the kernels it made them up to 3 % slower.
    """
    problem = work.problem
    if work.cells:
        return {"at_once": min(scattered(work), 8)}
    if not has_band(problem):
        return {"at_once": 2}
    return {"at_once": min(max(4, L2_BYTES // max(nbytes_of_queries(problem), 1)), 8)}


def nbytes_of_queries(problem):
    """Of a matrix' Q and dO, and of dQ, to which blocks add."""
    of_q_and_do = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return problem.seqlen_q * (FLOAT * problem.head_dim + of_q_and_do)


# -------------------------------------------------------------------------------------------- persistent workers
# Worker w starts with number w. `counters` holds two counters, both 0 before and after a kernel.
@device
def next_number(counters, first, count=1):
    """The number of the next tile, from `first` on, or the first of `count` tiles, for the worker that asks first."""
    return first + atomic_add(counters, 0, count)


@device
def finish(counters, workers):
    """This worker draws no more tiles; the last one to finish resets the counters."""
    if atomic_inc(counters, 1, workers - 1) == workers - 1:
        counters[0] = 0

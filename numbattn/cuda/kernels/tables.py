"""Tables of tiles, and what is looked up in them.

The first row whose shared memory fits is taken. The fastest come first, of those that spill no registers, as measured
on an H200; the others serve GPUs with less shared memory (99 KB on 8.6, 8.9 and 12.x; 64 KB on 7.5).
"""

from typing import NamedTuple

HEAD_DIMS = 32, 64, 128, 256  # what head_dims are rounded up to
LARGEST = HEAD_DIMS[-1]


class Tiles(NamedTuple):
    """Queries and keys of a tile; "mma", tensor cores, or "fma", CUDA cores with so many lanes in a row.

    stages: tiles in shared memory at once of what is walked over.
    """

    unit: str
    tile_m: int
    tile_n: int
    threads: int
    lanes: int = 0
    stages: int = 1


def rounded(name, head_dim):
    """The head_dim that a kernel is compiled for."""
    for size in HEAD_DIMS:
        if head_dim <= size:
            return size
    raise ValueError(f"{name}: got {head_dim}, at most {LARGEST} on a GPU")


def head_dims(problem):
    """Both head_dims, rounded."""
    return rounded("head_dim", problem.head_dim), rounded("head_dim_v", problem.head_dim_v)


def has_tensor_cores(device):
    return device.cc >= (8, 0)


def rows_of(table, crowded, work):
    """The rows of a table, (with tensor cores, bytes of an element): {largest head_dim: rows}. Those of the table
    `crowded` come first with dropout or cells in the mask, which take registers, too."""
    unit, largest = (has_tensor_cores(work.device), work.problem.dtype.itemsize), max(head_dims(work.problem))
    size = next(size for size in (64, 128, 256) if size >= largest)
    is_crowded = work.problem.dropout or len(work.mask) > 1
    return (crowded.get(unit, {}).get(size, ()) if is_crowded else ()) + table[unit][size]


def compiled_in(work, tiles, head_dims):
    """What all factories of kernels that make S take, of head_dims as they round them."""
    head_dim, head_dim_v = head_dims
    return {
        "dtype": work.problem.dtype.name, "head_dim": head_dim, "head_dim_v": head_dim_v, **tiles._asdict(),
        "mask": work.mask, "dropout": work.problem.dropout,
    }  # fmt: skip


def parameters(work, tiles):
    """What those for any GPU take."""
    return compiled_in(work, tiles, head_dims(work.problem)) | {"nbytes": work.nbytes}

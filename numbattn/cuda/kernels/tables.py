"""Tables of tiles, and the lookup.

The first row whose shared memory fits is taken. Rows spill no registers and are ordered by speed, as measured on an
H200; the later ones serve GPUs with less shared memory (99 KB on 8.6, 8.9 and 12.x; 64 KB on 7.5).

Rows for short sequences, so that these fill their tiles and several blocks share a multiprocessor, were measured on an
H100. With slopes, or packed, some spill up to 132 bytes.

Before 8.0 all kernels multiply on CUDA cores. These rows have not been measured: they depend on what a row of a matrix
takes alone, so that tiles fit in shared memory and registers.
"""

from typing import NamedTuple

from ...base.checks import UserValueError
from .scores import is_nonlinear, looks_up
from .shared.visibility import is_looked_up

HEAD_DIMS = 32, 64, 128, 192, 256  # that head_dims are rounded up to
SLICE = 128  # columns of a slice of larger ones, see shared.slices

FMA = "fma"  # the key of a table for CUDA cores

MANY = 64  # tokens: rows for longer sequences have warps of 32 rows, which fill all registers


class Tiles(NamedTuple):
    """A row: tiles of tile_m queries and tile_n keys."""

    unit: str  # "mma", tensor cores, or "fma", CUDA cores
    tile_m: int
    tile_n: int
    threads: int
    lanes: int = 0  # threads side by side in a row of the tile; "mma": a warp has 4, or 0, in several warps 8 or 16
    stages: int = 1  # in which the tiles that a kernel loops over are buffered
    sliced: bool = False  # warps that share rows of S each sum a slice of the depth, not some columns: see product_step
    blocks: int = 1  # that a multiprocessor should hold at least: with several, threads have fewer registers
    parts: int = 1  # of the depth of S that are summed one after the other: see product_step


def rounded(name, head_dim):
    """The head_dim that a kernel is compiled for."""
    for size in HEAD_DIMS:
        if head_dim <= size:
            return size
    raise UserValueError(f"{name}: got {head_dim}, at most {HEAD_DIMS[-1]} on a GPU")


def head_dims(problem):
    """Both head_dims, rounded."""
    return rounded("head_dim", problem.head_dim), rounded("head_dim_v", problem.head_dim_v)


def is_wide(problem):
    """Whether a head_dim is larger than those that kernels are compiled for."""
    return max(problem.head_dim, problem.head_dim_v) > HEAD_DIMS[-1]


def slices_of(problem):
    """How many slices large head_dims have: see shared.slices."""
    return -(-max(problem.head_dim, problem.head_dim_v) // SLICE) if is_wide(problem) else 1


def sliced_dims(problem):
    """Both head_dims, rounded, or the columns of slices of these."""
    return (SLICE, SLICE) if is_wide(problem) else head_dims(problem)


def size_of_rows(work):
    """The head_dim that tables have this work's rows under."""
    return next(size for size in (64, 128, 256) if size >= max(sliced_dims(work.problem)))


def has_tensor_cores(device):
    return device.cc >= (8, 0)


def is_under_pressure(work):
    """Whether registers are scarce, since dropout, a mask's grids, a score's arrays or its derivative take some."""
    return bool(work.problem.dropout or is_looked_up(work.mask) or looks_up(work.score) or is_nonlinear(work.score))


def longest_sequence(work):
    """The length of the longest sequence of queries or keys; the average length of packed ones."""
    longest, packed = max(work.problem.seqlen_q, work.problem.seqlen_k), max(work.segments - 2, 1)
    return -(-longest // packed)


def rows_of(table, under_pressure, work, short=None):
    """The rows for this work: those of `short`, under register pressure those of `under_pressure`, then those of
    `table`. The last two are {(bytes of an element, larger head_dim): rows}; on CUDA cores the row is that of
    table[FMA] for the least bytes of a row, at least this work's.
    """
    nbytes, size = work.problem.dtype.itemsize, size_of_rows(work)
    if not has_tensor_cores(work.device):
        return tuple([row for most, row in table.get(FMA, {}).items() if nbytes * size <= most][:1])
    tables = (under_pressure, table) if is_under_pressure(work) else (table,)
    found = [row for rows in tables for row in rows.get((nbytes, size), ())]
    return (*short_rows(short or {}, work), *found)


def short_rows(short, work):
    """The row for this work, if it has short sequences: the first that fits, from {(longest sequence, bytes of an
    element): {largest head_dim: row}}.

    Under register pressure their registers are not limited for several blocks to fit, and those for more than MANY
    tokens are not used.
    """
    if not has_tensor_cores(work.device):
        return ()
    nbytes, scarce = work.problem.dtype.itemsize, is_under_pressure(work)
    longest, size = longest_sequence(work), max(sliced_dims(work.problem))
    tables = (table for (seqlen, of_bytes), table in short.items()
              if nbytes == of_bytes and longest <= seqlen and not (scarce and seqlen > MANY))  # fmt: skip
    found = [row for largest, row in next(tables, {}).items() if size <= largest][:1]
    return tuple([row._replace(blocks=1) if scarce else row for row in found])


def compiled_in(work, tiles, head_dims):
    """The parameters of all factories of kernels that compute S. head_dims: rounded as the kernel does."""
    head_dim, head_dim_v = head_dims
    return {
        "dtype": work.problem.dtype.name, "head_dim": head_dim, "head_dim_v": head_dim_v, "tiles": tiles,
        "mask": work.mask, "score": work.score, "dropout": work.problem.dropout,
    }  # fmt: skip


def dtypes_of(work, *names):
    """The parameter with the dtypes that a kernel rounds these results to."""
    return {"out_dtypes": tuple(work.dtypes[name].name for name in names)}


def of_o(work):
    """The parameters that say what a kernel rounds O to, and whether it resumes from O over other keys."""
    return dtypes_of(work, "o") | {"resumes": work.resumes}


def lse_alone(work):
    """The parameter of a kernel that takes V without features, and then only computes lse."""
    return {} if work.problem.head_dim_v else {"head_dim_v": 0}


def parameters(work, tiles):
    """The parameters of kernels whose matrices' rows have an alignment."""
    return compiled_in(work, tiles, head_dims(work.problem)) | {"nbytes": work.nbytes}


def by_slices(work):
    """The parameter of a kernel that takes large head_dims a slice at a time."""
    return {"by_slices": True} if is_wide(work.problem) else {}


def sliced(work, tiles):
    """`parameters` of such a kernel."""
    return compiled_in(work, tiles, sliced_dims(work.problem)) | {"nbytes": work.nbytes, **by_slices(work)}


def with_results(*names, parameters=parameters):
    """`parameters`, and the dtypes of these results."""
    return lambda work, tiles: parameters(work, tiles) | dtypes_of(work, *names)

"""What the kernels for small matrices share: their tiles, which work they take, how rows come to shared memory.

A tile holds all scores of a (batch, head). Blocks are persistent: as many as are resident take matrices in turn, a
multiple of the heads, so that each keeps its head, and with it what it adds up by head.
"""

from typing import NamedTuple

from ...tile import Alignment, allocate, copy_async, device, rows_between, sync_threads, sync_warp
from ..shared.layouts import buffers
from ..shared.tables import compiled_in, has_tensor_cores
from ..shared.visibility import PACKED, has_states

SIZES = 16, 32, 64, 128  # of tiles, and what head_dims are rounded up to
RESERVED = 1024  # bytes of shared memory that a block takes beside its own
WARP = 32


class SmallTiles(NamedTuple):
    """A row: tiles of `size` queries and keys."""

    size: int
    threads: int
    blocks: int  # that a multiprocessor holds, where shared memory has room for them: ptxas saves registers for it
    stages: int = 1
    sums: str = "registers"  # where sums of dS are kept, or in "memory", which the L2 cache holds

    unit = "mma"

    @property
    def tile_m(self):
        return self.size

    tile_n = tile_m


def fitted(*sizes):
    """The first of SIZES that has room for each of these; None if none has."""
    return next((size for size in SIZES if max(sizes) <= size), None)


def rows_of(table, work):
    """Those of {(bytes of an element, size of the tile): {head_dim: rows}} for this work; none if it is not small."""
    problem = work.problem
    size, head_dim = fitted(problem.seqlen_q, problem.seqlen_k), fitted(problem.head_dim, problem.head_dim_v)
    return table.get((problem.dtype.itemsize, size), {}).get(head_dim, ())


def takes(spec):
    """(work) -> whether the kernel does it: matrices of one tile, not in segments or pages, none of them begun."""
    return lambda work: is_plain(work) and has_tensor_cores(work.device) and spec.fitting(work) is not None


def is_plain(work):
    return not (PACKED in work.mask or has_states(work.mask) or work.problem.cache or work.resumes)


def parameters(work, tiles):
    """Those of all factories here."""
    problem = work.problem
    found = compiled_in(work, tiles, (fitted(problem.head_dim), fitted(problem.head_dim_v))) | {"nbytes": work.nbytes}
    del found["sums"]
    return found


def resident(spec, work, tiles):
    """How many blocks a multiprocessor holds."""
    return max(min(tiles.blocks, (work.device.shared + RESERVED) // (spec.shared(work, tiles) + RESERVED)), 1)


def barrier_of(threads):
    """The word for a barrier of all threads of a block."""
    return sync_warp if threads == WARP else sync_threads


def place_steps(shared, dtype, threads, size, widths, nbytes, stages=1):
    """For each width the place of a tile of so many rows, and the device function (array, batch, head, end, stage):
    copy a matrix' rows before `end` there. Those beyond a sequence's length are not read: they may be NaN."""
    return [(place, fetch_step(place, layout, nbytes)) for place, layout
            in buffers(shared, dtype, threads, size, widths, stages)]  # fmt: skip


def fetch_step(PLACE, COPY, nbytes):
    ROWS_OF = Alignment(nbytes)

    @device
    def fetch(array, batch, head, end, stage=0):
        copy_async(allocate(PLACE, stage), rows_between(array, batch, head, 0, end, ROWS_OF), COPY, 0)

    return fetch

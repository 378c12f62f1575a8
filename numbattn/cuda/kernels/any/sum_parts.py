"""Add up the partial sums of blocks in a fixed order: the same bits in every run.

A block takes some elements of a matrix and loads a tile of their parts at a time, so that many loads are in flight;
in the end it adds up the rows of the tile by way of shared memory.
"""

from typing import NamedTuple

from ...build import Source
from ...compiler import types
from ...tile import (
    SharedMemory,
    allocate,
    block_index,
    copy_layout,
    full,
    get,
    load,
    put,
    row_sum,
    save,
    shape,
    simt,
    sync_threads,
)
from ...words.signatures import array_type
from ..shared.layouts import DTYPES
from ..shared.schedule import overlap_launches, split


class PartsTile(NamedTuple):
    """What a block loads at once: rows are parts, columns are elements."""

    tile_m: int
    tile_n: int


TILES, THREADS = PartsTile(32, 32), 128


def sum_parts(*, dtype, out_dtype):
    """The kernel: mParts (matrices, parts, elements) summed over the parts into mSum (matrices, elements).

    dtype: of the sums, which are rounded to out_dtype in the end.
    """
    dtype, shared = DTYPES[dtype], SharedMemory()
    PARTS, ELEMENTS = TILES
    TILE, SHARED = copy_layout(PARTS, ELEMENTS, THREADS, 1), shared.tile(PARTS, ELEMENTS, dtype)
    COLUMNS, ZERO = simt(ELEMENTS, PARTS, ELEMENTS, 1, 1), dtype.type(0)

    def kernel(mParts, mSum):
        overlap_launches()
        _, count, size = shape(mParts)
        matrix, place = split(block_index(), (size + ELEMENTS - 1) // ELEMENTS)
        first = place * ELEMENTS
        total = full(TILE, ZERO)
        for part in range(0, count, PARTS):
            total = total + load(mParts[matrix][:, first:], TILE, part)
        put(allocate(SHARED), total)
        sync_threads()
        save(mSum[matrix], row_sum(get(allocate(SHARED).T, COLUMNS)), first)

    signature = types.void(array_type(dtype, 3), array_type(DTYPES[out_dtype], 2))
    return Source(kernel, signature, THREADS, shared=shared.nbytes, overlaps=True)

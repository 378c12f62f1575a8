"""The gradient of a RelativeBias' table from dS summed over the matrices that share it: sums along diagonals.

A block takes some entries of a table, one per column of its tile, and adds up rows of dS, each starting one key after
the row before. The first entry also serves all diagonals before its own, and the last one all after: their blocks add
up these, too. The order is fixed: the same bits in every run.
"""

from typing import NamedTuple

from ...build import Source
from ...compiler import types
from ...tile import (
    INDEX,
    SharedMemory,
    allocate,
    block_index,
    col_index,
    copy_layout,
    device,
    full,
    get,
    index,
    maximum,
    minimum,
    put,
    row_index,
    row_sum,
    save,
    shape,
    simt,
    sync_threads,
    take,
    where,
)
from ...words.signatures import array_type
from ..shared.layouts import DTYPES
from ..shared.schedule import overlap_launches, split
from ..shared.visibility import EDGE


class TableTile(NamedTuple):
    """What a block loads at once: rows of dS, columns are entries."""

    tile_m: int
    tile_n: int


TILES, THREADS = TableTile(32, 32), 128


def table_gradient(*, dtype, out_dtype, by_matrix):
    """The kernel: mDS (tables, matrices, seqlen_q * seqlen_k), where a table serves its matrices, to mTable
    (tables, entries).

    dtype: of the sums, which are rounded to out_dtype in the end. by_matrix: whether the offset is an array (tables,
    matrices); else it is a number.
    """
    dtype, shared = DTYPES[dtype], SharedMemory()
    ROWS, ENTRIES = TILES
    TILE, SHARED = copy_layout(ROWS, ENTRIES, THREADS, 1), shared.tile(ROWS, ENTRIES, dtype)
    COLUMNS, ZERO = simt(ENTRIES, ROWS, ENTRIES, 1, 1), dtype.type(0)

    @device
    def of_matrix(offsets, table, matrix):
        return index(offsets[table, matrix])

    @device
    def of_all(offset, table, matrix):
        return offset

    offset_of = of_matrix if by_matrix else of_all

    @device
    def add_entries(total, dS, seqlen_q, seqlen_k, own, first, end):
        """Entries first... before `end`, modulo ENTRIES. own: the entry of key 0 for query 0."""
        for at in range(first, end, ENTRIES):
            entry = col_index(TILE, at)
            for row in range(0, seqlen_q, ROWS):
                i = row_index(TILE, row)
                j = i + (entry - own)
                inside = (i < seqlen_q) & (entry < end) & (j >= 0) & (j < seqlen_k)
                total = total + where(inside, take(dS, where(inside, i * seqlen_k + j, 0)), ZERO)
        return total

    def kernel(mDS, mTable, offsets, seqlen_q, seqlen_k):
        overlap_launches()
        (_, matrices, _), (_, entries) = shape(mDS), shape(mTable)
        table, tile = split(block_index(), (entries + ENTRIES - 1) // ENTRIES)
        first = tile * ENTRIES
        within, before, after = full(TILE, ZERO), full(TILE, ZERO), full(TILE, ZERO)
        for matrix in range(matrices):
            own = entries // 2 - offset_of(offsets, table, matrix)
            own = maximum(minimum(own, entries + seqlen_q), -seqlen_k)          # farther ones mean the same
            dS = mDS[table, matrix]
            within = add_entries(within, dS, seqlen_q, seqlen_k, own, first, first + ENTRIES)
            if first == 0:
                before = add_entries(before, dS, seqlen_q, seqlen_k, own, own - seqlen_q + 1, 0)
            if first + ENTRIES >= entries:
                after = add_entries(after, dS, seqlen_q, seqlen_k, own, entries, own + seqlen_k)
        entry = col_index(TILE, first)
        within = within + where(entry == 0, row_sum(before), ZERO)
        within = within + where(entry == entries - 1, row_sum(after), ZERO)
        put(allocate(SHARED), within)
        sync_threads()
        save(mTable[table], row_sum(get(allocate(SHARED).T, COLUMNS)), first)

    signature = types.void(
        array_type(dtype, 3), array_type(DTYPES[out_dtype], 2), EDGE if by_matrix else INDEX, INDEX, INDEX
    )  # fmt: skip
    return Source(kernel, signature, THREADS, shared=shared.nbytes, overlaps=True)

"""Copy caches in pages or of 8 bits into plain arrays of q's dtype, for kernels that do not read them directly.

A copy takes memory, and the time to read the cache and write it once: little compared with products of many queries.
"""

from functools import cache
from typing import Any

import numpy as np

from ..kernel import launch
from ..kernels.shared.cached import tokens_step
from ..kernels.shared.schedule import split
from ..tile import (
    Alignment,
    bitcast,
    block_index,
    convert,
    copy_layout,
    device,
    index,
    load,
    minimum,
    save,
    shape,
    where,
)
from ..tile.alignment import alignment_of

THREADS, ROWS = 128, 32


def gather(dense: Any, held: Any, lengths: Any, table: Any = None, scale: Any = None) -> None:
    """Copy the tokens of all sequences into a plain array.

    dense: (batch, heads, capacity, features), contiguous; held: a cache's k or v, float8_e4m3fn as uint8; lengths,
    table and scale: see `KVCache`.
    """
    batch, heads, capacity, features = dense.shape
    if not features:
        return
    nbytes = alignment_of(held)
    scales = () if scale is None else (scale.reshape(*scale.shape, *(1,) * (4 - scale.ndim)),)
    wide = np.float64 if dense.dtype == np.float64 else np.float32
    kernel = kernel_of(features, held.dtype, wide, 0 if table is None else held.shape[2], nbytes)
    tables, blocks = () if table is None else (table,), -(-capacity // ROWS) * heads * batch
    launch(kernel, (blocks, 1, 1), THREADS, 0, dense, held, lengths, tables, scales)


@cache
def kernel_of(features, dtype, wide, page_size, nbytes):
    """The kernel: a block copies ROWS tokens of one head. wide: the dtype in which 8-bit numbers are scaled."""
    vector = 16 // dtype.itemsize
    TILE = copy_layout(ROWS, -(-features // vector) * vector, THREADS, vector)
    COLUMN, ROWS_OF, ONES = TILE.row_vector(), Alignment(nbytes), Alignment(0)
    rows_of = tokens_step(page_size)

    @device
    def as_it_is(X, scales, tables, batch, head, count, row):
        return X

    @device
    def of_int8(X, scales, tables, batch, head, count, row):
        of_tokens = rows_of(scales[0], tables, batch, head, count, ONES)
        return convert(X, wide) * convert(load(of_tokens, COLUMN, row), wide)

    @device
    def of_float8(X, scales, tables, batch, head, count, row):
        return convert(from_float8(convert(X, np.uint32)), wide) * convert(scales[0][head, 0, 0, 0], wide)

    as_dense = {"int8": of_int8, "uint8": of_float8}.get(dtype.name, as_it_is)

    def kernel(dense, held, lengths, tables, scales):
        _, heads, capacity, _ = shape(dense)
        rest, tile = split(block_index(), (capacity + ROWS - 1) // ROWS)
        batch, head = split(rest, heads)
        count, row = minimum(index(lengths[batch]), capacity), tile * ROWS
        if row < count:
            X = load(rows_of(held, tables, batch, head, count, ROWS_OF), TILE, row)
            save(dense[batch, head][:count], as_dense(X, scales, tables, batch, head, count, row), row)

    return kernel


@device
def from_float8(bits):
    """float8_e4m3fn as float32."""
    size = bitcast((bits & 0x7F) << 20, np.float32) * 2.0**120  # the exponent's bias is less by 120
    size = where((bits & 0x7F) == 0x7F, np.nan, size)
    return where((bits & 0x80) != 0, -size, size)

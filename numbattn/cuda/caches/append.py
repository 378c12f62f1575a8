"""Append tokens to each sequence of a cache on a GPU, without waiting for the GPU.

Tokens for a cache of 8 bits are quantised as they are written: the same bits as NumPy computes.
"""

from functools import cache
from typing import Any

import numpy as np

from ...caches.eight_bits import LARGEST_IN_INT8
from ..kernel import launch
from ..tile import (
    WARP,
    bitcast,
    block_index,
    capped,
    convert,
    copy_layout,
    device,
    index,
    load,
    maximum,
    minimum,
    row_max,
    save,
    shape,
    where,
)

HEADS = 8  # copied at once


def append(held: Any, new: Any, lengths: Any, table: Any = None, offsets: Any = None, scale: Any = None) -> None:
    """Write tokens at positions `lengths` and on, as far as there is room.

    held: (batch, heads, capacity, features), or with a table (pages, heads, page_size, features); new: (batch, heads,
    tokens, features), or with offsets (heads, total, features), where tokens offsets[b] to offsets[b + 1] are sequence
    b's. lengths, table and offsets are of int32. held of int8, or of uint8, which is float8_e4m3fn, has a scale of
    float32: see `KVCache`.
    """
    if new.size:
        tokens = new.shape[-2] if offsets is not None else new.shape[0] * new.shape[2]
        kernel = kernel_of(new.shape[-1], held.dtype, new.dtype == np.float64, table is not None, offsets is not None)
        arrays, scales = (tuple(x for x in xs if x is not None) for xs in ((table, offsets), (scale,)))
        launch(kernel, (tokens, 1, 1), WARP, 0, held, new, lengths, arrays, scales)


def check_device(arrays: dict[str, Any]) -> None:
    """Refuse CuPy arrays that are not on its current device."""
    from ..launch import current_gpu  # needs CuPy

    current_gpu().addresses(arrays)


@cache
def kernel_of(features, dtype, of_float64, has_table, has_offsets):
    """The kernel: a block of one warp writes a token of all heads."""
    TILE = copy_layout(HEADS, -(-features // WARP) * WARP, WARP, 1)
    ROWS = TILE.row_vector()

    @device
    def of_batch(new, arrays, number):
        """The sequence of a token, its number among those that are new there, and the token (heads, features)."""
        _, _, tokens, _ = shape(new)
        return number // tokens, number % tokens, new[number // tokens, :, number % tokens]

    @device
    def of_packed(new, arrays, number):
        """What `of_batch` returns, for packed sequences; for a token of no sequence, one after the last."""
        offsets, (ends,), batch = arrays[-1], shape(arrays[-1]), index(0)
        while batch < ends - 1 and index(offsets[batch + 1]) <= number:
            batch += 1
        token = number - index(offsets[minimum(batch, ends - 1)])
        return (batch if token >= 0 else ends), token, new[:, number]

    @device
    def in_sequence(held, arrays, batch, position):
        """Where a token goes: the index along the first axis (-1 if nowhere) and the row."""
        _, _, capacity, _ = shape(held)
        return (batch if position < capacity else -1), position

    @device
    def in_page(held, arrays, batch, position):
        (pages, _, page_size, _), (_, most) = shape(held), shape(arrays[0])
        page = index(arrays[0][batch, position // page_size]) if position < most * page_size else index(-1)
        return (page if page < pages else -1), position % page_size

    @device
    def as_it_is(X, scales, page, row, head):
        return X

    @device
    def as_int8(X, scales, page, row, head):
        """Quantise: the lowest 8 bits of the result are to be written."""
        X = convert(capped_for_int8(X) if of_float64 else X, np.float32)
        largest = bitcast(row_max(bitcast(abs(X), np.uint32)), np.float32)  # compared as bits: those of NaN are largest
        scale = largest / 127
        save(scales[0][page, :, row], scale, head)
        return nearest_integer(X / where(scale == 0, 1, scale))

    @device
    def as_float8(X, scales, page, row, head):
        return nearest_float8(convert(X, np.float32) / load(scales[0], ROWS, head))

    token_of, place_of = of_packed if has_offsets else of_batch, in_page if has_table else in_sequence
    as_held = {"int8": as_int8, "uint8": as_float8}.get(dtype.name, as_it_is)

    def kernel(held, new, lengths, arrays, scales):
        (batches,), (_, heads, _, _) = shape(lengths), shape(held)
        batch, token, x = token_of(new, arrays, block_index())
        if batch < batches:
            page, row = place_of(held, arrays, batch, index(lengths[batch]) + token)
            if page >= 0:
                for head in range(0, heads, HEADS):
                    save(held[page, :, row], as_held(load(x, TILE, head), scales, page, row, head), head)

    return kernel


@device
def capped_for_int8(X):
    """Replace finite numbers that are too large by the largest."""
    return where(abs(X) < np.inf, minimum(maximum(X, -LARGEST_IN_INT8), LARGEST_IN_INT8), X)


@device
def nearest_integer(X):
    """The nearest int8, from -127 on, in the lowest 8 bits; 0 for NaN."""
    X = minimum(maximum(where(X == X, X, 0), -127), 127)
    return bitcast(X + 1.5 * 2**23, np.int32)  # the sum is rounded to an integer, to the nearest even


@device
def nearest_float8(X):
    """The bits of the nearest float8_e4m3fn, ties to even; numbers that are too large become the largest."""
    size = capped(abs(X), 448)
    bits = bitcast(size, np.uint32)
    # the exponent's bias is less by 120, and 3 bits of the mantissa stay; below 2**-6 there are only multiples of 2**-9
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)
    subnormal = bitcast(size + 2**14, np.uint32) & 0xF
    found = where(size < 2**-6, subnormal, where(size == size, normal, 0x7F))
    return found | (bitcast(X, np.uint32) >> 24 & 0x80)

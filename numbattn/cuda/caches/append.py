"""Append tokens to each sequence of a cache on a GPU, without waiting for the GPU.

Tokens for a cache of 8 bits are quantised as they are written: the same bits as NumPy computes. Keys may be turned by
their positions before.
"""

from typing import Any

import numpy as np

from ...caches.eight_bits import LARGEST_IN_INT8
from ...rotations.turns import cosine_and_sine
from ..kernel import kernel_factory, launch
from ..kernels.shared.schedule import split
from ..rotations import columns_of
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
    map_elements,
    maximum,
    minimum,
    row_max,
    save,
    shape,
    take,
    where,
)

HEADS = 8  # of a block
WIDE = 8192  # matrices of a head and a token, from which on there are blocks enough for this many heads each
NOWHERE = 2**30  # beyond all rows


def append(
    held: Any, new: Any, lengths: Any, table: Any = None, offsets: Any = None, scale: Any = None, rotary: Any = None,
    ring: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Write tokens at positions `lengths` and on, as far as there is room, turned by these if there is a Rotary.

    held: (batch, heads, capacity, features), or with a table (pages, heads, page_size, features); new: (batch, heads,
    tokens, features), or with offsets (heads, total, features), where tokens offsets[b] to offsets[b + 1] are sequence
    b's. lengths, table and offsets are of int32. held of int8, or of uint8, which is float8_e4m3fn, has a scale of
    float32: see `KVCache`. ring: of a rolling cache, how many tokens have rows of their own, and how many rows the
    others take in turns.
    """
    if new.size:
        tokens = new.shape[-2] if offsets is not None else new.shape[0] * new.shape[2]
        turns = () if rotary is None else columns_of(rotary, new)
        about = new.shape[-1], held.dtype, new.dtype == np.float64, table is not None, offsets is not None
        kernel, heads = kernel_of(*about, rotary is not None, bool(ring)), held.shape[1]
        arrays, scales = (tuple(x for x in xs if x is not None) for xs in ((table, offsets), (scale,)))
        of_block = HEADS if rotary is None or tokens * heads >= WIDE else 1
        blocks = tokens * -(-heads // of_block)
        launch(kernel, (blocks, 1, 1), WARP, 0, held, new, lengths, arrays, scales, turns, ring, np.int32(of_block))


def check_device(arrays: dict[str, Any]) -> None:
    """Refuse CuPy arrays that are not on its current device."""
    from ..launch import current_gpu  # needs CuPy

    current_gpu().addresses(arrays)


@kernel_factory
def kernel_of(features, dtype, of_float64, has_table, has_offsets, turns, rolls):
    """The kernel. A block of one warp writes a token of several heads: at once, or one after the other if it turns them
    by the same cosines and sines."""
    IS_TURNED, REAL = turns, np.float64 if of_float64 else np.float32
    TILE = copy_layout(1 if turns else HEADS, -(-features // WARP) * WARP, WARP, 1)
    ROWS, COLUMNS = TILE.row_vector(), TILE.col_vector()
    cosine, sine = map(device, cosine_and_sine(REAL))

    @device
    def of_batch(new, arrays, number):
        """The sequence of a token, its number among those that are new there, their count, and the token (heads,
        features)."""
        _, _, tokens, _ = shape(new)
        return number // tokens, number % tokens, tokens, new[number // tokens, :, number % tokens]

    @device
    def of_packed(new, arrays, number):
        """What `of_batch` returns, for packed sequences; for a token of no sequence, one after the last."""
        offsets, (ends,), batch = arrays[-1], shape(arrays[-1]), index(0)
        while batch < ends - 1 and index(offsets[batch + 1]) <= number:
            batch += 1
        first = index(offsets[minimum(batch, ends - 1)])
        count = index(offsets[minimum(batch + 1, ends - 1)]) - first
        return (batch if number >= first else ends), number - first, count, new[:, number]

    @device
    def in_order(ring, position, end):
        return position

    @device
    def in_turn(ring, position, end):
        """The row of a token where new ones come up to `end`; beyond all rows if one of these takes its row."""
        first, size = ring
        row = first + (position - first) % size if position >= end - size else index(NOWHERE)
        return position if position < first else row

    @device
    def in_sequence(held, arrays, batch, row):
        """Where a row is: the index along the first axis (-1 if nowhere) and the row there."""
        _, _, capacity, _ = shape(held)
        return (batch if row < capacity else -1), row

    @device
    def in_page(held, arrays, batch, row):
        (pages, _, page_size, _), (_, most) = shape(held), shape(arrays[0])
        page = index(arrays[0][batch, row // page_size]) if row < most * page_size else index(-1)
        return (page if page < pages else -1), row % page_size

    @device
    def rotation(turns, position):
        """Cosines and sines of a token, and which feature is the other one of a pair: see `columns_of`."""
        angles = convert(position, np.float64) * load(turns[0], COLUMNS, 0)
        factors = convert(load(turns[1], COLUMNS, 0), REAL)
        cosines = convert(map_elements(cosine, angles, 0, 0, (1, 1), ()), REAL) * factors
        sines = convert(map_elements(sine, angles, 0, 0, (1, 1), ()), REAL) * factors
        return cosines, sines, load(turns[2], COLUMNS, 0)

    @device
    def not_turned(x, head, by):
        """A token of some heads."""
        return load(x, TILE, head)

    @device
    def turned(x, head, by):
        """x cos(t) + y sin(t), where y is the other feature of a pair."""
        cosines, sines, others = by
        return convert(load(x, TILE, head), REAL) * cosines + convert(take(x[head], others), REAL) * sines

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
    read, row_of = turned if turns else not_turned, in_turn if rolls else in_order

    @device
    def write(held, x, scales, page, row, head, by):
        X = read(x, head, by)
        save(held[page, :, row], as_held(X, scales, page, row, head), head)

    def kernel(held, new, lengths, arrays, scales, turns, ring, of_block):
        (batches,), (_, heads, _, _) = shape(lengths), shape(held)
        number, part = split(block_index(), (heads + of_block - 1) // of_block)
        batch, token, count, x = token_of(new, arrays, number)
        if batch < batches:
            position, end = index(lengths[batch]) + token, index(lengths[batch]) + count
            page, row = place_of(held, arrays, batch, row_of(ring, position, end))
            if page >= 0:
                if IS_TURNED:
                    by = rotation(turns, position)
                    for head in range(part * of_block, minimum(part * of_block + of_block, heads)):
                        write(held, x, scales, page, row, head, by)
                else:
                    write(held, x, scales, page, row, part * HEADS, ())

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

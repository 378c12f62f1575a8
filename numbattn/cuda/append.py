"""Tokens written into a cache of arrays on a GPU, behind those of each sequence. Nothing waits for the GPU."""

from functools import cache
from typing import Any

from .kernel import launch
from .tile import block_index, copy_layout, device, index, load, minimum, save, shape

WARP = 32
HEADS = 8  # copied at once


def append(held: Any, new: Any, lengths: Any, table: Any = None, offsets: Any = None) -> None:
    """Write tokens to the places from `lengths` on, as far as there is room.

    held: (batch, heads, capacity, features), or with a table (pages, heads, page_size, features); new: (batch, heads,
    tokens, features), or with offsets (heads, total, features), of which offsets[b] to offsets[b + 1] are sequence b's.
    lengths, table and offsets are of int32.
    """
    if new.size:
        tokens = new.shape[-2] if offsets is not None else new.shape[0] * new.shape[2]
        kernel = kernel_of(new.shape[-1], table is not None, offsets is not None)
        launch(kernel, (tokens, 1, 1), WARP, 0, held, new, lengths, tuple(x for x in (table, offsets) if x is not None))


@cache
def kernel_of(features, has_table, has_offsets):
    """The kernel: a block of one warp copies a token of all heads."""
    TILE = copy_layout(HEADS, -(-features // WARP) * WARP, WARP, 1)

    @device
    def of_batch(new, arrays, number):
        """Of a token the sequence, its number among those that are new there, and it itself (heads, features)."""
        _, _, tokens, _ = shape(new)
        return number // tokens, number % tokens, new[number // tokens, :, number % tokens]

    @device
    def of_packed(new, arrays, number):
        """The same; behind the last sequence for a token of none."""
        offsets, (ends,), batch = arrays[-1], shape(arrays[-1]), index(0)
        while batch < ends - 1 and index(offsets[batch + 1]) <= number:
            batch += 1
        token = number - index(offsets[minimum(batch, ends - 1)])
        return (batch if token >= 0 else ends), token, new[:, number]

    @device
    def in_sequence(held, arrays, batch, position):
        """Where a token goes: along the first axis, or -1, and its row."""
        _, _, capacity, _ = shape(held)
        return (batch if position < capacity else -1), position

    @device
    def in_page(held, arrays, batch, position):
        (pages, _, page_size, _), (_, most) = shape(held), shape(arrays[0])
        page = index(arrays[0][batch, position // page_size]) if position < most * page_size else index(-1)
        return (page if page < pages else -1), position % page_size

    token_of, place_of = of_packed if has_offsets else of_batch, in_page if has_table else in_sequence

    def kernel(held, new, lengths, arrays):
        (batches,), (_, heads, _, _) = shape(lengths), shape(held)
        batch, token, x = token_of(new, arrays, block_index())
        if batch < batches:
            page, row = place_of(held, arrays, batch, index(lengths[batch]) + token)
            if page >= 0:
                for head in range(0, heads, HEADS):
                    save(held[page, :, row], load(x, TILE, head), head)

    return kernel

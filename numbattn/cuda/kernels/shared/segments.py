"""Packed sequences: tiles that end with their segment, so that each segment is computed as a matrix of its own.

A mask that is a `numbattn.Segments`, perhaps with a band, is "packed". A kernel's tiles of queries (or of keys, if it
keeps these) are numbered by slots: segment t begins at slot start // tile + t, and has slots for all of its tiles,
sometimes one too many. So the number of slots follows from shapes alone, the host does not read the offsets, and a
search finds the segment of a slot without a table. Tokens in no segment form two more segments, the first and the last
one, which see nothing.

In kernels tiles, the band and its tests count from the segment's first query and key; loads, stores and scores count
from the first ones of the packed arrays.
"""

from typing import Any, NamedTuple

from ...tile import WARP, ballot, device, index, lowest_bit, maximum, minimum, shape, thread_index
from ...words.spec import PADDED
from .visibility import PACKED, MaskArgs


class Segment(NamedTuple):
    """The place of a matrix in packed arrays; all of the arrays if they are not packed."""

    first_query: Any
    queries: Any  # how many
    first_key: Any
    keys: Any
    first_padded_row: Any  # where its queries begin in padded row statistics


@device
def whole(length):
    """The Segment of arrays that are not packed, with all queries and keys."""
    return Segment(index(0), length, index(0), length, index(0))


@device
def queries_of(segment):
    """The segment's queries [first, end) in packed arrays."""
    return segment.first_query, segment.first_query + segment.queries


@device
def keys_of(segment):
    return segment.first_key, segment.first_key + segment.keys


@device
def inside(offset, length):
    """The offset, clamped: the host does not check arrays on a GPU."""
    return maximum(minimum(offset, length), 0)


@device
def start_of(offsets, t, length):
    """Where segment t begins."""
    return inside(offsets[t - 1], length) if t > 0 else 0


@device
def extent_of(offsets, t, length):
    """Where segment t begins, and how long it is."""
    (count,) = shape(offsets)
    first = start_of(offsets, t, length)
    end = start_of(offsets, t + 1, length) if t < count else length
    return first, maximum(end - first, 0)


def search_step(tile, by_warp):
    """The device function (offsets, slot, length) -> the last segment that begins at this slot or before.

    by_warp: for whole warps that ask for the same slot; they look at 32 segments at a time, so that two successive
    loads find one of a thousand.
    """
    TILE = tile

    @device
    def begins_later(offsets, t, slot, length):
        return start_of(offsets, t, length) // TILE + t > slot

    @device
    def search(offsets, slot, length):
        (count,) = shape(offsets)
        low, high = index(1), count + 1
        while low < high:
            middle = (low + high) // 2
            if begins_later(offsets, middle, slot, length):
                high = middle
            else:
                low = middle + 1
        return low - 1

    @device
    def search_by_warp(offsets, slot, length):
        (count,) = shape(offsets)
        t, left = index(0), count
        while left > 0:                                         # it is one of t to t + left
            step = (left + WARP - 1) // WARP
            mine = t + (thread_index() % WARP + 1) * step
            later = mine > count or begins_later(offsets, minimum(mine, count), slot, length)
            t, left = t + lowest_bit(ballot(later)) * step, step - 1
        return t

    return search_by_warp if by_warp else search


def slot_step(mask, side, tile, by_warp=True):
    """The device function (packing, batch, slot, length) -> the Segment of a slot, for tiles of queries or of keys
    (side), and the number of its tile in the segment, beyond the last one if the slot has no tile. length: of arrays
    that are not packed.

    by_warp: see `search_step`.
    """
    KEEPS_Q, TILE, search = side == "q", tile, search_step(tile, by_warp)

    @device
    def in_segments(packing, batch, slot, length):
        (packing,) = packing
        queries, keys = packing.queries[batch, 0], packing.keys[batch, 0]
        kept, length = (queries, packing.seqlen_q) if KEEPS_Q else (keys, packing.seqlen_k)
        (count,), t = shape(kept), search(kept, slot, length)
        first_query, count_q = extent_of(queries, t, packing.seqlen_q)
        first_key, count_k = extent_of(keys, t, packing.seqlen_k)
        if t == 0 or t == count:                                # tokens in no segment
            count_q, count_k = (count_q, index(0)) if KEEPS_Q else (index(0), count_k)
        tile = slot - (first_query if KEEPS_Q else first_key) // TILE - t
        first_padded_row = (first_query // PADDED + t) * PADDED
        return Segment(first_query, count_q, first_key, count_k, first_padded_row), tile

    @device
    def in_matrix(packing, batch, slot, length):
        return whole(length), slot

    return in_segments if PACKED in mask else in_matrix


def count_step(mask, tile):
    """The device function (packing, length) -> the number of tiles, or of slots."""
    TILE = tile

    @device
    def slots(packing, length):
        (count,) = shape(packing[0].queries[0, 0])
        return length // TILE + count + 1

    @device
    def tiles(packing, length):
        return (length + TILE - 1) // TILE

    return slots if PACKED in mask else tiles


def mask_within_step(mask, rows=1):
    """The device function (mask, segment) -> the mask within a segment, counted from its first query and key.

    rows: the number of queries is rounded up to a multiple of it: queries beyond the segment need no test if they are
    not stored.
    """
    ROWS = rows

    @device
    def within(mask, segment):
        (packing,) = mask.packing
        shift, apart = segment.keys - segment.queries, segment.first_query - segment.first_key
        left = maximum(mask.queries - segment.first_query, 0)
        rounded = (segment.queries + ROWS - 1) // ROWS * ROWS
        return MaskArgs(
            maximum(packing.lo + shift, mask.lo + apart),
            minimum(packing.hi + shift, mask.hi + apart),
            left if left < segment.queries else rounded,
            maximum(minimum(segment.keys, mask.keys - segment.first_key), 0),
            mask.edges, mask.shifts, mask.grids, mask.packing, mask.intervals, mask.gaps,
            mask.depths, mask.states,
        )  # fmt: skip

    @device
    def same(mask, segment):
        return mask

    return within if PACKED in mask else same

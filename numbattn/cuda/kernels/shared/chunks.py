"""Chunks of keys, at the same places in every sequence: short ones first, and longer ones once there are many.

A chunk's partial result is written and read again, which costs less with long chunks; short ones spread few keys over
many warps. Sizes double: where a chunk begins is the farthest of four lines, and the chunk of a key the least.
"""

import numpy as np

from ...tile import (
    WARP,
    allocate,
    device,
    full,
    get_number,
    load,
    maximum,
    minimum,
    put,
    put_number,
    row_max,
    shape,
    simt,
    sync_warp,
    thread_index,
)
from .visibility import sides_of

# keys. us on an H200 for 1 x 1024, 1 x 8192, 64 x 4096, all in chunks of 256: 7.8, 16.4, 301; of 512: 8.6, 14.9, 270;
# of 1024: 10.7, 15.3, 263
SIZES = A, B, C, D = 256, 512, 1024, 2048
ENDS = 1024, 4096, 32768  # where the chunks of the first sizes end
FROM_B = ENDS[0]  # so many keys before the first one the chunks of this size would begin, were all of this size
FROM_C = 2 * FROM_B + ENDS[1]
FROM_D = 2 * FROM_C + ENDS[2]


def count_of_chunks(keys):
    """How many chunks the keys of a sequence are divided into."""
    return int(chunk_of(keys - 1)) + 1


@device
def first_key(chunk):
    return maximum(maximum(chunk * A, chunk * B - FROM_B), maximum(chunk * C - FROM_C, chunk * D - FROM_D))


@device
def chunks_between(first, end):
    """The range of chunks that the keys [first, end) lie in."""
    return (chunk_of(first), chunk_of(end - 1) + 1) if first < end else (0, 0)


@device
def chunk_of(key):
    return minimum(minimum(key // A, (key + FROM_B) // B), minimum((key + FROM_C) // C, (key + FROM_D) // D))


def longest_steps(shared, mask, by_head):
    """Device functions: (mask), called by warp 0, counts the chunks of the longest sequence; (chunks), called by thread
    0, -> that number, or `chunks` if it is not counted."""
    if "keys" not in mask or by_head:

        @device
        def count_nothing(mask):
            pass

        @device
        def all_of_them(chunks):
            return chunks

        return count_nothing, all_of_them
    AT, PLACE = sides_of(mask).index("keys"), shared.tile(1, 1, np.int32)
    LENGTHS = simt(1, WARP, WARP, 1, 1)
    ONE, NONE = LENGTHS.row_vector(), np.int32(0)

    @device
    def count_chunks(mask):
        lengths, longest = mask.edges[AT][:, 0], full(ONE, NONE)
        (batches,) = shape(lengths)
        for first in range(0, batches, WARP):
            longest = row_max(load(lengths, LENGTHS, first), longest)
        put(allocate(PLACE), longest)
        sync_warp()
        if thread_index() == 0:
            put_number(allocate(PLACE), chunks_between(0, minimum(get_number(allocate(PLACE)), mask.keys))[1])

    @device
    def counted(chunks):
        return get_number(allocate(PLACE))

    return count_chunks, counted

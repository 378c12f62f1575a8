"""The tiles of the forward kernel by mma.sync: tables, each row with its reason."""

from typing import NamedTuple

from ..tables import size_of_rows

KB = 1024


class ForwardTiles(NamedTuple):
    """A row: tiles of tile_m queries and tile_n keys."""

    tile_m: int
    tile_n: int
    threads: int
    held: bool  # Q in registers; else it is read from shared memory for each tile of keys

    unit = "mma"


# {larger head_dim: row}. Warps of 32 queries read K and V half as often as those of 16; with two blocks on a
# multiprocessor, one multiplies during the other's softmax. TFLOP/s: bfloat16 on an H200, full, seqlen 1024, 4096. With
# 64 queries head_dim 64 and 128 are 10 to 15 % slower; 128 keys or two stages are no faster. If scores and masks also
# take registers, these rows spill up to 400 bytes and are still faster than warps of 16 queries, which do not spill:
# 1.25 times with a relative bias
TILES = {  # FlashAttention-2's, except for 64 keys at head_dim 64: 128 would spill
    64: ForwardTiles(128, 64, 128, True),                       # 300, 327; two blocks
    128: ForwardTiles(128, 64, 128, False),                     # 350, 382; two blocks; O and S leave Q no registers
    256: ForwardTiles(64, 64, 128, False),                      # 302, 326; two blocks; 64 x 32 265, 286
}
WITH_LESS_ROOM = {  # instead, {(bytes of shared memory that a block may have, larger head_dim): row}
    (163 * KB, 256): ForwardTiles(128, 64, 256, False),         # 8.0: 288, 312; 64 x 64 would be one block of 4 warps
    (99 * KB, 128): ForwardTiles(128, 32, 128, False),          # 8.6 and newer: 312, 340; 64 x 64, Q held, 297, 326
}


def rows(work):
    size = size_of_rows(work)
    return (WITH_LESS_ROOM.get((work.device.shared, size), TILES[size]),)


L2_BYTES, MANY = 16 << 20, 64  # of keys and values that are read at once; matrices of fewer keys


def matrices_at_once(problem):
    """How many query heads to compute at a time, so that their keys stay in the L2 cache."""
    nbytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return problem.group_size * min(max(1, L2_BYTES // max(nbytes, 1)), MANY)

"""Which tiles the forward kernel by mma.sync takes: tables, each row with its reason."""

from typing import NamedTuple

from .scores import parts_of, takes_offsets
from .shared.tables import head_dims
from .shared.visibility import is_looked_up

KB = 1024


class MmaTiles(NamedTuple):
    """A row: tiles of tile_m queries and tile_n keys."""

    tile_m: int
    tile_n: int
    threads: int
    held: bool  # Q in registers

    unit = "mma"

    @property
    def rows_of_warp(self):
        return 32 * self.tile_m // self.threads


# {bytes of shared memory that a block may have, at least: {largest head_dim: row}}. Warps of 32 queries read K and V
# half as often as those of 16; of two blocks on a multiprocessor one multiplies under the other's softmax. TFLOP/s:
# bfloat16 on an H200, full, seqlen 1024, 4096, 16384. 64 queries are 15 to 25 % slower at head_dim 64 and 128, and
# 128 keys or two stages no faster
USUAL = {
    163 * KB: {  # 8.0, 9.0, 10.0: FlashAttention-2's, but for 64 keys at head_dim 64: 128 would spill
        64: MmaTiles(128, 64, 128, True),                       # 294, 319, 331: two blocks
        128: MmaTiles(128, 64, 128, False),                     # 315, 343, 362: two; O and S leave Q no registers
        256: MmaTiles(128, 64, 256, False),                     # 265, 286, 295; 64 x 64 277, 64 x 32 263
    },
    99 * KB: {  # 8.6, 8.9, 12.0: two blocks have 49 KB each
        64: MmaTiles(128, 64, 128, True),                       # 27 KB
        128: MmaTiles(64, 64, 128, True),                       # 34 KB, since Q leaves its place to V; 128 queries: 68
        256: MmaTiles(64, 64, 128, False),                      # 99 KB, one block
    },
}
# instead, where more than O and S needs registers: warps of 16 queries do not spill, but are up to 1.2 times as slow
PRESSED = {
    64: MmaTiles(128, 64, 256, True),
    128: MmaTiles(128, 64, 256, True),
}


def is_pressed(work, size):
    """Whether the usual row spills for tiles of this size."""
    if size == 64:
        return takes_offsets(work.score)
    return bool(size == 128 and (is_looked_up(work.mask) or parts_of(work.score)))


def rows(work):
    largest = max(head_dims(work.problem))
    size = next(size for size in (64, 128, 256) if largest <= size)
    usual = next(table[size] for room, table in USUAL.items() if room <= work.device.shared)
    return (PRESSED[size] if usual.rows_of_warp > 16 and is_pressed(work, size) else usual,)


L2_BYTES, MANY = 16 << 20, 64  # of keys and values that are read at once; matrices of fewer keys


def matrices_at_once(problem):
    """How many query heads go over their keys at a time, so that these stay in the L2 cache."""
    nbytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return problem.group_size * min(max(1, L2_BYTES // max(nbytes, 1)), MANY)

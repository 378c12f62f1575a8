"""Problem and device -> which kernels, in which tiles. Tables, no CUDA: any machine can read a plan.

The first row of a table whose shared memory fits is taken. The fastest come first, of those that spill no registers,
as measured on an H200; the others serve GPUs with less shared memory (99 KB on 8.6, 8.9 and 12.x; 64 KB on 7.5).
"""

from typing import NamedTuple

from ..problem import DTYPES
from .build import Key

KERNELS = __package__ + ".kernels."
HEAD_DIMS = 32, 64, 128, 256  # what head_dims are rounded up to
LARGEST = HEAD_DIMS[-1]
ITEM_BYTES = {dtype.name: dtype.itemsize for dtype in DTYPES}
DELTA_ROWS = 32  # of a block that computes delta
STATES_TILES = 64  # of a block that looks up which tiles are empty
STATES_WORD = 32  # tiles whose states are bits of one word


class Tiles(NamedTuple):
    """Queries and keys of a tile; "mma", tensor cores, or "fma", ordinary ones with so many lanes in a row.

    stages: tiles in shared memory at once of what is walked over.
    """

    unit: str
    tile_m: int
    tile_n: int
    threads: int
    lanes: int = 0
    stages: int = 1


# (with tensor cores, bytes of an element): {largest head_dim: rows}. TFLOP/s: one batch, 16 heads, seqlen 4096, full
FORWARD = {
    (True, 2): {
        64: (Tiles("mma", 128, 64, 128),),                          # 299; 128 x 128 in 256 threads 238
        128: (Tiles("mma", 128, 128, 256), Tiles("mma", 128, 64, 256)),     # 290, 277
        256: (Tiles("mma", 128, 32, 256),),
    },
    (True, 4): {
        64: (Tiles("mma", 128, 64, 256),),                          # 52
        128: (Tiles("mma", 128, 64, 256), Tiles("mma", 128, 32, 256)),      # 55, 52
        256: (Tiles("mma", 128, 32, 256), Tiles("mma", 64, 16, 128)),       # 49; 128 x 16 45
    },
    (True, 8): {
        64: (Tiles("mma", 128, 64, 256), Tiles("mma", 64, 32, 128)),        # 35, 34
        128: (Tiles("mma", 128, 16, 256), Tiles("mma", 64, 16, 128)),       # 36, 36; 64 x 32 spills: 26
        256: (Tiles("fma", 32, 16, 128, 8), Tiles("fma", 16, 16, 64, 8)),   # sums of 16 x 256 do not fit a warp
    },
    (False, 2): {
        64: (Tiles("fma", 64, 32, 128, 8),),
        128: (Tiles("fma", 64, 32, 128, 8),),
        256: (Tiles("fma", 32, 32, 128, 8),),
    },
    (False, 4): {
        64: (Tiles("fma", 64, 32, 128, 8),),
        128: (Tiles("fma", 32, 32, 128, 8),),
        256: (Tiles("fma", 16, 16, 64, 8),),
    },
    (False, 8): {
        64: (Tiles("fma", 32, 16, 128, 8),),
        128: (Tiles("fma", 16, 16, 64, 8),),
        256: (Tiles("fma", 16, 4, 64, 4),),
    },
}
BACKWARD_KV = {  # keeps two sums, keys x head_dim: see sums_of_kv
    (True, 2): {
        64: (Tiles("mma", 64, 128, 256, stages=2),),                # 267; one stage, loads through registers 145
        128: (Tiles("mma", 32, 128, 256, stages=2), Tiles("mma", 32, 128, 256)),    # 274; 64 x 128 in one stage 253
        256: (Tiles("mma", 16, 64, 128, stages=2), Tiles("mma", 16, 64, 128)),
    },
    (True, 4): {  # 64 x 128 is as fast, and spills with dropout
        64: (Tiles("mma", 32, 128, 256, stages=2), Tiles("mma", 32, 64, 128, stages=2)),    # 54, 52
        128: tuple(Tiles("mma", *row) for row in ((16, 128, 256, 0, 2), (16, 64, 128, 0, 2), (16, 64, 128))),     # 48
        256: (Tiles("mma", 8, 64, 128, stages=2), Tiles("fma", 16, 16, 128, 8)),
    },
    (True, 8): {
        64: (Tiles("mma", 16, 128, 256, stages=2), Tiles("mma", 8, 64, 128)),       # 40; on ordinary cores 14
        128: (Tiles("fma", 32, 32, 256, 16), Tiles("fma", 16, 16, 128, 8)),         # 11
        256: (Tiles("fma", 16, 16, 256, 16), Tiles("fma", 4, 16, 256, 32)),
    },
    (False, 2): {
        64: (Tiles("fma", 32, 32, 256, 16),),
        128: (Tiles("fma", 32, 32, 128, 8),),
        256: (Tiles("fma", 16, 32, 128, 8),),
    },
    (False, 4): {
        64: (Tiles("fma", 16, 32, 128, 8),),
        128: (Tiles("fma", 16, 32, 128, 8),),
        256: (Tiles("fma", 8, 16, 64, 8),),
    },
    (False, 8): {
        64: (Tiles("fma", 16, 16, 256, 16),),
        128: (Tiles("fma", 8, 16, 64, 8),),
        256: (Tiles("fma", 4, 8, 256, 32),),
    },
}
BACKWARD_Q = {
    (True, 2): {
        64: (Tiles("mma", 128, 64, 256, stages=2),),                # 276; one stage 246
        128: (Tiles("mma", 128, 64, 256, stages=2), Tiles("mma", 128, 32, 256)),    # 299; one stage 234
        256: (Tiles("mma", 64, 32, 128),),
    },
    (True, 4): {
        64: (Tiles("mma", 128, 32, 256, stages=2), Tiles("mma", 64, 32, 128, stages=2)),    # 54; 128 x 64 spills: 59
        128: (Tiles("mma", 128, 32, 256, stages=2), Tiles("mma", 64, 32, 128)),     # 58, 53
        256: (Tiles("mma", 64, 8, 128), Tiles("fma", 16, 16, 128, 8)),
    },
    (True, 8): {
        64: (Tiles("mma", 128, 16, 256, stages=2), Tiles("mma", 64, 16, 128, stages=2)),    # 37
        128: (Tiles("mma", 64, 16, 128), Tiles("fma", 16, 16, 128, 8)),             # 25
        256: (Tiles("fma", 16, 16, 128, 8), Tiles("fma", 16, 8, 128, 8)),
    },
    (False, 2): {
        64: (Tiles("fma", 32, 32, 128, 8),),
        128: (Tiles("fma", 32, 32, 128, 8),),
        256: (Tiles("fma", 32, 16, 128, 8),),
    },
    (False, 4): {
        64: (Tiles("fma", 32, 32, 128, 8),),
        128: (Tiles("fma", 32, 16, 128, 8),),
        256: (Tiles("fma", 16, 8, 64, 8),),
    },
    (False, 8): {
        64: (Tiles("fma", 16, 16, 64, 8),),
        128: (Tiles("fma", 16, 8, 64, 8),),
        256: (Tiles("fma", 8, 4, 64, 8),),
    },
}


# with dropout or cells in the mask, which take registers, too: these rows come before those above
CROWDED_FORWARD = {
    (True, 2): {64: (Tiles("mma", 64, 64, 128),), 128: (Tiles("mma", 128, 64, 256),)},
    (True, 4): {128: (Tiles("mma", 128, 32, 256),), 256: (Tiles("mma", 128, 16, 256),)},
    (True, 8): {64: (Tiles("mma", 64, 32, 128),)},
}
CROWDED_BACKWARD_KV = {
    (True, 2): {
        64: (Tiles("mma", 32, 128, 256, stages=2),),
        128: (Tiles("mma", 16, 128, 256, stages=2),),
        256: (Tiles("mma", 16, 64, 128),),
    },
    (True, 8): {64: (Tiles("mma", 8, 128, 256, stages=2),)},
}
CROWDED_BACKWARD_Q = {
    (True, 2): {64: (Tiles("mma", 128, 32, 256, stages=2),)},
    (True, 8): {128: (Tiles("mma", 64, 8, 128),)},
}


# ----------------------------------------------------------------------------------------------------------- Hopper
class Warpgroups(NamedTuple):
    """Tiles of tile_n keys, `stages` of K and of V in shared memory at once; consumers of 64 queries, and places for
    `q_places` tiles of Q, or O."""

    tile_n: int
    consumers: int
    stages: int
    q_places: int

    @property
    def tile_m(self):
        return 64 * self.consumers


HOPPER = "forward_wgmma:forward"
# Of the tensor cores' peak, by bench/rows.py on an H200: seqlen 512, 16384
HOPPER_FORWARD = {  # of the largest head_dim
    64: Warpgroups(64, 4, 6, 5),                                    # 46, 57 %
    128: Warpgroups(128, 2, 2, 5),                                  # 65, 81 %
    192: Warpgroups(96, 2, 2, 3),                                   # 57, 95 %; 64 keys 59, 90
    256: Warpgroups(64, 2, 2, 3),                                   # 63, 96 %; 80 keys 57, 95
}
HOPPER_LONG = {  # instead, where LONG keys are in sight, or more
    64: Warpgroups(128, 3, 3, 5),                                   # 44, 62 %; 96 keys 37, 57
    128: Warpgroups(80, 3, 3, 5),                                   # 57, 87 %
}
LONG = 2048
HOPPER_NARROW = {  # instead, for bands narrower than the keys: smaller tiles have less at their edges
    128: Warpgroups(64, 3, 5, 4),                                   # Window(1023, 0): 65 %; 128 keys 63, 80 keys 63
}
HOPPER_CELLS = {  # 128 queries and a power of two of keys, so that tiles lie within the usual blocks of a mask
    64: Warpgroups(128, 2, 4, 4),                                   # random 10%, 16384: 42 %; 64 keys 30
    128: Warpgroups(128, 2, 2, 5),                                  # 65 %; 64 keys 51
    192: Warpgroups(64, 2, 2, 4),
    256: Warpgroups(64, 2, 2, 3),
}
HOPPER_CELLS_AND_DROPOUT = HOPPER_CELLS | {128: Warpgroups(64, 2, 4, 4), 256: Warpgroups(32, 2, 2, 4)}


def forward_factory(device, item):
    """The kernel of the forward pass for elements of so many bytes."""
    return HOPPER if device.cc == (9, 0) and item == 2 else "forward_simt:forward"


def warpgroups_of(head_dim, head_dim_v, keys, narrow, mask, dropout, group_size, seqlen_q):
    """The Warpgroups for head_dims that are multiples of 64 and so many keys in sight, of more if it is narrow; mask is
    kinds, see kernels.visibility. Few queries: the row in which most heads of a group share the tiles of keys."""
    size, cells = max(head_dim, head_dim_v), len(mask) > 1
    if dropout or cells:  # dropout at 4096: 26.3 % at head_dim 64, 41.6 at 128; the rows above 25.5, 39.4
        return (HOPPER_CELLS_AND_DROPOUT if dropout and cells else HOPPER_CELLS)[size]
    usual, instead = HOPPER_FORWARD[size], HOPPER_LONG if keys >= LONG else HOPPER_NARROW if narrow else {}
    return max(instead.get(size, usual), usual, key=lambda row: heads_abreast(row, mask, group_size, seqlen_q))


def near_masked(head_dim):
    """How many matrices at a time (see kernels.schedule) give jobs enough, of all weights, and stay in the cache."""
    return 64 if head_dim <= 64 else 32


def heads_abreast(tiles, mask, group_size, seqlen_q):
    """How many query heads of a group share a job of the forward pass on Hopper: as many as it has room for, if all see
    the same keys."""
    if mask != ("band",):
        return 1
    divisors = (n for n in range(1, tiles.consumers + 1) if tiles.consumers % n == group_size % n == 0)
    return max(n for n in divisors if n == 1 or n * seqlen_q <= tiles.tile_m)


def hopper_plan(dtype, head_dim, head_dim_v, keys, narrow, mask, dropout, group_size, seqlen_q):
    """The Warpgroups and the Key of the forward pass on Hopper."""
    head_dim, head_dim_v = (max(64, -(-size // 64) * 64) for size in (head_dim, head_dim_v))
    tiles = warpgroups_of(head_dim, head_dim_v, keys, narrow, mask, dropout, group_size, seqlen_q)
    sizes = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, **tiles._asdict()}
    return tiles, Key.of(KERNELS + HOPPER, (9, 0, "a"), **sizes, mask=mask, dropout=dropout)


# --------------------------------------------------------------------------------------------------- shared memory
def _tile(rows, cols, itemsize):
    """Bytes of a tile: see tile.SharedTile."""
    return rows * (cols * itemsize + 16)


def forward_shared(tiles, item, sums, d, e):
    q, k, v = _tile(tiles.tile_m, d, item), _tile(tiles.tile_n, d, item), _tile(tiles.tile_n, e, item)
    p = _tile(tiles.tile_m, tiles.tile_n, sums)
    return q + k + v + (p if tiles.unit == "fma" else 0)


def backward_kv_shared(tiles, item, sums, d, e):
    rows = tiles.tile_n + tiles.stages * tiles.tile_m
    lines, p = 2 * tiles.stages * tiles.tile_m * sums, _tile(tiles.tile_n, tiles.tile_m, sums)
    return _tile(rows, d, item) + _tile(rows, e, item) + lines + (2 * p if tiles.unit == "fma" else 0)


def backward_q_shared(tiles, item, sums, d, e):
    rows, p = tiles.tile_m + tiles.stages * tiles.tile_n, _tile(tiles.tile_m, tiles.tile_n, sums)
    return _tile(rows, d, item) + _tile(rows, e, item) + (p if tiles.unit == "fma" else 0)


PASSES = {  # factory: tables and shared memory
    "forward_simt:forward": (FORWARD, CROWDED_FORWARD, forward_shared),
    "backward_simt:backward_kv": (BACKWARD_KV, CROWDED_BACKWARD_KV, backward_kv_shared),
    "backward_simt:backward_q": (BACKWARD_Q, CROWDED_BACKWARD_Q, backward_q_shared),
}


# ------------------------------------------------------------------------------------------------------------ plans
def rounded(name, head_dim):
    """The head_dim that a kernel is compiled for."""
    for size in HEAD_DIMS:
        if head_dim <= size:
            return size
    raise ValueError(f"{name}: got {head_dim}, at most {LARGEST} on a GPU")


def tiles_of(factory, device, dtype, d, e, crowded=False):
    """The Tiles of a pass for head_dims as `rounded` gives them.

    device has cc and shared, the bytes of shared memory that a block may have. crowded: with dropout or cells in the
    mask.
    """
    table, crowded_table, shared_of = PASSES[factory]
    item = ITEM_BYTES[dtype]
    unit, size = (device.cc >= (8, 0), item), next(size for size in (64, 128, 256) if size >= max(d, e))
    rows = table[unit][size]
    if crowded:
        rows = crowded_table.get(unit, {}).get(size, ()) + rows
    for tiles in rows:
        if shared_of(tiles, item, max(item, 4), d, e) <= device.shared:
            return tiles
    raise NotImplementedError(f"no tiles of {dtype} with head_dim {d}, {e} in {device.shared} bytes of shared memory")


def sums_of_kv(device, dtype, d, e):
    """The sums of each kernel that makes dK and dV: beyond head_dim 128 a warp has registers for one of them only."""
    return ("v", "k") if device.cc >= (8, 0) and dtype != "float64" and max(d, e) > 128 else ("kv",)


def plan(factory, device, dtype, head_dim, head_dim_v, mask, dropout, **compiled_in):
    """The Tiles and the Key of a pass; head_dims are as `rounded` gives them, mask is kinds, see kernels.visibility."""
    crowded = dropout or len(mask) > 1
    tiles = tiles_of(factory, device, dtype, head_dim, head_dim_v, crowded)
    sizes = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, **tiles._asdict()}
    return tiles, Key.of(KERNELS + factory, device.cc, **sizes, mask=mask, dropout=dropout, **compiled_in)

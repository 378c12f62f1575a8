"""Problem and device -> which kernels, in which tiles. Tables, no CUDA: any machine can read a plan.

A row of a table is taken if its shared memory fits: the first that does. The fastest come first, as measured with
bench/gpu.py on an H200; the others serve GPUs with less shared memory (99 KB on 8.6, 8.9 and 12.x; 64 KB on 7.5).
"""

from typing import NamedTuple

from .build import Key

KERNELS = __package__ + ".kernels."
HEAD_DIMS = 32, 64, 128, 256  # what head_dims are rounded up to
LARGEST = HEAD_DIMS[-1]
DELTA_ROWS = 32  # of a block that computes delta
STATES_TILES = 64  # of a block that looks up which tiles are empty


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


# (with tensor cores, bytes of an element): {largest head_dim: rows}
FORWARD = {
    (True, 2): {
        64: (Tiles("mma", 128, 64, 128),),
        128: (Tiles("mma", 128, 64, 256),),
        256: (Tiles("mma", 128, 32, 256),),
    },
    (True, 4): {
        64: (Tiles("mma", 128, 64, 256), Tiles("mma", 64, 64, 128)),
        128: (Tiles("mma", 128, 64, 256), Tiles("mma", 64, 32, 128)),
        256: (Tiles("mma", 128, 32, 256), Tiles("mma", 64, 32, 128), Tiles("mma", 64, 16, 128)),
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
        64: (Tiles("fma", 64, 64, 256, 16), Tiles("fma", 64, 32, 256, 16), Tiles("fma", 32, 16, 128, 8)),
        128: (Tiles("fma", 64, 32, 256, 16), Tiles("fma", 32, 16, 128, 8), Tiles("fma", 16, 16, 64, 8)),
        256: (Tiles("fma", 32, 16, 128, 8), Tiles("fma", 16, 16, 64, 8), Tiles("fma", 16, 4, 64, 4)),
    },
}
BACKWARD_KV = {  # two sums of the size of keys x head_dim are kept: beyond 128 they do not fit a warp of tensor cores
    (True, 2): {
        64: (Tiles("mma", 64, 128, 256),),
        128: (Tiles("mma", 32, 128, 256),),
        256: (Tiles("fma", 32, 32, 128, 8),),
    },
    (True, 4): {
        64: (Tiles("mma", 64, 128, 256), Tiles("mma", 32, 128, 256)),
        128: (Tiles("mma", 32, 128, 256), Tiles("mma", 16, 64, 128)),
        256: (Tiles("fma", 32, 32, 128, 8), Tiles("fma", 16, 16, 64, 8)),
    },
    (False, 2): {
        64: (Tiles("fma", 32, 32, 128, 8),),
        128: (Tiles("fma", 32, 32, 128, 8),),
        256: (Tiles("fma", 16, 32, 128, 8),),
    },
    (False, 4): {
        64: (Tiles("fma", 32, 32, 128, 8),),
        128: (Tiles("fma", 16, 32, 128, 8),),
        256: (Tiles("fma", 8, 16, 64, 8),),
    },
    (False, 8): {
        64: (Tiles("fma", 32, 64, 256, 16), Tiles("fma", 32, 32, 128, 8), Tiles("fma", 16, 16, 64, 8)),
        128: (Tiles("fma", 32, 32, 128, 8), Tiles("fma", 16, 16, 64, 8), Tiles("fma", 8, 16, 64, 8)),
        256: (Tiles("fma", 16, 16, 64, 8), Tiles("fma", 4, 16, 64, 8), Tiles("fma", 4, 8, 64, 8)),
    },
}
BACKWARD_Q = {
    (True, 2): {
        64: (Tiles("mma", 128, 64, 256),),
        128: (Tiles("mma", 128, 64, 256), Tiles("mma", 128, 32, 256)),
        256: (Tiles("mma", 64, 32, 128),),
    },
    (True, 4): {
        64: (Tiles("mma", 128, 64, 256), Tiles("mma", 128, 32, 256)),
        128: (Tiles("mma", 128, 32, 256), Tiles("mma", 64, 32, 128)),
        256: (Tiles("mma", 64, 32, 128), Tiles("mma", 64, 16, 128), Tiles("fma", 16, 16, 64, 8)),
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
        64: (Tiles("fma", 64, 32, 256, 16), Tiles("fma", 32, 32, 128, 8), Tiles("fma", 16, 16, 64, 8)),
        128: (Tiles("fma", 32, 32, 128, 8), Tiles("fma", 16, 16, 64, 8), Tiles("fma", 16, 8, 64, 8)),
        256: (Tiles("fma", 16, 16, 64, 8), Tiles("fma", 16, 8, 64, 8), Tiles("fma", 8, 4, 64, 8)),
    },
}


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
    "forward_simt:forward": (FORWARD, forward_shared),
    "backward_simt:backward_kv": (BACKWARD_KV, backward_kv_shared),
    "backward_simt:backward_q": (BACKWARD_Q, backward_q_shared),
}


# ------------------------------------------------------------------------------------------------------------ plans
def rounded(name, head_dim):
    """The head_dim that a kernel is compiled for."""
    for size in HEAD_DIMS:
        if head_dim <= size:
            return size
    raise ValueError(f"{name}: got {head_dim}, at most {LARGEST} on a GPU")


def tiles_of(factory, dtype, d, e, cc, shared):
    """The Tiles of a pass for head_dims as `rounded` gives them."""
    tables, shared_of = PASSES[factory]
    tensor_cores = cc >= (8, 0) and dtype != "float64"
    item = {"float64": 8, "float32": 4}.get(dtype, 2)
    rows = next(rows for size, rows in tables[tensor_cores, item].items() if size >= max(d, e))
    for tiles in rows:
        if shared_of(tiles, item, max(item, 4), d, e) <= shared:
            return tiles
    raise NotImplementedError(f"no tiles of {dtype} with head_dim {d}, {e} in {shared} bytes of shared memory")


def plan(factory, device, dtype, head_dim, head_dim_v, **compiled_in):
    """The Tiles and the Key of a pass for head_dims as `rounded` gives them.

    device has cc and shared, the bytes of shared memory that a block may have.
    """
    tiles = tiles_of(factory, dtype, head_dim, head_dim_v, device.cc, device.shared)
    sizes = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v}
    return tiles, Key.of(KERNELS + factory, device.cc, **sizes, **tiles._asdict(), **compiled_in)

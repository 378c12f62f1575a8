"""Which tiles the kernel `tangent` takes: tables, each row with its reason."""

from typing import NamedTuple


class TangentTiles(NamedTuple):
    """A row: tiles of tile_m queries and tile_n keys. O and tO take twice the registers of O alone, so that tensor
    cores have 16 queries a warp, or halves of these sums where two warps share rows."""

    unit: str  # "mma", tensor cores, or "fma", CUDA cores
    tile_m: int
    tile_n: int
    threads: int
    lanes: int = 0  # as in Tiles
    blocks: int = 1  # that a multiprocessor is to hold at least
    parts: int = 1  # of the depth of S that are summed one after the other: see product_step
    sliced: bool = False  # whether warps that share rows each sum a slice of the depth of S: see product_step


# (with tensor cores, bytes of an element): {largest head_dim: rows}
TILES = {
    (True, 2): {
        64: (TangentTiles("mma", 128, 64, 256),),
        128: (TangentTiles("mma", 64, 32, 128),),
        256: (TangentTiles("mma", 64, 32, 256, 8, sliced=True), TangentTiles("mma", 32, 16, 128, 8, sliced=True)),
    },
    (True, 4): {
        64: (TangentTiles("mma", 128, 32, 256), TangentTiles("mma", 64, 16, 128)),
        128: (TangentTiles("mma", 128, 16, 256), TangentTiles("mma", 32, 16, 64)),
        256: (TangentTiles("mma", 32, 16, 128, 8, sliced=True), TangentTiles("mma", 16, 8, 64, 8, sliced=True)),
    },
    (True, 8): {
        64: (TangentTiles("mma", 64, 16, 128), TangentTiles("mma", 32, 8, 64)),
        128: (TangentTiles("mma", 32, 16, 128, 8, sliced=True), TangentTiles("mma", 16, 8, 64, 8, sliced=True)),
        256: (TangentTiles("mma", 16, 8, 128, 16, sliced=True), TangentTiles("fma", 8, 4, 64, 8)),
    },
    (False, 2): {
        64: (TangentTiles("fma", 64, 32, 128, 8),),
        128: (TangentTiles("fma", 32, 32, 128, 8),),
        256: (TangentTiles("fma", 16, 16, 64, 8),),
    },
    (False, 4): {
        64: (TangentTiles("fma", 32, 32, 128, 8),),
        128: (TangentTiles("fma", 16, 16, 64, 8),),
        256: (TangentTiles("fma", 16, 4, 64, 8),),
    },
    (False, 8): {
        64: (TangentTiles("fma", 16, 16, 64, 8),),
        128: (TangentTiles("fma", 16, 4, 64, 8),),
        256: (TangentTiles("fma", 8, 2, 64, 8),),
    },
}
SHORT = {}

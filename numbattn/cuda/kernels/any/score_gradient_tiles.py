"""Tiles of the kernels for any GPU that compute gradients of the arrays of a score: tables. See `kernels.tables`."""

from ..tables import Tiles, has_tensor_cores, rows_of, size_of_rows
from .backward_tangent_tiles import TILES_Q as TILES_OF_TANGENTS
from .backward_tiles import TILES_Q, UNDER_PRESSURE_Q

# {(bytes of an element, largest head_dim): rows}; where there is none, those of `backward` for dQ.
# us of the gradient of a bias that 256 elements of a batch share, 8 heads, 256 queries and keys, on an H100
TILES = {
    (2, 64): (Tiles("mma", 64, 64, 128, blocks=3),), (2, 128): (Tiles("mma", 64, 64, 128, blocks=3),),
    (2, 256): (Tiles("mma", 64, 32, 128, blocks=2), Tiles("mma", 64, 16, 128)),
    (4, 64): (Tiles("mma", 64, 64, 128, blocks=2),),  # 897; 128 x 64 1114, 64 x 32 1133
    (4, 128): (Tiles("mma", 64, 32, 128, blocks=2), Tiles("mma", 32, 32, 64)),
    (8, 64): (  # 1742, 2058, 2551
        Tiles("mma", 64, 64, 256, 8), Tiles("mma", 64, 32, 128, blocks=2), Tiles("mma", 64, 16, 128, blocks=2),
    ),
    (8, 128): (Tiles("mma", 64, 32, 256, 8), Tiles("mma", 32, 16, 64)),
}  # fmt: skip
SHORT, TILES_OF_SHORT = 32, {  # for at most this many queries and keys
    (2, 64): (Tiles("mma", 32, 32, 64, blocks=8),), (2, 128): (Tiles("mma", 32, 32, 64, blocks=6),),
    (4, 64): (Tiles("mma", 32, 32, 64, blocks=6),), (4, 128): (Tiles("mma", 32, 32, 64, blocks=3),),
    (8, 64): (Tiles("mma", 32, 32, 64, blocks=4),), (8, 128): (Tiles("mma", 32, 16, 64),),
}  # fmt: skip
# {bytes of a row: (tile_m, tile_n, threads)}, of tangents, before those of `backward_tangent` for tdQ: the largest that
# spill nothing, and smaller ones
ALONG_DIRECTIONS = {256: (64, 32, 128), 512: (64, 16, 128), 1024: (32, 16, 64), 2048: (16, 8, 32)}
SUMMED = {  # before others, for sums along diagonals and along rows, where a warp holds whole rows
    (4, 256): (Tiles("mma", 64, 32, 128), Tiles("mma", 64, 16, 128), Tiles("mma", 32, 16, 64)),
    (8, 64): (Tiles("mma", 64, 32, 128, blocks=2), Tiles("mma", 64, 16, 128)),
    (8, 128): (Tiles("mma", 64, 32, 128), Tiles("mma", 32, 16, 64)),
    (8, 256): (Tiles("mma", 32, 16, 64), Tiles("mma", 16, 8, 32)),
}


def rows(work, of_bias, sums_cols=False, **others):
    """The rows for this work, the fastest first. of_bias: for `bias_gradient` or reads, else for sums by diagonal."""
    if work.is_along:
        nbytes = work.problem.dtype.itemsize * size_of_rows(work)
        found = [Tiles("mma", *row) for most, row in ALONG_DIRECTIONS.items() if nbytes <= most]
        others = [Tiles(*row[:5]) for row in rows_of(TILES_OF_TANGENTS, {}, work)]
        return (*found, *others) if has_tensor_cores(work.device) else others
    is_short = max(work.problem.seqlen_q, work.problem.seqlen_k) <= SHORT
    tables = *[TILES_OF_SHORT] * is_short, *[SUMMED] * (sums_cols or not of_bias), TILES
    found = tuple(row for table in tables for row in rows_of(table, {}, work))
    return found or tuple(Tiles(*row[:5]) for row in rows_of(TILES_Q, UNDER_PRESSURE_Q, work))

"""Tiles of the kernels for any GPU that compute gradients of the arrays of a score: tables. See `kernels.tables`."""

from ..tables import Tiles, rows_of
from .backward_tangent_tiles import TILES_Q as TILES_OF_TANGENTS
from .backward_tiles import TILES_Q, UNDER_PRESSURE_Q

# {bytes of an element: {largest head_dim: rows}}; where there is none, those of `backward` for dQ.
# us of the gradient of a bias that 256 elements of a batch share, 8 heads, 256 queries and keys, on an H100
TILES = {
    2: {
        64: (Tiles("mma", 64, 64, 128, blocks=3),), 128: (Tiles("mma", 64, 64, 128, blocks=3),),
        256: (Tiles("mma", 64, 32, 128, blocks=2), Tiles("mma", 64, 16, 128)),
    },
    4: {
        64: (Tiles("mma", 64, 64, 128, blocks=2),),  # 897; 128 x 64 1114, 64 x 32 1133
        128: (Tiles("mma", 64, 32, 128, blocks=2), Tiles("mma", 32, 32, 64)),
    },
    8: {
        64: (  # 1742, 2058, 2551
            Tiles("mma", 64, 64, 256, 8), Tiles("mma", 64, 32, 128, blocks=2), Tiles("mma", 64, 16, 128, blocks=2),
        ),
        128: (Tiles("mma", 64, 32, 256, 8), Tiles("mma", 32, 16, 64)),
    },
}  # fmt: skip
SHORT, TILES_OF_SHORT = 32, {  # for at most this many queries and keys
    2: {64: (Tiles("mma", 32, 32, 64, blocks=8),), 128: (Tiles("mma", 32, 32, 64, blocks=6),)},
    4: {64: (Tiles("mma", 32, 32, 64, blocks=6),), 128: (Tiles("mma", 32, 32, 64, blocks=3),)},
    8: {64: (Tiles("mma", 32, 32, 64, blocks=4),), 128: (Tiles("mma", 32, 16, 64),)},
}  # fmt: skip
ALONG_DIRECTIONS = {  # of tangents, before those of `backward_tangent` for tdQ: the largest that spill nothing
    2: {
        64: (Tiles("mma", 64, 32, 128),), 128: (Tiles("mma", 64, 32, 128), Tiles("mma", 64, 16, 128)),
        256: (Tiles("mma", 64, 16, 128), Tiles("mma", 32, 16, 64), Tiles("mma", 16, 8, 32)),
    },
    4: {
        64: (Tiles("mma", 64, 32, 128), Tiles("mma", 64, 16, 128)),
        128: (Tiles("mma", 64, 16, 128), Tiles("mma", 32, 16, 64)),
        256: (Tiles("mma", 32, 16, 64), Tiles("mma", 16, 8, 32)),
    },
    8: {
        64: (Tiles("mma", 64, 16, 128), Tiles("mma", 32, 16, 64)),
        128: (Tiles("mma", 32, 16, 64), Tiles("mma", 16, 8, 32)),
        256: (Tiles("mma", 16, 8, 32),),
    },
}  # fmt: skip
SUMMED = {  # before others, for sums along diagonals and along rows, where a warp holds whole rows
    4: {256: (Tiles("mma", 64, 32, 128), Tiles("mma", 64, 16, 128), Tiles("mma", 32, 16, 64))},
    8: {
        64: (Tiles("mma", 64, 32, 128, blocks=2), Tiles("mma", 64, 16, 128)),
        128: (Tiles("mma", 64, 32, 128), Tiles("mma", 32, 16, 64)),
        256: (Tiles("mma", 32, 16, 64), Tiles("mma", 16, 8, 32)),
    },
}


def rows(work, of_bias, sums_cols=False, **others):
    """The rows for this work, the fastest first. of_bias: for `bias_gradient`, else for sums by diagonal or by
    entry."""
    if work.is_along:
        found = (*rows_of(ALONG_DIRECTIONS, {}, work), *rows_of(TILES_OF_TANGENTS, {}, work))
        return tuple([Tiles(*row[:5]) for row in found])
    is_short = max(work.problem.seqlen_q, work.problem.seqlen_k) <= SHORT
    tables = *[TILES_OF_SHORT] * is_short, *[SUMMED] * (sums_cols or not of_bias), TILES
    found = tuple(row for table in tables for row in rows_of(table, {}, work))
    return found or tuple(Tiles(*row[:5]) for row in rows_of(TILES_Q, UNDER_PRESSURE_Q, work))

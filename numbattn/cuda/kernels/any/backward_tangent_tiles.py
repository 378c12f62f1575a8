"""Tiles of the kernels for any GPU of the tangent of the backward pass: tables. See `kernels.tables`."""

from ..tables import Streamed

# (with tensor cores, bytes of an element): {largest head_dim: rows}
TILES_KV = {  # four tiles of keys, two accumulators of keys x head_dim
    (True, 2): {
        64: (Streamed("mma", 64, 128, 256, stages=2), Streamed("mma", 32, 64, 128, stages=2)),
        128: (
            Streamed("mma", 32, 128, 256, stages=2), Streamed("mma", 16, 64, 128, stages=2),
            Streamed("mma", 16, 64, 128),
        ),
        256: (Streamed("mma", 32, 64, 256, 8), Streamed("mma", 32, 32, 128, 8), Streamed("fma", 16, 16, 64, 8)),
    },
    (True, 4): {
        64: (Streamed("mma", 32, 128, 256, stages=2), Streamed("mma", 32, 64, 128), Streamed("mma", 16, 64, 128)),
        128: (Streamed("mma", 16, 64, 256, 8, 2), Streamed("mma", 16, 32, 128, 8), Streamed("mma", 16, 16, 64, 8)),
        256: (Streamed("mma", 16, 32, 128, 8), Streamed("mma", 16, 16, 64, 8), Streamed("fma", 8, 8, 64, 8)),
    },
    (True, 8): {
        64: (Streamed("mma", 16, 64, 256, 8, 2), Streamed("mma", 16, 64, 256, 8), Streamed("mma", 16, 16, 64, 8)),
        128: (Streamed("mma", 16, 32, 256, 16), Streamed("mma", 16, 16, 128, 16), Streamed("fma", 8, 8, 64, 8)),
        256: (Streamed("fma", 8, 16, 256, 32), Streamed("fma", 8, 8, 128, 16), Streamed("fma", 4, 4, 32, 32)),
    },
    (False, 2): {
        64: (Streamed("fma", 32, 32, 256, 16),),
        128: (Streamed("fma", 16, 32, 128, 8),),
        256: (Streamed("fma", 8, 16, 64, 8),),
    },
    (False, 4): {
        64: (Streamed("fma", 16, 32, 128, 8),),
        128: (Streamed("fma", 8, 16, 64, 8),),
        256: (Streamed("fma", 4, 8, 64, 8),),
    },
    (False, 8): {
        64: (Streamed("fma", 8, 16, 64, 8),),
        128: (Streamed("fma", 4, 8, 64, 8),),
        256: (Streamed("fma", 2, 4, 128, 32),),
    },
}
TILES_Q = {  # four tiles of queries, and an accumulator of queries x head_dim
    (True, 2): {
        64: (Streamed("mma", 128, 64, 256, stages=2), Streamed("mma", 64, 32, 128)),
        128: (
            Streamed("mma", 128, 32, 256, stages=2), Streamed("mma", 64, 32, 128, stages=2),
            Streamed("mma", 64, 16, 128),
        ),
        256: (Streamed("mma", 64, 16, 128), Streamed("mma", 16, 16, 32)),
    },
    (True, 4): {
        64: (Streamed("mma", 128, 32, 256), Streamed("mma", 64, 32, 128, stages=2), Streamed("mma", 64, 16, 128)),
        128: (Streamed("mma", 64, 16, 256, 8), Streamed("mma", 64, 16, 128), Streamed("mma", 32, 8, 64)),
        256: (Streamed("mma", 32, 16, 128, 8), Streamed("mma", 16, 16, 64, 8), Streamed("fma", 16, 4, 64, 8)),
    },
    (True, 8): {
        64: (Streamed("mma", 64, 16, 256, 8), Streamed("mma", 32, 16, 128, 8), Streamed("mma", 16, 16, 64, 8)),
        128: (Streamed("mma", 32, 16, 256, 16), Streamed("mma", 16, 16, 128, 16), Streamed("fma", 8, 8, 64, 8)),
        256: (Streamed("fma", 16, 8, 256, 32), Streamed("fma", 8, 8, 128, 16), Streamed("fma", 4, 4, 32, 32)),
    },
    (False, 2): {
        64: (Streamed("fma", 32, 32, 256, 16),),
        128: (Streamed("fma", 32, 16, 128, 8),),
        256: (Streamed("fma", 16, 8, 64, 8),),
    },
    (False, 4): {
        64: (Streamed("fma", 32, 16, 128, 8),),
        128: (Streamed("fma", 16, 8, 64, 8),),
        256: (Streamed("fma", 8, 4, 64, 8),),
    },
    (False, 8): {
        64: (Streamed("fma", 16, 8, 64, 8),),
        128: (Streamed("fma", 8, 4, 64, 8),),
        256: (Streamed("fma", 4, 2, 128, 32),),
    },
}

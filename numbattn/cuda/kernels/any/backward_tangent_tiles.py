"""Tiles of the kernels for any GPU of the tangent of the backward pass: tables, each row as measured. See
`kernels.tables`."""

from ..tables import FMA, Tiles

# {(bytes of an element, largest head_dim): rows, FMA: {bytes of a row: tiles}}. TFLOP/s on an H100, without tdO: one
# batch, 16 heads, seqlen 4096, full
TILES_KV = {  # four tiles of keys, two accumulators of keys x head_dim
    (2, 64): (Tiles("mma", 64, 64, 128, stages=2), Tiles("mma", 32, 64, 128, stages=2)),  # 358; 128 keys 356; 309
    (2, 128): (Tiles("mma", 32, 64, 128), Tiles("mma", 16, 64, 128)),  # 346; 32 x 128, two stages, 340
    (2, 256): (Tiles("mma", 32, 64, 256, 8), Tiles("mma", 32, 32, 128, 8), Tiles("fma", 16, 16, 64, 8)),  # 226
    (4, 64): (  # 57, 54; 16 x 128 49
        Tiles("mma", 32, 128, 256, stages=2), Tiles("mma", 32, 64, 128), Tiles("mma", 16, 64, 128),
    ),
    (4, 128): (  # 46; 16 x 64 35, 37
        Tiles("mma", 32, 64, 256, 8), Tiles("mma", 16, 64, 256, 8, 2), Tiles("mma", 16, 32, 128, 8),
        Tiles("mma", 16, 16, 64, 8),
    ),
    (4, 256): (Tiles("mma", 16, 32, 128, 8), Tiles("mma", 16, 16, 64, 8), Tiles("fma", 8, 8, 64, 8)),
    (8, 64): (Tiles("mma", 16, 32, 128, 8), Tiles("mma", 16, 16, 64, 8)),  # 33, as 16 x 64
    (8, 128): (Tiles("mma", 16, 32, 256, 16), Tiles("mma", 16, 16, 128, 16), Tiles("fma", 8, 8, 64, 8)),
    (8, 256): (Tiles("fma", 8, 16, 256, 32), Tiles("fma", 8, 8, 128, 16), Tiles("fma", 4, 4, 32, 32)),
    FMA: {
        128: Tiles("fma", 32, 32, 256, 16), 256: Tiles("fma", 16, 32, 128, 8), 512: Tiles("fma", 8, 16, 64, 8),
        1024: Tiles("fma", 4, 8, 64, 8), 2048: Tiles("fma", 2, 4, 128, 32),
    },
}
NONLINEAR_KV = {(2, 64): (Tiles("mma", 32, 128, 256, stages=2),)}  # with F and tF: others spill
TILES_Q = {  # four tiles of queries, and an accumulator of queries x head_dim
    (2, 64): (Tiles("mma", 128, 32, 128, stages=2), Tiles("mma", 64, 32, 128)),  # 408; warps of 16 queries 338
    (2, 128): (  # 327, 319
        Tiles("mma", 128, 32, 256, stages=2), Tiles("mma", 64, 32, 128), Tiles("mma", 64, 16, 128),
    ),
    (2, 256): (Tiles("mma", 64, 16, 128), Tiles("mma", 16, 16, 32)),  # 195
    (4, 64): (Tiles("mma", 64, 32, 128), Tiles("mma", 64, 16, 128)),  # 54, as 128 x 32; two stages 41
    (4, 128): (  # 36, 34
        Tiles("mma", 64, 16, 128, stages=2), Tiles("mma", 64, 16, 128), Tiles("mma", 32, 8, 64),
    ),
    (4, 256): (Tiles("mma", 32, 16, 128, 8), Tiles("mma", 16, 16, 64, 8), Tiles("fma", 16, 4, 64, 8)),
    (8, 64): (Tiles("mma", 32, 16, 128, 8), Tiles("mma", 16, 16, 64, 8)),  # 33; 64 x 16 30
    (8, 128): (Tiles("mma", 32, 16, 256, 16), Tiles("mma", 16, 16, 128, 16), Tiles("fma", 8, 8, 64, 8)),
    (8, 256): (Tiles("fma", 16, 8, 256, 32), Tiles("fma", 8, 8, 128, 16), Tiles("fma", 4, 4, 32, 32)),
    FMA: {
        128: Tiles("fma", 32, 32, 256, 16), 256: Tiles("fma", 32, 16, 128, 8), 512: Tiles("fma", 16, 8, 64, 8),
        1024: Tiles("fma", 8, 4, 64, 8), 2048: Tiles("fma", 4, 2, 128, 32),
    },
}
NONLINEAR_Q = {(2, 64): (Tiles("mma", 128, 32, 256, stages=2),)}
# {(longest sequence, bytes of an element): {largest head_dim: row}}. us on an H100, 8 heads: n times batch
# 65536 with float32, 32768 with float64
SHORT_KV = {
    (32, 4): {
        32: Tiles("mma", 32, 32, 64, blocks=6),  # 220; four blocks 238
        64: Tiles("mma", 32, 32, 64, blocks=3),  # 512
    },
    (32, 8): {32: Tiles("mma", 16, 32, 64, blocks=4)},  # 213
    (64, 4): {
        32: Tiles("mma", 32, 64, 128, blocks=3),  # 356; two blocks 407
        64: Tiles("mma", 32, 64, 128, blocks=2),  # 741
    },
    (64, 8): {32: Tiles("mma", 16, 64, 128, blocks=2)},  # 291
    (128, 4): {
        32: Tiles("mma", 32, 64, 128, stages=2, blocks=2),  # 699; 128 keys 812
        64: Tiles("mma", 32, 64, 128, blocks=2),  # 1362, 1431
    },
}
SHORT_Q = {
    (32, 4): {
        32: Tiles("mma", 32, 32, 64, blocks=6),  # 202; four blocks 215
        64: Tiles("mma", 32, 32, 64, blocks=3),  # 455
    },
    (32, 8): {32: Tiles("mma", 32, 16, 64, blocks=4)},  # 194
    (64, 4): {
        32: Tiles("mma", 64, 32, 128, blocks=3),  # 311; two blocks 378
        64: Tiles("mma", 64, 32, 128, blocks=2),  # 680
    },
    (64, 8): {32: Tiles("mma", 64, 16, 128, blocks=2)},  # 270
    (128, 4): {
        32: Tiles("mma", 64, 32, 128, blocks=3),  # 582
        64: Tiles("mma", 64, 32, 128, blocks=2),  # 1224
    },
}

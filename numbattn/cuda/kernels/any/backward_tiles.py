"""Tiles of the backward kernels for any GPU: tables, each row as measured. See `kernels.tables`."""

from ..tables import FMA, Tiles

# {(bytes of an element, largest head_dim): rows, FMA: {bytes of a row: tiles}}. TFLOP/s: one batch, 16 heads, seqlen
# 4096, full
TILES_KV = {  # two accumulators, keys x head_dim
    (2, 128): (Tiles("mma", 32, 64, 128),),  # of slices alone
    (4, 64): (  # 54, 52; 64 x 128 is as fast, and spills with dropout
        Tiles("mma", 32, 128, 256, stages=2), Tiles("mma", 32, 64, 128, stages=2),
    ),
    (4, 128): tuple(Tiles("mma", *row) for row in ((16, 128, 256, 0, 2), (16, 64, 128, 0, 2), (16, 64, 128))),  # 48
    (4, 256): (  # the first up to a head_dim of 192
        Tiles("mma", 32, 64, 256, 8, 2), Tiles("mma", 32, 64, 256, 8),  # both passes 34, 34; 16 x 64, sliced 31
        Tiles("mma", 16, 32, 128, 8, 2), Tiles("fma", 16, 16, 128, 8),
    ),
    (8, 64): (Tiles("mma", 16, 128, 256, stages=2), Tiles("mma", 8, 64, 128)),  # 40; on CUDA cores 14
    (8, 128): (Tiles("mma", 16, 64, 256, 8, 2), Tiles("mma", 16, 32, 128, 8, 2), Tiles("fma", 16, 16, 128, 8)),
    (8, 256): (  # the first up to a head_dim of 192
        Tiles("mma", 32, 32, 256, 16), Tiles("mma", 16, 32, 256, 16, 1, True),  # both passes 21, 17
        Tiles("mma", 8, 32, 256, 16, 2, True), Tiles("fma", 16, 16, 256, 16), Tiles("fma", 4, 16, 256, 32),
    ),
    FMA: {
        128: Tiles("fma", 32, 32, 256, 16), 512: Tiles("fma", 16, 32, 128, 8), 1024: Tiles("fma", 8, 16, 64, 8),
        2048: Tiles("fma", 4, 8, 256, 32),
    },
}
UNDER_PRESSURE_KV = {
    (8, 64): (Tiles("mma", 8, 128, 256, stages=2),),
    (8, 256): (Tiles("mma", 32, 32, 256, 16), Tiles("mma", 8, 32, 256, 16, 2, True)),
}
TILES_Q = {
    (2, 64): (Tiles("mma", 128, 64, 256, stages=2),),  # 276; one stage 246
    (2, 128): (Tiles("mma", 128, 64, 256, stages=2), Tiles("mma", 128, 32, 256)),  # 299; one stage 234
    (2, 256): (Tiles("mma", 64, 32, 128),),
    (4, 64): (Tiles("mma", 128, 32, 256, stages=2), Tiles("mma", 64, 32, 128, stages=2)),  # 54; 128 x 64 spills: 59
    (4, 128): (Tiles("mma", 128, 32, 256, stages=2), Tiles("mma", 64, 32, 128)),  # 58, 53
    (4, 256): (  # the first up to a head_dim of 192
        Tiles("mma", 64, 64, 256, 8), Tiles("mma", 64, 32, 256, 8, 1, True), Tiles("mma", 64, 32, 256, 8),
        Tiles("mma", 64, 8, 128), Tiles("fma", 16, 16, 128, 8),
    ),
    (8, 64): (Tiles("mma", 128, 16, 256, stages=2), Tiles("mma", 64, 16, 128, stages=2)),  # 37
    (8, 128): (Tiles("mma", 64, 32, 256, 8), Tiles("mma", 64, 16, 128), Tiles("fma", 16, 16, 128, 8)),
    (8, 256): (  # the first up to a head_dim of 192
        Tiles("mma", 32, 32, 256, 16), Tiles("mma", 32, 16, 128, 8, 1, True),
        Tiles("fma", 16, 16, 128, 8), Tiles("fma", 16, 8, 128, 8),
    ),
    FMA: {
        256: Tiles("fma", 32, 32, 128, 8), 512: Tiles("fma", 32, 16, 128, 8), 1024: Tiles("fma", 16, 8, 64, 8),
        2048: Tiles("fma", 8, 4, 64, 8),
    },
}
UNDER_PRESSURE_Q = {
    (2, 64): (Tiles("mma", 128, 32, 256, stages=2),),
    (8, 128): (Tiles("mma", 64, 32, 256, 8), Tiles("mma", 64, 8, 128)),
    (8, 256): (Tiles("mma", 32, 32, 256, 16), Tiles("mma", 32, 16, 256, 16, 1, True)),
}
# {(longest sequence, bytes of an element): {largest head_dim: row}}. us next to those of the rows above, in
# one run on an H100, 8 heads: n times batch 131072 with float32, d 32 and 64, and float64, d 32. "-": not measured
SHORT_KV = {
    (32, 4): {
        32: Tiles("mma", 32, 32, 64, blocks=6),  # 296, 1243
        64: Tiles("mma", 32, 32, 64, blocks=4),  # 580, 1945
    },
    (32, 8): {32: Tiles("mma", 16, 32, 64, blocks=4)},  # 1016, 2137
    (64, 4): {
        32: Tiles("mma", 32, 64, 128, blocks=3),  # 426, 1080
        64: Tiles("mma", 32, 64, 128, stages=2, blocks=2),  # 832, 1687
    },
    (64, 8): {64: Tiles("mma", 16, 64, 128, stages=2, blocks=2)},  # -
    (256, 4): {64: Tiles("mma", 64, 64, 128, blocks=2)},  # n 256, half of the batch: 1329, 1404
    (256, 8): {64: Tiles("mma", 16, 64, 128, stages=2, blocks=2)},  # n 128, d 64: 1890, 2010
}
SHORT_Q = {
    (32, 4): {
        32: Tiles("mma", 32, 32, 64, blocks=6),  # 243, 997
        64: Tiles("mma", 32, 32, 64, blocks=4),  # 475, 1473
    },
    (32, 8): {32: Tiles("mma", 32, 16, 64, blocks=4)},  # 856, 1709
    (64, 4): {
        32: Tiles("mma", 64, 32, 128, blocks=3),  # 316, 808
        64: Tiles("mma", 64, 32, 128, stages=2, blocks=3),  # 560, 1300
    },
    (64, 8): {64: Tiles("mma", 64, 32, 128, blocks=2)},  # -
    (256, 4): {64: Tiles("mma", 64, 32, 128, stages=2, blocks=3)},  # n 256, half of the batch: 990, 1082
    (256, 8): {64: Tiles("mma", 64, 32, 128, blocks=2)},  # n 128, d 64: 1480, 1598
}
ALL_KEYS = {  # a tile has no fewer keys than a sequence. Beside the sum of both kernels with the rows of TILES
    (32, 4): {
        32: Tiles("mma", 16, 32, 64, stages=2, blocks=8),  # 344, 2240
        64: Tiles("mma", 16, 32, 64, stages=2, blocks=6, parts=2),  # 679, 3418
    },
    (32, 8): {32: Tiles("mma", 16, 32, 64, blocks=4)},  # 1118, 3846
    (64, 4): {
        32: Tiles("mma", 16, 64, 128, stages=2, blocks=4),  # 545, 1888
        64: Tiles("mma", 32, 64, 128, stages=2, blocks=2),  # 1043, 2987
    },
    (64, 8): {32: Tiles("mma", 16, 64, 128, blocks=2)},  # -
    (128, 4): {64: Tiles("mma", 32, 128, 256, stages=2)},  # 1937, 2686; 16 x 128 1875, spills with masks
    (128, 8): {64: Tiles("mma", 16, 128, 256)},  # d 64: 2805, 3608
}

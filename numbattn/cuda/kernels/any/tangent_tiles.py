"""Which tiles the kernel `tangent` takes: tables, each row with its reason.

O and tO are two sums: a warp has 16 queries of each, or half of the columns where they are wide.
"""

from ..tables import FMA, Tiles

# {(bytes of an element, largest head_dim): rows, FMA: {bytes of a row: tiles}}. TFLOP/s of six products on Hopper: 16
# heads, seqlen 4096, full; "-": not measured. The forward pass by the same instructions: 315, 364, 330 in half
# precision, 55, 58 in float32, 35, 37 in float64
TILES = {
    (2, 64): (Tiles("mma", 128, 64, 256),),  # 354; 64 x 64 346; warps of 32 queries 300
    (2, 128): (Tiles("mma", 128, 64, 256), Tiles("mma", 64, 32, 128)),  # 335, 310
    (2, 256): (  # 220, 180
        Tiles("mma", 64, 32, 256, 8, sliced=True), Tiles("mma", 32, 16, 128, 8, sliced=True),
    ),
    (4, 64): (Tiles("mma", 64, 32, 128),),  # 55
    (4, 128): (Tiles("mma", 128, 32, 256), Tiles("mma", 64, 16, 128)),  # 48, 47
    (4, 256): (Tiles("mma", 32, 8, 128, 8, sliced=True), Tiles("mma", 16, 8, 64, 8, sliced=True)),  # -
    (8, 64): (Tiles("mma", 32, 16, 128, 8, sliced=True),),  # 28
    (8, 128): (Tiles("mma", 32, 8, 128, 8, sliced=True), Tiles("mma", 16, 8, 64, 8, sliced=True)),  # 29
    (8, 256): (Tiles("mma", 16, 8, 128, 16, sliced=True), Tiles("fma", 8, 4, 64, 8)),  # -
    FMA: {
        128: Tiles("fma", 64, 32, 128, 8), 256: Tiles("fma", 32, 32, 128, 8),
        512: Tiles("fma", 16, 16, 64, 8), 1024: Tiles("fma", 16, 4, 64, 8),
        2048: Tiles("fma", 8, 2, 64, 8),
    },
}  # fmt: skip
# {(longest sequence, bytes of an element): {largest head_dim: row}}. us for 131072 tokens in 8 heads (float64:
# 65536), next to the formula by matrix products
SHORT = {
    (32, 4): {
        32: Tiles("mma", 32, 32, 64, blocks=6),  # 366, 3580: it moves twice what the forward pass does,
        64: Tiles("mma", 32, 32, 64, blocks=4),  # 735, 5041         which takes 197, 389
    },
    (32, 8): {32: Tiles("mma", 32, 16, 64, blocks=4)},  # 370, 2622
    (64, 4): {32: Tiles("mma", 32, 32, 64, blocks=6)},  # 581, 5248; with 64 queries 608
    (64, 8): {32: Tiles("mma", 64, 16, 128, blocks=2)},  # 485, 3720
    (256, 4): {32: Tiles("mma", 32, 32, 64, blocks=6)},  # n 128: 1048, 8925
}
# With O2, a third sum: twice as many warps share rows of wide ones. "-": not measured
TILES_SECOND = {
    (2, 64): (Tiles("mma", 64, 32, 128),),
    (2, 128): (Tiles("mma", 32, 32, 128, 8, sliced=True),),
    (2, 256): (Tiles("mma", 32, 16, 256, 16, sliced=True),),
    (4, 64): (Tiles("mma", 64, 16, 128),),
    (4, 128): (Tiles("mma", 32, 16, 128, 8, sliced=True),),
    (4, 256): (Tiles("mma", 16, 8, 128, 16, sliced=True),),
    (8, 64): (Tiles("mma", 32, 16, 128, 8, sliced=True),),
    (8, 128): (Tiles("mma", 16, 8, 128, 16, sliced=True),),
    (8, 256): (Tiles("fma", 8, 4, 128, 16),),
    FMA: {
        128: Tiles("fma", 32, 32, 128, 8), 256: Tiles("fma", 32, 16, 128, 8),
        512: Tiles("fma", 16, 16, 128, 8), 1024: Tiles("fma", 16, 4, 128, 8),
        2048: Tiles("fma", 8, 2, 128, 16),
    },
}
SHORT_SECOND = {(128, 4): {32: Tiles("mma", 32, 32, 64, blocks=4)}}

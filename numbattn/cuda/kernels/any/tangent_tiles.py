"""Which tiles the kernel `tangent` takes: tables, each row with its reason."""

from ..tables import Tiles

# (with tensor cores, bytes of an element): {largest head_dim: rows}
TILES = {
    (True, 2): {
        64: (Tiles("mma", 128, 64, 256),),
        128: (Tiles("mma", 64, 32, 128),),
        256: (Tiles("mma", 64, 32, 256, 8),),
    },
    (True, 4): {
        64: (Tiles("mma", 128, 32, 256), Tiles("mma", 64, 32, 128)),
        128: (Tiles("mma", 128, 16, 256), Tiles("mma", 64, 16, 128)),
        256: (Tiles("mma", 64, 16, 256, 8), Tiles("mma", 32, 16, 128, 8)),
    },
    (True, 8): {
        64: (Tiles("mma", 64, 16, 128),),
        128: (Tiles("mma", 64, 16, 256, 8), Tiles("mma", 32, 16, 128, 8)),
        256: (Tiles("fma", 16, 16, 64, 8), Tiles("fma", 16, 8, 64, 8)),
    },
    (False, 2): {
        64: (Tiles("fma", 64, 32, 128, 8),),
        128: (Tiles("fma", 32, 32, 128, 8),),
        256: (Tiles("fma", 16, 16, 64, 8),),
    },
    (False, 4): {
        64: (Tiles("fma", 32, 32, 128, 8),),
        128: (Tiles("fma", 16, 16, 64, 8),),
        256: (Tiles("fma", 16, 8, 64, 8),),
    },
    (False, 8): {
        64: (Tiles("fma", 16, 16, 64, 8),),
        128: (Tiles("fma", 16, 8, 64, 8),),
        256: (Tiles("fma", 16, 4, 128, 8),),
    },
}
SHORT = {}

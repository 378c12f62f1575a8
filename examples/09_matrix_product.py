"""A matrix product on Hopper in the tile language: C = A B^T, by TMA, a pipeline and wgmma.

    python examples/09_matrix_product.py            # 8192 x 8192 on a GPU, compared with cuBLAS; simulated without one

Persistent and warp-specialised: in each block one thread of the last warpgroup is the producer and loads tiles of A and
B by TMA; two warpgroups are the consumers, with 64 rows of C each. Needs one of numbattn's extras cu12 and cu13.
"""

from importlib import import_module
from importlib.util import find_spec

import numpy as np

from numbattn.cuda.kernel import TensorMap, launch
from numbattn.cuda.tile import (
    WARPGROUP,
    Alignment,
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    aligned,
    block_index,
    decrease_registers,
    device,
    dot,
    full,
    grid_size,
    increase_registers,
    init_pipelines,
    release,
    save,
    shape,
    stage,
    sync_threads,
    thread_index,
    tma_load,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)

ROWS, TILE_N, TILE_K, STAGES, CONSUMERS = 64, 256, 64, 4, 2     # a consumer's rows; a tile's columns; a stage's depth
TILE_M, PRODUCER, GROUP = ROWS * CONSUMERS, WARPGROUP * CONSUMERS, 16  # row tiles that share columns of B in L2
C_TILE, VECTORS = wgmma(TILE_N), Alignment(16)
shared = SharedMemory()
A_PIPELINE = Pipeline.within(shared, shared.boxes(ROWS, TILE_K, np.float16, STAGES * CONSUMERS), readers=1)
B_PIPELINE = Pipeline.within(shared, shared.boxes(TILE_N, TILE_K, np.float16, STAGES), readers=CONSUMERS)


@device
def tile_at(number, tiles_n):
    """The first row and column of a tile of C."""
    group, number = number // (GROUP * tiles_n), number % (GROUP * tiles_n)
    return TILE_M * (GROUP * group + number % GROUP), TILE_N * (number // GROUP)


@device
def produce(mA, mB, tiles, tiles_n, k_blocks):
    A, B = stage(A_PIPELINE, 0), stage(B_PIPELINE, 0)
    for number in range(block_index(), tiles, grid_size()):
        m0, n0 = tile_at(number, tiles_n)
        for k in range(k_blocks):
            for row in range(0, TILE_M, ROWS):
                acquire(A)
                tma_load(A, mA, 0, k, m0 + row)
                A = advance(A, 1)
            acquire(B)
            tma_load(B, mB, 0, k, n0)
            B = advance(B, 1)


@device
def consume(mC, tiles, tiles_n, k_blocks):
    A, B = stage(A_PIPELINE, warpgroup_index()), stage(B_PIPELINE, 0)
    for number in range(block_index(), tiles, grid_size()):
        m0, n0 = tile_at(number, tiles_n)
        wait(A)
        wait(B)
        C = dot(full(C_TILE, np.float32(0)), A.tile, B.tile.T)
        for _ in range(1, k_blocks):
            next_A, next_B = advance(A, CONSUMERS), advance(B, 1)
            wait(next_A)
            wait(next_B)
            C = wgmma_wait(dot(C, next_A.tile, next_B.tile.T), 1)   # this one is in flight, the previous one is over
            release(A)
            release(B)
            A, B = next_A, next_B
        C = wgmma_wait(C, 0)
        release(A)
        release(B)
        A, B = advance(A, CONSUMERS), advance(B, 1)
        save(aligned(mC[:, n0 : n0 + TILE_N], VECTORS), C, m0 + ROWS * warpgroup_index())


def matrix_product(mA, mB, mC, depth):
    """mA and mB are tensor maps of panels of TILE_K columns, (1, depth / TILE_K, rows, TILE_K): see `panels`."""
    init_pipelines(A_PIPELINE)
    init_pipelines(B_PIPELINE)
    sync_threads()
    m, n = shape(mC)
    tiles_n, k_blocks = (n + TILE_N - 1) // TILE_N, (depth + TILE_K - 1) // TILE_K
    tiles = (m + GROUP * TILE_M - 1) // (GROUP * TILE_M) * GROUP * tiles_n
    if warpgroup_index() == CONSUMERS:
        decrease_registers(40)
        if thread_index() == PRODUCER:
            produce(mA, mB, tiles, tiles_n, k_blocks)
    else:
        increase_registers(232)
        consume(mC, tiles, tiles_n, k_blocks)


def panels(x):
    """A matrix as panels of TILE_K columns, not copied."""
    return x.reshape(len(x), -1, TILE_K).swapaxes(0, 1)[None]


def product(a, b, blocks):
    """a b^T for float16 matrices whose rows are multiples of TILE_K long."""
    c = xp.empty((len(a), len(b)), np.float16)
    maps = TensorMap(panels(a), A_PIPELINE.tile.box), TensorMap(panels(b), B_PIPELINE.tile.box)
    launch(matrix_product, blocks, WARPGROUP * (CONSUMERS + 1), shared.nbytes, *maps, c, np.int32(a.shape[1]))
    return c


if __name__ == "__main__":
    on_gpu = find_spec("cupy") and import_module("cupy").is_available()
    xp = import_module("cupy" if on_gpu else "numpy")
    m, n, k, blocks = (8192, 8192, 8192, 132) if on_gpu else (100, 304, 192, 2)
    rng = np.random.default_rng(0)
    a, b = (xp.asarray(rng.standard_normal((rows, k), dtype=np.float32).astype(np.float16)) for rows in (m, n))
    c, wanted = product(a, b, blocks), a.astype(np.float32) @ b.astype(np.float32).T
    error = float(abs(c - wanted).max() / abs(wanted).max())
    print(f"c {c.shape}, {'on the GPU' if on_gpu else 'simulated'}, largest difference from float32: {error:.1e}")
    if on_gpu:
        from cupyx.profiler import benchmark

        calls = {"numbattn": lambda: product(a, b, blocks), "cuBLAS": lambda: a @ b.T}
        times = {name: [] for name in calls}
        for _ in range(20):                                     # in turn: a GPU at its power limit slows down
            for name, call in calls.items():
                times[name].extend(benchmark(call, n_repeat=5, n_warmup=1).gpu_times[0])
        for name in calls:
            print(f"{name}: {2 * m * n * k / np.median(times[name]) / 1e12:.0f} TFLOP/s")

"""An attention of your own in the tile language: scores capped softly, S = cap * tanh(S / cap), before the softmax.

    python examples/03_own_attention.py

With a GPU, Numba compiles the kernel for it; without one, the same function runs in Python, thread by thread.
Needs one of numbattn's extras cu12 and cu13.
"""

import math
from importlib import import_module
from importlib.util import find_spec

import numpy as np
from numba import cuda

from numbattn.cuda.tile import (
    SharedMemory,
    allocate,
    block_index,
    col_index,
    copy_layout,
    device,
    dot,
    exp2,
    full,
    load,
    part_sum,
    put,
    reciprocal,
    row_max,
    row_sum,
    save,
    simt,
    simulate,
    sync_threads,
    sync_warp,
    where,
)

# what a kernel captures is compiled in; numbers have a type, or they make it compute in float64
HEAD_DIM, CAP = 64, 5.0
TILE_M, TILE_N, THREADS = np.int32(64), np.int32(32), 128  # queries and keys of a tile
SCALE_OVER_CAP, CAP_LOG2_E = np.float32(HEAD_DIM**-0.5 / CAP), np.float32(CAP * math.log2(math.e))
TWO_LOG2_E, ZERO, NO_SCORE = np.float32(2 * math.log2(math.e)), np.float32(0), np.float32(-np.inf)

# layouts: which thread holds which elements. 8 lanes share a row of S and of O, in runs of 1 and 4 columns
S_TILE, O_TILE = simt(TILE_M, TILE_N, THREADS, 8, 1), simt(TILE_M, HEAD_DIM, THREADS, 8, 4)
ROWS, PARTS = S_TILE.row_vector(), S_TILE.row_parts()  # a number for each row; a summand of it in each thread
COPY_Q, COPY_K = copy_layout(TILE_M, HEAD_DIM, THREADS, 4), copy_layout(TILE_N, HEAD_DIM, THREADS, 4)

# places in the memory that the threads of a block share
shared = SharedMemory()
SHARED_Q, SHARED_K = shared.tile(TILE_M, HEAD_DIM, np.float32), shared.tile(TILE_N, HEAD_DIM, np.float32)
SHARED_V, SHARED_P = shared.tile(TILE_N, HEAD_DIM, np.float32), shared.tile(TILE_M, TILE_N, np.float32)


@device
def tanh(x):
    return 1 - 2 * reciprocal(exp2(x * TWO_LOG2_E) + 1)


def kernel(mQ, mK, mV, mO):
    """A block computes TILE_M rows of O. The arrays are (batch, heads, seqlen, HEAD_DIM)."""
    m0, head, batch = np.int32(block_index() * TILE_M), block_index(1), block_index(2)
    Q, K, V = mQ[batch, head], mK[batch, head], mV[batch, head]
    sQ, sK, sV, sP = allocate(SHARED_Q), allocate(SHARED_K), allocate(SHARED_V), allocate(SHARED_P)
    put(sQ, load(Q, COPY_Q, m0))
    O, m, l = full(O_TILE, ZERO), full(ROWS, NO_SCORE), full(PARTS, ZERO)
    seqlen_k, n0 = np.int32(K.shape[0]), np.int32(0)
    while n0 < seqlen_k:
        put(sK, load(K, COPY_K, n0))                            # beyond the last key: zeros
        put(sV, load(V, COPY_K, n0))
        sync_threads()                                      # Q, K and V are there
        S = dot(full(S_TILE, ZERO), sQ, sK.T)                   # Alg. 1 line 9: S = Q K^T
        S = CAP_LOG2_E * tanh(S * SCALE_OVER_CAP)               # this attention's own line; log2(e), as we use exp2
        S = where(col_index(S_TILE, n0) < seqlen_k, S, NO_SCORE)
        m_new = row_max(S, m)                                   # line 11: m_new = max(m, rowmax(S))
        P, alpha = exp2(S - m_new), exp2(m - m_new)             # line 10: P = exp(S - m_new)
        m, l = m_new, part_sum(P, l * alpha)                    # line 11: l = alpha l + rowsum(P)
        put(sP, P)
        sync_warp()                                             # a row of P is written and read by the same warp
        O = dot(O * alpha, sP, sV)                              # line 12: O = alpha O + P V
        n0 += TILE_N
        sync_threads()                                      # K and V are done with
    save(mO[batch, head], O * reciprocal(row_sum(l, ZERO)), m0)  # line 12: O = O / l


def softcapped_attention(q, k, v):
    """softmax(cap tanh(Q K^T / sqrt(HEAD_DIM) / cap)) V of contiguous float32 arrays."""
    o = xp.empty_like(q)
    batch, heads, seqlen_q, _ = q.shape
    grid = math.ceil(seqlen_q / TILE_M), heads, batch
    if simulated:
        simulate(kernel, grid, THREADS, shared.nbytes, q, k, v, o)
    else:
        compiled[grid, THREADS, 0, shared.nbytes](q, k, v, o)  # 0 is the stream that CuPy uses if not told otherwise
    return o


def formula(q, k, v):
    """The same in float64, as one writes it."""
    q, k, v = (x.astype(xp.float64) for x in (q, k, v))
    S = CAP * xp.tanh(q @ k.swapaxes(-1, -2) * HEAD_DIM**-0.5 / CAP)
    P = xp.exp(S - S.max(axis=-1, keepdims=True))
    return P / P.sum(axis=-1, keepdims=True) @ v


if __name__ == "__main__":
    simulated = not (find_spec("cupy") and import_module("cupy").is_available())
    xp = import_module("numpy" if simulated else "cupy")
    compiled = None if simulated else cuda.jit(kernel)
    batch, heads, seqlen_q, seqlen_k = (1, 2, 70, 50) if simulated else (2, 8, 2000, 3000)
    rng = np.random.default_rng(0)
    q, k, v = (xp.asarray(rng.standard_normal((batch, heads, seqlen, HEAD_DIM), dtype=np.float32))
               for seqlen in (seqlen_q, seqlen_k, seqlen_k))
    q *= 10  # so that the cap matters
    error = abs(softcapped_attention(q, k, v) - formula(q, k, v)).max()
    print(f"o {q.shape}, {'simulated' if simulated else 'on the GPU'}, largest difference from float64: {error:.1e}")

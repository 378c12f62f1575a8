"""An attention of your own in the tile language: softly capped scores, S = cap * tanh(S / cap), before the softmax.

    python examples/03_own_attention.py

On a GPU the kernel is compiled; without one, the same function runs in plain Python, thread by thread.
Needs one of numbattn's extras cu12 and cu13.
"""

from importlib import import_module
from importlib.util import find_spec

import numpy as np

from numbattn.cuda.kernel import launch
from numbattn.cuda.tile import (
    SharedMemory,
    allocate,
    block_index,
    col_index,
    copy_layout,
    dot,
    exp,
    full,
    load,
    part_sum,
    put,
    row_max,
    row_sum,
    save,
    shape,
    simt,
    sync_threads,
    sync_warp,
    tanh,
    where,
)

# what a kernel captures is compiled into it
HEAD_DIM, CAP = 64, 5.0
SCALE, ZERO, NO_SCORE = HEAD_DIM**-0.5, np.float32(0), np.float32(-np.inf)
TILE_M, TILE_N, THREADS = 64, 32, 128  # queries and keys in a tile

# layouts: which thread holds which elements. 8 lanes share a row of S and of O, in runs of 1 and 4 columns
S_TILE, O_TILE = simt(TILE_M, TILE_N, THREADS, 8, 1), simt(TILE_M, HEAD_DIM, THREADS, 8, 4)
ROWS, PARTS = S_TILE.row_vector(), S_TILE.row_parts()  # a number per row; and each thread's summand of it
COPY_Q, COPY_K = copy_layout(TILE_M, HEAD_DIM, THREADS, 4), copy_layout(TILE_N, HEAD_DIM, THREADS, 4)

# places in the memory that a block's threads share
shared = SharedMemory()
SHARED_Q, SHARED_K = shared.tile(TILE_M, HEAD_DIM, np.float32), shared.tile(TILE_N, HEAD_DIM, np.float32)
SHARED_V, SHARED_P = shared.tile(TILE_N, HEAD_DIM, np.float32), shared.tile(TILE_M, TILE_N, np.float32)


def softcapped(mQ, mK, mV, mO):
    """A block computes TILE_M rows of O. The arrays are (batch, heads, seqlen, HEAD_DIM)."""
    m0, head, batch = TILE_M * block_index(0), block_index(1), block_index(2)
    Q, K, V = mQ[batch, head], mK[batch, head], mV[batch, head]
    sQ, sK, sV, sP = allocate(SHARED_Q), allocate(SHARED_K), allocate(SHARED_V), allocate(SHARED_P)
    put(sQ, load(Q, COPY_Q, m0))
    O, m, l = full(O_TILE, ZERO), full(ROWS, NO_SCORE), full(PARTS, ZERO)
    seqlen_k, _ = shape(K)
    for n0 in range(0, seqlen_k, TILE_N):
        put(sK, load(K, COPY_K, n0))                            # beyond the last key: zeros
        put(sV, load(V, COPY_K, n0))
        sync_threads()                                          # Q, K and V are there
        S = dot(S_TILE, sQ, sK.T)                   # Alg. 1 line 9: S = Q K^T
        S = CAP * tanh(S * (SCALE / CAP))                       # this attention's own line
        S = where(col_index(S_TILE, n0) < seqlen_k, S, NO_SCORE)
        m_new = row_max(S, m)                                   # line 11: m_new = max(m, rowmax(S))
        P, alpha = exp(S - m_new), exp(m - m_new)               # line 10: P = exp(S - m_new)
        m, l = m_new, part_sum(P, l * alpha)                    # line 11: l = alpha l + rowsum(P)
        put(sP, P)
        sync_warp()                                             # a row of P is written and read by the same warp
        O = dot(O * alpha, sP, sV)                              # line 12: O = alpha O + P V
        sync_threads()                                          # K and V may be overwritten
    save(mO[batch, head], O / row_sum(l), m0)                   # line 12: O = O / l


def softcapped_attention(q, k, v):
    """softmax(cap tanh(Q K^T / sqrt(HEAD_DIM) / cap)) V of float32 arrays."""
    o = xp.empty_like(q)
    batch, heads, seqlen_q, _ = q.shape
    launch(softcapped, (-(-seqlen_q // TILE_M), heads, batch), THREADS, shared.nbytes, q, k, v, o)
    return o


def formula(q, k, v):
    """The same in float64, as one would write it."""
    q, k, v = (x.astype(xp.float64) for x in (q, k, v))
    S = CAP * xp.tanh(q @ k.swapaxes(-1, -2) * SCALE / CAP)
    P = xp.exp(S - S.max(axis=-1, keepdims=True))
    return P / P.sum(axis=-1, keepdims=True) @ v


if __name__ == "__main__":
    on_gpu = find_spec("cupy") and import_module("cupy").is_available()
    xp = import_module("cupy" if on_gpu else "numpy")
    batch, heads, seqlen_q, seqlen_k = (2, 8, 2000, 3000) if on_gpu else (1, 2, 70, 50)
    rng = np.random.default_rng(0)
    q, k, v = (xp.asarray(rng.standard_normal((batch, heads, seqlen, HEAD_DIM), dtype=np.float32))
               for seqlen in (seqlen_q, seqlen_k, seqlen_k))
    q *= 10  # so that the cap matters
    error = abs(softcapped_attention(q, k, v) - formula(q, k, v)).max()
    print(f"o {q.shape}, {'on the GPU' if on_gpu else 'simulated'}, largest difference from float64: {error:.1e}")

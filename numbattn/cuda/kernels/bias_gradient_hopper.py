"""The gradient of a bias on Hopper (wgmma, TMA): each block adds up dS over all score matrices that one tile serves.

As `score_gradient.bias_gradient`, for a bias whose tiles TMA loads: see `score.boxed_bias`. The tile itself stays in
shared memory; S, P and dP are computed anew for each matrix, 64 queries a consumer. One thread of the last warpgroup is
the producer, which TMA-loads the tiles of Q, K, dO and V of the next matrix meanwhile.
"""

import numpy as np
from numba.cuda import types

from ..spec import MASK, SCORE, Line, Own, Spec
from ..tile import (
    INDEX,
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    block_index,
    convert,
    decrease_registers,
    device,
    dot,
    exp2,
    full,
    increase_registers,
    init_pipeline,
    launch_dependents,
    load,
    minimum,
    prefetch_tensor_map,
    release,
    shape,
    stage,
    sync_threads,
    sync_warpgroup,
    thread_index,
    tma_load,
    tma_load_part,
    wait,
    wait_on_dependencies,
    warpgroup_index,
    wgmma,
    wgmma_wait,
    where,
)
from .forward_hopper import head_dims, takes, warp_specialised
from .gradients import (
    BIAS,
    CONSUMERS,
    GIVEN,
    LINE,
    PRODUCER,
    ROWS,
    ZERO,
    Tiles,
    dtype_of_bias,
    save_step,
    size_of,
)
from .layouts import DTYPES, array_type
from .score import score_steps_ahead, scores_type
from .score_gradient import OWN_NUMBERS, matrices_of
from .tables import compiled_in
from .visibility import band_of, element_test, keys_in_sight, needs_test, sight_type

REGISTERS = {64: (40, 232), 128: (24, 240)}  # {tile_n: of the producer's thread, of a consumer's}


def bias_gradient_hopper(
    *, dtype, out_dtype, head_dim, head_dim_v, tile_m, tile_n, stages, mask, score, dropout, behind, boxed, nbytes
):  # fmt: skip
    """The gradient of part number `behind`, whose dtype is `boxed`. stages: of the pipelines of K and of V."""
    dtype, bias = DTYPES[dtype], DTYPES[boxed]
    S_TILE = wgmma(tile_n)
    ROW_VECTOR, shared = S_TILE.row_vector(), SharedMemory()
    SHARED_Q, SHARED_DO = (shared.boxes(ROWS, cols, dtype, stages * CONSUMERS) for cols in (head_dim, head_dim_v))
    SHARED_K, SHARED_V = (shared.boxes(tile_n, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    SHARED_B = shared.boxes(ROWS, tile_n, bias, CONSUMERS)
    K_PIPELINE, V_PIPELINE = (Pipeline.within(shared, tile, CONSUMERS, 1 + CONSUMERS) for tile in (SHARED_K, SHARED_V))
    B_PIPELINE = Pipeline.within(shared, SHARED_B.of_stages(1), 1, fills=CONSUMERS)
    (OF_PRODUCER, OF_CONSUMER), TILE_M, TILE_N = REGISTERS[tile_n], tile_m, tile_n
    band_at, sees, tested = band_of(mask), element_test(mask, S_TILE), needs_test(mask)
    look_up, apply, pull_back, _ = score_steps_ahead(score, S_TILE, np.float32, behind=behind, is_boxed=True)
    save_rows = save_step(bias, out_dtype, tile_n, nbytes)

    @device
    def in_sight(sight, batch, head, m0, n0, seqlen_q):
        """Whether a query of the tile sees a key of it."""
        first, end = keys_in_sight(band_at(sight, batch, head), m0, minimum(m0 + TILE_M, seqlen_q))
        return first < n0 + TILE_N and n0 < end

    @device
    def load_tiles(mQ, mK, mV, mDO, biases, sight, own, group_size, m0, n0, seqlen_q):
        """The producer, one thread."""
        K, V, B = stage(K_PIPELINE, 0), stage(V_PIPELINE, 0), stage(B_PIPELINE, 0)
        own_batch, own_head, batch_end, head_end = own
        for consumer in range(CONSUMERS):
            tma_load_part(B, allocate(SHARED_B, consumer), biases[0], own_batch, own_head, m0 + consumer * ROWS, n0)
        for batch in range(own_batch, batch_end):
            for head in range(own_head, head_end):
                if in_sight(sight, batch, head, m0, n0, seqlen_q):
                    acquire(K)
                    tma_load(K, mK, batch, head // group_size, n0)
                    for consumer in range(CONSUMERS):
                        place = allocate(SHARED_Q, K.index * CONSUMERS + consumer)
                        tma_load_part(K, place, mQ, batch, head, m0 + consumer * ROWS, 0)
                    acquire(V)
                    tma_load(V, mV, batch, head // group_size, n0)
                    for consumer in range(CONSUMERS):
                        place = allocate(SHARED_DO, V.index * CONSUMERS + consumer)
                        tma_load_part(V, place, mDO, batch, head, m0 + consumer * ROWS, 0)
                    K, V = advance(K, 1), advance(V, 1)

    @device
    def ds_of(K, V, mLse, mDelta, sight, scores, scale_log2, batch, head, m_tile, m0, n0):
        """dS behind the part, of this consumer's queries."""
        consumer, band = warpgroup_index(), band_at(sight, batch, head)
        lse, D = load(mLse[batch, head], ROW_VECTOR, m0), load(mDelta[batch, head], ROW_VECTOR, m0)
        wait(K)
        S = dot(S_TILE, allocate(SHARED_Q, K.index * CONSUMERS + consumer), K.tile.T)   # Alg. 4 line 11: S = Q K^T
        wait(V)
        dP = dot(S_TILE, allocate(SHARED_DO, V.index * CONSUMERS + consumer), V.tile.T)     # line 17: dP = dO V^T
        S = wgmma_wait(S, 1)
        release(K)
        found = look_up(scores, allocate(SHARED_B, consumer), batch, head, m0, n0)
        S, F = apply(S, found, scores, batch, head, m0, n0)
        P = exp2(S * scale_log2 - lse)                          # line 13: P = exp(S - lse)
        dP = wgmma_wait(dP, 0)
        release(V)
        dS = pull_back(P * (dP - D), F)                         # line 20
        n_tile = n0 // TILE_N
        if tested(sight, band, batch, head, m_tile, n_tile, m0, m0 + ROWS, n0, n0 + TILE_N):
            dS = where(sees(sight, band, batch, head, m0, n0), dS, 0)   # line 12: what is masked may be NaN
        return dS

    @device
    def compute(mDB, mLse, mDelta, sight, scores, own, scale_log2, adds, m_tile, n0, seqlen_q):
        """The consumers, whole warpgroups."""
        K, V, B = stage(K_PIPELINE, 0), stage(V_PIPELINE, 0), stage(B_PIPELINE, 0)
        own_batch, own_head, batch_end, head_end = own
        dB, consumer = full(S_TILE, ZERO), warpgroup_index()
        m0 = m_tile * TILE_M + consumer * ROWS
        wait(B)
        for batch in range(own_batch, batch_end):
            for head in range(own_head, head_end):
                if in_sight(sight, batch, head, m_tile * TILE_M, n0, seqlen_q):
                    dB = dB + ds_of(K, V, mLse, mDelta, sight, scores, scale_log2, batch, head, m_tile, m0, n0)
                    K, V = advance(K, 1), advance(V, 1)
        target = mDB[own_batch, own_head][:, n0:]
        if adds:
            dB = dB + convert(load(target, S_TILE, m0), np.float32)
        sync_warpgroup()                                        # all have read the bias
        save_rows(target, dB, allocate(SHARED_B, consumer), m0)

    def kernel(
        mQ, mK, mV, mDO, biases, mDB, mLse, mDelta, sight, scores, group_size, scale_log2, own_batches, own_heads, adds
    ):
        batches, heads, _ = shape(mLse)
        _, _, seqlen_q, seqlen_k = shape(mDB)
        m_count, n_count = (seqlen_q + TILE_M - 1) // TILE_M, (seqlen_k + TILE_N - 1) // TILE_N
        tile, matrix = block_index() % (m_count * n_count), block_index() // (m_count * n_count)
        m_tile, n0 = tile // n_count, tile % n_count * TILE_N
        own = matrices_of(matrix, own_batches, own_heads, batches, heads)
        init_pipeline(K_PIPELINE)
        init_pipeline(V_PIPELINE)
        init_pipeline(B_PIPELINE)
        launch_dependents()
        wait_on_dependencies()
        sync_threads()
        if warpgroup_index() == CONSUMERS:
            decrease_registers(OF_PRODUCER)
            if thread_index() == PRODUCER:
                prefetch_tensor_map(mQ)
                prefetch_tensor_map(mDO)
                load_tiles(mQ, mK, mV, mDO, biases, sight, own, group_size, m_tile * TILE_M, n0, seqlen_q)
        else:
            increase_registers(OF_CONSUMER)
            compute(mDB, mLse, mDelta, sight, scores, own, scale_log2, adds, m_tile, n0, seqlen_q)

    signature = types.void(
        *[types.uint64] * 4, types.UniTuple(types.uint64, 1), array_type(DTYPES[out_dtype], 4), LINE, LINE,
        sight_type(mask), scores_type(score, dtype), INDEX, types.float32, INDEX, INDEX, INDEX,
    )  # fmt: skip
    tiles = SHARED_Q, SHARED_K, SHARED_V, SHARED_DO, SHARED_B
    return warp_specialised(kernel, signature, CONSUMERS, shared, tiles)


# ------------------------------------------------------------------------------------------------------------- tiles
BIASES = {64: Tiles(128, 128, 2), 128: Tiles(128, 64, 2)}
BESIDE_OTHERS = BIASES | {64: Tiles(128, 64, 2)}  # parts of a score, which take registers


def hopper_spec_of(name, *, out_dtype, behind, weight, sums_rows, sums_cols):
    """The Spec of the kernel that writes to an array of this name."""

    def takes_it(work):
        whole = not (weight or sums_rows or sums_cols)
        return whole and takes(work) and size_of(work) in BIASES and bool(dtype_of_bias(work))

    return Spec(
        bias_gradient_hopper,
        (*GIVEN, BIAS, Own(name), Line("lse_log2", padded=True), Line("delta", padded=True), MASK, SCORE, "group_size",
         "scale_log2", *OWN_NUMBERS),
        tiles=lambda work: ((BESIDE_OTHERS if len(work.score) > 1 else BIASES)[size_of(work)],),
        parameters=lambda work, tiles: compiled_in(work, tiles, head_dims(work.problem)) | {
            "out_dtype": out_dtype, "behind": behind, "boxed": dtype_of_bias(work), "nbytes": work.nbytes,
        },
        takes=takes_it,
        arch="a",
    )  # fmt: skip

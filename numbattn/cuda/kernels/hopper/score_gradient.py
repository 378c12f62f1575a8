"""Gradients of a score's arrays on Hopper (wgmma, TMA): each block adds up dS over a share of the score matrices.

As in `any.score_gradient`, there are `hopper_bias_gradient`, for a bias whose tiles TMA loads (see
`scores.number_of_tma_bias`) and which stays in shared memory, and `hopper_diagonal_sums` for tables. S, P and dP are
recomputed for each tile, 64 queries a consumer. One thread of the last warpgroup is the producer, which meanwhile
TMA-loads the tiles of Q, K, dO and V of the next tile.
"""

import numpy as np

from ...tile import (
    WARPGROUP,
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    block_index,
    convert,
    device,
    dot,
    full,
    grid_size,
    load,
    minimum,
    prefetch_tensor_map,
    release,
    save,
    shape,
    stage,
    sync_warpgroup,
    sync_warpgroups,
    tma_load,
    tma_load_part,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
    where,
)
from ...words.arguments import Own, Statistic, TmaBias
from ...words.signatures import signature_of
from ...words.spec import Route, Spec
from ...words.tiers import WGMMA
from ..any.score_gradient import DIAGONALS, OWN_NUMBERS
from ..any.score_gradient_ds import DsArguments
from ..scores import (
    ENTRIES,
    SCORE,
    dtype_of_tma_bias,
    number_of_tma_bias,
    parts_of,
    score_steps_ahead,
)
from ..shared.diagonals import Diagonal, diagonal_steps
from ..shared.layouts import DTYPES
from ..shared.recompute import recompute
from ..shared.shares import score_matrix, share_of
from ..shared.visibility import MASK, band_of, element_test, is_looked_up, needs_test, visible_keys
from ..shared.warps import source_of, warp_specialised
from ..tables import compiled_in
from .backward_steps import CONSUMERS, GIVEN, ROWS, ZERO, WgmmaTiles, save_step, size_of
from .forward_tiles import head_dims, is_for_hopper
from .tma_bias import load_bias_step

REGISTERS = {64: (40, 232), 128: (24, 240)}  # {tile_n: of the producer's thread, of a consumer's}


def ds_steps(shared, *, dtype, head_dim, head_dim_v, tiles, mask, score, after, by_tma, **others):
    """Steps that compute tiles of dS after part number `after` of the score: the layout of S; pipelines of Q and K, and
    of dO and V; the tiles that TMA loads; and device functions. The stages of `tiles` are those of the pipelines."""
    dtype, S_TILE, (tile_m, tile_n, stages, _) = DTYPES[dtype], wgmma(tiles.tile_n), tiles
    ROW_VECTOR, TILE_M, TILE_N = S_TILE.row_vector(), tile_m, tile_n
    SHARED_Q, SHARED_DO = (shared.boxes(ROWS, cols, dtype, stages * CONSUMERS) for cols in (head_dim, head_dim_v))
    SHARED_K, SHARED_V = (shared.boxes(tile_n, cols, dtype, stages) for cols in (head_dim, head_dim_v))
    K_PIPELINE, V_PIPELINE = (Pipeline.within(shared, tile, CONSUMERS, 1 + CONSUMERS) for tile in (SHARED_K, SHARED_V))
    band_at, sees, tested = band_of(mask), element_test(mask, S_TILE), needs_test(mask)
    look_up, apply, pull_back, _ = score_steps_ahead(score, S_TILE, np.float32, after=after, by_tma=by_tma)

    @device
    def visible(mask, batch, head, m0, n0, seqlen_q):
        """Whether a query of the tile sees a key of it."""
        first, end = visible_keys(band_at(mask, batch, head), m0, minimum(m0 + TILE_M, seqlen_q))
        return first < n0 + TILE_N and n0 < end

    @device
    def load_tile(K, V, given, batch, head, m0, n0):
        """Load the operands of the tile of dS from query m0 and key n0 on."""
        (mQ, mK, mV, mDO), head_k = given.inputs, head // given.group_size
        acquire(K)
        tma_load(K, mK, batch, head_k, n0)
        for consumer in range(CONSUMERS):
            place = allocate(SHARED_Q, K.index * CONSUMERS + consumer)
            tma_load_part(K, place, mQ, batch, head, m0 + consumer * ROWS, 0)
        acquire(V)
        tma_load(V, mV, batch, head_k, n0)
        for consumer in range(CONSUMERS):
            place = allocate(SHARED_DO, V.index * CONSUMERS + consumer)
            tma_load_part(V, place, mDO, batch, head, m0 + consumer * ROWS, 0)

    @device
    def load_tiles(K, V, given, at, seqlen_q):
        """The producer, one thread: load all tiles of a Diagonal."""
        for matrix in range(at.share.first, at.share.end):
            batch, head = score_matrix(at.share, matrix)
            for m_tile in range(at.m_first, at.m_end):
                m0, n0 = m_tile * TILE_M, at.n_first + (m_tile - at.m_first) * TILE_M
                if visible(given.mask, batch, head, m0, n0, seqlen_q):
                    load_tile(K, V, given, batch, head, m0, n0)
                    K, V = advance(K, 1), advance(V, 1)
        return K, V

    @device
    def ds_of(K, V, bias, given, scale_log2, batch, head, m_tile, n0):
        """A consumer: dS after the part, for its queries. bias: its place, if TMA has loaded it, else ()."""
        (mLse, mDelta), mask, scores = given.statistics, given.mask, given.scores
        consumer, band = warpgroup_index(), band_at(mask, batch, head)
        m0 = m_tile * TILE_M + consumer * ROWS
        lse, D = load(mLse[batch, head], ROW_VECTOR, m0), load(mDelta[batch, head], ROW_VECTOR, m0)
        wait(K)
        S = dot(S_TILE, allocate(SHARED_Q, K.index * CONSUMERS + consumer), K.tile.T)   # Alg. 4 line 11: S = Q K^T
        wait(V)
        dP = dot(S_TILE, allocate(SHARED_DO, V.index * CONSUMERS + consumer), V.tile.T)     # line 17: dP = dO V^T
        S = wgmma_wait(S, 1)
        release(K)
        S, F = apply(S, look_up(scores, bias, batch, head, m0, n0), scores, batch, head, m0, n0)
        P = recompute(S, lse, scale_log2)                       # line 13: P = exp(S - lse)
        dP = wgmma_wait(dP, 0)
        release(V)
        dS = pull_back(P * (dP - D), F)                         # line 20
        n_tile = n0 // TILE_N
        if tested(mask, band, batch, head, m_tile, n_tile, m0, m0 + ROWS, n0, n0 + TILE_N):
            dS = where(sees(mask, band, batch, head, m0, n0), dS, 0)   # line 12: what is masked may be NaN
        return dS

    @device
    def add_tiles(K, V, bias, given, scale_log2, at, seqlen_q):
        """The consumers, whole warpgroups: the sum of dS over all tiles of a Diagonal."""
        total = full(S_TILE, ZERO)
        for matrix in range(at.share.first, at.share.end):
            batch, head = score_matrix(at.share, matrix)
            for m_tile in range(at.m_first, at.m_end):
                n0 = at.n_first + (m_tile - at.m_first) * TILE_M
                if visible(given.mask, batch, head, m_tile * TILE_M, n0, seqlen_q):
                    dS = ds_of(K, V, bias, given, scale_log2, batch, head, m_tile, n0)
                    total = total + dS
                    K, V = advance(K, 1), advance(V, 1)
        return total, K, V

    maps = SHARED_Q, SHARED_K, SHARED_V, SHARED_DO
    return S_TILE, (K_PIPELINE, V_PIPELINE), maps, load_tiles, add_tiles


def hopper_bias_gradient(*, out_dtype, bias_dtype, nbytes, **about):
    """The gradient of part number `after`, whose dtype is `bias_dtype`."""
    bias, (tile_m, tile_n, *_) = DTYPES[bias_dtype], about["tiles"]
    shared = SharedMemory()
    S_TILE, (K_PIPELINE, V_PIPELINE), maps, load_tiles, add_tiles = ds_steps(shared, **about, by_tma=True)
    SHARED_B = shared.boxes(ROWS, tile_n, bias, CONSUMERS)
    B_PIPELINE = Pipeline.within(shared, SHARED_B.of_stages(1), 1, fills=CONSUMERS)
    TILE_M, TILE_N, save_rows = tile_m, tile_n, save_step(bias, out_dtype, tile_n, nbytes)

    @device
    def bias_of(consumer, at):
        return at.share.own_batch, at.share.own_head, at.m_first * TILE_M + consumer * ROWS, at.n_first

    load_bias = load_bias_step(SHARED_B, CONSUMERS, bias_of)

    @device
    def produce(biases, given, at, seqlen_q):
        """The producer, one thread."""
        mQ, _, _, mDO = given.inputs
        prefetch_tensor_map(mQ)
        prefetch_tensor_map(mDO)
        load_bias(stage(B_PIPELINE, 0), biases, at)
        load_tiles(stage(K_PIPELINE, 0), stage(V_PIPELINE, 0), given, at, seqlen_q)

    @device
    def compute(mDB, given, scale_log2, at, adds, seqlen_q):
        """The consumers, whole warpgroups."""
        K, V, bias = stage(K_PIPELINE, 0), stage(V_PIPELINE, 0), allocate(SHARED_B, warpgroup_index())
        wait(stage(B_PIPELINE, 0))
        dB, K, V = add_tiles(K, V, bias, given, scale_log2, at, seqlen_q)
        target = mDB[at.share.own_batch, at.share.own_head, at.share.part][:, at.n_first :]
        m0 = at.m_first * TILE_M + warpgroup_index() * ROWS
        if adds:
            dB = dB + convert(load(target, S_TILE, m0), np.float32)
        sync_warpgroup()                                        # all have read the bias
        save_rows(target, dB, bias, m0)

    own_pipelines = K_PIPELINE, V_PIPELINE, B_PIPELINE
    begin, take_roles = warp_specialised(own_pipelines, CONSUMERS, REGISTERS[tile_n], compute, produce)

    def kernel(
        mQ, mK, mV, mDO, biases, mDB, mLse, mDelta, mask, scores, group_size, scale_log2, own_batches, own_heads, adds
    ):
        begin()
        batches, heads, _ = shape(mLse)
        given = DsArguments((mQ, mK, mV, mDO), (mLse, mDelta), mask, scores, (), group_size, (), ())
        _, _, parts, seqlen_q, seqlen_k = shape(mDB)
        m_count, n_count = (seqlen_q + TILE_M - 1) // TILE_M, (seqlen_k + TILE_N - 1) // TILE_N
        tile, number = block_index() % (m_count * n_count), block_index() // (m_count * n_count)
        m_tile, n0 = tile // n_count, tile % n_count * TILE_N
        at = Diagonal(tile, share_of(number, parts, own_batches, own_heads, batches, heads), m_tile, m_tile + 1, n0)
        take_roles((mDB, given, scale_log2, at, adds, seqlen_q), ((biases, given, at, seqlen_q),))

    tiles, own_dtype = (*maps, SHARED_B), DTYPES[out_dtype]
    return source(kernel, bias_arguments("gradient"), shared, tiles, about, own_dtype=own_dtype, bias_dtype=bias_dtype)


def hopper_diagonal_sums(**about):
    """As `score_gradient.diagonal_sums`."""
    shared, (tile_m, tile_n, *_) = SharedMemory(), about["tiles"]
    _, (K_PIPELINE, V_PIPELINE), maps, load_tiles, add_tiles = ds_steps(shared, **about, by_tma=False)
    count, diagonal_of, sum_along = diagonal_steps(tile_m, tile_n, WARPGROUP * CONSUMERS)

    @device
    def sum_diagonals(target, number, total, skewed, plain, adds):
        sync_warpgroups(CONSUMERS)                              # all have read the last diagonals
        save(skewed, total, warpgroup_index() * ROWS)
        sync_warpgroups(CONSUMERS)
        sum_along(target, number, plain, adds)

    @device
    def produce(given, items, diagonals, seqlen_q):
        """The producer, one thread."""
        K, V = stage(K_PIPELINE, 0), stage(V_PIPELINE, 0)
        for item in range(block_index(), items, grid_size()):
            K, V = load_tiles(K, V, given, diagonal_of(item, *diagonals), seqlen_q)

    @device
    def compute(mSums, mSkewed, mPlain, given, scale_log2, items, diagonals, adds, seqlen_q):
        """The consumers, whole warpgroups."""
        K, V, place = stage(K_PIPELINE, 0), stage(V_PIPELINE, 0), block_index()
        for item in range(block_index(), items, grid_size()):
            at = diagonal_of(item, *diagonals)
            total, K, V = add_tiles(K, V, (), given, scale_log2, at, seqlen_q)
            target = mSums[at.share.own_batch, at.share.own_head, at.share.part]
            sum_diagonals(target, at.number, total, mSkewed[place], mPlain[place], adds)

    own_pipelines = K_PIPELINE, V_PIPELINE
    begin, take_roles = warp_specialised(own_pipelines, CONSUMERS, REGISTERS[tile_n], compute, produce)

    def kernel(
        mQ, mK, mV, mDO, mSums, mLse, mDelta, mask, scores, group_size, scale_log2, seqlen_q, seqlen_k, own_batches,
        own_heads, adds, mSkewed, mPlain,
    ):  # fmt: skip
        begin()
        batches, heads, _ = shape(mLse)
        given = DsArguments((mQ, mK, mV, mDO), (mLse, mDelta), mask, scores, (), group_size, (), ())
        _, _, parts, _, _ = shape(mSums)
        items = own_batches * own_heads * parts * count(seqlen_q, seqlen_k)
        diagonals = seqlen_q, seqlen_k, parts, own_batches, own_heads, batches, heads
        take_roles(
            (mSums, mSkewed, mPlain, given, scale_log2, items, diagonals, adds, seqlen_q),
            ((given, items, diagonals, seqlen_q),),
        )

    return source(kernel, diagonal_arguments("sums"), shared, maps, about, own_dtype=np.float32)


def source(kernel, arguments, shared, tiles, about, **types):
    """The Source of a kernel. tiles: of its inputs; types: what the types of its arguments follow from."""
    dtype, mask, score = DTYPES[about["dtype"]], about["mask"], about["score"]
    signature = signature_of(kernel, arguments, dtype, np.float32, mask=mask, score=score, **types)
    return source_of(kernel, signature, CONSUMERS, shared, tiles)


# ------------------------------------------------------------------------------------------------------------- tiles
BIASES = {
    64: WgmmaTiles(128, 128, 2),
    128: WgmmaTiles(128, 64, 2),
    192: WgmmaTiles(128, 64, 1),
    256: WgmmaTiles(128, 64, 1),
}
WITH_OTHERS = BIASES | {64: WgmmaTiles(128, 64, 2)}  # other parts of a score take registers
STATISTICS = Statistic("lse_log2", padded=True), Statistic("delta", padded=True)


def bias_arguments(name):
    """The arguments of a kernel that writes to an array of this name."""
    given = (*GIVEN, TmaBias(number_of_tma_bias), Own(name), *STATISTICS)
    return (*given, MASK, SCORE, "group_size", "scale_log2", *OWN_NUMBERS)


def diagonal_arguments(name):
    numbers = "group_size", "scale_log2", "seqlen_q", "seqlen_k", *OWN_NUMBERS
    return (*GIVEN, Own(name), *STATISTICS, MASK, SCORE, *numbers, *DIAGONALS)


def fills_tiles(work):
    """Else the smaller tiles of `any.score_gradient` are faster: five times with 32 queries and keys, 1.3 with 64."""
    return max(work.problem.seqlen_q, work.problem.seqlen_k) > 64


def bias_route(name, *, out_dtype, after, sums_rows, sums_cols):
    """The Route for the gradient of a bias, in an array of this name."""

    def takes(work):
        whole = not (parts_of(work.score)[after].own_axes == 0 or sums_rows or sums_cols)
        fits = whole and fills_tiles(work) and is_for_hopper(work)
        return fits and bool(dtype_of_tma_bias(work)) and not work.is_along

    spec = Spec(
        hopper_bias_gradient,
        bias_arguments(name),
        tiles=lambda work: ((WITH_OTHERS if len(work.score) > 1 else BIASES)[size_of(work)],),
        parameters=lambda work, tiles: compiled_in(work, tiles, head_dims(work.problem)) | {
            "out_dtype": out_dtype, "after": after, "bias_dtype": dtype_of_tma_bias(work), "nbytes": work.nbytes,
        },
        arch="a",
    )  # fmt: skip
    return Route(takes, (spec,), WGMMA)


def diagonals_route(name, *, after):
    """The Route for the sums by diagonal of a table."""

    def takes(work):
        few = all(part.takes_few_registers or part.gradient == ENTRIES for part in work.score)
        alone = few and not (is_looked_up(work.mask) or work.problem.dropout)
        return alone and fills_tiles(work) and is_for_hopper(work) and not work.is_along

    spec = Spec(
        hopper_diagonal_sums,
        diagonal_arguments(name),
        tiles=lambda work: (WITH_OTHERS[size_of(work)],),
        parameters=lambda work, tiles: compiled_in(work, tiles, head_dims(work.problem)) | {"after": after},
        arch="a",
    )
    return Route(takes, (spec,), WGMMA)

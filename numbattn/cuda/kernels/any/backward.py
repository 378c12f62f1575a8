"""Attention backward on any GPU: Algorithm 4 as two kernels, so that no two blocks add to the same gradient.

float16 and bfloat16 on tensor cores have `mma_backward` instead, but take dQ from here if it has to be deterministic.

`backward_kv` keeps a tile of keys and loops over the queries that see it, for dK and dV. `backward_q` keeps a tile of
queries and loops over the keys that they see, for dQ. If sequences are short, `backward_kv` keeps all keys, and also
computes dQ: five products, not seven. Both recompute P from lse. Without atomics the gradients are bitwise
reproducible. One source serves tensor cores and CUDA cores, as in the forward pass. Tiles of packed arrays end with
their segment.

The gradient of what a score adds to S, such as a bias that a batch of short sequences shares, is summed where dS is
computed for dQ: a block then takes its tile of several elements of the batch in turn.

With two pipeline stages the next tile is in flight while this one is computed. With one, Q and dO, or K and V, take
turns: each is loaded during the products of the other, which is why dP comes before S.

Unlike in the paper MASK follows the exponential: masked elements may be NaN. dP is masked too, since 0 * NaN is NaN.
"""

from dataclasses import replace

from ...build import Source
from ...tile import (
    SharedMemory,
    allocate,
    copy_async,
    copy_layout,
    device,
    dot,
    full,
    get,
    index,
    load,
    maximum,
    minimum,
    save,
    shape,
    sync_threads,
    wait_copies,
)
from ...words.arguments import LSE_LOG2, Matrix, Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec, block_per_query_tile
from ..scores import SCORE, score_steps, within_segment
from ..shared.all_keys import dq_steps, no_dq_steps
from ..shared.dropout import DROPOUT, drop_step
from ..shared.layouts import DTYPES, buffers, left_operand, product_step, sum_type, sums, vector
from ..shared.recompute import low_steps, mask_step_with_dp
from ..shared.segments import count_step, keys_of, mask_within_step, queries_of, slot_step
from ..shared.slices import slice_steps, sliced_product
from ..shared.sums_of_ds import PartialSums, Turn, part_of_block, sum_steps, sums_dS
from ..shared.visibility import (
    MASK,
    band_of,
    needs_test,
    steps_to_next,
    visible_keys,
    visible_queries,
)
from ..tables import is_wide, longest_sequence, rows_of, short_rows, sliced, slices_of, with_results
from .backward_tiles import ALL_KEYS, SHORT_KV, SHORT_Q, TILES_KV, TILES_Q, UNDER_PRESSURE_KV, UNDER_PRESSURE_Q


def backward_kv(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, score, dropout, nbytes, by_slices=False, with_sums=False
):  # fmt: skip
    """dK and dV; S, P, dP and dS are transposed: a row is a key, a column a query. by_slices: as in `forward`.

    With a third dtype in out_dtypes a block has all keys of a head, and also computes dQ; then dS may be summed.
    """
    dtype, ACC, (_, tile_m, tile_n, threads, _, stages, *_) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    K_TILE = sums(tiles, tile_n, head_dim, run=vector(dtype))
    V_TILE = sums(tiles, tile_n, head_dim_v, run=vector(dtype))
    shared = SharedMemory()
    widths = head_dim, head_dim_v
    of_k, of_v = buffers(shared, dtype, threads, tile_n, widths)
    of_q, of_do = buffers(shared, dtype, threads, tile_m, widths, stages)
    S_TILE, product = product_step(tiles, tile_n, tile_m, shared, ACC)
    (own_slice, slice_of), ZERO = slice_steps(by_slices, head_dim, nbytes), ACC(0)
    fetch_k, fetch_q, product_s = sliced_product(by_slices, head_dim, S_TILE, product, of_k, of_q, ZERO, nbytes)
    fetch_v, fetch_do, product_dp = sliced_product(by_slices, head_dim, S_TILE, product, of_v, of_do, ZERO, nbytes)
    (SHARED_K, _), (SHARED_Q, _), (SHARED_DO, _) = of_k, of_q, of_do
    COLS, COPY_ROW = S_TILE.col_vector(), copy_layout(1, tile_m, threads, 1).col_vector()
    (first_low, _, recompute), HAS_LOW = low_steps(dtype), dtype.itemsize > 2
    SHARED_LSE, SHARED_DELTA, *others = (shared.tile(1, tile_m, ACC, stages) for _ in range(2 + HAS_LOW))
    SHARED_LOW = others[0] if HAS_LOW else SHARED_LSE
    left_P, left_dS = left_operand(S_TILE, shared, ACC), left_operand(S_TILE, shared, ACC)
    HAS_ALL_KEYS = len(out_dtypes) == 3
    keys_seen, share, save_dq, save_zeros = (dq_steps if HAS_ALL_KEYS else no_dq_steps)(
        S_TILE, head_dim, threads, shared, mask, nbytes, SHARED_K
    )
    TILE_M, TILE_N, IN_TURN = tile_m, tile_n, stages == 1
    masked = mask_step_with_dp(mask, S_TILE, transposed=True)
    band_at, tested, steps = band_of(mask), needs_test(mask), steps_to_next(() if HAS_ALL_KEYS else mask)
    drop = drop_step(S_TILE, dropout, transposed=True)
    apply, pull_back, to_log2 = score_steps(score, S_TILE, ACC, transposed=True)
    tile_of, mask_of, scores_of = slot_step(mask, "k", tile_n), mask_within_step(mask), within_segment(score)
    place_of, add_dS = sum_steps(S_TILE, with_sums)

    @device
    def fetch_rows(stage, Q, lse, low, delta, m0):
        fetch_q(stage, Q, m0)
        copy_async(allocate(SHARED_LSE, stage), lse, COPY_ROW, m0)
        if HAS_LOW:
            copy_async(allocate(SHARED_LOW, stage), low, COPY_ROW, m0)
        copy_async(allocate(SHARED_DELTA, stage), delta, COPY_ROW, m0)

    def kernel(
        mQ, mK, mV, mDO, mDK, mDV, mLse, mDelta, mask, scores, drops, group_size, scale, kept_scale, to_dq, turn
    ):  # fmt: skip
        batches, heads, _ = shape(mLse)
        _, heads_k, seqlen_k, _ = shape(mDK)
        own, block = own_slice(mQ, mV)
        tile, batch, head_k = place_of(block, batches, heads_k, turn)
        segment, n_block = tile_of(mask.packing, batch, tile, seqlen_k)
        n0 = n_block * TILE_N
        if n0 >= segment.keys:                                  # a slot without a tile
            return
        mask, scores = mask_of(mask, segment), scores_of(scores, segment)
        query, row, (key, end_key) = segment.first_query, segment.first_padded_row, keys_of(segment)
        end_seen = keys_seen(mask, batch, head_k, group_size, end_key)
        K, V = mK[batch, head_k][key:end_seen], mV[batch, head_k][key:end_seen]
        fetch_k(0, K, n0)
        fetch_v(0, V, n0)
        dK, dV = full(K_TILE, ZERO), full(V_TILE, ZERO)
        for head in range(head_k * group_size, (head_k + 1) * group_size):
            band = band_at(mask, batch, head)
            first, end = visible_queries(band, n0, minimum(n0 + TILE_N, segment.keys))
            # without rows beyond a sequence's length, which may be NaN
            length = maximum(band[2], 1)
            Q, dO = mQ[batch, head][query : query + length], mDO[batch, head][query : query + length]
            lse, delta = mLse[batch, head][row : row + length], mDelta[batch, head][row : row + length]
            low = mLse[batch, head][row + first_low(mLse) : row + first_low(mLse) + length]
            m_block, m_blocks = first // TILE_M, (end + TILE_M - 1) // TILE_M
            m_block += steps(mask, batch, head, n_block, m_block, m_blocks - m_block)
            save_zeros(to_dq, batch, head, m_block, m_blocks)
            stage = index(0)
            sync_threads()                                      # all have read the last tile of the previous head
            if m_block < m_blocks:
                fetch_do(stage, dO, m_block * TILE_M)
                if not IN_TURN:
                    fetch_rows(stage, Q, lse, low, delta, m_block * TILE_M)
            while m_block < m_blocks:                           # Alg. 4 line 9
                m0, this = m_block * TILE_M, m_block
                m_block += 1
                m_block += steps(mask, batch, head, n_block, m_block, m_blocks - m_block)
                wait_copies()
                sync_threads()                                  # dO has arrived, or both; all have read the last Q
                if IN_TURN:
                    fetch_rows(stage, Q, lse, low, delta, m0)   # in flight while dP is computed
                elif m_block < m_blocks:
                    fetch_do(1 - stage, dO, m_block * TILE_M)
                    fetch_rows(1 - stage, Q, lse, low, delta, m_block * TILE_M)
                sQ, sdO = allocate(SHARED_Q, stage), allocate(SHARED_DO, stage)
                dP = product_dp((0, stage), V, dO, n0, m0, own)    # line 17: dP = dO V^T
                if IN_TURN:
                    wait_copies()
                    sync_threads()                              # Q has arrived
                S = product_s((0, stage), K, Q, n0, m0, own)    # line 11: S = scale Q K^T, transposed
                S, F = apply(S, scores, batch, head, query + m0, key + n0)
                high, rest = get(allocate(SHARED_LSE, stage), COLS), get(allocate(SHARED_LOW, stage), COLS)
                P = recompute(S, high, rest, to_log2(scale))    # line 13: P = exp(S - lse)
                if tested(mask, band, batch, head, n_block, this, m0, m0 + TILE_M, n0, n0 + TILE_N):
                    P, F, dP = masked(P, F, dP, mask, band, batch, head, m0, n0)   # line 12: MASK
                Z = drop(full(S_TILE, kept_scale), drops, batch, head, m0, n0)  # line 14
                dV = dot(dV, left_P(P * Z), sdO)                # lines 15 and 16: dV += (P Z)^T dO
                if IN_TURN and m_block < m_blocks:
                    sync_threads()                              # all have read dO
                    fetch_do(stage, dO, m_block * TILE_M)       # in flight while dK is computed
                D = get(allocate(SHARED_DELTA, stage), COLS)
                dS = pull_back(P * (dP * Z - D), F)             # lines 18 and 20: dS = P (dP Z - D)
                add_dS(turn, dS, n0, m0)
                share(dS)
                dK = dot(dK, left_dS(dS), sQ)                   # line 22: dK += dS^T Q, scaled in the epilogue
                save_dq(to_dq, batch, head, m0, scale)          # line 21: dQ = dS K
                if not IN_TURN:
                    stage = 1 - stage
        save(slice_of(mDK[batch, head_k][key:end_key], own), dK * scale, n0)    # line 24
        save(slice_of(mDV[batch, head_k][key:end_key], own), dV, n0)

    one_element = device(kernel)

    def kernel_of_part(
        mQ, mK, mV, mDO, mDK, mDV, mLse, mDelta, mask, scores, drops, group_size, scale, kept_scale, to_dq, mSums
    ):  # fmt: skip
        batches, heads, _ = shape(mLse)
        part, tile, head, own = part_of_block(mSums, batches, heads)
        for batch in part:
            turn = Turn(tile, batch, head, mSums[0][own].T)
            one_element(mQ, mK, mV, mDO, mDK, mDV, mLse, mDelta, mask, scores, drops, group_size, scale, kept_scale,
                        to_dq, turn)  # fmt: skip

    kernel = kernel_of_part if with_sums else kernel
    arguments = (SPEC_ALL if HAS_ALL_KEYS else SPEC_KV).arguments
    dtypes = dict(zip(("dk", "dv", "dq"), out_dtypes))
    signature = signature_of(kernel, arguments, dtype, ACC, dtypes, mask=mask, score=score, sums_dS=with_sums)
    return Source(kernel, signature, threads, tiles.blocks, shared.nbytes)


def backward_q(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, score, dropout, nbytes, by_slices=False, with_sums=False
):  # fmt: skip
    """dQ; a row of S, P, dP and dS is a query. by_slices: as in `forward`; with_sums: whether dS is summed."""
    dtype, ACC, (_, tile_m, tile_n, threads, _, stages, *_) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    Q_TILE = sums(tiles, tile_m, head_dim, run=vector(dtype))
    shared = SharedMemory()
    widths = head_dim, head_dim_v
    of_q, of_do = buffers(shared, dtype, threads, tile_m, widths)
    of_k, of_v = buffers(shared, dtype, threads, tile_n, widths, stages)
    S_TILE, product = product_step(tiles, tile_m, tile_n, shared, ACC)
    (own_slice, slice_of), ZERO = slice_steps(by_slices, head_dim, nbytes), ACC(0)
    fetch_q, fetch_k, product_s = sliced_product(by_slices, head_dim, S_TILE, product, of_q, of_k, ZERO, nbytes)
    fetch_do, fetch_v, product_dp = sliced_product(by_slices, head_dim, S_TILE, product, of_do, of_v, ZERO, nbytes)
    SHARED_K, _ = of_k
    ROWS, (first_low, _, recompute) = S_TILE.row_vector(), low_steps(dtype)
    left = left_operand(S_TILE, shared, ACC)
    TILE_M, TILE_N, IN_TURN = tile_m, tile_n, stages == 1
    masked, band_at = mask_step_with_dp(mask, S_TILE), band_of(mask)
    tested, steps = needs_test(mask), steps_to_next(mask)
    drop, (apply, pull_back, to_log2) = drop_step(S_TILE, dropout), score_steps(score, S_TILE, ACC)
    tiles_of, tile_of = count_step(mask, tile_m), slot_step(mask, "q", tile_m)
    mask_of, scores_of = mask_within_step(mask), within_segment(score)
    place_of, add_dS = sum_steps(S_TILE, with_sums)

    def kernel(mQ, mK, mV, mDO, mDQ, mLse, mDelta, mask, scores, drops, group_size, scale, kept_scale, turn):
        batches, heads, seqlen_q, _ = shape(mDQ)
        own, block = own_slice(mQ, mV)
        tile, batch, head = place_of(block, batches, heads, turn)
        number = tiles_of(mask.packing, seqlen_q) - 1 - tile   # the heaviest tiles of a causal mask first
        segment, m_block = tile_of(mask.packing, batch, number, seqlen_q)
        m0 = m_block * TILE_M
        if m0 >= segment.queries:                               # a slot without a tile
            return
        mask, scores = mask_of(mask, segment), scores_of(scores, segment)
        band = band_at(mask, batch, head)
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, segment.queries))
        head_k, key, row = head // group_size, segment.first_key, segment.first_padded_row
        query, end_query = queries_of(segment)
        # without rows beyond a sequence's length, which may be NaN
        length_q, length_k = maximum(band[2], 1), maximum(band[3], 1)
        Q, dO = mQ[batch, head][query : query + length_q], mDO[batch, head][query : query + length_q]
        K, V = mK[batch, head_k][key : key + length_k], mV[batch, head_k][key : key + length_k]
        n_block, n_blocks = first // TILE_N, (end + TILE_N - 1) // TILE_N
        n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
        stage = index(0)
        fetch_q(0, Q, m0)
        fetch_do(0, dO, m0)
        fetch_v(stage, V, n_block * TILE_N)
        if not IN_TURN:
            fetch_k(stage, K, n_block * TILE_N)
        lse = load(mLse[batch, head][row : row + length_q], ROWS, m0)
        low = load(mLse[batch, head][: row + first_low(mLse) + length_q], ROWS, row + first_low(mLse) + m0)
        D = load(mDelta[batch, head][row : row + length_q], ROWS, m0)
        dQ = full(Q_TILE, ZERO)
        while n_block < n_blocks:                               # Alg. 4 line 6
            n0, this = n_block * TILE_N, n_block
            n_block += 1
            n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
            wait_copies()
            sync_threads()                                      # V has arrived, or both; all have read the last K
            if IN_TURN:
                fetch_k(stage, K, n0)                           # in flight while dP is computed
            elif n_block < n_blocks:
                fetch_v(1 - stage, V, n_block * TILE_N)
                fetch_k(1 - stage, K, n_block * TILE_N)
            sK = allocate(SHARED_K, stage)
            dP = product_dp((0, stage), dO, V, m0, n0, own)     # line 17: dP = dO V^T
            if IN_TURN:
                wait_copies()
                sync_threads()                                  # K has arrived, all have read V
                if n_block < n_blocks:
                    fetch_v(stage, V, n_block * TILE_N)         # in flight while S and dQ are computed
            S = product_s((0, stage), Q, K, m0, n0, own)        # line 11: S = scale Q K^T
            S, F = apply(S, scores, batch, head, query + m0, key + n0)
            P = recompute(S, lse, low, to_log2(scale))          # line 13: P = exp(S - lse)
            if tested(mask, band, batch, head, m_block, this, m0, m0 + TILE_M, n0, n0 + TILE_N):
                P, F, dP = masked(P, F, dP, mask, band, batch, head, m0, n0)   # line 12: MASK
            Z = drop(full(S_TILE, kept_scale), drops, batch, head, m0, n0)  # line 14
            dS = pull_back(P * (dP * Z - D), F)                 # lines 18 and 20: dS = P (dP Z - D)
            add_dS(turn, dS, m0, n0)
            dQ = dot(dQ, left(dS), sK)                          # line 21: dQ += dS K, scaled in the epilogue
            if not IN_TURN:
                stage = 1 - stage
        save(slice_of(mDQ[batch, head][query:end_query], own), dQ * scale, m0)

    one_element = device(kernel)

    def kernel_of_part(mQ, mK, mV, mDO, mDQ, mLse, mDelta, mask, scores, drops, group_size, scale, kept_scale, mSums):
        batches, heads, _, _ = shape(mDQ)
        part, tile, head, own = part_of_block(mSums, batches, heads)
        for batch in part:
            turn = Turn(tile, batch, head, mSums[0][own])
            one_element(mQ, mK, mV, mDO, mDQ, mLse, mDelta, mask, scores, drops, group_size, scale, kept_scale, turn)

    kernel, dtypes = kernel_of_part if with_sums else kernel, {"dq": out_dtypes[0]}
    signature = signature_of(kernel, SPEC_Q.arguments, dtype, ACC, dtypes, mask=mask, score=score, sums_dS=with_sums)
    return Source(kernel, signature, threads, tiles.blocks, shared.nbytes)


def has_all_keys(work):
    """Whether a block is to have all keys of a head: `backward_kv` computes dQ, too."""
    return not work.segments and SPEC_ALL.fitting(work) is not None


SUMMED = 256  # tokens of the longest sequences whose dS is summed here: the sums stay in the L2 cache


def sums_here(work):
    """Whether these kernels sum dS."""
    problem = work.problem
    batches, _ = problem.matrices
    is_short = longest_sequence(work) <= SUMMED and not is_wide(problem)
    return sums_dS(work) and problem.dtype.itemsize > 2 and is_short and batches > 1


def and_sums(parameters):
    """Parameters of a kernel that may sum dS."""
    return lambda work, tiles: parameters(work, tiles) | ({"with_sums": True} if sums_here(work) else {})


def sums_of_blocks(spec):
    """The PartialSums of a Spec."""
    return PartialSums(sums_here, lambda work: work.problem.heads * spec().parts(work, spec().fitting(work)))


GIVEN = Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("do")
STATISTICS = LSE_LOG2, Statistic("delta", padded=True)
STATISTICS_AND_NUMBERS = *STATISTICS, MASK, SCORE, DROPOUT, "group_size", "scale", "kept_scale"
ARGUMENTS_KV = *GIVEN, Matrix("dk", "k"), Matrix("dv", "k"), *STATISTICS_AND_NUMBERS
SPEC_KV = Spec(
    backward_kv,
    (*ARGUMENTS_KV, (), ()),  # no dQ, no sums
    tiles=lambda work: rows_of(TILES_KV, UNDER_PRESSURE_KV, work, SHORT_KV),
    parameters=with_results("dk", "dv", parameters=sliced),
    keeps="k",
    blocks=lambda work, tiles, m_blocks, n_blocks: work.problem.heads_k * n_blocks * slices_of(work.problem),
    packs=True,
    slices=True,
)
SPEC_Q = Spec(
    backward_q,
    (*GIVEN, Matrix("dq"), *STATISTICS_AND_NUMBERS, sums_of_blocks(lambda: SPEC_Q)),
    tiles=lambda work: rows_of(TILES_Q, UNDER_PRESSURE_Q, work, SHORT_Q),
    parameters=and_sums(with_results("dq", parameters=sliced)),
    sums=sums_here,
    blocks=lambda work, *tiles: block_per_query_tile(work, *tiles) * slices_of(work.problem),
    packs=True,
    slices=True,
)
SPEC_ALL = replace(
    SPEC_KV,
    arguments=(*ARGUMENTS_KV, (Matrix("dq"),), sums_of_blocks(lambda: SPEC_ALL)),
    tiles=lambda work: short_rows(ALL_KEYS, work),
    parameters=and_sums(with_results("dk", "dv", "dq")),
    sums=sums_here,
    packs=False,
    slices=False,
)

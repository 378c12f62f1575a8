"""Gradients of the arrays of a score, on any GPU: each block adds up dS over all that one piece of an array serves.

`bias_gradient` keeps a tile of a bias' gradient and loops over the score matrices to which the bias is broadcast, and
over the tiles along axes of which it has only one. `diagonal_sums` is for functions of j - i: it keeps a diagonal of
tiles, and sums along the diagonals; `entry_sums` serves them where each query has an offset of its own, entry by entry.
All recompute S, P and dS, as in `backward`: no temporaries of the size of S, no atomics, the same bits in every run.
"""

from typing import Any, NamedTuple

from ..plan.arguments import Matrix, Own, Statistic
from ..plan.spec import Spec
from ..tile import (
    INDEX,
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    block_index,
    capped,
    convert,
    copy_async,
    device,
    dot,
    exp2,
    full,
    grid_size,
    load,
    maximum,
    minimum,
    row_sum,
    save,
    shape,
    simt,
    sync_threads,
    wait_copies,
    where,
)
from .backward import TILES_Q, UNDER_PRESSURE_Q, source
from .scores import SCORE, distance_steps, entry_steps, parts_of, score_steps
from .shared.dropout import DROPOUT, drop_step
from .shared.layouts import DTYPES, array_type, buffers, sum_type, sums
from .shared.tables import Tiles, parameters, rows_of
from .shared.visibility import FARTHEST, MASK, band_of, element_test, is_shown, keys_in_sight, needs_test

OWN_NUMBERS = "own_batches", "own_heads", "adds"  # how many matrices the array has, and whether it holds sums already
OWN_TYPES = [INDEX] * len(OWN_NUMBERS)


class DsArguments(NamedTuple):
    """What kernels are given to compute dS of."""

    inputs: Any  # Q, K, V, dO
    statistics: Any  # of rows: lse in base 2, delta
    sight: Any
    scores: Any
    drops: Any
    group_size: Any
    kept_scale: Any


def ds_step(dtype, head_dim, head_dim_v, tile_m, tile_n, threads, unit, lanes, mask, score, dropout, nbytes, behind):
    """What computes a tile of dS, that behind part number `behind` of the score: its layout, its shared memory, and the
    device function that loads tiles of Q, dO, K and V and computes dS from them."""
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    S_TILE = sums(unit, lanes, tile_m, tile_n, threads)
    ROWS, shared, ROWS_OF = S_TILE.row_vector(), SharedMemory(), Alignment(nbytes)
    (SHARED_Q, COPY_Q), (SHARED_DO, COPY_DO) = buffers(shared, dtype, threads, tile_m, [head_dim, head_dim_v])
    (SHARED_K, COPY_K), (SHARED_V, COPY_V) = buffers(shared, dtype, threads, tile_n, [head_dim, head_dim_v])
    sees, tested, drop = element_test(mask, S_TILE), needs_test(mask), drop_step(S_TILE, dropout)
    TILE_M, TILE_N = tile_m, tile_n
    apply, pull_back, to_log2 = score_steps(score, S_TILE, ACC, behind=behind)

    @device
    def ds_of(given, band, batch, head, m0, n0):
        """By all threads. Rows beyond a sequence's length are cut off: they may be NaN."""
        (mQ, mK, mV, mDO), (mLse, mDelta), sight, scores, drops, group_size, kept_scale = given
        head_k, length_q, length_k = head // group_size, maximum(band[2], 1), maximum(band[3], 1)
        sQ, sdO, sK, sV = allocate(SHARED_Q), allocate(SHARED_DO), allocate(SHARED_K), allocate(SHARED_V)
        sync_threads()                                          # all have read the last tiles
        copy_async(sQ, aligned(mQ[batch, head][:length_q], ROWS_OF), COPY_Q, m0)
        copy_async(sK, aligned(mK[batch, head_k][:length_k], ROWS_OF), COPY_K, n0)
        copy_async(sdO, aligned(mDO[batch, head][:length_q], ROWS_OF), COPY_DO, m0)
        copy_async(sV, aligned(mV[batch, head_k][:length_k], ROWS_OF), COPY_V, n0)
        lse_log2, D = load(mLse[batch, head][:length_q], ROWS, m0), load(mDelta[batch, head][:length_q], ROWS, m0)
        wait_copies()
        sync_threads()
        S, F = apply(dot(S_TILE, sQ, sK.T), scores, batch, head, m0, n0)    # Alg. 4 line 11
        P = exp2(capped(S * to_log2(scores.scale) - lse_log2, 0))   # line 13
        dP = dot(S_TILE, sdO, sV.T)                             # line 17
        Z = drop(full(S_TILE, kept_scale), drops, batch, head, m0, n0)  # line 14
        dS = pull_back(P * (dP * Z - D), F)                     # line 20
        m_block, n_block, m_end, n_end = m0 // TILE_M, n0 // TILE_N, m0 + TILE_M, n0 + TILE_N
        if tested(sight, band, batch, head, m_block, n_block, m0, m_end, n0, n_end):
            dS = where(sees(sight, band, batch, head, m0, n0), dS, 0)   # line 12: what is masked may be NaN
        return dS

    return S_TILE, shared, ds_of


@device
def matrices_of(matrix, own_batches, own_heads, batches, heads):
    """Of matrix number `matrix` of an array: its own batch and head, and where those to which it is broadcast end."""
    own_batch, own_head = matrix // own_heads, matrix % own_heads
    batch_end = own_batch + 1 if own_batches > 1 else batches
    head_end = own_head + 1 if own_heads > 1 else heads
    return own_batch, own_head, batch_end, head_end


class Diagonal(NamedTuple):
    """A diagonal of tiles in the score matrices that an array serves: the queries of tile m_block, m_first <= m_block <
    m_end, and the keys from n_first + tile_m * (m_block - m_first) on."""

    number: Any
    own_batch: Any
    own_head: Any
    batch_end: Any
    head_end: Any
    m_first: Any
    m_end: Any
    n_first: Any


def diagonal_steps(tile_m, tile_n, threads):
    """Device functions: how many diagonals of tiles a score matrix has; number `item` of those of all matrices; and
    sums along the diagonals of a tile, from the lower left on, that is in `plain` with shifted rows: its columns."""
    TILE_M, TILE_N, PER_TILE = tile_m, tile_n, tile_m // tile_n
    DIAGONALS = simt(tile_n, tile_m, threads, threads // tile_n, 1)
    ALONG = DIAGONALS.row_vector()

    @device
    def sizes(seqlen_q, seqlen_k):
        """The number of tiles along either axis, and of diagonals that start below the first tile."""
        m_blocks, n_blocks = (seqlen_q + TILE_M - 1) // TILE_M, (seqlen_k + TILE_N - 1) // TILE_N
        return m_blocks, n_blocks, PER_TILE * (m_blocks - 1)

    @device
    def count(seqlen_q, seqlen_k):
        _, n_blocks, before = sizes(seqlen_q, seqlen_k)
        return before + n_blocks

    @device
    def diagonal_of(item, seqlen_q, seqlen_k, own_batches, own_heads, batches, heads):
        m_blocks, n_blocks, before = sizes(seqlen_q, seqlen_k)
        diagonals = before + n_blocks
        number, matrix = item % diagonals, item // diagonals
        own_batch, own_head, batch_end, head_end = matrices_of(matrix, own_batches, own_heads, batches, heads)
        m_first = maximum(before - number + PER_TILE - 1, 0) // PER_TILE
        m_end = minimum((before - number + n_blocks + PER_TILE - 1) // PER_TILE, m_blocks)
        n_first = (number + PER_TILE * m_first - before) * TILE_N
        return Diagonal(number, own_batch, own_head, batch_end, head_end, m_first, m_end, n_first)

    @device
    def sum_along(target, plain, adds):
        for at in range(0, TILE_M + TILE_N, TILE_N):
            sums = row_sum(load(plain.T, DIAGONALS, at))
            if adds:
                sums = sums + load(target, ALONG, at)
            save(target, sums, at)

    return count, diagonal_of, sum_along


def bias_gradient(*, out_dtype, behind, weight, sums_rows, sums_cols, **about):
    """The gradient of part number `behind`, or with the weight "distance", of slopes.

    sums_rows: over all queries, up to the rows of a tile, which are left to be summed; sums_cols: over all keys.
    """
    dtype, mask, score = about["dtype"], about["mask"], about["score"]
    S_TILE, shared, ds_of = ds_step(**about, behind=behind)
    ACC = sum_type(DTYPES[dtype])
    (TILE_M, TILE_N), ROWS = S_TILE.shape, S_TILE.row_vector()
    ZERO, SUMS_ROWS, SUMS_COLS, OF_DISTANCE = ACC(0), sums_rows, sums_cols, weight == "distance"
    band_at, shown = band_of(mask), is_shown(mask)
    own_key, distance = distance_steps(parts_of(score)[behind], behind, S_TILE, ACC)

    def kernel(
        mQ, mK, mV, mDO, mDB, mLse, mDelta, sight, scores, drops, group_size, kept_scale, own_batches, own_heads, adds
    ):
        given = DsArguments((mQ, mK, mV, mDO), (mLse, mDelta), sight, scores, drops, group_size, kept_scale)
        batches, heads, seqlen_q = shape(mLse)
        _, _, seqlen_k, _ = shape(mK)
        m_blocks, n_blocks = (seqlen_q + TILE_M - 1) // TILE_M, (seqlen_k + TILE_N - 1) // TILE_N
        m_count, n_count = 1 if SUMS_ROWS else m_blocks, 1 if SUMS_COLS else n_blocks
        tile, matrix = block_index() % (m_count * n_count), block_index() // (m_count * n_count)
        m_first, n_first = tile // n_count, tile % n_count
        own_batch, own_head, batch_end, head_end = matrices_of(matrix, own_batches, own_heads, batches, heads)
        m_end, n_end = m_blocks if SUMS_ROWS else m_first + 1, n_blocks if SUMS_COLS else n_first + 1
        dB = full(S_TILE, ZERO)
        for batch in range(own_batch, batch_end):
            for head in range(own_head, head_end):
                band = band_at(sight, batch, head)
                for m_block in range(m_first, m_end):
                    m0 = m_block * TILE_M
                    first, end = keys_in_sight(band, m0, minimum(m0 + TILE_M, seqlen_q))
                    first, end = maximum(first // TILE_N, n_first), minimum((end + TILE_N - 1) // TILE_N, n_end)
                    for n_block in range(first, end):
                        if not shown(sight, batch, head, m_block, n_block):
                            continue
                        n0 = n_block * TILE_N
                        dS = ds_of(given, band, batch, head, m0, n0)
                        if OF_DISTANCE:
                            key, offsets = own_key(scores, batch, head, m0)
                            dS = -(dS * distance(key, offsets, n0))
                        dB = dB + dS
        target, m0 = mDB[own_batch, own_head][:, n_first * TILE_N :], m_first * TILE_M
        if SUMS_COLS:
            total = row_sum(dB)
            if adds:
                total = total + convert(load(target[:, 0], ROWS, m0), ACC)
            save(target[:, 0], total, m0)
        else:
            if adds:
                dB = dB + convert(load(target, S_TILE, m0), ACC)
            save(target, dB, m0)

    return source(kernel, DTYPES[dtype], [out_dtype], mask, score, about["threads"], shared, *OWN_TYPES)


def diagonal_sums(*, behind, **about):
    """Of dS behind part number `behind`: sums along the diagonals of a diagonal of tiles, from the lower left on.

    All tiles (m_block, diagonal + m_block * tile_m / tile_n) have the same j - i in the same place: their sum goes to
    mSkewed, whose rows are shifted so that the columns of mPlain, the same memory, are the diagonals.
    """
    dtype, mask, score = about["dtype"], about["mask"], about["score"]
    S_TILE, shared, ds_of = ds_step(**about, behind=behind)
    ACC = sum_type(DTYPES[dtype])
    (TILE_M, TILE_N), ZERO = S_TILE.shape, ACC(0)
    count, diagonal_of, sum_along = diagonal_steps(TILE_M, TILE_N, about["threads"])
    band_at, shown = band_of(mask), is_shown(mask)

    def kernel(
        mQ, mK, mV, mDO, mSums, mLse, mDelta, sight, scores, drops, group_size, kept_scale, own_batches, own_heads,
        adds, mSkewed, mPlain,
    ):  # fmt: skip
        given = DsArguments((mQ, mK, mV, mDO), (mLse, mDelta), sight, scores, drops, group_size, kept_scale)
        batches, heads, seqlen_q = shape(mLse)
        _, _, seqlen_k, _ = shape(mK)
        items, place = own_batches * own_heads * count(seqlen_q, seqlen_k), block_index()
        for item in range(block_index(), items, grid_size()):
            at = diagonal_of(item, seqlen_q, seqlen_k, own_batches, own_heads, batches, heads)
            total = full(S_TILE, ZERO)
            for batch in range(at.own_batch, at.batch_end):
                for head in range(at.own_head, at.head_end):
                    band = band_at(sight, batch, head)
                    for m_block in range(at.m_first, at.m_end):
                        m0, n0 = m_block * TILE_M, at.n_first + (m_block - at.m_first) * TILE_M
                        first, end = keys_in_sight(band, m0, minimum(m0 + TILE_M, seqlen_q))
                        if first < n0 + TILE_N and n0 < end and shown(sight, batch, head, m_block, n0 // TILE_N):
                            total = total + ds_of(given, band, batch, head, m0, n0)
            sync_threads()                                      # all have read the diagonals before
            save(mSkewed[place], total, 0)
            sync_threads()
            sum_along(mSums[at.own_batch, at.own_head, at.number], mPlain[place], adds)

    scratch = [array_type(ACC, 3)] * 2
    return source(kernel, DTYPES[dtype], [ACC.__name__], mask, score, about["threads"], shared, *OWN_TYPES, *scratch)


def entry_sums(*, behind, **about):
    """The gradient of part number `behind`, a table beside offsets of each query: a block for each entry. Up to the
    rows of a tile, which are left to be summed.

    It is slow, since tiles are computed anew for each entry: those in which a key may have it.
    """
    dtype, mask, score = about["dtype"], about["mask"], about["score"]
    S_TILE, shared, ds_of = ds_step(**about, behind=behind)
    ACC = sum_type(DTYPES[dtype])
    (TILE_M, TILE_N), ROWS, ZERO, NUMBER = S_TILE.shape, S_TILE.row_vector(), ACC(0), behind
    _, entries_of = entry_steps(parts_of(score)[behind], behind, S_TILE)
    band_at, shown = band_of(mask), is_shown(mask)

    @device
    def keys_with(entry, entries, offsets, m0, m_end):
        """The keys [first, end) outside of which queries [m0, m_end) have none with this entry."""
        low, high = m0 + offsets[m0], m0 + offsets[m0]
        for i in range(m0 + 1, m_end):
            low, high = minimum(low, i + offsets[i]), maximum(high, i + offsets[i])
        apart = entry - entries // 2
        return low + apart if entry > 0 else -FARTHEST, high + apart + 1 if entry < entries - 1 else FARTHEST

    def kernel(
        mQ, mK, mV, mDO, mSums, mLse, mDelta, sight, scores, drops, group_size, kept_scale, own_batches, own_heads, adds
    ):
        given = DsArguments((mQ, mK, mV, mDO), (mLse, mDelta), sight, scores, drops, group_size, kept_scale)
        batches, heads, seqlen_q = shape(mLse)
        _, _, _, entries = shape(mSums)
        entry, matrix = block_index() % entries, block_index() // entries
        own_batch, own_head, batch_end, head_end = matrices_of(matrix, own_batches, own_heads, batches, heads)
        total = full(S_TILE, ZERO)
        for batch in range(own_batch, batch_end):
            for head in range(own_head, head_end):
                band, (table, offsets) = band_at(sight, batch, head), scores.parts[NUMBER]
                offsets = offsets[batch, head]
                for m_block in range((seqlen_q + TILE_M - 1) // TILE_M):
                    m0, m_end = m_block * TILE_M, minimum((m_block + 1) * TILE_M, seqlen_q)
                    first, end = keys_in_sight(band, m0, m_end)
                    near, far = keys_with(entry, entries, offsets, m0, m_end)
                    first, end = maximum(first, near) // TILE_N, (minimum(end, far) + TILE_N - 1) // TILE_N
                    for n_block in range(first, end):
                        if not shown(sight, batch, head, m_block, n_block):
                            continue
                        n0 = n_block * TILE_N
                        dS = ds_of(given, band, batch, head, m0, n0)
                        total = total + where(entries_of(m0, offsets, n0, table) == entry, dS, 0)
        target, sums = mSums[own_batch, own_head][:, entry], row_sum(total)
        if adds:
            sums = sums + load(target, ROWS, 0)
        save(target, sums, 0)

    return source(kernel, DTYPES[dtype], [ACC.__name__], mask, score, about["threads"], shared, *OWN_TYPES)


TILES = {  # where there is none, those of `backward` for dQ: dS takes its place
    bias_gradient: {
        (True, 2): {
            64: (Tiles("mma", 128, 64, 256),), 128: (Tiles("mma", 128, 32, 256),), 256: (Tiles("mma", 64, 16, 128),)
        }
    },
    diagonal_sums: {
        (True, 2): {
            64: (Tiles("mma", 128, 32, 256),), 128: (Tiles("mma", 128, 32, 256),), 256: (Tiles("mma", 64, 16, 128),)
        }
    },
    entry_sums: {},
}  # fmt: skip
SUMMED = {  # for sums along the rows, instead: a warp holds whole ones
    (True, 4): {256: (Tiles("mma", 64, 32, 128), Tiles("mma", 64, 16, 128), Tiles("mma", 32, 16, 64))},
    (True, 8): {
        128: (Tiles("mma", 64, 16, 128), Tiles("mma", 32, 16, 64)),
        256: (Tiles("mma", 32, 16, 64), Tiles("mma", 16, 8, 32)),
    },
}


def rows(factory, work, sums_cols=False, **others):
    tables = (SUMMED, TILES[factory]) if sums_cols or factory is entry_sums else (TILES[factory],)
    found = (rows_of(table, {}, work) for table in tables)
    return next(filter(None, found), tuple(Tiles(*row[:5]) for row in rows_of(TILES_Q, UNDER_PRESSURE_Q, work)))


def spec_of(factory, name, **about):
    """The Spec of a kernel that writes to an array of this name; about: more parameters."""
    return Spec(
        factory,
        (Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("do"), Own(name),
         Statistic("lse_log2"), Statistic("delta"), MASK, SCORE, DROPOUT, "group_size", "kept_scale", *OWN_NUMBERS),
        tiles=lambda work: rows(factory, work, **about),
        parameters=lambda work, tiles: parameters(work, tiles) | about,
    )  # fmt: skip

"""Gradients of the arrays of a score, on any GPU: each block adds up dS over all that one piece of an array serves.

`bias_gradient` keeps a tile of a bias' gradient and loops over the score matrices to which the bias is broadcast, and
over the tiles along axes of which it has only one. `diagonal_sums` is for functions of j - i: it keeps a diagonal of
tiles, and sums along the diagonals; `entry_sums` serves them where each query has an offset of its own, entry by entry.
Where that would be fewer blocks than a GPU holds, each takes a share of the score matrices only; `sum_parts` adds up
what they leave. All recompute S, P and dS, as in `backward`: no temporaries of the size of S, no atomics, the same bits
in every run.
"""

from typing import Any, NamedTuple

from ...build import Source
from ...tile import (
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    block_index,
    commit_copies,
    convert,
    copy_async,
    device,
    dot,
    full,
    grid_size,
    index,
    load,
    maximum,
    minimum,
    row_sum,
    save,
    shape,
    sync_threads,
    wait_copies,
    where,
)
from ...words.arguments import Matrix, Own, Scratch, Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..scores import SCORE, entry_steps, kind, parts_of, score_steps
from ..shared.diagonals import diagonal_steps
from ..shared.dropout import DROPOUT, drop_step
from ..shared.layouts import DTYPES, buffers, sum_type, sums
from ..shared.recompute import recompute_capped
from ..shared.shares import score_matrix, share_of
from ..shared.visibility import FARTHEST, MASK, band_of, element_test, is_shown, needs_test, visible_keys
from ..tables import parameters, rows_of
from .backward_tiles import TILES_Q, UNDER_PRESSURE_Q

OWN_NUMBERS = "own_batches", "own_heads", "adds"  # how many matrices the array has, and whether it holds sums already


class DsArguments(NamedTuple):
    """What kernels are given to compute dS of."""

    inputs: Any  # Q, K, V, dO
    statistics: Any  # of rows: lse in base 2, delta
    mask: Any
    scores: Any
    drops: Any
    group_size: Any
    kept_scale: Any


class ScoreTile(NamedTuple):
    """A tile of a score matrix; after it in its row are those up to n_end."""

    matrix: Any  # number of a Share
    batch: Any
    head: Any
    m_block: Any
    n_block: Any
    n_end: Any


def walk_steps(keys_of, mask):
    """Device functions: (walk, given) -> the first ScoreTile, and (walk, given, at) -> the next one; see `sum_step`."""
    band_at, shown = band_of(mask), is_shown(mask)

    @device
    def next_place(walk, given, at):
        """The next tile that is not empty; its matrix is that of the end where there is none."""
        matrix, batch, head, m_block, n_block, n_end = at
        n_block += 1
        while matrix < walk.share.end:
            while n_block < n_end:
                if shown(given.mask, batch, head, m_block, n_block):
                    return ScoreTile(matrix, batch, head, m_block, n_block, n_end)
                n_block += 1
            m_block += 1
            if m_block >= walk.m_end:
                matrix, m_block = matrix + 1, walk.m_first
            if matrix < walk.share.end:
                batch, head = score_matrix(walk.share, matrix)
                n_block, n_end = keys_of(walk, given, band_at(given.mask, batch, head), batch, head, m_block)
        return ScoreTile(matrix, batch, head, m_block, n_block, n_end)

    @device
    def first_place(walk, given):
        nowhere = index(0)
        before = ScoreTile(walk.share.first - 1, nowhere, nowhere, walk.m_end - 1, nowhere, nowhere)
        return next_place(walk, given, before)

    return first_place, next_place


def sum_step(
    keys_of, add, *, dtype, head_dim, head_dim_v, tile_m, tile_n, threads, unit, lanes, mask, score, dropout, nbytes,
    after, blocks,
):  # fmt: skip
    """What adds up tiles of dS, that after part number `after` of the score: their layout, shared memory, and the
    device function (walk, given) -> the sum over all that a block walks over.

    walk: `share`, and the tiles of queries from m_first to m_end; keys_of: the device function (walk, given, band,
    batch, head, m_block) -> tiles of keys in such a row; add: (total, dS, given, batch, head, m0, n0, walk) -> total.

    dO and V of the next tile are in flight while S is computed, Q and K while P, dS and the next dP are.
    """
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    S_TILE = sums(unit, lanes, tile_m, tile_n, threads)
    ROWS, shared, ROWS_OF = S_TILE.row_vector(), SharedMemory(), Alignment(nbytes)
    (SHARED_Q, COPY_Q), (SHARED_DO, COPY_DO) = buffers(shared, dtype, threads, tile_m, [head_dim, head_dim_v])
    (SHARED_K, COPY_K), (SHARED_V, COPY_V) = buffers(shared, dtype, threads, tile_n, [head_dim, head_dim_v])
    sees, tested, drop = element_test(mask, S_TILE), needs_test(mask), drop_step(S_TILE, dropout)
    band_at, (first_place, next_place) = band_of(mask), walk_steps(keys_of, mask)
    TILE_M, TILE_N, ZERO = tile_m, tile_n, ACC(0)
    apply, pull_back, to_log2 = score_steps(score, S_TILE, ACC, after=after)

    @device
    def lengths_of(given, at):
        """Rows beyond a sequence's length are cut off: they may be NaN."""
        band = band_at(given.mask, at.batch, at.head)
        return maximum(band[2], 1), maximum(band[3], 1)

    @device
    def fetch(given, at, end, q, k, SHARED_ROWS, COPY_ROWS, SHARED_KEYS, COPY_KEYS):
        """q and k: Q and K, or dO and V."""
        if at.matrix < end:
            length_q, length_k = lengths_of(given, at)
            rows, keys = q[at.batch, at.head][:length_q], k[at.batch, at.head // given.group_size][:length_k]
            copy_async(allocate(SHARED_ROWS), aligned(rows, ROWS_OF), COPY_ROWS, at.m_block * TILE_M)
            copy_async(allocate(SHARED_KEYS), aligned(keys, ROWS_OF), COPY_KEYS, at.n_block * TILE_N)
        commit_copies()

    @device
    def sum_of(walk, given):
        """By all threads."""
        (mQ, mK, mV, mDO), (mLse, mDelta), mask, scores, drops, group_size, kept_scale = given
        sQ, sdO, sK, sV = allocate(SHARED_Q), allocate(SHARED_DO), allocate(SHARED_K), allocate(SHARED_V)
        total, end, at = full(S_TILE, ZERO), walk.share.end, first_place(walk, given)
        sync_threads()                                          # all have read the last tiles
        fetch(given, at, end, mDO, mV, SHARED_DO, COPY_DO, SHARED_V, COPY_V)
        fetch(given, at, end, mQ, mK, SHARED_Q, COPY_Q, SHARED_K, COPY_K)
        while at.matrix < end:
            batch, head, m0, n0 = at.batch, at.head, at.m_block * TILE_M, at.n_block * TILE_N
            following, (length_q, _) = next_place(walk, given, at), lengths_of(given, at)
            wait_copies(1)
            sync_threads()                                      # dO and V have arrived
            dP = dot(S_TILE, sdO, sV.T)                         # Alg. 4 line 17
            wait_copies()
            sync_threads()                                      # Q and K have arrived; all have read dO and V
            fetch(given, following, end, mDO, mV, SHARED_DO, COPY_DO, SHARED_V, COPY_V)
            S = dot(S_TILE, sQ, sK.T)                           # line 11
            sync_threads()                                      # all have read Q and K
            fetch(given, following, end, mQ, mK, SHARED_Q, COPY_Q, SHARED_K, COPY_K)
            lse_log2, D = load(mLse[batch, head][:length_q], ROWS, m0), load(mDelta[batch, head][:length_q], ROWS, m0)
            S, F = apply(S, scores, batch, head, m0, n0)
            P = recompute_capped(S, lse_log2, to_log2(scores.scale))    # line 13
            Z = drop(full(S_TILE, kept_scale), drops, batch, head, m0, n0)  # line 14
            dS = pull_back(P * (dP * Z - D), F)                 # line 20
            band = band_at(mask, batch, head)
            if tested(mask, band, batch, head, at.m_block, at.n_block, m0, m0 + TILE_M, n0, n0 + TILE_N):
                dS = where(sees(mask, band, batch, head, m0, n0), dS, 0)   # line 12: what is masked may be NaN
            total = add(total, dS, given, batch, head, m0, n0, walk)
            at = following
        return total

    return S_TILE, shared, sum_of


@device
def plain_sum(total, dS, given, batch, head, m0, n0, walk):
    return total + dS


class Rectangle(NamedTuple):
    """Tiles of the score matrices of a Share: of queries from m_first to m_end, of keys from n_first to n_end."""

    share: Any
    m_first: Any
    m_end: Any
    n_first: Any
    n_end: Any


def bias_gradient(*, out_dtype, sums_rows, sums_cols, **about):
    """The gradient of part number `after`.

    sums_rows: over all queries, up to the rows of a tile, which are left to be summed; sums_cols: over all keys.
    """
    dtype, score, after = DTYPES[about["dtype"]], about["score"], about["after"]
    TILE_M, TILE_N, ACC, SUMS_ROWS, SUMS_COLS = about["tile_m"], about["tile_n"], sum_type(dtype), sums_rows, sums_cols
    S_TILE = sums(about["unit"], about["lanes"], TILE_M, TILE_N, about["threads"])
    ROWS = S_TILE.row_vector()
    weighted = kind(parts_of(score)[after]).weighted_sum(after, S_TILE, ACC)

    @device
    def keys_of(walk, given, band, batch, head, m_block):
        m0, (_, _, seqlen_q) = m_block * TILE_M, shape(given.statistics[0])
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, seqlen_q))
        return maximum(first // TILE_N, walk.n_first), minimum((end + TILE_N - 1) // TILE_N, walk.n_end)

    @device
    def weighted_sum(total, dS, given, batch, head, m0, n0, walk):
        return weighted(total, dS, given.scores, batch, head, m0, n0)

    _, shared, sum_of = sum_step(keys_of, plain_sum if weighted is None else weighted_sum, **about)

    def kernel(
        mQ, mK, mV, mDO, mDB, mLse, mDelta, mask, scores, drops, group_size, kept_scale, own_batches, own_heads, adds
    ):
        given = DsArguments((mQ, mK, mV, mDO), (mLse, mDelta), mask, scores, drops, group_size, kept_scale)
        (batches, heads, seqlen_q), (_, _, seqlen_k, _), (_, _, parts, _, _) = shape(mLse), shape(mK), shape(mDB)
        m_blocks, n_blocks = (seqlen_q + TILE_M - 1) // TILE_M, (seqlen_k + TILE_N - 1) // TILE_N
        m_count, n_count = 1 if SUMS_ROWS else m_blocks, 1 if SUMS_COLS else n_blocks
        tile, number = block_index() % (m_count * n_count), block_index() // (m_count * n_count)
        m_first, n_first = tile // n_count, tile % n_count
        m_end, n_end = m_blocks if SUMS_ROWS else m_first + 1, n_blocks if SUMS_COLS else n_first + 1
        share = share_of(number, parts, own_batches, own_heads, batches, heads)
        dB = sum_of(Rectangle(share, m_first, m_end, n_first, n_end), given)
        target, m0 = mDB[share.own_batch, share.own_head, share.part][:, n_first * TILE_N :], m_first * TILE_M
        if SUMS_COLS:
            total = row_sum(dB)
            if adds:
                total = total + convert(load(target[:, 0], ROWS, m0), ACC)
            save(target[:, 0], total, m0)
        else:
            if adds:
                dB = dB + convert(load(target, S_TILE, m0), ACC)
            save(target, dB, m0)

    return source(kernel, arguments_of("gradient"), shared, DTYPES[out_dtype], about)


def diagonal_sums(**about):
    """Sums of dS after part number `after` along the diagonals of a diagonal of tiles, from the lower left on.

    All tiles (m_block, diagonal + m_block * tile_m / tile_n) have the same j - i in the same place: their sum goes to
    mSkewed, whose rows are shifted so that the columns of mPlain, the same memory, are the diagonals.
    """
    dtype, TILE_M, TILE_N = DTYPES[about["dtype"]], about["tile_m"], about["tile_n"]
    count, diagonal_of, sum_along = diagonal_steps(TILE_M, TILE_N, about["threads"])

    @device
    def keys_of(walk, given, band, batch, head, m_block):
        m0, (_, _, seqlen_q) = m_block * TILE_M, shape(given.statistics[0])
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, seqlen_q))
        n0 = walk.n_first + (m_block - walk.m_first) * TILE_M
        n_block = n0 // TILE_N
        return n_block, n_block + 1 if first < n0 + TILE_N and n0 < end else n_block

    _, shared, sum_of = sum_step(keys_of, plain_sum, **about)

    def kernel(
        mQ, mK, mV, mDO, mSums, mLse, mDelta, mask, scores, drops, group_size, kept_scale, own_batches, own_heads,
        adds, mSkewed, mPlain,
    ):  # fmt: skip
        given = DsArguments((mQ, mK, mV, mDO), (mLse, mDelta), mask, scores, drops, group_size, kept_scale)
        (batches, heads, seqlen_q), (_, _, seqlen_k, _), (_, _, parts, _, _) = shape(mLse), shape(mK), shape(mSums)
        items, place = own_batches * own_heads * parts * count(seqlen_q, seqlen_k), block_index()
        for item in range(block_index(), items, grid_size()):
            at = diagonal_of(item, seqlen_q, seqlen_k, parts, own_batches, own_heads, batches, heads)
            total = sum_of(at, given)
            sync_threads()                                      # all have read the diagonals before
            save(mSkewed[place], total, 0)
            sync_threads()
            target = mSums[at.share.own_batch, at.share.own_head, at.share.part, at.number]
            sum_along(target, mPlain[place], adds)

    return source(kernel, arguments_of("sums", *DIAGONALS), shared, sum_type(dtype), about)


class Entry(NamedTuple):
    """All tiles of the score matrices of a Share, for an entry of a table."""

    share: Any
    m_first: Any
    m_end: Any
    entry: Any


def entry_sums(**about):
    """The gradient of part number `after`, a table, with offsets of each query: a block for each entry. Up to the
    rows of a tile, which are left to be summed.

    It is slow, since tiles are computed anew for each entry: those in which a key may have it.
    """
    dtype, score, NUMBER = DTYPES[about["dtype"]], about["score"], about["after"]
    TILE_M, TILE_N = about["tile_m"], about["tile_n"]
    S_TILE = sums(about["unit"], about["lanes"], TILE_M, TILE_N, about["threads"])
    ROWS = S_TILE.row_vector()
    _, entries_of = entry_steps(parts_of(score)[NUMBER], NUMBER, S_TILE)

    @device
    def keys_with(entry, entries, offsets, m0, m_end):
        """The keys [first, end) outside of which queries [m0, m_end) have none with this entry."""
        low, high = m0 + offsets[m0], m0 + offsets[m0]
        for i in range(m0 + 1, m_end):
            low, high = minimum(low, i + offsets[i]), maximum(high, i + offsets[i])
        apart = entry - entries // 2
        return low + apart if entry > 0 else -FARTHEST, high + apart + 1 if entry < entries - 1 else FARTHEST

    @device
    def keys_of(walk, given, band, batch, head, m_block):
        (table, offsets), (_, _, seqlen_q) = given.scores.parts[NUMBER], shape(given.statistics[0])
        (_, _, entries), m0 = shape(table), m_block * TILE_M
        m_end = minimum(m0 + TILE_M, seqlen_q)
        first, end = visible_keys(band, m0, m_end)
        near, far = keys_with(walk.entry, entries, offsets[batch, head], m0, m_end)
        return maximum(first, near) // TILE_N, (minimum(end, far) + TILE_N - 1) // TILE_N

    @device
    def sum_of_entry(total, dS, given, batch, head, m0, n0, walk):
        table, offsets = given.scores.parts[NUMBER]
        return total + where(entries_of(m0, offsets[batch, head], n0, table) == walk.entry, dS, 0)

    _, shared, sum_of = sum_step(keys_of, sum_of_entry, **about)

    def kernel(
        mQ, mK, mV, mDO, mSums, mLse, mDelta, mask, scores, drops, group_size, kept_scale, own_batches, own_heads, adds
    ):
        given = DsArguments((mQ, mK, mV, mDO), (mLse, mDelta), mask, scores, drops, group_size, kept_scale)
        (batches, heads, seqlen_q), (_, _, parts, _, entries) = shape(mLse), shape(mSums)
        entry, number = block_index() % entries, block_index() // entries
        share = share_of(number, parts, own_batches, own_heads, batches, heads)
        total = row_sum(sum_of(Entry(share, index(0), (seqlen_q + TILE_M - 1) // TILE_M, entry), given))
        target = mSums[share.own_batch, share.own_head, share.part][:, entry]
        if adds:
            total = total + load(target, ROWS, 0)
        save(target, total, 0)

    return source(kernel, arguments_of("sums"), shared, sum_type(dtype), about)


def source(kernel, arguments, shared, own_dtype, about):
    """The Source; own_dtype: of the array to which the kernel writes."""
    dtype, mask, score = DTYPES[about["dtype"]], about["mask"], about["score"]
    signature = signature_of(kernel, arguments, dtype, sum_type(dtype), mask=mask, score=score, own_dtype=own_dtype)
    return Source(kernel, signature, about["threads"], about["blocks"], shared.nbytes)


class Summed(NamedTuple):
    """A row of the tables: Tiles, and how many blocks a multiprocessor is to hold."""

    unit: str
    tile_m: int
    tile_n: int
    threads: int
    lanes: int = 0
    blocks: int = 1


# (with tensor cores, bytes of an element): {largest head_dim: rows}; where there is none, those of `backward` for dQ.
# us of the gradient of a bias that 256 elements of a batch share, 8 heads, 256 queries and keys, on an H100
TILES = {
    (True, 2): {
        64: (Summed("mma", 64, 64, 128, blocks=3),), 128: (Summed("mma", 64, 64, 128, blocks=3),),
        256: (Summed("mma", 64, 32, 128, blocks=2), Summed("mma", 64, 16, 128)),
    },
    (True, 4): {
        64: (Summed("mma", 64, 64, 128, blocks=2),),                # 897; 128 x 64 1114, 64 x 32 1133
        128: (Summed("mma", 64, 32, 128, blocks=2), Summed("mma", 32, 32, 64)),
    },
    (True, 8): {
        64: (  # 1742, 2058, 2551
            Summed("mma", 64, 64, 256, 8), Summed("mma", 64, 32, 128, blocks=2), Summed("mma", 64, 16, 128, blocks=2),
        ),
        128: (Summed("mma", 64, 32, 256, 8), Summed("mma", 32, 16, 64)),
    },
}  # fmt: skip
SHORT, TILES_OF_SHORT = 32, {  # where there are no more queries than that, nor keys
    (True, 2): {64: (Summed("mma", 32, 32, 64, blocks=8),), 128: (Summed("mma", 32, 32, 64, blocks=6),)},
    (True, 4): {64: (Summed("mma", 32, 32, 64, blocks=6),), 128: (Summed("mma", 32, 32, 64, blocks=3),)},
    (True, 8): {64: (Summed("mma", 32, 32, 64, blocks=4),), 128: (Summed("mma", 32, 16, 64),)},
}  # fmt: skip
SUMMED = {  # for sums along rows, of which a warp holds whole ones, and along diagonals: before others
    (True, 4): {256: (Summed("mma", 64, 32, 128), Summed("mma", 64, 16, 128), Summed("mma", 32, 16, 64))},
    (True, 8): {
        64: (Summed("mma", 64, 32, 128, blocks=2), Summed("mma", 64, 16, 128)),
        128: (Summed("mma", 64, 32, 128), Summed("mma", 32, 16, 64)),
        256: (Summed("mma", 32, 16, 64), Summed("mma", 16, 8, 32)),
    },
}


def rows(factory, work, sums_cols=False, **others):
    is_short = max(work.problem.seqlen_q, work.problem.seqlen_k) <= SHORT
    tables = *[TILES_OF_SHORT] * is_short, *[SUMMED] * (sums_cols or factory is not bias_gradient), TILES
    found = tuple(row for table in tables for row in rows_of(table, {}, work))
    return found or tuple(Summed(*row[:5]) for row in rows_of(TILES_Q, UNDER_PRESSURE_Q, work))


DIAGONALS = Scratch("skewed"), Scratch("plain")


def arguments_of(name, *others):
    """What a kernel takes that writes to an array of this name."""
    return (
        Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("do"), Own(name), Statistic("lse_log2"),
        Statistic("delta"), MASK, SCORE, DROPOUT, "group_size", "kept_scale", *OWN_NUMBERS, *others,
    )  # fmt: skip


def spec_of(factory, name, **about):
    """The Spec of a kernel that writes to an array of this name; about: more parameters."""
    return Spec(
        factory,
        arguments_of(name, *DIAGONALS if factory is diagonal_sums else ()),
        tiles=lambda work: rows(factory, work, **about),
        parameters=lambda work, tiles: parameters(work, tiles) | about,
    )

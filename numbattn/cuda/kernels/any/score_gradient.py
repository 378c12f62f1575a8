"""Gradients of a score's arrays, on any GPU: each block adds up dS over all elements that one piece of an array serves.

`bias_gradient` keeps a tile of a bias' gradient and loops over the score matrices that the bias is broadcast to, and
over the tiles along its broadcast axes. `diagonal_sums` is for functions of j - i: it keeps a diagonal of tiles, and
sums along the diagonals. If there would be fewer blocks than a GPU holds, each takes only a share of the score
matrices, and `sum_parts` adds up the results. Both recompute S, P and dS, as in `backward`: no temporaries of the size
of S, no atomics, the same bits in every run.

The tangents of these gradients are the same sums over the tangent of dS, recomputed as in `backward_tangent`.
"""

from functools import partial
from typing import Any, NamedTuple

from ...build import Source
from ...tile import (
    SharedMemory,
    block_index,
    commit_copies,
    convert,
    device,
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
from ...words.arguments import LSE_LOG2, BlockScratch, Matrix, Own, Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..scores import SCORE, parts_of
from ..shared.diagonals import diagonal_steps
from ..shared.dropout import DROPOUT, drop_step
from ..shared.layouts import DTYPES, buffers, sum_type, sums
from ..shared.shares import score_matrix, share_of
from ..shared.slices import sliced_product
from ..shared.tangents import OperandRows, products_step, tiles_step
from ..shared.visibility import MASK, band_of, element_test, is_shown, needs_test, visible_keys
from ..tables import parameters, sliced
from .score_gradient_ds import ALONG, DsArguments, ds_steps
from .score_gradient_tiles import rows

OWN_NUMBERS = "own_batches", "own_heads", "adds"  # how many matrices the array has, and whether it holds sums already


class ScoreTile(NamedTuple):
    """A tile of a score matrix. Its row goes on up to n_end."""

    matrix: Any  # number of a MatrixShare
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
        """The next tile that is not empty; if there is none, its matrix is the end of the MatrixShare."""
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


def sum_step(keys_of, add, about, add_both=None):
    """Steps that add up tiles of dS after part number `after` of the score: their layout, shared memory, and the device
    function (walk, given, total) -> total with the sum over all tiles that a block walks over. about: the parameters of
    the factory.

    walk: `share`, and the tiles of queries from m_first to m_end; keys_of: the device function (walk, given, band,
    batch, head, m_block) -> the tiles of keys in such a row; add: (total, dS, S, given, batch, head, m0, n0, walk) ->
    total, with S = Q K^T. tangents: None, or which of "q", "k", "v" and "do" have one: then the tangent of dS is added
    up; or add_both is called, with dS and S in pairs with their tangents.

    dO and V of the next tile are in flight while S is computed, Q and K while P, dS and the next dP are.
    """
    dtype, mask, score, nbytes, tiles = (about[name] for name in ("dtype", "mask", "score", "nbytes", "tiles"))
    head_dim, head_dim_v, tangents = about["head_dim"], about["head_dim_v"], about.get("tangents")
    dtype, ACC, (_, tile_m, tile_n, threads, *_) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    S_TILE = sums(tiles, tile_m, tile_n)
    shared = SharedMemory()
    has_tq, has_tk, has_tv, has_tdo = (name in (tangents or ()) for name in ("q", "k", "v", "do"))
    of_rows, of_keys = (shared, dtype, threads, tile_m), (shared, dtype, threads, tile_n)
    if about.get("by_slices"):
        products = partial(products_by_slices, of_rows=of_rows, of_keys=of_keys, layout=S_TILE, nbytes=nbytes)
    else:
        products = partial(products_of_tiles, of_rows=of_rows, of_keys=of_keys, layout=S_TILE, nbytes=nbytes)
    copy_q, copy_k, scores_of = products(head_dim, has_tq, has_tk)
    copy_do, copy_v, dp_of = products(head_dim_v, has_tdo, has_tv)
    sees, tested, drop = element_test(mask, S_TILE), needs_test(mask), drop_step(S_TILE, about["dropout"])
    band_at, (first_place, next_place) = band_of(mask), walk_steps(keys_of, mask)
    TILE_M, TILE_N = tile_m, tile_n
    ds_of, tangents_of = ds_steps(score, tangents, about.get("tscore", ()), S_TILE, dtype, ACC, about["after"])
    if tangents is not None and add_both is None:
        ds_of = second_of(ds_of)
    clear, add = (clear_one, add) if add_both is None else (clear_two, add_both)

    @device
    def rows_of(given, at):
        """Rows of queries and of keys, without those beyond a sequence's length, which may be NaN."""
        band, none = band_at(given.mask, at.batch, at.head), index(0)
        queries = OperandRows(at.batch, at.head, none, maximum(band[2], 1))
        return queries, OperandRows(at.batch, at.head // given.group_size, none, maximum(band[3], 1))

    @device
    def fetch_do_and_v(given, at, end):
        (_, _, V, dO), (_, _, tV, tdO) = given.inputs, tangents_of(given)
        if at.matrix < end:
            queries, keys = rows_of(given, at)
            copy_do(0, dO, tdO, queries, at.m_block * TILE_M)
            copy_v(0, V, tV, keys, at.n_block * TILE_N)
        commit_copies()

    @device
    def fetch_q_and_k(given, at, end):
        (Q, K, _, _), (tQ, tK, _, _) = given.inputs, tangents_of(given)
        if at.matrix < end:
            queries, keys = rows_of(given, at)
            copy_q(0, Q, tQ, queries, at.m_block * TILE_M)
            copy_k(0, K, tK, keys, at.n_block * TILE_N)
        commit_copies()

    @device
    def sum_of(walk, given, total):
        """Called by all threads."""
        (Q, K, V, dO), end, at = given.inputs, walk.share.end, first_place(walk, given)
        sync_threads()                                          # all have read the last tiles
        fetch_do_and_v(given, at, end)
        fetch_q_and_k(given, at, end)
        while at.matrix < end:
            batch, head, m0, n0 = at.batch, at.head, at.m_block * TILE_M, at.n_block * TILE_N
            following, (queries, keys) = next_place(walk, given, at), rows_of(given, at)
            wait_copies(1)
            sync_threads()                                      # dO and V have arrived
            dP, tdP = dp_of(dO, V, queries, keys, m0, n0)       # Alg. 4 line 17
            wait_copies()
            sync_threads()                                      # Q and K have arrived; all have read dO and V
            fetch_do_and_v(given, following, end)
            S, tS = scores_of(Q, K, queries, keys, m0, n0)      # line 11
            sync_threads()                                      # all have read Q and K
            fetch_q_and_k(given, following, end)
            Z = drop(full(S_TILE, given.kept_scale), given.drops, batch, head, m0, n0)  # line 14
            dS = ds_of(S, tS, dP * Z, tdP * Z, given, batch, head, queries.length, m0, n0)
            band = band_at(given.mask, batch, head)
            if tested(given.mask, band, batch, head, at.m_block, at.n_block, m0, m0 + TILE_M, n0, n0 + TILE_N):
                dS = clear(sees(given.mask, band, batch, head, m0, n0), dS)  # line 12: what is masked may be NaN
            total = add(total, dS, (S, tS), given, batch, head, m0, n0, walk)
            at = following
        return total

    return S_TILE, shared, sum_of


def products_of_tiles(width, has_tx, has_ty, *, of_rows, of_keys, layout, nbytes):
    """Device functions: those of `tiles_step` that copy tiles of X and Y, and their tangents; (X, Y, queries, keys, m0,
    n0) -> the product X Y^T of these tiles, which have arrived, and its tangent."""
    (copy_x, x_tiles), (copy_y, y_tiles) = (
        tiles_step(*of, width, has_tangent, nbytes) for of, has_tangent in ((of_rows, has_tx), (of_keys, has_ty))
    )
    _, dtype, *_ = of_rows
    products = products_step(layout, sum_type(dtype), dtype, has_tx, has_ty)

    @device
    def product(X, Y, queries, keys, m0, n0):
        (sX, stX), (sY, stY) = x_tiles(0), y_tiles(0)
        return products(sX, stX, sY, stY)

    return copy_x, copy_y, product


def products_by_slices(width, has_tx, has_ty, *, of_rows, of_keys, layout, nbytes):
    """`products_of_tiles` of large head_dims, without tangents; width: of a slice. The product loads its tiles."""
    _, dtype, *_ = of_rows
    (of_x,), (of_y,) = buffers(*of_rows, [width]), buffers(*of_keys, [width])
    *_, product = sliced_product(True, width, layout, None, of_x, of_y, sum_type(dtype)(0), nbytes)

    @device
    def copy(stage, X, tX, rows, first):
        pass

    @device
    def products(X, Y, queries, keys, m0, n0):
        x, y = X[queries.batch, queries.head][: queries.length], Y[keys.batch, keys.head][: keys.length]
        Z = product((0, 0), x, y, m0, n0, 0)
        return Z, Z                                             # nobody asks for the tangent

    return copy, copy, products


@device
def clear_one(visible, dS):
    return where(visible, dS, 0)


@device
def clear_two(visible, dS):
    return where(visible, dS[0], 0), where(visible, dS[1], 0)


def second_of(both):
    """The tangent of dS alone, from the device function that computes both."""

    @device
    def tangent_of_ds(S, tS, dP, tdP, given, batch, head, length, m0, n0):
        _, tdS = both(S, tS, dP, tdP, given, batch, head, length, m0, n0)
        return tdS

    return tangent_of_ds


@device
def plain_sum(total, dS, S, given, batch, head, m0, n0, walk):
    return total + dS


class Rectangle(NamedTuple):
    """Tiles of the score matrices of a MatrixShare: of queries from m_first to m_end, of keys from n_first to n_end."""

    share: Any
    m_first: Any
    m_end: Any
    n_first: Any
    n_end: Any


def bias_gradient(*, out_dtype, sums_rows, sums_cols, **about):
    """The gradient of part number `after`.

    sums_rows: over all queries, up to the rows of a tile, which are left to be summed; sums_cols: over all keys.
    """
    dtype, score, after, tiles = DTYPES[about["dtype"]], about["score"], about["after"], about["tiles"]
    TILE_M, TILE_N, ACC, SUMS_ROWS, SUMS_COLS = tiles.tile_m, tiles.tile_n, sum_type(dtype), sums_rows, sums_cols
    S_TILE = sums(tiles, TILE_M, TILE_N)
    ROWS, ZERO = S_TILE.row_vector(), ACC(0)
    weighted = parts_of(score)[after].weighted_sum(after, S_TILE, ACC)

    @device
    def keys_of(walk, given, band, batch, head, m_block):
        m0, (_, _, seqlen_q) = m_block * TILE_M, shape(given.statistics[1])
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, seqlen_q))
        return maximum(first // TILE_N, walk.n_first), minimum((end + TILE_N - 1) // TILE_N, walk.n_end)

    @device
    def weighted_sum(total, dS, S, given, batch, head, m0, n0, walk):
        return weighted(total, dS, given.scores, batch, head, m0, n0)

    _, shared, sum_of = sum_step(keys_of, plain_sum if weighted is None else weighted_sum, about)

    def kernel(
        mQ, mK, mV, mDO, mDB, mLse, mDelta, mask, scores, drops, along, group_size, kept_scale, own_batches,
        own_heads, adds,
    ):  # fmt: skip
        given = DsArguments((mQ, mK, mV, mDO), (mLse, mDelta), mask, scores, drops, group_size, kept_scale, along)
        (batches, heads, seqlen_q), (_, _, seqlen_k, _), (_, _, parts, _, _) = shape(mDelta), shape(mK), shape(mDB)
        m_blocks, n_blocks = (seqlen_q + TILE_M - 1) // TILE_M, (seqlen_k + TILE_N - 1) // TILE_N
        m_count, n_count = 1 if SUMS_ROWS else m_blocks, 1 if SUMS_COLS else n_blocks
        tile, number = block_index() % (m_count * n_count), block_index() // (m_count * n_count)
        m_first, n_first = tile // n_count, tile % n_count
        m_end, n_end = m_blocks if SUMS_ROWS else m_first + 1, n_blocks if SUMS_COLS else n_first + 1
        share = share_of(number, parts, own_batches, own_heads, batches, heads)
        dB = sum_of(Rectangle(share, m_first, m_end, n_first, n_end), given, full(S_TILE, ZERO))
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
    """Sums of dS after part number `after` along the diagonals of a diagonal of tiles: see `diagonal_steps`.

    All tiles (m_block, diagonal + m_block * tile_m / tile_n) have the same j - i in the same place: their sum goes to
    mSkewed, whose rows are shifted so that the columns of mPlain, the same memory, are the diagonals.
    """
    dtype, (_, TILE_M, TILE_N, threads, *_) = DTYPES[about["dtype"]], about["tiles"]
    count, diagonal_of, sum_along = diagonal_steps(TILE_M, TILE_N, threads)

    @device
    def keys_of(walk, given, band, batch, head, m_block):
        m0, (_, _, seqlen_q) = m_block * TILE_M, shape(given.statistics[1])
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, seqlen_q))
        n0 = walk.n_first + (m_block - walk.m_first) * TILE_M
        n_block = n0 // TILE_N
        return n_block, n_block + 1 if first < n0 + TILE_N and n0 < end else n_block

    S_TILE, shared, sum_of = sum_step(keys_of, plain_sum, about)
    ZERO = sum_type(dtype)(0)

    def kernel(
        mQ, mK, mV, mDO, mSums, mLse, mDelta, mask, scores, drops, along, group_size, kept_scale, own_batches,
        own_heads, adds, mSkewed, mPlain,
    ):  # fmt: skip
        given = DsArguments((mQ, mK, mV, mDO), (mLse, mDelta), mask, scores, drops, group_size, kept_scale, along)
        (batches, heads, seqlen_q), (_, _, seqlen_k, _), (_, _, parts, _, _) = shape(mDelta), shape(mK), shape(mSums)
        items, place = own_batches * own_heads * parts * count(seqlen_q, seqlen_k), block_index()
        for item in range(block_index(), items, grid_size()):
            at = diagonal_of(item, seqlen_q, seqlen_k, parts, own_batches, own_heads, batches, heads)
            total = sum_of(at, given, full(S_TILE, ZERO))
            sync_threads()                                      # all have read the diagonals before
            save(mSkewed[place], total, 0)
            sync_threads()
            sum_along(mSums[at.share.own_batch, at.share.own_head, at.share.part], at.number, mPlain[place], adds)

    return source(kernel, arguments_of("sums", *DIAGONALS), shared, sum_type(dtype), about)


def source(kernel, arguments, shared, own_dtype, about):
    """The Source; own_dtype: of the array to which the kernel writes."""
    dtype, mask, score, tiles = DTYPES[about["dtype"]], about["mask"], about["score"], about["tiles"]
    tangents, tscore = about.get("tangents"), about.get("tscore", ())
    signature = signature_of(
        kernel, arguments, dtype, sum_type(dtype), mask=mask, score=score, own_dtype=own_dtype, tangents=tangents,
        tscore=tscore, given=[f"t{name}" for name in tangents or ()],
    )  # fmt: skip
    return Source(kernel, signature, tiles.threads, tiles.blocks, shared.nbytes)


DIAGONALS = BlockScratch("skewed"), BlockScratch("plain")


def arguments_of(name, *others):
    """What a kernel takes that writes to an array of this name."""
    return (
        Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("do"), Own(name), LSE_LOG2,
        Statistic("delta"), MASK, SCORE, DROPOUT, ALONG, "group_size", "kept_scale", *OWN_NUMBERS, *others,
    )  # fmt: skip


def spec_of(factory, name, **about):
    """The Spec of a kernel that writes to an array of this name; about: more parameters."""
    return Spec(
        factory,
        arguments_of(name, *DIAGONALS if factory is diagonal_sums else ()),
        tiles=lambda work: rows(work, factory is bias_gradient, **about),
        parameters=lambda work, tiles: of_scores(work, tiles) | about | along(work),
        slices=True,
    )


def of_scores(work, tiles):
    """The parameters of kernels that compute S; none take tangents by slices."""
    return parameters(work, tiles) if work.is_along else sliced(work, tiles)


def along(work):
    """The parameters of tangents, where there are some."""
    if not work.is_along:
        return {}
    return {"tangents": tuple([name for name in ("q", "k", "v", "do") if f"t{name}" in work.dtypes]),
            "tscore": work.tscore}  # fmt: skip

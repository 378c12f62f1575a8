"""Attention of few queries, as in decoding (FlashDecoding): Algorithm 2 over chunks of keys, which `combine` merges.

A persistent block takes work tiles: queries that share keys, as the rows of one tile, and a chunk of these keys. Warp w
takes tiles w, w + WARPS ... of these keys, which it loads itself, and already loads those of the next work tile while
the block's warps merge their results.

The keys of a chunk, those of each warp, and the order of all sums depend on nothing else in a call. So the results of a
sequence are the same bit for bit, alone or in any batch.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...build import Source
from ...compiler import types
from ...tile import (
    WARP,
    Alignment,
    SharedMemory,
    allocate,
    block_index,
    copy_layout,
    device,
    dot,
    fold_index,
    full,
    get,
    get_number,
    grid_size,
    index,
    load,
    maximum,
    minimum,
    mma,
    put,
    put_number,
    rescaled,
    row_sum,
    save,
    shape,
    sync_threads,
    sync_warp,
    thread_index,
    where,
)
from ...tile.alignment import VECTOR_BYTES
from ...views import View
from ...words.arguments import COUNTERS, Argument, Matrix
from ...words.signatures import signature_of
from ...words.spec import Spec
from ...words.steps import At
from ..scores import SCORE, differs_by_head, may_be_far, score_steps
from ..shared.cached import EIGHT_BITS, cached
from ..shared.chunks import count_of_chunks, first_key, longest_steps
from ..shared.dropout import DROPOUT, drop_step
from ..shared.layouts import DTYPES, sum_type
from ..shared.schedule import finish, next_number, overlap_launches, split
from ..shared.softmax import alpha_steps, softmax_steps
from ..shared.visibility import MASK, band_of, element_test, is_shown, needs_test, visible_keys
from ..tables import compiled_in, has_tensor_cores, head_dims, is_wide, lse_alone
from .combine import PARTIALS
from .decode_loads import KEYS, WARPS, cp_async_loads
from .packing import packing_steps, queries_of, shares_keys

ROWS = 16  # of a work tile
MANY, LONG = 16, 32  # numbers drawn at once; after how many draws of empty tiles
FEW = 16  # queries, at most


class DecodeTile(NamedTuple):
    """Some heads or sequences that share keys, and the tiles [n_block, n_blocks) of a chunk that they see."""

    number: Any
    batch: Any  # the first one
    head_k: Any
    head: Any  # the first one
    end: Any  # of the heads, or of the sequences
    chunk: Any
    n_block: Any
    n_blocks: Any
    band: Any


class DecodeCall(NamedTuple):
    """What determines the work tiles."""

    mask: Any
    heads: Any
    group_size: Any
    tiles_of_chunk: Any
    chunks: Any
    seqlen_q: Any
    tiles: Any  # work tiles


class CacheArgument(Argument):
    """The other arrays of a `KVCache`, in a tuple: see kernels.shared.cached."""

    def flat(self, planner, work):
        if work.problem.page_size:
            yield planner.whole("table")
        for name in ("k scale", "v scale") if held_of(work.problem) in EIGHT_BITS else ():
            array, (pointer, itemsize, shape, strides), has_batch = planner.whole(name)
            if len(shape) > 1:                                  # of tokens: a column of a matrix for each head
                shape, strides = (*shape, 1), (*strides, itemsize)
            yield At(array, View(pointer, itemsize, shape, strides), has_batch)

    def type(self, about):
        return types.Tuple.from_types(about.cached.types)


def decode(
    *, loads=cp_async_loads, dtype, held, head_dim, head_dim_v, tiles, page_size, mask, mask_by_head, score, dropout,
    nbytes,
):  # fmt: skip
    """The kernel for these KeyTiles and head_dims rounded up.

    page_size: of a cache in pages, else 0; held: the dtype of a cache of fewer bits than q, or None; mask_by_head:
    whether heads may have lengths of their own; nbytes: alignment of the rows of q, k and v.
    """
    dtype, ACC, (tile_n, queries, of_batch) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    S_TILE, O_TILE, Q_TILE = (mma(ROWS, cols, WARP).folded(queries) for cols in (tile_n, head_dim_v, head_dim))
    if held and dtype.itemsize == 2:
        O_TILE, Q_TILE = O_TILE.by_fours(), Q_TILE.by_fours()
    ROW_VECTOR, PARTS = S_TILE.row_vector(), S_TILE.row_parts()
    shared = SharedMemory()
    held = cached(shared, dtype, held, S_TILE, page_size, WARPS)
    start, stages, load_k, load_v, wait_k, wait_v, next_use, keys, maps = loads(
        shared, held, head_dim, head_dim_v, tile_n, page_size, mask, nbytes
    )
    of_keys, of_values, of_sums = held.of_keys, held.of_values, held.of_sums
    TILE_N, ROWS_OF = tile_n, Alignment(nbytes)
    ZERO, NO_SCORE = ACC(0), ACC(-np.inf)
    band_at, sees, tested, shown = band_of(mask), element_test(mask, S_TILE), needs_test(mask), is_shown(mask)
    apply_score, drop = heads_step(score, S_TILE, ACC), drop_step(S_TILE, dropout)
    no_max, softmax_step = softmax_steps(ACC, may_be_far(score), dtype.itemsize > 2)
    tiles_of_chunk, place_of, rows_of = packing_steps(ROWS, queries, of_batch)
    _, alpha_of = alpha_steps(ACC, dtype.itemsize > 2 and not may_be_far(score))
    put_warps, save_merged = merge_steps(shared, head_dim_v, rows_of, ACC, alpha_of)
    DRAWN, (count_chunks, counted) = shared.tile(1, 1, np.int32, stages=2), longest_steps(shared, mask, mask_by_head)

    @device
    def work_tile(number, call):
        """Work tile `number`. Chunks vary slowest: sequences that have ended leave the last numbers empty."""
        chunk, tile = split(minimum(number, call.tiles - 1), call.tiles_of_chunk)
        batch, head_k, head, end = place_of(tile, call)
        band = band_at(call.mask, batch, head)
        first_seen, end_seen = visible_keys(band, 0, call.seqlen_q)
        n_block = maximum(first_seen, first_key(chunk)) // TILE_N
        n_blocks = (minimum(end_seen, first_key(chunk + 1)) + TILE_N - 1) // TILE_N if number < call.tiles else 0
        return DecodeTile(number, batch, head_k, head, end, chunk, n_block, n_blocks, band)

    @device
    def is_empty(work):
        return work.n_block >= work.n_blocks

    @device
    def draw(counters, call):
        """Put the number of the next work tile that is not empty into shared memory, and the end of those drawn: one at
        a time, but many after a long run of empty ones, and none beyond the chunks of the longest sequence."""
        number, end = get_number(allocate(DRAWN, 0)), get_number(allocate(DRAWN, 1))
        draws, last, found = index(0), call.tiles_of_chunk * counted(call.chunks), False
        while not found:
            number += 1
            if number >= end:
                step = index(MANY if draws >= LONG else 1)
                number = next_number(counters, 2 * grid_size(), step)
                end = number + step
                draws += 1
            found = number >= last or not is_empty(work_tile(number, call))
        put_number(allocate(DRAWN, 0), number if number < last else call.tiles)
        put_number(allocate(DRAWN, 1), end)

    @device
    def next_tile(work, following, n_block, call):
        """This warp's next tile of keys that is not empty, from number n_block on, and its work tile."""
        while n_block < work.n_blocks and not shown(call.mask, work.batch, work.head, 0, n_block):
            n_block += WARPS
        if n_block < work.n_blocks:
            return work, n_block
        return following, following.n_block + thread_index() // WARP

    def kernel(mQ, mK, mV, cache, mPartial, mStatistics, mask, scores, drops, counters, group_size, scale_log2):
        start(mK, mV)
        overlap_launches()
        batches, heads, chunks, seqlen_q, _ = shape(mStatistics)
        of_chunk = tiles_of_chunk(batches, heads, group_size)
        tiles = of_chunk * chunks
        call = DecodeCall(mask, heads, group_size, of_chunk, chunks, seqlen_q, tiles)
        warp = thread_index() // WARP
        work, following = work_tile(block_index(), call), work_tile(block_index() + grid_size(), call)
        if thread_index() == 0:                                 # nothing has been drawn
            put_number(allocate(DRAWN, 0), tiles)
            put_number(allocate(DRAWN, 1), 0)
        K, V = stages(warp)
        ahead, n_ahead = next_tile(work, following, work.n_block + warp, call)
        load_k(K, mK, cache, ahead, n_ahead)
        load_v(V, mV, cache, ahead, n_ahead)
        if warp == 0:
            count_chunks(mask)
        while work.number < tiles:
            if thread_index() == 0 and following.number < tiles:
                draw(counters, call)
            Q = load(rows_of(mQ, work, ROWS_OF), Q_TILE, 0)
            O, m, l = full(O_TILE, ZERO), full(ROW_VECTOR, no_max(scale_log2)), full(PARTS, ZERO)
            while ahead.number == work.number and n_ahead < work.n_blocks:
                n_block, n0 = n_ahead, n_ahead * TILE_N
                sK = wait_k(K, work, n_block)
                S = of_keys(dot(S_TILE, Q, sK.T), cache, work)  # Alg. 2 line 10: S = Q K^T
                sync_warp()                                     # all lanes have read K
                ahead, n_ahead = next_tile(work, following, n_block + WARPS, call)
                K = next_use(K)
                load_k(K, mK, cache, ahead, n_ahead)            # in flight while O is computed
                S = apply_score(S, scores, work, n0)
                if tested(mask, work.band, work.batch, work.head, 0, n_block, 0, seqlen_q, n0, n0 + TILE_N):
                    S = where(sees(mask, work.band, work.batch, work.head, 0, n0), S, NO_SCORE)    # line 11: MASK(S)
                P, m, l, alpha = softmax_step(S, m, l, scale_log2)          # lines 12 and 13
                P = drop(P, drops, work.batch, work.head, 0, n0)            # line 14: dropout(P)
                sV = wait_v(V, work, n_block)
                P = of_values(P, cache, work)
                O = dot(rescaled(O, alpha), P, sV)              # line 15: O = alpha O + P V
                sync_warp()                                     # all lanes have read V
                V = next_use(V)
                load_v(V, mV, cache, ahead, n_ahead)            # in flight while S is computed
            put_warps(of_sums(O, cache, work), m, row_sum(l), warp)
            sync_threads()
            save_merged(mPartial[:, :, work.chunk], mStatistics[:, :, work.chunk], work, scale_log2)
            work, following = following, work_tile(get_number(allocate(DRAWN, 0)), call)
            if n_ahead >= ahead.n_blocks:                       # the next work tile has none for this warp
                ahead, n_ahead = following, following.n_block + warp
                load_k(K, mK, cache, ahead, n_ahead)
                load_v(V, mV, cache, ahead, n_ahead)
            sync_threads()                                      # all have read what the next merge overwrites
        if thread_index() == 0 and tiles > grid_size():         # else no block has drawn
            finish(counters, grid_size())

    arguments, dtypes = (Matrix("q"), *keys, *ARGUMENTS), {"k": held.dtype, "v": held.dtype}
    about = {"mask": mask, "score": score, "cached": held, "head_dim_v": head_dim_v}
    signature = signature_of(kernel, arguments, dtype, ACC, dtypes, **about)
    return Source(kernel, signature, WARP * WARPS, shared=shared.nbytes, overlaps=True, tensor_maps=maps)


def merge_steps(shared, head_dim_v, rows_of, ACC, alpha_of):
    """Device functions: (O, m, l, warp) puts a warp's results into shared memory; (mO, mStatistics, work, scale_log2)
    merges those of all warps, in order, and saves them."""
    ROWS_OF, UNALIGNED = Alignment(16), Alignment(0)
    SHARED_O, SHARED_M, SHARED_L = (shared.tile(ROWS, cols, ACC, WARPS) for cols in (head_dim_v, 1, 1))
    O_TILE = copy_layout(ROWS, head_dim_v, WARPS * WARP, 4)
    ROW_VECTOR = O_TILE.row_vector()

    @device
    def put_warps(O, m, l, warp):
        put(allocate(SHARED_O, warp), O)
        put(allocate(SHARED_M, warp), m)
        put(allocate(SHARED_L, warp), l)

    @device
    def save_merged(mO, mStatistics, work, scale_log2):
        m = get(allocate(SHARED_M, 0), ROW_VECTOR)
        for warp in range(1, WARPS):
            m = maximum(m, get(allocate(SHARED_M, warp), ROW_VECTOR))
        alpha = alpha_of(get(allocate(SHARED_M, 0), ROW_VECTOR), m, scale_log2)
        l, O = get(allocate(SHARED_L, 0), ROW_VECTOR) * alpha, get(allocate(SHARED_O, 0), O_TILE) * alpha
        for warp in range(1, WARPS):
            alpha = alpha_of(get(allocate(SHARED_M, warp), ROW_VECTOR), m, scale_log2)
            l = l + get(allocate(SHARED_L, warp), ROW_VECTOR) * alpha
            O = O + get(allocate(SHARED_O, warp), O_TILE) * alpha
        save(rows_of(mO, work, ROWS_OF), O, 0)
        save(rows_of(mStatistics[:, :, :, :1], work, UNALIGNED), m, 0)
        save(rows_of(mStatistics[:, :, :, 1:], work, UNALIGNED), l, 0)

    return put_warps, save_merged


def heads_step(score, layout, ACC):
    """The device function (S, scores, work, n0) -> S after all parts of the score, for each head its own."""
    LAYOUT, (apply, *_) = layout, score_steps(score, layout, ACC, after=len(score))

    @device
    def alike(S, scores, work, n0):
        S, _ = apply(S, scores, work.batch, work.head, index(0), n0)
        return S

    @device
    def by_head(S, scores, work, n0):
        found = S
        for head in range(work.head, work.end):
            of_head, _ = apply(S, scores, work.batch, head, index(0), n0)
            found = where(fold_index(LAYOUT) == head - work.head, of_head, found)
        return found

    return by_head if differs_by_head(score) else alike


class KeyTiles(NamedTuple):
    """A row: tiles of tile_n keys; each warp has two stages, one of K and one of V."""

    tile_n: int
    queries: int = ROWS  # how many rows of a work tile each of its heads has, a power of two
    of_batch: bool = False  # whether it has one head of many sequences instead of many heads, see `shares_keys`

    unit, tile_m = "mma", ROWS


TILES = [KeyTiles(tile_n) for tile_n in (128, 64, 32, 16, 8)]
TILE_BYTES, KEY_BYTES = 1 << 14, 512  # that a tile has at most, and a key: larger head_dims spill
COLUMN_BYTES = 32  # that a column of a tile has at least: tensor cores multiply as many at once


def rows(work):
    return rows_for(work.problem)


def rows_for(problem):
    """The largest tiles first. A key of fewer bits than q is widened."""
    size = next(size for size in (64, 128, 256) if max(head_dims(problem)) <= size)
    nbytes = problem.dtype.itemsize
    if size * nbytes > KEY_BYTES:
        return []
    return [row for row in TILES if COLUMN_BYTES <= row.tile_n * nbytes <= TILE_BYTES // size]


def has_few_queries(work):
    """Whether chunks of keys are computed by themselves. That, too, must not differ between sequences of a batch."""
    return has_tensor_cores(work.device) and work.problem.seqlen_q <= FEW


def takes(work):
    return has_few_queries(work) and SPEC.fitting(work) is not None


def held_of(problem):
    """The name of the dtype of a cache of fewer bits than q."""
    return problem.cache.dtype.name if problem.cache and problem.cache.dtype != problem.dtype else None


def reads(problem, device):
    """Whether the kernel reads a cache in place."""
    if not has_tensor_cores(device) or problem.seqlen_q > FEW or is_wide(problem):
        return False
    if held_of(problem) and problem.dtype.itemsize > 4:
        return False
    return any(shared_bytes(problem, tiles) <= device.shared for tiles in rows_for(problem))


def shared_bytes(problem, tiles):
    return _shared_bytes(problem.dtype.name, held_of(problem), *head_dims(problem), tiles)


@cache
def _shared_bytes(dtype, held, head_dim, head_dim_v, tiles):
    """The kernel's shared memory, which depends on nothing else."""
    return decode(
        dtype=dtype, held=held, head_dim=head_dim, head_dim_v=head_dim_v, tiles=tiles, page_size=0, mask=(),
        mask_by_head=False, score=(), dropout=False, nbytes=VECTOR_BYTES,
    ).shared  # fmt: skip


def parameters(work, tiles, head_dims=head_dims):
    """Parameters of the factory. head_dims: a function that rounds both head_dims up."""
    tiles = tiles._replace(queries=queries_of(work, ROWS), of_batch=shares_keys(work))
    return compiled_in(work, tiles, head_dims(work.problem)) | {
        "held": held_of(work.problem), "page_size": work.problem.page_size, "mask_by_head": work.mask_by_head,
        "nbytes": work.nbytes, **lse_alone(work),
    }  # fmt: skip


def blocks(work, tiles, m_blocks, n_blocks):
    """Blocks for one element of the batch: as many as work tiles, so that a few of these spread over the GPU; if
    sequences share work tiles, as many as if they did not."""
    problem = work.problem
    heads_of_tile = ROWS // queries_of(work, ROWS)
    return problem.heads_k * -(-problem.group_size // heads_of_tile) * count_of_chunks(problem.seqlen_k)


def resident(work, tiles):
    """Two blocks a multiprocessor if their tiles of fewer bits than q fit: of 8 bits one takes a third more time."""
    if held_of(work.problem) is None:
        return 1
    return min(2, work.device.shared // shared_bytes(work.problem, tiles))


CACHE = CacheArgument()
ARGUMENTS = CACHE, *PARTIALS, MASK, SCORE, DROPOUT, COUNTERS, "group_size", "scale_log2"
SPEC = Spec(
    decode,
    (Matrix("q"), *KEYS, *ARGUMENTS),
    tiles=rows,
    parameters=parameters,
    blocks=blocks,
    persistent=True,
    resident=resident,
)

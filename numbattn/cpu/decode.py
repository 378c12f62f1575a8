"""Few queries against many keys on the CPU, as in decoding: threads share the keys, the heads of a group one pass.

Each chunk of keys gives O, m and l; the thread that computes the last chunk of a tile of queries merges them in order.
Where chunks and tiles begin, and the order of all sums, depend on nothing else in the call: o and lse of a sequence are
the same bit for bit, alone or in any batch.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..functions.compiled.exponentials import exp
from .arguments import FEW, WorkTiles, kept, tiles_of
from .compile import Kernel
from .launch import launch
from .operands import ForwardGiven
from .product import product_few, product_nt
from .record import Later, Record
from .score import score
from .scratch import scratch_of
from .softmax import absorb, add_sink, multiply, normalise, save_lse
from .tile import (
    EMPTY,
    FULL,
    add_one,
    band_of,
    clear,
    draw,
    fill,
    inline,
    inline_in_place,
    intervals_of,
    is_set,
    keys_seen,
    mask_band,
    mask_cells,
    mask_intervals,
    matrix,
    rows_of,
    scaled,
    tile,
    tile_state,
)

TILE_N, CHUNK = 512, 1024  # keys: tiles of 128 take 1.25 times as long
VERY_FEW, SHORT = 4, 128  # queries and keys: more of either, up to FEW, may take half the time in forward.py
LANES = 32  # sums of P in a row, each over every 32nd key: they are vectors, and long rows lose fewer digits
HALVES = 16, 8, 4, 2, 1  # of LANES, added up in this order
READING = 32  # the cost of reading a number of K or V from memory, in multiplications


class Few(NamedTuple):
    """Tiles of few queries, a row for all heads that share keys, and their chunks, one after the other."""

    table: Any  # as WorkTiles.table; a row's head is the first of these
    starts: Any  # row number n has the chunks starts[n]:starts[n + 1], at least one
    packed: int  # heads
    rows: int  # the most of a tile: packed x queries
    keys: int  # of all tiles


@kept
def split(problem, mask, tile_m):
    """The WorkTiles of many queries and the Few, each with its Record, or None."""
    tiles = tiles_of(problem, mask, tile_m)
    batch, head, m0, m_end, segment, end, _ = tiles.table.T
    is_few = (m_end - m0 <= VERY_FEW) | (m_end - m0 <= FEW) & (end - segment > SHORT)
    packed = 1 if tiles.by_head or not problem.heads else problem.group_size
    some = is_few & (head % packed == 0)
    keys = (end - segment)[some]
    starts = np.append(0, np.cumsum(np.maximum(-(-keys // CHUNK), 1)))
    few = Few(tiles.table[some], starts, packed, packed * int((m_end - m0)[some].max(initial=0)), int(keys.sum()))
    pairs = int(((m_end - m0) * (end - segment))[~is_few].sum())
    many = WorkTiles(tiles.table[~is_few], None, pairs, tiles.longest, tiles.by_head)
    return (many, Record(many.table)) if len(many.table) else None, (few, Record(few)) if len(few.table) else None


class DecodeCall(NamedTuple):
    """What calls for tiles of few queries have in common."""

    launched: tuple  # the Call, without addresses, its blocks, work and memory
    shapes: tuple  # of the Parts
    dtype: Any  # of sums


def call_of(problem, given, few, table):
    """The DecodeCall. given: the Records of ForwardGiven."""
    blocks, dtype = int(few.starts[-1]), problem.sum_dtype
    shapes = (blocks, few.rows, problem.head_dim_v), (blocks, 2, few.rows), (len(few.table),)
    work = READING * few.keys * (problem.head_dim + problem.head_dim_v)
    scratch, nbytes = scratch_for(problem, max(few.rows, LANES))
    call = decode_kernel.given(scratch, *given, table, _parts(*shapes, dtype))
    return DecodeCall((call, blocks, work, nbytes), shapes, dtype)


def launch_decode(call, arrays):
    """o and lse of tiles of few queries. arrays: those of ForwardGiven."""
    O, statistics, done = call.shapes
    own = np.empty(O, call.dtype), np.empty(statistics, call.dtype), np.zeros(done, np.int64)
    launch(*call.launched, (*arrays, *own))


@lru_cache(maxsize=64)
def scratch_for(problem, rows):
    return scratch_of(problem, (rows, TILE_N), S=1, QT=1, vectors=1, wide=1)


@lru_cache(maxsize=64)
def _parts(O, statistics, done, dtype):
    """The Record of Parts of these shapes."""
    return Record(Parts(Later(O, dtype), Later(statistics, dtype), Later(done, np.int64)))


class Parts(NamedTuple):
    """Results of all chunks."""

    O: Any  # (chunks, rows, features)
    statistics: Any  # m and l
    done: Any  # how many chunks of each tile are computed


class Partial(NamedTuple):
    """Queries [m0, m_end) of heads [head, head_end), head by head, and their results over the keys so far."""

    batch: Any
    head: Any
    head_end: Any
    m0: Any
    m_end: Any
    offset: Any  # of their segment
    O: Any
    m: Any
    l: Any


@Kernel
def decode_kernel(first_block, end_block, stop, scratch, given: ForwardGiven, few, parts):
    """Blocks [first_block, end_block); a block is a chunk of keys for a tile of queries."""
    mask, statistics = given.mask, parts.statistics
    for block in range(first_block, end_block):
        number = np.searchsorted(few.starts, block, side="right") - 1
        batch, first_head, m0, m_end, segment, segment_end, offset = few.table[number]
        begin, chunks = few.starts[number], few.starts[number + 1] - few.starts[number]
        first, head, head_end = segment + (block - begin) * CHUNK, first_head, first_head + few.packed
        end, count = min(first + CHUNK, segment_end), few.packed * (m_end - m0)
        while head < head_end:
            n_first, n_end, alike_end = heads_alike(mask, batch, head, head_end, m0, m_end, first, end)
            r, r_end = (head - first_head) * (m_end - m0), (alike_end - first_head) * (m_end - m0)
            rows = Partial(batch, head, alike_end, m0, m_end, offset, parts.O[block, r:r_end],
                           statistics[block, 0, r:r_end], statistics[block, 1, r:r_end])  # fmt: skip
            attend(rows, given, scratch, stop, first, n_first, n_end)
            head = alike_end
        if is_set(stop):
            return
        if add_one(parts.done, number) == chunks:
            O, m, l = parts.O[begin, :count], statistics[begin, 0, :count], statistics[begin, 1, :count]
            for other in range(begin + 1, begin + chunks):
                absorb(O, m, l, parts.O[other, :count], statistics[other, 0], statistics[other, 1])
            rows = Partial(batch, first_head, head_end, m0, m_end, offset, O, m, l)
            finish(rows, given, scratch.vectors)


@inline
def heads_alike(mask, batch, head, head_end, m0, m_end, first, end):
    """The keys of [first, end) that a head sees, and the end of the heads from it on that see the same ones."""
    seen, other = seen_by(mask, batch, head, m0, m_end, first, end), head + 1
    while other < head_end and seen_by(mask, batch, other, m0, m_end, first, end) == seen:
        other += 1
    return seen[0], seen[1], other


@inline
def seen_by(mask, batch, head, m0, m_end, first, end):
    _, _, first, end = keys_seen(mask, batch, head, m0, m_end, first, end)
    return first, end


@inline
def attend(rows, given, scratch, stop, origin, first, end):
    """Algorithm 2 over keys [first, end), without the division by l. Tiles of keys are counted from origin."""
    dtype, one = rows.m.dtype, rows.m.dtype.type(1)
    batch, head, queries = rows.batch, rows.head, rows.m_end - rows.m0
    fill(rows.m, np.finfo(dtype).min)                                       # finite, since (-inf) - (-inf) is NaN
    fill(rows.l, 0)
    clear(rows.O)
    Q = tile(scratch.QT, rows.m.size, given.q.cols)
    for h in range(rows.head, rows.head_end):
        r = (h - head) * queries
        scaled(Q[r : r + queries], matrix(given.q, batch, h, dtype)[rows.m0 : rows.m_end], dtype.type(given.scale))
    for n0 in range(first - (first - origin) % TILE_N, end, TILE_N):
        if is_set(stop):
            return
        n_end = min(n0 + TILE_N, end)
        if is_hidden(rows, given.mask, n0, n_end):
            continue                                                        # Alg. 5 line 8
        S = tile(scratch.S, rows.m.size, TILE_N)
        product_nt(S[:, : n_end - n0], Q, rows_of(given.k, batch, head, n0, n_end, scratch.wide, dtype))  # line 10
        for r in range(rows.m.size):
            softmax_row(rows, r, S[r], given, scratch, n0, n_end)           # lines 11 to 14: S becomes P
        V = rows_of(given.v, batch, head, n0, n_end, scratch.wide, dtype)
        product_few(rows.O, S[:, : n_end - n0], V, one, True)               # line 15: O = O + P V


@inline
def is_hidden(rows, mask, n0, n_end):
    """Whether none of the rows sees any of the keys [n0, n_end)."""
    for h in range(rows.head, rows.head_end):
        intervals = intervals_of(mask, rows.batch, h)
        if tile_state(mask, intervals, rows.batch, h, rows.m0, rows.m_end, n0, n_end) != EMPTY:
            return False
    return True


@inline_in_place
def softmax_row(rows, r, S, given, scratch, n0, n_end):
    """Algorithm 2, lines 11 to 14, for one row; O = alpha O of line 15."""
    queries, batch, keys = rows.m_end - rows.m0, rows.batch, n_end - n0
    head, i = rows.head + r // queries, rows.m0 + r % queries
    band, intervals = band_of(given.mask, batch, head), intervals_of(given.mask, batch, head)
    column = tile(S, keys, 1)                                               # a row is a key, as in all tiles
    score(column, given.steps, scratch.slopes, batch, head, i, n0, rows.offset)
    mask_band(column, band, i, n0)
    mask_intervals(column, intervals, i, n0)
    if tile_state(given.mask, intervals, batch, head, i, i + 1, n0, n_end) != FULL:
        mask_cells(column, given.mask, batch, head, i, n0)
    whole = (keys + LANES - 1) // LANES
    fill(S[keys : whole * LANES], -np.inf)
    alpha = softmax_lanes(tile(S, whole, LANES), scratch.vectors, rows.m[r : r + 1], rows.l[r : r + 1])
    if alpha != 1:
        for c in range(rows.O.shape[1]):
            rows.O[r, c] *= alpha
    if given.drops.threshold > 0:
        Z = tile(scratch.Z, keys, 1)
        draw(Z, scratch.words, given.drops, batch, head, i, n0)
        multiply(column, Z)


@inline
def softmax_lanes(S, lanes, m, l):
    """Lines 12 and 13: m_new = max(m, rowmax(S)), P = exp(S - m_new), l = alpha l + rowsum(P), by lanes. Returns alpha.
    """
    m_old = m[0]
    for i in range(LANES):
        lanes[i] = m_old
    for j in range(S.shape[0]):
        for i in range(LANES):
            lanes[i] = S[j, i] if S[j, i] > lanes[i] else lanes[i]
    for width in HALVES:
        for i in range(width):
            lanes[i] = lanes[width + i] if lanes[width + i] > lanes[i] else lanes[i]
    m_new = lanes[0]
    for i in range(LANES):
        lanes[i] = 0
    for j in range(S.shape[0]):
        for i in range(LANES):
            S[j, i] = exp(S[j, i] - m_new)
            lanes[i] += S[j, i]
    for width in HALVES:
        for i in range(width):
            lanes[i] += lanes[width + i]
    alpha = exp(m_old - m_new)
    m[0], l[0] = m_new, alpha * l[0] + lanes[0]
    return alpha


@inline
def finish(rows, given, alpha):
    """Lines 15 and 16."""
    batch, m0, m_end = rows.batch, rows.m0, rows.m_end
    for h in range(rows.head, rows.head_end):
        r, r_end = (h - rows.head) * (m_end - m0), (h - rows.head + 1) * (m_end - m0)
        O, m, l = rows.O[r:r_end], rows.m[r:r_end], rows.l[r:r_end]
        if given.sinks.size:
            add_sink(O, m, l, alpha, given.sinks[batch, h])
        save_lse(given.lse[0, batch, h, m0:m_end], given.lse[1, batch, h, m0:m_end], m, l)
        normalise(O, l, given.kept_scale, 0)
        scaled(given.o[batch, h, m0:m_end], O, O.dtype.type(1))

"""How kernels over the edges of a graph read: steps that all of them share.

A row of a tile is a query with its keys, or in the transposed lists a key with its queries. A few lanes share it, along
head_dim, so that each moves 16 bytes at once; the rows of a warp walk along their lists together, an edge of each at a
time, as long as any row has one left. A long row has a block of its own, or several, each for a part of it, whose
results are merged in their order. Whatever a row adds up stays in the registers of its lanes: sums have one order.
"""

from functools import cache, reduce
from typing import Any, NamedTuple

import numpy as np

from ...functions.compiled import chain
from ...graphs.problem import AXES
from ..kernels.shared.block_rows import reduce_rows_step
from ..kernels.shared.dropout import U32, U64, random_words
from ..kernels.shared.exact_sums import add_exactly
from ..kernels.shared.layouts import sum_type, vector
from ..kernels.shared.schedule import split
from ..tile import (
    WARP,
    Alignment,
    SharedMemory,
    aligned,
    block_index,
    convert,
    device,
    exp2,
    full,
    gather,
    index,
    map_tiles,
    maximum,
    minimum,
    row_index,
    row_sum,
    save,
    scatter,
    shape,
    simt,
    thread_index,
    where,
)
from ..words.numbers import LOG2_E

THREADS = 128
OF_LANE = {2: 8, 4: 8, 8: 4}  # elements of a row, by their bytes: half as many take 1.0 to 1.7 times as long (H200)
OF_LANE_MOVED = {**OF_LANE, 4: 4}  # in tangents of gradients: 8 take 1.0 to 1.1 times as long (H200)
EDGES = "bias", "factor", "k_edge", "v_edge"
TILE, ALONE = -1, -1  # in place of a long row; in place of a part, where a row has no others
BLOCKS = 2048  # for parts of long rows, in all


class Lists(NamedTuple):
    """Lists of edges, see `numbattn.graphs.graph.Lists`."""

    rows: Any
    others: Any
    numbers: Any  # () where edges are in the order of their numbers
    parts: Any
    counts: Any
    slots: Any  # blocks for parts, of a matrix


class Arrays(NamedTuple):
    """The arrays of a call, (batch, heads, rows, features), and of edges, tuples of one or none, those of numbers
    (batch, heads, edges)."""

    q: Any
    k: Any
    v: Any
    do: Any = ()
    bias: Any = ()
    factor: Any = ()
    k_edge: Any = ()
    v_edge: Any = ()


class Drops(NamedTuple):
    """A Dropout, as kernels take it."""

    threshold: Any
    offset: Any
    key_low: Any
    key_high: Any
    scale: Any


class Matrix(NamedTuple):
    """Which score matrix a block works at."""

    number: Any
    batch: Any
    head: Any
    key_head: Any


class Found(NamedTuple):
    """What is read of an edge of each row."""

    other: Any  # its other end, -1 if there is no such edge
    number: Any
    others: Any  # rows of the other end, and their tangents
    of_edge: Any  # see `EdgeSteps.of_edges`
    t_of_edge: Any
    Z: Any  # what dropout multiplies P by


class GraphKernel(NamedTuple):
    """A kernel, the shared memory of a block, and how many blocks a multiprocessor should hold."""

    function: Any
    nbytes: int = 0
    blocks: int = 1


def blocks_of(form, blocks):
    """How many blocks a multiprocessor should hold: one of three numbers, without arrays of edges, with numbers, with
    rows, with which hardly anything spills; fewer where rows are so wide that a lane has more of each."""
    several = max(layout.cols.slots for layout in layouts_of(form)) // OF_LANE[form.dtype.itemsize]
    return max(blocks[max(map(AXES.get, form.given), default=0)] // max(several, 1), 1)


class Form(NamedTuple):
    """What a kernel is compiled for."""

    dtype: Any
    dim: int
    dim_v: int
    given: tuple  # names of arrays of edges
    softmax: bool
    nbytes: int  # alignment of rows
    dropout: bool
    moves: bool = False  # whether arrays have tangents
    score: tuple = ()  # of Links, see `numbattn.graphs.score`


def layouts_of(form):
    """The layouts of tiles of k and of v."""
    run, of_lane = vector(form.dtype), (OF_LANE_MOVED if form.moves else OF_LANE)[form.dtype.itemsize]
    lanes = min(1 << max(-(-max(form.dim, form.dim_v) // of_lane) - 1, 0).bit_length(), WARP)
    return [simt(THREADS // lanes, max(-(-size // (lanes * run)), 1) * lanes * run, THREADS, lanes, run)
            for size in (form.dim, form.dim_v)]  # fmt: skip


@cache
def rows_of_block(form):
    """How many rows a block has."""
    layout, _ = layouts_of(form)
    return layout.rows.size


class EdgeSteps:
    """The layouts of a kernel, and its steps: device functions over rows of a block, and an edge of each."""

    def __init__(self, form, has_numbers=False):
        self.form, self.ACC = form, sum_type(form.dtype)
        self.K, self.V = layouts_of(form)
        self.LINES, self.shared = self.K.row_vector(), SharedMemory()
        self.NO_MAX = self.ACC(np.finfo(self.ACC).min)      # finite, since (-inf) - (-inf) is NaN
        self.work_of_block, self.rows_of, self.edge_at = self.walk(has_numbers)
        self.rows_at, self.number_at = self.reads()

    def walk(self, has_numbers):
        """Device functions: (lists) -> the matrix of a block, its first work, where that ends, and how far it is to the
        next: parts of long rows, or a tile of rows; (lists, work) -> the long row or TILE, its part or ALONE, the
        numbers of the rows, where they are in their lists, where these end, and how far it is to the next entry;
        (lists, at, end, count) -> of an entry the other end, -1 if it is none of `count`, and the edge's number.

        All rows of a block for a long row are that one, and each takes its own share of the entries.
        """
        LINES, ROWS, HAS_NUMBERS = self.LINES, self.K.rows.size, has_numbers

        @device
        def work_of_block(lists):
            (_, rows), (_, most) = shape(lists.rows), shape(lists.parts)
            matrix, work = split(block_index(), lists.slots + (rows + ROWS - 1) // ROWS)
            end, step = minimum(index(lists.counts[1]), most), lists.slots
            if work >= lists.slots:                             # the tiles are numbered after all parts
                work = work - lists.slots + most
                end, step = work + 1, index(1)
            return matrix, work, end, step

        @device
        def rows_of(lists, work):
            (edges,), (_, rows), (_, most) = shape(lists.others), shape(lists.rows), shape(lists.parts)
            if work < most:
                row, part, step = index(lists.parts[0, work]), index(ALONE), index(ROWS)
                if work < index(lists.counts[0]):
                    part = work
                here, at = full(LINES, row), row_index(LINES, index(lists.parts[1, work]))
                end = full(LINES, index(lists.parts[2, work]))
            else:
                row, part, step, places = index(TILE), index(ALONE), index(1), row_index(LINES, (work - most) * ROWS)
                here = where(places < rows, gather(lists.rows[0], LINES, places), -1)
                at, end = gather(lists.rows[1], LINES, places), gather(lists.rows[2], LINES, places)
            return row, part, here, maximum(at, 0), minimum(end, edges), step

        @device
        def edge_at(lists, at, end, count):
            at = where(at < end, at, -1)
            other = where(at >= 0, gather(lists.others, LINES, at), -1)
            if HAS_NUMBERS:
                at = where(at >= 0, gather(lists.numbers[0], LINES, at), -1)
            return where(other < count, other, -1), at

        return work_of_block, rows_of, edge_at

    def saves(self, layout):
        """The device function (array, parts, tile, row, part, rows) that saves sums of rows to an array (rows,
        features), each its own, or their sum if they are all a long row, or a part of one; and (tile) -> that sum,
        transposed, as a row vector."""
        sum_of_rows = reduce_rows_step(self.shared, layout, self.ACC, THREADS, row_sum)
        ROWS_OF = Alignment(self.form.nbytes)

        @device
        def save_rows(array, parts, x, row, part, rows):
            if row == TILE:
                scatter(aligned(array, ROWS_OF), x, rows)
            else:
                save_part(array, parts, sum_of_rows(x), row, part)

        return save_rows, sum_of_rows

    def of_block(self, reduce):
        """The device function (numbers of all rows) -> what reduce, row_sum or row_max, makes of them: one number."""
        return reduce_rows_step(self.shared, self.LINES, self.ACC, THREADS, reduce)

    def reads(self):
        """Device functions (array, layout, batch, head, rows) -> rows of features, and (array, matrix, rows) ->
        numbers."""
        ACC, LINES, ROWS_OF = self.ACC, self.LINES, Alignment(self.form.nbytes)

        @device
        def rows_at(array, layout, batch, head, rows):
            return gather(aligned(array[batch, head], ROWS_OF), layout, rows)

        @device
        def number_at(array, matrix, rows):
            return convert(gather(array[matrix.batch, matrix.head], LINES, rows), ACC)

        return rows_at, number_at

    def of_edges(self, default=1):
        """Device functions: (arrays, matrix, number, Z) -> k_edge, v_edge, bias and factor Z as they are read;
        (K, V, these) -> k + k_edge, v + v_edge, bias and factor Z. default: a factor that is not given."""
        K, V, ACC, number_at = self.K, self.V, self.ACC, self.number_at
        HAS_BIAS, HAS_FACTOR, HAS_K, HAS_V = (name in self.form.given for name in EDGES)
        NONE, DEFAULT, rows_at = ACC(-0.0), ACC(default), self.rows_at      # x + -0.0 is x, and costs nothing

        @device
        def read(arrays, matrix, number, Z):
            k_edge = rows_at(arrays.k_edge[0], K, matrix.batch, matrix.head, number) if HAS_K else NONE
            v_edge = rows_at(arrays.v_edge[0], V, matrix.batch, matrix.head, number) if HAS_V else NONE
            bias = number_at(arrays.bias[0], matrix, number) if HAS_BIAS else NONE
            factor = number_at(arrays.factor[0], matrix, number) if HAS_FACTOR else DEFAULT
            return k_edge, v_edge, bias, factor * Z

        @device
        def added(k, v, found):
            k_edge, v_edge, bias, factor = found
            k, v = convert(k, ACC), convert(v, ACC)
            k = k + convert(k_edge, ACC) if HAS_K else k
            v = v + convert(v_edge, ACC) if HAS_V else v
            return k, v, bias, factor

        return read, added

    def kept(self):
        """The device function (drops, matrix, number) -> what dropout multiplies P of edges by, see
        `numbattn.dropout_mask`: the element (0, number) of a matrix."""
        LINES, ZERO, ONE, DROPS = self.LINES, self.ACC(0), self.ACC(1), self.form.dropout

        @device
        def kept_of(drops, matrix, number):
            if not DROPS:
                return ONE
            c0 = convert((number >> 4) * 4 + ((number >> 1) & 3), U32)
            c1, c2, c3 = full(LINES, U32(0)), full(LINES, U32(convert(matrix, U64))), full(LINES, U32(drops.offset))
            left, right, _, _, _, _ = random_words(c0, c1, c2, c3, drops.key_low, drops.key_high)
            word = where((number & 8) != 0, right, left)
            word = where((number & 1) != 0, word, word << 16)
            return where(word >= U32(drops.threshold << 16), full(LINES, drops.scale), ZERO)

        return kept_of

    def weights(self):
        """The device function (S, lse, seen) -> P of an edge, and its first and second derivative by S: 0 where there
        is no edge, or none of any weight."""
        LOG2E, LINES, ZERO, ONE, SOFTMAX = self.ACC(LOG2_E), self.LINES, self.ACC(0), self.ACC(1), self.form.softmax

        @device
        def weights_of(S, lse, seen):
            if SOFTMAX:
                P = where(seen & (lse != -np.inf), exp2((S - lse) * LOG2E), 0)
                return P, P, P
            return where(seen, S, 0), where(seen, full(LINES, ONE), 0), full(LINES, ZERO)

        return weights_of

    def scores_twice(self):
        """The device function (S, tS, S2, score, at) -> S, tS and the second derivative of S after the score."""
        if not self.form.score:
            return device(lambda S, tS, S2, score, at: (S, tS, S2))
        of_all = chain.seconds(self.form.score, self.ACC)

        @device
        def of_edge(s, ts, s2, i, j, number, batch, head, score):
            return of_all(s, ts, s2, (batch, head, number, i, j), score)

        @device
        def scored(S, tS, S2, score, at):
            places = maximum(at.i, 0), maximum(at.j, 0), maximum(at.number, 0)
            return map_tiles(of_edge, (S, tS, S2, *places), (at.batch, at.head, score))

        return scored

    def scores(self, order):
        """The device function (S, tS, score, at) -> S and tS after the score, its derivative, and the tangent of that:
        what is of this order, 0: S alone, 1: the derivative, too, 2: all. Absent edges are taken for edge 0."""
        if not self.form.score:
            return device(lambda S, tS, score, at: (S, tS, S, S))
        ACC, FIRST, SECOND = self.ACC, order > 0, order > 1
        of_order = chain.values, chain.slopes, chain.tangents
        of_value, of_slope, of_both = (each(self.form.score, ACC) for each in of_order)

        @device
        def of_edge(s, ts, i, j, number, batch, head, score):
            at = batch, head, number, i, j
            if SECOND:
                return of_both(s, ts, at, score)
            if FIRST:
                value, slope = of_slope(s, at, score)
                return value, ts, slope, ts
            return of_value(s, at, score), ts, ts, ts

        @device
        def scored(S, tS, score, at):
            places = maximum(at.i, 0), maximum(at.j, 0), maximum(at.number, 0)
            return map_tiles(of_edge, (S, tS, *places), (at.batch, at.head, score))

        return scored

    def reads_of_score(self):
        """The device function (sums, S, tS, dS, tdS, score, at) that adds to the gradients of arrays in the score, or
        with tangents to those of these, from S before the score and dS after it. The lanes of a row share its reads."""
        links, ACC, LANES, MOVES = self.form.score, self.ACC, THREADS // self.K.rows.size, self.form.moves

        def after(before, number):
            term_of = (chain.reads_along if MOVES else chain.reads)(links, number, ACC)

            @device
            def add(s, ts, ds, tds, at, score, sums):
                before(s, ts, ds, tds, at, score, sums)
                read = thread_index() % LANES
                count = read + 1
                while read < count:
                    if MOVES:
                        term, element, count = term_of(s, ts, ds, tds, at, score, read)
                    else:
                        term, element, count = term_of(s, ds, at, score, read)
                    if read < count:
                        add_exactly((element, term), sums)
                    read += LANES

            return add

        add_all = reduce(after, [number for number, link in enumerate(links) if any(link.wanted)], nothing)

        @device
        def of_edge(s, ts, ds, tds, i, j, number, batch, head, score, sums):
            add_all(s, ts, ds, tds, (batch, head, number, i, j), score, sums)
            return (s,)

        @device
        def add(sums, S, tS, dS, tdS, score, at):
            places = maximum(at.i, 0), maximum(at.j, 0), maximum(at.number, 0)
            map_tiles(of_edge, (S, tS, dS, tdS, *places), (at.batch, at.head, score, sums))

        return add


class Ends:
    """Device functions that read both ends of edges, and their tangents if arrays have any, `moves`.

    own_at: of a row's own end, (arrays, moved, matrix, rows) -> q and do, or k and v, with tangents; statistics_at:
    (statistics, matrix, rows) -> lse and D, and their tangents; in_order: (own, others) -> those of the query, those of
    the key; read: (lists, (arrays, moved, drops), matrix, at, end) -> Found; with_edges, with_moved: see
    `EdgeSteps.of_edges`.
    """

    def __init__(self, steps, by_key=False, moves=False):
        K, V, LINES, rows_at, number_at = steps.K, steps.V, steps.LINES, steps.rows_at, steps.number_at
        MOVES, SOFTMAX, ZERO, BY_KEY, edge_at = moves, steps.form.softmax, steps.ACC(0), by_key, steps.edge_at
        (read_edges, self.with_edges), (read_moved, self.with_moved) = steps.of_edges(), steps.of_edges(default=0)
        kept = steps.kept()

        @device
        def of_queries(arrays, moved, matrix, rows):
            batch, head = matrix.batch, matrix.head
            q, do = rows_at(arrays.q, K, batch, head, rows), rows_at(arrays.do, V, batch, head, rows)
            if MOVES:
                return q, do, rows_at(moved.q, K, batch, head, rows), rows_at(moved.do, V, batch, head, rows)
            return q, do, ZERO, ZERO

        @device
        def of_keys(arrays, moved, matrix, rows):
            batch, head = matrix.batch, matrix.key_head
            k, v = rows_at(arrays.k, K, batch, head, rows), rows_at(arrays.v, V, batch, head, rows)
            if MOVES:
                return k, v, rows_at(moved.k, K, batch, head, rows), rows_at(moved.v, V, batch, head, rows)
            return k, v, ZERO, ZERO

        @device
        def statistics_at(statistics, matrix, rows):
            zero = full(LINES, ZERO)
            if SOFTMAX:
                lse, D = number_at(statistics[0], matrix, rows), number_at(statistics[1], matrix, rows)
                if not MOVES:
                    return lse, D, zero, zero
                return lse, D, number_at(statistics[2], matrix, rows), number_at(statistics[3], matrix, rows)
            return zero, zero, zero, zero

        @device
        def in_order(own, others):
            return (others, own) if BY_KEY else (own, others)

        others_at = of_queries if by_key else of_keys

        @device
        def read(lists, given, matrix, at, end):
            arrays, moved, drops = given
            other, number = edge_at(lists, at, end, shape(arrays.q if BY_KEY else arrays.k)[2])
            Z = kept(drops, matrix.number, number)
            moves = read_moved(moved, matrix, number, Z) if MOVES else (ZERO, ZERO, ZERO, ZERO)
            others = others_at(arrays, moved, matrix, other)
            return Found(other, number, others, read_edges(arrays, matrix, number, Z), moves, Z)

        self.own_at, self.statistics_at, self.in_order = of_keys if by_key else of_queries, statistics_at, in_order
        self.read = read


@device
def save_part(array, parts, x, row, part):
    """Save to a row of one of two arrays: of whole rows, or of parts."""
    if part == ALONE:
        save(array[row], x, 0)
    else:
        save(parts[part], x, 0)


@device
def save_number(numbers, parts, x, row, part):
    """Likewise to one element of a vector."""
    if part == ALONE:
        save(numbers[row : row + 1], x, 0)
    else:
        save(parts[part : part + 1], x, 0)


@device
def matrix_of(number, arrays):
    """The Matrix of this number."""
    heads, key_heads = shape(arrays.q)[1], shape(arrays.k)[1]
    batch, head = number // heads, number % heads
    return Matrix(number, batch, head, head // (heads // key_heads))


@device
def nothing(s, ts, ds, tds, at, score, sums):
    pass

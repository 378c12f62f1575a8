"""How kernels over the edges of a graph read: steps that all of them share.

A row of a tile is a query with its keys, or in the transposed lists a key with its queries. A few lanes share it, along
head_dim, so that each moves 16 bytes at once; the rows of a warp walk along their lists together, an edge of each at a
time, as long as any row has one left. A long row has a block of its own. Whatever a row adds up stays in the
registers of its lanes: sums have one order.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...graphs.problem import AXES
from ..kernels.shared.dropout import U32, U64, random_words
from ..kernels.shared.layouts import sum_type, vector
from ..kernels.shared.schedule import split
from ..tile import (
    WARP,
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    block_index,
    convert,
    device,
    exp2,
    full,
    gather,
    get,
    index,
    maximum,
    minimum,
    put,
    row_index,
    row_sum,
    save,
    scatter,
    shape,
    simt,
    sync_threads,
    where,
)
from ..words.numbers import LOG2_E

THREADS = 128
OF_LANE = {2: 8, 4: 8, 8: 4}  # elements of a row, by their bytes: half as many take 1.0 to 1.7 times as long (H200)
OF_LANE_MOVED = {**OF_LANE, 4: 4}  # in tangents of gradients: 8 take 0.9 times as long by query, 1.4 times by key
EDGES = "bias", "factor", "k_edge", "v_edge"
TILE, NOTHING = -1, -2  # in place of a long row


class Lists(NamedTuple):
    """Lists of edges, see `numbattn.graphs.graph.Lists`."""

    starts: Any
    others: Any
    numbers: Any  # () where edges are in the order of their numbers
    longest: Any  # rows, among which all of more than `most` edges are
    most: Any


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
        self.rows_of_block, self.edge_at = self.walk(has_numbers)
        self.rows_at, self.number_at = self.reads()

    def walk(self, has_numbers):
        """Device functions: (lists) -> the matrix of a block, its long row or TILE or NOTHING, the numbers of its rows,
        where they are in their lists, where these end, and how far it is to the next entry; (lists, at, end, count) ->
        of an entry the other end, -1 if it is none of `count`, and the edge's number.

        All rows of a block for a long row are that one, and each takes its own part of the entries.
        """
        LINES, ROWS, HAS_NUMBERS = self.LINES, self.K.rows.size, has_numbers

        @device
        def rows_of_block(lists):
            (ends,), (edges,), (others,) = shape(lists.starts), shape(lists.others), shape(lists.longest)
            tiles = (ends - 1 + ROWS - 1) // ROWS
            matrix, tile = split(block_index(), tiles + others)
            row, step, here = index(TILE), 1, row_index(LINES, tile * ROWS)
            if tile >= tiles:
                row, step = index(lists.longest[tile - tiles]), ROWS
                count = index(lists.starts[row + 1]) - index(lists.starts[row])
                row = row if count > lists.most else index(NOTHING)
                here = full(LINES, row)
            at, end = gather(lists.starts, LINES, here), gather(lists.starts, LINES, here + 1)
            if row == TILE:
                here = where(end - at > lists.most, -1, here)
                end = where(here >= 0, end, at)                 # long rows have blocks of their own
            else:
                at = at + row_index(LINES, 0)
            return matrix, row, here, maximum(at, 0), minimum(end, edges), step

        @device
        def edge_at(lists, at, end, count):
            at = where(at < end, at, -1)
            other = where(at >= 0, gather(lists.others, LINES, at), -1)
            if HAS_NUMBERS:
                at = where(at >= 0, gather(lists.numbers[0], LINES, at), -1)
            return where(other < count, other, -1), at

        return rows_of_block, edge_at

    def saves(self, layout):
        """The device function (array, tile, row, rows) that saves sums of rows to an array (rows, features), each its
        own, or their sum if they are all a long row; and (tile) -> that sum, transposed, as a row vector."""
        rows, cols = layout.shape
        PLACE, ROWS_OF = self.shared.tile(rows, cols, self.ACC), Alignment(self.form.nbytes)
        TRANSPOSED = simt(cols, rows, THREADS, min(rows, WARP), 1)

        @device
        def sum_of_rows(x):
            sync_threads()                                      # all have read what was there
            put(allocate(PLACE), x)
            sync_threads()
            return row_sum(get(allocate(PLACE).T, TRANSPOSED))

        @device
        def save_rows(array, x, row, rows):
            if row == TILE:
                scatter(aligned(array, ROWS_OF), x, rows)
            else:
                save(array[row], sum_of_rows(x), 0)

        return save_rows, sum_of_rows

    def of_block(self, reduce):
        """The device function (numbers of all rows) -> what reduce, row_sum or row_max, makes of them: one number."""
        rows = self.LINES.rows.size
        PLACE, TRANSPOSED = self.shared.tile(rows, 1, self.ACC), simt(1, rows, THREADS, min(rows, WARP), 1)

        @device
        def reduced(x):
            sync_threads()
            put(allocate(PLACE), x)
            sync_threads()
            return reduce(get(allocate(PLACE).T, TRANSPOSED))

        return reduced

    def reads(self):
        """Device functions (array, layout, batch, head, rows) -> rows of features, and (array, batch, head, rows) ->
        numbers."""
        ACC, LINES, ROWS_OF = self.ACC, self.LINES, Alignment(self.form.nbytes)

        @device
        def rows_at(array, layout, batch, head, rows):
            return gather(aligned(array[batch, head], ROWS_OF), layout, rows)

        @device
        def number_at(array, batch, head, rows):
            return convert(gather(array[batch, head], LINES, rows), ACC)

        return rows_at, number_at

    def of_edges(self, default=1):
        """Device functions: (arrays, batch, head, number, Z) -> k_edge, v_edge, bias and factor Z as they are read;
        (K, V, these) -> k + k_edge, v + v_edge, bias and factor Z. default: a factor that is not given."""
        K, V, ACC, number_at = self.K, self.V, self.ACC, self.number_at
        HAS_BIAS, HAS_FACTOR, HAS_K, HAS_V = (name in self.form.given for name in EDGES)
        NONE, DEFAULT, rows_at = ACC(-0.0), ACC(default), self.rows_at      # x + -0.0 is x, and costs nothing

        @device
        def read(arrays, batch, head, number, Z):
            k_edge = rows_at(arrays.k_edge[0], K, batch, head, number) if HAS_K else NONE
            v_edge = rows_at(arrays.v_edge[0], V, batch, head, number) if HAS_V else NONE
            bias = number_at(arrays.bias[0], batch, head, number) if HAS_BIAS else NONE
            factor = number_at(arrays.factor[0], batch, head, number) if HAS_FACTOR else DEFAULT
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

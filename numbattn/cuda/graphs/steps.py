"""How kernels over the edges of a graph read: steps that all of them share.

A row of a tile is a query with its keys, or in the transposed lists a key with its queries. A few lanes share it, along
head_dim, so that each moves 16 bytes at once; the rows of a warp walk along their lists together, an edge of each at a
time, as long as any row has one left. Whatever a row adds up stays in the registers of its lanes: sums have one order.
"""

from typing import Any, NamedTuple

import numpy as np

from ..kernels.shared.layouts import sum_type, vector
from ..kernels.shared.schedule import split
from ..tile import (
    WARP,
    Alignment,
    aligned,
    block_index,
    convert,
    device,
    exp2,
    full,
    gather,
    load,
    maximum,
    minimum,
    shape,
    simt,
    where,
)
from ..words.numbers import LOG2_E

THREADS = 128
EDGES = "bias", "factor", "k_edge", "v_edge"


class Lists(NamedTuple):
    """Lists of edges, see `numbattn.graphs.graph.Lists`."""

    starts: Any
    others: Any
    numbers: Any  # () where edges are in the order of their numbers


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


class Form(NamedTuple):
    """What a kernel is compiled for."""

    dtype: Any
    dim: int
    dim_v: int
    given: tuple  # names of arrays of edges
    softmax: bool
    nbytes: int  # alignment of rows
    moves: bool = False  # whether arrays have tangents


class EdgeSteps:
    """The layouts of a kernel, and its steps: device functions over rows of a block, and an edge of each."""

    def __init__(self, form, has_numbers=False):
        self.form, self.ACC, run = form, sum_type(form.dtype), vector(form.dtype)
        lanes = min(1 << max(-(-max(form.dim, form.dim_v) // run) - 1, 0).bit_length(), WARP)
        self.K, self.V = (simt(THREADS // lanes, max(-(-dim // (lanes * run)), 1) * lanes * run, THREADS, lanes, run)
                          for dim in (form.dim, form.dim_v))  # fmt: skip
        self.LINES = self.K.row_vector()
        self.rows_of_block, self.edge_at = self.walk(has_numbers)
        self.rows_at, self.number_at = self.reads()

    def walk(self, has_numbers):
        """Device functions: (lists) -> of a block its matrix, its first row, and where lists of its rows begin and end;
        (lists, at, end, count) -> of an entry the other end, -1 if it is none of `count`, and the edge's number."""
        LINES, ROWS, HAS_NUMBERS = self.LINES, self.K.rows.size, has_numbers

        @device
        def rows_of_block(lists):
            (ends,), (edges,) = shape(lists.starts), shape(lists.others)
            matrix, tile = split(block_index(), (ends - 1 + ROWS - 1) // ROWS)
            at, end = load(lists.starts, LINES, tile * ROWS), load(lists.starts, LINES, tile * ROWS + 1)
            return matrix, tile * ROWS, maximum(at, 0), minimum(end, edges)     # beyond the last row `end` is 0

        @device
        def edge_at(lists, at, end, count):
            at = where(at < end, at, -1)
            other = where(at >= 0, gather(lists.others, LINES, at), -1)
            if HAS_NUMBERS:
                at = where(at >= 0, gather(lists.numbers[0], LINES, at), -1)
            return where(other < count, other, -1), at

        return rows_of_block, edge_at

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
        """Device functions: (arrays, batch, head, number) -> k_edge, v_edge, bias and factor as they lie in memory;
        (K, V, these) -> k + k_edge, v + v_edge, bias and factor. default: a factor that is not given."""
        K, V, ACC, number_at = self.K, self.V, self.ACC, self.number_at
        HAS_BIAS, HAS_FACTOR, HAS_K, HAS_V = (name in self.form.given for name in EDGES)
        NONE, DEFAULT, rows_at = ACC(-0.0), ACC(default), self.rows_at      # x + -0.0 is x, and costs nothing

        @device
        def read(arrays, batch, head, number):
            k_edge = rows_at(arrays.k_edge[0], K, batch, head, number) if HAS_K else NONE
            v_edge = rows_at(arrays.v_edge[0], V, batch, head, number) if HAS_V else NONE
            bias = number_at(arrays.bias[0], batch, head, number) if HAS_BIAS else NONE
            factor = number_at(arrays.factor[0], batch, head, number) if HAS_FACTOR else DEFAULT
            return k_edge, v_edge, bias, factor

        @device
        def added(k, v, found):
            k_edge, v_edge, bias, factor = found
            k, v = convert(k, ACC), convert(v, ACC)
            k = k + convert(k_edge, ACC) if HAS_K else k
            v = v + convert(v_edge, ACC) if HAS_V else v
            return k, v, bias, factor

        return read, added

    def weights(self):
        """The device function (S, lse, seen) -> P of an edge, and its first and second derivative by S: 0 where there
        is no edge, or none of any weight."""
        LOG2E, LINES, ZERO, ONE, SOFTMAX = self.ACC(LOG2_E), self.LINES, self.ACC(0), self.ACC(1), self.form.softmax

        @device
        def weights_of(S, lse, seen):
            if SOFTMAX:
                P = where(seen & (lse > -np.inf), exp2((S - lse) * LOG2E), 0)
                return P, P, P
            return where(seen, S, 0), where(seen, full(LINES, ONE), 0), full(LINES, ZERO)

        return weights_of

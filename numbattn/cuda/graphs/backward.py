"""Gradients over the edges of a graph, and their tangents: by query dq and those of edges, by key dk and dv.

Both recompute P from lse, as Algorithm 4 does. In the tangents of the gradients every product is differentiated: dS k
becomes tdS k + dS tk.
"""

from functools import cache

from ...graphs import edge
from ..kernels.shared.schedule import split
from ..tile import (
    aligned,
    anywhere,
    block_index,
    convert,
    device,
    full,
    load,
    row_sum,
    save,
    scatter,
    shape,
)
from ..tile.arrays import Alignment
from .steps import EDGES, NOTHING, EdgeSteps, GraphKernel, blocks_of

BLOCKS = {  # see `blocks_of`; by key or not, with tangents or not: about twice as fast as with one (H200)
    (False, False): (8, 6, 4), (True, False): (6, 6, 4), (False, True): (4, 4, 3), (True, True): (4, 3, 3),
}  # fmt: skip
gradients, tangents = device(edge.gradients), device(edge.tangents)


@cache
def delta(form, pairs, has_gradient):
    """The kernel of D = rowsum(do o) - dlse, or of its tangent: the sum of two pairs of factors. It also copies lse, or
    its tangent, to lie beside it: in the memory of both is a line for each query."""
    steps = EdgeSteps(form)
    V, LINES, ACC, ROWS_OF = steps.V, steps.LINES, steps.ACC, Alignment(form.nbytes)
    ROWS, TWO, HAS_GRADIENT = V.rows.size, pairs == 2, has_gradient

    @device
    def product(pair, batch, head, line):
        x, y = pair
        x, y = load(aligned(x[batch, head], ROWS_OF), V, line), load(aligned(y[batch, head], ROWS_OF), V, line)
        return row_sum(convert(x, ACC) * convert(y, ACC))

    def graph_delta(pairs, gradient, mLse, mCopy, mDelta):
        _, heads, queries = shape(mLse)
        matrix, tile = split(block_index(), (queries + ROWS - 1) // ROWS)
        batch, head, line = matrix // heads, matrix % heads, tile * ROWS
        D = product(pairs[0], batch, head, line)
        if TWO:
            D = D + product(pairs[1], batch, head, line)
        if HAS_GRADIENT:
            D = D - load(gradient[0][batch, head], LINES, line)
        save(mCopy[batch, head], load(mLse[batch, head], LINES, line), line)
        save(mDelta[batch, head], D, line)

    return GraphKernel(graph_delta)


class Ends:
    """Device functions that read both ends of edges, and their tangents if arrays have any.

    Of a row's own end, and of the other one of each edge: (arrays, moved, batch, head, key_head, rows) -> q and do, or
    k and v, with tangents; (statistics, batch, head, rows) -> lse and D, and their tangents. `in_order`: (own, others)
    -> those of the query, those of the key.
    """

    def __init__(self, steps, by_key):
        K, V, LINES, rows_at, number_at = steps.K, steps.V, steps.LINES, steps.rows_at, steps.number_at
        MOVES, SOFTMAX, ZERO, BY_KEY = steps.form.moves, steps.form.softmax, steps.ACC(0), by_key

        @device
        def of_queries(arrays, moved, batch, head, key_head, rows):
            q, do = rows_at(arrays.q, K, batch, head, rows), rows_at(arrays.do, V, batch, head, rows)
            if MOVES:
                return q, do, rows_at(moved.q, K, batch, head, rows), rows_at(moved.do, V, batch, head, rows)
            return q, do, ZERO, ZERO

        @device
        def of_keys(arrays, moved, batch, head, key_head, rows):
            k, v = rows_at(arrays.k, K, batch, key_head, rows), rows_at(arrays.v, V, batch, key_head, rows)
            if MOVES:
                return k, v, rows_at(moved.k, K, batch, key_head, rows), rows_at(moved.v, V, batch, key_head, rows)
            return k, v, ZERO, ZERO

        @device
        def statistics_at(statistics, batch, head, rows):
            zero = full(LINES, ZERO)
            if SOFTMAX:
                lse, D = number_at(statistics[0], batch, head, rows), number_at(statistics[1], batch, head, rows)
                if not MOVES:
                    return lse, D, zero, zero
                return lse, D, number_at(statistics[2], batch, head, rows), number_at(statistics[3], batch, head, rows)
            return zero, zero, zero, zero

        @device
        def in_order(own, others):
            return (others, own) if BY_KEY else (own, others)

        self.own, self.others = (of_keys, of_queries) if by_key else (of_queries, of_keys)
        self.statistics_at, self.in_order = statistics_at, in_order


@cache
def backward(form, by_key, adds=False):
    """The kernel of the gradients by query, or of those by key, or of their tangents.

    A block takes several matrices, one after the other: by key the heads of a group; by query all of them, if adds:
    gradients of edges are then added to what is there, since matrices may share some.
    """
    steps = EdgeSteps(form, has_numbers=by_key)
    ends, kept, weights_of = Ends(steps, by_key), steps.kept(), steps.weights()
    rows_of_block, edge_at, own_at, others_at = steps.rows_of_block, steps.edge_at, ends.own, ends.others
    statistics_at, in_order = ends.statistics_at, ends.in_order
    (read_edges, with_edges), (read_moved, with_moved) = steps.of_edges(), steps.of_edges(default=0)
    ACC, K, V, rows_at, number_at = steps.ACC, steps.K, steps.V, steps.rows_at, steps.number_at
    ZERO, BY_KEY, MOVES, ADDS, ROWS_OF = ACC(0), by_key, form.moves, adds, Alignment(form.nbytes)
    HAS_BIAS, HAS_FACTOR, HAS_K, HAS_V = (name in form.given and not by_key for name in EDGES)
    save_x, _ = steps.saves(K)
    save_v, _ = steps.saves(V) if by_key else (None, None)

    @device
    def read(lists, given, matrix, batch, head, key_head, at, end, own_statistics):
        arrays, moved, statistics, drops = given
        count = shape(arrays.q)[2] if BY_KEY else shape(arrays.k)[2]
        other, number = edge_at(lists, at, end, count)
        Z = kept(drops, matrix, number)
        found = others_at(arrays, moved, batch, head, key_head, other), read_edges(arrays, batch, head, number, Z)
        moves = read_moved(moved, batch, head, number, Z) if MOVES else (ZERO, ZERO, ZERO, ZERO)
        found_statistics = statistics_at(statistics, batch, head, other) if BY_KEY else own_statistics
        return other, number, found, moves, found_statistics, Z

    @device
    def add(sums, dS, weight, q, k, do):
        """dk += dS q and dv += weight do, or of a query dq += dS k, with what its edge adds to k and v."""
        dx, dv, dk_edge, dv_edge = sums
        if BY_KEY:
            return dx + dS * q, dv + weight * do, dk_edge, dv_edge
        if HAS_K:
            dk_edge = dk_edge + dS * q
        if HAS_V:
            dv_edge = dv_edge + weight * do
        return dx + dS * k, dv, dk_edge, dv_edge

    @device
    def save_rows(array, layout, batch, head, x, number):
        x = x + convert(rows_at(array, layout, batch, head, number), ACC) if ADDS else x
        scatter(aligned(array[batch, head], ROWS_OF), x, number)

    @device
    def save_numbers(array, batch, head, x, number):
        x = x + number_at(array, batch, head, number) if ADDS else x
        scatter(array[batch, head], x, number)

    @device
    def save_edges(results, sums, dS, dfactor, batch, head, number):
        _, _, dk_edge, dv_edge = sums
        if HAS_BIAS:
            save_numbers(results.bias[0], batch, head, dS, number)
        if HAS_FACTOR:
            save_numbers(results.factor[0], batch, head, dfactor, number)
        if HAS_K:
            save_rows(results.k_edge[0], K, batch, head, dk_edge, number)
        if HAS_V:
            save_rows(results.v_edge[0], V, batch, head, dv_edge, number)

    @device
    def add_edge(dx, dv, now, own, scale):
        """P of an edge, what that adds to the gradients of its ends, and the gradients of its own arrays."""
        other, _, (others, of_edge), t_of_edge, (lse, D, tlse, tD), Z = now
        (q, do, tq, tdo), (k, v, tk, tv) = in_order(own, others)
        q, do = convert(q, ACC), convert(do, ACC)
        k, v, bias, factor = with_edges(k, v, of_edge)
        P, slope, bend = weights_of(row_sum(q * k) * scale + bias, lse, other >= 0)
        dP = row_sum(do * v)
        weight, dS, dfactor = gradients(P, slope, factor, dP, D)
        sums = dx, dv, full(K, ZERO), full(V, ZERO)
        if MOVES:
            tq, tdo = convert(tq, ACC), convert(tdo, ACC)
            tk, tv, tbias, tfactor = with_moved(tk, tv, t_of_edge)
            moves = (row_sum(tq * k + q * tk) * scale + tbias) - tlse
            sums = add(sums, dS * scale, weight, tq, tk, tdo)
            tdP = row_sum(tdo * v + do * tv)
            weight, dS, dfactor = tangents(P, slope, bend, factor, tfactor, dP, tdP, D, tD, moves)
        return add(sums, dS * scale, weight, q, k, do), dS, Z * dfactor

    def graph_backward(lists, arrays, moved, statistics, results, drops, scale, together):
        given, heads, key_heads = (arrays, moved, statistics, drops), shape(arrays.q)[1], shape(arrays.k)[1]
        own_matrix, row, here, first, end, step = rows_of_block(lists)
        if row == NOTHING:
            return
        dx, dv = full(K, ZERO), full(V, ZERO)
        for matrix in range(own_matrix * together, (own_matrix + 1) * together):
            batch, head, at = matrix // heads, matrix % heads, first
            key_head = head // (heads // key_heads)
            own = own_at(arrays, moved, batch, head, key_head, here)
            own_statistics = statistics_at(statistics, batch, head, here)
            while anywhere(at < end):
                now = read(lists, given, matrix, batch, head, key_head, at, end, own_statistics)
                sums, dS, dfactor = add_edge(dx, dv, now, own, scale)
                dx, dv, _, _ = sums
                save_edges(results, sums, dS, dfactor, batch, head, now[1])
                at = at + step
            if not BY_KEY:
                save_x(results.q[batch, head], dx, row, here)
                dx = full(K, ZERO)
        if BY_KEY:
            batch, key_head = own_matrix // key_heads, own_matrix % key_heads
            save_x(results.k[batch, key_head], dx, row, here)
            save_v(results.v[batch, key_head], dv, row, here)

    return GraphKernel(graph_backward, steps.shared.nbytes, blocks_of(form, BLOCKS[by_key, form.moves]))

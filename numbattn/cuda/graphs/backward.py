"""Gradients over the edges of a graph, and their tangents: by query dq and those of edges, by key dk and dv.

Both recompute P from lse, as Algorithm 4 does. In the tangents of the gradients every product is differentiated: dS k
becomes tdS k + dS tk.
"""


from ...graphs import edge
from ...graphs.edge import Edge
from ..kernel import kernel_factory
from ..kernels.shared.exact_sums import rounded_sum
from ..kernels.shared.schedule import split
from ..tile import (
    aligned,
    anywhere,
    block_index,
    convert,
    device,
    full,
    load,
    map_tiles,
    minimum,
    row_index,
    row_sum,
    save,
    scatter,
    shape,
    simt,
    sync_warp,
)
from ..tile.arrays import Alignment
from .steps import EDGES, THREADS, EdgeSteps, Ends, GraphKernel, blocks_of, matrix_of

BLOCKS = {  # see `blocks_of`; by key or not, with tangents or not: about twice as fast as with one (H200)
    (False, False): (8, 6, 4), (True, False): (6, 6, 4), (False, True): (5, 4, 3), (True, True): (5, 3, 3),
}  # fmt: skip
OF_DOUBLE = (3, 3, 2)  # with tangents
gradients, tangents = device(edge.gradients), device(edge.tangents)


@kernel_factory
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


@kernel_factory
def backward(form, by_key, adds=False):
    """The kernel of the gradients by query, or of those by key, or of their tangents.

    A block takes several matrices, one after the other: by key the heads of a group; by query all of them, if adds:
    gradients of edges are then added to what is there, since matrices may share some.
    """
    steps = EdgeSteps(form, has_numbers=by_key)
    work_of_block, rows_of = steps.work_of_block, steps.rows_of
    ends, weights_of = Ends(steps, by_key, form.moves), steps.weights()
    own_at, statistics_at, in_order, read = ends.own_at, ends.statistics_at, ends.in_order, ends.read
    with_edges, with_moved, scored = ends.with_edges, ends.with_moved, steps.scores(1 + form.moves)
    ACC, K, V, rows_at, number_at = steps.ACC, steps.K, steps.V, steps.rows_at, steps.number_at
    ZERO, BY_KEY, MOVES, ADDS, ROWS_OF = ACC(0), by_key, form.moves, adds, Alignment(form.nbytes)
    HAS_BIAS, HAS_FACTOR, HAS_K, HAS_V = (name in form.given and not by_key for name in EDGES)
    HAS_SCORE, TRAINS = bool(form.score), not by_key and any(any(link.wanted) for link in form.score)
    blocks = OF_DOUBLE if form.moves and form.dtype.itemsize == 8 else BLOCKS[by_key, form.moves]
    save_x, _ = steps.saves(K)
    save_v, _ = steps.saves(V) if by_key else (None, None)
    add_reads = steps.reads_of_score() if TRAINS else None

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
    def save_rows(array, layout, matrix, x, number):
        if ADDS:
            x = x + convert(rows_at(array, layout, matrix.batch, matrix.head, number), ACC)
        scatter(aligned(array[matrix.batch, matrix.head], ROWS_OF), x, number)

    @device
    def save_numbers(array, matrix, x, number):
        x = x + number_at(array, matrix, number) if ADDS else x
        scatter(array[matrix.batch, matrix.head], x, number)

    @device
    def save_edges(results, sums, dS, dfactor, matrix, number):
        _, _, dk_edge, dv_edge = sums
        if HAS_BIAS:
            save_numbers(results.bias[0], matrix, dS, number)
        if HAS_FACTOR:
            save_numbers(results.factor[0], matrix, dfactor, number)
        if HAS_K:
            save_rows(results.k_edge[0], K, matrix, dk_edge, number)
        if HAS_V:
            save_rows(results.v_edge[0], V, matrix, dv_edge, number)

    @device
    def add_edge(dx, dv, now, own, statistics, matrix, here, numbers):
        """P of an edge, what that adds to the gradients of its ends, and the gradients of its own arrays."""
        (scale, score, score_sums), (lse, D, tlse, tD) = numbers, statistics
        (q, do, tq, tdo), (k, v, tk, tv) = in_order(own, now.others)
        q, do = convert(q, ACC), convert(do, ACC)
        k, v, bias, factor = with_edges(k, v, now.of_edge)
        S, dP = row_sum(q * k) * scale + bias, row_sum(do * v)
        tS, tdP = S, dP
        if MOVES:
            tq, tdo = convert(tq, ACC), convert(tdo, ACC)
            tk, tv, tbias, tfactor = with_moved(tk, tv, now.t_of_edge)
            tS, tdP = row_sum(tq * k + q * tk) * scale + tbias, row_sum(tdo * v + do * tv)
        sync_warp()
        i, j = in_order(here, now.other)
        at = Edge(matrix.batch, matrix.head, i, j, now.number)
        value, tvalue, F, tF = scored(S, tS, score, at)
        P, slope, bend = weights_of(value, lse, now.other >= 0)
        weight, dS, dfactor = gradients(P, slope, factor, dP, D)
        sums, tdS = (dx, dv, full(K, ZERO), full(V, ZERO)), dS
        if MOVES:
            sums = add(sums, (dS * F if HAS_SCORE else dS) * scale, weight, tq, tk, tdo)
            weight, tdS, dfactor = tangents(P, slope, bend, factor, tfactor, dP, tdP, D, tD, tvalue - tlse)
        if TRAINS:
            add_reads(score_sums, S, tS, dS, tdS, score, at)
        if HAS_SCORE:
            tdS = tdS * F + dS * tF if MOVES else dS * F
        return add(sums, tdS * scale, weight, q, k, do), tdS, now.Z * dfactor

    def graph_backward(lists, arrays, moved, statistics, results, parts, drops, score, scale, score_sums, together):
        given, numbers = (arrays, moved, drops), (scale, score, score_sums)
        own_matrix, work, last, further = work_of_block(lists)
        key_heads = shape(arrays.k)[1]
        while work < last:
            row, part, here, first, end, step = rows_of(lists, work)
            dx, dv = full(K, ZERO), full(V, ZERO)
            for number in range(own_matrix * together, (own_matrix + 1) * together):
                matrix, at = matrix_of(number, arrays), first
                own, of_own = own_at(arrays, moved, matrix, here), statistics_at(statistics, matrix, here)
                while anywhere(at < end):
                    now = read(lists, given, matrix, at, end)
                    of_queries = statistics_at(statistics, matrix, now.other) if BY_KEY else of_own
                    sums, dS, dfactor = add_edge(dx, dv, now, own, of_queries, matrix, here, numbers)
                    dx, dv, _, _ = sums
                    save_edges(results, sums, dS, dfactor, matrix, now.number)
                    at = at + step
                if not BY_KEY:
                    of_parts = parts[0][matrix.batch, matrix.head]
                    save_x(results.q[matrix.batch, matrix.head], of_parts, dx, row, part, here)
                    dx = full(K, ZERO)
            if BY_KEY:
                batch, key_head = own_matrix // key_heads, own_matrix % key_heads
                save_x(results.k[batch, key_head], parts[0][batch, key_head], dx, row, part, here)
                save_v(results.v[batch, key_head], parts[1][batch, key_head], dv, row, part, here)
            work = work + further

    return GraphKernel(graph_backward, steps.shared.nbytes, blocks_of(form, blocks))


@kernel_factory
def rounded():
    """The kernel that rounds exact sums to an array."""
    LINES = simt(THREADS, 1, THREADS, 1, 1).row_vector()

    @device
    def of_element(_, element, sums):
        return (rounded_sum(element, sums),)

    def graph_rounded(sums, found):
        (count,), first = shape(found), block_index() * THREADS
        (total,) = map_tiles(of_element, (full(LINES, 0.0), minimum(row_index(LINES, first), count - 1)), (sums,))
        save(found, total, first)

    return GraphKernel(graph_rounded)

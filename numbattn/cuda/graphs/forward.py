"""o and lse of each query over its edges, by the online softmax of Algorithm 1, and the tangents of both."""


import numpy as np

from ...graphs import edge
from ...graphs.edge import Edge
from ..kernel import kernel_factory
from ..kernels.shared.schedule import split
from ..kernels.shared.softmax import LN_2
from ..tile import (
    anywhere,
    block_index,
    convert,
    device,
    exp2,
    full,
    index,
    log2,
    maximum,
    minimum,
    reciprocal,
    row_index,
    row_max,
    row_sum,
    scatter,
    shape,
    where,
)
from ..words.numbers import LOG2_E
from .steps import (
    ALONE,
    TILE,
    EdgeSteps,
    Ends,
    GraphKernel,
    Matrix,
    blocks_of,
    matrix_of,
    save_number,
    save_part,
)

FORWARD, TANGENT, SECOND = (8, 8, 8), (5, 5, 4), (4, 4, 3)  # see `blocks_of`
second = device(edge.second)


def online_softmax(steps):
    """Device functions: (O, m, l, S, factor, v) -> O, m and l after an edge of each row; (array of o, of lse, parts of
    both, O, m, l, row, part, rows) that saves o and lse of rows, or of a part of one."""
    ACC, V, SOFTMAX = steps.ACC, steps.V, steps.form.softmax
    LOG2E, LN2 = ACC(LOG2_E), ACC(LN_2)
    max_of_block, sum_of_block = steps.of_block(row_max), steps.of_block(row_sum)
    save_rows, sum_of_rows = steps.saves(V)

    @device
    def add(O, m, l, S, factor, v):
        """Alg. 1 lines 10 to 12."""
        if SOFTMAX:
            m_new = maximum(m, S)
            alpha, P = exp2((m - m_new) * LOG2E), exp2((S - m_new) * LOG2E)
            return O * alpha + (P * factor) * v, m_new, l * alpha + P
        return O + (S * factor) * v, m, l

    @device
    def save_results(mO, mLse, oParts, lseParts, O, m, l, row, part, rows):
        """Alg. 1 line 12: O = O / l, lse = m + log(l)."""
        if not SOFTMAX:
            save_rows(mO, oParts, O, row, part, rows)
        elif row == TILE:
            save_rows(mO, oParts, O * where(l != 0, reciprocal(l), 0), row, part, rows)
            scatter(mLse, where(l != 0, m + log2(l) * LN2, -np.inf), rows)
        else:                                                   # all rows of the block are one
            M = max_of_block(m)
            factor = exp2((m - M) * LOG2E)
            total = sum_of_block(l * factor)
            save_part(mO, oParts, sum_of_rows(O * factor) * where(total != 0, reciprocal(total), 0), row, part)
            save_number(mLse, lseParts, where(total != 0, M + log2(total) * LN2, -np.inf), row, part)

    return add, save_results


@kernel_factory
def forward(form):
    """The kernel."""
    steps = EdgeSteps(form)
    ends, work_of_block, rows_of = Ends(steps), steps.work_of_block, steps.rows_of
    rows_at, scored, read, with_edges = steps.rows_at, steps.scores(0), ends.read, ends.with_edges
    ACC, K, V, LINES, HIDDEN = steps.ACC, steps.K, steps.V, steps.LINES, -np.inf if form.softmax else steps.ACC(0)
    ZERO, NO_MAX = ACC(0), steps.NO_MAX
    add, save_results = online_softmax(steps)

    def graph_forward(lists, arrays, mO, mLse, parts, drops, score, scale):
        number, work, last, further = work_of_block(lists)
        matrix = matrix_of(number, arrays)
        batch, head = matrix.batch, matrix.head
        mO, mLse, oParts, lseParts = mO[batch, head], mLse[batch, head], parts[0][batch, head], parts[1][batch, head]
        while work < last:
            row, part, here, at, end, step = rows_of(lists, work)
            Q = convert(rows_at(arrays.q, K, batch, head, here), ACC)
            O, m, l = full(V, ZERO), full(LINES, NO_MAX), full(LINES, ZERO)
            while anywhere(at < end):
                now = read(lists, (arrays, (), drops), matrix, at, end)
                k, v, _, _ = now.others
                k, v, bias, factor = with_edges(k, v, now.of_edge)
                S = row_sum(Q * k) * scale + bias
                S, _, _, _ = scored(S, S, score, Edge(batch, head, here, now.other, now.number))
                O, m, l = add(O, m, l, where(now.other >= 0, S, HIDDEN), factor, v)
                at = at + step
            save_results(mO, mLse, oParts, lseParts, O, m, l, row, part, here)
            work = work + further

    return GraphKernel(graph_forward, steps.shared.nbytes, blocks_of(form, FORWARD))


@kernel_factory
def tangent(form, bends=False):
    """The kernel of tlse = rowsum(P tS) and tO = sum of tfactor P v + factor (P' tS v + P tv), less tlse O; with
    `bends` also of O2 + 2 tlse tO, see `numbattn.graphs.edge`."""
    steps = EdgeSteps(form)
    ends, work_of_block, rows_of = Ends(steps, moves=True), steps.work_of_block, steps.rows_of
    rows_at, scored = steps.rows_at, steps.scores(2)
    read, with_edges, with_moved = ends.read, ends.with_edges, ends.with_moved
    ACC, K, V, LINES, SOFTMAX, number_at = steps.ACC, steps.K, steps.V, steps.LINES, form.softmax, steps.number_at
    ZERO, weights_of, sum_of_block = ACC(0), steps.weights(), steps.of_block(row_sum)
    save_rows, _ = steps.saves(V)
    BENDS, TWO, scored_twice = bends, ACC(2), steps.scores_twice()

    def graph_tangent(lists, arrays, moved, mO, mLse, mTO, mTLse, mO2, parts, drops, score, scale):
        number, work, last, further = work_of_block(lists)
        matrix = matrix_of(number, arrays)
        batch, head = matrix.batch, matrix.head
        while work < last:
            row, part, here, at, end, step = rows_of(lists, work)
            Q = convert(rows_at(arrays.q, K, batch, head, here), ACC)
            tQ = convert(rows_at(moved.q, K, batch, head, here), ACC)
            lse = number_at(mLse, matrix, here) if SOFTMAX else full(LINES, ZERO)
            tO, total, O2, total2 = full(V, ZERO), full(LINES, ZERO), full(V, ZERO), full(LINES, ZERO)
            while anywhere(at < end):
                now = read(lists, (arrays, moved, drops), matrix, at, end)
                k, v, tk, tv = now.others
                k, v, bias, factor = with_edges(k, v, now.of_edge)
                tk, tv, tbias, tfactor = with_moved(tk, tv, now.t_of_edge)
                S, tS = row_sum(Q * k) * scale + bias, row_sum(tQ * k + Q * tk) * scale + tbias
                place = Edge(batch, head, here, now.other, now.number)
                if BENDS:
                    S, tS, S2 = scored_twice(S, tS, row_sum(tQ * tk) * (TWO * scale), score, place)
                else:
                    S, tS, _, _ = scored(S, tS, score, place)
                P, slope, bend = weights_of(S, lse, now.other >= 0)
                total = total + slope * tS
                tO = tO + (tfactor * P + factor * (slope * tS)) * v + (factor * P) * tv
                if BENDS:
                    P2, of_v, of_tv = second(P, slope, bend, factor, tfactor, tS, S2)
                    total2, O2 = total2 + P2, O2 + of_v * v + of_tv * tv
                at = at + step
            if SOFTMAX:
                O = convert(rows_at(mO, V, batch, head, here), ACC)
                tO, O2 = tO - total * O, O2 - total2 * O
                if row == TILE:
                    scatter(mTLse[batch, head], total, here)
                else:
                    save_number(mTLse[batch, head], parts[1][batch, head], sum_of_block(total), row, part)
            save_rows(mTO[batch, head], parts[0][batch, head], tO, row, part, here)
            if BENDS:
                save_rows(mO2[batch, head], parts[2][batch, head], O2, row, part, here)
            work = work + further

    return GraphKernel(graph_tangent, steps.shared.nbytes, blocks_of(form, SECOND if bends else TANGENT))


@kernel_factory
def merge(form, has_numbers):
    """The kernel that merges results of parts of rows, in the dtype of sums: with a softmax o and lse, which is
    attention with lse as scores; without one sums of rows, and of numbers if they have any."""
    steps = EdgeSteps(form)
    ACC, V, LINES, ROWS, NO_MAX = steps.ACC, steps.V, steps.LINES, steps.V.rows.size, steps.NO_MAX
    ZERO, ONE, rows_at, number_at = ACC(0), ACC(1), steps.rows_at, steps.number_at
    SOFTMAX, HAS_NUMBERS = form.softmax, has_numbers
    sum_of_block, (add, save_results) = steps.of_block(row_sum), online_softmax(steps)

    def graph_merge(lists, results, parts):
        (_, most), (_, heads, _, _) = shape(lists.parts), shape(results[0])
        number, part = split(block_index(), lists.slots)
        matrix = Matrix(number, number // heads, number % heads, index(0))
        rows = results[0][matrix.batch, matrix.head]
        numbers = results[1][matrix.batch, matrix.head] if HAS_NUMBERS else rows
        while part < minimum(index(lists.counts[0]), most):
            row, at, last = index(lists.parts[0, part]), row_index(LINES, part), part + index(lists.parts[3, part])
            if last > part:                                     # the first part of its row
                O, m, l, total = full(V, ZERO), full(LINES, NO_MAX), full(LINES, ZERO), full(LINES, ZERO)
                while anywhere(at < last):
                    now = where(at < last, at, -1)
                    S = number_at(parts[1], matrix, now) if HAS_NUMBERS else full(LINES, ONE)
                    weight = where(now >= 0, S, -np.inf) if SOFTMAX else full(LINES, ONE)
                    O, m, l = add(O, m, l, weight, ONE, rows_at(parts[0], V, matrix.batch, matrix.head, now))
                    total = total + S
                    at = at + ROWS
                save_results(rows, numbers, rows, numbers, O, m, l, row, index(ALONE), full(LINES, row))
                if HAS_NUMBERS and not SOFTMAX:
                    save_number(numbers, numbers, sum_of_block(total), row, index(ALONE))
            part = part + lists.slots

    return GraphKernel(graph_merge, steps.shared.nbytes)

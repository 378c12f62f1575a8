"""o and lse of each query over its edges, by the online softmax of Algorithm 1, and the tangents of both."""


import numpy as np

from ...graphs import edge
from ..kernel import kernel_factory
from ..kernels.shared.softmax import LN_2
from ..tile import (
    anywhere,
    convert,
    device,
    exp2,
    full,
    log2,
    maximum,
    reciprocal,
    row_max,
    row_sum,
    save,
    scatter,
    where,
)
from ..words.numbers import LOG2_E
from .steps import NOTHING, TILE, Edge, EdgeSteps, Ends, GraphKernel, blocks_of, matrix_of

FORWARD, TANGENT, SECOND = (8, 8, 8), (5, 5, 4), (4, 4, 3)  # see `blocks_of`
second = device(edge.second)


@kernel_factory
def forward(form):
    """The kernel."""
    steps = EdgeSteps(form)
    ends, rows_of_block, rows_at, scored = Ends(steps), steps.rows_of_block, steps.rows_at, steps.scores(0)
    read, with_edges = ends.read, ends.with_edges
    ACC, K, V, LINES, SOFTMAX = steps.ACC, steps.K, steps.V, steps.LINES, form.softmax
    ZERO, LOG2E, LN2, NO_MAX = ACC(0), ACC(LOG2_E), ACC(LN_2), ACC(np.finfo(ACC).min * 2.0**-28)
    max_of_block, sum_of_block = steps.of_block(row_max), steps.of_block(row_sum)
    save_rows, sum_of_rows = steps.saves(V)

    @device
    def add(O, m, l, S, factor, v):
        """A softmax step: Alg. 1 lines 10 to 12, for an edge of each row."""
        if SOFTMAX:
            m_new = maximum(m, S)
            alpha, P = exp2((m - m_new) * LOG2E), exp2((S - m_new) * LOG2E)
            return O * alpha + (P * factor) * v, m_new, l * alpha + P
        return O + (S * factor) * v, m, l

    @device
    def merged(O, m, l):
        """Of all rows of a block, which are one, relative to the maximum of all."""
        M = max_of_block(m)
        factor = exp2((m - M) * LOG2E)
        return O * factor, M, sum_of_block(l * factor)

    def graph_forward(lists, arrays, mO, mLse, drops, score, scale):
        number, row, here, at, end, step = rows_of_block(lists)
        if row == NOTHING:
            return
        matrix = matrix_of(number, arrays)
        mO, mLse = mO[matrix.batch, matrix.head], mLse[matrix.batch, matrix.head]
        Q = convert(rows_at(arrays.q, K, matrix.batch, matrix.head, here), ACC)
        O, m, l = full(V, ZERO), full(LINES, NO_MAX), full(LINES, ZERO)
        while anywhere(at < end):
            now = read(lists, (arrays, (), drops), matrix, at, end)
            k, v, _, _ = now.others
            k, v, bias, factor = with_edges(k, v, now.of_edge)
            S = row_sum(Q * k) * scale + bias
            S, _, _, _ = scored(S, S, score, Edge(matrix.batch, matrix.head, here, now.other, now.number))
            O, m, l = add(O, m, l, where(now.other >= 0, S, -np.inf if SOFTMAX else ZERO), factor, v)
            at = at + step
        if not SOFTMAX:
            save_rows(mO, O, row, here)
        elif row == TILE:                                       # Alg. 1 line 12: O = O / l, lse = m + log(l)
            save_rows(mO, O * where(l != 0, reciprocal(l), 0), row, here)
            scatter(mLse, where(l != 0, m + log2(l) * LN2, -np.inf), here)
        else:
            O, M, total = merged(O, m, l)
            save(mO[row], sum_of_rows(O) * where(total != 0, reciprocal(total), 0), 0)
            save(mLse[row : row + 1], where(total != 0, M + log2(total) * LN2, -np.inf), 0)

    return GraphKernel(graph_forward, steps.shared.nbytes, blocks_of(form, FORWARD))


@kernel_factory
def tangent(form, bends=False):
    """The kernel of tlse = rowsum(P tS) and tO = sum of tfactor P v + factor (P' tS v + P tv), less tlse O; with
    `bends` also of O2 + 2 tlse tO, see `numbattn.graphs.edge`."""
    steps = EdgeSteps(form)
    ends, rows_of_block, rows_at, scored = Ends(steps, moves=True), steps.rows_of_block, steps.rows_at, steps.scores(2)
    read, with_edges, with_moved = ends.read, ends.with_edges, ends.with_moved
    ACC, K, V, LINES, SOFTMAX, number_at = steps.ACC, steps.K, steps.V, steps.LINES, form.softmax, steps.number_at
    ZERO, weights_of, sum_of_block = ACC(0), steps.weights(), steps.of_block(row_sum)
    save_rows, _ = steps.saves(V)
    BENDS, TWO, scored_twice = bends, ACC(2), steps.scores_twice()

    def graph_tangent(lists, arrays, moved, mO, mLse, mTO, mTLse, mO2, drops, score, scale):
        number, row, here, at, end, step = rows_of_block(lists)
        if row == NOTHING:
            return
        matrix = matrix_of(number, arrays)
        batch, head = matrix.batch, matrix.head
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
                save(mTLse[batch, head][row : row + 1], sum_of_block(total), 0)
        save_rows(mTO[batch, head], tO, row, here)
        if BENDS:
            save_rows(mO2[batch, head], O2, row, here)

    return GraphKernel(graph_tangent, steps.shared.nbytes, blocks_of(form, SECOND if bends else TANGENT))

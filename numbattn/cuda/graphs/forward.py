"""o and lse of each query over its edges, by the online softmax of Algorithm 1, and the tangents of both."""

from functools import cache

import numpy as np

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
    shape,
    where,
)
from ..words.numbers import LOG2_E
from .steps import NOTHING, TILE, EdgeSteps, GraphKernel, blocks_of

FORWARD, TANGENT = (8, 8, 8), (5, 5, 4)  # see `blocks_of`


@cache
def forward(form):
    """The kernel."""
    steps = EdgeSteps(form)
    rows_of_block, edge_at, rows_at = steps.rows_of_block, steps.edge_at, steps.rows_at
    (read_edges, with_edges), kept = steps.of_edges(), steps.kept()
    ACC, K, V, LINES, SOFTMAX = steps.ACC, steps.K, steps.V, steps.LINES, form.softmax
    ZERO, LOG2E, LN2, NO_MAX = ACC(0), ACC(LOG2_E), ACC(LN_2), ACC(np.finfo(ACC).min * 2.0**-28)
    max_of_block, sum_of_block = steps.of_block(row_max), steps.of_block(row_sum)
    save_rows, sum_of_rows = steps.saves(V)

    @device
    def read(lists, arrays, drops, matrix, batch, head, key_head, at, end):
        _, _, keys, _ = shape(arrays.k)
        j, number = edge_at(lists, at, end, keys)
        Z = kept(drops, matrix, number)
        k, v = rows_at(arrays.k, K, batch, key_head, j), rows_at(arrays.v, V, batch, key_head, j)
        return j, k, v, read_edges(arrays, batch, head, number, Z)

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

    def graph_forward(lists, arrays, mO, mLse, drops, scale):
        (_, heads, _, _), (_, key_heads, _, _) = shape(mO), shape(arrays.k)
        matrix, row, here, at, end, step = rows_of_block(lists)
        if row == NOTHING:
            return
        batch, head = matrix // heads, matrix % heads
        key_head = head // (heads // key_heads)
        Q = convert(rows_at(arrays.q, K, batch, head, here), ACC)
        O, m, l = full(V, ZERO), full(LINES, NO_MAX), full(LINES, ZERO)
        while anywhere(at < end):
            j, k, v, of_edge = read(lists, arrays, drops, matrix, batch, head, key_head, at, end)
            k, v, bias, factor = with_edges(k, v, of_edge)
            S = where(j >= 0, row_sum(Q * k) * scale + bias, -np.inf if SOFTMAX else ZERO)
            O, m, l = add(O, m, l, S, factor, v)
            at = at + step
        if not SOFTMAX:
            save_rows(mO[batch, head], O, row, here)
        elif row == TILE:                                       # Alg. 1 line 12: O = O / l, lse = m + log(l)
            save_rows(mO[batch, head], O * where(l != 0, reciprocal(l), 0), row, here)
            scatter(mLse[batch, head], where(l != 0, m + log2(l) * LN2, -np.inf), here)
        else:
            O, M, total = merged(O, m, l)
            save(mO[batch, head, row], sum_of_rows(O) * where(total != 0, reciprocal(total), 0), 0)
            save(mLse[batch, head][row : row + 1], where(total != 0, M + log2(total) * LN2, -np.inf), 0)

    return GraphKernel(graph_forward, steps.shared.nbytes, blocks_of(form, FORWARD))


@cache
def tangent(form):
    """The kernel of tlse = rowsum(P tS) and tO = sum of tfactor P v + factor (P' tS v + P tv), less tlse O."""
    steps = EdgeSteps(form)
    rows_of_block, edge_at, rows_at, number_at = steps.rows_of_block, steps.edge_at, steps.rows_at, steps.number_at
    (read_edges, with_edges), (read_moved, with_moved) = steps.of_edges(), steps.of_edges(default=0)
    ACC, K, V, LINES, SOFTMAX = steps.ACC, steps.K, steps.V, steps.LINES, form.softmax
    ZERO, kept, weights_of, sum_of_block = ACC(0), steps.kept(), steps.weights(), steps.of_block(row_sum)
    save_rows, _ = steps.saves(V)

    @device
    def read(lists, arrays, moved, drops, matrix, batch, head, key_head, at, end):
        _, _, keys, _ = shape(arrays.k)
        j, number = edge_at(lists, at, end, keys)
        Z = kept(drops, matrix, number)
        k, v = rows_at(arrays.k, K, batch, key_head, j), rows_at(arrays.v, V, batch, key_head, j)
        tk, tv = rows_at(moved.k, K, batch, key_head, j), rows_at(moved.v, V, batch, key_head, j)
        of_edge, t_of_edge = (read_edges(arrays, batch, head, number, Z), read_moved(moved, batch, head, number, Z))
        return j, k, v, of_edge, tk, tv, t_of_edge

    def graph_tangent(lists, arrays, moved, mO, mLse, mTO, mTLse, drops, scale):
        (_, heads, _, _), (_, key_heads, _, _) = shape(mO), shape(arrays.k)
        matrix, row, here, at, end, step = rows_of_block(lists)
        if row == NOTHING:
            return
        batch, head = matrix // heads, matrix % heads
        key_head = head // (heads // key_heads)
        Q = convert(rows_at(arrays.q, K, batch, head, here), ACC)
        tQ = convert(rows_at(moved.q, K, batch, head, here), ACC)
        lse = number_at(mLse, batch, head, here) if SOFTMAX else full(LINES, ZERO)
        tO, total = full(V, ZERO), full(LINES, ZERO)
        while anywhere(at < end):
            found = read(lists, arrays, moved, drops, matrix, batch, head, key_head, at, end)
            j, k, v, of_edge, tk, tv, t_of_edge = found
            k, v, bias, factor = with_edges(k, v, of_edge)
            tk, tv, tbias, tfactor = with_moved(tk, tv, t_of_edge)
            P, slope, _ = weights_of(row_sum(Q * k) * scale + bias, lse, j >= 0)
            tS = row_sum(tQ * k + Q * tk) * scale + tbias
            total = total + slope * tS
            tO = tO + (tfactor * P + factor * (slope * tS)) * v + (factor * P) * tv
            at = at + step
        if SOFTMAX:
            tO = tO - total * convert(rows_at(mO, V, batch, head, here), ACC)
            if row == TILE:
                scatter(mTLse[batch, head], total, here)
            else:
                save(mTLse[batch, head][row : row + 1], sum_of_block(total), 0)
        save_rows(mTO[batch, head], tO, row, here)

    return GraphKernel(graph_tangent, steps.shared.nbytes, blocks_of(form, TANGENT))

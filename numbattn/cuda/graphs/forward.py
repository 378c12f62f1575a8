"""o and lse of each query over its edges, by the online softmax of Algorithm 1, and the tangents of both."""

from functools import cache

import numpy as np

from ..kernels.shared.softmax import LN_2
from ..tile import (
    aligned,
    anywhere,
    convert,
    device,
    exp2,
    full,
    log2,
    maximum,
    reciprocal,
    row_index,
    row_sum,
    save,
    shape,
    where,
)
from ..tile.arrays import Alignment
from ..words.numbers import LOG2_E
from .steps import EdgeSteps


@cache
def forward(form):
    """The kernel."""
    steps = EdgeSteps(form)
    rows_of_block, edge_at, rows_at = steps.rows_of_block, steps.edge_at, steps.rows_at
    read_edges, with_edges = steps.of_edges()
    ACC, K, V, LINES, SOFTMAX, ROWS_OF = steps.ACC, steps.K, steps.V, steps.LINES, form.softmax, Alignment(form.nbytes)
    ZERO, LOG2E, LN2, NO_MAX = ACC(0), ACC(LOG2_E), ACC(LN_2), ACC(np.finfo(ACC).min * 2.0**-28)

    @device
    def read(lists, arrays, batch, head, key_head, at, end):
        _, _, keys, _ = shape(arrays.k)
        j, number = edge_at(lists, at, end, keys)
        k, v = rows_at(arrays.k, K, batch, key_head, j), rows_at(arrays.v, V, batch, key_head, j)
        return j, k, v, read_edges(arrays, batch, head, number)

    @device
    def add(O, m, l, S, factor, v):
        """A softmax step: Alg. 1 lines 10 to 12, for an edge of each row."""
        if SOFTMAX:
            m_new = maximum(m, S)
            alpha, P = exp2((m - m_new) * LOG2E), exp2((S - m_new) * LOG2E)
            return O * alpha + (P * factor) * v, m_new, l * alpha + P
        return O + (S * factor) * v, m, l

    def graph_forward(lists, arrays, mO, mLse, scale):
        (_, heads, _, _), (_, key_heads, _, _) = shape(mO), shape(arrays.k)
        matrix, line, at, end = rows_of_block(lists)
        batch, head = matrix // heads, matrix % heads
        key_head = head // (heads // key_heads)
        Q = convert(rows_at(arrays.q, K, batch, head, row_index(LINES, line)), ACC)
        O, m, l = full(V, ZERO), full(LINES, NO_MAX), full(LINES, ZERO)
        now = read(lists, arrays, batch, head, key_head, at, end)
        while anywhere(at < end):
            ahead = read(lists, arrays, batch, head, key_head, at + 1, end)
            j, k, v, of_edge = now
            k, v, bias, factor = with_edges(k, v, of_edge)
            S = where(j >= 0, row_sum(Q * k) * scale + bias, -np.inf if SOFTMAX else ZERO)
            O, m, l = add(O, m, l, S, factor, v)
            at, now = at + 1, ahead
        if SOFTMAX:
            O = O * where(l > 0, reciprocal(l), 0)
            save(mLse[batch, head], where(l > 0, m + log2(l) * LN2, -np.inf), line)
        save(aligned(mO[batch, head], ROWS_OF), O, line)

    return graph_forward


@cache
def tangent(form):
    """The kernel of tlse = rowsum(P tS) and tO = sum of tfactor P v + factor (P' tS v + P tv), less tlse O."""
    steps = EdgeSteps(form)
    rows_of_block, edge_at, rows_at, number_at = steps.rows_of_block, steps.edge_at, steps.rows_at, steps.number_at
    (read_edges, with_edges), (read_moved, with_moved) = steps.of_edges(), steps.of_edges(default=0)
    ACC, K, V, LINES, SOFTMAX, ROWS_OF = steps.ACC, steps.K, steps.V, steps.LINES, form.softmax, Alignment(form.nbytes)
    ZERO, weights_of = ACC(0), steps.weights()

    @device
    def read(lists, arrays, moved, batch, head, key_head, at, end):
        _, _, keys, _ = shape(arrays.k)
        j, number = edge_at(lists, at, end, keys)
        k, v = rows_at(arrays.k, K, batch, key_head, j), rows_at(arrays.v, V, batch, key_head, j)
        tk, tv = rows_at(moved.k, K, batch, key_head, j), rows_at(moved.v, V, batch, key_head, j)
        return j, k, v, read_edges(arrays, batch, head, number), tk, tv, read_moved(moved, batch, head, number)

    def graph_tangent(lists, arrays, moved, mO, mLse, mTO, mTLse, scale):
        (_, heads, _, _), (_, key_heads, _, _) = shape(mO), shape(arrays.k)
        matrix, line, at, end = rows_of_block(lists)
        batch, head = matrix // heads, matrix % heads
        key_head, here = head // (heads // key_heads), row_index(LINES, line)
        Q = convert(rows_at(arrays.q, K, batch, head, here), ACC)
        tQ = convert(rows_at(moved.q, K, batch, head, here), ACC)
        lse = number_at(mLse, batch, head, here) if SOFTMAX else full(LINES, ZERO)
        tO, total = full(V, ZERO), full(LINES, ZERO)
        now = read(lists, arrays, moved, batch, head, key_head, at, end)
        while anywhere(at < end):
            ahead = read(lists, arrays, moved, batch, head, key_head, at + 1, end)
            j, k, v, of_edge, tk, tv, t_of_edge = now
            k, v, bias, factor = with_edges(k, v, of_edge)
            tk, tv, tbias, tfactor = with_moved(tk, tv, t_of_edge)
            P, slope, _ = weights_of(row_sum(Q * k) * scale + bias, lse, j >= 0)
            tS = row_sum(tQ * k + Q * tk) * scale + tbias
            total = total + slope * tS
            tO = tO + (tfactor * P + factor * (slope * tS)) * v + (factor * P) * tv
            at, now = at + 1, ahead
        if SOFTMAX:
            tO = tO - total * convert(rows_at(mO, V, batch, head, here), ACC)
            save(mTLse[batch, head], total, line)
        save(aligned(mTO[batch, head], ROWS_OF), tO, line)

    return graph_tangent

"""Sums of P over queries on the CPU: P is recomputed from lse, as in the backward pass."""

from typing import Any, NamedTuple

import numpy as np

from .arguments import record_of_tiles
from .backward_tile import exponentiate
from .compile import Kernel
from .launch import launch
from .operands import ROWS, ForwardGiven, Operands
from .product import dot
from .record import Record
from .score import sinks_of
from .scratch import TILE_M, TILE_N, Lent
from .statistics import call_of, queries_of, scores_of
from .tile import EMPTY, address_of, fill, is_set, tile, tile_state

KEYS = 2 * TILE_N  # of a block: queries are transposed once for as many


class RowsGiven(NamedTuple):
    """Of each query, (batch, heads, queries)."""

    lse: Any
    lse_low: Any  # or nothing
    weights: Any


ARRAYS = Operands(lse=ROWS, lse_low=ROWS, weights=ROWS)


def column_sums(problem, inputs, given, tangents=None):
    """The column sums, by name, of P with its rows times their weights."""
    found = np.empty((*problem.batch, problem.seqlen_k), problem.sum_dtype)
    tiles, of_tiles = record_of_tiles(problem, inputs.mask, TILE_M)
    lent = Lent()
    arrays, options, scratch, nbytes, cost = call_of(problem, inputs, lent.new, saves=False)
    rows, parts = ARRAYS.record(problem, given), -(-problem.seqlen_k // KEYS)
    work = Record(found.reshape(*problem.matrices, problem.seqlen_k), tiles.starts, parts)
    call = column_sums_kernel.given(scratch, *options, sinks_of(problem, ()), rows, work, of_tiles)
    o = np.empty(problem.out_shape, problem.sum_dtype)
    launch(call, (len(tiles.starts) - 1) * parts, tiles.pairs * cost, nbytes, (*arrays, o))
    lent.give_back()
    return {"column_sums": found}


@Kernel
def column_sums_kernel(
    first_block, end_block, stop, scratch, given: ForwardGiven, rows: RowsGiven, sums, starts, parts, tiles
):  # fmt: skip
    """Blocks [first_block, end_block); a block is a few tiles of keys of one (batch, head), whose sums it alone has."""
    dtype, heads, seqlen_k = sums.dtype, sums.shape[1], sums.shape[2]
    for block in range(first_block, end_block):
        number, first_key = block // parts, block % parts * KEYS
        end_key = min(first_key + KEYS, seqlen_k)
        total = sums[number // heads, number % heads, first_key:end_key]
        fill(total, 0)
        for row in range(starts[number], starts[number + 1]):
            at, first, end = queries_of(tiles[row], given, scratch)
            batch, head, m0, m_end = at.batch, at.head, at.m0, at.m_end
            first, end = max(first, first_key), min(end, end_key)
            lse, low, weights = at.alpha, at.part, tile(scratch.vectors, 1, m_end - m0)[0]
            for i in range(m_end - m0):
                x = rows.lse[batch, head, m0 + i]
                is_seen = x != -np.inf
                lse[i] = x if is_seen else np.inf                   # P = 0
                weights[i] = rows.weights[batch, head, m0 + i] if is_seen else 0
                low[i] = rows.lse_low[batch, head, m0 + i] if rows.lse_low.size else 0
            for n0 in range(first, end, TILE_N):
                n_end = min(n0 + TILE_N, end)
                state = tile_state(given.mask, at.intervals, batch, head, m0, m_end, n0, n_end)
                if state == EMPTY:
                    continue
                if is_set(stop):
                    return
                S = tile(scratch.S, n_end - n0, m_end - m0)
                scores_of(S, at, given, scratch, n0, n_end, state)
                exponentiate(S, lse, low)                           # Alg. 4 line 13: P = exp(S - lse)
                for j in range(n_end - n0):
                    total[n0 - first_key + j] += dot(address_of(S[j]), address_of(weights), m_end - m0, dtype)

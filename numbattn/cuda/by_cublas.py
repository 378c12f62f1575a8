"""Attention whose head_dims are too large for tiles of kernels, by matrix products of cuBLAS; of half precision the
gradients alone.

A block of scores is in memory at a time; between its products a kernel reads and writes it. Masks are bands that all
matrices share, outside of which no block is computed.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..base.values import put, rounded, rowsum
from ..masks import Causal, Window
from .kernel import kernel_factory, launch
from .kernels.shared.layouts import vector
from .kernels.shared.schedule import split
from .kernels.shared.softmax import LN_2, log2_step, logsumexp, low_step, softmax_parts
from .kernels.tables import SLICE
from .products import has_cublas, product
from .tile import (
    WARP,
    Alignment,
    aligned,
    block_index,
    cols_between,
    convert,
    device,
    exp2,
    full,
    index,
    load,
    minimum,
    part_sum,
    reciprocal,
    row_index,
    row_sum,
    save,
    shape,
    simt,
    where,
)
from .tile.alignment import VECTOR_BYTES
from .words.numbers import LOG2_E

# The largest head_dims that kernels compute faster, by bytes of an element; in the backward pass of long sequences, of
# longer ones with a mask. ms of kernels and of products, forward and backward, H200, 8192 tokens, 8 heads, seqlen 4096:
# float64, d 96 3.9 6.7, 14.2 11.3; 128 3.9 7.1, 14.6 12.1; 192 18.9 8.4, 24.7 15.5; 512 88 15, 348 37. float32, d 192
# 4.0 6.2, 15.4 14.5; 256 5.7 6.8, 19.8 16.4; 320 18.0 8.9, 104 22; 512 31 12.6, 201 30. Causal, float64, d 128 2.1 3.9,
# 7.4 7.5. bfloat16, d 512, 32 heads, backward, seqlen 16384 269 108, causal 127 67; batch 8, seqlen 2048 35 20, 17 21
# Blocks of a band in half precision are small where heads are few: d 320, 6 heads, backward, causal: 172 TFLOP/s of
# kernels at seqlen 1024, 73 and 114 of products at 4096 and 16384
WIDEST, WIDEST_OF_LONG, LONG, LONG_BAND = {4: 256, 8: 128}, {2: 256, 4: 192, 8: 64}, 1024, 4096
WIDEST_OF_BAND = WIDEST_OF_LONG | {2: 320}
BYTES = 1 << 27  # of a block of scores, if q has no more: a half takes 1.2 times as long in bfloat16, a quarter 2.3
PARTS, LEAST = 8, 512  # of the queries of a band: parts, each of which has columns of its own, and their rows
THREADS, TILE_M, TILE_N = 256, 16, 256


def takes(problem: Any, inputs: Any, backward: bool = False) -> bool:
    """Whether a pass of a call is computed here."""
    return fits(problem, backward) and not inputs.mask._holds_arrays


@lru_cache(maxsize=1024)
def fits(problem: Any, backward: bool) -> bool:
    """Whether a call without arrays in its mask would be."""
    lead, nbytes = problem.batch, problem.dtype.itemsize
    lead_k = (*lead[:-1], problem.heads_k) if lead else ()
    long, widest_of_long = (LONG_BAND, WIDEST_OF_BAND) if problem.mask_kinds else (LONG, WIDEST_OF_LONG)
    is_long = backward and min(problem.seqlen_q, problem.seqlen_k) >= long
    return (
        max(problem.head_dim, problem.head_dim_v) > (widest_of_long if is_long else WIDEST).get(nbytes, math.inf)
        and not (problem.is_empty or problem.score_kinds or problem.dropout or problem.cache)
        and {Causal, Window}.issuperset(problem.mask_kinds)
        and [shape[:-2] for shape in problem.shapes] == [lead, lead_k, lead_k]
        and has_cublas()
    )


# --------------------------------------------------------------------------------------------------------------- passes
def forward(problem: Any, inputs: Any, o: Any, lse: Any, low: Any, empty: Callable[..., Any]) -> None:
    """o, lse, and what rounding took from it; empty: allocates."""
    of_queries, (Q, K, V) = stacks(problem, inputs)
    O, lse, low = map(of_queries, (o, lse, low))
    for block, (S,) in blocks(problem, inputs, empty, [problem.dtype]):
        at, keys = block.queries, block.keys
        sliced_product(S[..., : block.cols], Q[at], K[keys])                    # Alg. 0 line 1: S = Q K^T
        kernel, grid = softmax_kernel(S.dtype), S.shape[0] * -(-S.shape[1] // TILE_M)
        run(kernel, grid, block, inputs.scale, S, lse[at], low[at])
        product(O[at], S[..., : block.cols], V[keys])                           # line 3: O = P V


def backward(problem: Any, inputs: Any, given: Any, results: Any, empty: Callable[..., Any]) -> None:
    """dq, dk and dv, by name among the results. In half precision blocks add to sums of dk and dv."""
    of_queries, (Q, K, V) = stacks(problem, inputs)
    dtype, is_half, scale = problem.sum_dtype, problem.dtype != problem.sum_dtype, inputs.scale
    D = rowsum(*[rounded(given[name], dtype) for name in ("do", "o")])          # Alg. 4 line 19
    if "dlse" in given:
        D -= given["dlse"]
    low = given["lse_low"] if "lse_low" in given else np.zeros_like(given["lse"])
    dO, lse, low, D, dQ = map(of_queries, (given["do"], given["lse"], low, D, results["dq"]))
    sums = [empty(results[name].shape, dtype) if is_half else results[name] for name in ("dk", "dv")]
    dK, dV = map(of_keys, sums)
    for x in sums:
        x.fill(0)
    for block, (S, dP, *halves) in blocks(problem, inputs, empty, [dtype] * 2 + [problem.dtype] * (2 * is_half)):
        at, keys, (P, dS) = block.queries, block.keys, halves or (S, dP)
        sliced_product(S[..., : block.cols], Q[at], K[keys])                    # line 11: S = Q K^T
        sliced_product(dP[..., : block.cols], dO[at], V[keys])                  # line 17: dP = dO V^T
        grid = S.shape[0] * -(-S.shape[1] // TILE_M) * -(-S.shape[2] // TILE_N)
        run(gradient_kernel(dtype, P.dtype), grid, block, scale, S, dP, P, dS, lse[at], low[at], D[at])
        P, dS = (x[..., : block.cols] for x in (P, dS))
        product(dV[keys], P.swapaxes(1, 2), dO[at], add=True)                   # line 16: dV = dV + P^T dO
        product(dQ[at], dS, K[keys], factor=scale)                              # line 21: dQ = dS K
        product(dK[keys], dS.swapaxes(1, 2), Q[at], add=True, factor=scale)     # line 22: dK = dK + dS^T Q
    if is_half:
        for name, x in zip(("dk", "dv"), sums):
            put(results[name], x)


def sliced_product(out: Any, x: Any, y: Any) -> None:
    """x y^T, on whose digits P and dS depend most. cuBLAS adds up products one after the other: by slices of the
    features rounding takes half as much, in some 8 % more of the time of a pass. Halves have lost more before."""
    size = SLICE if out.dtype == x.dtype else max(x.shape[-1], 1)
    for first in range(0, x.shape[-1] or 1, size):
        part = slice(first, first + size)
        product(out, x[..., part], y[..., part].swapaxes(1, 2), add=first > 0)


# --------------------------------------------------------------------------------------------------------------- blocks
class Block(NamedTuple):
    """Some rows and columns of the scores of some matrices."""

    queries: tuple[slice, int, slice]  # matrices, the query head of those that share a key head, rows
    keys: tuple[slice, slice]
    cols: int
    lo: int  # column j is visible to row i of the block iff i + lo <= j <= i + hi
    hi: int


def stacks(problem: Any, inputs: Any) -> tuple[Callable[[Any], Any], list[Any]]:
    """The function (array) -> it with axes of all key heads of the batch and of the query heads that share each; Q,
    and K and V with one axis of all key heads."""

    def of_queries(x: Any) -> Any:
        return x.reshape(-1, problem.group_size, *x.shape[len(problem.batch) :])

    return of_queries, [of_queries(inputs.q), of_keys(inputs.k), of_keys(inputs.v)]


def of_keys(x: Any) -> Any:
    return x.reshape(-1, *x.shape[-2:])


def blocks(problem: Any, inputs: Any, empty: Any, dtypes: list[Any]) -> Iterator[tuple[Block, list[Any]]]:
    """The Blocks of a call, each with memory for arrays of these dtypes, the first that of sums, with aligned rows."""
    lo, hi, m, n = *inputs.mask._band(problem.seqlen_q, problem.seqlen_k)[:2], problem.seqlen_q, problem.seqlen_k
    nbytes = max(BYTES, inputs.q.nbytes)    # in both passes, so that S has the same bits
    most, unit = nbytes // dtypes[0].itemsize, VECTOR_BYTES // dtypes[-1].itemsize
    rows, width = min(m, max(most // n, 1)), -(-n // unit) * unit
    if lo > 1 - m or hi < n - 1:
        rows = min(rows, max(-(-m // PARTS), LEAST))
    matrices = math.prod(problem.batch) // problem.group_size
    at_once = min(max(most // (rows * n), 1), matrices)
    room = [empty((at_once, rows, width), dtype) for dtype in dtypes]
    for first in range(0, matrices, at_once):
        which = slice(first, min(first + at_once, matrices))
        for member in range(problem.group_size):
            for row in range(0, m, rows):
                end = min(row + rows, m)
                col, last = max(row + lo, 0), min(end + hi, n)
                keys = slice(col, max(last, col))
                block = Block((which, member, slice(row, end)), (which, keys), keys.stop - col, row + lo - col,
                              row + hi - col)  # fmt: skip
                width = -(-max(block.cols, 1) // unit) * unit
                yield block, [x[: which.stop - first, : end - row, :width] for x in room]


# -------------------------------------------------------------------------------------------------------------- kernels
def run(kernel: Any, grid: int, block: Block, scale: float, *arrays: Any) -> None:
    """Launch a kernel on scores and on vectors of their rows."""
    edges = map(np.int32, (block.cols, block.lo, block.hi))
    launch(kernel, (grid, 1, 1), THREADS, 0, *arrays, *edges, arrays[0].dtype.type(scale * LOG2_E))


def visible_step(TILE):
    """The device function (m0, n0, cols, lo, hi) -> which elements of a tile are visible."""
    ROW = TILE.row_vector()

    @device
    def visible(m0, n0, cols, lo, hi):
        i = row_index(ROW, m0)
        return cols_between(TILE, n0, i + lo, minimum(i + hi, cols - 1))

    return visible


@kernel_factory
def softmax_kernel(dtype):
    """The kernel that makes P of S, and lse: a warp has some rows."""
    ACC, ROWS_OF, TILE = dtype.type, Alignment(VECTOR_BYTES), simt(TILE_M, TILE_N, THREADS, WARP, vector(dtype))
    ROWS, COLS, INFINITE, ZERO, LN2 = TILE_M, TILE_N, ACC(np.inf), ACC(0), ACC(LN_2)
    (no_max, new_max, exponentials), low_of = softmax_parts(ACC, exact=True), low_step(ACC)
    visible, ROW, PARTS_OF_ROWS = visible_step(TILE), TILE.row_vector(), TILE.row_parts()

    def softmax_of_scores(mS, mLse, mLow, cols, lo, hi, scale_log2):
        _, rows, _ = shape(mS)
        matrix, tile = split(block_index(), (rows + ROWS - 1) // ROWS)
        S, m0, n0 = mS[matrix], tile * ROWS, index(0)
        m, l = full(ROW, no_max(scale_log2)), full(PARTS_OF_ROWS, ZERO)
        while n0 < cols:
            T = load(aligned(S[:, n0 : n0 + COLS], ROWS_OF), TILE, m0)
            T = where(visible(m0, n0, cols, lo, hi), T, -INFINITE)
            m, alpha, zero = new_max(T, m, scale_log2)
            l = part_sum(exponentials(T, zero, scale_log2), l * alpha)
            n0 = n0 + COLS
        total = row_sum(l)
        factor, lse = reciprocal(total), logsumexp(m * (scale_log2 * LN2), total, LN2)
        save(mLse[matrix], lse, m0)
        save(mLow[matrix], low_of(lse, m, scale_log2, factor), m0)
        n0 = index(0)
        while n0 < cols:
            T = load(aligned(S[:, n0 : n0 + COLS], ROWS_OF), TILE, m0)
            T = where(visible(m0, n0, cols, lo, hi), T, -INFINITE)
            save(aligned(S[:, n0 : n0 + COLS], ROWS_OF), exponentials(T, m, scale_log2) * factor, m0)
            n0 = n0 + COLS

    return softmax_of_scores


@kernel_factory
def gradient_kernel(dtype, out_dtype):
    """The kernel that makes P of S, and dS of dP, perhaps where these are."""
    ACC, OUT, TILE = dtype.type, out_dtype, simt(TILE_M, TILE_N, THREADS, WARP, vector(dtype))
    ROWS, COLS, LOG2E, ROWS_OF = TILE_M, TILE_N, ACC(LOG2_E), Alignment(VECTOR_BYTES)
    to_log2, visible, ROW = log2_step(ACC), visible_step(TILE), TILE.row_vector()

    @device
    def columns(mX, matrix, n0):
        return aligned(mX[matrix][:, n0 : n0 + COLS], ROWS_OF)

    def gradient_of_scores(mS, mDP, mP, mDS, mLse, mLow, mD, cols, lo, hi, scale_log2):
        _, rows, width = shape(mS)
        row, col_tile = split(block_index(), (width + COLS - 1) // COLS)
        matrix, row_tile = split(row, (rows + ROWS - 1) // ROWS)
        m0, n0 = row_tile * ROWS, col_tile * COLS
        S, dP = load(columns(mS, matrix, n0), TILE, m0), load(columns(mDP, matrix, n0), TILE, m0)
        lse, low, D = to_log2(load(mLse[matrix], ROW, m0)), load(mLow[matrix], ROW, m0), load(mD[matrix], ROW, m0)
        seen = visible(m0, n0, cols, lo, hi)
        P = where(seen, exp2(S * scale_log2 - lse - low * LOG2E), 0)            # Alg. 4 lines 12 and 13
        dS = where(seen, P * (dP - D), 0)                                       # line 20
        save(columns(mP, matrix, n0), convert(P, OUT), m0)
        save(columns(mDS, matrix, n0), convert(dS, OUT), m0)

    return gradient_of_scores

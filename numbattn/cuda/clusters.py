"""Sums over the points of each label on a GPU, as k-means takes them: of points sorted by label, a part of a cluster in
each block, and then of the parts of each cluster in their order. What is read of a point is read once."""

import math
from typing import Any

import numpy as np

from .kernel import kernel_factory, launch
from .kernels.shared.block_rows import reduce_rows_step
from .kernels.shared.layouts import sum_type, vector
from .kernels.shared.schedule import split
from .tile import (
    Alignment,
    SharedMemory,
    aligned,
    block_index,
    convert,
    device,
    full,
    gather,
    index,
    load,
    minimum,
    part_sum,
    row_index,
    row_sum,
    save,
    shape,
    simt,
    where,
)
from .tile.alignment import VECTOR_BYTES, alignment_of

THREADS, LANES = 128, 16  # of a block; of a row, at most
PART, PARTS = 64, 4096  # points of a part, at least; parts, besides one for each cluster


def clusters(problem: Any, inputs: Any, labels: Any, weights: Any) -> tuple[Any, Any, Any]:
    """As `numbattn.cpu.points.clusters`, in the dtype of sums; without weights, counts are integers."""
    m, k, d, problems = problem.seqlen_q, problem.seqlen_k, problem.head_dim, math.prod(problem.batch)
    last, total, batch = problems * k, problems * m, problem.batch
    x, y = inputs.q.reshape(total, d), inputs.k.reshape(last, d)
    if not d:   # kernels read some memory in any case
        x, y = (np.zeros_like(z, shape=(len(z), 1)) for z in (x, y))
    own = labels.reshape(problems, m)
    in_all = own if problems == 1 else own + np.arange(0, last, k, own.dtype, like=own)[:, None]
    own = np.where(own < 0, own.dtype.type(last), in_all).ravel()
    order = np.argsort(own, kind="stable").astype(np.int32)
    starts = np.searchsorted(own[order], np.arange(last + 1, dtype=own.dtype, like=own)).astype(np.int32)
    counts, most = starts[1:] - starts[:-1], max(PART, -(-total // PARTS))
    before = np.zeros_like(starts)      # parts of clusters before each one
    before[1:] = np.cumsum((counts + np.int32(most - 1)) // np.int32(most))
    numbers = np.arange(total // most + last, dtype=np.int32, like=own)
    of_part = np.searchsorted(before[1:], numbers, side="right").astype(np.int32)   # last: none
    sums, squares, mass = sums_of(x, y, order, weights, starts, before, of_part, most)
    inertia = squares.reshape(*batch, k * squares.shape[1]).sum(axis=-1)
    counts = counts if weights is None else mass
    return sums[:, :d].reshape(*batch, k, d), counts.reshape(*batch, k), inertia


def sums_of(x: Any, y: Any, order: Any, weights: Any, starts: Any, before: Any, of_part: Any, most: int) -> Any:
    """sum w (x - y), sum w |x - y|^2 in one or several columns, and sum w over the points x of each cluster, whose
    centre is y."""
    (clusters, d), dtype, of_d = y.shape, np.dtype(sum_type(x.dtype)), chunks_of(x.dtype, y.shape[1])
    width = -(-(d + of_d + 1) // 4) * 4     # of aligned rows
    parts, sums = (np.empty_like(x, dtype, shape=(rows, width)) for rows in (len(of_part), clusters))
    given, of_width = () if weights is None else (weights.ravel(),), chunks_of(dtype, width)
    if clusters:
        kernel, nbytes = parts_kernel(x.dtype, lanes_of(x.dtype, d), bool(given), alignment_of(x))
        launch(kernel, (len(parts) * of_d, 1, 1), THREADS, nbytes, parts, x, y, order, given, starts, before, of_part,
               np.int32(most), np.int32(of_d))  # fmt: skip
        kernel, nbytes = merge_kernel(dtype, lanes_of(dtype, width))
        launch(kernel, (clusters * of_width, 1, 1), THREADS, nbytes, sums, parts, before, np.int32(of_width))
    return sums[:, :d], sums[:, d : d + of_d], sums[:, d + of_d]


def lanes_of(dtype: Any, features: int) -> int:
    """How many lanes share a row."""
    return min(1 << max(-(-features // vector(dtype)) - 1, 0).bit_length(), LANES)


def chunks_of(dtype: Any, features: int) -> int:
    """How many tiles of features there are."""
    return max(-(-features // (lanes_of(dtype, features) * vector(dtype))), 1)


def tile_of(dtype, lanes):
    return simt(THREADS // lanes, lanes * vector(dtype), THREADS, lanes, vector(dtype))


@kernel_factory
def parts_kernel(dtype, lanes, has_weights, nbytes):
    """The kernel for points of this dtype, of which a block sums up some features of a part, and its shared memory. A
    row of the parts has sums of all features, squares of each tile of them, and the sum of weights."""
    ACC, TILE, shared, ROWS_OF = sum_type(dtype), tile_of(dtype, lanes), SharedMemory(), Alignment(nbytes)
    (ROWS, COLS), LINES, COLUMN, HAS_WEIGHTS = TILE.shape, TILE.row_vector(), TILE.col_vector(), has_weights
    OF_LANES, ZERO, ONE = TILE.row_parts(), ACC(0), ACC(1)
    sum_of_rows, sum_of_lines = (reduce_rows_step(shared, layout, ACC, THREADS, row_sum) for layout in (TILE, LINES))

    @device
    def rows_of(order, at, end):
        places = row_index(LINES, at)
        return where(places < end, gather(order, LINES, places), -1)

    def sums_of_parts(mParts, mX, mY, mOrder, weights, mStarts, mBefore, mClusters, most, chunks):
        (clusters, features), (part, chunk) = shape(mY), split(block_index(), chunks)
        cluster, n0 = index(mClusters[part]), chunk * COLS
        if cluster < clusters:
            at = index(mStarts[cluster]) + (part - index(mBefore[cluster])) * most
            end = minimum(at + most, index(mStarts[cluster + 1]))
            Y, total = convert(load(mY[cluster], COLUMN, n0), ACC), full(TILE, ZERO)
            squares, mass = full(OF_LANES, ZERO), full(LINES, ZERO)
            rows = rows_of(mOrder, at, end)
            while at < end:
                rows_after = rows_of(mOrder, at + ROWS, end)    # ahead of time
                w = gather(weights[0], LINES, rows) if HAS_WEIGHTS else where(rows >= 0, full(LINES, ONE), ZERO)
                X = convert(gather(aligned(mX[:, n0:], ROWS_OF), TILE, rows), ACC)
                moves = where(rows >= 0, X - Y, ZERO)
                total = total + moves * w
                squares = part_sum(moves * moves * w, squares)
                mass, rows, at = mass + w, rows_after, at + ROWS
            line = mParts[part]
            save(line[:features], sum_of_rows(total), n0)
            save(line[features:], sum_of_lines(row_sum(squares)), chunk)
            if chunk == 0:
                save(line[features:], sum_of_lines(mass), chunks)

    return sums_of_parts, shared.nbytes


@kernel_factory
def merge_kernel(dtype, lanes):
    """The kernel that adds up the parts of each cluster, and its shared memory."""
    ACC, TILE, shared, ROWS_OF = dtype.type, tile_of(dtype, lanes), SharedMemory(), Alignment(VECTOR_BYTES)
    ROWS, COLS = TILE.shape
    sum_of_rows, ZERO = reduce_rows_step(shared, TILE, ACC, THREADS, row_sum), ACC(0)

    def sums_of_clusters(mSums, mParts, mBefore, chunks):
        cluster, chunk = split(block_index(), chunks)
        at, end, n0 = index(mBefore[cluster]), index(mBefore[cluster + 1]), chunk * COLS
        total = full(TILE, ZERO)
        while at < end:
            total = total + load(aligned(mParts[:end, n0:], ROWS_OF), TILE, at)
            at = at + ROWS
        save(mSums[cluster], sum_of_rows(total), n0)

    return sums_of_clusters, shared.nbytes

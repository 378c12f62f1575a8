"""Means of the points of each label on a GPU, as k-means takes them: of points sorted by label, sums over a part of a
cluster in each block, and then of the parts of each cluster in their order. What is read of a point is read once.

Cluster c has positions starts[c] to starts[c + 1] of the order. Its parts are numbered from starts[c] // most + c on:
clusters share no number, and few are left over, so that nothing waits for counts.
"""

import math
from typing import Any

import numpy as np

from .kernel import kernel_factory, launch
from .kernels.shared.block_rows import reduce_rows_step, transposed
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
    """As `numbattn.cpu.points.clusters`."""
    m, k, d, problems = problem.seqlen_q, problem.seqlen_k, problem.head_dim, math.prod(problem.batch)
    last, total, batch = problems * k, problems * m, problem.batch
    x, y = inputs.q.reshape(total, d), inputs.k.reshape(last, d)
    if not d:   # kernels read some memory in any case
        x, y = (np.zeros_like(z, shape=(len(z), 1)) for z in (x, y))
    if problems > 1:    # of all problems
        firsts = np.arange(0, last, k, labels.dtype, like=labels).reshape(*batch, 1)
        labels = np.where(labels < 0, labels, labels + firsts)
    means, counts, squares = means_of(x, y, labels.ravel(), weights)
    inertia = squares.reshape(*batch, k * squares.shape[1]).sum(axis=-1)
    return means[:, :d].reshape(*batch, k, d), counts.reshape(*batch, k), inertia


def means_of(x: Any, y: Any, labels: Any, weights: Any) -> Any:
    """Means of the points x of each label, or y; their counts or sums of weights; sum w |x - y|^2 in one or several
    columns."""
    (last, d), total, dtype, of_d = y.shape, len(x), np.dtype(sum_type(x.dtype)), chunks_of(x.dtype, y.shape[1])
    order, most = np.argsort(labels, kind="stable"), max(PART, -(-total // PARTS))  # labels of -1 come first

    def new(of, *shape):
        return np.empty(shape, of, like=x)

    starts, parts = new(np.int64, last + 1), new(dtype, total // most + last, -(-(d + of_d + 1) // 4) * 4)
    means, squares, mass = new(y.dtype, last, d), new(dtype, last, of_d), new(dtype, last)
    if last:
        lanes, given, sizes = lanes_of(x.dtype, d), () if weights is None else (weights.ravel(),), (most, of_d)
        steps = np.int32(1 << total.bit_length() >> 1)
        launch(starts_kernel(), -(-len(starts) // THREADS), THREADS, 0, starts, labels, order, steps)
        kernel, nbytes = parts_kernel(x.dtype, lanes, bool(given), alignment_of(x))
        launch(kernel, len(parts) * of_d, THREADS, nbytes, parts, x, y, order, given, starts, *map(np.int32, sizes))
        kernel, nbytes = means_kernel(y.dtype, lanes)
        launch(kernel, last * of_d, THREADS, nbytes, means, mass, squares, y, parts, starts, *map(np.int32, sizes))
    return means, starts[1:] - starts[:-1] if weights is None else mass, squares


def lanes_of(dtype: Any, features: int) -> int:
    """How many lanes share a row."""
    return min(1 << max(-(-features // vector(dtype)) - 1, 0).bit_length(), LANES)


def chunks_of(dtype: Any, features: int) -> int:
    """How many tiles of features there are."""
    return max(-(-features // (lanes_of(dtype, features) * vector(dtype))), 1)


def tile_of(lanes, of_lane):
    return simt(THREADS // lanes, lanes * of_lane, THREADS, lanes, of_lane)


@kernel_factory
def starts_kernel():
    """The kernel that counts the labels below each cluster, with or without points."""
    LINES, ZERO = tile_of(1, 1).row_vector(), np.int32(0)

    def starts_of_clusters(mStarts, mLabels, mOrder, step):
        (total,), r0 = shape(mLabels), block_index() * THREADS
        clusters, below = row_index(LINES, r0), full(LINES, ZERO)
        while step > 0:                                         # a binary search in the sorted labels
            beyond = below + step
            labels = gather(mLabels, LINES, convert(gather(mOrder, LINES, beyond - 1), np.int32))
            below = where((labels < clusters) & (beyond <= total), beyond, below)
            step = step // 2
        save(mStarts, convert(below, np.int64), r0)

    return starts_of_clusters


@device
def first_part(mStarts, cluster, most):
    return index(mStarts[cluster]) // most + cluster


@kernel_factory
def parts_kernel(dtype, lanes, has_weights, nbytes):
    """The kernel for points of this dtype, of which a block sums up some features of a part, and its shared memory. A
    row of the parts has sums of all features, squares of each tile of them, and the sum of weights."""
    ACC, TILE, shared, ROWS_OF = sum_type(dtype), tile_of(lanes, vector(dtype)), SharedMemory(), Alignment(nbytes)
    (ROWS, COLS), LINES, COLUMN, HAS_WEIGHTS = TILE.shape, TILE.row_vector(), TILE.col_vector(), has_weights
    OF_LANES, ZERO, ONE = TILE.row_parts(), ACC(0), ACC(1)
    sum_of_rows, sum_of_lines = (reduce_rows_step(shared, layout, ACC, THREADS, row_sum) for layout in (TILE, LINES))

    @device
    def cluster_of(mStarts, part, most):
        cluster, end = index(0), shape(mStarts)[0] - 1
        while end - cluster > 1:                                # a binary search
            middle = (cluster + end) // 2
            if first_part(mStarts, middle, most) <= part:
                cluster = middle
            else:
                end = middle
        return cluster

    @device
    def rows_of(order, at, end):
        places = row_index(LINES, at)
        return where(places < end, convert(gather(order, LINES, places), np.int32), -1)

    def sums_of_parts(mParts, mX, mY, mOrder, weights, mStarts, most, chunks):
        (_, features), (part, chunk) = shape(mY), split(block_index(), chunks)
        cluster, n0 = cluster_of(mStarts, part, most), chunk * COLS
        before, stop = part - first_part(mStarts, cluster, most), index(mStarts[cluster + 1])
        at = index(mStarts[cluster]) + before * most
        if before >= 0 and at < stop:                           # else none of a cluster's parts has the number
            end = minimum(at + most, stop)
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
def means_kernel(dtype, lanes):
    """The kernel that adds up the parts of each cluster, some features in a block, and its shared memory."""
    OUT, ACC, shared, ROWS_OF = dtype.type, sum_type(dtype), SharedMemory(), Alignment(VECTOR_BYTES)
    OF_LANE = vector(np.dtype(ACC))
    TILE = tile_of(lanes * vector(dtype) // OF_LANE, OF_LANE)
    (ROWS, COLS), LINES, ZERO, ONE = TILE.shape, TILE.row_vector(), ACC(0), ACC(1)
    COLUMN = transposed(TILE, THREADS).row_vector()
    sum_of_rows, sum_of_lines = (reduce_rows_step(shared, layout, ACC, THREADS, row_sum) for layout in (TILE, LINES))

    def means_of_clusters(mMeans, mMass, mSquares, mY, mParts, mStarts, most, chunks):
        (_, features), (cluster, chunk) = shape(mY), split(block_index(), chunks)
        n0, count = chunk * COLS, index(mStarts[cluster + 1]) - index(mStarts[cluster])
        at = first_part(mStarts, cluster, most)
        end = at + (count + most - 1) // most
        total, squares, mass = full(TILE, ZERO), full(LINES, ZERO), full(LINES, ZERO)
        while at < end:
            parts = mParts[:end]
            total = total + load(aligned(parts[:, n0:], ROWS_OF), TILE, at)
            squares = squares + load(parts[:, features + chunk], LINES, at)
            mass = mass + load(parts[:, features + chunks], LINES, at)
            at = at + ROWS
        moves, weight = sum_of_rows(total), sum_of_rows(full(TILE, ZERO) + mass)
        means = convert(load(mY[cluster], COLUMN, n0), ACC) + moves / where(weight > ZERO, weight, ONE)
        save(mMeans[cluster], convert(means, OUT), n0)
        save(mSquares[cluster], sum_of_lines(squares), chunk)
        if chunk == 0:
            save(mMass[cluster:], sum_of_lines(mass), 0)

    return means_of_clusters, shared.nbytes

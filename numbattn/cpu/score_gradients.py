"""Gradients of a score's arrays, added up tile by tile where dS is computed.

As everywhere here tiles are transposed: a row is a key, a column a query.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..scores import steps_of
from .record import Later
from .score import KEPT, KIND, SLOPES, by_kind, numbered_tile, row_of
from .scores import KINDS, matrix_of
from .tile import contiguous_view, inline, inline_view
from .transposition import transpose

NEAR = 2**14  # elements: with 2**13 the order in memory is up to 1.3 times as fast, with 2**15 it is slower
COUNTS = 64, 16, 4, 1  # of blocks: constants, so that gradients do not depend on the number of threads


# ------------------------------------------------------------------------------------------------------------- blocks
class Shares(NamedTuple):
    """How (batch, key head) pairs are divided among blocks, which each add up gradients of arrays on their own."""

    order: Any  # int64 (pairs,), batch * heads_k + head; block number b has order[starts[b]:starts[b + 1]]
    starts: Any
    places: tuple  # for each wanted gradient, int64 (batch, heads): the number of the sum that each matrix adds to
    firsts: tuple  # for each wanted gradient: the first sum of each matrix of the array


def shapes_of(parts):
    """The shape of the array of each step, with rows and columns; None where its gradient is not wanted."""
    return tuple([shape_of(part) if part._wants_gradient else None for part in steps_of(parts)])


def shape_of(part):
    """The shape of a part's array; a function's arrays are one after the other."""
    return (1, part._elements) if part._own_axes is None else matrix_of(part).shape


def shares_of(problem, shapes):
    """The Shares of a problem. Without gradients of arrays a block is a pair."""
    shapes = tuple([shape for shape in shapes if shape is not None])
    batches, heads = problem.matrices
    keys = problem.heads_k * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    room = batches * (heads * problem.seqlen_q * problem.head_dim + keys)  # elements of dq, dk and dv
    return _shares(problem.batch, (batches, heads), problem.heads_k, shapes, room if shapes else 0)


@lru_cache(maxsize=64)
def _shares(batch, matrices, heads_k, shapes, room):
    """The Shares. shapes: of the arrays; room: how many elements all sums beyond one for each of their matrices may
    have.

    Blocks take pairs in the order of the matrices of the largest array, so that sums are few and stay in the cache. If
    they all stay there anyway, pairs are taken in memory order.
    """
    pairs, group_size = matrices[0] * heads_k, matrices[1] // max(heads_k, 1)
    if not shapes:
        return Shares(np.arange(pairs), np.arange(pairs + 1), (), ())
    owns = [_own_of(shape, batch, matrices) for shape in shapes]
    sizes = [math.prod(shape[-2:]) for shape in shapes]
    own, order = owns[sizes.index(max(sizes))], np.arange(pairs)
    if max(sizes) * (own.max(initial=0) + 1) > NEAR:
        order = np.argsort(own[:, :: max(group_size, 1)].ravel(), kind="stable")
    for count in COUNTS:
        count = min(count, max(pairs, 1))
        starts = np.arange(count + 1) * pairs // count
        block = np.empty(pairs, np.int64)
        block[order] = np.repeat(np.arange(count), np.diff(starts))
        block = block.reshape(matrices[0], heads_k).repeat(group_size, axis=1)
        found = [np.unique(own * count + block, return_inverse=True) for own in owns]
        firsts = [np.flatnonzero(np.diff(sums // count, prepend=-1)) for sums, _ in found]
        more = sum((len(sums) - len(first)) * size for (sums, _), first, size in zip(found, firsts, sizes))
        if more <= room:
            break
    return Shares(order, starts, tuple([place.reshape(matrices) for _, place in found]), tuple(firsts))


def _own_of(shape, batch, matrices):
    """The number of the matrix, in an array of this shape, for each (batch, head)."""
    lead = (1,) * (len(batch) - len(shape) + 2) + shape[:-2]
    return np.broadcast_to(np.arange(math.prod(lead)).reshape(lead), batch).reshape(matrices)


# --------------------------------------------------------------------------------------------------------------- sums
class Sums(NamedTuple):
    """The sums for the gradients of the arrays of Steps, as kernels take them."""

    numbers: Any  # int64 (steps, 4): which wanted gradient, or -1; rows and columns; bytes between the sums of chunks
    addresses: Any  # int64 (directions, wanted gradients), of arrays (sums, chunks, rows, columns)
    places: Any  # int64 (wanted gradients, batch, heads), bytes: where in the array the sum of each begins


def sums_for(problem, shapes, shares, chunks, count):
    """The Sums of steps, and the shape and dtype of the array of each wanted gradient. shapes: as from shapes_of;
    count: of directions."""
    numbers, layouts = np.full((len(shapes), 4), -1, np.int64), []
    places = np.zeros((len(shares.places), *problem.matrices), np.int64)
    for step, shape in enumerate(shapes):
        if shape is not None:
            rows, cols = shape[-2:]
            whole = rows > 1 and cols > 1  # few numbers are added to an element, all in one chunk, and there are many
            number, dtype = len(layouts), problem.sum_dtype if whole else np.dtype(np.float64)
            place, nbytes, parts = shares.places[number], rows * cols * dtype.itemsize, 1 if whole else chunks
            numbers[step] = number, rows, cols, 0 if whole else nbytes
            places[number] = place * parts * nbytes
            layouts.append(((int(place.max(initial=0)) + 1, parts, rows, cols), dtype))
    return Sums(numbers, Later((count, len(layouts)), np.int64), places), layouts


@inline
def sums_along(sums, t):
    """The Sums of a direction."""
    return Sums(sums.numbers, sums.addresses[t], sums.places)


def merged(dx, firsts):
    """The gradient of each matrix of an array, from its sums."""
    dx = dx[:, 0] if dx.shape[1] == 1 else dx.sum(axis=1)
    return dx if len(dx) == len(firsts) else np.add.reduceat(dx, firsts, axis=0)


# ---------------------------------------------------------------------------------------------------------- gradients
collect = by_kind([kind.collect for kind in KINDS])


@inline
def pull_back(dS, steps, slopes, sums, batch, head, chunk, m0, n0, aligned):
    """dS after the score becomes that before it, step by step, and is added to the gradients of arrays on the way.

    aligned: the offset of the tile's queries within their segment.
    """
    for step in range(steps.caps.size - 1, -1, -1):
        own, kept = steps.numbers[step, SLOPES], steps.numbers[step, KEPT]
        if sums.numbers[step, 0] >= 0:
            S = numbered_tile(slopes, max(kept, 0), dS)
            add_to_sum(dS, S, steps, step, sums, batch, head, chunk, m0, n0, aligned)
        if own >= 0:
            multiply_by_slopes(dS, numbered_tile(slopes, own, dS))


@inline
def add_to_sum(dS, S, steps, step, sums, batch, head, chunk, m0, n0, aligned):
    """Add dS to the gradient of the array of a step. S: before it, if it is kept; else nobody looks at it."""
    number, rows, cols, stride = sums.numbers[step]
    if rows > 1 and cols > 1:
        place = sums.addresses[number] + sums.places[number, batch, head] + chunk * stride
        whole = contiguous_view(place, rows, cols, cols, dS.dtype)
        transpose(whole[m0 : m0 + dS.shape[1], n0 : n0 + dS.shape[0]], dS, dS.dtype.type(1), True)
        return
    dx, row = sum_of(sums, step, batch, head, chunk), row_of(steps, step, batch, head, aligned)
    collect(steps.numbers[step, KIND], dx, dS, S, row, batch, head, m0, n0)


@inline_view
def sum_of(sums, step, batch, head, chunk):
    """The sum to which a step adds, of an array whose numbers serve many elements each."""
    number, rows, cols, stride = sums.numbers[step]
    place = sums.addresses[number] + sums.places[number, batch, head] + chunk * stride
    return contiguous_view(place, rows, cols, cols, np.float64)


@inline
def multiply_by_slopes(dS, slopes):
    """Where dS is 0 already, as where an element is masked, slopes may be NaN."""
    for j in range(dS.shape[0]):
        for i in range(dS.shape[1]):
            dS[j, i] = dS[j, i] * slopes[j, i] if dS[j, i] != 0 else dS.dtype.type(0)

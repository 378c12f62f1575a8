"""Gradients of the arrays that a user's function reads, from the tiles of dS that dQ is computed from.

A thread adds up consecutive terms of one element, and adds them to it once, as in `function_gradient`. If the last
index of what each element of S reads is the key's class, and the other indices follow from the query, as in
w[kind[i], kind[j]], there would be few consecutive terms. There dS is first summed by query and class, by a product
with a matrix of zeros and ones.
"""

import numpy as np

from ....functions.compiled.reads import is_by_class
from ...compiler import from_dtype
from ...tile import (
    allocate,
    block_index,
    device,
    dot,
    fence_async_proxy,
    full,
    operand,
    put,
    shape,
    sync_warpgroup,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)
from ..scores import parts_of, read_step, score_steps
from ..scores.function import class_steps
from ..scores.score import scaling_steps
from ..shared.exact_sums import add_atomically
from .backward_steps import ROWS, ZERO, size_of
from .walk import place_of

MOST_CLASSES, MULTIPLE = 64, 16  # that consumers have registers for; rounded up to a multiple of this
LARGEST_BY_CLASS = 128  # head_dim: beyond, shared memory has no room for the classes of keys


def reads_of(work, tiles):
    """What is compiled in of the Reads of this work: all but the name, and in place of `columns` the number of classes
    of keys, 0 if dS is not summed by these; () without Reads."""
    if not (work.reads and work.reads.wanted):
        return ()
    _, _, after, wanted, sum_dtype, columns = work.reads
    part = parts_of(work.score)[after]
    fits = 0 < columns <= MOST_CLASSES and tiles.tile_n == ROWS and size_of(work) <= LARGEST_BY_CLASS
    by_class = fits and is_by_class(part.identity.function, wanted, from_dtype(np.float32), part.array_types)
    return after, wanted, sum_dtype, -(-columns // MULTIPLE) * MULTIPLE if by_class else 0


def reads_steps(shared, score, reads, layout, dtype, stages, consumers):
    """Device functions of a consumer: () -> what is pending before the first tile; (K, args, tile, n0) prepares a tile;
    (pending, S, dS, K, args, tile, n0) -> what is pending after it; (pending) -> the same, once at most one later
    product is in flight; (pending, args, tile) adds it.

    S = Q K^T; dS: after the function; K: its stage.
    """
    if not reads:
        return nothing_pending, nothing_ahead, nothing_read, as_it_is, nothing_left
    after, wanted, sum_dtype, classes = reads
    about = parts_of(score)[after], after, wanted, np.float32, np.dtype(sum_dtype).type
    if classes:
        return steps_by_class(about, wgmma(classes), shared.boxes(ROWS, classes, dtype, stages * consumers), consumers)
    return steps_one_by_one(about, parts_of(score)[:after], layout)


def steps_one_by_one(about, before, layout):
    """`reads_steps` by consecutive terms. before: the parts of the score before the function."""
    part, after, _, _, SUM = about
    (apply, *_), (_, to_scaled) = score_steps(before, layout, np.float32, after=after), scaling_steps(before, part)
    add_reads, NONE, NOTHING, ONE = read_step(*about, add_atomically), np.int32(0), SUM(0), np.float32(1)

    @device
    def none_pending():
        return NONE, NOTHING

    @device
    def add(pending, S, dS, K, args, tile, n0):
        (parts, _), (row, col) = shape(args.reads), place_of(tile, n0)
        S, _ = apply(S, args.scores, tile.batch, tile.head, row, col)
        S, sums = S * to_scaled(ONE, args.scores), args.reads[block_index() % parts]
        return add_reads(pending, S, dS, args.scores, sums, tile.batch, tile.head, row, col)

    @device
    def add_last(pending, args, tile):
        parts, _ = shape(args.reads)
        add_atomically(pending, args.reads[block_index() % parts])

    return none_pending, nothing_ahead, add, as_it_is, add_last


def steps_by_class(about, layout, places, consumers):
    """`reads_steps` by classes. layout: of sums by query and class; places: of the matrix of zeros and ones, for each
    stage of K and each consumer."""
    (classes_of, add_sums), PLACES, CONSUMERS = class_steps(*about, layout), places, consumers

    @device
    def place_for(K):
        return allocate(PLACES, K.index * CONSUMERS + warpgroup_index())

    @device
    def none_pending():
        return full(layout, ZERO)

    @device
    def prepare(K, args, tile, n0):
        _, col = place_of(tile, n0)
        put(place_for(K), classes_of(args.scores, tile.batch, tile.head, col))
        fence_async_proxy()
        sync_warpgroup()

    @device
    def add(pending, S, dS, K, args, tile, n0):
        return dot(pending, operand(dS, PLACES), place_for(K))

    @device
    def settled(pending):
        return wgmma_wait(pending, 1)

    @device
    def add_last(pending, args, tile):
        (parts, _), (row, _) = shape(args.reads), place_of(tile, 0)
        sums = args.reads[block_index() % parts]
        add_sums(wgmma_wait(pending, 0), args.scores, sums, tile.batch, tile.head, row)

    return none_pending, prepare, add, settled, add_last


@device
def nothing_pending():
    return ()


@device
def nothing_ahead(K, args, tile, n0):
    pass


@device
def nothing_read(pending, S, dS, K, args, tile, n0):
    return ()


@device
def as_it_is(pending):
    return pending


@device
def nothing_left(pending, args, tile):
    pass

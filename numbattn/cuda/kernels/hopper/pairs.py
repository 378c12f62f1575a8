"""Pairs of points on Hopper: a persistent, warp-specialised walk over all of them.

A block takes work tiles in turn, 64 points x for each consumer, and loops over all tiles of y. A consumer works on one
product while the next is in flight, even if that is the first of the next work tile. Two threads of the producer load x
and y, and with y a line of numbers, one for each point.
"""

from functools import reduce
from typing import Any, NamedTuple

from ...tile import (
    Pipeline,
    acquire,
    advance,
    allocate,
    block_index,
    bulk_load,
    device,
    get,
    grid_size,
    index,
    opaque,
    prefetch_tensor_map,
    release,
    stage,
    sync_warpgroup,
    tma_load_part,
    wait,
    warpgroup_index,
    wgmma_wait,
)
from ..shared.schedule import place
from .forward_tiles import ROWS

REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}  # {consumers: of a producer's thread, of a consumer's}


class PairTiles(NamedTuple):
    """A row: tiles of 64 points x for each consumer, and of tile_n points y."""

    tile_n: int
    consumers: int
    stages: int  # of y

    unit = "wgmma"

    @property
    def tile_m(self):
        return ROWS * self.consumers


class PairSizes(NamedTuple):
    """How many points and matrices there are, and how many rows apart the parts of points are, if they have parts."""

    seqlen_q: Any
    seqlen_k: Any
    heads: Any
    matrices: Any
    apart_x: Any
    apart_y: Any


def load_parts_step(places):
    """The device function (stage, matrix, batch, head, row, apart): TMA-load rows of a matrix from `row` on to the
    first place, from `row + apart` on to the next one, and so on."""

    def then(before, numbered):
        NUMBER, PLACE = numbered

        @device
        def both(stage, matrix, batch, head, row, apart):
            before(stage, matrix, batch, head, row, apart)
            tma_load_part(stage, allocate(PLACE, stage.index), matrix, batch, head, row + NUMBER * apart, 0)

        return both

    return reduce(then, enumerate(places), nothing)


@device
def nothing(stage, matrix, batch, head, row, apart):
    pass


def pair_steps(shared, x_places, y_places, tile_n, consumers, layout, ACC):
    """What these kernels share: the pipelines of x and y; the two producers, device functions (mX, sizes) and (mY,
    mLine, sizes); and a function (start, product, meanwhile, add, finish) -> the consumers, a device function (given,
    sizes). Its arguments are device functions, too:

        start() is the result without any y, product(X, Y) starts S of two stages, add(found, S, line, n0, given) adds a
        tile, meanwhile(X) is called before x is released, finish(found, aside, given, batch, head, m0) saves results.

    x_places, y_places: of the parts of a tile of points; each consumer has two stages of those of x.
    """
    LINE = shared.tile(1, tile_n, ACC, y_places[0].stages)
    X_PIPELINE = Pipeline.within(shared, x_places[0], 1, fills=len(x_places))
    Y_PIPELINE = Pipeline.within(shared, y_places[0], consumers, fills=len(y_places) + 1)
    COLS, TILE_N, CONSUMERS, TILE_M = layout.col_vector(), tile_n, consumers, consumers * ROWS
    load_x_parts, load_y_parts = load_parts_step(x_places), load_parts_step(y_places)

    @device
    def count_of(sizes):
        """How many work tiles there are."""
        return (sizes.seqlen_q + TILE_M - 1) // TILE_M * sizes.matrices

    @device
    def load_x(mX, sizes):
        X, number = stage(X_PIPELINE, 0), block_index()
        prefetch_tensor_map(mX)
        while number < count_of(sizes):
            (m_block, batch, head), consumer = place(number, sizes.matrices, sizes.heads), index(0)
            while consumer < CONSUMERS:
                acquire(X)
                load_x_parts(X, mX, batch, head, m_block * TILE_M + consumer * ROWS, sizes.apart_x)
                X, consumer = advance(X, 1), opaque(consumer + 1)
            number = number + grid_size()

    @device
    def load_y(mY, mLine, sizes):
        Y, number = stage(Y_PIPELINE, 0), block_index()
        prefetch_tensor_map(mY)
        while number < count_of(sizes):
            (_, batch, head), n0 = place(number, sizes.matrices, sizes.heads), index(0)
            while n0 < sizes.seqlen_k:
                acquire(Y)
                load_y_parts(Y, mY, batch, head, n0, sizes.apart_y)
                bulk_load(Y, allocate(LINE, Y.index), mLine[batch, head], n0)
                Y, n0 = advance(Y, 1), opaque(n0 + TILE_N)
            number = number + grid_size()

    def consumer_of(start, product, meanwhile, add, finish):
        @device
        def with_tile(found, S, Y, n0, given):
            found = add(found, S, get(allocate(LINE, Y.index), COLS), n0, given)
            sync_warpgroup()                                    # all have read the line, and X
            release(Y)
            return found

        @device
        def product_with(X, Y):
            """In flight."""
            wait(Y)
            return product(X, Y)

        @device
        def step(found, S, X, Y, n0, given):
            """Add a tile, and compute S of the next one. Also returns that S and its stage."""
            after = advance(Y, 1)
            T = product_with(X, after)
            found = with_tile(found, S, Y, n0, given)
            return found, wgmma_wait(T, 0), after

        @device
        def all_but_last(S, X, Y, seqlen_k, given):
            """All steps but the last. Also returns S of the last tile, and where that begins."""
            found, n0 = start(), index(0)
            while n0 + 2 * TILE_N < seqlen_k:                   # two at a time: no register of S is moved
                found, T, Y = step(found, S, X, Y, n0, given)
                found, S, Y = step(found, T, X, Y, n0 + TILE_N, given)
                n0 = n0 + 2 * TILE_N
            if n0 + TILE_N < seqlen_k:
                found, S, Y = step(found, S, X, Y, n0, given)
                n0 = n0 + TILE_N
            return found, S, Y, n0

        @device
        def last(found, S, X, Y, n0, number, given, sizes):
            """Add the last tile of y, and save the results of the work tile."""
            m_block, batch, head = place(number, sizes.matrices, sizes.heads)
            aside = meanwhile(X)
            found = with_tile(found, S, Y, n0, given)
            release(X)
            finish(found, aside, given, batch, head, m_block * TILE_M + warpgroup_index() * ROWS)

        @device
        def compute(given, sizes):
            X, Y, number = stage(X_PIPELINE, warpgroup_index()), stage(Y_PIPELINE, 0), block_index()
            wait(X)
            S = wgmma_wait(product_with(X, Y), 0)
            while number < count_of(sizes):
                found, S, Y, n0 = all_but_last(S, X, Y, sizes.seqlen_k, given)
                next_x, after, next_number = advance(X, CONSUMERS), advance(Y, 1), number + grid_size()
                if next_number < count_of(sizes):
                    wait(next_x)
                    T = product_with(next_x, after)
                    last(found, S, X, Y, n0, number, given, sizes)
                    S = wgmma_wait(T, 0)
                else:
                    last(found, S, X, Y, n0, number, given, sizes)
                X, Y, number = next_x, after, next_number

        return compute

    return (X_PIPELINE, Y_PIPELINE), (load_x, load_y), consumer_of

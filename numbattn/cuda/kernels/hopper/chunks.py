"""Pairs of points of float32 on Hopper, of any number of dimensions: x . y of their parts by wgmma.

The main loop is that of matrix multiplication: tiles of x and y come through one ring of stages, chunk by chunk of
their dimensions and, of each chunk, part by part (see `parts`), and wgmma adds up the products. A block takes work
tiles in turn, 64 points x for each consumer, and loops over all tiles of y. While one consumer works on its products,
another one multiplies.
"""

from typing import Any, NamedTuple

from ...tile import (
    Pipeline,
    acquire,
    advance,
    allocate,
    bfloat16,
    block_index,
    bulk_load,
    device,
    dot,
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
from .pairs import nothing
from .parts import PARTS, WIDTH


class ChunkTiles(NamedTuple):
    """A row: tiles of 64 points x for each consumer, and of tile_n points y."""

    tile_n: int
    consumers: int
    stages: int  # of the ring, each with one part of a chunk of x and of y
    y_stages: int  # of whatever else comes with a tile of y

    unit = "wgmma"

    @property
    def tile_m(self):
        return ROWS * self.consumers


class ChunkSizes(NamedTuple):
    """How many points, matrices and chunks of dimensions there are, and how many rows apart the parts of points are."""

    seqlen_q: Any
    seqlen_k: Any
    heads: Any
    matrices: Any
    chunks: Any
    apart_x: Any
    apart_y: Any


def chunk_steps(shared, layout, tiles, ACC, fills=0, load_more=nothing):
    """What kernels that walk over chunks share. Returns the pipelines of points and of what comes with a tile of y; the
    two producers, device functions (mX, mY, sizes) and (more, mLine, sizes); a function (start, add, finish) -> the
    consumers, a device function (given, sizes); and the places in shared memory of a part of x and of y.

    start, add and finish are device functions: start(given, batch, head, m0) is the result without any y, add(found, S,
    line, Y, n0, given) adds a tile, finish(found, given, batch, head, m0) saves the results.

    Each tile of y comes with a line of numbers, one for each point, and with what load_more(Y, more, batch, head, row,
    apart) copies to the stage Y, in `fills` loads.
    """
    tile_n, consumers, stages, y_stages = tiles
    TILE_N, CONSUMERS, TILE_M, CHUNK, S_TILE, COLS = tile_n, consumers, tiles.tile_m, WIDTH, layout, layout.col_vector()
    X_PLACE = shared.boxes(ROWS, WIDTH, bfloat16, stages * consumers)
    Y_PLACE = shared.boxes(tile_n, WIDTH, bfloat16, stages)
    LINE = shared.tile(1, tile_n, ACC, y_stages)
    RING = Pipeline.within(shared, Y_PLACE, consumers, fills=consumers + 1)
    LINES = Pipeline.within(shared, LINE, consumers, fills=1 + fills)

    @device
    def count_of(sizes):
        """How many work tiles there are."""
        return (sizes.seqlen_q + TILE_M - 1) // TILE_M * sizes.matrices

    @device
    def load_part(P, mX, mY, batch, head, m0, n0, col):
        acquire(P)
        for consumer in range(CONSUMERS):
            X = allocate(X_PLACE, P.index * CONSUMERS + consumer)
            tma_load_part(P, X, mX, batch, head, m0 + consumer * ROWS, col)
        tma_load_part(P, allocate(Y_PLACE, P.index), mY, batch, head, n0, col)

    @device
    def load_points(mX, mY, sizes):
        """The last part of each chunk comes first."""
        P, number = stage(RING, 0), block_index()
        prefetch_tensor_map(mX)
        prefetch_tensor_map(mY)
        while number < count_of(sizes):
            (m_block, batch, head), n0 = place(number, sizes.matrices, sizes.heads), index(0)
            while n0 < sizes.seqlen_k:
                chunk = index(0)
                while chunk < sizes.chunks:
                    part = index(PARTS - 1)
                    while part >= 0:
                        m0 = part * sizes.apart_x + m_block * TILE_M
                        load_part(P, mX, mY, batch, head, m0, part * sizes.apart_y + n0, chunk * CHUNK)
                        P, part = advance(P, 1), opaque(part - 1)
                    chunk = opaque(chunk + 1)
                n0 = opaque(n0 + TILE_N)
            number = number + grid_size()

    @device
    def load_lines(more, mLine, sizes):
        Y, number = stage(LINES, 0), block_index()
        while number < count_of(sizes):
            (_, batch, head), n0 = place(number, sizes.matrices, sizes.heads), index(0)
            while n0 < sizes.seqlen_k:
                acquire(Y)
                load_more(Y, more, batch, head, n0, sizes.apart_y)
                bulk_load(Y, allocate(LINE, Y.index), mLine[batch, head], n0)
                Y, n0 = advance(Y, 1), opaque(n0 + TILE_N)
            number = number + grid_size()

    @device
    def x_of(P):
        return allocate(X_PLACE, P.index * CONSUMERS + warpgroup_index())

    @device
    def begin_chunk(S, P):
        """Start the products of the parts that come first."""
        wait(P)
        wait(advance(P, 1))
        Q = advance(P, 1)
        return dot(S, x_of(Q), allocate(Y_PLACE, Q.index).T)

    @device
    def end_chunk(S, P):
        """Start all other products, small terms first, since the unit truncates what does not fit into a sum."""
        Q, R = advance(P, 1), advance(P, 2)
        wait(R)
        x1, x2, x3 = x_of(R), x_of(Q), x_of(P)
        y1, y2, y3 = allocate(Y_PLACE, R.index), allocate(Y_PLACE, Q.index), allocate(Y_PLACE, P.index)
        S = dot(dot(S, x3, y1.T), x1, y3.T)
        return dot(dot(dot(S, x2, y1.T), x1, y2.T), x1, y1.T)

    @device
    def release_chunk(P):
        release(P)
        release(advance(P, 1))
        release(advance(P, 2))
        return advance(P, 3)

    @device
    def products(P, chunks):
        """S of a tile, and the stage after it."""
        S, chunk = end_chunk(begin_chunk(S_TILE, P), P), index(1)
        while chunk < chunks:
            S = wgmma_wait(begin_chunk(S, advance(P, 3)), 1)    # all products of the last chunk are there
            P = release_chunk(P)
            S, chunk = end_chunk(S, P), chunk + 1
        S = wgmma_wait(S, 0)
        return S, release_chunk(P)

    def consumer_of(start, add, finish):
        @device
        def tiles_of_y(found, P, Y, given, sizes):
            """The result of a work tile, and the stages after it."""
            n0 = index(0)
            while n0 < sizes.seqlen_k:
                S, P = products(P, sizes.chunks)
                wait(Y)
                found = add(found, S, get(allocate(LINE, Y.index), COLS), Y, n0, given)
                sync_warpgroup()                                # all have read the line
                release(Y)
                Y, n0 = advance(Y, 1), n0 + TILE_N
            return found, P, Y

        @device
        def compute(given, sizes):
            P, Y, number = stage(RING, 0), stage(LINES, 0), block_index()
            while number < count_of(sizes):
                m_block, batch, head = place(number, sizes.matrices, sizes.heads)
                m0 = m_block * TILE_M + warpgroup_index() * ROWS
                found, P, Y = tiles_of_y(start(given, batch, head, m0), P, Y, given, sizes)
                finish(found, given, batch, head, m0)
                number = number + grid_size()

        return compute

    return (RING, LINES), (load_points, load_lines), consumer_of, (X_PLACE, Y_PLACE)

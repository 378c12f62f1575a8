"""Pairs of points on Hopper: persistent, warp-specialised walks over all of them, whatever is computed of a pair.

A block takes work tiles in turn, 64 points x for each consumer, and loops over all tiles of y, each with a line of
numbers, one for each point. Two threads of the producer load tiles; consumers multiply them by wgmma. There are two
walks, for points of half precision and for parts of float32, see `parts`:

    resident_steps   all dimensions of x stay in shared memory. A consumer works on the products of one tile while those
                     of the next are in flight, even if that is the first of the next work tile.
    chunk_steps      tiles of x and y come through one ring of stages, as in matrix multiplication: chunk by chunk of
                     64 dimensions and, of each chunk, part by part. While one consumer works on its products, another
                     one multiplies.

Both have one protocol. A kernel gives three device functions, where `at` is the batch, the head and the first row:

    start(given, at)                    the result without any y
    add(found, S, line, Y, n0, given)   the same with a tile of products S; Y is the stage of what came with the tile
    finish(found, of_x, given, at)      saves the results
"""

from collections.abc import Callable
from functools import reduce
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
from ...words.spec import Spec
from ..shared.schedule import place
from .forward_tiles import ROWS
from .parts import PARTS, WIDTH, whole_boxes

REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}  # {consumers: of a producer's thread, of a consumer's}


class PairTiles(NamedTuple):
    """A row: tiles of 64 points x for each consumer, and of tile_n points y."""

    tile_n: int
    consumers: int
    stages: int  # of y; or of the ring, each with one part of a chunk of x and of y
    y_stages: int = 0  # of whatever else comes with a tile of y, if points come in chunks

    unit = "wgmma"

    @property
    def tile_m(self):
        return ROWS * self.consumers


class PairSizes(NamedTuple):
    """How many points, matrices and chunks of dimensions there are, and how many rows apart the parts of points are, if
    they have parts."""

    seqlen_q: Any
    seqlen_k: Any
    heads: Any
    matrices: Any
    chunks: Any
    apart_x: Any
    apart_y: Any


def pairs_spec(factory, arguments, tiles, parameters):
    """The Spec of a kernel. tiles: (work) -> its row; parameters: (work) -> what else the factory is given."""
    return Spec(
        factory,
        arguments,
        tiles=lambda work: (tiles(work),),
        parameters=lambda work, tiles: {"tiles": tiles} | parameters(work),
        numbers=lambda work, tiles: {"chunks": whole_boxes(work.problem.head_dim) // WIDTH},
        persistent=True,
        arch="a",
    )


class PairWalk(NamedTuple):
    """A walk."""

    pipelines: tuple
    producers: tuple  # device functions (mX, mY, sizes) and (what comes with y, mLine, sizes)
    consumer_of: Callable  # (start, add, finish, ...) -> the consumers, a device function (given, sizes)
    places: tuple  # of a part of x and of y in shared memory


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


@device
def nothing_of_x(X):
    return ()


def work_steps(tiles):
    """Device functions: (sizes) -> how many work tiles there are; (number, sizes) -> where one is."""
    TILE_M = tiles.tile_m

    @device
    def count_of(sizes):
        return (sizes.seqlen_q + TILE_M - 1) // TILE_M * sizes.matrices

    @device
    def place_of(number, sizes):
        m_block, batch, head = place(number, sizes.matrices, sizes.heads)
        return batch, head, m_block * TILE_M

    return count_of, place_of


def line_steps(LINE, LINES, tiles, layout, load_more):
    """What comes with each tile of y, a line of numbers, and what load_more(Y, more, batch, head, row, apart) copies to
    the stage Y: the device function (more, mLine, sizes) of the producer, and a function (add) -> that of consumers,
    which adds a tile and releases Y."""
    (count_of, place_of), TILE_N, COLS = work_steps(tiles), tiles.tile_n, layout.col_vector()

    @device
    def load_lines(more, mLine, sizes):
        Y, number = stage(LINES, 0), block_index()
        while number < count_of(sizes):
            (batch, head, _), n0 = place_of(number, sizes), index(0)
            while n0 < sizes.seqlen_k:
                acquire(Y)
                load_more(Y, more, batch, head, n0, sizes.apart_y)
                bulk_load(Y, allocate(LINE, Y.index), mLine[batch, head], n0)
                Y, n0 = advance(Y, 1), opaque(n0 + TILE_N)
            number = number + grid_size()

    def adding(add):
        @device
        def with_tile(found, S, Y, n0, given):
            found = add(found, S, get(allocate(LINE, Y.index), COLS), Y, n0, given)
            sync_warpgroup()                                    # all have read the line, and X
            release(Y)
            return found

        return with_tile

    return load_lines, adding


# -------------------------------------------------------------------------------------------------------- x stays
def resident_steps(shared, layout, tiles, ACC, dtype, dim, parts=1):
    """The PairWalk for points of `dim` columns, in one part or two. Consumers may also be given read_x(X), which is
    called before x is released: its result is `of_x`."""
    X_PLACES = tuple(shared.boxes(ROWS, dim, dtype, 2 * tiles.consumers) for _ in range(parts))
    Y_PLACES = tuple(shared.boxes(tiles.tile_n, dim, dtype, tiles.stages) for _ in range(parts))
    LINE = shared.tile(1, tiles.tile_n, ACC, tiles.stages)
    X_PIPELINE = Pipeline.within(shared, X_PLACES[0], 1, fills=parts)
    Y_PIPELINE = Pipeline.within(shared, Y_PLACES[0], tiles.consumers, fills=parts + 1)
    (count_of, place_of), TILE_N, CONSUMERS = work_steps(tiles), tiles.tile_n, tiles.consumers
    load_y, adding = line_steps(LINE, Y_PIPELINE, tiles, layout, load_parts_step(Y_PLACES))
    load_parts, product = load_parts_step(X_PLACES), product_step(layout, X_PLACES[-1], Y_PLACES[-1], parts)

    @device
    def load_x(mX, mY, sizes):
        X, number = stage(X_PIPELINE, 0), block_index()
        prefetch_tensor_map(mX)
        prefetch_tensor_map(mY)
        while number < count_of(sizes):
            (batch, head, m0), consumer = place_of(number, sizes), index(0)
            while consumer < CONSUMERS:
                acquire(X)
                load_parts(X, mX, batch, head, m0 + consumer * ROWS, sizes.apart_x)
                X, consumer = advance(X, 1), opaque(consumer + 1)
            number = number + grid_size()

    @device
    def product_with(X, Y):
        """In flight."""
        wait(Y)
        return product(X, Y)

    def consumer_of(start, add, finish, read_x=nothing_of_x):
        with_tile = adding(add)

        @device
        def step(found, S, X, Y, n0, given):
            """Add a tile, and compute S of the next one. Also returns that S and its stage."""
            after = advance(Y, 1)
            T = product_with(X, after)
            found = with_tile(found, S, Y, n0, given)
            return found, wgmma_wait(T, 0), after

        @device
        def all_but_last(found, S, X, Y, seqlen_k, given):
            """All steps but the last. Also returns S of the last tile, and where that begins."""
            n0 = index(0)
            while n0 + 2 * TILE_N < seqlen_k:                   # two at a time: no register of S is moved
                found, T, Y = step(found, S, X, Y, n0, given)
                found, S, Y = step(found, T, X, Y, n0 + TILE_N, given)
                n0 = n0 + 2 * TILE_N
            if n0 + TILE_N < seqlen_k:
                found, S, Y = step(found, S, X, Y, n0, given)
                n0 = n0 + TILE_N
            return found, S, Y, n0

        @device
        def rows_of(number, sizes):
            batch, head, m0 = place_of(number, sizes)
            return batch, head, m0 + warpgroup_index() * ROWS

        @device
        def last(found, S, X, Y, n0, number, given, sizes):
            """Add the last tile of y, and save the results of the work tile."""
            at, of_x = rows_of(number, sizes), read_x(X)
            found = with_tile(found, S, Y, n0, given)
            release(X)
            finish(found, of_x, given, at)

        @device
        def compute(given, sizes):
            X, Y, number = stage(X_PIPELINE, warpgroup_index()), stage(Y_PIPELINE, 0), block_index()
            wait(X)
            S = wgmma_wait(product_with(X, Y), 0)
            while number < count_of(sizes):
                found = start(given, rows_of(number, sizes))
                found, S, Y, n0 = all_but_last(found, S, X, Y, sizes.seqlen_k, given)
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

    return PairWalk((X_PIPELINE, Y_PIPELINE), (load_x, load_y), consumer_of, (X_PLACES[0], Y_PLACES[0]))


def product_step(layout, second_x, second_y, parts):
    """The device function (X, Y) that starts the products of the points of two stages: x y, or x2 y1 + x1 y2 + x1 y1 of
    two parts. Small terms come first, since the unit truncates what does not fit into a sum."""
    S_TILE, X2, Y2 = layout, second_x, second_y

    @device
    def of_one(X, Y):
        return dot(S_TILE, X.tile, Y.tile.T)

    @device
    def of_two(X, Y):
        x2, y2 = allocate(X2, X.index), allocate(Y2, Y.index)
        return dot(dot(dot(S_TILE, x2, Y.tile.T), X.tile, y2.T), X.tile, Y.tile.T)

    return of_one if parts == 1 else of_two


# --------------------------------------------------------------------------------------------- chunks of dimensions
def chunk_steps(shared, layout, tiles, ACC, fills=0, load_more=nothing):
    """The PairWalk for points of any number of dimensions, as parts. load_more: see `line_steps`, in `fills` loads."""
    X_PLACE = shared.boxes(ROWS, WIDTH, bfloat16, tiles.stages * tiles.consumers)
    Y_PLACE = shared.boxes(tiles.tile_n, WIDTH, bfloat16, tiles.stages)
    LINE = shared.tile(1, tiles.tile_n, ACC, tiles.y_stages)
    RING = Pipeline.within(shared, Y_PLACE, tiles.consumers, fills=tiles.consumers + 1)
    LINES = Pipeline.within(shared, LINE, tiles.consumers, fills=1 + fills)
    TILE_N, CONSUMERS, CHUNK, S_TILE = tiles.tile_n, tiles.consumers, WIDTH, layout
    count_of, place_of = work_steps(tiles)
    load_lines, adding = line_steps(LINE, LINES, tiles, layout, load_more)

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
            (batch, head, m0), n0 = place_of(number, sizes), index(0)
            while n0 < sizes.seqlen_k:
                chunk = index(0)
                while chunk < sizes.chunks:
                    part = index(PARTS - 1)
                    while part >= 0:
                        row, col = part * sizes.apart_y + n0, chunk * CHUNK
                        load_part(P, mX, mY, batch, head, part * sizes.apart_x + m0, row, col)
                        P, part = advance(P, 1), opaque(part - 1)
                    chunk = opaque(chunk + 1)
                n0 = opaque(n0 + TILE_N)
            number = number + grid_size()

    @device
    def x_of(P):
        return allocate(X_PLACE, P.index * CONSUMERS + warpgroup_index())

    @device
    def begin_chunk(S, P):
        """Start the product x2 y2: small terms come first, since the unit truncates what does not fit into a sum."""
        wait(P)
        wait(advance(P, 1))
        Q = advance(P, 1)
        return dot(S, x_of(Q), allocate(Y_PLACE, Q.index).T)

    @device
    def end_chunk(S, P):
        """Start all other products."""
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
        with_tile = adding(add)

        @device
        def tiles_of_y(found, P, Y, given, sizes):
            """The result of a work tile, and the stages after it."""
            n0 = index(0)
            while n0 < sizes.seqlen_k:
                S, P = products(P, sizes.chunks)
                wait(Y)
                found = with_tile(found, S, Y, n0, given)
                Y, n0 = advance(Y, 1), n0 + TILE_N
            return found, P, Y

        @device
        def compute(given, sizes):
            P, Y, number = stage(RING, 0), stage(LINES, 0), block_index()
            while number < count_of(sizes):
                batch, head, m0 = place_of(number, sizes)
                at = batch, head, m0 + warpgroup_index() * ROWS
                found, P, Y = tiles_of_y(start(given, at), P, Y, given, sizes)
                finish(found, (), given, at)
                number = number + grid_size()

        return compute

    return PairWalk((RING, LINES), (load_points, load_lines), consumer_of, (X_PLACE, Y_PLACE))

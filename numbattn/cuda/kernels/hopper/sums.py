"""Sums over pairs of points of float32 on Hopper, o_i = sum_j kappa_ij b_j, of any number of dimensions.

The products x . y are those of matrix multiplication: tiles of x and y, chunk by chunk of their dimensions, and of each
chunk part by part (see `parts`), come through one ring of stages, and wgmma adds them up. Then
|x - y|^2 = -2 (x . y - |x|^2 / 2 - |y|^2 / 2). Of few features of b each thread sums its own products; of more they are
products of the parts of kappa and of b.

A block takes work tiles in turn, 64 points x for each consumer, and loops over all tiles of y. While a consumer is busy
with kappa, another one multiplies.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ...tile import (
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    allocate,
    bitcast,
    block_index,
    bulk_load,
    col_index,
    device,
    dot,
    full,
    get,
    grid_size,
    index,
    load,
    maximum,
    opaque,
    operand,
    prefetch_tensor_map,
    release,
    save,
    shape,
    stage,
    sync_warpgroup,
    tma_load_part,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
    where,
)
from ...words.arguments import Matrix
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..points.arguments import COLUMNS, FEW, SMALLEST
from ..points.arguments import ROWS as ROW_SHIFTS
from ..points.features import no_sums_step, part_sums_step, save_sums_step, tuple_of, two_sums_step
from ..points.kinds import of_products, pair_step, steps_of
from ..shared.layouts import DTYPES
from ..shared.schedule import place
from ..shared.warps import source_of, warp_specialised
from .forward_tiles import ROWS
from .pairs import load_parts_step
from .parts import (
    LINE_OF_X,
    LINE_OF_Y,
    LINES_OF_B,
    PARTS,
    PARTS_OF_B,
    PARTS_OF_X,
    PARTS_OF_Y,
    WIDTH,
    whole_boxes,
)

REGISTERS = {2: (24, 240), 3: (32, 160)}  # {consumers: of a producer's thread, of a consumer's}


class SumTiles(NamedTuple):
    """A row: tiles of 64 points x for each consumer, and of tile_n points y."""

    tile_n: int
    consumers: int
    stages: int  # of the ring, each with a part of a chunk of both
    b_stages: int  # of b

    unit = "wgmma"

    @property
    def tile_m(self):
        return ROWS * self.consumers


class Sizes(NamedTuple):
    """How many points, matrices and chunks of dimensions there are, and how many rows the parts of points are apart."""

    seqlen_q: Any
    seqlen_k: Any
    heads: Any
    matrices: Any
    chunks: Any
    apart_x: Any
    apart_y: Any


def hopper_sums(*, dim_b, tile_n, consumers, stages, b_stages, kind):
    """The kernel for tiles of 64 points x a consumer, tile_n points y, and dim_b features of b: up to FEW, or WIDTH.

    stages: of parts of points; b_stages: of those of b. kind: what is compiled in of it, see `points.kinds`.
    """
    dtype, ACC, IS_FEW = DTYPES["bfloat16"], np.float32, dim_b <= FEW
    TILE_N, CONSUMERS, TILE_M, CHUNK = tile_n, consumers, consumers * ROWS, WIDTH
    S_TILE, ZERO, TWICE = wgmma(tile_n), ACC(0), ACC(-2)
    VECTOR, COLS = S_TILE.row_vector(), S_TILE.col_vector()
    shared = SharedMemory()
    X_PLACE = shared.boxes(ROWS, WIDTH, dtype, stages * consumers)
    Y_PLACE = shared.boxes(tile_n, WIDTH, dtype, stages)
    B_PLACES = () if IS_FEW else tuple(shared.boxes(tile_n, WIDTH, dtype, b_stages) for _ in range(PARTS))
    B_LINES = shared.tile(1, tile_n, ACC, b_stages * dim_b) if IS_FEW else None
    LINE = shared.tile(1, tile_n, ACC, b_stages)
    RING = Pipeline.within(shared, Y_PLACE, consumers, fills=consumers + 1)
    B_PIPELINE = Pipeline.within(shared, LINE, consumers, fills=1 + (dim_b if IS_FEW else PARTS))
    steps = few_steps(S_TILE, ACC, dim_b, B_LINES) if IS_FEW else many_steps(B_PLACES, ACC)
    load_b_tile, none, of_tile, add, save_sums = steps
    kappa_of = pair_step(steps_of(kind, ACC))

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
        """Of each chunk the last part first."""
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
    def load_b(mB, mLine, sizes):
        B, number = stage(B_PIPELINE, 0), block_index()
        while number < count_of(sizes):
            (_, batch, head), n0 = place(number, sizes.matrices, sizes.heads), index(0)
            while n0 < sizes.seqlen_k:
                acquire(B)
                load_b_tile(B, mB, batch, head, n0, sizes.apart_y)
                bulk_load(B, allocate(LINE, B.index), mLine[batch, head], n0)
                B, n0 = advance(B, 1), opaque(n0 + TILE_N)
            number = number + grid_size()

    @device
    def x_of(P):
        return allocate(X_PLACE, P.index * CONSUMERS + warpgroup_index())

    @device
    def begin_chunk(S, P):
        """Of the parts that come first."""
        wait(P)
        wait(advance(P, 1))
        Q = advance(P, 1)
        return dot(S, x_of(Q), allocate(Y_PLACE, Q.index).T)

    @device
    def end_chunk(S, P):
        """All other products, in flight; the small terms first, since the unit cuts off what does not fit into a sum.
        """
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
            S = wgmma_wait(begin_chunk(S, advance(P, 3)), 1)    # all products of the chunk before are there
            P = release_chunk(P)
            S, chunk = end_chunk(S, P), chunk + 1
        S = wgmma_wait(S, 0)
        return S, release_chunk(P)

    @device
    def tile_of_work(P, B, norms, batch, head, sizes, kind_number):
        """The sums of a work tile, and the stages after it."""
        O, n0 = none(), index(0)
        while n0 < sizes.seqlen_k:
            S, P = products(P, sizes.chunks)
            wait(B)
            T = maximum(S * TWICE + norms + get(allocate(LINE, B.index), COLS) * TWICE, ZERO)
            kappa = kappa_of(T, (), kind_number)
            if n0 + TILE_N > sizes.seqlen_k:
                kappa = where(col_index(S_TILE, n0) < sizes.seqlen_k, kappa, ZERO)
            O = add(O, of_tile(kappa, B))
            sync_warpgroup()                                    # all have read b
            release(B)
            B, n0 = advance(B, 1), n0 + TILE_N
        return O, P, B

    @device
    def compute(mLineX, mO, sizes, kind_number):
        P, B, number = stage(RING, 0), stage(B_PIPELINE, 0), block_index()
        while number < count_of(sizes):
            m_block, batch, head = place(number, sizes.matrices, sizes.heads)
            m0 = m_block * TILE_M + warpgroup_index() * ROWS
            norms = load(mLineX[batch, head], VECTOR, m0) * TWICE
            O, P, B = tile_of_work(P, B, norms, batch, head, sizes, kind_number)
            save_sums(mO[batch, head], O, m0)
            number = number + grid_size()

    begin, take_roles = warp_specialised(
        (RING, B_PIPELINE), consumers, REGISTERS[consumers], compute, load_points, load_b
    )  # fmt: skip

    def kernel(mX, mY, mB, mLineX, mLineY, mO, seqlen_k, chunks, kind_number):
        batches, heads, seqlen_q, _ = shape(mO)
        (_, _, apart_x), (_, _, apart_y) = shape(mLineX), shape(mLineY)
        begin()
        sizes = Sizes(seqlen_q, seqlen_k, heads, batches * heads, chunks, apart_x, apart_y)
        take_roles((mLineX, mO, sizes, kind_number), ((mX, mY, sizes), (mB, mLineY, sizes)))

    spec = SPEC_FEW if IS_FEW else SPEC
    signature = signature_of(kernel, spec.arguments, dtype, ACC, {"o": "float32"})
    return source_of(kernel, signature, consumers, shared, (X_PLACE, Y_PLACE, *B_PLACES[:1]))


def few_steps(layout, ACC, count, lines):
    """Device functions for sums of so many features on CUDA cores: (B, mB, batch, head, row, apart) loads a tile of b;
    () -> no sums; (kappa, B) -> those of a tile; (sums, those of a tile) -> sums; (matrix, sums, m0) saves them.

    lines: places of features, those of each stage together.
    """
    COLS, COUNT, LINES = layout.col_vector(), count, lines
    none, add_products = no_sums_step(layout, ACC, count), part_sums_step(count)

    @device
    def feature(number, first):
        return get(allocate(LINES, first + number), COLS)

    features = tuple_of(feature, count)

    @device
    def load_lines(B, mB, batch, head, row, apart):
        for number in range(COUNT):
            bulk_load(B, allocate(LINES, B.index * COUNT + number), mB[batch, head], number * apart + row)

    @device
    def of_tile(kappa, B):
        return add_products(none(), kappa, features(B.index * COUNT))

    return load_lines, none, of_tile, two_sums_step(count), save_sums_step(count, ACC(1))


def many_steps(places, ACC):
    """The same of products of parts; places: of the parts of b. The sum of a tile on its own: the unit cuts off what
    does not fit into a sum, and in the end there are many."""
    O_TILE, ZERO, HIGH, (B1, B2, B3) = wgmma(WIDTH), ACC(0), np.uint32(0xFFFF0000), places

    @device
    def none():
        return full(O_TILE, ZERO)

    @device
    def split(kappa):
        """The first 8 bits, as they are, as an operand; and the rest."""
        first = bitcast(bitcast(kappa, np.uint32) & HIGH, np.float32)
        return operand(first, B1), kappa - first

    @device
    def of_tile(kappa, B):
        b1, b2, b3 = allocate(B1, B.index), allocate(B2, B.index), allocate(B3, B.index)
        p1, rest = split(kappa)
        p2, rest = split(rest)
        p3 = operand(rest, B1)
        O = dot(dot(dot(O_TILE, p3, b1), p2, b2), p1, b3)
        return wgmma_wait(dot(dot(dot(O, p2, b1), p1, b2), p1, b1), 0)

    @device
    def add(O, new):
        return O + new

    @device
    def save_tile(matrix, O, m0):
        save(matrix, O, m0)

    return load_parts_step(places), none, of_tile, add, save_tile




MOST_OF_MMA = 32  # dimensions up to which mma.sync is as fast for few features
TILES_OF_FEW = SumTiles(192, 2, 5, 2)  # ms for 100,000 points each, an H100, d 64: 11.4; 128 columns 12.4
TILES = {  # of the largest number of dimensions, for 64 features
    64: SumTiles(96, 2, 5, 2),              # 23; 128 columns 26
    math.inf: SumTiles(128, 2, 5, 1),       # d 512: 131; 96 columns 158
}


def tiles_of(problem, is_few):
    return TILES_OF_FEW if is_few else next(tiles for most, tiles in TILES.items() if problem.head_dim <= most)


def fits(problem, kind):
    """Whether these points are for the kernel, of however many dimensions; no masks: every y is in sight."""
    return problem.dtype == np.float32 and not problem.mask_kinds and not of_products(kind)


def takes(work):
    """Of no more features of b than a box has, and no logarithms of rows or columns."""
    is_plain = ROW_SHIFTS not in work.dtypes and COLUMNS not in work.dtypes and work.problem.head_dim_v <= WIDTH
    return is_plain and work.device.cc == (9, 0) and fits(work.problem, work.kind)


def takes_few(work):
    return takes(work) and 0 < work.problem.head_dim_v <= FEW and work.problem.head_dim > MOST_OF_MMA


def takes_many(work):
    return takes(work) and work.problem.head_dim_v > FEW and work.problem.head_dim > SMALLEST


def spec_of(b, is_few):
    return Spec(
        hopper_sums,
        (PARTS_OF_X.map, PARTS_OF_Y.map, b, LINE_OF_X, LINE_OF_Y, Matrix("o"), "seqlen_k", "chunks", "kind_number"),
        tiles=lambda work: (tiles_of(work.problem, is_few),),
        parameters=lambda work, tiles: {
            "dim_b": work.problem.head_dim_v if is_few else WIDTH, "kind": work.kind, **tiles._asdict(),
        },
        numbers=lambda work, tiles: {"chunks": whole_boxes(work.problem.head_dim) // WIDTH},
        persistent=True,
        arch="a",
    )  # fmt: skip


SPEC_FEW, SPEC = spec_of(LINES_OF_B, is_few=True), spec_of(PARTS_OF_B.map, is_few=False)

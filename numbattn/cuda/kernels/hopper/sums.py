"""Sums over pairs of points of float32 on Hopper, o_i = sum_j kappa_ij b_j, of any number of dimensions: see `pairs`.

|x - y|^2 = -2 (x . y - |x|^2 / 2 - |y|^2 / 2). With few features of b each thread sums its own products; with more the
parts of kappa are multiplied by those of b.
"""

import math

import numpy as np

from ...tile import (
    SharedMemory,
    allocate,
    bfloat16,
    bitcast,
    bulk_load,
    col_index,
    device,
    dot,
    full,
    get,
    load,
    operand,
    save,
    shape,
    wgmma,
    wgmma_wait,
    where,
)
from ...words.arguments import Matrix
from ...words.signatures import signature_of
from ..points.arguments import APART, COLUMNS, FEW, PLACES, SMALLEST
from ..points.arguments import ROWS as ROW_SHIFTS
from ..points.features import near_steps, no_sums_step, part_sums_step, save_sums_step, tuple_of, two_sums_step
from ..points.kinds import pair_step
from ..shared.layouts import DTYPES
from ..shared.warps import source_of, warp_specialised
from .pairs import REGISTERS, PairSizes, PairTiles, chunk_steps, load_parts_step, pairs_spec
from .parts import LINE_OF_X, LINE_OF_Y, LINES_OF_B, PARTS, PARTS_OF_B, PARTS_OF_X, PARTS_OF_Y, WIDTH, fits_parts

MANY_REGISTERS = 24, 240  # of a producer's thread, and of each of two consumers'


def hopper_sums(*, dim_b, tiles, kind):
    """The kernel for these PairTiles and dim_b features of b: up to FEW, or WIDTH.

    kind: the form of a `numbattn.points.kinds.Kind`.
    """
    ACC, IS_FEW, (tile_n, consumers, _, y_stages) = np.float32, dim_b <= FEW, tiles
    S_TILE, TILE_N, ZERO, TWICE, shared = wgmma(tile_n), tile_n, ACC(0), ACC(-2), SharedMemory()
    if IS_FEW:
        steps = few_steps(S_TILE, ACC, dim_b, shared.tile(1, tile_n, ACC, y_stages * dim_b))
        fills, registers, places = dim_b, REGISTERS[consumers], ()
    else:
        places = tuple(shared.boxes(tile_n, WIDTH, bfloat16, y_stages) for _ in range(PARTS))
        fills, registers, steps = PARTS, MANY_REGISTERS, many_steps(places, ACC)
    load_b, none, of_tile, add_sums, save_sums = steps
    walk = chunk_steps(shared, S_TILE, tiles, ACC, fills, load_b)
    VECTOR, kappa_of = S_TILE.row_vector(), pair_step(kind, ACC)
    has_near, recompute = near_steps(S_TILE, ACC)

    @device
    def start(given, at):
        batch, head, m0 = at
        return at, load(given[0][batch, head], VECTOR, m0) * TWICE, none()

    @device
    def add(found, S, line, B, n0, given):
        (at, norms, O), (_, _, mGivenX, mGivenY, seqlen_k, kind_number, rate) = found, given
        T = S * TWICE + (line * TWICE + norms)
        if has_near(T, norms):                                  # see `points.pairs`
            batch, head, m0 = at
            T = recompute(T, norms, line * TWICE, mGivenX[batch, head], mGivenY[batch, head], m0, n0, rate)
        kappa = kappa_of(T, (), kind_number)
        if n0 + TILE_N > seqlen_k:
            kappa = where(col_index(S_TILE, n0) < seqlen_k, kappa, ZERO)
        return at, norms, add_sums(O, of_tile(kappa, B))     # each tile is summed on its own: more digits

    @device
    def finish(found, of_x, given, at):
        batch, head, m0 = at
        save_sums(given[1][batch, head], found[2], m0)

    compute = walk.consumer_of(start, add, finish)
    begin, take_roles = warp_specialised(walk.pipelines, consumers, registers, compute, *walk.producers)

    def kernel(mX, mY, mB, mLineX, mLineY, mO, mGivenX, mGivenY, seqlen_k, chunks, kind_number, rate):
        batches, heads, seqlen_q, _ = shape(mO)
        (_, _, apart_x), (_, _, apart_y) = shape(mLineX), shape(mLineY)
        begin()
        sizes = PairSizes(seqlen_q, seqlen_k, heads, batches * heads, chunks, apart_x, apart_y)
        given = mLineX, mO, mGivenX, mGivenY, seqlen_k, kind_number, rate
        take_roles((given, sizes), ((mX, mY, sizes), (mB, mLineY, sizes)))

    spec = SPEC_FEW if IS_FEW else SPEC
    signature = signature_of(kernel, spec.arguments, DTYPES["bfloat16"], ACC, dict.fromkeys(("o", *PLACES), "float32"))
    return source_of(kernel, signature, consumers, shared, (*walk.places, *places[:1]))


def few_steps(layout, ACC, count, lines):
    """Device functions for sums of `count` features on CUDA cores: (B, mB, batch, head, row, apart) loads a tile of b;
    () -> sums of nothing; (kappa, B) -> the sums of a tile; (sums, sums of a tile) -> both; (matrix, sums, m0) saves
    them.

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
    """`few_steps` for many features, by products of parts. places: of the parts of b."""
    O_TILE, ZERO, HIGH, (B1, B2, B3) = wgmma(WIDTH), ACC(0), np.uint32(0xFFFF0000), places

    @device
    def none():
        return full(O_TILE, ZERO)

    @device
    def split(kappa):
        """The first 8 bits, truncated, as an operand; and the rest."""
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
TILES_OF_FEW = PairTiles(192, 2, 5, 2)  # ms for 100,000 points each, an H100, d 64: 11.4; 128 columns 12.4
TILES = {  # by the largest number of dimensions, for 64 features
    64: PairTiles(96, 2, 5, 2),            # 23; 128 columns 26
    math.inf: PairTiles(128, 2, 5, 1),     # d 512: 131; 96 columns 158
}


def tiles_of(problem, is_few):
    return TILES_OF_FEW if is_few else next(tiles for most, tiles in TILES.items() if problem.head_dim <= most)


def fits(problem, kind):
    return not kind.is_of_product and fits_parts(problem)


def takes(work):
    """b has no more features than a box, and rows and columns have no logarithms."""
    is_plain = ROW_SHIFTS not in work.dtypes and COLUMNS not in work.dtypes and work.problem.head_dim_v <= WIDTH
    return is_plain and work.device.cc == (9, 0) and fits(work.problem, work.kind)


def takes_few(work):
    return takes(work) and 0 < work.problem.head_dim_v <= FEW and work.problem.head_dim > MOST_OF_MMA


def takes_many(work):
    return takes(work) and work.problem.head_dim_v > FEW and work.problem.head_dim > SMALLEST


def spec_of(b, is_few):
    arguments = (
        PARTS_OF_X.map, PARTS_OF_Y.map, b, LINE_OF_X, LINE_OF_Y, Matrix("o"), *APART, "seqlen_k", "chunks",
        "kind_number", "rate",
    )  # fmt: skip
    return pairs_spec(
        hopper_sums,
        arguments,
        lambda work: tiles_of(work.problem, is_few),
        lambda work: {"dim_b": work.problem.head_dim_v if is_few else WIDTH, "kind": work.kind},
    )


SPEC_FEW, SPEC = spec_of(LINES_OF_B, is_few=True), spec_of(PARTS_OF_B.map, is_few=False)

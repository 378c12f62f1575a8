"""The gradient of sums over pairs of points: dx_i = sum_j W_ij 2 (x_i - y_j), W_ij = kappa'_ij <c_i, b_j>, or
sum_j W_ij y_j for a function of x . y.

See `loop` for how a block gets its pairs. With few dimensions each thread sums its own differences; with more they are
2 (x_i rowsum(W)_i - (W Y)_i).
"""

from ....points.kinds import DERIVATIVE, DIFFERENCES
from ...build import Source
from ...tile import (
    aligned,
    convert,
    device,
    dot,
    full,
    load,
    part_sum,
    row_sum,
    save,
)
from ...words.arguments import Matrix
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.layouts import left_operand
from ..shared.visibility import MASK
from .arguments import APART, COLUMNS, FEW, ROWS, VECTORS, PointTiles, parameters, rows_of
from .features import part_differences_step
from .kinds import pair_step
from .loop import loop_steps
from .outer import OuterSums, few_sums, latest, outer, same, tile_of_sums
from .pairs import PairSteps


def point_gradient(*, dtype, dim, dim_b, tiles, kind, given, mask, nbytes):
    """The kernel for points of `dim` dimensions and `dim_b` features of b and c; given, kind: see `point_sums`."""
    pairs = PairSteps(dtype, dim, dim_b, tiles, nbytes)
    keep_points, fetch_points, get_points, distances = pairs.distances(dim, kind)
    keep_rows, fetch_columns, shift_of = pairs.shifts(given)
    keep_c, (fetch_b, get_b), inner = pairs.kept(dim_b, FEW), pairs.walked(dim_b, FEW), pairs.inner(dim_b, FEW)
    slope_of = pair_step(kind, pairs.ACC, DERIVATIVE, shifted=ROWS in given or COLUMNS in given)
    sums = displacements(pairs, dim, kind)
    none, add_displacements, save_dx = sums.none, sums.add, sums.save

    @device
    def fetch(given, block, stage, n0):
        _, _, _, mY, mB, vectors, _ = given
        fetch_points(mY, vectors, block, stage, n0)
        fetch_columns(vectors, block, stage, n0)
        fetch_b(mB[block.batch, block.head][block.key : block.seen_key], stage, n0)

    block_of, in_sight, loop_of = loop_steps(pairs, mask, fetch)

    @device
    def add(dX, given, mask, block, part):
        X, R, C, _, _, _, kind_number = given
        Y = get_points(part.stage, part.chunk)
        slope = slope_of(distances(X, Y, part), shift_of(R, part.stage, part.chunk), kind_number)
        W = in_sight(slope * inner(C, get_b(part.stage, part.chunk)), mask, block, part)   # W_ij = kappa'_ij <c_i, b_j>
        return add_displacements(dX, W, X, Y)                   # dx_i += sum_j W_ij (x_i - y_j)

    loop = loop_of(add, sums.begin, sums.end)

    def kernel(mX, mY, mB, mC, mDX, mGivenX, mGivenY, vectors, mask, kind_number, rate):
        block, mask = block_of(mDX, mask)
        batch, head = block.batch, block.head
        X, R = keep_points(mX, vectors, (mGivenX, mGivenY, rate), block), keep_rows(vectors, block)
        C = keep_c(mC[batch, head][block.query : block.seen_query], block.m0)
        dX = loop(none(), (X, R, C, mY, mB, vectors, kind_number), mask, block)
        points = mX[batch, head][block.query : block.seen_query]
        save_dx(mDX[batch, head][block.query : block.end_query], dX, points, block.m0)

    signature = signature_of(kernel, SPEC.arguments, pairs.dtype, pairs.ACC, {"dq": pairs.ACC}, mask=mask, given=given)
    return Source(kernel, signature, tiles.threads, tiles.blocks, pairs.shared.nbytes)


def displacements(pairs, dim, kind):
    """The OuterSums of W (x - y) over columns, add(dX, W, X, Y), doubled when they are saved, save(matrix, dX, points,
    m0); or those of W y."""
    if kind.is_of_product:
        return with_points(outer(pairs, dim, DIFFERENCES), of_y)
    if dim <= DIFFERENCES:
        return with_points(few_sums(pairs.layout, pairs.ACC, dim, part_differences_step(dim), 2.0), of_x_and_y)
    return many_displacements(pairs, dim)


def of_y(add):
    @device
    def added(dX, W, X, Y):
        return add(dX, W, Y)

    return added


def of_x_and_y(add):
    @device
    def added(dX, W, X, Y):
        return add(dX, W, X[0], Y)

    return added


def with_points(sums, given):
    """Sums whose `save` ignores points."""
    save_sums = sums.save

    @device
    def save_without(matrix, dX, points, m0):
        save_sums(matrix, dX, m0)

    return sums._replace(add=given(sums.add), save=save_without)


def many_displacements(pairs, dim):
    """`displacements` of many dimensions, from W Y and the sums of W."""
    X_TILE, PARTS, ACC, ROWS_OF = tile_of_sums(pairs, dim), pairs.layout.row_parts(), pairs.ACC, pairs.rows_of
    TWO, ZERO, left = ACC(2), ACC(0), left_operand(pairs.layout, pairs.shared, ACC, dim)

    @device
    def none():
        return full(X_TILE, ZERO), full(PARTS, ZERO)

    @device
    def add(dX, W, X, Y):
        WY, total = dX
        return dot(WY, left(W), Y), part_sum(W, total)

    @device
    def save_tile(matrix, dX, points, m0):
        WY, total = dX
        X = convert(load(aligned(points, ROWS_OF), X_TILE, m0), ACC)
        save(aligned(matrix, ROWS_OF), (X * row_sum(total) - WY) * TWO, m0)

    return OuterSums(none, same, add, latest, save_tile)


# As those of `point_sums`
TILES = {
    (True, True, 2): {
        4: PointTiles("fma", 32, 512, 256, lanes=32, chunks=4, blocks=2),
        12: PointTiles("fma", 32, 512, 256, lanes=32, chunks=8),
    },
    (True, True, 4): {
        4: PointTiles("fma", 64, 256, 128, lanes=16, chunks=4, blocks=2),  # 1.7; 32 rows 1.6
        12: PointTiles("fma", 32, 512, 256, lanes=32, chunks=8),
    },
    (True, True, 8): {
        7: PointTiles("fma", 32, 256, 256, lanes=32, chunks=4),
        12: PointTiles("fma", 16, 256, 256, lanes=32, chunks=4),
    },
    (True, False, 2): {256: PointTiles("mma", 128, 64, 256)},
    (True, False, 4): {
        64: PointTiles("mma", 128, 64, 256), 128: PointTiles("mma", 128, 32, 256),
        256: PointTiles("mma", 128, 32, 256),
    },
    (True, False, 8): {128: PointTiles("mma", 64, 16, 128), 256: PointTiles("mma", 64, 16, 128)},
    (False, True, 2): {128: PointTiles("mma", 128, 64, 256), 256: PointTiles("mma", 64, 32, 128)},
    (False, True, 4): {
        64: PointTiles("mma", 128, 32, 128, blocks=2),  # 0.22; 64 columns 0.19
        128: PointTiles("mma", 128, 32, 256), 256: PointTiles("mma", 128, 16, 256),
    },
    (False, True, 8): {64: PointTiles("mma", 128, 16, 256), 128: PointTiles("mma", 64, 16, 128)},
    (False, False, 2): {128: PointTiles("mma", 128, 64, 256), 256: PointTiles("mma", 64, 32, 128)},
    (False, False, 4): {
        64: PointTiles("mma", 128, 32, 256), 128: PointTiles("mma", 128, 16, 256),
        256: PointTiles("mma", 64, 16, 128),
    },
    (False, False, 8): {64: PointTiles("mma", 64, 16, 128), 128: PointTiles("mma", 64, 8, 128)},
}
SPEC = Spec(
    point_gradient,
    (Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("c"), Matrix("dq"), *APART, VECTORS, MASK,
     "kind_number", "rate"),
    tiles=lambda work: rows_of(TILES, work),
    parameters=parameters,
    packs=True,
)

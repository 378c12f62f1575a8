"""Tuples of vectors, one for each feature of points: sums over few features, on CUDA cores, without a tile of products.

A thread keeps the features of its rows in registers, and reads those of its columns from shared memory, where each
feature is a line. Everything is unrolled.
"""

from ....points.kinds import NEAR
from ...tile import (
    allocate,
    always,
    anywhere,
    columns,
    convert,
    copy_async,
    copy_layout,
    device,
    full,
    get,
    index,
    load,
    opaque,
    part_sum,
    row_sum,
    save,
    shape,
    where,
)


def tuple_of(function, count):
    """The device function (given) -> the tuple of function(number, given) for each number up to count."""
    LAST = count - 1

    @device
    def nothing(given):
        return ()

    if not count:
        return nothing
    others = tuple_of(function, count - 1)

    @device
    def of_each(given):
        return (*others(given), function(LAST, given))

    return of_each


def map_of(function, count):
    """The device function (xs, ys, zs, given) -> the tuple of function(x, y, z, given) over three tuples."""
    LAST = count - 1

    @device
    def nothing(xs, ys, zs, given):
        return ()

    if not count:
        return nothing
    others = map_of(function, count - 1)

    @device
    def of_each(xs, ys, zs, given):
        return (*others(xs, ys, zs, given), function(xs[LAST], ys[LAST], zs[LAST], given))

    return of_each


def sum_of(term, count):
    """The device function (xs, ys) -> the sum of term(x, y) over two tuples."""
    LAST = count - 1

    @device
    def alone(xs, ys):
        return term(xs[LAST], ys[LAST])

    if count == 1:
        return alone
    others = sum_of(term, count - 1)

    @device
    def total(xs, ys):
        return others(xs, ys) + term(xs[LAST], ys[LAST])

    return total


@device
def squared_difference(x, y):
    difference = x - y
    return difference * difference


@device
def product(x, y):
    return x * y


def load_rows_step(layout, ACC, count):
    """The device function (matrix, m0) -> the features of a tile's rows from m0 on, row vectors."""
    ROWS = layout.row_vector()

    @device
    def feature(number, given):
        matrix, m0 = given
        return convert(load(matrix[:, number], ROWS, m0), ACC)

    features = tuple_of(feature, count)

    @device
    def load_rows(matrix, m0):
        return features((matrix, m0))

    return load_rows


def near_steps(layout, ACC):
    """Device functions: (T, |x|^2 of rows) -> whether some pair of this warp is near, or almost; (T, |x|^2 of rows,
    |y|^2 of columns, X, Y, m0, n0, rate) -> T, that of near pairs from rows of X and Y, in memory, feature by feature:
    slow, for few tiles.

    T of other pairs stays: passes over the same pairs are to agree on it, whatever the tile.
    """
    ROWS, COLS, ZERO, BOUND = layout.row_vector(), layout.col_vector(), ACC(0), ACC(NEAR)
    SHARE = ACC(2.43 * NEAR)  # of |x|^2: if t < NEAR (|x|^2 + |y|^2), then |y|^2 < 1.43 |x|^2

    @device
    def has_near(T, norms):
        return anywhere(norms * SHARE > T)

    @device
    def recompute(T, x_norms, y_norms, X, Y, m0, n0, rate):
        (_, count), number = shape(X), index(0)
        T = where(x_norms * BOUND + y_norms * BOUND > T, ZERO, T)
        # T of near pairs goes down from 0, that of others is positive: no second tile in registers
        while number < count:
            x = load(X[:, number], ROWS, opaque(m0))            # no kept addresses
            if always():                                        # nor many in flight
                y = load(Y[:, number], COLS, opaque(n0))
                T = where(T > ZERO, T, T - squared_difference(convert(x, ACC), convert(y, ACC)))
            number = opaque(number + 1)
        return where(T > ZERO, T, T * -rate)

    return has_near, recompute


class Lines:
    """Places in shared memory for vectors along columns: the features of a matrix, or a single vector."""

    def __init__(self, shared, dtype, layout, threads, count=1, chunks=1, stages=1):
        """layout: of a tile; `chunks` of them, side by side, are copied together."""
        cols = layout.cols.size * chunks
        self.place = shared.tile(1, cols, dtype, stages * count)
        self.copy, self.cols = copy_layout(1, cols, threads, 1).col_vector(), layout.col_vector()
        self.count, self.chunks = count, chunks

    def matrix_steps(self, ACC):
        """Device functions: (matrix, stage, n0) starts to copy the features of columns from n0 on; (stage, chunk) gets
        those of a tile."""
        PLACE, COPY, COUNT = self.place, self.copy, self.count
        get_one = self.get_step(ACC)

        @device
        def fetch(matrix, stage, n0):
            for number in range(COUNT):
                copy_async(allocate(PLACE, stage * COUNT + number), matrix[:, number], COPY, n0)

        @device
        def get_feature(number, given):
            stage, chunk = given
            return get_one(stage * COUNT + number, chunk)

        features = tuple_of(get_feature, COUNT)

        @device
        def get_features(stage, chunk):
            return features((stage, chunk))

        return fetch, get_features

    def vector_steps(self, ACC):
        """The `matrix_steps` of a single vector."""
        PLACE, COPY = self.place, self.copy

        @device
        def fetch(vector, stage, n0):
            copy_async(allocate(PLACE, stage), vector, COPY, n0)

        return fetch, self.get_step(ACC)

    def get_step(self, ACC):
        PLACE, COLS, CHUNKS = self.place, self.cols, self.chunks

        @device
        def get_one(line, chunk):
            return convert(get(columns(allocate(PLACE, line), chunk, CHUNKS), COLS), ACC)

        return get_one


def part_sums_step(count):
    """The device function (sums, W, ys) -> each of `sums`, row parts, plus W times each of ys, column vectors."""

    @device
    def added(total, y, same, W):
        return part_sum(W * y, total)

    added_to_each = map_of(added, count)

    @device
    def add(sums, W, ys):
        return added_to_each(sums, ys, ys, W)

    return add


def part_differences_step(count):
    """The device function (sums, W, xs, ys) -> each of `sums`, row parts, plus those of W (x - y)."""

    @device
    def added(total, x, y, W):
        return part_sum(W * (x - y), total)

    added_to_each = map_of(added, count)

    @device
    def add(sums, W, xs, ys):
        return added_to_each(sums, xs, ys, W)

    return add


def no_sums_step(layout, ACC, count):
    """The device function () -> `count` row parts of zeros."""
    PARTS, ZERO = layout.row_parts(), ACC(0)

    @device
    def nothing(number, given):
        return full(PARTS, ZERO)

    nothings = tuple_of(nothing, count)

    @device
    def no_sums():
        return nothings(())

    return no_sums


def two_sums_step(count):
    """The device function (sums, others) -> the sum of two tuples of row parts."""

    @device
    def added(one, other, same, given):
        return one + other

    added_to_each = map_of(added, count)

    @device
    def add(sums, others):
        return added_to_each(sums, others, others, ())

    return add


def save_sums_step(count, factor):
    """The device function (matrix, sums, first): save row parts, added up, times a factor, as columns of a matrix."""
    NUMBERS, FACTOR = tuple(range(count)), factor

    @device
    def save_one(total, number, same, given):
        matrix, first = given
        save(matrix[:, number], row_sum(total) * FACTOR, first)
        return 0

    save_each = map_of(save_one, count)

    @device
    def save_sums(matrix, sums, first):
        save_each(sums, NUMBERS, NUMBERS, (matrix, first))

    return save_sums

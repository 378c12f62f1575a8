"""t of tiles of pairs of points, and other steps of the kernels.

With few dimensions t is a sum of squared differences on CUDA cores, which loses no digits even for far-off points. With
more it is |x|^2 + |y|^2 - 2 x . y: a product of tiles, and given norms. Of near pairs, where this loses digits, t comes
from the differences of points as they were given, in memory.
"""

from ....points.kinds import DIFFERENCES
from ...tile import Alignment, SharedMemory, aligned, allocate, copy_async, device, full, load, simt
from ...words.numbers import LOG2_E
from ..shared.layouts import DTYPES, buffers, product_step, sum_type, vector
from .arguments import COLUMNS, FEW, ROWS
from .features import Lines, load_rows_step, near_steps, product, squared_difference, sum_of


class PairSteps:
    """The layout of a tile of pairs, places in shared memory, and steps of kernels."""

    def __init__(self, dtype, dim, dim_b, tiles, nbytes):
        self.dtype, self.ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
        unit, self.tile_m, self.tile_n, self.threads, lanes, self.chunks, self.stages, _ = self.tiles = tiles
        self.shared, self.rows_of, cols = SharedMemory(), Alignment(nbytes), self.tile_n // self.chunks
        self.layout, self.product = product_step(tiles, self.tile_m, cols, self.shared, self.ACC)
        if unit == "fma" and dim <= DIFFERENCES and dim_b <= FEW:
            self.layout = simt(self.tile_m, cols, self.threads, lanes, min(cols // lanes, vector(self.dtype)))

    def lines(self, dtype, count=1):
        return Lines(self.shared, dtype, self.layout, self.threads, count, self.chunks, self.stages)

    def kept(self, count, most):
        """The device function (matrix, m0) -> a block's rows of a matrix of `count` features: row vectors, if there are
        at most `most`, or a tile in shared memory, which it starts to copy them to."""
        if count <= most:
            return load_rows_step(self.layout, self.ACC, count)
        ((PLACE, COPY),), ROWS_OF = buffers(self.shared, self.dtype, self.threads, self.tile_m, [count]), self.rows_of

        @device
        def keep(matrix, m0):
            copy_async(allocate(PLACE), aligned(matrix, ROWS_OF), COPY, m0)
            return allocate(PLACE)

        return keep

    def walked(self, count, most):
        """Device functions: (matrix, stage, n0) starts to copy rows of a matrix, a tile's columns; (stage, chunk) gets
        them: column vectors, or a tile in shared memory."""
        if count <= most:
            return self.lines(self.dtype, count).matrix_steps(self.ACC)
        ((PLACE, COPY),), ROWS_OF = buffers(
            self.shared, self.dtype, self.threads, self.tile_n, [count], self.stages
        ), self.rows_of  # fmt: skip

        @device
        def fetch(matrix, stage, n0):
            copy_async(allocate(PLACE, stage), aligned(matrix, ROWS_OF), COPY, n0)

        @device
        def get(stage, chunk):
            return allocate(PLACE, stage)

        return fetch, get

    def inner(self, count, most, term=product):
        """The device function (X, Y) -> the products of rows with columns, or sums of `term` over few features."""
        return sum_of(term, count) if count <= most else self.product

    def distances(self, dim, kind):
        """For t: (matrix, vectors, apart, block) keeps rows; (matrix, vectors, block, stage, n0) starts
        to copy columns; (stage, chunk) gets these; (X, Y, part) -> T.

        apart: matrices of points as they were given, x and y, and the factor of their squared distances.
        """
        keep_points, (fetch_points, get_points) = self.kept(dim, DIFFERENCES), self.walked(dim, DIFFERENCES)
        VECTOR = self.layout.row_vector()

        @device
        def keep(matrix, vectors, apart, block):
            return keep_points(matrix[block.batch, block.head][block.query : block.seen_query], block.m0), (), ()

        @device
        def fetch(matrix, vectors, block, stage, n0):
            fetch_points(matrix[block.batch, block.head][block.key : block.seen_key], stage, n0)

        if dim <= DIFFERENCES or kind.is_of_product:
            sum_over = self.inner(dim, DIFFERENCES, product if kind.is_of_product else squared_difference)
            TILE, NOTHING = self.layout, self.ACC(-0.0)         # x + -0.0 is x

            @device
            def summed(X, Y, part):
                return sum_over(X[0], Y) + full(TILE, NOTHING)  # a tile of the unit that multiplies

            return keep, fetch, get_points, summed

        fetch_norms, norms_of = self.lines(self.ACC).vector_steps(self.ACC)
        inner, (has_near, recompute) = self.product, near_steps(self.layout, self.ACC)

        @device
        def keep_with_norms(matrix, vectors, apart, block):
            (mX, mY, rate), (batch, head), (X, _, _) = apart, block[:2], keep(matrix, vectors, apart, block)
            norms = vectors.x_norms[0][batch, head][block.query : block.seen_query]
            rows, cols = mX[batch, head][block.query : block.seen_query], mY[batch, head][block.key : block.seen_key]
            return X, load(norms, VECTOR, block.m0), (rows, cols, block.m0, rate)

        @device
        def fetch_with_norms(matrix, vectors, block, stage, n0):
            fetch(matrix, vectors, block, stage, n0)
            fetch_norms(vectors.y_norms[0][block.batch, block.head][block.key : block.seen_key], stage, n0)

        @device
        def by_norms(X, Y, part):
            points, norms, (rows, cols, m0, rate) = X
            T = inner(points, Y) * -2 + (norms + norms_of(part.stage, part.chunk))
            if has_near(T, norms):
                T = recompute(T, norms, norms_of(part.stage, part.chunk), rows, cols, m0, part.n0, rate)
            return T

        return keep_with_norms, fetch_with_norms, get_points, by_norms

    def shifts(self, given):
        """Device functions for logarithms to base 2 that are added to that of kappa: (vectors, block) keeps those of
        rows; (vectors, block, stage, n0) starts to copy those of columns; (R, stage, chunk) -> their sum."""
        HAS_ROWS, HAS_COLUMNS = ROWS in given, COLUMNS in given
        VECTOR, LOG2E = self.layout.row_vector(), self.ACC(LOG2_E)
        fetch_line, line_of = self.lines(self.ACC).vector_steps(self.ACC) if HAS_COLUMNS else (None, None)

        @device
        def keep(vectors, block):
            if HAS_ROWS:
                found = vectors.rows[0][block.batch, block.head][block.query : block.seen_query]
                return load(found, VECTOR, block.m0) * LOG2E
            return ()

        @device
        def fetch(vectors, block, stage, n0):
            if HAS_COLUMNS:
                fetch_line(vectors.columns[0][block.batch, block.head][block.key : block.seen_key], stage, n0)

        @device
        def of_rows(R, stage, chunk):
            return R

        @device
        def of_columns(R, stage, chunk):
            return line_of(stage, chunk) * LOG2E

        @device
        def of_both(R, stage, chunk):
            return R + line_of(stage, chunk) * LOG2E

        return keep, fetch, of_both if HAS_ROWS and HAS_COLUMNS else of_columns if HAS_COLUMNS else of_rows

"""What kernels over pairs of points share: the rows that a block keeps, the columns that it walks over, and t of a tile
of pairs.

Of few dimensions t is a sum of squared differences on CUDA cores, which loses no digits however far off points are. Of
more it is |x|^2 + |y|^2 - 2 x . y: a product of tiles, given norms, and no less than 0.
"""

from typing import Any, NamedTuple

from numba.cuda import types

from ....points.kinds import DIFFERENCES
from ...tile import (
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    block_index,
    copy_async,
    device,
    dot,
    full,
    load,
    maximum,
    minimum,
    save,
    shape,
    simt,
    where,
)
from ...words.arguments import Argument
from ...words.numbers import LOG2_E
from ...words.signatures import several
from ..shared.layouts import DTYPES, buffers, left_operand, product_step, sum_type, sums, vector
from ..shared.schedule import place
from ..shared.segments import count_step, keys_of, mask_within_step, queries_of, slot_step
from ..shared.visibility import band_of, element_test, needs_test, steps_to_next, visible_keys
from ..tables import has_tensor_cores, rounded
from .features import (
    Lines,
    load_rows_step,
    no_sums_step,
    part_sums_step,
    product,
    save_sums_step,
    squared_difference,
    sum_of,
)
from .kinds import of_products

FEW = 4  # features up to which each thread sums its own products
SMALLEST = 16  # features of a tile that tensor cores multiply
ROWS, COLUMNS, X_NORMS, Y_NORMS = "rows", "columns", "norms of x", "norms of y"


class PointTiles(NamedTuple):
    """A row of a table: tiles of tile_m rows and tile_n columns, in `chunks` one after the other."""

    unit: str  # as in tables.Tiles
    tile_m: int
    tile_n: int
    threads: int
    lanes: int = 0
    chunks: int = 1  # of a tile's columns, each a tile in registers
    stages: int = 2
    blocks: int = 1


CUDA_CORES = (
    PointTiles("fma", 64, 64, 128, lanes=8), PointTiles("fma", 32, 32, 128, lanes=8),
    PointTiles("fma", 16, 16, 64, lanes=8, stages=1), PointTiles("fma", 8, 8, 64, lanes=8, stages=1),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- its arguments
class Vectors(NamedTuple):
    """Numbers for rows or columns of a matrix: an array (batch, heads, how many) in a tuple of its own, or nothing."""

    rows: Any  # logarithms, added to that of kappa
    columns: Any
    x_norms: Any  # squared
    y_norms: Any


class VectorsArgument(Argument):
    """The fields of Vectors."""

    def flat(self, planner, work):
        for name, heads in HEADS.items():
            if name in planner.layouts:
                yield planner.at(name, heads, own=1)

    def type(self, about):
        return types.NamedTuple([several(about.sums_of(3), name in about.given) for name in HEADS], Vectors)


HEADS = {ROWS: "q", COLUMNS: "k", X_NORMS: "q", Y_NORMS: "k"}  # of Vectors, by name
VECTORS = VectorsArgument()


def rows_of(table, work):
    """The rows for this work: of {(few dimensions of points, few features of b, bytes of an element): {size: rows}},
    the size up to the sum of both where both are few, up to the larger of the others where not, and those of
    CUDA_CORES. Before 8.0 products are for CUDA cores."""
    problem = work.problem
    sizes, nbytes = sizes_of(problem), problem.dtype.itemsize
    few = sizes[0] <= DIFFERENCES, sizes[1] <= FEW
    found = table[(*few, nbytes)] if all(few) or has_tensor_cores(work.device) else {}
    size = sum(sizes) if all(few) else max(size for size, is_few in zip(sizes, few) if not is_few)
    rows = next((found[largest] for largest in sorted(found) if size <= largest), ())
    return *rows, *CUDA_CORES


def sizes_of(problem):
    """Dimensions of points, and features of b, as kernels are compiled for them: few are as they are."""
    few = (problem.head_dim, DIFFERENCES), (problem.head_dim_v, FEW)
    return tuple([max(size, 1) if size <= most else SMALLEST if size <= SMALLEST else rounded("features", size)
                  for size, most in few])  # fmt: skip


def parameters(work, tiles):
    """Those of factories of kernels over pairs."""
    dim, dim_b = sizes_of(work.problem)
    given = tuple([name for name in HEADS if name in work.dtypes])
    return {
        "dtype": work.problem.dtype.name, "dim": dim, "dim_b": dim_b, **tiles._asdict(), "kind": work.kind,
        "given": given, "mask": work.mask, "nbytes": work.nbytes,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- its steps
class Block(NamedTuple):
    """What a block computes: a tile of rows of a matrix, and the tiles of columns that these see."""

    batch: Any
    head: Any
    m_block: Any
    m0: Any
    first: Any  # tile of columns
    tiles: Any
    band: Any
    query: Any  # rows [query, end_query) of the arrays are those of its segment
    end_query: Any
    seen_query: Any  # those before it may be read
    key: Any
    seen_key: Any


def block_steps(mask, tile_m, tile_n):
    """Device functions: (mO, mask) -> the Block of this block, and the mask of its segment; (mask, block, n_block) ->
    the next tile of columns after this one."""
    TILE_M, TILE_N = tile_m, tile_n
    band_at, steps = band_of(mask), steps_to_next(mask)
    tiles_of, tile_of, mask_of = count_step(mask, tile_m), slot_step(mask, "q", tile_m), mask_within_step(mask)

    @device
    def block_of(mO, mask):
        batches, heads, rows, _ = shape(mO)
        tile, batch, head = place(block_index(), batches * heads, heads)
        number = tiles_of(mask.packing, rows) - 1 - tile        # the heaviest tiles of a causal mask first
        segment, m_block = tile_of(mask.packing, batch, number, rows)
        mask, m0 = mask_of(mask, segment), m_block * TILE_M
        band = band_at(mask, batch, head)
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, segment.queries))  # none in a slot without a tile
        (query, end_query), (key, _) = queries_of(segment), keys_of(segment)
        n_block, n_blocks = first // TILE_N, (end + TILE_N - 1) // TILE_N
        n_block = n_block + steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
        # beyond a sequence's length there may be NaN
        seen_query, seen_key = query + maximum(band[2], 1), key + maximum(band[3], 1)
        block = Block(batch, head, m_block, m0, n_block, n_blocks, band, query, end_query, seen_query, key, seen_key)
        return block, mask

    @device
    def next_tile(mask, block, n_block):
        n_block = n_block + 1
        return n_block + steps(mask, block.batch, block.head, block.m_block, n_block, block.tiles - n_block)

    return block_of, next_tile


def mask_steps(mask, layout, tile_m, tile_n, hidden=0):
    """Device functions: (mask, block, n_block), whether a tile needs a test per element; (P, mask, block, n0), P of a
    part of it from column n0 on, `hidden` where it is masked."""
    TILE_M, TILE_N, HIDDEN, sees, tested = tile_m, tile_n, hidden, element_test(mask, layout), needs_test(mask)

    @device
    def needs_mask(mask, block, n_block):
        (batch, head, m_block, m0), n0 = block[:4], n_block * TILE_N
        return tested(mask, block.band, batch, head, m_block, n_block, m0, m0 + TILE_M, n0, n0 + TILE_N)

    @device
    def masked(P, mask, block, n0):
        return where(sees(mask, block.band, block.batch, block.head, block.m0, n0), P, HIDDEN)

    return needs_mask, masked


class Pairs:
    """The layout of a tile of pairs, places in shared memory, and the steps that kernels are made of."""

    def __init__(self, dtype, dim, dim_b, unit, tile_m, tile_n, threads, lanes, chunks, stages, nbytes):
        self.dtype, self.ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
        self.tile_m, self.tile_n, self.threads, self.chunks, self.stages = tile_m, tile_n, threads, chunks, stages
        self.unit, self.lanes = unit, lanes
        self.shared, self.rows_of, cols = SharedMemory(), Alignment(nbytes), tile_n // chunks
        self.layout, self.product = product_step(unit, lanes, tile_m, cols, threads, False, self.shared, self.ACC)
        if unit == "fma" and dim <= DIFFERENCES and dim_b <= FEW:
            self.layout = simt(tile_m, cols, threads, lanes, min(cols // lanes, vector(self.dtype)))

    def lines(self, dtype, count=1):
        return Lines(self.shared, dtype, self.layout, self.threads, count, self.chunks, self.stages)

    def kept(self, count, most):
        """The device function (matrix, m0): a block's rows of a matrix of so many features: row vectors, where there
        are no more than `most`, or a tile in shared memory, to which it starts to copy them."""
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
        """The device function (X, Y): the products of rows with columns, or sums of `term` over few features."""
        return sum_of(term, count) if count <= most else self.product

    def distances(self, dim, kind):
        """Device functions for t: (matrix, vectors, block) keeps rows; (matrix, vectors, block, stage, n0) starts to
        copy columns; (stage, chunk) gets these; (X, Y, stage, chunk) -> T."""
        keep_points, (fetch_points, get_points) = self.kept(dim, DIFFERENCES), self.walked(dim, DIFFERENCES)
        VECTOR = self.layout.row_vector()

        @device
        def keep(matrix, vectors, block):
            return keep_points(matrix[block.batch, block.head][block.query : block.seen_query], block.m0), ()

        @device
        def fetch(matrix, vectors, block, stage, n0):
            fetch_points(matrix[block.batch, block.head][block.key : block.seen_key], stage, n0)

        if dim <= DIFFERENCES or of_products(kind):
            sum_over = self.inner(dim, DIFFERENCES, product if of_products(kind) else squared_difference)
            TILE, NOTHING = self.layout, self.ACC(-0.0)         # x + -0.0 is x

            @device
            def summed(X, Y, stage, chunk):
                return sum_over(X[0], Y) + full(TILE, NOTHING)  # a tile of the unit that multiplies

            return keep, fetch, get_points, summed

        fetch_norms, norms_of = self.lines(self.ACC).vector_steps(self.ACC)
        inner = self.product

        @device
        def keep_with_norms(matrix, vectors, block):
            X, _ = keep(matrix, vectors, block)
            norms = vectors.x_norms[0][block.batch, block.head][block.query : block.seen_query]
            return X, load(norms, VECTOR, block.m0)

        @device
        def fetch_with_norms(matrix, vectors, block, stage, n0):
            fetch(matrix, vectors, block, stage, n0)
            fetch_norms(vectors.y_norms[0][block.batch, block.head][block.key : block.seen_key], stage, n0)

        @device
        def by_norms(X, Y, stage, chunk):
            points, norms = X
            return maximum(inner(points, Y) * -2 + norms + norms_of(stage, chunk), 0)

        return keep_with_norms, fetch_with_norms, get_points, by_norms

    def shifts(self, given):
        """Device functions for logarithms of base 2 that are added to that of kappa: (vectors, block) keeps those of
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

    def tile_of_sums(self, count):
        """The layout of a tile of sums of so many features."""
        return sums(self.unit, self.lanes, self.tile_m, count, self.threads, run=vector(self.dtype))

    def outer(self, count, most):
        """Device functions for sums over columns, of so many features: none yet; (O, P, B) -> O with P B added;
        (matrix, O, m0) saves them."""
        if count <= most:
            return no_sums_step(self.layout, self.ACC, count), part_sums_step(count), save_sums_step(count, self.ACC(1))
        O_TILE = self.tile_of_sums(count)
        left, ZERO, ROWS_OF = left_operand(self.layout, self.shared, self.ACC, count), self.ACC(0), self.rows_of

        @device
        def no_sums():
            return full(O_TILE, ZERO)

        @device
        def add(O, P, B):
            return dot(O, left(P), B)

        @device
        def save_tile(matrix, O, m0):
            save(aligned(matrix, ROWS_OF), O, m0)

        return no_sums, add, save_tile

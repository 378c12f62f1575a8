"""What the kernels for small matrices share: their tiles, the work that they take, copies of rows to shared memory.

A tile holds all scores of a (batch, head). Blocks are persistent: as many as are resident take matrices in turn. If
something is kept or summed by head, their number is a multiple of the heads, so that a block keeps its head.

Segments of packed arrays have tiles of their own sizes: a kernel takes those that fit its tile and no smaller one.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ...tile import (
    WARP,
    Alignment,
    allocate,
    copy_async,
    device,
    full,
    get_registers,
    grid_size,
    index,
    maximum,
    minimum,
    put,
    put_registers,
    rows_between,
    shape,
    sync_threads,
    sync_warp,
    where,
)
from ...words.spec import BY_HEAD, SHARED, Route, everything
from ...words.tiers import MMA
from ..scores import is_scaled, score_steps
from ..shared.layouts import buffers, sum_type
from ..shared.schedule import split
from ..shared.segments import Segment, extent_of, start_of, whole
from ..shared.visibility import PACKED, band_test, has_states, in_band, is_looked_up, looked_up_test
from ..tables import compiled_in, has_tensor_cores

SIZES = 16, 32, 64, 128  # of tiles, and that head_dims are rounded up to
SPLIT = 32  # of tiles of more, packed arrays have smaller ones, too, for their shorter segments
NO_LIMIT = 2**31 - 1
FEWER = 4  # most keys for each query: with more, the kernels for few queries waste less of a tile


class SmallTiles(NamedTuple):
    """A row: tiles of `size` queries and keys."""

    threads: int
    blocks: int  # that a multiprocessor holds, where shared memory has room for them: ptxas saves registers for it
    stages: int = 1
    keeps_score: bool = True  # whether shared memory has room for what a score adds to S
    size: int = 0
    least: int = 0  # tokens of the segments that it takes; of 0 also the tokens in none
    most: int = NO_LIMIT

    unit = "mma"

    @property
    def tile_m(self):
        return self.size

    tile_n = tile_m


class Matrices(NamedTuple):
    """The matrices of a call; of packed arrays, those of each segment."""

    count: Any
    batches: Any
    heads: Any  # whose keys differ
    queries: Any
    keys: Any


def fitted(*sizes):
    """The first of SIZES that has room for each of these; None if none has."""
    return next((size for size in SIZES if max(sizes) <= size), None)


def rows_of(table, work, size=None):
    """Rows of {(bytes of an element, size of the tile): {largest head_dim: row}} for this work; none if it is not
    small. size: of the tiles, for some segments of packed arrays; the default takes all."""
    problem, least, most = work.problem, 0, NO_LIMIT
    lengths = (work.longest,) if PACKED in work.mask else (problem.seqlen_q, problem.seqlen_k)
    largest, head_dim = fitted(*lengths), max(problem.head_dim, problem.head_dim_v)
    if size is not None:
        least, most = size // 2 + 1 if size > SPLIT else 0, size if size < largest else NO_LIMIT
    size = size or largest
    found = table.get((problem.dtype.itemsize, size), {})
    row = next((row for width, row in found.items() if head_dim <= width), None)
    row = row and row._replace(size=size, least=least, most=most)
    return () if row is None else (row, row._replace(keeps_score=False))


def routes_by_size(spec, table, also=everything):
    """Routes for packed arrays: kernels of a spec with this table, each for the segments that fit its tiles. also: what
    else the work has to be."""
    sizes = [size for size in SIZES if size >= SPLIT]
    specs = [replace(spec, tiles=partial(rows_of, table, size=size)) for size in sizes]
    return [route_of(tuple(specs[: n + 1]), sizes[n], also) for n in range(1, len(sizes))]


def route_of(specs, largest, also):
    """The Route for packed arrays whose longest segments need tiles of this size."""
    fits = [takes(spec) for spec in specs]

    def take(work):
        return PACKED in work.mask and work.longest == largest and also(work) and all(fit(work) for fit in fits)

    return Route(take, specs, MMA)


def takes(spec):
    """(work) -> whether the kernel takes it: matrices of one tile, or segments that are known to be as short, not in
    pages, which resume from nothing."""
    return lambda work: is_plain(work) and has_tensor_cores(work.device) and spec.fitting(work) is not None


def is_plain(work):
    problem = work.problem
    has_many_queries = FEWER * problem.seqlen_q >= problem.seqlen_k
    is_long = PACKED in work.mask and not work.longest
    return has_many_queries and not (is_long or has_states(work.mask) or problem.cache or work.resumes)


def parameters(work, tiles, grouped=False):
    """The parameters of all factories here."""
    problem = work.problem
    tiles = tiles._replace(keeps_score=tiles.keeps_score and keeps_score(work, grouped))
    sizes = fitted(problem.head_dim), fitted(problem.head_dim_v)
    return compiled_in(work, tiles, sizes) | {"nbytes": work.nbytes}


def keeps_score(work, grouped):
    """Whether a score adds the same to all matrices of a block. grouped: whether these are of all heads of a group."""
    return PACKED not in work.mask and (work.score_added == SHARED or (work.score_added == BY_HEAD and not grouped))


def resident(spec, work, tiles):
    """How many blocks a multiprocessor holds."""
    return max(min(tiles.blocks, work.device.holds(spec.shared(work, tiles))), 1)


def barrier_of(threads):
    """The word for a barrier of all threads of a block."""
    return sync_warp if threads == WARP else sync_threads


def place_steps(shared, dtype, threads, size, widths, nbytes, stages=1):
    """For each width the place of a tile of `size` rows, and the device function (array, batch, head, first, rows,
    stage): copy so many rows of a matrix there, and zeros for the others, which may be NaN beyond a sequence's length.
    """
    return [(place, fetch_step(place, layout, nbytes)) for place, layout
            in buffers(shared, dtype, threads, size, widths, stages)]  # fmt: skip


def fetch_step(PLACE, COPY, nbytes):
    ROWS_OF, ZERO = Alignment(nbytes), sum_type(PLACE.dtype)(0)

    @device
    def fetch(array, batch, head, first, rows, stage=0):
        if rows > 0:
            copy_async(allocate(PLACE, stage), rows_between(array, batch, head, first, first + rows, ROWS_OF), COPY, 0)
        else:
            put(allocate(PLACE, stage), full(COPY, ZERO))

    return fetch


def matrices_steps(mask, tiles):
    """Device functions: (batches, heads, queries, keys, mask) -> the Matrices; (number, matrices, mask) -> the number
    of the matrix that a block computes next, this one or a later one with queries, its batch and head, and its Segment.

    After all segments of packed arrays come the tokens in none of them, a tile at a time, which see nothing.
    """
    SIZE, LEAST, MOST, TAKES_OTHERS = tiles.size, tiles.least, tiles.most, tiles.least == 0

    @device
    def of_turn(offsets, turn, length):
        (count,) = shape(offsets)
        if turn < count - 1:
            first, tokens = extent_of(offsets, turn + 1, length)
            tokens = minimum(tokens, SIZE) if LEAST <= tokens <= MOST else index(0)
            return Segment(first, tokens, first, tokens, index(0))
        before, tile = start_of(offsets, 1, length), turn - (count - 1)
        ahead = (before + SIZE - 1) // SIZE
        first = tile * SIZE if tile < ahead else start_of(offsets, count, length) + (tile - ahead) * SIZE
        end = before if tile < ahead else length
        return Segment(first, minimum(maximum(end - first, 0), SIZE), first, index(0), index(0))

    @device
    def of_packed(batches, heads, queries, keys, mask):
        (count,) = shape(mask.packing[0].queries[0, 0])
        others = queries // SIZE + 2 if TAKES_OTHERS else index(0)
        return Matrices((count - 1 + others) * batches * heads, batches, heads, queries, keys)

    @device
    def next_of_packed(number, matrices, mask):
        batch, head, found = index(0), index(0), False
        segment = whole(index(0))
        while not found and number < matrices.count:
            turn, matrix = split(number, matrices.batches * matrices.heads)
            batch, head = split(matrix, matrices.heads)
            segment = of_turn(mask.packing[0].queries[batch, 0], turn, matrices.queries)
            found = segment.queries > 0
            if not found:
                number += grid_size()
        return number, batch, head, segment

    @device
    def of_call(batches, heads, queries, keys, mask):
        return Matrices(batches * heads, batches, heads, queries, keys)

    @device
    def next_of_call(number, matrices, mask):
        batch, head = split(number, matrices.heads)
        return number, batch, head, Segment(index(0), matrices.queries, index(0), matrices.keys, index(0))

    return (of_packed, next_of_packed) if PACKED in mask else (of_call, next_of_call)


def mask_steps(mask, S_TILE):
    """Device functions: (mask, band, batch, head) -> the elements that the grids of a mask show, looked up while
    matrices are in flight, or () without grids; (x, other, shown, band) -> x where the mask shows it, else other.

    The band is tested only if it ends within the tile.
    """
    seen_in_band, SIZE = band_test(S_TILE, transposed=False), S_TILE.shape[0]

    @device
    def nothing(mask, band, batch, head):
        return ()

    @device
    def within_band(x, other, shown, band):
        return x if in_band(band, 0, SIZE, 0, SIZE) else where(seen_in_band(band, 0, 0), x, other)

    if not is_looked_up(mask):
        return nothing, within_band
    test = looked_up_test(mask, S_TILE)

    @device
    def look_up(mask, band, batch, head):
        return test(mask, band, batch, head, 0, 0)

    @device
    def within_both(x, other, shown, band):
        return within_band(where(shown, x, other), other, shown, band)

    return look_up, within_both


def score_steps_of_block(shared, score, S_TILE, ACC, keeps_score):
    """Device functions: (scores, head), called once; (S, scores, batch, head, i, j) -> S, from row i and column j on,
    after all parts, and F; (dS, F) -> dS F.

    keeps_score: whether the parts add the same to all matrices of the block: then this is computed once and kept in
    shared memory, each thread its own share.
    """
    apply, pull_back, _ = score_steps(score, S_TILE, ACC)
    if not keeps_score:

        @device
        def keep_nothing(scores, head):
            pass

        @device
        def apply_now(S, scores, batch, head, i, j):
            return apply(S, scores, batch, head, i, j)

        return keep_nothing, apply_now, pull_back

    rows, cols = S_TILE.shape
    PLACE, ZERO, IS_SCALED = shared.tile(1, rows * cols, ACC), ACC(0), is_scaled(score)

    @device
    def keep(scores, head):
        added, _ = apply(full(S_TILE, ZERO), scores, 0, head, 0, 0)
        put_registers(allocate(PLACE), added)

    @device
    def apply_kept(S, scores, batch, head, i, j):
        if IS_SCALED:
            S = S * scores.scale
        return S + get_registers(allocate(PLACE), S_TILE), S

    return keep, apply_kept, pull_back

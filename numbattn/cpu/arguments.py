"""Arrays, masks and dropout as kernels take them: one type for all shapes, strides and broadcasts."""

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..base.checks import DTYPES
from ..base.origin import Origin
from ..caches import eight_bits
from ..masks import All, Bits, BlockSparse, Dense, Grid, QuerySegments, band_of, materialised
from .function import record_of
from .record import HOLE, At, Later, Record, data_address
from .tile import BFLOAT16, FLOAT8, FLOAT16, FULL, INT8, OF_SUMS
from .where import tile_function


class Matrices(NamedTuple):
    """An array as the addresses of its matrices, one for each (batch, head)."""

    address: int
    offsets: Any  # int64 (batch, heads), bytes
    rows: int
    cols: int
    stride: int  # elements from one row to the next


class RowAddresses(NamedTuple):
    """The addresses of rows, in bytes: row r of page p at address + offsets[batch, head] + p page_stride + r
    row_stride.
    """

    address: int
    offsets: Any  # int64 (batch, heads)
    page_stride: int
    row_stride: int


class Tokens(NamedTuple):
    """Keys or values: token t of a sequence is row t % page_size of page table[batch, t // page_size]."""

    place: RowAddresses
    kind: int  # of their numbers: OF_SUMS, FLOAT16, ...
    cols: int
    table: Any  # int32 (batch, pages of a sequence); without pages all is in page 0
    page_size: int
    scales: RowAddresses  # of numbers of 8 bits, a float32 a token


class WorkTiles(NamedTuple):
    """Tiles of queries, each within one segment. Without Segments there is a single segment."""

    table: Any  # int64 (tiles, 7): batch, head, m0, m_end; the segment's keys [first, end), and its offset
    starts: Any  # of the tiles of each score matrix: number n has rows starts[n]:starts[n + 1]
    pairs: int  # (query, key) in one segment, over all tiles
    longest: int  # the most keys of a segment
    by_head: bool  # whether heads have segments of their own


class MaskArrays(NamedTuple):
    """A mask, as kernels take it."""

    band: tuple  # lo, hi, queries, keys
    bands: Any  # int64 (batch, heads, 4), instead of `band` where bands differ; else empty
    intervals: Matrices  # int64, two rows: first and end of the keys that each query sees; or no rows
    # and two more rows for each gap in these
    cells: Any  # int64 (grids, batch, heads), addresses of uint8 matrices
    grids: Any  # int64 (grids, 14): rows and columns of cells, and strides; rows, columns and packed of a cell, and the
    # value of one that is wholly visible, 0 for any but 0; for a function, else 0: its address, the address of a record
    # of its arrays, and the query, key, element of the batch and head that it counts from


class DropoutNumbers(NamedTuple):
    """A Dropout, as kernels take it; threshold 0 drops nothing."""

    threshold: Any
    offset: Any
    key_low: Any
    key_high: Any
    origin: Origin


class Scratch(NamedTuple):
    """Memory of one thread, for one tile at a time. Names are those of the tiles in the kernels."""

    S: Any  # then P
    dP: Any  # then dS
    slopes: Any  # derivatives of scores
    QT: Any
    dOT: Any
    O: Any  # of further keys, where rows are long
    vectors: Any  # one number a query
    Z: Any  # uint8
    words: Any  # uint64
    wide: Any  # tokens of K or V that are widened, or that are in several pages


FEW = 16  # queries of a tile, at most, that decode.py computes
LINE = 64  # bytes of a cache line: each array of a Scratch begins with one
LONG = 8192  # keys that are summed before they are added to others; of 128
NO_BANDS, NO_CELLS, NO_GRIDS = (np.zeros(shape, np.int64) for shape in ((0, 0, 4), (0, 0, 0), (0, 14)))
NO_TILES = np.zeros((0, 5), np.int64)
NO_FRAME = All()  # a mask without segments
NO_MATRICES = NO_INTERVALS = Matrices(0, np.zeros((0, 0), np.int64), 0, 0, 1)
NO_SCALES = RowAddresses(0, np.zeros((0, 0), np.int64), 0, 0)
KINDS = {DTYPES[0]: FLOAT16, DTYPES[1]: BFLOAT16, eight_bits.INT8: INT8, eight_bits.FLOAT8: FLOAT8}
NO_DROPS = DropoutNumbers(*[np.uint64(0)] * 4, Origin())


def compact(x):
    """x with one element along each axis whose elements share memory."""
    if 0 not in x.strides:
        return x
    return x[tuple([slice(0, None if stride else 1) for stride in x.strides])]


def readable(x, dtype):
    """x itself if kernels can read its matrices in `dtype`, else a copy, with one matrix for those that share
    memory."""
    rows, cols = x.shape[-2:]
    row, col = x.strides[-2:]
    item = x.itemsize
    if x.dtype == dtype and (col == item or cols <= 1) and (row >= cols * item or rows <= 1) and x.flags.aligned:
        return x
    *lead, _, _ = compact(x).shape
    with np.errstate(under="ignore"):
        return x[tuple(map(slice, lead))].astype(dtype, order="C")


def matrices_of(x, problem):
    """The Matrices of an array (..., heads, rows, columns), broadcast to the problem's batch axes. Keep x alive."""
    return matrices(problem, x.shape, x.strides, x.itemsize)._replace(address=data_address(x))


def matrices(problem, shape, strides, itemsize):
    """The matrices of an array with this layout."""
    *_, rows, cols = shape
    offsets = offsets_of(shape[:-2], strides[:-2], problem.batch, problem.heads)
    return Matrices(HOLE, offsets, rows, cols, max(strides[-2] // itemsize, cols, 1))


def directions(problem, count, layout):
    """The Matrices of an array (count, ..., rows, columns) with this layout, (shape, strides): direction t and element
    b of the batch have number t * batches + b. None, which stands for zero, has no rows."""
    if layout is None:
        return NO_MATRICES
    (number, *own, rows, cols), (stride, *strides, row_stride, _) = layout
    batch = count, *(problem.batch or (1,))
    missing = len(batch) - 1 - len(own)
    offsets = offsets_of((number, *[1] * missing, *own), (stride, *[0] * missing, *strides), batch, problem.heads)
    return Matrices(HOLE, offsets, rows, cols, max(row_stride // problem.sum_dtype.itemsize, cols, 1))


def operands_of(problem, inputs, o, *lse):
    """The Record of q, k, v, o, and lse with its low part, if it is wanted."""
    q, cache = readable(inputs.q, problem.sum_dtype), inputs.cache
    k, of_k = _tokens_of(inputs.k, problem, cache, cache and cache.k_scale)
    v, of_v = _tokens_of(inputs.v, problem, cache, cache and cache.v_scale)
    of_q = None if q is inputs.q else (q.shape, q.strides)
    return _operands(problem, of_q, of_k, of_v, len(lse)).filled(q, *k, *v, o, *lse)


def _tokens_of(x, problem, cache, scale):
    """The arrays of the Tokens of k or v, (..., heads, tokens, features), or of a cache; and their layout, None if it
    is that of x."""
    given, x = x, readable(x, x.dtype)
    if cache is None:
        return (x,), None if x is given else (x.shape, x.strides)
    arrays, table, of_scale = [x], None, None
    if is_paged(problem):
        arrays.append(np.ascontiguousarray(cache.table))
        table = cache.table.shape
    if scale is not None:
        scale = cache._scale_of_tokens(scale)[..., None]
        arrays.append(scale)
        of_scale = scale.shape, scale.strides
    return arrays, (x.shape, x.strides, x.dtype, table, of_scale)


@lru_cache(maxsize=64)
def _operands(problem, q, k, v, saves):
    """The Record of calls on arrays of these layouts; None for those of the problem."""
    q, k, v = (found or (shape, strides) for found, shape, strides in zip((q, k, v), problem.shapes, problem.strides))
    rows, dtype = (*problem.matrices, problem.seqlen_q), problem.sum_dtype
    batches, heads = problem.matrices
    lse = Later((2 * batches, *rows[1:]), dtype) if saves else np.zeros((2 * batches, heads, 0), dtype)
    return Record(matrices(problem, *q, dtype.itemsize), _tokens(problem, *k), _tokens(problem, *v),
                  Later((*rows, problem.head_dim_v), dtype), lse)  # fmt: skip


def _tokens(problem, shape, strides, dtype=None, table=None, scale=None):
    """The Tokens of arrays with these layouts; a cache may have a dtype of its own, a table and scales."""
    dtype = dtype or problem.dtype
    kind, scales = KINDS.get(dtype, OF_SUMS), NO_SCALES if scale is None else _place(problem, *scale)
    if table is None:
        pages, page_size = np.zeros((problem.matrices[0], 1), np.int32), max(problem.seqlen_k, 1)
    else:
        pages, page_size = Later(table, np.int32), problem.cache.page_size
    return Tokens(_place(problem, shape, strides), kind, shape[-1], pages, page_size, scales)


def _place(problem, shape, strides):
    """The RowAddresses of an array (..., heads, rows, columns), or (pages, heads, rows, columns)."""
    axes = slice(1 if is_paged(problem) else 0, -2)
    offsets = offsets_of(shape[axes], strides[axes], problem.batch, problem.heads)
    return RowAddresses(HOLE, offsets, strides[0], strides[-2])


def is_paged(problem):
    return problem.cache is not None and problem.cache.page_size is not None


@lru_cache(maxsize=256)
def offsets_of(shape, strides, batch, heads):
    """Offsets of the matrices of an array with these batch axes; the heads of a group share one."""
    steps = [np.arange(size) * stride for size, stride in zip(shape, strides)] or [np.zeros(1, np.int64)]
    steps[-1] = np.repeat(steps[-1], heads // max(steps[-1].size, 1))
    batch = batch or (1,)
    offsets = np.broadcast_to(sum(np.ix_(*steps)), batch)
    # a copy: NumPy's broadcast arrays are read-only, for which Numba would compile other kernels
    return np.array(offsets.reshape(-1, heads) if offsets.size else np.zeros((0, heads)), np.int64, order="C")


def kept(function):
    """Decorate a function of a problem, of a mask's segments, and of more: its results are kept, unless the segments
    are arrays that may change."""
    known = lru_cache(maxsize=64)(function)

    def kept_or_new(problem, mask, *more):
        if not mask._has_frame:
            return known(problem, NO_FRAME, *more)
        return (known if mask._is_immutable else function)(problem, mask, *more)

    return kept_or_new


def tiles_of(problem, mask, tile_m):
    """The WorkTiles of a problem, of tile_m queries or fewer."""
    if mask._segments is not None:
        rows = mask._segments._rows(np.arange(problem.seqlen_q), problem.seqlen_k)
        return _tiles(problem.batch, rows, tile_m)
    tiles = _uncut_tiles(problem.batch, problem.seqlen_q, problem.seqlen_k, tile_m)
    return tiles if problem.cache is None else _tiles_of_cache(problem, tiles, mask._frame.keys)


@lru_cache(maxsize=64)
def _uncut_tiles(batch, seqlen_q, seqlen_k, tile_m):
    own = np.arange(seqlen_q) + seqlen_k - seqlen_q
    return _tiles(batch, QuerySegments(np.zeros(seqlen_q, np.int64), np.full(seqlen_q, seqlen_k), own), tile_m)


def _tiles_of_cache(problem, tiles, lengths):
    """The WorkTiles of a cache: each sequence is a segment, with `lengths` keys, (batch, 1)."""
    table, end = tiles.table.copy(), lengths[tiles.table[:, 0], 0]
    table[:, 5], table[:, 6] = end, end - problem.seqlen_q
    pairs = int(((table[:, 3] - table[:, 2]) * end).sum())
    return tiles._replace(table=table, pairs=pairs, longest=int(end.max(initial=0)))


def _tiles(batch, rows, tile_m):
    """The WorkTiles for queries in these QuerySegments."""
    *lead, seqlen_q = rows.own.shape
    rows = [x.reshape(math.prod(lead), seqlen_q) for x in rows]
    cuts = [_cut(*row, tile_m) for row in zip(*rows)]
    own = np.broadcast_to(np.arange(len(cuts)).reshape(lead), batch).ravel()  # the cut of each score matrix
    counts = np.array([len(cut) for cut in cuts], np.int64)[own]
    matrix, cut = np.repeat(np.arange(own.size), counts), np.concatenate([cuts[number] for number in own] or [NO_TILES])
    table = np.column_stack([*np.divmod(matrix, batch[-1] if batch else 1), cut])
    m0, m_end, first, end, _ = cut.T
    pairs, longest = int(((m_end - m0) * (end - first)).sum()), int((end - first).max(initial=0))
    return WorkTiles(table, np.append(0, np.cumsum(counts)), pairs, longest, bool(lead) and lead[-1] > 1)


def _cut(first, end, own, tile_m):
    """m0, m_end, first, end and offset of each tile of a row of queries, the last one first, which is the heaviest
    under a causal mask."""
    changes = np.flatnonzero((np.diff(first) != 0) | (np.diff(end) != 0)) + 1
    bounds = np.unique(np.concatenate([[0, first.size], changes]))
    counts = -(-np.diff(bounds) // tile_m)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a tile within its bounds
    m0 = np.repeat(bounds[:-1], counts) + tile_m * number
    m_end = np.minimum(m0 + tile_m, np.repeat(bounds[1:], counts))
    return np.stack([m0, m_end, first[m0], end[m0], own[m0] - m0], axis=-1)[::-1]


def mask_of(problem, mask):
    """The Record of the MaskArrays of a mask. Those of a cache are kept if they are small."""
    lasts = not mask._holds_arrays or (mask._is_immutable and problem.seqlen_q <= FEW)
    return _known_record_of(problem, mask) if lasts else _record_of(problem, mask)


def _record_of(problem, mask):
    mask = materialised(mask, problem.seqlen_q, problem.seqlen_k, NO_BANDS, also=lambda part: part._is_tail)
    if mask._parts and all(isinstance(part, Dense | Bits | BlockSparse) for part in mask._parts):
        grids = [_compact(grid) for grid in mask._grids()]
        layouts = [(x.shape, x.strides, rows, cols, packed) for x, rows, cols, packed, _ in grids]
        record, offsets = _record_of_cells(problem, *layouts)
        addresses = np.array([data_address(grid.cells) for grid in grids], np.int64)
        return record.filled(offsets + addresses[:, None, None], held=grids)
    mask, held = _mask_arrays(problem, mask)
    return Record(mask, held=held)


@lru_cache(maxsize=64)
def _record_of_cells(problem, *layouts):
    """The Record of a mask that is nothing but Grids with these layouts, and where in its cells each matrix begins."""
    offsets = [offsets_of(shape[:-2], strides[:-2], problem.batch, problem.heads) for shape, strides, *_ in layouts]
    numbers = [(*shape[-2:], *strides[-2:], rows, cols, packed, 255 * packed, *[0] * 6)
               for shape, strides, rows, cols, packed in layouts]  # fmt: skip
    whole = tuple(band_of((), problem.seqlen_q, problem.seqlen_k))
    cells = Later((len(layouts), *problem.matrices), np.int64)
    return Record(MaskArrays(whole, NO_BANDS, NO_INTERVALS, cells, np.array(numbers, np.int64))), np.stack(offsets)


_known_record_of = lru_cache(maxsize=64)(_record_of)


def _mask_arrays(problem, mask):
    """The MaskArrays, and the arrays whose addresses they hold."""
    band, bands = mask._band(problem.seqlen_q, problem.seqlen_k), NO_BANDS
    if not all(isinstance(number, int) for number in band):
        bands = np.empty((*problem.batch, 4), np.int64)
        for side, number in enumerate(band):
            bands[..., side] = number
        band, bands = (0, 0, 0, 0), bands.reshape(*problem.matrices, 4)
    if not problem.mask_kinds:
        return MaskArrays(tuple(band), bands, NO_INTERVALS, NO_CELLS, NO_GRIDS), ()
    intervals, alive = _intervals(problem, mask)
    if not (grids := mask._grids()):
        return MaskArrays(tuple(band), bands, intervals, NO_CELLS, NO_GRIDS), alive
    grids = [_compact(grid) for grid in grids]
    matrices = [matrices_of(grid.cells, problem) for grid in grids]
    cells = np.stack([x.address + x.offsets for x in matrices])
    functions = [_function_of(problem, grid) for grid in grids]
    numbers = [(*x.shape[-2:], *x.strides[-2:], rows, cols, packed, *own)
               for (x, rows, cols, packed, _), (own, _) in zip(grids, functions)]  # fmt: skip
    return MaskArrays(tuple(band), bands, intervals, cells, np.array(numbers, np.int64)), (alive, grids, functions)


def _function_of(problem, grid):
    """The value of wholly visible cells of a Grid, and the numbers of its function; and what has to live as long."""
    if grid.function is None:
        return (255 * grid.packed, *[0] * 6), None
    function, record = tile_function(grid.function, problem.sum_dtype), record_of(grid.function.arrays)
    at = grid.function._at
    numbers = FULL, function.address, data_address(record), at.query, at.key, at.batch, at.head
    return numbers, (function, record)


def _intervals(problem, mask):
    """The intervals of a mask and their gaps, as in MaskArrays, and the array to keep alive."""
    interval = mask._interval(np.arange(problem.seqlen_q), problem.seqlen_k)
    if interval is None:
        return NO_INTERVALS, None
    gaps = mask._gaps(np.arange(problem.seqlen_q), problem.seqlen_k)
    bounds = np.stack(np.broadcast_arrays(*interval, *(bound for gap in gaps for bound in gap)), axis=-2)
    bounds = readable(bounds, np.int64)  # stacked arrays keep the memory order of their parts
    return matrices_of(bounds, problem), bounds


def _compact(grid):
    """A Grid with a single row of cells, or column, in place of several that share memory."""
    cells, rows, cols, packed, function = grid
    if function is not None:
        return grid
    if cells.strides[-2] == 0 and cells.shape[-2] > 1:
        cells, rows = cells[..., :1, :], rows * cells.shape[-2]
    if cells.strides[-1] == 0 and cells.shape[-1] > 1 and not packed:
        cells, cols = cells[..., :1], cols * cells.shape[-1]
    return Grid(cells, rows, cols, packed)


@lru_cache(maxsize=64)
def numbers_of(dropout, origin, scale):
    """The Record of a Dropout or None, the scale of scores, and that of kept elements."""
    if dropout is None:
        return Record(NO_DROPS, scale, 1.0)
    return Record(DropoutNumbers(*map(np.uint64, dropout._numbers), origin), scale, dropout.scale)


@lru_cache(maxsize=64)
def scratch_of(problem, tile_m, tile_n, backward=False, slopes=0):
    """The Record of a Scratch, whose addresses count from its beginning, and a function that allocates its memory."""
    elements, dropped = tile_m * tile_n, tile_m * tile_n if problem.dropout else 0
    gathers = problem.dtype.itemsize == 2 or problem.cache is not None
    wide = tile_n * max(problem.head_dim, problem.head_dim_v) * gathers
    sizes = (elements, elements * backward, elements * slopes, tile_m * problem.head_dim,
             tile_m * problem.head_dim_v * backward, tile_m * problem.head_dim_v * (problem.seqlen_k > LONG),
             6 * tile_m)  # fmt: skip
    dtypes = *[problem.sum_dtype] * len(sizes), np.dtype(np.uint8), np.dtype(np.uint64), problem.sum_dtype
    return memory_of(Scratch, (*sizes, dropped, 2 * (tile_m + 16) if dropped else 0, wide), dtypes)


def memory_of(kind, sizes, dtypes):
    """The Record of a NamedTuple of this kind, of buffers with these numbers of elements, whose addresses count from
    the beginning of one memory; and a function that allocates that."""
    places, nbytes = [], 0
    for size, dtype in zip(sizes, dtypes, strict=True):
        places.append(At(nbytes, (size,), dtype))
        nbytes += -(-size * dtype.itemsize // LINE) * LINE
    return Record(kind(*places)), partial(fresh, nbytes)


def fresh(nbytes):
    """Memory of a thread, whatever is in it."""
    return np.empty(nbytes, np.uint8)

"""Tiles of queries, masks and dropout as kernels take them: one type for all."""

import math
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import numpy as np

from ..base.origin import Origin
from ..call.problem import Inputs
from ..masks import All, Bits, BlockSparse, Dense, Grid, QuerySegments, band_of, drawn, materialised, takers
from .function import record_of
from .operands import NO_MATRICES, Matrices, matrices_of, offsets_of, readable
from .record import Later, Record, data_address
from .tile import FULL
from .where import tile_function


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


FEW = 16  # queries of a tile, at most, that decode.py computes
LONG = 8192  # keys that are summed before they are added to others; of 128
NO_BANDS, NO_CELLS, NO_GRIDS = (np.zeros(shape, np.int64) for shape in ((0, 0, 4), (0, 0, 0), (0, 14)))
NO_TILES = np.zeros((0, 5), np.int64)
NO_FRAME = All()  # a mask without segments
ABSENT = None, None, None  # q, k and v
NO_DROPS = DropoutNumbers(*[np.uint64(0)] * 4, Origin())


def kept(function):
    """Decorate a function of a problem, of a mask's segments, and of more: its results are kept, unless the segments
    are arrays that may change."""
    known = lru_cache(maxsize=64)(function)

    def kept_or_new(problem, mask, *more):
        if not mask._has_frame:
            return known(problem, NO_FRAME, *more)
        return (known if mask._is_immutable else function)(problem, mask, *more)

    return kept_or_new


def known(function):
    """Decorate a function of a problem, of Inputs, of whose arrays it sees none, and of more: its results are kept if
    the options are nothing but numbers and a mask that lasts."""
    kept = lru_cache(maxsize=64)(lambda problem, options, *more: function(problem, Inputs(*ABSENT, *options), *more))

    @wraps(function)
    def known_or_new(problem, inputs, *more):
        if inputs.score or inputs.dropout or not lasts(problem, inputs.mask):
            return function(problem, inputs, *more)
        return kept(problem, (inputs.mask, inputs.scale, None, (), None, inputs.origin), *more)

    return known_or_new


def tiles_of(problem, mask, tile_m):
    """The WorkTiles of a problem, of tile_m queries or fewer."""
    if mask._segments is not None:
        rows = mask._segments._rows(np.arange(problem.seqlen_q), problem.seqlen_k)
        return _tiles(problem.batch, rows, tile_m)
    tiles = _uncut_tiles(problem.batch, problem.seqlen_q, problem.seqlen_k, tile_m)
    return tiles if problem.cache is None else _tiles_of_cache(problem, tiles, mask._frame._stored(problem.seqlen_k))


@kept
def record_of_tiles(problem, mask, tile_m):
    """These WorkTiles, and the Record of their table."""
    tiles = tiles_of(problem, mask, tile_m)
    return tiles, Record(tiles.table)


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


def lasts(problem, mask):
    """Whether what is made of a mask is kept: of one without arrays, and of that of a cache if it is small."""
    return not mask._holds_arrays or (mask._is_immutable and problem.seqlen_q <= FEW)


def mask_of(problem, mask):
    """The Record of the MaskArrays of a mask."""
    return (_known_record_of if lasts(problem, mask) else _record_of)(problem, mask)


def _record_of(problem, mask):
    if mask._placing is not None and takers(mask):
        mask = drawn(mask, problem.seqlen_q, problem.seqlen_k)
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
    return Record(MaskArrays(whole, NO_BANDS, NO_MATRICES, cells, np.array(numbers, np.int64))), np.stack(offsets)


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
        return MaskArrays(tuple(band), bands, NO_MATRICES, NO_CELLS, NO_GRIDS), ()
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
        return NO_MATRICES, None
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

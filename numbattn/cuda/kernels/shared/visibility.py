"""Which queries see which keys: the tiles that a block visits, which of them need a test per element, and that test.

A mask is a band, an interval of keys for each query, and some grids, see `numbattn.masks`. A block keeps one tile of
queries, or of keys, and loops over the tiles of the other side. "In sight" of its tile is what the band lets it see, a
range of keys, or of queries: where the loop starts and ends. Within it intervals and grids of blocks decide by the
states of tiles, one bit each, which the kernel `tile_states` has computed before (Algorithm 5); there `kept` is the
number of the block's own tile.

Only the kinds of a mask are compiled in: "lo", "hi", "queries" and "keys" where that edge of the band is an array, then
"dense", "bits", "blocks" or "tail" for each grid, "intervals", and "gap" for each gap in these; or "packed" alone, for
segments whose tiles are their own, see `segments`.
"""

from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numba.cuda import types

from ....masks import Bits, BlockSparse, Dense, Tail
from ...plan.arguments import Word
from ...plan.spec import SIDES
from ...plan.steps import END, FIRST, array_of_mask
from ...tile import (
    INDEX,
    cols_between,
    convert,
    device,
    has_bits,
    index,
    lowest_bit,
    maximum,
    minimum,
    row_index,
    shape,
    take,
    where,
)
from .layouts import places_of

GRIDS = {Dense: "dense", Bits: "bits", BlockSparse: "blocks", Tail: "tail"}
BY_INTERVALS, GAP, PACKED = "intervals", "gap", "packed"
WORD = 32  # tiles whose states are bits of one word
NOTHING = -1
FARTHEST = 2**30  # beyond all rows and columns; a farther shift of an edge means the same, see `edge_of`


class Cells(NamedTuple):
    """A grid: element (i, j) belongs to cell (i // rows, j // cols)."""

    cells: Any  # uint8 (batch, heads, rows of cells, columns of cells)
    rows: Any
    cols: Any


class Packing(NamedTuple):
    """Offsets of segments in packed arrays. Tokens before the first offset and behind the last one see nothing."""

    queries: Any  # offsets, int32 (batch, heads, count)
    keys: Any
    seqlen_q: Any  # of the packed arrays
    seqlen_k: Any
    lo: Any  # the band of each segment: query i sees key j only if lo <= j - (its own key) <= hi
    hi: Any


class Sight(NamedTuple):
    """A mask, as kernels take it. Key j is in the band of query i iff i + lo <= j <= i + hi, i < queries, j < keys."""

    lo: Any
    hi: Any
    queries: Any
    keys: Any
    edges: Any = ()  # int32 (batch, heads) for each edge that is an array: they narrow the band
    shifts: Any = ()  # added to lo and hi among them
    grids: Any = ()  # a Cells for each grid
    packing: Any = ()  # a Packing, where there is one
    intervals: Any = ()  # first and end, int32 (batch, heads, seqlen_q), where there are some: see kernels.intervals
    gaps: Any = ()  # of each gap in them first and end, likewise
    states: Any = ()  # of tiles, where there are blocks or intervals: see tile_states


class MaskWord(Word):
    """The fields of a Sight."""

    def flat(self, planner, work):
        yield from BAND.flat(planner, work)
        for number, sizes in enumerate(planner.call.grids):
            yield planner.at(f"cells {number}")
            yield from sizes
        yield from PACKING.flat(planner, work)
        if BY_INTERVALS in work.mask:
            yield from (planner.at(name, own=1) for name in (FIRST, END, *planner.names_of_gaps()))
        if has_states(work.mask):
            yield planner.at(planner.states)


class BandWord(Word):
    """The fields of a Sight of the band alone, see `band_kinds`."""

    def flat(self, planner, work):
        yield from SIDES
        for side in sides_of(work.mask):
            yield planner.at(side, own=0)
        for side in diagonals_of(work.mask):
            yield f"{side}_shift"


class PackingWord(Word):
    """The fields of a Packing where arrays are packed, else nothing."""

    def flat(self, planner, work):
        if PACKED in work.mask:
            yield from (planner.at(array_of_mask(0, which), own=1) for which in range(2))
            yield from (work.problem.seqlen_q, work.problem.seqlen_k, "own_lo", "own_hi")


MASK, BAND, PACKING = MaskWord(), BandWord(), PackingWord()
BYTES, WORDS = types.Array(types.uint8, 4, "A"), types.Array(types.uint32, 4, "A")
CELLS = types.NamedTuple([BYTES, INDEX, INDEX], Cells)
EDGE, LINE = types.Array(types.int32, 2, "A"), types.Array(types.int32, 3, "A")
DIAGONALS = SIDES[:2]  # lo and hi


def sides_of(mask):
    return [kind for kind in mask if kind in SIDES]


def band_kinds(mask):
    """Those of a mask's kinds that are of its band."""
    return tuple(sides_of(mask))


def has_band(problem):
    """Whether the mask has anything but grids."""
    return any(kind not in GRIDS for kind in problem.mask_kinds)


def diagonals_of(mask):
    return [kind for kind in mask if kind in DIAGONALS]


def grids_of(mask):
    return [kind for kind in mask if kind in GRIDS.values()]


def has_states(mask):
    """Whether it tells tiles apart that are empty, partial or full."""
    return "blocks" in mask or BY_INTERVALS in mask


def has_key_lengths(mask):
    """Whether keys end before their array does: there may be NaN behind them."""
    return "keys" in mask or PACKED in mask


def has_query_lengths(mask):
    return "queries" in mask or PACKED in mask


def is_looked_up(mask):
    """Whether what a query sees is looked up for each element."""
    return bool(grids_of(mask)) or BY_INTERVALS in mask


def several(kind, count):
    return types.UniTuple(kind, count) if count else types.Tuple(())


def packing_of(mask):
    """Those of a mask's kinds on which the place of tiles depends."""
    return (PACKED,) if PACKED in mask else ()


def packing_type(mask):
    """Of a Packing where there is one, in a tuple."""
    return several(types.NamedTuple([LINE, LINE, INDEX, INDEX, INDEX, INDEX], Packing), PACKED in mask)


def sight_type(mask):
    """The type of a Sight for a mask of these kinds."""
    sides, grids = sides_of(mask), grids_of(mask)
    return types.NamedTuple(
        [
            INDEX, INDEX, INDEX, INDEX,
            several(EDGE, len(sides)),
            several(INDEX, len(diagonals_of(mask))),
            several(CELLS, len(grids)),
            packing_type(mask),
            several(LINE, 2 * (BY_INTERVALS in mask)),
            several(LINE, 2 * mask.count(GAP)),
            several(WORDS, has_states(mask)),
        ],
        Sight,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- the band
@device
def same_band(sight, batch, head):
    return sight.lo, sight.hi, sight.queries, sight.keys


def edge_of(mask, side):
    """The device function (sight, batch, head, otherwise): an edge of a band, `otherwise` if it is no array."""
    sides, diagonals = sides_of(mask), diagonals_of(mask)
    at, shifted = (names.index(side) if side in names else None for names in (sides, diagonals))

    @device
    def same(sight, batch, head, otherwise):
        return otherwise

    @device
    def diagonal(sight, batch, head, otherwise):
        shift = sight.shifts[shifted]                   # clamped before the shift is added: no sum overflows
        edge = minimum(sight.edges[at][batch, head], sight.keys - shift)
        return maximum(edge, -sight.queries - shift) + shift    # a farther edge means the same

    @device
    def length(sight, batch, head, otherwise):
        return maximum(minimum(sight.edges[at][batch, head], otherwise), 0)

    return same if at is None else length if shifted is None else diagonal


def band_of(mask):
    """The device function (sight, batch, head) -> (lo, hi, queries, keys)."""
    if not sides_of(mask):
        return same_band
    lo_of, hi_of, queries_of, keys_of = (edge_of(mask, side) for side in SIDES)

    @device
    def own_band(sight, batch, head):
        return (
            maximum(sight.lo, lo_of(sight, batch, head, sight.lo)),
            minimum(sight.hi, hi_of(sight, batch, head, sight.hi)),
            queries_of(sight, batch, head, sight.queries),
            keys_of(sight, batch, head, sight.keys),
        )

    return own_band


@device
def keys_in_sight(band, m0, m_end):
    """The keys [first, end) in sight of queries [m0, m_end), neither bound negative."""
    lo, hi, queries, keys = band
    last = minimum(m_end, queries) - 1
    return maximum(m0 + lo, 0), maximum(minimum(last + hi + 1, keys), 0) if m0 <= last else 0


@device
def queries_in_sight(band, n0, n_end):
    """The queries [first, end) in sight of keys [n0, n_end), neither bound negative."""
    lo, hi, queries, keys = band
    last = minimum(n_end, keys) - 1
    return maximum(n0 - hi, 0), maximum(minimum(last - lo + 1, queries), 0) if n0 <= last else 0


@device
def in_band(band, m0, m_end, n0, n_end):
    """Whether every query of [m0, m_end) sees every key of [n0, n_end)."""
    lo, hi, queries, keys = band
    left, right = m_end - 1 + lo <= n0, n_end <= m0 + hi + 1
    return left and right and m_end <= queries and n_end <= keys


def band_test(layout, transposed):
    """The device function (band, m0, n0): which keys each query sees, in a tile from query m0 and key n0 on.

    The tile's rows are queries, or keys if it is transposed.
    """

    @device
    def queries_by_keys(band, m0, n0):
        lo, hi, queries, keys = band
        i = row_index(layout, m0)
        last = where(i < queries, minimum(i + hi, keys - 1), NOTHING)
        return cols_between(layout, n0, i + lo, last)

    @device
    def keys_by_queries(band, m0, n0):
        lo, hi, queries, keys = band
        j = row_index(layout, n0)
        last = where(j < keys, minimum(j - lo, queries - 1), NOTHING)
        return cols_between(layout, m0, j - hi, last)

    return keys_by_queries if transposed else queries_by_keys


# -------------------------------------------------------------------------------------------------------- the grids
def cell_test(g, kind):
    """The device function (sight, band, batch, head, i, j): whether grid number g shows keys j to queries i."""

    @device
    def dense(sight, band, batch, head, i, j):
        return has_bits(sight.grids[g].cells[batch, head], i, j, 0xFF)

    @device
    def bits(sight, band, batch, head, i, j):
        return has_bits(sight.grids[g].cells[batch, head], i, j >> 3, 1 << (j & 7))

    @device
    def blocks(sight, band, batch, head, i, j):
        cells, rows, cols = sight.grids[g]
        return has_bits(cells[batch, head], i // rows, j // cols, 0xFF)

    @device
    def tail(sight, band, batch, head, i, j):
        j = j - first_of_tail(band)
        return (j < 0) | bits(sight, band, batch, head, i, j)

    return {"dense": dense, "bits": bits, "blocks": blocks, "tail": tail}[kind]


@device
def first_of_tail(band):
    """The key of query 0, where each query has one: the last of the keys."""
    lo, hi, queries, keys = band
    return keys - queries


@device
def between(first, end, batch, head, i, j):
    """Whether keys j are from `first` of queries i on and before `end`."""
    _, _, seqlen_q = shape(first)
    i = minimum(i, seqlen_q - 1)
    return (take(first[batch, head], i) <= j) & (j < take(end[batch, head], i))


@device
def interval_test(sight, band, batch, head, i, j):
    """As a `cell_test`, whether the intervals show keys j to queries i."""
    return between(sight.intervals[0], sight.intervals[1], batch, head, i, j)


def gap_test(g):
    """The same for gap number g: whether keys are not in it."""

    @device
    def test(sight, band, batch, head, i, j):
        return ~between(sight.gaps[2 * g], sight.gaps[2 * g + 1], batch, head, i, j)

    return test


def both(one, other):
    @device
    def test(sight, band, batch, head, i, j):
        return one(sight, band, batch, head, i, j) & other(sight, band, batch, head, i, j)

    return test


def element_test(mask, layout, transposed=False):
    """The device function (sight, band, batch, head, m0, n0): as `band_test`, for the whole mask."""
    tests = [cell_test(g, kind) for g, kind in enumerate(grids_of(mask))] + [interval_test] * (BY_INTERVALS in mask)
    tests += map(gap_test, range(mask.count(GAP)))
    seen_in_band = band_test(layout, transposed)
    if not tests:

        @device
        def band_only(sight, band, batch, head, m0, n0):
            return seen_in_band(band, m0, n0)

        return band_only

    places, seen_by_others = places_of(transposed), reduce(both, tests)

    @device
    def test(sight, band, batch, head, m0, n0):
        i, j = places(layout, m0, n0)
        return seen_in_band(band, m0, n0) & seen_by_others(sight, band, batch, head, i, j)

    return test


# -------------------------------------------------------------------------------------------------------- the tiles
@device
def every_tile(sight, batch, head, kept, tile, count):
    return 0


@device
def next_tile(sight, batch, head, kept, tile, count):
    """How many tiles, from this one on, are empty before the first that is not; `count` if all of them are."""
    steps, found = index(0), False
    while steps < count and not found:
        at = tile + steps
        step = lowest_bit(states_from(sight, batch, head, kept, at, 0))
        found = step < WORD
        steps = steps + (step if found else WORD - at % WORD)
    return minimum(steps, count)


@device
def states_from(sight, batch, head, kept, tile, which):
    """The bits of a tile, the lowest, and of those after it in its word. which: 0 for not empty, 1 for full."""
    word = sight.states[0][batch, head, kept, 2 * (tile // WORD) + which]
    return np.uint32(word >> convert(tile % WORD, np.uint32))


@device
def has_state(sight, batch, head, kept, tile, which):
    return (states_from(sight, batch, head, kept, tile, which) & np.uint32(1)) != 0


def is_shown(mask):
    """The device function (sight, batch, head, kept, tile): whether states do not say that a tile is empty."""

    @device
    def by_states(sight, batch, head, kept, tile):
        return has_state(sight, batch, head, kept, tile, 0)

    @device
    def without_states(sight, batch, head, kept, tile):
        return True

    return by_states if has_states(mask) else without_states


def steps_to_next(mask):
    return next_tile if has_states(mask) else every_tile


def needs_test(mask):
    """The device function that tells whether a tile in sight needs a test per element."""
    if "dense" in mask or "bits" in mask:

        @device
        def always(sight, band, batch, head, kept, tile, m0, m_end, n0, n_end):
            return True

        return always

    @device
    def partial(sight, band, batch, head, kept, tile, m0, m_end, n0, n_end):
        whole = has_state(sight, batch, head, kept, tile, 1)
        return not (whole and in_band(band, m0, m_end, n0, n_end))

    @device
    def across_an_edge(sight, band, batch, head, kept, tile, m0, m_end, n0, n_end):
        return not in_band(band, m0, m_end, n0, n_end)

    tested = partial if has_states(mask) else across_an_edge

    @device
    def in_tail(sight, band, batch, head, kept, tile, m0, m_end, n0, n_end):
        return n_end > first_of_tail(band) or tested(sight, band, batch, head, kept, tile, m0, m_end, n0, n_end)

    return in_tail if "tail" in mask else tested

"""A mask as kernels take it, its kinds, and the types and arguments of kernels that follow from these."""

from typing import Any, NamedTuple

from .....masks import Bits, BlockSparse, Dense, Tail
from .....masks.where import Where
from ....compiler import types
from ....tile import INDEX
from ....words.arguments import Argument
from ....words.numbers import SIDES
from ....words.signatures import several
from ....words.steps import END, FIRST, array_of_grid, array_of_mask
from .function import FUNCTION, arrays_of, function_type, has_functions, is_function

GRIDS = {Dense: "dense", Bits: "bits", BlockSparse: "blocks", Tail: "tail", Where: FUNCTION}
BY_INTERVALS, GAP, PLACED, PACKED = "intervals", "gap", "placed", "packed"
FARTHEST = 2**30  # beyond all rows and columns: larger shifts of an edge mean the same, see `edge_of`


class Cells(NamedTuple):
    """A grid: element (i, j) belongs to cell (i // rows, j // cols)."""

    cells: Any  # uint8 (batch, heads, rows of cells, columns of cells)
    rows: Any
    cols: Any


class Packing(NamedTuple):
    """Offsets of segments in packed arrays. Tokens before the first offset and after the last one see nothing."""

    queries: Any  # offsets, int32 (batch, heads, count)
    keys: Any
    seqlen_q: Any  # of the packed arrays
    seqlen_k: Any
    lo: Any  # the band of each segment: query i sees key j only if lo <= j - (its own key) <= hi
    hi: Any


class MaskArgs(NamedTuple):
    """A mask, as kernels take it. Key j is in the band of query i iff i + lo <= j <= i + hi, i < queries, j < keys."""

    lo: Any
    hi: Any
    queries: Any
    keys: Any
    edges: Any = ()  # int32 (batch, heads) for each edge that is an array: they narrow the band
    shifts: Any = ()  # what to add to lo and hi among these
    grids: Any = ()  # a Cells for each grid, or a Function
    packing: Any = ()  # a Packing, if arrays are packed
    intervals: Any = ()  # first and end, int32 (batch, heads, seqlen_q), if there are any: see any.intervals
    gaps: Any = ()  # first and end of each gap in these, likewise
    depths: Any = ()  # int32 (batch, heads, seqlen_q), if intervals are of positions: see masks.Positions
    states: Any = ()  # of tiles, with blocks, functions or intervals: see tile_states


class MaskArgument(Argument):
    """The fields of a MaskArgs."""

    def flat(self, planner, work):
        yield from BAND.flat(planner, work)
        for number, (kind, rows, cols, at) in enumerate(planner.call.mask.grids):
            yield from (planner.at(f"cells {number}"), rows, cols)
            if is_function(kind):
                yield from ("first", *at, work.problem.seqlen_q, work.problem.seqlen_k)
                yield from (planner.whole(array_of_grid(number, which)) for which, _ in enumerate(arrays_of(kind)))
        yield from PACKING.flat(planner, work)
        if BY_INTERVALS in work.mask:
            yield from (planner.at(name, own=1) for name in (FIRST, END, *planner.names_of_gaps()))
        if PLACED in work.mask:
            yield planner.at(planner.depths, own=1)
        if has_states(work.mask):
            yield planner.at(planner.states)

    def type(self, about):
        return mask_type(about.mask)


class BandArgument(Argument):
    """The fields of a MaskArgs for the band alone, see `band_kinds`."""

    def flat(self, planner, work):
        yield from SIDES
        for side in sides_of(work.mask):
            yield planner.at(side, own=0)
        for side in diagonals_of(work.mask):
            yield f"{side}_shift"

    def type(self, about):
        return mask_type(band_kinds(about.mask))


class PackingArgument(Argument):
    """The fields of a Packing if arrays are packed, else nothing."""

    def flat(self, planner, work):
        if PACKED in work.mask:
            yield from (planner.at(array_of_mask(0, which), own=1) for which in range(2))
            yield from (work.problem.seqlen_q, work.problem.seqlen_k, "own_lo", "own_hi")

    def type(self, about):
        return packing_type(about.mask)


MASK, BAND, PACKING = MaskArgument(), BandArgument(), PackingArgument()
BYTES, WORDS = types.Array(types.uint8, 4, "A"), types.Array(types.uint32, 4, "A")
CELLS = types.NamedTuple([BYTES, INDEX, INDEX], Cells)
EDGE, LINE = types.Array(types.int32, 2, "A"), types.Array(types.int32, 3, "A")
DIAGONALS = SIDES[:2]  # lo and hi


def sides_of(mask):
    return [kind for kind in mask if kind in SIDES]


def band_kinds(mask):
    """The kinds that belong to a mask's band."""
    return tuple(sides_of(mask))


def has_band(problem):
    """Whether the mask has anything but grids."""
    return any(kind not in GRIDS for kind in problem.mask_kinds)


def diagonals_of(mask):
    return [kind for kind in mask if kind in DIAGONALS]


def grids_of(mask):
    return [kind for kind in mask if kind.partition(" ")[0] in GRIDS.values()]


def has_blocks(kind):
    """Whether a grid of this kind says which blocks are empty."""
    return kind == "blocks" or is_function(kind)


def has_states(mask):
    """Whether the mask's tiles have states: empty, partial or full."""
    return BY_INTERVALS in mask or any(map(has_blocks, mask))


def has_key_lengths(mask):
    """Whether keys may end before their array does, with NaN after them."""
    return "keys" in mask or PACKED in mask


def has_query_lengths(mask):
    return "queries" in mask or PACKED in mask


def is_looked_up(mask):
    """Whether the mask is looked up for each element."""
    return bool(grids_of(mask)) or BY_INTERVALS in mask


def packing_of(mask):
    """The kinds that the place of tiles depends on."""
    return (PACKED,) if PACKED in mask else ()


def packing_type(mask):
    """The Numba type of a Packing where there is one, in a tuple."""
    return several(types.NamedTuple([LINE, LINE, INDEX, INDEX, INDEX, INDEX], Packing), PACKED in mask)


def grids_type(mask):
    """The type of a tuple of Cells and Functions."""
    kinds = grids_of(mask)
    if not has_functions(mask):
        return several(CELLS, len(kinds))
    return types.Tuple.from_types([function_type(kind, BYTES) if is_function(kind) else CELLS for kind in kinds])


def mask_type(mask):
    """The type of a MaskArgs for a mask of these kinds."""
    sides = sides_of(mask)
    return types.NamedTuple(
        [
            INDEX, INDEX, INDEX, INDEX,
            several(EDGE, len(sides)),
            several(INDEX, len(diagonals_of(mask))),
            grids_type(mask),
            packing_type(mask),
            several(LINE, 2 * (BY_INTERVALS in mask)),
            several(LINE, 2 * mask.count(GAP)),
            several(LINE, PLACED in mask),
            several(WORDS, has_states(mask)),
        ],
        MaskArgs,
    )  # fmt: skip

"""The tests of a tile's elements: the band, the cells of grids, intervals and gaps in them."""

from functools import reduce

from ....tile import device, has_bits, maximum, minimum, shape, take, where
from ..layouts import places_of
from .args import BY_INTERVALS, GAP, PLACED, grids_of, is_looked_up
from .band import band_test
from .boxes import axes_of, boxes_test
from .function import function_test, is_function


def cell_test(g, kind):
    """The device function (mask, band, batch, head, i, j) -> whether grid number g shows keys j to queries i."""

    @device
    def dense(mask, band, batch, head, i, j):
        return has_bits(mask.grids[g].cells[batch, head], i, j, 0xFF)

    @device
    def bits(mask, band, batch, head, i, j):
        return has_bits(mask.grids[g].cells[batch, head], i, j >> 3, 1 << (j & 7))

    @device
    def blocks(mask, band, batch, head, i, j):
        cells, rows, cols = mask.grids[g]
        return has_bits(cells[batch, head], i // rows, j // cols, 0xFF)

    @device
    def tail(mask, band, batch, head, i, j):
        j = j - first_of_tail(band)
        return (j < 0) | bits(mask, band, batch, head, i, j)

    return {"dense": dense, "bits": bits, "blocks": blocks, "tail": tail}[kind]


@device
def first_of_tail(band):
    """The key of query 0, if the last keys are the queries' own."""
    lo, hi, queries, keys = band
    return keys - queries


@device
def between(first, end, batch, head, i, j):
    """Whether keys j are in [first, end) of queries i."""
    _, _, seqlen_q = shape(first)
    i = minimum(i, seqlen_q - 1)
    return (take(first[batch, head], i) <= j) & (j < take(end[batch, head], i))


@device
def interval_test(mask, band, batch, head, i, j):
    """Whether the intervals show keys j to queries i, as a `cell_test`."""
    return between(mask.intervals[0], mask.intervals[1], batch, head, i, j)


def gap_test(g):
    """The `cell_test` of gap number g: whether keys are outside of it."""

    @device
    def test(mask, band, batch, head, i, j):
        return ~between(mask.gaps[2 * g], mask.gaps[2 * g + 1], batch, head, i, j)

    return test


def at_positions(seen):
    """A `cell_test` of positions as one of keys."""

    @device
    def test(mask, band, batch, head, i, j):
        depths, first = mask.depths[0][batch, head], first_of_tail(band)
        row = minimum(maximum(j - first, 0), shape(depths)[0] - 1)
        return seen(mask, band, batch, head, i, where(j < first, j, first + take(depths, row)))

    return test


def both(one, other):
    @device
    def test(mask, band, batch, head, i, j):
        return one(mask, band, batch, head, i, j) & other(mask, band, batch, head, i, j)

    return test


def element_test(mask, layout, transposed=False):
    """The device function (mask, band, batch, head, m0, n0): `band_test` for the whole mask."""
    seen_in_band = band_test(layout, transposed)
    if not is_looked_up(mask):

        @device
        def band_only(mask, band, batch, head, m0, n0):
            return seen_in_band(band, m0, n0)

        return band_only

    looked_up = looked_up_test(mask, layout, transposed)

    @device
    def test(mask, band, batch, head, m0, n0):
        return seen_in_band(band, m0, n0) & looked_up(mask, band, batch, head, m0, n0)

    return test


def looked_up_test(mask, layout, transposed=False):
    """`element_test` for the mask without its band."""
    grids = list(enumerate(grids_of(mask)))
    tests = [cell_test(g, kind) for g, kind in grids if not is_function(kind)]
    by_intervals = [*[interval_test] * (BY_INTERVALS in mask), *map(gap_test, range(mask.count(GAP)))]
    tests += [at_positions(reduce(both, by_intervals))] if PLACED in mask else by_intervals
    functions = [(boxes_test if axes_of(kind) else function_test)(g, kind, layout, transposed)
                 for g, kind in grids if is_function(kind)]  # fmt: skip
    if not tests:
        return reduce(both, functions)
    return reduce(both, [at_places(reduce(both, tests), layout, transposed), *functions])


def at_places(seen, layout, transposed):
    """A test of queries and keys as one of a tile."""
    places = places_of(transposed)

    @device
    def test(mask, band, batch, head, m0, n0):
        i, j = places(layout, m0, n0)
        return seen(mask, band, batch, head, i, j)

    return test

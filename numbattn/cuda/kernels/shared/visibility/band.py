"""The band: its edges for a matrix, what a tile sees, and the test of its elements."""

from ....tile import cols_between, device, maximum, minimum, row_index, where
from ....words.numbers import SIDES
from .args import diagonals_of, sides_of

NOTHING = -1


@device
def same_band(mask, batch, head):
    return mask.lo, mask.hi, mask.queries, mask.keys


def edge_of(mask, side):
    """The device function (mask, batch, head, otherwise) -> an edge of a band, or `otherwise` if it is not an array."""
    sides, diagonals = sides_of(mask), diagonals_of(mask)
    at, shifted = (names.index(side) if side in names else None for names in (sides, diagonals))

    @device
    def same(mask, batch, head, otherwise):
        return otherwise

    @device
    def diagonal(mask, batch, head, otherwise):
        shift = mask.shifts[shifted]                   # clamped before the shift is added: no sum overflows
        edge = minimum(mask.edges[at][batch, head], mask.keys - shift)
        return maximum(edge, -mask.queries - shift) + shift    # an edge farther away means the same

    @device
    def length(mask, batch, head, otherwise):
        return maximum(minimum(mask.edges[at][batch, head], otherwise), 0)

    return same if at is None else length if shifted is None else diagonal


def band_of(mask):
    """The device function (mask, batch, head) -> (lo, hi, queries, keys)."""
    if not sides_of(mask):
        return same_band
    lo_of, hi_of, queries_of, keys_of = (edge_of(mask, side) for side in SIDES)

    @device
    def own_band(mask, batch, head):
        return (
            maximum(mask.lo, lo_of(mask, batch, head, mask.lo)),
            minimum(mask.hi, hi_of(mask, batch, head, mask.hi)),
            queries_of(mask, batch, head, mask.queries),
            keys_of(mask, batch, head, mask.keys),
        )

    return own_band


@device
def visible_keys(band, m0, m_end):
    """The keys [first, end) visible to queries [m0, m_end), neither bound negative."""
    lo, hi, queries, keys = band
    last = minimum(m_end, queries) - 1
    return maximum(m0 + lo, 0), maximum(minimum(last + hi + 1, keys), 0) if m0 <= last else 0


@device
def visible_queries(band, n0, n_end):
    """The queries [first, end) that see keys [n0, n_end), neither bound negative."""
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
    """The device function (band, m0, n0) -> which keys each query sees, in a tile from query m0 and key n0 on.

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

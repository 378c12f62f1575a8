"""The windows of a grid as a test of whole tiles: the function of numbattn.grids.visibility, on fragments of int32."""

from ....tile import Alignment, aligned, device, load

FIELDS = "fields"
VECTORS = Alignment(16)  # of the words of tokens, of which there are whole tiles


def fields_of(kind):
    """The guards, and whether tokens have two windows, and whether there are extra tokens, of a function with such a
    test; None for others."""
    name, _, about = kind.rpartition(" ")[-1].partition("=")
    if name != FIELDS:
        return None
    guards, wraps, has_extra = map(int, about.split(","))
    return guards, bool(wraps), bool(has_extra)


def has_boxes(mask):
    """Whether tokens are in the order of boxes of a grid."""
    return any(map(fields_of, mask))


def fields_test(g, kind, layout, transposed):
    """The device function (mask, band, batch, head, m0, n0): `element_test` for grid number g."""
    (GUARDS, WRAPS, HAS_EXTRA), ROWS, COLS = fields_of(kind), layout.row_vector(), layout.col_vector()

    @device
    def of_rows(words, which, first):
        return load(words[which], ROWS, first)

    @device
    def of_cols(words, which, first):
        return load(aligned(words[:, first:], VECTORS), COLS, which)

    of_queries, of_keys = (of_cols, of_rows) if transposed else (of_rows, of_cols)

    @device
    def inside(at, words, window, m0):
        return (at - of_queries(words, window, m0)) & (of_queries(words, window + 1, m0) - at)

    @device
    def test(mask, band, batch, head, m0, n0):
        (words,) = mask.grids[g].arrays
        at = of_keys(words, 0, n0)
        found = inside(at, words, 1, m0)
        if WRAPS:
            found = found | inside(at, words, 3, m0)
        shown = (found & GUARDS) == GUARDS
        if HAS_EXTRA:
            shown = shown | ((at & of_queries(words, 2, m0)) < 0)
        return shown

    return test

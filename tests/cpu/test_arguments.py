"""Tiles of queries, and masks."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

import numbattn as na
from numbattn.call.problem import describe
from numbattn.cpu import arguments


def test_what_a_mask_lowers_to_is_kept():
    """Beside a cache by its lengths, which all layers share; of many queries, where it is large, it is not."""
    def lowered(seqlen_q, lengths):
        cache = na.KVCache(*np.zeros((2, 2, 2, 90, 8)), np.array(lengths, np.int32))
        problem, inputs = describe(np.zeros((2, 4, seqlen_q, 8)), cache, None, mask=mask)
        return arguments.mask_of(problem, inputs.mask).arguments[0]

    mask = na.Causal() & (na.Window(9, 0) | na.Lengths(keys=2))
    first = lowered(1, [20, 30])
    assert first.bands[:, 0, 3].tolist() == [20, 30]
    assert lowered(1, [20, 30]) is first
    assert lowered(1, [20, 31]).bands[:, 0, 3].tolist() == [20, 31]
    assert lowered(30, [30, 40]) is not lowered(30, [30, 40])


OFFSETS = st.lists(st.integers(0, 300), min_size=2, max_size=9).map(sorted)


@given(st.lists(OFFSETS, min_size=3, max_size=3))
@example([[10, 11, 12, 13]] * 3)            # the keys 5 to 5, 5 to 6 and 6 to 6
def test_tiles(offsets):
    """Of three segmentations: every query is in one tile, and every tile in one segment, whose keys are the tile's."""
    size = min(map(len, offsets))
    queries = np.array([row[:size] for row in offsets])[:, None]
    q = np.zeros((3, 2, 300, 1))
    problem, inputs = describe(q, q, q, mask=na.Segments(queries, queries // 2))
    tiles = arguments.tiles_of(problem, inputs.mask, 32)
    visible, found = inputs.mask.dense(300, 300), np.zeros((3, 2, 300), int)
    pairs = 0
    for batch, head in np.ndindex(3, 2):
        for row in tiles.table[tiles.starts[2 * batch + head] : tiles.starts[2 * batch + head + 1]]:
            assert tuple(row[:2]) == (batch, head)
            m0, m_end, first, end, offset = row[2:]
            assert 0 < m_end - m0 <= 32
            found[batch, head, m0:m_end] += 1
            keys = np.arange(300)
            np.testing.assert_array_equal(visible[batch, 0, m0:m_end], [(first <= keys) & (keys < end)] * (m_end - m0))
            if first < end:                             # its last key is that of the segment's last query
                ends = queries[batch, 0].tolist()
                assert offset == end - next(x for x in ends if x >= m_end)
            pairs += visible[batch, 0, m0:m_end].sum()
    assert (found == 1).all()
    assert tiles.pairs == pairs


def test_tiles_without_segments():
    problem, inputs = describe(np.zeros((2, 70, 1)), *np.zeros((2, 2, 90, 1)), causal=True)
    tiles = arguments.tiles_of(problem, inputs.mask, 32)
    rows = [(64, 70, 0, 90, 20), (32, 64, 0, 90, 20), (0, 32, 0, 90, 20)]       # the heaviest first
    np.testing.assert_array_equal(tiles.table, [(0, head, *row) for head in range(2) for row in rows])
    assert tiles.starts.tolist() == [0, 3, 6]


FAULTS = {
    "caches/test_kv_cache.py::test_lengths_may_be_edited_in_place": {
        "(inputs.mask, inputs.scale, None, (), None, inputs.origin)":
            "(inputs.mask._within or NO_FRAME, inputs.scale, None, (), None, inputs.origin)",
    },
    " and problem.seqlen_q <= FEW)": ")",
    "(mask._is_immutable and": "(False and",
    ("cpu/test_arguments.py", "cpu/test_tile.py::test_grids", "cpu/test_tile.py::test_draw"): {
        "cells, rows = cells[..., :1, :], rows * cells.shape[-2]": "cells = cells[..., :1, :]",
        "cells[..., :1], cols * cells.shape[-1]": "cells[..., :1], cols",
        "np.minimum(m0 + tile_m, np.repeat(bounds[1:], counts))": "m0 + tile_m",
        "(np.diff(first) != 0) | (np.diff(end) != 0)": "np.diff(first) != 0",
        "(m_end - m0) * (end - first)": "(m_end - m0 + 1) * (end - first)",
        "own[m0] - m0], axis=-1)[::-1]": "own[m0] - m0], axis=-1)",
        "batch[-1] if batch else 1), cut": "1), cut",
    },
    ("caches/test_kv_cache.py::test_8_bits[16-1-int8]", "caches/test_kv_cache.py::test_8_bits[None-1-int8]"): {
        "end = tiles.table.copy(), lengths[tiles.table[:, 0], 0]": "end = tiles.table.copy(), 0 * tiles.table[:, 0]",
    },
    (
        "cpu/test_record.py::test_what_is_kept_keeps_no_array_of_a_mask",
        "cpu/test_record.py::test_arrays_of_masks_and_scores_are_read_anew",
    ): {
        "return known(problem, NO_FRAME, *more)": "return known(problem, mask, *more)",
        "known if mask._is_immutable else function": "known",
    },
}

"""Layouts deal out every element exactly once, but for the copies that they own up to."""

import numpy as np
import pytest

from numbattn.cuda.tile import ONE, Axis, copy_layout, mma, simt

LAYOUTS = [
    simt(64, 64, 128, 8, 1),
    simt(64, 128, 256, 16, 4),
    simt(128, 64, 128, 8, 4, row_vector=4),
    copy_layout(64, 96, 128, 8),
    copy_layout(16, 80, 256, 4),
    copy_layout(4, 8, 128, 4),
    mma(128, 48, 128),
    mma(64, 256, 128),
    mma(64, 48, 128, across=2),
    mma(16, 16, 128, across=4),
]


def holders(layout):
    """How many registers of how many threads hold each element."""
    count = np.zeros(layout.shape, int)
    for thread in range(layout.threads):
        rows = layout.rows.base(thread) + np.array(layout.rows.offsets)
        cols = layout.cols.base(thread) + np.array(layout.cols.offsets)
        np.add.at(count, (rows[:, None], cols[None, :]), 1)
    return count


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_has_one_holder_and_its_copies(layout):
    assert (holders(layout) == 1 << len(layout.idle_bits())).all()


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[6]], ids=str)
def test_vectors_parts_and_coarser_layouts(layout):
    lanes = 1 << len(layout.row_lane_bits())
    assert (holders(layout.row_vector()) == lanes << len(layout.idle_bits())).all()
    assert layout.row_vector().cols == layout.col_vector().rows == ONE
    assert layout.row_parts().shape == (layout.rows.size, lanes)
    assert (holders(layout.row_parts()) == 1 << len(layout.idle_bits())).all()
    coarse = holders(layout.without(rows=8, cols=9))
    i, j = np.indices(layout.shape)
    np.testing.assert_array_equal(coarse > 0, (i & 8 == 0) & (j & 9 == 0))


def test_mma_is_the_accumulator_of_mma_sync_and_wgmma():
    layout = mma(64, 32, 128)
    for thread in 0, 5, 37, 127:
        for i in range(16):
            r, c = i >> 1 & 1, 2 * (i >> 2) + (i & 1)  # register i of wgmma is this row and column slot
            row = layout.rows.base(thread) + layout.rows.offsets[r]
            col = layout.cols.base(thread) + layout.cols.offsets[c]
            assert row == 16 * (thread // 32) + thread % 32 // 4 + 8 * (i >> 1 & 1)
            assert col == 8 * (i >> 2) + 2 * (thread % 4) + (i & 1)


@pytest.mark.parametrize(
    ("axis", "run", "period"),
    [(mma(16, 80, 32).cols, 2, 8), (simt(8, 64, 32, 4, 4).cols, 4, 16), (simt(8, 16, 32, 4, 4).cols, 4, 16)],
    ids=["mma", "simt", "one run"],
)
def test_runs_come_in_periods(axis, run, period):
    assert (axis.run, axis.period) == (run, period)
    assert axis.offsets == tuple(slot // run * period + slot % run for slot in range(axis.slots))


def test_warps_share_rows_of_mma():
    layout = mma(32, 64, 128, across=2)
    assert not layout.has_whole_rows
    assert layout.rows == mma(32, 64, 64).rows
    for thread in range(128):
        warp = thread // 32
        assert layout.rows.base(thread) // 16 == warp % 2
        assert layout.cols.base(thread) // 8 == warp // 2
    assert mma(32, 8, 128, across=2).has_whole_rows             # both hold them


def test_runs_are_as_wide_as_can_be():
    assert [len(run) for run in Axis(32, ((0, 2, 4),), (0, 1, 2, 3, 16, 17, 18, 19)).runs(4)] == [4, 4]
    assert [len(run) for run in Axis(32, ((0, 2, 4),), (0, 1, 2, 3, 16, 17, 18, 19)).runs(2)] == [2] * 4
    assert [len(run) for run in Axis(32, ((0, 2, 2),), (0, 1, 8, 9)).runs(4)] == [2, 2]
    assert [len(run) for run in Axis(32, ((0, 3, 1),), (0, 8)).runs(4)] == [1, 1]


def test_neighbours_in_two_lanes():
    assert [layout.neighbours_lane() for layout in LAYOUTS] == [8, 16, None, 4, 4, 2, 4, 4, 4, 4]
    assert simt(8, 256, 64, 32, 4).neighbours_lane() is None        # in two warps


def test_half_an_axis():
    assert mma(64, 64, 128).cols.half() == mma(64, 32, 128).cols
    with pytest.raises(TypeError, match="lie in different registers"):
        simt(64, 64, 128, 8, 8).cols.half()


def test_rows_of_two_warps_have_no_reductions():
    with pytest.raises(TypeError, match="not held by one warp"):
        copy_layout(8, 256, 64, 4).row_parts()


def test_what_cannot_be_dealt():
    with pytest.raises(ValueError, match="96 is no multiple of 16 runs of 4"):
        simt(64, 96, 256, 16, 4)
    with pytest.raises(ValueError, match="power of two"):
        simt(64, 64, 96, 8, 4)


@pytest.mark.parametrize("queries", [1, 4, 16])
def test_a_folded_layout_counts_within_each_tile(queries):
    layout = mma(16, 8, 32).folded(queries)
    for thread in range(32):
        rows = layout.rows.base(thread) + np.array(layout.rows.offsets)
        for axis, wanted in ((layout.rows.within, rows % queries), (layout.rows.outside, rows // queries)):
            assert (axis.base(thread) + np.array(axis.offsets)).tolist() == wanted.tolist()


FAULTS = {
    "self._picked(0, self.fold) if self.fold": "self._picked(0, self.size) if self.fold",
    "self._picked(log2(self.fold), self.size)": "self._picked(0, self.size)",
    "offset % end >> low": "offset % end",
}

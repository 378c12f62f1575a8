"""Row and column numbers, which broadcast, and which columns lie between the ends of their rows: on every layout."""

import numpy as np
import pytest

from numbattn.cuda.tile import col_index, cols_between, convert, load, mma, row_index, save, simt
from tests.tools.launch import launch

from .tiles import LAYOUTS, THREADS, each_layout, run


@each_layout
def test_vectors_broadcast(layout):
    def kernel(z):
        i, j = row_index(layout, 100), col_index(layout, 7)
        save(z, i * 1000 + j, 0)

    want = (100 + np.arange(32))[:, None] * 1000 + 7 + np.arange(32)
    np.testing.assert_array_equal(run(kernel, out=np.int32), want)


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS.values(), mma(32, 80, THREADS), simt(32, 160, THREADS, 2, 4), simt(32, 8, THREADS, 2, 4)],
    ids=[*LAYOUTS, "mma of 80 columns", "80 columns a thread", "one run a thread"],
)
def test_columns_between_ends_of_each_row(layout):
    ROWS, START = layout.row_vector(), np.int32(100)

    def kernel(ends, y):
        first, last = load(ends[0], ROWS, 0), load(ends[1], ROWS, 0)
        save(y, convert(cols_between(layout, START, first, last), np.int32), 0)

    cols = layout.cols.size
    far = [(-(2**30), 2**30), (2**30, -(2**30)), (100, 99 + cols), (101, 98 + cols), (99, 99), (100, 100)]
    ends = np.random.default_rng(0).integers(90, 110 + cols, (2, 32)).astype(np.int32)
    ends[:, : len(far)] = np.transpose(far)
    y, j = np.full((32, cols), 7, np.int32), np.arange(100, 100 + cols)
    launch(kernel, (1, 1, 1), THREADS, 0, ends, y)
    np.testing.assert_array_equal(y, (j >= ends[0][:, None]) & (j <= ends[1][:, None]))

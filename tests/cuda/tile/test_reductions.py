"""Sums and maxima along the rows: on every layout."""

import numpy as np
import pytest

from numbattn.cuda.tile import anywhere, full, load, part_argmin, part_sum, row_max, row_sum, save, simt, where
from tests.tools.launch import compiled_only, launch, poisoned, ptx_of

from .tiles import SHAPE, THREADS, each_layout, numbers


@each_layout
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_along_the_rows(layout, dtype):
    ROWS, PARTS, ZERO = layout.row_vector(), layout.row_parts(), dtype(0)

    def kernel(x, seed, top, total, parts):
        X, start = load(x, layout, 0), load(seed, ROWS, 0)
        save(top, row_max(X, start), 0)
        save(total, row_sum(X, start), 0)
        twice = part_sum(X, part_sum(X, full(PARTS, ZERO)) * start)
        save(parts, row_sum(twice, ZERO), 0)

    x, seed = numbers(SHAPE, dtype), numbers(SHAPE, dtype, 1)[0]
    x[3], x[4, 7] = -np.inf, np.nan
    top, total, parts = (poisoned(32, dtype) for _ in range(3))
    launch(kernel, (1, 1, 1), THREADS, 0, x, seed, top, total, parts)
    np.testing.assert_array_equal(top, np.fmax(np.fmax.reduce(x, 1), seed))
    bound = {"atol": 64 * np.finfo(dtype).eps, "rtol": 0}
    np.testing.assert_allclose(total, x.sum(1) + seed, **bound)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(parts, x.sum(1) * seed + x.sum(1), **bound)


@compiled_only
@each_layout
def test_reductions_shuffle_once_a_row_and_step(layout):
    ROWS = layout.row_vector()

    def kernel(x, top):
        save(top, row_max(load(x, layout, 0), load(top, ROWS, 0)), 0)

    found = ptx_of(kernel, THREADS, numbers(SHAPE), poisoned(32))
    assert found.count("shfl.sync.bfly") == layout.rows.slots * len(layout.row_lane_bits())


@each_layout
def test_running_minima(layout):
    """Of two tiles, one the other with one number changed: equal ones keep the first column."""
    PARTS, INFINITE, NOBODY = layout.row_parts(), np.float32(np.inf), np.int32(-1)
    LAST = np.int32(99)

    def kernel(x, y, smallest, number):
        least, col = part_argmin(load(x, layout, 0), 0, full(PARTS, INFINITE), full(PARTS, NOBODY))
        least, col = part_argmin(load(y, layout, 0), 32, least, col)
        top = -row_max(-least)
        save(smallest, top, 0)
        save(number, -row_max(-where(least == top, col, LAST)), 0)

    x = np.round(numbers(SHAPE) * 4)  # many are equal
    x[3], x[4, 7], x[5] = np.inf, np.nan, np.nan
    y = x.copy()
    y[6, 11], y[7, 31] = -np.inf, x[7].min()
    smallest, number = poisoned(32), np.full(32, 77, np.int32)
    launch(kernel, (1, 1, 1), THREADS, 0, x, y, smallest, number)
    both = np.where(np.isnan(z := np.hstack([x, y])), np.inf, z)
    wanted = both.argmin(1)
    wanted[[3, 5]] = -1
    np.testing.assert_array_equal(smallest, both.min(1))
    np.testing.assert_array_equal(number, wanted)


def test_truths_of_a_warp():
    layout = simt(*SHAPE, THREADS, 8, 1)

    def kernel(x, y):
        X = load(x, layout, 0)
        number = np.float32(1) if anywhere(X > 5) else np.float32(0)
        save(y, full(layout, number), 0)

    x, y = np.zeros(SHAPE, np.float32), poisoned(SHAPE)
    x[9, 30] = 6
    launch(kernel, (1, 1, 1), THREADS, 0, x, y)
    rows = sorted({*np.flatnonzero(y[:, 0])})
    assert 9 in rows
    assert len(rows) == 16  # of two warps


FAULTS = {
    "test_running_minima": {
        'b.fcmp_ordered("<", *two)': 'b.fcmp_ordered("<=", *two)',
        "b.select(is_new, b.add(start, at), before)": "b.add(start, at)",
        "[-2::-1]": "[:-1]",
        "smaller = found < least.registers": "smaller = found <= least.registers",
    },
}

"""Sums and maxima along the rows: on every layout."""

import numpy as np
import pytest

from numbattn.cuda.tile import full, load, part_sum, row_max, row_sum, save
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

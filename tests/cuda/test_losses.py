"""The steps of losses over pairs on a GPU, as by array operations; calls are tested in tests/points/test_losses.py."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn.base.checks import DTYPES
from numbattn.cuda import losses as module
from numbattn.points import blocks
from tests.tools.launch import launch, mostly_simulated

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = DTYPES


@pytest.fixture(autouse=True)
def in_world(world, monkeypatch):
    monkeypatch.setattr(module, "launch", launch)


def drawn(rng, rows, cols, dtype, sigmoid):
    """R in an array with poisoned columns after its own, and what else is given."""
    whole = np.full((rows, -(-cols // 8) * 8), np.nan, dtype)
    R = whole[:, :cols]
    R[...] = 3 * rng.standard_normal((rows, cols))
    a, b = (rng.uniform(0.5, 2, n).astype(dtype) for n in (rows, cols))
    w = np.where(rng.random(cols) < 0.1, -np.inf, rng.standard_normal(cols)).astype(dtype)
    return R, blocks.Given(a, b, w, rng.integers(-5, cols + 5, rows).astype(np.int32), sigmoid)


def close(found, wanted, dtype):
    tolerance = {2: 2.0**-7 if dtype == BFLOAT16 else 2.0**-10, 4: 3e-6, 8: 1e-14}[dtype.itemsize]
    largest = np.abs(wanted, where=np.isfinite(wanted), out=np.zeros(wanted.shape)).max()
    assert_allclose(found.astype(float), wanted.astype(float), rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize(("rows", "cols", "dtype", "sigmoid"), [
    (19, 600, FLOAT32, False),
    pytest.param(9, 7, FLOAT64, False, marks=mostly_simulated),
    (3, 40, FLOAT32, True),
    pytest.param(3, 40, FLOAT64, True, marks=mostly_simulated),
])  # fmt: skip
def test_statistics(rng, rows, cols, dtype, sigmoid):
    """Of two blocks, one after the other; a row sees nothing at all, and another one has large scores."""
    found, wanted = (blocks.Statistics(*[np.full(rows, x, dtype) for x in (np.finfo(dtype).min, 0, 0)]) for _ in "ab")
    for _ in range(2):
        R, given = drawn(rng, rows, cols, dtype, sigmoid)
        R[0] *= 100
        R[1] = -np.inf
        module.absorb(R, given, found)
        blocks.absorb(R, given, wanted)
    if not sigmoid:  # any m near the maximum will do
        found, wanted = (
            blocks.Statistics(x.total > 0, x.highest + np.log(np.maximum(x.total, 1e-30)), x.chosen)
            for x in (found, wanted)
        )
    for one, other in zip(found, wanted):
        close(one, other, dtype)


@mostly_simulated
def test_small_losses_keep_their_digits():
    R, one, zero = np.array([[-30.0] * 8], np.float32), *np.array([[1], [0]], np.float32)
    known = blocks.Statistics(zero.copy(), zero.copy(), zero.copy())
    module.absorb(R[:], blocks.Given(one, np.ones(8, "f"), np.zeros(8, "f"), np.array([-1], np.int32), True), known)
    assert_allclose(known.total, 8 * np.exp(-30), rtol=1e-5)


@pytest.mark.parametrize(("rows", "cols", "dtype", "sigmoid"), [
    (19, 264, BFLOAT16, False),
    pytest.param(150, 270, FLOAT32, False, marks=mostly_simulated),
    pytest.param(9, 7, FLOAT64, False, marks=mostly_simulated),
    pytest.param(20, 30, FLOAT16, True, marks=mostly_simulated),
])  # fmt: skip
def test_gradients(rng, rows, cols, dtype, sigmoid):
    sums = np.dtype(np.float64 if dtype == FLOAT64 else np.float32)
    R, given = drawn(rng, rows, cols, sums, sigmoid)
    f, low, c = blocks.scores(R, given).max(1) + rng.random(rows), 1e-3 * rng.random(rows), rng.standard_normal(rows)
    f[0], c[0] = np.inf, 0
    weights = blocks.Weights(*[x.astype(sums) for x in (f, low, c)])
    dR = module.room_for_gradient(R, dtype)
    assert (dR is R) == (dtype == sums)
    wanted, found_w, wanted_w = np.empty((rows, cols), sums), *np.ones((2, cols), sums)
    blocks.gradient(wanted, R.copy(), given, weights, wanted_w)
    module.gradient(dR, R, given, weights, found_w)
    close(dR, wanted, dtype)
    close(found_w, wanted_w, sums)


def test_how_cublas_reads_a_matrix():
    x = np.zeros((6, 8), np.float32)
    assert [module.operand(z)[1:] for z in (x, x.T, x[::2], x[:, 2:5], x[:1], x[:, :1])] == [
        (8, False), (8, True), (16, False), (8, False), (8, False), (8, False)
    ]  # fmt: skip
    for odd in (x[:, ::2], x[::-1], np.broadcast_to(x[0], (3, 8))):
        copy, ld, turned = module.operand(odd)
        assert (ld, turned) == (odd.shape[1], False)
        assert_array_equal(copy, odd)


FAULTS = {
    "test_statistics[simulated-19-600-dtype0-False]": {
        "(j == target) & (j < cols)": "j == target",
        "before, l = before * alpha, ": "l = ",
    },
    "test_gradients[simulated-19-264-dtype0-False]": {
        "where(row_index(TILE, row) < rows, G, ZERO)": "G",
        "part * MOST, minimum(part * MOST + MOST, rows)": "part * MOST, rows",
        "dw += sums.sum(axis=0)": "dw += sums[0]",
    },
    "test_small_losses_keep_their_digits[simulated]": {"math.log1p(u)": "math.log(1 + u)"},
    "test_how_cublas_reads_a_matrix[simulated]": {"step >= cols * x.itemsize": "step > cols * x.itemsize"},
}

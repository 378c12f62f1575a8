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


def drawn(rng, rows, cols, dtype, factors, w, targets, sigmoid):
    """R in an array with poisoned columns after its own, and Factors."""
    whole = np.full((rows, -(-cols // 8) * 8), np.nan, dtype)
    R = whole[:, :cols]
    R[...] = 3 * rng.standard_normal((rows, cols))
    a, b = (rng.uniform(0.5, 2, n).astype(dtype) if factors else None for n in (rows, cols))
    w = np.where(rng.random(cols) < 0.1, -np.inf, rng.standard_normal(cols)).astype(dtype) if w else None
    targets = rng.integers(-5, cols + 5, rows).astype(np.int32) if targets else None
    return R, blocks.Factors(dtype.type(1.3), a, b, w, targets, sigmoid)


def close(found, wanted, dtype):
    tolerance = {2: 2.0**-7 if dtype == BFLOAT16 else 2.0**-10, 4: 3e-6, 8: 1e-14}[dtype.itemsize]
    largest = np.abs(wanted, where=np.isfinite(wanted), out=np.zeros(wanted.shape)).max()
    assert_allclose(found.astype(float), wanted.astype(float), rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize(("rows", "cols", "dtype", "given"), [
    (19, 600, FLOAT32, (False, True, True, False)),
    pytest.param(9, 7, FLOAT64, (True, False, True, False), marks=mostly_simulated),
    pytest.param(8, 513, FLOAT32, (True, True, False, False), marks=mostly_simulated),
    (3, 40, FLOAT32, (True, True, True, True)),
    pytest.param(3, 40, FLOAT64, (False, False, True), marks=mostly_simulated),
])  # fmt: skip
def test_statistics(rng, rows, cols, dtype, given):
    """Of two blocks, one after the other; in the second a row sees nothing at all."""
    found, wanted = (blocks.Statistics(*[np.full(rows, x, dtype) for x in (np.finfo(dtype).min, 0, 0)]) for _ in "ab")
    for _ in range(2):
        R, factors = drawn(rng, rows, cols, dtype, *given)
        R[0] *= 1 if given[3] else 100
        R[1] = -np.inf
        module.absorb(R, factors, found)
        blocks.absorb(R, factors, wanted)
    if not given[3]:  # any m near the maximum will do
        found, wanted = (
            blocks.Statistics(x.total > 0, x.highest + np.log(np.maximum(x.total, 1e-30)), x.chosen)
            for x in (found, wanted)
        )
    for one, other in zip(found, wanted):
        close(one, other, dtype)


@pytest.mark.parametrize(("rows", "cols", "dtype", "given", "columns", "dw"), [
    (19, 264, BFLOAT16, (False, True, True, False), False, True),
    pytest.param(150, 270, FLOAT32, (True, False, True, False), True, False, marks=mostly_simulated),
    pytest.param(9, 7, FLOAT64, (True, True, False, False), False, True, marks=mostly_simulated),
    pytest.param(20, 30, FLOAT16, (True, True, True, True), False, True, marks=mostly_simulated),
])  # fmt: skip
def test_gradients(rng, rows, cols, dtype, given, columns, dw):
    sums = np.dtype(np.float64 if dtype == FLOAT64 else np.float32)
    R, factors = drawn(rng, rows, cols, sums, *given)
    T = blocks.scores(R, factors)
    f, low, c = T.max(1) + rng.random(rows), 1e-3 * rng.random(rows), rng.standard_normal(rows)
    f[0], c[0] = np.inf, 0
    of_columns = (T.max(0) + rng.random(cols), 1e-3 * rng.random(cols), rng.standard_normal(cols))
    weights = [f, low, c, 2 * c, *(of_columns if columns else (None, None, None))]
    weights = blocks.Weights(*[x if x is None else x.astype(sums) for x in weights])
    dR = module.room_for_gradient(R, dtype)
    assert (dR is R) == (dtype == sums)
    wanted, found_w, wanted_w = np.empty((rows, cols), sums), *np.ones((2, cols), sums)
    blocks.gradient(wanted, R.copy(), factors, weights, wanted_w)
    module.gradient(dR, R, factors, weights, found_w if dw else None)
    close(dR, wanted, dtype)
    if dw:
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

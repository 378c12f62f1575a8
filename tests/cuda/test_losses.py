"""The steps of losses over pairs on a GPU, as by array operations; calls are tested in tests/points/test_losses.py."""

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from numbattn import points
from numbattn.base.checks import DTYPES
from numbattn.cuda import losses as module
from numbattn.points import blocks, scores
from tests.tools.cublas import emulated
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
    targets = rng.integers(-5, cols, rows).astype(np.int32)
    targets[2] = cols  # of the next block
    return R, blocks.Given(a, b, w, targets, sigmoid)


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
    for turn in range(2):
        R, given = drawn(rng, rows, cols, dtype, sigmoid)
        R[2:] *= 1 + 9 * turn
        R[0] *= 100
        R[1] = -np.inf
        module.absorb(R, given, found)
        blocks.absorb(R, given, wanted)
    if not sigmoid:  # any m near the maximum will do
        found, wanted = (
            [x.total > 0, np.where(x.total > 0, x.highest + np.log(np.maximum(x.total, 1e-30)), 0), x.chosen]
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
    f = blocks.scores(R.copy(), given).max(1) + rng.random(rows)
    low, c = 1e-3 * rng.random(rows), rng.standard_normal(rows)
    f[0], c[0] = np.inf, 0
    weights = blocks.Weights(*[x.astype(sums) for x in (f, low, c)])
    dR = module.room_for_gradient(R, dtype)
    assert (dR is R) == (dtype == sums)
    wanted, found_w, wanted_w = np.empty((rows, cols), sums), *np.ones((2, cols), sums)
    blocks.gradient(wanted, R.copy(), given, weights, wanted_w)
    module.gradient(dR, R, given, weights, found_w)
    close(dR, wanted, dtype)
    close(found_w, wanted_w, sums)


@mostly_simulated
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
@pytest.mark.parametrize("kernel", [points.Linear(0.5), points.Cosine(4.0)], ids=repr)
def test_calls(rng, monkeypatch, dtype, kernel):
    """Of some blocks; gradients are off by a rounding of those of T."""
    emulated(monkeypatch)
    x, y, w = (rng.standard_normal(shape).astype(dtype) for shape in ((19, 24), (150, 24), (150,)))
    targets, df = rng.integers(-1, 150, 19), rng.standard_normal(19)
    wide = [z.astype(np.float64) for z in (x, y, w)]
    wanted, backprop = points.cross_entropy_vjp(*wide[:2], targets, kernel, w=wide[2])
    wanted = [wanted, *backprop(df), backprop(df).kernel, *backprop.hvp(df, *wide)]
    steps = SimpleNamespace(**vars(module) | {"BYTES": 4 * 64 * 24})
    monkeypatch.setattr(scores, "loss_steps", lambda library: steps)
    x, y = map(np.asfortranarray, (x, y))
    f, backprop = points.cross_entropy_vjp(x, y, targets, kernel, w=w)
    grads = backprop(df.astype(np.float32))
    rounding = {2: 2.0**-7 if dtype == BFLOAT16 else 2.0**-10, 4: 1e-5}[dtype.itemsize]
    tgrads = backprop.hvp(df.astype(np.float32), x, y, w)
    for found, want, allowed in zip((f, *grads, grads.kernel, *tgrads), wanted, (3e-6, *[rounding] * 7), strict=True):
        assert_allclose(found.astype(float), want, atol=allowed * np.abs(want).max())


@mostly_simulated
def test_rows_beyond_the_end_have_no_gradient():
    """Though exp(w) is infinite, which times 0 is not a number."""
    R, w, zero, dw = np.zeros((1, 8), np.float32), np.full(8, 100, np.float32), np.float32([0]), np.zeros(8, np.float32)
    given = blocks.Given(zero + 1, w / 100, w, np.int32([-1]), False)
    module.gradient(R[:], R[:], given, blocks.Weights(zero + 100, zero, zero + 2), dw)
    assert_allclose(dw, 2, rtol=1e-6)
    assert_allclose(R, 2, rtol=1e-6)


FAULTS = {
    "test_statistics[simulated-19-600-dtype0-False]": {
        "(j == target) & (j < cols)": "j == target",
        "before, l = before * alpha, ": "l = ",
    },
    "test_gradients[simulated-19-264-dtype0-False]": {
        "dw += sums.sum(axis=0)": "dw += sums[0]",
    },
    "test_gradients[simulated-150-270-dtype1-False]": {
        "part * MOST, minimum(part * MOST + MOST, rows)": "part * MOST, rows",
    },
    "test_rows_beyond_the_end_have_no_gradient[simulated]": {"where(row_index(TILE, row) < rows, G, ZERO)": "G"},
    "test_small_losses_keep_their_digits[simulated]": {"math.log1p(u)": "math.log(1 + u)"},
}

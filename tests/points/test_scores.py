"""Blocks of scores: the calls are tested in test_losses.py and test_logsumexp.py."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from numbattn import points
from numbattn.cuda import losses as on_gpus
from numbattn.points import blocks, scores

LINEAR = points.Linear(0.5)


@pytest.fixture
def small_blocks(monkeypatch):
    """Some rows and some columns, as of many points."""
    monkeypatch.setattr(blocks, "BYTES", 8 * 50)
    monkeypatch.setattr(scores, "MULTIPLE", 4)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_blocks_add_up(rng, request, sigmoid):
    x, y, w, tx, ty = (rng.standard_normal(shape) for shape in ((23, 9), (30, 9), (30,), (23, 9), (30, 9)))
    targets, df, found = rng.integers(-1, 30, 23), rng.standard_normal(23), []
    for split in (False, True):
        if split:
            request.getfixturevalue("small_blocks")
        f, backprop = points.cross_entropy_vjp(x, y, targets, LINEAR, w=w, sigmoid=sigmoid)
        found.append((f, *backprop(df), *backprop.hvp(df, tx, ty, w)))
    seen = list(backprop._call.element().blocks())
    assert len({i.start for i, _ in seen}) > 1 < len({j.start for _, j in seen})
    for whole, parts in zip(*found, strict=True):
        assert_allclose(parts, whole, atol=1e-12)


@pytest.mark.parametrize("kernel", [points.Linear(0.3), points.Cosine(4.0)], ids=repr)
def test_logarithms_of_many_features(rng, kernel):
    """As those of all features by the kernels for few, of which a mask asks."""
    x, y, w = rng.standard_normal((2, 9, 300)), rng.standard_normal((12, 300)), rng.standard_normal(12)
    w[3] = -np.inf
    tx, ty, tw = (rng.standard_normal(z.shape) for z in (x, y, w))
    df, found = rng.standard_normal((2, 9)), []
    for mask in (None, np.ones((9, 12), bool)):
        f, backprop = points.logsumexp_vjp(x, y, w, kernel, mask=mask)
        grads = backprop(df)
        _, tf = points.logsumexp_jvp(x, y, w, kernel, tx, None, tw, mask=mask)
        found.append((f, *grads, grads.kernel, tf, *backprop.hvp(df, tx, ty, tw)))
    assert isinstance(points.logsumexp_vjp(x, y, w, kernel)[1]._call, scores.ScoresCall)
    for one, other in zip(*found, strict=True):
        assert_allclose(one, other, atol=1e-12 * np.abs(other).max())
    assert points.logsumexp_vjp(x, y, None, kernel)[1](df).dw is None


def test_what_sees_nothing(rng):
    x, y, w = rng.standard_normal((4, 300)), rng.standard_normal((5, 300)), np.full(5, -np.inf)
    for n in (5, 0):
        f, backprop = points.logsumexp_vjp(x, y[:n], w[:n], LINEAR)
        assert (f == -np.inf).all()
        for gradient in backprop(np.full(4, np.nan)):
            assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_probabilities_of_large_scores_sum_to_1(rng, dtype):
    x, y = 100 * rng.standard_normal((50, 300)), 100 * rng.standard_normal(300) + 0.01 * rng.standard_normal((50, 300))
    _, backprop = points.logsumexp_vjp(x.astype(dtype), y.astype(dtype), np.zeros(50, np.float32), points.Linear(0.1))
    assert_allclose(backprop(np.ones(50, np.float32)).dw.sum(), 50, rtol=1e-6)


def test_small_gradients_of_float16(rng, monkeypatch):
    """Rounded to float16, as on a GPU: of many classes, and rows that count little."""
    monkeypatch.setattr(blocks, "room_for_gradient", on_gpus.room_for_gradient)
    x, y = (rng.standard_normal((n, 300)).astype(np.float16) for n in (5, 3000))
    targets, df = np.arange(5), np.full(5, 1e-6, np.float32)
    found = points.cross_entropy_vjp(x, y, targets, points.Linear(0.01))[1](df)
    call = points.cross_entropy_vjp(x.astype(float), y.astype(float), targets, points.Linear(0.01))
    for got, want in zip(found[:2], call[1](df)):
        error = np.sqrt(((got.astype(float) - want) ** 2).mean())
        assert error < 1e-7  # a subnormal of float16 is 6e-8
    assert_allclose(found.kernel, call[1](df).kernel, rtol=1e-3)


FAULTS = {
    "test_blocks_add_up[False]": {
        "add=i.start > 0": "add=False",
        "points/blocks.py": {
            "self.targets[i] - j.start": "self.targets[i]",
            "known.total[...] *= np.exp(known.highest - highest)": "pass",
        },
    },
    "test_probabilities_of_large_scores_sum_to_1": {
        "points/blocks.py": {"T -= weights.low[:, None]": "pass"},
    },
    "test_what_sees_nothing": {"np.where(np.isneginf(f), math.inf, f)": "f"},
    "test_small_gradients_of_float16": {"np.where(largest > 0, LARGEST / largest, 1)": "np.ones(())"},
    "test_logarithms_of_many_features": {"/ kernel.scale": "/ 1"},
}

"""Means of the points of each label on a GPU, as on CPUs."""

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn.base.backends import run_points
from numbattn.call.problem import describe
from numbattn.cuda import clusters as module
from tests.tools.launch import launch, mostly_simulated, simulated_only


@pytest.fixture(autouse=True)
def in_world(world, monkeypatch):
    def launch_some(kernel, grid, *about):
        assert grid > 0
        launch(kernel, (grid, 1, 1), *about)

    monkeypatch.setattr(module, "launch", launch_some)


def check(rng, dtype, m, k, d, batch=(), labels=None, is_weighed=False, order="C"):
    x, y = (rng.standard_normal((*batch, rows, d)).astype(dtype, order=order) for rows in (m, k))
    problem, inputs = describe(x, y, y[..., :0])
    if labels is None:
        labels = rng.integers(-1, k, (*batch, m))
    weights = rng.random((*batch, m)).astype(problem.sum_dtype) if is_weighed else None
    labels = labels.astype(np.int32)
    found = module.clusters(problem, inputs, labels, weights)
    expected = run_points(problem, "clusters", inputs, labels, weights)
    assert [z.dtype for z in found] == [z.dtype for z in expected]
    for got, one in zip(found, expected, strict=True):
        rounding = 4 * float(ml_dtypes.finfo(one.dtype).eps) if one.dtype.kind != "i" else 0
        assert got.shape == one.shape
        assert_allclose(got.astype(float), one.astype(float), rtol=2 * rounding, atol=rounding)


@pytest.mark.parametrize(("dtype", "d", "is_weighed"), [
    (np.float16, 136, True),
    pytest.param(ml_dtypes.bfloat16, 20, False, marks=mostly_simulated),
    pytest.param(np.float32, 3, True, marks=mostly_simulated),
    pytest.param(np.float64, 40, False, marks=mostly_simulated),
    pytest.param(np.float32, 0, True, marks=mostly_simulated),
], ids=str)  # fmt: skip
def test_batches(rng, dtype, d, is_weighed):
    """In one tile of features, and in several; of each, too few for all its lanes."""
    check(rng, dtype, 150, 3, d, (2,), is_weighed=is_weighed)


@simulated_only
def test_parts(rng, monkeypatch):
    """Of several clusters in turn, some of which are empty, and the first and the last ones; of one that has all."""
    monkeypatch.setattr(module, "PART", 16)
    labels = np.repeat([-1, 1, 2, 5], [3, 16, 17, 100])
    check(rng, np.float32, len(labels), 8, 5, labels=rng.permutation(labels))
    check(rng, np.float32, 300, 2, 5, labels=np.ones(300))


@simulated_only
def test_columns_that_are_contiguous(rng):
    check(rng, np.float32, 40, 3, 20, order="F")


@simulated_only
def test_empty_clusters(rng):
    check(rng, np.float32, 20, 5, 3, labels=np.full(20, 3))
    check(rng, np.float32, 20, 2, 3, labels=np.full(20, -1))


@simulated_only
@pytest.mark.parametrize(("m", "batch"), [(0, ()), (1, ()), (5, (0,))])
def test_few_points(rng, m, batch):
    check(rng, np.float32, m, 3, 5, batch)


@simulated_only
def test_what_does_not_count_is_not_read(rng):
    x, y = (rng.standard_normal((rows, 5)).astype(np.float32) for rows in (70, 3))
    x[7], y[1] = np.nan, np.inf
    labels = np.where(np.arange(70) == 7, -1, 2).astype(np.int32)
    problem, inputs = describe(x, y, y[..., :0])
    means, counts, inertia = module.clusters(problem, inputs, labels, None)
    assert np.isfinite(means[[0, 2]]).all()
    assert np.isfinite(inertia)
    assert_array_equal(counts, [0, 0, 69])


@simulated_only
def test_far_centres(rng):
    """Whose squares are beyond float32."""
    y = np.full((1, 5), 1e22, np.float32)
    x = y + rng.standard_normal((70, 5)).astype(np.float32) * np.float32(1e16)
    problem, inputs = describe(x, y, y[..., :0])
    means, _, inertia = module.clusters(problem, inputs, np.zeros(70, np.int32), None)
    moves = x.astype(float) - y
    assert_allclose(means[0], x.astype(float).mean(0), rtol=1e-6)
    assert_allclose(inertia, (moves**2).sum(), rtol=1e-5)


@simulated_only
def test_the_same_bits_again(rng):
    """In any order of points with different labels."""
    x, y, order = rng.standard_normal((200, 5)), rng.standard_normal((4, 5)), np.arange(200).reshape(4, 50).T.ravel()
    labels = np.repeat(np.arange(4, dtype=np.int32), 50)
    problem, inputs = describe(x, y, y[..., :0])
    one = module.clusters(problem, inputs, labels, None)
    other = module.clusters(problem, inputs._replace(q=x[order]), labels[order], None)
    assert all((a == b).all() for a, b in zip(one, other))


FAULTS = {
    "test_batches": {
        "np.arange(0, last, k,": "np.arange(0, last * 0 + 1, k,",
        "np.where(labels < 0, labels, ": "np.where(labels < 0, labels * 0, ",
        "where(places < end,": "where(places < end + 1,",
        "total + moves * w": "total + moves",
        "moves * moves * w": "moves * moves",
        "if chunk == 0:\n                save(line": "if chunk == 1:\n                save(line",
        "cluster_of(mStarts, part, most), chunk * COLS": "cluster_of(mStarts, part, most), 0 * COLS",
        "save(mSquares[cluster], sum_of_lines(squares), chunk)": "save(mSquares[cluster], sum_of_lines(squares), 0)",
    },
    "test_far_centres": {"where(rows >= 0, X - Y, ZERO)": "X - Y"},
    "test_parts": {
        "+ before * most": "+ 0 * most",
        "minimum(at + most, stop)": "stop",
        "total // most + last,": "total // most,",
        "(count + most - 1) // most": "count // most",
        "<= part:": "< part:",
        "(labels < clusters)": "(labels <= clusters)",
        "& (beyond <= total)": "& (beyond <= total + 1)",
    },
    "test_columns_that_are_contiguous": {"np.empty(shape, of, like=x)": "np.empty_like(x, of, shape=shape)"},
    "test_few_points": {"if last:": "if True:"},
    "test_empty_clusters": {"where(weight > ZERO, weight, ONE)": "weight"},
    "cuda/kernels/shared/block_rows.py": {
        "reduce(get(allocate(PLACE).T, TRANSPOSED))": "reduce(get(allocate(PLACE).T, TRANSPOSED)) * 2",
    },
}

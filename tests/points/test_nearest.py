"""Nearest neighbours."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn import points
from numbattn.points import kinds

from ..accuracy import to_numpy
from . import plain


@pytest.mark.parametrize("d", [2, 20])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=str)
def test_neighbours(xp, rng, dtype, d):
    x, y = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 50, d), (1, 70, d)))
    distances, j = points.nearest(xp.asarray(x), xp.asarray(y), k=4)
    assert (distances.dtype, j.dtype) == (np.float64 if dtype == np.float64 else np.float32, np.int32)
    distances, j = to_numpy(distances), to_numpy(j)
    squares, _ = plain.nearest(x, y, 4)
    assert_allclose(distances, np.sqrt(squares), rtol=1e-4)
    assert_array_equal(np.sort(j), np.sort(plain.nearest(x, y, 4)[1]))


@pytest.mark.parametrize(("d", "dtype"), [(2, np.float32), (20, np.float64), (2, np.float16)])
def test_many_neighbours(xp, rng, d, dtype):
    """More than registers hold, and some of all of them."""
    x, y = rng.standard_normal((30, d)).astype(dtype), rng.standard_normal((2, 300, d)).astype(dtype)
    for k in (33, 200, 400):
        distances, j = map(to_numpy, points.nearest(xp.asarray(x), xp.asarray(y), k))
        squares, wanted = plain.nearest(x, y, k)
        assert_array_equal(np.sort(j), np.sort(wanted))
        assert_allclose(distances, np.sqrt(squares), rtol=1e-4)


@pytest.mark.parametrize("mask", [na.Window(3, 3), na.Segments([0, 2, 40], [0, 1, 30]), na.Lengths(keys=0),
                                  na.Dense(np.eye(40, 30, dtype=bool))], ids=repr)  # fmt: skip
@pytest.mark.parametrize("d", [2, 20])
def test_fewer_in_sight(rng, mask, d):
    x, y = rng.standard_normal((40, d)), rng.standard_normal((30, d))
    distances, j = points.nearest(x, y, k=5, mask=mask)
    squares, wanted = plain.nearest(x, y, 5, mask.dense(40, 30))
    assert_array_equal(j, wanted)
    assert_allclose(distances, np.sqrt(squares))


@pytest.mark.parametrize("d", [2, 20])
def test_fewer_points_than_neighbours(d):
    for n in (0, 1, 3):
        distances, j = points.nearest(np.zeros((2, d)), np.ones((n, d)), k=3)
        assert_array_equal(j, np.broadcast_to(np.where(np.arange(3) < n, np.arange(3), -1), (2, 3)))
        assert_allclose(distances, np.broadcast_to(np.where(np.arange(3) < n, d**0.5, np.inf), (2, 3)))
    assert points.nearest(np.zeros((0, d)), np.ones((4, d)), k=3)[1].shape == (0, 3)


@pytest.mark.parametrize("d", [3, kinds.DIFFERENCES + 1, 30])
def test_a_point_is_its_own_neighbour_at_distance_0(rng, d):
    """In float32, far off, and of two that are equal the lower index is first."""
    x = (1000 + rng.random((2, 40, d))).astype(np.float32)
    x[:, 7] = x[:, 30]
    distances, j = points.nearest(x, x, k=2)
    own = np.arange(40)
    own[30] = 7
    assert_array_equal(j[..., 0], np.broadcast_to(own, (2, 40)))
    assert_array_equal(distances[..., 0], np.zeros((2, 40)))
    assert_array_equal(distances[:, [7, 30]], np.zeros((2, 2, 2)))
    assert_array_equal(j[:, [7, 30]], [[[7, 30]] * 2] * 2)


@pytest.mark.parametrize("d", [3, 30])
def test_close_neighbours_far_off(rng, d):
    x, y = (np.float32(1000) + rng.random((n, d)).astype(np.float32) for n in (30, 40))
    y[:30] = np.nextafter(x, np.float32(2000))
    distances, j = points.nearest(x, y)
    assert_array_equal(j[:, 0], np.arange(30))
    assert_allclose(distances[:, 0], np.linalg.norm(x.astype(np.float64) - y[:30], axis=-1), rtol=1e-6)


@settings(max_examples=40)
@given(st.integers(0, 6), st.integers(0, 6), st.sampled_from([0, 1, 2, 9]), st.integers(1, 32), st.booleans())
def test_ties(m, n, d, k, is_batch):
    """Points of a small grid, many of which are as far as others."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(3, size=(m, d)).astype(float), rng.integers(3, size=(2, n, d)).astype(float)
    y = y if is_batch else y[0]
    distances, j = points.nearest(x, y, k)
    squares, wanted = plain.nearest(x, y, k)
    assert_array_equal(j, wanted)
    assert_array_equal(distances, np.sqrt(squares))


@pytest.mark.parametrize(("k", "kind", "message"), [
    (0, ValueError, "k: got 0, allowed 1 to 2048"), (2049, ValueError, "k: got 2049, allowed 1 to 2048"),
    (1.0, TypeError, "k: got 1.0, expected an integer"),
])  # fmt: skip
def test_errors(k, kind, message):
    with pytest.raises(kind, match=message):
        points.nearest(np.zeros((3, 2)), np.zeros((3, 2)), k)
    with pytest.raises(TypeError, match=r"x: got int64, allowed .*; pass x.astype\(np.float32\)"):
        points.nearest(np.zeros((3, 2), int), np.zeros((3, 2), int))


FAULTS = {
    "(pairs.x.dtype == pairs.dtype or library(pairs.x) == \"numpy\")": "False",
    "j.sort(axis=-1)": "j[...] = j[..., ::-1]",
    "first = pairs.broadcast(n * np": "first = pairs.broadcast(0 * np",
    "squares = np.where(j < n, squares, math.inf)": "squares = squares",
}

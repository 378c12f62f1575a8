"""Lists of neighbours are those of all pairs, of all images."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from numbattn import graphs

from ..accuracy import to_numpy


def brute(x, radius, box, owners):
    """Edges as (i, j, *shifts), sorted."""
    d, found = x.shape[1], []
    vectors = np.zeros((d, d)) if box is None else np.diag(box) if box.ndim == 1 else box
    images = [(0,) * d]
    if box is not None and len(x):
        inverse = np.linalg.inv(vectors)
        wraps = np.floor(x @ inverse).astype(int)
        far = int(np.ptp(wraps, axis=0).max() + np.ceil(radius * np.abs(inverse).max() * d)) + 1
        images = itertools.product(range(-far, far + 1), repeat=d)
    for shift in images:
        between = x[None] - x[:, None] + np.array(shift, x.dtype) @ vectors.astype(x.dtype)
        near = ((between**2).sum(-1) < radius**2) & (owners[:, None] == owners)
        if not any(shift):
            np.fill_diagonal(near, False)
        found += [(*pair, *shift) for pair in np.argwhere(near)]
    return np.array(sorted(found), int).reshape(-1, 2 + d)


def check(seed, xp=np):
    rng = np.random.default_rng(seed)
    n, d, dtype = int(rng.integers(0, 25)), int(rng.integers(1, 4)), rng.choice([np.float32, np.float64])
    x = (rng.random((n, d)) * rng.choice([1, 4]) - rng.choice([0, 1])).astype(dtype)
    box, radius = None, rng.choice([0.3, 0.7, 1.1])
    kind = rng.choice(["none", "orthorhombic", "triclinic"])
    if kind != "none":
        box = (np.eye(d) * rng.uniform(0.8, 3, d) + np.tril(rng.uniform(-0.4, 0.4, (d, d)), -1)).astype(dtype)
        box = box if kind == "triclinic" else box.diagonal().copy()
    ends = np.sort(rng.integers(0, n + 1, 2))
    segments = np.array([0, *ends, n]) if rng.random() < 0.4 else None
    owners = np.zeros(n, int) if segments is None else np.searchsorted(segments, np.arange(n), side="right")
    on_device = {name: xp.asarray(a) for name, a in (("box", box), ("segments", segments)) if a is not None}
    g, shifts = graphs.radius_graph(xp.asarray(x), radius, **on_device)
    i = np.repeat(np.arange(n), np.diff(to_numpy(g.indptr)))
    got = np.concatenate([i[:, None], to_numpy(g.indices)[:, None], to_numpy(shifts)], axis=1)
    assert_array_equal(got, brute(x, radius, box, owners))


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_as_all_pairs(seed):
    check(seed)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_on_a_gpu(seed):
    import cupy

    check(seed, cupy)


def test_many_points(rng):
    """More cells than are near each other, in numbers beyond those of a small box."""
    x = rng.random((3000, 3)) * 10
    g, shifts = graphs.radius_graph(x, 1.0, box=np.full(3, 10.0))
    e = graphs.differences(x, g, shifts=shifts, box=np.full(3, 10.0))
    assert (np.linalg.norm(e, axis=-1) < 1).all()
    assert abs(g.edges / 3000 - 3 * 4 / 3 * np.pi) < 1
    assert_array_equal(np.diff(g._by_key.starts), np.diff(g.indptr))                # both directions


def test_a_radius_whose_square_is_out_of_range():
    for x, radius in ((np.array([[0.0], [1e154]]), 1e155), (np.zeros((2, 2), np.float32), 1e-23)):
        assert graphs.radius_graph(x, radius)[0].edges == 2


def test_wrong_arguments():
    x = np.zeros((3, 2))
    for error, words, arguments, options in (
        (ValueError, "radius: got 0.0, allowed finite and > 0", (x, 0.0), {}),
        (TypeError, "x: got int64, allowed float32, float64", (x.astype(int), 1.0), {}),
        (ValueError, r"x: got the shape \(3,\), expected \(points, d\)", (x[:, 0], 1.0), {}),
        (TypeError, "box: got float32, expected float64", (x, 1.0), {"box": np.ones(2, np.float32)}),
        (ValueError, r"box: got the shape \(3,\)", (x, 1.0), {"box": np.ones(3)}),
        (TypeError, "segments: got numpy.ndarray of float64", (x, 1.0), {"segments": np.zeros(2)}),
        (ValueError, "segments: got offsets from 0 to 2, expected from 0 to 3, as many as there are points", (x, 1.0),
         {"segments": np.array([0, 2])}),
        (ValueError, "x: got positions that are not finite", (x * np.nan, 1.0), {}),
        (ValueError, "x: got points more than 536870912 boxes away", (x + 1e12, 1.0), {"box": np.ones(2)}),
        (ValueError, "expected finite vectors that span a box", (x, 1.0), {"box": np.array([1.0, 0.0])}),
        (ValueError, "segments: got 3 before 1", (x, 1.0), {"segments": np.array([0, 3, 1])}),
    ):
        with pytest.raises(error, match=words):
            graphs.radius_graph(*arguments, **options)


FAULTS = {
    "(i != j) | (shifts != 0).any(axis=-1)": "(i != j)",
    "/ radius) ** 2).sum(axis=-1) < 1": "/ radius) ** 2).sum(axis=-1) < 2",
    "images[i] - cells.wraps[j] + cells.wraps[i]": "images[i]",
    "found = found * size + places[:, axis]": "found = found + size * places[:, axis]",
    "np.ceil(width * sizes / heights)": "np.ceil(width * 0 * sizes / heights) + 1",
}

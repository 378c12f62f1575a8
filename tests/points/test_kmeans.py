"""A step of k-means."""

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn import points

from ..accuracy import to_numpy


def drawn(rng, m=300, k=7, d=3, batch=()):
    return rng.standard_normal((*batch, m, d)), rng.standard_normal((*batch, k, d))


def exact(x, centres, weights):
    """Of one problem, in float64."""
    x, centres, weights = (z.astype(np.float64) for z in (x, centres, weights))
    squares = ((x[:, None] - centres) ** 2).sum(-1)
    labels, new = squares.argmin(-1), centres.copy()
    counts = np.bincount(labels, weights, len(centres))
    for label in np.flatnonzero(counts):
        own = labels == label
        new[label] = (weights[own, None] * x[own]).sum(0) / counts[label]
    return labels, new, counts, (squares.min(-1) * weights).sum()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("d", [3, 20])
@pytest.mark.parametrize("is_weighed", [False, True])
def test_steps(xp, rng, dtype, d, is_weighed):
    """Of a batch, whose centres are those of all its elements."""
    x, centres = (z.astype(dtype) for z in drawn(rng, d=d, batch=(2,)))
    centres, weights = centres[0], rng.random(300).astype(dtype) if is_weighed else None
    sums = np.float64 if dtype == np.float64 else np.float32
    step = points.kmeans_step(*map(xp.asarray, (x, centres)), weights=None if weights is None else xp.asarray(weights))
    assert all(isinstance(z, xp.ndarray) for z in step)
    assert [z.dtype for z in step] == [np.int32, dtype, sums if is_weighed else np.int64, sums]
    assert [z.shape for z in step] == [(2, 300), (2, 7, d), (2, 7), (2,)]
    rounding = max(float(ml_dtypes.finfo(dtype).eps), 1e-15)
    for at, found in enumerate(zip(*map(to_numpy, step))):
        labels, new, counts, inertia = exact(x[at], centres, np.ones(300) if weights is None else weights)
        assert_array_equal(found[0], labels)
        assert_allclose(found[1].astype(np.float64), new, rtol=2 * rounding, atol=4 * rounding)
        assert_allclose(found[2], counts, rtol=1e-6)
        assert_allclose(found[3], inertia, rtol=1e-5)


def test_steps_are_those_of_scikit_learn(rng):
    cluster = pytest.importorskip("sklearn.cluster")
    x, _ = drawn(rng, 500)
    centres = x[:7]
    found = cluster.KMeans(7, init=centres, n_init=1, max_iter=20, tol=0).fit(x)
    for _ in range(found.n_iter_):
        labels, centres, _, inertia = points.kmeans_step(x, centres)
    assert_array_equal(labels, found.labels_)
    assert_allclose(centres, found.cluster_centers_)
    assert_allclose(inertia, found.inertia_)


@pytest.mark.parametrize("origin", [0, 1e3, 1e5])
def test_means_have_few_rounding_errors(xp, rng, origin):
    """Of many points, whatever the origin, of clusters far from all others, too: those of the result."""
    x, _ = drawn(rng, 50_000, d=4)
    x[:20_000] += 50 * max(origin, 1)
    x = (x + origin).astype(np.float32)
    centres = x[[0, 1, -1]] + np.float32(0.5)
    labels, new, counts, _ = map(to_numpy, points.kmeans_step(*map(xp.asarray, (x, centres))))
    assert counts.sum() == 50_000
    for label in range(3):
        own, one = x[labels == label], np.finfo(np.float32).eps
        mean = own.astype(np.float64).mean(0)
        off = np.abs((own - own[0]).mean(0) + own[0] - mean).max()  # the best that float32 can do
        assert np.abs(new[label] - mean).max() <= 2 * off + one * np.abs(mean).max()


def test_empty_clusters_stay(rng):
    """Also such whose points have no weight."""
    x, centres = drawn(rng)
    centres[2] += 1e3
    labels, new, counts, _ = points.kmeans_step(x, centres)
    assert counts[2] == 0
    assert_array_equal(new[2], centres[2])
    weights = np.where(labels == 3, 0.0, 1.0)
    _, new, counts, _ = points.kmeans_step(x, centres, weights=weights)
    assert counts[3] == 0
    assert_array_equal(new[3], centres[3])


def test_points_without_label_do_not_count(xp, rng):
    """They are too far off in float32; nor does what is not finite, which is refused where it is seen."""
    x, centres = (z.astype(np.float32) for z in drawn(rng))
    far = x.copy()
    far[5] = 1e25
    weights = np.where(np.arange(300) == 5, 0, 1).astype(np.float32)
    for own in (None, weights + 1):
        given = {} if own is None else {"weights": xp.asarray(own)}
        labels, *found = points.kmeans_step(*map(xp.asarray, (far, centres)), **given)
        assert labels[5] == -1
        own = weights if own is None else own * weights
        for got, wanted in zip(found, points.kmeans_step(x, centres, weights=own)[1:], strict=True):
            assert_allclose(to_numpy(got), wanted, rtol=1e-5)
    if xp is not np:
        far[5] = np.nan
        assert all(np.isfinite(to_numpy(z)).all() for z in points.kmeans_step(*map(xp.asarray, (far, centres))))


def test_few_points(rng):
    x, centres = drawn(rng, m=0)
    labels, new, counts, inertia = points.kmeans_step(x, centres)
    assert labels.shape == (0,)
    assert_array_equal(new, centres)
    assert_array_equal(counts, 0)
    assert inertia == 0
    assert_array_equal(points.kmeans_step(centres, centres).centres, centres)


X = np.ones((3, 2))


@pytest.mark.parametrize(("given", "options", "kind", "message"), [
    ((np.ones((4, 2)), np.ones((3, 3))), {}, ValueError, "centres: got 3 features, expected 2, as many as x"),
    ((np.ones((4, 2)), np.ones((0, 2))), {}, ValueError, r"centres: got the shape \(0, 2\), expected 1 or more"),
    ((np.ones((4, 2)), np.ones((3, 2))), {"weights": np.ones(3)}, ValueError, r"weights: got the shape \(3,\), expect"),
    ((X, X), {"weights": np.array([1, 2, -1.0])}, ValueError, "weights: got weights from -1.0 to 2.0, allowed finite"),
    ((X, X), {"weights": np.array([1, 2, np.nan])}, ValueError, "weights: got weights from nan to nan, allowed fin"),
    ((X * np.nan, X), {}, ValueError, "x: got points with inf or NaN, allowed are finite ones"),
    ((X, X + np.inf), {}, ValueError, "centres: got points with inf or NaN, allowed are finite ones"),
    ((np.ones((4, 2)), np.ones((3, 2), np.float32)), {}, TypeError, "centres: got float32, expected float64, the"),
])  # fmt: skip
def test_errors(given, options, kind, message):
    with pytest.raises(kind, match=message):
        points.kmeans_step(*given, **options)


FAULTS = {
    "test_steps": {
        "cpu/points/clusters.py": {
            "weights[at, min(i, weights.shape[1] - 1)]": "weights[at, 0]",
            "squares[f] += weight * (move * move)": "squares[f] += move * move",
        },
    },
    "test_means_have_few_rounding_errors": {
        "cpu/points/clusters.py": {"move = float(x[f]) - float(y[f])": "move = x[f] - x.dtype.type(0)"},
    },
    "test_points_without_label_do_not_count": {"cpu/points/clusters.py": {"if label >= 0:": "if True:"}},
    "test_errors": {'check_finite("centres", centres)': "pass", 'check_weights("weights", weights)': "pass"},
    "test_empty_clusters_stay": {"cpu/points/clusters.py": {"np.where(mass > 0, mass, 1)": "mass"}},
}

"""The same calls on NumPy's and on CuPy's arrays."""

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn import points

from ..accuracy import to_numpy
from . import plain

MASKS = {
    "none": None,
    "lengths": na.Lengths(keys=np.array([[60], [75]]), queries=np.array([[50], [3]])),
    "causal segments": na.Segments([0, 20, 50], [0, 30, 80]) & na.Causal(),
    "union": na.Window(5, 5) | na.First(3),
    "dense": np.random.default_rng(0).random((50, 80)) < 0.5,
    "blocks": na.BlockSparse(np.random.default_rng(1).random((1, 1, 4, 3)) < 0.5, (16, 32)),
}


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def drawn(rng, cupy, *shapes, dtype=np.float64):
    """Arrays of NumPy and the same of CuPy."""
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    return arrays, [cupy.asarray(array) for array in arrays]


def assert_same(found, wanted, scale=1e-12):
    assert not isinstance(found, np.ndarray)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=1)
    assert_allclose(to_numpy(found), wanted, atol=scale * largest, rtol=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", plain.KERNELS, ids=repr)
@pytest.mark.parametrize("mask", ["none", "causal segments"])
def test_kernels(cupy, rng, kernel, mask):
    here, there = drawn(rng, cupy, (2, 2, 50, 3), (2, 1, 80, 3), (80, 4), (2, 2, 50, 4))
    (s, backprop), (s_there, backprop_there) = (
        points.product_vjp(*arrays[:3], kernel, mask=MASKS[mask]) for arrays in (here, there)
    )
    assert_same(s_there, s)
    grads, grads_there = backprop(here[3]), backprop_there(there[3])
    for found, wanted in zip(grads_there, grads):
        assert_same(found, wanted)
    if not isinstance(grads.kernel, tuple) and grads.kernel is not None:
        assert_same(grads_there.kernel, grads.kernel, 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", [3, 17, 70, 300])
def test_masks(cupy, rng, mask, d):
    here, there = drawn(rng, cupy, (2, 2, 50, d), (2, 1, 80, d), (2, 2, 80), (2, 2, 50))
    cost, weights = points.Cost(1.5, float(d)), slice(0, 3)
    (f, backprop), (f_there, backprop_there) = (
        points.logsumexp_vjp(*arrays[weights], cost, mask=MASKS[mask]) for arrays in (here, there)
    )
    assert_same(f_there, f)
    for found, wanted in zip(backprop_there(there[3]), backprop(here[3])):
        assert_same(found, wanted)
    for k in (1, 5, 32):
        (distances, j), (distances_there, j_there) = (
            points.nearest(*arrays[:2], k, mask=MASKS[mask]) for arrays in (here, there)
        )
        assert_same(distances_there, distances)
        assert_array_equal(to_numpy(j_there), j)


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "e"), [(40, 1), (64, 20), (300, 3), (300, 70)])
def test_products_of_parts(cupy, rng, d, e):
    """By Hopper's kernels for float32, of many tiles, against float64."""
    here, there = drawn(rng, cupy, (1000, d), (3000, d), (3000, e), (3000,), dtype=np.float32)
    wide, kernel = [array.astype(np.float64) for array in here], points.Gaussian(d**0.5)
    found = points.product(*there[:3], kernel), points.logsumexp(*there[:2], there[3], kernel)
    wanted = points.product(*wide[:3], kernel), points.logsumexp(*wide[:2], wide[3], kernel)
    for got, want in zip(found, wanted):
        assert_allclose(to_numpy(got), want, atol=3e-6 * np.abs(want).max())
    (distances, j), (wanted, _) = points.nearest(*there[:2]), points.nearest(*wide[:2])
    assert_allclose(to_numpy(distances), wanted, rtol=1e-6)
    assert_allclose(np.linalg.norm(wide[0] - wide[1][to_numpy(j)[:, 0]], axis=-1), wanted[:, 0], rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("offset", [0, 300])
def test_half_precision(cupy, rng, dtype, offset):
    """As exact as of float32, near the origin, where Hopper has one product, and far off."""
    x, y = (offset + (30 if offset else 1) * rng.standard_normal((n, 40)) for n in (1000, 3000))
    x, y, w = x.astype(dtype), y.astype(dtype), rng.standard_normal(3000).astype(np.float32)
    cost = points.Cost(2, 3000.0 if offset else 3.0)
    found = points.logsumexp(*map(cupy.asarray, (x, y, w)), cost)
    wanted = points.logsumexp(*[array.astype(np.float64) for array in (x, y, w)], cost)
    assert_allclose(to_numpy(found), wanted, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", plain.SCORES, ids=repr)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize(("m", "n", "d"), [(3, 7, 1), (50, 801, 70), (300, 1000, 520), (2000, 40000, 64)])
def test_losses(cupy, rng, kernel, dtype, m, n, d):
    """By cuBLAS, of blocks of any width, also of arrays that it does not read as they lie, on a stream of one's own;
    the same each time."""
    arrays = [(rng.standard_normal(shape) / d**0.25).astype(dtype) for shape in ((m, d), (n, d), (n,))]
    targets, df = rng.integers(-1, n, m), rng.standard_normal(m)
    wide = [array.astype(np.float64) for array in arrays]
    f, backprop = points.cross_entropy_vjp(*wide[:2], targets, kernel, w=wide[2])
    wanted, wanted_scale = (f, *backprop(df)), backprop(df).kernel
    rounding = {2: 2.0**-7 if dtype == ml_dtypes.bfloat16 else 2.0**-10, 4: 1e-5, 8: 1e-12}[np.dtype(dtype).itemsize]
    sizes, found = [*[np.abs(z).max(initial=1e-3) for z in wanted], 10 * np.linalg.norm(df)], []
    for turn in range(3):
        x, y, w = map(cupy.asarray, arrays)
        y = cupy.repeat(y, 2, axis=1)[:, ::2] if turn == 2 else y
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream(non_blocking=True):
            f, backprop = points.cross_entropy_vjp(x, y, cupy.asarray(targets), kernel, w=w)
            grads = backprop(cupy.asarray(df))
            found.append([to_numpy(z) for z in (f, *grads, grads.kernel)])
    for *turns, want, size in zip(*found, (*wanted, wanted_scale), sizes):
        assert_array_equal(turns[0], turns[1])
        for got in turns:
            assert_allclose(got.astype(np.float64), want, atol=rounding * size)
    tangents = [cupy.asarray(z) for z in arrays]
    _, exact = points.cross_entropy_vjp(*wide[:2], targets, kernel, w=wide[2])
    for got, want in zip(backprop.hvp(cupy.asarray(df), *tangents), exact.hvp(df, *wide)):
        assert_allclose(to_numpy(got).astype(np.float64), want, atol=10 * rounding * np.abs(want).max())


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", plain.SCORES, ids=repr)
@pytest.mark.parametrize("mask", ["none", "lengths", "dense"])
@pytest.mark.parametrize("d", [3, 70, 300])
def test_logarithms_of_scores(cupy, rng, kernel, mask, d):
    here, there = drawn(rng, cupy, (2, 2, 50, d), (80, d), (80,), (2, 2, 50))
    here, there = ([z / d**0.25 for z in arrays] for arrays in (here, there))
    (f, backprop), (f_there, backprop_there) = (
        points.logsumexp_vjp(*arrays[:3], kernel, mask=MASKS[mask]) for arrays in (here, there)
    )
    assert_same(f_there, f)
    grads, grads_there = backprop(here[3]), backprop_there(there[3])
    for found, wanted in zip((*grads_there, grads_there.kernel), (*grads, grads.kernel)):
        assert_same(found, wanted)
    for found, want in zip(backprop_there.hvp(there[3], *there[:3]), backprop.hvp(here[3], *here[:3])):
        assert_same(found, want, 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_transport(cupy, rng, debias, dtype):
    here, there = drawn(rng, cupy, (2, 50, 3), (2, 80, 3), dtype=dtype)
    for arrays, xp in ((here, np), (there, cupy)):
        arrays += [xp.full(n, 1 / n, dtype) for n in (50, 80)]
    (r, backprop), (r_there, backprop_there) = (
        points.sinkhorn_vjp(*arrays, points.Cost(2, 0.5), tol=1e-6, debias=debias) for arrays in (here, there)
    )
    scale = 1e-5 if dtype == np.float64 else 1e-4
    assert r_there.converged
    assert_same(r_there.cost, r.cost, scale)
    for found, wanted in zip(backprop_there(), backprop()):
        assert_same(found, wanted, scale)


@pytest.mark.gpu
def test_without_batch_axes(cupy, rng):
    """Results are arrays of no axes, which CuPy's `full_like(shape=())` does not make."""
    here, there = drawn(rng, cupy, (50, 3), (80, 3), (50, 2))
    found = []
    for (x, y, b), xp in ((here, np), (there, cupy)):
        r, backprop = points.sinkhorn_vjp(x, y, xp.full(50, 1 / 50), xp.full(80, 1 / 80), points.Cost(2, 0.5), tol=1e-9)
        s, of_solution = points.solve_vjp(x, b, points.Gaussian(), ridge=0.1, tol=1e-9)
        logdet, of_logdet = points.log_determinant_vjp(x, points.Gaussian(), ridge=0.1, tol=1e-9)
        found.append([r.cost, r.primal(), *backprop(), s.x, *of_solution(b), logdet, *of_logdet()])
    for wanted, one in zip(*found):
        assert_same(one, wanted, 1e-6)


@pytest.mark.gpu
def test_calls_do_not_wait_for_the_device(cupy, rng):
    """Whatever does cannot be captured in a graph; sinkhorn does, see there."""
    from ..tools.graphs import capture, own_stream

    x, y, b, ds, lengths = drawn(rng, cupy, (500, 3), (400, 3), (400, 2), (500, 2), (3,))[1]
    kernel = points.Gaussian() + points.Matern(1.5, lengths**2 + 1)

    def calls():
        s, backprop = points.product_vjp(x, y, b, kernel)
        f, backprop_of_logs = points.logsumexp_vjp(x, y, b[:, 0], points.Cost(2, 0.1))
        tgrads = *backprop.hvp(ds, x, y, b, tds=ds), *backprop_of_logs.hvp(ds[:, 0], x, None, None)
        return s, *backprop(ds), *tgrads, f, *backprop_of_logs(ds[:, 0]), *points.nearest(x, y, 3)

    with own_stream():
        wanted = calls()
        found, graph = capture(calls)
        graph.launch()
        for one, other in zip(found, wanted):
            assert_array_equal(to_numpy(one), to_numpy(other))

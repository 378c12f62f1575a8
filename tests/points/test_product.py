"""Kernel products and their gradients."""

import copy
import pickle
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn import points
from numbattn.points.kinds import DIFFERENCES

from ..accuracy import to_numpy
from ..test_errors import Array, Tensor
from . import plain

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.mark.parametrize("kernel", plain.KERNELS, ids=repr)
def test_kernels(xp, rng, kernel):
    x, y, b = rng.standard_normal((2, 5, 3)), rng.standard_normal((2, 7, 3)), rng.standard_normal((2, 7, 4))
    s = points.product(*map(xp.asarray, (x, y, b)), kernel)
    assert isinstance(s, xp.ndarray)
    assert_allclose(to_numpy(s), plain.KERNELS[kernel](x, y) @ b, atol=1e-12)


@pytest.mark.parametrize("kernel", plain.KERNELS, ids=repr)
@pytest.mark.parametrize("mask", [None, na.Causal() | na.First(1)], ids=["", "mask"])
def test_gradients_are_those_of_finite_differences(rng, kernel, mask):
    arrays = x, y, b = rng.standard_normal((2, 6, 3)), rng.standard_normal((7, 3)), rng.standard_normal((1, 7, 2))
    s, backprop = points.product_vjp(*arrays, kernel, mask=mask)
    assert_array_equal(s, points.product(*arrays, kernel, mask=mask))
    ds = rng.standard_normal(s.shape)
    grads = backprop(ds)
    assert grads._fields == ("dx", "dy", "db")
    for at, (gradient, array) in enumerate(zip(grads, arrays)):
        assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype)
        direction = rng.standard_normal(array.shape)
        exact = plain.slope(lambda *now: (ds * points.product(*now, kernel, mask=mask)).sum(), arrays, at, direction)
        assert_allclose((gradient * direction).sum(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kernel", plain.KERNELS, ids=repr)
def test_gradients_of_lengths(rng, kernel):
    x, y, b = rng.standard_normal((2, 6, 3)), rng.standard_normal((7, 3)), rng.standard_normal((7, 2))
    s, backprop = points.product_vjp(x, y, b, kernel)
    ds = rng.standard_normal(s.shape)
    found = backprop(ds).kernel
    plain.assert_gradient(rng, found, lambda kernel: (ds * points.product(x, y, b, kernel)).sum(), kernel)


@pytest.mark.parametrize("kernel", [kernel for kernel in plain.KERNELS if kernel != points.Cosine()], ids=repr)
def test_gradients_where_points_coincide_are_finite(rng, kernel):
    x, b = rng.standard_normal((5, 3)), rng.standard_normal((5, 2))
    _, backprop = points.product_vjp(x, x, b, kernel)
    dx, dy, _ = backprop(b)
    assert np.isfinite(dx).all()
    one, ds = np.zeros((1, 3)), np.ones((1, 1))
    for gradient in points.product_vjp(one, one, ds, kernel)[1](ds)[:2]:
        assert_array_equal(gradient, 0 * one)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_cosines_of_points_of_any_size(rng, size):
    """Whose squares are no float32."""
    x, y, b, ds = rng.standard_normal((4, 6, 3), dtype=np.float32)
    s, backprop = points.product_vjp(x, y, b, points.Cosine())
    found, of_large = points.product_vjp(x * np.float32(size), y, b, points.Cosine())
    assert_allclose(found, s, rtol=1e-4, atol=1e-5)
    assert_allclose(of_large(ds).dx * np.float32(size), backprop(ds).dx, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "kernel"), [(3, points.Matern(1.5, 2.0)), (40, points.Matern(1.5, 6.0)),
                                           (40, points.Cosine())], ids=str)  # fmt: skip
def test_dtypes(xp, rng, dtype, d, kernel):
    x, y, b, ds = (rng.standard_normal(shape).astype(dtype) for shape in ((60, d), (70, d), (70, 2), (60, 2)))
    x, y = (100 * z for z in (x, y)) if kernel == points.Cosine() else (x, y)
    s, backprop = points.product_vjp(*map(xp.asarray, (x, y, b)), kernel)
    grads = backprop(xp.asarray(ds))
    exact, exact_backprop = points.product_vjp(*(z.astype(np.float64) for z in (x, y, b)), kernel)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for got, wanted in zip((s, *grads), (exact, *exact_backprop(ds.astype(np.float64)))):
        assert got.dtype == dtype
        error = np.abs(to_numpy(got).astype(np.float64) - wanted).max()
        assert error < 4 * max(eps, 2e-16) * np.abs(wanted).max() * (1 if dtype in DTYPES[:2] else 8)


@pytest.mark.parametrize("kernel", [points.Gaussian, points.Laplacian, points.Matern], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("d", [2, 8, 10, 64, 300])
def test_errors_are_about_those_of_the_plain_formula(xp, rng, kernel, d):
    """At most twice, in float32, of differences, all pairs at once; three times by products on a GPU."""
    length = 0.6 * d**0.5
    kernel = kernel(1.5, length) if kernel is points.Matern else kernel(length)
    x, y, b, ds = (rng.standard_normal(shape).astype(np.float32) for shape in ((200, d), (250, d), (250, 3), (200, 3)))
    exact, backprop = points.product_vjp(*(z.astype(np.float64) for z in (x, y, b)), kernel)
    wanted = exact, *backprop(ds.astype(np.float64))
    s, backprop = points.product_vjp(*map(xp.asarray, (x, y, b)), kernel)
    found = [to_numpy(z) for z in (s, *backprop(xp.asarray(ds)))]
    differences = (x[:, None] - y) / np.float32(length)
    t = (differences**2).sum(-1)
    slopes = 2 * kernel._kind.derivative(t) * (ds @ b.T) / np.float32(length)
    K = kernel._kind.value(t)
    slopes = slopes[..., None] * differences
    plainly = K @ b, slopes.sum(1), -slopes.sum(0), K.T @ ds
    times = 3 if xp is not np and d > DIFFERENCES else 2  # sums of tensor cores are not rounded, but cut off
    for got, other, exactly in zip(found, plainly, wanted):
        for norm in (np.linalg.norm, lambda error: np.abs(error).max()):
            # the factor of t is rounded, too
            assert norm(got - exactly) < times * norm(other - exactly) + 2e-7 * norm(exactly)


def test_numpy_told_to_raise_errors_does_not_change_that(rng):
    """Kernels fall below the smallest number, and far-off points have none."""
    x, y, b = (rng.standard_normal((30, n)).astype(np.float32) for n in (3, 3, 1))
    y[20:] *= 1e3
    b, small = np.abs(b), np.float32(1e-30) * np.abs(b)
    with np.errstate(all="raise"):
        for kernel in (points.Gaussian(0.1), points.Matern(1.5, 0.1) + 0.5 * points.Cosine(), points.Cost(2, 1e-3)):
            s, backprop = points.product_vjp(x, y, small, kernel)
            backprop(s)
        f, backprop = points.logsumexp_vjp(x, y, b[:, 0], points.Cost(2, 1e-3))
        backprop(f)
        points.nearest(x, y, 3)
        a = np.full(30, np.float32(1 / 30))
        points.sinkhorn_vjp(x, x[::-1] + b, a, a, points.Cost(2, 0.5), debias=True, tol=1e-2)[1]()
        points.operator(x, x, points.Gaussian(0.1), ridge=0.5) @ small


@pytest.mark.parametrize("d", [3, 20])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["", "batch"])
def test_points_far_off_keep_the_digits_of_their_differences(rng, d, batch):
    """In float32, whichever of x and y is shared by the batch, and where clouds of a batch are far from each other."""
    x, y, b = rng.random((*batch, 30, d)), rng.random((*batch, 40, d)), rng.random((40, 2))
    offsets = 1000 * (1 + np.arange(len(x)))[:, None, None] if batch else 1000
    arrays = (x + offsets).astype(np.float32), (y + offsets).astype(np.float32), b.astype(np.float32)
    if batch:
        arrays = arrays[0][:1, :, :], arrays[1][0], arrays[2]
    kernel = points.Gaussian(0.3 * d**0.5)
    exact = points.product(*(z.astype(np.float64) for z in arrays), kernel)
    assert_allclose(points.product(*arrays, kernel), exact, rtol=3e-6)


def test_clouds_of_a_batch_have_centres_of_their_own(rng):
    offsets = np.array([1e3, 0, -1e3])[:, None, None]
    x, y = (rng.random((3, n, 20)) + offsets for n in (30, 40))
    x, y, b = (z.astype(np.float32) for z in (x, y, rng.random((40, 2))))
    exact = points.product(*(z.astype(np.float64) for z in (x, y, b)), points.Gaussian())
    assert_allclose(points.product(x, y, b, points.Gaussian()), exact, rtol=3e-6)


@pytest.mark.parametrize("far", [0, 1], ids="xy")
def test_a_cloud_that_a_batch_shares_is_the_centre(rng, far):
    """Of the others, some are far from it."""
    clouds = [rng.random((30, 20)), rng.random((40, 20))]
    clouds[far] = clouds[far] + np.array([0, 3e3, -1e4])[:, None, None]
    x, y, b = (z.astype(np.float32) for z in (*clouds, rng.random((40, 2))))
    exact = points.product(*(z.astype(np.float64) for z in (x, y, b)), points.Gaussian())
    assert_allclose(points.product(x, y, b, points.Gaussian()), exact, rtol=3e-6)


def test_the_cosine_of_nothing_is_0(rng):
    x, b = rng.standard_normal((4, 3)), rng.random((4, 2))
    x[1] = 0
    s, backprop = points.product_vjp(x, x, b, points.Cosine())
    dx, dy, db = backprop(b)
    for found in (s, dx, dy, db):
        assert np.isfinite(found).all()
        assert_array_equal(found[1], 0 * found[1])


def test_what_nobody_sees_may_be_nan_and_moves_no_centre(rng):
    x, y, b, ds = (rng.random((2, 9, n)) for n in (12, 12, 2, 2))
    mask, seen = na.Lengths(keys=np.array([6, 4]), queries=np.array([5, 7])), np.arange(9)[:, None]
    for array, lengths in ((x, [5, 7]), (y, [6, 4]), (b, [6, 4]), (ds, [5, 7])):
        array[np.broadcast_to(seen >= np.array(lengths)[:, None, None], array.shape)] = np.nan
    s, backprop = points.product_vjp(x, y, b, points.Laplacian(), mask=mask)
    grads = backprop(ds)
    clean = [np.nan_to_num(array) for array in (x, y, b)]
    visible = mask.dense(9, 9)
    assert_allclose(s, np.where(visible, np.exp(-plain.distances(*clean[:2], 1)), 0) @ clean[2], rtol=1e-9)
    assert all(np.isfinite(gradient).all() for gradient in (*grads, grads.kernel))
    for array in (x, y):
        array[np.isnan(array)] = 1e30
    assert_allclose(points.product(x, y, b, points.Laplacian(), mask=mask), s, rtol=1e-9)


@pytest.mark.parametrize("kernel", [points.Matern(1.5) * points.Cauchy(), points.Gaussian(np.array([1.0, 2.0]))],
                         ids=["product", "lengths"])  # fmt: skip
def test_nan_stays_in_its_segment(rng, kernel):
    """Also if it is half of all points."""
    x, y, b = rng.random((3, 20, 2))
    y[:10] = np.nan
    options = {"mask": na.Segments([0, 10, 20])}
    s, backprop = points.product_vjp(x, y, b, kernel, **options)
    alone, backprop_alone = points.product_vjp(x[10:], y[10:], b[10:], kernel)
    assert_allclose(s[10:], alone, rtol=1e-12)
    for found, wanted in zip(backprop(np.ones((20, 2))), backprop_alone(np.ones((10, 2)))):
        assert_allclose(found[10:], wanted, rtol=1e-10, atol=1e-12)


def test_what_nobody_sees_has_no_cosine(rng):
    """Also where each element of the batch that shares a cloud sees other points of it."""
    x, y, b, ds = (rng.standard_normal(shape) for shape in ((7, 3), (2, 9, 3), (2, 9, 2), (2, 7, 2)))
    x[6], y[0, 6:], y[1, 4:] = np.nan, np.nan, np.nan
    mask = na.Lengths(keys=np.array([6, 4]), queries=np.array([5, 6]))
    _, backprop = points.product_vjp(x, y, b, points.Cosine(), mask=mask)
    _, exact = points.product_vjp(*map(np.nan_to_num, (x, y)), b, points.Cosine(), mask=mask.dense(7, 9))
    for found, wanted in zip(backprop(ds), exact(ds)):
        assert_allclose(found, wanted, atol=1e-12)


SHAPES = st.lists(st.sampled_from([1, 2, 3]), max_size=3)


@st.composite
def calls(draw):
    """Shapes that broadcast."""
    whole = draw(SHAPES)
    batches = [[n if draw(st.booleans()) else 1 for n in whole][draw(st.integers(0, len(whole))) :] for _ in range(3)]
    m, n, d, e = (draw(st.integers(0, 4)) for _ in range(4))
    return [(*batch, *own) for batch, own in zip(batches, ((m, d), (n, d), (n, e)))]


@settings(max_examples=60)
@given(calls(), st.integers(0, 3))
def test_shapes(shapes, which):
    rng = np.random.default_rng(0)
    x, y, b = arrays = [rng.standard_normal(shape) for shape in shapes]
    kernel = [points.Gaussian(), points.Linear(), points.Cosine(), 2 * points.Polynomial(2) + points.Cauchy(3.0)][which]
    s, backprop = points.product_vjp(x, y, b, kernel)
    with np.errstate(invalid="ignore"):
        K = [lambda: np.exp(-plain.squares(x, y, 1) / 2), lambda: x @ plain.T(y),
             lambda: np.nan_to_num(x @ plain.T(y) / plain.norms(x) / plain.T(plain.norms(y))),
             lambda: 2 * (x @ plain.T(y) + 1) ** 2 + 1 / (1 + plain.squares(x, y, 3))][which]()  # fmt: skip
    assert_allclose(s, np.broadcast_to(K @ b, s.shape), atol=1e-12)
    batch = np.broadcast_shapes(*(shape[:-2] for shape in shapes))
    assert s.shape == (*batch, x.shape[-2], b.shape[-1])
    grads = backprop(np.ones(s.shape))
    assert [gradient.shape for gradient in grads] == shapes
    assert_allclose((grads.db * b).sum(), s.sum(), atol=1e-10)
    assert all(np.isfinite(gradient).all() for gradient in grads)
    for array, gradient in zip(arrays[:2], grads):
        assert gradient.dtype == array.dtype


def test_strides(rng):
    x, y, b = rng.random((3, 5, 2)).T, rng.random((14, 3))[::2], np.broadcast_to(rng.random(2), (7, 2))
    y = np.broadcast_to(y, (2, 7, 3))
    s, backprop = points.product_vjp(x[:, ::-1], y, b, points.Gaussian())
    copies = [np.ascontiguousarray(z) for z in (x[:, ::-1], y, b)]
    again, backprop_again = points.product_vjp(*copies, points.Gaussian())
    assert_array_equal(s, again)
    for one, other in zip(backprop(s), backprop_again(s)):
        assert_array_equal(one, other)


def test_masks_say_who_sees_whom(rng):
    x, y, b = rng.random((20, 3)), rng.random((30, 3)), rng.random((30, 2))
    K = np.exp(-plain.squares(x, y, 1) / 2)
    for mask in (na.Segments([0, 5, 20], [0, 20, 30]), na.Window(3, 3), rng.random((20, 30)) < 0.5,
                 na.BlockSparse(rng.random((2, 3)) < 0.5, (10, 10))):  # fmt: skip
        visible = mask if isinstance(mask, np.ndarray) else mask.dense(20, 30)
        for kernel, pairs in ((points.Gaussian(), K), (points.Linear(), x @ y.T)):
            assert_allclose(points.product(x, y, b, kernel, mask=mask), np.where(visible, pairs, 0) @ b, atol=1e-12)


@st.composite
def masked(draw):
    """Numbers of points, and a mask for them."""
    m, n = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    bounds = [sorted(draw(st.lists(st.integers(0, count), min_size=3, max_size=3))) for count in (m, n)]
    masks = [na.Causal(draw(st.none() | st.integers(-40, 40))), na.Window(draw(st.integers(0, 9)), 2), na.First(3),
             na.Lengths(draw(st.integers(0, n)), draw(st.integers(0, m))), na.Prefix(draw(st.integers(0, n))),
             na.Dense(np.random.default_rng(m).random((m, n)) < 0.5), na.Segments(*bounds)]  # fmt: skip
    one, other, third = draw(st.permutations(masks))[:3]
    is_joined = draw(st.booleans()) and not any(isinstance(mask, na.Segments) for mask in (one, other))
    return m, n, (one | other if is_joined else one & other) & third


@settings(max_examples=60)
@given(masked(), st.sampled_from([3, 12]))
def test_masks_are_their_booleans(drawn, d):
    m, n, mask = drawn
    rng = np.random.default_rng(0)
    x, y, b, ds = (rng.random(shape) for shape in ((2, m, d), (2, n, d), (2, n, 2), (2, m, 2)))
    visible = mask.dense(m, n)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mask: ")  # of Lengths in an | with Segments
        s, backprop = points.product_vjp(x, y, b, points.Gaussian(), mask=mask)
        grads = backprop(ds)
    wanted, backprop = points.product_vjp(x, y, b, points.Gaussian(), mask=visible)
    for found, exact in zip((s, *grads), (wanted, *backprop(ds))):
        assert_allclose(found, exact, atol=1e-12)
    assert_allclose(s, np.where(visible, np.exp(-plain.squares(x, y, 1) / 2), 0) @ b, atol=1e-12)


def test_copies_of_backprop_have_its_functions(rng):
    """For other processes, too: with a mask, in a sum, and after a use; whatever other functions do the same."""
    points.Radial(lambda t: 1 / (1 + t / 9))
    kernel, (x, b) = points.Radial(inverse) + 0.5 * points.Gaussian(), rng.random((2, 5, 2))
    _, backprop = points.product_vjp(x, x, b, kernel, mask=na.Causal())
    wanted = *backprop(b), *backprop.hvp(b, x, None, b)
    for again in (copy.copy(backprop), copy.deepcopy(backprop), pickle.loads(pickle.dumps(backprop))):
        for one, other in zip((*again(b), *again.hvp(b, x, None, b)), wanted):
            assert_array_equal(one, other)


def inverse(t):
    return 1 / (1 + t / 9)


def test_gradients_are_values(rng):
    x = rng.random((3, 2))
    grads = points.product_vjp(x, x, x, points.Gaussian())[1](x)
    for again in (copy.copy(grads), pickle.loads(pickle.dumps(grads))):
        assert type(again) is points.ProductGradients
        assert_array_equal(again, grads)
        assert again.kernel == grads.kernel
    assert repr(grads).startswith("ProductGradients(dx=array(")


@pytest.mark.parametrize("kernel", [points.Laplacian(), points.Matern(2.5), points.Cost(1.5, 1.0)], ids=repr)
def test_points_that_coincide_in_many_dimensions(rng, kernel):
    """Rounding makes their distance anything but 0, not negative."""
    x, b = (10 * rng.standard_normal((64, 40))).astype(np.float32), rng.random((64, 1)).astype(np.float32)
    s, backprop = points.product_vjp(x, x, b, kernel)
    assert_allclose(s, b, rtol=0.1)
    assert all(np.isfinite(gradient).all() for gradient in backprop(b))


X, B = np.zeros((4, 3)), np.zeros((4, 2))
ERRORS = {
    "b: got the shape (4,), expected (..., 4, columns); pass b[:, None]": (X, X, B[:, 0], points.Gaussian()),
    "b: got the shape (3, 2), expected (..., 4, columns), a row for each point of y": (X, X, B[:3], points.Gaussian()),
    "x: got int64, allowed float16, bfloat16, float32, float64; pass x.astype(np.float32)": (
        X.astype(int), X, B, points.Gaussian()),
    "b: got float32, expected float64, the dtype of x; pass b.astype(np.float64)": (
        X, X, B.astype(np.float32), points.Gaussian()),
    "x: got the shape (4,), expected (..., points, features); pass x[:, None] for points of one feature": (
        X[:, 0], X, B, points.Gaussian()),
    "y: got 2 features, expected 3, as many as x": (X, B, B, points.Gaussian()),
    "y: got [], expected a numpy.ndarray or a cupy.ndarray": (X, [], B, points.Gaussian()),
    "batch axes of x (2,), y (3,), b () do not broadcast": (
        np.zeros((2, 4, 3)), np.zeros((3, 4, 3)), B, points.Gaussian()),
    "kernel: got 0.5, expected one of numbattn.points, as points.Gaussian(0.5)": (X, X, B, 0.5),
    "kernel: Gaussian length: got the shape (2,), expected a number or the shape (..., 3) or (..., 1)": (
        X, X, B, points.Linear() + points.Gaussian([1.0, 2.0])),
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    kind = TypeError if "dtype of x" in message or "allowed float16" in message or "[]" in message else ValueError
    kind = TypeError if message.startswith("kernel: got 0.5") else kind
    for function in (points.product, points.product_vjp):
        with pytest.raises(kind) as found:
            function(*ERRORS[message])
        assert str(found.value).replace("got list", "got []") == message


@pytest.mark.parametrize(("array", "kind", "framework"), [(Tensor(), "torch.Tensor", "torch"),
                                                          (Array(), "jaxlib.Array", "jax")])  # fmt: skip
@pytest.mark.parametrize(("of", "call"), [
    ("x", lambda array: points.product(array, X, B, points.Gaussian())),
    ("ds", lambda array: points.product_vjp(X, X, B, points.Gaussian())[1](array)),
    ("y", lambda array: points.nearest(X, array, 2)),
])  # fmt: skip
def test_arrays_of_frameworks_are_told_how_to_come(array, kind, framework, of, call):
    with pytest.raises(TypeError) as found:
        call(array)
    assert str(found.value) == (
        f"{of}: got {kind} of {array.dtype}, expected a numpy.ndarray or a cupy.ndarray; "
        f"product, logsumexp and sinkhorn of those are in numbattn.interop.{framework}.points; else pass "
        f"np.asarray({of}), or cupy.from_dlpack({of}) on a GPU"
    )


def test_errors_of_gradients():
    s, backprop = points.product_vjp(X, X, B, points.Gaussian())
    with pytest.raises(ValueError, match=r"ds: got the shape \(4,\), expected \(4, 2\), the shape of s"):
        backprop(s[:, 0])
    with pytest.raises(TypeError, match="ds: got int64, allowed float16"):
        backprop(s.astype(int))


def test_errors_of_masks():
    with pytest.raises(ValueError, match=r"mask: Lengths keys: got 9, allowed 0 to 4"):
        points.product(X, X, B, points.Gaussian(), mask=na.Lengths(keys=9))


FAULTS = {
    "test_nan_stays_in_its_segment[product]": {
        "points/formula.py": {"np.where(np.isfinite(z), z, 0) for z in (block": "z for z in (block"},
    },
    "test_nan_stays_in_its_segment[lengths]": {
        "points/pairs.py": {"np.nan_to_num(centre, nan=0.0, posinf=0.0, neginf=0.0)": "centre"},
    },
    "test_shapes": {
        "sum_broadcast(factor * db, self.b.shape)": "sum_broadcast(db, self.b.shape)",
        "points/pairs.py": {
            "return points - centre.reshape(centre.shape[max(centre.ndim - points.ndim, 0) :])": (
                "return points - centre"
            ),
        },
    },
    "test_the_cosine_of_nothing_is_0": {
        "points/kernels.py": {"np.where(largest == 0, math.inf, largest *": "(largest *"},
    },
    "test_a_cloud_that_a_batch_shares_is_the_centre": {
        "points/pairs.py": {"which = 0 if sizes[0] < sizes[1] else 1": "which = 1"},
    },
    "test_gradients_of_lengths[Cost(power=2.0, epsilon=0.3)]": {
        "points/kernels.py": {"return (-found / (self.power * self.epsilon))": "return (-found / self.epsilon)"},
    },
    "test_gradients_are_those_of_finite_differences[-Cosine(scale=1.0)]": {
        "points/kernels.py": {
            "return (gradient - unit * dots(unit, gradient)) / _norms(x)": "return gradient / _norms(x)",
        },
    },
    "test_what_nobody_sees_may_be_nan_and_moves_no_centre": {
        "points/pairs.py": {"points = np.where(seen, points, math.inf)": "points = points"},
        "points/kernels.py": {"products = np.where(gradient == 0, 0, x * gradient)": "products = (x * gradient)"},
    },
    "test_what_nobody_sees_has_no_cosine": {
        "points/kernels.py": {"_across(_with(gradient, x), gradient))": "_across(x, gradient))"},
    },
    "test_copies_of_backprop_have_its_functions": {
        "points/pairs.py": {"    def __reduce__(": "    def _reduce("},
    },
    "test_masks_say_who_sees_whom": {
        "points/pairs.py": {
            "self.kind == kinds.LINEAR and self.pairs.mask is NOTHING_HIDDEN": "self.kind == kinds.LINEAR",
        },
    },
    "test_errors": {"points/checks.py": {"if array.dtype != x.dtype and (": "if False and ("}},
}

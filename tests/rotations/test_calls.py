"""Turned arrays, of NumPy and of CuPy, by the formula; gradients and tangents; layouts; errors."""

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn.base.checks import DTYPES, dtype_of_sums
from tests.accuracy import assert_equal, to_numpy

from .plain import angles, turned

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = DTYPES
EPS = {dtype: float(ml_dtypes.finfo(dtype).eps) for dtype in DTYPES}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def check(got, x, t, interleaved=False, factor=1.0):
    """At most twice the error of the plain formula in the dtype of sums, relative RMS and largest; for float64 what
    rounded angles explain, on both sides."""
    want, sums = turned(x, t, interleaved, factor), dtype_of_sums(x.dtype)
    plain = turned(x, t, interleaved, factor, work=sums).astype(x.dtype)
    assert got.dtype == x.dtype
    got, plain = (abs(to_numpy(each).astype(float) - want) for each in (got, plain))
    slack = 0 if x.dtype != FLOAT64 else 2 * EPS[FLOAT64] * (1 + abs(t).max()) * abs(x).max()
    assert got.max() <= 2 * plain.max() + slack
    assert np.linalg.norm(got) <= 2 * np.linalg.norm(plain) + slack * got.size**0.5


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dims", "features"), [(None, 64), (20, 64), (2, 7), (None, 200), (None, 2), (62, 63)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_the_formula(rng, xp, dtype, dims, features, interleaved):
    x, positions = rng.standard_normal((2, 9, 37, features)).astype(dtype), rng.integers(-2000, 100000, 37)
    y = na.rotary(xp.asarray(x), xp.asarray(positions), na.Rotary(dims=dims, interleaved=interleaved))
    check(y, x, angles(positions, dims or features), interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scaling(rng, xp, interleaved):
    """Other features keep their length."""
    x, rotary = rng.standard_normal((3, 37, 40)).astype(FLOAT32), na.Rotary(500.0, 32, interleaved, YARN)
    turns, factor = rotary._turns(32)
    assert factor > 1
    y = na.rotary(xp.asarray(x), np.arange(37), rotary)
    check(y, x, np.arange(37)[:, None] * turns * 2 * np.pi, interleaved, factor)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, np.uint64, np.float16, np.float32, np.float64, list])
def test_positions_of_any_numbers(rng, xp, kind):
    """None of them is rounded."""
    x = rng.standard_normal((3, 5, 8)).astype(FLOAT32)
    positions = [0, 3, 200, 7, 1] if kind is list else np.array([0, 3, 200, 7.25, 1]).astype(kind)
    y = na.rotary(xp.asarray(x), positions if kind is list else xp.asarray(positions), na.Rotary())
    check(y, x, angles(positions, 8))


@pytest.mark.parametrize("positions", [[10**5, 10**6 + 1, 2**31 - 1, 2**40 + 3], [1e5 + 0.125, 1e6 + 0.5, 3e7, 1e9]])
def test_positions_of_millions_cost_no_digits(rng, xp, positions):
    """Angles in extended precision; those of float64 are wrong by 1e-16 of theirs, of float32 by whole turns."""
    x, width = rng.standard_normal((4, 32)).astype(FLOAT32), 32
    frequencies = (10000.0 ** (-np.arange(0, width, 2) / width)).astype(np.longdouble)
    t = np.array(positions, np.longdouble)[:, None] * frequencies
    y = to_numpy(na.rotary(xp.asarray(x), positions, na.Rotary()))
    np.testing.assert_allclose(y, turned(x, t), rtol=0, atol=2e-6 + 1e-15 * max(positions))


def test_each_axis_has_a_part_of_the_features(rng, xp):
    """In order, each as if it were alone; what is left stays."""
    x, at = rng.standard_normal((2, 3, 30, 50)).astype(FLOAT32), rng.integers(0, 99, (2, 1, 30, 3))
    for interleaved in (False, True):
        y = na.rotary(xp.asarray(x), xp.asarray(at), na.Rotary(100.0, 48, interleaved))
        for n in range(3):
            some = slice(16 * n, 16 * n + 16)
            check(y[..., some], x[..., some], angles(at[..., n], 16, 100.0), interleaved)
        assert_equal(y[..., 48:], x[..., 48:])


@pytest.mark.parametrize("shape", [(7,), (1, 1, 7), (2, 1, 7), (2, 3, 7), (1, 3, 7)])
def test_positions_are_shared_or_not(rng, xp, shape):
    x, positions = rng.standard_normal((2, 3, 7, 12)).astype(FLOAT32), rng.integers(0, 99, shape)
    check(na.rotary(xp.asarray(x), xp.asarray(positions), na.Rotary()), x, angles(positions, 12))


@pytest.mark.parametrize("shape", [(7, 8), (3, 7, 8), (2, 3, 4, 7, 8), (2, 3, 2, 2, 7, 8)])
def test_any_number_of_axes(rng, xp, shape):
    x, positions = rng.standard_normal(shape), rng.integers(0, 99, (*shape[:-3], 1, 7)[-len(shape) + 1 :])
    t = angles(positions, 8)
    check(na.rotary(xp.asarray(x), xp.asarray(positions), na.Rotary()), x, t)
    out = xp.zeros((*shape[:-1], 2 * shape[-1]))[..., ::2]
    assert na.rotary(xp.asarray(x), xp.asarray(positions), na.Rotary(), out=out) is out
    check(out, x, t)


VIEWS = {
    "heads after tokens": lambda x: x.swapaxes(-2, -3).copy().swapaxes(-2, -3),
    "columns after rows": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "backwards": lambda x: x[:, ::-1, ::-1].copy()[:, ::-1, ::-1],
    "features backwards": lambda x: x[..., ::-1].copy()[..., ::-1],
    "a part of larger rows": lambda x: np.concatenate([x, x, x], axis=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "one more byte for each row": lambda x: np.concatenate([x, x[..., :1]], axis=-1)[..., :-1],
}


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_strides(rng, xp, view, interleaved, dtype):
    """Of x, of what it is written to, and of both where that is x itself. Kernels for other layouts may round a sum of
    products after another product."""
    x = xp.asarray(rng.standard_normal((2, 3, 21, 24)).astype(dtype))
    rotary, tolerance = na.Rotary(dims=16, interleaved=interleaved), 0 if xp is np else 4 * EPS[x.dtype]
    want = to_numpy(na.rotary(x, np.arange(21), rotary))

    def check_as_wanted(got):
        np.testing.assert_allclose(to_numpy(got), want, rtol=0, atol=tolerance)

    check_as_wanted(na.rotary(VIEWS[view](x), np.arange(21), rotary))
    out = VIEWS[view](xp.zeros_like(x))
    assert na.rotary(x, np.arange(21), rotary, out=out) is out
    check_as_wanted(out)
    out = VIEWS[view](x)
    na.rotary(out, np.arange(21), rotary, out=out)
    check_as_wanted(out)



def test_tangents_where_the_tangent_was(rng, xp):
    """y may be written over tx, and over x that is its own tangent."""
    x, tx = xp.asarray(rng.standard_normal((2, 3, 21, 8)))
    want, twant = (to_numpy(na.rotary(each, np.arange(21), na.Rotary())) for each in (x, tx))
    y, ty = na.rotary_jvp(x, tx, np.arange(21), na.Rotary(), out=tx)
    assert y is tx
    np.testing.assert_allclose(to_numpy(y), want, atol=1e-14)
    np.testing.assert_allclose(to_numpy(ty), twant, atol=1e-14)
    _, ty = na.rotary_jvp(x, x, np.arange(21), na.Rotary(), out=x)
    np.testing.assert_allclose(to_numpy(ty), want, atol=1e-14)


def test_one_row_for_all(rng, xp):
    x = xp.asarray(rng.standard_normal((1, 1, 8)))
    y = na.rotary(xp.broadcast_to(x, (3, 7, 8)), np.arange(7), na.Rotary())
    assert_equal(y, na.rotary(xp.tile(x, (3, 7, 1)), np.arange(7), na.Rotary()))


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8), (0, 8)])
def test_empty(xp, shape):
    y, backprop = na.rotary_vjp(xp.zeros(shape), np.zeros(shape[-2], int), na.Rotary())
    assert y.shape == backprop(y).shape == shape


@pytest.mark.parametrize("interleaved", [False, True])
def test_only_distances_count(rng, xp, interleaved):
    q, k = map(xp.asarray, rng.standard_normal((2, 4, 20, 32)))
    rotary, products = na.Rotary(interleaved=interleaved), []
    for start in (0, 77, -5):
        positions = np.arange(start, start + 20)
        products.append(na.rotary(q, positions, rotary) @ na.rotary(k, positions, rotary).swapaxes(-1, -2))
    for other in products[1:]:
        np.testing.assert_allclose(to_numpy(other), to_numpy(products[0]), atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_and_tangents(rng, xp, interleaved, dtype):
    """Against the formula, whose matrix is transposed: lengths grow by the factor either way."""
    x, dy = rng.standard_normal((2, 2, 3, 20, 36)).astype(dtype)
    positions, rotary = rng.integers(0, 999, (2, 1, 20)), na.Rotary(500.0, 32, interleaved, YARN)
    turns, factor = rotary._turns(32)
    t = positions[..., None] * turns * 2 * np.pi
    y, backprop = na.rotary_vjp(xp.asarray(x), xp.asarray(positions), rotary)
    assert_equal(y, na.rotary(xp.asarray(x), positions, rotary))
    dx = backprop(xp.asarray(dy))
    check(dx, dy, -t, interleaved, factor)
    out = xp.zeros_like(y)
    assert backprop(xp.asarray(dy), out=out) is out
    assert_equal(out, dx)
    left, right = (np.vdot(to_numpy(a).astype(float), b.astype(float)) for a, b in ((y, dy), (dx, x)))
    assert left == pytest.approx(right, abs=40 * EPS[np.dtype(dtype)] * x.size**0.5)
    y, ty = na.rotary_jvp(xp.asarray(x), xp.asarray(dy), positions, rotary)
    assert_equal(y, na.rotary(xp.asarray(x), positions, rotary))
    check(ty, dy, t, interleaved, factor)
    _, several = na.rotary_jvp(xp.asarray(x), xp.asarray(np.stack([dy, x])), positions, rotary)
    assert_equal(several[0], ty)
    assert_equal(several[1], y)


# -------------------------------------------------------------------------------------------------------------- errors
X, AT, TURN = np.zeros((2, 3, 5, 8)), np.arange(5), na.Rotary()
WRONG = [
    (lambda: na.rotary(X.tolist(), AT, TURN), TypeError, "x: got list, expected a numpy.ndarray"),
    (lambda: na.rotary(X.astype(int), AT, TURN), TypeError, "x: got int64, allowed float16"),
    (lambda: na.rotary(X[0, 0, 0], AT, TURN), ValueError, r"x: got the shape \(8,\), expected"),
    (lambda: na.rotary(X, np.arange(5), "rope"), TypeError, "rotary: got 'rope', expected a numbattn.Rotary"),
    (lambda: na.rotary(X, 5, na.Rotary()), TypeError, "positions: got 5, expected a numpy.ndarray"),
    (lambda: na.rotary(X, [[0, 1], [2]], na.Rotary()), ValueError, "positions: got a list of no shape"),
    (lambda: na.rotary(X, np.zeros(5, bool), na.Rotary()), TypeError, "positions: got numpy.ndarray of bool"),
    (lambda: na.rotary(X, np.arange(4), na.Rotary()), ValueError,
     r"positions: got the shape \(4,\), expected \(5,\), or for each axis of x \(2 or 1, 3 or 1, 5\)"),
    (lambda: na.rotary(X, np.zeros((2, 5)), na.Rotary()), ValueError, r"positions: got the shape \(2, 5\)"),
    (lambda: na.rotary(X, np.zeros((3, 1, 5)), na.Rotary()), ValueError, r"positions: got the shape \(3, 1, 5\)"),
    (lambda: na.rotary(X, np.zeros((2, 1, 5, 0)), na.Rotary()), ValueError, r"positions: got the shape \(2, 1, 5, 0\)"),
    (lambda: na.rotary(X, np.zeros((1, 2, 1, 5, 2)), na.Rotary()), ValueError, "positions: got the shape"),
    (lambda: na.rotary(X, np.zeros((2, 1, 5, 3)), na.Rotary()), ValueError,
     "features of x: got 8, expected a multiple of 6, pairs along each axis of positions"),
    (lambda: na.rotary(X, np.arange(5), na.Rotary(dims=10)), ValueError, "Rotary dims: got 10, at most 8"),
    (lambda: na.rotary(X[..., :7], AT, TURN), ValueError, "features of x: got 7, expected a multiple"),
    (lambda: na.rotary(X, AT, TURN, out=X[0]), ValueError, r"out: got the shape \(3, 5, 8\), expected"),
    (lambda: na.rotary(X, AT, TURN, out=X.astype("f")), ValueError, "out: got float32, expected float64"),
    (lambda: na.rotary(X, AT, TURN, out=np.broadcast_to(X[:1], X.shape)), ValueError, "out: got a read"),
    (lambda: na.rotary(X, AT, TURN, out=X[::-1]), ValueError, "out: overlaps x or positions"),
    (lambda: na.rotary_vjp(X, AT, TURN)[1](X[0]), ValueError, r"dy: got the shape \(3, 5, 8\), expected"),
    (lambda: na.rotary_jvp(X, X.astype("f"), AT, TURN), ValueError, "tx: got float32, expected float64"),
    (lambda: na.rotary_jvp(X, X[0], AT, TURN), ValueError, r"tx: got the shape \(3, 5, 8\), expected"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_errors(number):
    function, error, words = WRONG[number]
    with pytest.raises(error, match=words):
        function()


@pytest.mark.gpu
def test_streams_and_graphs(rng):
    """Numbers that are kept on the device serve all streams; a captured call is repeated with other positions."""
    cupy = pytest.importorskip("cupy")
    from tests.tools.graphs import capture, own_stream

    x, positions, rotary = cupy.asarray(rng.standard_normal((2, 3, 40, 64))), cupy.arange(40), na.Rotary(777.0)
    out = cupy.empty_like(x)
    with own_stream() as stream:
        na.rotary(x, positions, rotary, out=out)
        _, graph = capture(lambda: na.rotary(x, positions, rotary, out=out))
        positions += 5
        graph.launch(stream)
        stream.synchronize()
    assert_equal(out, na.rotary(x, np.arange(5, 45), rotary))


FAULTS = {
    "x.ndim == 2 or positions.shape[-3] > 1": "x.ndim == 2",
    "len(lead) <= LEAD": "len(lead) <= LEAD - 1 or len(lead) >= LEAD",
    "along[None] if several else along": "along",
    "lies_within_rows(out, x)": "True",
    "rotary, out, back=True": "rotary, out",
    'np.int64 if found.dtype.kind in "iu" else np.float32': "np.int32",
    "found.shape[-1] > 0": "True",
    "n not in (1, size)": "n not in (1, size, 3)",
    "caches/test_kv_cache.py::test_keys_are_turned_by_their_positions": {
        "positions[None, :, None]": "positions[None, :, None] + 1",
    },
}

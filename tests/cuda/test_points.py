"""Sums over pairs of points by the CUDA kernels, without a GPU: against the formula in float64."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

import numbattn as na
from numbattn.cuda.points import Points, norms
from numbattn.points import kinds
from numbattn.problem import describe
from tests.points import plain
from tests.tools.device import GPU, HOPPER, TURING
from tests.tools.launch import compiled_only, simulated_only

pytestmark = pytest.mark.usefixtures("world")
EPS = {np.dtype(dtype): eps for dtype, eps in (("float16", 2e-3), ("float32", 4e-6), ("float64", 1e-12))}


def drawn(rng, dtype=np.float32, batch=(1, 1), m=40, n=70, d=3, e=1):
    """x, y, b and c: some of x are some of y."""
    x, y, b, c = (rng.standard_normal((*batch, *sizes)).astype(dtype) for sizes in ((m, d), (n, d), (n, e), (m, e)))
    return x, y, b, c


def check(x, y, b, c, kind=kinds.GAUSSIAN, mask=None, device=HOPPER, visible=True, **vectors):
    """Both passes."""
    gpu, (problem, inputs) = GPU(device), describe(x, y, b, mask=mask)
    points = Points(lambda: gpu)
    given = {name: x.astype(problem.sum_dtype) for name, x in vectors.items()}
    found = points.sums(problem, inputs, kind, **given), points.gradient(problem, inputs, kind, c, **given)
    if mask is not None:
        visible = np.broadcast_to(inputs.mask.dense(problem.seqlen_q, problem.seqlen_k), problem.score_shape)
        x, y, b, c = (np.nan_to_num(points) for points in (x, y, b, c))
    wanted = plain.sums(kind, x, y, b, visible, **given), plain.gradient(kind, x, y, b, c, visible, **given)
    for got, want in zip(found, wanted):
        assert got.dtype == problem.sum_dtype
        assert_allclose(got, want, atol=EPS[x.dtype] * (abs(want).max(initial=0) + 1e-30), rtol=0)


@pytest.mark.parametrize(("dtype", "d", "e"), [("float32", 3, 1), pytest.param("float64", 20, 6, marks=simulated_only)])
def test_both(rng, dtype, d, e):
    check(*drawn(rng, np.dtype(dtype), d=d, e=e))


@simulated_only
@pytest.mark.parametrize(("dtype", "d", "e", "device"), [
    ("float16", 2, 2, HOPPER), ("float16", 20, 6, HOPPER), ("float32", 8, 4, HOPPER), ("float32", 2, 7, HOPPER),
    ("float32", 20, 3, HOPPER), ("float64", 3, 1, HOPPER), ("float32", 12, 6, TURING), ("float64", 2, 7, TURING),
    ("float32", 0, 1, HOPPER)
])  # fmt: skip
def test_dtypes_and_sizes(rng, dtype, d, e, device):
    check(*drawn(rng, np.dtype(dtype), d=d, e=e, n=40), device=device)


@compiled_only
def test_by_tensor_cores(rng):
    check(*drawn(rng, d=20, e=6))


@simulated_only
@pytest.mark.parametrize("d", [3, 12])
def test_logarithms_of_rows_and_columns(rng, d):
    x, y, b, c = drawn(rng, np.float64, d=d, n=40)
    rows, columns = rng.standard_normal((1, 1, 40)), rng.standard_normal((1, 1, 40))
    columns[..., 3] = -np.inf
    check(x, y, b, c, rows=rows)
    check(x, y, b, c, columns=columns)
    check(x, y, b, c, kinds.EXPONENTIAL, rows=rows + 800, columns=columns - 800)


MASKS = {
    "window": lambda rng: na.Window(20, 9),
    "lengths": lambda rng: na.Lengths(np.array([[65], [0]]), np.array([[33], [40]])),
    "dense": lambda rng: na.Dense(rng.random((2, 1, 40, 70)) < 0.3),
    "blocks": lambda rng: na.BlockSparse(rng.random((1, 1, 4, 5)) < 0.4, (10, 14)),
    "segments": lambda rng: na.Segments([0, 3, 20, 38], [0, 30, 31, 69]) & na.Window(9, 9),
    "nothing": lambda rng: na.Window(0, 0, offset=100),
}


@simulated_only
@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, mask):
    x, y, b, c = drawn(rng, batch=(2, 1))
    mask = MASKS[mask](rng)
    if isinstance(mask, na.Lengths):
        x[0, 0, 33:], y[0, 0, 65:], b[0, 0, 65:], c[0, 0, 33:] = (np.nan,) * 4
    check(x, y, b, c, mask=mask)


@simulated_only
def test_shared_points(rng):
    """Of a batch of several b; and arrays of any strides."""
    x, y, b, c = drawn(rng, batch=(3, 1), d=12, n=40)
    x, y = (np.broadcast_to(points[:1, :, ::-1], points.shape) for points in (x, y))
    check(x, y, b, c)
    assert norms(x, describe(x, y, b)[0]).shape == (1, 1, 40)


@simulated_only
def test_points_far_off(rng):
    """Differences lose nothing."""
    x, y, b, c = drawn(rng)
    check(x + np.float32(2**10), y + np.float32(2**10), b, c)


def test_no_columns(rng):
    x, y, b, c = drawn(rng, n=0)
    check(x, y, b, c)


FAULTS = {
    "x.fill(0)": "pass",
    "if stride else 1": "if stride else None",
    "{ROWS: rows, COLUMNS: columns}": "{ROWS: columns, COLUMNS: rows}",
    "not of_products(text)": "of_products(text)",
}

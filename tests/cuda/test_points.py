"""Passes over pairs of points, in tiles of their plans; kernels/points has smaller ones."""

import sys
from unittest.mock import patch

import numpy as np
import pytest
from numpy.testing import assert_allclose

import numbattn as na
import numbattn.points
from numbattn.base import backends
from numbattn.call.problem import describe
from numbattn.cuda import points
from numbattn.cuda.points import PointsBackend
from numbattn.points import formula, kinds
from numbattn.points.tangents import Moving
from tests.tools.device import GPU, HOPPER, TURING
from tests.tools.launch import compiled_only, simulated_only

from .kernels.points.calls import check, drawn

pytestmark = pytest.mark.usefixtures("world")


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
    x, y, b, c = drawn(rng, np.float64, d=d, m=20, n=20)
    rows, columns = rng.standard_normal((1, 1, 20)), rng.standard_normal((1, 1, 20))
    columns[..., 3] = -np.inf
    check(x, y, b, c, rows=rows)
    check(x, y, b, c, columns=columns)
    kind = kinds.EXPONENTIAL if d == 3 else kinds.Derivative(kinds.EXPONENTIAL)
    check(x, y, b, c, kind, rows=rows + 800, columns=columns - 800)


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
    x, y, b, c = drawn(rng, batch=(2, 1), m=9, n=20)
    x, y = (np.broadcast_to(points[:1, :, ::-1], points.shape) for points in (x, y))
    check(x, y, b, c)


@simulated_only
def test_points_far_off(rng):
    """Differences lose nothing."""
    x, y, b, c = drawn(rng)
    check(x + np.float32(2**10), y + np.float32(2**10), b, c)


def test_no_columns(rng):
    x, y, b, c = drawn(rng, n=0)
    check(x, y, b, c)
    r2, _ = PointsBackend(lambda: GPU(HOPPER)).nearest(*describe(x, y, b), 1)
    assert np.all(r2 == np.inf)


@simulated_only
@pytest.mark.parametrize("order", [1, 2])
def test_by_the_layer(rng, order):
    """Lengths, a centre, gradients of both points and of the length, and tangents of gradients."""
    x, y, b, ds = drawn(rng, np.float64, batch=(1,), m=9, n=12, d=3, e=2)
    y[:, 7:] = b[:, 7:] = np.nan
    options = {"kernel": na.points.Matern(1.5, length=0.8), "mask": na.Lengths(7)}
    gpu, found = GPU(HOPPER), []
    for backend in (PointsBackend(lambda: gpu), formula):
        with (patch.object(backends, "POINTS", {"numpy": "here"}), patch.dict(sys.modules, here=backend),
              patch.object(Moving, "own", None)):  # kernels for GPUs take no tangents
            s, backprop = na.points.product_vjp(x, y, b, **options)
            found.append((s, *backprop(ds), *(backprop.hvp(ds, x, None, None) if order == 2 else ())))
    for got, want in zip(*found, strict=True):
        assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@simulated_only
@pytest.mark.parametrize(("d", "n"), [(3, 35), (12, 32)])
def test_few_rows(rng, monkeypatch, d, n):
    """Columns in parts, as an axis of the batch, and what is left of them."""
    monkeypatch.setattr(points, "COLUMNS_AT_LEAST", 8)
    x, y, b, c = drawn(rng, np.float64, batch=(1,), m=10, n=n, d=d, e=2)
    problem, inputs = describe(x, y, b)
    assert PointsBackend(lambda: GPU(HOPPER)).parts(problem, inputs) == 4
    given = {"rows": rng.standard_normal((1, 10)), "columns": rng.standard_normal((1, n))} if d == 3 else {}
    check(x, y, b, c, **given)


@simulated_only
def test_little_shared_memory(rng):
    """What Turing has room for."""
    check(*drawn(rng, np.float64, m=5, n=9, d=256, e=256), device=TURING, only=["gradient"])


@simulated_only
def test_many_dimensions(rng):
    """By array operations."""
    check(*drawn(rng, np.float64, m=5, n=6, d=300))


FAULTS = {
    "columns=columns)\n        return o": "columns=rows)\n        return o",
    "cuda/passes.py": {'"r2": math.inf': '"r2": 0'},
    "cuda/kernels/tables.py": {
        "return max(problem.head_dim, problem.head_dim_v) >": "return problem.head_dim_v >",
    },
    "test_few_rows": {
        "first:end].reshape(*lead, size)": ": end - first].reshape(*lead, size)",
        "((0, whole, count), (whole, problem.seqlen_k, 1))": "((0, whole, count),)",
            },
}

"""Plans of a call against the formula, simulated; a few of them compiled."""

import numpy as np
import pytest

from numbattn.call.problem import describe
from numbattn.cuda.points import PointsBackend
from numbattn.points import formula
from tests.cuda.works import NAMED
from tests.points import plain
from tests.points.test_formula import MASKS, drawn
from tests.tools.device import AMPERE, GPU, HOPPER, TURING
from tests.tools.launch import simulated_only

BOUNDS = {"float16": 1e-5, "bfloat16": 1e-5, "float32": 1e-5, "float64": 1e-12}  # of distances up to 100


def check(rng, k=1, device=AMPERE, dtype="float32", **about):
    problem, inputs, (x, y, _), visible = drawn(rng, dtype=NAMED[dtype], e=0, **about)
    backend = PointsBackend(lambda: GPU(device))
    (t, j), (wanted, first) = (f(problem, inputs, k) for f in (backend.nearest, formula.nearest))
    np.testing.assert_allclose(t, wanted, rtol=BOUNDS[dtype], atol=BOUNDS[dtype] * x.shape[-1])
    exact = ((x[..., :, None, :].astype(float) - y[..., None, :, :]) ** 2).sum(-1)
    exact = np.where(visible, exact, np.nan)
    found = np.take_along_axis(exact, np.maximum(j, 0), -1)
    np.testing.assert_array_equal(j < 0, first < 0)
    np.testing.assert_allclose(np.where(j < 0, np.inf, found), wanted, rtol=1e-4, atol=BOUNDS[dtype] * x.shape[-1])


@simulated_only
@pytest.mark.parametrize("k", [1, 3, 32])
@pytest.mark.parametrize("d", [3, 11])
def test_how_many(rng, k, d):
    check(rng, k, d=d, batch=(2,))


@simulated_only
@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "none"])
def test_masks(rng, mask):
    check(rng, 5 if mask in ("segments", "lengths") else 1, mask=mask, d=3, batch=(2, 1))


@simulated_only
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(("device", "dtype", "d"), [
    (AMPERE, "float16", 20), (AMPERE, "float64", 9), (AMPERE, "float32", 70), (TURING, "float32", 9),
    (TURING, "bfloat16", 3), (HOPPER, "float16", 40),
])  # fmt: skip
def test_units(rng, device, dtype, d, k):
    check(rng, k, device, dtype, d=d, batch=())


@simulated_only
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_points_far_off(rng, dtype):
    """Which no centre brings nearer; a point is its own first neighbour."""
    x = (100 + rng.standard_normal((20, 12))).astype(NAMED[dtype])
    problem, inputs = describe(x, x, x[:, :0])
    t, j = PointsBackend(lambda: GPU(AMPERE)).nearest(problem, inputs, 3)
    wanted, first = plain.nearest(x, x, 3)
    np.testing.assert_allclose(t, wanted, rtol=1e-6)
    np.testing.assert_array_equal(j[:, 0], first[:, 0])
    assert not t[:, 0].any()


@pytest.mark.parametrize("k", [1, 4])
def test_many_tiles(rng, k):
    check(rng, k, d=3, m=9, n=600, batch=())


@simulated_only
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("d", [3, 12])
def test_of_equal_ones_the_first(rng, k, d):
    y = np.round(rng.standard_normal((1, 200, d)), 0).astype(np.float32)
    x, b = y[:, ::7], np.zeros((1, 200, 0), np.float32)
    problem, inputs = describe(x, y, b)
    backend = PointsBackend(lambda: GPU(AMPERE))
    (t, j), (wanted, first) = (f(problem, inputs, k) for f in (backend.nearest, formula.nearest))
    np.testing.assert_array_equal(t, wanted)
    np.testing.assert_array_equal(j, first)


@simulated_only
def test_nothing_in_sight(rng):
    problem, inputs, _, _ = drawn(rng, e=0, n=0)
    t, j = PointsBackend(lambda: GPU(AMPERE)).nearest(problem, inputs, 2)
    assert (t == np.inf).all()
    assert (j == -1).all()


FAULTS = {
    "test_masks": {
        "block.key + part.n0)": "part.n0)",
        "hidden=np.inf": "hidden=0",
        "block.end_query], j,": "block.end_query], j + 1,",
    },
    "cuda/kernels/points/norms.py": {
        "test_units": {
            "row_sum(points * points) * FACTOR": "row_sum(points * points)",
        },
        "test_how_many": {
            "Route(takes_distances, (OF_X, OF_Y, spec))": "Route(takes_distances, (OF_Y, spec))",
        },
    },
    "cuda/kernels/points/loop.py": {
        "test_many_tiles": {
            "                sync_threads()                                  # this": "                pass  # this",
            "                wait_copies()\n": "",
            "this * TILE_N + chunk * COLS": "this * TILE_N",
            "stage = 1 - stage": "stage = stage",
        },
        "test_masks": {
            "if part.is_masked:": "if not part.is_masked:",
        },
    },
}

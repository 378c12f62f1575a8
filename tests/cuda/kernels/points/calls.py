"""Sums over pairs of points by the CUDA kernels, without a GPU: against the formula in float64."""

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn.call.problem import describe
from numbattn.cuda.kernels.points.arguments import PointTiles
from numbattn.cuda.points import PointsBackend
from numbattn.points import kinds
from tests.points import plain
from tests.tools.device import AMPERE, GPU, HOPPER

EPS = {np.dtype(dtype): eps for dtype, eps in (("float16", 2e-3), ("float32", 4e-6), ("float64", 1e-12))}
TILES = {
    "few features": (3, 2, PointTiles("fma", 16, 32, 64, lanes=8, chunks=2)),
    "many of b": (2, 6, PointTiles("mma", 16, 16, 32)),
    "many dimensions": (10, 2, PointTiles("mma", 32, 16, 64)),
    "CUDA cores": (10, 6, PointTiles("fma", 16, 16, 64, lanes=8)),
    "in turn": (10, 6, PointTiles("mma", 32, 16, 64, stages=1)),
}
MASKS = {
    "window": lambda: na.Window(20, 9),
    "causal": lambda: na.Causal(offset=9),
    "lengths": lambda: na.Lengths(np.array([[37]]), np.array([[19]])),
    "blocks": lambda: na.BlockSparse(np.array([[[[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]]], bool), (7, 11)),
    "segments": lambda: na.Segments([1, 5, 20], [0, 18, 37]),
}


def drawn(rng, dtype=np.float32, batch=(1, 1), m=40, n=70, d=3, e=1):
    """x, y, b and c."""
    return [rng.standard_normal((*batch, *sizes)).astype(dtype) for sizes in ((m, d), (n, d), (n, e), (m, e))]


def check(x, y, b, c, kind=kinds.GAUSSIAN, mask=None, device=HOPPER, only=("sums", "gradient"), **vectors):
    """Both passes, or only one."""
    gpu, (problem, inputs) = GPU(device), describe(x, y, b, mask=mask)
    points, visible = PointsBackend(lambda: gpu), True
    given = {name: x.astype(problem.sum_dtype) for name, x in vectors.items()}
    found = {name: getattr(points, name)(problem, inputs, kind, *[c] * (name == "gradient"), **given) for name in only}
    if mask is not None:
        visible = np.broadcast_to(inputs.mask.dense(problem.seqlen_q, problem.seqlen_k), problem.score_shape)
        x, y, b, c = (np.nan_to_num(points) for points in (x, y, b, c))
    for name, got in found.items():
        want = getattr(plain, name)(kind, x, y, b, *[c] * (name == "gradient"), visible, **given)
        assert got.dtype == problem.sum_dtype
        assert_allclose(got, want, atol=EPS[x.dtype] * (abs(want).max(initial=0) + 1e-30), rtol=0)


def drawn_far(rng, d, e, mask=None):
    """Problem, Inputs, points and b: x has two clusters far apart, y points of both and points close to them."""
    x = rng.standard_normal((24, d)) + np.where(np.arange(24) % 3 == 0, 0, 1e4)[:, None]
    y = np.concatenate([x[::2], x[1:20] + 1e-2 * rng.standard_normal((19, d))]).astype(np.float32)
    x, b = x.astype(np.float32), rng.standard_normal((31, e)).astype(np.float32)
    centre = x[1]
    return *describe((x - centre) / 3, (y - centre) / 3, b, mask=mask), x, y, b


def check_far(rng, function, d, e=2, kind=kinds.EXPONENTIAL, device=AMPERE, rtol=2e-6, mask=None):
    """Points far from the centre cost no digits, for their differences are taken."""
    problem, inputs, x, y, b = drawn_far(rng, d, e, mask)
    got = getattr(PointsBackend(lambda: GPU(device)), function)(problem, inputs, kind, apart=kinds.Apart(x, y, 1 / 9))
    x, y = (points.astype(float) / 3 for points in (x, y))
    visible = True if mask is None else inputs.mask.dense(len(x), len(y))
    wanted = plain.sums(kind, x, y, b, visible) if function == "sums" else plain.logsumexp(kind, x, y)
    assert_allclose(got, wanted, atol=rtol * abs(wanted).max())


def check_others_stay(rng, d, e, device):
    """t of pairs that are not near is the same, bit for bit, whether a tile has near ones or not."""
    x, y = (np.float32(3) + rng.standard_normal((n, d), np.float32) for n in (24, 31))
    b = rng.standard_normal((31, e), np.float32) * (np.arange(31) > 4)[:, None]
    found = []
    for first in (y[:4], x[:4]):
        y[:4] = first
        given, apart = describe(x, y, b), kinds.Apart(x, y, 1)
        found.append(PointsBackend(lambda: GPU(device)).sums(*given, kinds.EXPONENTIAL, apart=apart))
    assert_array_equal(*found)


def check_tiles(rng, only, sizes):
    """Several matrices, with logarithms of rows and columns."""
    x, y, b, c = drawn(rng, batch=(2, 2), m=21, n=39, **sizes)
    rows, columns = rng.standard_normal((2, 2, 21)), rng.standard_normal((2, 2, 39))
    check(x, y, b, c, only=(only,), rows=rows, columns=columns)


def check_mask(rng, only, sizes, mask):
    """One of MASKS; beyond lengths there is NaN."""
    x, y, b, c = drawn(rng, m=21, n=40, **sizes)
    if mask == "lengths":
        x[:, :, 19:], y[:, :, 37:], b[:, :, 37:] = np.nan, np.nan, np.nan
    check(x, y, b, c, mask=MASKS[mask](), only=(only,))


def check_number(rng, only, sizes):
    """A kind with a number."""
    check(*drawn(rng, m=16, n=16, **sizes), kinds.Polynomial(2, 0.5), only=(only,))

"""Plans of a call against the formula: parts of points, and their products."""

import numpy as np
import pytest

from numbattn.call.problem import describe
from numbattn.cuda import points
from numbattn.cuda.kernels.hopper import logsumexp, parts
from numbattn.cuda.kernels.hopper.pairs import PairTiles
from numbattn.cuda.kernels.points import norms
from numbattn.cuda.points import PointsBackend
from numbattn.points import formula, kinds
from tests.cuda.works import NAMED, kernels
from tests.points.test_formula import drawn
from tests.tools.device import GPU, HOPPER
from tests.tools.launch import compiled_only, simulated_only


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    """May take more room than they would, so that a test needs few points, in smaller tiles."""
    monkeypatch.setattr(parts, "MOST_ROOM", np.inf)
    monkeypatch.setattr(logsumexp, "OF_PARTS", PairTiles(64, 2, 5, 2))


def check(rng, columns=True, times=1, **about):
    """Errors are to be no more than twice those of the formula in float32. times: how far apart points are."""
    problem, inputs, (x, y, _), _ = drawn(rng, dtype=np.float32, e=0, **about)
    for array in (inputs.q, inputs.k):
        array *= times
    w = rng.standard_normal((*problem.batch, problem.seqlen_k)).astype(np.float32) if columns else None
    if columns:
        w[..., 3] = -np.inf
    gpu = GPU(HOPPER)
    found = PointsBackend(lambda: gpu).logsumexp(problem, inputs, kinds.GAUSSIAN, w)[0], formula.logsumexp(
        problem, inputs, kinds.GAUSSIAN, w)
    (program,) = gpu.programs.values()
    assert kernels(program.plan) == ["point_parts", "point_parts", "hopper_logsumexp"]
    t = ((inputs.q.astype(float)[..., :, None, :] - inputs.k[..., None, :, :]) ** 2).sum(-1)
    logs = -t / 2 + (0 if w is None else w.astype(float)[..., None, :])
    top = logs.max(-1)
    wanted = top + np.log(np.exp(logs - top[..., None]).sum(-1))
    errors = [abs(x - wanted).max() for x in found]
    assert errors[0] <= 2 * errors[1] + 1e-6


@compiled_only
@pytest.mark.parametrize("columns", [True, False])
def test_one_tile(rng, columns):
    check(rng, columns, d=20, m=30, n=50, batch=())


@simulated_only
def test_several_tiles(rng):
    check(rng, d=40, m=300, n=150, batch=())


@simulated_only
def test_digits_of_all_parts(rng):
    """Of terms that are large and cancel."""
    check(rng, times=30, d=40, m=64, n=128, batch=())


@simulated_only
def test_many_dimensions(rng, monkeypatch):
    """More than other kernels hold: chunk by chunk."""
    monkeypatch.setattr(points, "HEAD_DIMS", (64,))
    monkeypatch.setattr(norms, "PADDED", 128)
    check(rng, d=70, m=30, n=100, batch=(2,))


@simulated_only
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_points_of_half_precision(rng, dtype):
    """One product where they are bfloat16; else three parts, as of float32."""
    rate = 1.5
    x, y = (rng.standard_normal((rows, 20)).astype(NAMED[dtype]).astype(np.float32) for rows in (30, 50))
    w = rng.standard_normal(50).astype(np.float32)
    problem, inputs = describe(x, y, y[..., :0])
    found = PointsBackend(lambda: GPU(HOPPER)).logsumexp(problem, inputs, kinds.GAUSSIAN, w, rate=rate)[0]
    t = ((x.astype(float)[..., :, None, :] - y[..., None, :, :]) ** 2).sum(-1)
    wanted = np.log(np.exp(w[..., None, :] - rate / 2 * t).sum(-1))
    assert abs(found - wanted).max() < 2e-5


FAULTS = {
    "test_digits_of_all_parts": {
        "S * (scales[1] if OF_HALVES else LOG2E) + line": "S + line",
        "lse + load(mLineX[batch, head], VECTOR, m0) * (scales[0] if OF_HALVES else ONE)": "lse",
    },
    "test_points_of_half_precision": {
        "(counts[0][0] == 0) == IS_EXACT": "IS_EXACT",
        "scales[0] if": "scales[1] if",
        "scales[1] if": "scales[0] if",
    },
    "cuda/kernels/hopper/parts.py": {
        "test_points_of_half_precision": {
            "number == 0 and anywhere(rest != ZERO)": "False",
            "found = found * scales[0]": "pass",
        },
        "test_several_tiles": {
            "number * (rows // PARTS) + m0": "number * (rows // PARTS)",
            "rest = rest - convert(part, ACC)": "rest = rest",
            "row_index(ROWS, m0) < length": "row_index(ROWS, m0) <= length",
        },
        "test_one_tile": {
            "found = found + load(": "found = found - load(",
        },
    },
    "cuda/kernels/hopper/pairs.py": {
        "test_many_dimensions": {
            '"chunks": whole_boxes(work.problem.head_dim) // WIDTH': '"chunks": work.problem.head_dim // WIDTH',
        },
        "test_digits_of_all_parts": {
            "dot(dot(S, x3, y1.T), x1, y3.T)": "dot(S, x1, y3.T)",
            "dot(dot(dot(S, x2, y1.T), x1, y2.T), x1, y1.T)": "dot(dot(S, x2, y1.T), x1, y1.T)",
        },
        "test_one_tile": {
            "fills=tiles.consumers + 1": "fills=tiles.consumers",
        },
    },
}

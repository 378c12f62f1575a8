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
    for form, stages in ((parts.PARTS, (5, 2)), (parts.SHORT, (3,))):
        monkeypatch.setitem(logsumexp.TILES, form, PairTiles(64, 2, *stages))


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
    has_short = problem.head_dim <= logsumexp.MOST
    assert kernels(program.plan) == ["point_parts", "point_parts", *["hopper_logsumexp"] * (1 + has_short)]
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
@pytest.mark.parametrize("case", ["large", "tiny", "nan", "inf"])
def test_points_beyond_float16(rng, case):
    """Where some have no short form, all parts of all points count."""
    x, y = (rng.standard_normal((rows, 20)).astype(np.float32) for rows in (70, 1 if case == "tiny" else 90))
    if case == "tiny":
        x, y = x * np.float32(1e-5), y * np.float32(1e-5)
    else:
        x[67] *= {"large": 3000, "nan": np.nan, "inf": np.inf}[case]
    problem, inputs = describe(x, y, y[..., :0])
    found = PointsBackend(lambda: GPU(HOPPER)).logsumexp(problem, inputs, kinds.GAUSSIAN)[0]
    logs = -((x.astype(float)[:, None] - y) ** 2).sum(-1) / 2
    top = logs.max(-1)
    with np.errstate(invalid="ignore"):
        wanted = top + np.log(np.exp(logs - top[:, None]).sum(-1))
    assert np.isnan(found[67]) == (case in ("nan", "inf"))
    is_number = np.isfinite(wanted)
    assert is_number.sum() >= 69
    assert (abs(found - wanted) / abs(wanted).clip(1e-10))[is_number].max() < 1e-5


@simulated_only
def test_many_dimensions(rng, monkeypatch):
    """More than other kernels hold: chunk by chunk."""
    monkeypatch.setattr(points, "HEAD_DIMS", (64,))
    monkeypatch.setattr(norms, "PADDED", 128)
    check(rng, d=70, m=30, n=100, batch=(2,))


@simulated_only
def test_digits_of_many_dimensions(rng, monkeypatch):
    monkeypatch.setattr(points, "HEAD_DIMS", (64,))
    check(rng, times=30, d=70, m=64, n=70, batch=())


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
        "(counts[0][0] == 0) == IS_SHORT": "IS_SHORT",
        "scales[0] if": "scales[1] if",
        "scales[1] if": "scales[0] if",
    },
    "cuda/kernels/hopper/parts.py": {
        "test_points_of_half_precision": {
            "left = left + row_sum(rest * rest)": "pass",
            "found = found * scales[0]": "pass",
        },
        "test_points_beyond_float16": {
            "~(left <= norms * SQUARE)": "left > norms * SQUARE",
            "left = left + row_sum(rest * rest)": "left = rest - rest",
        },
        "test_several_tiles": {
            "number * (rows // COUNT) + m0": "number * (rows // COUNT)",
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
            "dot(dot(dot(S_TILE, x2, Y.tile.T), X.tile, y2.T), X.tile, Y.tile.T)": (
                "dot(dot(S_TILE, x2, Y.tile.T), X.tile, Y.tile.T)"
            ),
        },
        "test_digits_of_many_dimensions": {
            "fills=tiles.consumers + 1": "fills=tiles.consumers",
            "dot(dot(S, x3, y1.T), x1, y3.T)": "dot(S, x1, y3.T)",
            "dot(dot(dot(S, x2, y1.T), x1, y2.T), x1, y1.T)": "dot(dot(S, x2, y1.T), x1, y1.T)",
        },
    },
}

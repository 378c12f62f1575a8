"""Plans of a call against float64 and the formula: parts of points, chunks of dimensions, features of b."""

import numpy as np
import pytest

from numbattn.call.problem import describe
from numbattn.cuda import points
from numbattn.cuda.kernels.hopper import parts, sums
from numbattn.cuda.kernels.hopper.pairs import PairTiles
from numbattn.cuda.kernels.points import norms
from numbattn.cuda.plan import tier
from numbattn.points import formula, kinds
from tests.cuda.kernels.points.calls import check_far, check_others_stay
from tests.cuda.works import kernels
from tests.points import plain
from tests.tools.device import GPU, HOPPER
from tests.tools.launch import compiled_only, simulated_only

ONE_BLOCK = HOPPER._replace(multiprocessors=1)


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    """May take more room than they would, so that a test needs few points."""
    monkeypatch.setattr(parts, "MOST_ROOM", np.inf)


@pytest.fixture
def small_tiles(monkeypatch):
    """And fewer points beyond the last one."""
    monkeypatch.setattr(norms, "PADDED", 128)
    monkeypatch.setattr(sums, "tiles_of", lambda problem, is_few: PairTiles(64, 2, 5, 2))


def check(rng, d, e, m, n, kind=kinds.GAUSSIAN, batch=(), times=1.0):
    """Errors are to be no more than twice those of the formula in float32. times: how far apart points are."""
    x, y = (rng.standard_normal((*batch, rows, d), np.float32) * np.float32(times / d**0.5) for rows in (m, n))
    b = rng.standard_normal((*batch, n, e), np.float32)
    problem, inputs = describe(x, y, b)
    gpu = GPU(ONE_BLOCK)
    found = points.PointsBackend(lambda: gpu).sums(problem, inputs, kind), formula.sums(problem, inputs, kind)
    prepared = "feature_lines" if e <= 4 else "point_parts"
    for program in gpu.programs.values():
        assert kernels(program.plan) == ["point_parts", "point_parts", prepared, "hopper_sums"]
    wanted = plain.sums(kind, x, y, b, True)
    errors = [abs(o - wanted).max() for o in found]
    assert errors[0] <= 2 * errors[1] + 2e-7 * abs(wanted).max()


@compiled_only
@pytest.mark.parametrize("e", [1, 20])
def test_one_tile(rng, e):
    check(rng, 40, e, 30, 50)


@simulated_only
@pytest.mark.parametrize("e", [2, 8])
@pytest.mark.usefixtures("small_tiles")
def test_points_far_off(rng, e):
    check_far(rng, "sums", 40, e, device=ONE_BLOCK)


@simulated_only
@pytest.mark.usefixtures("small_tiles")
def test_only_near_pairs_are_recomputed(rng):
    check_others_stay(rng, 40, 2, ONE_BLOCK)


@simulated_only
@pytest.mark.parametrize(("e", "kind"), [(2, kinds.MATERN32), (40, kinds.Derivative(kinds.RationalQuadratic(1.5)))])
@pytest.mark.usefixtures("small_tiles")
def test_several_tiles_and_chunks(rng, e, kind):
    """And matrices, by one block; the last tile ends beyond the points."""
    check(rng, 70, e, 20, 100, kind, batch=(2,))


@simulated_only
@pytest.mark.usefixtures("small_tiles")
def test_digits_of_all_parts(rng):
    """Of terms that are large and cancel."""
    check(rng, 64, 8, 64, 100, times=8.0)


@simulated_only
@pytest.mark.usefixtures("small_tiles")
def test_slices_of_features(rng, monkeypatch):
    """Of more dimensions than other kernels hold."""
    monkeypatch.setattr(points, "HEAD_DIMS", (32,))
    check(rng, 40, 70, 20, 30)


@simulated_only
def test_whose_points_are_for_it():
    """Other kernels, which take kinds of products, logarithms and masks, are for no more than 256 dimensions."""
    backend = points.PointsBackend(lambda: GPU(HOPPER))
    for d, e, kind, is_plain, most in ((256, 300, kinds.GAUSSIAN, False, 256), (300, 300, kinds.GAUSSIAN, True, 0),
                                       (300, 100, kinds.GAUSSIAN, True, 64), (300, 100, kinds.LINEAR, True, 0),
                                       (300, 100, kinds.GAUSSIAN, False, 0)):  # fmt: skip
        problem, _ = describe(*(np.zeros((9, size), np.float32) for size in (d, d, e)))
        assert backend.features_at_once(problem, kind, is_plain) == most
        with tier("mma"):
            assert backend.features_at_once(problem, kind, is_plain) == (most if d == 256 else 0)


@simulated_only
def test_room(monkeypatch):
    """Other kernels are for many small matrices, and for points that many share."""
    monkeypatch.undo()
    for n, batch, own, fits in ((300, 1, 1, True), (60, 1, 1, False), (1000, 20, 20, True), (1000, 20, 1, False)):
        x, b = np.zeros((own, n, 64), np.float32), np.zeros((batch, n, 2), np.float32)
        x = np.broadcast_to(x, (batch, n, 64))
        assert parts.take_little_room(describe(x, x, b)[0]) == fits


FAULTS = {
    "test_digits_of_all_parts": {
        "return operand(first, B1), kappa - first": "return operand(first, B1), kappa",
    },
    "test_one_tile": {
        "dot(dot(dot(O_TILE, p3, b1), p2, b2), p1, b3)": "dot(dot(O_TILE, p3, b1), p2, b2)",
    },
    "test_several_tiles_and_chunks": {
        "number * apart + row": "row",
        "B.index * COUNT)": "0)",
    },
    "cuda/kernels/hopper/pairs.py": {
        "test_digits_of_all_parts": {
            "dot(S, x_of(Q), allocate(Y_PLACE, Q.index).T)": "dot(S, x_of(P), allocate(Y_PLACE, P.index).T)",
            "row + NUMBER * apart": "row",
        },
        "test_several_tiles_and_chunks": {
            "chunk * CHUNK": "0",
            "tiles.stages * tiles.consumers)": "tiles.stages)",
            "return advance(P, 3)": "return advance(P, 2)",
            "part * sizes.apart_y + n0": "n0",
        },
    },
    "cuda/kernels/hopper/parts.py": {
        "test_room": {
            "strides) if stride)": "strides))",
            "<= MOST_ROOM * given": "<= 4 * MOST_ROOM * given",
        },
        "test_several_tiles_and_chunks": {
            "norms = norms + row_sum(points * points)": "norms = row_sum(points * points)",
            "number * (length // COUNT) + m0": "number + m0",
        },
    },
    "cuda/points.py": {
        "test_slices_of_features": {
            "[inputs.v[..., at : at + most]": "[inputs.v[..., :most]",
        },
    },
}

"""Plans of a call against float64 and the formula: parts of points, chunks of dimensions, features of b."""

import numpy as np
import pytest

from numbattn.cuda.points import Points
from numbattn.points import formula, kinds
from numbattn.problem import describe
from tests.cuda.works import kernels
from tests.points import plain
from tests.tools.device import GPU, HOPPER
from tests.tools.launch import simulated_only


def check(rng, d, e, m, n, kind=kinds.GAUSSIAN, batch=(), times=1.0):
    """Errors are to be no more than twice those of the formula in float32. times: how far apart points are."""
    x, y = (rng.standard_normal((*batch, rows, d), np.float32) * np.float32(times / d**0.5) for rows in (m, n))
    b = rng.standard_normal((*batch, n, e), np.float32)
    problem, inputs = describe(x, y, b)
    gpu = GPU(HOPPER)
    found = Points(lambda: gpu).sums(problem, inputs, kind), formula.sums(problem, inputs, kind)
    prepared = "feature_lines" if e <= 4 else "point_parts"
    for program in gpu.programs.values():
        assert kernels(program.plan) == ["point_parts", "point_parts", prepared, "hopper_sums"]
    wanted = plain.sums(kind, x, y, b, True)
    errors = [abs(o - wanted).max() for o in found]
    assert errors[0] <= 2 * errors[1] + 2e-7 * abs(wanted).max()


@pytest.mark.parametrize("e", [1, 20])
def test_one_tile(rng, e):
    check(rng, 40, e, 30, 50)


@simulated_only
@pytest.mark.parametrize(("e", "kind"), [(2, kinds.MATERN32), (40, kinds.RationalQuadratic(1.5))])
def test_several_tiles_and_chunks(rng, e, kind):
    """And matrices; the last tile ends beyond the points."""
    check(rng, 70, e, 140, 200, kind, batch=(2,))


@simulated_only
def test_digits_of_all_parts(rng):
    """Of terms that are large and cancel."""
    check(rng, 64, 8, 64, 100, times=8.0)


@simulated_only
def test_slices_of_features(rng):
    """Of many dimensions there is no other kernel."""
    check(rng, 260, 70, 20, 30)


FAULTS = {
    "test_digits_of_all_parts": {
        "dot(dot(S, x3, y1.T), x1, y3.T)": "dot(S, x1, y3.T)",
        "dot(S, x_of(Q), allocate(Y_PLACE, Q.index).T)": "dot(S, x_of(P), allocate(Y_PLACE, P.index).T)",
        "dot(dot(dot(O_TILE, p3, b1), p2, b2), p1, b3)": "dot(dot(O_TILE, p3, b1), p2, b2)",
        "return operand(first, B1), kappa - first": "return operand(first, B1), kappa",
    },
    "test_several_tiles_and_chunks": {
        "col_index(S_TILE, n0) < sizes.seqlen_k": "col_index(S_TILE, n0) <= sizes.seqlen_k",
        "number * apart + row": "row",
        "chunk * CHUNK": "0",
        "B.index * COUNT)": "0)",
        "stages * consumers)": "stages)",
        "return advance(P, 3)": "return advance(P, 2)",
    },
    "cuda/kernels/hopper/parts.py": {
        "test_several_tiles_and_chunks": {
            "norms = norms + row_sum(rest * rest)": "norms = row_sum(rest * rest)",
            "number * (length // COUNT) + m0": "number + m0",
        },
    },
    "cuda/points.py": {
        "test_slices_of_features": {
            "for at in range(0, problem.head_dim_v, most)": "for at in range(0, most, most)",
        },
    },
}

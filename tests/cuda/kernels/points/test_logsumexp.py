"""Plans of a call against the formula, simulated; a few of them compiled."""

import numpy as np
import pytest

from numbattn.cuda.points import PointsBackend
from numbattn.points import formula, kinds
from tests.cuda.works import NAMED
from tests.points.test_formula import MASKS, drawn
from tests.tools.device import AMPERE, GPU, TURING
from tests.tools.launch import simulated_only

BOUNDS = {"float16": 2e-3, "bfloat16": 2e-3, "float32": 2e-5, "float64": 1e-12}


def check(rng, kind=kinds.GAUSSIAN, device=AMPERE, dtype="float32", columns=True, **about):
    problem, inputs, _, _ = drawn(rng, dtype=NAMED[dtype], e=0, **about)
    w = rng.standard_normal((*problem.batch, problem.seqlen_k)).astype(problem.sum_dtype) * 3 if columns else None
    if columns:
        w[..., 4] = -np.inf
    got = PointsBackend(lambda: GPU(device)).logsumexp(problem, inputs, kind, w)[0]
    np.testing.assert_allclose(got, formula.logsumexp(problem, inputs, kind, w), atol=BOUNDS[dtype])


@simulated_only
@pytest.mark.parametrize("kind", [
    kinds.GAUSSIAN, kinds.EXPONENTIAL, kinds.Power(1.5), kinds.EXPONENTIAL_OF_PRODUCT,
], ids=str)  # fmt: skip
@pytest.mark.parametrize("d", [2, 11])
def test_kinds(rng, kind, d):
    check(rng, kind, columns=d == 2, d=d, batch=(2,))


@simulated_only
@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "none"])
def test_masks(rng, mask):
    check(rng, mask=mask, d=3, batch=(2, 1))


@simulated_only
@pytest.mark.parametrize(("device", "dtype", "d"), [
    (AMPERE, "float16", 20), (AMPERE, "float64", 9), (AMPERE, "float32", 70), (TURING, "float32", 9),
    (TURING, "bfloat16", 3),
])  # fmt: skip
def test_units(rng, device, dtype, d):
    check(rng, device=device, dtype=dtype, d=d, batch=())


@pytest.mark.parametrize("d", [3, 24])
def test_many_tiles(rng, d):
    check(rng, d=d, m=9, n=600, batch=())


@simulated_only
def test_nothing_in_sight(rng):
    problem, inputs, _, _ = drawn(rng, e=0, n=0)
    assert (PointsBackend(lambda: GPU(AMPERE)).logsumexp(problem, inputs, kinds.GAUSSIAN)[0] == -np.inf).all()


FAULTS = {
    "test_many_tiles": {
        "S = S + shift_of((), part.stage, part.chunk)": "S = S",
        "logsumexp(m * LN2, total, LN2)": "logsumexp(m, total, LN2)",
        "        fetch_columns(vectors, block, stage, n0)\n": "",
    },
    "test_masks": {
        "hidden=-np.inf": "hidden=0",
    },
}

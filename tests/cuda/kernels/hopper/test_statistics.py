"""Statistics of P by kernels for Hopper, as tests/test_statistics.py checks them on CPUs; and column sums."""

import numpy as np
import pytest

import numbattn as na
from tests.problems import SMALL
from tests.test_statistics import OPTIONS, check, draw, drawn
from tests.tools.device import HOPPER, on
from tests.tools.launch import mostly_simulated, simulated_only


@mostly_simulated
@pytest.mark.parametrize("kind", [
    "causal", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OPTIONS if kind != "causal"),
])  # fmt: skip
def test_known_problems(rng, world, kind):
    q, k, weights = drawn(rng, np.float16)
    with on(HOPPER):
        check(q, k, weights, **OPTIONS[kind])


@simulated_only
@pytest.mark.parametrize("options", [{}, {"mask": na.Lengths([[50], [0]])}], ids=["all", "lengths"])
def test_several_tiles(rng, options):
    """NaN beyond the queries does not reach sums."""
    q, k, weights = drawn(rng, np.float16, m=270, n=300)
    with on(HOPPER):
        check(q, k, weights, **options)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_random_problems(number, world):
    q, k, options = draw(number, SMALL)
    with on(HOPPER):
        check(q.astype(np.float16), k.astype(np.float16), **options)


FAULTS = {
    "(t + l * last) * alpha": "t * alpha",
    "S = where(sees(mask, band, batch, head, m0, n0), S, NO_SCORE)": "pass",
    "cuda/kernels/hopper/column_sums.py": {
        ("test_known_problems", "test_several_tiles"): {
            "P = where(sees(mask, band, batch, head, m0, n0), P, 0)": "pass",
            "found = rows_of(rows, tile, after, length)": "found = rows_of(rows, tile, at, length)",
            "where(seen, weights, 0)": "where(seen, 1, 0)",
        },
    },
}

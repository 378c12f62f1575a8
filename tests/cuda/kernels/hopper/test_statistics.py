"""Statistics of P by kernels for Hopper, as tests/test_statistics.py checks them on CPUs; and column sums."""

import numpy as np
import pytest

import numbattn as na
from tests.problems import SMALL
from tests.test_statistics import ALL, OPTIONS, check, draw, drawn
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
def test_several_tiles(rng):
    q, k, weights = drawn(rng, np.float16, m=140, n=270)
    with on(HOPPER):
        check(q[:1, :2], k[:1, :1], weights[:1, :2])


@simulated_only
def test_nothing_leaks_from_beyond_lengths(rng):
    q, k, _ = drawn(rng, np.float16, m=140, n=70)
    mask, q, k = na.Lengths(keys=[[50]], queries=[[60]]), q[:1, :2], k[:1, :1]
    with on(HOPPER):
        want = na.attention_statistics(q, k, **ALL, mask=mask)
        q[..., 60:, :], k[..., 50:, :] = np.nan, np.nan
        for x, exact in zip(na.attention_statistics(q, k, **ALL, mask=mask), want):
            np.testing.assert_array_equal(x, exact)


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

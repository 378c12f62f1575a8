"""Statistics of P by kernels for any GPU, as tests/test_statistics.py checks them on CPUs; and column sums."""

import numpy as np
import pytest

from tests.problems import SMALL
from tests.test_statistics import OPTIONS, check, draw, drawn
from tests.tools.device import AMPERE, TURING, on
from tests.tools.launch import mostly_simulated


@mostly_simulated
@pytest.mark.parametrize(("device", "dtype", "kind"), [
    (AMPERE, np.float16, "score"), (AMPERE, np.float32, "packed"),
    *(pytest.param(*which, marks=pytest.mark.slow) for which in (
        (AMPERE, np.float64, "window"), (TURING, np.float32, "drawn"), (TURING, np.float16, "causal"),
    )),
])  # fmt: skip
def test_known_problems(rng, world, device, dtype, kind):
    q, k, weights = drawn(rng, dtype)
    with on(device):
        check(q, k, weights, **OPTIONS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("device", [AMPERE, TURING], ids=["ampere", "turing"])
@pytest.mark.parametrize("number", range(8))
def test_random_problems(device, number, world):
    q, k, options = draw(number, SMALL)
    with on(device):
        check(q, k, **options)


@pytest.mark.slow
def test_slices_of_large_head_dims(rng, world):
    q, k, weights = drawn(rng, np.float32, m=20, n=30, d=300)
    with on(AMPERE):
        check(q, k, weights)


FAULTS = {
    "l * maximum((before - m) * scale_log2, LOW)": "0",
    "P * maximum((S - m) * scale_log2, LOW)": "P * ((S - m) * scale_log2)",
    "largest = row_max(S, largest)": "largest = m",
    "p * maximum(log2(p) * LN2, LOW)": "p",
    "cuda/kernels/any/column_sums.py": {
        ("test_known_problems", "test_random_problems"): {
            "& (col_index(COLUMNS, m0) < length)": "",
            "P = where(sees(mask, band, batch, head, m0, n0), P, 0)": "pass",
            "query + m0, key + n0)": "m0, n0)",
        },
    },
}

"""Rows of many keys, more directions than are computed at once. All else: see test_jets."""

import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.cpu.arguments import LONG
from numbattn.cpu.tangent import AT_ONCE
from tests.accuracy import check_tangents

SINK = na.Sink(np.float32(3.0)), np.array(0.5, np.float32)


@pytest.mark.parametrize("options", [{}, {"dropout": na.Dropout(0.3, 1)}, {"score": SINK[0], "tscore": SINK[1:]}])
def test_parts_of_a_long_row(rng, options):
    """Some queries see keys of one part alone, one of none, and nobody one of the parts."""
    m, n = 17, 3 * LONG + 300
    first, end = np.zeros(m, int), np.full(m, n)
    first[1:5], end[1:5] = (3, LONG + 7, 2 * LONG + 5, 9), (LONG - 2, LONG + 90, n, 9)
    mask = na.Intervals(first, end) & na.BlockSparse(np.array([[True, False, True, True]]), (m, LONG))
    q, k, v = (rng.standard_normal((size, 8), dtype=np.float32) for size in (m, n, n))
    to, tlse, *_ = check_tangents(q, k, v, rng, mask=mask, **options)
    assert not to[[2, 4]].any()
    assert not tlse[[2, 4]].any()


def test_second_derivatives_of_a_long_row(rng):
    """In more directions than are computed at once."""
    n, count = LONG + 300, AT_ONCE + 1
    q, k, v = (rng.standard_normal((size, 4)) for size in (3, n, n))
    jq, jk, jv = (rng.standard_normal((count, *x.shape)) for x in (q, k, v))
    options = {"dropout": na.Dropout(0.3, 1), "score": na.Softcap(2.0)}
    for got, want in zip(na.attention_laplacian(q, k, v, jq, jk, jv, q, k, v, **options),
                         reference.attention_laplacian(q, k, v, jq, jk, jv, q, k, v, **options)):  # fmt: skip
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


FAULTS = {
    "order=1 + bends": "order=1",
    "test_jets.py": {
        "range(0, max(tangents.count, 1), AT_ONCE)": "range(0, tangents.count, AT_ONCE)",
        "call/passes.py": {'found["o2"].sum(axis=0)': 'found["o2"][0]'},
    },
    "cpu/forward_directions.py": {
        "test_jets.py": {
            "product(tS, tK, QT, one, True)": "product(tS, tK, QT, one, False)",
            "product(S2, tK, tQT, two, False)": "product(S2, tK, tQT, one, False)",
            "sums[i, own] += part[i]": "pass",
            "sums[i, sums.shape[1] - 1] += part[i]": "pass",
            "P[j, i] * tS[j, i] if P[j, i] != zero else zero": "P[j, i] * tS[j, i]",
            "(S2[j, i] + tS[j, i] * tS[j, i])": "(S2[j, i] - tS[j, i] * tS[j, i])",
            "tl[i] += exp(logit - m[i]) * tangent": "tl[i] += tangent",
            "tO[i, c] = sums[i, c] - tl[i] * O[i, c]": "tO[i, c] = sums[i, c]",
            "out.dtype.type(2) * tl[i, t]": "tl[i, t]",
            "sums[i, c] - l2[i] * O[i, c]": "sums[i, c]",
            "multiply(S2, Z)": "pass",
            "given.kept_scale, count + bends)": "given.kept_scale, bends)",
        },
    },
    "cpu/score_tangents.py": {
        "test_jets.py": {
            "number * count + step, batch": "step, batch",
            "slope[j, i] * tdS[j, i] + bend[j, i] * dS[j, i] if some": "slope[j, i] * tdS[j, i] if some",
            "slope[j, i] * S2[j, i] + curvature": "S2[j, i] + curvature",
            "out[j, i] = curvature[j, i] * tS[j, i]": "out[j, i] = curvature[j, i]",
            "            multiply(tS, slope)": "            pass",
        },
        "test_jets.py::test_functions_of_arrays": {
            "copy(numbered_tile(slopes, kept + 1, tS), tS)": "pass",
        },
        "cpu/test_tangent.py": {
            "np.broadcast_to(x, problem.batch)": "np.zeros(problem.batch)",
        },
    },
    "cpu/function_tangents.py": {
        "test_jets.py::test_functions_of_arrays": {
            "slope * tdS[j, i] + tslope * dS[j, i]": "slope * tdS[j, i]",
        },
    },
}

"""Laplacians of particles on the CPU; see also tests/call/test_particles.py."""

import numpy as np

import numbattn as na

from ..call.test_particles import drawn, shapes


def test_what_is_hidden_may_be_anything(rng):
    """Keys and queries beyond lengths, and their derivatives."""
    arrays, firsts, _ = drawn(rng, shapes(50, 50, (2, 2)), "qkv")
    lengths = np.array([[40], [7]])
    options = {"mask": na.Lengths(keys=lengths, queries=lengths), "particle": np.arange(50) // 2}
    want = na.attention_laplacian(*arrays, *firsts, **options)
    for b, n in enumerate(lengths[:, 0]):
        for x in (*arrays, *firsts):
            x[..., b, :, n:, :] = np.nan
    for got, exact in zip(na.attention_laplacian(*arrays, *firsts, **options), want):
        np.testing.assert_array_equal(got, exact)
    assert not want[1][:, 1, :, 7:].any()


def test_bits_of_a_sequence_do_not_depend_on_others(rng):
    arrays, firsts, _ = drawn(rng, shapes(70, 70), "qkv", np.float32)
    whole = na.attention_laplacian(*arrays, *firsts, particle=range(70))
    alone = na.attention_laplacian(*(x[1:] for x in arrays), *(x[:, 1:] for x in firsts), particle=range(70))
    for got, want in zip(alone, whole):
        np.testing.assert_array_equal(got, want[..., 1:, :, :, :])


FAULTS = {
    "call/test_particles.py::test_as_the_plain_formula": {
        "C, jK, jQT, two, False": "C, jK, jQT, one, False",
        "same * (x * y + x * y + z)": "same * (x * y + z)",
        "p * (y + same * x)": "p * y",
        "b[i] += same * (p * y)": "b[i] += p * y",
        "C[j, i] -= b[i] * P[j, i]": "C[j, i] -= B[j, i] * P[j, i]",
        "W[j, i] -= two * b[i] * B[j, i]": "W[j, i] -= b[i] * B[j, i]",
        "(y[c] - z[i, c])": "y[c]",
        "total = out[i, c] if adds else zero": "total = zero",
        "    if not adds:\n        clear(jO)\n": "",
        "jV, two, c > 0)": "jV, two, False)",
        "subtract(O2[i : i + 1], b[i : i + 1]": "subtract(O2[i : i + 1], a[i : i + 1]",
        "if p >= 0:": "if p > 0:",
    },
    "test_what_is_hidden_may_be_anything": {
        "x if x != -np.inf else np.inf": "x",
        "if p != zero else (zero, zero, zero)": "if True else (zero, zero, zero)",
        "0 <= j < P.shape[0]:": "True:",
    },
}

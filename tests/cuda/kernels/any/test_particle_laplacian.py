"""Laplacians of particles by the kernel for any GPU, as tests/call/test_particles.py checks them on CPUs."""

from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.cuda import passes
from tests.call.test_particles import NOT_ALL, drawn, shapes
from tests.tools.device import AMPERE, HOPPER, TURING, on
from tests.tools.launch import mostly_simulated

OF_TWENTY = np.sort([*NOT_ALL, *NOT_ALL[:7], 0, 0])  # of one particle in two tiles of 16, or in three of 8


LENGTHS = {"mask": na.Lengths(keys=np.array([[14], [3]]), queries=np.array([[9], [0]]))}
BIAS = np.random.default_rng(1).standard_normal((9, 20))
BIAS[3] = -np.inf  # who sees a sink alone
CALLS = {  # shapes of q, k and v; particle; which of jq, jk and jv are given; options
    "causal": (shapes(9, 20, (2,), (1,)), (np.arange(9) - 1, OF_TWENTY), "qkv", {"causal": True}),
    "lengths": (shapes(18, 20, (2, 2), (2, 1)), (np.arange(18) // 2, OF_TWENTY), "qkv", LENGTHS),
    "scores": (shapes(9, 20, (2,), (2,)), (np.arange(9), OF_TWENTY), "qkv",
               {"score": [na.Bias(BIAS), na.Alibi([0.1, 0.2]), na.Sink([1.0, 2.0])]}),
    "packed": (shapes(20, 20, (2,), (2,)), OF_TWENTY, "qkv", {"mask": na.Segments([0, 4, 4, 20])}),
    "blocks": (shapes(20, 40, (1,), (1,)), (np.arange(20), np.arange(40) // 2), "qkv",
               {"mask": na.BlockSparse(np.array([[[0, 0, 1], [0, 0, 0]]]) > 0, (16, 16))}),
    "batches apart": (((2, 3, 2, 6, 8), (2, 1, 2, 7, 8), (2, 1, 1, 7, 4)), (range(6), np.arange(7) // 3), "qkv", {}),
    "another order": (shapes(11, 11, (2,), (1,)), list(NOT_ALL), "qkv", {}),
    "jq alone": (shapes(9, 9, (), ()), np.arange(9) // 2, "q", {}),
    "jk alone": (shapes(9, 9, (), ()), np.arange(9) // 2, "k", {}),
    "jv alone": (shapes(9, 9, (), ()), np.arange(9) // 2, "v", {}),
    "no jk": (shapes(9, 9, (), ()), np.arange(9) // 2, "qv", {}),
    "no jv": (shapes(9, 9, (), ()), np.arange(9) // 2, "qk", {}),
    "one row": (shapes(1, 1, (), (), 8, 5), [0], "qkv", {}),
    "no features": (shapes(3, 3, (), (), 4, 0), range(3), "qkv", {}),
    "no features of q": (shapes(3, 3, (), (), 0, 4), range(3), "qkv", {}),
    "nobody's": (shapes(3, 3), [-1] * 3, "qkv", {}),
    "no keys": (shapes(3, 0), ([0, 1, 2], []), "qkv", {}),
}  # fmt: skip


def check(rng, device, call, particle, given, dtype=np.float64, atol=2e-14, hide=(), **options):
    """No array operations take the place of the kernel. hide: the queries and the keys after these are NaN."""
    arrays, firsts, seconds = drawn(rng, call, given, dtype)
    call = *arrays, *firsts, *seconds
    want = reference.attention_laplacian(*call, particle=particle, **options)
    for x, seen in zip(call, [*hide, *hide[1:]] * 3):
        x[..., seen:, :] = np.nan
    with on(device), patch.object(passes, "by_products", None):
        found = na.attention_laplacian(*call, particle=particle, **options)
    for got, exact in zip(found, want):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(float), exact, rtol=0, atol=atol * abs(exact).max(initial=1))


@mostly_simulated
@pytest.mark.parametrize(("device", "name"), [
    (AMPERE, "causal"), *((AMPERE, name) for name in list(CALLS)[1:]), (TURING, "scores"), (HOPPER, "lengths"),
])  # fmt: skip
def test_as_the_plain_formula(rng, world, device, name):
    shapes, particle, given, options = CALLS[name]
    check(rng, device, shapes, particle, given, **options)


@mostly_simulated
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes(rng, world, dtype):
    """In half precision sums are those of float32, and rounded once."""
    atol = 2e-6 if dtype == np.float32 else 0.51 * float(ml_dtypes.finfo(dtype).eps)
    check(rng, HOPPER, shapes(17, 17, (1,), (1,), 40, 70), np.arange(17) // 3, "qkv", dtype, atol)


@mostly_simulated
def test_what_is_hidden_may_be_anything(rng, world):
    options = {"mask": na.Lengths(keys=np.array([14]), queries=np.array([5]))}
    check(rng, AMPERE, shapes(9, 20, (2,), (2,)), (np.arange(9), OF_TWENTY), "qkv", hide=(5, 14), **options)


@mostly_simulated
def test_arrays_of_any_strides(rng, world):
    """Also of what is broadcast over the batch, and with batches that are no multiple of one stride."""
    draw = rng.standard_normal
    q, k, v = draw((3, 9, 2, 8)).swapaxes(1, 2)[::2], draw((2, 9, 16))[..., ::2], draw((9, 12))[::-1, 6:]
    jq, jk, jv = draw((8, 9, 2, 2, 2)).T, draw((2, 2, 9, 16))[..., 1::2], draw((2, 6, 9)).swapaxes(-1, -2)
    want = reference.attention_laplacian(q, k, v, jq, jk, jv, particle=range(9))
    with on(AMPERE), patch.object(passes, "by_products", None):
        found = na.attention_laplacian(q, k, v, jq, jk, jv, particle=range(9))
    for got, exact in zip(found, want):
        np.testing.assert_allclose(got, exact, rtol=0, atol=2e-14 * abs(exact).max())


@mostly_simulated
def test_large_head_dims_and_other_orders_beside_a_mask(rng):
    """By products of whole matrices."""
    for (m, d), options in {(9, 300): {}, (11, 8): {"causal": True}}.items():
        call = [rng.standard_normal(shape) for shape in ((m, d), (m, d), (m, 8), (2, m, d), (2, m, d), (2, m, 8))]
        particle = list(NOT_ALL[:m])
        want = reference.attention_laplacian(*call, particle=particle, **options)
        with on(AMPERE):
            found = na.attention_laplacian(*call, particle=particle, **options)
        for got, exact in zip(found, want):
            np.testing.assert_allclose(got, exact, rtol=0, atol=2e-14 * abs(exact).max())


FAULTS = {
    "test_as_the_plain_formula": {
        "P = where(sees(mask, band, batch, head, m0, n0), P, ZERO)": "pass",
        "(P * product(stQ, stK) * scale + PA * B) * TWO, ZERO)": "PA * B * TWO, ZERO)",
        "own_b = part_sum(where(same, PB, ZERO), own_b)": "own_b = part_sum(PB, own_b)",
        "left_v((PB + where(same, PA, ZERO)) * TWO)": "left_v((PB + PA) * TWO)",
        "jO = jO - b * O": "pass",
        "O2 = O2 - jO * (b * TWO)": "O2 = O2 - jO * b",
        "(owners.first + batch)": "batch",
        "is_whole = stop <= n_end": "is_whole = True",
        "own = own - O * a_sum": "pass",
        "O2 = O2 - (jO * a_sum + own * b_sum) * TWO": "O2 = O2 - jO * a_sum * TWO",
        "O2 = O2 - O * row_sum(w)": "pass",
        "            wait_copies()                                       # for Q, where no key is seen\n": "",
        "sync_threads()                                  # P and P B are there": "pass",
        "sync_threads()                                  # all have read K, V, P and P B": "pass",
    },
    "test_what_is_hidden_may_be_anything": {
        "[:seen_q], ROWS_OF)\n            if HAS_TK": "[:seqlen_q], ROWS_OF)\n            if HAS_TK",
        "mTV[0][batch, head_k, c][:seen_k]": "mTV[0][batch, head_k, c]",
    },
}

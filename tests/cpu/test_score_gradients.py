"""How gradients of arrays are shared out among blocks. What they are: see tests/scores."""

import math

import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.call.problem import describe
from numbattn.cpu import launch
from numbattn.cpu.score_gradients import shapes_of, shares_of

BATCH, HEADS, N = 70, 4, 5


def score(rng):
    """Arrays that the elements of the batch share, or the heads, or nobody; with rows and columns, or without."""
    shapes = (1, HEADS, N, N), (BATCH, 1, 1, N), (BATCH, HEADS, N, N), (BATCH, 1, N, 1)
    return (*(na.Bias(rng.standard_normal(shape)) for shape in shapes), na.Softcap(3.0),
            na.RelativeBias(rng.standard_normal((HEADS, 5))), na.Sink(rng.standard_normal(HEADS)),
            na.Alibi(rng.random((BATCH, 1))), na.Bias(rng.standard_normal((N, N)), gradient=False))  # fmt: skip


def inputs(rng, heads_k=2):
    return rng.standard_normal((BATCH, HEADS, N, 8)), *rng.standard_normal((2, BATCH, heads_k, N, 8))


def test_gradients_and_bits_by_any_number_of_threads(rng, monkeypatch):
    q, k, v = inputs(rng)
    options, do = {"score": score(rng), "dropout": na.Dropout(0.2, 1), "causal": True}, rng.standard_normal(q.shape)
    want = reference.attention_backward(do, q, k, v, **options)
    monkeypatch.setattr(launch, "SERIAL", 1)
    found = []
    for threads in 1, 3:
        monkeypatch.setattr(launch, "_threads", lambda threads=threads: threads)
        found.append(na.attention_vjp(q, k, v, **options)[1](do))
    for got, again, x in zip(*((*gradients, *gradients.score) for gradients in (*found, want))):
        assert (got is None) == (x is None)
        if x is not None:
            np.testing.assert_allclose(got, x, rtol=1e-10, atol=1e-10)
            np.testing.assert_array_equal(got, again)


@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_every_pair_is_of_one_block_and_no_two_blocks_share_a_sum(rng, heads_k):
    problem, inputs_ = describe(*inputs(rng, heads_k), score=score(rng))
    shares = shares_of(problem, shapes_of(inputs_.score))
    np.testing.assert_array_equal(np.sort(shares.order), np.arange(BATCH * heads_k))
    block = np.empty(BATCH * heads_k, int)
    for number, (first, end) in enumerate(zip(shares.starts, shares.starts[1:])):
        block[shares.order[first:end]] = number
    block = block.reshape(BATCH, heads_k).repeat(HEADS // heads_k, axis=1)
    leads = (1, HEADS), (BATCH, 1), (BATCH, HEADS), (BATCH, 1), (1, HEADS), (BATCH, 1)
    for lead, places, firsts in zip(leads, shares.places, shares.firsts, strict=True):
        np.testing.assert_array_equal(np.unique(places), np.arange(places.max() + 1))
        assert all(len(np.unique(block[places == place])) == 1 for place in np.unique(places))
        own = np.broadcast_to(np.arange(math.prod(lead)).reshape(lead), (BATCH, HEADS))
        np.testing.assert_array_equal(np.searchsorted(firsts, places, side="right") - 1, own)


@pytest.mark.parametrize(("n", "blocks"), [(8, 64), (40, 16), (100, 4), (2000, 1)])
def test_further_sums_take_no_more_memory_than_dq_dk_and_dv(n, blocks):
    """Of head_dim 4 these are as many as 12 columns of a bias for each of the batch."""
    q, bias = np.zeros((64, 1, n, 4)), np.broadcast_to(0.0, (n, n))
    problem, inputs_ = describe(q, q, q, score=na.Bias(bias))
    assert len(shares_of(problem, shapes_of(inputs_.score)).starts) == blocks + 1


FAULTS = {
    "np.unique(own * count + block": "np.unique(own",
    "np.unique(own * count": "np.unique(own * 0",
    "sums // count, prepend": "sums, prepend",
    "if more <= room:": "if True:",
    "dx if len(dx) == len(firsts) else ": "dx[: len(firsts)] if True else ",
    "scores/test_parts.py": {
        "if dS[j, i] != 0 else dS.dtype.type(0)": "",
        "range(steps.caps.size - 1, -1, -1)": "range(steps.caps.size)",
        "numbered_tile(slopes, own, dS)": "numbered_tile(slopes, 0, dS)",
        "whole[m0 : m0 + dS.shape[1], n0": "whole[: dS.shape[1], n0",
    },
    "cpu/test_backward.py::test_blocks_add_to_sums_of_their_own": {
        "0 if whole else nbytes": "0",
        "dx[:, 0] if dx.shape[1] == 1 else dx.sum(axis=1)": "dx[:, 0]",
    },
}

"""Gradients of a function's arrays, against formulas, on CPUs."""

import copy
import math
import pickle
from contextlib import nullcontext

import numpy as np
import pytest

import numbattn as na
from tests.accuracy import check, random
from tests.tools.device import AMPERE, on


def bucket(distance):
    return distance if distance < 4 else min(4 + int(math.log(max(distance / 4.0, 1.0)) / math.log(8.0) * 4), 7)


def trained(s, batch, head, i, j, table, gain, kinds, weights):
    return s * gain[head] + table[bucket(abs(i - j)), head] + weights[kinds[i], kinds[j]]


def arrays_of(rng, n, heads=2, dtype=np.float64):
    table, weights = random(rng, (8, heads), dtype), random(rng, (3, 3), dtype)
    return table, 1 + random(rng, heads, np.float64) / 4, rng.integers(3, size=n), weights


def test_gradients_are_those_of_a_formula(rng):
    """Of the terms of a bias: each adds dS where it is read; with kinds of tokens, and buckets as T5's."""
    n, heads = 40, 2
    q, k, v, do = rng.standard_normal((4, heads, n, 8))
    table, gain, kinds, weights = arrays = arrays_of(rng, n)
    o, saved = na.attention_forward(q, k, v, causal=True, score=na.Score(trained, arrays=arrays, gradient=True))
    grads = na.attention_backward(do, saved)
    i, j = np.indices((n, n))
    entries = np.vectorize(bucket)(abs(i - j))
    S = q @ k.swapaxes(1, 2) / np.sqrt(8)
    bias = table[entries].transpose(2, 0, 1) + weights[kinds[i], kinds[j]]
    P = np.where(j <= i, np.exp(S * gain[:, None, None] + bias), 0)
    P /= P.sum(-1, keepdims=True)
    dP = do @ v.swapaxes(1, 2)
    dS = P * (dP - (P * dP).sum(-1, keepdims=True))
    dtable, dweights = np.zeros_like(table), np.zeros_like(weights)
    for head in range(heads):
        np.add.at(dtable[:, head], entries, dS[head])
        np.add.at(dweights, (kinds[i], kinds[j]), dS[head])
    np.testing.assert_allclose(o, P @ v, rtol=1e-12)
    np.testing.assert_allclose(grads[0], (dS * gain[:, None, None]) @ k / np.sqrt(8), rtol=1e-9, atol=1e-12)
    for got, want in zip(grads.score, (dtable, (dS * S).sum((1, 2)), None, dweights), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_gradients_with_all_else(rng):
    """Between other parts, behind -inf, of groups of heads, dropped and packed; arrays of other dtypes and strides."""
    q, (k, v) = random(rng, (2, 4, 70, 16), np.float32), random(rng, (2, 2, 1, 70, 16), np.float32)
    table, gain, kinds, weights = arrays_of(rng, 70, 4, np.float32)
    score = [na.Bias(np.where(rng.random(70) < 0.2, -np.inf, random(rng, 70, np.float32))),
             na.Score(trained, arrays=[table[::-1], gain, kinds, weights.T], gradient=True), na.Softcap(5.0),
             na.Score(lambda s, batch, head, i, j, x, gain: s * x[batch] * gain[()],
                      arrays=[np.array([1.0, 2]), np.array(0.7)], gradient=True)]
    mask = na.Segments([0, 20, 20, 61, 70]) & na.Causal()
    check(q, k, v, rng, mask=mask, score=score, dropout=na.Dropout(0.2, 3))


def softcap(s, batch, head, i, j, cap):
    return cap[head] * math.tanh(s / cap[head])


@pytest.mark.parametrize("device", [
    pytest.param(None, id="CPU"), pytest.param(AMPERE, id="Ampere", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_was_minus_infinity_has_no_gradient(rng, device):
    """Though the function makes it visible, and its derivative by the array is NaN there; of second order, too."""
    q, k, v, do = random(rng, (4, 1, 2, 9, 8), np.float32)
    bias = np.where(rng.random((9, 9)) < 0.3, -np.inf, 0).astype(np.float32)
    score = [na.Bias(bias, gradient=False), na.Score(softcap, arrays=[np.array([2, 3], np.float32)], gradient=True)]
    given = {"score": score, "tscore": [None, np.ones(2, np.float32)]}
    with on(device) if device else nullcontext():
        _, to, saved, tsaved = na.attention_forward_jvp(q, k, v, None, None, None, **given)
        grads, tgrads = na.attention_backward_jvp(do, saved, tsaved)
    np.testing.assert_allclose(grads.score[1].sum(), (do * to).sum(), rtol=1e-4)
    assert np.isfinite(tgrads.score[1]).all()


def test_who_has_a_gradient(rng):
    q, arrays = rng.standard_normal((2, 9, 4)), arrays_of(rng, 9)
    for gradient, wanted in (
        (False, ()), (True, (0, 1, 3)), ([False, True, False, False], (1,)), ((True, False, False, True), (0, 3)),
    ):  # fmt: skip
        score = na.Score(trained, arrays=arrays, gradient=gradient)
        o, saved = na.attention_forward(q, q, q, score=score)
        found = na.attention_backward(o, saved).score
        assert [n for n, dx in enumerate(found) if dx is not None] == list(wanted)
        again = pickle.loads(pickle.dumps(score))
        assert again.gradient == score.gradient
    assert na.Score(trained, arrays=arrays, gradient=True) != na.Score(trained, arrays=arrays)


def test_copies_have_the_function_that_was_taken():
    shift = 1.0
    score = na.Score(lambda s, batch, head, i, j, x: s + shift * x[j], arrays=[np.ones(3)])
    shift = 2.0
    again = copy.deepcopy(score)
    assert copy.copy(score) == score != again
    assert again._kind == score._kind
    again.arrays[0][:] = 5
    assert again._value(0.0, 0, 0, 0, 0) == 5 * score._value(0.0, 0, 0, 0, 0) == 5


WRONG = {
    "too few": ([True], ValueError, r"Score gradient: got 1 bools, expected 4, one for each array"),
    "of integers": ([False, False, True, False], TypeError, r"Score gradient\[2\]: got True for arrays\[2\] of int64"),
    "a word": ("yes", TypeError, "Score gradient: got 'yes', expected True, False"),
    "numbers": ([1, 0, 0, 1], TypeError, "Score gradient: got list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_gradient_takes(rng, name):
    gradient, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        na.Score(trained, arrays=arrays_of(rng, 9), gradient=gradient)


def test_no_floats_have_no_gradient():
    with pytest.raises(ValueError, match="Score gradient: got True, expected arrays of floats"):
        na.Score(lambda s, batch, head, i, j, x: s + x[j], arrays=[np.arange(9)], gradient=True)

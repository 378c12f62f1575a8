"""The reference itself: against the definition of softmax on small numbers, and by finite differences."""

import math

import numpy as np
import pytest

import numbattn as na
from numbattn import reference


def test_forward_is_the_definition(rng):
    q, k, v = rng.standard_normal((3, 3, 4, 5))
    o, lse = reference.attention_forward(q, k, v, scale=0.7)
    for h in range(3):
        for i in range(4):
            weights = [math.exp(0.7 * sum(q[h, i] * k[h, j])) for j in range(4)]
            want = sum(w * v[h, j] for j, w in enumerate(weights)) / sum(weights)
            np.testing.assert_allclose(o[h, i], want)
            assert lse[h, i] == pytest.approx(math.log(sum(weights)))


def test_masked_keys_are_as_if_absent(rng):
    q, k, v = rng.standard_normal((3, 6, 4))
    for keys in range(1, 7):
        masked = reference.attention_forward(q, k, v, mask=na.Lengths(keys))
        cut = reference.attention_forward(q, k[:keys], v[:keys])
        np.testing.assert_allclose(masked[0], cut[0])
        np.testing.assert_allclose(masked[1], cut[1])


def test_dropout_multiplies_p(rng):
    q, k = rng.standard_normal((2, 8, 4))
    dropout = na.Dropout(0.5, 3)
    p, lse = reference.attention_forward(q, k, np.eye(8))
    dropped, same = reference.attention_forward(q, k, np.eye(8), dropout=dropout)
    np.testing.assert_allclose(dropped, p * na.dropout_mask(dropout, (8, 8)) * 2)
    np.testing.assert_array_equal(same, lse)


def test_nothing_seen():
    o, lse = reference.attention_forward(np.ones((3, 2)), np.ones((4, 2)), np.ones((4, 5)), mask=na.Lengths(4, 1))
    assert o.tolist() == [[1] * 5, [0] * 5, [0] * 5]
    assert np.isneginf(lse).tolist() == [False, True, True]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": na.Lengths(3, 4), "dropout": na.Dropout(0.3, 1)}])
def test_gradients_by_finite_differences(rng, options):
    x = list(rng.standard_normal((3, 2, 5, 4)))
    x[1], x[2] = x[1][:1], x[2][:1]     # one key head for both
    do, dlse = rng.standard_normal((2, 5, 4)), rng.standard_normal((2, 5))

    def loss(*x):
        o, lse = reference.attention_forward(*x, **options)
        return np.vdot(o, do) + np.vdot(np.where(np.isfinite(lse), lse, 0), dlse)

    grads = reference.attention_backward(do, *x, dlse=dlse, **options)
    for i, grad in enumerate(grads):
        for at in np.ndindex(grad.shape):
            step = [np.zeros_like(y) for y in x]
            step[i][at] = 1e-6
            ahead, behind = (loss(*(y + sign * s for y, s in zip(x, step))) for sign in (1, -1))
            assert grad[at] == pytest.approx((ahead - behind) / 2e-6, rel=1e-6, abs=1e-8)

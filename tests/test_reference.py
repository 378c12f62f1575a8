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


def small(rng):
    """Arguments with everything in a call that tangents go through, and as many tangents."""
    q, k, v, do = (rng.standard_normal(x) for x in ((4, 5, 3), (2, 6, 3), (1, 6, 4), (4, 5, 4)))
    arrays = q, k, v, rng.standard_normal((4, 5, 6)), rng.random(4), rng.standard_normal(5), rng.random(4)
    rows = do, rng.standard_normal((4, 5))
    return arrays, rows, *([rng.standard_normal(x.shape) for x in some] for some in (arrays, rows))


def options(bias, slopes, table, logits):
    return {
        "score": [na.Bias(bias), na.Softcap(2.0), na.Alibi(slopes), na.RelativeBias(table), na.Sink(logits)],
        "mask": na.Causal() & na.Lengths(queries=4, keys=5), "dropout": na.Dropout(0.3, 1), "scale": 0.7,
    }  # fmt: skip


def test_tangents_by_finite_differences(rng):
    """Of o and lse, and of all gradients, along all arguments at once."""
    arrays, rows, tangents, trows = small(rng)

    def at(h):
        q, k, v, *parts = (x + h * t for x, t in zip(arrays, tangents))
        do, dlse = (x + h * t for x, t in zip(rows, trows))
        o, lse = reference.attention_forward(q, k, v, **options(*parts))
        grads = reference.attention_backward(do, q, k, v, dlse=dlse, **options(*parts))
        return o, np.where(np.isfinite(lse), lse, 0), *grads, *(x for x in grads.score if x is not None)

    given = *arrays[:3], *tangents[:3]
    to, tlse = reference.attention_jvp(*given, tscore=tangents[3:], **options(*arrays[3:]))
    tgrads = reference.attention_backward_jvp(
        rows[0], *given, tdo=trows[0], dlse=rows[1], tdlse=trows[1], tscore=tangents[3:], **options(*arrays[3:])
    )
    for got, ahead, behind in zip((to, tlse, *tgrads, *tgrads.score), at(1e-5), at(-1e-5), strict=True):
        np.testing.assert_allclose(got, (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-8)


def test_several_tangents_have_an_axis(rng):
    arrays, (do, _), tangents, _ = small(rng)
    q, k, v, *parts = arrays
    both, given = [np.stack([x, 2 * x]) for x in tangents[:3]], options(*parts)
    one = reference.attention_backward_jvp(do, q, k, v, *tangents[:3], **given)
    for got, want in zip(reference.attention_backward_jvp(do, q, k, v, *both, **given), one):
        np.testing.assert_allclose(got, [want, 2 * want])
    for got, want in zip(reference.attention_jvp(q, k, v, *both, **given),
                         reference.attention_jvp(q, k, v, *tangents[:3], **given)):  # fmt: skip
        np.testing.assert_allclose(got, [want, 2 * want])


def test_laplacian_by_finite_differences(rng):
    (q, k, v, *parts), _, seconds, _ = small(rng)
    firsts, given = [rng.standard_normal((2, *x.shape)) for x in (q, k, v, *parts)], options(*parts)

    def at(h, along):
        arrays = [x + h * t for x, t in zip((q, k, v, *parts), along)]
        return reference.attention_forward(*arrays[:3], **options(*arrays[3:]))[0]

    of_score = {"jscore": firsts[3:], "lscore": seconds[3:]}
    _, _, lo = reference.attention_laplacian(q, k, v, *firsts[:3], *seconds[:3], **of_score, **given)
    want = (at(1e-5, seconds) - at(-1e-5, seconds)) / 2e-5
    for along in zip(*firsts):
        want += (at(1e-4, along) - 2 * at(0, along) + at(-1e-4, along)) / 1e-8
    np.testing.assert_allclose(lo, want, rtol=1e-6, atol=2e-6)

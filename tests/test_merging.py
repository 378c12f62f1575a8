import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn import reference

from .accuracy import plain


def parts_of(q, k, v, bounds):
    """The states of the keys between these bounds."""
    states = []
    for first, end in itertools.pairwise(bounds):
        o, saved = na.attention_forward(q, k[..., first:end, :], v[..., first:end, :])
        states.append((o, saved.lse))
    return states


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_parts_give_attention_over_all_keys(rng, dtype):
    q, k, v = (rng.standard_normal((2, 3, n, 16)).astype(dtype) for n in (5, 300, 300))
    o, lse = na.merge(parts_of(q, k, v, [0, 1, 100, 100, 300]))
    want_o, want_lse = reference.attention_forward(q, k, v)
    plain_o, plain_lse, *_ = plain(q, q, k, v)
    assert o.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    for got, by_formula, want in ((o, plain_o, want_o), (lse, plain_lse, want_lse)):
        error, allowed = (abs(x.astype(np.float64) - want) for x in (got, by_formula))
        least = 4e-15 if dtype == np.float64 else 0  # what is compared with has rounded, too
        assert error.max() <= 2 * allowed.max() + least
        assert np.sqrt((error**2).mean()) <= 2 * np.sqrt((allowed**2).mean()) + least


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 3), max_size=2), st.integers(0, 3), st.integers(0, 4), st.integers(1, 4), st.data())
def test_against_the_formula(lead, seqlen_q, head_dim, count, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    o = rng.standard_normal((count, *lead, seqlen_q, head_dim))
    lse = np.where(rng.random(o.shape[:-1]) < 0.4, -np.inf, 50 * rng.standard_normal(o.shape[:-1]))
    got, got_lse = na.merge(zip(o, lse))
    np.testing.assert_allclose(got_lse, np.logaddexp.reduce(lse), rtol=1e-13)
    weights = np.where(lse == -np.inf, 0, np.exp(lse - np.where(got_lse == -np.inf, 0, got_lse)))
    np.testing.assert_allclose(got, (weights[..., None] * o).sum(0), atol=1e-12)


def test_nothing_and_nothing_is_nothing():
    o, lse = np.full((2, 3, 4), np.nan), np.full((2, 3), -np.inf)
    (merged, merged_lse), backprop = na.merge_vjp(zip(o, lse))
    assert (merged == 0).all()
    assert (merged_lse == -np.inf).all()
    for do, dlse in backprop(np.ones((3, 4)), np.ones(3)):
        assert (do == 0).all()
        assert (dlse == 0).all()


def test_what_an_empty_part_holds_does_not_matter():
    states = [(np.full((1, 2), np.nan), np.array([-np.inf])), (np.ones((1, 2)), np.zeros(1))]
    o, lse = na.merge(states)
    np.testing.assert_array_equal(o, [[1, 1]])
    np.testing.assert_array_equal(lse, [0])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_shows(bad):
    o, lse = na.merge([(np.ones((1, 2)), np.array([bad])), (np.ones((1, 2)), np.zeros(1))])
    assert np.isnan(o).all()
    np.testing.assert_array_equal(lse, [bad])


def test_gradients_against_finite_differences(rng):
    o, do = rng.standard_normal((3, 2, 4, 5)), rng.standard_normal((2, 4, 5))
    lse, dlse = rng.standard_normal((3, 2, 4)), rng.standard_normal((2, 4))
    _, backprop = na.merge_vjp(zip(o, lse))
    d_o, d_lse = rng.standard_normal(o.shape), rng.standard_normal(lse.shape)
    h = 1e-6
    (o_1, lse_1), (o_0, lse_0) = (na.merge(zip(o + step * d_o, lse + step * d_lse)) for step in (h, -h))
    want = ((do * (o_1 - o_0)).sum() + (dlse * (lse_1 - lse_0)).sum()) / (2 * h)
    got = sum((x * a).sum() + (y * b).sum() for (x, y), a, b in zip(backprop(do, dlse), d_o, d_lse))
    assert got == pytest.approx(want, rel=1e-7)


def test_gradients_are_those_of_attention_over_all_keys(rng):
    q, k, v, do = (rng.standard_normal((2, n, 8)) for n in (4, 30, 30, 4))
    _, backprop = na.attention_vjp(q, k, v)
    saved = [na.attention_forward(q, k[:, part], v[:, part]) for part in (slice(0, 11), slice(11, 30))]
    _, merge_back = na.merge_vjp([(o, of_part.lse) for o, of_part in saved])
    grads = [na.attention_backward(do_i, of_part, dlse=dlse_i)
             for (do_i, dlse_i), (_, of_part) in zip(merge_back(do), saved)]  # fmt: skip
    dq, dk, dv = backprop(do)
    np.testing.assert_allclose(sum(x.dq for x in grads), dq, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([x.dk for x in grads], axis=1), dk, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([x.dv for x in grads], axis=1), dv, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_gradients_in_half_precision(dtype):
    o, lse = np.ones((2, 3, 4), dtype), np.zeros((2, 3), np.float32)
    _, backprop = na.merge_vjp(zip(o, lse))
    for do, dlse in backprop(np.ones((3, 4), dtype)):
        assert do.dtype == dtype
        assert dlse.dtype == np.float32
        np.testing.assert_array_equal(do.astype(float), 0.5)


O, LSE = np.zeros((2, 3)), np.zeros(2)
WRONG = {
    "states: got none": (ValueError, []),
    "states: got 3, expected pairs": (TypeError, 3),
    r"states\[1\]: got 1 values": (TypeError, [(O, LSE), (O,)]),
    r"states\[0\]: got o of int64, allowed float16": (TypeError, [(O.astype(np.int64), LSE)]),
    r"states\[0\]: got o of the shape \(3,\)": (ValueError, [(O[0], LSE)]),
    r"states\[1\]: got o of the shape \(1, 3\), expected \(2, 3\)": (ValueError, [(O, LSE), (O[:1], LSE)]),
    r"states\[1\]: got lse of the shape \(1,\), expected \(2,\)": (ValueError, [(O, LSE), (O, LSE[:1])]),
    r"states\[1\]: got o of float32, expected float64": (TypeError, [(O, LSE), (O.astype(np.float32), LSE)]),
    r"states\[0\]: got lse of float32, expected float64": (TypeError, [(O, LSE.astype(np.float32))]),
    r"lse of states\[0\]: got list": (TypeError, [(O, [0, 0])]),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    kind, states = WRONG[message]
    with pytest.raises(kind, match=message):
        na.merge(states)


def test_errors_of_gradients():
    _, backprop = na.merge_vjp([(O, LSE)])
    with pytest.raises(ValueError, match=r"do: got the shape \(2,\), expected \(2, 3\)"):
        backprop(LSE)
    with pytest.raises(TypeError, match="dlse: got 3"):
        backprop(O, 3)


FAULTS = {
    "np.where(highest == -np.inf, 0, highest)": "highest",
    "np.where(l == 0, 1, l)": "l",
    "np.where(w == 0, 0, w * along)": "w * along",
    "np.where(highest == np.inf, highest, m + np.log(l))": "m + np.log(l)",
    "test_errstate.py": {
        'under="ignore", invalid="ignore"': 'invalid="ignore"',
    },
}

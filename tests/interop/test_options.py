"""Options without their arrays, which come back in their places."""

import numpy as np
import pytest

import numbattn as na
from numbattn.base.values import Placeholder
from numbattn.interop.options import taken_apart


def half(s, batch, head, i, j, table):
    return s * table[head]


def all_options(rng, batch=2):
    """Of four heads, ten queries, ten keys."""
    lengths = na.Lengths(keys=rng.integers(1, 11, (batch, 1)))
    return {
        "causal": True,
        "mask": (lengths & na.Dense(rng.random((10, 10)) > 0.2)) | na.Window(2, 0),
        "scale": 0.5,
        "dropout": na.Dropout(0.25, seed=1),
        "score": [
            na.Bias(rng.standard_normal((4, 10, 10))),
            na.Alibi(rng.random(4), offset=np.zeros((batch, 1), int), gradient=False),
            na.Score(half, arrays=[rng.random(4)]),
            na.RelativeBias(rng.standard_normal((4, 7))),
            na.Sink(1.0),
        ],
    }


def test_a_call_is_the_same_with_its_options_put_together_again(rng):
    q, k, v = rng.standard_normal((3, 2, 4, 10, 8))
    given = all_options(rng)
    options, arrays = taken_apart(**given)
    assert [x.shape for x in arrays] == [(2, 1), (10, 10), (4, 10, 10), (4,), (2, 1), (4,), (4, 7), ()]
    assert options.own_axes == (0, 2, 2, 0, 0, None, 1, 0)
    assert options.weights == (2, 3, 5, 6, 7)
    assert options.wanted == (True, False, False, True, True)
    o, backprop = na.attention_vjp(q, k, v, **given)
    same, again = na.attention_vjp(q, k, v, **options.given(arrays))
    np.testing.assert_array_equal(same, o)
    for x, y in zip(again(o).score, backprop(o).score, strict=True):
        np.testing.assert_array_equal(x, y)


def test_options_are_equal_whatever_is_in_their_arrays(rng):
    (one, _), (other, _) = (taken_apart(**all_options(rng)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    for different in ({"causal": False}, {"scale": None}, {"dropout": None}, {"mask": na.Causal()}, {"score": None}):
        assert taken_apart(**all_options(rng) | different)[0] != one
    assert taken_apart(**all_options(rng, batch=1))[0] != one


def test_booleans_are_a_mask(rng):
    visible = rng.random((10, 10)) > 0.5
    options, (array,) = taken_apart(mask=visible)
    assert array is visible
    assert options.own_axes == (2,)
    assert options.weights == ()
    assert options.given([~visible])["mask"].visible is not visible


def test_placeholders_are_refused_where_arrays_are_needed(rng):
    q = rng.standard_normal((4, 10, 8))
    options, _ = taken_apart(mask=np.ones((10, 10), bool), score=na.Bias(np.zeros((10, 10))))
    with pytest.raises(TypeError, match=r"mask: Dense visible: got .*Placeholder of bool, expected an array of NumPy"):
        na.attention(q, q, q, mask=options.mask)
    with pytest.raises(TypeError, match=r"score: Bias bias: got .*Placeholder of float64, .* of numbattn.interop"):
        na.attention(q, q, q, score=options.score)
    with pytest.raises(TypeError, match=r"mask: Dense visible: got .*Placeholder"):
        options.mask.dense(10, 10)
    with pytest.raises(TypeError, match=r"Softcap cap: got .*Placeholder of float64, expected a number"):
        na.Softcap(Placeholder(0, (), np.dtype(np.float64)))
    with pytest.raises(TypeError, match=r"scale: got .*Placeholder of float64, expected a number"):
        taken_apart(scale=Placeholder(0, (), np.dtype(np.float64)))


FAULTS = {
    "first += len(own)": "first += 1",
    "len(arrays) - 1,": "len(arrays) % 2,",
    "base/values.py": {
        "len(held.shape) for held in self._held(1, 1)": "len(held.array.shape) for held in self._held(1, 1)",
    },
}

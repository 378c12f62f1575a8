"""A part that a function of one element defines, made here: it multiplies S by an array that has a gradient. Nothing of
numbattn but its base class knows of it."""

import math
import pickle
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.base.checks import Floats, UserTypeError
from numbattn.base.values import kinds
from numbattn.scores import ArrayPart, Part
from numbattn.scores.element import FunctionPart, Identity
from tests.accuracy import random
from tests.tools.device import AMPERE, HOPPER, on

B, H, M, N, D = 2, 2, 20, 24, 16
WORLDS = {"CPU": nullcontext, "CUDA cores": lambda: on(AMPERE), "Hopper": lambda: on(HOPPER)}


def times(s, batch, head, i, j, t):
    return s * t[head]


@dataclass(frozen=True, eq=False, repr=False)
class Temperature(FunctionPart, ArrayPart):
    """S = t S, with a t for each head."""

    t: Floats
    gradient: bool = True

    _identity = Identity(times)
    _reads = {"t": ("head",)}  # noqa: RUF012
    _needs_positions, _crops_by_sequence = False, True


def wrong(s, batch, head, i, j):
    return math.lgamma(s)


@dataclass(frozen=True, eq=False, repr=False)
class Wrong(FunctionPart):
    """What cannot be differentiated."""

    _identity = Identity(wrong)


def as_a_score(t):
    return na.Score(times, arrays=[t], gradient=True)


def draw(rng, dtype):
    """q, k, v, do and their tangents, t and its tangent."""
    shapes = (B, H, M, D), (B, H, N, D), (B, H, N, D), (B, H, M, D)
    t_dtype = np.float64 if dtype == np.float64 else np.float32
    given = [random(rng, shape, dtype) for shape in shapes * 2]
    return *given, 1 + random(rng, H, t_dtype) / 4, random(rng, H, t_dtype)


def passes(score, q, k, v, do, tq, tk, tv, tdo, t, tt, deterministic=False):
    """What all passes return."""
    options = {"causal": True, "score": [na.Alibi(np.array(0.1, q.dtype), False), score(t), na.Softcap(5.0)]}
    o, saved = na.attention_forward(q, k, v, **options)
    grads, backprop2 = na.attention_backward_vjp(do, saved, deterministic=deterministic)
    *_, saved, tsaved = na.attention_forward_jvp(q, k, v, tq, tk, tv, tscore=[None, tt], **options)
    _, tgrads = na.attention_backward_jvp(do, saved, tsaved, tdo=tdo, deterministic=deterministic)
    second = backprop2(tq, tk, tv, ddscore=[None, tt])
    _, jo, lo = na.attention_laplacian(q, k, v, tq[None], tk[None], tv[None], **options)
    step = na.attention(q[:, :, -1:], k, v, **options)
    return (o, saved.lse, *grads, grads.score[1], tsaved.to, tsaved.tlse, *tgrads, tgrads.score[1], *second,
            second.score[1], jo, lo, step)  # fmt: skip


def plain(score, q, k, v, do, tq, tk, tv, tdo, t, tt):
    """The same by the plain formula."""
    options = {"causal": True, "score": [na.Alibi(np.array(0.1), False), score(t), na.Softcap(5.0)]}
    o, lse = reference.attention_forward(q, k, v, **options)
    grads = reference.attention_backward(do, q, k, v, **options)
    to, tlse = reference.attention_jvp(q, k, v, tq, tk, tv, tscore=[None, tt], **options)
    tgrads, second = (
        reference.attention_backward_jvp(do, q, k, v, tq, tk, tv, tdo=x, tscore=[None, tt], **options)
        for x in (tdo, None)
    )
    _, jo, lo = reference.attention_laplacian(q, k, v, tq[None], tk[None], tv[None], **options)
    step, _ = reference.attention_forward(q[:, :, -1:], k, v, **options)
    return (o, lse, *grads, grads.score[1], to, tlse, *tgrads, tgrads.score[1], *second, to, second.score[1], jo, lo,
            step)  # fmt: skip


@pytest.mark.parametrize(("world", "dtype", "deterministic"), [
    ("CPU", np.float64, False), ("CPU", np.float32, False), ("CPU", np.float16, False),
    ("CUDA cores", np.float32, False), ("CUDA cores", np.float32, True), ("Hopper", np.float16, False),
    pytest.param("CUDA cores", np.float16, False, marks=pytest.mark.slow),
    pytest.param("Hopper", np.float16, True, marks=pytest.mark.slow),
    pytest.param("Hopper", np.float32, False, marks=pytest.mark.slow),
])  # fmt: skip
def test_all_passes(rng, world, dtype, deterministic):
    """The plain formula's, and exactly those of a Score of the same function."""
    x = draw(rng, dtype)
    with WORLDS[world]():
        got, score = (passes(each, *x, deterministic=deterministic) for each in (Temperature, as_a_score))
    want = plain(Temperature, *[y.astype(np.float64) for y in x])
    for number, (one, other, exact) in enumerate(zip(got, score, want, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=str(number))
        error = abs(one - exact).max() / abs(exact).max()
        assert error < 64 * max(float(np.finfo(dtype).eps), float(np.finfo(one.dtype).eps)), number


def test_it_is_a_part_like_others(rng):
    t = np.ones(H)
    part = Temperature(t)
    assert kinds(Part).count(Temperature) == 1  # though two of its bases are Parts
    assert repr(part) == "Temperature(t=<float64 array (2,)>, gradient=True)"
    assert part == Temperature(t) != Temperature(t, False)
    q, k, v, do, *_ = draw(rng, np.float64)
    o, saved = pickle.loads(pickle.dumps(na.attention_forward(q, k, v, score=part)))
    np.testing.assert_array_equal(na.attention_backward(do, saved).score[0].shape, t.shape)
    _, saved = na.attention_forward(q, k, v, score=Temperature(t, False))
    assert na.attention_backward(do, saved).score == (None,)
    for shape in (), (1,), (1, 2):
        with pytest.raises(ValueError, match=r"score: Temperature t: got the shape .*, expected at least \(2,\)"):
            na.attention(q, k, v, score=Temperature(np.ones(shape)))
    with pytest.raises(TypeError, match=r"Temperature t: got numpy.ndarray of float16, expected an array of float32"):
        na.attention(q, k, v, score=Temperature(np.ones(2, np.float16)))
    assert na.attention(q[0, 0], k[0, 0], v[0, 0], score=Temperature(np.ones(1))).shape == (M, D)
    with pytest.raises(NotImplementedError, match="an array of a Temperature whose gradient is not wanted"):
        na.attention_jvp(q, k, v, q, k, v, tscore=[t], score=Temperature(t, False))
    with pytest.raises(TypeError, match="numbattn's Alibi, Bias, RelativeBias, Score, Sink, Softcap"):
        na.attention(q, k, v, score="none")


@pytest.mark.parametrize("world", ["CPU", pytest.param("CUDA cores", marks=pytest.mark.slow)])
def test_errors_name_it(rng, world):
    q, k, v, do, *_ = draw(rng, np.float32)
    with WORLDS[world]():
        _, saved = na.attention_forward(q, k, v, score=Wrong())
        with pytest.raises(UserTypeError, match=r"score: the derivative of wrong, line \d+ of .*test_element.py"):
            na.attention_backward(do, saved)


FAULTS = {
    "scores/element.py": {
        "        return self._wants_gradient\n": "        return False\n",
    },
    "cpu/score_tangents.py": {
        "if tsteps.caps.size and kept >= 0:": "if tsteps.caps.size and kept < 0:",
    },
}

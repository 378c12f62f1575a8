"""vmap of attention in JAX: each sample as it is alone, bit for bit. `test_jax.py` runs this file in a process of its
own."""

from functools import partial

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import numbattn as na
from numbattn.interop.jax import attention

from ..problems import LIMITS, Draw
from .in_jax import assert_close, assert_same, placed

SAMPLES = 3
MAPPED = {  # shapes of q, k and v, and the axes of the samples
    "q of matrices": ([(SAMPLES, 6, 4), (5, 4), (5, 2)], (0, None, None)),
    "k and v of matrices": ([(6, 4), (5, SAMPLES, 4), (5, 2, SAMPLES)], (None, 1, 2)),
    "few heads, last axes": ([(4, 3, 6, 4), (2, 5, 4), (2, 5, 3, 2)], (1, None, 2)),
    "keys of all heads": ([(3, 6, 4), (3, 3, 5, 4), (3, 3, 5, 2)], (None, 0, 0)),
    "unequal axes": ([(3, 3, 6, 4), (5, 4), (3, 5, 2)], (0, None, 0)),
    "few heads, fewer axes": ([(3, 3, 4, 6, 4), (2, 5, 4), (3, 2, 5, 2)], (0, None, None)),
}


def assert_as_alone(function, axes, *x, jit=jax.jit):
    """What vmap gives is what each sample gives alone, bit for bit."""
    def sample(i):
        return [a if axis is None else jax.tree.map(lambda a, axis=axis: np.take(np.asarray(a), i, axis), a)
                for a, axis in zip(x, axes)]  # fmt: skip

    one = jit(function)
    alone = [one(*sample(i)) for i in range(SAMPLES)]
    assert_same(jit(jax.vmap(function, axes))(*x), jax.tree.map(lambda *each: np.stack(each), *alone))


def derivatives(attend):
    """o, the gradients, and the Hessian times the arrays themselves, by arrays of floats."""
    def function(*x):
        grads = jax.grad(lambda *x: (attend(*x) ** 2).sum(), tuple(range(len(x))))
        return attend(*x), jax.jvp(grads, x, x)

    return function


SOME = "k and v of matrices", "few heads, last axes", "unequal axes"


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in SOME)) for name in MAPPED
])  # fmt: skip
def test_samples_are_as_alone(rng, name):
    shapes, axes = MAPPED[name]
    arrays = [*map(rng.standard_normal, shapes)]
    assert_as_alone(derivatives(partial(attention, causal=True)), axes, *arrays)
    assert_as_alone(partial(attention, causal=True), axes, *arrays, jit=lambda function: function)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPPED)
def test_gradients_of_all_samples_are_sums(rng, name):
    shapes, axes = MAPPED[name]
    arrays = tuple(map(rng.standard_normal, shapes))

    def one_by_one(*x):
        return sum((attention(*(a if axis is None else jnp.take(a, i, axis) for a, axis in zip(x, axes))) ** 2).sum()
                   for i in range(SAMPLES))  # fmt: skip

    def all_at_once(*x):
        return (jax.vmap(attention, axes)(*x) ** 2).sum()

    def found(f):
        return jax.jit(lambda *x: (jax.grad(f, (0, 1, 2))(*x), jax.jacfwd(jax.grad(f, 1), 2)(*x)))(*arrays)

    assert_close(found(all_at_once), found(one_by_one))


SCORE_AXES = {"bias": (SAMPLES, 4, 6, 6), "slopes": (SAMPLES, 4), "table": (SAMPLES, 4, 5), "logits": (SAMPLES, 4)}


def scored(q, k, v, bias, slopes, table, logits):
    score = [na.Bias(bias), na.Alibi(slopes), na.RelativeBias(table), na.Sink(logits)]
    return attention(q, k, v, causal=True, score=score)


@pytest.mark.parametrize("mapped", [
    "bias", "all", *(pytest.param(name, marks=pytest.mark.slow) for name in ("slopes", "table", "logits", "q")),
])  # fmt: skip
def test_samples_with_scores_of_their_own(rng, mapped):
    qkv = rng.standard_normal((3, SAMPLES, 4, 6, 3))
    axes = tuple([0 if mapped in ("all", name) else None for name in ("q", "k", "v", *SCORE_AXES)])
    arrays = *qkv, *map(rng.standard_normal, SCORE_AXES.values())
    assert_as_alone(derivatives(scored), axes, *[x if axis == 0 else x[0] for x, axis in zip(arrays, axes)])


def test_samples_in_samples(rng):
    q, k, v = rng.standard_normal((3, SAMPLES, 2, 4, 5, 3))
    inner = jax.vmap(derivatives(partial(attention, causal=True)), (0, None, 0))
    assert_as_alone(inner, (0, 0, None), q, k[:, 0], v[0])


def sliced_dropout(i, q, k, v):
    """Two heads with a step of training as the offset."""
    return attention(q, k, v, dropout=na.Dropout(0.4, 2**40 + 7), dropout_offset=i)


def test_samples_drop_what_they_drop_alone(rng):
    q, k, v = rng.standard_normal((3, SAMPLES, 2, 6, 3))
    fixed = partial(attention, dropout=na.Dropout(0.5, 3))
    assert_as_alone(derivatives(fixed), (0, None, 0), q, k[0], v)
    assert_as_alone(jax.vmap(derivatives(fixed), (0, None, None)), (None, 0, None), q, k, v[0])
    assert_as_alone(sliced_dropout, (0, 0, None, None), np.arange(SAMPLES), q, k[0], v[0])
    assert_close(jax.hessian(lambda q: fixed(q, k[0], v[0]).sum())(q[0]),
                 jax.jacrev(jax.grad(lambda q: fixed(q, k[0], v[0]).sum()))(q[0]))  # fmt: skip


MASKS_OF_ARRAYS = {
    "lengths": lambda x: na.Lengths(keys=x.whole(0, 6, SAMPLES, 4)),
    "offsets": lambda x: na.Causal(x.whole(-2, 6, SAMPLES, 4)) | na.First(x.whole(0, 3, SAMPLES, 4)),
    "segments": lambda x: na.Segments(np.sort(x.whole(0, 6, SAMPLES, 4))),
    "booleans": lambda x: na.Dense(x.truths(SAMPLES, 6, 6)) & na.Dense(x.truths(SAMPLES, 4, 1, 6)),
    "bits": lambda x: na.Bits.pack(x.truths(SAMPLES, 4, 6, 6)),
    "blocks": lambda x: na.BlockSparse(x.truths(SAMPLES, 1, 2, 3), (3, 2)),
    "intervals": lambda x: na.Intervals(x.whole(0, 2, SAMPLES, 4, 6), x.whole(3, 6, SAMPLES, 4, 6)),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in ("lengths", "offsets", "booleans")))
    for name in MASKS_OF_ARRAYS
])  # fmt: skip
@pytest.mark.parametrize("alone", ["mask", pytest.param("both", marks=pytest.mark.slow)])
def test_samples_with_masks_of_their_own(rng, name, alone):
    draw = Draw(58, 0, LIMITS["cpu"], np)
    mask, (q, k, v) = placed(MASKS_OF_ARRAYS[name](draw)), rng.standard_normal((3, SAMPLES, 4, 6, 3))
    q, axis = (q, 0) if alone == "both" else (q[0], None)
    assert_as_alone(lambda mask, q, k, v: derivatives(partial(attention, mask=mask))(q, k, v), (0, axis, None, None),
                    mask, q, k[0], v[0])  # fmt: skip


def test_samples_with_arrays_of_a_function(rng):
    def tilted(s, batch, head, i, j, table):
        return s * table[j]

    q, tables = rng.standard_normal((4, 6, 3)), rng.standard_normal((SAMPLES, 6))
    assert_as_alone(lambda x: attention(q, q, q, score=na.Score(tilted, arrays=[x])), (0,), tables)


@pytest.mark.parametrize("dropout", [
    pytest.param(None, id="", marks=pytest.mark.slow), pytest.param(na.Dropout(0.5, 3), id="dropout"),
])  # fmt: skip
def test_several_tangents(rng, dropout):
    """Of one call, of samples, and several of several."""
    attend = partial(attention, dropout=dropout)
    q, k, v = rng.standard_normal((3, SAMPLES, 2, 4, 3))
    assert_as_alone(jax.jacfwd(lambda q: attend(q, k[0], v[0])), (0,), q)
    assert_as_alone(jax.hessian(lambda q: (attend(q, k[0], v[0]) ** 2).sum()), (0,), q)
    t = rng.standard_normal((SAMPLES, *q.shape))
    assert_as_alone(lambda t: jax.jvp(jax.vmap(attend), (q, k, v), (t, t, k))[1], (0,), t)

    def tangent(x, t):
        return jax.jvp(lambda q: attend(q, k[0], v[0]), (q[0],), (x * t,))[1]

    assert_as_alone(jax.vmap(tangent, (0, None)), (None, 0), jnp.arange(2.0), q)

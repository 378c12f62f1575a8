"""Attention of JAX's arrays, against the plain formula in JAX and against numbattn's own functions, bit for bit.

`test_jax.py` runs this file in a process of its own: a process that has JAX warns of every fork.
"""

from functools import partial

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import numbattn as na
from numbattn.interop.jax import attention

from ..directions import Directions
from ..problems import LIMITS, Draw, Problem, present

jax.config.update("jax_enable_x64", True)

BATCH, HEADS, M, N, D, E = 2, 4, 5, 6, 3, 2
SHAPES = (BATCH, HEADS, M, D), (BATCH, 2, N, D), (BATCH, 2, N, E), (HEADS, M, N), (HEADS,), (HEADS, 5), (HEADS,)
VISIBLE = np.random.default_rng(0).random((M, N)) < 0.7
VISIBLE[1] = False  # a query that sees nothing


@pytest.fixture
def arrays(rng):
    """q, k, v and the arrays of a score."""
    return [jnp.asarray(rng.standard_normal(shape)) for shape in SHAPES]


def ours(q, k, v, bias, slopes, table, logits):
    score = [na.Bias(bias), na.Softcap(3.0), na.Alibi(slopes), na.RelativeBias(table), na.Sink(logits)]
    return attention(q, k, v, mask=VISIBLE, score=score, scale=0.7, return_lse=True)


def formula(q, k, v, bias, slopes, table, logits):
    k, v = (jnp.repeat(x, HEADS // 2, axis=-3) for x in (k, v))
    ahead = jnp.arange(N) - jnp.arange(M)[:, None] - (N - M)
    S = 3 * jnp.tanh((0.7 * q @ k.mT + bias) / 3) - slopes[:, None, None] * abs(ahead)
    S = S + table[:, jnp.clip(ahead, -2, 2) + 2]
    some = VISIBLE.any(-1)
    E = jnp.where(VISIBLE, jnp.exp(S), 0)
    total = jnp.where(some, E.sum(-1) + jnp.exp(logits)[:, None], 1)
    return (E / total[..., None]) @ v, jnp.where(some, jnp.log(total), -jnp.inf)


def total(attend, *arrays):
    """A number of all results, of which no second derivative is zero."""
    o, lse = attend(*arrays)
    return (jnp.sin(o) * jnp.arange(o.size).reshape(o.shape)).sum() + (jnp.where(lse > -jnp.inf, lse, 0) ** 2).sum()


def assert_close(got, expected, tolerance=1e-10):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * (1 + abs(np.nan_to_num(y)).max(initial=0)))


def assert_same(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)


def squares(grads):
    return sum((x**2).sum() for x in grads)


# -------------------------------------------------------------------------------------------------------- derivatives
ALL, SOME, REST = tuple(range(7)), (0, 3, 5), (1, 2, 4, 6)


def of_o(f):
    return lambda *x: f(*x)[0]


def of_grads(f, by):
    """A number of the gradients by some arrays."""
    return lambda *x: squares(jax.grad(partial(total, f), by)(*x))


def in_a_scan(f, *x):
    """A number of q of which each step makes another one."""
    def step(q, _):
        return q + f(q, *x[1:])[0].sum(-1, keepdims=True), (q**2).sum()

    q, sums = jax.lax.scan(step, x[0], None, 3)
    return (q**2).sum() + sums.sum()


def in_a_branch(f, *x):
    return jax.lax.cond(x[0].sum() > jnp.inf, lambda *x: x[0].sum(), partial(total, f), *x)


DERIVATIVES = {  # of a function and its arrays
    "forward": lambda f, *x: f(*x),
    "grad": lambda f, *x: jax.value_and_grad(partial(total, f), ALL)(*x),
    "jvp": lambda f, *x: jax.jvp(of_o(f), x, x),
    "linearize": lambda f, *x: jax.linearize(partial(total, f), *x)[1](*x),
    "jacfwd": lambda f, *x: jax.jacfwd(of_o(f), SOME)(*x),
    "jacrev": lambda f, *x: jax.jacrev(of_o(f), REST)(*x),
    "hessian": lambda f, *x: jax.hessian(partial(total, f), SOME)(*x),
    "hessian by others": lambda f, *x: jax.hessian(partial(total, f), REST)(*x),
    "forward over reverse": lambda f, *x: jax.jvp(jax.grad(partial(total, f), ALL), x, x),
    "reverse over reverse": lambda f, *x: jax.grad(of_grads(f, ALL), ALL)(*x),
    "reverse over reverse by others": lambda f, *x: jax.grad(of_grads(f, SOME), REST)(*x),
    "reverse over forward": lambda f, *x: jax.grad(lambda *y: squares([jax.jvp(of_o(f), y, x)[1]]), ALL)(*x),
    "reverse over jacfwd": lambda f, *x: jax.grad(lambda *y: squares(jax.jacfwd(partial(total, f), SOME)(*y)), ALL)(*x),
    "checkpoint": lambda f, *x: jax.hessian(jax.checkpoint(partial(total, f)), (1, 4))(*x),
    "scan": lambda f, *x: jax.grad(partial(in_a_scan, f), ALL)(*x),
    "cond": lambda f, *x: jax.grad(partial(in_a_branch, f), ALL)(*x),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(arrays, name):
    ours_, expected = (jax.jit(partial(DERIVATIVES[name], f)) for f in (ours, formula))
    assert_close(ours_(*arrays), expected(*arrays))


@pytest.mark.parametrize("name", ["forward", "grad", "jvp", "jacfwd", "hessian by others", "reverse over forward"])
def test_derivatives_outside_of_jit(arrays, name):
    """They are passes on the very same numbers, which JAX's own functions may round in another way."""
    derivative = partial(DERIVATIVES[name], ours)
    assert_close(derivative(*arrays), jax.jit(derivative)(*arrays), 1e-13)


# ---------------------------------------------------------------------------------------------------- random problems
def placed(x):
    """Arrays, in masks and scores, too, as JAX has them."""
    return jax.tree.map(lambda a: jnp.asarray(np.ascontiguousarray(a)), x)


@pytest.mark.parametrize("number", range(16))
def test_random_problems_bit_for_bit(number):
    """All results and their derivatives are numbattn's own, inside and outside of jit."""
    problem = Problem(58, number, LIMITS["cpu"]._replace(longest=100, elements=20_000))
    options = dict(problem.options)
    tangents = Directions(problem, problem.jets, problem.along, ["jvp"], [None]).tangents
    (q, k, v), do, dlse, *tqkv = (jax.tree.map(np.ascontiguousarray, x) for x in (
        problem.arrays, problem.do, problem.dlse, *list(tangents.values())[:3]))  # fmt: skip
    o, saved = na.attention_forward(q, k, v, **options)
    grads = na.attention_backward(do, saved, dlse=dlse, deterministic=problem.deterministic)
    mask, score = placed((options.pop("mask"), options.pop("score")))
    is_differentiable = not any(isinstance(part, na.Score) for part in score)

    def attend(q, k, v, mask, score):
        return attention(q, k, v, mask=mask, score=score, **options, deterministic=problem.deterministic,
                         return_lse=True)  # fmt: skip

    def derivatives(q, k, v, do, dlse, mask, score, *tqkv):
        def of_floats(q, k, v, own):
            return attend(q, k, v, mask, own if is_differentiable else score)

        results, pullback = jax.vjp(of_floats, q, k, v, score if is_differentiable else 0.0)
        dlse = jnp.zeros_like(results[1]) if dlse is None else dlse
        *grads, of_score = pullback((do, dlse))
        tqkv = [jnp.zeros_like(x) if t is None else t for x, t in zip((q, k, v), tqkv)]
        along = jax.jvp(lambda *x: attend(*x, mask, score), (q, k, v), tuple(tqkv))[1]
        return results, grads, of_score, along

    given = placed((q, k, v, do, dlse)), mask, score, *placed(tqkv)
    eager = derivatives(*given[0], *given[1:])
    assert_same(jax.jit(derivatives)(*given[0], *given[1:]), eager)
    results, qkv, of_score, (to, tlse) = eager
    assert_same(results, (o, saved.lse))
    assert_same(qkv, [*grads])
    if is_differentiable:
        found = [x for part in of_score if part._wants_gradient for x in part._weights]
        assert_same(found, present(grads.score))
    tqkv = [np.zeros_like(x) if t is None else t for x, t in zip((q, k, v), tqkv)]
    _, own, _, tsaved = na.attention_forward_jvp(q, k, v, *tqkv, **problem.options)
    assert_same((to, tlse), (own, tsaved.tlse))


# --------------------------------------------------------------------------------------------------------------- vmap
SAMPLES = 3
MAPPED = {  # shapes of q, k and v, and the axes of the samples
    "q of matrices": ([(SAMPLES, 6, 4), (5, 4), (5, 2)], (0, None, None)),
    "k and v of matrices": ([(6, 4), (5, SAMPLES, 4), (5, 2, SAMPLES)], (None, 1, 2)),
    "few heads, last axes": ([(4, 3, 6, 4), (2, 5, 4), (2, 5, 3, 2)], (1, None, 2)),
    "keys of all heads": ([(3, 6, 4), (3, 3, 5, 4), (3, 3, 5, 2)], (None, 0, 0)),
    "unequal axes": ([(3, 3, 6, 4), (5, 4), (3, 5, 2)], (0, None, 0)),
    "few heads, fewer axes": ([(3, 3, 4, 6, 4), (2, 5, 4), (3, 2, 5, 2)], (0, None, None)),
}


def assert_as_alone(function, axes, *x):
    """What vmap gives is what each sample gives alone, bit for bit, inside and outside of jit."""
    def sample(i):
        return [a if axis is None else jax.tree.map(lambda a, axis=axis: np.take(np.asarray(a), i, axis), a)
                for a, axis in zip(x, axes)]  # fmt: skip

    mapped = jax.vmap(function, axes)
    alone = [function(*sample(i)) for i in range(SAMPLES)]
    expected = jax.tree.map(lambda *each: np.stack(each), *alone)
    assert_same(mapped(*x), expected)
    assert_same(jax.jit(mapped)(*x), expected)


def derivatives(attend):
    """o, the gradients, and the Hessian times the arrays themselves, by arrays of floats."""
    def function(*x):
        grads = jax.grad(lambda *x: (attend(*x) ** 2).sum(), tuple(range(len(x))))
        return attend(*x), jax.jvp(grads, x, x)

    return function


@pytest.mark.parametrize("name", MAPPED)
def test_samples_are_as_alone(rng, name):
    shapes, axes = MAPPED[name]
    assert_as_alone(derivatives(partial(attention, causal=True)), axes, *map(rng.standard_normal, shapes))


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


@pytest.mark.parametrize("mapped", [*SCORE_AXES, "q", "all"])
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


@pytest.mark.parametrize("name", MASKS_OF_ARRAYS)
@pytest.mark.parametrize("alone", ["mask", "both"])
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

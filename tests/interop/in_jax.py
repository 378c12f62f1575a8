"""Attention of JAX's arrays, against the plain formula in JAX and against numbattn's own functions, bit for bit.

`test_jax.py` runs this file in a process of its own: a process that has JAX warns of every fork.
"""

import math
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import numpy as jnp

import numbattn as na
from numbattn.interop.jax import attention

from ..problems import LIMITS, MASKS, SCORES, Draw, Problem, present

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
